// See kernels.h. Highway compiles this file once for each target.
//
// Cells are taken in words of 64: membership is a word of bits, positions are
// 64 integers, and a vector never straddles two words.

#include "optimized/kernels.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>

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

// The cells of word w of the members at positions in `range`.
HWY_INLINE std::uint64_t SelectWord(const Members& members, std::size_t w,
                                    PosRange range) {
  const std::uint64_t word = members.words[w];
  if (word == 0) return 0;
  const PosRange stored = members.ranges[w];
  if (stored.last < range.first || range.last < stored.first) return 0;
  if (range.first <= stored.first && stored.last <= range.last) return word;
  std::uint64_t excluded = 0;
  for (std::size_t i = 0; i < kWord; i += hn::Lanes(I32())) {
    const auto position = hn::LoadU(I32(), members.positions + w * kWord + i);
    excluded |= BitsOf(Outside(range, position)) << i;
  }
  return word & ~excluded;
}

std::size_t SelectCells(Members members, PosRange range,
                        std::uint64_t* selected) {
  std::size_t count = 0;
  for (std::size_t w = 0; w < members.word_count; ++w) {
    selected[w] = SelectWord(members, w, range);
    count += static_cast<std::size_t>(std::popcount(selected[w]));
  }
  return count;
}

std::size_t FirstCellIn(Members members, PosRange range) {
  for (std::size_t w = 0; w < members.word_count; ++w) {
    const std::uint64_t selected = SelectWord(members, w, range);
    if (selected != 0) {
      return w * kWord + static_cast<std::size_t>(std::countr_zero(selected));
    }
  }
  return SIZE_MAX;
}

std::size_t LastCellIn(Members members, PosRange range) {
  for (std::size_t w = members.word_count; w-- > 0;) {
    const std::uint64_t selected = SelectWord(members, w, range);
    if (selected != 0) {
      return w * kWord + static_cast<std::size_t>(std::bit_width(selected)) - 1;
    }
  }
  return SIZE_MAX;
}

PosRange RangeOf(const std::int32_t* positions, std::uint64_t cells) {
  const auto lowest_start = hn::Set(I32(), INT32_MAX);
  const auto highest_start = hn::Set(I32(), -1);
  auto lowest = lowest_start;
  auto highest = highest_start;
  for (std::size_t i = 0; i < kWord; i += hn::Lanes(I32())) {
    const auto lanes = LanesOf(cells >> i);
    const auto position = hn::LoadU(I32(), positions + i);
    lowest = hn::Min(lowest, hn::IfThenElse(lanes, position, lowest_start));
    highest = hn::Max(highest, hn::IfThenElse(lanes, position, highest_start));
  }
  return {hn::GetLane(hn::MinOfLanes(I32(), lowest)),
          hn::GetLane(hn::MaxOfLanes(I32(), highest))};
}

PosRange Extremes(Members members) {
  PosRange all{.first = INT32_MAX, .last = -1};
  for (std::size_t w = 0; w < members.word_count; ++w) {
    const std::uint64_t word = members.words[w];
    PosRange range = members.ranges[w];
    if (word == 0 || (all.first <= range.first && range.last <= all.last)) {
      continue;
    }
    if (word != ~members.free[w]) {
      range = RangeOf(members.positions + w * kWord, word);
    }
    all.first = std::min(all.first, range.first);
    all.last = std::max(all.last, range.last);
  }
  return all;
}

void AddToPositions(std::int32_t* positions, std::uint64_t cells,
                    std::int32_t offset) {
  const auto offsets = hn::Set(I32(), offset);
  for (std::size_t i = 0; i < kWord; i += hn::Lanes(I32())) {
    const auto position = hn::LoadU(I32(), positions + i);
    const auto step = hn::IfThenElseZero(LanesOf(cells >> i), offsets);
    hn::StoreU(hn::Add(position, step), I32(), positions + i);
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

}  // namespace kvtwin::optimized::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtwin::optimized {

HWY_EXPORT(SelectCells);
HWY_EXPORT(FirstCellIn);
HWY_EXPORT(LastCellIn);
HWY_EXPORT(Extremes);
HWY_EXPORT(RangeOf);
HWY_EXPORT(AddToPositions);
HWY_EXPORT(WriteMaskRowF32);
HWY_EXPORT(WriteMaskRowF16);

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

PosRange RangeOf(const std::int32_t* positions, std::uint64_t cells) {
  return HWY_DYNAMIC_DISPATCH(RangeOf)(positions, cells);
}

void AddToPositions(std::int32_t* positions, std::uint64_t cells,
                    std::int32_t offset) {
  HWY_DYNAMIC_DISPATCH(AddToPositions)(positions, cells, offset);
}

void WriteMaskRow(const MaskRow& row, float* out) {
  HWY_DYNAMIC_DISPATCH(WriteMaskRowF32)(row, out);
}

void WriteMaskRow(const MaskRow& row, std::uint16_t* out) {
  HWY_DYNAMIC_DISPATCH(WriteMaskRowF16)(row, out);
}

}  // namespace kvtwin::optimized
#endif  // HWY_ONCE
