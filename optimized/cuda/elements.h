// Elements of rows in kernels: the same results as core/elements.h and
// core/narrow.h, to the bit. A NaN from a device instruction has unspecified
// bits, so NaNs are never left to an instruction.

#ifndef KVTWIN_OPTIMIZED_CUDA_ELEMENTS_H_
#define KVTWIN_OPTIMIZED_CUDA_ELEMENTS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvtwin/tensor.h"
#include "optimized/cuda/runtime.h"

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

namespace kvtwin::optimized::cuda {

// The formats: T is the type of a stored element, kQuiet the NaN that an
// operation on numbers yields. Float of a NaN is an unspecified NaN.

struct SingleFormat {
  using T = std::uint32_t;
  static constexpr T kSign = 0x80000000;
  static constexpr T kInfinity = 0x7F800000;
  static constexpr T kQuiet = 0x7FC00000;

  __device__ static bool IsNaN(T bits) { return (bits & ~kSign) > kInfinity; }
  __device__ static float Float(T bits) { return __uint_as_float(bits); }
  __device__ static T Rounded(float value) { return __float_as_uint(value); }
  // The result of a sum with a NaN.
  __device__ static T Quieted(T nan) { return nan | kQuiet; }
};

struct HalfFormat {
  using T = std::uint16_t;
  static constexpr T kQuiet = 0x7E00;

  __device__ static bool IsNaN(T bits) { return (bits & 0x7FFF) > 0x7C00; }

  // Converts exactly.
  __device__ static float Float(T bits) {
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half(bits));
#else
    const std::uint32_t magnitude = (bits & 0x7FFFU) << 13;
    const std::uint32_t sign = (bits & 0x8000U) << 16;
    std::uint32_t result = magnitude + ((127U - 15) << 23);
    if (magnitude < 0x0400U << 13) {
      // The value of a subnormal is its mantissa as a fraction of 2^-14: add a
      // leading one, then subtract it.
      constexpr std::uint32_t kFirst = (127U - 14) << 23;
      result = __float_as_uint(__uint_as_float(magnitude + kFirst) -
                               __uint_as_float(kFirst));
    } else if (magnitude >= 0x7C00U << 13) {
      result += (128U - 16) << 23;
    }
    return __uint_as_float(result | sign);
#endif
  }

  // Rounds to nearest, ties to even; any NaN becomes kQuiet with its sign.
  __device__ static T Rounded(float value) {
    const std::uint32_t bits = __float_as_uint(value);
    const std::uint32_t magnitude = bits & 0x7FFFFFFF;
    const std::uint32_t sign = bits >> 16 & 0x8000;
    if (magnitude > 0x7F800000) return static_cast<T>(sign | kQuiet);
#ifdef __CUDA_ARCH__
    return __half_as_ushort(__float2half_rn(value));
#else
    std::uint32_t result = 0x7C00;
    if (magnitude < (127U - 14) << 23) {
      // Adding 0.5, whose last place is that of a subnormal f16, makes the
      // floating-point adder round.
      const float rounded = __uint_as_float(magnitude) + 0.5F;
      result = __float_as_uint(rounded) - __float_as_uint(0.5F);
    } else if (magnitude < (127U + 16) << 23) {
      // Rebases the exponent from bias 127 to 15, and adds half of the last
      // kept place, less one, plus one if that place is odd: ties to even.
      const std::uint32_t odd = magnitude >> 13 & 1;
      result = (magnitude - ((127U - 15) << 23) + 0xFFF + odd) >> 13;
    }
    return static_cast<T>(sign | result);
#endif
  }
  __device__ static T Quieted(T nan) {
    if ((nan & kQuiet) == kQuiet) return nan;
    return static_cast<T>((nan & 0x8000U) | kQuiet);
  }
};

struct UpperFormat {
  using T = std::uint16_t;
  static constexpr T kQuiet = 0x7FC0;

  __device__ static bool IsNaN(T bits) { return (bits & 0x7FFF) > 0x7F80; }
  __device__ static float Float(T bits) {
    return __uint_as_float(std::uint32_t{bits} << 16);
  }
  __device__ static T Rounded(float value) {
    const std::uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) {
      return static_cast<T>((bits >> 16 & 0x8000) | kQuiet);
    }
    return static_cast<T>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  }
  __device__ static T Quieted(T nan) {
    if ((nan & kQuiet) == kQuiet) return nan;
    return static_cast<T>((nan & 0x8000U) | kQuiet);
  }
};

// e4m3. Values above 448 become 448.
struct F8Format {
  using T = std::uint8_t;
  static constexpr T kQuiet = 0x7F;

  __device__ static bool IsNaN(T bits) { return (bits & kQuiet) == kQuiet; }
  __device__ static float Float(T bits) {
    const std::uint32_t magnitude = (bits & 0x7FU) << 20;
    const std::uint32_t sign = (bits & 0x80U) << 24;
    std::uint32_t result = magnitude + ((127U - 7) << 23);
    if (magnitude < 8U << 20) {
      constexpr std::uint32_t kFirst = (127U - 6) << 23;
      result = __float_as_uint(__uint_as_float(magnitude + kFirst) -
                               __uint_as_float(kFirst));
    } else if (magnitude == 0x7FU << 20) {
      result = SingleFormat::kQuiet;
    }
    return __uint_as_float(result | sign);
  }
  __device__ static T Rounded(float value) {
    const std::uint32_t bits = __float_as_uint(value);
    const std::uint32_t magnitude = bits & 0x7FFFFFFF;
    std::uint32_t result = 0x7E;
    if (magnitude > 0x7F800000) {
      result = kQuiet;
    } else if (magnitude < (127U - 6) << 23) {
      // The last place of 2^14 is that of a subnormal f8.
      const float rounded = __uint_as_float(magnitude) + 16384.0F;
      result = __float_as_uint(rounded) - __float_as_uint(16384.0F);
    } else if (magnitude < __float_as_uint(448.0F)) {
      const std::uint32_t odd = magnitude >> 20 & 1;
      result = (magnitude - ((127U - 7) << 23) + 0x7FFFF + odd) >> 20;
    }
    return static_cast<T>((bits >> 24 & 0x80) | result);
  }
  __device__ static T Quieted(T nan) { return nan; }
};

// Added and Turned give what a shift stores in place of an element: see
// core/shift_row.h. `offset` is finite.
template <class Format>
__device__ typename Format::T Added(typename Format::T before, float offset) {
  if (Format::IsNaN(before)) return Format::Quieted(before);
  return Format::Rounded(Format::Float(before) + offset);
}

template <class Format>
__device__ typename Format::T Turned(typename Format::T before, float turned) {
  if (Format::IsNaN(before)) return before;
  return turned != turned ? Format::kQuiet : Format::Rounded(turned);
}

// Blocks ----------------------------------------------------------------------

// Each thread of a team of neighbouring lanes has this many of a block's
// numbers.
inline constexpr unsigned kTeamNumbers = 4;
inline constexpr unsigned kTeamLanes = kBlockElements / kTeamNumbers;
inline constexpr unsigned kAllLanes = 0xFFFFFFFF;

__device__ inline std::uint32_t Magnitude(float value) {
  return __float_as_uint(value) & 0x7FFFFFFF;
}

// Stores two halves, because blocks lie on even addresses.
__device__ inline void StoreBytes(std::uint32_t four, std::byte* to) {
  auto* halves = reinterpret_cast<std::uint16_t*>(to);
  halves[0] = static_cast<std::uint16_t>(four);
  halves[1] = static_cast<std::uint16_t>(four >> 16);
}

__device__ inline float ScaleOf(const std::byte* block) {
  return HalfFormat::Float(*reinterpret_cast<const std::uint16_t*>(block));
}

struct Q8Format {
  static constexpr unsigned kBytes = 2 + 32;

  __device__ static float Scale(float largest) { return fabsf(largest) / 127; }
  __device__ static float Number(const std::byte* block, unsigned i) {
    const auto number = static_cast<signed char>(block[2 + i]);
    return ScaleOf(block) * static_cast<float>(number);
  }
  // The byte for a number that was multiplied by its block's inverse scale.
  __device__ static std::uint32_t Stored(float number) {
    return static_cast<std::uint32_t>(static_cast<int>(rintf(number))) & 0xFF;
  }
  // Stores `four` bytes of each lane.
  __device__ static void Store(std::uint32_t four, unsigned lane, bool wanted,
                               std::byte* block) {
    if (wanted) StoreBytes(four, block + 2 + std::size_t{4} * lane);
  }
};

struct Q4Format {
  static constexpr unsigned kBytes = 2 + 16;

  // The element of largest magnitude is stored as -8, whatever its sign.
  __device__ static float Scale(float largest) { return largest / -8; }
  __device__ static float Number(const std::byte* block, unsigned i) {
    const auto pair = static_cast<int>(block[2 + i % 16]);
    const int number = (i < 16 ? pair & 15 : pair >> 4) - 8;
    return ScaleOf(block) * static_cast<float>(number);
  }
  __device__ static std::uint32_t Stored(float number) {
    const int above = static_cast<int>(rintf(number)) + 8;
    return static_cast<std::uint32_t>(above < 15 ? above : 15);
  }
  // The upper half of the lanes has the upper half of each byte.
  __device__ static void Store(std::uint32_t four, unsigned lane, bool wanted,
                               std::byte* block) {
    const std::uint32_t upper =
        __shfl_xor_sync(kAllLanes, four, kTeamLanes / 2);
    if (wanted && lane < kTeamLanes / 2) {
      StoreBytes(four | upper << 4, block + 2 + std::size_t{4} * lane);
    }
  }
};

// Stores a block if it is wanted. This thread has elements from kTeamNumbers *
// lane on, lane being its number in the team. All lanes of a warp call it
// together.
template <class Format>
__device__ void StoreBlock(const float (&numbers)[kTeamNumbers], unsigned lane,
                           bool wanted, std::byte* block) {
  float largest = 0;  // The first of the largest magnitude.
  for (unsigned i = 0; i < kTeamNumbers; ++i) {
    if (Magnitude(numbers[i]) > Magnitude(largest)) largest = numbers[i];
  }
  for (unsigned apart = 1; apart < kTeamLanes; apart *= 2) {
    const float other =
        __shfl_xor_sync(kAllLanes, largest, static_cast<int>(apart));
    // The other lane's elements come first.
    const bool first = (lane & apart) != 0;
    if (Magnitude(other) + (first ? 1 : 0) > Magnitude(largest)) {
      largest = other;
    }
  }
  const float exact = Format::Scale(largest);
  std::uint16_t scale = HalfFormat::Rounded(exact);
  const unsigned scale_size = scale & 0x7FFFU;
  const bool fits =
      Magnitude(largest) < SingleFormat::kInfinity && scale_size < 0x7C00;
  if (!fits) scale = HalfFormat::kQuiet;
  const float inverse = scale_size == 0 ? 0 : 1 / exact;
  std::uint32_t four = 0;
  for (unsigned i = 0; fits && i < kTeamNumbers; ++i) {
    four |= Format::Stored(numbers[i] * inverse) << (8 * i);
  }
  Format::Store(four, lane, wanted, block);
  if (wanted && lane == 0) *reinterpret_cast<std::uint16_t*>(block) = scale;
}

// These call does(format): WithNarrow for dtypes narrower than f32 except
// blocks, WithElements for all dtypes except blocks, WithBlocks for blocks.
template <class Does>
cudaError_t WithNarrow(DType dtype, const Does& does) {
  if (dtype == DType::kF16) return does(HalfFormat());
  if (dtype == DType::kBF16) return does(UpperFormat());
  return does(F8Format());
}

template <class Does>
cudaError_t WithElements(DType dtype, const Does& does) {
  return dtype == DType::kF32 ? does(SingleFormat()) : WithNarrow(dtype, does);
}

template <class Does>
cudaError_t WithBlocks(DType dtype, const Does& does) {
  return dtype == DType::kQ8 ? does(Q8Format()) : does(Q4Format());
}

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_OPTIMIZED_CUDA_ELEMENTS_H_
