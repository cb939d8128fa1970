// See mask_kernels.h. Highway compiles this file once for each target.
//
// Each column is first computed as a bit, 64 columns at a time: cheap, because
// most words need no comparison of positions. Then the bits are expanded to
// elements of the dtype.

#include "optimized/mask_kernels.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "core/assert.h"
#include "core/index.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimized/mask_kernels.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "optimized/words-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvtwin::optimized::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Columns are handled in chunks, whose bits stay in the first-level cache;
// masks of bits have larger chunks.
constexpr std::size_t kChunk = 128 * kWord;
constexpr std::size_t kBitsChunk = 512 * kWord;

// Handles as many words at a time as there are 64-bit lanes.
using U64 = hn::CappedTag<std::uint64_t, 8>;
using I64 = hn::RebindToSigned<U64>;

HWY_INLINE std::uint64_t VisibleWord(const MaskRow& row, std::size_t w) {
  return SelectWord(row.positions + w * kWord, row.ranges[w], row.members[w],
                    row.range);
}

// Writes the visible cells of the words w .. end - 1. Requires: members is not
// null.
HWY_INLINE void LookAtWords(const MaskRow& row, std::size_t w, std::size_t end,
                            std::uint64_t* out) {
  KVTWIN_DCHECK(row.members != nullptr);
  constexpr std::size_t kLanes = hn::MaxLanes(U64());
  const auto row_first = hn::Set(I64(), row.range.first);
  const auto row_last = hn::Set(I64(), row.range.last);
  for (; w + kLanes <= end; w += kLanes, out += kLanes) {
    // `first` is the lower half of 64 bits. Ranges are loaded as words, not
    // through an array: loading a vector that was just written in parts would
    // stall.
    const auto range = hn::LoadU(
        U64(), reinterpret_cast<const std::uint64_t*>(row.ranges + w));
    const auto first =
        hn::BitCast(I64(), hn::And(range, hn::Set(U64(), UINT32_MAX)));
    const auto last = hn::BitCast(I64(), hn::ShiftRight<32>(range));
    const auto not_inside =
        hn::Or(hn::Gt(row_first, first), hn::Gt(last, row_last));
    const auto members = hn::LoadU(U64(), row.members + w);
    const auto none = hn::RebindMask(I64(), hn::Eq(members, hn::Zero(U64())));
    const auto partly = hn::AndNot(none, not_inside);
    if (HWY_LIKELY(hn::AllFalse(I64(), partly))) {
      hn::StoreU(members, U64(), out);
      continue;
    }
    hn::StoreU(hn::IfThenZeroElse(hn::RebindMask(U64(), not_inside), members),
               U64(), out);
    const auto outside =
        hn::Or(hn::Gt(first, row_last), hn::Gt(row_first, last));
    const auto straddles = hn::AndNot(outside, partly);
    std::array<std::uint8_t, sizeof(std::uint64_t)> lanes;
    hn::StoreMaskBits(I64(), straddles, lanes.data());
    for (unsigned rest = lanes[0]; rest != 0; rest &= rest - 1) {
      const auto i = AsSize(std::countr_zero(rest));
      out[i] = VisibleWord(row, w + i);
    }
  }
  for (; w < end; ++w) *out++ = VisibleWord(row, w);
}

// Copies words; memcpy is slower for few words.
HWY_INLINE void CopyWords(const std::uint64_t* from, std::size_t count,
                          std::uint64_t* to) {
  constexpr std::size_t kLanes = hn::MaxLanes(U64());
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    hn::StoreU(hn::LoadU(U64(), from + i), U64(), to + i);
  }
  for (; i < count; ++i) to[i] = from[i];
}

// Whether all members of the block of word w are visible.
HWY_INLINE bool SeesBlockOf(const MaskRow& row, std::size_t w) {
  if (row.blocks == nullptr) return false;
  const PosRange block = row.blocks[w / kBlockWords];
  return row.range.first <= block.first && block.last <= row.range.last;
}

// Writes the visible cells of the words begin .. end - 1.
HWY_INLINE void VisibleWords(const MaskRow& row, std::size_t begin,
                             std::size_t end, std::uint64_t* out) {
  if (row.members == nullptr) {
    std::fill_n(out, end - begin, 0);
    return;
  }
  for (std::size_t w = begin; w < end;) {
    // Blocks that are alike are handled together.
    const bool whole = SeesBlockOf(row, w);
    std::size_t next = w;
    do {
      next = std::min(end, (next / kBlockWords + 1) * kBlockWords);
    } while (next < end && SeesBlockOf(row, next) == whole);
    if (whole) {
      CopyWords(row.members + w, next - w, out);
    } else {
      LookAtWords(row, w, next, out);
    }
    out += next - w;
    w = next;
  }
}

// Writes one bit for each of the cells first .. first + size - 1, and zeros up
// to a whole word. Requires: size <= kBitsChunk.
HWY_INLINE void VisibleColumns(const MaskRow& row, std::size_t first,
                               std::size_t size, std::uint64_t* bits) {
  KVTWIN_DCHECK(size <= kBitsChunk);
  const std::size_t begin = first / kWord;
  const std::size_t end = (first + size - 1) / kWord + 1;
  const std::size_t shift = first % kWord;
  const std::size_t count = (size + kWord - 1) / kWord;
  if (shift == 0) {
    VisibleWords(row, begin, end, bits);
  } else {
    // A word of columns spans two words of cells, the last perhaps only one.
    std::array<std::uint64_t, kBitsChunk / kWord + 2> words;
    VisibleWords(row, begin, end, words.data());
    words[end - begin] = 0;
    for (std::size_t i = 0; i < count; ++i) {
      bits[i] = words[i] >> shift | words[i + 1] << (kWord - shift);
    }
  }
  bits[count - 1] &= ~std::uint64_t{0} >> (count * kWord - size);
}

// The bits of a chunk.
using ChunkBits = std::array<std::uint64_t, kChunk / kWord>;

constexpr std::size_t kLine = 64;  // Bytes of a cache line.

// A vector is at most a line, so that a word is a whole number of vectors.
template <class T>
using ElementTag = hn::CappedTag<T, kLine / sizeof(T)>;

// Stores 64 elements: past the cache, from the start of a line, or anywhere.
template <bool kStream, class T>
HWY_INLINE void StoreWord(std::uint64_t visible, T minus_inf, T* out) {
  const ElementTag<T> d;
  const auto hidden = hn::Set(d, minus_inf);
  for (std::size_t i = 0; i < kWord; i += hn::Lanes(d)) {
    const auto value = hn::IfThenZeroElse(LanesOf(d, visible >> i), hidden);
    if constexpr (kStream) {
      hn::Stream(value, d, out + i);
    } else {
      hn::StoreU(value, d, out + i);
    }
  }
}

template <class T>
HWY_INLINE void StoreColumns(const ChunkBits& bits, std::size_t size,
                             T minus_inf, bool stream, T* out) {
  const std::size_t words = size / kWord;
  if (stream) {
    for (std::size_t i = 0; i < words; ++i) {
      StoreWord<true>(bits[i], minus_inf, out + i * kWord);
    }
  } else {
    for (std::size_t i = 0; i < words; ++i) {
      StoreWord<false>(bits[i], minus_inf, out + i * kWord);
    }
  }
  if (size % kWord == 0) return;
  // `out` ends with the row: the last word goes through a copy.
  T last[kWord];
  StoreWord<false>(bits[words], minus_inf, last);
  std::copy_n(last, size % kWord, out + words * kWord);
}

// The number of elements before the next cache line begins.
template <class T>
std::size_t BeforeLine(const T* out) {
  const auto at = reinterpret_cast<std::uintptr_t>(out);
  return (kLine - at % kLine) % kLine / sizeof(T);
}

template <class T>
HWY_INLINE void WriteElements(const MaskRow& row, T minus_inf,
                              std::byte* bytes) {
  T* out = reinterpret_cast<T*>(bytes);
  ChunkBits bits;
  std::size_t first = row.first;
  while (first < row.end) {
    // Whole lines are streamed, so the first chunk ends at the start of a line.
    const std::size_t before = row.stream ? BeforeLine(out) : 0;
    const std::size_t size =
        std::min(before > 0 ? before : kChunk, row.end - first);
    VisibleColumns(row, first, size, bits.data());
    StoreColumns(bits, size, minus_inf, row.stream, out);
    first += size;
    out += size;
  }
}

// Writes words to any address, whole lines of them past the cache.
HWY_INLINE void StreamWords(const std::uint64_t* bits, std::size_t count,
                            std::uint64_t* out) {
  std::size_t i = std::min(BeforeLine(out), count);
  std::copy_n(bits, i, out);
  constexpr std::size_t kLanes = hn::MaxLanes(U64());
  for (; i + kLanes <= count; i += kLanes) {
    hn::Stream(hn::LoadU(U64(), bits + i), U64(), out + i);
  }
  std::copy(bits + i, bits + count, out + i);
}

HWY_INLINE void WriteBits(const MaskRow& row, std::byte* bytes) {
  auto* out = reinterpret_cast<std::uint64_t*>(bytes);
  std::array<std::uint64_t, kBitsChunk / kWord> bits;
  for (std::size_t first = row.first; first < row.end; first += kBitsChunk) {
    const std::size_t size = std::min(kBitsChunk, row.end - first);
    VisibleColumns(row, first, size, row.stream ? bits.data() : out);
    if (row.stream) StreamWords(bits.data(), (size + kWord - 1) / kWord, out);
    out += kBitsChunk / kWord;
  }
}

void WriteMaskRowAs(const MaskRow& row, DType dtype, std::byte* out) {
  if (dtype == DType::kBits) return WriteBits(row, out);
  if (dtype == DType::kF32) {
    return WriteElements(row, std::uint32_t{0xFF800000}, out);
  }
  const std::uint16_t minus_inf = dtype == DType::kF16 ? 0xFC00 : 0xFF80;
  WriteElements(row, minus_inf, out);
}

}  // namespace kvtwin::optimized::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtwin::optimized {

HWY_EXPORT(WriteMaskRowAs);

void WriteMaskRow(const MaskRow& row, DType dtype, std::byte* out) {
  HWY_DYNAMIC_DISPATCH(WriteMaskRowAs)(row, dtype, out);
}

}  // namespace kvtwin::optimized
#endif  // HWY_ONCE
