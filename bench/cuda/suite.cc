#include "bench/cuda/suite.h"

#include <fmt/format.h>

#include "bench/cuda/gpu.h"

namespace kvtwin::bench {

int RunCudaGoals(const GoalOptions& options) {
  int device = 0;
  Must(cudaGetDevice(&device));
  cudaDeviceProp properties = {};
  Must(cudaGetDeviceProperties(&properties, device));
  constexpr GoalPart kParts[] = {CudaMaskGoals, CudaRowGoals, CudaDecodeGoals,
                                 CudaStepGoals};
  return RunGoals(options, fmt::format("The twin cuda on {}", properties.name),
                  kParts);
}

}  // namespace kvtwin::bench
