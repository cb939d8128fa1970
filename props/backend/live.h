// Runs random histories on a third-party backend: finds the strongest level
// that holds, and failures.

#ifndef KVTWIN_PROPS_BACKEND_LIVE_H_
#define KVTWIN_PROPS_BACKEND_LIVE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "props/backend/backend.h"
#include "props/base/level.h"
#include "props/compare/runner.h"
#include "props/search/explain.h"
#include "props/search/fuzz.h"

namespace kvtwin::props {

// Returns the levels that can be tried on a backend, the strongest first; with
// `asked`, only this one, if it can be tried.
std::vector<Level> LevelsOf(const BackendInfo& info,
                            std::optional<Level> asked = std::nullopt);

// Returns whether a finding is a crash, a leak or the like, which does not
// break a level.
inline bool IsOfBackend(const Failure& finding) {
  return finding.party() == Party::kBackend;
}

// Returns the level that the backend claims if it is one of `levels`, else the
// strongest of them.
Level ClaimedOf(const std::vector<Level>& levels, const BackendInfo& info);

struct LiveResult {
  std::vector<Level> tried;
  Level holds = Level::kNone;  // The strongest unbroken level.
  bool attends_wrong = false;  // Whether the level `attention` is broken.
  // The level that nothing breaks, but at which no history compared a view
  // without ending in a finding: nothing shows that this level holds.
  Level not_judged = Level::kNone;
  // Levels at which the history of a finding at a stronger level fails, too.
  std::vector<Level> broken_again;
  // Each finding once, explained, at the level at which it was found.
  std::vector<Failure> findings;
  std::int64_t known = 0;  // Histories that failed like a finding.
  PassedOver passed_over;
  AnswerCounts answers = {};
  // Whether histories were passed over at the level that holds.
  bool holds_but = false;
  std::int64_t operations = 0;
  std::int64_t histories = 0;
  std::int64_t ran = 0;  // Histories that the backend has a cache for.
  double seconds = 0;
  std::uint64_t digest = 0;  // Digest of the last level.

  // Returns whether the level that the backend claims holds (if it was not
  // tried, the strongest tried level), without findings that break no level.
  bool Right(const BackendInfo& info) const;
};

// Runs each of `levels` for as long as the options say, until one holds, and
// then the level `attention`, if it is one of them; it does not run a level at
// which the history of a finding fails. A failure that ends the backend's
// process does not end the run: it is a finding, and the run continues with the
// next history. Calls `found`, if not null, with each finding as soon as it is
// explained.
LiveResult FuzzLive(const FuzzOptions& options,
                    const std::vector<Level>& levels,
                    const std::function<Subject(Level)>& subject_at,
                    const std::function<void(const Failure&)>& found = nullptr);

enum class Outcome { kHolds, kBroken, kNotJudged };

struct LevelVerdict {
  Outcome outcome = Outcome::kNotJudged;
  std::string text;  // "holds, because it is weaker"
};
LevelVerdict VerdictOn(Level level, const LiveResult& result,
                       const BackendInfo& info);

// Returns the abilities that the backend does not declare: a level that holds
// says nothing about them.
std::vector<std::string> NotDeclared(const BackendInfo& info);

// Returns the text of a finding, and where it was found. `may_resume`: the
// backend has can_resume.
std::string FindingText(const Failure& finding, bool may_resume);

// Returns lines that name the command `profile` if the finding may be a
// convention, and what a window without can_resume must keep; "" if neither.
std::string HintOn(const Failure& finding, std::string_view profile,
                   bool may_resume);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_LIVE_H_
