// The mask of a pass: which cells of the view each batch token may attend to.

#ifndef KVTWIN_OPTIMIZED_MASK_H_
#define KVTWIN_OPTIMIZED_MASK_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvtwin/tensor.h"
#include "optimized/aligned_buffer.h"
#include "optimized/kernels.h"

namespace kvtwin::optimized {

// What one batch token may attend to: the cells of `members` (one bit each,
// null for none) at positions in `range`.
struct RowRule {
  const std::uint64_t* members;
  PosRange range;
};

// The cells of a view.
struct CellSpan {
  std::size_t first = 0;
  std::size_t end = 0;
  std::size_t size() const { return end - first; }
};

class Mask {
 public:
  // One row for each rule, then rows of -inf, `row_count` in all. Keeps its
  // memory from one call to the next.
  void Build(const std::int32_t* positions, std::span<const RowRule> rules,
             std::size_t row_count, CellSpan view, DType dtype);

  // [cells of the view, row_count].
  const TensorView& view() const { return view_; }

 private:
  AlignedBuffer buffer_;
  TensorView view_;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_MASK_H_
