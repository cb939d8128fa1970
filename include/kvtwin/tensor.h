// Element types, and tensors: views of memory that they do not own (an address,
// a shape, byte strides), and tensors that own their elements.

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

// Element types. docs/dtypes.md says how the narrow types round a number.
enum class DType {
  kF32,
  kF16,
  kBF16,  // The upper half of an f32.
  kF8,    // e4m3: 4 bits of exponent, 3 of mantissa, no infinities.
  kQ8,    // q8_0: blocks of 32 elements, an f16 scale and 8 bits each.
  kQ4,    // q4_0: the same with 4 bits.
  kBits,  // One bit per element; see TensorView.
};

// Whether K and V rows can be of this type, and whether masks can.
constexpr bool IsRowDType(DType dtype) { return dtype != DType::kBits; }
constexpr bool IsMaskDType(DType dtype) {
  return dtype <= DType::kBF16 || dtype == DType::kBits;
}

// Whether elements are stored in blocks that share a scale.
constexpr bool IsBlockDType(DType dtype) {
  return dtype == DType::kQ8 || dtype == DType::kQ4;
}

// Elements of a block. A run of a block dtype has whole blocks.
inline constexpr std::int64_t kBlockElements = 32;

// Bytes of one element; 0 for kBits and block dtypes, whose elements have no
// address.
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

// Bytes of `count` elements in a row; kBits takes whole 64-bit words.
constexpr std::int64_t RunBytes(DType dtype, std::int64_t count) {
  if (dtype == DType::kBits) return (count + 63) / 64 * 8;
  if (!IsBlockDType(dtype)) {
    return count * static_cast<std::int64_t>(SizeOf(dtype));
  }
  const int block = dtype == DType::kQ8 ? 2 + 32 : 2 + 16;
  return (count + kBlockElements - 1) / kBlockElements * block;
}

// "f32", "f16", "bf16", "f8_e4m3", "q8_0", "q4_0", "bits"; DTypeFromName
// returns nothing for any other name.
std::string_view DTypeName(DType dtype);
std::optional<DType> DTypeFromName(std::string_view name);

// How the V rows of a cache lie in memory, first dimension fastest.
enum class VLayout {
  kPlain,     // [v_head_dim, kv_heads, cells]
  kPermuted,  // [cells, v_head_dim, kv_heads]
  kTiled,     // [kTileCells, v_head_dim, kv_heads, cells / kTileCells]: read by
              // column like kPermuted, but the rows of a tile lie together.
};
// Cells of a tile of kTiled.
inline constexpr int kTileCells = 32;

// The device whose memory an address points to.
enum class Device { kCpu, kCuda };

// Up to four dimensions, first dimension fastest; unused ones are 1.
using Shape = std::array<std::int64_t, 4>;

// A tensor in memory that the view does not own. Element (i, j, k, l) lies
// stride[0]*i + stride[1]*j + stride[2]*k + stride[3]*l bytes after `data`. A
// null `data` means that there is no tensor (the mask of an encoder cache).
//
// With kBits, element i of a run (j, k, l) is bit i % 8, bit 0 being the
// lowest, of byte i / 8 after at(0, j, k, l): so a 64-bit word, read as
// little-endian, has element i in its bit i % 64. stride[0] is 0. Runs are
// whole 64-bit words, on 8-byte boundaries; the bits past shape[0] are 0.
//
// With kQ8 and kQ4, a run (j, k, l) is blocks of kBlockElements elements, one
// after another, and shape[0] is a multiple of kBlockElements. stride[0] is 0.
struct TensorView {
  // The address of element 0; null if the tensor is absent.
  const void* data = nullptr;
  DType dtype = DType::kF32;   // The type of the elements.
  Shape shape = {1, 1, 1, 1};  // Elements of each dimension.
  // In bytes; DenseView sets them. Along a stride of 0, all elements are the
  // same memory. Calls refuse several elements without strides.
  Shape stride = {0, 0, 0, 0};

  // The number of elements.
  std::int64_t elements() const {
    return shape[0] * shape[1] * shape[2] * shape[3];
  }
  // The address of an element; of a run, for kBits and block dtypes.
  const std::byte* at(std::int64_t i, std::int64_t j = 0, std::int64_t k = 0,
                      std::int64_t l = 0) const {
    return static_cast<const std::byte*>(data) + stride[0] * i + stride[1] * j +
           stride[2] * k + stride[3] * l;
  }
};

// Returns a view of a dense tensor: its runs of the first dimension (RunBytes)
// lie one after another.
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

// A dense tensor that owns its elements.
struct DenseTensor {
  DType dtype = DType::kF32;          // The type of the elements.
  Shape shape = {1, 1, 1, 1};         // Elements of each dimension.
  std::vector<std::byte> bytes = {};  // DenseBytes(dtype, shape) of them.

  // The elements. Valid until `bytes` changes.
  TensorView view() const { return DenseView(bytes.data(), dtype, shape); }
  bool operator==(const DenseTensor&) const = default;
};

// Returns the text "[2, 4, 8]". The fourth dimension is left out if it is 1.
std::string ShapeText(const Shape& shape);

}  // namespace kvtwin

#endif  // KVTWIN_TENSOR_H_
