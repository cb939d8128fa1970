// Which cell holds which token of which sequences: the cache without its rows.
//
// A cell's position is in one flat array. Who owns it is not written at the
// cell: every sequence has a BitTree of its cells, so that whatever is asked
// about many cells is answered for 64 of them at a time. The owners of a cell
// besides one sequence are the OR of the other sequences' words.

#ifndef KVTWIN_OPTIMIZED_CELL_TABLE_H_
#define KVTWIN_OPTIMIZED_CELL_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvtwin/cache.h"
#include "optimized/aligned_buffer.h"
#include "optimized/bit_tree.h"
#include "optimized/id_map.h"
#include "optimized/kernels.h"

namespace kvtwin::optimized {

// A sequence that is stored: it has at least one cell.
struct Sequence {
  explicit Sequence(std::size_t cells) : members(cells) {}

  int id = 0;
  BitTree members;
  std::size_t count = 0;  // Of its cells.
  PosRange extremes;      // Its lowest and highest position.
  std::size_t live_index = 0;

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

// The token in `from` now lies in `to`.
struct CellMove {
  std::size_t from;
  std::size_t to;
};

class CellTable {
 public:
  // Requires: 1 <= cells <= INT32_MAX.
  explicit CellTable(std::size_t cells);

  std::size_t size() const { return free_.size(); }
  std::size_t free_count() const { return free_count_; }
  const BitTree& free() const { return free_; }
  const std::int32_t* positions() const {
    return positions_.as<std::int32_t>();
  }
  // All that are stored, in no order that means anything.
  const std::vector<Sequence*>& sequences() const { return live_; }

  // Null if it is not stored.
  Sequence* Find(int id) const { return by_id_.Find(id); }

  // The first cell of the first `count` free cells in a row, or kNone.
  std::size_t FindRun(std::size_t count) const;

  void Clear();

  // Puts a token in a cell. One that is held already is shared then; its
  // position is the same.
  Sequence& Add(int id, std::size_t cell, std::int32_t position);

  // The cells of `sequence` at positions in `range`.
  void Select(const Sequence& sequence, PosRange range, Selection& out) const;
  // The first and the last of them. Requires: there is one.
  std::size_t FirstIn(const Sequence& sequence, PosRange range) const;
  std::size_t LastIn(const Sequence& sequence, PosRange range) const;

  // The cells of word w that others than `sequence` own.
  std::uint64_t OwnedByOthers(const Sequence& sequence, std::size_t w) const;

  // The selected cells leave the sequence; those that nobody else owns become
  // free. `extremes` may be wrong, or there may be no cells: Settle is next.
  void Drop(Sequence& sequence, const Selection& cells);
  // Ends a change: computes the extremes if they are stale, and forgets the
  // sequence (the reference dangles then) if it has no cells.
  void Settle(Sequence& sequence, bool stale);

  // The selected cells' positions change. Settle is next.
  void AddToSelected(const Selection& cells, std::int32_t offset);

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
  Members MembersIn(const Sequence& sequence, Extent extent) const;

  Sequence& New(int id);
  void Release(Sequence& sequence);

  AlignedBuffer positions_;  // A whole number of words.
  BitTree free_;
  std::size_t free_count_;
  IdMap<Sequence> by_id_;
  std::vector<Sequence*> live_;
  std::vector<Sequence*> spare_;
  std::vector<std::unique_ptr<Sequence>> all_;  // live_ and spare_.
  std::vector<std::size_t> targets_;            // Defrag's.
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_CELL_TABLE_H_
