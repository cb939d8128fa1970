// Tests the shrinking of histories of pools.

#include <gtest/gtest.h>

#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "props/paged/faulty_pools.h"
#include "props/paged/paged_client.h"
#include "props/paged/paged_history.h"
#include "props/paged/paged_runner.h"
#include "props/testing/pools.h"

namespace kvtwin::props {
namespace {

// A fuzz run ends with the shortest history, whichever call fails.
TEST(PagedShrink, ShortensEveryFault) {
  for (const Wrong& wrong :
       {Wrong{.call = "Views"}, Wrong{.call = "SlotMapping", .throws = true},
        Wrong{.call = "Append", .throws = true}}) {
    SCOPED_TRACE(wrong.call);
    Subject subject;
    int runs = 0;
    subject.run_pool = [&](const PagedHistory& history,
                           const PoolRunOptions& options) {
      ++runs;
      return RunPaged(history, options.counts,
                      WrongPools(wrong, WrongIn::kOptimized));
    };
    const PagedFuzzResult result = FuzzPools(1, 500, subject);
    EXPECT_NE(TextOf(result.failure), "");
    EXPECT_LE(result.shrunk.ops.size(), 2U) << ToText(result.shrunk);
    // The search ends when nothing is plainer, long before its limit of 20,000.
    EXPECT_LT(runs, 1000);
  }
  // If one of two bugs is known, the other is found, even though the shortest
  // histories show the known bug.
  Subject subject;
  subject.name = "toy";
  subject.run_pool = [](const PagedHistory& history, const PoolRunOptions&) {
    Failure failure =
        PoolFailure(history.ops.size() < 3 ? "short: 1" : "long: 1");
    failure.step = history.ops.size();
    return RunResult{
        .ran = true, .operations = std::ssize(history.ops), .failure = failure};
  };
  const PagedFuzzResult result = FuzzPools(1, 10000, subject, {"toy-short"});
  EXPECT_EQ(TextOf(result.failure), "long: 1");
  EXPECT_EQ(result.shrunk.ops.size(), 3);
}

TEST(PagedShrink, EndsForPoolsThatCannotBeMade) {
  const PagedMaker none = [](const PagedSpec&, std::string_view)
      -> Result<std::unique_ptr<PagedPool>> { throw std::bad_alloc(); };
  EXPECT_EQ(TextOf(RunPaged(MakePagedHistory(1, 0), nullptr, none)),
            "exception: init: std::bad_alloc");
}

// Returns a subject whose views lose their last block from this many rows on.
Subject ForgetsLongSequences(int rows) {
  const Wrong wrong = {.views = [=](std::vector<PagedView>& views) {
    if (!views.empty() && views.back().start + views.back().length >= rows) {
      views.pop_back();
    }
  }};
  Subject subject;
  subject.run_pool = [=](const PagedHistory& history,
                         const PoolRunOptions& options) {
    return RunPaged(history, options.counts,
                    WrongPools(wrong, WrongIn::kOptimized));
  };
  return subject;
}

// One append has all tokens, whose number no append of the history has.
TEST(PagedShrink, JoinsAppends) {
  const auto history = ParsePagedHistory(
      "kvp1 block=1 blocks=9 most=9 | open 0 0 0 | append 0 1 0 | commit 0 1 0 "
      "| append 0 1 0 | commit 0 1 0 | append 0 1 0 | commit 0 1 0");
  ASSERT_TRUE(history.ok()) << history.status().message();
  const PagedHistory shrunk = Shrink(*history, ForgetsLongSequences(5));
  EXPECT_EQ(shrunk.ops.size(), 2U) << ToText(shrunk);
}

}  // namespace
}  // namespace kvtwin::props
