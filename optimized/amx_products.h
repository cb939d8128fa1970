// Products of bf16 in the tiles of Intel's AMX. A tile has up to 16 rows of 64
// bytes. Tests put an emulator of the instructions in the place of AmxTiles.

#ifndef KVTWIN_OPTIMIZED_AMX_PRODUCTS_H_
#define KVTWIN_OPTIMIZED_AMX_PRODUCTS_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/index.h"
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

// The products of factors with so many terms, and which tiles each loads.
class StepsOfTerms {
 public:
  struct Step {
    TermsOfFactors terms;
    bool loads_a;
    bool loads_b;
  };

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
  constexpr const Step& operator[](std::size_t i) const { return steps_[i]; }

  static const StepsOfTerms& Of(const Bf16Product& product) {
    static constexpr std::array<std::array<StepsOfTerms, kMostTerms>,
                                kMostTerms>
        kAll = {{{{{1, 1}, {1, 2}, {1, 3}}},
                 {{{2, 1}, {2, 2}, {2, 3}}},
                 {{{3, 1}, {3, 2}, {3, 3}}}}};
    return At(At(kAll, product.a_terms.count - 1), product.b_terms.count - 1);
  }

 private:
  std::array<Step, kOrderOfTerms.size()> steps_ = {};
  std::size_t count_ = 0;
};

// A block of c, of up to two by two tiles.
template <class Tiles>
class TileBlock {
 public:
  TileBlock(const Bf16Product& product, std::size_t row, std::size_t column)
      : product_(product),
        row_(row),
        column_(column),
        two_rows_(row + kAmxRows < product.rows),
        two_columns_(column + kAmxColumns < product.columns) {}

  void Begin() const {
    ForEachSum([&](auto tile, const float* c, std::size_t stride) {
      if (product_.add) {
        Tiles::template Load<tile>(c, stride);
      } else {
        Tiles::template Zero<tile>();
      }
    });
  }

  // Adds the products of the terms, from `pair` on. A factor that is not loaded
  // is that of the step before.
  void Multiply(const StepsOfTerms::Step& step, std::size_t pair) const {
    if (step.loads_a) {
      const std::size_t stride = product_.a_row * kBytes;
      const float* a = product_.a + step.terms.i * product_.a_terms.stride +
                       row_ * product_.a_row + pair;
      Tiles::template Load<kA0>(a, stride);
      if (two_rows_) {
        Tiles::template Load<kA1>(a + kAmxRows * product_.a_row, stride);
      }
    }
    if (step.loads_b) {
      const std::size_t stride = product_.columns * kBytes;
      const float* b = product_.b + step.terms.j * product_.b_terms.stride +
                       pair * product_.columns + column_;
      Tiles::template Load<kB0>(b, stride);
      if (two_columns_) Tiles::template Load<kB1>(b + kAmxColumns, stride);
    }
    Tiles::template Multiply<kSum00, kA0, kB0>();
    if (two_columns_) Tiles::template Multiply<kSum01, kA0, kB1>();
    if (two_rows_) Tiles::template Multiply<kSum10, kA1, kB0>();
    if (two_rows_ && two_columns_) {
      Tiles::template Multiply<kSum11, kA1, kB1>();
    }
  }

  void End() const {
    ForEachSum([](auto tile, float* c, std::size_t stride) {
      Tiles::template Store<tile>(c, stride);
    });
  }

 private:
  static constexpr std::size_t kBytes = sizeof(float);

  // Calls does(tile, its place in c, bytes from row to row).
  template <class Does>
  void ForEachSum(const Does& does) const {
    const std::size_t stride = product_.c_row * kBytes;
    float* c = product_.c + row_ * product_.c_row + column_;
    float* below = c + kAmxRows * product_.c_row;
    does(std::integral_constant<int, kSum00>(), c, stride);
    if (two_columns_) {
      does(std::integral_constant<int, kSum01>(), c + kAmxColumns, stride);
    }
    if (two_rows_) does(std::integral_constant<int, kSum10>(), below, stride);
    if (two_rows_ && two_columns_) {
      does(std::integral_constant<int, kSum11>(), below + kAmxColumns, stride);
    }
  }

  const Bf16Product& product_;
  std::size_t row_;
  std::size_t column_;
  bool two_rows_;
  bool two_columns_;
};

// A MultiplyBf16; a step is up to four multiplications of tiles. After the last
// step the tiles are released, so that the thread has no state that the kernel
// of the system saves.
template <class Tiles>
void MultiplyInTiles(Bf16Work& work, std::size_t steps) {
  for (; steps > 0 && work.product < work.products.size(); --steps) {
    const Bf16Product& product = work.products[work.product];
    const StepsOfTerms& terms = StepsOfTerms::Of(product);
    const TileBlock<Tiles> block(product, work.row, work.column);
    if (work.pair == 0 && work.terms == 0) {
      const std::size_t rows = std::min(product.rows - work.row, 2 * kAmxRows);
      if (rows != work.configured) ConfigureTiles<Tiles>(rows);
      work.configured = rows;
      block.Begin();
    }
    block.Multiply(terms[work.terms], work.pair);
    if (++work.terms < terms.count()) continue;
    work.terms = 0;
    work.pair += kPairsOfTile;
    if (work.pair < product.pairs) continue;
    block.End();
    work.pair = 0;
    work.column += 2 * kAmxColumns;
    if (work.column < product.columns) continue;
    work.column = 0;
    work.row += 2 * kAmxRows;
    if (work.row < product.rows) continue;
    work.row = 0;
    ++work.product;
    if (work.product == work.products.size()) Tiles::Release();
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
