// See row_kernels.h. Highway compiles this file once for each target.

#include "optimized/row_kernels.h"

#include <algorithm>
#include <cstring>

#include "core/assert.h"
#include "core/index.h"
#include "optimized/block_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimized/row_kernels.cc"
// These headers must come after the target is chosen.
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "optimized/aligned_buffer.h"
#include "optimized/narrow-inl.h"
#include "optimized/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvtwin::optimized::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes: a remainder is copied to a buffer of this size.
constexpr std::size_t kLanesMax = 16;
using F32 = hn::CappedTag<float, kLanesMax>;
constexpr std::size_t kLine = 64;

// Applies convert(from, to), which handles one vector, to count elements.
template <class From, class To, class Convert>
HWY_INLINE void ForEachVector(const From* from, To* to, std::size_t count,
                              const Convert& convert) {
  const std::size_t lanes = hn::Lanes(F32());
  std::size_t i = 0;
  HWY_UNROLL(4)
  for (; i + lanes <= count; i += lanes) convert(from + i, to + i);
  if (i == count) return;
  // Converts the remainder in a copy, so that nothing past the end is touched.
  From rest[kLanesMax] = {};
  To converted[kLanesMax];
  std::copy(from + i, from + count, rest);
  convert(rest, converted);
  std::copy(converted, converted + (count - i), to + i);
}

// Calls does(format) with the format of `dtype`.
template <class Does>
HWY_INLINE void WithFormat(DType dtype, const Does& does) {
  if (dtype == DType::kF16) return does(HalfFormat());
  if (dtype == DType::kBF16) return does(UpperFormat());
  does(F8Format());
}

template <class Format>
HWY_INLINE void RoundTo(Format, const float* from, typename Format::T* to,
                        std::size_t count) {
  using T = typename Format::T;
  ForEachVector(from, to, count, [](const float* in, T* out) HWY_ATTR {
    const F32 d;
    hn::StoreU(Format::Canonical(d, hn::LoadU(d, in)), hn::Rebind<T, F32>(),
               out);
  });
}

void RoundToAny(DType dtype, const float* from, std::byte* to,
                std::size_t count) {
  WithFormat(dtype, [&](auto format) HWY_ATTR {
    using T = typename decltype(format)::T;
    RoundTo(format, from, reinterpret_cast<T*>(to), count);
  });
}

void WidenFromAny(DType dtype, const std::byte* from, float* to,
                  std::size_t count) {
  WithFormat(dtype, [&](auto format) HWY_ATTR {
    using Format = decltype(format);
    using T = typename Format::T;
    ForEachVector(reinterpret_cast<const T*>(from), to, count,
                  [](const T* in, float* out) HWY_ATTR {
                    const F32 d;
                    const hn::Rebind<T, F32> stored;
                    hn::StoreU(Format::Exact(d, hn::LoadU(stored, in)), d, out);
                  });
  });
}

// The bytes before the first whole cache line at or after `to`, at most
// `bytes`.
HWY_INLINE std::size_t BytesBeforeLine(const void* to, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(to);
  return std::min(bytes, (kLine - address % kLine) % kLine);
}

#if HWY_TARGET == HWY_SCALAR

template <class Format>
HWY_INLINE void StreamLineAs(Format format, const float* from,
                             typename Format::T* to) {
  RoundTo(format, from, to, kLine / sizeof(*to));
}

// Requires: `to` lies on a cache line.
HWY_INLINE void StreamLine(const std::byte* from, std::byte* to) {
  KVTWIN_DCHECK(IsOnCacheLine(to));
  std::memcpy(to, from, kLine);
}

#else

// Only whole vectors can be streamed: they are combined from two vectors of
// halves, or four vectors of bytes.
template <class Format>
HWY_INLINE hn::Vec<hn::Twice<HalvesOf<F32> > > WholeVector(Format,
                                                           const float* from) {
  const F32 d;
  const hn::Twice<HalvesOf<F32> > halves;
  const auto low = Format::Canonical(d, hn::LoadU(d, from));
  const auto high = Format::Canonical(d, hn::LoadU(d, from + hn::Lanes(d)));
  return hn::Combine(halves, high, low);
}
HWY_INLINE hn::Vec<hn::Twice<hn::Twice<BytesOf<F32> > > > WholeVector(
    F8Format, const float* from) {
  const F32 d;
  const std::size_t lanes = hn::Lanes(d);
  const hn::Twice<BytesOf<F32> > two;
  const hn::Twice<decltype(two)> four;
  const auto next = [&](std::size_t i) HWY_ATTR {
    return F8Format::Canonical(d, hn::LoadU(d, from + i * lanes));
  };
  return hn::Combine(four, hn::Combine(two, next(3), next(2)),
                     hn::Combine(two, next(1), next(0)));
}

template <class Format>
HWY_INLINE void StreamLineAs(Format format, const float* from,
                             typename Format::T* to) {
  using T = typename Format::T;
  const hn::CappedTag<T, kLine / sizeof(T)> d;
  HWY_UNROLL(4)
  for (std::size_t i = 0; i < kLine / sizeof(T); i += hn::Lanes(d)) {
    hn::Stream(WholeVector(format, from + i), d, to + i);
  }
}

// Requires: `to` lies on a cache line.
HWY_INLINE void StreamLine(const std::byte* from, std::byte* to) {
  KVTWIN_DCHECK(IsOnCacheLine(to));
  const hn::CappedTag<std::uint8_t, kLine> d;
  const auto* in = reinterpret_cast<const std::uint8_t*>(from);
  auto* out = reinterpret_cast<std::uint8_t*>(to);
  HWY_UNROLL(4)
  for (std::size_t i = 0; i < kLine; i += hn::Lanes(d)) {
    hn::Stream(hn::LoadU(d, in + i), d, out + i);
  }
}

#endif  // HWY_TARGET

void StreamAsAny(DType dtype, const float* from, std::byte* bytes,
                 std::size_t count) {
  WithFormat(dtype, [&](auto format) HWY_ATTR {
    using T = typename decltype(format)::T;
    constexpr std::size_t kLineElements = kLine / sizeof(T);
    T* to = reinterpret_cast<T*>(bytes);
    std::size_t i = BytesBeforeLine(to, count * sizeof(T)) / sizeof(T);
    RoundTo(format, from, to, i);
    for (; i + kLineElements <= count; i += kLineElements) {
      StreamLineAs(format, from + i, to + i);
    }
    RoundTo(format, from + i, to + i, count - i);
  });
}

void StreamBytes(const std::byte* from, std::byte* to, std::size_t bytes) {
  std::size_t i = BytesBeforeLine(to, bytes);
  std::memcpy(to, from, i);
  for (; i + kLine <= bytes; i += kLine) StreamLine(from + i, to + i);
  std::memcpy(to + i, from + i, bytes - i);
}

void StreamRows(const RowCopies& rows, const RowCopies& next,
                std::size_t bytes) {
  RowCopies left = rows;
  std::size_t lines = bytes / kLine;
  for (RowCopy& row : left) {
    const std::size_t before = BytesBeforeLine(row.to, bytes);
    std::memcpy(row.to, row.from, before);
    row = {.from = row.from + before, .to = row.to + before};
    lines = std::min(lines, (bytes - before) / kLine);
  }
  for (std::size_t i = 0; i < lines * kLine; i += kLine) {
    HWY_UNROLL(4)
    for (std::size_t r = 0; r < left.size(); ++r) {
      // Into the second-level cache: fetches into the first one are slower.
      __builtin_prefetch(next[r].from + i, 0, 2);
      StreamLine(left[r].from + i, left[r].to + i);
    }
  }
  for (std::size_t r = 0; r < left.size(); ++r) {
    const std::byte* const end = rows[r].from + bytes;
    const std::byte* const from = left[r].from + lines * kLine;
    StreamBytes(from, left[r].to + lines * kLine, AsSize(end - from));
  }
}

#if HWY_TARGET != HWY_SCALAR
// Transposes bytes two columns at a time, as one column of 16 bits.
template <class Write>
HWY_INLINE void TransposeTile(const std::uint8_t* rows, std::size_t row_stride,
                              std::size_t count, const Write& write,
                              std::size_t columns) {
  TransposeTile(
      reinterpret_cast<const std::uint16_t*>(rows), row_stride / 2, count,
      [&](auto d, std::size_t r, std::size_t c, auto both) HWY_ATTR {
        const hn::RebindToSigned<decltype(d)> shorts;
        const hn::Rebind<std::uint8_t, decltype(d)> bytes;
        const auto low = hn::And(both, hn::Set(d, 0xFF));
        const auto high = hn::ShiftRight<8>(both);
        write(bytes, r, 2 * c, hn::DemoteTo(bytes, hn::BitCast(shorts, low)));
        write(bytes, r, 2 * c + 1,
              hn::DemoteTo(bytes, hn::BitCast(shorts, high)));
      },
      columns / 2);
}
#endif

template <class T>
HWY_INLINE void TransposeInto(const T* rows, std::size_t row_stride,
                              std::size_t count, T* tile) {
  TransposeTile(
      rows, row_stride, count,
      [&](auto d, std::size_t r, std::size_t c, auto v)
          HWY_ATTR { hn::Store(v, d, tile + c * kTileRows + r); },
      kTileColumns);
}

template <class T>
HWY_INLINE void StreamTransposedTo(const T* rows, std::size_t row_stride,
                                   std::byte* to, std::size_t stride) {
  TransposeTile(
      rows, row_stride, kTileRows,
      [&](auto d, std::size_t r, std::size_t c, auto v) HWY_ATTR {
        hn::Stream(v, d, reinterpret_cast<T*>(to + c * stride) + r);
      },
      kTileColumns);
}

void TransposeF8(const std::uint8_t* rows, std::size_t row_stride,
                 std::size_t count, std::uint8_t* tile) {
  TransposeInto(rows, row_stride, count, tile);
}

void TransposeF32(const float* rows, std::size_t row_stride, std::size_t count,
                  float* tile) {
  TransposeInto(rows, row_stride, count, tile);
}

void TransposeF16(const std::uint16_t* rows, std::size_t row_stride,
                  std::size_t count, std::uint16_t* tile) {
  TransposeInto(rows, row_stride, count, tile);
}

void StreamTransposedF32(const float* rows, std::size_t row_stride,
                         std::byte* to, std::size_t stride) {
  StreamTransposedTo(rows, row_stride, to, stride);
}

void StreamTransposedF16(const std::uint16_t* rows, std::size_t row_stride,
                         std::byte* to, std::size_t stride) {
  StreamTransposedTo(rows, row_stride, to, stride);
}

}  // namespace kvtwin::optimized::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtwin::optimized {

HWY_EXPORT(RoundToAny);
HWY_EXPORT(WidenFromAny);
HWY_EXPORT(StreamAsAny);
HWY_EXPORT(StreamBytes);
HWY_EXPORT(StreamRows);
HWY_EXPORT(TransposeF8);
HWY_EXPORT(TransposeF32);
HWY_EXPORT(TransposeF16);
HWY_EXPORT(StreamTransposedF32);
HWY_EXPORT(StreamTransposedF16);

void RoundF32(DType dtype, const float* from, std::byte* to,
              std::size_t count) {
  if (IsBlockDType(dtype)) return QuantizeF32(dtype, from, to, count);
  HWY_DYNAMIC_DISPATCH(RoundToAny)(dtype, from, to, count);
}

void WidenToF32(DType dtype, const std::byte* from, float* to,
                std::size_t count) {
  if (IsBlockDType(dtype)) return DequantizeToF32(dtype, from, to, count);
  HWY_DYNAMIC_DISPATCH(WidenFromAny)(dtype, from, to, count);
}

void StreamRoundedF32(DType dtype, const float* from, std::byte* to,
                      std::size_t count) {
  HWY_DYNAMIC_DISPATCH(StreamAsAny)(dtype, from, to, count);
}

void StreamBytes(const std::byte* from, std::byte* to, std::size_t bytes) {
  HWY_DYNAMIC_DISPATCH(StreamBytes)(from, to, bytes);
}

void StreamRows(const RowCopies& rows, const RowCopies& next,
                std::size_t bytes) {
  HWY_DYNAMIC_DISPATCH(StreamRows)(rows, next, bytes);
}

void FenceStreams() { hwy::FlushStream(); }

void Transpose(const float* rows, std::size_t row_stride, std::size_t count,
               float* tile) {
  KVTWIN_DCHECK(IsOnCacheLine(tile));
  HWY_DYNAMIC_DISPATCH(TransposeF32)(rows, row_stride, count, tile);
}

void Transpose(const std::uint16_t* rows, std::size_t row_stride,
               std::size_t count, std::uint16_t* tile) {
  KVTWIN_DCHECK(IsOnCacheLine(tile));
  HWY_DYNAMIC_DISPATCH(TransposeF16)(rows, row_stride, count, tile);
}

void Transpose(const std::uint8_t* rows, std::size_t row_stride,
               std::size_t count, std::uint8_t* tile) {
  KVTWIN_DCHECK(IsOnCacheLine(tile));
  HWY_DYNAMIC_DISPATCH(TransposeF8)(rows, row_stride, count, tile);
}

void StreamTransposed(const float* rows, std::size_t row_stride, std::byte* to,
                      std::size_t stride) {
  KVTWIN_DCHECK(IsOnCacheLine(to));
  KVTWIN_DCHECK(stride % kCacheLine == 0);
  HWY_DYNAMIC_DISPATCH(StreamTransposedF32)(rows, row_stride, to, stride);
}

void StreamTransposed(const std::uint16_t* rows, std::size_t row_stride,
                      std::byte* to, std::size_t stride) {
  KVTWIN_DCHECK(IsOnCacheLine(to));
  KVTWIN_DCHECK(stride % kCacheLine == 0);
  HWY_DYNAMIC_DISPATCH(StreamTransposedF16)(rows, row_stride, to, stride);
}

}  // namespace kvtwin::optimized
#endif  // HWY_ONCE
