#include "props/paged/pool_log.h"

#include <fmt/format.h>

#include <utility>

#include "core/index.h"
#include "core/trace/trace.h"
#include "kvtwin/status.h"
#include "props/report/show_pool.h"

namespace kvtwin::props {
namespace {

using Kind = PagedTraceOpKind;

}  // namespace

// PoolCallText ends with ": " and the answer, if the call has one.
std::string PoolCalls::TextOf(const Change& change) {
  const PagedTraceOp& op = change.op;
  std::string text =
      fmt::format("{}  {}", TraceOpName(op.kind), PoolCallText(op));
  const bool answers = op.kind == Kind::kOpen || op.kind == Kind::kFork ||
                       op.kind == Kind::kAppend;
  if (change.answer == StatusCode::kOk) {
    // ", 2 tokens found" is not known until SeqLen says it.
    const bool cut = op.kind == Kind::kOpen && !change.has_len;
    return cut ? text.substr(0, text.rfind(", ")) : text;
  }
  if (answers) text.resize(text.rfind(": "));
  if (change.answer) text += fmt::format(": {}", StatusName(*change.answer));
  return text;
}

std::string PoolCalls::TextOf(const Read& read) {
  std::string text(read.name);
  if (read.sequence) text += fmt::format("  sequence {}", *read.sequence);
  if (read.layer) {
    text += fmt::format("{}layer {}", read.sequence ? ", " : "  ", *read.layer);
  }
  if (read.group) {
    text += fmt::format("{}group {}", read.sequence ? ", " : "  ", *read.group);
  }
  text += read.more;
  if (read.answer.value_or(StatusCode::kOk) != StatusCode::kOk) {
    text += fmt::format(": {}", StatusName(*read.answer));
  }
  return text;
}

std::vector<Step> PoolCalls::Steps() const {
  std::vector<Step> steps;
  const auto add = [&](std::string text) {
    Step& step = steps.emplace_back();
    step.number = std::ssize(steps);
    step.call = std::move(text);
  };
  for (const Change& change : changes_) add(TextOf(change));
  if (read_) add(TextOf(*read_));
  return steps;
}

std::optional<PagedTraceOpKind> PoolCalls::LastCall() const {
  return read_ ? read_->kind : LastChange();
}

std::optional<PagedTraceOpKind> PoolCalls::LastChange() const {
  if (changes_.empty()) return std::nullopt;
  return changes_.back().op.kind;
}

void PoolCalls::TellChange() const {
  if (told_) told_(changes_.size() - 1, TextOf(changes_.back()));
}

void PoolCalls::Begin(PagedTraceOp op) {
  read_.reset();
  changes_.push_back({std::move(op), std::nullopt});
  TellChange();
}

void PoolCalls::End(const Status& status) {
  changes_.back().answer = status.code();
  changes_.back().op.result = status.code();
  TellChange();
}

void PoolCalls::Begin(const Read& read) {
  read_ = read;
  if (told_) told_(changes_.size(), TextOf(read));
}

PoolCalls::Change* PoolCalls::BeginSeqLen(int sequence, bool has_groups) {
  Change* const last = changes_.empty() ? nullptr : &changes_.back();
  Read read{"seq_len", Kind::kSeqLen, sequence};
  bool first = false;
  if (last != nullptr && last->answer == StatusCode::kOk && !last->has_len) {
    const PagedTraceOp& op = last->op;
    // A pool with groups chooses the length of a fork or a truncation (P14).
    first =
        op.kind == Kind::kTruncate
            ? has_groups && op.seq == sequence
            : op.made == sequence && (op.kind == Kind::kOpen ||
                                      (has_groups && op.kind == Kind::kFork));
    if (first) read.kind = op.kind;
  }
  Begin(read);
  return first ? last : nullptr;
}

// Notes the calls that a group of a pool gets.
class PoolLog::LoggedGroup final : public ForwardingGroup {
 public:
  LoggedGroup(const PagedPool& group, PoolCalls& calls, int number)
      : ForwardingGroup(group), calls_(calls), number_(number) {}

  PagedUsage Usage() const override {
    Begin("usage", Kind::kUsage);
    return reads_.Usage();
  }
  Result<PagedCsr> ExportCsr(std::span<const int> sequences) const override {
    Begin("csr", Kind::kCsr);
    return calls_.Said(reads_.ExportCsr(sequences));
  }
  Result<PagedTable> ExportTable(
      std::span<const int> sequences) const override {
    Begin("table", Kind::kTable);
    return calls_.Said(reads_.ExportTable(sequences));
  }
  Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                int end) const override {
    Begin("slots", Kind::kSlots, sequence);
    return calls_.Said(reads_.SlotMapping(sequence, begin, end));
  }

 private:
  void Begin(std::string_view name, Kind kind,
             std::optional<int> sequence = {}) const {
    calls_.Begin(PoolCalls::Read{
        .name = name, .kind = kind, .sequence = sequence, .group = number_});
  }

  PoolCalls& calls_;
  const int number_;
};

PoolLog::PoolLog(std::unique_ptr<PagedPool> pool, PoolCalls& calls)
    : ForwardingPool(std::move(pool)), calls_(calls) {
  calls_.changes_.clear();
  calls_.read_.reset();
  for (int group = 0; group < Size(spec().groups); ++group) {
    groups_.push_back(
        std::make_unique<LoggedGroup>(*pool_->Group(group), calls_, group));
  }
}

PoolLog::~PoolLog() = default;

const PagedPool* PoolLog::Group(int group) const {
  const bool exists = group >= 0 && group < Size(groups_);
  return exists ? At(groups_, group).get() : ForwardingPool::Group(group);
}

Result<int> PoolLog::Open(std::span<const std::int32_t> prompt,
                          const PrefixKey& key) {
  PagedTraceOp op{.kind = Kind::kOpen};
  op.tokens.emplace(prompt.begin(), prompt.end());
  op.prefix_key = key;
  calls_.Begin(std::move(op));
  Result<int> opened = pool_->Open(prompt, key);
  if (opened.ok()) calls_.changes_.back().op.made = *opened;
  calls_.End(opened.status());
  return opened;
}

Result<int> PoolLog::Fork(int sequence, int len) {
  PagedTraceOp op{.kind = Kind::kFork, .seq = sequence, .len = len};
  calls_.Begin(std::move(op));
  Result<int> forked = pool_->Fork(sequence, len);
  if (forked.ok()) calls_.changes_.back().op.made = *forked;
  calls_.End(forked.status());
  return forked;
}

Result<int> PoolLog::Find(std::span<const std::int32_t> prompt,
                          const PrefixKey& key) const {
  calls_.Begin(PoolCalls::Read{"find", Kind::kOpen});
  return calls_.Said(pool_->Find(prompt, key));
}

Result<int> PoolLog::ResumeBefore(int sequence, int len) const {
  calls_.Begin(PoolCalls::Read{"resume_before", Kind::kTruncate, sequence});
  return calls_.Said(pool_->ResumeBefore(sequence, len));
}

Result<int> PoolLog::SeqLen(int sequence) const {
  PoolCalls::Change* const made =
      calls_.BeginSeqLen(sequence, !spec().groups.empty());
  Result<int> len = calls_.Said(pool_->SeqLen(sequence));
  if (!len.ok() || made == nullptr) return len;
  made->has_len = true;
  if (made->op.kind == Kind::kOpen) {
    made->op.len = *len;
    calls_.TellChange();
  }
  return len;
}

Result<PagedAppend> PoolLog::Append(int sequence, int layer,
                                    const TensorView& key,
                                    const TensorView& value) {
  PagedTraceOp op{.kind = Kind::kAppend, .seq = sequence, .layer = layer};
  op.key.emplace().shape = key.shape;
  calls_.Begin(std::move(op));
  Result<PagedAppend> appended = pool_->Append(sequence, layer, key, value);
  calls_.End(appended.status());
  return appended;
}

Status PoolLog::Commit(int sequence, int new_tokens) {
  PagedTraceOp op{
      .kind = Kind::kCommit, .seq = sequence, .new_tokens = new_tokens};
  calls_.Begin(std::move(op));
  Status status = pool_->Commit(sequence, new_tokens);
  calls_.End(status);
  return status;
}

Status PoolLog::Commit(int sequence, std::span<const std::int32_t> tokens) {
  PagedTraceOp op{.kind = Kind::kCommit, .seq = sequence};
  op.tokens.emplace(tokens.begin(), tokens.end());
  calls_.Begin(std::move(op));
  Status status = pool_->Commit(sequence, tokens);
  calls_.End(status);
  return status;
}

Status PoolLog::Truncate(int sequence, int len) {
  PagedTraceOp op{.kind = Kind::kTruncate, .seq = sequence, .len = len};
  calls_.Begin(std::move(op));
  Status status = pool_->Truncate(sequence, len);
  calls_.End(status);
  return status;
}

Status PoolLog::Free(int sequence) {
  calls_.Begin({.kind = Kind::kFree, .seq = sequence});
  Status status = pool_->Free(sequence);
  calls_.End(status);
  return status;
}

Status PoolLog::AddMedia(int sequence, const PrefixMedia& media) {
  calls_.Begin({.kind = Kind::kMedia, .seq = sequence, .media = media});
  Status status = pool_->AddMedia(sequence, media);
  calls_.End(status);
  return status;
}

Result<std::vector<PagedView>> PoolLog::Views(int sequence, int layer) const {
  calls_.Begin(PoolCalls::Read{"views", Kind::kViews, sequence, layer});
  return calls_.Said(pool_->Views(sequence, layer));
}

Result<std::vector<PagedView>> PoolLog::ViewsPacked(int sequence,
                                                    int layer) const {
  calls_.Begin(PoolCalls::Read{"views_packed", Kind::kViews, sequence, layer});
  return calls_.Said(pool_->ViewsPacked(sequence, layer));
}

Result<std::optional<PagedKv>> PoolLog::ContiguousKV(int sequence, int layer,
                                                     int kv_len) const {
  calls_.Begin(PoolCalls::Read{"contiguous_kv", Kind::kViews, sequence, layer});
  return calls_.Said(pool_->ContiguousKV(sequence, layer, kv_len));
}

PagedUsage PoolLog::Usage() const {
  calls_.Begin(PoolCalls::Read{"usage", Kind::kUsage});
  return pool_->Usage();
}

Result<PagedCsr> PoolLog::ExportCsr(std::span<const int> sequences) const {
  calls_.Begin(PoolCalls::Read{"csr", Kind::kCsr});
  return calls_.Said(pool_->ExportCsr(sequences));
}

Result<PagedTable> PoolLog::ExportTable(std::span<const int> sequences) const {
  calls_.Begin(PoolCalls::Read{"table", Kind::kTable});
  return calls_.Said(pool_->ExportTable(sequences));
}

Result<std::vector<std::int64_t>> PoolLog::SlotMapping(int sequence, int begin,
                                                       int end) const {
  calls_.Begin(PoolCalls::Read{"slots", Kind::kSlots, sequence});
  return calls_.Said(pool_->SlotMapping(sequence, begin, end));
}

// A recording has neither the table of a layer nor K and V of all blocks; a
// table says where they lie (P10).
Result<PagedTable> PoolLog::ExportLayerTable(std::span<const int> sequences,
                                             int layer) const {
  calls_.Begin(PoolCalls::Read{
      .name = "layer_table", .kind = Kind::kTable, .layer = layer});
  return calls_.Said(pool_->ExportLayerTable(sequences, layer));
}

Result<PagedKv> PoolLog::Blocks(int layer) const {
  calls_.Begin(
      PoolCalls::Read{.name = "blocks", .kind = Kind::kTable, .layer = layer});
  return calls_.Said(pool_->Blocks(layer));
}

Status PoolLog::AttendLast(std::span<const int> sequences,
                           std::span<const int> query_rows, int layer,
                           const TensorView& query,
                           const AttentionOptions& options,
                           std::span<float> out) {
  PagedTraceOp op{.kind = Kind::kAttend, .layer = layer};
  op.sequences.assign(sequences.begin(), sequences.end());
  op.query_rows.assign(query_rows.begin(), query_rows.end());
  op.soft_cap = options.soft_cap;
  op.sinks.assign(options.sinks.begin(), options.sinks.end());
  calls_.Begin(PoolCalls::Read{.name = "attend",
                               .kind = Kind::kAttend,
                               .more = "  " + PoolCallText(op)});
  return calls_.Said(
      AttendBy(*pool_, sequences, query_rows, layer, query, options, out));
}

}  // namespace kvtwin::props
