// The reference twin of all kinds that have cells: cells, ranges and masks,
// written in the most obvious way, so that a reader can check them against
// docs/semantics.md.

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "core/refusals.h"
#include "reference/make.h"
#include "reference/row_store.h"

namespace kvtwin::reference {
namespace {

using enum StatusCode;

// Farther than any position. Sums of positions are computed in 64 bits (S49).
constexpr std::int64_t kUnbounded = std::int64_t{1} << 40;

struct Cell {
  std::int32_t position = 0;
  std::set<int> sequences;  // Empty: the cell is free, or has a draft.
  // The sequence of a draft (else -1), its number and its parent (D1).
  int drafted_by = -1;
  int draft = -1;
  int parent = kNotADraft;
  std::set<int> pinned_by;  // Sequences that pinned this state (R14).

  bool IsFree() const { return sequences.empty() && drafted_by < 0; }
  bool Holds(int seq) const { return sequences.contains(seq); }
};

struct Layer {
  RowStore keys;
  RowStore values;
};

class CausalCache : public GuardedCache {
 public:
  explicit CausalCache(const CacheSpec& spec) : spec_(spec) {}

  void ListCells(std::vector<CellEntry>& out) const override {
    out.clear();
    for (int i = 0; i < CellCount(); ++i) {
      const Cell& cell = At(cells_, i);
      for (const int seq : cell.sequences) {
        out.push_back({i, cell.position, seq});
      }
      if (cell.drafted_by < 0) continue;
      out.push_back({i, cell.position, cell.drafted_by});
    }
  }

 protected:
  // Sets the window and the memory, and counts the cells (S2 to S4).
  Result<std::int64_t> DoCheckInit(const InitArgs& args) override {
    window_ = memory_ = kUnbounded;
    const bool windowed = IsWindowed(spec_.kind);
    if (windowed && spec_.window) window_ = memory_ = *spec_.window;
    if (spec_.kind == Kind::kSwaMem && spec_.memory) memory_ = *spec_.memory;
    // Adds room for the stop token, which the next request will not have.
    if (args.max_sequences > 1) memory_ = std::max(memory_, window_ + 1);
    if (memory_ >= args.capacity) memory_ = kUnbounded;
    if (memory_ < window_) {
      return Invalid("memory is {}, less than the window, which is {}", memory_,
                     window_);
    }
    std::int64_t cells = std::int64_t{args.max_sequences} * args.capacity;
    if (memory_ < kUnbounded) {
      cells = args.max_sequences * memory_ + args.max_batch;
    }
    return RoundUp(cells, config().cache_padding);
  }

  static std::int64_t RoundUp(std::int64_t length, std::int64_t padding) {
    return (length + padding - 1) / padding * padding;
  }

  void DoInit() override {
    cells_.assign(AsSize(CellCount()), {});
    layers_.clear();
  }

  void DoClose() override {
    cells_.clear();
    layers_.clear();
  }

  Cell& CellAt(int i) { return At(cells_, i); }

  Status DoStartForward(const Batch&, bool reserve) override {
    view_first_ = 0;
    view_cells_ = CellCount();
    if (reserve) {
      for (int i = 0; i < std::ssize(batch()); ++i) batch_cells().push_back(i);
    } else {
      if (memory_ < kUnbounded) Evict();
      batch_cells() = FindCells(batch().size());
      if (batch_cells().empty()) return {kCacheFull, "no room"};
      for (std::size_t i = 0; i < batch().size(); ++i) {
        Store(batch()[i], CellAt(batch_cells()[i]));
      }
      SetView();
    }
    DoBuildMask();
    return {};
  }

  static void Store(const BatchToken& token, Cell& cell) {
    cell = {};
    cell.position = token.position;
    if (token.draft < 0) {
      cell.sequences = {token.sequence};
      return;
    }
    cell.drafted_by = token.sequence;
    cell.draft = token.draft;
    cell.parent = token.parent;
  }

  // Returns the lowest position of `seq` in the batch, or `otherwise`. All its
  // drafts count as tokens of the batch (D3).
  std::int64_t LowestInBatch(int seq, std::int64_t otherwise) const {
    std::int64_t lowest = kUnbounded;
    for (const BatchToken& token : batch()) {
      if (token.sequence != seq) continue;
      lowest = std::min<std::int64_t>(lowest, token.position);
    }
    for (const Cell& cell : cells_) {
      if (cell.drafted_by != seq) continue;
      lowest = std::min<std::int64_t>(lowest, cell.position);
    }
    return lowest == kUnbounded ? otherwise : lowest;
  }

  // Lets tokens beyond the memory leave their sequences (S7, S8).
  void Evict() {
    std::map<int, std::int64_t> next;  // By sequence.
    for (const Cell& cell : cells_) {
      for (const int seq : cell.sequences) {
        next[seq] = std::max(next[seq], std::int64_t{cell.position} + 1);
      }
    }
    for (const auto& [seq, next_position] : next) {
      const std::int64_t low = LowestInBatch(seq, next_position);
      for (Cell& cell : cells_) {
        if (cell.position < low - memory_) cell.sequences.erase(seq);
      }
    }
  }

  // Returns this many free cells; empty if there are not enough (S9, S10).
  std::vector<int> FindCells(std::size_t count) {
    std::vector<int> found = FindFree(count);
    if (!found.empty() || spec_.placement == Placement::kScatter) return found;
    Defrag();
    return FindFree(count);
  }

  std::vector<int> FindFree(std::size_t count) {
    std::vector<int> found;
    for (int i = 0; i < CellCount(); ++i) {
      if (CellAt(i).IsFree()) {
        found.push_back(i);
      } else if (spec_.placement == Placement::kContiguous) {
        found.clear();
      }
      if (found.size() == count) return found;
    }
    return {};
  }

  // Moves one token at a time, so that rows and cells stay together (S11).
  void Defrag() {
    int last = CellCount() - 1;
    for (int hole = 0; hole < last; ++hole) {
      if (!CellAt(hole).IsFree()) continue;
      while (last > hole && CellAt(last).IsFree()) --last;
      std::swap(CellAt(hole), CellAt(last));
      for (auto& [id, layer] : layers_) {
        layer.keys.Copy(last, hole);
        layer.values.Copy(last, hole);
      }
    }
  }

  // Sets the bounds of the view (S14). Requires: the batch has its cells.
  void SetView() {
    std::set<int> sequences;
    for (const BatchToken& token : batch()) sequences.insert(token.sequence);
    int first = CellCount();
    int last = -1;
    for (const int seq : sequences) {
      const std::int64_t low = LowestInBatch(seq, 0);
      const std::int64_t oldest = memory_ < kUnbounded ? low - window_ : 0;
      for (int i = 0; i < CellCount(); ++i) {
        const Cell& cell = CellAt(i);
        if (cell.drafted_by != seq && !cell.Holds(seq)) continue;
        if (cell.position < oldest) continue;
        first = std::min(first, i);
        last = std::max(last, i);
      }
    }
    KVTWIN_ASSERT(first <= last);
    const int padding = config().cache_padding;
    view_first_ = first / padding * padding;
    view_cells_ = AsInt(RoundUp(last + 1, padding)) - view_first_;
  }

  // Returns the numbers of the draft `token` and of the drafts that it follows
  // (D2). The drafts may be gone.
  std::set<int> Followed(const BatchToken& token) const {
    std::map<int, int> parents;  // By draft of the sequence.
    for (const Cell& cell : cells_) {
      if (cell.drafted_by == token.sequence) parents[cell.draft] = cell.parent;
    }
    std::set<int> followed;
    for (int i = token.draft; parents.contains(i); i = parents[i]) {
      followed.insert(i);
    }
    return followed;
  }

  virtual bool Sees(const BatchToken& token, const Cell& cell) const {
    const std::int64_t now = token.position;
    const bool follows =
        cell.drafted_by == token.sequence && followed_.contains(cell.draft);
    if (!cell.Holds(token.sequence) && !follows) return false;
    if (cell.position > now && !token.excepted) return false;
    if (cell.position < now - window_) return false;
    const bool chunked = spec_.kind == Kind::kChunked;
    return !chunked || cell.position >= now - now % spec_.chunk;
  }

  // Makes a column for each cell of the view, and a row for each token (S15).
  void DoBuildMask() override {
    const std::int64_t rows =
        RoundUp(std::ssize(batch()), config().mask_batch_padding);
    mask_ = HidingMask(config().mask_dtype, view_cells_, rows);
    int row = 0;
    for (const BatchToken& token : batch()) {
      followed_ = Followed(token);
      for (int column = 0; column < view_cells_; ++column) {
        const bool sees = Sees(token, CellAt(view_first_ + column));
        if (sees) AllowInMask(mask_, column, row);
      }
      ++row;
    }
  }

  void DoGiveBack() override {
    for (const int i : batch_cells()) CellAt(i) = {};
  }

  void DoStoreRows(int layer, std::span<const int> cells, const TensorView& key,
                   const TensorView& value) override {
    if (!layers_.contains(layer)) {
      RowStore keys(k_dtype(), key.shape, CellCount(), VLayout::kPlain);
      RowStore values(v_dtype(), value.shape, CellCount(), config().v_layout);
      layers_.try_emplace(layer, Layer{std::move(keys), std::move(values)});
    }
    auto& [keys, values] = layers_.at(layer);
    for (int i = 0; i < Size(cells); ++i) {
      if (At(cells, i) < 0) continue;  // (R7)
      keys.Store(At(cells, i), Slice(key, 2, i));
      values.Store(At(cells, i), Slice(value, 2, i));
    }
  }

  KvView DoAllRows(int layer) const override {
    const auto& [keys, values] = layers_.at(layer);
    return {keys.View(0, CellCount()), values.View(0, CellCount()), {}, 0};
  }

  void DoAddEntry(const CellEntry& entry) override {
    CellAt(entry.cell).position = entry.position;
    CellAt(entry.cell).sequences.insert(entry.sequence);
  }

  // Returns K, V and mask of the view, without a copy (S23, S24).
  KvView DoGet() override {
    const auto& [keys, values] = layers_.at(layer());
    return {keys.View(view_first_, view_cells_),
            values.View(view_first_, view_cells_), mask_.view(), view_first_};
  }

  void DoCopyPrefix(int src, int dst, std::int32_t len) override {
    for (Cell& cell : cells_) {
      const bool copied = cell.Holds(src) && cell.position < len;
      cell.sequences.erase(dst);
      if (copied) cell.sequences.insert(dst);
    }
  }

  bool DoCanResume(int seq, std::int32_t pos) const override {
    if (memory_ == kUnbounded) return true;
    std::set<std::int64_t> stored;
    for (const Cell& cell : cells_) {
      if (cell.Holds(seq)) stored.insert(cell.position);
    }
    if (stored.empty()) return false;
    return *stored.begin() <= std::max<std::int64_t>(0, pos - window_) &&
           pos <= *stored.rbegin() + 1;
  }

  std::int64_t DoWindow() const override { return window_; }

  std::int64_t DoLastPosition(int seq) const override {
    std::int64_t last = -1;
    for (const Cell& cell : cells_) {
      if (cell.Holds(seq)) last = std::max<std::int64_t>(last, cell.position);
    }
    return last;
  }

  // The path's drafts become tokens where they are; the others go (D5).
  void DoCommit(int seq, std::span<const int> path) override {
    for (Cell& cell : cells_) {
      if (cell.drafted_by != seq) continue;
      if (std::ranges::count(path, cell.draft) > 0) cell.sequences = {seq};
      cell.drafted_by = -1;
    }
  }

  Status CheckRemove(int seq, std::int32_t begin, std::int32_t end) const {
    bool remains = false;
    for (const Cell& cell : cells_) {
      if (!cell.Holds(seq)) continue;
      remains = remains || cell.position < begin || cell.position >= end;
      if (cell.position >= end && cell.sequences.size() > 1) {
        return {kSharedCells, "a later token is shared"};
      }
    }
    if (!remains || spec_.shift.kind != ShiftKind::kNone) return {};
    return {kNotSupported, "there is no shift function"};
  }

  Status DoPrepareRemove(int seq, std::int32_t begin,
                         std::int32_t end) override {
    shifted_.clear();
    if (end == kOpenEnd) return {};
    if (Status why = CheckRemove(seq, begin, end); !why.ok()) return why;
    for (int i = 0; i < CellCount(); ++i) {
      if (!CellAt(i).Holds(seq) || CellAt(i).position < end) continue;
      for (auto& [id, layer] : layers_) {
        DenseTensor key = layer.keys.Load(i);
        Status status = ShiftStored(spec_.shift, id, begin - end, key);
        if (!status.ok()) return status;
        shifted_.emplace_back(&layer.keys, i, key);
      }
    }
    return {};
  }

  void DoCommitRemove(int seq, std::int32_t begin, std::int32_t end) override {
    for (const auto& [keys, cell, key] : shifted_) {
      keys->Store(cell, key.view());
    }
    for (Cell& cell : cells_) {
      if (!cell.Holds(seq) || cell.position < begin) continue;
      if (cell.position < end || end == kOpenEnd) {
        cell.sequences.erase(seq);
      } else {
        cell.position -= end - begin;
      }
    }
  }

  const CacheSpec spec_;
  std::int64_t window_ = kUnbounded;
  std::int64_t memory_ = kUnbounded;
  std::vector<Cell> cells_;
  std::map<int, Layer> layers_;
  // Set by DoPrepareRemove: the shifted K rows, and their places.
  std::vector<std::tuple<RowStore*, int, DenseTensor>> shifted_;

  // The current pass.
  int view_first_ = 0;
  int view_cells_ = 0;
  DenseTensor mask_;        // [view_cells, rows]
  std::set<int> followed_;  // The mask's current row follows these drafts.
};

// The cells of this cache hold states (R1 to R15).
class RecurrentCache final : public CausalCache {
 public:
  using CausalCache::CausalCache;

 private:
  bool IsRecurrent() const override { return true; }
  bool TakesDrafts() const override { return spec_.drafts > 0; }
  bool HasPins() const override { return spec_.pins > 0; }

  // Counts the cells (R2).
  Result<std::int64_t> DoCheckInit(const InitArgs& args) override {
    const std::int64_t states =
        std::int64_t{Kept()} + 2 + spec_.pins + spec_.drafts;
    return RoundUp(args.max_sequences * states, config().cache_padding);
  }

  std::int32_t Kept() const {
    return spec_.checkpoint_every > 0 ? spec_.checkpoints : 0;
  }
  bool IsCheckpoint(std::int64_t position) const {
    const std::int64_t every = spec_.checkpoint_every;
    return every > 0 && (position + 1) % every == 0;
  }

  // Returns the position of the last state of `seq`, -1 if it has none.
  std::int64_t LastState(int seq) const {
    std::int64_t last = -1;
    for (const Cell& cell : cells_) {
      if (cell.Holds(seq)) last = std::max<std::int64_t>(last, cell.position);
    }
    return last;
  }

  // Each sequence continues at its end (R3). Drafts that follow others are at
  // the right positions already (D1); the others come after the end (R11).
  Status DoCheckBatch(const Batch& batch) const override {
    std::map<int, std::int64_t> next;
    for (std::size_t i = 0; i < batch.positions.size(); ++i) {
      const int seq = batch.sequences[i];
      if (!next.contains(seq)) next[seq] = LastState(seq) + 1;
      const std::int32_t position = batch.positions[i];
      const int parent = ParentOf(batch, i);
      if (parent < 0 && position != next[seq]) {
        return Invalid("sequence {} continues at {}, the batch has {}", seq,
                       next[seq], position);
      }
      if (parent == kNotADraft) ++next[seq];
    }
    return {};
  }

  Status DoStartForward(const Batch& given, bool reserve) override {
    read_.clear();
    for (const BatchToken& token : batch()) {
      read_.try_emplace(token.sequence, LastState(token.sequence));
    }
    if (reserve) return CausalCache::DoStartForward(given, reserve);
    for (const auto& [seq, read] : read_) {
      std::set<std::int64_t> added;
      for (const BatchToken& token : batch()) {
        const bool ordinary = token.sequence == seq && token.draft < 0;
        if (ordinary) added.insert(token.position);
      }
      KeepStates(seq, {read}, added);
    }
    if (!Place()) return {kCacheFull, "no room"};
    SetView();
    DoBuildMask();
    return {};
  }

  // Whether the state after a batch token is stored: it is the sequence's last
  // one, or among its last checkpoints (R5), or that of a draft (R11).
  bool IsStored(std::size_t row) const {
    const BatchToken& token = batch()[row];
    if (token.draft >= 0) return true;
    int later = 0;
    int checkpoints = 0;
    for (std::size_t i = row + 1; i < batch().size(); ++i) {
      if (batch()[i].sequence != token.sequence) continue;
      ++later;
      if (IsCheckpoint(batch()[i].position)) ++checkpoints;
    }
    return later == 0 || (IsCheckpoint(token.position) && checkpoints < Kept());
  }

  // Drops the states of `seq`, except for those at the positions `kept`, the
  // pinned ones, and the last checkpoints, those at the positions `added`
  // included (R4).
  void KeepStates(int seq, std::set<std::int64_t> kept,
                  const std::set<std::int64_t>& added) {
    std::set<std::int64_t, std::greater<>> checkpoints;
    for (const Cell& cell : cells_) {
      const bool is = cell.Holds(seq) && IsCheckpoint(cell.position);
      if (is) checkpoints.insert(cell.position);
    }
    for (const std::int64_t position : added) {
      if (IsCheckpoint(position)) checkpoints.insert(position);
    }
    int left = Kept();
    for (const std::int64_t position : checkpoints) {
      if (left-- > 0) kept.insert(position);
    }
    for (Cell& cell : cells_) {
      if (kept.contains(cell.position)) continue;
      if (!cell.pinned_by.contains(seq)) cell.sequences.erase(seq);
    }
  }

  // Puts each stored state of the batch in a cell (R5); false: no room.
  bool Place() {
    std::vector<std::size_t> stored;
    for (std::size_t i = 0; i < batch().size(); ++i) {
      if (IsStored(i)) stored.push_back(i);
    }
    const std::vector<int> cells = FindCells(stored.size());
    if (cells.empty()) return false;
    batch_cells().assign(batch().size(), -1);
    for (std::size_t i = 0; i < stored.size(); ++i) {
      const BatchToken& token = batch()[stored[i]];
      batch_cells()[stored[i]] = cells[i];
      Store(token, CellAt(cells[i]));
    }
    return true;
  }

  // All tokens of a sequence see the state before the batch (R6), or that of
  // the last draft of an earlier batch that they follow (R12).
  bool Sees(const BatchToken& token, const Cell& cell) const override {
    int number = token.draft >= 0 ? token.parent : kCommitted;
    for (std::size_t i = batch().size(); i-- > 0 && number >= 0;) {
      const BatchToken& other = batch()[i];
      const bool same = other.sequence == token.sequence;
      if (same && other.draft == number) number = other.parent;
    }
    if (number >= 0) {
      return cell.drafted_by == token.sequence && cell.draft == number;
    }
    return cell.Holds(token.sequence) &&
           cell.position == read_.at(token.sequence);
  }

  void DoGiveBack() override {
    for (const int i : batch_cells()) {
      if (i >= 0) CellAt(i) = {};
    }
  }

  // The path is like an ordinary batch: it leaves its last state, its last
  // checkpoints and the state before it (R13).
  void DoCommit(int seq, std::span<const int> path) override {
    const std::int64_t before = LastState(seq);
    CausalCache::DoCommit(seq, path);
    if (!path.empty()) KeepStates(seq, {before, LastState(seq)}, {});
  }

  // Pins the last state. If there are too many pins, the first is undone (R14).
  void DoCheckpoint(int seq) override {
    const std::int64_t last = LastState(seq);
    std::map<std::int64_t, Cell*> pinned;
    for (Cell& cell : cells_) {
      if (!cell.Holds(seq)) continue;
      if (cell.position == last) cell.pinned_by.insert(seq);
      if (cell.pinned_by.contains(seq)) pinned[cell.position] = &cell;
    }
    if (std::ssize(pinned) <= spec_.pins) return;
    pinned.begin()->second->pinned_by.erase(seq);
  }

  // A copy has the pins of its states (R15).
  void DoCopyPrefix(int src, int dst, std::int32_t len) override {
    CausalCache::DoCopyPrefix(src, dst, len);
    for (Cell& cell : cells_) {
      const bool pinned = cell.Holds(dst) && cell.pinned_by.contains(src);
      cell.pinned_by.erase(dst);
      if (pinned) cell.pinned_by.insert(dst);
    }
  }
  void DoCommitRemove(int seq, std::int32_t begin, std::int32_t end) override {
    CausalCache::DoCommitRemove(seq, begin, end);
    for (Cell& cell : cells_) {
      if (!cell.Holds(seq)) cell.pinned_by.erase(seq);
    }
  }

  bool DoCanResume(int seq, std::int32_t pos) const override {  // (R8)
    return pos == 0 || std::ranges::any_of(cells_, [&](const Cell& cell) {
             return cell.Holds(seq) && cell.position == pos - 1;
           });
  }

  Status DoPrepareRemove(int seq, std::int32_t begin,
                         std::int32_t end) override {
    if (end == kOpenEnd || begin > LastState(seq)) return {};
    return {kNotSupported, "a state is of all its tokens"};  // (R10)
  }

  // For each sequence of the batch, the position of the state that it reads, -1
  // if it is empty.
  std::map<int, std::int64_t> read_;
};

}  // namespace

std::unique_ptr<GuardedCache> MakeCausal(const CacheSpec& spec) {
  KVTWIN_ASSERT(spec.kind != Kind::kEncoder && !IsWrapper(spec.kind));
  if (spec.kind == Kind::kRecurrent) {
    return std::make_unique<RecurrentCache>(spec);
  }
  return std::make_unique<CausalCache>(spec);
}

}  // namespace kvtwin::reference
