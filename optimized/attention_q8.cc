#include "optimized/attention_q8.h"

#include "hwy/base.h"

#if HWY_ARCH_X86
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

#include "core/elements.h"
#include "core/index.h"
#include "optimized/avx512.h"
#include "optimized/targets.h"

HWY_PUSH_ATTRIBUTES("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni");
namespace kvtwin::optimized {
namespace {

constexpr std::size_t kTile = kAttentionTile;
constexpr std::size_t kLanes = 16;
constexpr std::size_t kBlockBytes = 2 + kBlockElements;
constexpr std::size_t kMostBlocks = 32;

// An element of a query is kBytes bytes with a sign, the lowest first: element
// = unit * (byte 0 + 256 * byte 1 + 65,536 * byte 2).
constexpr std::size_t kBytesOfF32 = 3;
constexpr std::size_t kBytesOfBf16 = 2;
// Integers whose lower bytes can all be made ones with a sign are at most
// 0x7F7F7F and 0x7F7F. The first leaves room for the rounding of a product.
template <std::size_t kBytes>
constexpr float kQueryUnits = kBytes == 3 ? 0x7F7F00 : 0x7F7F;

// A weight is a number of 15 bits and a sign, or two numbers: 32,768 * first +
// second, which has no sign.
constexpr std::size_t kNumbersOfF32 = 2;
constexpr std::size_t kNumbersOfBf16 = 1;
constexpr int kNumberBits = 15;
template <std::size_t kNumbers>
constexpr float kWeightUnits = kNumbers == 2 ? 0x1p30f - 1024 : 0x7FFF;

// 0, or NaN if a number is not finite.
HWY_INLINE __m512 TimesZero(__m512 numbers) {
  return _mm512_mul_ps(numbers, _mm512_setzero_ps());
}

// The parts of a query of `head_dim` elements, which take no more memory than
// its floats.
template <std::size_t kBytes>
struct Query {
  std::array<std::int8_t*, kBytes> bytes;  // [head_dim]
  std::array<std::int32_t*, kBytes> sums;  // [blocks]: -128 * sum of bytes.
  float* unit;
};

template <std::size_t kBytes>
HWY_INLINE Query<kBytes> PartsOf(float* query, std::size_t head_dim) {
  auto* bytes = reinterpret_cast<std::int8_t*>(query);
  auto* sums = reinterpret_cast<std::int32_t*>(bytes + kBytes * head_dim);
  const std::size_t blocks = head_dim / kBlockElements;
  Query<kBytes> parts;
  HWY_UNROLL(3)
  for (std::size_t p = 0; p < kBytes; ++p) {
    parts.bytes[p] = bytes + p * head_dim;
    parts.sums[p] = sums + p * blocks;
  }
  parts.unit = reinterpret_cast<float*>(sums + kBytes * blocks);
  return parts;
}

// Adds 2^7 to each of the lower bytes, and takes it away from each: the number
// is the same, and each byte has a sign.
template <std::size_t kBytes>
HWY_INLINE __m512i WithSigns(__m512i numbers) {
  const __m512i half = _mm512_set1_epi32(kBytes == 3 ? 0x8080 : 0x80);
  return _mm512_xor_si512(_mm512_add_epi32(numbers, half), half);
}

template <std::size_t kBytes>
void RoundQuery(float* query, std::size_t head_dim) {
  // A unit is at least 2^-126, and its reciprocal finite.
  __m512 most = _mm512_set1_ps(kQueryUnits<kBytes> * 0x1p-126f);
  __m512 zeros = _mm512_setzero_ps();
  for (std::size_t i = 0; i < head_dim; i += kLanes) {
    const __m512 some = _mm512_load_ps(query + i);
    most = _mm512_max_ps(most, _mm512_abs_ps(some));
    zeros = _mm512_add_ps(zeros, TimesZero(some));
  }
  const float largest = _mm512_reduce_max_ps(most);
  const __m512 factor = _mm512_set1_ps(kQueryUnits<kBytes> / largest);
  const Query<kBytes> parts = PartsOf<kBytes>(query, head_dim);
  const std::size_t blocks = head_dim / kBlockElements;
  alignas(64) std::array<float, kMostBlocks * kBlockElements> numbers;
  std::copy_n(query, head_dim, numbers.begin());
  for (std::size_t b = 0; b < blocks; ++b) {
    __m512i sums[kBytes];
    for (__m512i& sum : sums) sum = _mm512_setzero_si512();
    for (std::size_t i = b * kBlockElements; i < (b + 1) * kBlockElements;
         i += kLanes) {
      __m512i number = WithSigns<kBytes>(_mm512_cvtps_epi32(
          _mm512_mul_ps(_mm512_load_ps(numbers.data() + i), factor)));
      HWY_UNROLL(3)
      for (std::size_t p = 0; p < kBytes; ++p) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(parts.bytes[p] + i),
                         _mm512_cvtepi32_epi8(number));
        const __m512i byte =
            _mm512_srai_epi32(_mm512_slli_epi32(number, 24), 24);
        sums[p] = _mm512_add_epi32(sums[p], byte);
        number = _mm512_srai_epi32(number, 8);
      }
    }
    HWY_UNROLL(3)
    for (std::size_t p = 0; p < kBytes; ++p) {
      parts.sums[p][b] = -128 * _mm512_reduce_add_epi32(sums[p]);
    }
  }
  *parts.unit = largest / kQueryUnits<kBytes> + _mm512_reduce_add_ps(zeros);
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

template <std::size_t kQueries, std::size_t kBytes>
struct BlockSums {
  __m512i of[kQueries][kBytes];
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
template <std::size_t kQueries, std::size_t kBytes, std::size_t kGroups>
HWY_INLINE void AddQuads(const __m512i (&quads)[kGroups][4],
                         const std::array<Query<kBytes>, 4>& queries,
                         std::size_t i,
                         BlockSums<kQueries, kBytes> (&sums)[kGroups]) {
  HWY_UNROLL(4)
  for (std::size_t quad = 0; quad < 4; ++quad, i += 4) {
    HWY_UNROLL(4)
    for (std::size_t q = 0; q < kQueries; ++q) {
      HWY_UNROLL(3)
      for (std::size_t p = 0; p < kBytes; ++p) {
        const __m512i four = SetOfFour(queries[q].bytes[p] + i);
        HWY_UNROLL(2)
        for (std::size_t g = 0; g < kGroups; ++g) {
          __m512i& sum = sums[g].of[q][p];
          sum = _mm512_dpbusd_epi32(sum, quads[g][quad], four);
        }
      }
    }
  }
}

// The sum of the bytes, each times its power of 256. Two bytes fit into 32
// bits.
template <std::size_t kBytes>
HWY_INLINE __m512 SumOfBytes(const __m512i (&of)[kBytes]) {
  const __m512 two =
      _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(of[1], 8), of[0]));
  if constexpr (kBytes == 2) {
    return two;
  } else {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(of[2]), _mm512_set1_ps(0x1p16f),
                           two);
  }
}

// See IntegerDots: for kQueries queries and up to 16 or 32 cells.
template <std::size_t kBytes, std::size_t kQueries, std::size_t kGroups>
HWY_NOINLINE void Dots(const float* from, std::size_t padded, CellsRows keys,
                       std::size_t head_dim, EvenFetches& ahead,
                       float* scores) {
  EvenFetches fetches = ahead;
  fetches.Next();  // The lines of the scales.
  std::array<Query<kBytes>, 4> queries;
  __m512 results[kGroups][kQueries];
  HWY_UNROLL(4)
  for (std::size_t q = 0; q < kQueries; ++q) {
    queries[q] =
        PartsOf<kBytes>(const_cast<float*>(from) + q * padded, head_dim);
    HWY_UNROLL(2)
    for (auto& result : results) result[q] = _mm512_setzero_ps();
  }
  for (std::size_t b = 0; b < head_dim / kBlockElements; ++b) {
    const std::ptrdiff_t block = keys.offset + AsInt(b * kBlockBytes);
    BlockSums<kQueries, kBytes> sums[kGroups];
    HWY_UNROLL(4)
    for (std::size_t q = 0; q < kQueries; ++q) {
      HWY_UNROLL(2)
      for (auto& sum : sums) {
        HWY_UNROLL(3)
        for (std::size_t p = 0; p < kBytes; ++p) {
          sum.of[q][p] = _mm512_set1_epi32(queries[q].sums[p][b]);
        }
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
        results[g][q] =
            _mm512_fmadd_ps(SumOfBytes(sums[g].of[q]), scale, results[g][q]);
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
// cells, of each number.
template <std::size_t kNumbers>
using PairsOfQuery = std::array<std::array<std::int32_t, kTile / 2>, kNumbers>;

template <std::size_t kNumbers>
HWY_INLINE void RoundWeights(const float* weights, const __m512 (&scales)[4],
                             PairsOfQuery<kNumbers>& pairs) {
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  HWY_UNROLL(2)
  for (std::size_t i = 0; i < 4; i += 2) {
    const __m512i first = _mm512_cvtps_epi32(
        _mm512_mul_ps(_mm512_load_ps(weights + i * kLanes), scales[i]));
    const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(
        _mm512_load_ps(weights + (i + 1) * kLanes), scales[i + 1]));
    const auto store = [&](std::size_t number, __m512i a, __m512i b)
        __attribute__((always_inline)) {
      _mm512_store_si512(
          pairs[number].data() + i * kLanes / 2,
          _mm512_permutexvar_epi64(order, _mm512_packs_epi32(a, b)));
    };
    if constexpr (kNumbers == 1) {
      store(0, first, second);
    } else {
      const __m512i low = _mm512_set1_epi32((1 << kNumberBits) - 1);
      store(0, _mm512_srai_epi32(first, kNumberBits),
            _mm512_srai_epi32(second, kNumberBits));
      store(1, _mm512_and_si512(first, low), _mm512_and_si512(second, low));
    }
  }
}

// out[q] += unit * units[q] * pairs[q] . values over the cells of a tile, for
// the 32 elements of a block.
template <std::size_t kNumbers, std::size_t kQueries>
HWY_NOINLINE void AddBlock(const PairsOfQuery<kNumbers>* pairs,
                           CellsRows values, std::size_t cells,
                           const float* units, float unit, std::size_t padded,
                           EvenFetches& ahead, float* out) {
  EvenFetches fetches = ahead;
  fetches.Next();  // The lines of the scales.
  __m512i low[kQueries][kNumbers];
  __m512i high[kQueries][kNumbers];
  HWY_UNROLL(4)
  for (std::size_t q = 0; q < kQueries; ++q) {
    HWY_UNROLL(2)
    for (std::size_t n = 0; n < kNumbers; ++n) {
      low[q][n] = high[q][n] = _mm512_setzero_si512();
    }
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
      HWY_UNROLL(2)
      for (std::size_t n = 0; n < kNumbers; ++n) {
        const __m512i weight = _mm512_set1_epi32(pairs[q][n][t / 2]);
        low[q][n] = _mm512_dpwssd_epi32(low[q][n], weight, first);
        high[q][n] = _mm512_dpwssd_epi32(high[q][n], weight, second);
      }
    }
  }
  const __m512i first =
      _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  HWY_UNROLL(4)
  for (std::size_t q = 0; q < kQueries; ++q) {
    const __m512 factor = _mm512_set1_ps(units[q] * unit);
    float* to = out + q * padded;
    const auto sum = [&](__m512i order) __attribute__((always_inline)) {
      const auto of = [&](std::size_t n) __attribute__((always_inline)) {
        return _mm512_cvtepi32_ps(
            _mm512_permutex2var_epi32(low[q][n], order, high[q][n]));
      };
      if constexpr (kNumbers == 1) {
        return of(0);
      } else {
        return _mm512_fmadd_ps(of(0), _mm512_set1_ps(1 << kNumberBits), of(1));
      }
    };
    const __m512 sum0 = sum(first);
    const __m512 sum1 = sum(second);
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
HWY_INLINE float DivideScales(CellsRows block, std::size_t cells, float units,
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
  const __m512 factor = _mm512_set1_ps(largest == 0 ? 0 : units / largest);
  for (__m512& scale : scales) scale = _mm512_mul_ps(scale, factor);
  return largest / units + _mm512_reduce_add_ps(zeros);
}

// See AddIntegerValues.
template <std::size_t kNumbers>
void AddNumbers(float* weights, std::size_t padded, std::size_t count,
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
    At(scale_units, b) =
        DivideScales(block(b), cells, kWeightUnits<kNumbers>, scales[b]);
  }
  alignas(64) std::array<PairsOfQuery<kNumbers>, kFewQueries> pairs;
  for (std::size_t b = 0; b < blocks; ++b) {
    for (std::size_t q = 0; q < count; ++q) {
      RoundWeights<kNumbers>(weights + q * kTile, scales[b], At(pairs, q));
    }
    const CellsRows numbers = {values.rows, block(b).offset + 2};
    for (std::size_t q = 0; q < count; q += 4) {
      WithCount(count - q, [&](auto n) {
        AddBlock<kNumbers, n>(&At(pairs, q), numbers, cells, units.data() + q,
                              At(scale_units, b), padded, ahead,
                              out + q * padded + b * kBlockElements);
      });
    }
  }
}

// Calls does(bytes of an element) with the number as a constant.
template <class Does>
HWY_INLINE void WithBytes(Integers integers, const Does& does) {
  if (integers == Integers::kOfF32) {
    return does(std::integral_constant<std::size_t, kBytesOfF32>());
  }
  does(std::integral_constant<std::size_t, kBytesOfBf16>());
}

}  // namespace

void IntegerDots(Integers integers, const float* queries, std::size_t padded,
                 std::size_t count, CellsRows keys, std::size_t cells,
                 std::size_t head_dim, EvenFetches& ahead, float* scores) {
  WithBytes(integers, [&](auto bytes) {
    WithCount(count, [&](auto n) {
      for (std::size_t t = 0; t < cells; t += 2 * kLanes) {
        const CellsRows some = {keys.rows + t, keys.offset};
        const auto dots = [&](auto groups, std::size_t first) {
          Dots<bytes, n, groups>(queries, padded,
                                 {some.rows + first, some.offset}, head_dim,
                                 ahead, scores + t + first);
        };
        constexpr std::integral_constant<std::size_t, 1> kOne;
        constexpr std::integral_constant<std::size_t, 2> kTwo;
        if (cells - t <= kLanes) {
          dots(kOne, 0);
        } else if constexpr (bytes == 2) {
          dots(kTwo, 0);
        } else {  // The sums of two groups would not fit into the registers.
          dots(kOne, 0);
          dots(kOne, kLanes);
        }
      }
    });
  });
}

void AddIntegerValues(Integers integers, float* weights, std::size_t padded,
                      std::size_t count, CellsRows values, std::size_t cells,
                      std::size_t head_dim, EvenFetches& ahead, float* out) {
  const auto add = integers == Integers::kOfF32 ? AddNumbers<kNumbersOfF32>
                                                : AddNumbers<kNumbersOfBf16>;
  add(weights, padded, count, values, cells, head_dim, ahead, out);
}

void RoundToIntegers(Integers integers, float* queries, std::size_t padded,
                     std::size_t count) {
  WithBytes(integers, [&](auto bytes) {
    for (std::size_t q = 0; q < count; ++q) {
      RoundQuery<bytes>(queries + q * padded, padded);
    }
  });
}

}  // namespace kvtwin::optimized
HWY_POP_ATTRIBUTES;

namespace kvtwin::optimized {

namespace {

// Of ForceIntegers.
enum class Forced { kNothing, kNo, kYes };
std::atomic<Forced> forced = Forced::kNothing;

}  // namespace

bool IntegersPay() {
  static const bool has = __builtin_cpu_supports("avx512vnni") != 0 &&
                          __builtin_cpu_supports("avx512bw") != 0;
  if (!has || !ActiveTarget().starts_with("AVX3")) return false;
  const Forced now = forced.load(std::memory_order_relaxed);
  return now == Forced::kNothing ? IsIntel() : now == Forced::kYes;
}

void ForceIntegers(std::optional<bool> pay) {
  const Forced to = pay.value_or(false) ? Forced::kYes : Forced::kNo;
  forced.store(pay ? to : Forced::kNothing, std::memory_order_relaxed);
}

bool HasIntegers(const TileRows& rows) {
  return rows.dtype == DType::kQ8 && rows.adjacent &&
         rows.head_dim <= kMostBlocks * kBlockElements;
}

}  // namespace kvtwin::optimized

#else   // HWY_ARCH_X86
namespace kvtwin::optimized {

bool HasIntegers(const TileRows&) { return false; }
bool IntegersPay() { return false; }
void ForceIntegers(std::optional<bool>) {}
void RoundToIntegers(Integers, float*, std::size_t, std::size_t) {}
void IntegerDots(Integers, const float*, std::size_t, std::size_t, CellsRows,
                 std::size_t, std::size_t, EvenFetches&, float*) {}
void AddIntegerValues(Integers, float*, std::size_t, std::size_t, CellsRows,
                      std::size_t, std::size_t, EvenFetches&, float*) {}

}  // namespace kvtwin::optimized
#endif  // HWY_ARCH_X86
