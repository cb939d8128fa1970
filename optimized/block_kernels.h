// Rows of q8_0 and q4_0, compiled for every instruction set (see targets.h).
// What is computed does not depend on the target, to the bit.

#ifndef KVTWIN_OPTIMIZED_BLOCK_KERNELS_H_
#define KVTWIN_OPTIMIZED_BLOCK_KERNELS_H_

#include <cstddef>

#include "kvtwin/tensor.h"

namespace kvtwin::optimized {

// As StoreBlock and LoadFromBlock (core/narrow.h), on whole blocks.
void QuantizeF32(DType dtype, const float* from, std::byte* to,
                 std::size_t count);
void DequantizeToF32(DType dtype, const std::byte* from, float* to,
                     std::size_t count);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_BLOCK_KERNELS_H_
