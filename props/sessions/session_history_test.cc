// Histories of sessions: their text, the search, and the shrinker.

#include "props/sessions/session_history.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>

#include "props/search/explain.h"
#include "props/search/fuzz.h"
#include "props/sessions/faulty_sessions.h"
#include "props/sessions/session_runner.h"

namespace kvtwin::props {
namespace {

TEST(SessionHistories, LinesAreReadBackAsWritten) {
  for (std::uint64_t number = 0; number < 20; ++number) {
    const std::string text = ToText(MakeSessionHistory(3, number));
    const auto read = ParseSessionHistory(text);
    ASSERT_TRUE(read.ok()) << read.status().ToString();
    EXPECT_EQ(ToText(*read), text);
  }
  EXPECT_EQ(ToText(*ParseSessionHistory("kvs1 7 | step | step 1 2")),
            "kvs1 7 | step | step 1 2");
  EXPECT_EQ(ToText(*ParseSessionHistory("kvs1")), "kvs1");
  for (const char* text :
       {"", "kvt1", "kvs1 -1", "kvs1 1000", "kvs1 1x", "kvs12", "kvs1  1",
        "kvs1 | stop", "kvs1 | step 99999999999", "step 1"}) {
    EXPECT_FALSE(ParseSessionHistory(text).ok()) << text;
  }
}

TEST(SessionHistories, TheSearchReachesRareEventsAndFindsNothing) {
  for (const char* twin : {"optimized", "reference"}) {
    FuzzOptions options;
    options.operations = 30000;
    options.seed = 5;
    options.threads = 2;
    const SessionFuzzResult result = FuzzSessions(options, TwinSubject(twin));
    EXPECT_EQ(result.failure ? FailureText(*result.failure) : "", "");
    EXPECT_GT(result.counts.judged, 30000);
    EXPECT_GT(result.counts.gauges.forks, 100);
    EXPECT_GT(result.counts.gauges.shifts, 100);
    EXPECT_GT(result.counts.gauges.reprocessed, 20);
    EXPECT_GT(result.counts.gauges.missed, 10);
    EXPECT_GT(result.counts.adopted, 100);
    EXPECT_GT(result.counts.replayed, 50);
  }
}

// Faults are shrunk to short lines that still show them. (Others write past
// their lists in some plays, and would end the program.)
TEST(SessionHistories, FaultsAreShrunkToShortLines) {
  const std::set<std::string> shrinkable = {
      "copies_one_token_too_few", "forgets_who_came_last",
      "keeps_a_stop_string", "resumes_without_a_window"};
  std::size_t tried = 0;
  for (const FaultySessions& faulty : AllFaultySessions()) {
    if (!shrinkable.contains(faulty.name)) continue;
    ++tried;
    SCOPED_TRACE(faulty.name);
    const auto run = [&](const SessionHistory& history) {
      return RunSessions(history, faulty.make, {}).failure;
    };
    std::uint64_t number = 0;
    while (number < 2000 && !run(MakeSessionHistory(1, number))) ++number;
    const SessionHistory found = MakeSessionHistory(1, number);
    ASSERT_TRUE(run(found));
    const SessionHistory shrunk = ShrinkSessions(found, run);
    const std::string line = ToText(shrunk);
    EXPECT_LE(shrunk.ops.size(), 12U) << line;
    EXPECT_LT(line.size(), 600U) << line;
    const auto failure = run(*ParseSessionHistory(line));
    ASSERT_TRUE(failure) << line;
    EXPECT_EQ(failure->check, kSessionsCheck);
    EXPECT_FALSE(failure->trace.empty());
    EXPECT_FALSE(RunHistory(shrunk, TwinSubject("optimized")).failure) << line;
  }
  EXPECT_EQ(tried, shrinkable.size());
}

}  // namespace
}  // namespace kvtwin::props
