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

// Element types. bf16 and quantized blocks will join here.
enum class DType { kF32, kF16 };

// Bytes of one element.
constexpr std::size_t SizeOf(DType dtype) {
  return dtype == DType::kF32 ? 4 : 2;
}

// "f32", "f16"; the other way, nothing for any other name.
std::string_view DTypeName(DType dtype);
std::optional<DType> DTypeFromName(std::string_view name);

// Up to four dimensions, first dimension fastest; unused ones are 1.
using Shape = std::array<std::int64_t, 4>;

// A tensor in memory that the view does not own. Element (i, j, k, l) lies
// stride[0]*i + stride[1]*j + stride[2]*k + stride[3]*l bytes after `data`. A
// null `data` means that there is no tensor (the mask of an encoder cache).
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

// A view of a dense tensor: each stride is the one before it times its extent.
inline TensorView DenseView(const void* data, DType dtype, const Shape& shape) {
  TensorView view{.data = data, .dtype = dtype, .shape = shape, .stride = {}};
  auto stride = static_cast<std::int64_t>(SizeOf(dtype));
  for (std::size_t i = 0; i < shape.size(); ++i) {
    view.stride[i] = stride;
    stride *= shape[i];
  }
  return view;
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
