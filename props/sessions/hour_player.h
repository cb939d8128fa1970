// Plays the recorded hour of a chat service: a server whose slots are always
// busy. The plans of the sessions are compared with the reference beside, and
// what attention would read of the cache with the records.

#ifndef KVTWIN_PROPS_SESSIONS_HOUR_PLAYER_H_
#define KVTWIN_PROPS_SESSIONS_HOUR_PLAYER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "kvtwin/sessions.h"
#include "props/sessions/service_hour.h"

namespace kvtwin::props {

struct HourPlay {
  std::string_view name = {};
  SessionsSpec sessions = {};
  CacheSpec cache = {};
  CacheConfig config = {};
  int block_size = 0;  // 0: over cells; else the subject is over a pool.
  int divisor = 1;     // One in this many tokens of the prompts.
  // A reference cache is beside, and its masks are compared. Else the reference
  // sessions have a cache without cells, which accepts all.
  bool both_caches = true;
  // Some requests are given up, or end before their limit by a stop string.
  bool restless = true;
};

// The hour as it was recorded, on 16 slots of 128k tokens.
HourPlay WholeHour();
// Smaller plays, on 4 slots of 128 tokens with one in 64 tokens of the prompts:
// one batch ahead; layers with and without a window; a pool.
std::vector<HourPlay> DividedHours();

struct HourCounts {
  std::int64_t batches = 0;
  std::int64_t calls = 0;  // Calls of the sessions, not of the reference.
  std::int64_t rows = 0;   // Rows of masks whose tokens were compared.
  std::int64_t masks = 0;  // Masks that were compared with the reference cache.
  std::int64_t checks = 0;  // CheckSessions, and comparisons of whole records.
  SessionGauges gauges;     // Sums.
};

struct HourOptions {
  std::int64_t batches = 0;  // At most; 0: all.
  std::uint64_t seed = 1;
  // Between two batches of which every row is compared, and whole records.
  int every = 997;
  std::function<void(std::int64_t requests)> progress;  // After each batch.
};

// Returns what went wrong; empty if nothing did. Requires: the cache of the
// play accepts the sessions.
std::string PlayHour(const HourPlay& play,
                     const std::vector<ServiceRequest>& requests,
                     const HourOptions& options, HourCounts& counts);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SESSIONS_HOUR_PLAYER_H_
