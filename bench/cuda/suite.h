// The goals of the twin cuda: each of its kernels beside what the device needs
// for as many bytes, measured by the device's clock in the same run.

#ifndef KVTWIN_BENCH_CUDA_SUITE_H_
#define KVTWIN_BENCH_CUDA_SUITE_H_

#include <cstdint>
#include <string>

#include "bench/goals.h"
#include "kvtwin/tensor.h"

namespace kvtwin::bench {

// The parts of the suite, in order.
void CudaMaskGoals(Goals& goals);
void CudaRowGoals(Goals& goals);
void CudaDecodeGoals(Goals& goals);
void CudaStepGoals(Goals& goals);

// 1 GiB; in a quick run, a size that an emulator handles in a moment.
inline std::int64_t Gib(const Goals& goals) {
  return goals.quick() ? std::int64_t{1} << 16 : std::int64_t{1} << 30;
}

// Rows of 8 heads of 128.
inline constexpr int kHeads = 8;
inline constexpr int kHeadDim = 128;
inline std::int64_t RowBytes(DType dtype) {
  return kHeads * RunBytes(dtype, kHeadDim);
}

}  // namespace kvtwin::bench

#endif  // KVTWIN_BENCH_CUDA_SUITE_H_
