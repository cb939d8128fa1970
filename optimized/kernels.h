// The inner loops over cells, each compiled for every instruction set (see
// targets.h). Results are bit-identical on all targets.

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

// Some words of a set of cells. Each word is 64 cells, and has their positions,
// their free bits, and the lowest and highest position of its used cells.
// Positions of cells outside of the set may be anything, but must be readable.
struct Members {
  const std::int32_t* positions;
  const std::uint64_t* words;
  const std::uint64_t* free;
  const PosRange* ranges;
  std::size_t word_count;
};

// Writes to selected[w] the members in word w at positions in `range`. Returns
// the number of selected cells.
std::size_t SelectCells(Members members, PosRange range,
                        std::uint64_t* selected);

// The first and the last member at a position in `range`, counted from the
// first cell of the first word; SIZE_MAX if there is none.
std::size_t FirstCellIn(Members members, PosRange range);
std::size_t LastCellIn(Members members, PosRange range);

// The lowest and highest position of the members; {INT32_MAX, -1} if there are
// none.
PosRange Extremes(Members members);

// The lowest and highest of the positions of the cells in the word `cells`;
// {INT32_MAX, -1} if it is empty.
PosRange RangeOf(const std::int32_t* positions, std::uint64_t cells);

// Adds `offset` to the positions of the cells in the word `cells`. Requires: no
// position overflows.
void AddToPositions(std::int32_t* positions, std::uint64_t cells,
                    std::int32_t offset);

// Lists the cells of a word whose first cell is `first`, and returns how many
// there are. Requires: `out` has room for 64 cells; entries past the result may
// be overwritten. (Not checked: a pointer does not know how much room it has.)
std::size_t ListCells(std::uint64_t cells, std::int32_t first,
                      std::int32_t* out);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_KERNELS_H_
