#include "optimized/recurrent.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "core/refusals.h"

namespace kvtwin::optimized {
namespace {

// Returns the rows [first, first + count) of a Put.
TensorView RowsFrom(const TensorView& all, int first, std::size_t count) {
  TensorView rows = Slice(all, 2, first);
  rows.shape[2] = static_cast<std::int64_t>(count);
  return rows;
}

}  // namespace

Result<std::int64_t> RecurrentCache::DoCheckInit(const InitArgs& args) {
  reach_ = {.window = kOpenEnd, .memory = kOpenEnd};
  kept_ = spec_.checkpoint_every > 0 ? spec_.checkpoints : 0;
  const std::int64_t states =
      args.max_sequences * (kept_ + 2 + spec_.pins + spec_.drafts);
  return RoundUp(states, config().cache_padding);
}

void RecurrentCache::DoInit() {
  CausalCache::DoInit();
  pins_.clear();
}

std::int64_t RecurrentCache::Length(int seq) const {
  const Sequence* sequence = table_->Find(seq);
  return sequence == nullptr ? 0 : std::int64_t{sequence->extremes.last} + 1;
}

Status RecurrentCache::DoCheckBatch(const Batch& batch) const {
  order_.clear();
  for (int i = 0; i < Size(batch.sequences); ++i) {
    order_.emplace_back(At(batch.sequences, i), i);
  }
  std::ranges::sort(order_);
  std::int64_t next = 0;
  int known = -1;
  for (const auto& [seq, row] : order_) {
    if (seq != known) next = Length(seq);
    known = seq;
    const std::int32_t position = At(batch.positions, row);
    const int parent = ParentOf(batch, AsSize(row));
    if (parent >= 0) continue;  // It says the position of the draft (D1).
    if (position != next) {
      return Invalid(
          "sequence {} has {} tokens, its token {} of the batch is "
          "at position {} instead of {}",
          seq, Length(seq), row, position, next);
    }
    if (parent == kNotADraft) ++next;
  }
  return {};
}

// Finds the runs of the batch.
void RecurrentCache::FindRuns() {
  order_.clear();
  for (int i = 0; i < Size(batch()); ++i) {
    order_.emplace_back(At(batch(), i).sequence, i);
  }
  std::ranges::sort(order_);
  runs_.clear();
  run_of_.resize(batch().size());
  for (const auto& [seq, row] : order_) {
    if (runs_.empty() || runs_.back().sequence != seq) {
      const std::int64_t length = Length(seq);
      runs_.push_back({.sequence = seq,
                       .first = length,
                       .end = length,
                       .first_draft = At(batch(), row).draft});
    }
    if (At(batch(), row).draft < 0) ++runs_.back().end;
    At(run_of_, row) = Size(runs_) - 1;
  }
}

Status RecurrentCache::DoStartForward(const Batch& given, bool reserve) {
  FindRuns();
  rows_.clear();
  cells_.clear();
  if (reserve) return CausalCache::DoStartForward(given, reserve);
  for (const Run& run : runs_) Evict(run);
  for (std::size_t i = 0; i < batch().size(); ++i) {
    if (IsStored(i)) rows_.push_back(AsInt(i));
  }
  if (!FindCells(rows_.size(), cells_)) {
    return {StatusCode::kCacheFull,
            fmt::format("{} of {} cells are free, the batch has {} states",
                        table_->free_count(), table_->size(), rows_.size())};
  }
  batch_cells().assign(batch().size(), -1);
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const BatchToken& token = At(batch(), rows_[i]);
    if (token.draft >= 0) {
      StoreDraft(token, AsSize(cells_[i]));
    } else {
      table_->Add(token.sequence, AsSize(cells_[i]), token.position);
    }
    At(batch_cells(), rows_[i]) = cells_[i];
  }
  view_ = FindView();
  Status status = BuildMask({});
  if (!status.ok()) DoGiveBack();
  return status;
}

// The last state stays: the pass reads it. Of the others, the pinned ones stay,
// and the last checkpoints, as many as the run leaves room for (R4).
void RecurrentCache::Evict(const Run& run) {
  Sequence* sequence = table_->Find(run.sequence);
  if (sequence == nullptr) return;
  std::int64_t left = kept_ - (Checkpoints(run.end) - Checkpoints(run.first));
  std::int32_t first = sequence->extremes.last;
  leaving_.clear();
  const auto cells = table_->CellsAt(*sequence, {0, kOpenEnd});
  for (std::size_t i = cells.size(); i-- > 0;) {
    const std::int32_t position = table_->positions()[cells[i]];
    const std::int64_t length = std::int64_t{position} + 1;
    const bool checkpoint = Checkpoints(length) > Checkpoints(length - 1);
    if ((checkpoint && left-- > 0) || i + 1 == cells.size() ||
        IsPinned(run.sequence, length)) {
      first = position;
    } else {
      leaving_.push_back(cells[i]);
    }
  }
  if (leaving_.empty()) return;
  for (const std::int32_t cell : leaving_) {
    table_->DropCell(*sequence, AsSize(cell));
  }
  sequence->extremes.first = first;
  table_->FinishUpdate(*sequence, /*stale=*/false);
}

// Whether the state at `length` is among the last checkpoints of a sequence of
// `end` tokens.
bool RecurrentCache::IsKept(std::int64_t length, std::int64_t end) const {
  return Checkpoints(length) > Checkpoints(length - 1) &&
         Checkpoints(end) - Checkpoints(length) < kept_;
}

// The state after a batch token is stored if it is the last one of its
// sequence, or among its last checkpoints (R5), or that of a draft (R11).
bool RecurrentCache::IsStored(std::size_t row) const {
  const std::int64_t end = RunOf(row).end;
  const std::int64_t length = std::int64_t{batch()[row].position} + 1;
  return batch()[row].draft >= 0 || length == end || IsKept(length, end);
}

CellSpan RecurrentCache::FindView() const {
  std::size_t first = table_->size();
  std::size_t last = 0;
  for (const Run& run : runs_) {
    if (const Sequence* sequence = table_->Find(run.sequence)) {
      first = std::min(first, sequence->members.First());
      last = std::max(last, sequence->members.Last());
    }
    if (run.first_draft < 0) continue;
    for (const Draft& draft : *DraftsOf(run.sequence)) {
      first = std::min(first, AsSize(draft.cell));
      last = std::max(last, AsSize(draft.cell));
    }
  }
  const auto padding = AsSize(config().cache_padding);
  return {.first = first / padding * padding,
          .end = (last / padding + 1) * padding};
}

// Each row shows the last state before the batch (R6), or that of the last
// draft of an earlier batch that it follows (R12).
RowRule RecurrentCache::ReadBy(std::size_t row) const {
  const Run& run = RunOf(row);
  int number = batch()[row].draft;
  if (number >= 0) {
    const std::vector<Draft>& drafts = *DraftsOf(run.sequence);
    while (number >= run.first_draft) number = At(drafts, number).parent;
    if (number >= 0) {
      return {.sequence = nullptr,
              .range = {0, -1},
              .more = std::span(&At(drafts, number).cell, 1)};
    }
  }
  if (run.first == 0) return {.sequence = nullptr, .range = {0, -1}};
  const auto read = static_cast<std::int32_t>(run.first - 1);
  return {.sequence = table_->Find(run.sequence), .range = {read, read}};
}

void RecurrentCache::DoBuildMask() {
  rules_.clear();
  for (std::size_t i = 0; i < batch().size(); ++i) {
    rules_.push_back(ReadBy(i));
  }
  const std::int64_t rows =
      RoundUp(std::ssize(batch()), config().mask_batch_padding);
  memory_->mask().Build(*table_, rules_, AsSize(rows), view_,
                        config().mask_dtype);
}

// Runs right after DoStartForward.
void RecurrentCache::DoGiveBack() {
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const BatchToken& token = At(batch(), rows_[i]);
    if (token.draft >= 0) {
      GiveBackDraft(token);
    } else {
      table_->DropCell(*table_->Find(token.sequence), AsSize(cells_[i]));
    }
  }
  for (const Run& run : runs_) {
    Sequence* sequence = table_->Find(run.sequence);
    if (sequence != nullptr) table_->FinishUpdate(*sequence, /*stale=*/true);
  }
}

// Stores the states that have cells, runs of rows at a time (R7).
void RecurrentCache::DoPut(const TensorView& key, const TensorView& value) {
  NeedLayer(layer(), key, value);
  if (reserving()) return;
  for (std::size_t i = 0, end = 0; i < rows_.size(); i = end) {
    end = i + 1;
    while (end < rows_.size() && rows_[end] == rows_[end - 1] + 1) ++end;
    memory_->Store(layer(), std::span(cells_).subspan(i, end - i),
                   RowsFrom(key, rows_[i], end - i),
                   RowsFrom(value, rows_[i], end - i));
  }
}

bool RecurrentCache::DoCanResume(int seq, std::int32_t pos) const {
  return pos == 0 || DoResumeBefore(seq, pos) == pos;
}

std::int32_t RecurrentCache::DoResumeBefore(int seq, std::int32_t pos) const {
  Sequence* sequence = table_->Find(seq);
  if (sequence == nullptr) return 0;
  const auto cells = table_->CellsAt(*sequence, {0, pos - 1});
  return cells.empty() ? 0 : table_->positions()[cells.back()] + 1;
}

Status RecurrentCache::DoPrepareRemove(int seq, std::int32_t begin,
                                       std::int32_t end) {
  if (end != kOpenEnd && begin < Length(seq)) {
    return {StatusCode::kNotSupported,
            fmt::format("sequence {} has a state of {} tokens, which can only "
                        "be cut at its end",
                        seq, Length(seq))};
  }
  return CausalCache::DoPrepareRemove(seq, begin, kOpenEnd);
}

// The same states of the path stay as those of an ordinary batch (R13).
void RecurrentCache::DoCommit(int seq, std::span<const int> path) {
  path_.clear();
  if (!path.empty()) {
    const std::int64_t before = Length(seq);
    const std::int64_t end = before + std::ssize(path);
    Evict({.sequence = seq, .first = before, .end = end});
    std::int64_t length = before;
    for (const int number : path) {
      ++length;
      if (length == end || IsKept(length, end)) path_.push_back(number);
    }
  }
  CausalCache::DoCommit(seq, path_);
}

// The pins come in order: a state that is not pinned is after those that are.
void RecurrentCache::DoCheckpoint(int seq) {
  const std::int64_t length = Length(seq);
  if (length == 0 || IsPinned(seq, length)) return;
  std::vector<std::int64_t>& pins = pins_[seq];
  pins.push_back(length);
  if (std::ssize(pins) > spec_.pins) pins.erase(pins.begin());
}

bool RecurrentCache::IsPinned(int seq, std::int64_t length) const {
  const auto found = pins_.find(seq);
  return found != pins_.end() &&
         std::ranges::binary_search(found->second, length);
}

// States after more than `len` tokens are gone.
void RecurrentCache::CutPins(int seq, std::int64_t len) {
  const auto found = pins_.find(seq);
  if (found == pins_.end()) return;
  std::erase_if(found->second, [&](std::int64_t at) { return at > len; });
  if (found->second.empty()) pins_.erase(found);
}

void RecurrentCache::DoCopyPrefix(int src, int dst, std::int32_t len) {
  CausalCache::DoCopyPrefix(src, dst, len);
  if (src != dst) {
    const auto found = pins_.find(src);
    if (found == pins_.end()) {
      pins_.erase(dst);
    } else {
      pins_[dst] = found->second;
    }
  }
  CutPins(dst, len);
}

void RecurrentCache::DoCommitRemove(int seq, std::int32_t begin,
                                    std::int32_t end) {
  CausalCache::DoCommitRemove(seq, begin, end);
  CutPins(seq, begin);
}

}  // namespace kvtwin::optimized
