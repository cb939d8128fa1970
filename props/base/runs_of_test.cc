#include "props/base/runs_of.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace kvtwin::props {
namespace {

TEST(RunsOf, HasRunsOfEightNumbersOrMoreInShort) {
  EXPECT_EQ(RunsOf({}), "");
  EXPECT_EQ(RunsOf(std::vector{0, 1, 2, 3, 4, 5, 6}), "0 1 2 3 4 5 6");
  EXPECT_EQ(RunsOf(std::vector{0, 1, 2, 3, 4, 5, 6, 7}), "0 to 7");
  EXPECT_EQ(RunsOf(std::vector(7, -1)), "-1 -1 -1 -1 -1 -1 -1");
  EXPECT_EQ(RunsOf(std::vector(8, -1)), "8 times -1");
  EXPECT_EQ(RunsOf(std::vector{9, 3, 4, 5, 6, 7, 8, 9, 10, 12}),
            "9 3 to 10 12");
  EXPECT_EQ(RunsOf(std::vector{1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3, 4}),
            "9 times 1 2 3 4");
  const int largest = std::numeric_limits<int>::max();
  EXPECT_EQ(RunsOf(std::vector{largest, std::numeric_limits<int>::min()}),
            "2147483647 -2147483648");
}

}  // namespace
}  // namespace kvtwin::props
