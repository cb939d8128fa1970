// Conversion of row elements to and from f32. From f32 they are rounded to the
// nearest, ties to even (by Eigen and narrow.h); to f32 they are exact.

#ifndef KVTWIN_CORE_ELEMENTS_H_
#define KVTWIN_CORE_ELEMENTS_H_

#include <Eigen/Core>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "core/index.h"
#include "core/narrow.h"
#include "kvtwin/tensor.h"

namespace kvtwin {

template <class T>
float LoadAs(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return static_cast<float>(value);
}

template <class T>
void StoreAs(float value, std::byte* to) {
  const T element(value);
  std::memcpy(to, &element, sizeof(element));
}

// Requires of both: elements of `dtype` have addresses (SizeOf is not 0).
inline float LoadElement(const std::byte* from, DType dtype) {
  if (dtype == DType::kF32) return LoadAs<float>(from);
  if (dtype == DType::kBF16) return LoadAs<Eigen::bfloat16>(from);
  if (dtype == DType::kF8) return F32FromF8(static_cast<std::uint8_t>(*from));
  return LoadAs<Eigen::half>(from);
}

inline void StoreElement(float value, std::byte* to, DType dtype) {
  if (dtype == DType::kF32) return StoreAs<float>(value, to);
  if (dtype == DType::kBF16) return StoreAs<Eigen::bfloat16>(value, to);
  if (dtype == DType::kF8) {
    *to = static_cast<std::byte>(F8FromF32(value));
  } else {
    StoreAs<Eigen::half>(value, to);
  }
}

// Returns element (i, j, k, l) of rows of any row dtype.
inline float LoadFrom(const TensorView& rows, std::int64_t i,
                      std::int64_t j = 0, std::int64_t k = 0,
                      std::int64_t l = 0) {
  if (!IsBlockDType(rows.dtype)) {
    return LoadElement(rows.at(i, j, k, l), rows.dtype);
  }
  const std::int64_t before =
      RunBytes(rows.dtype, i / kBlockElements * kBlockElements);
  return LoadFromBlock(rows.at(0, j, k, l) + before, rows.dtype,
                       AsSize(i % kBlockElements));
}

// Stores numbers as blocks, one after another.
inline void StoreBlocks(std::span<const float> from, DType dtype,
                        std::byte* to) {
  for (std::size_t i = 0; i < from.size(); i += kBlockElements) {
    StoreBlock(from.subspan(i).first<kBlockElements>(), dtype, to);
    to += RunBytes(dtype, kBlockElements);
  }
}

// Copies run (j, k, l) to `to`, where elements are `stride` bytes apart. If the
// dtypes are the same, bit for bit.
inline void CopyRun(const TensorView& from, std::int64_t j, std::int64_t k,
                    std::int64_t l, std::byte* to, std::int64_t stride,
                    DType dtype) {
  const bool same = from.dtype == dtype;
  if (IsBlockDType(dtype)) {
    if (same) {
      const std::int64_t bytes = RunBytes(dtype, from.shape[0]);
      std::memcpy(to, from.at(0, j, k, l), AsSize(bytes));
      return;
    }
    std::vector<float> numbers;
    for (std::int64_t i = 0; i < from.shape[0]; ++i) {
      numbers.push_back(LoadFrom(from, i, j, k, l));
    }
    return StoreBlocks(numbers, dtype, to);
  }
  for (std::int64_t i = 0; i < from.shape[0]; ++i, to += stride) {
    if (same) {
      std::memcpy(to, from.at(i, j, k, l), SizeOf(dtype));
    } else {
      StoreElement(LoadFrom(from, i, j, k, l), to, dtype);
    }
  }
}

}  // namespace kvtwin

#endif  // KVTWIN_CORE_ELEMENTS_H_
