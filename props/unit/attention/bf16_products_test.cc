// Products of bf16: the emulator of AMX by examples and, bit for bit, by a
// processor that has AMX; and the products of matrices by AVX-512 BF16, AMX and
// the emulator.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numbers>
#include <random>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/names.h"
#include "kvtwin/attention.h"
#include "kvtwin/tensor.h"
#include "optimized/aligned_buffer.h"
#include "optimized/amx_products.h"
#include "optimized/attention_bf16.h"
#include "props/unit/attention/amx_emulator.h"

namespace kvtwin::props {
namespace {

using Tiles = EmulatedTiles;
using Faults = std::vector<std::string>;

// A pair of numbers that bf16 has, as a float with their bits.
float Pair(float first, float second) {
  return std::bit_cast<float>(
      std::bit_cast<std::uint32_t>(first) >> 16 |
      (std::bit_cast<std::uint32_t>(second) & 0xFFFF0000));
}

// Tile 0 has one sum, tile 1 a row of two pairs, and tile 2 two rows of a pair.
optimized::TileConfig OneSum() {
  optimized::TileConfig config;
  config.rows = {1, 1, 2};
  config.row_bytes = {4, 8, 4};
  return config;
}

// sum + a0 b0 + a1 b1, of pairs.
template <class SomeTiles>
float SumBy(float sum, const std::array<float, 2>& a,
            const std::array<float, 2>& b) {
  SomeTiles::Configure(OneSum());
  SomeTiles::template Load<0>(&sum, 4);
  SomeTiles::template Load<1>(a.data(), 8);
  SomeTiles::template Load<2>(b.data(), 4);
  SomeTiles::template Multiply<0, 1, 2>();
  SomeTiles::template Store<0>(&sum, 4);
  SomeTiles::Release();
  return sum;
}

// The sum by the emulator. A processor that has AMX must have the same bits.
float SumOf(float before, const std::array<float, 2>& a,
            const std::array<float, 2>& b) {
  const float sum = SumBy<Tiles>(before, a, b);
  EXPECT_EQ(Tiles::TakeFaults(), Faults());
#ifdef KVTWIN_AMX
  if (MultiplierByAmx() != nullptr) {
    EXPECT_PRED2(HaveSameBits, sum, SumBy<optimized::AmxTiles>(before, a, b));
  }
#endif
  return sum;
}

TEST(AmxEmulator, AddsTheProductsOfPairs) {
  EXPECT_EQ(SumOf(100, {Pair(1, 2), Pair(3, 4)}, {Pair(5, 6), Pair(7, 8)}),
            100 + 1 * 5 + 2 * 6 + 3 * 7 + 4 * 8);
}

TEST(AmxEmulator, KeepsTheFirstAndTheSecondNumbersApart) {
  // In the order of the pairs the 1 would be lost beside 2^24.
  EXPECT_EQ(SumOf(0, {Pair(0x1p12, 1), Pair(0x1p12, 0)},
                  {Pair(0x1p12, 1), Pair(-0x1p12, 0)}),
            1);
  // The products are added to each other first, then to the sum.
  EXPECT_EQ(SumOf(0x1p24, {Pair(1, 1), 0}, {Pair(1, 1), 0}), 0x1p24 + 2);
}

TEST(AmxEmulator, FusesProductsWithSums) {
  // 1.5 * 1.5 - 2.25 is 0 either way; (1 + 2^-7)^2 has 15 bits, and its sum
  // with 2^-20 more than a rounded sum of f32 would lose.
  EXPECT_EQ(SumOf(0, {Pair(1 + 0x1p-7, 0), Pair(1, 0)},
                  {Pair(1 + 0x1p-7, 0), Pair(-1, 0)}),
            0x1p-6 + 0x1p-14);
}

TEST(AmxEmulator, FlushesWhatIsTooSmall) {
  const float tiny = 0x1p-133f;  // The smallest bf16.
  EXPECT_EQ(SumOf(0, {Pair(tiny, 0), 0}, {Pair(0x1p100, 0), 0}), 0);
  EXPECT_EQ(SumOf(0, {Pair(0x1p-64, 0), 0}, {Pair(0x1p-63, 0), 0}), 0);
  EXPECT_EQ(SumOf(0, {Pair(0x1p-63, 0), 0}, {Pair(0x1p-63, 0), 0}), 0x1p-126);
  EXPECT_EQ(SumOf(0x1p-149f, {0, 0}, {0, 0}), 0);
  // Below 2^-126 by 3/4 of 2^-150: 24 digits hold that, those of f32 do not.
  EXPECT_EQ(SumOf(0, {Pair(0x1p-63, 0), Pair(-0x1.8p-76, 0)},
                  {Pair(0x1p-63, 0), Pair(0x1p-75, 0)}),
            0);
}

TEST(AmxEmulator, MultipliesWhatIsNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const auto sum = [](float before, float a, float b) {
    return SumOf(before, {Pair(a, 0), 0}, {Pair(b, 0), 0});
  };
  EXPECT_EQ(sum(1, kInfinity, -2), -kInfinity);
  EXPECT_EQ(sum(0, 0x1p100, 0x1p100), kInfinity);
  EXPECT_EQ(sum(0x1.FFFFFEp127f, 0x1p60, 0x1p60), kInfinity);
  EXPECT_TRUE(std::isnan(sum(0, kInfinity, 0)));
  EXPECT_TRUE(std::isnan(sum(0, kInfinity, 0x1p-133f)));
  EXPECT_TRUE(std::isnan(sum(-kInfinity, kInfinity, 1)));
  EXPECT_TRUE(std::isnan(sum(0, kNaN, 0)));
  EXPECT_TRUE(std::isnan(sum(kNaN, 1, 1)));
}

TEST(AmxEmulator, ClearsWhatIsOutsideOfATile) {
  std::array<float, 32> numbers;
  numbers.fill(7);
  optimized::TileConfig config;
  config.rows = {2};
  config.row_bytes = {8};
  Tiles::Configure(config);
  Tiles::Load<0>(numbers.data(), 64);
  std::array<float, 32> stored = {};
  Tiles::Store<0>(stored.data(), 64);
  EXPECT_EQ(stored[1], 7);
  EXPECT_EQ(stored[2], 0);
  EXPECT_EQ(stored[17], 7);
  Tiles::Configure(config);
  Tiles::Store<0>(stored.data(), 64);
  EXPECT_EQ(stored[1], 0);
  Tiles::Release();
  EXPECT_EQ(Tiles::TakeFaults(), Faults());
}

TEST(AmxEmulator, RefusesOtherConfigurations) {
  const auto expect_fault = [](const auto& change) {
    optimized::TileConfig config = OneSum();
    change(config);
    Tiles::Configure(config);
    EXPECT_EQ(Tiles::TakeFaults(), Faults{"ldtilecfg: #GP"});
    EXPECT_FALSE(Tiles::IsConfigured());
  };
  expect_fault([](auto& config) { config.palette = 2; });
  expect_fault([](auto& config) { config.start_row = 1; });
  expect_fault([](auto& config) { config.reserved[13] = 1; });
  expect_fault([](auto& config) { config.rows[0] = 17; });
  expect_fault([](auto& config) { config.row_bytes[0] = 65; });
  expect_fault([](auto& config) { config.rows[0] = 0; });
  expect_fault([](auto& config) { config.row_bytes[0] = 0; });
  expect_fault([](auto& config) { config.rows[8] = 4; });
}

TEST(AmxEmulator, RefusesTilesThatDoNotFit) {
  const auto expect_fault = [](const auto& change) {
    optimized::TileConfig config = OneSum();
    change(config);
    Tiles::Configure(config);
    EXPECT_EQ(Tiles::TakeFaults(), Faults());
    Tiles::Multiply<0, 1, 2>();
    EXPECT_EQ(Tiles::TakeFaults(), Faults{"tdpbf16ps: #UD"});
  };
  expect_fault([](auto& config) { config.rows[0] = 2; });
  expect_fault([](auto& config) { config.rows[2] = 1; });
  expect_fault([](auto& config) { config.row_bytes[0] = 8; });
  expect_fault([](auto& config) { config.row_bytes[1] = 4; });
  expect_fault([](auto& config) { config.row_bytes[2] = 6; });
  expect_fault([](auto& config) {
    config.rows[1] = 0;
    config.row_bytes[1] = 0;
  });
  Tiles::Configure(OneSum());
  Tiles::Multiply<0, 1, 1>();
  Tiles::Multiply<0, 0, 2>();
  Tiles::Zero<3>();
  Tiles::Release();
  Tiles::Multiply<0, 1, 2>();
  Tiles::Zero<0>();
  float number = 0;
  Tiles::Load<0>(&number, 4);
  Tiles::Store<0>(&number, 4);
  EXPECT_EQ(Tiles::TakeFaults(),
            (Faults{"tdpbf16ps: #UD", "tdpbf16ps: #UD", "tilezero: #UD",
                    "tdpbf16ps: #UD", "tilezero: #UD", "tileloadd: #UD",
                    "tilestored: #UD"}));
}

// Multiplies matrices of random integers, whose sums are exact in any order.
// The numbers around `c` stay as they are.
void ExpectExactProduct(optimized::MultiplyBf16 multiply, std::size_t rows,
                        std::size_t pairs, std::size_t columns, bool add) {
  constexpr std::size_t kAround = 64;
  constexpr std::size_t kPairs = optimized::kPairsOfTile;
  std::mt19937 random(static_cast<std::uint32_t>(rows));
  const auto draw = [&] { return static_cast<float>(random() % 17) - 8; };
  const std::size_t padded = (pairs + kPairs - 1) / kPairs * kPairs;
  const auto make = [](std::size_t count) {
    return optimized::AlignedBuffer(count * sizeof(float));
  };
  auto a_memory = make(rows * padded);
  auto b_memory = make(padded * columns);
  auto c_memory = make(rows * columns + 2 * kAround);
  auto* a = a_memory.as<float>();
  auto* b = b_memory.as<float>();
  auto* c = c_memory.as<float>() + kAround;
  std::vector<float> expected(rows * columns);
  for (std::size_t i = 0; i < rows * columns + 2 * kAround; ++i) {
    c[AsInt(i) - AsInt(kAround)] = 3;
  }
  for (float& sum : expected) sum = add ? 3 : 0;
  std::vector<std::array<float, 2>> left(rows * pairs);
  std::vector<std::array<float, 2>> right(pairs * columns);
  for (auto* side : {&left, &right}) {
    for (auto& pair : *side) pair = {draw(), draw()};
  }
  std::fill_n(a, rows * padded, 0.0f);
  std::fill_n(b, padded * columns, 0.0f);
  for (std::size_t k = 0; k < pairs; ++k) {
    for (std::size_t r = 0; r < rows; ++r) {
      const auto& of_row = left[r * pairs + k];
      a[r * padded + k] = Pair(of_row[0], of_row[1]);
      for (std::size_t j = 0; j < columns; ++j) {
        const auto& of_column = right[k * columns + j];
        b[k * columns + j] = Pair(of_column[0], of_column[1]);
        expected[r * columns + j] +=
            of_row[0] * of_column[0] + of_row[1] * of_column[1];
      }
    }
  }
  const optimized::Bf16Product product = {.a = a,
                                          .a_row = padded,
                                          .rows = rows,
                                          .pairs = pairs,
                                          .b = b,
                                          .columns = columns,
                                          .c = c,
                                          .c_row = columns,
                                          .add = add};
  multiply({&product, 1});
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(c[i], expected[i])
        << i / columns << ", " << i % columns << " of " << rows << " rows, "
        << columns << " columns, " << pairs << " pairs, add " << add;
  }
  for (std::size_t i = 0; i < kAround; ++i) {
    ASSERT_EQ(*(c - 1 - i), 3);
    ASSERT_EQ(c[expected.size() + i], 3);
  }
}

void ExpectExactProducts(optimized::MultiplyBf16 multiply) {
  for (std::size_t rows = 1; rows <= 70; ++rows) {
    const std::size_t pairs = 1 + rows * 7 % 40;
    const std::size_t columns = 16 * (1 + rows % 9);
    ExpectExactProduct(multiply, rows, pairs, columns, /*add=*/false);
    ExpectExactProduct(multiply, rows, pairs, columns, /*add=*/true);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(Bf16Products, OfThisProcessorAreExact) {
  const optimized::MultiplyBf16 own = optimized::Bf16Multiplier();
  // Without AVX-512 BF16 the instructions would end the program. The emulator
  // of AMX and the five targets of AttentionInBf16 are tested everywhere.
  if (own == nullptr) GTEST_SKIP() << "this processor has no AVX-512 BF16";
  ExpectExactProducts(optimized::MultiplyInRegisters);
  if (own != optimized::MultiplyInRegisters) ExpectExactProducts(own);
}

TEST(Bf16Products, OfTilesAreExact) {
  ExpectExactProducts(optimized::MultiplyInTiles<Tiles>);
  EXPECT_EQ(Tiles::TakeFaults(), Faults());
  EXPECT_FALSE(Tiles::IsConfigured());
}

// The exponents of random factors and of the sums before, as bits.
struct Exponents {
  std::uint32_t first_factor, last_factor, first_sum, last_sum;
};

// Multiplies random matrices by `multiply` and by the emulator.
void ExpectBitsOfTheEmulator(optimized::MultiplyBf16 multiply,
                             const Exponents& exponents, std::uint32_t seed) {
  std::mt19937 random(seed);
  const std::size_t rows = 1 + random() % 40;
  const std::size_t pairs = optimized::kPairsOfTile * (1 + random() % 3);
  const std::size_t columns = 16 * (1 + random() % 4);
  const auto draw = [&](std::uint32_t first, std::uint32_t last) {
    const auto exponent = first + random() % (last - first + 1);
    const auto others = random() & 0x807FFFFF;
    return std::bit_cast<float>(
        static_cast<std::uint32_t>(others | exponent << 23));
  };
  const auto draw_pairs = [&](std::size_t count) {
    std::vector<float> drawn(count);
    for (float& pair : drawn) {
      const float first = draw(exponents.first_factor, exponents.last_factor);
      const float second = draw(exponents.first_factor, exponents.last_factor);
      pair = Pair(first, second);
    }
    return drawn;
  };
  const std::vector<float> a = draw_pairs(rows * pairs);
  const std::vector<float> b = draw_pairs(pairs * columns);
  std::vector<float> emulated(rows * columns);
  for (float& sum : emulated) {
    sum = draw(exponents.first_sum, exponents.last_sum);
  }
  std::vector<float> sums = emulated;
  optimized::Bf16Product product = {.a = a.data(),
                                    .a_row = pairs,
                                    .rows = rows,
                                    .pairs = pairs,
                                    .b = b.data(),
                                    .columns = columns,
                                    .c = sums.data(),
                                    .c_row = columns,
                                    .add = seed % 4 != 0};
  multiply({&product, 1});
  product.c = emulated.data();
  optimized::MultiplyInTiles<Tiles>({&product, 1});
  for (std::size_t i = 0; i < sums.size(); ++i) {
    ASSERT_PRED2(HaveSameBits, sums[i], emulated[i])
        << "sum " << i << ", factors of 2^"
        << static_cast<int>(exponents.first_factor) - 127 << ", seed " << seed;
  }
}

TEST(Bf16Products, OfAmxHaveTheBitsOfTheEmulator) {
  const optimized::MultiplyBf16 own = MultiplierByAmx();
  if (own == nullptr) GTEST_SKIP() << "this processor has no AMX";
  constexpr std::array kExponents = {
      Exponents{118, 136, 110, 145},  // Usual numbers.
      Exponents{0, 255, 0, 255},      // Any numbers, NaN and infinity too.
      Exponents{60, 68, 0, 12},       // Products and sums around 2^-126.
      Exponents{0, 2, 0, 2},          // Subnormal numbers.
      Exponents{0, 130, 0, 10},       // Subnormal and usual numbers.
      Exponents{183, 189, 247, 254},  // Sums around 2^127.
  };
  for (const Exponents& exponents : kExponents) {
    for (std::uint32_t seed = 0; seed < 50 && !HasFailure(); ++seed) {
      ExpectBitsOfTheEmulator(own, exponents, seed);
    }
  }
  EXPECT_EQ(Tiles::TakeFaults(), Faults());
}

// Some cells of one KV head. The numbers of `value` are integers that all
// dtypes have; blocks of q8_0 have a scale of 1, as they have a 127.
struct KnownCells {
  DenseTensor key;
  DenseTensor value;
  std::int64_t head_dim;
  std::int64_t cells;

  float Value(std::int64_t i, std::int64_t cell) const {
    if (value.view().dtype == DType::kQ8 && i % 32 == 0) return 127;
    return static_cast<float>((i * 7 + cell * 13) % 15 - 8);
  }
};

KnownCells MakeCells(DType dtype, std::int64_t head_dim, std::int64_t cells) {
  const Shape shape = {head_dim, 1, cells, 1};
  KnownCells made = {.key = FilledTensor(dtype, shape, 1),
                     .value = FilledTensor(dtype, shape, 0),
                     .head_dim = head_dim,
                     .cells = cells};
  DenseTensor row = FilledTensor(DType::kF32, {head_dim, 1, 1, 1}, 0);
  for (std::int64_t cell = 0; cell < cells; ++cell) {
    for (std::int64_t i = 0; i < head_dim; ++i) {
      StoreElement(made.Value(i, cell),
                   const_cast<std::byte*>(row.view().at(i)), DType::kF32);
    }
    const TensorView& value = made.value.view();
    CopyRun(row.view(), 0, 0, 0, const_cast<std::byte*>(value.at(0, 0, cell)),
            value.stride[0], dtype);
  }
  return made;
}

// Attends to the cells with `heads` queries in each row; `query(i, head)` is
// element i. Returns `out` and then log_sum_exp.
template <class Query>
std::vector<float> AttendTo(const KnownCells& cells, int heads, int rows,
                            const Query& query) {
  DenseTensor queries =
      FilledTensor(DType::kF32, {cells.head_dim, heads, rows, 1}, 0);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t head = 0; head < heads; ++head) {
      for (std::int64_t i = 0; i < cells.head_dim; ++i) {
        StoreElement(query(i, head),
                     const_cast<std::byte*>(queries.view().at(i, head, row)),
                     DType::kF32);
      }
    }
  }
  const DenseTensor mask =
      FilledTensor(DType::kF32, {cells.cells, rows, 1, 1}, 0);
  auto attention = *MakeAttention();
  EXPECT_TRUE(attention->Plan(mask.view(), rows).ok());
  const std::int64_t count = std::int64_t{rows} * heads;
  std::vector<float> out(AsSize((cells.head_dim + 1) * count));
  EXPECT_TRUE(attention
                  ->Attend(queries.view(),
                           {.key = cells.key.view(),
                            .value = cells.value.view(),
                            .mask = {}},
                           VLayout::kPlain, {.bf16_products = true},
                           {.out = out.data(),
                            .log_sum_exp = out.data() + cells.head_dim * count})
                  .ok());
  return out;
}

// Rows that weigh all cells alike: the results are means of integers, which
// bf16 has.
void ExpectExactMeans(DType dtype, int cells, int head_dim, int heads,
                      int rows) {
  const KnownCells made = MakeCells(dtype, head_dim, cells);
  const std::vector<float> out =
      AttendTo(made, heads, rows, [](auto, auto) { return 0.0f; });
  for (std::int64_t i = 0; i < head_dim; ++i) {
    float sum = 0;
    for (std::int64_t cell = 0; cell < cells; ++cell) {
      sum += made.Value(i, cell);
    }
    const float mean = sum / static_cast<float>(cells);
    for (std::int64_t row = 0; row < std::int64_t{rows} * heads; ++row) {
      ASSERT_NEAR(out[AsSize(row * head_dim + i)], mean, 4e-5)
          << "row " << row << ", element " << i << ", " << cells << " cells, "
          << head_dim << " elements, " << rows << " rows, " << heads
          << " heads, " << DTypeName(dtype);
    }
  }
}

TEST(Bf16Products, OfAnyTileAreExact) {
  constexpr std::array kHeadDims = {1, 16, 31, 33, 128, 576};
  for (const optimized::MultiplyBf16 multiply :
       {optimized::MultiplyBf16{nullptr}, &optimized::MultiplyInRegisters,
        &optimized::MultiplyInTiles<Tiles>}) {
    optimized::ForceBf16Multiplier(multiply);
    for (int cells = 1; cells <= 140 && !HasFailure(); ++cells) {
      ExpectExactMeans(DType::kF32, cells,
                       kHeadDims.at(AsSize(cells) % kHeadDims.size()), 3,
                       2 + cells % 13);
    }
    optimized::ForceBf16Multiplier(nullptr);
  }
  EXPECT_EQ(Tiles::TakeFaults(), Faults());
}

constexpr std::array kRowDTypes = {DType::kF32, DType::kF16, DType::kBF16,
                                   DType::kF8, DType::kQ8};

TEST(Bf16Products, OfFewQueriesAreExact) {
  for (const DType dtype : kRowDTypes) {
    for (int cells = 1; cells <= 140 && !HasFailure(); ++cells) {
      const int head_dim =
          dtype == DType::kQ8 ? 32 * (1 + cells % 5) : 16 * (1 + cells % 9);
      ExpectExactMeans(dtype, cells, head_dim, 1 + cells % 8, 1);
    }
  }
}

// Scores are in units of log 2: a query with this number and zeros has one
// element of K as its score, exactly, which is log_sum_exp if there is one
// cell.
constexpr auto kOne = std::numbers::ln2_v<float>;

TEST(Bf16Products, OfFewQueriesTakeEachElement) {
  constexpr std::int64_t kMost = 144;
  for (const DType dtype : kRowDTypes) {
    for (const std::int64_t head_dim : {16, 32, 64, 80, 128, 144}) {
      if (dtype == DType::kQ8 && head_dim % 32 != 0) continue;
      KnownCells cells = MakeCells(dtype, head_dim, 1);
      cells.key = MakeCells(dtype, head_dim, 1).value;
      for (std::int64_t first = 0; first < kMost; first += 8) {
        const auto query = [&](std::int64_t i, std::int64_t head) {
          return i == (first + head) % head_dim ? kOne : 0.0f;
        };
        const std::vector<float> out = AttendTo(cells, 8, 1, query);
        for (std::int64_t head = 0; head < 8; ++head) {
          const std::int64_t i = (first + head) % head_dim;
          ASSERT_NEAR(out[AsSize(8 * head_dim + head)],
                      cells.Value(i, 0) * kOne, 1e-4)
              << i << " of " << head_dim << ", " << DTypeName(dtype);
        }
      }
    }
  }
}

// Each query sees nearly one cell alone, another one than the other queries.
TEST(Bf16Products, OfFewQueriesFindTheirCells) {
  constexpr std::int64_t kHeadDim = 160;
  for (const DType dtype : kRowDTypes) {
    for (const std::int64_t count : {8, 63, 64, 65, 127, 150}) {
      KnownCells cells = MakeCells(dtype, kHeadDim, count);
      for (std::int64_t cell = 0; cell < count; ++cell) {
        DenseTensor one = FilledTensor(DType::kF32, {kHeadDim, 1, 1, 1}, 0);
        StoreElement(1, const_cast<std::byte*>(one.view().at(cell)),
                     DType::kF32);
        const TensorView& key = cells.key.view();
        CopyRun(one.view(), 0, 0, 0, const_cast<std::byte*>(key.at(0, 0, cell)),
                key.stride[0], dtype);
      }
      const auto cell_of = [&](std::int64_t head, std::int64_t first) {
        return (first + head * 19) % count;
      };
      for (std::int64_t first = 0; first < count; ++first) {
        const std::vector<float> out =
            AttendTo(cells, 8, 1, [&](std::int64_t i, std::int64_t head) {
              return i == cell_of(head, first) ? 64 * kOne : 0.0f;
            });
        for (std::int64_t i = 0; i < 8 * kHeadDim; ++i) {
          const std::int64_t cell = cell_of(i / kHeadDim, first);
          ASSERT_NEAR(out[AsSize(i)], cells.Value(i % kHeadDim, cell), 1e-4)
              << "head " << i / kHeadDim << ", element " << i % kHeadDim << ", "
              << count << " cells, " << DTypeName(dtype);
        }
      }
    }
  }
}

// Every number of f8, subnormal or not, as an element of K and of V.
TEST(Bf16Products, OfFewQueriesTakeEachNumberOfF8) {
  KnownCells cells = MakeCells(DType::kF8, 256, 1);
  for (std::size_t i = 0; i < 256; ++i) {
    const bool is_nan = i % 128 == 127;
    const auto byte = static_cast<std::byte>(is_nan ? 0 : i);
    cells.key.bytes[i] = cells.value.bytes[i] = byte;
  }
  for (std::int64_t first = 0; first < 256; first += 8) {
    const std::vector<float> out =
        AttendTo(cells, 8, 1, [&](std::int64_t i, std::int64_t head) {
          return i == first + head ? kOne : 0.0f;
        });
    for (std::int64_t i = 0; i < 256; ++i) {
      ASSERT_EQ(out[AsSize(i)],
                LoadElement(cells.value.view().at(i), DType::kF8))
          << i;
    }
    for (std::int64_t head = 0; head < 8; ++head) {
      const float number =
          kOne * LoadElement(cells.key.view().at(first + head), DType::kF8);
      ASSERT_NEAR(out[AsSize(std::int64_t{8} * 256 + head)], number,
                  1e-6f * std::abs(number))
          << first + head;
    }
  }
}

// Every number of q8_0 as an element of K and of V, with positive, negative and
// very small scales.
TEST(Bf16Products, OfFewQueriesTakeEachNumberOfQ8) {
  constexpr std::array<std::uint16_t, 8> kScales = {
      0x3C00, 0xB800, 0x0001, 0x8400, 0x7BFF, 0x0000, 0x3555, 0xC123};
  KnownCells cells = MakeCells(DType::kQ8, 256, 1);
  for (std::size_t i = 0; i < 256; ++i) {
    const std::size_t at = i / 32 * 34;
    std::memcpy(&cells.key.bytes[at], &kScales.at(i / 32), 2);
    cells.key.bytes[at + 2 + i % 32] = static_cast<std::byte>(i);
  }
  cells.value.bytes = cells.key.bytes;
  for (std::int64_t first = 0; first < 256; first += 8) {
    const std::vector<float> out =
        AttendTo(cells, 8, 1, [&](std::int64_t i, std::int64_t head) {
          return i == first + head ? kOne : 0.0f;
        });
    for (std::int64_t i = 0; i < 256; ++i) {
      const float number = LoadFrom(cells.value.view(), i);
      ASSERT_NEAR(out[AsSize(i)], number, 1e-6f * std::abs(number)) << i;
    }
    for (std::int64_t head = 0; head < 8; ++head) {
      const float number = kOne * LoadFrom(cells.key.view(), first + head);
      ASSERT_NEAR(out[AsSize(std::int64_t{8} * 256 + head)], number,
                  1e-6f * std::abs(number))
          << first + head;
    }
  }
}

// An element of a query is a multiple of a part of the largest element.
TEST(Bf16Products, OfFewQueriesRoundToPartsOfTheLargest) {
  // Without AVX-512 BF16, queries keep their f32: there is nothing to round.
  if (optimized::Bf16Multiplier() == nullptr) {
    GTEST_SKIP() << "this processor has no AVX-512 BF16";
  }
  KnownCells cells = MakeCells(DType::kQ8, 32, 1);
  DenseTensor one = FilledTensor(DType::kF32, {32, 1, 1, 1}, 0);
  StoreElement(1, const_cast<std::byte*>(one.view().at(1)), DType::kF32);
  CopyRun(one.view(), 0, 0, 0, cells.key.bytes.data(), 1, DType::kQ8);
  const float key = LoadFrom(cells.key.view(), 1);
  for (const float small : {0.4f, 0.6f, -3.4f, 127.4f, 128.6f, -129.4f}) {
    const std::vector<float> out =
        AttendTo(cells, 1, 1, [&](std::int64_t i, std::int64_t) {
          return kOne * (i == 0 ? 16383 : i == 1 ? small : 0);
        });
    EXPECT_NEAR(out[32], kOne * key * std::round(small), 1e-4) << small;
  }
}

// A weight of 2^-12 beside one of 1 keeps its digits: it is 8 units.
TEST(Bf16Products, OfFewQueriesKeepSmallWeights) {
  KnownCells cells = MakeCells(DType::kQ8, 32, 2);
  DenseTensor row = FilledTensor(DType::kF32, {32, 1, 1, 1}, 0);
  const auto store = [&](const TensorView& to, std::int64_t cell, float first,
                         float second) {
    StoreElement(first, const_cast<std::byte*>(row.view().at(0)), DType::kF32);
    StoreElement(second, const_cast<std::byte*>(row.view().at(1)), DType::kF32);
    CopyRun(row.view(), 0, 0, 0, const_cast<std::byte*>(to.at(0, 0, cell)), 1,
            DType::kQ8);
  };
  store(cells.key.view(), 0, 127, 0);
  store(cells.key.view(), 1, 0, 127);
  store(cells.value.view(), 0, 127, 0);
  store(cells.value.view(), 1, 127, 100);
  const std::vector<float> out =
      AttendTo(cells, 1, 1, [&](std::int64_t i, std::int64_t) {
        return i == 0 ? 12 * kOne / 127 : 0.0f;
      });
  constexpr float kExpected = 100 * 0x1p-12f / (1 + 0x1p-12f);
  EXPECT_NEAR(out[1], kExpected, 1e-3f * kExpected);
}

// Heads of more than 32 blocks have products of f32.
TEST(Bf16Products, OfFewQueriesTakeWideHeads) {
  for (const std::int64_t head_dim : {1024, 1056}) {
    KnownCells cells = MakeCells(DType::kQ8, head_dim, 1);
    cells.key = MakeCells(DType::kQ8, head_dim, 1).value;
    for (const std::int64_t at :
         {std::int64_t{1}, std::int64_t{1023}, head_dim - 1}) {
      const std::vector<float> out = AttendTo(
          cells, 1, 1,
          [&](std::int64_t i, std::int64_t) { return i == at ? kOne : 0.0f; });
      EXPECT_NEAR(out[AsSize(head_dim)], kOne * cells.Value(at, 0), 1e-4) << at;
      EXPECT_NEAR(out[AsSize(at)], cells.Value(at, 0), 1e-4) << at;
    }
  }
}

// A tile with fewer cells than before takes nothing from what lay in memory.
TEST(Bf16Products, TakeNothingFromAbsentCells) {
  // Without AVX-512 BF16 the instructions that round would end the program.
  if (optimized::Bf16Multiplier() == nullptr) {
    GTEST_SKIP() << "this processor has no AVX-512 BF16";
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::array<float, 16> row;
  row.fill(3);
  optimized::TileRows rows = {.rows = {},
                              .dtype = DType::kF32,
                              .adjacent = true,
                              .head_dim = row.size(),
                              .head_stride = 0,
                              .stride = sizeof(float)};
  rows.rows.fill(reinterpret_cast<const std::byte*>(row.data()));
  const optimized::GroupTile seen = {
      .tile = {.cells = 1, .keys = rows, .values = rows, .next = nullptr},
      .visible = {1}};
  const std::size_t floats = optimized::ManyBf16Scratch(16, 16);
  auto scratch = optimized::AlignedBuffer(floats * sizeof(float));
  for (const optimized::MultiplyBf16 multiply :
       {&optimized::MultiplyInRegisters, optimized::Bf16Multiplier(),
        &optimized::MultiplyInTiles<Tiles>}) {
    std::fill_n(scratch.as<float>(), floats, nan);
    alignas(64) std::array<float, 16> query = {};
    alignas(64) std::array<float, 16> out = {};
    float largest = -std::numeric_limits<float>::infinity();
    float sum = 0;
    optimized::AttendManyInBf16({&seen, 1},
                                {.kv_head = 0,
                                 .count = 1,
                                 .queries = query.data(),
                                 .out = out.data(),
                                 .largest = &largest,
                                 .sum = &sum},
                                1, {.cap = 0}, multiply, scratch.as<float>());
    EXPECT_EQ(out, row);
    EXPECT_EQ(sum, 1);
  }
}

}  // namespace
}  // namespace kvtwin::props
