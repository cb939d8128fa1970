// Compares the reference attention with its formula.

#include "reference/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

// Two tokens with K = V = 1 and 2, a query of 3, a scale of 0.5.
TEST(Attention, WeighsByTheProducts) {
  TestCache cache({}, "reference");
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  cache.Append(0, 0, {1, 2});
  const Eigen::MatrixXd query = Eigen::MatrixXd::Constant(1, 1, 3);
  const double seen =
      reference::Attend(*cache->Get(), VLayout::kPlain, 1, query, 0.5)(0, 0);
  const double weight = std::exp(3 * 1 * 0.5);
  const double two = std::exp(3 * 2 * 0.5);
  EXPECT_NEAR(seen, (weight * 1 + two * 2) / (weight + two), 1e-12);
  // A token whose weight overflows a double outweighs all others.
  EXPECT_EQ(
      reference::Attend(*cache->Get(), VLayout::kPlain, 1, query, 200)(0, 0),
      2);
  // An infinite score has no defined weight; its token is not hidden.
  cache.Append(0, 2, {std::numeric_limits<float>::infinity()});
  EXPECT_TRUE(std::isnan(
      reference::Attend(*cache->Get(), VLayout::kPlain, 0, query, 0.5)(0, 0)));
}

}  // namespace
}  // namespace kvtwin::props
