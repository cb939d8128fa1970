// Compares attention of both twins with the formula, within the derived bound,
// for random cases.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "core/index.h"
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

// Checks `few` random cases, or as many as the environment asks for.
void ExpectExactCases(std::string_view twin, int few) {
  auto attention = *MakeAttention(twin);
  const int count = CaseCount(few);
  for (int number = 0; number < count; ++number) {
    const Case drawn = DrawCase(SeededPick(1, AsSize(number)));
    ExpectExact(drawn, Attend(drawn, *attention));
    ASSERT_FALSE(::testing::Test::HasFailure()) << "case " << number;
  }
}

// Does the same with products of bf16, which have other results than those of
// f32 if there is an instruction for them.
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

class AttentionOnEachTarget : public EachTarget {};

TEST_P(AttentionOnEachTarget, IsWithinTheBound) {
  ExpectExactCases("optimized", 400);
}

TEST_P(AttentionOnEachTarget, IsWithinTheBoundInBf16) {
  ExpectExactCasesInBf16(optimized::Bf16Multiplier() == nullptr ? 20 : 300);
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionOnEachTarget,
                         ::testing::ValuesIn(optimized::SupportedTargets()),
                         [](const auto& info) { return info.param; });

// As on a processor with AMX, except that the tiles are emulated.
TEST(Attention, OfEmulatedTilesIsWithinTheBoundInBf16) {
  if (optimized::Bf16Multiplier() == nullptr) {
    GTEST_SKIP() << "AVX-512 BF16, which rounds the numbers, is not here";
  }
  optimized::ForceBf16Multiplier(optimized::MultiplyInTiles<EmulatedTiles>);
  const std::size_t before = EmulatedTiles::Multiplications();
  ExpectExactCasesInBf16(100);
  optimized::ForceBf16Multiplier(nullptr);
  EXPECT_GT(EmulatedTiles::Multiplications(), before);
  EXPECT_EQ(EmulatedTiles::TakeFaults(), std::vector<std::string>());
}

TEST(Attention, OfTheReferenceIsWithinTheBound) {
  ExpectExactCases("reference", 200);
}

}  // namespace
}  // namespace kvtwin::props::attention
