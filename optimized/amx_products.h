// Products of bf16 in the tiles of Intel's AMX. A tile has up to 16 rows of 64
// bytes. Tests put an emulator of the instructions in the place of AmxTiles.

#ifndef KVTWIN_OPTIMIZED_AMX_PRODUCTS_H_
#define KVTWIN_OPTIMIZED_AMX_PRODUCTS_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/assert.h"
#include "hwy/base.h"
#include "optimized/attention_bf16.h"

namespace kvtwin::optimized {

// The operand of ldtilecfg: the rows of each tile, and the bytes of a row.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::array<std::uint8_t, 14> reserved = {};
  std::array<std::uint16_t, 16> row_bytes = {};  // 8 tiles, then zeros.
  std::array<std::uint8_t, 16> rows = {};        // 8 tiles, then zeros.
};
static_assert(sizeof(TileConfig) == 64);

inline constexpr std::size_t kAmxRows = 16;
inline constexpr std::size_t kAmxColumns = 16;  // Numbers of f32, or pairs.

// The tiles of a block of two by two tiles of c, with two of a and two of b.
enum BlockTile { kSum00, kSum01, kSum10, kSum11, kA0, kA1, kB0, kB1 };

// Configures the tiles for a block of some rows of c.
template <class Tiles>
void ConfigureTiles(std::size_t rows) {
  TileConfig config;
  const auto set = [&](BlockTile tile, std::size_t tile_rows) {
    if (tile_rows == 0) return;
    config.rows.at(tile) = static_cast<std::uint8_t>(tile_rows);
    config.row_bytes.at(tile) = kAmxColumns * sizeof(float);
  };
  const std::size_t first = std::min(rows, kAmxRows);
  for (const BlockTile tile : {kSum00, kSum01, kA0}) set(tile, first);
  for (const BlockTile tile : {kSum10, kSum11, kA1}) set(tile, rows - first);
  for (const BlockTile tile : {kB0, kB1}) set(tile, kPairsOfTile);
  Tiles::Configure(config);
}

// The products of terms i of a and j of b, about from the smallest to the
// largest; after each, one of the factors is used again.
struct TermsOfFactors {
  std::size_t i;
  std::size_t j;
};
inline constexpr std::array<TermsOfFactors, 6> kOrderOfTerms = {
    {{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 2}, {0, 0}}};

// A step multiplies one term of a by one term of b. A factor that it does not
// load is the factor of the step before.
struct StepOfTerms {
  TermsOfFactors terms;
  bool loads_a;
  bool loads_b;
};

// The steps that multiply two factors, for the numbers of their terms.
class StepsOfTerms {
 public:
  constexpr StepsOfTerms(std::size_t a_count, std::size_t b_count) {
    TermsOfFactors before = {kMostTerms, kMostTerms};
    for (const TermsOfFactors& terms : kOrderOfTerms) {
      if (terms.i >= a_count || terms.j >= b_count) continue;
      steps_[count_++] = {.terms = terms,
                          .loads_a = terms.i != before.i,
                          .loads_b = terms.j != before.j};
      before = terms;
    }
  }

  constexpr std::size_t count() const { return count_; }
  constexpr const StepOfTerms& operator[](std::size_t i) const {
    return steps_[i];
  }

 private:
  std::array<StepOfTerms, kOrderOfTerms.size()> steps_ = {};
  std::size_t count_ = 0;
};

// The block of c, of up to two by two tiles, and the tiles of pairs at which
// some work is. `kWhole`: the block has all four tiles. All functions are
// inlined, so that the addresses stay in registers.
template <class Tiles, bool kWhole>
class TileBlock {
 public:
  TileBlock() = default;
  HWY_INLINE explicit TileBlock(const Bf16Work& work) {
    const Bf16Product& product = work.products[work.product];
    a_ = product.a + work.row * product.a_row + work.pair;
    a_row_ = product.a_row * kBytes;
    a_term_ = product.a_terms.stride;
    b_ = product.b + work.pair * product.columns + work.column;
    b_row_ = product.columns * kBytes;
    b_term_ = product.b_terms.stride;
    two_rows_ = work.row + kAmxRows < product.rows;
    two_columns_ = work.column + kAmxColumns < product.columns;
  }

  // Adds the products of the terms.
  template <StepOfTerms kStep>
  HWY_INLINE void Multiply() const {
    if constexpr (kStep.loads_a) {
      const float* a = a_ + kStep.terms.i * a_term_;
      Tiles::template Load<kA0>(a, a_row_);
      if (two_rows()) {
        Tiles::template Load<kA1>(a + kAmxRows * a_row_ / kBytes, a_row_);
      }
    }
    if constexpr (kStep.loads_b) {
      const float* b = b_ + kStep.terms.j * b_term_;
      Tiles::template Load<kB0>(b, b_row_);
      if (two_columns()) Tiles::template Load<kB1>(b + kAmxColumns, b_row_);
    }
    Tiles::template Multiply<kSum00, kA0, kB0>();
    if (two_columns()) Tiles::template Multiply<kSum01, kA0, kB1>();
    if (two_rows()) Tiles::template Multiply<kSum10, kA1, kB0>();
    if (two_rows() && two_columns()) {
      Tiles::template Multiply<kSum11, kA1, kB1>();
    }
  }

  // Begin loads or zeroes the sums; End stores them.
  HWY_INLINE void Begin(const Bf16Work& work) const {
    const bool add = work.products[work.product].add;
    ForEachSum(work, [&](auto tile, const float* c, std::size_t stride) {
      if (add) {
        Tiles::template Load<tile>(c, stride);
      } else {
        Tiles::template Zero<tile>();
      }
    });
  }
  HWY_INLINE void End(const Bf16Work& work) const {
    ForEachSum(work, [](auto tile, float* c, std::size_t stride) {
      Tiles::template Store<tile>(c, stride);
    });
  }

 private:
  static constexpr std::size_t kBytes = sizeof(float);

  HWY_INLINE bool two_rows() const { return kWhole || two_rows_; }
  HWY_INLINE bool two_columns() const { return kWhole || two_columns_; }

  // Calls does(tile, its place in c, bytes from row to row).
  template <class Does>
  HWY_INLINE void ForEachSum(const Bf16Work& work, const Does& does) const {
    const Bf16Product& product = work.products[work.product];
    const std::size_t stride = product.c_row * kBytes;
    float* c = product.c + work.row * product.c_row + work.column;
    float* below = c + kAmxRows * product.c_row;
    does(std::integral_constant<int, kSum00>(), c, stride);
    if (two_columns()) {
      does(std::integral_constant<int, kSum01>(), c + kAmxColumns, stride);
    }
    if (two_rows()) does(std::integral_constant<int, kSum10>(), below, stride);
    if (two_rows() && two_columns()) {
      does(std::integral_constant<int, kSum11>(), below + kAmxColumns, stride);
    }
  }

  const float* a_ = nullptr;
  std::size_t a_row_ = 0;   // Bytes from row to row.
  std::size_t a_term_ = 0;  // Pairs from term to term.
  const float* b_ = nullptr;
  std::size_t b_row_ = 0;
  std::size_t b_term_ = 0;
  bool two_rows_ = false;
  bool two_columns_ = false;
};

// Does step kStep of the terms of a tile of pairs. The tiles that it loads and
// multiplies are constants: where branches chose the tiles, a prefill took 5 to
// 10 % longer (docs/attention.md). Step 0 sets `block` for the other steps.
template <class Tiles, bool kWhole, std::size_t a_count, std::size_t b_count,
          std::size_t kStep>
HWY_INLINE void DoStep(Bf16Work& work, TileBlock<Tiles, kWhole>& block) {
  constexpr StepsOfTerms kSteps(a_count, b_count);
  if (kStep == 0) {
    block = TileBlock<Tiles, kWhole>(work);
    if (work.pair == 0) {
      const std::size_t rows =
          kWhole ? 2 * kAmxRows
                 : std::min(work.products[work.product].rows - work.row,
                            2 * kAmxRows);
      if (work.configured != rows) ConfigureTiles<Tiles>(rows);
      work.configured = rows;
      block.Begin(work);
    }
  }
  block.template Multiply<kSteps[kStep]>();
  if (kStep + 1 < kSteps.count()) return;
  const Bf16Product& product = work.products[work.product];
  work.pair += kPairsOfTile;
  if (work.pair < product.pairs) return;
  block.End(work);
  work.pair = 0;
  work.column += 2 * kAmxColumns;
  if (work.column < product.columns) return;
  work.column = 0;
  work.row += 2 * kAmxRows;
  if (work.row < product.rows) return;
  work.row = 0;
  ++work.product;
}

// Does the next step of some work.
template <class Tiles, bool kWhole, std::size_t a_count, std::size_t b_count>
HWY_INLINE void DoNextStep(Bf16Work& work) {
  constexpr std::size_t kCount = StepsOfTerms(a_count, b_count).count();
  TileBlock<Tiles, kWhole> block(work);
  const std::size_t now = work.terms;
  [&]<std::size_t... step>(std::index_sequence<step...>) {
    ((now == step ? DoStep<Tiles, kWhole, a_count, b_count, step>(work, block)
                  : void()),
     ...);
  }
  (std::make_index_sequence<kCount>());
  work.terms = now + 1 < kCount ? now + 1 : 0;
}

// Calls does(terms of a, terms of b) with the numbers of terms of a product as
// constants.
template <class Does>
HWY_INLINE void WithTerms(const Bf16Product& product, const Does& does) {
  constexpr std::integral_constant<std::size_t, 1> kOne;
  constexpr std::integral_constant<std::size_t, 2> kTwo;
  constexpr std::integral_constant<std::size_t, kMostTerms> kMost;
  KVTWIN_DCHECK(product.a_terms.count == kMostTerms ||
                (product.a_terms.count == 1 && product.b_terms.count == 1));
  if (product.a_terms.count == 1) return does(kOne, kOne);
  if (product.b_terms.count == 1) return does(kMost, kOne);
  if (product.b_terms.count == 2) return does(kMost, kTwo);
  does(kMost, kMost);
}

// Whether the work has products, all products have equally many terms, and all
// of their blocks are whole.
inline bool HasWholeBlocks(const Bf16Work& work) {
  return !work.products.empty() &&
         std::ranges::all_of(work.products, [&](const Bf16Product& product) {
           const Bf16Product& first = work.products[0];
           return product.a_terms.count == first.a_terms.count &&
                  product.b_terms.count == first.b_terms.count &&
                  product.rows % (2 * kAmxRows) == 0 &&
                  product.columns % (2 * kAmxColumns) == 0;
         });
}

// A MultiplyBf16; a step is up to four multiplications of tiles. After the last
// step of the last work the tiles are released, so that the thread has no state
// that the kernel of the system saves.
template <class Tiles>
void MultiplyInTiles(Bf16Work& work, std::size_t steps) {
  for (; steps > 0 && work.product < work.products.size(); --steps) {
    const Bf16Product& product = work.products[work.product];
    const bool whole = work.row + 2 * kAmxRows <= product.rows &&
                       work.column + 2 * kAmxColumns <= product.columns;
    WithTerms(product, [&](auto a_count, auto b_count) {
      if (whole) {
        DoNextStep<Tiles, true, a_count, b_count>(work);
      } else {
        DoNextStep<Tiles, false, a_count, b_count>(work);
      }
    });
    if (work.last && work.product == work.products.size()) Tiles::Release();
  }
}

#if defined(__x86_64__) && defined(__linux__)
#define KVTWIN_AMX
// The instructions. They are written as assembly, as the number of a tile is a
// part of each.
class AmxTiles {
 public:
  static void Configure(const TileConfig& config) {
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  template <int tile>
  static void Load(const float* from, std::size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride),
                 "i"(tile)
                 : "memory");
  }
  template <int tile>
  static void Zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
  }
  template <int sum, int a, int b>
  static void Multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(a),
                 "i"(b));
  }
  template <int tile>
  static void Store(float* to, std::size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride),
                 "i"(tile)
                 : "memory");
  }
  static void Release() { asm volatile("tilerelease"); }
};
#endif

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_AMX_PRODUCTS_H_
