// Compares the reference attention with its formula.

#include "reference/attention.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "kvtwin/attention.h"
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

// A pool with a window frees the blocks before it: their entries in the table
// are -1, or name a block that does not exist. A twin that reads them crashes.
TEST(Attention, ReadsNoBlockBeforeTheWindow) {
  const DenseTensor ones = FilledTensor(DType::kF32, {1, 1, 2, 1}, 1);
  const DenseTensor query = FilledTensor(DType::kF32, {1, 1, 1, 1}, 1);
  const std::array<std::int32_t, 1> lengths = {4};
  const std::array<std::int32_t, 1> rows = {1};
  for (const std::int32_t gone : {-1, std::numeric_limits<int>::max()}) {
    const std::array<std::int32_t, 2> blocks = {gone, 0};
    for (const std::string twin : {"reference", "optimized"}) {
      auto attention = *MakeAttention(twin);
      ASSERT_TRUE(attention
                      ->Plan({.blocks = blocks,
                              .columns = 2,
                              .lengths = lengths,
                              .query_rows = rows,
                              .block_size = 2,
                              .window = 1})
                      .ok());
      float out = 0;
      ASSERT_TRUE(attention
                      ->Attend(query.view(),
                               {.key = ones.view(), .value = ones.view()},
                               PagedLayout::kTokenMajor, {}, {.out = &out})
                      .ok());
      EXPECT_EQ(out, 1) << twin;
    }
  }
}

// Two cells and one head, computed by hand.
TEST(Attention, IsAWeightedMean) {
  const std::vector<float> keys = {0, std::log(3.0F), 7};
  const std::vector<float> values = {4, 8, std::nanf("")};
  const std::vector<float> mask = {0,         0,         -INFINITY,
                                   -INFINITY, -INFINITY, -INFINITY};
  const KvView view{DenseView(keys.data(), DType::kF32, {1, 1, 3, 1}),
                    DenseView(values.data(), DType::kF32, {1, 1, 3, 1}),
                    DenseView(mask.data(), DType::kF32, {3, 2, 1, 1}), 0};
  const Eigen::MatrixXd queries = Eigen::MatrixXd::Constant(1, 2, 2.0);
  // Weights 1/4 and 3/4.
  const Eigen::MatrixXd seen =
      reference::Attend(view, VLayout::kPlain, 0, queries, 0.5);
  EXPECT_NEAR(seen(0, 0), 7, 1e-6);
  EXPECT_EQ(seen(0, 1), seen(0, 0));
  EXPECT_EQ(reference::Attend(view, VLayout::kPlain, 1, queries, 0.5).norm(),
            0);
}

}  // namespace
}  // namespace kvtwin::props
