#include "optimized/causal.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "core/assert.h"
#include "core/index.h"
#include "core/shift_row.h"
#include "optimized/kernels.h"

namespace kvtwin::optimized {
namespace {

constexpr std::int32_t kPosMax = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kUnbounded = kPosMax;

// Everything at or after `first`, which may be negative.
PosRange From(std::int64_t first) {
  return {static_cast<std::int32_t>(std::max<std::int64_t>(first, 0)), kPosMax};
}

}  // namespace

CausalCache::CausalCache(const CacheSpec& spec,
                         std::unique_ptr<CacheMemory> memory)
    : spec_(spec), memory_(std::move(memory)) {}

CausalCache::Reach CausalCache::ReachOf(const InitArgs& args) const {
  const bool windowed = IsWindowed(spec_.kind);
  Reach reach;
  reach.window = windowed ? spec_.window.value_or(kPosMax) : kUnbounded;
  reach.memory = reach.window;
  if (spec_.kind == Kind::kSwaMem && spec_.memory) reach.memory = *spec_.memory;
  if (reach.memory != kUnbounded && args.max_sequences > 1) {
    // Leaves room for the stop token, which no follow-up request contains.
    reach.memory = std::max(reach.memory, reach.window + 1);
  }
  if (reach.memory >= args.capacity) reach.memory = kUnbounded;
  return reach;
}

bool CausalCache::bounded_memory() const { return reach_.memory != kUnbounded; }

Result<std::int64_t> CausalCache::DoCheckInit(const InitArgs& args) {
  const Reach reach = ReachOf(args);
  if (reach.memory < reach.window) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("memory is {}, less than the window, which is {}",
                              reach.memory, reach.window));
  }
  reach_ = reach;
  const std::int64_t cells =
      bounded_memory() ? args.max_sequences * reach.memory + args.max_batch
                       : std::int64_t{args.max_sequences} * args.capacity;
  return RoundUp(cells, config().cache_padding);
}

void CausalCache::DoInit() {
  memory_->Release();
  if (table_ != nullptr) return table_->Clear();
  // Sequences beyond this many allocate when they are first stored.
  constexpr int kMaxSequences = 64;
  table_ = std::make_unique<CellTable>(
      AsSize(CellCount()),
      AsSize(std::min(init_args().max_sequences, kMaxSequences)), MaxOrdered());
  // A defrag moves at most as many cells as there are holes to fill.
  moves_.reserve(table_->size() / 2);
}

std::size_t CausalCache::MaxOrdered() const {
  if (reach_.window == kUnbounded) return 0;
  return AsSize(bounded_memory() ? reach_.memory + init_args().max_batch
                                 : std::int64_t{init_args().capacity});
}

void CausalCache::DoClose() {
  table_.reset();
  memory_->Release();
  memory_->mask().Release();
  removal_ = Removal();
  moves_ = {};
  custom_rows_.clear();
  batch_sequences_.clear();
  selection_ = Selection();
}

Status CausalCache::DoStartForward(const Batch&, bool reserve) {
  std::vector<int>& cells = batch_cells();
  if (reserve) {
    // Reserving takes the worst case, and changes nothing else.
    for (std::size_t i = 0; i < batch().size(); ++i) {
      cells.push_back(AsInt(i));
    }
    view_ = {.first = 0, .end = table_->size()};
    return BuildMask({});
  }
  if (bounded_memory()) Evict();
  if (!FindCells(batch().size(), batch_cells())) {
    return {StatusCode::kCacheFull,
            fmt::format("{} of {} cells are free, the batch has {} tokens",
                        table_->free_count(), table_->size(), batch().size())};
  }
  for (std::size_t i = 0; i < batch().size(); ++i) {
    const BatchToken& token = batch()[i];
    if (token.draft >= 0) {
      StoreDraft(token, AsSize(cells[i]));
    } else {
      table_->Add(token.sequence, AsSize(cells[i]), token.position);
    }
  }
  MarkBatch();
  view_ = FindView();
  Status status = BuildMask(cells);
  if (!status.ok()) DoGiveBack();
  return status;
}

// Also tells the memory where the rows of the pass go.
Status CausalCache::BuildMask(std::span<const int> cells) {
  const auto max = AsSize(init_args().max_batch);
  try {
    memory_->SetCells(cells, std::min(max, table_->size()));
    DoBuildMask();
  } catch (const MemoryError& error) {
    return error.status();
  }
  return {};
}

// Finds the stored sequences of the batch, and the lowest position of each in
// the batch.
void CausalCache::MarkBatch() {
  ++batch_number_;
  batch_sequences_.clear();
  Sequence* sequence = nullptr;
  int id = -1;  // The id of `sequence`.
  for (const BatchToken& token : batch()) {
    if (token.sequence != id) sequence = table_->Find(token.sequence);
    id = token.sequence;
    if (sequence == nullptr) continue;
    if (sequence->batch != batch_number_) {
      sequence->batch = batch_number_;
      sequence->batch_low = LowOf(token);
      batch_sequences_.push_back(sequence);
    }
    sequence->batch_low = std::min(sequence->batch_low, token.position);
  }
}

// Looks only at sequences that got tokens since the last eviction, or get some
// now: all tokens of the other sequences lie within their memory.
void CausalCache::Evict() {
  MarkBatch();
  for (Sequence* sequence : batch_sequences_) table_->Grows(*sequence);
  // Backwards: the last grown sequence takes the place of one that is released.
  for (std::size_t i = table_->grown().size(); i-- > 0;) {
    Sequence& sequence = *table_->grown()[i];
    const std::int64_t low = sequence.batch == batch_number_
                                 ? std::int64_t{sequence.batch_low}
                                 : std::int64_t{sequence.extremes.last} + 1;
    const std::int64_t last_to_go = low - reach_.memory - 1;
    if (last_to_go < sequence.extremes.first) continue;
    table_->DropOldest(sequence, static_cast<std::int32_t>(last_to_go));
  }
  table_->ClearGrown();
  // If the pass ends here because the cache is full, each sequence of the batch
  // keeps the tokens that its lowest batch position can see. The next pass
  // evicts more, so these sequences stay marked.
  for (Sequence* sequence : batch_sequences_) {
    if (sequence->count > 0) table_->Grows(*sequence);
  }
}

bool CausalCache::FindCells(std::size_t count, std::vector<int>& out) {
  if (spec_.placement == Placement::kScatter) {
    return FindScatteredCells(count, out);
  }
  std::size_t first = table_->FindRun(count);
  if (first == kNone) {
    Defrag();
    MoveDrafts();
    first = table_->FindRun(count);
  }
  if (first == kNone) return false;
  for (std::size_t i = 0; i < count; ++i) out.push_back(AsInt(first + i));
  return true;
}

bool CausalCache::FindScatteredCells(std::size_t count, std::vector<int>& out) {
  if (table_->free_count() < count) return false;
  table_->FindFree(count, out);
  return true;
}

void CausalCache::Defrag() {
  table_->Defrag(moves_);
  if (!moves_.empty()) memory_->Move(moves_);
}

CellSpan CausalCache::FindView() const {
  std::size_t first = kNone;
  std::size_t last = 0;
  for (Sequence* sequence : batch_sequences_) {
    // The oldest position visible to the sequence's earliest batch token. The
    // new cells are included, because none has a lower position.
    const std::int64_t oldest = bounded_memory()
                                    ? sequence->batch_low - reach_.window
                                    : std::int64_t{0};
    // With drafts, the sequence may have no visible token.
    if (oldest > sequence->extremes.last) continue;
    if (oldest <= sequence->extremes.first) {
      first = std::min(first, sequence->members.First());
      last = std::max(last, sequence->members.Last());
    } else {
      const CellBounds bounds = table_->Since(*sequence, From(oldest).first);
      first = std::min(first, bounds.first);
      last = std::max(last, bounds.last);
    }
  }
  int seq = -1;  // The last sequence with drafts.
  for (const BatchToken& token : batch()) {
    if (token.draft < 0 || token.sequence == seq) continue;
    seq = token.sequence;
    for (const Draft& draft : *DraftsOf(seq)) {
      first = std::min(first, AsSize(draft.cell));
      last = std::max(last, AsSize(draft.cell));
    }
  }
  KVTWIN_ASSERT(first <= last);
  // The number of cells is a multiple of the padding as well.
  const auto padding = AsSize(config().cache_padding);
  return {.first = first / padding * padding,
          .end = (last / padding + 1) * padding};
}

// The positions that a batch token may attend to in its own sequence.
PosRange CausalCache::VisibleTo(const BatchToken& token) const {
  // An unbounded window reaches as far as positions go.
  PosRange range = From(token.position - reach_.window);
  if (!token.excepted) range.last = token.position;
  if (spec_.kind == Kind::kChunked) {
    range.first =
        std::max(range.first, token.position - token.position % spec_.chunk);
  }
  return range;
}

// Builds the mask for the cells as they are now: sequences may have been added
// or removed since the pass began.
void CausalCache::DoBuildMask() {
  rules_.clear();
  Sequence* sequence = nullptr;
  int id = -1;  // The id of `sequence`.
  for (const BatchToken& token : batch()) {
    if (token.sequence != id) sequence = table_->Find(token.sequence);
    id = token.sequence;
    rules_.push_back({.sequence = sequence, .range = VisibleTo(token)});
  }
  if (!drafts_.empty()) ShowDrafts();
  const std::int64_t rows =
      RoundUp(std::ssize(batch()), config().mask_batch_padding);
  memory_->mask().Build(*table_, rules_, AsSize(rows), view_,
                        config().mask_dtype);
}

// Runs right after DoStartForward: the batch's sequences are known, and its
// cells are not yet shared.
void CausalCache::DoGiveBack() {
  for (std::size_t i = 0; i < batch().size(); ++i) {
    const BatchToken& token = batch()[i];
    if (token.draft >= 0) {
      GiveBackDraft(token);
    } else {
      table_->DropCell(*table_->Find(token.sequence), AsSize(batch_cells()[i]));
    }
  }
  for (Sequence* sequence : batch_sequences_) {
    table_->FinishUpdate(*sequence, /*stale=*/true);
  }
}

void CausalCache::NeedLayer(int layer, const TensorView& key,
                            const TensorView& value) {
  memory_->NeedLayer(layer,
                     {.k_head_dim = AsInt(key.shape[0]),
                      .kv_heads = AsInt(key.shape[1]),
                      .v_head_dim = AsInt(value.shape[0])},
                     {.k_dtype = k_dtype(),
                      .v_dtype = v_dtype(),
                      .v_layout = config().v_layout,
                      .cells = table_->size()});
}

void CausalCache::DoPut(const TensorView& key, const TensorView& value) {
  NeedLayer(layer(), key, value);
  if (!reserving()) memory_->Put(layer(), key, value);
}

// Stores rows outside of a pass.
void CausalCache::DoStoreRows(int layer, std::span<const int> cells,
                              const TensorView& key, const TensorView& value) {
  NeedLayer(layer, key, value);
  if (!cells.empty()) memory_->Store(layer, cells, key, value);
}

KvView CausalCache::DoAllRows(int layer) const {
  return memory_->HostRows(layer);
}

void CausalCache::DoAddEntry(const CellEntry& entry) {
  table_->Add(entry.sequence, AsSize(entry.cell), entry.position);
}

KvView CausalCache::DoGet() {
  KvView view = memory_->Rows(layer(), view_);
  view.mask = memory_->MaskView();
  return view;
}

void CausalCache::DropAll(Sequence& sequence) {
  table_->Select(sequence, From(0), selection_);
  table_->Drop(sequence, selection_);
  table_->FinishUpdate(sequence, /*stale=*/false);
}

void CausalCache::DoCopyPrefix(int src, int dst, std::int32_t len) {
  Sequence* to = table_->Find(dst);
  if (src == dst) {
    if (to == nullptr || len > to->extremes.last) return;
    table_->Select(*to, From(len), selection_);
    table_->Drop(*to, selection_);
    table_->FinishUpdate(*to, /*stale=*/true);
    return;
  }
  if (to != nullptr) DropAll(*to);
  const Sequence* from = table_->Find(src);
  if (from != nullptr) table_->CopyPrefix(*from, dst, len, selection_);
}

bool CausalCache::DoCanResume(int seq, std::int32_t pos) const {
  if (!bounded_memory()) return true;
  const Sequence* sequence = table_->Find(seq);
  if (sequence == nullptr) return false;
  const PosRange stored = sequence->extremes;
  return stored.first <= std::max<std::int64_t>(0, pos - reach_.window) &&
         pos <= std::int64_t{stored.last} + 1;
}

// Where it cannot resume at its end, it cannot before either.
std::int32_t CausalCache::DoResumeBefore(int seq, std::int32_t pos) const {
  const Sequence* sequence = table_->Find(seq);
  if (sequence == nullptr || sequence->extremes.last >= pos) return 0;
  const std::int32_t end = sequence->extremes.last + 1;
  return DoCanResume(seq, end) ? end : 0;
}

Status CausalCache::DoPrepareRemove(int seq, std::int32_t begin,
                                    std::int32_t end) {
  removal_.seq = seq;
  removal_.begin = begin;
  removal_.end = end;
  const Sequence* sequence = table_->Find(seq);
  if (sequence == nullptr) return {};
  if (end == kOpenEnd) {
    table_->Select(*sequence, From(begin), removal_.leaving);
    return {};
  }
  table_->Select(*sequence, {begin, end - 1}, removal_.leaving);
  table_->Select(*sequence, From(end), removal_.later);
  if (Status status = CheckLater(*sequence); !status.ok()) return status;
  if (spec_.shift.kind == ShiftKind::kNone &&
      removal_.leaving.count < sequence->count) {
    return {StatusCode::kNotSupported,
            fmt::format("sequence {} keeps {} tokens, and this cache has no "
                        "shift function",
                        seq, sequence->count - removal_.leaving.count)};
  }
  return ShiftCustomRows();
}

// Checks that no other sequence shares a token that is going to move.
Status CausalCache::CheckLater(const Sequence& sequence) const {
  const Selection& later = removal_.later;
  for (std::size_t w = later.begin; w < later.end; ++w) {
    if (later.words[w] == 0) continue;
    const std::uint64_t shared = later.words[w] & table_->shared(w);
    if (shared == 0) continue;
    const std::size_t cell = w * kWordBits + AsSize(std::countr_zero(shared));
    return {StatusCode::kSharedCells,
            fmt::format("sequence {} shares its token at position {}, in cell "
                        "{}, with another sequence",
                        sequence.id, table_->positions()[cell], cell)};
  }
  return {};
}

// If the shift function is custom, calls it for all rows that are going to
// move. It may fail, so the shifted rows are kept aside.
Status CausalCache::ShiftCustomRows() {
  const std::int32_t offset = removal_.begin - removal_.end;
  if (spec_.shift.kind != ShiftKind::kCustom || offset == 0) return {};
  custom_rows_.resize(layer_dims().size());
  std::size_t i = 0;
  for (const auto& [layer, dims] : layer_dims()) {
    const std::size_t elements =
        AsSize(dims.k_head_dim) * AsSize(dims.kv_heads);
    std::vector<float>& rows = custom_rows_[i++];
    rows.resize(removal_.later.count * elements);
    memory_->LoadKeys(layer, removal_.later, rows);
    for (std::size_t at = 0; at < rows.size(); at += elements) {
      Status status =
          ShiftRow(spec_.shift, layer, offset, dims.k_head_dim, dims.kv_heads,
                   std::span(rows).subspan(at, elements));
      if (!status.ok()) return status;
    }
  }
  return {};
}

// Commits the removal that DoPrepareRemove prepared, with equal arguments.
void CausalCache::DoCommitRemove(int, std::int32_t, std::int32_t) {
  Sequence* sequence = table_->Find(removal_.seq);
  if (sequence == nullptr) return;
  table_->Drop(*sequence, removal_.leaving);
  PosRange& extremes = sequence->extremes;
  const auto leaves = [&](std::int32_t position) {
    return position >= removal_.begin &&
           (position < removal_.end || removal_.end == kOpenEnd);
  };
  const bool stale = leaves(extremes.first) || leaves(extremes.last);
  const std::int32_t offset = removal_.begin - removal_.end;
  if (removal_.end != kOpenEnd && offset != 0 && removal_.later.count > 0) {
    table_->AddToSelected(*sequence, removal_.later, offset);
    ShiftKeys();
    // The last token is among the later ones; the first one may be.
    if (extremes.first >= removal_.end) extremes.first += offset;
    extremes.last += offset;
  }
  table_->FinishUpdate(*sequence, stale);
}

void CausalCache::ShiftKeys() {
  const Selection& later = removal_.later;
  if (spec_.shift.kind != ShiftKind::kCustom) {
    memory_->ShiftKeys(later, spec_.shift, removal_.begin - removal_.end);
    return;
  }
  std::size_t i = 0;
  for (const auto& [layer, dims] : layer_dims()) {
    memory_->StoreKeys(layer, later, custom_rows_[i++]);
  }
}

std::int64_t CausalCache::DoLastPosition(int seq) const {
  const Sequence* sequence = table_->Find(seq);
  return sequence == nullptr ? -1 : std::int64_t{sequence->extremes.last};
}

const std::vector<CausalCache::Draft>* CausalCache::DraftsOf(int seq) const {
  const auto found = drafts_.find(seq);
  return found == drafts_.end() ? nullptr : &found->second;
}

// For a draft, the position after the committed tokens: that of the first
// draft.
std::int32_t CausalCache::LowOf(const BatchToken& token) const {
  if (token.draft < 0) return token.position;
  const std::vector<Draft>* drafts = DraftsOf(token.sequence);
  if (drafts == nullptr) return token.position;
  return table_->positions()[drafts->front().cell];
}

void CausalCache::StoreDraft(const BatchToken& token, std::size_t cell) {
  table_->Take(cell, token.position);
  drafts_[token.sequence].push_back(
      {.cell = static_cast<std::int32_t>(cell), .parent = token.parent});
}

// Gives back the last draft of the token's sequence.
void CausalCache::GiveBackDraft(const BatchToken& token) {
  const auto found = drafts_.find(token.sequence);
  const auto cell = AsSize(found->second.back().cell);
  table_->Give(cell / kWordBits, std::uint64_t{1} << cell % kWordBits);
  found->second.pop_back();
  if (found->second.empty()) drafts_.erase(found);
}

// Adds to the rule of each draft the cells of the draft and of those that it
// follows, as far as they are in its range (D2). There are none if the drafts
// of its sequence are gone.
void CausalCache::ShowDrafts() {
  ancestors_.clear();
  std::vector<std::size_t> ends;
  for (std::size_t i = 0; i < batch().size(); ++i) {
    const BatchToken& token = batch()[i];
    const std::vector<Draft>* drafts = DraftsOf(token.sequence);
    int number = drafts == nullptr ? -1 : token.draft;
    for (; number >= 0; number = At(*drafts, number).parent) {
      const std::int32_t cell = At(*drafts, number).cell;
      if (table_->positions()[cell] < rules_[i].range.first) break;
      ancestors_.push_back(cell);
    }
    ends.push_back(ancestors_.size());
  }
  std::size_t begin = 0;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    rules_[i].more = std::span(ancestors_).subspan(begin, ends[i] - begin);
    begin = ends[i];
  }
}

// Follows a defrag. The moves begin with the highest cell.
void CausalCache::MoveDrafts() {
  if (moves_.empty()) return;
  for (auto& [seq, drafts] : drafts_) {
    for (Draft& draft : drafts) {
      const auto move = std::partition_point(
          moves_.begin(), moves_.end(),
          [&](const CellMove& at) { return at.from > AsSize(draft.cell); });
      if (move == moves_.end() || move->from != AsSize(draft.cell)) continue;
      draft.cell = static_cast<std::int32_t>(move->to);
    }
  }
}

// Frees a word of cells at a time: drafts usually lie side by side.
void CausalCache::DoCommit(int seq, std::span<const int> path) {
  std::vector<Draft>& drafts = drafts_.at(seq);
  for (const int number : path) {
    table_->Join(seq, AsSize(At(drafts, number).cell));
    At(drafts, number).cell = -1;
  }
  std::size_t w = 0;
  std::uint64_t leaving = 0;  // Cells of word w.
  for (const Draft& draft : drafts) {
    if (draft.cell < 0) continue;
    const auto cell = AsSize(draft.cell);
    if (cell / kWordBits != w && leaving != 0) {
      table_->Give(w, leaving);
      leaving = 0;
    }
    w = cell / kWordBits;
    leaving |= std::uint64_t{1} << cell % kWordBits;
  }
  if (leaving != 0) table_->Give(w, leaving);
  drafts_.erase(seq);
}

void CausalCache::ListCells(std::vector<CellEntry>& out) const {
  out.clear();
  if (table_ != nullptr) table_->List(out);
  if (drafts_.empty()) return;
  for (const auto& [seq, drafts] : drafts_) {
    for (const Draft& draft : drafts) {
      out.push_back({draft.cell, table_->positions()[draft.cell], seq});
    }
  }
  std::ranges::sort(out, {}, [](const CellEntry& entry) {
    return std::pair(entry.cell, entry.sequence);
  });
}

}  // namespace kvtwin::optimized
