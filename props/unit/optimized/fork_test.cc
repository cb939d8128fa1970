// After fork(), the child can do what the parent can, also on several threads.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "kvtwin/cache.h"
#include "kvtwin/save.h"

namespace kvtwin::props {
namespace {

constexpr int kTokens = 1000;
constexpr std::int64_t kHeadDim = 128;
constexpr std::int64_t kHeads = 8;

// A cache of 4 MiB of K rows, whose Remove uses several threads.
std::unique_ptr<Cache> Filled() {
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kRope;
  std::unique_ptr<Cache> cache = *MakeCache(spec);
  EXPECT_TRUE(cache->Init({DType::kF32, 1, kTokens, kTokens}).ok());
  std::vector<std::int32_t> positions;
  for (int i = 0; i < kTokens; ++i) positions.push_back(i);
  const std::vector<int> sequences(kTokens, 0);
  EXPECT_TRUE(cache->StartForward({positions, sequences}, false).ok());
  std::vector<float> numbers(kTokens * kHeads * kHeadDim);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = static_cast<float>(i % 1013);
  }
  const TensorView rows =
      DenseView(numbers.data(), DType::kF32, {kHeadDim, kHeads, kTokens, 1});
  EXPECT_TRUE(cache->Put(rows, rows).ok());
  return cache;
}

std::vector<std::byte> Removed(Cache& cache) {
  EXPECT_TRUE(cache.Remove(0, 0, 1).ok());
  return StateToBytes(*cache.Snapshot());
}

// Forks; the child removes from its copy of `cache`. Returns whether it
// finished in time with the expected bytes.
bool ChildRemoves(Cache& cache, const std::vector<std::byte>& expected) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // Ends a child that hangs.
    _exit(Removed(cache) == expected ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

class Fork : public testing::Test {
 protected:
#ifdef _OPENMP
  void SetUp() override { omp_set_num_threads(2); }
  void TearDown() override { omp_set_num_threads(threads_); }

 private:
  const int threads_ = omp_get_max_threads();
#endif
};

TEST_F(Fork, TheChildRemoves) {
  const std::vector<std::byte> expected = Removed(*Filled());
  const std::unique_ptr<Cache> cache = Filled();
  EXPECT_TRUE(ChildRemoves(*cache, expected));
  // The parent is unchanged, and so is a later child.
  EXPECT_TRUE(ChildRemoves(*cache, expected));
  EXPECT_EQ(Removed(*cache), expected);
}

TEST_F(Fork, TheChildOfAChildRemoves) {
  const std::vector<std::byte> expected = Removed(*Filled());
  const std::unique_ptr<Cache> cache = Filled();
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    const bool own_is_right = Removed(*Filled()) == expected;
    _exit(own_is_right && ChildRemoves(*cache, expected) ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// Some worker pools have a separate thread that forks.
TEST_F(Fork, TheChildOfAnotherThreadRemoves) {
  const std::vector<std::byte> expected = Removed(*Filled());
  const std::unique_ptr<Cache> cache = Filled();
  bool done = false;
  std::thread([&] {
    done = Removed(*Filled()) == expected && ChildRemoves(*cache, expected);
  }).join();
  EXPECT_TRUE(done);
  EXPECT_TRUE(ChildRemoves(*cache, expected));
}

}  // namespace
}  // namespace kvtwin::props
