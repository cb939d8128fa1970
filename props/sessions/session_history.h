// A play of sessions as a value, and as the line of text that `kvtwin run`
// reads: the numbers that the play draws, for the set-up and for each step.

#ifndef KVTWIN_PROPS_SESSIONS_SESSION_HISTORY_H_
#define KVTWIN_PROPS_SESSIONS_SESSION_HISTORY_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "props/sessions/session_play.h"

namespace kvtwin::props {

// A number n draws lo + n % (hi - lo + 1). After the last number, each draw is
// the largest that is possible: then nothing more happens in this step.
struct SessionStep {
  std::vector<int> draws;
};
struct SessionHistory {
  std::vector<int> setup;
  std::vector<SessionStep> ops;
};

// "kvs1 2 0 5 | step 30 1 | step"
std::string ToText(const SessionHistory& history);
// Errors: `text` is not such a line.
Result<SessionHistory> ParseSessionHistory(std::string_view text);

// Draws a history from a seed and a number.
SessionHistory MakeSessionHistory(std::uint64_t seed, std::uint64_t number);

// For the search: sessions are of one kind.
inline std::vector<std::string> KindNames(const SessionHistory&) { return {}; }
inline bool FirstOperationOpens(const SessionHistory&) { return false; }

// Plays the history. `steps` becomes the number of steps that were begun.
PlayResult PlayHistory(const SessionHistory& history, const SessionsMaker& make,
                       const PlayOptions& options, PlayCounts& counts,
                       std::size_t& steps);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SESSIONS_SESSION_HISTORY_H_
