#include "bench/cuda/suite.h"

#include <fmt/format.h>

#include "bench/cuda/gpu.h"

namespace kvtwin::bench {

namespace {

// Ends the program with exit code 1 if the machine has no CUDA device.
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

[[maybe_unused]] const auto kSet = run_cuda_goals = RunCudaGoals;

}  // namespace

}  // namespace kvtwin::bench
