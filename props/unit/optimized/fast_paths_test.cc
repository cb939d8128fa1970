// Fast paths that are forced on or off.

#include "optimized/fast_paths.h"

#include <gtest/gtest.h>

namespace kvtwin::props {
namespace {

TEST(FastPaths, AreForced) {
  using optimized::FastPaths;
  EXPECT_EQ(optimized::FastPathsFromName(""), FastPaths::kAuto);
  EXPECT_EQ(optimized::FastPathsFromName("on"), FastPaths::kOn);
  EXPECT_EQ(optimized::FastPathsFromName("off"), FastPaths::kOff);
  EXPECT_FALSE(optimized::FastPathsFromName("of"));
  EXPECT_FALSE(optimized::FastPathsFromName("one"));
  for (const bool pays : {false, true}) {
    optimized::ForceFastPaths(FastPaths::kOn);
    EXPECT_TRUE(optimized::TakeFastPath(pays));
    optimized::ForceFastPaths(FastPaths::kOff);
    EXPECT_FALSE(optimized::TakeFastPath(pays));
    optimized::ForceFastPaths(FastPaths::kAuto);
    EXPECT_EQ(optimized::TakeFastPath(pays), pays);
  }
}

}  // namespace
}  // namespace kvtwin::props
