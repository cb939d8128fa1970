// Compares sets of cells, as a list of words and as bits, with std::set.

#include "optimized/cell_set.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "optimized/fast_paths.h"

namespace kvtwin::props {
namespace {

using optimized::CellSet;
using optimized::FastPaths;
using optimized::kNone;
using optimized::kWordBits;

class Sets {
 public:
  Sets(std::uint32_t seed, std::size_t cells)
      : random_(seed), cells_(cells), set_(cells) {}

  // There are phases of few and of many cells, so that the set changes its
  // form.
  void Change() {
    const std::size_t cell = Pick(cells_);
    switch (Pick(8)) {
      case 0:
        return SetWord(cell / kWordBits);
      case 1:
        if (Pick(20) == 0) Clear();
        return;
      case 2:
      case 3:
        if (expected_.empty()) return;
        return Remove(*expected_.lower_bound(Pick(*expected_.rbegin() + 1)));
      case 4:
        set_.Trim(expected_.size());
        return;
      default:
        expected_.insert(cell);
        set_.Set(cell);
    }
  }

  void Check() {
    ASSERT_EQ(set_.First(), expected_.empty() ? kNone : *expected_.begin());
    ASSERT_EQ(set_.Last(), expected_.empty() ? kNone : *expected_.rbegin());
    const std::size_t cell = Pick(cells_);
    const auto next = expected_.lower_bound(cell);
    ASSERT_EQ(set_.Next(cell), next == expected_.end() ? kNone : *next);
    const std::size_t words = optimized::WordsFor(cells_);
    const std::size_t begin = Pick(words);
    const std::size_t end = begin + 1 + Pick(words - begin);
    std::vector<std::uint64_t> scratch(end - begin, 1);
    const std::uint64_t* found = set_.Words(begin, end, scratch.data());
    for (std::size_t w = begin; w < end; ++w) {
      ASSERT_EQ(found[w - begin], DueWord(w));
      ASSERT_EQ(set_.word(w), DueWord(w));
    }
  }

 private:
  std::size_t Pick(std::size_t count) { return random_() % count; }

  std::uint64_t DueWord(std::size_t w) const {
    std::uint64_t word = 0;
    const auto end = expected_.lower_bound((w + 1) * kWordBits);
    for (auto at = expected_.lower_bound(w * kWordBits); at != end; ++at) {
      word |= std::uint64_t{1} << *at % kWordBits;
    }
    return word;
  }

  void Remove(std::size_t cell) {
    expected_.erase(cell);
    set_.Clear(cell);
  }

  void SetWord(std::size_t w) {
    const std::uint64_t word = Pick(2) == 0 ? 0 : random_() & 0xFFu;
    for (std::size_t i = 0; i < kWordBits; ++i) {
      const std::size_t cell = w * kWordBits + i;
      expected_.erase(cell);
      if ((word >> i & 1) != 0 && cell < cells_) expected_.insert(cell);
    }
    set_.SetWord(w, DueWord(w));
  }

  void Clear() {
    expected_.clear();
    set_.ClearAll();
  }

  std::mt19937 random_;
  std::size_t cells_;
  CellSet set_;
  std::set<std::size_t> expected_;
};

TEST(CellSet, AgreesWithAStdSet) {
  for (const FastPaths use :
       {FastPaths::kAuto, FastPaths::kOn, FastPaths::kOff}) {
    optimized::ForceFastPaths(use);
    for (const std::size_t cells : {1U, 64U, 65U, 700U, 3000U, 20'000U}) {
      for (std::uint32_t seed = 0; seed < 3; ++seed) {
        Sets sets(seed, cells);
        for (int step = 0; step < 600; ++step) {
          sets.Change();
          SCOPED_TRACE(testing::Message() << cells << " cells, seed " << seed
                                          << ", step " << step);
          ASSERT_NO_FATAL_FAILURE(sets.Check());
        }
      }
    }
  }
  optimized::ForceFastPaths(FastPaths::kAuto);
}

}  // namespace
}  // namespace kvtwin::props
