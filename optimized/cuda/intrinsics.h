// Device instructions for which CUDA C++ has no functions. The emulator has its
// own versions (props/cuda/emulator/emulated_intrinsics.h), which its tests
// compare with plain loops.
//
// All lanes of a warp must call the functions marked "together". With g = lane
// / 4 and t = lane % 4, a lane holds these 16-bit elements, two to a register,
// the first in the lower half:
//   left operand, 16 x 16: row g, columns 2t and 2t + 1; the same of row g + 8;
//     both again for columns 2t + 8 and 2t + 9;
//   right operand, 16 x 8: column g, rows 2t and 2t + 1; 2t + 8 and 2t + 9;
//   sums, 16 x 8, f32: row g, columns 2t and 2t + 1; the same of row g + 8.
// (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".)

#ifndef KVTWIN_OPTIMIZED_CUDA_INTRINSICS_H_
#define KVTWIN_OPTIMIZED_CUDA_INTRINSICS_H_

#include <cuda_runtime.h>

#include <cstdint>

#ifndef __CUDACC__

#include <emulated_intrinsics.h>

namespace kvtwin::optimized::cuda {

using emulator::CopyAsync16If;
using emulator::CopyAsync16Zero;
using emulator::CopyAsyncCommit;
using emulator::CopyAsyncWait;
using emulator::HalvesFromF8;
using emulator::LdMatrix4;
using emulator::LdMatrix4Trans;
using emulator::MmaBF16;
using emulator::MmaF16;
using emulator::PackHalf2;

}  // namespace kvtwin::optimized::cuda

#else

namespace kvtwin::optimized::cuda {

// Adds left * right to the sums; together. Products are exact; how the device
// rounds their sum is undocumented: by about 2^-22 of the largest.
__device__ __forceinline__ void MmaF16(uint4 left, uint2 right,
                                       float (&sums)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left.x), "r"(left.y), "r"(left.z), "r"(left.w), "r"(right.x),
        "r"(right.y));
}
__device__ __forceinline__ void MmaBF16(uint4 left, uint2 right,
                                        float (&sums)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left.x), "r"(left.y), "r"(left.z), "r"(left.w), "r"(right.x),
        "r"(right.y));
}

// Loads four 8 x 8 matrices of 16-bit elements; together. Lane i passes the
// address, in shared memory and on a 16-byte boundary, of the 16 bytes of row i
// % 8 of matrix i / 8, and gets columns 2t and 2t + 1 of row g of each matrix;
// transposed, rows 2t and 2t + 1 of column g.
__device__ __forceinline__ uint4 LdMatrix4(const void* shared) {
  const auto address =
      static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  uint4 four;
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
      : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
      : "r"(address)
      : "memory");
  return four;
}
__device__ __forceinline__ uint4 LdMatrix4Trans(const void* shared) {
  const auto address =
      static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  uint4 four;
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, "
      "[%4];\n"
      : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
      : "r"(address)
      : "memory");
  return four;
}

// Copies 16 bytes from global to shared memory, both on 16-byte boundaries, if
// `wanted`, without a branch. The copy is done after a wait for the group of
// the next commit. A thread sees its own copies then; other threads need a
// barrier as well.
__device__ __forceinline__ void CopyAsync16If(bool wanted, void* shared,
                                              const void* global) {
  const auto address =
      static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %2, 0;\n"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16;\n"
      "}\n" ::"r"(address),
      "l"(global), "r"(static_cast<std::uint32_t>(wanted))
      : "memory");
}
// Does the same, but reads only the first `bytes` (0 to 16) of the 16 bytes;
// the others become zeros.
__device__ __forceinline__ void CopyAsync16Zero(void* shared,
                                                const void* global, int bytes) {
  const auto address =
      static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address),
               "l"(global), "r"(bytes)
               : "memory");
}
// Makes a group of the thread's copies since the last commit.
__device__ __forceinline__ void CopyAsyncCommit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
// Returns when at most the last kGroups groups are still under way.
template <int kGroups>
__device__ __forceinline__ void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kGroups) : "memory");
}

// Two f32 rounded to f16, ties to even, `low` in the lower half. A NaN becomes
// 0x7FFF.
__device__ __forceinline__ std::uint32_t PackHalf2(float low, float high) {
  std::uint32_t two;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(two) : "f"(high), "f"(low));
  return two;
}

// Converts the two e4m3 in the lower half of `bytes` to f16: exact, except that
// a NaN becomes an unspecified NaN.
__device__ __forceinline__ std::uint32_t HalvesFromF8(std::uint32_t bytes) {
  std::uint32_t two;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  const auto lower = static_cast<std::uint16_t>(bytes);
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(two) : "h"(lower));
#else
  const std::uint32_t spread = (bytes & 0xFF) | (bytes & 0xFF00) << 8;
  const std::uint32_t magnitudes = spread & 0x007F007F;
  // The exponent bias is 7 instead of 15: multiplies by 2^8, which also makes
  // subnormals normal.
  asm("mul.rn.f16x2 %0, %1, %2;\n"
      : "=r"(two)
      : "r"(magnitudes << 7), "r"(0x5C005C00U));
  // Adding 1 sets bit 7 of 0x7F only.
  const std::uint32_t nans = (magnitudes + 0x00010001) >> 7 & 0x00010001;
  two |= nans * 0x7FFF | (spread & 0x00800080) << 8;
#endif
  return two;
}

}  // namespace kvtwin::optimized::cuda

#endif

#endif  // KVTWIN_OPTIMIZED_CUDA_INTRINSICS_H_
