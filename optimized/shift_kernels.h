// The operations of the shift functions on rows, each compiled for every
// instruction set (see targets.h). Results are bit-identical on all targets.

#ifndef KVTWIN_OPTIMIZED_SHIFT_KERNELS_H_
#define KVTWIN_OPTIMIZED_SHIFT_KERNELS_H_

#include <cstddef>

#include "kvtwin/tensor.h"

namespace kvtwin::optimized {

// These functions do what ShiftRow (core/shift_row.h) does, in place, on
// elements of any dtype of rows: they shift as f32 and round, and elements that
// do not change keep their bits.
//
// Adds `offset` to count elements.
void AddToElements(DType dtype, std::byte* elements, std::size_t count,
                   float offset);

// How the first 2 * pairs elements of a head turn: x becomes x * cosine + y *
// sine, where y is the other element of its pair.
struct Turns {
  std::size_t pairs;
  const float* cosines;  // One for each element.
  const float* sines;
};

// Pair p is elements (2p, 2p + 1) of a head, or (p, p + pairs). The heads are
// contiguous.
void TurnAdjacent(DType dtype, std::byte* heads, std::size_t count,
                  std::size_t head_dim, const Turns& turns);
void TurnHalves(DType dtype, std::byte* heads, std::size_t count,
                std::size_t head_dim, const Turns& turns);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_SHIFT_KERNELS_H_
