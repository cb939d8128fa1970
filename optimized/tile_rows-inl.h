// The rows of tiles of K and V as vectors of f32, for each dtype. Included once
// for each target by the kernels, see targets.h.

#include <algorithm>
#include <array>
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

// The scale of rows that have none.
struct NoScale {
  HWY_INLINE static NoScale Of(const std::byte* /*block*/) { return {}; }
};

// Rows of each dtype, of blocks of kElements in kBytes: Load(block, i, scale)
// returns elements [i, i + kLanes) of a block as f32, in units of RowUnit. The
// scale is Scale::Of(block). kLineElements: elements of a cache line, if rows
// are fetched while others are multiplied (FetchesWithin); else 0.
template <std::size_t element_bytes>
struct UnscaledRows {
  static constexpr std::size_t kElements = kLanes;
  static constexpr std::size_t kBytes = kLanes * element_bytes;
  static constexpr std::size_t kLineElements =
      element_bytes == 1 ? 0 : 64 / element_bytes;
  using Scale = NoScale;
};

struct F32Rows : UnscaledRows<sizeof(float)> {
  HWY_INLINE static V Load(const std::byte* block, std::size_t /*i*/, NoScale) {
    return hn::LoadU(F32(), reinterpret_cast<const float*>(block));
  }
};

template <class Format>
struct NarrowRows : UnscaledRows<sizeof(typename Format::T)> {
  HWY_INLINE static V Load(const std::byte* block, std::size_t /*i*/, NoScale) {
    using T = typename Format::T;
    const hn::Rebind<T, F32> d;
    return Format::Floats(F32(),
                          hn::LoadU(d, reinterpret_cast<const T*>(block)));
  }
};

// A finite f8 with the bits of its magnitude moved to those of an f16 is 2^8
// times too small, subnormal or not. A NaN becomes a number, as the results of
// rows that see it are unspecified.
struct F8Rows : UnscaledRows<1> {
  HWY_INLINE static V Load(const std::byte* block, std::size_t /*i*/, NoScale) {
    const hn::Rebind<std::int8_t, F32> d;
    const ShortsOf<F32> shorts;
    const auto wide = hn::PromoteTo(
        shorts, hn::LoadU(d, reinterpret_cast<const std::int8_t*>(block)));
    const auto bits = hn::And(hn::ShiftLeft<7>(wide),
                              hn::Set(shorts, static_cast<short>(0xBF80)));
    return FromHalves(F32(), hn::BitCast(HalvesOf<F32>(), bits));
  }
};

HWY_INLINE std::uint16_t HalfAt(const std::byte* from) {
  std::uint16_t half;
  std::memcpy(&half, from, sizeof(half));
  return half;
}

struct BlockScale {
  float value;

  HWY_INLINE static BlockScale Of(const std::byte* block) {
    const HalvesOf<OneF32> halves;
    return {hn::GetLane(
        HalfFormat::Floats(OneF32(), hn::Set(halves, HalfAt(block))))};
  }
};

// Rows of blocks that begin with their scale.
template <std::size_t number_bytes>
struct ScaledRows {
  static constexpr std::size_t kElements = kBlockElements;
  static constexpr std::size_t kBytes = sizeof(std::uint16_t) + number_bytes;
  static constexpr std::size_t kLineElements = 0;
  using Scale = BlockScale;
};

struct Q8Rows : ScaledRows<kBlockElements> {
  HWY_INLINE static V Load(const std::byte* block, std::size_t i,
                           BlockScale scale) {
    const hn::Rebind<std::int8_t, F32> d;
    const auto* numbers = reinterpret_cast<const std::int8_t*>(block + 2);
    const auto number = hn::PromoteTo(I32(), hn::LoadU(d, numbers + i));
    return hn::Mul(hn::Set(F32(), scale.value), hn::ConvertTo(F32(), number));
  }
};

struct Q4Rows : ScaledRows<kBlockElements / 2> {
  HWY_INLINE static V Load(const std::byte* block, std::size_t i,
                           BlockScale scale) {
    constexpr std::size_t kPairs = kBlockElements / 2;
    const hn::Rebind<std::uint8_t, F32> d;
    const auto* pairs = reinterpret_cast<const std::uint8_t*>(block + 2);
    const auto both = hn::PromoteTo(I32(), hn::LoadU(d, pairs + i % kPairs));
    const auto low = hn::And(both, hn::Set(I32(), 15));
    const auto high = hn::ShiftRight<4>(both);
    const auto number = hn::Sub(i < kPairs ? low : high, hn::Set(I32(), 8));
    return hn::Mul(hn::Set(F32(), scale.value), hn::ConvertTo(F32(), number));
  }
};

// One block of each of four rows.
using FourBlocks = std::array<const std::byte*, 4>;

HWY_INLINE std::array<NoScale, 4> LoadScales(const FourBlocks&, NoScale) {
  return {};
}

// Converts the scales of four blocks together. They are put together in
// registers of integers, as the instructions that insert into vectors or
// convert one number compete with products.
template <class Scale, class D = hn::CappedTag<float, 4>>
HWY_INLINE std::array<Scale, 4> LoadScales(const FourBlocks& blocks, Scale) {
  if constexpr (hn::MaxLanes(D()) < 4) {
    return {Scale::Of(blocks[0]), Scale::Of(blocks[1]), Scale::Of(blocks[2]),
            Scale::Of(blocks[3])};
  } else {
    const std::uint64_t halves = HalfAt(blocks[0]) |
                                 std::uint64_t{HalfAt(blocks[1])} << 16 |
                                 std::uint64_t{HalfAt(blocks[2])} << 32 |
                                 std::uint64_t{HalfAt(blocks[3])} << 48;
    const hn::Repartition<std::uint64_t, HalvesOf<D>> bits;
    alignas(16) float scales[4];
    hn::Store(HalfFormat::Floats(
                  D(), hn::BitCast(HalvesOf<D>(), hn::Set(bits, halves))),
              D(), scales);
    return {Scale{scales[0]}, Scale{scales[1]}, Scale{scales[2]},
            Scale{scales[3]}};
  }
}

// Calls does(i, vector of each row) for elements [i, i + kLanes) of four rows,
// from the first to the last. Requires: head_dim % Rows::kElements == 0.
template <class Rows, class Does>
HWY_INLINE void ForEachVector(const FourBlocks& rows, std::size_t head_dim,
                              const Does& does) {
  // Four addresses that advance would be kept in a vector by GCC.
  const std::byte* row0 = rows[0];
  const std::byte* row1 = rows[1];
  const std::byte* row2 = rows[2];
  const std::byte* row3 = rows[3];
  std::size_t byte = 0;
  for (std::size_t b = 0; b < head_dim; b += Rows::kElements) {
    const auto scales =
        LoadScales({row0 + byte, row1 + byte, row2 + byte, row3 + byte},
                   typename Rows::Scale());
    HWY_UNROLL(2)
    for (std::size_t i = 0; i < Rows::kElements; i += kLanes) {
      does(b + i, Rows::Load(row0 + byte, i, scales[0]),
           Rows::Load(row1 + byte, i, scales[1]),
           Rows::Load(row2 + byte, i, scales[2]),
           Rows::Load(row3 + byte, i, scales[3]));
    }
    byte += Rows::kBytes;
  }
}

// Calls does(i, vector) for elements [i, i + kLanes) of one row.
template <class Rows, class Does>
HWY_INLINE void ForEachVector(const std::byte* row, std::size_t head_dim,
                              const Does& does) {
  for (std::size_t b = 0; b < head_dim; b += Rows::kElements) {
    const auto scale = Rows::Scale::Of(row);
    for (std::size_t i = 0; i < Rows::kElements; i += kLanes) {
      does(b + i, Rows::Load(row, i, scale));
    }
    row += Rows::kBytes;
  }
}

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
        ForEachVector<decltype(format)>(
            rows.rows[t] + offset, rows.head_dim,
            [&](std::size_t i, V v)
                HWY_ATTR { hn::Store(v, F32(), to + t * padded + i); });
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
