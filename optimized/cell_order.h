// The cells of one sequence by position, for caches that forget: which cell
// leaves next is known without looking at the others.

#ifndef KVTWIN_OPTIMIZED_CELL_ORDER_H_
#define KVTWIN_OPTIMIZED_CELL_ORDER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "optimized/cell_set.h"

namespace kvtwin::optimized {

class CellOrder {
 public:
  // Nothing is known until Clear. No allocation for up to `most` cells.
  void Reserve(std::size_t most) { cells_.reserve(2 * most + 1); }

  // Of no cells.
  void Clear() {
    cells_.clear();
    begin_ = 0;
    known_ = true;
  }
  // Other cells left, or positions changed.
  void Forget() { known_ = false; }

  // A new cell. Only one at the end is worth to be kept in order.
  void Add(std::size_t cell, const std::int32_t* positions) {
    const auto added = static_cast<std::int32_t>(cell);
    known_ = known_ && (begin_ == cells_.size() ||
                        positions[cells_.back()] <= positions[added]);
    if (known_) cells_.push_back(added);
  }

  // The `count` cells at the lowest positions leave.
  void DropFirst(std::size_t count) {
    begin_ += count;
    if (2 * begin_ <= cells_.size()) return;
    cells_.erase(cells_.begin(),
                 cells_.begin() + static_cast<std::ptrdiff_t>(begin_));
    begin_ = 0;
  }

  // `members` are its cells.
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
  std::vector<std::int32_t> cells_;  // From begin_ on.
  std::size_t begin_ = 0;
  bool known_ = false;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_CELL_ORDER_H_
