// How the emulator of CUDA (emulator/emulator.h) runs kernels: in any way that
// a device may, so that kernels that work only by luck fail.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>
#include <vector>

#include "core/elements.h"
#include "core/index.h"
#include "optimized/cuda/intrinsics.h"
#include "optimized/cuda/runtime.h"
#include "props/cuda/emulator/emulator.h"
#include "props/cuda/emulator_test.h"

namespace kvtwin::emulator {
namespace {

using optimized::cuda::DynamicShared;
using optimized::cuda::Launch;

__device__ int ThreadOfGrid() {
  const unsigned block =
      blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread =
      threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  return AsInt(block * blockDim.x * blockDim.y * blockDim.z + thread);
}

// Blocks and threads ----------------------------------------------------------

// Writes the order in which the threads came.
__global__ void Order(int* count, int* order) {
  order[ThreadOfGrid()] = atomicAdd(count, 1);
}

TEST_F(Emulator, RunsEachThreadOnceInARandomOrder) {
  const dim3 block(4, 3, 2);
  for (const dim3 grid : {dim3(1), dim3(3, 2, 2)}) {
    const int threads = AsInt(24 * grid.x * grid.y * grid.z);
    std::set<std::vector<int>> orders;
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
      SetSeed(seed);
      const Numbers<int> count(std::vector<int>{0});
      const Numbers<int> order(std::vector<int>(AsSize(threads), -1));
      EXPECT_OK(
          Launch(Order, grid, block, 0, nullptr, count.get(), order.get()));
      std::vector<int> read = order.Read();
      orders.insert(read);
      std::ranges::sort(read);
      for (int i = 0; i < threads; ++i) {
        EXPECT_EQ(At(read, i), i);
      }
    }
    EXPECT_EQ(orders.size(), 10);
  }
}

// Every thread adds what its neighbour wrote, round by round.
__global__ void Neighbours(unsigned* out, bool barrier) {
  __shared__ unsigned now[64];
  const unsigned i = threadIdx.x;
  now[i] = i;
  for (int round = 0; round < 5; ++round) {
    if (barrier) __syncthreads();
    const unsigned other = now[(i + 1) % blockDim.x];
    if (barrier) __syncthreads();
    now[i] += other;
  }
  out[blockIdx.x * blockDim.x + i] = now[i];
}

TEST_F(Emulator, BarriersAreNeededAndEnough) {
  std::vector<unsigned> right;
  for (int block = 0; block < 3; ++block) {
    std::array<unsigned, 64> now;
    for (std::size_t i = 0; i < now.size(); ++i)
      now[i] = static_cast<unsigned>(i);
    for (int round = 0; round < 5; ++round) {
      const std::array<unsigned, 64> before = now;
      for (std::size_t i = 0; i < 64; ++i) now[i] += before[(i + 1) % 64];
    }
    right.insert(right.end(), now.begin(), now.end());
  }
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    SetSeed(seed);
    const Numbers<unsigned> out(right.size());
    EXPECT_OK(Launch(Neighbours, 3, 64, 0, nullptr, out.get(), true));
    EXPECT_EQ(out.Read(), right) << seed;
    EXPECT_OK(Launch(Neighbours, 3, 64, 0, nullptr, out.get(), false));
    EXPECT_NE(out.Read(), right) << seed;
  }
}

__global__ void ReadShared(unsigned* out) {
#ifndef KVTWIN_PLAIN_SHARED
  __shared__ unsigned word;
  out[0] = word;
  word = 5;
#else
  out[0] = ~0U;
#endif
  auto* dynamic = reinterpret_cast<unsigned*>(DynamicShared());
  out[1] = dynamic[0] & dynamic[9];
  dynamic[0] = dynamic[9] = 5;
}

TEST_F(Emulator, SharedMemoryIsGarbageAtFirst) {
  const Numbers<unsigned> out(2);
  for (int i = 0; i < 2; ++i) {
    EXPECT_OK(Launch(ReadShared, 1, 1, 40, nullptr, out.get()));
    EXPECT_EQ(out.Read(), std::vector<unsigned>(2, ~0U));
  }
}

__global__ void Nothing() {}

TEST_F(Emulator, LaunchesBeyondTheLimitsAreRefused) {
  const auto launch = [](dim3 grid, dim3 block, std::size_t shared) {
    return Launch(Nothing, grid, block, shared, nullptr);
  };
  EXPECT_OK(launch(1, 1024, 48 << 10));
  EXPECT_OK(launch({1, 65535}, 1, 0));
  for (const dim3 block : {dim3(1025), dim3(0), dim3(1, 1, 65)}) {
    EXPECT_EQ(launch(1, block, 0), cudaErrorInvalidConfiguration);
  }
  for (const dim3 grid : {dim3(0), dim3(1, 65536), dim3(1, 1, 65536)}) {
    EXPECT_EQ(launch(grid, 1, 0), cudaErrorInvalidConfiguration);
  }
  EXPECT_EQ(launch(1, 1, (48 << 10) + 1), cudaErrorInvalidValue);
  EXPECT_EQ(
      cudaFuncSetAttribute(Nothing, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           (227 << 10) + 1),
      cudaErrorInvalidValue);
  EXPECT_OK(cudaFuncSetAttribute(
      Nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 << 10));
  EXPECT_OK(launch(1, 1, 227 << 10));
  EXPECT_OK(cudaDeviceSynchronize());
}

// Warps -----------------------------------------------------------------------

constexpr unsigned kAll = 0xffffffff;

__global__ void Shuffles(int* out) {
  const int lane = AsInt(threadIdx.x % 32);
  int* own = out + 5 * threadIdx.x;
  own[0] = __shfl_sync(kAll, 100 + lane, lane + 3);
  own[1] = __shfl_xor_sync(kAll, 100 + lane, 5, 8);
  own[2] = __shfl_down_sync(kAll, 100 + lane, 3, 16);
  own[3] = __shfl_up_sync(kAll, 100 + lane, 3);
  own[4] = 0;
  if (lane % 2 == 1) {
    const unsigned odd = __ballot_sync(0xaaaaaaaa, lane < 8);
    own[4] = AsInt(odd) + 1000 * __any_sync(0xaaaaaaaa, lane == 4) +
             10000 * __all_sync(0xaaaaaaaa, lane > 0);
  }
}

TEST_F(Emulator, Shuffles) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    SetSeed(seed);
    const Numbers<int> out(5 * 64);
    EXPECT_OK(Launch(Shuffles, 1, 64, 0, nullptr, out.get()));
    const std::vector<int> read = out.Read();
    for (int i = 0; i < 64; ++i) {
      const int lane = i % 32;
      const int* own = read.data() + 5 * i;
      EXPECT_EQ(own[0], 100 + (lane + 3) % 32);
      EXPECT_EQ(own[1], 100 + (lane ^ 5));
      EXPECT_EQ(own[2], 100 + (lane % 16 < 13 ? lane + 3 : lane));
      EXPECT_EQ(own[3], 100 + (lane < 3 ? lane : lane - 3));
      EXPECT_EQ(own[4], lane % 2 == 1 ? 0xaa + 10000 : 0);
    }
  }
}

enum class Wrong { kAbsent, kEnded, kBarrier, kOtherMask, kNotOwn, kNotThere };

__global__ void MeetWrongly(Wrong wrong) {
  const int lane = AsInt(threadIdx.x);
  if (wrong == Wrong::kEnded && lane == 7) return;
  if (wrong == Wrong::kBarrier && lane == 7) __syncthreads();
  unsigned mask = kAll;
  if (wrong == Wrong::kOtherMask && lane == 7) mask = kAll & ~0x100U;
  if (wrong == Wrong::kNotOwn || wrong == Wrong::kNotThere) {
    mask = kAll & ~0x80U;
  }
  if (wrong == Wrong::kNotThere && lane == 7) return;
  __shfl_xor_sync(mask, lane, 1);
}

TEST_F(EmulatorDeath, LanesThatDivergeAtAShuffle) {
  const auto run = [](Wrong wrong, unsigned threads) {
    EXPECT_OK(Launch(MeetWrongly, 1, threads, 0, nullptr, wrong));
    cudaDeviceSynchronize();
  };
  constexpr const char* kDeadlock =
      "deadlock in .*\n.*waits at __shfl_xor_sync, mask ffffffff";
  EXPECT_DEATH(run(Wrong::kAbsent, 31), kDeadlock);
  EXPECT_DEATH(run(Wrong::kEnded, 32), kDeadlock);
  EXPECT_DEATH(run(Wrong::kBarrier, 32), kDeadlock);
  EXPECT_DEATH(run(Wrong::kOtherMask, 32), kDeadlock);
  EXPECT_DEATH(run(Wrong::kNotOwn, 32), "its own lane is not in the mask");
  EXPECT_DEATH(run(Wrong::kNotThere, 32), "reads a lane that is not");
  run(Wrong::kAbsent, 64);
}

// Intrinsics ------------------------------------------------------------------

// `left` is [16, 16] and `right` is [16, 8], both row-major.
template <bool kHalf>
__global__ void Product(const std::uint16_t* left, const std::uint16_t* right,
                        float* out) {
  const unsigned g = threadIdx.x / 4;
  const unsigned t = threadIdx.x % 4;
  const auto two = [&](const std::uint16_t* from, unsigned row, unsigned column,
                       unsigned columns, unsigned next) {
    const unsigned at = row * columns + column;
    return from[at] | static_cast<unsigned>(from[at + next]) << 16;
  };
  const uint4 a = {two(left, g, 2 * t, 16, 1), two(left, g + 8, 2 * t, 16, 1),
                   two(left, g, 2 * t + 8, 16, 1),
                   two(left, g + 8, 2 * t + 8, 16, 1)};
  const uint2 b = {two(right, 2 * t, g, 8, 8), two(right, 2 * t + 8, g, 8, 8)};
  float sums[4] = {1, 2, 3, 4};
  if (kHalf) {
    optimized::cuda::MmaF16(a, b, sums);
  } else {
    optimized::cuda::MmaBF16(a, b, sums);
  }
  for (unsigned i = 0; i < 4; ++i) {
    out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
  }
}

template <class T, bool kHalf>
void ExpectProduct() {
  std::vector<std::uint16_t> left(16 * 16);
  std::vector<std::uint16_t> right(16 * 8);
  const auto fill = [](std::vector<std::uint16_t>& numbers, int factor) {
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const int number = AsInt(i) * factor % 101 - 50;
      numbers[i] = std::bit_cast<std::uint16_t>(T(static_cast<float>(number)));
    }
  };
  fill(left, 37);
  fill(right, 53);
  const Numbers<std::uint16_t> device_left(left);
  const Numbers<std::uint16_t> device_right(right);
  const Numbers<float> out(16 * 8);
  EXPECT_OK(Launch(Product<kHalf>, 1, 32, 0, nullptr, device_left.get(),
                   device_right.get(), out.get()));
  const std::vector<float> read = out.Read();
  for (std::size_t i = 0; i < 16; ++i) {
    for (std::size_t j = 0; j < 8; ++j) {
      // The sums are whole numbers, so they are exact.
      float sum = static_cast<float>(i / 8 * 2 + j % 2 + 1);
      for (std::size_t k = 0; k < 16; ++k) {
        sum += static_cast<float>(std::bit_cast<T>(left[i * 16 + k])) *
               static_cast<float>(std::bit_cast<T>(right[k * 8 + j]));
      }
      EXPECT_EQ(read[i * 8 + j], sum) << i << " " << j;
    }
  }
}

TEST_F(Emulator, Products) {
  ExpectProduct<Eigen::half, true>();
  ExpectProduct<Eigen::bfloat16, false>();
}

__global__ void Matrices(uint4* out, bool transposed) {
  auto* elements = reinterpret_cast<std::uint16_t*>(DynamicShared());
  const unsigned lane = threadIdx.x;
  for (unsigned i = 0; i < 8; ++i) {
    elements[8 * lane + i] = static_cast<std::uint16_t>(8 * lane + i);
  }
  __syncwarp();
  out[lane] = transposed ? optimized::cuda::LdMatrix4Trans(elements + 8 * lane)
                         : optimized::cuda::LdMatrix4(elements + 8 * lane);
}

TEST_F(Emulator, MatricesOfSharedMemory) {
  const Numbers<uint4> out(32);
  for (const bool transposed : {false, true}) {
    EXPECT_OK(Launch(Matrices, 1, 32, 512, nullptr, out.get(), transposed));
    const std::vector<uint4> read = out.Read();
    for (unsigned lane = 0; lane < 32; ++lane) {
      // Element (i, j) of matrix m is 64m + 8i + j.
      const unsigned g = lane / 4;
      const unsigned t = lane % 4;
      const unsigned first = transposed ? 16 * t + g : 8 * g + 2 * t;
      const unsigned second = first + (transposed ? 8 : 1);
      EXPECT_EQ(read[lane].x, first | second << 16);
      EXPECT_EQ(read[lane].w, (first + 192) | (second + 192) << 16);
    }
  }
}

// Writes the contents of shared memory before the waits, after the wait for the
// first group, and after the wait for both groups.
__global__ void CopyLater(const uint4* from, unsigned* out) {
  auto* shared = reinterpret_cast<uint4*>(DynamicShared());
  shared[0] = shared[1] = {9, 9, 9, 9};
  optimized::cuda::CopyAsync16If(true, shared, from);
  optimized::cuda::CopyAsyncCommit();
  optimized::cuda::CopyAsync16Zero(shared + 1, from + 1, 4);
  optimized::cuda::CopyAsyncCommit();
  const auto look = [&](int i) {
    out[3 * i] = shared[0].w;
    out[3 * i + 1] = shared[1].x;
    out[3 * i + 2] = shared[1].y;
  };
  look(0);
  optimized::cuda::CopyAsyncWait<1>();
  look(1);
  optimized::cuda::CopyAsyncWait<0>();
  look(2);
}

TEST_F(Emulator, CopiesToSharedMemoryNeedAWait) {
  const Numbers<uint4> from(std::vector<uint4>{{1, 2, 3, 4}, {5, 6, 7, 8}});
  const Numbers<unsigned> out(9);
  EXPECT_OK(Launch(CopyLater, 1, 1, 32, nullptr, from.get(), out.get()));
  EXPECT_EQ(out.Read(), (std::vector<unsigned>{~0U, ~0U, ~0U,  //
                                               4, ~0U, ~0U,    //
                                               4, 5, 0}));
}

TEST_F(Emulator, NarrowNumbers) {
  for (std::uint32_t bits = 0; bits < 256; ++bits) {
    const std::uint32_t two = optimized::cuda::HalvesFromF8(bits << 8 | 0x38);
    const auto half =
        std::bit_cast<Eigen::half>(static_cast<std::uint16_t>(two >> 16));
    const float right = F32FromF8(static_cast<std::uint8_t>(bits));
    EXPECT_EQ(two & 0xffff, 0x3c00U);
    if (std::isnan(right)) {
      EXPECT_TRUE(std::isnan(static_cast<float>(half)));
    } else {
      EXPECT_EQ(std::bit_cast<std::uint32_t>(static_cast<float>(half)),
                std::bit_cast<std::uint32_t>(right));
    }
  }
  // Every f16, the midpoint to the next one, and its two f32 neighbours.
  for (std::uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const auto low = static_cast<float>(
        std::bit_cast<Eigen::half>(static_cast<std::uint16_t>(bits)));
    const float high = bits == 0x7bff
                           ? 65536
                           : static_cast<float>(std::bit_cast<Eigen::half>(
                                 static_cast<std::uint16_t>(bits + 1)));
    const float middle = (low + high) / 2;
    for (const float number : {low, std::nextafter(middle, low), middle,
                               std::nextafter(middle, high)}) {
      const std::uint32_t two = optimized::cuda::PackHalf2(number, -number);
      const auto right = std::bit_cast<std::uint16_t>(Eigen::half(number));
      ASSERT_EQ(two, right | (right | 0x8000U) << 16) << number;
    }
  }
  EXPECT_EQ(optimized::cuda::PackHalf2(INFINITY, NAN), 0x7fff7c00U);
}

}  // namespace
}  // namespace kvtwin::emulator
