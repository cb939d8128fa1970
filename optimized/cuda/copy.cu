#include <algorithm>

#include "optimized/cuda/copy.h"

namespace kvtwin::optimized::cuda {
namespace {

// The contiguous parts of a tensor: elements, or runs of the first dimension,
// whose extent is then 1.
struct Parts {
  const std::byte* from;
  std::int64_t shape[4];
  std::int64_t stride[4];
  std::int64_t bytes;  // Bytes of each part.
  std::int64_t count;
};

__global__ void CopyParts(Parts parts, std::byte* to) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t thread =
      std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (std::int64_t at = thread; at < parts.count * parts.bytes; at += step) {
    std::int64_t part = at / parts.bytes;
    const std::byte* from = parts.from + at % parts.bytes;
    for (int d = 0; d < 4; ++d) {
      from += part % parts.shape[d] * parts.stride[d];
      part /= parts.shape[d];
    }
    to[at] = *from;
  }
}

}  // namespace

cudaError_t CopyDense(const TensorView& from, std::byte* to,
                      cudaStream_t stream) {
  if (from.stride == DenseView(nullptr, from.dtype, from.shape).stride) {
    return cudaMemcpyAsync(to, from.data, DenseBytes(from.dtype, from.shape),
                           cudaMemcpyDeviceToDevice, stream);
  }
  const bool runs = from.stride[0] == 0 && SizeOf(from.dtype) == 0;
  Parts parts = {static_cast<const std::byte*>(from.data), {}, {}, 0, 1};
  for (std::size_t d = 0; d < 4; ++d) {
    parts.shape[d] = d == 0 && runs ? 1 : from.shape[d];
    parts.stride[d] = from.stride[d];
    parts.count *= parts.shape[d];
  }
  parts.bytes = RunBytes(from.dtype, runs ? from.shape[0] : 1);
  const std::int64_t bytes = parts.count * parts.bytes;
  if (bytes == 0) return cudaSuccess;
  constexpr std::int64_t kThreads = 256;
  constexpr std::int64_t kMaxBlocks = 4096;
  const auto blocks = std::min((bytes + kThreads - 1) / kThreads, kMaxBlocks);
  return Launch(CopyParts, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                0, stream, parts, to);
}

}  // namespace kvtwin::optimized::cuda
