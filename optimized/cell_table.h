// Which cell holds which token of which sequences: a cache without its rows.
//
// The positions of the cells are one flat array. Ownership is not stored at the
// cell: every sequence has a CellSet, so that questions about many cells are
// answered for 64 cells at a time. For each such word the table keeps the
// lowest and highest position of its used cells, so that words that lie wholly
// inside or outside of a range are not searched, and which of its cells are
// shared.
//
// Bytes per cell: 4 for the position, 1/8 for the range of its word, 1/8 each
// for the free and the shared bit, 3/16 to 3/8 for free runs. Bytes per
// sequence: at most 1/8 for each cell of the table, and at most 64 for each
// cell of the sequence; in caches with a window 8 more for each cell of the
// sequence, for their order. Pages that were never used are not in memory.

#ifndef KVTWIN_OPTIMIZED_CELL_TABLE_H_
#define KVTWIN_OPTIMIZED_CELL_TABLE_H_

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/index.h"
#include "kvtwin/cache.h"
#include "optimized/aligned_buffer.h"
#include "optimized/bit_tree.h"
#include "optimized/cell_order.h"
#include "optimized/cell_set.h"
#include "optimized/id_map.h"
#include "optimized/kernels.h"
#include "optimized/run_tree.h"

namespace kvtwin::optimized {

// A stored sequence has at least one cell.
struct Sequence {
  explicit Sequence(std::size_t cells) : members(cells) {}

  int id = 0;
  CellSet members;
  std::size_t count = 0;  // Number of its cells.
  PosRange extremes;      // Its lowest and highest position.
  std::size_t live_index = 0;
  bool reserved = false;  // Its object never allocates.

  // The words whose cells or positions changed last: change number i is at i %
  // kRecent. The numbers continue when another sequence takes this object.
  static constexpr std::size_t kRecent = 32;
  std::uint64_t changes = 0;
  std::array<std::uint32_t, kRecent> recent = {};
  void Changed(std::size_t w) {
    recent[changes++ % kRecent] = static_cast<std::uint32_t>(w);
  }

  CellOrder order;

  // All its cells at positions >= since lie in [since_first, since_last].
  std::int64_t since = 0;
  std::size_t since_first = 0;
  std::size_t since_last = 0;

  // Its lowest position in batch number `batch`, if it is in that batch.
  std::uint64_t batch = 0;
  std::int32_t batch_low = 0;
};

// Selected cells of one sequence. Callers keep and reuse it, because it has a
// word for each word of the table.
struct Selection {
  std::size_t begin = 0;  // Words [begin, end) are meant, the rest is stale.
  std::size_t end = 0;
  std::size_t count = 0;  // The number of cells.
  std::vector<std::uint64_t> words;
};

// Calls visit(cell) for every selected cell, in order.
template <class Visit>
void ForEachCell(const Selection& cells, const Visit& visit) {
  for (std::size_t w = cells.begin; w < cells.end; ++w) {
    for (std::uint64_t left = cells.words[w]; left != 0; left &= left - 1) {
      visit(w * kWordBits + AsSize(std::countr_zero(left)));
    }
  }
}

// From the first to the last cell, both included.
struct CellBounds {
  std::size_t first;
  std::size_t last;
};

// The token in `from` now lies in `to`.
struct CellMove {
  std::size_t from;
  std::size_t to;
};

class CellTable {
 public:
  // This many sequences exist from the start, and never allocate later.
  // `max_ordered`: the number of cells of a sequence that are kept in order, 0
  // if none are. Requires: 1 <= cells <= INT32_MAX.
  CellTable(std::size_t cells, std::size_t sequences, std::size_t max_ordered);

  std::size_t size() const { return free_.size(); }
  std::size_t free_count() const { return free_count_; }
  const BitTree& free() const { return free_; }
  const std::int32_t* positions() const {
    return positions_.as<std::int32_t>();
  }
  // For each word, the lowest and highest position of its used cells,
  // {INT32_MAX, -1} if it has none.
  const PosRange* ranges() const { return ranges_.as<PosRange>(); }
  // The stored sequences that got cells since the last ClearGrown, or were
  // marked by Grows, in unspecified order.
  std::span<Sequence* const> grown() const {
    return std::span(live_).first(grown_count_);
  }
  void Grows(Sequence& sequence) {
    if (sequence.live_index >= grown_count_) Exchange(sequence, grown_count_++);
  }
  void ClearGrown() { grown_count_ = 0; }

  // Returns null if the sequence is not stored.
  Sequence* Find(int id) const { return by_id_.Find(id); }

  // The first cell of the first `count` free cells in a row, or kNone.
  std::size_t FindRun(std::size_t count);
  // The first `count` free cells. Requires: count <= free_count().
  void FindFree(std::size_t count, std::vector<int>& out) const;

  void Clear();

  // Puts a token in a cell. If the cell is in use, it becomes shared, and the
  // position must match.
  Sequence& Add(int id, std::size_t cell, std::int32_t position);

  // The same in two steps, for the token of a draft, which no sequence holds
  // yet: Take makes a free cell used, and Join gives a used cell that has no
  // owner to a sequence.
  void Take(std::size_t cell, std::int32_t position);
  void Join(int id, std::size_t cell);
  // Makes cells of word w free that have no owner.
  void Give(std::size_t w, std::uint64_t cells);

  // The cells of `sequence` at positions in `range`.
  void Select(const Sequence& sequence, PosRange range, Selection& out) const;
  // The first and last cell of the sequence at positions >= since. Fast if
  // `since` never decreases from call to call. Requires: there is such a cell.
  CellBounds Since(Sequence& sequence, std::int32_t since) const;
  // The cells of the sequence at positions in `range`, by position. Requires:
  // ordered().
  std::span<const std::int32_t> CellsAt(Sequence& sequence,
                                        PosRange range) const;
  bool ordered() const { return max_ordered_ > 0; }

  // The cells of word w that several sequences hold.
  std::uint64_t shared(std::size_t w) const {
    return shared_.as<std::uint64_t>()[w];
  }

  // The selected cells leave the sequence; cells that no other sequence holds
  // become free. Afterwards `extremes` may be wrong and the sequence may be
  // empty: call FinishUpdate next.
  void Drop(Sequence& sequence, const Selection& cells);
  // Does the same for one cell.
  void DropCell(Sequence& sequence, std::size_t cell);
  // Does the same for the cells at positions <= last, and calls FinishUpdate.
  // Requires: ordered().
  void DropOldest(Sequence& sequence, std::int32_t last);
  // Finishes a change: recomputes the extremes if they are stale, and removes
  // the sequence (the reference then dangles) if it has no cells.
  void FinishUpdate(Sequence& sequence, bool stale);

  // Adds `offset` to the positions of the selected cells. The selection is all
  // cells from some position on, and the other cells stay below them. Call
  // FinishUpdate next. Requires: no other sequence holds the selected cells;
  // offset <= 0.
  void AddToSelected(Sequence& sequence, const Selection& cells,
                     std::int32_t offset);

  // Sequence `id` gets the cells of src at positions < len. Requires: `id` is
  // not stored.
  void CopyPrefix(const Sequence& src, int id, std::int32_t len,
                  Selection& scratch);

  // Fills the lowest hole from the highest used cell until no hole lies below a
  // used cell. Writes these moves to `moves`. No cell is in two moves, so that
  // they can be carried out in any order.
  void Defrag(std::vector<CellMove>& moves);

  // Replaces `out` by all memberships, sorted by cell, then by sequence.
  void List(std::vector<CellEntry>& out) const;

 private:
  // The words from a sequence's first to its last cell.
  struct Extent {
    std::size_t begin;
    std::size_t end;
  };
  static Extent ExtentOf(const Sequence& sequence);
  // The result is valid until the next call.
  Members MembersIn(const Sequence& sequence, Extent extent) const;

  // Exchanges the places in live_ of a sequence and of the sequence at `index`.
  void Exchange(Sequence& sequence, std::size_t index) {
    std::swap(live_[sequence.live_index], live_[index]);
    std::swap(sequence.live_index, live_[sequence.live_index]->live_index);
  }
  Sequence* Make();
  Sequence& New(int id);
  void Release(Sequence& sequence);
  void DropFromWord(Sequence& sequence, std::size_t w, std::uint64_t leaving);
  std::uint64_t SharedByOthers(const Sequence& sequence, std::size_t w,
                               std::uint64_t cells) const;
  void UpdateRange(std::size_t w);

  // The number of cells of a sequence that are kept in order.
  const std::size_t max_ordered_;
  AlignedBuffer positions_;  // Padded to whole words.
  AlignedBuffer ranges_;     // Position range of each word.
  AlignedBuffer shared_;     // Shared cells of each word.
  BitTree free_;
  RunTree free_runs_;
  std::size_t free_count_;
  IdMap<Sequence> by_id_;
  std::vector<Sequence*> live_;
  std::vector<Sequence*> spare_;
  std::vector<Sequence*> spare_reserved_;  // Taken first.
  // Owns live_ and both spare lists.
  std::vector<std::unique_ptr<Sequence>> all_;
  std::vector<std::size_t> targets_;  // Scratch of Defrag.
  std::size_t grown_count_ = 0;  // The first this many of live_ are grown().
  mutable AlignedBuffer words_;  // Scratch of MembersIn.
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_CELL_TABLE_H_
