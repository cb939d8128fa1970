// What a mask says, whatever its dtype: nobody else looks at its bytes.

#ifndef KVTWIN_CORE_MASK_ELEMENTS_H_
#define KVTWIN_CORE_MASK_ELEMENTS_H_

#include <cstdint>

#include "kvtwin/tensor.h"

namespace kvtwin {

// An element of f32, f16 and bf16 is 0 or -inf, bit for bit, or it is wrong.
enum class MaskElement { kAllows, kHides, kNeither };

// Requires: a mask, and an element of it.
MaskElement MaskElementAt(const TensorView& mask, std::int64_t column,
                          std::int64_t row);

// Whether the row may attend to the column's cell.
inline bool MaskAllows(const TensorView& mask, std::int64_t column,
                       std::int64_t row) {
  return MaskElementAt(mask, column, row) == MaskElement::kAllows;
}

// A mask that hides everything, and how to make it allow one element.
DenseTensor HidingMask(DType dtype, std::int64_t columns, std::int64_t rows);
void AllowInMask(DenseTensor& mask, std::int64_t column, std::int64_t row);

}  // namespace kvtwin

#endif  // KVTWIN_CORE_MASK_ELEMENTS_H_
