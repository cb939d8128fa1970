// Which cell holds which token of which sequences: the cache without its rows.
//
// A cell's position is in one flat array. Who owns it is not written at the
// cell: every sequence has a CellSet, so that whatever is asked
// about many cells is answered for 64 of them at a time. For each such word the
// lowest and highest position of its used cells is kept, so that words that are
// wholly within or without a range are not looked into, and which of its cells
// have several owners.
//
// Bytes for each cell: 4 for the position, 1/8 for the range of its word, 1/8
// each for being free and shared, 3/16 to 3/8 for free runs. For each sequence
// no more than 1/8 for each cell of the table and 64 for each of its own, and
// in caches with a window 8 more for the order of its own cells. Pages that
// were never needed are not in memory.

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

#include "kvtwin/cache.h"
#include "optimized/aligned_buffer.h"
#include "optimized/bit_tree.h"
#include "optimized/cell_order.h"
#include "optimized/cell_set.h"
#include "optimized/id_map.h"
#include "optimized/kernels.h"
#include "optimized/run_tree.h"

namespace kvtwin::optimized {

// A sequence that is stored: it has at least one cell.
struct Sequence {
  explicit Sequence(std::size_t cells) : members(cells) {}

  int id = 0;
  CellSet members;
  std::size_t count = 0;  // Of its cells.
  PosRange extremes;      // Its lowest and highest position.
  std::size_t live_index = 0;
  bool reserved = false;  // It never allocates.

  // The words whose cells or positions changed last: change number i is at
  // i % kRecent. Numbers go on when the object becomes another sequence.
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

// Cells of one sequence. Kept by its users, for it has a word for each word of
// the table.
struct Selection {
  std::size_t begin = 0;  // Words [begin, end) are meant, the rest is stale.
  std::size_t end = 0;
  std::size_t count = 0;  // Of cells.
  std::vector<std::uint64_t> words;
};

// Calls visit(cell) for every selected cell, in order.
template <class Visit>
void ForEachCell(const Selection& cells, const Visit& visit) {
  for (std::size_t w = cells.begin; w < cells.end; ++w) {
    for (std::uint64_t left = cells.words[w]; left != 0; left &= left - 1) {
      visit(w * kWordBits + static_cast<std::size_t>(std::countr_zero(left)));
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
  // For so many sequences nothing is allocated later on. `most`: cells of one
  // sequence that are kept in order, 0 if none are. Requires: 1 <= cells <=
  // INT32_MAX.
  CellTable(std::size_t cells, std::size_t sequences, std::size_t most);

  std::size_t size() const { return free_.size(); }
  std::size_t free_count() const { return free_count_; }
  const BitTree& free() const { return free_; }
  const std::int32_t* positions() const {
    return positions_.as<std::int32_t>();
  }
  // For each word, the lowest and highest position of its cells that are used,
  // {INT32_MAX, -1} if none is.
  const PosRange* ranges() const { return ranges_.as<PosRange>(); }
  // The stored sequences that got cells since the last ForgetGrown, or were
  // marked by Grows, in no order that means anything.
  std::span<Sequence* const> grown() const {
    return std::span(live_).first(grown_count_);
  }
  void Grows(Sequence& sequence) {
    if (sequence.live_index >= grown_count_) Exchange(sequence, grown_count_++);
  }
  void ForgetGrown() { grown_count_ = 0; }

  // Null if it is not stored.
  Sequence* Find(int id) const { return by_id_.Find(id); }

  // The first cell of the first `count` free cells in a row, or kNone.
  std::size_t FindRun(std::size_t count);
  // The first `count` free cells. Requires: there are as many.
  void FindFree(std::size_t count, std::vector<int>& out) const;

  void Clear();

  // Puts a token in a cell. One that is held already is shared then; its
  // position is the same.
  Sequence& Add(int id, std::size_t cell, std::int32_t position);

  // The cells of `sequence` at positions in `range`.
  void Select(const Sequence& sequence, PosRange range, Selection& out) const;
  // The first and the last of its cells at positions >= since. Quick if it is
  // asked for ever later positions. Requires: there is one.
  CellBounds Since(Sequence& sequence, std::int32_t since) const;
  // Its cells at positions in `range`, by position. Requires: cells are kept in
  // order.
  std::span<const std::int32_t> CellsAt(Sequence& sequence,
                                        PosRange range) const;
  bool ordered() const { return most_ > 0; }

  // The cells of word w that several sequences own.
  std::uint64_t shared(std::size_t w) const {
    return shared_.as<std::uint64_t>()[w];
  }

  // The selected cells leave the sequence; those that nobody else owns become
  // free. `extremes` may be wrong, or there may be no cells: Settle is next.
  void Drop(Sequence& sequence, const Selection& cells);
  // The same for one cell.
  void DropCell(Sequence& sequence, std::size_t cell);
  // The same for its cells at positions <= last, and settles. Requires: cells
  // are kept in order.
  void DropOldest(Sequence& sequence, std::int32_t last);
  // Ends a change: computes the extremes if they are stale, and forgets the
  // sequence (the reference dangles then) if it has no cells.
  void Settle(Sequence& sequence, bool stale);

  // The positions of the sequence's selected cells change: of all from some
  // position on, and its others stay below them. Settle is next. Requires:
  // nobody else owns them; offset <= 0.
  void AddToSelected(Sequence& sequence, const Selection& cells,
                     std::int32_t offset);

  // `id` gets the cells of src at positions < len. Requires: `id` is not
  // stored.
  void CopyPrefix(const Sequence& src, int id, std::int32_t len,
                  Selection& scratch);

  // Fills the lowest hole from the highest used cell until no hole lies below
  // a used cell. Replaces `moves` by what it did. No cell is in two moves, so
  // that they can be followed in any order.
  void Defrag(std::vector<CellMove>& moves);

  // Replaces `out` by all memberships, by cell, then by sequence.
  void List(std::vector<CellEntry>& out) const;

 private:
  // The words from a sequence's first to its last cell.
  struct Extent {
    std::size_t begin;
    std::size_t end;
  };
  static Extent ExtentOf(const Sequence& sequence);
  // Until the next call.
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
  std::uint64_t SharedByOthers(const Sequence& sequence, std::size_t w) const;
  void UpdateRange(std::size_t w);

  const std::size_t most_;   // Cells of a sequence in order.
  AlignedBuffer positions_;  // A whole number of words.
  AlignedBuffer ranges_;     // For each word,
  AlignedBuffer shared_;     // and which of its cells.
  BitTree free_;
  RunTree free_runs_;
  std::size_t free_count_;
  IdMap<Sequence> by_id_;
  std::vector<Sequence*> live_;
  std::vector<Sequence*> spare_;
  std::vector<Sequence*> spare_reserved_;       // They are taken first.
  std::vector<std::unique_ptr<Sequence>> all_;  // live_ and both spare_.
  std::vector<std::size_t> targets_;            // Defrag's.
  std::size_t grown_count_ = 0;  // Of live_: the first so many are grown().
  mutable AlignedBuffer words_;  // Scratch of MembersIn.
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_CELL_TABLE_H_
