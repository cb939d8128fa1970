// Conversion of vectors of f32 to f16, bf16 and f8, and back, for files that
// Highway compiles once for each target (see targets.h). The results do not
// depend on the target.

// Included once for each target: every other time the toggle is defined.
#if defined(KVTWIN_OPTIMIZED_NARROW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTWIN_OPTIMIZED_NARROW_INL_H_
#undef KVTWIN_OPTIMIZED_NARROW_INL_H_
#else
#define KVTWIN_OPTIMIZED_NARROW_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

// Whether Highway converts with an instruction: it rounds to nearest, ties to
// even, subnormals too, whatever the rounding mode of the processor. Elsewhere
// Highway's conversion truncates, so this file converts in integers.
#undef KVTWIN_F16C
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)
#define KVTWIN_F16C 1
#else
#define KVTWIN_F16C 0
#endif

HWY_BEFORE_NAMESPACE();
namespace kvtwin::optimized::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// In these types D is a tag of float.
template <class D>
using IntsOf = hn::RebindToSigned<D>;
template <class D>
using HalvesOf = hn::Rebind<std::uint16_t, D>;
template <class D>
using ShortsOf = hn::Rebind<std::int16_t, D>;

// Whether the magnitude bits of 16-bit numbers are greater than `bound`.
template <class D>
HWY_INLINE hn::Mask<HalvesOf<D>> IsAbove(D, hn::Vec<HalvesOf<D>> value,
                                         std::int16_t bound) {
  const ShortsOf<D> shorts;
  const auto magnitude =
      hn::And(hn::BitCast(shorts, value), hn::Set(shorts, INT16_MAX));
  return hn::RebindMask(HalvesOf<D>(),
                        hn::Gt(magnitude, hn::Set(shorts, bound)));
}

// Converts in integers. Any NaN becomes 0x7E00 with its sign.
template <class D>
HWY_INLINE hn::Vec<HalvesOf<D>> RoundedInIntegers(D d, hn::Vec<D> value) {
  const IntsOf<D> ints;
  const auto bits = hn::BitCast(ints, value);
  const auto magnitude = hn::And(bits, hn::Set(ints, INT32_MAX));
  const auto sign = hn::Xor(bits, magnitude);

  // Normal numbers: rebases the exponent from bias 127 to 15, and adds half of
  // the last kept place, less one, plus one if that place is odd: ties to even.
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(ints, 1));
  const auto rounding = hn::Set(ints, ((15 - 127) * (1 << 23)) + 0xFFF);
  const auto normal =
      hn::ShiftRight<13>(hn::Add(hn::Add(magnitude, rounding), odd));

  // Below 2^-14: adding 0.5, whose last place is that of a subnormal f16, makes
  // the floating-point adder round.
  const auto half = hn::Set(d, 0.5f);
  const auto tiny =
      hn::Sub(hn::BitCast(ints, hn::Add(hn::BitCast(d, magnitude), half)),
              hn::BitCast(ints, half));

  const auto first_normal = hn::Set(ints, (127 - 14) << 23);
  const auto first_infinite = hn::Set(ints, (127 + 16) << 23);
  const auto infinity = hn::Set(ints, 0xFF << 23);
  const auto special =
      hn::IfThenElse(hn::Gt(magnitude, infinity), hn::Set(ints, 0x7E00),
                     hn::Set(ints, 0x7C00));
  auto result = hn::IfThenElse(hn::Gt(first_normal, magnitude), tiny, normal);
  result = hn::IfThenElse(hn::Gt(first_infinite, magnitude), result, special);
  // The sign is sign-extended, and result has 15 bits: this narrows exactly.
  result = hn::Or(result, hn::ShiftRight<16>(sign));
  return hn::BitCast(HalvesOf<D>(), hn::DemoteTo(ShortsOf<D>(), result));
}

// Converts in integers, exactly.
template <class D>
HWY_INLINE hn::Vec<D> ExactFromHalves(D d, hn::Vec<HalvesOf<D>> value) {
  const IntsOf<D> ints;
  const auto bits = hn::PromoteTo(ints, value);
  const auto magnitude =
      hn::ShiftLeft<13>(hn::And(bits, hn::Set(ints, 0x7FFF)));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(ints, 0x8000)));
  const auto rebias = hn::Set(ints, (127 - 15) << 23);
  const auto normal = hn::Add(magnitude, rebias);
  const auto special = hn::Add(normal, hn::Set(ints, (128 - 16) << 23));
  // The value of a subnormal is its mantissa as a fraction of 2^-14: add a
  // leading one, then subtract it.
  const auto first = hn::Set(ints, (127 - 14) << 23);
  const auto tiny =
      hn::BitCast(ints, hn::Sub(hn::BitCast(d, hn::Add(magnitude, first)),
                                hn::BitCast(d, first)));

  const auto first_normal = hn::Set(ints, 0x0400 << 13);
  const auto last_finite = hn::Set(ints, (0x7C00 << 13) - 1);
  auto result = hn::IfThenElse(hn::Gt(first_normal, magnitude), tiny, normal);
  result = hn::IfThenElse(hn::Gt(magnitude, last_finite), special, result);
  return hn::BitCast(d, hn::Or(result, sign));
}

// Rounds to nearest, ties to even. Any NaN becomes an unspecified NaN.
template <class D>
HWY_INLINE hn::Vec<HalvesOf<D>> ToHalves(D d, hn::Vec<D> value) {
#if KVTWIN_F16C
  (void)d;
  const hn::Rebind<hwy::float16_t, D> halves;
  return hn::BitCast(HalvesOf<D>(), hn::DemoteTo(halves, value));
#else
  return RoundedInIntegers(d, value);
#endif
}

// Same as ToHalves, but any NaN becomes 0x7E00 with its sign.
template <class D>
HWY_INLINE hn::Vec<HalvesOf<D>> ToCanonicalHalves(D d, hn::Vec<D> value) {
#if KVTWIN_F16C
  const HalvesOf<D> halves;
  const auto result = ToHalves(d, value);
  const auto quiet =
      hn::Or(hn::And(result, hn::Set(halves, 0x8000)), hn::Set(halves, 0x7E00));
  return hn::IfThenElse(IsAbove(d, result, 0x7C00), quiet, result);
#else
  return RoundedInIntegers(d, value);
#endif
}

// Converts exactly, except that a NaN becomes an unspecified NaN.
template <class D>
HWY_INLINE hn::Vec<D> FromHalves(D d, hn::Vec<HalvesOf<D>> value) {
#if KVTWIN_F16C
  const hn::Rebind<hwy::float16_t, D> halves;
  return hn::PromoteTo(d, hn::BitCast(halves, value));
#else
  return ExactFromHalves(d, value);
#endif
}

// bf16 is the upper half of an f32. Rounds to nearest, ties to even; any NaN
// becomes 0x7FC0 with its sign.
template <class D>
HWY_INLINE hn::Vec<HalvesOf<D>> RoundedToUpper(D, hn::Vec<D> value) {
  const IntsOf<D> ints;
  const auto bits = hn::BitCast(ints, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(ints, 1));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(ints, 0x7FFF)), odd);
  const auto quiet = hn::Or(hn::And(bits, hn::Set(ints, INT32_MIN)),
                            hn::Set(ints, 0x7FC00000));
  const auto result =
      hn::IfThenElse(hn::RebindMask(ints, hn::IsNaN(value)), quiet, rounded);
  // The sign is sign-extended: this narrows exactly.
  return hn::BitCast(HalvesOf<D>(),
                     hn::DemoteTo(ShortsOf<D>(), hn::ShiftRight<16>(result)));
}

template <class D>
HWY_INLINE hn::Vec<D> FromUpper(D d, hn::Vec<HalvesOf<D>> value) {
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(IntsOf<D>(), value)));
}

template <class D>
using BytesOf = hn::Rebind<std::uint8_t, D>;

// Converts to e4m3, in integers as above. Values above 448 become 448; any NaN
// becomes 0x7F with its sign.
template <class D>
HWY_INLINE hn::Vec<BytesOf<D>> RoundedToF8(D d, hn::Vec<D> value) {
  const IntsOf<D> ints;
  const auto bits = hn::BitCast(ints, value);
  const auto magnitude = hn::And(bits, hn::Set(ints, INT32_MAX));
  const auto sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(ints, 0x80));

  const auto odd = hn::And(hn::ShiftRight<20>(magnitude), hn::Set(ints, 1));
  const auto rounding = hn::Set(ints, ((7 - 127) * (1 << 23)) + 0x7FFFF);
  const auto normal =
      hn::ShiftRight<20>(hn::Add(hn::Add(magnitude, rounding), odd));

  // Below 2^-6: the last place of 2^14 is that of a subnormal f8.
  const auto large = hn::Set(d, 16384.0f);
  const auto tiny =
      hn::Sub(hn::BitCast(ints, hn::Add(hn::BitCast(d, magnitude), large)),
              hn::BitCast(ints, large));

  const auto first_normal = hn::Set(ints, (127 - 6) << 23);
  const auto largest = hn::BitCast(ints, hn::Set(d, 448.0f));
  const auto infinity = hn::Set(ints, 0xFF << 23);
  const auto special = hn::IfThenElse(hn::Gt(magnitude, infinity),
                                      hn::Set(ints, 0x7F), hn::Set(ints, 0x7E));
  auto result = hn::IfThenElse(hn::Gt(first_normal, magnitude), tiny, normal);
  result = hn::IfThenElse(hn::Gt(largest, magnitude), result, special);
  return hn::DemoteTo(BytesOf<D>(), hn::Or(result, sign));
}

// Converts exactly. A NaN becomes the quiet NaN with its sign.
template <class D>
HWY_INLINE hn::Vec<D> FromF8(D d, hn::Vec<BytesOf<D>> value) {
  const IntsOf<D> ints;
  const auto bits = hn::PromoteTo(ints, value);
  const auto magnitude = hn::ShiftLeft<20>(hn::And(bits, hn::Set(ints, 0x7F)));
  const auto sign = hn::ShiftLeft<24>(hn::And(bits, hn::Set(ints, 0x80)));
  const auto normal = hn::Add(magnitude, hn::Set(ints, (127 - 7) << 23));
  const auto first = hn::Set(ints, (127 - 6) << 23);
  const auto tiny =
      hn::BitCast(ints, hn::Sub(hn::BitCast(d, hn::Add(magnitude, first)),
                                hn::BitCast(d, first)));
  const auto first_normal = hn::Set(ints, 8 << 20);
  const auto last_finite = hn::Set(ints, 0x7E << 20);
  auto result = hn::IfThenElse(hn::Gt(first_normal, magnitude), tiny, normal);
  result = hn::IfThenElse(hn::Gt(magnitude, last_finite),
                          hn::Set(ints, 0x7FC00000), result);
  return hn::BitCast(d, hn::Or(result, sign));
}

// The formats, as kernels see them: T is the type of a stored element, kQuiet
// the NaN that an operation on numbers yields.
struct HalfFormat {
  using T = std::uint16_t;
  static constexpr T kQuiet = 0x7E00;

  template <class D>
  HWY_INLINE static hn::Mask<HalvesOf<D>> IsNaN(D d, hn::Vec<HalvesOf<D>> v) {
    return IsAbove(d, v, 0x7C00);
  }
  template <class D>
  HWY_INLINE static hn::Mask<HalvesOf<D>> IsQuiet(D d, hn::Vec<HalvesOf<D>> v) {
    return IsAbove(d, v, 0x7DFF);
  }
  // Rounds to nearest, ties to even. Any NaN becomes an unspecified NaN.
  template <class D>
  HWY_INLINE static hn::Vec<HalvesOf<D>> Rounded(D d, hn::Vec<D> value) {
    return ToHalves(d, value);
  }
  // Same as Rounded, but any NaN becomes kQuiet with its sign.
  template <class D>
  HWY_INLINE static hn::Vec<HalvesOf<D>> Canonical(D d, hn::Vec<D> value) {
    return ToCanonicalHalves(d, value);
  }
  // Converts exactly, except that a NaN becomes an unspecified NaN.
  template <class D>
  HWY_INLINE static hn::Vec<D> Floats(D d, hn::Vec<HalvesOf<D>> value) {
    return FromHalves(d, value);
  }
  // Converts exactly.
  template <class D>
  HWY_INLINE static hn::Vec<D> Exact(D d, hn::Vec<HalvesOf<D>> value) {
    return ExactFromHalves(d, value);
  }
};

struct UpperFormat {
  using T = std::uint16_t;
  static constexpr T kQuiet = 0x7FC0;

  template <class D>
  HWY_INLINE static hn::Mask<HalvesOf<D>> IsNaN(D d, hn::Vec<HalvesOf<D>> v) {
    return IsAbove(d, v, 0x7F80);
  }
  template <class D>
  HWY_INLINE static hn::Mask<HalvesOf<D>> IsQuiet(D d, hn::Vec<HalvesOf<D>> v) {
    return IsAbove(d, v, 0x7FBF);
  }
  template <class D>
  HWY_INLINE static hn::Vec<HalvesOf<D>> Rounded(D d, hn::Vec<D> value) {
    return RoundedToUpper(d, value);
  }
  template <class D>
  HWY_INLINE static hn::Vec<HalvesOf<D>> Canonical(D d, hn::Vec<D> value) {
    return RoundedToUpper(d, value);
  }
  template <class D>
  HWY_INLINE static hn::Vec<D> Floats(D d, hn::Vec<HalvesOf<D>> value) {
    return FromUpper(d, value);
  }
  template <class D>
  HWY_INLINE static hn::Vec<D> Exact(D d, hn::Vec<HalvesOf<D>> value) {
    return FromUpper(d, value);
  }
};

struct F8Format {
  using T = std::uint8_t;
  static constexpr T kQuiet = 0x7F;

  template <class D>
  HWY_INLINE static hn::Mask<BytesOf<D>> IsNaN(D, hn::Vec<BytesOf<D>> v) {
    const auto quiet = hn::Set(BytesOf<D>(), kQuiet);
    return hn::Eq(hn::And(v, quiet), quiet);
  }
  template <class D>
  HWY_INLINE static hn::Mask<BytesOf<D>> IsQuiet(D d, hn::Vec<BytesOf<D>> v) {
    return IsNaN(d, v);
  }
  template <class D>
  HWY_INLINE static hn::Vec<BytesOf<D>> Rounded(D d, hn::Vec<D> value) {
    return RoundedToF8(d, value);
  }
  template <class D>
  HWY_INLINE static hn::Vec<BytesOf<D>> Canonical(D d, hn::Vec<D> value) {
    return RoundedToF8(d, value);
  }
  template <class D>
  HWY_INLINE static hn::Vec<D> Floats(D d, hn::Vec<BytesOf<D>> value) {
    return FromF8(d, value);
  }
  template <class D>
  HWY_INLINE static hn::Vec<D> Exact(D d, hn::Vec<BytesOf<D>> value) {
    return FromF8(d, value);
  }
};

}  // namespace kvtwin::optimized::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVTWIN_OPTIMIZED_NARROW_INL_H_
