// One element of a row, f32, f16 or bf16, as f32. From f32 it is rounded to the
// nearest, ties to even (Eigen's conversions); to f32 is exact.

#ifndef KVTWIN_CORE_ELEMENTS_H_
#define KVTWIN_CORE_ELEMENTS_H_

#include <Eigen/Core>
#include <cstddef>
#include <cstring>

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

inline float LoadElement(const std::byte* from, DType dtype) {
  if (dtype == DType::kF32) return LoadAs<float>(from);
  if (dtype == DType::kBF16) return LoadAs<Eigen::bfloat16>(from);
  return LoadAs<Eigen::half>(from);
}

inline void StoreElement(float value, std::byte* to, DType dtype) {
  if (dtype == DType::kF32) return StoreAs<float>(value, to);
  if (dtype == DType::kBF16) return StoreAs<Eigen::bfloat16>(value, to);
  StoreAs<Eigen::half>(value, to);
}

// From one dtype to another; bit for bit if they are the same.
inline void CopyElement(const std::byte* from, DType from_dtype, std::byte* to,
                        DType to_dtype) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, SizeOf(to_dtype));
  } else {
    StoreElement(LoadElement(from, from_dtype), to, to_dtype);
  }
}

}  // namespace kvtwin

#endif  // KVTWIN_CORE_ELEMENTS_H_
