// Rows of any dtype as f32 numbers, and access to single elements of the views
// that a cache or a pool returns. docs/dtypes.md says how numbers are rounded
// and how blocks are stored.

#ifndef KVTWIN_ROWS_H_
#define KVTWIN_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvtwin/status.h"
#include "kvtwin/tensor.h"

namespace kvtwin {

// Convert a run of elements: from a stored row, exactly, and to a stored row,
// rounded to the nearest. A row of `n` numbers has RunBytes(dtype, n) bytes, at
// any address. Errors: a dtype that rows cannot have; a size that does not fit;
// a block dtype whose number of elements is not a multiple of kBlockElements.
Status RowToF32(std::span<const std::byte> row, DType dtype,
                std::span<float> numbers);
Status RowFromF32(std::span<const float> numbers, DType dtype,
                  std::span<std::byte> row);

// Returns element (i, j, k, l) of K or V as a number. Requires: the view has a
// row dtype and memory of the CPU, and the element is inside its shape.
float ElementAsF32(const TensorView& view, std::int64_t i, std::int64_t j = 0,
                   std::int64_t k = 0, std::int64_t l = 0);

// Returns the stored element itself. `T` is float for f32; std::uint16_t, or a
// 16-bit float of the compiler, for f16 and bf16; std::uint8_t for f8. Elements
// of blocks and bits have no address. Requires: as ElementAsF32, and
// sizeof(T) == SizeOf(view.dtype).
template <class T>
const T& ElementOf(const TensorView& view, std::int64_t i, std::int64_t j = 0,
                   std::int64_t k = 0, std::int64_t l = 0) {
  return *reinterpret_cast<const T*>(view.at(i, j, k, l));
}

// Returns whether a mask of any mask dtype lets the batch's token `row` attend
// to `column`. Requires: the mask has memory of the CPU, and the element is
// inside its shape.
bool MayAttend(const TensorView& mask, std::int64_t column, std::int64_t row);

}  // namespace kvtwin

#endif  // KVTWIN_ROWS_H_
