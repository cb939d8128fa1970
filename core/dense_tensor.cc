#include "core/dense_tensor.h"

#include <cstring>
#include <span>
#include <vector>

#include "core/assert.h"
#include "core/elements.h"
#include "core/index.h"

namespace kvtwin {

DenseTensor FilledTensor(DType dtype, const Shape& shape, float value) {
  KVTWIN_ASSERT(IsRowDType(dtype) || value == 0);
  DenseTensor tensor{dtype, shape,
                     std::vector<std::byte>(DenseBytes(dtype, shape))};
  if (value == 0) return tensor;
  TensorView repeated = DenseView(&value, DType::kF32, shape);
  repeated.stride = {};
  WriteDense(repeated, dtype, tensor.bytes.data());
  return tensor;
}

DenseTensor ZerosLike(const TensorView& like) {
  return FilledTensor(like.dtype, like.shape, 0);
}

std::byte* WriteDense(const TensorView& from, DType dtype, std::byte* to) {
  KVTWIN_ASSERT(from.dtype == dtype ||
                (IsRowDType(from.dtype) && IsRowDType(dtype)));
  const auto size = static_cast<std::int64_t>(SizeOf(dtype));
  const auto run = AsSize(RunBytes(dtype, from.shape[0]));
  const bool as_is = from.dtype == dtype && from.stride[0] == size;
  for (std::int64_t l = 0; l < from.shape[3]; ++l) {
    for (std::int64_t k = 0; k < from.shape[2]; ++k) {
      for (std::int64_t j = 0; j < from.shape[1]; ++j) {
        if (as_is) {
          std::memcpy(to, from.at(0, j, k, l), run);
        } else {
          CopyRun(from, j, k, l, to, size, dtype);
        }
        to += run;
      }
    }
  }
  return to;
}

DenseTensor CopyOf(const TensorView& from, DType dtype) {
  DenseTensor copy = FilledTensor(dtype, from.shape, 0);
  WriteDense(from, dtype, copy.bytes.data());
  return copy;
}

TensorView PermutedView(const TensorView& value) {
  TensorView permuted = value;
  permuted.shape = {value.shape[2], value.shape[0], value.shape[1],
                    value.shape[3]};
  permuted.stride = {value.stride[2], value.stride[0], value.stride[1],
                     value.stride[3]};
  return permuted;
}

TensorView RowOf(const TensorView& view, VLayout layout, std::int64_t column) {
  if (layout == VLayout::kPlain) return Slice(view, 2, column);
  const bool tiled = layout == VLayout::kTiled;
  TensorView row = tiled ? Slice(view, 3, column / kTileCells) : view;
  row = Slice(row, 0, tiled ? column % kTileCells : column);
  row.shape = {row.shape[1], row.shape[2], 1, 1};
  row.stride = {row.stride[1], row.stride[2], 0, 0};
  return row;
}

std::int64_t ColumnsOf(const TensorView& view, VLayout layout) {
  if (layout == VLayout::kPlain) return view.shape[2];
  return layout == VLayout::kTiled ? view.shape[0] * view.shape[3]
                                   : view.shape[0];
}

Status ShiftStored(const Shift& shift, int layer, std::int32_t offset,
                   DenseTensor& key) {
  if (offset == 0 || shift.kind == ShiftKind::kIdentity) return {};
  std::vector<float> row(AsSize(key.view().elements()));
  WriteDense(key.view(), DType::kF32,
             std::as_writable_bytes(std::span(row)).data());
  const std::vector<float> before = row;
  Status status = ShiftRow(shift, layer, offset, AsInt(key.shape[0]),
                           AsInt(key.shape[1]), row);
  if (!status.ok()) return status;
  // An element, or a block of them, keeps its bits unless it changes (S35).
  // Bits are compared: a zero that changes its sign has changed, a NaN has not.
  const std::size_t step = IsBlockDType(key.dtype) ? kBlockElements : 1;
  std::byte* to = key.bytes.data();
  for (std::size_t i = 0; i < row.size(); i += step) {
    if (std::memcmp(&row[i], &before[i], step * sizeof(float)) != 0) {
      const Shape run = {static_cast<std::int64_t>(step), 1, 1, 1};
      WriteDense(DenseView(&row[i], DType::kF32, run), key.dtype, to);
    }
    to += RunBytes(key.dtype, static_cast<std::int64_t>(step));
  }
  return {};
}

}  // namespace kvtwin
