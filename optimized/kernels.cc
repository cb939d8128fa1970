// See kernels.h. Highway compiles this file once for each target.
//
// Cells are taken in words of 64: membership is a word of bits, positions are
// 64 integers, and a vector never straddles two words. Sums of products rely
// on -ffp-contract=off: a fused multiply-add rounds once where ShiftRow rounds
// twice.

#include "optimized/kernels.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "optimized/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimized/kernels.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvtwin::optimized::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes, so that a word is a whole number of vectors everywhere.
using I32 = hn::CappedTag<std::int32_t, 16>;
using F32 = hn::RebindToFloat<I32>;
using U16 = hn::Rebind<std::uint16_t, I32>;
using I16 = hn::Rebind<std::int16_t, I32>;
using IntVec = hn::Vec<I32>;
constexpr std::size_t kLanesMax = 16;
constexpr std::size_t kWord = 64;  // Cells.

const char* TargetOfThisCode() { return hwy::TargetName(HWY_TARGET); }

// The lanes whose bit is set, lane 0 being the lowest bit.
HWY_INLINE hn::Mask<I32> LanesOf(std::uint64_t bits) {
  std::array<std::uint8_t, sizeof(bits)> bytes;
  std::memcpy(bytes.data(), &bits, sizeof(bits));
  return hn::LoadMaskBits(I32(), bytes.data());
}

// And back.
HWY_INLINE std::uint64_t BitsOf(hn::Mask<I32> lanes) {
  std::array<std::uint8_t, sizeof(std::uint64_t)> bytes = {};
  hn::StoreMaskBits(I32(), lanes, bytes.data());
  std::uint64_t bits;
  std::memcpy(&bits, bytes.data(), sizeof(bits));
  return bits;
}

// The lanes outside of the range. Comparing cannot overflow, whatever it is.
HWY_INLINE hn::Mask<I32> Outside(PosRange range, IntVec position) {
  return hn::Or(hn::Gt(hn::Set(I32(), range.first), position),
                hn::Gt(position, hn::Set(I32(), range.last)));
}

HWY_INLINE std::uint64_t SelectWord(const std::int32_t* positions,
                                    std::uint64_t word, PosRange range) {
  if (word == 0) return 0;
  std::uint64_t excluded = 0;
  for (std::size_t i = 0; i < kWord; i += hn::Lanes(I32())) {
    const auto position = hn::LoadU(I32(), positions + i);
    excluded |= BitsOf(Outside(range, position)) << i;
  }
  return word & ~excluded;
}

std::size_t SelectCells(Members members, PosRange range,
                        std::uint64_t* selected) {
  std::size_t count = 0;
  for (std::size_t w = 0; w < members.word_count; ++w) {
    selected[w] =
        SelectWord(members.positions + w * kWord, members.words[w], range);
    count += static_cast<std::size_t>(std::popcount(selected[w]));
  }
  return count;
}

std::size_t FirstCellIn(Members members, PosRange range) {
  for (std::size_t w = 0; w < members.word_count; ++w) {
    const std::uint64_t selected =
        SelectWord(members.positions + w * kWord, members.words[w], range);
    if (selected != 0) {
      return w * kWord + static_cast<std::size_t>(std::countr_zero(selected));
    }
  }
  return SIZE_MAX;
}

std::size_t LastCellIn(Members members, PosRange range) {
  for (std::size_t w = members.word_count; w-- > 0;) {
    const std::uint64_t selected =
        SelectWord(members.positions + w * kWord, members.words[w], range);
    if (selected != 0) {
      return w * kWord + static_cast<std::size_t>(std::bit_width(selected)) - 1;
    }
  }
  return SIZE_MAX;
}

PosRange Extremes(Members members) {
  const auto lowest_start = hn::Set(I32(), INT32_MAX);
  const auto highest_start = hn::Set(I32(), -1);
  auto lowest = lowest_start;
  auto highest = highest_start;
  for (std::size_t w = 0; w < members.word_count; ++w) {
    const std::uint64_t word = members.words[w];
    if (word == 0) continue;
    for (std::size_t i = 0; i < kWord; i += hn::Lanes(I32())) {
      const auto lanes = LanesOf(word >> i);
      const auto position = hn::LoadU(I32(), members.positions + w * kWord + i);
      lowest = hn::Min(lowest, hn::IfThenElse(lanes, position, lowest_start));
      highest =
          hn::Max(highest, hn::IfThenElse(lanes, position, highest_start));
    }
  }
  return {hn::GetLane(hn::MinOfLanes(I32(), lowest)),
          hn::GetLane(hn::MaxOfLanes(I32(), highest))};
}

void AddToPositions(std::int32_t* positions, const std::uint64_t* selected,
                    std::size_t word_count, std::int32_t offset) {
  const auto offsets = hn::Set(I32(), offset);
  for (std::size_t w = 0; w < word_count; ++w) {
    const std::uint64_t word = selected[w];
    if (word == 0) continue;
    for (std::size_t i = 0; i < kWord; i += hn::Lanes(I32())) {
      std::int32_t* at = positions + w * kWord + i;
      const auto position = hn::LoadU(I32(), at);
      const auto step = hn::IfThenElseZero(LanesOf(word >> i), offsets);
      hn::StoreU(hn::Add(position, step), I32(), at);
    }
  }
}

// Stores -inf in the hidden lanes and 0 in the others.
HWY_INLINE void StoreHidden(hn::Mask<I32> hidden, float* out) {
  const auto minus_inf = hn::Set(I32(), static_cast<std::int32_t>(0xFF800000u));
  const auto bits = hn::IfThenElseZero(hidden, minus_inf);
  hn::StoreU(hn::BitCast(F32(), bits), F32(), out);
}
HWY_INLINE void StoreHidden(hn::Mask<I32> hidden, std::uint16_t* out) {
  // Sign extended, for that is the narrowing which all targets have.
  const auto minus_inf =
      hn::Set(I32(), std::int32_t{static_cast<std::int16_t>(0xFC00)});
  const auto bits = hn::DemoteTo(I16(), hn::IfThenElseZero(hidden, minus_inf));
  hn::StoreU(hn::BitCast(U16(), bits), U16(), out);
}

// Writes the 64 columns of one word.
template <class T>
HWY_INLINE void WriteMaskWord(const std::int32_t* positions, std::uint64_t word,
                              PosRange range, T* out) {
  if (word == 0) {
    const auto all = hn::FirstN(I32(), kLanesMax);
    for (std::size_t i = 0; i < kWord; i += hn::Lanes(I32())) {
      StoreHidden(all, out + i);
    }
    return;
  }
  for (std::size_t i = 0; i < kWord; i += hn::Lanes(I32())) {
    const auto others = LanesOf(~word >> i);
    const auto position = hn::LoadU(I32(), positions + i);
    StoreHidden(hn::Or(others, Outside(range, position)), out + i);
  }
}

template <class T>
HWY_INLINE void WriteMaskColumns(const MaskRow& row, T* out) {
  std::size_t cell = row.first;
  while (cell < row.end) {
    const std::size_t base = cell / kWord * kWord;
    const std::size_t end = std::min(row.end, base + kWord);
    const std::uint64_t word =
        row.members == nullptr ? 0 : row.members[cell / kWord];
    const std::int32_t* positions = row.positions + base;
    if (end - cell == kWord) {
      WriteMaskWord(positions, word, row.range, out);
    } else {
      // A view begins and ends at any cell, out is only as long as the view.
      T whole[kWord];
      WriteMaskWord(positions, word, row.range, whole);
      std::copy(whole + (cell - base), whole + (end - base), out);
    }
    out += end - cell;
    cell = end;
  }
}

void WriteMaskRowF32(const MaskRow& row, float* out) {
  WriteMaskColumns(row, out);
}
void WriteMaskRowF16(const MaskRow& row, std::uint16_t* out) {
  WriteMaskColumns(row, out);
}

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

HWY_EXPORT(TargetOfThisCode);
HWY_EXPORT(SelectCells);
HWY_EXPORT(FirstCellIn);
HWY_EXPORT(LastCellIn);
HWY_EXPORT(Extremes);
HWY_EXPORT(AddToPositions);
HWY_EXPORT(WriteMaskRowF32);
HWY_EXPORT(WriteMaskRowF16);
HWY_EXPORT(F32ToF16);
HWY_EXPORT(F16ToF32);
HWY_EXPORT(AddToElements);
HWY_EXPORT(TurnAdjacent);
HWY_EXPORT(TurnHalves);
HWY_EXPORT(HasNonFinite);

std::size_t SelectCells(Members members, PosRange range,
                        std::uint64_t* selected) {
  return HWY_DYNAMIC_DISPATCH(SelectCells)(members, range, selected);
}

std::size_t FirstCellIn(Members members, PosRange range) {
  return HWY_DYNAMIC_DISPATCH(FirstCellIn)(members, range);
}

std::size_t LastCellIn(Members members, PosRange range) {
  return HWY_DYNAMIC_DISPATCH(LastCellIn)(members, range);
}

PosRange Extremes(Members members) {
  return HWY_DYNAMIC_DISPATCH(Extremes)(members);
}

void AddToPositions(std::int32_t* positions, const std::uint64_t* selected,
                    std::size_t word_count, std::int32_t offset) {
  HWY_DYNAMIC_DISPATCH(AddToPositions)
  (positions, selected, word_count, offset);
}

void WriteMaskRow(const MaskRow& row, float* out) {
  HWY_DYNAMIC_DISPATCH(WriteMaskRowF32)(row, out);
}

void WriteMaskRow(const MaskRow& row, std::uint16_t* out) {
  HWY_DYNAMIC_DISPATCH(WriteMaskRowF16)(row, out);
}

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

namespace {

// Asked for once, before anything is forced: Highway answers with the forced
// target afterwards.
const std::vector<std::int64_t>& TargetBits() {
  static const std::vector<std::int64_t> bits = [] {
    const auto found = hwy::SupportedAndGeneratedTargets();
    return std::vector<std::int64_t>(found.begin(), found.end());
  }();
  return bits;
}

bool ForceTarget(std::string_view name) {
  for (const std::int64_t bit : TargetBits()) {
    if (name != hwy::TargetName(bit)) continue;
    hwy::SetSupportedTargetsForTest(bit);
    return true;
  }
  return false;
}

}  // namespace

std::vector<std::string> SupportedTargets() {
  std::vector<std::string> names;
  for (const std::int64_t bit : TargetBits()) {
    names.emplace_back(hwy::TargetName(bit));
  }
  return names;
}

bool UseTargetFromEnvironment() {
  static const bool known = [] {
    const char* name = std::getenv("KVTWIN_TARGET");
    return name == nullptr || *name == '\0' || ForceTarget(name);
  }();
  return known;
}

bool SelectTarget(std::string_view name) {
  // First, so that the environment does not override this later.
  (void)UseTargetFromEnvironment();
  return ForceTarget(name);
}

std::string ActiveTarget() {
  (void)UseTargetFromEnvironment();
  return HWY_DYNAMIC_DISPATCH(TargetOfThisCode)();
}

}  // namespace kvtwin::optimized
#endif  // HWY_ONCE
