// Tensors that somebody else owns: an address, a shape, byte strides.

#ifndef KVTWIN_TENSOR_H_
#define KVTWIN_TENSOR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvtwin {

// Element types. What the narrow ones do with a number is in docs/dtypes.md.
enum class DType {
  kF32,
  kF16,
  kBF16,  // The upper half of an f32.
  kF8,    // e4m3: 4 bits of exponent, 3 of mantissa, no infinities.
  kQ8,    // q8_0: blocks of 32 elements, an f16 scale and 8 bits each.
  kQ4,    // q4_0: the same with 4 bits.
  kBits,  // One bit for each element; see TensorView.
};

// Whether K and V rows can be of this type, or masks.
constexpr bool IsRowDType(DType dtype) { return dtype != DType::kBits; }
constexpr bool IsMaskDType(DType dtype) {
  return dtype <= DType::kBF16 || dtype == DType::kBits;
}

// Whether elements are stored in blocks that share a scale.
constexpr bool IsBlockDType(DType dtype) {
  return dtype == DType::kQ8 || dtype == DType::kQ4;
}

// Elements of such a block. Runs of them are of whole blocks.
inline constexpr std::int64_t kBlockElements = 32;

// Bytes of one element; 0 where elements have no address: of kBits and blocks.
constexpr std::size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kF8:
      return 1;
    default:
      return 0;
  }
}

// Bytes of `count` elements one after another; of kBits, whole 64-bit words.
constexpr std::int64_t RunBytes(DType dtype, std::int64_t count) {
  if (dtype == DType::kBits) return (count + 63) / 64 * 8;
  if (!IsBlockDType(dtype)) {
    return count * static_cast<std::int64_t>(SizeOf(dtype));
  }
  const int block = dtype == DType::kQ8 ? 2 + 32 : 2 + 16;
  return (count + kBlockElements - 1) / kBlockElements * block;
}

// "f32", "f16", "bf16", "f8_e4m3", "q8_0", "q4_0", "bits"; the other way,
// nothing for any other name.
std::string_view DTypeName(DType dtype);
std::optional<DType> DTypeFromName(std::string_view name);

// How the V rows of a cache lie, first dimension fastest.
enum class VLayout {
  kPlain,     // [v_head_dim, kv_heads, cells]
  kPermuted,  // [cells, v_head_dim, kv_heads]
  kTiled,     // [kTileCells, v_head_dim, kv_heads, cells / kTileCells]: read by
              // column like permuted rows, but those of a cell lie together.
};
inline constexpr int kTileCells = 32;

// Whose memory an address is of.
enum class Device { kCpu, kCuda };

// Up to four dimensions, first dimension fastest; unused ones are 1.
using Shape = std::array<std::int64_t, 4>;

// A tensor in memory that the view does not own. Element (i, j, k, l) lies
// stride[0]*i + stride[1]*j + stride[2]*k + stride[3]*l bytes after `data`. A
// null `data` means that there is no tensor (the mask of an encoder cache).
//
// Of kBits, element i of a run (j, k, l) is bit i % 8, the lowest being bit 0,
// of byte i / 8 after at(0, j, k, l): so a 64-bit word, read as little-endian,
// has element i in its bit i % 64. stride[0] is 0. Runs are whole 64-bit words,
// on 8-byte boundaries; the bits of the last one past shape[0] are 0.
//
// Of kQ8 and kQ4, a run (j, k, l) is blocks of kBlockElements, one after
// another, and shape[0] is a multiple of that. stride[0] is 0.
struct TensorView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape = {1, 1, 1, 1};
  Shape stride = {0, 0, 0, 0};

  std::int64_t elements() const {
    return shape[0] * shape[1] * shape[2] * shape[3];
  }
  const std::byte* at(std::int64_t i, std::int64_t j = 0, std::int64_t k = 0,
                      std::int64_t l = 0) const {
    return static_cast<const std::byte*>(data) + stride[0] * i + stride[1] * j +
           stride[2] * k + stride[3] * l;
  }
};

// A view of a dense tensor: runs of the first dimension (RunBytes) one after
// another.
inline TensorView DenseView(const void* data, DType dtype, const Shape& shape) {
  TensorView view{.data = data, .dtype = dtype, .shape = shape, .stride = {}};
  view.stride[0] = static_cast<std::int64_t>(SizeOf(dtype));
  view.stride[1] = RunBytes(dtype, shape[0]);
  view.stride[2] = view.stride[1] * shape[1];
  view.stride[3] = view.stride[2] * shape[2];
  return view;
}

// Bytes of a dense tensor.
constexpr std::size_t DenseBytes(DType dtype, const Shape& shape) {
  return static_cast<std::size_t>(RunBytes(dtype, shape[0]) * shape[1] *
                                  shape[2] * shape[3]);
}

// A tensor that owns its elements, dense.
struct DenseTensor {
  DType dtype = DType::kF32;
  Shape shape = {1, 1, 1, 1};
  std::vector<std::byte> bytes;

  TensorView view() const { return DenseView(bytes.data(), dtype, shape); }
  bool operator==(const DenseTensor&) const = default;
};

// "[2, 4, 8]": trailing ones are dropped, the first three always shown.
std::string ShapeText(const Shape& shape);

}  // namespace kvtwin

#endif  // KVTWIN_TENSOR_H_
