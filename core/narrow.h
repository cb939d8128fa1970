// The dtypes of rows that are no type of a processor, a number or a block at a
// time. What they do with a number is in docs/dtypes.md.

#ifndef KVTWIN_CORE_NARROW_H_
#define KVTWIN_CORE_NARROW_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvtwin/tensor.h"

namespace kvtwin {

// e4m3. The nearest, ties to even; beyond 448 it is 448. A NaN stays one.
std::uint8_t F8FromF32(float value);
float F32FromF8(std::uint8_t bits);  // Exact.

// q8_0 or q4_0. A block with anything but finite numbers, or too large a one,
// becomes all NaN.
void StoreBlock(std::span<const float, kBlockElements> from, DType dtype,
                std::byte* block);
float LoadFromBlock(const std::byte* block, DType dtype, std::size_t i);

}  // namespace kvtwin

#endif  // KVTWIN_CORE_NARROW_H_
