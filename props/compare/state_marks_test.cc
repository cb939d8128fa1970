// The coverage marks of recurrent caches and hybrids: what they count, and that
// random histories reach all of them.

#include <gtest/gtest.h>

#include <string_view>
#include <vector>

#include "props/history/speculate.h"
#include "props/testing/mark_rows.h"

namespace kvtwin::props {
namespace {

// Of the setups, "every=2 keep=2" keeps two checkpoints.
const std::vector<MarkRow> kRows = {
    {"state_inside",
     {"kind=recurrent every=2 keep=2 | put 0*3"},
     {"kind=recurrent every=2 keep=2 | put 0*2 | put 0*1",
      "kind=recurrent | put 0*3"}},
    {"state_passed_over",
     {"kind=recurrent every=2 keep=1 | put 0*5"},
     {"kind=recurrent every=2 keep=2 | put 0*5",
      "kind=recurrent every=2 keep=1 | put 0*3"}},
    {"state_evicted",
     {"kind=recurrent every=2 keep=1 | put 0*3 | put 0*3"},
     {"kind=recurrent every=2 keep=2 | put 0*3 | put 0*1"}},
    {"state_evicted_shared",
     {"kind=recurrent every=2 keep=1 | put 0*3 | copy 0>1:9 | put 0*3"},
     {"kind=recurrent every=2 keep=1 | put 0*3 | put 0*3",
      "kind=recurrent | put 0*3 | copy 0>1:9 | put 0*3"}},
    {"state_taken_back",
     {"kind=recurrent | put 0*2 | put 0*2 | drop 0:2-"},
     {"kind=recurrent every=1 keep=1 | put 0*2 | put 0*2 | drop 0:4-",
      "kind=recurrent | put 0*2 | put 0*2 | drop 0:1-"}},
    {"state_rollback",
     {"kind=recurrent every=2 keep=2 | put 0*3 | put 0*1 | put 0*1 | drop 0:2-",
      "kind=recurrent every=2 keep=2 | put 0*3 | put 0*2 | drop 0:2-"},
     {"kind=recurrent every=2 keep=2 | put 0*3 | put 0*2 | drop 0:3-"}},
    {"state_cut",
     {"kind=recurrent every=2 keep=2 | put 0*5 | drop 0:3-"},
     {"kind=recurrent every=2 keep=2 | put 0*5 | drop 0:2-"}},
    {"state_fork",
     {"kind=recurrent every=2 keep=2 | put 0*5 | copy 0>1:4"},
     {"kind=recurrent every=2 keep=2 | put 0*5 | copy 0>1:5",
      "kind=recurrent every=2 keep=2 | put 0*5 | copy 0>1:1"}},
    {"state_fork_cut",
     {"kind=recurrent every=2 keep=2 | put 0*5 | copy 0>1:3"},
     {"kind=recurrent every=2 keep=2 | put 0*5 | copy 0>1:4"}},
    {"pin_keeps",
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | put 0*1 | put 0*1"},
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | put 0*1",
      "kind=recurrent pins=1 every=1 keep=3 | put 0*1 | pin 0 | put 0*1 | "
      "put 0*1"}},
    {"pin_again",
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | pin 0"},
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | put 0*1 | pin 0",
      "kind=recurrent pins=1 | pin 0 | pin 0"}},
    {"pin_undone",
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | put 0*1 | pin 0"},
     {"kind=recurrent pins=2 | put 0*1 | pin 0 | put 0*1 | pin 0"}},
    {"pin_evicted",
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | put 0*1 | pin 0 | put 0*1"},
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | put 0*1 | pin 0",
      "kind=recurrent pins=1 | put 0*1 | put 0*1 | pin 0 | put 0*1"}},
    {"pin_forked",
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | put 0*1 | copy 0>1:2"},
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | copy 0>1:2",
      "kind=recurrent pins=1 | put 0*1 | put 0*1 | copy 0>1:2"}},
    {"pin_removed",
     {"kind=recurrent pins=1 | put 0*1 | put 0*1 | pin 0 | drop 0:1-"},
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | put 0*1 | drop 0:1-"}},
    {"draft_state_chain",
     {"kind=recurrent drafts=4 | put 0*2:-1"},
     {"kind=recurrent drafts=4 | put 0*2:-1,-1"}},
    {"draft_state_read",
     {"kind=recurrent drafts=4 | put 0*1:-1 | put 0*1:0"},
     {"kind=recurrent drafts=4 | put 0*2:-1 | put 0*1:-1"}},
    {"draft_state_first",
     {"kind=recurrent drafts=4 | put 0*1:-1"},
     {"kind=recurrent drafts=4 | put 0*1 | put 0*1:-1"}},
    {"commit_state_inside",
     {"kind=recurrent every=2 keep=1 drafts=4 | put 0*3:-1 | commit 0:0,0,0"},
     {"kind=recurrent every=2 keep=1 drafts=4 | put 0*3:-1 | commit 0:0,0"}},
    {"commit_state_evicts",
     {"kind=recurrent every=2 keep=1 drafts=4 | put 0*3 | put 0*1:-1 | "
      "commit 0:0"},
     {"kind=recurrent every=2 keep=1 drafts=4 | put 0*3 | put 0*1:-1 | "
      "commit 0:",
      "kind=recurrent every=2 keep=2 drafts=4 | put 0*3 | put 0*1:-1 | "
      "commit 0:0"}},
    {"commit_state_pin",
     {"kind=recurrent pins=1 drafts=4 | put 0*1 | pin 0 | put 0*1 | "
      "put 0*1:-1 | commit 0:0"},
     {"kind=recurrent pins=1 drafts=4 | put 0*1 | pin 0 | put 0*1:-1 | "
      "commit 0:0"}},
    {"hybrid_cut",
     {"kind=hybrid caches=causal/recurrent:e2:k2 | put 0*5 | drop 0:3-"},
     {"kind=hybrid caches=causal/recurrent:e2:k2 | put 0*5 | drop 0:4-",
      "kind=hybrid caches=causal/recurrent:e2:k2 | put 0*5 | drop 0:1-"}},
    {"hybrid_emptied",
     {"kind=hybrid caches=causal/recurrent:e2:k2 | put 0*5 | drop 0:1-"},
     {"kind=hybrid caches=causal/recurrent:e2:k2 | put 0*5 | drop 0:3-",
      "kind=hybrid caches=causal/recurrent:e2:k2 | put 0*5 | drop 0:0-"}},
    {"hybrid_fork_cut",
     {"kind=hybrid caches=causal/recurrent:e2:k2 | put 0*5 | copy 0>1:3"},
     {"kind=hybrid caches=causal/recurrent:e2:k2 | put 0*5 | copy 0>1:4"}},
    {"hybrid_full",
     {"kind=hybrid caches=causal/recurrent seqs=1 cap=2 | put 0*3"},
     {"kind=hybrid caches=causal/recurrent seqs=1 cap=3 | put 0*3",
      "kind=wrapper caches=causal/recurrent seqs=1 cap=2 | put 0*3"}},
};

TEST(StateMarks, AreHitByTheirOwnStateOnly) {
  CheckMarkRows(kRows, kFirstStateMark, "");
}

// A generator that no longer reaches one of these states is seen here.
TEST(StateMarks, AreAllReached) {
  CoverageCounts counts;
  for (std::uint64_t number = 0; number < 150; ++number) {
    const History history =
        MakeSpeculation(1, number, Kind::kHybrid, 200, /*cells_max=*/0);
    const RunResult result =
        RunHistory(history, TwinSubject("optimized"), {.counts = &counts});
    EXPECT_FALSE(result.failure) << number;
  }
  auto mark =
      std::ranges::find(kCoverageMarks, kFirstStateMark, &CoverageMark::name);
  for (; mark != kCoverageMarks.end(); ++mark) {
    EXPECT_GT(At(counts.hits, mark - kCoverageMarks.begin()), 0) << mark->name;
  }
}

// Each group of marks is asked for only if some of them are hit.
TEST(StateMarks, AreExpectedTogether) {
  const auto gaps = [](std::string_view hit) {
    CoverageCounts counts;
    const auto mark =
        std::ranges::find(kCoverageMarks, hit, &CoverageMark::name);
    At(counts.hits, mark - kCoverageMarks.begin()) = 1;
    std::string all;
    for (const std::string& gap : CoverageGaps(counts)) all += gap + "\n";
    return all;
  };
  EXPECT_EQ(gaps("filled").find("never: state_cut"), std::string::npos);
  EXPECT_NE(gaps("state_fork").find("never: state_cut"), std::string::npos);
  EXPECT_EQ(gaps("state_fork").find("never: draft_"), std::string::npos);
  EXPECT_EQ(gaps("state_fork").find("never: hybrid_"), std::string::npos);
  EXPECT_NE(gaps("draft_state_read").find("never: commit_state_pin"),
            std::string::npos);
  EXPECT_NE(gaps("hybrid_cut").find("never: hybrid_full"), std::string::npos);
}

}  // namespace
}  // namespace kvtwin::props
