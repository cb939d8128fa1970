#include "kvtwin/tensor.h"

#include <fmt/format.h>

namespace kvtwin {

std::string_view DTypeName(DType dtype) {
  return dtype == DType::kF32 ? "f32" : "f16";
}

std::optional<DType> DTypeFromName(std::string_view name) {
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  return std::nullopt;
}

std::string ShapeText(const Shape& shape) {
  std::string text = fmt::format("[{}, {}, {}", shape[0], shape[1], shape[2]);
  if (shape[3] != 1) text += fmt::format(", {}", shape[3]);
  return text + "]";
}

}  // namespace kvtwin
