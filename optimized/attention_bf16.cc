#include "optimized/attention_bf16.h"

#include <atomic>

#include "hwy/base.h"

#if HWY_ARCH_X86
#include <algorithm>
#include <array>

#include "core/elements.h"
#include "optimized/amx_products.h"
#include "optimized/attention_q8.h"
#include "optimized/avx512.h"
#include "optimized/targets.h"
#include "optimized/tile_walk.h"
#ifdef KVTWIN_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Highway's targets of Debian 12 lack AVX-512 BF16.
HWY_PUSH_ATTRIBUTES("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi");
namespace kvtwin::optimized {
namespace {

constexpr std::size_t kTile = kAttentionTile;
constexpr std::size_t kLanes = 16;
// Cells whose values are added at once. Of 16, whose rows may be 4 KiB apart,
// not all would fit into the first-level cache.
constexpr std::size_t kValueCells = 8;
// Rows and vectors of a block, whose sums fit into the registers.
constexpr std::size_t kBlockRows = 6;
constexpr std::size_t kBlockVectors = 4;

// Multiplies kRows rows and kVectors vectors of columns, from `row` and
// `column` on.
template <std::size_t kRows, std::size_t kVectors>
HWY_INLINE void MultiplyBlock(const Bf16Product& product, std::size_t row,
                              std::size_t column) {
  const std::size_t a_row = product.a_row;
  const std::size_t columns = product.columns;
  const float* a = product.a + row * a_row;
  const float* b = product.b + column;
  float* c = product.c + row * product.c_row + column;
  __m512 sums[kRows][kVectors];
  HWY_UNROLL(8)
  for (std::size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (std::size_t v = 0; v < kVectors; ++v) {
      sums[r][v] = _mm512_setzero_ps();
    }
  }
  for (std::size_t k = 0; k < product.pairs; ++k, ++a, b += columns) {
    __m512bh right[kVectors];
    HWY_UNROLL(8)
    for (std::size_t v = 0; v < kVectors; ++v) {
      right[v] = (__m512bh)_mm512_load_ps(b + v * kLanes);
    }
    HWY_UNROLL(8)
    for (std::size_t r = 0; r < kRows; ++r) {
      const auto left = (__m512bh)_mm512_set1_ps(a[r * a_row]);
      HWY_UNROLL(8)
      for (std::size_t v = 0; v < kVectors; ++v) {
        sums[r][v] = _mm512_dpbf16_ps(sums[r][v], left, right[v]);
      }
    }
  }
  HWY_UNROLL(8)
  for (std::size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (std::size_t v = 0; v < kVectors; ++v) {
      float* to = c + r * product.c_row + v * kLanes;
      _mm512_store_ps(to, product.add
                              ? _mm512_add_ps(sums[r][v], _mm512_load_ps(to))
                              : sums[r][v]);
    }
  }
}

template <std::size_t kRows>
HWY_INLINE void MultiplyRows(const Bf16Product& product, std::size_t row) {
  std::size_t j = 0;
  for (; j + kBlockVectors * kLanes <= product.columns;
       j += kBlockVectors * kLanes) {
    MultiplyBlock<kRows, kBlockVectors>(product, row, j);
  }
  for (; j < product.columns; j += kLanes) {
    MultiplyBlock<kRows, 1>(product, row, j);
  }
}

// Rounds two vectors: a pair has an element of the first and one of the second.
HWY_INLINE __m512i PairsOf(__m512 first, __m512 second) {
  alignas(64) static constexpr std::array<std::uint16_t, 32> kOrder = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder.data()),
                                  (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// Returns the numbers that are finite, and 0 for others.
HWY_INLINE __m512i FiniteOf(__m512i numbers) {
  const __m512i exponent = _mm512_set1_epi16(0x7F80);
  return _mm512_maskz_mov_epi16(
      _mm512_cmpneq_epi16_mask(_mm512_and_si512(numbers, exponent), exponent),
      numbers);
}

// Rounds the rows of values of some cells where they lie, to pairs of two cells
// each; numbers that are not finite become 0, unless `all`.
void PairValues(float* rows, std::size_t padded, std::size_t cells, bool all) {
  for (std::size_t t = 0; t < cells; t += 2) {
    const float* from = rows + t * padded;
    float* to = rows + t / 2 * padded;
    for (std::size_t i = 0; i < padded; i += kLanes) {
      const __m512i pairs =
          PairsOf(_mm512_load_ps(from + i), _mm512_load_ps(from + padded + i));
      _mm512_store_si512(to + i, all ? pairs : FiniteOf(pairs));
    }
  }
}

// Copies a square of pairs so that its rows become columns. The numbers of two
// rows that are eight apart are interleaved four times.
HWY_INLINE void Transpose(const float* from, std::size_t from_row, float* to,
                          std::size_t to_row) {
  const __m512i low =
      _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  __m512i rows[2][kLanes];
  HWY_UNROLL(16)
  for (std::size_t i = 0; i < kLanes; ++i) {
    rows[0][i] = _mm512_load_si512(from + i * from_row);
  }
  HWY_UNROLL(4)
  for (std::size_t round = 0; round < 4; ++round) {
    HWY_UNROLL(8)
    for (std::size_t i = 0; i < kLanes / 2; ++i) {
      const __m512i first = rows[round % 2][i];
      const __m512i second = rows[round % 2][i + kLanes / 2];
      rows[1 - round % 2][2 * i] =
          _mm512_permutex2var_epi32(first, low, second);
      rows[1 - round % 2][2 * i + 1] =
          _mm512_permutex2var_epi32(first, high, second);
    }
  }
  HWY_UNROLL(16)
  for (std::size_t i = 0; i < kLanes; ++i) {
    _mm512_store_si512(to + i * to_row, rows[0][i]);
  }
}

// Copies the pairs of keys to [kTile, pairs], so that a vector has the same
// pair of several cells.
void TransposeKeys(const float* rows, std::size_t padded, std::size_t pairs,
                   float* columns) {
  for (std::size_t i = 0; i < pairs; i += kLanes) {
    for (std::size_t t = 0; t < kTile; t += kLanes) {
      Transpose(rows + t * padded + i, padded, columns + i * kTile + t, kTile);
    }
  }
}

void RoundRows(float* rows, std::size_t padded, std::size_t count) {
  for (std::size_t r = 0; r < count; ++r, rows += padded) {
    for (std::size_t i = 0; i < padded; i += 2 * kLanes) {
      const __m512 first = _mm512_load_ps(rows + i);
      const __m512 second = i + kLanes < padded
                                ? _mm512_load_ps(rows + i + kLanes)
                                : _mm512_setzero_ps();
      _mm512_store_si512(rows + i / 2,
                         (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
  }
}

struct Two {
  __m512i first;
  __m512i second;
};

// Rows of each dtype for few queries: elements [i, i + 32) of two cells. Keys
// are pairs of elements, of each cell; Values are pairs of cells, of the first
// 16 elements and of the others. Rows of f32 and f16 would have to be rounded,
// which takes as long as their products of f32.
struct Bf16Rows {
  HWY_INLINE static void Keys(const std::byte* a, const std::byte* b,
                              std::size_t i, Two& keys) {
    keys.first = _mm512_loadu_si512(a + 2 * i);
    keys.second = _mm512_loadu_si512(b + 2 * i);
  }
  HWY_INLINE static void Values(const std::byte* a, const std::byte* b,
                                std::size_t i, Two& values) {
    alignas(64) static constexpr std::array<std::uint16_t, 32> kFirst = {
        0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i first = _mm512_load_si512(kFirst.data());
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    const __m512i of_a = _mm512_loadu_si512(a + 2 * i);
    const __m512i of_b = _mm512_loadu_si512(b + 2 * i);
    values.first = _mm512_permutex2var_epi16(of_a, first, of_b);
    values.second = _mm512_permutex2var_epi16(of_a, second, of_b);
  }
};

// The bf16 of the magnitudes of f8, in units of RowUnit: the low bytes, then
// the high bytes. A shift of the bits would make numbers that are subnormal in
// f8 subnormal in bf16, and the instructions take those as 0.
constexpr std::array<std::uint8_t, 256> MakeF8Table() {
  std::array<std::uint8_t, 256> table = {};
  for (unsigned i = 1; i < 128; ++i) {
    unsigned number = ((112 << 3) + i) << 4;
    if (i < 8) {
      const unsigned log = i < 2 ? 0 : i < 4 ? 1 : 2;
      number = ((110 + log) << 7) + ((i - (1U << log)) << (7 - log));
    }
    table[i] = static_cast<std::uint8_t>(number);
    table[128 + i] = static_cast<std::uint8_t>(number >> 8);
  }
  return table;
}

// Two bytes of each cell that follow each other are of elements that do so;
// from the first and the third quarter of each 16 bytes come the first pairs.
constexpr std::array<std::uint8_t, 64> MakeF8Pairs() {
  std::array<std::uint8_t, 64> order = {};
  for (unsigned i = 0; i < 64; ++i) {
    const unsigned element = i / 16 * 4 + i % 8 / 2 + (i % 16 < 8 ? 0 : 16);
    order[i] = static_cast<std::uint8_t>(element + i % 2 * 32);
  }
  return order;
}

struct F8Rows {
  HWY_INLINE static void Keys(const std::byte* a, const std::byte* b,
                              std::size_t i, Two& keys) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    Convert(_mm512_permutexvar_epi64(order, Load(a + i, b + i)), keys);
  }
  HWY_INLINE static void Values(const std::byte* a, const std::byte* b,
                                std::size_t i, Two& values) {
    alignas(64) static constexpr auto kOrder = MakeF8Pairs();
    Convert(_mm512_permutexvar_epi8(_mm512_load_si512(kOrder.data()),
                                    Load(a + i, b + i)),
            values);
  }

 private:
  HWY_INLINE static __m512i Load(const std::byte* a, const std::byte* b) {
    return _mm512_inserti64x4(
        _mm512_castsi256_si512(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a))),
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)), 1);
  }
  // The lower half of each 16 bytes is of to.first, the upper half of
  // to.second.
  HWY_INLINE static void Convert(__m512i bytes, Two& to) {
    alignas(64) static constexpr auto kTable = MakeF8Table();
    const __m512i low =
        _mm512_permutex2var_epi8(_mm512_load_si512(kTable.data()), bytes,
                                 _mm512_load_si512(kTable.data() + 64));
    const __m512i magnitude =
        _mm512_permutex2var_epi8(_mm512_load_si512(kTable.data() + 128), bytes,
                                 _mm512_load_si512(kTable.data() + 192));
    constexpr int kOrWithAnd = 0xF8;
    const __m512i high = _mm512_ternarylogic_epi32(
        magnitude, bytes, _mm512_set1_epi8(static_cast<char>(0x80)),
        kOrWithAnd);
    to.first = _mm512_unpacklo_epi8(low, high);
    to.second = _mm512_unpackhi_epi8(low, high);
  }
};

// Whether rows can be read as pairs of bf16.
bool HasPairs(const TileRows& rows) {
  const bool has_rows = rows.dtype == DType::kBF16 || rows.dtype == DType::kF8;
  return has_rows && rows.adjacent && rows.head_dim % (2 * kLanes) == 0;
}

// Whether few queries multiply these rows as pairs of bf16. Intel's processors
// do four vectors of products of f32 in the time of one of pairs.
bool FewMultiplyPairs(const TileRows& rows) {
  return HasPairs(rows) && !IsIntel();
}

// Calls does(format) with the format of rows. Requires: HasPairs(rows).
template <class Does>
HWY_INLINE void WithPairs(const TileRows& rows, const Does& does) {
  rows.dtype == DType::kF8 ? does(F8Rows()) : does(Bf16Rows());
}

// Copies the keys of one head as pairs of elements: [padded head_dim, cells],
// of which the first half is used.
void CopyKeys(const TileRows& keys, std::size_t cells, std::size_t kv_head,
              float* to) {
  const std::size_t padded = Padded(keys.head_dim);
  if (!HasPairs(keys)) {
    UnpackRows(keys, cells, kv_head, to);
    return RoundRows(to, padded, cells);
  }
  const CellsRows rows = {keys.rows.data(), HeadOffset(keys, kv_head)};
  WithPairs(keys, [&](auto format) {
    for (std::size_t t = 0; t < cells; t += 2, to += 2 * padded) {
      for (std::size_t i = 0; i < keys.head_dim; i += 2 * kLanes) {
        Two pairs;
        format.Keys(rows[t], rows[t + 1], i, pairs);
        _mm512_store_si512(to + i / 2, pairs.first);
        _mm512_store_si512(to + padded + i / 2, pairs.second);
      }
    }
  });
}

// Copies the values of one head as pairs of two cells each: [padded head_dim,
// kTile / 2], zeros for absent cells. A V that is not finite must not reach a
// row that does not see it.
void CopyValues(const TileRows& values, std::size_t cells, std::size_t kv_head,
                bool all, float* to) {
  const std::size_t padded = Padded(values.head_dim);
  if (!HasPairs(values)) {
    UnpackRows(values, cells, kv_head, to);
    std::fill(to + cells * padded, to + kTile * padded, 0.0f);
    return PairValues(to, padded, kTile, all);
  }
  const CellsRows rows = {values.rows.data(), HeadOffset(values, kv_head)};
  std::fill(to + (cells + 1) / 2 * padded, to + kTile / 2 * padded, 0.0f);
  WithPairs(values, [&](auto format) {
    for (std::size_t t = 0; t < cells; t += 2, to += padded) {
      for (std::size_t i = 0; i < values.head_dim; i += 2 * kLanes) {
        Two pairs;
        format.Values(rows[t], rows[t + 1], i, pairs);
        _mm512_store_si512(to + i, all ? pairs.first : FiniteOf(pairs.first));
        _mm512_store_si512(to + i + kLanes,
                           all ? pairs.second : FiniteOf(pairs.second));
      }
    }
  });
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
                        const Two& first, const Two& second,
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
  Two first;
  Two second;
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
      Two pairs;
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

void RoundFewToBf16(const TileRows& keys, float* rows, std::size_t padded,
                    std::size_t count) {
  if (HasIntegers(keys)) RoundToIntegers(rows, padded, count);
  if (FewMultiplyPairs(keys)) RoundRows(rows, padded, count);
}

namespace {

// See ScoreFew.
void ScoreInBf16(const AttentionTile& tile, const QueryHeads* heads,
                 std::size_t head_count, float* scores, float* rows) {
  const TileRows& keys = tile.keys;
  const std::size_t padded = Padded(keys.head_dim);
  const std::size_t count = heads[0].count;
  const RowsAhead ahead(&tile, &AttentionTile::values);
  const auto scores_of = [&](std::size_t h, std::size_t q, std::size_t t) {
    return scores + (h * kFewQueries + q) * kTile + t;
  };
  if (HasIntegers(keys)) {
    return ForEachCells<kIntegerCells>(
        keys, tile.cells, true, ahead, heads, head_count, rows,
        [&](std::size_t h, std::size_t t, CellsRows cells,
            std::size_t head_dim) {
          for (std::size_t q = 0; q < count; q += 4) {
            IntegerDots(heads[h].queries + q * padded, padded, count - q, cells,
                        head_dim, scores_of(h, q, t));
          }
        });
  }
  if (!FewMultiplyPairs(keys))
    return ScoreFew(tile, heads, head_count, scores, rows);
  const auto dots = ProductsOf(keys, count, [](auto format, auto n) {
    return Dots<decltype(format), n>;
  });
  ForEachCells<4>(
      keys, tile.cells, true, ahead, heads, head_count, rows,
      [&](std::size_t h, std::size_t t, CellsRows cells, std::size_t head_dim) {
        for (std::size_t q = 0; q < count; q += 4) {
          dots[q / 4](heads[h].queries + q * padded, padded, cells, head_dim,
                      scores_of(h, q, t));
        }
      });
}

// See AddFew; the weights are lost.
void AddInBf16(const AttentionTile& tile, const QueryHeads* heads,
               std::size_t head_count, float* weights, float* rows) {
  const TileRows& values = tile.values;
  const std::size_t padded = Padded(values.head_dim);
  const std::size_t count = heads[0].count;
  const RowsAhead ahead(tile.next, &AttentionTile::keys);
  if (HasIntegers(values)) {
    return ForEachCells<kTile>(
        values, tile.cells, true, ahead, heads, head_count, rows,
        [&](std::size_t h, std::size_t, CellsRows cells, std::size_t head_dim) {
          AddIntegerValues(weights + h * kFewQueries * kTile, padded, count,
                           cells, tile.cells, head_dim, heads[h].out);
        });
  }
  if (!FewMultiplyPairs(values))
    return AddFew(tile, heads, head_count, weights, rows);
  for (std::size_t h = 0; h < head_count; ++h) {
    RoundRows(weights + h * kFewQueries * kTile, kTile, count);
  }
  const auto add = ProductsOf(values, count, [](auto format, auto n) {
    return AddValues<decltype(format), n>;
  });
  ForEachCells<kValueCells>(
      values, tile.cells, true, ahead, heads, head_count, rows,
      [&](std::size_t h, std::size_t t, CellsRows cells, std::size_t head_dim) {
        for (std::size_t q = 0; q < count; q += 4) {
          add[q / 4](weights + (h * kFewQueries + q) * kTile + t / 2, padded,
                     cells, head_dim, heads[h].out + q * padded);
        }
      });
}

}  // namespace

void AttendFewInBf16(const AttentionTile& tile, const QueryHeads* heads,
                     std::size_t head_count, ScoreScale scale, float* scratch) {
  float* rows = scratch + head_count * kFewQueries * kTile;
  ScoreInBf16(tile, heads, head_count, scratch, rows);
  WeighFew(tile, heads, head_count, scale, scratch);
  AddInBf16(tile, heads, head_count, scratch, rows);
}

void MultiplyInRegisters(std::span<const Bf16Product> products) {
  for (const Bf16Product& product : products) {
    std::size_t r = 0;
    for (; r + kBlockRows <= product.rows; r += kBlockRows) {
      MultiplyRows<kBlockRows>(product, r);
    }
    for (; r < product.rows; ++r) MultiplyRows<1>(product, r);
  }
}

}  // namespace kvtwin::optimized
HWY_POP_ATTRIBUTES;

namespace kvtwin::optimized {
namespace {

#ifdef KVTWIN_AMX
// Whether the processor has AMX with bf16, and the system lets this process use
// it. Asks the system for that.
bool HasAmx() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  constexpr unsigned kBf16 = 1U << 22;
  constexpr unsigned kTiles = 1U << 24;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 ||
      (~edx & (kBf16 | kTiles)) != 0) {
    return false;
  }
  constexpr unsigned kSystemSavesStates = 1U << 27;
  __cpuid(1, eax, ebx, ecx, edx);
  if ((ecx & kSystemSavesStates) == 0) return false;
  unsigned states = 0;
  asm volatile("xgetbv" : "=a"(states), "=d"(edx) : "c"(0));
  constexpr unsigned kTileStates = 3U << 17;
  if ((~states & kTileStates) != 0) return false;
  constexpr int kRequest = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;     // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#endif

// Null: the processor has none.
MultiplyBf16 OfProcessor() {
  // Cooper Lake alone has the first and lacks one of the others.
  if (__builtin_cpu_supports("avx512bf16") == 0 ||
      __builtin_cpu_supports("avx512vnni") == 0 ||
      __builtin_cpu_supports("avx512vbmi") == 0) {
    return nullptr;
  }
#ifdef KVTWIN_AMX
  if (HasAmx()) return MultiplyInTiles<AmxTiles>;
#endif
  // Products of f32 are faster (FewMultiplyPairs).
  return IsIntel() ? nullptr : MultiplyInRegisters;
}

std::atomic<MultiplyBf16> forced = nullptr;

}  // namespace

MultiplyBf16 Bf16Multiplier() {
  static const MultiplyBf16 own = OfProcessor();
  if (own == nullptr || !ActiveTarget().starts_with("AVX3")) return nullptr;
  MultiplyBf16 multiply = forced.load(std::memory_order_relaxed);
  return multiply == nullptr ? own : multiply;
}

void ForceBf16Multiplier(MultiplyBf16 multiply) {
  forced.store(multiply, std::memory_order_relaxed);
}

void RoundToBf16(float* rows, std::size_t padded, std::size_t count) {
  RoundRows(rows, padded, count);
}

namespace {

// Pairs of a key, with zeros up to whole tiles of AMX.
std::size_t PairsOfKey(std::size_t head_dim) {
  const std::size_t pairs = Padded(head_dim) / 2;
  return (pairs + kPairsOfTile - 1) / kPairsOfTile * kPairsOfTile;
}

}  // namespace

// Scratch: scores, the pairs of keys, and those of values, of which the last
// tile takes twice as much while it is rounded.
std::size_t ManyBf16Scratch(std::size_t k_head_dim, std::size_t v_head_dim) {
  const std::size_t v = Padded(v_head_dim);
  return kManyBf16Tiles * kTile * (kManyBf16Queries + PairsOfKey(k_head_dim)) +
         std::max(Padded(k_head_dim) * kTile,
                  (kManyBf16Tiles + 1) * kTile / 2 * v);
}

void AttendManyInBf16(std::span<const GroupTile> tiles, const QueryHeads& head,
                      std::size_t queries_per_row, ScoreScale scale,
                      MultiplyBf16 multiply, float* scratch) {
  const std::size_t k_padded = Padded(tiles[0].tile.keys.head_dim);
  const std::size_t v_padded = Padded(tiles[0].tile.values.head_dim);
  const std::size_t width = tiles.size() * kTile;
  float* scores = scratch;
  float* keys = scores + kManyBf16Queries * width;
  const std::size_t k_pairs = PairsOfKey(tiles[0].tile.keys.head_dim);
  float* values = keys + k_pairs * width;
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    const AttentionTile& tile = tiles[i].tile;
    // The columns of absent cells may hold anything, as their weights are 0.
    CopyKeys(tile.keys, tile.cells, head.kv_head, values);
    TransposeKeys(values, k_padded, k_pairs, keys + i * k_pairs * kTile);
  }
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    const AttentionTile& tile = tiles[i].tile;
    CopyValues(tile.values, tile.cells, head.kv_head,
               SeeAll(tiles[i], head.count / queries_per_row),
               values + i * kTile / 2 * v_padded);
  }
  const std::size_t cells = width - kTile + tiles.back().tile.cells;
  for (std::size_t q = 0; q < head.count; q += kManyBf16Queries) {
    const std::size_t count = std::min(kManyBf16Queries, head.count - q);
    if (!SeeAny(tiles, q, count, queries_per_row)) continue;
    std::array<Bf16Product, kManyBf16Tiles> products;
    for (std::size_t i = 0; i < tiles.size(); ++i) {
      At(products, i) = {.a = head.queries + q * k_padded,
                         .a_row = k_padded,
                         .rows = count,
                         .pairs = k_pairs,
                         .b = keys + i * k_pairs * kTile,
                         .columns = kTile,
                         .c = scores + i * kTile,
                         .c_row = width,
                         .add = false};
    }
    multiply(std::span(products).first(tiles.size()));
    WeighMany(tiles, head, q, count, queries_per_row, scale, scores);
    RoundRows(scores, width, count);
    products[0] = {.a = scores,
                   .a_row = width,
                   .rows = count,
                   .pairs = (cells + 1) / 2,
                   .b = values,
                   .columns = v_padded,
                   .c = head.out + q * v_padded,
                   .c_row = v_padded,
                   .add = true};
    multiply(std::span(products).first(1));
  }
}

}  // namespace kvtwin::optimized

#else   // HWY_ARCH_X86
namespace kvtwin::optimized {

MultiplyBf16 Bf16Multiplier() { return nullptr; }
void ForceBf16Multiplier(MultiplyBf16) {}
void MultiplyInRegisters(std::span<const Bf16Product>) {}
void RoundToBf16(float*, std::size_t, std::size_t) {}
void RoundFewToBf16(const TileRows&, float*, std::size_t, std::size_t) {}
void AttendFewInBf16(const AttentionTile&, const QueryHeads*, std::size_t,
                     ScoreScale, float*) {}
std::size_t ManyBf16Scratch(std::size_t, std::size_t) { return 0; }
void AttendManyInBf16(std::span<const GroupTile>, const QueryHeads&,
                      std::size_t, ScoreScale, MultiplyBf16, float*) {}

}  // namespace kvtwin::optimized
#endif  // HWY_ARCH_X86
