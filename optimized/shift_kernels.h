// What the shift functions do to rows, each compiled for every instruction set
// (see targets.h). What they compute does not depend on the target, to the bit.

#ifndef KVTWIN_OPTIMIZED_SHIFT_KERNELS_H_
#define KVTWIN_OPTIMIZED_SHIFT_KERNELS_H_

#include <cstddef>

#include "kvtwin/tensor.h"

namespace kvtwin::optimized {

// As ShiftRow (core/shift_row.h), in place, on elements of any dtype of rows.
// They are shifted as f32 and rounded, and what does not change keeps its bits.
//
// Adds `offset` to count elements.
void AddToElements(DType dtype, std::byte* elements, std::size_t count,
                   float offset);

// How the first 2 * pairs elements of a head turn: x becomes
// x * cosine + y * sine, where y is the other one of its pair.
struct Turns {
  std::size_t pairs;
  const float* cosines;  // For each element.
  const float* sines;
};

// Of what is turned, so many bytes are better on their way from memory before:
// the rest is fetched that far ahead.
inline constexpr std::size_t kTurnsAhead = 8192;

// Pair p is elements (2p, 2p + 1) of a head, or (p, p + pairs). The heads lie
// one after another.
void TurnAdjacent(DType dtype, std::byte* heads, std::size_t count,
                  std::size_t head_dim, const Turns& turns);
void TurnHalves(DType dtype, std::byte* heads, std::size_t count,
                std::size_t head_dim, const Turns& turns);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_SHIFT_KERNELS_H_
