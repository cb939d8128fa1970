// See row_kernels.h. Highway compiles this file once for each target.
//
// Sums of products rely on -ffp-contract=off: a fused multiply-add rounds once
// where ShiftRow rounds twice.

#include "optimized/row_kernels.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimized/row_kernels.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvtwin::optimized::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes: a rest is copied to so much.
using I32 = hn::CappedTag<std::int32_t, 16>;
using F32 = hn::RebindToFloat<I32>;
using U16 = hn::Rebind<std::uint16_t, I32>;
using I16 = hn::Rebind<std::int16_t, I32>;
constexpr std::size_t kLanesMax = 16;

// In integers, for Highway's own conversion truncates on some targets and
// keeps the payload of a NaN on others.
HWY_INLINE hn::Vec<U16> ToF16(hn::Vec<F32> value) {
  const auto bits = hn::BitCast(I32(), value);
  const auto magnitude = hn::And(bits, hn::Set(I32(), INT32_MAX));
  const auto sign = hn::Xor(bits, magnitude);

  // Normal numbers: exponent from bias 127 to 15; half of the last place that
  // stays, less one, and one more if that place is odd, round to even.
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(I32(), 1));
  const auto rounding = hn::Set(I32(), ((15 - 127) * (1 << 23)) + 0xFFF);
  const auto normal =
      hn::ShiftRight<13>(hn::Add(hn::Add(magnitude, rounding), odd));

  // Below 2^-14: adding 0.5, whose last place is that of a subnormal f16,
  // makes the adder round.
  const auto half = hn::Set(F32(), 0.5f);
  const auto tiny =
      hn::Sub(hn::BitCast(I32(), hn::Add(hn::BitCast(F32(), magnitude), half)),
              hn::BitCast(I32(), half));

  const auto first_normal = hn::Set(I32(), (127 - 14) << 23);
  const auto first_infinite = hn::Set(I32(), (127 + 16) << 23);
  const auto infinity = hn::Set(I32(), 0xFF << 23);
  const auto special =
      hn::IfThenElse(hn::Gt(magnitude, infinity), hn::Set(I32(), 0x7E00),
                     hn::Set(I32(), 0x7C00));
  auto result = hn::IfThenElse(hn::Gt(first_normal, magnitude), tiny, normal);
  result = hn::IfThenElse(hn::Gt(first_infinite, magnitude), result, special);
  // The sign arrives extended, and result has 15 bits: this narrows exactly.
  result = hn::Or(result, hn::ShiftRight<16>(sign));
  return hn::BitCast(U16(), hn::DemoteTo(I16(), result));
}

HWY_INLINE hn::Vec<F32> ToF32(hn::Vec<U16> value) {
  const auto bits = hn::PromoteTo(I32(), value);
  const auto magnitude =
      hn::ShiftLeft<13>(hn::And(bits, hn::Set(I32(), 0x7FFF)));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(I32(), 0x8000)));
  const auto rebias = hn::Set(I32(), (127 - 15) << 23);
  const auto normal = hn::Add(magnitude, rebias);
  const auto special = hn::Add(normal, hn::Set(I32(), (128 - 16) << 23));
  // A subnormal is its mantissa's share of 2^-14: put it behind a leading one
  // and take that away again.
  const auto first = hn::Set(I32(), (127 - 14) << 23);
  const auto tiny =
      hn::BitCast(I32(), hn::Sub(hn::BitCast(F32(), hn::Add(magnitude, first)),
                                 hn::BitCast(F32(), first)));

  const auto first_normal = hn::Set(I32(), 0x0400 << 13);
  const auto last_finite = hn::Set(I32(), (0x7C00 << 13) - 1);
  auto result = hn::IfThenElse(hn::Gt(first_normal, magnitude), tiny, normal);
  result = hn::IfThenElse(hn::Gt(magnitude, last_finite), special, result);
  return hn::BitCast(F32(), hn::Or(result, sign));
}

// Applies convert(from, to), which handles one vector, to count elements.
template <class From, class To, class Convert>
HWY_INLINE void ForEachVector(const From* from, To* to, std::size_t count,
                              const Convert& convert) {
  const std::size_t lanes = hn::Lanes(I32());
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) convert(from + i, to + i);
  if (i == count) return;
  // The rest goes through a copy, so that nothing beyond it is touched.
  From rest[kLanesMax] = {};
  To converted[kLanesMax];
  std::copy(from + i, from + count, rest);
  convert(rest, converted);
  std::copy(converted, converted + (count - i), to + i);
}

void F32ToF16(const float* from, std::uint16_t* to, std::size_t count) {
  ForEachVector(from, to, count,
                [](const float* in, std::uint16_t* out) HWY_ATTR {
                  hn::StoreU(ToF16(hn::LoadU(F32(), in)), U16(), out);
                });
}

void F16ToF32(const std::uint16_t* from, float* to, std::size_t count) {
  ForEachVector(from, to, count,
                [](const std::uint16_t* in, float* out) HWY_ATTR {
                  hn::StoreU(ToF32(hn::LoadU(U16(), in)), F32(), out);
                });
}

void AddToElements(float* elements, std::size_t count, float offset) {
  const auto offsets = hn::Set(F32(), offset);
  ForEachVector(
      elements, elements, count, [&](const float* in, float* out) HWY_ATTR {
        hn::StoreU(hn::Add(hn::LoadU(F32(), in), offsets), F32(), out);
      });
}

void TurnAdjacent(float* head, std::size_t pairs, const float* cosine,
                  const float* sine) {
  const std::size_t lanes = hn::Lanes(F32());
  std::size_t p = 0;
  for (; p + lanes <= pairs; p += lanes) {
    hn::Vec<F32> x;
    hn::Vec<F32> y;
    hn::LoadInterleaved2(F32(), head + 2 * p, x, y);
    const auto c = hn::LoadU(F32(), cosine + p);
    const auto s = hn::LoadU(F32(), sine + p);
    hn::StoreInterleaved2(hn::Sub(hn::Mul(x, c), hn::Mul(y, s)),
                          hn::Add(hn::Mul(x, s), hn::Mul(y, c)), F32(),
                          head + 2 * p);
  }
  for (; p < pairs; ++p) {
    const float x = head[2 * p];
    const float y = head[2 * p + 1];
    head[2 * p] = x * cosine[p] - y * sine[p];
    head[2 * p + 1] = x * sine[p] + y * cosine[p];
  }
}

void TurnHalves(float* head, std::size_t pairs, const float* cosine,
                const float* sine) {
  const std::size_t lanes = hn::Lanes(F32());
  float* high = head + pairs;
  std::size_t p = 0;
  for (; p + lanes <= pairs; p += lanes) {
    const auto x = hn::LoadU(F32(), head + p);
    const auto y = hn::LoadU(F32(), high + p);
    const auto c = hn::LoadU(F32(), cosine + p);
    const auto s = hn::LoadU(F32(), sine + p);
    hn::StoreU(hn::Sub(hn::Mul(x, c), hn::Mul(y, s)), F32(), head + p);
    hn::StoreU(hn::Add(hn::Mul(x, s), hn::Mul(y, c)), F32(), high + p);
  }
  for (; p < pairs; ++p) {
    const float x = head[p];
    const float y = high[p];
    head[p] = x * cosine[p] - y * sine[p];
    high[p] = x * sine[p] + y * cosine[p];
  }
}

bool HasNonFinite(const float* elements, std::size_t count) {
  const std::size_t lanes = hn::Lanes(F32());
  const auto finite = hn::Set(I32(), 0x7F7FFFFF);
  const auto magnitude_bits = hn::Set(I32(), INT32_MAX);
  auto highest = hn::Zero(I32());
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto bits = hn::BitCast(I32(), hn::LoadU(F32(), elements + i));
    highest = hn::Max(highest, hn::And(bits, magnitude_bits));
  }
  bool found = !hn::AllFalse(I32(), hn::Gt(highest, finite));
  for (; i < count; ++i) found |= !std::isfinite(elements[i]);
  return found;
}

}  // namespace kvtwin::optimized::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtwin::optimized {

HWY_EXPORT(F32ToF16);
HWY_EXPORT(F16ToF32);
HWY_EXPORT(AddToElements);
HWY_EXPORT(TurnAdjacent);
HWY_EXPORT(TurnHalves);
HWY_EXPORT(HasNonFinite);

void F32ToF16(const float* from, std::uint16_t* to, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(F32ToF16)(from, to, count);
}

void F16ToF32(const std::uint16_t* from, float* to, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(F16ToF32)(from, to, count);
}

void AddToElements(float* elements, std::size_t count, float offset) {
  HWY_DYNAMIC_DISPATCH(AddToElements)(elements, count, offset);
}

void TurnAdjacent(float* head, std::size_t pairs, const float* cosine,
                  const float* sine) {
  HWY_DYNAMIC_DISPATCH(TurnAdjacent)(head, pairs, cosine, sine);
}

void TurnHalves(float* head, std::size_t pairs, const float* cosine,
                const float* sine) {
  HWY_DYNAMIC_DISPATCH(TurnHalves)(head, pairs, cosine, sine);
}

bool HasNonFinite(const float* elements, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(HasNonFinite)(elements, count);
}

}  // namespace kvtwin::optimized
#endif  // HWY_ONCE
