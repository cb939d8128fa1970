// Products of matrices of bf16 by AVX-512 BF16, AMX and the emulator of AMX,
// which is judged by examples and, bit for bit, by a processor that has AMX.

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

// The terms of two factors.
struct Terms {
  std::size_t a = 1;
  std::size_t b = 1;
};

// Multiplies matrices of random integers, whose sums are exact in any order, as
// two products with some and all of the rows, in calls of up to six steps. The
// numbers around `c` stay as they are.
void ExpectExactProduct(optimized::MultiplyBf16 multiply, std::size_t rows,
                        std::size_t pairs, std::size_t columns, bool add,
                        Terms terms = {}) {
  constexpr std::size_t kAround = 64;
  constexpr std::size_t kPairs = optimized::kPairsOfTile;
  std::mt19937 random(static_cast<std::uint32_t>(rows));
  const auto draw = [&] { return static_cast<float>(random() % 17) - 8; };
  const std::size_t padded = (pairs + kPairs - 1) / kPairs * kPairs;
  const auto make = [](std::size_t count) {
    return optimized::AlignedBuffer(count * sizeof(float));
  };
  const std::size_t a_stride = rows * padded;
  const std::size_t b_stride = padded * columns;
  auto a_memory = make(terms.a * a_stride);
  auto b_memory = make(terms.b * b_stride);
  auto c_memory = make(rows * columns + 2 * kAround);
  auto some_memory = make(rows * columns);
  auto* a = a_memory.as<float>();
  auto* b = b_memory.as<float>();
  auto* c = c_memory.as<float>() + kAround;
  auto* some = some_memory.as<float>();
  std::vector<float> expected(rows * columns);
  for (std::size_t i = 0; i < rows * columns + 2 * kAround; ++i) {
    c[AsInt(i) - AsInt(kAround)] = 3;
  }
  std::fill_n(some, rows * columns, 3.0f);
  for (float& sum : expected) sum = add ? 3 : 0;
  std::vector<std::array<float, 2>> left(terms.a * a_stride);
  std::vector<std::array<float, 2>> right(terms.b * b_stride);
  std::fill_n(a, left.size(), 0.0f);
  std::fill_n(b, right.size(), 0.0f);
  const auto fill = [&](auto& numbers, float* to, std::size_t i) {
    numbers[i] = {draw(), draw()};
    to[i] = Pair(numbers[i][0], numbers[i][1]);
  };
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (i % padded < pairs) fill(left, a, i);
  }
  for (std::size_t i = 0; i < right.size(); ++i) {
    if (i % b_stride / columns < pairs) fill(right, b, i);
  }
  for (std::size_t i = 0; i < terms.a; ++i) {
    for (std::size_t j = 0; j < terms.b && i + j < 3; ++j) {
      for (std::size_t at = 0; at < rows * columns * pairs; ++at) {
        const std::size_t k = at % pairs;
        const std::size_t r = at / pairs / columns;
        const std::size_t column = at / pairs % columns;
        const auto& x = left[i * a_stride + r * padded + k];
        const auto& y = right[j * b_stride + k * columns + column];
        expected[r * columns + column] += x[0] * y[0] + x[1] * y[1];
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
                                          .add = add,
                                          .a_terms = {terms.a, a_stride},
                                          .b_terms = {terms.b, b_stride}};
  optimized::Bf16Product first_rows = product;
  first_rows.rows = (rows + 1) / 2;
  first_rows.c = some;
  const std::array products = {first_rows, product};
  optimized::Bf16Work work = {.products = products};
  for (std::size_t steps = 1; work.product < products.size(); ++steps) {
    multiply(work, steps % 7);
  }
  multiply(work, optimized::kAllSteps);  // There are no steps left.
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (i < first_rows.rows * columns) {
      ASSERT_EQ(some[i], expected[i]) << i / columns << " of the first rows";
    } else {
      ASSERT_EQ(some[i], 3);
    }
    ASSERT_EQ(c[i], expected[i])
        << i / columns << ", " << i % columns << " of " << rows << " rows, "
        << columns << " columns, " << pairs << " pairs, add " << add << ", "
        << terms.a << " and " << terms.b << " terms";
  }
  for (std::size_t i = 0; i < kAround; ++i) {
    ASSERT_EQ(*(c - 1 - i), 3);
    ASSERT_EQ(c[expected.size() + i], 3);
  }
}

void ExpectExactProducts(optimized::MultiplyBf16 multiply, Terms terms = {}) {
  for (std::size_t rows = 1; rows <= 70; ++rows) {
    const std::size_t pairs = 1 + rows * 7 % 40;
    const std::size_t columns = 16 * (1 + rows % 9);
    ExpectExactProduct(multiply, rows, pairs, columns, /*add=*/false, terms);
    ExpectExactProduct(multiply, rows, pairs, columns, /*add=*/true, terms);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_F(Avx512Bf16, ProductsOfThisProcessorAreExact) {
  const optimized::MultiplyBf16 own = optimized::Bf16Multiplier();
  ExpectExactProducts(optimized::MultiplyInRegisters);
  if (own != optimized::MultiplyInRegisters) ExpectExactProducts(own);
}

TEST(Bf16Products, OfTilesAreExact) {
  ExpectExactProducts(optimized::MultiplyInTiles<Tiles>);
  EXPECT_EQ(Tiles::TakeFaults(), Faults());
  EXPECT_FALSE(Tiles::IsConfigured());
}

TEST(Bf16Products, OfTermsAreExact) {
  for (const Terms terms : {Terms{3, 1}, Terms{3, 2}, Terms{3, 3}}) {
    ExpectExactProducts(optimized::MultiplyInTiles<Tiles>, terms);
    if (optimized::TermsMultiplier() != nullptr) {
      ExpectExactProducts(optimized::TermsMultiplier(), terms);
    }
  }
  EXPECT_EQ(Tiles::TakeFaults(), Faults());
}

// Splits numbers by SplitQueries, and expects that the sums of the terms are
// the numbers.
void ExpectExactTerms(const std::vector<float>& numbers, std::size_t terms) {
  constexpr std::size_t kPadded = 32;
  const std::size_t rows = (numbers.size() + kPadded - 1) / kPadded;
  const std::size_t stride = rows * kPadded;
  optimized::AlignedBuffer memory(terms * stride * sizeof(float));
  auto* split = memory.as<float>();
  std::fill_n(split, stride, 0.0f);
  std::ranges::copy(numbers, split);
  optimized::SplitQueries(split, kPadded, rows, terms);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    double sum = 0;
    for (std::size_t term = 0; term < terms; ++term) {
      const auto bits =
          std::bit_cast<std::uint32_t>(split[term * stride + i / 2]);
      sum += std::bit_cast<float>(i % 2 == 0 ? bits << 16 : bits & 0xFFFF0000);
    }
    ASSERT_EQ(sum, numbers[i]) << terms << " terms";
  }
}

TEST_F(Avx512Bf16, TermsSumUpToEachNumber) {
  std::mt19937 random(1);
  std::vector<float> numbers = {0,
                                1,
                                0x1.FFFFFEp127f,
                                -0x1.FF8p127f,
                                0x1p-100f,
                                0x1.FEp127f,
                                0x1.FF0002p127f,
                                0x1.008p0f,
                                0x1.018p0f,
                                0x1.FFFFFEp0f};
  for (int i = 0; i < 100'000; ++i) {
    // From 2^-100 to the largest number.
    const auto exponent = static_cast<std::uint32_t>(27 + random() % 228);
    const auto others = static_cast<std::uint32_t>(random() & 0x807FFFFF);
    numbers.push_back(std::bit_cast<float>(others | exponent << 23));
  }
  ExpectExactTerms(numbers, optimized::kMostTerms);
}

// TermsOf says how many terms the numbers of a dtype need.
TEST_F(Avx512Bf16, TermsOfADTypeAreEnough) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF8}) {
    std::vector<float> numbers;
    const std::uint32_t end = dtype == DType::kF8 ? 1 << 8 : 1 << 16;
    for (std::uint32_t bits = 0; bits < end; ++bits) {
      const auto* number = reinterpret_cast<const std::byte*>(&bits);
      const float loaded = LoadElement(number, dtype);
      if (std::isfinite(loaded) && std::abs(loaded) >= 0x1p-126f) {
        numbers.push_back(loaded);
      }
    }
    EXPECT_GT(numbers.size(), end / 2);
    ExpectExactTerms(numbers, optimized::TermsOf(dtype));
  }
  // Blocks: each number of 4 or 8 bits, times the scale.
  for (std::uint32_t bits = 0; bits < 1 << 16; bits += 7) {
    const float scale =
        LoadElement(reinterpret_cast<const std::byte*>(&bits), DType::kF16);
    if (!std::isfinite(scale)) continue;
    std::vector<float> numbers;
    for (int i = -8; i < 8; ++i) {
      numbers.push_back(scale * static_cast<float>(i));
    }
    ExpectExactTerms(numbers, optimized::TermsOf(DType::kQ4));
    for (int i = -128; i < 128; ++i) {
      numbers.push_back(scale * static_cast<float>(i));
    }
    ExpectExactTerms(numbers, optimized::TermsOf(DType::kQ8));
  }
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
  optimized::Bf16Work work = {.products = {&product, 1}};
  multiply(work, optimized::kAllSteps);
  product.c = emulated.data();
  work = {.products = {&product, 1}};
  optimized::MultiplyInTiles<Tiles>(work, optimized::kAllSteps);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    ASSERT_PRED2(HaveSameBits, sums[i], emulated[i])
        << "sum " << i << ", factors of 2^"
        << static_cast<int>(exponents.first_factor) - 127 << ", seed " << seed;
  }
}

TEST(Bf16Products, OfAmxHaveTheBitsOfTheEmulator) {
  const optimized::MultiplyBf16 own = MultiplierByAmx();
  // Without AMX its instructions would end the program. The emulator has
  // examples, which run everywhere.
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

}  // namespace
}  // namespace kvtwin::props
