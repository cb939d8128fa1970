// The rules of third-party caches, by name.

#ifndef KVTWIN_CORE_DIALECTS_PROFILES_H_
#define KVTWIN_CORE_DIALECTS_PROFILES_H_

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dialects/rules.h"
#include "core/index.h"
#include "kvtwin/status.h"

namespace kvtwin {

struct Profile {
  std::string_view name;
  Rules rules;
};

inline constexpr std::size_t kProfileCount = 6;

// docs/profiles.md gives the source of each rule of each profile.
std::span<const Profile> Profiles();
std::optional<Profile> FindProfile(std::string_view name);

// A rule as data, to iterate over all rules.
struct RuleInfo {
  std::string_view name;                 // "window"
  std::vector<std::string_view> values;  // "counts the query", ...
  int (*get)(const Rules& rules);
  void (*set)(Rules& rules, int value);

  std::string_view ValueOf(const Rules& rules) const {
    return At(values, get(rules));
  }
};

// In the order of the members of Rules.
const std::vector<RuleInfo>& AllRules();

// Convert rules to the value of each rule, and back. Rules without a value in
// `values` are kvtwin's.
std::vector<int> ValuesOf(const Rules& rules);
Rules RulesOf(std::span<const int> values);

// Parses rules: "llama.cpp"; "llama.cpp except copy replaces, middle removal
// shifts"; or the output of `kvtwin profile`, "yours is like A except copy
// replaces (kvt1 | ...) or B". Of several alternatives it returns the first,
// because the backend behaves the same under all. Errors: any other text; a
// rule that cannot be observed under the others.
Result<Rules> ParseRules(std::string_view text);

// Returns the alternative that ParseRules reads, without its histories: "A
// except copy replaces".
std::string FirstProfile(std::string_view text);

// Whether `rule` can be observed under `rules`. For example, a cache that never
// goes back does not show whether tokens beyond its window are gone.
bool HasRule(const Rules& rules, const RuleInfo& rule);

}  // namespace kvtwin

#endif  // KVTWIN_CORE_DIALECTS_PROFILES_H_
