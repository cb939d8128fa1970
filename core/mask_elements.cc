#include "core/mask_elements.h"

#include <cstddef>
#include <cstring>

#include "core/assert.h"
#include "core/index.h"

namespace kvtwin {
namespace {

// Returns the bits of -inf. Requires: not kBits, which has no -inf.
std::uint32_t Hiding(DType dtype) {
  KVTWIN_DCHECK(dtype != DType::kBits);
  if (dtype == DType::kF32) return 0xFF800000;
  return dtype == DType::kF16 ? 0xFC00 : 0xFF80;
}

// Returns the bits of -0.
std::uint32_t Sign(DType dtype) {
  return dtype == DType::kF32 ? 0x80000000 : 0x8000;
}

template <class T>
bool HasNeither(const std::byte* row, std::int64_t columns, DType dtype) {
  const T sign = static_cast<T>(Sign(dtype));
  const T hiding = static_cast<T>(Hiding(dtype));
  unsigned found = 0;
#pragma omp simd reduction(| : found)
  for (std::int64_t i = 0; i < columns; ++i) {
    T element;
    std::memcpy(&element, row + i * AsInt(sizeof(T)), sizeof(T));
    const bool valid = element == 0 || element == sign || element == hiding;
    found |= valid ? 0U : 1U;
  }
  return found != 0;
}

constexpr std::byte BitOf(std::int64_t column) {
  return std::byte{1} << column % 8;
}

}  // namespace

MaskElement MaskElementAt(const TensorView& mask, std::int64_t column,
                          std::int64_t row) {
  KVTWIN_DCHECK(mask.data != nullptr);
  KVTWIN_DCHECK(0 <= column && column < mask.shape[0]);
  KVTWIN_DCHECK(0 <= row && row < mask.shape[1]);
  if (mask.dtype == DType::kBits) {
    const std::byte byte = mask.at(0, row)[column / 8];
    return (byte & BitOf(column)) != std::byte{0} ? MaskElement::kAllows
                                                  : MaskElement::kHides;
  }
  // The machine is little-endian: the lowest byte comes first.
  std::uint32_t element = 0;
  std::memcpy(&element, mask.at(column, row), SizeOf(mask.dtype));
  if (element == 0 || element == Sign(mask.dtype)) return MaskElement::kAllows;
  return element == Hiding(mask.dtype) ? MaskElement::kHides
                                       : MaskElement::kNeither;
}

bool HasNeither(const TensorView& mask, std::int64_t row) {
  if (mask.dtype == DType::kBits) return false;
  const bool wide = mask.dtype == DType::kF32;
  const auto find =
      wide ? HasNeither<std::uint32_t> : HasNeither<std::uint16_t>;
  return find(mask.at(0, row), mask.shape[0], mask.dtype);
}

DenseTensor HidingMask(DType dtype, std::int64_t columns, std::int64_t rows) {
  const Shape shape = {columns, rows, 1, 1};
  DenseTensor mask{dtype, shape, {}};
  mask.bytes.resize(DenseBytes(dtype, shape));
  if (dtype == DType::kBits) return mask;
  const std::uint32_t hiding = Hiding(dtype);
  const std::size_t size = SizeOf(dtype);
  for (std::size_t at = 0; at < mask.bytes.size(); at += size) {
    std::memcpy(&mask.bytes[at], &hiding, size);
  }
  return mask;
}

void AllowInMask(DenseTensor& mask, std::int64_t column, std::int64_t row) {
  const std::int64_t begin = row * mask.view().stride[1];
  if (mask.dtype == DType::kBits) {
    At(mask.bytes, begin + column / 8) |= BitOf(column);
    return;
  }
  const auto size = static_cast<std::int64_t>(SizeOf(mask.dtype));
  std::memset(&At(mask.bytes, begin + column * size), 0, SizeOf(mask.dtype));
}

}  // namespace kvtwin
