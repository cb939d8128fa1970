// Conversions of the row dtypes that processors do not have: one number or one
// block at a time. docs/dtypes.md says how they round.

#ifndef KVTWIN_CORE_NARROW_H_
#define KVTWIN_CORE_NARROW_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvtwin/tensor.h"

namespace kvtwin {

// f8_e4m3. Rounds to nearest, ties to even; beyond 448 to 448. A NaN stays NaN.
std::uint8_t F8FromF32(float value);
float F32FromF8(std::uint8_t bits);  // Exact.

// q8_0 or q4_0. A block with a number that is not finite, or too large for the
// scale, becomes all NaN.
void StoreBlock(std::span<const float, kBlockElements> from, DType dtype,
                std::byte* block);
float LoadFromBlock(const std::byte* block, DType dtype, std::size_t i);

}  // namespace kvtwin

#endif  // KVTWIN_CORE_NARROW_H_
