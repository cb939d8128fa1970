// One element of a row, f32 or f16, as f32. f32 to f16 rounds to the
// nearest, ties to even (Eigen's conversion); f16 to f32 is exact.

#ifndef KVTWIN_CORE_ELEMENTS_H_
#define KVTWIN_CORE_ELEMENTS_H_

#include <Eigen/Core>
#include <cstddef>
#include <cstring>

#include "kvtwin/tensor.h"

namespace kvtwin {

inline float LoadElement(const std::byte* from, DType dtype) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  Eigen::half value;
  std::memcpy(&value, from, sizeof(value));
  return static_cast<float>(value);
}

inline void StoreElement(float value, std::byte* to, DType dtype) {
  if (dtype == DType::kF32) {
    std::memcpy(to, &value, sizeof(value));
    return;
  }
  const Eigen::half half(value);
  std::memcpy(to, &half, sizeof(half));
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
