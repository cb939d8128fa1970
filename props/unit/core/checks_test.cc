// Do the checks of core/assert.h stop what breaks a requirement? This program
// is compiled with KVTWIN_CHECKS in every build.

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/assert.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "core/wrapper.h"
#include "gtest/gtest.h"
#include "optimized/bit_tree.h"
#include "optimized/cell_set.h"
#include "optimized/cell_table.h"
#include "optimized/distinct.h"
#include "optimized/id_map.h"
#include "optimized/run_tree.h"

namespace kvtwin {
namespace {

using optimized::BitTree;
using optimized::CellMove;
using optimized::CellSet;
using optimized::CellTable;

const std::string kBug = "kvtwin bug: .* does not hold";

TEST(ChecksDeathTest, AnIndexIsInsideItsContainer) {
  std::vector<int> list = {1, 2};
  EXPECT_EQ(At(list, 1), 2);
  EXPECT_DEATH(At(list, 2), kBug);
  EXPECT_DEATH(At(list, -1), kBug);
  EXPECT_EQ(*IteratorAt(list, 1), 2);
  EXPECT_EQ(IteratorAt(list, 2), list.end());
  EXPECT_DEATH(IteratorAt(list, 3), kBug);
}

TEST(ChecksDeathTest, ANumberFitsItsType) {
  EXPECT_EQ(AsSize(3), 3U);
  EXPECT_DEATH(AsSize(-1), kBug);
  EXPECT_EQ(AsInt(std::int64_t{-3}), -3);
  EXPECT_DEATH(AsInt(std::int64_t{1} << 31), kBug);
  EXPECT_DEATH(AsInt(std::numeric_limits<std::size_t>::max()), kBug);
  EXPECT_EQ(Size(std::array{1, 2, 3}), 3);
}

TEST(ChecksDeathTest, AnEnumeratorIsAnIndex) {
  enum class Choice { kFirst, kSecond };
  const std::array names = {'a', 'b'};
  EXPECT_EQ(At(names, Choice::kSecond), 'b');
  EXPECT_DEATH(At(names, static_cast<Choice>(2)), kBug);
}

TEST(ChecksDeathTest, ACellIsInTheBitTree) {
  BitTree cells(70);
  cells.Set(69);
  EXPECT_DEATH(BitTree(0), kBug);
  EXPECT_DEATH(cells.Set(70), kBug);
  EXPECT_DEATH(cells.Clear(70), kBug);
  EXPECT_DEATH(cells.Test(70), kBug);
  EXPECT_DEATH(cells.Prev(70), kBug);
  EXPECT_EQ(cells.Next(70), optimized::kNone);
  EXPECT_DEATH(cells.Next(71), kBug);
  EXPECT_DEATH(cells.word(2), kBug);
  EXPECT_DEATH(cells.NextWord(3), kBug);
  EXPECT_DEATH(cells.SetWord(2, 0), kBug);
  cells.SetWord(1, 63);
  EXPECT_DEATH(cells.SetWord(1, 64), kBug);
}

TEST(ChecksDeathTest, ACellIsInTheCellSet) {
  CellSet cells(10'000);
  cells.Set(9'999);
  EXPECT_DEATH(CellSet(0), kBug);
  EXPECT_DEATH(cells.Set(10'000), kBug);
  EXPECT_DEATH(cells.Clear(10'000), kBug);
  EXPECT_DEATH(cells.Next(10'001), kBug);
  EXPECT_DEATH(cells.word(157), kBug);
  EXPECT_DEATH(cells.SetWord(157, 1), kBug);
  EXPECT_DEATH(cells.Words(2, 158, nullptr), kBug);
  EXPECT_DEATH(cells.Trim(2), kBug);
  cells.Trim(1);
}

TEST(ChecksDeathTest, AnIdIsInTheMapOnce) {
  optimized::IdMap<int> map;
  int value = 0;
  map.Insert(3, &value);
  EXPECT_DEATH(map.Insert(3, &value), kBug);
  EXPECT_DEATH(map.Insert(4, nullptr), kBug);
  EXPECT_DEATH(map.Erase(4), kBug);
}

TEST(ChecksDeathTest, ACellTableGetsWhatItRequires) {
  CellTable table(8, 2, /*max_ordered=*/0);
  std::vector<int> cells;
  EXPECT_DEATH(table.FindFree(9, cells), kBug);
  EXPECT_DEATH(table.FindRun(0), kBug);
  optimized::Sequence& sequence = table.Add(0, 3, 5);
  EXPECT_DEATH(table.Add(1, 3, 6), kBug);  // Another position.
  EXPECT_DEATH(table.CellsAt(sequence, {0, 5}), kBug);
  EXPECT_DEATH(table.DropOldest(sequence, 5), kBug);
  optimized::Selection selection;
  table.Select(sequence, {0, 5}, selection);
  EXPECT_DEATH(table.AddToSelected(sequence, selection, 1), kBug);
  EXPECT_DEATH(table.CopyPrefix(sequence, 0, 6, selection), kBug);
  table.Add(1, 3, 5);
  EXPECT_DEATH(table.AddToSelected(sequence, selection, -1), kBug);
}

TEST(ChecksDeathTest, CellsAreDistinct) {
  using optimized::AreDistinct;
  using optimized::AreIndependent;
  EXPECT_TRUE(AreDistinct({}));
  EXPECT_TRUE(AreDistinct(std::array{1, 2, 5}));
  EXPECT_TRUE(AreDistinct(std::array{5, 1, 2}));
  EXPECT_FALSE(AreDistinct(std::array{1, 1}));
  EXPECT_FALSE(AreDistinct(std::array{5, 1, 5}));
  const auto independent = [](const std::vector<CellMove>& moves) {
    return AreIndependent(moves);
  };
  EXPECT_TRUE(independent({}));
  EXPECT_TRUE(independent({{9, 0}, {8, 1}}));
  EXPECT_TRUE(independent({{8, 1}, {9, 0}}));
  EXPECT_FALSE(independent({{9, 0}, {8, 9}}));
  EXPECT_FALSE(independent({{9, 1}, {8, 1}}));
  EXPECT_FALSE(independent({{8, 1}, {8, 0}}));
}

TEST(ChecksDeathTest, AnElementIsInsideTheMask) {
  const DenseTensor mask = HidingMask(DType::kF32, 4, 2);
  EXPECT_FALSE(MaskAllows(mask.view(), 3, 1));
  EXPECT_DEATH(MaskAllows(mask.view(), 4, 1), kBug);
  EXPECT_DEATH(MaskAllows(mask.view(), 3, 2), kBug);
  EXPECT_DEATH(MaskAllows({}, 0, 0), kBug);
}

// Checked in every build.
TEST(ChecksDeathTest, AWrapperHasCaches) {
  EXPECT_DEATH(WrapperCache({}), kBug);
}

}  // namespace
}  // namespace kvtwin
