// The softmax of attention. Included once for each target by the kernels, see
// targets.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "optimized/attention_kernels.h"
#include "optimized/tile_rows-inl.h"

#if defined(KVTWIN_OPTIMIZED_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVTWIN_OPTIMIZED_SOFTMAX_INL_H_
#undef KVTWIN_OPTIMIZED_SOFTMAX_INL_H_
#else
#define KVTWIN_OPTIMIZED_SOFTMAX_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace kvtwin::optimized::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr std::size_t kTile = kAttentionTile;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Returns 2^x, within 1.2 * 2^-24 of it, relatively, for x from -126 to 0; and
// 0 for smaller x and NaN. The polynomial's own error is 2e-8.
HWY_INLINE V Exp2(V x) {
  const F32 d;
  // The sum with 1.5 * 2^23 is rounded to a whole number, which is in its
  // lowest bits.
  const V shifted = hn::Add(x, hn::Set(d, 0x1.8p23f));
  const V f = hn::Sub(x, hn::Sub(shifted, hn::Set(d, 0x1.8p23f)));
  V p = hn::Set(d, 0.000154614449f);
  p = hn::MulAdd(p, f, hn::Set(d, 0.0013400428f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.00961805694f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.0555032715f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.240226507f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.693147182f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const auto bits = hn::Add(hn::BitCast(I32(), p),
                            hn::ShiftLeft<23>(hn::BitCast(I32(), shifted)));
  return hn::IfThenElseZero(hn::Ge(x, hn::Set(d, -126.0f)),
                            hn::BitCast(d, bits));
}

// Combines the lanes of each of four vectors by `op`, and stores the four
// results to `to`.
template <class Op>
HWY_INLINE void StoreCombined([[maybe_unused]] const Op& op, V a, V b, V c, V e,
                              float* to) {
#if HWY_TARGET == HWY_SCALAR
  to[0] = hn::GetLane(a);
  to[1] = hn::GetLane(b);
  to[2] = hn::GetLane(c);
  to[3] = hn::GetLane(e);
#else
  const F32 d;
  const hn::RepartitionToWide<F32> pairs;
  const V ab = op(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const V ce = op(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const auto ab2 = hn::BitCast(pairs, ab);
  const auto ce2 = hn::BitCast(pairs, ce);
  V all = op(hn::BitCast(d, hn::InterleaveLower(pairs, ab2, ce2)),
             hn::BitCast(d, hn::InterleaveUpper(pairs, ab2, ce2)));
  if constexpr (kLanes >= 8) all = op(all, hn::SwapAdjacentBlocks(all));
  if constexpr (kLanes >= 16) all = op(all, hn::ReverseBlocks(d, all));
  HWY_ALIGN float lanes[kLanes];
  hn::Store(all, d, lanes);
  std::memcpy(to, lanes, 4 * sizeof(float));
#endif
}

struct Sum {
  HWY_INLINE V operator()(V a, V b) const { return hn::Add(a, b); }
};
struct Largest {
  HWY_INLINE V operator()(V a, V b) const { return hn::Max(a, b); }
};

// The most queries that Softmax takes: whole vectors of every target.
constexpr std::size_t kSoftmaxQueries = kHeadPadding;

// Stores the result of of_query(q), with its lanes combined by `op`, for each
// of some queries. `to` has kSoftmaxQueries numbers.
template <class Op, class OfQuery>
HWY_INLINE void CombineQueries(const Op& op, std::size_t count,
                               const OfQuery& of_query, float* to) {
  for (std::size_t q = 0; q < count; q += 4) {
    V of_queries[4];
    for (std::size_t i = 0; i < 4; ++i) {
      of_queries[i] = q + i < count ? of_query(q + i) : of_queries[0];
    }
    StoreCombined(op, of_queries[0], of_queries[1], of_queries[2],
                  of_queries[3], to + q);
  }
}

// A piece of Softmax has kPiece cells. A run has kFewPieces pieces where the
// number of pieces makes no difference.
constexpr std::size_t kPiece = 2 * kLanes;
constexpr std::size_t kFewPieces = 2;

// Calls does(i) for each i below kCount, as a constant.
template <std::size_t kCount, class Does>
HWY_INLINE void ForEachIndex(const Does& does) {
  [&]<std::size_t... i>(std::index_sequence<i...>) HWY_ATTR
      __attribute__((always_inline)) {
    (does(std::integral_constant<std::size_t, i>()), ...);
  }
  (std::make_index_sequence<kCount>());
}

// Turns the scores [width, count] of queries from `first` on into weights
// exp2(score - largest), after the cells that they do not see have been set to
// -infinity, and scales what they have by the change of `largest`. A query that
// sees no cell yet has weights of 0, as its differences are NaN. Weights are
// computed in runs of kPieces pieces of two vectors: for each, Softmax calls
// store(place of the scores, first vector, second vector), and then
// meanwhile(first cell, number of the piece in its run, as a constant).
template <std::size_t kPieces, class Store, class Work>
HWY_INLINE void Softmax(const QueryHeads& head, std::size_t first,
                        std::size_t count, std::size_t padded,
                        std::size_t width, float* scores, const Store& store,
                        const Work& meanwhile) {
  const F32 d;
  HWY_ALIGN float largest[kSoftmaxQueries];
  HWY_ALIGN float sums[kSoftmaxQueries];
  HWY_ALIGN float grown[kSoftmaxQueries] = {};
  const float* before = head.largest + first;
  CombineQueries(
      Largest(), count,
      [&](std::size_t q) HWY_ATTR {
        const float* of_tile = scores + q * width;
        V most = hn::Load(d, of_tile);
        for (std::size_t i = 0; i < width; i += kTile, of_tile += kTile) {
          HWY_UNROLL(4)
          for (std::size_t t = 0; t < kTile; t += kLanes) {
            most = hn::Max(most, hn::Load(d, of_tile + t));
          }
        }
        return most;
      },
      largest);
  for (std::size_t q = 0; q < count; ++q) {
    largest[q] = std::max(before[q], largest[q]);
    grown[q] = before[q] - largest[q];
  }
  for (std::size_t q = 0; q < count; q += kLanes) {
    hn::Store(Exp2(hn::Load(d, grown + q)), d, grown + q);
  }
  CombineQueries(
      Sum(), count,
      [&](std::size_t q) HWY_ATTR {
        float* of_query = scores + q * width;
        const V most = hn::Set(d, largest[q]);
        V sum = hn::Zero(d);
        for (std::size_t i = 0; i < width; i += kPieces * kPiece) {
          ForEachIndex<kPieces>([&](
              auto piece) HWY_ATTR __attribute__((always_inline)) {
            float* place = of_query + i + piece * kPiece;
            const V a = Exp2(hn::Sub(hn::Load(d, place), most));
            const V b = Exp2(hn::Sub(hn::Load(d, place + kLanes), most));
            store(place, a, b);
            sum = hn::Add(hn::Add(sum, a), b);
            meanwhile(i + piece * kPiece, piece);
          });
        }
        return sum;
      },
      sums);
  for (std::size_t q = 0; q < count; ++q) {
    float& sum = head.sum[first + q];
    sum = sum * grown[q] + sums[q];
    const bool scale = before[q] != largest[q] && before[q] != -kInfinity;
    head.largest[first + q] = largest[q];
    if (!scale) continue;
    const V factor = hn::Set(d, grown[q]);
    float* out = head.out + (first + q) * padded;
    for (std::size_t i = 0; i < padded; i += kLanes) {
      hn::Store(hn::Mul(hn::Load(d, out + i), factor), d, out + i);
    }
  }
}

// Stores weights in the place of their scores.
struct StoreInPlace {
  HWY_INLINE void operator()(float* scores, V a, V b) const {
    hn::Store(a, F32(), scores);
    hn::Store(b, F32(), scores + kLanes);
  }
};

// Hides the scores of the cells whose bit is not set.
HWY_INLINE void Hide(std::uint64_t visible, float* scores) {
  const F32 d;
  for (std::size_t t = 0; t < kTile; t += kLanes) {
    hn::Store(hn::IfThenElse(LanesOf(d, visible >> t), hn::Load(d, scores + t),
                             hn::Set(d, -kInfinity)),
              d, scores + t);
  }
}

// Caps the scores.
HWY_INLINE void Cap(ScoreScale scale, float* scores) {
  const F32 d;
  if (scale.cap == 0) return;
  for (std::size_t t = 0; t < kTile; t += kLanes) {
    const V tanh = hn::Tanh(d, hn::Load(d, scores + t));
    hn::Store(hn::Mul(hn::Set(d, scale.cap), tanh), d, scores + t);
  }
}

// Turns the scores [width, count] of queries into weights, as Softmax does,
// after it has capped them and hidden the cells that a query does not see.
// `width` counts the cells of full tiles.
template <std::size_t kPieces, class Store, class Work>
HWY_INLINE void WeighQueries(const WeighedQueries& queries, float* scores,
                             const Store& store, const Work& meanwhile) {
  const std::size_t width = queries.tiles.size() * kTile;
  const std::size_t v_padded = Padded(queries.tiles[0].tile.values.head_dim);
  for (std::size_t begin = 0; begin < queries.count; begin += kSoftmaxQueries) {
    const std::size_t some = std::min(kSoftmaxQueries, queries.count - begin);
    for (std::size_t q = begin; q < begin + some; ++q) {
      const std::size_t row = (queries.first + q) / queries.queries_per_row;
      float* of_tile = scores + q * width;
      for (const GroupTile& seen : queries.tiles) {
        const std::uint64_t sees =
            seen.visible[row] & FirstBits(seen.tile.cells);
        Cap(queries.scale, of_tile);
        if (sees != ~std::uint64_t{0}) Hide(sees, of_tile);
        of_tile += kTile;
      }
    }
    Softmax<kPieces>(queries.head, queries.first + begin, some, v_padded, width,
                     scores + begin * width, store, meanwhile);
  }
}

}  // namespace kvtwin::optimized::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVTWIN_OPTIMIZED_SOFTMAX_INL_H_
