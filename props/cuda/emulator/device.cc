// The device: its properties, its errors, and launches of kernels.

#include <array>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "props/cuda/emulator/internal.h"

namespace kvtwin::emulator {
namespace {

constexpr int kVersion = 13000;
constexpr int kMajor = 9;  // Like an H200.
constexpr int kMinor = 0;
constexpr int kThreadsOfProcessor = 2048;
constexpr std::size_t kSharedOfProcessor = 228 << 10;

// A failure that a test asked for.
struct Failure {
  bool set = false;
  int after = 0;
  cudaError_t error = cudaSuccess;
  bool sticky = false;
};
std::array<Failure, kCalls> failures;
std::array<std::int64_t, kCalls> counts;

// In CUDA, each thread has its own last error.
thread_local cudaError_t last_error = cudaSuccess;

thread_local int current_device = 0;

// Returns the failure requested for this call, if any.
cudaError_t Fail(Call call) {
  Failure& failure = failures[static_cast<std::size_t>(call)];
  if (!failure.set || failure.after-- > 0) return cudaSuccess;
  failure.set = false;
  if (failure.sticky) TheDevice().sticky = failure.error;
  return failure.error;
}

std::uint64_t SeedOfEnvironment() {
  const char* text = std::getenv("KVTWIN_EMULATOR_SEED");
  return text == nullptr ? 0 : std::strtoull(text, nullptr, 0);
}

}  // namespace

Device::Device() : streams(memory) { streams.SetSeed(SeedOfEnvironment()); }

Device& TheDevice() {
  static Device& device = *new Device;  // Caches may outlive all statics.
  return device;
}

int CurrentDevice() { return current_device; }

std::mutex& TheMutex() {
  static std::mutex& mutex = *new std::mutex;
  return mutex;
}

cudaError_t Begin(Call call) {
  ++counts[static_cast<std::size_t>(call)];
  Device& device = TheDevice();
  if (device.driver_too_old) return cudaErrorInsufficientDriver;
  if (device.none) return cudaErrorNoDevice;
  if (device.sticky != cudaSuccess) return device.sticky;
  return Fail(call);
}

cudaError_t Answer(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

void KernelDone() {
  ++counts[static_cast<std::size_t>(Call::kKernel)];
  const cudaError_t error = Fail(Call::kKernel);
  if (error != cudaSuccess) TheDevice().sticky = error;
}

void FailNext(Call call, cudaError_t error, int after, bool sticky) {
  const std::lock_guard lock(TheMutex());
  failures[static_cast<std::size_t>(call)] = {true, after, error, sticky};
}

void SetNoDevice(bool none) {
  const std::lock_guard lock(TheMutex());
  TheDevice().none = none;
}

void SetDriverTooOld(bool old) {
  const std::lock_guard lock(TheMutex());
  TheDevice().driver_too_old = old;
}

void SetDevices(int count) {
  const std::lock_guard lock(TheMutex());
  TheDevice().count = count;
}

void SetSeed(std::uint64_t seed) {
  const std::lock_guard lock(TheMutex());
  TheDevice().streams.SetSeed(seed);
}

void SetMemory(std::size_t bytes) {
  const std::lock_guard lock(TheMutex());
  TheDevice().memory.SetLimit(bytes);
}

void SetProtect(bool protect) {
  const std::lock_guard lock(TheMutex());
  TheDevice().memory.SetProtect(protect);
}

void Reset() {
  const std::lock_guard lock(TheMutex());
  failures = {};
  counts = {};
  Device& device = TheDevice();
  device.sticky = cudaSuccess;
  device.none = false;
  device.driver_too_old = false;
  device.count = 1;
  current_device = 0;
  last_error = cudaSuccess;
}

std::int64_t Count(Call call) {
  const std::lock_guard lock(TheMutex());
  return counts[static_cast<std::size_t>(call)];
}

cudaError_t LaunchKernel(const cudaLaunchConfig_t* config, const void* kernel,
                         std::function<void()> thread, const char* type) {
  return Do(Call::kLaunch, [&](Device& device) {
    if (config == nullptr || config->numAttrs != 0) {
      return cudaErrorInvalidValue;
    }
    if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
    const dim3 grid = config->gridDim;
    const dim3 block = config->blockDim;
    const std::size_t threads = std::size_t{block.x} * block.y * block.z;
    const std::size_t shared = config->dynamicSmemBytes;
    const auto max = device.shared_bytes.find(kernel);
    if (threads == 0 || threads > kMaxThreads || block.x > 1024 ||
        block.y > 1024 || block.z > 64 || grid.x == 0 || grid.y == 0 ||
        grid.z == 0 || grid.x > 0x7fffffff || grid.y > 65535 ||
        grid.z > 65535) {
      return cudaErrorInvalidConfiguration;
    }
    if (shared > (max == device.shared_bytes.end()
                      ? kSharedBytes
                      : static_cast<std::size_t>(max->second))) {
      return cudaErrorInvalidValue;
    }
    const cudaStream_t found = device.streams.Find(config->stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    return device.streams.Put(
        found, [&device, kernel = Kernel{kernel, std::move(thread), type, grid,
                                         block, shared}] {
          if (device.sticky != cudaSuccess) return;  // Nothing runs after that.
          RunGrid(kernel, device.streams.random());
          KernelDone();
        });
  });
}

}  // namespace kvtwin::emulator

using kvtwin::emulator::Call;
using kvtwin::emulator::Device;
using kvtwin::emulator::Do;

cudaError_t cudaGetLastError() {
  const std::lock_guard lock(kvtwin::emulator::TheMutex());
  const cudaError_t sticky = kvtwin::emulator::TheDevice().sticky;
  const cudaError_t last =
      std::exchange(kvtwin::emulator::last_error, cudaSuccess);
  return sticky != cudaSuccess ? sticky : last;
}

cudaError_t cudaPeekAtLastError() {
  const std::lock_guard lock(kvtwin::emulator::TheMutex());
  const cudaError_t sticky = kvtwin::emulator::TheDevice().sticky;
  return sticky != cudaSuccess ? sticky : kvtwin::emulator::last_error;
}

cudaError_t cudaGetDeviceCount(int* count) {
  if (count != nullptr) *count = 0;
  return Do(Call::kDevice, [&](Device& it) {
    if (count == nullptr) return cudaErrorInvalidValue;
    *count = it.count;
    return cudaSuccess;
  });
}

cudaError_t cudaGetDevice(int* device) {
  return Do(Call::kDevice, [&](Device&) {
    if (device == nullptr) return cudaErrorInvalidValue;
    *device = kvtwin::emulator::CurrentDevice();
    return cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int device) {
  return Do(Call::kDevice, [&](Device& it) {
    if (device < 0 || device >= it.count) return cudaErrorInvalidDevice;
    kvtwin::emulator::current_device = device;
    return cudaSuccess;
  });
}

cudaError_t cudaInitDevice(int device, unsigned /*device_flags*/,
                           unsigned /*flags*/) {
  return cudaSetDevice(device);
}

cudaError_t cudaDriverGetVersion(int* version) {
  if (version == nullptr) return cudaErrorInvalidValue;
  const std::lock_guard lock(kvtwin::emulator::TheMutex());
  const Device& device = kvtwin::emulator::TheDevice();
  // 0 means that no driver is installed.
  *version = device.none             ? 0
             : device.driver_too_old ? 11000
                                     : kvtwin::emulator::kVersion;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  if (version == nullptr) return cudaErrorInvalidValue;
  *version = kvtwin::emulator::kVersion;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return Do(Call::kDevice, [&](Device& it) {
    if (properties == nullptr) return cudaErrorInvalidValue;
    if (device != 0) return cudaErrorInvalidDevice;
    cudaDeviceProp out = {};
    std::strcpy(out.name, "kvtwin's emulator");
    out.totalGlobalMem = it.memory.limit();
    out.sharedMemPerBlock = kvtwin::emulator::kSharedBytes;
    out.warpSize = warpSize;
    out.maxThreadsPerBlock = kvtwin::emulator::kMaxThreads;
    out.maxThreadsDim[0] = out.maxThreadsDim[1] = 1024;
    out.maxThreadsDim[2] = 64;
    out.maxGridSize[0] = 0x7fffffff;
    out.maxGridSize[1] = out.maxGridSize[2] = 65535;
    out.major = kvtwin::emulator::kMajor;
    out.minor = kvtwin::emulator::kMinor;
    out.multiProcessorCount = kvtwin::emulator::kProcessors;
    out.concurrentKernels = 1;
    out.asyncEngineCount = 2;
    out.unifiedAddressing = 1;
    out.l2CacheSize = 1 << 20;
    out.maxThreadsPerMultiProcessor = kvtwin::emulator::kThreadsOfProcessor;
    out.sharedMemPerMultiprocessor = kvtwin::emulator::kSharedOfProcessor;
    out.sharedMemPerBlockOptin = kvtwin::emulator::kMaxSharedBytes;
    *properties = out;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute,
                                   int device) {
  return Do(Call::kDevice, [&](Device&) {
    if (value == nullptr) return cudaErrorInvalidValue;
    if (device != 0) return cudaErrorInvalidDevice;
    static const std::map<cudaDeviceAttr, int> values = {
        {cudaDevAttrMaxThreadsPerBlock, kvtwin::emulator::kMaxThreads},
        {cudaDevAttrMaxGridDimX, 0x7fffffff},
        {cudaDevAttrMaxGridDimY, 65535},
        {cudaDevAttrMaxGridDimZ, 65535},
        {cudaDevAttrMaxSharedMemoryPerBlock, kvtwin::emulator::kSharedBytes},
        {cudaDevAttrWarpSize, warpSize},
        {cudaDevAttrMultiProcessorCount, kvtwin::emulator::kProcessors},
        {cudaDevAttrIntegrated, 0},
        {cudaDevAttrL2CacheSize, 1 << 20},
        {cudaDevAttrMaxThreadsPerMultiProcessor,
         kvtwin::emulator::kThreadsOfProcessor},
        {cudaDevAttrUnifiedAddressing, 1},
        {cudaDevAttrComputeCapabilityMajor, kvtwin::emulator::kMajor},
        {cudaDevAttrComputeCapabilityMinor, kvtwin::emulator::kMinor},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor,
         kvtwin::emulator::kSharedOfProcessor},
        {cudaDevAttrPageableMemoryAccess, 0},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin,
         kvtwin::emulator::kMaxSharedBytes},
        {cudaDevAttrMemoryPoolsSupported, 1},
    };
    const auto at = values.find(attribute);
    if (at == values.end()) return cudaErrorInvalidValue;
    *value = at->second;
    return cudaSuccess;
  });
}

cudaError_t cudaFuncSetAttribute(const void* kernel,
                                 cudaFuncAttribute attribute, int value) {
  return Do(Call::kDevice, [&](Device& device) {
    if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) {
      return cudaSuccess;
    }
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
        static_cast<std::size_t>(value) > kvtwin::emulator::kMaxSharedBytes) {
      return cudaErrorInvalidValue;
    }
    device.shared_bytes[kernel] = value;
    return cudaSuccess;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int* blocks, const void* kernel, int block_threads,
    std::size_t shared_bytes) {
  return Do(Call::kDevice, [&](Device&) {
    if (blocks == nullptr || block_threads <= 0) return cudaErrorInvalidValue;
    if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
    std::size_t max = std::min<std::size_t>(
        32, static_cast<std::size_t>(kvtwin::emulator::kThreadsOfProcessor /
                                     block_threads));
    // A block needs another 1 KiB of shared memory.
    max = std::min(
        max, kvtwin::emulator::kSharedOfProcessor / (shared_bytes + 1024));
    *blocks = static_cast<int>(max);
    return cudaSuccess;
  });
}
