// Products of bf16 for few queries: AttendFewInBf16.

#include "hwy/base.h"
#include "optimized/attention_bf16.h"

#if HWY_ARCH_X86
#include <array>

#include "optimized/attention_q8.h"
#include "optimized/avx512.h"
#include "optimized/bf16_rows.h"
#include "optimized/tile_walk.h"

HWY_PUSH_ATTRIBUTES("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi");
namespace kvtwin::optimized {
namespace {

constexpr std::size_t kTile = kAttentionTile;
// Cells whose values are added at once. Of 16, whose rows may be 4 KiB apart,
// not all would fit into the first-level cache.
constexpr std::size_t kValueCells = 8;

// Whether rows are multiplied as pairs of bf16. Processors with AMX do four
// vectors of products of f32 in the time of one of pairs.
bool MultipliesPairs(const TileRows& rows, MultiplyBf16 multiply) {
  return HasPairs(rows) && multiply == MultiplyInRegisters &&
         PairsOfFewPay(rows.dtype);
}

// Adds the lanes of four vectors to each other, so that each 16 bytes of the
// result have a part of the sum of each.
HWY_INLINE __m512 PartsOfSums(const __m512* sums) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(sums[0], sums[1]),
                                  _mm512_unpackhi_ps(sums[0], sums[1]));
  const __m512 ce = _mm512_add_ps(_mm512_unpacklo_ps(sums[2], sums[3]),
                                  _mm512_unpackhi_ps(sums[2], sums[3]));
  const auto low = _mm512_unpacklo_pd((__m512d)ab, (__m512d)ce);
  const auto high = _mm512_unpackhi_pd((__m512d)ab, (__m512d)ce);
  return _mm512_add_ps((__m512)low, (__m512)high);
}

// Adds the 16 bytes that are neighbours, of two vectors.
HWY_INLINE __m512 AddNeighbours(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88),
                       _mm512_shuffle_f32x4(a, b, 0xDD));
}

// Adds the products of a pair of vectors of four keys with the queries.
template <std::size_t kQueries>
HWY_INLINE void AddDots(const float* queries, std::size_t padded,
                        const TwoVectors& first, const TwoVectors& second,
                        __m512 (&sums)[4][4]) {
  HWY_UNROLL(4)
  for (std::size_t q = 0; q < kQueries; ++q) {
    const auto query = (__m512bh)_mm512_load_ps(queries + q * padded);
    sums[q][0] = _mm512_dpbf16_ps(sums[q][0], query, (__m512bh)first.first);
    sums[q][1] = _mm512_dpbf16_ps(sums[q][1], query, (__m512bh)first.second);
    sums[q][2] = _mm512_dpbf16_ps(sums[q][2], query, (__m512bh)second.first);
    sums[q][3] = _mm512_dpbf16_ps(sums[q][3], query, (__m512bh)second.second);
  }
}

// scores[q * kTile + t] = queries[q] . keys[t] for kQueries queries and four
// cells. The queries are pairs, `padded` floats from each other.
template <class Rows, std::size_t kQueries>
HWY_NOINLINE void Dots(const float* queries, std::size_t padded, CellsRows keys,
                       std::size_t head_dim, float* scores) {
  const std::byte* key0 = keys[0];
  const std::byte* key1 = keys[1];
  const std::byte* key2 = keys[2];
  const std::byte* key3 = keys[3];
  __m512 sums[4][4];
  HWY_UNROLL(4)
  for (std::size_t q = 0; q < 4; ++q) {
    sums[q][0] = sums[q][1] = sums[q][2] = sums[q][3] = _mm512_setzero_ps();
  }
  TwoVectors first;
  TwoVectors second;
  for (std::size_t i = 0; i < head_dim; i += 2 * kLanes) {
    Rows::Keys(key0, key1, i, first);
    Rows::Keys(key2, key3, i, second);
    AddDots<kQueries>(queries + i / 2, padded, first, second, sums);
  }
  __m512 parts[4];
  HWY_UNROLL(4)
  for (std::size_t q = 0; q < 4; ++q) parts[q] = PartsOfSums(sums[q]);
  const __m512 all = AddNeighbours(AddNeighbours(parts[0], parts[1]),
                                   AddNeighbours(parts[2], parts[3]));
  _mm_store_ps(scores, _mm512_castps512_ps128(all));
  if constexpr (kQueries > 1) {
    _mm_store_ps(scores + kTile, _mm512_extractf32x4_ps(all, 1));
  }
  if constexpr (kQueries > 2) {
    _mm_store_ps(scores + 2 * kTile, _mm512_extractf32x4_ps(all, 2));
  }
  if constexpr (kQueries > 3) {
    _mm_store_ps(scores + 3 * kTile, _mm512_extractf32x4_ps(all, 3));
  }
}

// out[q] += weights[q * kTile + p] * the values of cells 2 p and 2 p + 1, over
// kValueCells cells. `padded` is the distance between results.
template <class Rows, std::size_t kQueries>
HWY_NOINLINE void AddValues(const float* weights, std::size_t padded,
                            CellsRows values, std::size_t head_dim,
                            float* out) {
  for (std::size_t i = 0; i < head_dim; i += 2 * kLanes) {
    __m512 sums[kQueries][2];
    HWY_UNROLL(4)
    for (std::size_t q = 0; q < kQueries; ++q) {
      sums[q][0] = _mm512_load_ps(out + q * padded + i);
      sums[q][1] = _mm512_load_ps(out + q * padded + i + kLanes);
    }
    HWY_UNROLL(1)
    for (std::size_t p = 0; p < kValueCells / 2; ++p) {
      TwoVectors pairs;
      Rows::Values(values[2 * p], values[2 * p + 1], i, pairs);
      HWY_UNROLL(4)
      for (std::size_t q = 0; q < kQueries; ++q) {
        const auto weight = (__m512bh)_mm512_set1_ps(weights[q * kTile + p]);
        sums[q][0] =
            _mm512_dpbf16_ps(sums[q][0], weight, (__m512bh)pairs.first);
        sums[q][1] =
            _mm512_dpbf16_ps(sums[q][1], weight, (__m512bh)pairs.second);
      }
    }
    HWY_UNROLL(4)
    for (std::size_t q = 0; q < kQueries; ++q) {
      _mm512_store_ps(out + q * padded + i, sums[q][0]);
      _mm512_store_ps(out + q * padded + i + kLanes, sums[q][1]);
    }
  }
}

// Dots or AddValues, for some dtype and number of queries.
using OfCells = void (*)(const float* from, std::size_t padded, CellsRows rows,
                         std::size_t head_dim, float* to);

// Returns choose(format, n) for the dtype of rows, and n for each four of the
// queries. Requires: HasPairs(rows).
template <class Choose>
std::array<OfCells, 2> ProductsOf(const TileRows& rows, std::size_t count,
                                  const Choose& choose) {
  std::array<OfCells, 2> functions = {};
  for (std::size_t i = 0; i * 4 < count; ++i) {
    WithCount(count - i * 4, [&](auto n) {
      WithPairs(rows,
                [&](auto format) { functions.at(i) = choose(format, n); });
    });
  }
  return functions;
}

}  // namespace

void RoundFewToBf16(const TileRows& keys, MultiplyBf16 multiply, float* rows,
                    std::size_t padded, std::size_t count) {
  if (HasIntegers(keys)) RoundToIntegers(rows, padded, count);
  if (MultipliesPairs(keys, multiply)) {
    RoundRows(rows, padded, count, rows, padded);
  }
}

namespace {

// See ScoreFew.
void ScoreInBf16(const AttentionTile& tile, const QueryHeads* heads,
                 std::size_t head_count, MultiplyBf16 multiply, float* scores,
                 float* rows) {
  const TileRows& keys = tile.keys;
  const std::size_t padded = Padded(keys.head_dim);
  const std::size_t count = heads[0].count;
  const RowsAhead ahead(&tile, &AttentionTile::values);
  const auto scores_of = [&](std::size_t h, std::size_t q, std::size_t t) {
    return scores + (h * count + q) * kTile + t;
  };
  if (HasIntegers(keys)) {
    EvenFetches fetches(tile.values, tile.cells, heads, head_count);
    for (std::size_t h = 0; h < head_count; ++h) {
      for (std::size_t q = 0; q < count; q += 4) {
        IntegerDots(heads[h].queries + q * padded, padded, count - q,
                    RowsOfHead(keys, heads[h].kv_head), tile.cells,
                    keys.head_dim, fetches, scores_of(h, q, 0));
      }
    }
    return;
  }
  if (!MultipliesPairs(keys, multiply)) {
    return ScoreFew(tile, heads, head_count, scores, rows);
  }
  const auto dots = ProductsOf(keys, count, [](auto format, auto n) {
    return Dots<decltype(format), n>;
  });
  ForEachCells<4>(keys, tile.cells, true, ahead, heads, head_count, rows,
                  [&](std::size_t h, std::size_t t, CellsRows cells,
                      std::size_t head_dim, const CellsRows* /*fetched*/) {
                    for (std::size_t q = 0; q < count; q += 4) {
                      dots[q / 4](heads[h].queries + q * padded, padded, cells,
                                  head_dim, scores_of(h, q, t));
                    }
                  });
}

// See AddFew; the weights are lost.
void AddInBf16(const AttentionTile& tile, const QueryHeads* heads,
               std::size_t head_count, MultiplyBf16 multiply, float* weights,
               float* rows) {
  const TileRows& values = tile.values;
  const std::size_t padded = Padded(values.head_dim);
  const std::size_t count = heads[0].count;
  const RowsAhead ahead(tile.next, &AttentionTile::keys);
  if (HasIntegers(values)) {
    // After the last tile, its keys are fetched again, which costs little.
    const AttentionTile& next = tile.next == nullptr ? tile : *tile.next;
    EvenFetches fetches(next.keys, next.cells, heads, head_count);
    for (std::size_t h = 0; h < head_count; ++h) {
      AddIntegerValues(weights + h * count * kTile, padded, count,
                       RowsOfHead(values, heads[h].kv_head), tile.cells,
                       values.head_dim, fetches, heads[h].out);
    }
    return;
  }
  if (!MultipliesPairs(values, multiply)) {
    return AddFew(tile, heads, head_count, weights, rows);
  }
  for (std::size_t h = 0; h < head_count; ++h) {
    float* of_head = weights + h * count * kTile;
    RoundRows(of_head, kTile, count, of_head, kTile);
  }
  const auto add = ProductsOf(values, count, [](auto format, auto n) {
    return AddValues<decltype(format), n>;
  });
  ForEachCells<kValueCells>(
      values, tile.cells, true, ahead, heads, head_count, rows,
      [&](std::size_t h, std::size_t t, CellsRows cells, std::size_t head_dim,
          const CellsRows* /*fetched*/) {
        for (std::size_t q = 0; q < count; q += 4) {
          add[q / 4](weights + (h * count + q) * kTile + t / 2, padded, cells,
                     head_dim, heads[h].out + q * padded);
        }
      });
}

}  // namespace

void AttendFewInBf16(const AttentionTile& tile, const QueryHeads* heads,
                     std::size_t head_count, ScoreScale scale,
                     MultiplyBf16 multiply, float* scratch) {
  float* rows = scratch + head_count * kFewQueries * kTile;
  ScoreInBf16(tile, heads, head_count, multiply, scratch, rows);
  WeighFew(tile, heads, head_count, scale, scratch);
  AddInBf16(tile, heads, head_count, multiply, scratch, rows);
}

}  // namespace kvtwin::optimized
HWY_POP_ATTRIBUTES;

#else   // HWY_ARCH_X86
namespace kvtwin::optimized {

void RoundFewToBf16(const TileRows&, MultiplyBf16, float*, std::size_t,
                    std::size_t) {}
void AttendFewInBf16(const AttentionTile&, const QueryHeads*, std::size_t,
                     ScoreScale, MultiplyBf16, float*) {}

}  // namespace kvtwin::optimized
#endif  // HWY_ARCH_X86
