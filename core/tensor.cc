#include "kvtwin/tensor.h"

#include <fmt/format.h>

#include "core/index.h"
#include "core/names.h"

namespace kvtwin {

std::string_view DTypeName(DType dtype) {
  const auto number = AsSize(dtype);
  return number < kDTypeNames.size() ? kDTypeNames[number] : "no dtype";
}

std::optional<DType> DTypeFromName(std::string_view name) {
  return FromName<DType>(kDTypeNames, name);
}

std::string ShapeText(const Shape& shape) {
  std::string text = fmt::format("[{}, {}, {}", shape[0], shape[1], shape[2]);
  if (shape[3] != 1) text += fmt::format(", {}", shape[3]);
  return text + "]";
}

}  // namespace kvtwin
