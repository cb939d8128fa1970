// Fast paths that are forced on or off.

#include "optimized/fast_paths.h"

#include <gtest/gtest.h>

#include <thread>

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

TEST(FastPaths, ForcedOnesLeaveSmallWorkWhole) {
  using optimized::FastPaths;
  using optimized::SharesInTurn;
  EXPECT_FALSE(SharesInTurn::On());
  const SharesInTurn in_turn;
  for (const FastPaths use : {FastPaths::kOn, FastPaths::kOff}) {
    optimized::ForceFastPaths(use);
    EXPECT_FALSE(SharesInTurn::On());
    optimized::ForceFastPaths(FastPaths::kAuto);
    EXPECT_TRUE(SharesInTurn::On());
  }
  { const SharesInTurn again; }
  EXPECT_TRUE(SharesInTurn::On());
  bool other = true;
  std::thread([&] { other = SharesInTurn::On(); }).join();
  EXPECT_FALSE(other);
}

}  // namespace
}  // namespace kvtwin::props
