// The rows of tiles of K and V as vectors of f32, for each dtype. Included once
// for each target by the kernels, see targets.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/elements.h"
#include "core/index.h"
#include "hwy/highway.h"
#include "optimized/attention_kernels.h"
#include "optimized/narrow-inl.h"
#include "optimized/tile_walk.h"
#include "optimized/words-inl.h"

#if defined(KVTWIN_OPTIMIZED_TILE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTWIN_OPTIMIZED_TILE_ROWS_INL_H_
#undef KVTWIN_OPTIMIZED_TILE_ROWS_INL_H_
#else
#define KVTWIN_OPTIMIZED_TILE_ROWS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace kvtwin::optimized::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, kHeadPadding>;
using OneF32 = hn::CappedTag<float, 1>;
using V = hn::Vec<F32>;
constexpr std::size_t kLanes = hn::MaxLanes(F32());

// Rows of each dtype: Load(row, i) returns the elements from i on, a multiple
// of the lanes, as f32, in units of RowUnit.
struct F32Rows {
  HWY_INLINE static V Load(const std::byte* row, std::size_t i) {
    return hn::LoadU(F32(), reinterpret_cast<const float*>(row) + i);
  }
};

template <class Format>
struct NarrowRows {
  HWY_INLINE static V Load(const std::byte* row, std::size_t i) {
    using T = typename Format::T;
    const hn::Rebind<T, F32> d;
    return Format::Floats(F32(),
                          hn::LoadU(d, reinterpret_cast<const T*>(row) + i));
  }
};

// Elements of a cache line of rows that are fetched while others are
// multiplied (FetchesWithin). 0: of other dtypes.
template <class Rows>
constexpr std::size_t kLineElements = 0;
template <>
inline constexpr std::size_t kLineElements<F32Rows> = 64 / sizeof(float);
template <class Format>
inline constexpr std::size_t kLineElements<NarrowRows<Format>> =
    64 / sizeof(typename Format::T);

// A finite f8 with the bits of its magnitude moved to those of an f16 is 2^8
// times too small, subnormal or not. A NaN becomes a number, as the results of
// rows that see it are unspecified.
struct F8Rows {
  HWY_INLINE static V Load(const std::byte* row, std::size_t i) {
    const hn::Rebind<std::int8_t, F32> d;
    const ShortsOf<F32> shorts;
    const auto wide = hn::PromoteTo(
        shorts, hn::LoadU(d, reinterpret_cast<const std::int8_t*>(row) + i));
    const auto bits = hn::And(hn::ShiftLeft<7>(wide),
                              hn::Set(shorts, static_cast<short>(0xBF80)));
    return FromHalves(F32(), hn::BitCast(HalvesOf<F32>(), bits));
  }
};

HWY_INLINE float ScaleOfBlock(const std::byte* block) {
  std::uint16_t half;
  std::memcpy(&half, block, sizeof(half));
  const HalvesOf<OneF32> halves;
  return hn::GetLane(HalfFormat::Floats(OneF32(), hn::Set(halves, half)));
}

struct Q8Rows {
  HWY_INLINE static V Load(const std::byte* row, std::size_t i) {
    constexpr std::size_t kBytes = 2 + kBlockElements;
    const std::byte* block = row + i / kBlockElements * kBytes;
    const hn::Rebind<std::int8_t, F32> d;
    const auto* numbers = reinterpret_cast<const std::int8_t*>(block + 2);
    const auto number =
        hn::PromoteTo(I32(), hn::LoadU(d, numbers + i % kBlockElements));
    return hn::Mul(hn::Set(F32(), ScaleOfBlock(block)),
                   hn::ConvertTo(F32(), number));
  }
};

struct Q4Rows {
  HWY_INLINE static V Load(const std::byte* row, std::size_t i) {
    constexpr std::size_t kPairs = kBlockElements / 2;
    const std::byte* block = row + i / kBlockElements * (2 + kPairs);
    const hn::Rebind<std::uint8_t, F32> d;
    const auto* pairs = reinterpret_cast<const std::uint8_t*>(block + 2);
    const auto both = hn::PromoteTo(I32(), hn::LoadU(d, pairs + i % kPairs));
    const auto low = hn::And(both, hn::Set(I32(), 15));
    const auto high = hn::ShiftRight<4>(both);
    const auto number =
        hn::Sub(i % kBlockElements < kPairs ? low : high, hn::Set(I32(), 8));
    return hn::Mul(hn::Set(F32(), ScaleOfBlock(block)),
                   hn::ConvertTo(F32(), number));
  }
};

// Calls does(rows) with the Rows of a dtype.
template <class Does>
HWY_INLINE void WithRows(DType dtype, const Does& does) {
  switch (dtype) {
    case DType::kF16:
      return does(NarrowRows<HalfFormat>());
    case DType::kBF16:
      return does(NarrowRows<UpperFormat>());
    case DType::kF8:
      return does(F8Rows());
    case DType::kQ8:
      return does(Q8Rows());
    case DType::kQ4:
      return does(Q4Rows());
    default:
      return does(F32Rows());
  }
}

// The rows of a tile as they are, or converted to f32, adjacent, and padded
// with zeros, if they cannot be read a vector at a time.
HWY_INLINE bool IsReadable(const TileRows& rows) {
  return rows.adjacent && rows.head_dim % kLanes == 0;
}

// Copies one head of the rows to [padded head_dim, cells].
inline void Unpack(const TileRows& rows, std::size_t cells, std::size_t kv_head,
                   float* to) {
  const std::size_t padded = Padded(rows.head_dim);
  const std::ptrdiff_t offset = HeadOffset(rows, kv_head);
  if (IsReadable(rows)) {
    WithRows(rows.dtype, [&](auto format) HWY_ATTR {
      for (std::size_t t = 0; t < cells; ++t) {
        for (std::size_t i = 0; i < rows.head_dim; i += kLanes) {
          hn::Store(decltype(format)::Load(rows.rows[t] + offset, i), F32(),
                    to + t * padded + i);
        }
      }
    });
    return;
  }
  for (std::size_t t = 0; t < cells; ++t) {
    const std::byte* row = rows.rows[t] + offset;
    float* out = to + t * padded;
    for (std::size_t i = 0; i < rows.head_dim; ++i) {
      out[i] = LoadElement(row + static_cast<std::ptrdiff_t>(i) * rows.stride,
                           rows.dtype) /
               RowUnit(rows.dtype);
    }
    std::fill(out + rows.head_dim, out + padded, 0.0f);
  }
}

}  // namespace kvtwin::optimized::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVTWIN_OPTIMIZED_TILE_ROWS_INL_H_
