#include "bench/cuda/gpu.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "bench/twins.h"
#include "core/index.h"

namespace kvtwin::bench {
namespace {

// The suite's own stream, and events on it.
struct Clock {
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
};

const Clock& TheClock() {
  static const Clock clock = [] {
    Clock made;
    Must(cudaStreamCreateWithFlags(&made.stream, cudaStreamNonBlocking));
    Must(cudaEventCreate(&made.begin));
    Must(cudaEventCreate(&made.end));
    return made;
  }();
  return clock;
}

// The bits of four bytes of elements that are random, and those that are one.
struct Pattern {
  std::uint32_t random;
  std::uint32_t ones;
};
Pattern PatternOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return {0x807fffff, 0x3f000000};
    case DType::kF16:
      return {0x83ff83ff, 0x38003800};
    case DType::kBF16:
      return {0x807f807f, 0x3f003f00};
    case DType::kF8:
      return {0x87878787, 0x30303030};
    default:
      return {0xffffffff, 0};
  }
}

}  // namespace

void Must(cudaError_t error) {
  if (error != cudaSuccess) {
    Wrong("a call that must be done", cudaGetErrorName(error));
  }
}

GpuBuffer::GpuBuffer(std::int64_t bytes) : bytes_(AsSize(bytes)) {
  Must(cudaMalloc(&data_, bytes_));
}

std::vector<std::byte> GpuBuffer::Download() const {
  std::vector<std::byte> bytes(bytes_);
  Must(cudaDeviceSynchronize());
  Must(cudaMemcpy(bytes.data(), data_, bytes_, cudaMemcpyDeviceToHost));
  return bytes;
}

void RunOnGpu(const GpuWork& work) {
  Must(work(TheClock().stream));
  Must(cudaStreamSynchronize(TheClock().stream));
}

Timing OnGpu(GpuWork work) {
  return [work = std::move(work)] {
    const Clock& clock = TheClock();
    Must(cudaEventRecord(clock.begin, clock.stream));
    Must(work(clock.stream));
    Must(cudaEventRecord(clock.end, clock.stream));
    Must(cudaEventSynchronize(clock.end));
    float milliseconds = 0;
    Must(cudaEventElapsedTime(&milliseconds, clock.begin, clock.end));
    return double{milliseconds} * 1e6;
  };
}

Timing SetLimit(const GpuBuffer& to, std::int64_t bytes) {
  return OnGpu([&to, bytes](cudaStream_t stream) {
    return cudaMemsetAsync(to.data(), 0xff, AsSize(bytes), stream);
  });
}

Timing CopyLimit(const GpuBuffer& from, const GpuBuffer& to,
                 std::int64_t bytes) {
  return OnGpu([&from, &to, bytes](cudaStream_t stream) {
    return cudaMemcpyAsync(to.data(), from.data(), AsSize(bytes),
                           cudaMemcpyDeviceToDevice, stream);
  });
}

std::vector<std::byte> RandomElements(DType dtype, std::int64_t count,
                                      std::uint64_t seed) {
  const auto bytes = AsSize(RunBytes(dtype, count));
  std::vector<std::byte> elements(bytes);
  const auto [random, ones] = PatternOf(dtype);
  for (std::size_t i = 0; i < bytes; i += sizeof(random)) {
    seed = seed * 6364136223846793005 + 1442695040888963407;
    const std::uint32_t word =
        (static_cast<std::uint32_t>(seed >> 32) & random) | ones;
    std::memcpy(elements.data() + i, &word, std::min(sizeof(word), bytes - i));
  }
  if (!IsBlockDType(dtype)) return elements;
  const auto block = AsSize(RunBytes(dtype, kBlockElements));
  for (std::size_t i = 0; i < bytes; i += block) {
    constexpr std::array kScale = {std::byte{0x00}, std::byte{0x20}};  // 2^-7.
    std::memcpy(elements.data() + i, kScale.data(), kScale.size());
  }
  return elements;
}

}  // namespace kvtwin::bench
