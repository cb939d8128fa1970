// Work that is large enough is shared by threads.

#include "optimized/parallel.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <mutex>
#include <set>
#include <thread>

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

}  // namespace
}  // namespace kvtwin::props
