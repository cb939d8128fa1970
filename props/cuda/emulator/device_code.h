// The part of CUDA C++ that kernels may use besides C++.

#ifndef KVTWIN_PROPS_CUDA_EMULATOR_DEVICE_CODE_H_
#define KVTWIN_PROPS_CUDA_EMULATOR_DEVICE_CODE_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "props/cuda/emulator/vector_types.h"

// NOLINTBEGIN(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp): the
// names are CUDA's.
#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// One block runs at a time, and its threads take turns. AddressSanitizer sees
// accesses beside a variable, but not in a custom section. Custom sections let
// shared variables be filled with garbage before a block (see
// shared_memory.cc); `used` is needed as the compiler does not see that write.
#if defined(__SANITIZE_ADDRESS__)
#define KVTWIN_PLAIN_SHARED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVTWIN_PLAIN_SHARED 1
#endif
#endif
#ifdef KVTWIN_PLAIN_SHARED
#define __shared__ static
#else
#define KVTWIN_EMULATOR_TEXT_OF(number) #number
#define KVTWIN_EMULATOR_TEXT(number) KVTWIN_EMULATOR_TEXT_OF(number)
#define __shared__       \
  static __attribute__(( \
      used, section("kvtwin_shared_" KVTWIN_EMULATOR_TEXT(__COUNTER__))))
#endif

// These describe the running thread.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
inline constexpr int warpSize = 32;

namespace kvtwin::emulator {

// The input of a lane at a meeting of its warp, and the place of its output.
struct Lane {
  const void* in;
  void* out;
};
// Fills the `out` of every lane in `mask` of lanes[0 .. 31].
using Combine = void (*)(unsigned mask, const Lane* lanes);

// Runs `combine` and returns once all lanes in `mask` have come to the same
// meeting. If a lane can no longer come, ends the process with a message.
void Meet(const char* name, unsigned mask, const void* in, void* out,
          Combine combine);
// Returns when all threads of the block that have not ended are at a barrier.
void Barrier();
int LaneIndex();
// Ends the process with a message about the running thread.
[[noreturn]] void Misuse(const char* name, const char* what);

template <class T>
struct Passed {
  T value;
  int source;
};

template <class T>
T Shuffle(const char* name, unsigned mask, T value, int source) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4,
                "CUDA shuffles words and double words");
  Passed<T> in = {value, source};
  T out = value;
  Meet(name, mask, &in, &out, [](unsigned lane_mask, const Lane* lanes) {
    for (int i = 0; i < 32; ++i) {
      if ((lane_mask >> i & 1) == 0) continue;
      const int from = static_cast<const Passed<T>*>(lanes[i].in)->source;
      if ((lane_mask >> from & 1) == 0) {
        Misuse("__shfl*_sync", "reads a lane that is not in the mask");
      }
      *static_cast<T*>(lanes[i].out) =
          static_cast<const Passed<T>*>(lanes[from].in)->value;
    }
  });
  return out;
}

// Returns a bit mask of the lanes whose predicate holds.
unsigned Ballot(const char* name, unsigned mask, bool predicate);

// Dynamic shared memory of the running block, aligned to 1024 bytes.
std::byte* DynamicSharedMemory();

}  // namespace kvtwin::emulator

namespace kvtwin::optimized::cuda {
inline std::byte* DynamicShared() { return emulator::DynamicSharedMemory(); }
}  // namespace kvtwin::optimized::cuda

inline void __syncthreads() { kvtwin::emulator::Barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffff) {
  kvtwin::emulator::Meet("__syncwarp", mask, nullptr, nullptr,
                         [](unsigned, const kvtwin::emulator::Lane*) {});
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize) {
  const int begin = kvtwin::emulator::LaneIndex() & ~(width - 1);
  return kvtwin::emulator::Shuffle("__shfl_sync", mask, value,
                                   begin + (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize) {
  const int lane = kvtwin::emulator::LaneIndex();
  const int end = (lane & ~(width - 1)) + width;
  const int source = lane ^ bits;
  return kvtwin::emulator::Shuffle("__shfl_xor_sync", mask, value,
                                   source < end ? source : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = warpSize) {
  const int lane = kvtwin::emulator::LaneIndex();
  const int end = (lane & ~(width - 1)) + width;
  const int source = lane + static_cast<int>(by);
  return kvtwin::emulator::Shuffle("__shfl_down_sync", mask, value,
                                   source < end ? source : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = warpSize) {
  const int lane = kvtwin::emulator::LaneIndex();
  const int begin = lane & ~(width - 1);
  const int source = lane - static_cast<int>(by);
  return kvtwin::emulator::Shuffle("__shfl_up_sync", mask, value,
                                   source >= begin ? source : lane);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return kvtwin::emulator::Ballot("__ballot_sync", mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
  return kvtwin::emulator::Ballot("__any_sync", mask, predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return kvtwin::emulator::Ballot("__all_sync", mask, predicate != 0) == mask;
}
// Threads take turns, so one is active. (A real warp may answer any mask that
// contains the calling lane.)
inline unsigned __activemask() { return 1U << kvtwin::emulator::LaneIndex(); }

constexpr int __popc(unsigned bits) { return std::popcount(bits); }
constexpr int __popcll(unsigned long long bits) { return std::popcount(bits); }
constexpr int __ffs(int bits) {
  const auto set = static_cast<unsigned>(bits);
  return set == 0 ? 0 : std::countr_zero(set) + 1;
}
constexpr int __ffsll(long long bits) {
  const auto set = static_cast<unsigned long long>(bits);
  return set == 0 ? 0 : std::countr_zero(set) + 1;
}
constexpr int __clz(int bits) {
  return std::countl_zero(static_cast<unsigned>(bits));
}
constexpr int __clzll(long long bits) {
  return std::countl_zero(static_cast<unsigned long long>(bits));
}

constexpr unsigned __float_as_uint(float value) {
  return std::bit_cast<unsigned>(value);
}
constexpr int __float_as_int(float value) { return std::bit_cast<int>(value); }
constexpr float __uint_as_float(unsigned bits) {
  return std::bit_cast<float>(bits);
}
constexpr float __int_as_float(int bits) { return std::bit_cast<float>(bits); }

constexpr float __fmul_rn(float a, float b) { return a * b; }
constexpr float __fadd_rn(float a, float b) { return a + b; }
constexpr float __fsub_rn(float a, float b) { return a - b; }
constexpr float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline int __float2int_rn(float a) {
  return static_cast<int>(std::nearbyint(a));
}

template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
void __stcs(T* to, T value) {
  *to = value;
}

// Threads take turns, so fences have nothing to do.
inline void __threadfence() {}
inline void __threadfence_block() {}

#define KVTWIN_EMULATOR_ATOMICS(T)      \
  inline T atomicAdd(T* to, T value) {  \
    const T old = *to;                  \
    *to = static_cast<T>(old + value);  \
    return old;                         \
  }                                     \
  inline T atomicExch(T* to, T value) { \
    const T old = *to;                  \
    *to = value;                        \
    return old;                         \
  }
#define KVTWIN_EMULATOR_INTEGER_ATOMICS(T)        \
  KVTWIN_EMULATOR_ATOMICS(T)                      \
  inline T atomicMax(T* to, T value) {            \
    const T old = *to;                            \
    *to = std::max(old, value);                   \
    return old;                                   \
  }                                               \
  inline T atomicMin(T* to, T value) {            \
    const T old = *to;                            \
    *to = std::min(old, value);                   \
    return old;                                   \
  }                                               \
  inline T atomicOr(T* to, T value) {             \
    const T old = *to;                            \
    *to = old | value;                            \
    return old;                                   \
  }                                               \
  inline T atomicAnd(T* to, T value) {            \
    const T old = *to;                            \
    *to = old & value;                            \
    return old;                                   \
  }                                               \
  inline T atomicCAS(T* to, T compare, T value) { \
    const T old = *to;                            \
    if (old == compare) *to = value;              \
    return old;                                   \
  }
KVTWIN_EMULATOR_ATOMICS(float)
KVTWIN_EMULATOR_INTEGER_ATOMICS(int)
KVTWIN_EMULATOR_INTEGER_ATOMICS(unsigned)
KVTWIN_EMULATOR_INTEGER_ATOMICS(unsigned long long)
#undef KVTWIN_EMULATOR_INTEGER_ATOMICS
#undef KVTWIN_EMULATOR_ATOMICS

// In kernels, CUDA has these functions without std::.
template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
// NOLINTEND(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp)

#endif  // KVTWIN_PROPS_CUDA_EMULATOR_DEVICE_CODE_H_
