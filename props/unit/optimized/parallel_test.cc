// Work that is large enough is shared by threads.

#include "optimized/parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace kvtwin::props {
namespace {

TEST(Parallel, ThreadsShareLargeWork) {
  const auto threads = [](std::size_t bytes) {
    std::mutex mutex;
    std::set<std::thread::id> ids;
    std::size_t done = 0;
    optimized::ParallelFor(1000, bytes, [&](std::size_t) {
      const std::scoped_lock lock(mutex);
      ids.insert(std::this_thread::get_id());
      ++done;
    });
    EXPECT_EQ(done, 1000);
    return ids.size();
  };
  EXPECT_EQ(threads(1 << 20), 1);
#ifdef _OPENMP
  EXPECT_EQ(threads(1 << 22), omp_get_max_threads());
#else
  EXPECT_EQ(threads(1 << 22), 1);
#endif
}

// Each part of some work is done once, whatever its size.
TEST(Parallel, OneThreadDoesTheSharesInTurn) {
  constexpr std::size_t kItems = 100;
  std::set<std::size_t> counts;
  for (std::size_t bytes = 0; bytes < 400; bytes += 4) {
    EXPECT_EQ(optimized::ShareCount(bytes), 1);
    const optimized::SharesInTurn in_turn;
    const std::size_t shares = optimized::ShareCount(bytes);
    counts.insert(shares);
    std::vector<int> done(kItems);
    std::vector<std::size_t> order;
    optimized::ParallelShares(1, bytes, [&](std::size_t, auto share) {
      EXPECT_EQ(share.count, shares);
      order.push_back(share.index);
      for (std::size_t i = share.Begin(kItems); i < share.End(kItems); ++i) {
        ++done[i];
      }
    });
    EXPECT_TRUE(std::ranges::is_sorted(order, std::greater()));
    EXPECT_EQ(order.size(), shares);
    EXPECT_EQ(std::ranges::count(done, 1), kItems);
    std::set<std::size_t> workers;
    optimized::ParallelForUneven(kItems, bytes,
                                 [&](std::size_t i, auto worker) {
                                   workers.insert(worker);
                                   ++done[i];
                                 });
    EXPECT_EQ(workers.size(), shares);
    EXPECT_EQ(*workers.rbegin(), shares - 1);
    EXPECT_EQ(std::ranges::count(done, 2), kItems);
  }
  EXPECT_EQ(counts, (std::set<std::size_t>{1, 2, 3, 4}));
}

}  // namespace
}  // namespace kvtwin::props
