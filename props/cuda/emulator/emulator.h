// An emulator of the CUDA runtime: kernels, compiled by the host's compiler,
// run on the CPU, so that their code can be tried where there is no device. A
// program is compiled with `-I props/cuda/emulator` before all else, where it
// finds <cuda_runtime.h>. This header is for tests to steer it by.
//
// It does what a device may do, and rather what shows a mistake:
//   - Blocks run in an order that is drawn, and so do the threads of a block
//     between barriers. A missing __syncthreads() shows; so do lanes that do
//     not meet: the process ends and says which wait where.
//   - Memory is garbage at first (NaN, or random bits), that of a block as
//     well. It lies between pages that nobody may touch; what is written beside
//     it is found when it is freed. Host code cannot touch device memory
//     (SetProtect), nor copies reach beyond an allocation.
//   - Streams do nothing before somebody waits. What should wait for an event,
//     or for a copy before it reads or reuses pinned memory, and does not, sees
//     what was there before. Capture refuses what the real one refuses.
// It cannot show:
//   - races within a warp's step, or between threads that run until they wait:
//     threads take turns at barriers and warp functions only, blocks run one
//     after the other. There is no memory model: a missing __threadfence() or
//     volatile goes unseen, and a kernel whose blocks wait for each other
//     hangs.
//   - what the compiler for a device makes of the code: registers, the bits of
//     its exp2f and the like (here they are libm's), the order in which a
//     tensor core adds.
//   - time.
// Where it is stricter than a device: a lane that has ended may not be in the
// mask of a warp function, a copy from or to memory that is not pinned not in a
// capture. It has one device and none of: textures, cooperative groups, managed
// memory, peers, graphs that are not captured, memory in graphs.
//
// All of it is under one lock: threads of the host may use it at once, and run
// kernels by turns.

#ifndef KVTWIN_PROPS_CUDA_EMULATOR_EMULATOR_H_
#define KVTWIN_PROPS_CUDA_EMULATOR_EMULATOR_H_

#include <cstddef>
#include <cstdint>

#include "props/cuda/emulator/cuda_runtime.h"

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

// How many devices there are: more than 1 are one under several numbers, whose
// memory is that of the number it was allocated for. Reset() makes it 1.
void SetDevices(int count);

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

#endif  // KVTWIN_PROPS_CUDA_EMULATOR_EMULATOR_H_
