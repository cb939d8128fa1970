#include "optimized/attention_q8.h"

#include "hwy/base.h"

#if HWY_ARCH_X86
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "core/elements.h"
#include "core/index.h"
#include "optimized/avx512.h"

HWY_PUSH_ATTRIBUTES("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni");
namespace kvtwin::optimized {
namespace {

constexpr std::size_t kTile = kAttentionTile;
constexpr std::size_t kLanes = 16;
constexpr std::size_t kBlockBytes = 2 + kBlockElements;
constexpr std::size_t kMostBlocks = 32;

// A query is two integers of 8 bits for each element, and numbers of blocks:
// element = unit * (128 * high + low).
constexpr float kQueryUnits = 16383;
constexpr float kWeightUnits = 32767;

// The parts of a query of `head_dim` elements, which take no more memory than
// its floats.
struct Query {
  std::int8_t* high;   // [head_dim]
  std::int8_t* low;    // [head_dim], from 0 to 127.
  std::int32_t* sums;  // [blocks]: -128 times the sum of the integers.
  float* unit;
};

HWY_INLINE Query PartsOf(float* query, std::size_t head_dim) {
  auto* high = reinterpret_cast<std::int8_t*>(query);
  auto* sums = reinterpret_cast<std::int32_t*>(high + 2 * head_dim);
  return {.high = high,
          .low = high + head_dim,
          .sums = sums,
          .unit = reinterpret_cast<float*>(sums + head_dim / kBlockElements)};
}

// 0, or NaN if a number is not finite.
HWY_INLINE __m512 TimesZero(__m512 numbers) {
  return _mm512_mul_ps(numbers, _mm512_setzero_ps());
}

void RoundQuery(float* query, std::size_t head_dim) {
  __m512 most = _mm512_set1_ps(0x1p-112f);  // Then its reciprocal is finite.
  __m512 zeros = _mm512_setzero_ps();
  for (std::size_t i = 0; i < head_dim; i += kLanes) {
    const __m512 some = _mm512_load_ps(query + i);
    most = _mm512_max_ps(most, _mm512_abs_ps(some));
    zeros = _mm512_add_ps(zeros, TimesZero(some));
  }
  const float largest = _mm512_reduce_max_ps(most);
  const __m512 factor = _mm512_set1_ps(kQueryUnits / largest);
  const Query parts = PartsOf(query, head_dim);
  const std::size_t blocks = head_dim / kBlockElements;
  alignas(64) std::array<std::int8_t, kMostBlocks * kBlockElements> low;
  std::array<std::int32_t, kMostBlocks> sums;
  for (std::size_t b = 0; b < blocks; ++b) {
    __m512i sum = _mm512_setzero_si512();
    for (std::size_t i = b * kBlockElements; i < (b + 1) * kBlockElements;
         i += kLanes) {
      const __m512i number =
          _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(query + i), factor));
      sum = _mm512_add_epi32(sum, number);
      _mm_store_si128(reinterpret_cast<__m128i*>(low.data() + i),
                      _mm512_cvtepi32_epi8(
                          _mm512_and_si512(number, _mm512_set1_epi32(127))));
      // It overwrites floats that have been read.
      _mm_storeu_si128(reinterpret_cast<__m128i*>(parts.high + i),
                       _mm512_cvtepi32_epi8(_mm512_srai_epi32(number, 7)));
    }
    At(sums, b) = _mm512_reduce_add_epi32(_mm512_slli_epi32(sum, 7));
  }
  std::memcpy(parts.low, low.data(), head_dim);
  for (std::size_t b = 0; b < blocks; ++b) parts.sums[b] = -At(sums, b);
  *parts.unit = largest / kQueryUnits + _mm512_reduce_add_ps(zeros);
}

// The scales of a block of four cells.
HWY_INLINE std::int64_t LoadHalves(const std::byte* const* rows,
                                   std::ptrdiff_t offset) {
  std::uint64_t halves = 0;
  HWY_UNROLL(4)
  for (std::size_t t = 4; t-- > 0;) {
    std::uint16_t half;
    std::memcpy(&half, rows[t] + offset, sizeof(half));
    halves = halves << 16 | half;
  }
  return static_cast<std::int64_t>(halves);
}

// The scales of a block of 16 cells. They are put together in registers of
// integers, as the instructions that insert into vectors compete with products.
HWY_INLINE __m512 LoadScales(const std::byte* const* rows,
                             std::ptrdiff_t offset) {
  return _mm512_cvtph_ps(_mm256_setr_epi64x(
      LoadHalves(rows, offset), LoadHalves(rows + 4, offset),
      LoadHalves(rows + 8, offset), LoadHalves(rows + 12, offset)));
}

// Bytes of four cells that are four apart, 16 each.
HWY_INLINE __m512i LoadFour(const std::byte* const* rows,
                            std::ptrdiff_t offset) {
  const auto load = [&](std::size_t t) __attribute__((always_inline)) {
    return reinterpret_cast<const __m128i*>(rows[t] + offset);
  };
  __m512i four = _mm512_castsi128_si512(_mm_loadu_si128(load(0)));
  four = _mm512_mask_broadcast_i32x4(four, 0x00F0, _mm_loadu_si128(load(4)));
  four = _mm512_mask_broadcast_i32x4(four, 0x0F00, _mm_loadu_si128(load(8)));
  return _mm512_mask_broadcast_i32x4(four, 0xF000, _mm_loadu_si128(load(12)));
}

template <std::size_t kQueries>
struct BlockSums {
  __m512i high[kQueries];
  __m512i low[kQueries];
};

HWY_INLINE __m512i SetOfFour(const std::int8_t* bytes) {
  std::int32_t four;
  std::memcpy(&four, bytes, sizeof(four));
  return _mm512_set1_epi32(four);
}

// Elements [i, i + 4), [i + 4, i + 8), ... of 16 keys, where the instructions
// for products take them: as numbers without a sign, which are 128 more.
HWY_INLINE void LoadQuads(const std::byte* const* rows, std::ptrdiff_t offset,
                          __m512i (&quads)[4]) {
  const __m512i row0 = LoadFour(rows, offset);
  const __m512i row1 = LoadFour(rows + 1, offset);
  const __m512i row2 = LoadFour(rows + 2, offset);
  const __m512i row3 = LoadFour(rows + 3, offset);
  const __m512i low0 = _mm512_unpacklo_epi32(row0, row1);
  const __m512i low1 = _mm512_unpacklo_epi32(row2, row3);
  const __m512i high0 = _mm512_unpackhi_epi32(row0, row1);
  const __m512i high1 = _mm512_unpackhi_epi32(row2, row3);
  const __m512i sign = _mm512_set1_epi32(-0x7F7F7F80);
  quads[0] = _mm512_xor_si512(_mm512_unpacklo_epi64(low0, low1), sign);
  quads[1] = _mm512_xor_si512(_mm512_unpackhi_epi64(low0, low1), sign);
  quads[2] = _mm512_xor_si512(_mm512_unpacklo_epi64(high0, high1), sign);
  quads[3] = _mm512_xor_si512(_mm512_unpackhi_epi64(high0, high1), sign);
}

// Adds the products of elements [i, i + 16) of the queries with those of 16
// keys, or of 32, which share what is loaded of the queries.
template <std::size_t kQueries, std::size_t kGroups>
HWY_INLINE void AddQuads(const __m512i (&quads)[kGroups][4],
                         const std::array<Query, 4>& queries, std::size_t i,
                         BlockSums<kQueries> (&sums)[kGroups]) {
  HWY_UNROLL(4)
  for (std::size_t quad = 0; quad < 4; ++quad, i += 4) {
    HWY_UNROLL(4)
    for (std::size_t q = 0; q < kQueries; ++q) {
      const __m512i high = SetOfFour(queries[q].high + i);
      const __m512i low = SetOfFour(queries[q].low + i);
      HWY_UNROLL(2)
      for (std::size_t g = 0; g < kGroups; ++g) {
        BlockSums<kQueries>& sum = sums[g];
        sum.high[q] = _mm512_dpbusd_epi32(sum.high[q], quads[g][quad], high);
        sum.low[q] = _mm512_dpbusd_epi32(sum.low[q], quads[g][quad], low);
      }
    }
  }
}

// See IntegerDots: for kQueries queries and up to 16 or 32 cells.
template <std::size_t kQueries, std::size_t kGroups>
HWY_NOINLINE void Dots(const float* from, std::size_t padded, CellsRows keys,
                       std::size_t head_dim, EvenFetches& ahead,
                       float* scores) {
  EvenFetches fetches = ahead;
  fetches.Next();  // The lines of the scales.
  std::array<Query, 4> queries;
  __m512 results[kGroups][kQueries];
  HWY_UNROLL(4)
  for (std::size_t q = 0; q < kQueries; ++q) {
    queries[q] = PartsOf(const_cast<float*>(from) + q * padded, head_dim);
    HWY_UNROLL(2)
    for (auto& result : results) result[q] = _mm512_setzero_ps();
  }
  for (std::size_t b = 0; b < head_dim / kBlockElements; ++b) {
    const std::ptrdiff_t block = keys.offset + AsInt(b * kBlockBytes);
    BlockSums<kQueries> sums[kGroups];
    HWY_UNROLL(4)
    for (std::size_t q = 0; q < kQueries; ++q) {
      HWY_UNROLL(2)
      for (BlockSums<kQueries>& sum : sums) {
        sum.high[q] = _mm512_setzero_si512();
        sum.low[q] = _mm512_set1_epi32(queries[q].sums[b]);
      }
    }
    HWY_UNROLL(2)
    for (std::size_t half = 0; half < 2; ++half) {
      __m512i quads[kGroups][4];
      HWY_UNROLL(2)
      for (std::size_t g = 0; g < kGroups; ++g) {
        LoadQuads(keys.rows + g * kLanes, block + 2 + AsInt(half * kLanes),
                  quads[g]);
        fetches.Next();
      }
      AddQuads(quads, queries, b * kBlockElements + half * kLanes, sums);
    }
    HWY_UNROLL(2)
    for (std::size_t g = 0; g < kGroups; ++g) {
      const __m512 scale = LoadScales(keys.rows + g * kLanes, block);
      HWY_UNROLL(4)
      for (std::size_t q = 0; q < kQueries; ++q) {
        const __m512i sum = _mm512_add_epi32(
            _mm512_slli_epi32(sums[g].high[q], 7), sums[g].low[q]);
        results[g][q] =
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, results[g][q]);
      }
    }
  }
  HWY_UNROLL(4)
  for (std::size_t q = 0; q < kQueries; ++q) {
    const __m512 unit = _mm512_set1_ps(*queries[q].unit);
    HWY_UNROLL(2)
    for (std::size_t g = 0; g < kGroups; ++g) {
      _mm512_store_ps(scores + q * kTile + g * kLanes,
                      _mm512_mul_ps(results[g][q], unit));
    }
  }
  ahead = fetches;
}

// The integers of the weights of a tile, times the scales of a block: pairs of
// cells.
using WeightPairs =
    std::array<std::array<std::int32_t, kTile / 2>, kFewQueries>;

HWY_INLINE void RoundWeights(const float* weights, const __m512 (&scales)[4],
                             std::int32_t* pairs) {
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  HWY_UNROLL(2)
  for (std::size_t i = 0; i < 4; i += 2) {
    const __m512i first = _mm512_cvtps_epi32(
        _mm512_mul_ps(_mm512_load_ps(weights + i * kLanes), scales[i]));
    const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(
        _mm512_load_ps(weights + (i + 1) * kLanes), scales[i + 1]));
    _mm512_store_si512(
        pairs + i * kLanes / 2,
        _mm512_permutexvar_epi64(order, _mm512_packs_epi32(first, second)));
  }
}

// out[q] += unit * units[q] * pairs[q] . values over the cells of a tile, for
// the 32 elements of a block.
template <std::size_t kQueries>
HWY_NOINLINE void AddBlock(const std::array<std::int32_t, kTile / 2>* pairs,
                           CellsRows values, std::size_t cells,
                           const float* units, float unit, std::size_t padded,
                           EvenFetches& ahead, float* out) {
  EvenFetches fetches = ahead;
  fetches.Next();  // The lines of the scales.
  __m512i low[kQueries];
  __m512i high[kQueries];
  HWY_UNROLL(4)
  for (std::size_t q = 0; q < kQueries; ++q) {
    low[q] = high[q] = _mm512_setzero_si512();
  }
  for (std::size_t t = 0; t < cells; t += 2) {
    if (t % 8 == 0) fetches.Next();
    const __m512i a = _mm512_cvtepi8_epi16(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values[t])));
    const __m512i b = _mm512_cvtepi8_epi16(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values[t + 1])));
    const __m512i first = _mm512_unpacklo_epi16(a, b);
    const __m512i second = _mm512_unpackhi_epi16(a, b);
    HWY_UNROLL(4)
    for (std::size_t q = 0; q < kQueries; ++q) {
      const __m512i weight = _mm512_set1_epi32(pairs[q][t / 2]);
      low[q] = _mm512_dpwssd_epi32(low[q], weight, first);
      high[q] = _mm512_dpwssd_epi32(high[q], weight, second);
    }
  }
  const __m512i first =
      _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  HWY_UNROLL(4)
  for (std::size_t q = 0; q < kQueries; ++q) {
    const __m512 factor = _mm512_set1_ps(units[q] * unit);
    float* to = out + q * padded;
    const auto sum0 =
        _mm512_cvtepi32_ps(_mm512_permutex2var_epi32(low[q], first, high[q]));
    const auto sum1 =
        _mm512_cvtepi32_ps(_mm512_permutex2var_epi32(low[q], second, high[q]));
    _mm512_store_ps(to, _mm512_fmadd_ps(sum0, factor, _mm512_load_ps(to)));
    _mm512_store_ps(to + kLanes,
                    _mm512_fmadd_ps(sum1, factor, _mm512_load_ps(to + kLanes)));
  }
  ahead = fetches;
}

// Divides the weights of a query by the largest one, which it returns.
HWY_INLINE float DivideByLargest(float* weights) {
  __m512 most = _mm512_load_ps(weights);
  for (std::size_t t = kLanes; t < kTile; t += kLanes) {
    most = _mm512_max_ps(most, _mm512_load_ps(weights + t));
  }
  const float largest = _mm512_reduce_max_ps(most);
  const __m512 factor = _mm512_set1_ps(largest == 0 ? 0 : 1 / largest);
  for (std::size_t t = 0; t < kTile; t += kLanes) {
    _mm512_store_ps(weights + t,
                    _mm512_mul_ps(_mm512_load_ps(weights + t), factor));
  }
  return largest;
}

// Divides the scales of a block of the cells by the unit of weights times
// scales, which it returns: NaN if a scale is not finite.
HWY_INLINE float DivideScales(CellsRows block, std::size_t cells,
                              __m512 (&scales)[kTile / kLanes]) {
  __m512 most = _mm512_setzero_ps();
  __m512 zeros = _mm512_setzero_ps();
  for (std::size_t i = 0; i < kTile / kLanes; ++i) {
    scales[i] = i * kLanes < cells
                    ? LoadScales(block.rows + i * kLanes, block.offset)
                    : _mm512_setzero_ps();
    most = _mm512_max_ps(most, _mm512_abs_ps(scales[i]));
    zeros = _mm512_add_ps(zeros, TimesZero(scales[i]));
  }
  const float largest = _mm512_reduce_max_ps(most);
  const __m512 factor =
      _mm512_set1_ps(largest == 0 ? 0 : kWeightUnits / largest);
  for (__m512& scale : scales) scale = _mm512_mul_ps(scale, factor);
  return largest / kWeightUnits + _mm512_reduce_add_ps(zeros);
}

}  // namespace

void IntegerDots(const float* queries, std::size_t padded, std::size_t count,
                 CellsRows keys, std::size_t cells, std::size_t head_dim,
                 EvenFetches& ahead, float* scores) {
  WithCount(count, [&](auto n) {
    for (std::size_t t = 0; t < cells; t += 2 * kLanes) {
      const auto dots = cells - t > kLanes ? Dots<n, 2> : Dots<n, 1>;
      dots(queries, padded, {keys.rows + t, keys.offset}, head_dim, ahead,
           scores + t);
    }
  });
}

void AddIntegerValues(float* weights, std::size_t padded, std::size_t count,
                      CellsRows values, std::size_t cells, std::size_t head_dim,
                      EvenFetches& ahead, float* out) {
  std::array<float, kFewQueries> units;
  for (std::size_t q = 0; q < count; ++q) {
    At(units, q) = DivideByLargest(weights + q * kTile);
  }
  const std::size_t blocks = head_dim / kBlockElements;
  const auto block = [&](std::size_t b) {
    return CellsRows{values.rows, values.offset + AsInt(b * kBlockBytes)};
  };
  // First the scales of all blocks, whose largest ones are found meanwhile.
  __m512 scales[kMostBlocks][kTile / kLanes];
  std::array<float, kMostBlocks> scale_units;
  for (std::size_t b = 0; b < blocks; ++b) {
    At(scale_units, b) = DivideScales(block(b), cells, scales[b]);
  }
  alignas(64) WeightPairs pairs;
  for (std::size_t b = 0; b < blocks; ++b) {
    for (std::size_t q = 0; q < count; ++q) {
      RoundWeights(weights + q * kTile, scales[b], At(pairs, q).data());
    }
    const CellsRows numbers = {values.rows, block(b).offset + 2};
    for (std::size_t q = 0; q < count; q += 4) {
      WithCount(count - q, [&](auto n) {
        AddBlock<n>(&At(pairs, q), numbers, cells, units.data() + q,
                    At(scale_units, b), padded, ahead,
                    out + q * padded + b * kBlockElements);
      });
    }
  }
}

void RoundToIntegers(float* queries, std::size_t padded, std::size_t count) {
  for (std::size_t q = 0; q < count; ++q)
    RoundQuery(queries + q * padded, padded);
}

}  // namespace kvtwin::optimized
HWY_POP_ATTRIBUTES;

namespace kvtwin::optimized {

bool HasIntegers(const TileRows& rows) {
  return rows.dtype == DType::kQ8 && rows.adjacent &&
         rows.head_dim <= kMostBlocks * kBlockElements;
}

}  // namespace kvtwin::optimized

#else   // HWY_ARCH_X86
namespace kvtwin::optimized {

bool HasIntegers(const TileRows&) { return false; }
void RoundToIntegers(float*, std::size_t, std::size_t) {}
void IntegerDots(const float*, std::size_t, std::size_t, CellsRows, std::size_t,
                 std::size_t, EvenFetches&, float*) {}
void AddIntegerValues(float*, std::size_t, std::size_t, CellsRows, std::size_t,
                      std::size_t, EvenFetches&, float*) {}

}  // namespace kvtwin::optimized
#endif  // HWY_ARCH_X86
