// The cells of one sequence in order of position, for caches that evict: the
// next cell to leave is found without a search.

#ifndef KVTWIN_OPTIMIZED_CELL_ORDER_H_
#define KVTWIN_OPTIMIZED_CELL_ORDER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/index.h"
#include "optimized/cell_set.h"

namespace kvtwin::optimized {

class CellOrder {
 public:
  // The order is unknown until Clear or Cells. Adding up to `max` cells does
  // not allocate.
  void Reserve(std::size_t max) { cells_.reserve(2 * max + 1); }

  // Makes the order empty and known.
  void Clear() {
    cells_.clear();
    begin_ = 0;
    known_ = true;
  }
  // Marks the order as unknown: other cells left, or positions changed.
  void Invalidate() { known_ = false; }

  // Adds a new cell. The order stays known only if the cell goes at its end.
  void Add(std::size_t cell, const std::int32_t* positions) {
    const auto added = static_cast<std::int32_t>(cell);
    known_ = known_ && (begin_ == cells_.size() ||
                        positions[cells_.back()] <= positions[added]);
    if (known_) cells_.push_back(added);
  }

  // Drops the `count` cells at the lowest positions.
  void DropFirst(std::size_t count) {
    begin_ += count;
    if (2 * begin_ <= cells_.size()) return;
    cells_.erase(cells_.begin(), IteratorAt(cells_, begin_));
    begin_ = 0;
  }

  // The cells in order; sorts `members`, the sequence's cells, if the order is
  // unknown.
  std::span<const std::int32_t> Cells(const CellSet& members,
                                      const std::int32_t* positions) {
    if (!known_) {
      Clear();
      for (std::size_t cell = members.First(); cell != kNone;
           cell = members.Next(cell + 1)) {
        cells_.push_back(static_cast<std::int32_t>(cell));
      }
      std::sort(cells_.begin(), cells_.end(),
                [&](auto a, auto b) { return positions[a] < positions[b]; });
    }
    return std::span<const std::int32_t>(cells_).subspan(begin_);
  }

 private:
  std::vector<std::int32_t> cells_;  // Valid from begin_ on.
  std::size_t begin_ = 0;
  bool known_ = false;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_CELL_ORDER_H_
