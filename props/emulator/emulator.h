// An emulator of the CUDA runtime: kernels, compiled by the host's compiler,
// run on the CPU. This is for tests to steer it by.

#ifndef KVTWIN_PROPS_EMULATOR_EMULATOR_H_
#define KVTWIN_PROPS_EMULATOR_EMULATOR_H_

#include <cstdint>

#include "props/emulator/cuda_runtime.h"

namespace kvtwin::emulator {

enum class Call {
  kDevice,       // Count, properties, attributes, versions.
  kMalloc,       // cudaMalloc, cudaMallocAsync.
  kMallocHost,   // cudaMallocHost, cudaHostAlloc.
  kFree,         // Of either memory.
  kLaunch,       // Of a kernel.
  kKernel,       // No call: a kernel that has run.
  kCopy,         // cudaMemcpy* and cudaMemset*.
  kStream,       // Making one, and waits of one for an event.
  kEvent,        // Making, recording.
  kQuery,        // cudaStreamQuery, cudaEventQuery, attributes of a pointer.
  kSynchronize,  // cudaStream-, cudaEvent- and cudaDeviceSynchronize.
  kGraph,        // Capture, and what is done with graphs.
};
inline constexpr int kCalls = 12;

// Of such calls, the one after the next `after` ones fails, and nothing else
// happens in it. If the error is sticky, all later calls fail as well. Of
// kKernel: the kernel has run then, and the error is always sticky.
void FailNext(Call call, cudaError_t error, int after = 0, bool sticky = false);

// What a machine without a device, or with a driver that is too old, answers.
void SetNoDevice(bool none);
void SetDriverTooOld(bool old);

// Draws the order of blocks, of threads, of what streams do. With 0, which is
// the default (or $KVTWIN_EMULATOR_SEED), streams do nothing until somebody
// waits for it, and then no more than what is waited for; with other seeds they
// may also do it earlier.
void SetSeed(std::uint64_t seed);

// Bytes of device memory that there are; 8 GiB (or $KVTWIN_EMULATOR_MEMORY).
void SetMemory(std::size_t bytes);

// Whether a touch of device memory by the host's code ends the process; else it
// is not seen. No (or $KVTWIN_EMULATOR_PROTECT=1).
void SetProtect(bool protect);

// Forgets errors, those to come as well, and counts from 0. Memory and streams
// stay as they are.
void Reset();

// Calls since the start or the last Reset(), those as well that failed.
std::int64_t Count(Call call);

}  // namespace kvtwin::emulator

#endif  // KVTWIN_PROPS_EMULATOR_EMULATOR_H_
