// Products of bf16 in the tiles of Intel's AMX. A tile has up to 16 rows of 64
// bytes. Tests put an emulator of the instructions in the place of AmxTiles.

#ifndef KVTWIN_OPTIMIZED_AMX_PRODUCTS_H_
#define KVTWIN_OPTIMIZED_AMX_PRODUCTS_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

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

// Computes a block of c, of up to two by two tiles, from `row` and `column` on.
template <class Tiles>
void MultiplyTiles(const Bf16Product& product, std::size_t row,
                   std::size_t column) {
  constexpr std::size_t kBytes = sizeof(float);
  const bool two_rows = row + kAmxRows < product.rows;
  const bool two_columns = column + kAmxColumns < product.columns;
  const std::size_t stride = product.columns * kBytes;
  const std::size_t c_stride = product.c_row * kBytes;
  const auto sums = [&](const auto& one) {
    float* c = product.c + row * product.c_row + column;
    float* below = c + kAmxRows * product.c_row;
    one(std::integral_constant<int, kSum00>(), c);
    if (two_columns) {
      one(std::integral_constant<int, kSum01>(), c + kAmxColumns);
    }
    if (two_rows) one(std::integral_constant<int, kSum10>(), below);
    if (two_rows && two_columns) {
      one(std::integral_constant<int, kSum11>(), below + kAmxColumns);
    }
  };
  sums([&](auto tile, const float* c) {
    if (product.add) {
      Tiles::template Load<tile>(c, c_stride);
    } else {
      Tiles::template Zero<tile>();
    }
  });
  const auto load_a = [&](std::size_t term, std::size_t k) {
    const float* a =
        product.a + term * product.a_terms.stride + row * product.a_row + k;
    const std::size_t a_stride = product.a_row * kBytes;
    Tiles::template Load<kA0>(a, a_stride);
    if (two_rows) {
      Tiles::template Load<kA1>(a + kAmxRows * product.a_row, a_stride);
    }
  };
  const auto load_b = [&](std::size_t term, std::size_t k) {
    const float* b = product.b + term * product.b_terms.stride +
                     k * product.columns + column;
    Tiles::template Load<kB0>(b, stride);
    if (two_columns) Tiles::template Load<kB1>(b + kAmxColumns, stride);
  };
  for (std::size_t k = 0; k < product.pairs; k += kPairsOfTile) {
    std::size_t last_i = kMostTerms;
    std::size_t last_j = kMostTerms;
    for (const auto& [i, j] : kOrderOfTerms) {
      if (i >= product.a_terms.count || j >= product.b_terms.count) continue;
      if (i != last_i) load_a(i, k);
      if (j != last_j) load_b(j, k);
      last_i = i;
      last_j = j;
      Tiles::template Multiply<kSum00, kA0, kB0>();
      if (two_columns) Tiles::template Multiply<kSum01, kA0, kB1>();
      if (two_rows) Tiles::template Multiply<kSum10, kA1, kB0>();
      if (two_rows && two_columns) Tiles::template Multiply<kSum11, kA1, kB1>();
    }
  }
  sums([&](auto tile, float* c) { Tiles::template Store<tile>(c, c_stride); });
}

// A MultiplyBf16. The tiles are released, so that the thread has no state that
// the kernel of the system saves.
template <class Tiles>
void MultiplyInTiles(std::span<const Bf16Product> products) {
  const std::size_t all = products[0].rows;
  std::size_t configured = 0;
  for (std::size_t row = 0; row < all; row += 2 * kAmxRows) {
    const std::size_t rows = std::min(all - row, 2 * kAmxRows);
    if (rows != configured) ConfigureTiles<Tiles>(rows);
    configured = rows;
    for (const Bf16Product& product : products) {
      for (std::size_t j = 0; j < product.columns; j += 2 * kAmxColumns) {
        MultiplyTiles<Tiles>(product, row, j);
      }
    }
  }
  Tiles::Release();
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
