#include "core/dense_tensor.h"

#include <array>
#include <bit>
#include <cstring>

#include "core/elements.h"

namespace kvtwin {

DenseTensor FilledTensor(DType dtype, const Shape& shape, float value) {
  DenseTensor tensor{dtype, shape,
                     std::vector<std::byte>(DenseBytes(dtype, shape))};
  if (value == 0) return tensor;
  std::array<std::byte, 4> element{};
  StoreElement(value, element.data(), dtype);
  for (std::size_t at = 0; at < tensor.bytes.size(); at += SizeOf(dtype)) {
    std::memcpy(&tensor.bytes[at], element.data(), SizeOf(dtype));
  }
  return tensor;
}

DenseTensor ZerosLike(const TensorView& like) {
  return FilledTensor(like.dtype, like.shape, 0);
}

std::byte* WriteDense(const TensorView& from, DType dtype, std::byte* to) {
  const std::size_t size = SizeOf(dtype);
  const auto run = static_cast<std::size_t>(RunBytes(dtype, from.shape[0]));
  const bool as_is =
      from.dtype == dtype && from.stride[0] == static_cast<std::int64_t>(size);
  for (std::int64_t l = 0; l < from.shape[3]; ++l) {
    for (std::int64_t k = 0; k < from.shape[2]; ++k) {
      for (std::int64_t j = 0; j < from.shape[1]; ++j) {
        if (as_is) {
          std::memcpy(to, from.at(0, j, k, l), run);
          to += run;
          continue;
        }
        for (std::int64_t i = 0; i < from.shape[0]; ++i, to += size) {
          CopyElement(from.at(i, j, k, l), from.dtype, to, dtype);
        }
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

Status ShiftStored(const Shift& shift, int layer, std::int32_t offset,
                   DenseTensor& key) {
  if (offset == 0 || shift.kind == ShiftKind::kIdentity) return {};
  const std::size_t size = SizeOf(key.dtype);
  std::vector<float> row(static_cast<std::size_t>(key.view().elements()));
  for (std::size_t i = 0; i < row.size(); ++i) {
    row[i] = LoadElement(&key.bytes[i * size], key.dtype);
  }
  const std::vector<float> before = row;
  Status status = ShiftRow(shift, layer, offset, static_cast<int>(key.shape[0]),
                           static_cast<int>(key.shape[1]), row);
  if (!status.ok()) return status;
  for (std::size_t i = 0; i < row.size(); ++i) {
    // As bits: a zero may change its sign, a NaN stays what it is.
    if (std::bit_cast<std::uint32_t>(row[i]) ==
        std::bit_cast<std::uint32_t>(before[i])) {
      continue;
    }
    StoreElement(row[i], &key.bytes[i * size], key.dtype);
  }
  return {};
}

}  // namespace kvtwin
