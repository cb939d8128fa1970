#include "bench/cuda/gpu.h"

#ifndef KVTWIN_CUDA_EMULATED
#include <cub/device/device_reduce.cuh>
#endif

namespace kvtwin::bench {
namespace {

// With a null `scratch`, only sets the scratch bytes that are needed.
cudaError_t Sum(void* scratch, std::size_t& scratch_bytes,
                const std::byte* from, std::int64_t bytes, std::byte* sum,
                cudaStream_t stream) {
#ifdef KVTWIN_CUDA_EMULATED
  const std::size_t half = static_cast<std::size_t>(bytes) / 2;
  if (scratch == nullptr) {
    scratch_bytes = half;
    return cudaSuccess;
  }
  (void)sum;
  return cudaMemcpyAsync(scratch, from, half, cudaMemcpyDeviceToDevice, stream);
#else
  return cub::DeviceReduce::Sum(
      scratch, scratch_bytes, reinterpret_cast<const std::uint32_t*>(from),
      reinterpret_cast<std::uint32_t*>(sum),
      bytes / static_cast<std::int64_t>(sizeof(std::uint32_t)), stream);
#endif
}

std::size_t ScratchBytes(const std::byte* from, std::int64_t bytes) {
  std::size_t scratch_bytes = 0;
  Must(Sum(nullptr, scratch_bytes, from, bytes, nullptr, nullptr));
  return scratch_bytes;
}

}  // namespace

ReadLimit::ReadLimit(const std::byte* from, std::int64_t bytes)
    : from_(from),
      bytes_(bytes),
      scratch_bytes_(ScratchBytes(from, bytes)),
      scratch_(static_cast<std::int64_t>(scratch_bytes_)),
      sum_(sizeof(std::uint32_t)) {}

Timing ReadLimit::timing() const {
  return OnGpu([this](cudaStream_t stream) {
    std::size_t scratch_bytes = scratch_bytes_;
    return Sum(scratch_.data(), scratch_bytes, from_, bytes_, sum_.data(),
               stream);
  });
}

}  // namespace kvtwin::bench
