#include "bench/chat.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "bench/limits.h"
#include "core/index.h"

namespace kvtwin::bench {
namespace {

constexpr int kBlockTokens = 512;

}  // namespace

std::vector<Request> ReadRequests(const std::string& path, int context) {
  std::vector<Request> requests;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const auto json = nlohmann::json::parse(line);
    Request request = {.input_length = json.at("input_length"),
                       .output_length = json.at("output_length"),
                       .blocks = json.at("hash_ids")};
    if (request.input_length + request.output_length <= context) {
      requests.push_back(std::move(request));
    }
  }
  return requests;
}

Chat::Chat(const std::vector<Request>& requests)
    : requests_(&requests), slots_(kSlots) {}

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

// An answer is not a prefix of any prompt: the file does not record the tokens
// of answers.
int Chat::CommonPrefix(const Slot& slot, const Request& request) {
  if (slot.request == nullptr) return 0;
  const std::vector<int>& a = slot.request->blocks;
  const std::vector<int>& b = request.blocks;
  const auto [end, end_b] =
      std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  const auto blocks = AsInt(end - a.begin());
  return std::min({blocks * kBlockTokens, slot.length,
                   slot.request->input_length, request.input_length});
}

// Chooses the slot with the longest prefix if it is free and holds nothing
// else; otherwise the free slot that was not used for the longest time, which
// gets a copy of that prefix.
int Chat::ChooseSlot(Cache& cache, const Request& request, int& prefix) {
  int best = 0;
  int oldest = -1;
  prefix = -1;
  for (int i = 0; i < kSlots; ++i) {
    const Slot& slot = At(slots_, i);
    const int common = CommonPrefix(slot, request);
    if (common > prefix) {
      best = i;
      prefix = common;
    }
    if (slot.busy()) continue;
    if (oldest < 0 || slot.last_used < At(slots_, oldest).last_used) {
      oldest = i;
    }
  }
  const Slot& source = At(slots_, best);
  if (prefix > 0 && prefix == source.length && !source.busy()) return best;
  if (prefix > 0 && best != oldest) {
    Status status;
    cache_time_ +=
        Time([&] { status = cache.CopyPrefix(best, oldest, prefix); });
    Must(status);
    At(slots_, oldest).cells = source.cells;
  }
  return oldest;
}

// Returns false if no slot is free, or no request waits.
bool Chat::Admit(Cache& cache) {
  if (next_request_ == requests_->size() ||
      std::ranges::all_of(slots_, &Slot::busy)) {
    return false;
  }
  const Request& request = (*requests_)[next_request_++];
  int prefix = 0;
  const int index = ChooseSlot(cache, request, prefix);
  Slot& slot = At(slots_, index);
  // At least one token is evaluated.
  prefix = std::min(prefix, request.input_length - 1);
  bool resumes = true;
  Status status;
  cache_time_ += Time([&] {
    if (prefix > 0) resumes = *cache.CanResume(index, prefix);
    status = cache.Remove(index, prefix, kOpenEnd);
  });
  Must(status);
  if (!resumes) Wrong("chat", "a cache without a window cannot resume");
  slot.request = &request;
  slot.length = prefix;
  slot.to_come = request.input_length - prefix;
  slot.to_say = request.output_length;
  slot.last_used = ++clock_;
  slot.cells.resize(AsSize(prefix));
  return true;
}

// Adds the tokens that the slot computes next, as far as they fit.
void Chat::AddFrom(int index) {
  const Slot& slot = At(slots_, index);
  const int room = kBatch - Size(batch_.positions);
  const int wanted = slot.to_come > 0 ? slot.to_come : std::min(slot.to_say, 1);
  for (int i = 0; i < std::min(wanted, room); ++i) {
    batch_.Add(slot.length + i, index);
  }
}

bool Chat::Step(Cache& cache) {
  while (Admit(cache)) {
  }
  batch_ = Tokens();
  int starved = -1;  // The first slot that got nothing comes first next time.
  for (int i = 0; i < kSlots; ++i) {
    const int index = (next_slot_ + i) % kSlots;
    const std::size_t before = batch_.positions.size();
    AddFrom(index);
    const bool nothing = batch_.positions.size() == before;
    if (starved < 0 && nothing && At(slots_, index).busy()) {
      starved = index;
    }
  }
  if (batch_.positions.empty()) return false;
  next_slot_ = starved < 0 ? (next_slot_ + 1) % kSlots : starved;
  cache_time_ += TimeForward(cache, batch_);
  ++passes_;
  tokens_ += std::ssize(batch_.positions);
  mask_elements_ += static_cast<double>(cache.Get()->mask.elements());
  Advance(cache);
  return true;
}

// The last token of an answer is put as well: it turns out to be the last only
// when the next pass has begun. The slot's length does not count it.
void Chat::Advance(Cache& cache) {
  const std::span<const int> cells = cache.BatchCells();
  for (std::size_t i = 0; i < batch_.sequences.size(); ++i) {
    Slot& slot = At(slots_, batch_.sequences[i]);
    slot.cells.push_back(cells[i]);
    if (slot.to_come > 0) {
      --slot.to_come;
      ++slot.length;
    } else if (--slot.to_say > 0) {
      ++slot.length;
    }
    if (!slot.busy()) ++finished_;
  }
}

void Chat::CheckMask(const std::string& name, Cache& cache) const {
  const KvView view = Must(cache.Get());
  for (const std::size_t row : {std::size_t{0}, batch_.positions.size() - 1}) {
    const auto index = AsSize(batch_.sequences[row]);
    CheckRow(name, view, row, slots_[index], batch_.positions[row]);
  }
}

// The row sees its slot's cells up to its own position, and no others.
void Chat::CheckRow(const std::string& name, const KvView& view,
                    std::size_t row, const Slot& slot,
                    std::int32_t position) const {
  const auto at = static_cast<std::int64_t>(row);
  std::int64_t seen = 0;
  for (std::int64_t column = 0; column < view.mask.shape[0]; ++column) {
    seen += Visible(view.mask, at, column) ? 1 : 0;
  }
  bool all = seen == position + 1;
  for (std::int32_t i = 0; i <= position; ++i) {
    const std::int64_t column = At(slot.cells, i) - view.first_cell;
    all = all && column >= 0 && column < view.mask.shape[0] &&
          Visible(view.mask, at, column);
  }
  if (!all) {
    Wrong(name, fmt::format("pass {}, row {}: position {} sees {} cells",
                            passes_, row, position, seen));
  }
}

}  // namespace kvtwin::bench
