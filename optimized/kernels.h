// The inner loops over cells, each compiled for every instruction set (see
// targets.h). What they compute does not depend on the target, to the bit.

#ifndef KVTWIN_OPTIMIZED_KERNELS_H_
#define KVTWIN_OPTIMIZED_KERNELS_H_

#include <cstddef>
#include <cstdint>

namespace kvtwin::optimized {

// Positions from first to last, both included; none if first > last.
struct PosRange {
  std::int32_t first = 0;
  std::int32_t last = 0;
};

// Some words of a set of cells, each word 64 cells, and for each word their
// positions, which of them are free, and the lowest and highest position of
// those that are not. Positions of cells outside of the set do not matter, but
// are there.
struct Members {
  const std::int32_t* positions;
  const std::uint64_t* words;
  const std::uint64_t* free;
  const PosRange* ranges;
  std::size_t word_count;
};

// Writes to selected[w] the cells of word w at positions in `range`. Returns
// how many there are in all.
std::size_t SelectCells(Members members, PosRange range,
                        std::uint64_t* selected);

// The first and the last cell at a position in `range`, counted from the first
// word's first cell; SIZE_MAX if there is none.
std::size_t FirstCellIn(Members members, PosRange range);
std::size_t LastCellIn(Members members, PosRange range);

// The lowest and highest position; {INT32_MAX, -1} without members.
PosRange Extremes(Members members);

// The lowest and highest of 64 positions, of those in `cells`; {INT32_MAX, -1}
// if that is none.
PosRange RangeOf(const std::int32_t* positions, std::uint64_t cells);

// Adds `offset` to 64 positions, to those in `cells`. Requires: none of them
// overflows.
void AddToPositions(std::int32_t* positions, std::uint64_t cells,
                    std::int32_t offset);

// Lists the cells of a word whose first cell is `first`, and returns how many
// they are. Requires: `out` has 64 places; those that are not needed may be
// written to.
std::size_t ListCells(std::uint64_t cells, std::int32_t first,
                      std::int32_t* out);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_KERNELS_H_
