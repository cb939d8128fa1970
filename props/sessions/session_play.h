// Plays a random server: requests that come, continue each other's prompts, are
// sampled, stopped and cancelled. What the sessions plan is compared with the
// reference and, token by token, with what each request must compute whatever
// the others do.

#ifndef KVTWIN_PROPS_SESSIONS_SESSION_PLAY_H_
#define KVTWIN_PROPS_SESSIONS_SESSION_PLAY_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvtwin/sessions.h"
#include "props/base/pick.h"

namespace kvtwin::props {

using SessionsMaker =
    std::function<std::unique_ptr<Sessions>(Cache&, const SessionsSpec&)>;

// Makes the sessions of a twin.
SessionsMaker SessionsOf(std::string_view twin);

struct PlayOptions {
  int steps = 60;
  std::function<bool()> begin_step = {};  // If set, in place of `steps`: called
                                          // before each; false ends the play.
  std::string_view cache_twin = "optimized";
  bool alone = false;  // Without the reference beside.
};

// Counts of what happened in plays. A test requires a minimum of each.
struct PlayCounts {
  SessionGauges gauges;  // Sums.
  std::int64_t requests = 0;
  std::int64_t judged = 0;    // Tokens whose states were compared.
  std::int64_t replayed = 0;  // Requests compared with a fresh cache.
  std::int64_t adopted = 0;   // Slots that were given tokens.

  void Add(const PlayCounts& other);
};

struct PlayResult {
  std::vector<std::string> log;  // The set-up, then the calls.
  std::string wrong;             // Empty if nothing is.
};
PlayResult RunPlay(const Pick& pick, const SessionsMaker& make,
                   const PlayOptions& options, PlayCounts& counts);

// Returns what went wrong, with all steps that led to it; empty if nothing did.
std::string PlaySessions(const Pick& pick, const SessionsMaker& make,
                         const PlayOptions& options, PlayCounts& counts);

// The same with the random numbers of a seed.
std::string PlaySessions(std::uint64_t seed, const SessionsMaker& make,
                         const PlayOptions& options, PlayCounts& counts);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SESSIONS_SESSION_PLAY_H_
