#include "core/dialects/profiles.h"

#include <algorithm>
#include <array>
#include <string>

#include "core/index.h"
#include "core/json_line.h"
#include "core/refusals.h"

namespace kvtwin {
namespace {

template <auto kMember>
RuleInfo RuleOf(std::string_view name, std::vector<std::string_view> values) {
  using Value = std::remove_reference_t<decltype(Rules().*kMember)>;
  return {name, std::move(values),
          [](const Rules& rules) { return AsInt(rules.*kMember); },
          [](Rules& rules, int value) {
            rules.*kMember = static_cast<Value>(value);
          }};
}

constexpr Rules kOllama012 = {};

constexpr Rules kOllama015 = {.mask_rows = Rules::MaskRows::kBatch};

constexpr Rules kLlamaCpp = {.window = Rules::Window::kWithQuery,
                             .copy = Rules::Copy::kAdds,
                             .middle = Rules::Middle::kLeavesGap,
                             .positions = Rules::Positions::kContinue,
                             .eviction = Rules::Eviction::kLazy,
                             .shared_shift = Rules::SharedShift::kMovesAll,
                             .mask_rows = Rules::MaskRows::kBatch};

constexpr Rules kTransformers = {.window = Rules::Window::kWithQuery,
                                 .middle = Rules::Middle::kRefused,
                                 .positions = Rules::Positions::kContinue,
                                 .back = Rules::Back::kUntilFull,
                                 .mask_rows = Rules::MaskRows::kBatch};

constexpr Rules kMlx = {.window = Rules::Window::kWithQuery,
                        .middle = Rules::Middle::kRefused,
                        .positions = Rules::Positions::kContinue,
                        .back = Rules::Back::kUntilFull,
                        .first = Rules::First::kStay,
                        .mask_rows = Rules::MaskRows::kBatch};

constexpr Rules kExecutorch = {.window = Rules::Window::kWithQuery,
                               .middle = Rules::Middle::kRefused,
                               .positions = Rules::Positions::kOverwrite,
                               .eviction = Rules::Eviction::kLazy,
                               .mask_rows = Rules::MaskRows::kBatch};

constexpr std::array<Profile, kProfileCount> kProfiles = {{
    Profile{"ollama-0.12", kOllama012},
    Profile{"ollama-0.15", kOllama015},
    Profile{"llama.cpp", kLlamaCpp},
    Profile{"transformers", kTransformers},
    Profile{"mlx", kMlx},
    Profile{"executorch", kExecutorch},
}};

// Removes the text up to and including `end`, or all of it; returns the part
// before `end`.
std::string_view CutAt(std::string_view end, std::string_view& text) {
  const std::size_t at = text.find(end);
  const std::string_view head = text.substr(0, at);
  text.remove_prefix(std::min(text.size(), head.size() + end.size()));
  return head;
}

// Returns the text without its lead-in ("yours is like") and without the
// histories, which are in parentheses.
std::string Plain(std::string_view text) {
  if (const std::size_t at = text.find(" is like "); at != text.npos) {
    text.remove_prefix(at + 4);
  }
  if (text.starts_with("like ")) text.remove_prefix(5);
  std::string plain;
  while (!text.empty()) {
    plain += CutAt(" (", text);
    CutAt(")", text);
  }
  return plain;
}

// Reads "copy replaces". Errors: an unknown rule, or an unknown value of it.
Result<const RuleInfo*> SetRule(std::string_view said, Rules& rules) {
  for (const RuleInfo& rule : AllRules()) {
    for (std::size_t i = 0; i < rule.values.size(); ++i) {
      if (said != std::string(rule.name) + " " + std::string(rule.values[i])) {
        continue;
      }
      rule.set(rules, AsInt(i));
      return &rule;
    }
  }
  return Invalid(
      "'{}' is not a rule with one of its values, such as 'copy replaces': "
      "see kvtwin profile --list",
      Printable(said, 80));
}

// Reads "llama.cpp except copy replaces, middle removal shifts".
Result<Rules> ParseOne(std::string_view text) {
  const std::string_view name = CutAt(" except ", text);
  const std::optional<Profile> profile = FindProfile(name);
  if (name.substr(0, name.find(':')) == "none") {
    return Invalid("'{}' names no profile: `kvtwin profile` found none",
                   Printable(name, 40));
  }
  if (!profile) {
    return Invalid("'{}' is not a known profile: see kvtwin profile --list",
                   Printable(name, 40));
  }
  Rules rules = profile->rules;
  std::vector<const RuleInfo*> excepted;
  while (!text.empty()) {
    const Result<const RuleInfo*> rule = SetRule(CutAt(", ", text), rules);
    if (!rule.ok()) return rule.status();
    excepted.push_back(*rule);
  }
  for (const RuleInfo& rule : AllRules()) {
    if (HasRule(rules, rule)) continue;
    if (std::ranges::count(excepted, &rule) > 0) {
      return Invalid("'{} {}' is nothing that a cache of its other rules shows",
                     rule.name, rule.ValueOf(rules));
    }
    rule.set(rules, 0);
  }
  return rules;
}

}  // namespace

Result<Rules> ParseRules(std::string_view text) {
  const std::string plain = Plain(text);
  std::string_view left = plain;
  const Result<Rules> rules = ParseOne(CutAt(" or ", left));
  while (rules.ok() && !left.empty()) {
    const Result<Rules> other = ParseOne(CutAt(" or ", left));
    if (!other.ok()) return other.status();
  }
  return rules;
}

std::string FirstProfile(std::string_view text) {
  const std::string plain = Plain(text);
  return plain.substr(0, plain.find(" or "));
}

std::span<const Profile> Profiles() { return kProfiles; }

std::optional<Profile> FindProfile(std::string_view name) {
  const auto at = std::ranges::find(kProfiles, name, &Profile::name);
  if (at == kProfiles.end()) return std::nullopt;
  return *at;
}

const std::vector<RuleInfo>& AllRules() {
  static const std::vector<RuleInfo> rules = {
      RuleOf<&Rules::window>(
          "window", {"counts what is before the query", "counts the query"}),
      RuleOf<&Rules::copy>("copy", {"replaces", "adds"}),
      RuleOf<&Rules::middle>("middle removal",
                             {"shifts", "leaves a gap", "is refused"}),
      RuleOf<&Rules::positions>("positions",
                                {"are any", "continue", "overwrite"}),
      RuleOf<&Rules::eviction>("eviction", {"is eager", "is lazy"}),
      RuleOf<&Rules::back>("going back", {"ends with what is stored",
                                          "ends with a full "
                                          "window"}),
      RuleOf<&Rules::first>("first tokens", {"leave", "stay"}),
      RuleOf<&Rules::shared_shift>("shift of shared tokens",
                                   {"is refused", "moves all"}),
      RuleOf<&Rules::mask_rows>("mask rows", {"are padded", "are the batch's"}),
  };
  return rules;
}

std::vector<int> ValuesOf(const Rules& rules) {
  std::vector<int> values;
  for (const RuleInfo& rule : AllRules()) values.push_back(rule.get(rules));
  return values;
}

Rules RulesOf(std::span<const int> values) {
  Rules rules;
  const std::size_t count = std::min(values.size(), AllRules().size());
  for (std::size_t i = 0; i < count; ++i) AllRules()[i].set(rules, values[i]);
  return rules;
}

bool HasRule(const Rules& rules, const RuleInfo& rule) {
  if (rule.name == "shift of shared tokens") {
    return rules.middle != Rules::Middle::kRefused;
  }
  return rule.name != "eviction" || rules.back == Rules::Back::kWhileStored;
}

}  // namespace kvtwin
