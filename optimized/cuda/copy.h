// Copies of tensors on the device.

#ifndef KVTWIN_OPTIMIZED_CUDA_COPY_H_
#define KVTWIN_OPTIMIZED_CUDA_COPY_H_

#include <cstddef>

#include "kvtwin/tensor.h"
#include "optimized/cuda/runtime.h"

namespace kvtwin::optimized::cuda {

// Same as the host's CopyDense (optimized/storage.h): copies a tensor of any
// strides, dtype unchanged. Puts the copy on the stream and returns.
cudaError_t CopyDense(const TensorView& from, std::byte* to,
                      cudaStream_t stream);

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_OPTIMIZED_CUDA_COPY_H_
