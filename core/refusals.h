// The refusals of misuse that the gates of both twins return: messages that
// name the argument and its value.

#ifndef KVTWIN_CORE_REFUSALS_H_
#define KVTWIN_CORE_REFUSALS_H_

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "core/index.h"
#include "kvtwin/status.h"
#include "kvtwin/tensor.h"

namespace kvtwin {

template <class... Args>
Status Invalid(fmt::format_string<Args...> format, Args&&... args) {
  return {StatusCode::kInvalidArgument,
          fmt::format(format, std::forward<Args>(args)...)};
}

template <class... Args>
Status Untimely(fmt::format_string<Args...> format, Args&&... args) {
  return {StatusCode::kFailedPrecondition,
          fmt::format(format, std::forward<Args>(args)...)};
}

inline Status NotNegative(std::string_view name, std::int64_t value) {
  if (value >= 0) return {};
  return Invalid("{} is {}, it must not be negative", name, value);
}

inline Status AtLeastOne(std::string_view name, std::int64_t value) {
  if (value >= 1) return {};
  return Invalid("{} is {}, it must be at least 1", name, value);
}

// Refuses a `value` that is not among the first `count` values of its enum: a
// caller may have written any number into it.
template <class Enum>
Status CheckEnum(std::string_view name, Enum value, std::size_t count) {
  const auto number = static_cast<std::int64_t>(value);
  if (number >= 0 && AsSize(number) < count) return {};
  return Invalid("{} is {}, it must be 0 to {}", name, number, count - 1);
}

inline Status CheckDType(std::string_view name, DType dtype) {
  return CheckEnum(name, dtype, AsSize(DType::kBits) + 1);
}

inline Status CheckRowDType(std::string_view name, DType dtype) {
  if (Status status = CheckDType(name, dtype); !status.ok()) return status;
  if (IsRowDType(dtype)) return {};
  return Invalid("{} is {}, rows are of numbers", name, DTypeName(dtype));
}

inline Status CheckWholeBlocks(std::string_view name, std::int64_t head_dim,
                               DType dtype) {
  if (!IsBlockDType(dtype) || head_dim % kBlockElements == 0) return {};
  return Invalid("{} has a head_dim of {}, {} is in blocks of {}", name,
                 head_dim, DTypeName(dtype), kBlockElements);
}

// Refuses elements with gaps between them, and blocks whose stride[0] is not 0.
// Requires: the dtype is a value of its enum.
inline Status CheckFirstStride(std::string_view name,
                               const TensorView& tensor) {
  const auto element = static_cast<std::int64_t>(SizeOf(tensor.dtype));
  if (tensor.stride[0] == element) return {};
  return Invalid("{} has a stride[0] of {}, {} needs {}", name,
                 tensor.stride[0], DTypeName(tensor.dtype), element);
}

// Refuses several elements, or runs of blocks, without strides: they would all
// be the same memory.
inline Status CheckStrides(std::string_view name, const TensorView& tensor) {
  const int first = IsBlockDType(tensor.dtype) ? 1 : 0;
  const bool one = std::all_of(tensor.shape.begin() + first, tensor.shape.end(),
                               [](std::int64_t extent) { return extent == 1; });
  if (one || tensor.stride != Shape{0, 0, 0, 0}) return {};
  return Invalid("{} has no strides: DenseView sets them", name);
}

// Refuses rows to store that are neither of f32 nor of the dtype `stored`,
// blocks whose stride[0] is not 0, and rows without strides. `taker`: "cache"
// or "pool".
inline Status CheckRowsToStore(std::string_view name, const TensorView& rows,
                               std::string_view taker, DType stored) {
  if (Status status = CheckStrides(name, rows); !status.ok()) return status;
  if (rows.dtype == DType::kF32 || rows.dtype == stored) {
    return IsBlockDType(rows.dtype) ? CheckFirstStride(name, rows) : Status();
  }
  const std::string other =
      stored == DType::kF32 ? "" : fmt::format(" or {}", DTypeName(stored));
  return Invalid("{} is {}, the {} takes f32{}", name, DTypeName(rows.dtype),
                 taker, other);
}

}  // namespace kvtwin

#endif  // KVTWIN_CORE_REFUSALS_H_
