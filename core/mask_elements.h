// Reads and writes the elements of masks of any mask dtype, so that other code
// need not look at their bytes.

#ifndef KVTWIN_CORE_MASK_ELEMENTS_H_
#define KVTWIN_CORE_MASK_ELEMENTS_H_

#include <cstdint>

#include "kvtwin/tensor.h"

namespace kvtwin {

// A valid element of f32, f16 or bf16 is 0, of either sign, or -inf; any other
// is kNeither.
enum class MaskElement { kAllows, kHides, kNeither };

// Requires: `mask` has data, and the element is inside its shape.
MaskElement MaskElementAt(const TensorView& mask, std::int64_t column,
                          std::int64_t row);

// Whether some element of a row is kNeither. Requires: as MaskElementAt, and
// the elements of the row lie one after another.
bool HasNeither(const TensorView& mask, std::int64_t row);

// Whether the row may attend to the column's cell.
inline bool MaskAllows(const TensorView& mask, std::int64_t column,
                       std::int64_t row) {
  return MaskElementAt(mask, column, row) == MaskElement::kAllows;
}

// Returns a mask that hides everything; AllowInMask allows one element of it.
DenseTensor HidingMask(DType dtype, std::int64_t columns, std::int64_t rows);
void AllowInMask(DenseTensor& mask, std::int64_t column, std::int64_t row);

}  // namespace kvtwin

#endif  // KVTWIN_CORE_MASK_ELEMENTS_H_
