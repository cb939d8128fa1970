// Making and shifting dense tensors.

#ifndef KVTWIN_CORE_DENSE_TENSOR_H_
#define KVTWIN_CORE_DENSE_TENSOR_H_

#include <cstdint>

#include "core/shift_row.h"
#include "kvtwin/tensor.h"

namespace kvtwin {

// Returns a tensor whose elements all are `value`. Requires: IsRowDType(dtype),
// or `value` is 0.
DenseTensor FilledTensor(DType dtype, const Shape& shape, float value);

// Returns zeros with the shape and dtype of `like`.
DenseTensor ZerosLike(const TensorView& like);

// Writes the elements of `from` in its order, one run after another, rounded to
// `dtype` if that is another dtype. Returns the end of the written bytes.
// Requires: both dtypes are row dtypes if they differ.
std::byte* WriteDense(const TensorView& from, DType dtype, std::byte* to);

// Returns the same elements as a tensor.
DenseTensor CopyOf(const TensorView& from, DType dtype);

// Returns entry `at` of dimension `dim`, which becomes 1.
inline TensorView Slice(const TensorView& view, std::size_t dim,
                        std::int64_t at) {
  TensorView slice = view;
  slice.data = static_cast<const std::byte*>(view.data) + view.stride[dim] * at;
  slice.shape[dim] = 1;
  return slice;
}

// Views V of [a, b, n] as [n, a, b], the form that permuted encoders store.
TensorView PermutedView(const TensorView& value);

// Returns column `column` of a view of V, as [v_head_dim, kv_heads]; and the
// number of columns. For K, pass VLayout::kPlain.
TensorView RowOf(const TensorView& view, VLayout layout, std::int64_t column);
std::int64_t ColumnsOf(const TensorView& view, VLayout layout);

// Shifts a stored K row [k_head_dim, kv_heads]: converts it to f32, calls
// ShiftRow, and rounds back. An error, an offset of 0 or an identity shift
// leaves `key` as it is, bit for bit.
Status ShiftStored(const Shift& shift, int layer, std::int32_t offset,
                   DenseTensor& key);

}  // namespace kvtwin

#endif  // KVTWIN_CORE_DENSE_TENSOR_H_
