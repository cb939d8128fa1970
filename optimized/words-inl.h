// Cells in words of 64: membership is a word of bits, positions are 64
// integers, and a vector never straddles two words. Included once for each
// target by the kernels, see targets.h.

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/assert.h"
#include "hwy/highway.h"
#include "optimized/kernels.h"

#if defined(KVTWIN_OPTIMIZED_WORDS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTWIN_OPTIMIZED_WORDS_INL_H_
#undef KVTWIN_OPTIMIZED_WORDS_INL_H_
#else
#define KVTWIN_OPTIMIZED_WORDS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace kvtwin::optimized::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes, so that a word is a whole number of vectors everywhere.
using I32 = hn::CappedTag<std::int32_t, 16>;
constexpr std::size_t kWord = 64;  // Cells per word.

// The lanes whose bit is set, lane 0 being the lowest bit.
template <class D>
HWY_INLINE hn::Mask<D> LanesOf(D d, std::uint64_t bits) {
  std::array<std::uint8_t, sizeof(bits)> bytes;
  std::memcpy(bytes.data(), &bits, sizeof(bits));
  return hn::LoadMaskBits(d, bytes.data());
}

// The bits of set lanes. They are read as wide as they were written: a wider
// load would wait for the store.
HWY_INLINE std::uint64_t BitsOf(hn::Mask<I32> lanes) {
  using Bits = std::conditional_t<(hn::MaxLanes(I32()) > 8), std::uint16_t,
                                  std::uint8_t>;
  std::array<std::uint8_t, sizeof(std::uint64_t)> bytes;
  hn::StoreMaskBits(I32(), lanes, bytes.data());
  Bits bits;
  std::memcpy(&bits, bytes.data(), sizeof(bits));
  return bits;
}

// The lanes outside of the range. Comparing cannot overflow.
HWY_INLINE hn::Mask<I32> Outside(PosRange range, hn::Vec<I32> position) {
  return hn::Or(hn::Gt(hn::Set(I32(), range.first), position),
                hn::Gt(position, hn::Set(I32(), range.last)));
}

// Whether all members are at positions in `range`.
inline bool AllIn(const std::int32_t* positions, std::uint64_t word,
                  PosRange range) {
  for (; word != 0; word &= word - 1) {
    const std::int32_t position = positions[std::countr_zero(word)];
    if (position < range.first || range.last < position) return false;
  }
  return true;
}

// The members of a word at positions in `range`. Requires: all members are at
// positions in `stored`.
HWY_INLINE std::uint64_t SelectWord(const std::int32_t* positions,
                                    PosRange stored, std::uint64_t word,
                                    PosRange range) {
  KVTWIN_DCHECK(AllIn(positions, word, stored));
  if (word == 0) return 0;
  if (stored.last < range.first || range.last < stored.first) return 0;
  if (range.first <= stored.first && stored.last <= range.last) return word;
  std::uint64_t excluded = 0;
  for (std::size_t i = 0; i < kWord; i += hn::Lanes(I32())) {
    const auto position = hn::LoadU(I32(), positions + i);
    excluded |= BitsOf(Outside(range, position)) << i;
  }
  return word & ~excluded;
}

}  // namespace kvtwin::optimized::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
