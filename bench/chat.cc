#include "bench/chat.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "bench/limits.h"
#include "core/index.h"

namespace kvtwin::bench {
namespace {

int CommonPrefix(const ServiceRequest& a, const ServiceRequest& b) {
  const auto [end, end_b] = std::mismatch(a.blocks.begin(), a.blocks.end(),
                                          b.blocks.begin(), b.blocks.end());
  const int common = AsInt(end - a.blocks.begin()) * props::kBlockTokens;
  return std::min({common, a.input_length, b.input_length});
}

}  // namespace

void ChatCache::Log(Call call) {
  if (calls_ != nullptr) calls_->push_back(std::move(call));
}

Status ChatCache::StartForward(const Batch& batch, bool reserve) {
  batch_.positions.assign(batch.positions.begin(), batch.positions.end());
  batch_.sequences.assign(batch.sequences.begin(), batch.sequences.end());
  Log([tokens = batch_](Cache& cache) {
    return cache.StartForward(tokens, /*reserve=*/false);
  });
  Status status;
  time_ += Time([&] { status = cache_->StartForward(batch, reserve); });
  const std::span<const int> cells = cache_->BatchCells();
  for (int i = 0; i < Size(cells); ++i) {
    const int sequence = At(batch_.sequences, i);
    if (sequence >= Size(cells_)) cells_.resize(AsSize(sequence) + 1);
    At(cells_, sequence).push_back(At(cells, i));
  }
  return status;
}

Status ChatCache::CopyPrefix(int src, int dst, std::int32_t len) {
  Log([=](Cache& cache) { return cache.CopyPrefix(src, dst, len); });
  Status status;
  time_ += Time([&] { status = cache_->CopyPrefix(src, dst, len); });
  cells_.resize(std::max(cells_.size(), AsSize(std::max(src, dst)) + 1));
  At(cells_, dst)
      .assign(At(cells_, src).begin(), IteratorAt(At(cells_, src), len));
  return status;
}

Result<bool> ChatCache::CanResume(int seq, std::int32_t pos) {
  Log([=](Cache& cache) { return cache.CanResume(seq, pos).status(); });
  Result<bool> can = false;
  time_ += Time([&] { can = cache_->CanResume(seq, pos); });
  return can;
}

Status ChatCache::Remove(int seq, std::int32_t begin, std::int32_t end) {
  if (end != kOpenEnd) Wrong("chat", "a request that fits shifts");
  Log([=](Cache& cache) { return cache.Remove(seq, begin, end); });
  Status status;
  time_ += Time([&] { status = cache_->Remove(seq, begin, end); });
  if (seq < Size(cells_)) At(cells_, seq).resize(AsSize(begin));
  return status;
}

void ChatCache::CheckMask(const std::string& name) const {
  const KvView view = Must(cache_->Get());
  CheckRow(name, view, 0);
  CheckRow(name, view, Size(batch_.positions) - 1);
}

// The row sees its sequence's cells up to its own position, and no others.
void ChatCache::CheckRow(const std::string& name, const KvView& view,
                         std::int64_t row) const {
  const std::int32_t position = At(batch_.positions, row);
  const std::vector<int>& cells = At(cells_, At(batch_.sequences, row));
  std::int64_t seen = 0;
  for (std::int64_t column = 0; column < view.mask.shape[0]; ++column) {
    seen += Visible(view.mask, row, column) ? 1 : 0;
  }
  bool all = seen == position + 1;
  for (std::int32_t i = 0; i <= position; ++i) {
    const std::int64_t column = At(cells, i) - view.first_cell;
    all = all && column >= 0 && column < view.mask.shape[0] &&
          Visible(view.mask, row, column);
  }
  if (!all) {
    Wrong(name, fmt::format("row {}: position {} sees {} cells", row, position,
                            seen));
  }
}

Chat::Chat(const std::vector<ServiceRequest>& requests, ChatCache& cache,
           int context)
    : requests_(&requests),
      cache_(&cache),
      sessions_(Must(MakeSessions(
          cache, {.slots = kSlots, .context = context, .batch = kBatch}))),
      held_(kSlots),
      next_answer_(props::kFirstAnswer) {}

CacheSetup Chat::Setup(DType mask_dtype, int context) {
  CacheSetup setup;
  setup.spec.placement = Placement::kScatter;
  setup.spec.shift.kind = ShiftKind::kIdentity;
  setup.config.cache_padding = 256;
  setup.config.mask_dtype = mask_dtype;
  setup.max_sequences = kSlots;
  setup.capacity = context;
  setup.max_batch = kBatch;
  return setup;
}

template <class Call>
auto Chat::Timed(const Call& call) {
  decltype(call()) result = {Status()};
  time_ += Time([&] { result = call(); });
  return Must(std::move(result));
}

void Chat::Submit() {
  const ServiceRequest& request = At(*requests_, submitted_++);
  const std::vector<SessionInput> prompt = PromptOf(request);
  const RequestOptions options = {.limit = request.output_length};
  waiting_.push_back(Timed([&] { return sessions_->Submit(prompt, options); }));
}

bool Chat::Step() {
  for (SessionGauges now = gauges();
       now.waiting + now.running < kSlots && submitted_ < Size(*requests_);
       ++now.waiting) {
    Submit();
  }
  for (int i = 0; i < kSlots; ++i) {
    Held& held = At(held_, i);
    if (held.request == nullptr) continue;
    held.length = std::min(Size(Must(sessions_->Slot(i)).record),
                           held.request->input_length);
  }
  const auto batch = Timed([&] { return sessions_->NextBatch(); });
  while (!waiting_.empty()) {
    const RequestInfo info = Must(sessions_->Request(waiting_.front()));
    if (info.slot < 0) break;
    CountReusable(waiting_.front(), info);
    waiting_.erase(waiting_.begin());
  }
  if (batch.inputs.empty()) return false;
  mask_elements_ += static_cast<double>(cache_->Get()->mask.elements());
  for (const int output : batch.outputs) {
    const Ending ending = Timed([&] {
      return sessions_->Sampled(At(batch.requests, output), next_answer_++);
    });
    finished_ += ending != Ending::kNone ? 1 : 0;
  }
  return true;
}

// The request got a slot.
void Chat::CountReusable(int request, const RequestInfo& info) {
  const ServiceRequest& now = At(*requests_, request);
  int most = 0;
  for (const Held& held : held_) {
    if (held.request == nullptr) continue;
    most =
        std::max(most, std::min(held.length, CommonPrefix(*held.request, now)));
  }
  reusable_ += std::min(most, now.input_length - 1);
  At(held_, info.slot) = {&now, info.reused};
}

}  // namespace kvtwin::bench
