// The loops over words of cells, on each instruction set.

#include "optimized/kernels.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>

#include "optimized/targets.h"
#include "props/testing/each_target.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

class KernelsOn : public EachTarget {};
INSTANTIATE_TEST_SUITE_P(Targets, KernelsOn,
                         ::testing::ValuesIn(optimized::SupportedTargets()),
                         TwinTestName);

TEST_P(KernelsOn, FindTheOnlyCellOfSeveralWords) {
  std::array<std::int32_t, 192> positions = {};
  positions[70] = 5;
  const std::array<std::uint64_t, 3> words = {0, std::uint64_t{1} << 6, 0};
  const std::array<std::uint64_t, 3> free = {~words[0], ~words[1], ~words[2]};
  // The ranges are as wide as allowed.
  const std::array<optimized::PosRange, 3> ranges = {{{0, 9}, {0, 9}, {0, 9}}};
  const optimized::Members members = {.positions = positions.data(),
                                      .words = words.data(),
                                      .free = free.data(),
                                      .ranges = ranges.data(),
                                      .word_count = 3};
  EXPECT_EQ(FirstCellIn(members, {5, 5}), 70);
  EXPECT_EQ(LastCellIn(members, {5, 5}), 70);
  EXPECT_EQ(FirstCellIn(members, {6, 9}), SIZE_MAX);
  EXPECT_EQ(LastCellIn(members, {6, 9}), SIZE_MAX);
  const optimized::PosRange range =
      optimized::RangeOf(&positions[64], words[1]);
  EXPECT_EQ(range.first, 5);
  EXPECT_EQ(range.last, 5);
  optimized::AddToPositions(&positions[64], words[1], 2);
  EXPECT_EQ(positions[70], 7);
  EXPECT_EQ(positions[0], 0);
}

}  // namespace
}  // namespace kvtwin::props
