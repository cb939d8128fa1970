// The inner loops over rows of K and V, each compiled for every instruction set
// (see targets.h). What they compute does not depend on the target, to the bit.

#ifndef KVTWIN_OPTIMIZED_ROW_KERNELS_H_
#define KVTWIN_OPTIMIZED_ROW_KERNELS_H_

#include <cstddef>
#include <cstdint>

namespace kvtwin::optimized {

// As core/elements.h: rounds to the nearest, ties to even, every NaN becomes
// 0x7e00 and its sign; and back, exactly.
void F32ToF16(const float* from, std::uint16_t* to, std::size_t count);
void F16ToF32(const std::uint16_t* from, float* to, std::size_t count);

// The parts of ShiftRow (core/shift_row.h), in place.
//
// Adds `offset` to count elements.
void AddToElements(float* elements, std::size_t count, float offset);
// Turns the pairs of one head by the given cosines and sines: pair p is
// elements (2p, 2p + 1) or (p, p + pairs). Requires: no NaN among them.
void TurnAdjacent(float* head, std::size_t pairs, const float* cosine,
                  const float* sine);
void TurnHalves(float* head, std::size_t pairs, const float* cosine,
                const float* sine);
bool HasNonFinite(const float* elements, std::size_t count);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ROW_KERNELS_H_
