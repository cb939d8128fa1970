// Compares attention of both twins with the formula, within the derived bound,
// for random cases.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/index.h"
#include "core/names.h"
#include "kvtwin/attention.h"
#include "optimized/amx_products.h"
#include "optimized/attention_bf16.h"
#include "optimized/targets.h"
#include "props/history/generate.h"
#include "props/testing/each_target.h"
#include "props/unit/attention/amx_emulator.h"
#include "props/unit/attention/attention_case.h"

namespace kvtwin::props::attention {
namespace {

// Each case is drawn, and computed in double, once for all instruction sets.
class AttentionOfSizes : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_TRUE(optimized::SelectTarget(before_)); }
  static void TearDownTestSuite() {
    for (const auto& [name, error] : largest_) {
      std::printf("%-7s K of %-8s: errors of at most %.3f bounds\n",
                  name.first.c_str(), name.second.c_str(), error);
    }
  }

  void Check(const Case& drawn) {
    const std::vector<ExactRow> exact = ExactRows(drawn);
    const std::string dtype(DTypeName(drawn.key.view.dtype));
    for (const std::string& target : targets_) {
      SCOPED_TRACE(target);
      ASSERT_TRUE(optimized::SelectTarget(target));
      double& largest = largest_[{target, dtype}];
      largest =
          std::max(largest, LargestError(drawn, exact, Attend(drawn, *twin_)));
    }
  }

  const std::vector<std::string> targets_ = optimized::SupportedTargets();

 private:
  // For each instruction set and dtype of K, in bounds.
  inline static std::map<std::pair<std::string, std::string>, double> largest_;

  const std::string before_ = optimized::ActiveTarget();
  std::unique_ptr<Attention> twin_ = *MakeAttention();
};

// The random cases are dealt out to this many tests, which can run at once.
constexpr int kDeals = 4;

class AttentionOnEachTarget : public AttentionOfSizes,
                              public ::testing::WithParamInterface<int> {};

TEST_P(AttentionOnEachTarget, IsWithinTheBound) {
  const int count = CaseCount(2000);
  int checked = 0;
  for (int number = GetParam(); number < count; number += kDeals) {
    Check(DrawCase(SeededPick(1, AsSize(number))));
    ASSERT_FALSE(HasFailure()) << "case " << number;
    if (++checked % 10'000 == 0) {
      std::printf("%d cases on %d targets\n", checked, Size(targets_));
      std::fflush(stdout);
    }
  }
  std::printf("%d cases on %d targets: 0 differences\n", checked,
              Size(targets_));
}

INSTANTIATE_TEST_SUITE_P(Deals, AttentionOnEachTarget,
                         ::testing::Range(0, kDeals));

// Sizes around each constant of the optimized twin.
TEST_F(AttentionOfSizes, AroundEachConstant) {
  struct Sizes {
    int columns = 70;
    int rows = 1;
    int queries = 1;  // For each KV head and row.
    int kv_heads = 1;
    int k_head_dim = 3;
    int v_head_dim = 2;
    int splits = 0;
  };
  std::vector<Sizes> all;
  for (const int tiles : {1, 2, 8, 9, 15, 16, 24, 127, 128, 129, 136, 144}) {
    for (const int more : {-1, 0, 1}) {
      all.push_back({.columns = 64 * tiles + more});
      all.push_back({.columns = 64 * tiles + more, .queries = 9});
    }
  }
  for (const int kv_heads : {15, 16, 17}) {
    all.push_back({.columns = 1100, .rows = 2, .kv_heads = kv_heads});
  }
  for (const int rows : {2, 4, 6, 7, 15, 16, 17, 63, 64, 65, 127, 128, 129}) {
    all.push_back({.rows = rows});
    all.push_back({.rows = rows, .queries = 2});
  }
  for (int queries = 2; queries <= 17; ++queries) {
    all.push_back({.queries = queries, .kv_heads = 2});
  }
  for (const int dims : {1, 4, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129}) {
    all.push_back({.k_head_dim = dims, .v_head_dim = dims});
    all.push_back({.rows = 7, .k_head_dim = dims, .v_head_dim = dims});
  }
  for (const int splits : {1, 2, 3, 4, 63, 64, 65, 65535, 65536}) {
    all.push_back({.columns = 200, .splits = splits});
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Sizes& sizes = all[i];
    for (std::size_t number = 0; number < 4; ++number) {
      const Pick pick = SeededPick(2, 4 * i + number);
      Case drawn;
      drawn.columns = sizes.columns;
      drawn.rows = sizes.rows;
      drawn.kv_heads = sizes.kv_heads;
      drawn.heads = sizes.queries * sizes.kv_heads;
      drawn.k_head_dim = sizes.k_head_dim;
      drawn.v_head_dim = sizes.v_head_dim;
      DrawOptions(pick, drawn);
      drawn.options.splits = sizes.splits;
      drawn.sees_all = number % 2 == 0;
      DrawTensors(pick, drawn, DType::kF32, DType::kF16);
      Check(drawn);
      ASSERT_FALSE(HasFailure()) << "sizes " << i << ", case " << number;
    }
  }
}

TEST(Attention, OfTheReferenceIsWithinTheBound) {
  auto twin = *MakeAttention("reference");
  for (int number = 0; number < 200; ++number) {
    const Case drawn = DrawCase(SeededPick(1, AsSize(number)));
    ExpectExact(drawn, Attend(drawn, *twin));
    ASSERT_FALSE(::testing::Test::HasFailure()) << "case " << number;
  }
}

// Checks `few` random cases with products of bf16, which have other results
// than those of f32 if there is an instruction for them.
void ExpectExactCasesInBf16(int few) {
  auto attention = *MakeAttention();
  const int count = CaseCount(few);
  bool differs = false;
  for (int number = 0; number < count; ++number) {
    Case drawn = InBf16(DrawCase(SeededPick(1, AsSize(number))));
    drawn.options.bf16_products = false;
    const Results plain = Attend(drawn, *attention);
    drawn.options.bf16_products = true;
    const Results got = Attend(drawn, *attention);
    ExpectExact(drawn, got);
    ASSERT_FALSE(::testing::Test::HasFailure()) << "case " << number;
    differs = differs || std::memcmp(got.out.data(), plain.out.data(),
                                     got.out.size() * sizeof(float)) != 0;
  }
  EXPECT_EQ(differs, optimized::Bf16Multiplier() != nullptr);
}

class AttentionInBf16 : public EachTarget {};

TEST_P(AttentionInBf16, IsWithinTheBound) {
  ExpectExactCasesInBf16(optimized::Bf16Multiplier() == nullptr ? 20 : 300);
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionInBf16,
                         ::testing::ValuesIn(optimized::SupportedTargets()),
                         [](const auto& info) { return info.param; });

// As on a processor with AMX, except that the tiles are emulated. They are not
// used without AVX-512 BF16, which rounds the numbers.
TEST(Attention, OfEmulatedTilesIsWithinTheBoundInBf16) {
  const bool rounds = optimized::Bf16Multiplier() != nullptr;
  optimized::ForceBf16Multiplier(optimized::MultiplyInTiles<EmulatedTiles>);
  const std::size_t before = EmulatedTiles::Multiplications();
  ExpectExactCasesInBf16(100);
  optimized::ForceBf16Multiplier(nullptr);
  EXPECT_EQ(EmulatedTiles::Multiplications() > before, rounds);
  EXPECT_EQ(EmulatedTiles::TakeFaults(), std::vector<std::string>());
}

}  // namespace
}  // namespace kvtwin::props::attention
