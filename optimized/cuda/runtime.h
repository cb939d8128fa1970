// The CUDA runtime, and how kernels are launched. Kernels are compiled by nvcc,
// and again by the host's compiler for the emulator in props/cuda/emulator/,
// whose <cuda_runtime.h> is then found first. So every kernel is tested on
// machines without a device.

#ifndef KVTWIN_OPTIMIZED_CUDA_RUNTIME_H_
#define KVTWIN_OPTIMIZED_CUDA_RUNTIME_H_

#include <cuda_runtime.h>

#include <cstddef>

namespace kvtwin::optimized::cuda {

// Puts a kernel on a stream. `shared`: bytes of DynamicShared().
template <class... Parameters, class... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                   std::size_t shared, cudaStream_t stream,
                   Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel,
                            static_cast<Parameters>(arguments)...);
}

#ifdef __CUDACC__
// The dynamic shared memory of a block, on a 16-byte boundary. (The emulator
// has its own version.)
__device__ inline std::byte* DynamicShared() {
  extern __shared__ uint4 kvtwin_shared[];
  return reinterpret_cast<std::byte*>(kvtwin_shared);
}
#endif

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_OPTIMIZED_CUDA_RUNTIME_H_
