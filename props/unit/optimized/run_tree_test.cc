// Compares the tree of runs of free cells with a scan of all cells.

#include "optimized/run_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>

#include "optimized/bit_tree.h"

namespace kvtwin::props {
namespace {

using optimized::BitTree;
using optimized::kNone;
using optimized::kWordBits;
using optimized::RunTree;

std::size_t RunByScan(const BitTree& cells, std::size_t count) {
  std::size_t length = 0;
  for (std::size_t cell = 0; cell < cells.size(); ++cell) {
    length = cells.Test(cell) ? length + 1 : 0;
    if (length == count) return cell + 1 - count;
  }
  return kNone;
}

// Changes stretches of words in a tree of three levels, each word to an entry
// of `menu` (the same one if `alike`), and asks for up to 2^bits cells in a
// row.
void ExpectRuns(std::span<const std::uint64_t> menu, bool alike,
                std::size_t bits, std::uint32_t seed = 5) {
  constexpr std::size_t kWords = 1100;
  BitTree cells(kWords * kWordBits - 7);
  RunTree runs(cells);
  std::mt19937 random(seed);
  const auto pick = [&](std::size_t end) {
    return std::uniform_int_distribution<std::size_t>(0, end - 1)(random);
  };
  for (int step = 0; step < 60; ++step) {
    const std::size_t end = kWords - 1;  // The last word is partial.
    // The runs that are found lie near the beginning.
    const std::size_t first = step % 2 == 0 ? 0 : pick(end);
    const std::size_t last =
        std::min(end, first + pick(std::size_t{1} << (1 + step % 11)) + 1);
    const std::uint64_t chosen = menu[pick(menu.size())];
    for (std::size_t w = first; w < last; ++w) {
      cells.SetWord(w, alike ? chosen : menu[pick(menu.size())]);
      runs.Changed(w);
    }
    for (int i = 0; i < 8; ++i) {
      const std::size_t count = pick(std::size_t{1} << pick(bits + 1)) + 1;
      ASSERT_EQ(runs.Find(count), RunByScan(cells, count))
          << "step " << step << ", " << count << " cells";
    }
  }
}

TEST(RunTree, FindsRunsOverManyNodes) {
  const std::uint64_t menu[] = {~std::uint64_t{0}, ~std::uint64_t{0}, 0,
                                0xF0F0'FFFF'00FF'0F03};
  ExpectRuns(menu, /*alike=*/true, /*bits=*/16);
}

// The longest run of each word has the same length, but another place.
TEST(RunTree, FindsRunsAcrossWords) {
  const std::uint64_t menu[] = {
      0xFFFFF, std::uint64_t{0xFFFFF} << 20, std::uint64_t{0xFFFFF} << 20,
      std::uint64_t{0xFFFFF} << 20, std::uint64_t{0xFFFFF} << 44};
  ExpectRuns(menu, /*alike=*/false, /*bits=*/6);
}

}  // namespace
}  // namespace kvtwin::props
