// The explorer of pools with groups: a fault is found on the shortest path.

#include "props/search/explore_pools.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "props/base/forwarding_pool.h"
#include "props/testing/pools.h"

namespace kvtwin::props {
namespace {

// Keeps a token that it was asked to drop.
class KeepsOneMore final : public ForwardingPool {
 public:
  using ForwardingPool::ForwardingPool;
  Status Truncate(int sequence, int len) override {
    const Result<int> all = SeqLen(sequence);
    const bool keeps = len == 1 && all.ok() && *all == 2;
    return ForwardingPool::Truncate(sequence, keeps ? 2 : len);
  }
};

PoolSpaceResult Explore(bool faulty) {
  const PagedMaker make =
      [&](const PagedSpec& spec,
          std::string_view twin) -> Result<std::unique_ptr<PagedPool>> {
    auto pool = MakePagedPool(spec, twin);
    if (!pool.ok() || twin == "reference" || !faulty) return pool;
    return std::unique_ptr<PagedPool>(
        std::make_unique<KeepsOneMore>(std::move(*pool)));
  };
  return ExploreSpace(PoolSpaces()[1], make, [](const PoolSpaceResult& so_far) {
    return so_far.states > 500;
  });
}

TEST(PoolExplorer, FindsAFaultOnTheShortestPath) {
  const PoolSpaceResult right = Explore(/*faulty=*/false);
  EXPECT_FALSE(right.failure) << TextOf(right.failure);
  EXPECT_FALSE(right.fixed_point);
  EXPECT_GT(right.states, 500);
  EXPECT_GT(right.transitions, 2000);
  const PoolSpaceResult wrong = Explore(/*faulty=*/true);
  ASSERT_TRUE(wrong.failure);
  EXPECT_FALSE(wrong.fixed_point);
  // Open, append two tokens, commit them, truncate to one.
  EXPECT_EQ(wrong.history.ops.size(), 4U) << ToText(wrong.history);
  EXPECT_EQ(wrong.history.ops.back().kind, PagedOpKind::kTruncate);
}

}  // namespace
}  // namespace kvtwin::props
