// See kernels.h. Highway compiles this file once for each target.

#include "optimized/kernels.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "core/assert.h"
#include "core/index.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimized/kernels.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "optimized/words-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvtwin::optimized::HWY_NAMESPACE {

// The members in word w at positions in `range`.
HWY_INLINE std::uint64_t SelectWord(const Members& members, std::size_t w,
                                    PosRange range) {
  return SelectWord(members.positions + w * kWord, members.ranges[w],
                    members.words[w], range);
}

std::size_t SelectCells(Members members, PosRange range,
                        std::uint64_t* selected) {
  std::size_t count = 0;
  for (std::size_t w = 0; w < members.word_count; ++w) {
    selected[w] = SelectWord(members, w, range);
    count += AsSize(std::popcount(selected[w]));
  }
  return count;
}

std::size_t FirstCellIn(Members members, PosRange range) {
  for (std::size_t w = 0; w < members.word_count; ++w) {
    const std::uint64_t selected = SelectWord(members, w, range);
    if (selected != 0) {
      return w * kWord + AsSize(std::countr_zero(selected));
    }
  }
  return SIZE_MAX;
}

std::size_t LastCellIn(Members members, PosRange range) {
  for (std::size_t w = members.word_count; w-- > 0;) {
    const std::uint64_t selected = SelectWord(members, w, range);
    if (selected != 0) {
      return w * kWord + AsSize(std::bit_width(selected)) - 1;
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
    const auto lanes = LanesOf(I32(), cells >> i);
    const auto position = hn::LoadU(I32(), positions + i);
    lowest = hn::Min(lowest, hn::IfThenElse(lanes, position, lowest_start));
    highest = hn::Max(highest, hn::IfThenElse(lanes, position, highest_start));
  }
  return {hn::GetLane(hn::MinOfLanes(I32(), lowest)),
          hn::GetLane(hn::MaxOfLanes(I32(), highest))};
}

HWY_INLINE PosRange RangeOfWord(const Members& members, std::size_t w) {
  const std::uint64_t word = members.words[w];
  if (word == ~members.free[w]) return members.ranges[w];
  return RangeOf(members.positions + w * kWord, word);
}

// Most sequences have their lowest positions in their first cells and their
// highest positions in their last cells, so that few words are searched.
PosRange Extremes(Members members) {
  PosRange all{.first = INT32_MAX, .last = -1};
  for (std::size_t w = 0; w < members.word_count; ++w) {
    if (members.ranges[w].first < all.first && members.words[w] != 0) {
      all.first = std::min(all.first, RangeOfWord(members, w).first);
    }
  }
  for (std::size_t w = members.word_count; w-- > 0;) {
    if (members.ranges[w].last > all.last && members.words[w] != 0) {
      all.last = std::max(all.last, RangeOfWord(members, w).last);
    }
  }
  return all;
}

void AddToPositions(std::int32_t* positions, std::uint64_t cells,
                    std::int32_t offset) {
  const auto offsets = hn::Set(I32(), offset);
  for (std::size_t i = 0; i < kWord; i += hn::Lanes(I32())) {
    const auto position = hn::LoadU(I32(), positions + i);
    const auto step = hn::IfThenElseZero(LanesOf(I32(), cells >> i), offsets);
    hn::StoreU(hn::Add(position, step), I32(), positions + i);
  }
}

std::size_t ListCells(std::uint64_t cells, std::int32_t first,
                      std::int32_t* out) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < kWord; i += hn::Lanes(I32())) {
    const auto cell = hn::Iota(I32(), first + static_cast<std::int32_t>(i));
    const auto lanes = LanesOf(I32(), cells >> i);
    // A whole vector is stored: there is room, and Zen 4 takes 100 cycles for
    // an instruction that compresses into memory.
    hn::StoreU(hn::Compress(cell, lanes), I32(), out + count);
    count += hn::CountTrue(I32(), lanes);
  }
  return count;
}

}  // namespace kvtwin::optimized::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtwin::optimized {
namespace {

bool NoneOverflows(const std::int32_t* positions, std::uint64_t cells,
                   std::int32_t offset) {
  for (; cells != 0; cells &= cells - 1) {
    const std::int64_t position = positions[std::countr_zero(cells)];
    if (!std::in_range<std::int32_t>(position + offset)) return false;
  }
  return true;
}

}  // namespace

HWY_EXPORT(SelectCells);
HWY_EXPORT(FirstCellIn);
HWY_EXPORT(LastCellIn);
HWY_EXPORT(Extremes);
HWY_EXPORT(RangeOf);
HWY_EXPORT(AddToPositions);
HWY_EXPORT(ListCells);

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
  KVTWIN_DCHECK(NoneOverflows(positions, cells, offset));
  HWY_DYNAMIC_DISPATCH(AddToPositions)(positions, cells, offset);
}

std::size_t ListCells(std::uint64_t cells, std::int32_t first,
                      std::int32_t* out) {
  return HWY_DYNAMIC_DISPATCH(ListCells)(cells, first, out);
}

}  // namespace kvtwin::optimized
#endif  // HWY_ONCE
