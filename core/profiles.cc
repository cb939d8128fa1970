#include "core/profiles.h"

#include <algorithm>
#include <array>

namespace kvtwin {
namespace {

template <auto kMember>
RuleInfo RuleOf(std::string_view name, std::vector<std::string_view> values) {
  using Value = std::remove_reference_t<decltype(Rules().*kMember)>;
  return {name, std::move(values),
          [](const Rules& rules) { return static_cast<int>(rules.*kMember); },
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

}  // namespace

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
