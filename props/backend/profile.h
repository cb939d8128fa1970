// Infers the rules that a backend follows from what it does.

#ifndef KVTWIN_PROPS_BACKEND_PROFILE_H_
#define KVTWIN_PROPS_BACKEND_PROFILE_H_

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dialects/profiles.h"
#include "core/dialects/rules.h"
#include "props/backend/backend.h"
#include "props/compare/runner.h"
#include "props/history/abilities.h"
#include "props/history/history.h"

namespace kvtwin::props {

// A history that tells two values of a rule apart, in caches that agree in the
// other rules.
struct RuleProbe {
  std::string_view rule;  // RuleInfo::name
  int one = 0;
  int other = 0;
  std::string_view history;
};

// props/backend/profile_test.cc finds them, and keeps them as short as
// possible.
std::span<const RuleProbe> RuleProbes();

// Returns how the backend differs from a cache of these rules, if it does;
// result.ran is false if the backend cannot run the history.
using RunByRules = std::function<RunResult(const History&, const Rules&)>;

// Runs the cache of MakeLedgerCache against the ledger of `judge`.
RunResult RunLedgers(const History& history, const Rules& cache,
                     const Rules& judge, const Abilities& abilities = {});

// Returns the rules of every possible cache. A rule that a cache does not have
// (HasRule) has our value.
std::vector<Rules> AllOfRules();

// The value of a rule, as the backend shows it.
struct FoundRule {
  std::size_t rule = 0;     // Index into AllRules().
  std::vector<int> values;  // The possible values: one, if it is known.
  std::string history;      // The shortest that shows the rule; or empty.
  bool known() const { return values.size() == 1; }
};

// A rule in which a backend differs from its nearest profile.
struct RuleException {
  std::size_t rule = 0;
  int found = 0;
  int profile = 0;
  std::string history;  // The shortest that shows the difference.
};

// A profile that the backend follows, with these exceptions.
struct NearProfile {
  std::string_view name;
  Rules rules;
  std::vector<RuleException> exceptions;
};

struct InferredProfile {
  Rules rules;                   // Rules that explain the answers.
  std::vector<FoundRule> found;  // By rule.
  // Several if the backend fits each of them with the same number of
  // exceptions.
  std::vector<NearProfile> nearest;
  // A history that no rules explain: the cache is wrong by all rules.
  struct Unexplained {
    std::string history;
    // How the backend ended a run: "backend: crash: ...", or that its answers
    // vary from run to run; empty if it answered all calls of each run.
    std::string ended;
    bool answered = false;  // It was judged by its answers.
  };
  std::vector<Unexplained> unexplained;
  // Histories that the backend ran, without the random histories that hold.
  int asked = 0;
  // Operations of random histories by these rules.
  std::int64_t operations = 0;
};

struct InferenceLimits {
  // Random histories have at least this many operations in all; 0: no random
  // histories are run.
  std::int64_t operations = 30'000;
  double shrink_seconds = 60;  // Time to shrink one failure of them.
};

// Runs the probes, and random histories by the rules that the probes show.
InferredProfile InferProfile(const RunByRules& run, const Abilities& abilities,
                             const InferenceLimits& limits = {});
// Calls the backend in this process, at visibility, or at numeric if it claims
// that.
InferredProfile InferProfile(const BackendInfo& info,
                             const InferenceLimits& limits = {});

// Whether the backend answered a history in a way that no rules explain. Then
// the rules that the other histories show mean nothing.
bool IsWrong(const InferredProfile& profile);

// Returns "like llama.cpp except copy replaces (kvt1 | put 0*1 | ...)", or for
// several profiles "like A except ... or B except ...". ParseRules reads it.
std::string SummaryOf(const InferredProfile& profile);

// Returns "17 histories and 30005 operations of random histories".
std::string TriedText(const InferredProfile& profile);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_PROFILE_H_
