// Making and shifting dense tensors.

#ifndef KVTWIN_CORE_DENSE_TENSOR_H_
#define KVTWIN_CORE_DENSE_TENSOR_H_

#include <cstdint>

#include "core/shift_row.h"
#include "kvtwin/tensor.h"

namespace kvtwin {

// Every element is `value`; of a dtype of rows, unless that is 0.
DenseTensor FilledTensor(DType dtype, const Shape& shape, float value);

// Zeros, of the shape and dtype of `like`.
DenseTensor ZerosLike(const TensorView& like);

// Writes the elements of `from`, in its order, one run after another, rounded
// to `dtype` if they have another; both are of rows then. Returns where it
// stopped.
std::byte* WriteDense(const TensorView& from, DType dtype, std::byte* to);

// The same, as a tensor.
DenseTensor CopyOf(const TensorView& from, DType dtype);

// Entry `at` of dimension `dim`, which becomes 1.
inline TensorView Slice(const TensorView& view, std::size_t dim,
                        std::int64_t at) {
  TensorView slice = view;
  slice.data = static_cast<const std::byte*>(view.data) + view.stride[dim] * at;
  slice.shape[dim] = 1;
  return slice;
}

// V as [a, b, n], seen as [n, a, b]: what permuted encoders store.
TensorView PermutedView(const TensorView& value);

// Column `column` of a view of V, as [v_head_dim, kv_heads]; and how many there
// are. Of K, the layout is plain.
TensorView RowOf(const TensorView& view, VLayout layout, std::int64_t column);
std::int64_t ColumnsOf(const TensorView& view, VLayout layout);

// ShiftRow on a stored K row [k_head_dim, kv_heads]: converted to f32, shifted,
// rounded back. An error leaves `key` as it is; so does what moves nothing, bit
// for bit.
Status ShiftStored(const Shift& shift, int layer, std::int32_t offset,
                   DenseTensor& key);

}  // namespace kvtwin

#endif  // KVTWIN_CORE_DENSE_TENSOR_H_
