// What kvtwin's kernels use of CUB, with its order of additions: a tree within
// a warp, the warps one after the other. Only lane or thread 0 gets the result.

#ifndef KVTWIN_PROPS_EMULATOR_CUB_CUB_CUH_
#define KVTWIN_PROPS_EMULATOR_CUB_CUB_CUH_

#include "props/emulator/device_code.h"

namespace cub {

template <class T, int kWidth = 32>
class WarpReduce {
 public:
  struct TempStorage {};

  explicit WarpReduce(TempStorage&) {}

  template <class Operation>
  T Reduce(T value, Operation operation) {
    const int lane = kvtwin::emulator::LaneIndex();
    const unsigned all = kWidth == 32 ? ~0U : (1U << kWidth) - 1;
    const unsigned mask = all << (lane & ~(kWidth - 1));
    for (int by = 1; by < kWidth; by *= 2) {
      const T other =
          __shfl_down_sync(mask, value, static_cast<unsigned>(by), kWidth);
      if ((lane & (kWidth - 1)) + by < kWidth) value = operation(value, other);
    }
    return value;
  }
  T Sum(T value) {
    return Reduce(value, [](T a, T b) { return static_cast<T>(a + b); });
  }
};

template <class T, int kThreads>
class BlockReduce {
 public:
  struct TempStorage {
    T warps[kThreads / 32];
  };

  explicit BlockReduce(TempStorage& storage) : storage_(storage) {
    static_assert(kThreads % 32 == 0);
  }

  template <class Operation>
  T Reduce(T value, Operation operation) {
    typename WarpReduce<T>::TempStorage none;
    value = WarpReduce<T>(none).Reduce(value, operation);
    const unsigned thread =
        threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    if (thread % 32 == 0) storage_.warps[thread / 32] = value;
    __syncthreads();
    if (thread == 0) {
      for (int i = 1; i < kThreads / 32; ++i) {
        value = operation(value, storage_.warps[i]);
      }
    }
    return value;
  }
  T Sum(T value) {
    return Reduce(value, [](T a, T b) { return static_cast<T>(a + b); });
  }

 private:
  TempStorage& storage_;
};

}  // namespace cub

#endif  // KVTWIN_PROPS_EMULATOR_CUB_CUB_CUH_
