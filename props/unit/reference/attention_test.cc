// The reference attention against its formula.

#include "reference/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

// Two tokens with K = V = 1 and 2, a query of 3, a scale of a half.
TEST(Attention, WeighsByTheProducts) {
  TestCache cache({}, "reference");
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  cache.Append(0, 0, {1, 2});
  const Eigen::MatrixXd query = Eigen::MatrixXd::Constant(1, 1, 3);
  const double seen =
      reference::Attend(*cache->Get(), VLayout::kPlain, 1, query, 0.5)(0, 0);
  const double one = std::exp(3 * 1 * 0.5);
  const double two = std::exp(3 * 2 * 0.5);
  EXPECT_NEAR(seen, (one * 1 + two * 2) / (one + two), 1e-12);
  // What weighs more than a double holds is all there is.
  EXPECT_EQ(
      reference::Attend(*cache->Get(), VLayout::kPlain, 1, query, 200)(0, 0),
      2);
  // What is infinite has no weight that could be told; it is not hidden.
  cache.Append(0, 2, {std::numeric_limits<float>::infinity()});
  EXPECT_TRUE(std::isnan(
      reference::Attend(*cache->Get(), VLayout::kPlain, 0, query, 0.5)(0, 0)));
}

}  // namespace
}  // namespace kvtwin::props
