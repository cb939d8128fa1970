// Caches with more cells than the sizes at which the optimized twin changes its
// method: words of 64 cells, levels of its trees, its tables of sequences.

#include "optimized/causal.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "kvtwin/cache.h"
#include "optimized/targets.h"
#include "props/history/history.h"
#include "props/testing/agreement.h"
#include "props/testing/each_target.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

class CausalOn : public EachTarget {};
INSTANTIATE_TEST_SUITE_P(Targets, CausalOn,
                         ::testing::ValuesIn(optimized::SupportedTargets()),
                         TwinTestName);

TEST_P(CausalOn, AgreesWithTheReferenceAtItsLimits) {
  for (const std::string line : {
           // A token at the largest position, removed by the open end and by a
           // range that ends there.
           "kvt1 | put 0*1@+2147483632 | put 0*1@+100 | drop 0:5-",
           "kvt1 | put 0*1@+2147483632 | put 0*1@+100 | drop 0:5-^100",
           "kvt1 shift=add | put 0*2 | put 0*1@+2147483632 | put 0*1@+100 | "
           "drop 0:1-2",
           "kvt1 kind=encoder seqs=1 batch=20 | put 0*20@+2147483632 image=19 "
           "| drop 0:5-",
           "kvt1 kind=encoder seqs=1 | put 0*1@+9 image=0 | drop 0:0-9",
           "kvt1 kind=encoder seqs=1 | put 0*1@+9 image=0 | drop 0:0-10",
           // More sequences than the first table of ids holds.
           "kvt1 cap=40 batch=40 | put 0*1 1*1 2*1 3*1 4*1 5*1 6*1 7*1 8*1 9*1 "
           "10*1 11*1 12*1 13*1 14*1 15*1 16*1 17*1 | drop 9:0- | drop 3:0- | "
           "put 20*1 3*1 | copy 17>9:1",
           // Whole vectors of pairs, and heads of several widths.
           "kvt1 shift=rope dims=96,2,3 | put 0*3 | drop 0:0-1 | put 0*1",
           "kvt1 shift=rope_halves dims=96,2,3 | put 0*3 | drop 0:0-1 | put "
           "0*1",
           "kvt1 shift=rope dims=1,1,1 | put 0*3 | drop 0:0-1 | put 0*1",
           "kvt1 shift=tag_add dims=1,2,1 | put 0*3 | drop 0:0-1 | put 0*1",
           "kvt1 shift=add | put 0*3 | drop 0:1-1 | put 0*1",
           // A sequence over several words, some of which have none of its
           // cells.
           "kvt1 kind=swa window=3 cap=300 batch=300 seqs=1 shift=add | "
           "put 0*20 | put 1*130 | put 0*20 | drop 1:3-9 | put 0*1 | put 1*1",
           "kvt1 cap=400 batch=200 shift=add | put 0*3 | put 1*200 | put 0*3 | "
           "drop 0:1-2 | put 0*1 | drop 1:4-190 | put 0*90",
       }) {
    ExpectAgreement(line);
  }
}

TEST(Causal, ATokenWithSeveralOwners) {
  for (const int n : {63, 64, 65, 127, 128, 129, 300}) {
    ExpectAgreement(fmt::format(
        "kvt1 cap=8 shift=add | put 0*2 | copy 0>1-{0}:1 | put {0}*1 | "
        "drop {0}:0-1 | drop {0}:0- | put {0}*1 {1}*1 | copy {0}>0:2 | "
        "drop 0:0-",
        n - 1, n / 2));
  }
  // Owners after many others hold a token, which must not be shifted.
  for (const int n : {63, 64, 65, 128}) {
    ExpectAgreement(fmt::format(
        "kvt1 cap=1 seqs=200 batch=200 shift=add | put 0-{0}*1 | put {1}*2 | "
        "copy {1}>{2}-{3}:2 | drop {1}:0- | drop {2}:0-1 | drop {3}:0- | "
        "drop {2}:0-1",
        n - 1, n, n + 1, n + 3));
  }
}

TEST(Causal, SequencesWithUnsharedTokens) {
  for (const int n : {15, 16, 17, 63, 64, 65, 129}) {
    ExpectAgreement(fmt::format(
        "kvt1 seqs=1 cap={2} batch={2} | put 0-{0}*1 except={0} | drop {0}:0- "
        "| put {0}*2 0*1 | drop {1}:0- | copy {0}>{1}:2 | put {1}*1",
        n - 1, n / 2, n + 4));
  }
}

TEST(Causal, IndicesOfExceptedTokens) {
  for (const int n : {31, 32, 33, 63, 64, 65, 66, 127, 128, 129, 255, 256}) {
    ExpectAgreement(fmt::format(
        "kvt1 cells={0} dims=1,1,1 | put 0*{0} except={1} | causal {1},{2} | "
        "causal",
        n + 4, n, n - 1));
  }
}

// Two sequences use nearly all cells; the free ones are 5 in a row at the end,
// and each 700th.
CacheState Crowded(int cells) {
  CacheState state;
  for (int cell = 0; cell + 5 < cells; ++cell) {
    if (cell % 700 != 699) state.cells.push_back({cell, cell, cell / 96 % 2});
  }
  return state;
}

void ExpectSamePass(Cache& a, Cache& b) {
  std::vector<CellEntry> a_cells;
  std::vector<CellEntry> b_cells;
  a.ListCells(a_cells);
  b.ListCells(b_cells);
  ASSERT_EQ(a_cells, b_cells);
  const float one = 1;
  const auto tokens = std::ssize(a.BatchCells());
  TensorView rows = DenseView(&one, DType::kF32, {1, 1, tokens, 1});
  rows.stride = {0, 0, 0, 1};  // Of one element.
  ASSERT_TRUE(a.Put(rows, rows).ok() && b.Put(rows, rows).ok());
  const KvView expected = *a.Get();
  const KvView actual = *b.Get();
  ASSERT_EQ(actual.first_cell, expected.first_cell);
  ASSERT_EQ(actual.mask.shape, expected.mask.shape);
  const auto bytes = AsSize(expected.mask.shape[0]) * 4;
  for (std::int64_t row = 0; row < expected.mask.shape[1]; ++row) {
    ASSERT_EQ(
        0, std::memcmp(expected.mask.at(0, row), actual.mask.at(0, row), bytes))
        << "row " << row;
  }
}

void ExpectSameIn(int cells, Placement placement) {
  SCOPED_TRACE(cells);
  CacheSpec spec;
  spec.placement = placement;
  spec.shift.kind = ShiftKind::kIdentity;
  std::array<std::unique_ptr<Cache>, 2> twins = {*MakeCache(spec, "reference"),
                                                 *MakeCache(spec, "optimized")};
  const auto both = [&](const auto& call) {
    const auto first = call(*twins[0]);
    ASSERT_EQ(first.code(), call(*twins[1]).code());
  };
  const CacheState state = Crowded(cells);
  both([&](Cache& c) { return c.Init({DType::kF32, 1, cells, 8}); });
  both([&](Cache& c) { return c.Restore(state); });
  const auto pass = [&](std::vector<int> sequences) {
    std::vector<std::int32_t> positions(sequences.size(), cells);
    both([&](Cache& c) {
      return c.StartForward({positions, sequences}, false);
    });
    ASSERT_NO_FATAL_FAILURE(ExpectSamePass(*twins[0], *twins[1]));
  };
  ASSERT_NO_FATAL_FAILURE(pass({0, 1, 0, 1, 0}));  // At the end of the cells.
  both([&](Cache& c) { return c.Remove(0, cells / 2, cells / 2 + 97); });
  both([&](Cache& c) { return c.CopyPrefix(1, 2, cells / 2); });
  ASSERT_NO_FATAL_FAILURE(pass({0, 2, 2}));
  // The free cells lie apart, so the last tokens move.
  both([&](Cache& c) { return c.Remove(2, cells / 3, cells / 3 + 4); });
  ASSERT_NO_FATAL_FAILURE(pass({1, 1, 1, 1, 1, 1, 1, 0}));
  both([&](Cache& c) { return c.Remove(1, 0, kOpenEnd); });
  ASSERT_NO_FATAL_FAILURE(pass({3, 0}));
}

TEST(Causal, CellsOfACache) {
  for (const int cells : {2047, 2048, 2049, 4095, 4096, 4097, 65535, 65536,
                          65537, 131072 + 1, 262144 + 1}) {
    for (const Placement placement :
         {Placement::kContiguous, Placement::kScatter}) {
      ASSERT_NO_FATAL_FAILURE(ExpectSameIn(cells, placement));
    }
  }
}

class CausalWith : public EachPath {};
INSTANTIATE_TEST_SUITE_P(Paths, CausalWith, ::testing::ValuesIn(kEachPath),
                         EachPath::Name);

// Between two passes of a sequence, more words change than are recorded; and
// its window moves by more cells.
TEST_P(CausalWith, ChangesBetweenPasses) {
  for (const int words : {31, 32, 33, 34}) {
    ExpectAgreement(
        fmt::format("kvt1 shift=add seqs=1 cap=2600 batch=1200 dims=1,1,1 | "
                    "start 0*1200 | start 0*1150 | put 0*1 | drop 0:64-{} | "
                    "put 0*1 | put 0*1",
                    64 + words * 64));
    ExpectAgreement(
        fmt::format("kvt1 kind=swa_mem window=200 memory=900 seqs=1 cap=1000 "
                    "batch=300 dims=1,1,1 | start 0*300 | put 0*1 | put 0*1@+{}"
                    " | put 0*1@-{}",
                    words, words));
    // The changed words are the words that sequence 0 leaves to 1, and the word
    // that gets a token of sequence 0: the first of them counts as well.
    const int tokens = (words - 1) * 64;
    ExpectAgreement(
        fmt::format("kvt1 seqs=2 cap=1200 batch=2200 dims=1,1,1 | start 0*{} | "
                    "copy 0>1:{} | put 0*1 | drop 0:64- | put 0*1",
                    tokens, tokens));
    // The same number of words lose all cells of one sequence, and one word
    // gains a cell; and the same number of cells leave a window. Another
    // sequence has cells on both sides, so that they stay in the view.
    ExpectAgreement(
        fmt::format("kvt1 shift=add seqs=1 cap=2600 batch=2400 dims=1,1,1 | "
                    "start 0*2300 | copy 0>1:2300 | put 0*1 1*1 | drop 0:{}- | "
                    "put 0*1 1*1",
                    64 * (36 - words + 1)));
    ExpectAgreement(
        fmt::format("kvt1 kind=swa_mem window=200 memory=900 seqs=2 cap=1000 "
                    "batch=300 dims=1,1,1 | start 1*300 | start 0*300 | "
                    "put 0*1 1*1 | put 0*1@+{0} 1*1 | put 0*1@-{0} 1*1",
                    words));
  }
}

class CausalOf : public EachTwin {};
INSTANTIATE_TEST_SUITE_P(Twins, CausalOf, ::testing::ValuesIn(TwinList()),
                         TwinTestName);

// Only whole words of 64 cells are shared.
TEST_P(CausalOf, FindsASharedTokenInAFullWord) {
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kIdentity;
  TestCache cache(spec, GetParam());
  ASSERT_EQ(cache.Init(3, 64, 64), StatusCode::kOk);
  const std::vector<float> tags(64, 1);
  cache.Append(5, 0, tags);
  cache.Append(6, 64, tags);
  ASSERT_TRUE(cache->CopyPrefix(6, 7, 128).ok());
  const Status refused = cache->Remove(7, 0, 10);
  EXPECT_EQ(refused.code(), StatusCode::kSharedCells);
  if (GetParam() == "optimized") {
    EXPECT_EQ(refused.message(),
              "sequence 7 shares its token at position 64, in cell 64, with "
              "another sequence");
  }
  EXPECT_EQ(cache->Remove(5, 0, 10).code(), StatusCode::kOk);
}

}  // namespace
}  // namespace kvtwin::props
