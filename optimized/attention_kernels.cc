// See attention_kernels.h. Highway compiles this file once for each target.

#include "optimized/attention_kernels.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "core/assert.h"
#include "optimized/amx_products.h"
#include "optimized/attention_bf16.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimized/attention_kernels.cc"
#include "hwy/foreach_target.h"
// These headers must come after the target is chosen.
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "optimized/tile_rows-inl.h"
#include "optimized/tile_walk.h"
#include "optimized/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvtwin::optimized::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr std::size_t kTile = kAttentionTile;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Vectors of a row that a block of AddProducts has: its sums fit into the
// registers.
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64
constexpr std::size_t kBlockVectors = 4;
constexpr std::size_t kBlockRows = 6;
#else
constexpr std::size_t kBlockVectors = 2;
constexpr std::size_t kBlockRows = 4;
#endif

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

// scores[q * kTile + t] = queries[q] . keys[t] for kQueries queries and four
// cells. `padded` is the distance between queries, whose padding is zeros.
template <class Rows, std::size_t kQueries>
HWY_NOINLINE void Dots(const float* queries, std::size_t padded, CellsRows keys,
                       std::size_t head_dim, float* scores) {
  const F32 d;
  const std::byte* key0 = keys[0];
  const std::byte* key1 = keys[1];
  const std::byte* key2 = keys[2];
  const std::byte* key3 = keys[3];
  V sums[kQueries][4];
  HWY_UNROLL(8)
  for (std::size_t q = 0; q < kQueries; ++q) {
    sums[q][0] = sums[q][1] = sums[q][2] = sums[q][3] = hn::Zero(d);
  }
  for (std::size_t i = 0; i < head_dim; i += kLanes) {
    const V k0 = Rows::Load(key0, i);
    const V k1 = Rows::Load(key1, i);
    const V k2 = Rows::Load(key2, i);
    const V k3 = Rows::Load(key3, i);
    HWY_UNROLL(8)
    for (std::size_t q = 0; q < kQueries; ++q) {
      const V query = hn::Load(d, queries + q * padded + i);
      sums[q][0] = hn::MulAdd(query, k0, sums[q][0]);
      sums[q][1] = hn::MulAdd(query, k1, sums[q][1]);
      sums[q][2] = hn::MulAdd(query, k2, sums[q][2]);
      sums[q][3] = hn::MulAdd(query, k3, sums[q][3]);
    }
  }
  HWY_UNROLL(8)
  for (std::size_t q = 0; q < kQueries; ++q) {
    StoreCombined(Sum(), sums[q][0], sums[q][1], sums[q][2], sums[q][3],
                  scores + q * kTile);
  }
}

// out[q] += weights[q * kTile + t] * values[t] over four cells. `padded` is the
// distance between results.
template <class Rows, std::size_t kQueries>
HWY_NOINLINE void AddValues(const float* weights, std::size_t padded,
                            CellsRows values, std::size_t head_dim,
                            float* out) {
  const F32 d;
  const std::byte* value0 = values[0];
  const std::byte* value1 = values[1];
  const std::byte* value2 = values[2];
  const std::byte* value3 = values[3];
  V weight[kQueries][4];
  HWY_UNROLL(8)
  for (std::size_t q = 0; q < kQueries; ++q) {
    HWY_UNROLL(8)
    for (std::size_t t = 0; t < 4; ++t) {
      weight[q][t] = hn::Set(d, weights[q * kTile + t]);
    }
  }
  for (std::size_t i = 0; i < head_dim; i += kLanes) {
    const V v0 = Rows::Load(value0, i);
    const V v1 = Rows::Load(value1, i);
    const V v2 = Rows::Load(value2, i);
    const V v3 = Rows::Load(value3, i);
    HWY_UNROLL(8)
    for (std::size_t q = 0; q < kQueries; ++q) {
      V sum = hn::Load(d, out + q * padded + i);
      sum = hn::MulAdd(weight[q][0], v0, sum);
      sum = hn::MulAdd(weight[q][1], v1, sum);
      sum = hn::MulAdd(weight[q][2], v2, sum);
      sum = hn::MulAdd(weight[q][3], v3, sum);
      hn::Store(sum, d, out + q * padded + i);
    }
  }
}

// Dots or AddValues, for some dtype and number of queries.
using FourCells = void (*)(const float* from, std::size_t padded,
                           CellsRows rows, std::size_t head_dim, float* to);

// Returns choose(format, n) for the dtype of rows and n queries, from 1 to 4.
template <class Choose>
FourCells FourCellsFor(const TileRows& rows, std::size_t count,
                       const Choose& choose) {
  FourCells function = nullptr;
  const DType dtype = IsReadable(rows) ? rows.dtype : DType::kF32;
  WithRows(dtype, [&](auto format) {
    WithCount(count, [&](auto n) { function = choose(format, n); });
  });
  return function;
}

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

// A piece of Softmax has kPiece cells; a run has kFewPieces pieces where their
// number makes no difference.
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

void LoadHead(const TileRows& row, std::size_t head, float factor, float* to) {
  const auto scale = [&](V value) HWY_ATTR {
    return hn::Mul(value, hn::Set(F32(), factor));
  };
  if (IsReadable(row)) {
    const std::byte* from = row.rows[0] + HeadOffset(row, head);
    WithRows(row.dtype, [&](auto format) HWY_ATTR {
      for (std::size_t i = 0; i < row.head_dim; i += kLanes) {
        hn::Store(scale(decltype(format)::Load(from, i)), F32(), to + i);
      }
    });
    std::fill(to + row.head_dim, to + Padded(row.head_dim), 0.0f);
    return;
  }
  Unpack(row, 1, head, to);
  for (std::size_t i = 0; i < Padded(row.head_dim); i += kLanes) {
    hn::Store(scale(hn::Load(F32(), to + i)), F32(), to + i);
  }
}

void StoreScaled(const float* from, float factor, std::size_t count,
                 float* to) {
  const F32 d;
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    hn::StoreU(hn::Mul(hn::Load(d, from + i), hn::Set(d, factor)), d, to + i);
  }
  for (; i < count; ++i) to[i] = from[i] * factor;
}

// See WeighFew.
void WeighAll(const AttentionTile& tile, const QueryHeads* heads,
              std::size_t head_count, ScoreScale scale, float* scores) {
  const std::size_t v_padded = Padded(tile.values.head_dim);
  const std::size_t per_head = kFewQueries * kTile;
  const std::size_t count = heads[0].count;
  // If values are fetched shortly before they are read, memory is idle now.
  const std::size_t fetched =
      NearFetches<4>::CellsAhead(tile.values, head_count);
  const bool fetch = IsIntel() && IsReadable(tile.keys) &&
                     IsReadable(tile.values) && fetched < tile.cells;
  EvenFetches fetches(tile.values, tile.cells, heads, head_count,
                      fetch ? fetched : 0);
  const auto meanwhile = [&](std::size_t cell, std::size_t /*piece*/) {
    if (cell == 0 && fetch) fetches.Next();
  };
  for (std::size_t h = 0; h < head_count; ++h) {
    for (std::size_t q = 0; q < count; ++q) {
      float* of_query = scores + h * per_head + q * kTile;
      Cap(scale, of_query);
      if (tile.cells < kTile) Hide(FirstBits(tile.cells), of_query);
    }
    Softmax<kFewPieces>(heads[h], 0, count, v_padded, kTile,
                        scores + h * per_head, StoreInPlace(), meanwhile);
  }
}

// See ScoreFew.
void ScoreAll(const AttentionTile& tile, const QueryHeads* heads,
              std::size_t head_count, float* scores, float* rows) {
  const std::size_t padded = Padded(tile.keys.head_dim);
  const std::size_t per_head = kFewQueries * kTile;
  const std::size_t count = heads[0].count;
  const std::size_t others = count - std::min<std::size_t>(count, 4);
  const auto choose = [](auto format, auto n) {
    return Dots<decltype(format), n>;
  };
  const std::array<FourCells, 2> dots = {
      FourCellsFor(tile.keys, count, choose),
      FourCellsFor(tile.keys, others, choose)};
  ForEachCells<4>(
      tile.keys, tile.cells, IsReadable(tile.keys),
      RowsAhead(&tile, &AttentionTile::values), heads, head_count, rows,
      [&](std::size_t h, std::size_t t, CellsRows keys, std::size_t head_dim)
          HWY_ATTR {
            for (std::size_t q = 0; q < count; q += 4) {
              dots[q / 4](heads[h].queries + q * padded, padded, keys, head_dim,
                          scores + h * per_head + q * kTile + t);
            }
          });
}

// See AddFew.
void AddAll(const AttentionTile& tile, const QueryHeads* heads,
            std::size_t head_count, const float* weights, float* rows) {
  const std::size_t padded = Padded(tile.values.head_dim);
  const std::size_t per_head = kFewQueries * kTile;
  const std::size_t count = heads[0].count;
  const std::size_t others = count - std::min<std::size_t>(count, 4);
  const auto choose = [](auto format, auto n) {
    return AddValues<decltype(format), n>;
  };
  const std::array<FourCells, 2> add = {
      FourCellsFor(tile.values, count, choose),
      FourCellsFor(tile.values, others, choose)};
  ForEachCells<4>(
      tile.values, tile.cells, IsReadable(tile.values),
      RowsAhead(tile.next, &AttentionTile::keys), heads, head_count, rows,
      [&](std::size_t h, std::size_t t, CellsRows values, std::size_t head_dim)
          HWY_ATTR {
            for (std::size_t q = 0; q < count; q += 4) {
              add[q / 4](weights + h * per_head + q * kTile + t, padded, values,
                         head_dim, heads[h].out + q * padded);
            }
          });
}

// c += a b, for kRows rows and kVectors vectors of c. A call of its own has its
// addresses in registers.
template <std::size_t kRows, std::size_t kVectors>
HWY_NOINLINE void AddBlock(const float* a, std::size_t a_row, std::size_t depth,
                           const float* b, std::size_t b_row, float* c,
                           std::size_t c_row) {
  const F32 d;
  V sums[kRows][kVectors];
  HWY_UNROLL(8)
  for (std::size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (std::size_t v = 0; v < kVectors; ++v) {
      sums[r][v] = hn::Load(d, c + r * c_row + v * kLanes);
    }
  }
  for (std::size_t k = 0; k < depth; ++k, b += b_row) {
    V right[kVectors];
    HWY_UNROLL(8)
    for (std::size_t v = 0; v < kVectors; ++v) {
      right[v] = hn::LoadU(d, b + v * kLanes);
    }
    HWY_UNROLL(8)
    for (std::size_t r = 0; r < kRows; ++r) {
      const V left = hn::Set(d, a[r * a_row + k]);
      HWY_UNROLL(8)
      for (std::size_t v = 0; v < kVectors; ++v) {
        sums[r][v] = hn::MulAdd(left, right[v], sums[r][v]);
      }
    }
  }
  HWY_UNROLL(8)
  for (std::size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (std::size_t v = 0; v < kVectors; ++v) {
      hn::Store(sums[r][v], d, c + r * c_row + v * kLanes);
    }
  }
}

// c += a b: a is [depth, rows], b is [columns, depth], c is [columns, rows],
// and their rows are as far apart as said; columns are whole vectors. Calls
// fetch(first, end) once for the rows that are multiplied next.
template <class Fetch>
HWY_INLINE void AddProducts(const float* a, std::size_t a_row, std::size_t rows,
                            std::size_t depth, const float* b,
                            std::size_t b_row, std::size_t columns, float* c,
                            std::size_t c_row, const Fetch& fetch) {
  for (std::size_t j = 0; j < columns;) {
    const bool wide = columns - j >= kBlockVectors * kLanes;
    for (std::size_t r = 0; r < rows;) {
      const bool whole = rows - r >= kBlockRows;
      const auto add = whole  ? wide ? AddBlock<kBlockRows, kBlockVectors>
                                     : AddBlock<kBlockRows, 1>
                        : wide ? AddBlock<1, kBlockVectors>
                              : AddBlock<1, 1>;
      const std::size_t end = r + (whole ? kBlockRows : 1);
      if (j == 0) fetch(r, end);
      add(a + r * a_row, a_row, depth, b + j, b_row, c + r * c_row + j, c_row);
      r = end;
    }
    j += wide ? kBlockVectors * kLanes : kLanes;
  }
}

// Copies the keys of one head to [kTile, padded head_dim], so that a vector has
// the same element of several cells. The columns of absent cells are zeros.
void Transpose(const TileRows& keys, std::size_t cells, std::size_t kv_head,
               float* rows, float* columns) {
  const std::size_t padded = Padded(keys.head_dim);
  Unpack(keys, cells, kv_head, rows);
  std::fill(rows + cells * padded, rows + kTile * padded, 0.0f);
  TransposeTile(
      rows, padded, kTile,
      [&](auto d, std::size_t t, std::size_t i, auto v)
          HWY_ATTR { hn::Store(v, d, columns + i * kTile + t); },
      padded);
}

// A V that is not finite must not reach a row that does not see its cell: its
// weight there is 0, and 0 * NaN is NaN.
void ClearWhatIsNotFinite(float* rows, std::size_t count) {
  const F32 d;
  for (std::size_t i = 0; i < count; i += kLanes) {
    const V v = hn::Load(d, rows + i);
    hn::Store(hn::IfThenElseZero(hn::IsFinite(v), v), d, rows + i);
  }
}

// See WeighMany.
template <std::size_t kPieces, class Store, class Work>
HWY_INLINE void WeighTiles(std::span<const GroupTile> tiles,
                           const QueryHeads& head, std::size_t first,
                           std::size_t count, std::size_t queries_per_row,
                           ScoreScale scale, float* scores, const Store& store,
                           const Work& meanwhile) {
  const std::size_t width = tiles.size() * kTile;
  const std::size_t v_padded = Padded(tiles[0].tile.values.head_dim);
  for (std::size_t begin = 0; begin < count; begin += kSoftmaxQueries) {
    const std::size_t some = std::min(kSoftmaxQueries, count - begin);
    for (std::size_t q = begin; q < begin + some; ++q) {
      const std::size_t row = (first + q) / queries_per_row;
      float* of_tile = scores + q * width;
      for (const GroupTile& seen : tiles) {
        const std::uint64_t sees =
            seen.visible[row] & FirstBits(seen.tile.cells);
        Cap(scale, of_tile);
        if (sees != ~std::uint64_t{0}) Hide(sees, of_tile);
        of_tile += kTile;
      }
    }
    Softmax<kPieces>(head, first + begin, some, v_padded, width,
                     scores + begin * width, store, meanwhile);
  }
}

#if HWY_TARGET <= HWY_AVX3
// Stores the terms of weights as pairs of cells: the first terms from `scores`
// on, where the scores of the first query begin. Digits are cut off rather than
// rounded, which takes a third of the time.
struct StoreTerms {
  float* scores;
  std::size_t stride;  // From term to term.

  HWY_INLINE void operator()(const float* place, V a, V b) const {
    const hn::Repartition<std::uint16_t, F32> halves;
    float* to = scores + (place - scores) / 2;
    const V upper = hn::BitCast(F32(), hn::Set(I32(), ~0xFFFF));
    HWY_UNROLL(3)
    for (std::size_t term = 0; term < kMostTerms; ++term) {
      hn::Store(hn::BitCast(F32(), hn::ConcatOdd(halves, hn::BitCast(halves, b),
                                                 hn::BitCast(halves, a))),
                F32(), to + term * stride);
      a = hn::Sub(a, hn::And(a, upper));
      b = hn::Sub(b, hn::And(b, upper));
    }
  }
};

template <std::size_t kPieces, class Store, class Work>
HWY_INLINE void WeighQueries(const WeighedQueries& queries, float* scores,
                             const Store& store, const Work& meanwhile) {
  WeighTiles<kPieces>(queries.tiles, queries.head, queries.first, queries.count,
                      queries.queries_per_row, queries.scale, scores, store,
                      meanwhile);
}

// See WeighMany. A step is a call.
template <class Store>
void WeighWithCalls(const WeighedQueries& queries, float* scores,
                    const Store& store, Bf16Work& work, MultiplyBf16 multiply) {
  WeighQueries<kFewPieces>(
      queries, scores, store,
      [&](std::size_t /*cell*/, std::size_t /*piece*/) { multiply(work, 1); });
}

#ifdef KVTWIN_AMX
// The step of `steps` that follows a piece, if they are spread over `pieces`;
// `steps`: none.
constexpr std::size_t StepAfter(std::size_t piece, std::size_t pieces,
                                std::size_t steps) {
  std::size_t step = 0;
  while (step < steps && step * pieces / steps != piece) ++step;
  return step;
}

// WeighWithSteps does the same for kManyBf16Tiles tiles. The steps are a part
// of this function, those of a tile of pairs for each query: in front of a
// call, or a branch that is hard to foresee, the processor computes few weights
// while it multiplies. Requires: AreWhole(work, a_count, b_count).
template <std::size_t a_count, std::size_t b_count, class Store>
void WeighWithSteps(const WeighedQueries& queries, float* scores,
                    const Store& store, Bf16Work& work) {
  KVTWIN_DCHECK(AreWhole(work, a_count, b_count));
  constexpr std::size_t kPieces = kManyBf16Tiles * kTile / kPiece;
  constexpr std::size_t kSteps = StepsOfTerms(a_count, b_count).count();
  static_assert(kSteps <= kPieces);
  TileBlock<AmxTiles, true> block;
  WeighQueries<kPieces>(
      queries, scores, store,
      [&](std::size_t /*cell*/, auto piece) HWY_ATTR
      __attribute__((always_inline)) {
        constexpr std::size_t kStep = StepAfter(piece, kPieces, kSteps);
        if constexpr (kStep < kSteps) {
          if (work.product == work.products.size()) return;
          DoStep<AmxTiles, true, a_count, b_count, kStep>(work, block);
        }
      });
}
#endif

void Weigh(const WeighedQueries& queries, float* scores, Bf16Terms terms,
           Bf16Work& work, MultiplyBf16 multiply) {
  const StoreTerms store = {.scores = scores, .stride = terms.stride};
#ifdef KVTWIN_AMX
  if (multiply == MultiplyInTiles<AmxTiles> &&
      queries.tiles.size() == kManyBf16Tiles) {
    if (terms.count == 1 && AreWhole(work, 1, 1)) {
      return WeighWithSteps<1, 1>(queries, scores, StoreInPlace(), work);
    }
    if (terms.count == 3 && AreWhole(work, 3, 1)) {
      return WeighWithSteps<3, 1>(queries, scores, store, work);
    }
    if (terms.count == 3 && AreWhole(work, 3, 2)) {
      return WeighWithSteps<3, 2>(queries, scores, store, work);
    }
    if (terms.count == 3 && AreWhole(work, 3, 3)) {
      return WeighWithSteps<3, 3>(queries, scores, store, work);
    }
  }
#endif
  if (terms.count > 1) {
    WeighWithCalls(queries, scores, store, work, multiply);
  } else {
    WeighWithCalls(queries, scores, StoreInPlace(), work, multiply);
  }
}
#else
// These targets have no products of bf16: WeighMany is not called.
void Weigh(const WeighedQueries&, float*, Bf16Terms, Bf16Work&, MultiplyBf16) {}
#endif

void AttendMany(const GroupTile& seen, const QueryHeads& head,
                std::size_t queries_per_row, ScoreScale scale, float* scratch) {
  const AttentionTile& tile = seen.tile;
  const std::size_t k_padded = Padded(tile.keys.head_dim);
  const std::size_t v_padded = Padded(tile.values.head_dim);
  float* scores = scratch;
  float* rows = scores + kManyQueries * kTile;
  float* columns = rows + std::max(k_padded, v_padded) * kTile;
  Transpose(tile.keys, tile.cells, head.kv_head, rows, columns);
  Unpack(tile.values, tile.cells, head.kv_head, rows);
  if (!SeeAll(seen, head.count / queries_per_row)) {
    ClearWhatIsNotFinite(rows, tile.cells * v_padded);
  }
  const RowsAhead keys(tile.next, &AttentionTile::keys);
  const RowsAhead values(tile.next, &AttentionTile::values);
  const std::span tiles(&seen, 1);
  for (std::size_t q = 0; q < head.count; q += kManyQueries) {
    const std::size_t count = std::min(kManyQueries, head.count - q);
    if (!SeeAny(tiles, q, count, queries_per_row)) continue;
    // A part of the rows ahead for each of the queries.
    const auto fetch = [&](const RowsAhead& ahead) {
      return [&ahead, &head, q](std::size_t begin, std::size_t end) {
        ahead.Fetch((q + begin) * kTile / head.count,
                    (q + end) * kTile / head.count, head.kv_head);
      };
    };
    std::fill_n(scores, count * kTile, 0.0f);
    AddProducts(head.queries + q * k_padded, k_padded, count,
                tile.keys.head_dim, columns, kTile, kTile, scores, kTile,
                fetch(keys));
    WeighTiles<kFewPieces>(tiles, head, q, count, queries_per_row, scale,
                           scores, StoreInPlace(),
                           [](std::size_t /*cell*/, std::size_t /*piece*/) {});
    AddProducts(scores, kTile, count, tile.cells, rows, v_padded, v_padded,
                head.out + q * v_padded, v_padded, fetch(values));
  }
}

}  // namespace kvtwin::optimized::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtwin::optimized {

HWY_EXPORT(LoadHead);
HWY_EXPORT(StoreScaled);
HWY_EXPORT(ScoreAll);
HWY_EXPORT(WeighAll);
HWY_EXPORT(AddAll);
HWY_EXPORT(Unpack);
HWY_EXPORT(Weigh);
HWY_EXPORT(AttendMany);

std::size_t FewScratch(std::size_t k_head_dim, std::size_t v_head_dim,
                       std::size_t head_count) {
  return head_count * kFewQueries * kAttentionTile +
         kAttentionTile * std::max(Padded(k_head_dim), Padded(v_head_dim));
}

std::size_t ManyScratch(std::size_t k_head_dim, std::size_t v_head_dim) {
  const std::size_t k = Padded(k_head_dim);
  return kAttentionTile * (kManyQueries + k + std::max(k, Padded(v_head_dim)));
}

void LoadHead(const TileRows& row, std::size_t head, float factor, float* to) {
  HWY_DYNAMIC_DISPATCH(LoadHead)(row, head, factor, to);
}

void StoreScaled(const float* from, float factor, std::size_t count,
                 float* to) {
  HWY_DYNAMIC_DISPATCH(StoreScaled)(from, factor, count, to);
}

void AttendFew(const AttentionTile& tile, const QueryHeads* heads,
               std::size_t head_count, ScoreScale scale, float* scratch) {
  float* rows = scratch + head_count * kFewQueries * kAttentionTile;
  ScoreFew(tile, heads, head_count, scratch, rows);
  WeighFew(tile, heads, head_count, scale, scratch);
  AddFew(tile, heads, head_count, scratch, rows);
}

void ScoreFew(const AttentionTile& tile, const QueryHeads* heads,
              std::size_t head_count, float* scores, float* rows) {
  HWY_DYNAMIC_DISPATCH(ScoreAll)(tile, heads, head_count, scores, rows);
}

void AddFew(const AttentionTile& tile, const QueryHeads* heads,
            std::size_t head_count, const float* weights, float* rows) {
  HWY_DYNAMIC_DISPATCH(AddAll)(tile, heads, head_count, weights, rows);
}

void WeighFew(const AttentionTile& tile, const QueryHeads* heads,
              std::size_t head_count, ScoreScale scale, float* scores) {
  HWY_DYNAMIC_DISPATCH(WeighAll)(tile, heads, head_count, scale, scores);
}

void UnpackRows(const TileRows& rows, std::size_t cells, std::size_t kv_head,
                float* to) {
  HWY_DYNAMIC_DISPATCH(Unpack)(rows, cells, kv_head, to);
}

void WeighMany(const WeighedQueries& queries, float* scores, Bf16Terms terms,
               Bf16Work& work, MultiplyBf16 multiply) {
  KVTWIN_DCHECK(Bf16Multiplier() != nullptr);
  KVTWIN_DCHECK(terms.count == 1 || terms.count == kMostTerms);
  KVTWIN_DCHECK(!work.last);
  HWY_DYNAMIC_DISPATCH(Weigh)(queries, scores, terms, work, multiply);
}

void AttendMany(const GroupTile& seen, const QueryHeads& head,
                std::size_t queries_per_row, ScoreScale scale, float* scratch) {
  HWY_DYNAMIC_DISPATCH(AttendMany)
  (seen, head, queries_per_row, scale, scratch);
}

}  // namespace kvtwin::optimized
#endif  // HWY_ONCE
