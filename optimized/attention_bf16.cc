#include "optimized/attention_bf16.h"

#include <atomic>

#include "hwy/base.h"

#if HWY_ARCH_X86
#include <algorithm>
#include <array>
#include <utility>

#include "core/elements.h"
#include "core/index.h"
#include "optimized/amx_products.h"
#include "optimized/avx512.h"
#include "optimized/bf16_rows.h"
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
// Rows and vectors of a block, whose sums fit into the registers. All of the
// kManyBf16Queries rows are in blocks.
constexpr std::size_t kBlockRows = 8;
constexpr std::size_t kBlockVectors = 2;
static_assert(kManyBf16Queries % kBlockRows == 0);

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

// The order that makes pairs of two vectors: an element of the first and one of
// the second.
HWY_INLINE __m512i OrderOfPairs() {
  alignas(64) static constexpr std::array<std::uint16_t, 32> kOrder = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_load_si512(kOrder.data());
}

// Rounds two vectors to pairs.
HWY_INLINE __m512i PairsOf(__m512 first, __m512 second) {
  return _mm512_permutexvar_epi16(OrderOfPairs(),
                                  (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// Returns the numbers that are finite, and 0 for others.
HWY_INLINE __m512 FiniteOf(__m512 numbers) {
  constexpr int kNaNOrInfinity = 0x99;
  return _mm512_maskz_mov_ps(
      _knot_mask16(_mm512_fpclass_ps_mask(numbers, kNaNOrInfinity)), numbers);
}
HWY_INLINE __m512i FiniteOf(__m512i numbers) {
  const __m512i exponent = _mm512_set1_epi16(0x7F80);
  return _mm512_maskz_mov_epi16(
      _mm512_cmpneq_epi16_mask(_mm512_and_si512(numbers, exponent), exponent),
      numbers);
}

// Returns the next term of two vectors, and subtracts it.
HWY_INLINE __m512i TakeTerm(__m512& first, __m512& second, bool is_first) {
  // A number above the largest bf16 has that as its first term.
  constexpr int kSmallerMagnitude = 0b0010;
  const auto bounded = [&](__m512 numbers) {
    const __m512 most = _mm512_set1_ps(0x1.FEp127f);
    return is_first ? _mm512_range_ps(numbers, most, kSmallerMagnitude)
                    : numbers;
  };
  const auto term =
      (__m512i)_mm512_cvtne2ps_pbh(bounded(second), bounded(first));
  const auto subtract = [](__m512& from, __m256i half) {
    from = _mm512_sub_ps(from, _mm512_castsi512_ps(_mm512_slli_epi32(
                                   _mm512_cvtepu16_epi32(half), 16)));
  };
  subtract(first, _mm512_castsi512_si256(term));
  subtract(second, _mm512_extracti64x4_epi64(term, 1));
  return term;
}

// Splits rows [padded, count] into terms [pairs, count], which are `stride`
// from each other; `pairs` is a multiple of kLanes, with zeros behind those of
// the row. The first terms may lie where the rows do.
void SplitRows(const float* rows, std::size_t padded, std::size_t count,
               std::size_t pairs, float* to, Bf16Terms terms) {
  if (terms.count == 1) return RoundRows(rows, padded, count, to, pairs);
  for (std::size_t r = 0; r < count; ++r, rows += padded, to += pairs) {
    for (std::size_t i = 0; i < padded; i += 2 * kLanes) {
      __m512 first = _mm512_load_ps(rows + i);
      __m512 second = i + kLanes < padded ? _mm512_load_ps(rows + i + kLanes)
                                          : _mm512_setzero_ps();
      for (std::size_t term = 0; term < terms.count; ++term) {
        _mm512_store_si512(to + i / 2 + term * terms.stride,
                           TakeTerm(first, second, term == 0));
      }
    }
  }
}

// Splits the rows [padded, kTile] of values into terms of pairs of two cells
// each; numbers that are not finite become 0, unless `all`.
void PairValues(const float* rows, std::size_t padded, bool all, float* to,
                Bf16Terms terms) {
  const __m512i order = OrderOfPairs();
  for (std::size_t t = 0; t < kTile; t += 2) {
    for (std::size_t i = 0; i < padded; i += kLanes) {
      __m512 first = _mm512_load_ps(rows + i);
      __m512 second = _mm512_load_ps(rows + padded + i);
      if (terms.count == 1) {
        const __m512i pairs = PairsOf(first, second);
        _mm512_store_si512(to + i, all ? pairs : FiniteOf(pairs));
        continue;
      }
      if (!all) {
        first = FiniteOf(first);
        second = FiniteOf(second);
      }
      for (std::size_t term = 0; term < terms.count; ++term) {
        _mm512_store_si512(to + i + term * terms.stride,
                           _mm512_permutexvar_epi16(
                               order, TakeTerm(first, second, term == 0)));
      }
    }
    rows += 2 * padded;
    to += padded;
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
void TransposeKeys(const float* rows, std::size_t pairs, float* columns) {
  for (std::size_t i = 0; i < pairs; i += kLanes) {
    for (std::size_t t = 0; t < kTile; t += kLanes) {
      Transpose(rows + t * pairs + i, pairs, columns + i * kTile + t, kTile);
    }
  }
}

// Copies the keys of one head as terms of pairs of elements: [pairs, cells].
void CopyKeys(const TileRows& keys, std::size_t cells, std::size_t kv_head,
              std::size_t pairs, float* to, Bf16Terms terms) {
  if (!HasPairs(keys)) {
    UnpackRows(keys, cells, kv_head, to);
    return SplitRows(to, Padded(keys.head_dim), cells, pairs, to, terms);
  }
  const CellsRows rows = {keys.rows.data(), HeadOffset(keys, kv_head)};
  WithPairs(keys, [&](auto format) {
    for (std::size_t t = 0; t < cells; t += 2, to += 2 * pairs) {
      for (std::size_t i = 0; i < keys.head_dim; i += 2 * kLanes) {
        TwoVectors both;
        format.Keys(rows[t], rows[t + 1], i, both);
        _mm512_store_si512(to + i / 2, both.first);
        _mm512_store_si512(to + pairs + i / 2, both.second);
      }
    }
  });
}

// Copies the keys of one head as terms of columns: [kTile, pairs]. Those of
// absent cells may hold anything, as their weights are 0. `rows` is scratch.
void CopyColumns(const AttentionTile& tile, std::size_t kv_head,
                 std::size_t pairs, float* rows, float* columns,
                 Bf16Terms terms) {
  const std::size_t stride = kTile * Padded(tile.keys.head_dim);
  CopyKeys(tile.keys, tile.cells, kv_head, pairs, rows,
           {.count = terms.count, .stride = stride});
  for (std::size_t term = 0; term < terms.count; ++term) {
    TransposeKeys(rows + term * stride, pairs, columns + term * terms.stride);
  }
}

// Copies the values of one head as terms of pairs of two cells each: [padded
// head_dim, kTile / 2], zeros for absent cells. A V that is not finite must not
// reach a row that does not see it. `unpacked` is scratch.
void CopyValues(const TileRows& values, std::size_t cells, std::size_t kv_head,
                bool all, float* unpacked, float* to, Bf16Terms terms) {
  const std::size_t padded = Padded(values.head_dim);
  if (!HasPairs(values)) {
    UnpackRows(values, cells, kv_head, unpacked);
    std::fill(unpacked + cells * padded, unpacked + kTile * padded, 0.0f);
    return PairValues(unpacked, padded, all, to, terms);
  }
  const CellsRows rows = {values.rows.data(), HeadOffset(values, kv_head)};
  std::fill(to + (cells + 1) / 2 * padded, to + kTile / 2 * padded, 0.0f);
  WithPairs(values, [&](auto format) {
    for (std::size_t t = 0; t < cells; t += 2, to += padded) {
      for (std::size_t i = 0; i < values.head_dim; i += 2 * kLanes) {
        TwoVectors pairs;
        format.Values(rows[t], rows[t + 1], i, pairs);
        _mm512_store_si512(to + i, all ? pairs.first : FiniteOf(pairs.first));
        _mm512_store_si512(to + i + kLanes,
                           all ? pairs.second : FiniteOf(pairs.second));
      }
    }
  });
}

}  // namespace

void MultiplyInRegisters(Bf16Work& work, std::size_t /*steps*/) {
  for (; work.product < work.products.size(); ++work.product) {
    const Bf16Product& product = work.products[work.product];
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
  // Products of f32 are faster (attention_few_bf16.cc).
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

bool PairsOfFewPay(DType dtype) {
  return dtype == DType::kF8 || !HasLargeFirstLevel() ||
         forced.load(std::memory_order_relaxed) != nullptr;
}

MultiplyBf16 TermsMultiplier() {
  const MultiplyBf16 multiply = Bf16Multiplier();
  return multiply == MultiplyInRegisters ? nullptr : multiply;
}

namespace {

// Pairs of a key, with zeros up to whole tiles of AMX.
std::size_t PairsOfKey(std::size_t head_dim) {
  const std::size_t pairs = Padded(head_dim) / 2;
  return (pairs + kPairsOfTile - 1) / kPairsOfTile * kPairsOfTile;
}

}  // namespace

// Scratch: the scores of two blocks, whose first terms take their place, the
// terms of keys and of values, and the rows of a tile while they are split.
std::size_t ManyBf16Scratch(std::size_t k_head_dim, std::size_t v_head_dim,
                            ManyTerms terms) {
  constexpr std::size_t kWidth = kManyBf16Tiles * kTile;
  const std::size_t v = Padded(v_head_dim);
  return kWidth * (2 * kManyBf16Queries * terms.queries +
                   PairsOfKey(k_head_dim) * terms.keys + v / 2 * terms.values) +
         kTile * std::max(Padded(k_head_dim) * terms.keys, v);
}

void SplitQueries(float* rows, std::size_t padded, std::size_t count,
                  std::size_t terms) {
  SplitRows(rows, padded, count, PairsOfKey(padded), rows,
            {.count = terms, .stride = count * padded});
}

namespace {

// See AttendManyInBf16. While a block of queries is weighed, the sums of the
// block before and the scores of the next one are multiplied.
class ManyInBf16 {
 public:
  ManyInBf16(std::span<const GroupTile> tiles, const QueryHeads& head,
             std::size_t queries_per_row, ScoreScale scale, ManyTerms terms,
             MultiplyBf16 multiply, float* scratch)
      : tiles_(tiles),
        head_(head),
        queries_per_row_(queries_per_row),
        scale_(scale),
        multiply_(multiply),
        v_padded_(Padded(tiles[0].tile.values.head_dim)),
        k_pairs_(PairsOfKey(tiles[0].tile.keys.head_dim)),
        width_(tiles.size() * kTile),
        query_terms_{
            .count = terms.queries,
            .stride = head.count * Padded(tiles[0].tile.keys.head_dim)},
        weight_terms_{.count = terms.queries,
                      .stride = kManyBf16Queries * width_},
        key_terms_{.count = terms.keys, .stride = k_pairs_ * kTile},
        value_terms_{.count = terms.values, .stride = width_ / 2 * v_padded_},
        scratch_(scratch),
        keys_(scratch + 2 * weight_terms_.count * weight_terms_.stride),
        values_(keys_ + tiles.size() * key_terms_.count * key_terms_.stride) {}

  void Attend() {
    CopyRows();
    float* place = scratch_;
    float* other = scratch_ + weight_terms_.count * weight_terms_.stride;
    Block before;
    Block now;
    Block next = NextBlock(0, place);
    Bf16Work work;
    do {
      product_count_ = 0;
      if (before.count > 0) AddSums(before);
      if (next.count > 0) AddScores(next);
      work = {.products = std::span(products_).first(product_count_),
              .last = now.count == 0 && next.count == 0,
              .configured = work.configured};
      if (now.count > 0) Weigh(now, work);
      multiply_(work, kAllSteps);
      before = now;
      now = next;
      std::swap(place, other);
      next = NextBlock(now.first + now.count, place);
    } while (before.count > 0 || now.count > 0);
  }

 private:
  // Some queries, and the tiles of which they see cells.
  struct Block {
    std::size_t first = 0;
    std::size_t count = 0;
    std::span<const GroupTile> tiles = {};
    float* scores = nullptr;  // And weights.

    std::size_t width() const { return tiles.size() * kTile; }
  };

  void CopyRows() {
    float* rows = values_ + value_terms_.count * value_terms_.stride;
    for (std::size_t i = 0; i < tiles_.size(); ++i) {
      const AttentionTile& tile = tiles_[i].tile;
      CopyColumns(tile, head_.kv_head, k_pairs_, rows, KeysOf(i), key_terms_);
      CopyValues(tile.values, tile.cells, head_.kv_head,
                 SeeAll(tiles_[i], head_.count / queries_per_row_), rows,
                 ValuesOf(i), value_terms_);
    }
  }
  float* KeysOf(std::size_t tile) const {
    return keys_ + tile * key_terms_.count * key_terms_.stride;
  }
  float* ValuesOf(std::size_t tile) const {
    return values_ + tile * kTile / 2 * v_padded_;
  }

  // The next block, from a query on, that sees a cell. It is empty if there is
  // none.
  Block NextBlock(std::size_t first, float* scores) const {
    for (; first < head_.count; first += kManyBf16Queries) {
      const std::size_t count = std::min(kManyBf16Queries, head_.count - first);
      const auto sees = [&](const GroupTile& tile) {
        return SeeAny({&tile, 1}, first, count, queries_per_row_);
      };
      std::span<const GroupTile> tiles = tiles_;
      while (!tiles.empty() && !sees(tiles.front())) tiles = tiles.subspan(1);
      while (!tiles.empty() && !sees(tiles.back())) {
        tiles = tiles.first(tiles.size() - 1);
      }
      if (tiles.empty()) continue;
      return {.first = first, .count = count, .tiles = tiles, .scores = scores};
    }
    return {.first = first};
  }

  // The number of the first tile of a block.
  std::size_t FirstTile(const Block& block) const {
    return AsSize(block.tiles.data() - tiles_.data());
  }

  void AddScores(const Block& block) {
    const std::size_t first_tile = FirstTile(block);
    for (std::size_t i = 0; i < block.tiles.size(); ++i) {
      Add({.a = head_.queries + block.first * k_pairs_,
           .a_row = k_pairs_,
           .rows = block.count,
           .pairs = k_pairs_,
           .b = KeysOf(first_tile + i),
           .columns = kTile,
           .c = block.scores + i * kTile,
           .c_row = block.width(),
           .add = false,
           .a_terms = query_terms_,
           .b_terms = key_terms_});
    }
  }

  void AddSums(const Block& block) {
    const std::size_t cells =
        block.width() - kTile + block.tiles.back().tile.cells;
    Add({.a = block.scores,
         .a_row = block.width() / 2,
         .rows = block.count,
         .pairs = (cells + 1) / 2,
         .b = ValuesOf(FirstTile(block)),
         .columns = v_padded_,
         .c = head_.out + block.first * v_padded_,
         .c_row = v_padded_,
         .add = true,
         .a_terms = weight_terms_,
         .b_terms = value_terms_});
  }

  void Add(const Bf16Product& product) {
    At(products_, product_count_++) = product;
  }

  // Replaces the scores of a block by the terms of weights.
  void Weigh(const Block& block, Bf16Work& work) const {
    WeighMany({.tiles = block.tiles,
               .head = head_,
               .first = block.first,
               .count = block.count,
               .queries_per_row = queries_per_row_,
               .scale = scale_},
              block.scores, weight_terms_, work, multiply_);
    if (weight_terms_.count > 1) return;
    RoundRows(block.scores, block.width(), block.count, block.scores,
              block.width() / 2);
  }

  std::span<const GroupTile> tiles_;
  const QueryHeads& head_;
  std::size_t queries_per_row_;
  ScoreScale scale_;
  MultiplyBf16 multiply_;
  std::size_t v_padded_;
  std::size_t k_pairs_;
  std::size_t width_;
  Bf16Terms query_terms_;
  Bf16Terms weight_terms_;
  Bf16Terms key_terms_;
  Bf16Terms value_terms_;
  float* scratch_;
  float* keys_;
  float* values_;
  std::array<Bf16Product, kManyBf16Tiles + 1> products_;
  std::size_t product_count_ = 0;
};

}  // namespace

void AttendManyInBf16(std::span<const GroupTile> tiles, const QueryHeads& head,
                      std::size_t queries_per_row, ScoreScale scale,
                      ManyTerms terms, MultiplyBf16 multiply, float* scratch) {
  ManyInBf16(tiles, head, queries_per_row, scale, terms, multiply, scratch)
      .Attend();
}

}  // namespace kvtwin::optimized

#else   // HWY_ARCH_X86
namespace kvtwin::optimized {

MultiplyBf16 Bf16Multiplier() { return nullptr; }
void ForceBf16Multiplier(MultiplyBf16) {}
void MultiplyInRegisters(Bf16Work&, std::size_t) {}
MultiplyBf16 TermsMultiplier() { return nullptr; }
std::size_t ManyBf16Scratch(std::size_t, std::size_t, ManyTerms) { return 0; }
void SplitQueries(float*, std::size_t, std::size_t, std::size_t) {}
void AttendManyInBf16(std::span<const GroupTile>, const QueryHeads&,
                      std::size_t, ScoreScale, ManyTerms, MultiplyBf16,
                      float*) {}

}  // namespace kvtwin::optimized
#endif  // HWY_ARCH_X86
