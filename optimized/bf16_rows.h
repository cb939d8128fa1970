// Rows of K and V as pairs of bf16, for the instructions of AVX-512 BF16 and
// AMX. For sources that are compiled once, on x86.

#ifndef KVTWIN_OPTIMIZED_BF16_ROWS_H_
#define KVTWIN_OPTIMIZED_BF16_ROWS_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "hwy/base.h"
#include "kvtwin/tensor.h"
#include "optimized/attention_kernels.h"
#include "optimized/avx512.h"

// Highway's targets of Debian 12 lack AVX-512 BF16.
HWY_PUSH_ATTRIBUTES("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi");
namespace kvtwin::optimized {

inline constexpr std::size_t kLanes = 16;  // Floats of a vector.

// Rounds rows of `padded` numbers to pairs, and zeros up to a multiple of 16:
// [to_row, count]. They may lie where the rows do.
inline void RoundRows(const float* rows, std::size_t padded, std::size_t count,
                      float* to, std::size_t to_row) {
  for (std::size_t r = 0; r < count; ++r, rows += padded, to += to_row) {
    for (std::size_t i = 0; i < padded; i += 2 * kLanes) {
      const __m512 first = _mm512_load_ps(rows + i);
      const __m512 second = i + kLanes < padded
                                ? _mm512_load_ps(rows + i + kLanes)
                                : _mm512_setzero_ps();
      _mm512_store_si512(to + i / 2,
                         (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
  }
}

struct TwoVectors {
  __m512i first;
  __m512i second;
};

// Rows of each dtype: elements [i, i + 32) of two cells. Keys
// are pairs of elements, of each cell; Values are pairs of cells, of the first
// 16 elements and of the others. Rows of f32 and f16 would have to be rounded,
// which takes as long as their products of f32.
struct Bf16Rows {
  HWY_INLINE static void Keys(const std::byte* a, const std::byte* b,
                              std::size_t i, TwoVectors& keys) {
    keys.first = _mm512_loadu_si512(a + 2 * i);
    keys.second = _mm512_loadu_si512(b + 2 * i);
  }
  HWY_INLINE static void Values(const std::byte* a, const std::byte* b,
                                std::size_t i, TwoVectors& values) {
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

// TwoVectors bytes of each cell that follow each other are of elements that do
// so; from the first and the third quarter of each 16 bytes come the first
// pairs.
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
                              std::size_t i, TwoVectors& keys) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    Convert(_mm512_permutexvar_epi64(order, Load(a + i, b + i)), keys);
  }
  HWY_INLINE static void Values(const std::byte* a, const std::byte* b,
                                std::size_t i, TwoVectors& values) {
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
  HWY_INLINE static void Convert(__m512i bytes, TwoVectors& to) {
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
inline bool HasPairs(const TileRows& rows) {
  const bool has_rows = rows.dtype == DType::kBF16 || rows.dtype == DType::kF8;
  return has_rows && rows.adjacent && rows.head_dim % (2 * kLanes) == 0;
}

// Calls does(format) with the format of rows. Requires: HasPairs(rows).
template <class Does>
HWY_INLINE void WithPairs(const TileRows& rows, const Does& does) {
  rows.dtype == DType::kF8 ? does(F8Rows()) : does(Bf16Rows());
}

}  // namespace kvtwin::optimized
HWY_POP_ATTRIBUTES;

#endif  // KVTWIN_OPTIMIZED_BF16_ROWS_H_
