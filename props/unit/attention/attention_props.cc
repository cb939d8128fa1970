// Compares attention of both twins with the formula, within the derived bound,
// for random cases.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/index.h"
#include "core/names.h"
#include "kvtwin/attention.h"
#include "optimized/targets.h"
#include "props/history/generate.h"
#include "props/unit/attention/attention_case.h"

namespace kvtwin::props::attention {
namespace {

// The random cases are dealt out to this many tests, which can run at once.
constexpr int kDeals = 4;

// Each case is drawn, and computed in double, once for all instruction sets.
class AttentionOnEachTarget : public ::testing::TestWithParam<int> {
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
      largest = std::max(largest,
                         LargestError(drawn, exact, Attend(drawn, *twin_)));
    }
  }

  const std::vector<std::string> targets_ = optimized::SupportedTargets();

 private:
  // For each instruction set and dtype of K, in bounds.
  inline static std::map<std::pair<std::string, std::string>, double> largest_;

  const std::string before_ = optimized::ActiveTarget();
  std::unique_ptr<Attention> twin_ = *MakeAttention();
};

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

TEST(Attention, OfTheReferenceIsWithinTheBound) {
  auto twin = *MakeAttention("reference");
  for (int number = 0; number < 200; ++number) {
    const Case drawn = DrawCase(SeededPick(1, AsSize(number)));
    ExpectExact(drawn, Attend(drawn, *twin));
    ASSERT_FALSE(::testing::Test::HasFailure()) << "case " << number;
  }
}

}  // namespace
}  // namespace kvtwin::props::attention
