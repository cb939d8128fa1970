// Compares attention of both twins with the formula, within the derived bound,
// for random cases.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <numbers>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/index.h"
#include "core/names.h"
#include "kvtwin/attention.h"
#include "optimized/amx_products.h"
#include "optimized/attention_bf16.h"
#include "optimized/fast_paths.h"
#include "optimized/targets.h"
#include "props/history/generate.h"
#include "props/testing/each_target.h"
#include "props/unit/attention/amx_emulator.h"
#include "props/unit/attention/attention_case.h"

namespace kvtwin::props::attention {
namespace {

// How K, V, queries and weights are multiplied: as f32, as bf16 by AVX-512
// BF16, or, by the emulator of AMX, as bf16 and as f32 in terms of bf16.
enum class Products { kF32, kBf16, kEmulatedAmx, kTerms };

constexpr std::array kProducts = {Products::kF32, Products::kBf16,
                                  Products::kEmulatedAmx, Products::kTerms};

bool AreOfBf16(Products products) {
  return products == Products::kBf16 || products == Products::kEmulatedAmx;
}
bool AreByAmx(Products products) {
  return products == Products::kEmulatedAmx || products == Products::kTerms;
}

std::string_view NameOf(Products products) {
  constexpr std::array<std::string_view, kProducts.size()> kNames = {
      "f32", "bf16", "amx", "terms"};
  return kNames.at(AsSize(products));
}

std::string_view Describe(Products products) {
  constexpr std::array<std::string_view, kProducts.size()> kTexts = {
      "f32", "bf16 by AVX-512 BF16", "bf16 by the emulated AMX",
      "f32 by the emulated AMX"};
  return kTexts.at(AsSize(products));
}

// Each case is drawn, and computed in double, once for all instruction sets.
class AttentionOfSizes : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_TRUE(optimized::SelectTarget(before_)); }
  static void TearDownTestSuite() {
    for (const auto& [key, found] : found_) {
      const auto& [products, target, dtype] = key;
      std::printf(
          "products of %s, %s, K of %s: %d cases, errors of at most %.3f "
          "bounds\n",
          Describe(products).data(), target.c_str(), dtype.c_str(), found.cases,
          found.largest);
    }
    if (by_amx_ > 0) {
      std::printf("the AMX of this processor: the same bits in %d cases\n",
                  by_amx_);
    }
  }

  // Products of bf16 are tried on the instruction sets that have them. A case
  // counts for emulated tiles if it multiplies them; a processor that has AMX
  // must have the same bits.
  void Check(const Case& drawn, Products products) {
    std::optional<std::vector<ExactRow>> exact;
    const std::string dtype(DTypeName(drawn.key.view.dtype));
    for (const std::string& target : targets_) {
      SCOPED_TRACE(target);
      ASSERT_TRUE(optimized::SelectTarget(target));
      const bool rounds = optimized::Bf16Multiplier() != nullptr;
      if (products != Products::kF32 && !rounds) continue;
      const std::size_t before = EmulatedTiles::Multiplications();
      const Results got = AttendWith(drawn, products);
      if (AreByAmx(products)) {
        if (EmulatedTiles::Multiplications() == before) continue;
        CompareWithAmx(drawn, got);
      }
      if (!exact) exact = ExactRows(drawn);
      Found& found = found_[{products, target, dtype}];
      ++found.cases;
      const double error = LargestError(drawn, *exact, got);
      found.largest = std::max(found.largest, error);
      largest_ = std::max(largest_, error);
      ++computed_;
    }
  }

  void PrintProgress(int drawn) const {
    std::printf(
        "%d cases drawn, %d computed on %d targets, errors of at most %.3f "
        "bounds\n",
        drawn, computed_, Size(targets_), largest_);
    std::fflush(stdout);
  }

  int computed_ = 0;  // Cases, by this test, on all targets.

 private:
  Results AttendWith(const Case& drawn, Products products) {
    constexpr std::array<optimized::MultiplyBf16, kProducts.size()>
        kMultipliers = {optimized::MultiplyInRegisters,
                        optimized::MultiplyInRegisters,
                        optimized::MultiplyInTiles<EmulatedTiles>,
                        optimized::MultiplyInTiles<EmulatedTiles>};
    optimized::ForceBf16Multiplier(kMultipliers.at(AsSize(products)));
    Results got = Attend(drawn, *twin_);
    optimized::ForceBf16Multiplier(nullptr);
    return got;
  }

  void CompareWithAmx(const Case& drawn, const Results& emulated) {
    if (MultiplierByAmx() == nullptr) return;
    const Results got = Attend(drawn, *twin_);
    EXPECT_TRUE(std::ranges::equal(got.out, emulated.out, HaveSameBits));
    EXPECT_TRUE(std::ranges::equal(got.log_sum_exp, emulated.log_sum_exp,
                                   HaveSameBits));
    ++by_amx_;
  }

  struct Found {
    int cases = 0;
    double largest = 0;  // The largest error, in bounds.
  };
  // For each kind of products, instruction set and dtype of K.
  inline static std::map<std::tuple<Products, std::string, std::string>, Found>
      found_;
  inline static int by_amx_ = 0;  // The cases by the AMX of this processor.

  const std::vector<std::string> targets_ = optimized::SupportedTargets();
  double largest_ = 0;
  const std::string before_ = optimized::ActiveTarget();
  std::unique_ptr<Attention> twin_ = *MakeAttention();
};

// The random cases are dealt out to this many tests, which can run at once.
constexpr int kDeals = 4;

class AttentionOnEachTarget
    : public AttentionOfSizes,
      public ::testing::WithParamInterface<std::tuple<Products, int>> {};

TEST_P(AttentionOnEachTarget, IsWithinTheBound) {
  const auto [products, deal] = GetParam();
  constexpr std::array<int, kProducts.size()> kFew = {2000, 600, 200, 600};
  const int count = CaseCount(kFew.at(AsSize(products)));
  int cases = 0;
  for (int number = deal; number < count; number += kDeals) {
    Case drawn = DrawCase(SeededPick(1, AsSize(number)));
    if (AreOfBf16(products)) drawn = InBf16(std::move(drawn));
    Check(drawn, products);
    ASSERT_FALSE(HasFailure()) << "case " << number;
    if (++cases % 10'000 == 0) PrintProgress(cases);
  }
  PrintProgress(cases);
  EXPECT_GT(computed_, 0);
  EXPECT_EQ(EmulatedTiles::TakeFaults(), std::vector<std::string>());
}

// Returns the kinds of products that this processor can compute.
std::vector<Products> ProductsHere() {
  std::vector<Products> here(kProducts.begin(), kProducts.end());
  if (optimized::Bf16Multiplier() == nullptr) here = {Products::kF32};
  return here;
}

INSTANTIATE_TEST_SUITE_P(Deals, AttentionOnEachTarget,
                         ::testing::Combine(::testing::ValuesIn(ProductsHere()),
                                            ::testing::Range(0, kDeals)),
                         [](const auto& info) {
                           return std::string(NameOf(std::get<0>(info.param))) +
                                  "_" + std::to_string(std::get<1>(info.param));
                         });

// The sizes of a case.
struct Sizes {
  int columns = 70;
  int rows = 1;
  int queries = 1;  // For each KV head and row.
  int kv_heads = 1;
  int k_head_dim = 3;
  int v_head_dim = 2;
  int splits = 0;
  DType k_dtype = DType::kF32;
  DType v_dtype = DType::kF16;
};

// Sizes around each constant of the optimized twin.
std::vector<Sizes> SizesAroundConstants() {
  std::vector<Sizes> all;
  for (const int tiles :
       {1, 2, 3, 4, 5, 8, 9, 15, 16, 24, 127, 128, 129, 136, 144}) {
    for (const int more : {-1, 0, 1}) {
      all.push_back({.columns = 64 * tiles + more});
      all.push_back({.columns = 64 * tiles + more, .queries = 9});
    }
  }
  for (const int kv_heads : {15, 16, 17}) {
    all.push_back({.columns = 1100, .rows = 2, .kv_heads = kv_heads});
  }
  for (const int rows :
       {2, 4, 6, 7, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257}) {
    all.push_back({.rows = rows});
    all.push_back({.rows = rows, .queries = 2});
  }
  for (const int rows : {4095, 4096, 4097}) {
    all.push_back({.columns = 5, .rows = rows});
  }
  for (int queries = 2; queries <= 17; ++queries) {
    all.push_back({.queries = queries, .kv_heads = 2});
  }
  for (const int queries :
       {31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 128, 129, 191, 192, 193}) {
    all.push_back({.rows = 1, .queries = queries});
    all.push_back({.columns = 300, .rows = 3, .queries = queries});
  }
  for (const int queries : {15, 16, 17}) {
    all.push_back(
        {.queries = queries, .k_dtype = DType::kF8, .v_dtype = DType::kBF16});
  }
  for (const int dims : {1, 4, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129}) {
    all.push_back({.k_head_dim = dims, .v_head_dim = dims});
    all.push_back({.rows = 7, .k_head_dim = dims, .v_head_dim = dims});
  }
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kF8}) {
    // Blocks of 32 queries over four tiles, and whole tiles of sums.
    all.push_back({.columns = 300,
                   .rows = 100,
                   .queries = 2,
                   .k_head_dim = 64,
                   .v_head_dim = 64,
                   .k_dtype = dtype,
                   .v_dtype = dtype});
  }
  for (const int dims : {255, 256, 257}) {  // Rows of about 1,024 bytes.
    all.push_back({.columns = 600, .k_head_dim = dims});
  }
  for (const int splits : {1, 2, 3, 4, 63, 64, 65, 65535, 65536})
    all.push_back({.columns = 200, .splits = splits});
  return all;
}

TEST_F(AttentionOfSizes, AroundEachConstant) {
  const std::vector<Sizes> all = SizesAroundConstants();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Sizes& sizes = all[i];
    for (std::size_t number = 0; number < 2; ++number) {
      const Pick pick = SeededPick(2, 2 * i + number);
      Case drawn;
      drawn.columns = sizes.columns;
      drawn.rows = sizes.rows;
      drawn.kv_heads = sizes.kv_heads;
      drawn.heads = std::int64_t{sizes.queries} * sizes.kv_heads;
      drawn.k_head_dim = sizes.k_head_dim;
      drawn.v_head_dim = sizes.v_head_dim;
      DrawOptions(pick, drawn);
      drawn.options.splits = sizes.splits;
      drawn.sees_all = number % 2 == 0;
      DrawTensors(pick, drawn, sizes.k_dtype, sizes.v_dtype);
      Check(drawn, Products::kF32);
      Check(drawn, Products::kTerms);
      const Case in_bf16 = InBf16(std::move(drawn));
      Check(in_bf16, Products::kBf16);
      Check(in_bf16, Products::kEmulatedAmx);
      ASSERT_FALSE(HasFailure()) << "sizes " << i << ", case " << number;
    }
  }
}

TEST_F(AttentionOfSizes, TheEndsOfTheOptionsDoNotOverflow) {
  constexpr float kSmallest = 0x1p-50F;
  constexpr float kLargest = 0x1p50F;
  for (const DType dtype : {DType::kF32, DType::kF8, DType::kQ8}) {
    for (const float scale : {kSmallest, -kSmallest, kLargest, -kLargest}) {
      for (const float soft_cap : {0.F, kSmallest, kLargest}) {
        for (const float sink : {-kInfinity, -kLargest, kLargest}) {
          for (const int rows : {1, 70}) {
            Case drawn;
            drawn.columns = 70;
            drawn.rows = rows;
            drawn.heads = 2;
            drawn.k_head_dim = drawn.v_head_dim = 32;
            drawn.options.scale = scale;
            drawn.options.soft_cap = soft_cap;
            drawn.sinks = {sink, -kInfinity};
            DrawTensors(SeededPick(3, AsSize(rows)), drawn, dtype, dtype);
            Check(drawn, Products::kF32);
            Check(drawn, Products::kTerms);
            drawn.options.bf16_products = true;
            Check(drawn, Products::kBf16);
            Check(drawn, Products::kEmulatedAmx);
            ASSERT_FALSE(HasFailure())
                << DTypeName(dtype) << ", scale " << scale << ", soft_cap "
                << soft_cap << ", sink " << sink << ", rows " << rows;
          }
        }
      }
    }
  }
}

// Kernels read f8 in units of 256: a weight of 2^-122 times a V of 8 is 2^-127
// there, and tiles take it as 0.
TEST_F(AttentionOfSizes, FlushedProductsOfF8AreWithinTheBound) {
  constexpr std::int64_t kDims = 32;
  Case drawn;
  drawn.columns = 2;
  drawn.rows = 64;
  drawn.k_head_dim = drawn.v_head_dim = kDims;
  drawn.options.scale = 1;
  DenseTensor key = FilledTensor(DType::kF8, {kDims, 1, 2, 1}, 0);
  DenseTensor value = key;
  DenseTensor query = FilledTensor(DType::kF32, {kDims, 1, drawn.rows, 1}, 0);
  const auto store = [](const DenseTensor& to, std::int64_t i, std::int64_t row,
                        float number) {
    StoreElement(number, const_cast<std::byte*>(to.view().at(i, 0, row)),
                 to.dtype);
  };
  store(key, 0, 1, -1);
  store(value, 0, 1, 8);
  for (int row = 0; row < drawn.rows; ++row) {
    store(query, 0, row, 122 * std::numbers::ln2_v<float>);
  }
  drawn.key.view = key.view();
  drawn.value.view = value.view();
  drawn.query.view = query.view();
  drawn.exact_key = CopyOf(key.view(), DType::kF32);
  drawn.exact_value = CopyOf(value.view(), DType::kF32);
  drawn.mask = FilledTensor(DType::kF32, {2, drawn.rows, 1, 1}, 0);
  drawn.finite.assign(AsSize(drawn.rows), true);
  Check(drawn, Products::kTerms);
}

TEST(Attention, OfTheReferenceIsWithinTheBound) {
  auto twin = *MakeAttention("reference");
  for (int number = 0; number < 200; ++number) {
    const Case drawn = DrawCase(SeededPick(1, AsSize(number)));
    ExpectExact(drawn, Attend(drawn, *twin));
    ASSERT_FALSE(::testing::Test::HasFailure()) << "case " << number;
  }
}

// Where rows are fetched from, and when, changes no result.
TEST(Attention, HasTheSameBitsOnEachPath) {
  auto twin = *MakeAttention();
  for (int number = 0; number < 200; ++number) {
    Case drawn = DrawCase(SeededPick(5, AsSize(number)));
    if (number % 2 == 1) drawn = InBf16(std::move(drawn));
    optimized::ForceFastPaths(optimized::FastPaths::kOff);
    const Results off = Attend(drawn, *twin);
    optimized::ForceFastPaths(optimized::FastPaths::kOn);
    const Results on = Attend(drawn, *twin);
    optimized::ForceFastPaths(optimized::FastPaths::kAuto);
    ASSERT_TRUE(std::ranges::equal(on.out, off.out, HaveSameBits))
        << "case " << number;
    ExpectExact(drawn, on);
    ASSERT_FALSE(::testing::Test::HasFailure()) << "case " << number;
  }
}

// Products of bf16 have other results than products of f32 if there is an
// instruction for them, and otherwise the same results.
class AttentionInBf16 : public EachTarget {};

TEST_P(AttentionInBf16, DiffersFromF32IfItRounds) {
  const bool rounds = optimized::Bf16Multiplier() != nullptr;
  auto attention = *MakeAttention();
  int differing = 0;
  for (int number = 0; number < 20; ++number) {
    Case drawn = InBf16(DrawCase(SeededPick(1, AsSize(number))));
    const Results got = Attend(drawn, *attention);
    drawn.options.bf16_products = false;
    const Results plain = Attend(drawn, *attention);
    differing += std::memcmp(got.out.data(), plain.out.data(),
                             got.out.size() * sizeof(float)) != 0;
  }
  EXPECT_EQ(differing > 0, rounds);
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionInBf16,
                         ::testing::ValuesIn(optimized::SupportedTargets()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace kvtwin::props::attention
