// See attention_kernels.h. Highway compiles this file once for each target.

#include "optimized/attention_kernels.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimized/attention_kernels.cc"
#include "hwy/foreach_target.h"
// These headers must come after the target is chosen.
#include "hwy/highway.h"
#include "optimized/softmax-inl.h"
#include "optimized/targets.h"
#include "optimized/tile_rows-inl.h"
#include "optimized/tile_walk.h"
#include "optimized/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvtwin::optimized::HWY_NAMESPACE {

// Rows, and vectors of a row, that a block of AddProducts has: its sums fit
// into the registers, and are more than a processor computes at once.
constexpr std::size_t kBlockRows = 6;
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64
constexpr std::size_t kBlockVectors = 4;
#else
constexpr std::size_t kBlockVectors = 2;
#endif

// scores[q * kTile + t] = queries[q] . keys[t] for kQueries queries and four
// cells. Queries are padded with zeros.
template <class Rows, std::size_t kQueries>
HWY_NOINLINE void Dots(const float* queries, CellsRows keys,
                       std::size_t head_dim, const CellsRows* fetched,
                       float* scores) {
  const std::size_t padded = Padded(head_dim);
  const F32 d;
  const FetchedRows<4> fetches(fetched);
  V sums[kQueries][4];
  HWY_UNROLL(8)
  for (std::size_t q = 0; q < kQueries; ++q) {
    sums[q][0] = sums[q][1] = sums[q][2] = sums[q][3] = hn::Zero(d);
  }
  const auto multiply = [&](std::size_t i, V k0, V k1, V k2, V k3) HWY_ATTR {
    fetches.Fetch<Rows::kLineElements>(i);
    HWY_UNROLL(8)
    for (std::size_t q = 0; q < kQueries; ++q) {
      const V query = hn::Load(d, queries + q * padded + i);
      sums[q][0] = hn::MulAdd(query, k0, sums[q][0]);
      sums[q][1] = hn::MulAdd(query, k1, sums[q][1]);
      sums[q][2] = hn::MulAdd(query, k2, sums[q][2]);
      sums[q][3] = hn::MulAdd(query, k3, sums[q][3]);
    }
  };
  ForEachVector<Rows>({keys[0], keys[1], keys[2], keys[3]}, head_dim, multiply);
  HWY_UNROLL(8)
  for (std::size_t q = 0; q < kQueries; ++q) {
    StoreCombined(Sum(), sums[q][0], sums[q][1], sums[q][2], sums[q][3],
                  scores + q * kTile);
  }
}

// out[q] += weights[q * kTile + t] * values[t] over four cells. Results are
// padded.
template <class Rows, std::size_t kQueries>
HWY_NOINLINE void AddValues(const float* weights, CellsRows values,
                            std::size_t head_dim, const CellsRows* fetched,
                            float* out) {
  const std::size_t padded = Padded(head_dim);
  const F32 d;
  const FetchedRows<4> fetches(fetched);
  V weight[kQueries][4];
  HWY_UNROLL(8)
  for (std::size_t q = 0; q < kQueries; ++q) {
    HWY_UNROLL(8)
    for (std::size_t t = 0; t < 4; ++t) {
      weight[q][t] = hn::Set(d, weights[q * kTile + t]);
    }
  }
  const auto add = [&](std::size_t i, V v0, V v1, V v2, V v3) HWY_ATTR {
    fetches.Fetch<Rows::kLineElements>(i);
    HWY_UNROLL(8)
    for (std::size_t q = 0; q < kQueries; ++q) {
      V sum = hn::Load(d, out + q * padded + i);
      sum = hn::MulAdd(weight[q][0], v0, sum);
      sum = hn::MulAdd(weight[q][1], v1, sum);
      sum = hn::MulAdd(weight[q][2], v2, sum);
      sum = hn::MulAdd(weight[q][3], v3, sum);
      hn::Store(sum, d, out + q * padded + i);
    }
  };
  ForEachVector<Rows>({values[0], values[1], values[2], values[3]}, head_dim,
                      add);
}

// Dots or AddValues, for some dtype and number of queries.
using FourCells = void (*)(const float* from, CellsRows rows,
                           std::size_t head_dim, const CellsRows* fetched,
                           float* to);

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

void LoadHead(const TileRows& row, std::size_t head, float factor, float* to) {
  const auto store = [&](std::size_t i, V value) HWY_ATTR {
    hn::Store(hn::Mul(value, hn::Set(F32(), factor)), F32(), to + i);
  };
  if (IsReadable(row)) {
    const std::byte* from = row.rows[0] + HeadOffset(row, head);
    WithRows(row.dtype, [&](auto format) HWY_ATTR {
      ForEachVector<decltype(format)>(from, row.head_dim, store);
    });
    std::fill(to + row.head_dim, to + Padded(row.head_dim), 0.0f);
    return;
  }
  Unpack(row, 1, head, to);
  for (std::size_t i = 0; i < Padded(row.head_dim); i += kLanes) {
    store(i, hn::Load(F32(), to + i));
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
  const std::size_t count = heads[0].count;
  const std::size_t per_head = count * kTile;
  // If values are fetched shortly before they are read, memory is idle now.
  const std::size_t fetched = NearFetches<4>::CellsAhead(tile.keys, head_count);
  const bool fetch = FetchesNear() && IsReadable(tile.keys) &&
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
  const std::size_t count = heads[0].count;
  const std::size_t per_head = count * kTile;
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
      [&](std::size_t h, std::size_t t, CellsRows keys, std::size_t head_dim,
          const CellsRows* fetched) HWY_ATTR {
        for (std::size_t q = 0; q < count; q += 4) {
          dots[q / 4](heads[h].queries + q * padded, keys, head_dim, fetched,
                      scores + h * per_head + q * kTile + t);
        }
      });
}

// See AddFew.
void AddAll(const AttentionTile& tile, const QueryHeads* heads,
            std::size_t head_count, const float* weights, float* rows) {
  const std::size_t padded = Padded(tile.values.head_dim);
  const std::size_t count = heads[0].count;
  const std::size_t per_head = count * kTile;
  const std::size_t others = count - std::min<std::size_t>(count, 4);
  const auto choose = [](auto format, auto n) {
    return AddValues<decltype(format), n>;
  };
  const std::array<FourCells, 2> add = {
      FourCellsFor(tile.values, count, choose),
      FourCellsFor(tile.values, others, choose)};
  ForEachCells<4>(tile.values, tile.cells, IsReadable(tile.values),
                  RowsAhead(tile.next, &AttentionTile::keys), heads, head_count,
                  rows,
                  [&](std::size_t h, std::size_t t, CellsRows values,
                      std::size_t head_dim, const CellsRows* fetched) HWY_ATTR {
                    for (std::size_t q = 0; q < count; q += 4) {
                      add[q / 4](weights + h * per_head + q * kTile + t, values,
                                 head_dim, fetched, heads[h].out + q * padded);
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
    WeighQueries<kFewPieces>(
        {.tiles = tiles,
         .head = head,
         .first = q,
         .count = count,
         .queries_per_row = queries_per_row,
         .scale = scale},
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

void AttendMany(const GroupTile& seen, const QueryHeads& head,
                std::size_t queries_per_row, ScoreScale scale, float* scratch) {
  HWY_DYNAMIC_DISPATCH(AttendMany)
  (seen, head, queries_per_row, scale, scratch);
}

}  // namespace kvtwin::optimized
#endif  // HWY_ONCE
