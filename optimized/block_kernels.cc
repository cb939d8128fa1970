// See block_kernels.h. Highway compiles this file once for each target.

#include "optimized/block_kernels.h"

#include <bit>
#include <cstdint>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimized/block_kernels.cc"
// These headers must come after the target is chosen.
#include "core/index.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "optimized/narrow-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvtwin::optimized::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr std::size_t kBlock = kBlockElements;
constexpr std::size_t kScaleBytes = sizeof(std::uint16_t);

using F32 = hn::CappedTag<float, 16>;
using OneF32 = hn::CappedTag<float, 1>;
using I32 = IntsOf<F32>;
using U8 = BytesOf<F32>;
using I8 = hn::Rebind<std::int8_t, F32>;
using Pairs = hn::CappedTag<std::uint8_t, 16>;  // Two q4_0 numbers per byte.

HWY_INLINE std::uint16_t ToHalf(float value) {
  return hn::GetLane(HalfFormat::Canonical(OneF32(), hn::Set(OneF32(), value)));
}

HWY_INLINE float FromHalf(std::uint16_t half) {
  const HalvesOf<OneF32> halves;
  return hn::GetLane(HalfFormat::Exact(OneF32(), hn::Set(halves, half)));
}

// The bit patterns of the absolute values of a vector of floats.
HWY_INLINE hn::Vec<I32> Magnitudes(const float* from) {
  const I32 ints;
  return hn::And(hn::BitCast(ints, hn::LoadU(F32(), from)),
                 hn::Set(ints, INT32_MAX));
}

// The first float whose absolute value has the bits `magnitude`.
HWY_INLINE float FirstOf(const float* from, std::int32_t magnitude) {
  const I32 ints;
  std::size_t i = 0;
  std::intptr_t found = -1;
  for (; found < 0; i += hn::Lanes(ints)) {
    found = hn::FindFirstTrue(
        ints, hn::Eq(Magnitudes(from + i), hn::Set(ints, magnitude)));
  }
  return from[i - hn::Lanes(ints) + AsSize(found)];
}

HWY_INLINE hn::Vec<I32> Numbers(const float* from, float inverse) {
  const F32 d;
  return hn::NearestInt(hn::Mul(hn::LoadU(d, from), hn::Set(d, inverse)));
}

struct Q8 {
  HWY_INLINE static float Scale(const float*, std::int32_t magnitude) {
    return std::bit_cast<float>(magnitude) / 127;
  }
  HWY_INLINE static void Store(const float* from, float inverse,
                               std::uint8_t* to) {
    auto* numbers = reinterpret_cast<std::int8_t*>(to);
    for (std::size_t i = 0; i < kBlock; i += hn::Lanes(F32())) {
      hn::StoreU(hn::DemoteTo(I8(), Numbers(from + i, inverse)), I8(),
                 numbers + i);
    }
  }
  HWY_INLINE static void Load(const std::uint8_t* from, float scale,
                              float* to) {
    const F32 d;
    const auto* numbers = reinterpret_cast<const std::int8_t*>(from);
    for (std::size_t i = 0; i < kBlock; i += hn::Lanes(d)) {
      const auto number = hn::PromoteTo(I32(), hn::LoadU(I8(), numbers + i));
      hn::StoreU(hn::Mul(hn::Set(d, scale), hn::ConvertTo(d, number)), d,
                 to + i);
    }
  }
};

struct Q4 {
  static constexpr std::size_t kPairs = kBlock / 2;

  // The element of largest magnitude is stored as -8, whatever its sign.
  HWY_INLINE static float Scale(const float* from, std::int32_t magnitude) {
    if (magnitude == 0) return -0.0F;  // Zeros of either sign.
    return FirstOf(from, magnitude) / -8;
  }
  HWY_INLINE static void Store(const float* from, float inverse,
                               std::uint8_t* to) {
    const I32 ints;
    const Pairs pairs;
    HWY_ALIGN std::uint8_t numbers[kBlock];
    for (std::size_t i = 0; i < kBlock; i += hn::Lanes(ints)) {
      const auto number =
          hn::Min(hn::Add(Numbers(from + i, inverse), hn::Set(ints, 8)),
                  hn::Set(ints, 15));
      hn::StoreU(hn::DemoteTo(U8(), number), U8(), numbers + i);
    }
    for (std::size_t i = 0; i < kPairs; i += hn::Lanes(pairs)) {
      const auto low = hn::LoadU(pairs, numbers + i);
      const auto high = hn::LoadU(pairs, numbers + kPairs + i);
      hn::StoreU(hn::Or(low, hn::ShiftLeft<4>(high)), pairs, to + i);
    }
  }
  HWY_INLINE static void Load(const std::uint8_t* from, float scale,
                              float* to) {
    const F32 d;
    const I32 ints;
    const Pairs pairs;
    HWY_ALIGN std::uint8_t numbers[kBlock];
    for (std::size_t i = 0; i < kPairs; i += hn::Lanes(pairs)) {
      const auto both = hn::LoadU(pairs, from + i);
      hn::StoreU(hn::And(both, hn::Set(pairs, 15)), pairs, numbers + i);
      hn::StoreU(hn::ShiftRight<4>(both), pairs, numbers + kPairs + i);
    }
    for (std::size_t i = 0; i < kBlock; i += hn::Lanes(d)) {
      const auto number = hn::Sub(
          hn::PromoteTo(ints, hn::LoadU(U8(), numbers + i)), hn::Set(ints, 8));
      hn::StoreU(hn::Mul(hn::Set(d, scale), hn::ConvertTo(d, number)), d,
                 to + i);
    }
  }
};

template <class Format>
HWY_INLINE void StoreBlock(const float* from, std::uint8_t* block,
                           std::size_t block_bytes) {
  const I32 ints;
  auto largest = hn::Zero(ints);
  for (std::size_t i = 0; i < kBlock; i += hn::Lanes(ints)) {
    largest = hn::Max(largest, Magnitudes(from + i));
  }
  const std::int32_t magnitude = hn::GetLane(hn::MaxOfLanes(ints, largest));
  constexpr std::int32_t kInfinity = 0x7F800000;
  constexpr std::uint16_t kHalfInfinity = 0x7C00;
  constexpr std::uint16_t kHalfMagnitude = 0x7FFF;
  const float exact =
      magnitude < kInfinity ? Format::Scale(from, magnitude) : 0;
  std::uint16_t scale = ToHalf(exact);
  const int scale_size = scale & kHalfMagnitude;
  const bool fits = magnitude < kInfinity && scale_size < kHalfInfinity;
  if (!fits) scale = HalfFormat::kQuiet;
  std::memcpy(block, &scale, kScaleBytes);
  if (!fits) {
    std::memset(block + kScaleBytes, 0, block_bytes - kScaleBytes);
    return;
  }
  Format::Store(from, scale_size == 0 ? 0 : 1 / exact, block + kScaleBytes);
}

template <class Format>
HWY_INLINE void StoreBlocks(DType dtype, const float* from, std::byte* to,
                            std::size_t count) {
  const auto bytes = AsSize(RunBytes(dtype, kBlock));
  auto* block = reinterpret_cast<std::uint8_t*>(to);
  for (std::size_t i = 0; i < count; i += kBlock, block += bytes) {
    StoreBlock<Format>(from + i, block, bytes);
  }
}

template <class Format>
HWY_INLINE void LoadBlocks(DType dtype, const std::byte* from, float* to,
                           std::size_t count) {
  const auto bytes = AsSize(RunBytes(dtype, kBlock));
  const auto* block = reinterpret_cast<const std::uint8_t*>(from);
  for (std::size_t i = 0; i < count; i += kBlock, block += bytes) {
    std::uint16_t scale = 0;
    std::memcpy(&scale, block, kScaleBytes);
    Format::Load(block + kScaleBytes, FromHalf(scale), to + i);
  }
}

void Quantize(DType dtype, const float* from, std::byte* to,
              std::size_t count) {
  if (dtype == DType::kQ8) return StoreBlocks<Q8>(dtype, from, to, count);
  StoreBlocks<Q4>(dtype, from, to, count);
}

void Dequantize(DType dtype, const std::byte* from, float* to,
                std::size_t count) {
  if (dtype == DType::kQ8) return LoadBlocks<Q8>(dtype, from, to, count);
  LoadBlocks<Q4>(dtype, from, to, count);
}

}  // namespace kvtwin::optimized::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtwin::optimized {

HWY_EXPORT(Quantize);
HWY_EXPORT(Dequantize);

void QuantizeF32(DType dtype, const float* from, std::byte* to,
                 std::size_t count) {
  HWY_DYNAMIC_DISPATCH(Quantize)(dtype, from, to, count);
}

void DequantizeToF32(DType dtype, const std::byte* from, float* to,
                     std::size_t count) {
  HWY_DYNAMIC_DISPATCH(Dequantize)(dtype, from, to, count);
}

}  // namespace kvtwin::optimized
#endif  // HWY_ONCE
