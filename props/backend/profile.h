// Which rules a backend follows, worked out from what it does.

#ifndef KVTWIN_PROPS_BACKEND_PROFILE_H_
#define KVTWIN_PROPS_BACKEND_PROFILE_H_

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dialects/profiles.h"
#include "core/dialects/rules.h"
#include "props/compare/runner.h"
#include "props/history/abilities.h"
#include "props/history/history.h"

namespace kvtwin::props {

// A history that tells two values of a rule apart, in caches that are the same
// in the others.
struct RuleProbe {
  std::string_view rule;  // RuleInfo::name
  int one = 0;
  int other = 0;
  std::string_view history;
};

// Found, and kept as short as they can be, by props/backend/profile_test.cc.
std::span<const RuleProbe> RuleProbes();

// What the backend does that a cache of these rules does not, if anything;
// result.ran is false if it cannot be asked.
using RunByRules = std::function<RunResult(const History&, const Rules&)>;

// The cache of MakeLedgerCache, held to the ledger of `judge`.
RunResult RunLedgers(const History& history, const Rules& cache,
                     const Rules& judge, const Abilities& abilities = {});

// Every cache that has rules; those of which HasRule says no have ours.
std::vector<Rules> AllOfRules();

// A rule as the backend shows it.
struct FoundRule {
  std::size_t rule = 0;     // Of AllRules().
  std::vector<int> values;  // Those that it may have: one, if that is known.
  std::string history;      // The shortest that shows it; may be empty.
  bool known() const { return values.size() == 1; }
};

// Where a backend is not as its nearest profile.
struct RuleException {
  std::size_t rule = 0;
  int found = 0;
  int profile = 0;
  std::string history;  // The shortest that tells them apart.
};

// A profile that it is like, but for these.
struct NearProfile {
  std::string_view name;
  Rules rules;
  std::vector<RuleException> exceptions;
};

struct InferredProfile {
  Rules rules;                       // One that explains what was seen.
  std::vector<FoundRule> found;      // By rule.
  std::vector<NearProfile> nearest;  // Several if it does not show which; each
                                     // has as many exceptions.
  // What no rules explain: the cache is wrong by all of them.
  std::vector<std::string> unexplained;
  int asked = 0;  // Histories that it could be asked.
};

InferredProfile InferProfile(const RunByRules& run, const Abilities& abilities);

// "like llama.cpp except copy replaces (kvt1 | put 0*1 | ...)", and of several
// profiles "like A except ... or B except ...". ParseRules reads it.
std::string SummaryOf(const InferredProfile& profile);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_PROFILE_H_
