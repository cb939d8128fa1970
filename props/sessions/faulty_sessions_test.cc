// The plays find each faulty sessions: beside the reference, and without it by
// what each request must compute.

#include "props/sessions/faulty_sessions.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace kvtwin::props {
namespace {

constexpr std::uint64_t kFaultPlays = 1000;

bool IsFound(const SessionsMaker& make, const PlayOptions& options) {
  PlayCounts counts;
  for (std::uint64_t seed = 1; seed <= kFaultPlays; ++seed) {
    if (!PlaySessions(seed, make, options, counts).empty()) return true;
  }
  return false;
}

TEST(FaultySessionsTest, PlaysFindEach) {
  for (const FaultySessions& faulty : AllFaultySessions()) {
    EXPECT_TRUE(IsFound(faulty.make, {})) << faulty.name;
    EXPECT_TRUE(IsFound(faulty.make, {.alone = true})) << faulty.name;
  }
}

}  // namespace
}  // namespace kvtwin::props
