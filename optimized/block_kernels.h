// Conversion of rows to and from q8_0 and q4_0, compiled for every instruction
// set (see targets.h). Results are bit-identical on all targets.

#ifndef KVTWIN_OPTIMIZED_BLOCK_KERNELS_H_
#define KVTWIN_OPTIMIZED_BLOCK_KERNELS_H_

#include <cstddef>

#include "kvtwin/tensor.h"

namespace kvtwin::optimized {

// Same as StoreBlock and LoadFromBlock (core/narrow.h), for whole blocks.
void QuantizeF32(DType dtype, const float* from, std::byte* to,
                 std::size_t count);
void DequantizeToF32(DType dtype, const std::byte* from, float* to,
                     std::size_t count);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_BLOCK_KERNELS_H_
