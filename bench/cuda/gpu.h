// The device: its memory, its clock, and its limits.

#ifndef KVTWIN_BENCH_CUDA_GPU_H_
#define KVTWIN_BENCH_CUDA_GPU_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "bench/limits.h"
#include "kvtwin/tensor.h"

namespace kvtwin::bench {

// Ends the program on an error, as Must of a Status does.
void Must(cudaError_t error);

// Device memory, with unspecified contents.
class GpuBuffer {
 public:
  explicit GpuBuffer(std::int64_t bytes);
  // Device memory with a copy of `values`.
  template <class T>
  explicit GpuBuffer(const std::vector<T>& values)
      : GpuBuffer(static_cast<std::int64_t>(values.size() * sizeof(T))) {
    Must(cudaMemcpy(data_, values.data(), values.size() * sizeof(T),
                    cudaMemcpyHostToDevice));
  }
  ~GpuBuffer() { (void)cudaFree(data_); }
  GpuBuffer(const GpuBuffer&) = delete;
  GpuBuffer& operator=(const GpuBuffer&) = delete;

  std::byte* data() const { return data_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  // Waits for all work on the device, then copies to the host.
  std::vector<std::byte> Download() const;

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

// Puts work on a stream.
using GpuWork = std::function<cudaError_t(cudaStream_t stream)>;

// Does the work once, and waits for it.
void RunOnGpu(const GpuWork& work);
// Nanoseconds from begin to end of the work, by the device's clock.
Timing OnGpu(GpuWork work);

// Nanoseconds of the device for setting, or copying, this many bytes; a copy
// reads and writes as many. Buffers must outlive the Timing.
Timing SetLimit(const GpuBuffer& to, std::int64_t bytes);
Timing CopyLimit(const GpuBuffer& from, const GpuBuffer& to,
                 std::int64_t bytes);
// Reads bytes by CUB's sum of 32-bit integers. (The emulator has no CUB, and
// copies half of the bytes.)
class ReadLimit {
 public:
  ReadLimit(const std::byte* from, std::int64_t bytes);

  Timing timing() const;

 private:
  const std::byte* from_;
  std::int64_t bytes_;
  std::size_t scratch_bytes_;
  GpuBuffer scratch_;
  GpuBuffer sum_;
};

// Random elements, some in -1 .. -0.5 and some in 0.5 .. 1; in blocks, with
// scales of that order. Requires: a whole number of runs of 32.
std::vector<std::byte> RandomElements(DType dtype, std::int64_t count,
                                      std::uint64_t seed);

}  // namespace kvtwin::bench

#endif  // KVTWIN_BENCH_CUDA_GPU_H_
