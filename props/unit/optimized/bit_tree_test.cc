// Sets of cells with one cell, and with each number of levels.

#include "optimized/bit_tree.h"

#include <gtest/gtest.h>

#include <cstddef>

namespace kvtwin::props {
namespace {

TEST(BitTree, HoldsItsLastCell) {
  for (const std::size_t size : {1U, 64U, 65U, 5000U}) {
    optimized::BitTree set(size);
    EXPECT_EQ(set.First(), optimized::kNone);
    EXPECT_EQ(set.Last(), optimized::kNone);
    EXPECT_EQ(set.NextWord(0), optimized::kNone);
    EXPECT_TRUE(set.empty());
    const std::size_t last = size - 1;
    set.Set(last);
    EXPECT_FALSE(set.empty());
    EXPECT_EQ(set.First(), last);
    EXPECT_EQ(set.Last(), last);
    EXPECT_EQ(set.NextWord(0), last / 64);
    EXPECT_EQ(set.NextWord(set.word_count()), optimized::kNone);
    EXPECT_EQ(last == 0 ? optimized::kNone : set.Prev(last - 1),
              optimized::kNone);
    set.SetWord(last / 64, 0);
    EXPECT_TRUE(set.empty());
  }
}

// The set gains a level at 64, 4,096 and 262,144 cells, with one cell in it.
TEST(BitTree, GainsALevelAtEachPowerOf64) {
  for (const std::size_t n : {64U, 4096U, 262144U, 16777216U}) {
    optimized::BitTree set(n + 1);
    for (const std::size_t cell : {n, n - 1, std::size_t{0}}) {
      set.Set(cell);
      EXPECT_EQ(set.First(), cell);
      EXPECT_EQ(set.Last(), cell);
      EXPECT_EQ(set.Next(cell), cell);
      EXPECT_EQ(set.Next(cell + 1), optimized::kNone);
      EXPECT_EQ(set.NextWord(0), cell / 64);
      EXPECT_EQ(set.empty(), false);
      set.Clear(cell);
      EXPECT_EQ(set.First(), optimized::kNone);
      EXPECT_EQ(set.Last(), optimized::kNone);
      EXPECT_EQ(set.empty(), true);
    }
  }
}

}  // namespace
}  // namespace kvtwin::props
