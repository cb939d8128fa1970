// An emulator of the CUDA runtime: kernels, compiled by the host's compiler,
// run on the CPU, so that their code can be tested without a device. A program
// is compiled with `-I props/cuda/emulator` before all other include paths and
// finds <cuda_runtime.h> there. This header lets tests control the emulator.
//
// The emulator does what a device may do, and prefers behaviour that reveals
// mistakes:
//   - Blocks run in a random order, and so do the threads of a block between
//     barriers. A missing __syncthreads() shows; so do lanes that do not meet:
//     the process ends and says which threads wait where.
//   - Memory starts as garbage (NaN, or random bits), a block's shared memory
//     too. Allocations lie between inaccessible pages; bytes written beside an
//     allocation are detected when it is freed. Host code cannot touch device
//     memory (SetProtect), and copies cannot reach past an allocation.
//   - Streams run nothing until the host waits. Work that should wait for an
//     event but does not, or that reads or reuses pinned memory before the copy
//     is done, sees the old contents. Capture refuses what CUDA's refuses.
// It cannot show:
//   - races within a warp's step, or between threads that run until they wait:
//     threads take turns at barriers and warp functions only, blocks run one
//     after the other. There is no memory model: a missing __threadfence() or
//     volatile is not detected, and a kernel whose blocks wait for each other
//     hangs.
//   - what the device compiler makes of the code: registers, the bits of its
//     exp2f and the like (here they are libm's), the order in which a tensor
//     core adds.
//   - time.
// It is stricter than a device in two points: a lane that has ended may not be
// in the mask of a warp function, and a capture may not contain a copy from or
// to memory that is not pinned. It has one device. It lacks textures,
// cooperative groups, managed memory, peers, graphs that are not captured, and
// memory in graphs.
//
// All of the emulator is under one lock: several host threads may use it, and
// their kernels take turns.

#ifndef KVTWIN_PROPS_CUDA_EMULATOR_EMULATOR_H_
#define KVTWIN_PROPS_CUDA_EMULATOR_EMULATOR_H_

#include <cstddef>
#include <cstdint>

#include "props/cuda/emulator/cuda_runtime.h"

namespace kvtwin::emulator {

enum class Call {
  kDevice,       // Devices, function attributes, free memory.
  kMalloc,       // cudaMalloc, cudaMallocAsync.
  kMallocHost,   // cudaMallocHost, cudaHostAlloc.
  kFree,         // cudaFree, cudaFreeAsync, cudaFreeHost.
  kLaunch,       // Launches of kernels.
  kKernel,       // Not a call: a kernel that has run.
  kCopy,         // cudaMemcpy* and cudaMemset*.
  kStream,       // Streams: create, destroy, wait for an event.
  kEvent,        // Events: create, destroy, record.
  kQuery,        // cudaStreamQuery, cudaEventQuery, attributes of a pointer.
  kSynchronize,  // cudaStream-, cudaEvent- and cudaDeviceSynchronize.
  kGraph,        // Capture, and all functions on graphs.
};
inline constexpr int kCalls = 12;

// After the next `after` calls of this kind, one call fails and does nothing
// else. If the error is sticky, all later calls fail as well. With kKernel the
// kernel has run by then, and the error is always sticky.
void FailNext(Call call, cudaError_t error, int after = 0, bool sticky = false);

// Emulates a machine without a device, or with a driver that is too old.
void SetNoDevice(bool none);
void SetDriverTooOld(bool old);

// The number of devices. If more than 1, one device has several numbers; memory
// belongs to the number that it was allocated for. Reset() makes it 1.
void SetDevices(int count);

// Seeds the order of blocks, of threads and of work on streams. With 0, the
// default (or $KVTWIN_EMULATOR_SEED), streams do nothing until the host waits,
// and then only the work that it waits for; with other seeds, streams may also
// run work earlier.
void SetSeed(std::uint64_t seed);

// The size of device memory in bytes: 8 GiB (or $KVTWIN_EMULATOR_MEMORY).
void SetMemory(std::size_t bytes);

// Whether host code that touches device memory ends the process; otherwise such
// accesses go unnoticed. Off by default (on with $KVTWIN_EMULATOR_PROTECT=1).
void SetProtect(bool protect);

// Forgets all errors, also those requested by FailNext, and sets the counts to
// 0. Memory and streams stay as they are.
void Reset();

// Calls since the start or the last Reset(), including those that failed.
std::int64_t Count(Call call);

}  // namespace kvtwin::emulator

#endif  // KVTWIN_PROPS_CUDA_EMULATOR_EMULATOR_H_
