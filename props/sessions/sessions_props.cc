// Random servers, whose sessions are compared with the reference and judged.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "props/sessions/session_play.h"

namespace kvtwin::props {
namespace {

// The number of plays: KVTWIN_SESSION_PLAYS, or a few.
std::uint64_t Plays() {
  const char* count = std::getenv("KVTWIN_SESSION_PLAYS");
  return count == nullptr ? 2000 : std::stoull(count);
}

TEST(SessionsProps, EachRequestComputesWhatItWouldAlone) {
  for (const char* twin : {"optimized", "reference"}) {
    PlayCounts counts;
    for (std::uint64_t seed = 1; seed <= Plays(); ++seed) {
      const std::string wrong =
          PlaySessions(seed, SessionsOf(twin), {.cache_twin = twin}, counts);
      ASSERT_EQ(wrong, "") << twin;
    }
    // The plays reach what they are for.
    EXPECT_GT(counts.judged, 100000);
    EXPECT_GT(counts.replayed, 1000);
    EXPECT_GT(counts.adopted, 1000);
    EXPECT_GT(counts.gauges.hit_tokens, counts.gauges.prompt_tokens / 10);
    EXPECT_GT(counts.gauges.forks, 1000);
    EXPECT_GT(counts.gauges.shifts, 1000);
    EXPECT_GT(counts.gauges.reprocessed, 200);
    EXPECT_GT(counts.gauges.missed, 100);
    EXPECT_EQ(counts.gauges.refusals, 0);
  }
}

}  // namespace
}  // namespace kvtwin::props
