#include "props/paged/pool_recorder.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "core/dense_tensor.h"
#include "core/guarded_paged.h"
#include "core/index.h"
#include "props/base/hash.h"

namespace kvtwin::props {
namespace {

using Kind = PagedTraceOpKind;

// Returns the rows of all blocks as f32; nullopt if there are no views.
std::optional<DenseTensor> Joined(const std::vector<PagedView>& views,
                                  TensorView PagedView::*part) {
  std::optional<DenseTensor> all;
  for (const PagedView& view : views) {
    DenseTensor rows = CopyOf(view.*part, DType::kF32);
    if (!all) {
      all = std::move(rows);
      continue;
    }
    all->shape[2] += rows.shape[2];
    all->bytes.insert(all->bytes.end(), rows.bytes.begin(), rows.bytes.end());
  }
  return all;
}

}  // namespace

// Records the tables and slots of a group; the recorder has the other calls.
class PoolRecorder::RecordedGroup final : public ForwardingGroup {
 public:
  RecordedGroup(const PoolRecorder& recorder, int group)
      : ForwardingGroup(*recorder.pool_->Group(group)),
        recorder_(recorder),
        number_(group) {}

  Result<PagedCsr> ExportCsr(std::span<const int> sequences) const override {
    return recorder_.Csr(reads_, number_, sequences);
  }
  Result<PagedTable> ExportTable(
      std::span<const int> sequences) const override {
    return recorder_.Table(reads_, number_, sequences);
  }
  Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                int end) const override {
    return recorder_.Slots(reads_, number_, sequence, begin, end);
  }

 private:
  const PoolRecorder& recorder_;
  const int number_;
};

PoolRecorder::PoolRecorder(std::unique_ptr<PagedPool> pool, Take take)
    : ForwardingPool(std::move(pool)), take_(std::move(take)) {
  for (int group = 0; group < Size(pool_->spec().groups); ++group) {
    groups_.push_back(std::make_unique<RecordedGroup>(*this, group));
  }
}

Result<int> PoolRecorder::LengthAfter(const char* call, int sequence) const {
  Result<int> len = pool_->SeqLen(sequence);
  if (len.ok()) return len;
  const Status& status = len.status();
  return Status(status.code(),
                fmt::format("after {}, SeqLen of sequence {}: {}", call,
                            sequence, status.message()));
}

Result<int> PoolRecorder::Open(std::span<const std::int32_t> prompt,
                               const PrefixKey& key) {
  PagedTraceOp op{.kind = Kind::kOpen};
  op.tokens.emplace(prompt.begin(), prompt.end());
  op.prefix_key = key;
  Result<int> opened = pool_->Open(prompt, key);
  if (!opened.ok()) return opened;
  const Result<int> len = LengthAfter("Open", *opened);
  if (!len.ok()) return len;
  op.made = *opened;
  op.len = *len;
  take_(std::move(op));
  return opened;
}

Result<int> PoolRecorder::Fork(int sequence, int len) {
  PagedTraceOp op{.kind = Kind::kFork, .seq = sequence, .len = len};
  Result<int> forked = pool_->Fork(sequence, len);
  if (!forked.ok()) return forked;
  op.made = *forked;
  if (has_groups()) {
    const Result<int> kept = LengthAfter("Fork", *forked);
    if (!kept.ok()) return kept;
    op.kept = *kept;
  }
  take_(std::move(op));
  return forked;
}

Result<int> PoolRecorder::SeqLen(int sequence) const {
  PagedTraceOp op{.kind = Kind::kSeqLen, .seq = sequence};
  Result<int> len = pool_->SeqLen(sequence);
  if (!len.ok()) return len;
  op.len = *len;
  take_(std::move(op));
  return len;
}

Result<PagedAppend> PoolRecorder::Append(int sequence, int layer,
                                         const TensorView& key,
                                         const TensorView& value) {
  PagedTraceOp op{.kind = Kind::kAppend, .seq = sequence, .layer = layer};
  Result<PagedAppend> appended = pool_->Append(sequence, layer, key, value);
  const StatusCode code = appended.status().code();
  if (code != StatusCode::kOk && code != StatusCode::kCacheFull) {
    return appended;
  }
  op.key = CopyOf(key, DType::kF32);
  op.value = CopyOf(value, DType::kF32);
  op.result = code;
  if (appended.ok()) op.start = appended->start;
  take_(std::move(op));
  return appended;
}

Status PoolRecorder::Commit(int sequence, int new_tokens) {
  PagedTraceOp op{
      .kind = Kind::kCommit, .seq = sequence, .new_tokens = new_tokens};
  Status status = pool_->Commit(sequence, new_tokens);
  if (status.ok()) take_(std::move(op));
  return status;
}

Status PoolRecorder::Commit(int sequence,
                            std::span<const std::int32_t> tokens) {
  PagedTraceOp op{.kind = Kind::kCommit, .seq = sequence};
  op.tokens.emplace(tokens.begin(), tokens.end());
  Status status = pool_->Commit(sequence, tokens);
  if (status.ok()) take_(std::move(op));
  return status;
}

Result<std::vector<PagedView>> PoolRecorder::Views(int sequence,
                                                   int layer) const {
  PagedTraceOp op{.kind = Kind::kViews, .seq = sequence, .layer = layer};
  auto views = pool_->Views(sequence, layer);
  if (!views.ok()) return views;
  op.key = Joined(*views, &PagedView::key);
  op.value = Joined(*views, &PagedView::value);
  const int start = views->empty() ? 0 : views->front().start;
  if (SpecOfLayer(pool_->spec(), layer).states) {
    op.positions.emplace();
    for (const PagedView& view : *views) op.positions->push_back(view.start);
  } else if (start > 0) {
    op.start = start;
  }
  op.blocks.emplace();
  for (const PagedView& view : *views) op.blocks->push_back(view.block);
  const bool placed = std::none_of(op.blocks->begin(), op.blocks->end(),
                                   [](int block) { return block < 0; });
  if (!placed) op.blocks.reset();
  take_(std::move(op));
  return views;
}

Status PoolRecorder::Truncate(int sequence, int len) {
  PagedTraceOp op{.kind = Kind::kTruncate, .seq = sequence, .len = len};
  Status status = pool_->Truncate(sequence, len);
  if (!status.ok()) return status;
  if (has_groups()) {
    const Result<int> kept = LengthAfter("Truncate", sequence);
    if (!kept.ok()) return kept.status();
    op.kept = *kept;
  }
  take_(std::move(op));
  return status;
}

Status PoolRecorder::Free(int sequence) {
  PagedTraceOp op{.kind = Kind::kFree, .seq = sequence};
  Status status = pool_->Free(sequence);
  if (status.ok()) take_(std::move(op));
  return status;
}

PagedUsage PoolRecorder::Usage() const {
  PagedTraceOp op{.kind = Kind::kUsage};
  op.usage = pool_->Usage();
  take_(op);
  return op.usage;
}

Status PoolRecorder::AttendLast(std::span<const int> sequences,
                                std::span<const int> query_rows, int layer,
                                const TensorView& query,
                                const AttentionOptions& options,
                                std::span<float> out) {
  PagedTraceOp op{.kind = Kind::kAttend, .layer = layer};
  op.sequences.assign(sequences.begin(), sequences.end());
  op.query_rows.assign(query_rows.begin(), query_rows.end());
  op.soft_cap = options.soft_cap;
  op.sinks.assign(options.sinks.begin(), options.sinks.end());
  Status status =
      AttendBy(*pool_, sequences, query_rows, layer, query, options, out);
  if (!status.ok()) return status;
  op.key = CopyOf(query, DType::kF32);
  const PagedSpec& spec = SpecOfLayer(pool_->spec(), layer);
  const Shape shape = {spec.v_head_dim, query.shape[1], query.shape[2], 1};
  op.value = CopyOf(DenseView(out.data(), DType::kF32, shape), DType::kF32);
  take_(std::move(op));
  return status;
}

Status PoolRecorder::AddMedia(int sequence, const PrefixMedia& media) {
  PagedTraceOp op{.kind = Kind::kMedia, .seq = sequence, .media = media};
  Status status = pool_->AddMedia(sequence, media);
  if (status.ok()) take_(std::move(op));
  return status;
}

const PagedPool* PoolRecorder::Group(int group) const {
  const bool exists = group >= 0 && group < Size(groups_);
  return exists ? At(groups_, group).get() : ForwardingPool::Group(group);
}

Result<PagedCsr> PoolRecorder::Csr(const PagedPool& of, int group,
                                   std::span<const int> sequences) const {
  PagedTraceOp op{.kind = Kind::kCsr, .group = group};
  op.sequences.assign(sequences.begin(), sequences.end());
  Result<PagedCsr> csr = of.ExportCsr(sequences);
  if (!csr.ok()) return csr;
  op.csr = *csr;
  take_(std::move(op));
  return csr;
}

Result<PagedCsr> PoolRecorder::ExportCsr(std::span<const int> sequences) const {
  return Csr(*pool_, 0, sequences);
}

Result<PagedTable> PoolRecorder::Table(const PagedPool& of, int group,
                                       std::span<const int> sequences) const {
  PagedTraceOp op{.kind = Kind::kTable, .group = group};
  op.sequences.assign(sequences.begin(), sequences.end());
  Result<PagedTable> table = of.ExportTable(sequences);
  if (!table.ok()) return table;
  op.table = *table;
  take_(std::move(op));
  return table;
}

Result<PagedTable> PoolRecorder::ExportTable(
    std::span<const int> sequences) const {
  return Table(*pool_, 0, sequences);
}

Result<std::vector<std::int64_t>> PoolRecorder::Slots(const PagedPool& of,
                                                      int group, int sequence,
                                                      int begin,
                                                      int end) const {
  PagedTraceOp op{
      .kind = Kind::kSlots, .seq = sequence, .group = group, .begin = begin};
  auto slots = of.SlotMapping(sequence, begin, end);
  if (!slots.ok()) return slots;
  op.slots.assign(slots->begin(), slots->end());
  take_(std::move(op));
  return slots;
}

Result<std::vector<std::int64_t>> PoolRecorder::SlotMapping(int sequence,
                                                            int begin,
                                                            int end) const {
  return Slots(*pool_, 0, sequence, begin, end);
}

std::uint64_t HashAnswers(const PagedTraceOp& op, std::uint64_t digest) {
  const auto add = [&](const auto& list) {
    digest = HashBytes(list.data(), std::span(list).size_bytes(), digest);
  };
  const std::array numbers = {AsInt(op.kind),       op.made,
                              AsInt(op.result),     op.len,
                              op.kept.value_or(-1), op.start.value_or(-1),
                              op.table.columns};
  add(numbers);
  for (const auto& tensor : {op.key, op.value}) {
    if (tensor) add(tensor->bytes);
  }
  for (const auto& list : {op.blocks, op.positions}) {
    if (list) add(*list);
  }
  add(op.slots);
  add(op.table.blocks);
  add(op.table.seq_lens);
  add(op.csr.indptr);
  add(op.csr.indices);
  add(op.csr.last_page_len);
  return HashBytes(&op.usage, sizeof(op.usage), digest);
}

}  // namespace kvtwin::props
