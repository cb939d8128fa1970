// Checks of lists of cells, for builds with checks (core/assert.h). These
// functions do not allocate; they are fast for cells in order, as placement
// returns them.

#ifndef KVTWIN_OPTIMIZED_DISTINCT_H_
#define KVTWIN_OPTIMIZED_DISTINCT_H_

#include <algorithm>
#include <cstddef>
#include <functional>
#include <span>

#include "optimized/cell_table.h"

namespace kvtwin::optimized {

inline bool AreDistinct(std::span<const int> cells) {
  const auto unordered =
      std::ranges::adjacent_find(cells, std::greater_equal());
  if (unordered == cells.end()) return true;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    if (std::ranges::count(cells.subspan(i), cells[i]) > 1) return false;
  }
  return true;
}

// Whether no cell is in two moves, so that they can be made in any order.
inline bool AreIndependent(std::span<const CellMove> moves) {
  const auto unordered = [](const CellMove& move, const CellMove& next) {
    return move.from <= next.from || move.to >= next.to;
  };
  if (moves.empty()) return true;
  if (std::ranges::adjacent_find(moves, unordered) == moves.end()) {
    return moves.back().to < moves.back().from;
  }
  for (std::size_t i = 0; i < moves.size(); ++i) {
    const auto meets = [&](const CellMove& other) {
      return other.from == moves[i].from || other.from == moves[i].to ||
             other.to == moves[i].to;
    };
    if (std::ranges::count_if(moves, meets) > 1) return false;
  }
  return true;
}

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_DISTINCT_H_
