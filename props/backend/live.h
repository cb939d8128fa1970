// A backend of somebody else's, by random histories: the strongest level that
// holds, and what goes wrong.

#ifndef KVTWIN_PROPS_BACKEND_LIVE_H_
#define KVTWIN_PROPS_BACKEND_LIVE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "props/backend/backend.h"
#include "props/base/level.h"
#include "props/compare/runner.h"
#include "props/search/explain.h"
#include "props/search/fuzz.h"

namespace kvtwin::props {

// The levels that can be tried on a backend, the strongest first.
std::vector<Level> LevelsOf(const BackendInfo& info);

// Whether a finding is a crash, a leak and the like, which breaks no level.
inline bool IsOfBackend(const Failure& finding) {
  return finding.party() == Party::kBackend;
}

struct LiveResult {
  std::vector<Level> tried;
  Level holds = Level::kNone;  // The strongest that no finding breaks.
  // The level at which every history ended in a finding that breaks no level,
  // or was passed over: no history shows that this level holds.
  Level unjudged = Level::kNone;
  // Each explained, once, at the level at which it was found.
  std::vector<Failure> findings;
  std::int64_t known = 0;  // Histories that failed as one of them.
  PassedOver passed_over;
  bool holds_but =
      false;  // At the level that holds, something was passed over.
  std::int64_t operations = 0;
  std::int64_t histories = 0;
  std::int64_t ran = 0;  // Of these; of the others, it has no such cache.
  double seconds = 0;
  std::uint64_t digest = 0;  // Of the last level.

  // It keeps what it says of itself.
  bool Right(const BackendInfo& info) const;
};

// Runs each of `levels` for as long as the options say, until one holds. What
// ends the backend's process does not end the run: it is a finding, once, and
// the next history is next.
LiveResult FuzzLive(const FuzzOptions& options,
                    const std::vector<Level>& levels,
                    const std::function<Subject(Level)>& subject_at);

// The text of a finding, with where it was found.
std::string FindingText(const Failure& finding);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_LIVE_H_
