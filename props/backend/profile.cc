#include "props/backend/profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "core/index.h"
#include "props/backend/ledger_backend.h"
#include "props/base/interrupt.h"
#include "props/search/fuzz.h"

namespace kvtwin::props {
namespace {

constexpr auto kRuleProbes = std::to_array<RuleProbe>({
    {"window", 0, 1, "kvt1 kind=swa window=2 | put 0*3"},
    {"copy", 0, 1, "kvt1 | put 0*1 | put 1*1 | copy 0>1:1 | put 1*1"},
    {"middle removal", 0, 1, "kvt1 | put 0*2 | drop 0:0-1"},
    {"middle removal", 0, 2, "kvt1 shift=identity | put 0*2 | drop 0:0-1"},
    {"positions", 0, 1, "kvt1 | put 0*1 | put 0*1@-1"},
    {"eviction", 0, 1,
     "kvt1 kind=swa window=3 | put 0*5 | put 0*1 | drop 0:3- | put 0*1"},
    // A ring or a list may evict only with batches of its own sequence.
    {"eviction", 0, 1,
     "kvt1 kind=swa window=2 | put 0*4 | put 1*1 | drop 0:2- | put 0*1"},
    // Without can_resume, a legal client does not go back, but it copies. The
    // eviction comes with a batch of the same sequence, or of another sequence.
    {"eviction", 0, 1,
     "kvt1 kind=swa window=2 | put 0*4 | put 0*1 | copy 0>1:1 | put 1*1"},
    {"eviction", 0, 1,
     "kvt1 kind=swa window=2 legal=1 | put 0*4 | put 1*1 | drop 1:0- "
     "| copy 0>1:1 | put 1*1"},
    // A cache that hides tokens and keeps them has less room for new tokens.
    {"eviction", 0, 1,
     "kvt1 kind=swa window=2 cap=5 legal=1 | put 0*4 | put 0*1 | copy 0>1:1 "
     "| put 1*5"},
    // Without a shift function, the answer depends on the tokens that are left.
    {"eviction", 0, 1,
     "kvt1 kind=swa window=2 legal=1 | put 0*4 | put 0*1 | drop 0:1-5"},
    {"going back", 0, 1, "kvt1 kind=swa window=2 | put 0*3 | drop 0:1-"},
    {"first tokens", 0, 1, "kvt1 kind=swa window=2 | put 0*3 | put 0*1"},
    {"shift of shared tokens", 0, 1,
     "kvt1 | put 0*2 | copy 0>1:2 | drop 0:0-1"},
    // A cache that copies rows shifts its own, or cannot shift them. The other
    // sequence then shows whether its tokens moved, too.
    {"shift of shared tokens", 0, 1,
     "kvt1 shift=identity legal=1 | put 0*2 | copy 0>1:2 | drop 0:0-1 "
     "| drop 1:1- | put 1*1"},
    {"shift of shared tokens", 0, 1,
     "kvt1 | put 0*1 | copy 0>1:1 | move 0:0-@+1"},
    {"mask rows", 0, 1, "kvt1 maskpad=2 | put 0*1"},
});

// Adds the V layout and mask dtype that LedgerCache needs.
Abilities ForLedgers(Abilities abilities) {
  abilities.v_layouts |= 1U << KVTWIN_V_PLAIN;
  abilities.mask_dtypes |= 1U << KVTWIN_F32;
  return abilities;
}

Rules With(const Rules& rules, std::size_t rule, int value) {
  Rules with = rules;
  AllRules()[rule].set(with, value);
  return with;
}

// The histories that ran, and the rules that are still possible.
class Inference {
 public:
  Inference(const RunByRules& run, const Abilities& abilities,
            const InferenceLimits& limits)
      : run_(run),
        abilities_(abilities),
        limits_(limits),
        left_(AllOfRules()) {}

  InferredProfile Work();

 private:
  struct Asked {
    History history;
    std::string text;
  };

  void Ask(History history);
  void Choose();
  void TryRandomHistories();
  FoundRule Find(std::size_t rule);
  std::vector<RuleException> ExceptionsTo(const Rules& profile) const;
  // Returns the shortest history that shows that the backend lacks `value`.
  std::string Showing(std::size_t rule, int value) const;
  bool Agrees(const History& history, const Rules& rules) const {
    return !run_(history, rules).failure;
  }

  const RunByRules& run_;
  const Abilities& abilities_;
  const InferenceLimits& limits_;
  std::vector<Rules> left_;
  std::vector<Asked> asked_;  // The shortest first.
  InferredProfile result_;
};

void Inference::Ask(History history) {
  abilities_.Fit(history.setup);
  std::vector<Rules> agreeing;
  bool ran = false;
  bool differs = false;
  std::string ended;  // How the backend ended, such as by a crash.
  for (const Rules& rules : left_) {
    if (Interrupted()) return;
    const RunResult result = run_(history, rules);
    ran = ran || result.ran || result.failure;
    if (!result.failure) {
      // A cache of these rules may refuse the setup, as this backend did.
      agreeing.push_back(rules);
      continue;
    }
    const Failure& failure = *result.failure;
    if (failure.party() != Party::kBackend) {
      differs = true;
      continue;
    }
    ended = fmt::format("{}: {}", failure.check, failure.text);
    // An exception may refuse a batch that clients make by these rules alone.
    // The first operation is the same by all rules.
    if (failure.check == "backend: error" && failure.step > 0 &&
        failure.function == "start_forward") {
      continue;
    }
    // No rules explain this.
    agreeing.clear();
    differs = false;
    break;
  }
  if (!ran) return;
  ++result_.asked;
  std::string text = ToText(history);
  if (agreeing.empty()) {
    result_.unexplained.push_back({std::move(text), std::move(ended), differs});
    return;
  }
  left_ = std::move(agreeing);
  asked_.push_back({std::move(history), std::move(text)});
}

std::string Inference::Showing(std::size_t rule, int value) const {
  const Rules& rules = result_.rules;
  const Rules other = With(rules, rule, value);
  const Abilities abilities = ForLedgers(abilities_);
  for (const auto& [history, text] : asked_) {
    if (!Agrees(history, other)) return text;
    // Masks that the backend pads by its own rule are right by both values.
    if (AllRules()[rule].name == "mask rows") continue;
    // If `other` allows what `rules` does, a ledger with `other` shows the
    // difference.
    History plain = history;
    plain.setup.config.v_layout = VLayout::kPlain;
    plain.setup.config.mask_dtype = DType::kF32;
    if (RunLedgers(plain, other, rules, abilities).failure) return text;
  }
  return "";
}

FoundRule Inference::Find(std::size_t rule) {
  const RuleInfo& info = AllRules()[rule];
  const int own = info.get(result_.rules);
  FoundRule found{.rule = rule, .values = {}, .history = ""};
  for (int value = 0; value < std::ssize(info.values); ++value) {
    const bool asked = value != own && HasRule(result_.rules, info);
    const std::string text = asked ? Showing(rule, value) : "";
    if (text.empty()) found.values.push_back(value);
    const bool shorter =
        found.history.empty() || text.size() < found.history.size();
    if (!text.empty() && shorter) found.history = text;
  }
  return found;
}

// Returns the number of rules that differ, of those that both caches can have.
std::ptrdiff_t Distance(const Rules& rules, const Rules& other) {
  return std::ranges::count_if(AllRules(), [&](const RuleInfo& rule) {
    return HasRule(rules, rule) && HasRule(other, rule) &&
           rule.get(rules) != rule.get(other);
  });
}

// Chooses, among the rules that are left, those of a profile or nearest to one.
// Lazy eviction, which allows both, is left out if eager eviction agrees, too.
void Inference::Choose() {
  std::vector<Rules> rules_left = left_;
  std::erase_if(rules_left, [&](Rules rules) {
    if (rules.eviction == Rules::Eviction::kEager) return false;
    rules.eviction = Rules::Eviction::kEager;
    return std::ranges::count(left_, rules) > 0;
  });
  std::ptrdiff_t least = std::ssize(AllRules()) + 1;
  for (const Profile& profile : Profiles()) {
    for (const Rules& rules : rules_left) {
      const std::ptrdiff_t distance = Distance(rules, profile.rules);
      if (distance < least) result_.rules = rules;
      least = std::min(least, distance);
    }
  }
}

// Runs random histories by the chosen rules. A history that fails excludes
// these rules; if it leaves others, random histories run again by the nearest.
void Inference::TryRandomHistories() {
  Subject subject;
  subject.name = "backend";
  subject.run = [&](const History& history, const RunOptions& /*options*/) {
    return run_(history, result_.rules);
  };
  subject.shrink_seconds = limits_.shrink_seconds;
  subject.level = Level::kVisibility;
  subject.abilities = abilities_;
  // A backend that pads its masks by its own rule is right by no other padding.
  subject.abilities.max_mask_padding = 1;
  FuzzOptions options;
  options.operations = limits_.operations;
  while (result_.unexplained.empty() && !Interrupted()) {
    const FuzzResult fuzzed = Fuzz(options, subject);
    result_.operations = fuzzed.operations;
    if (!fuzzed.failure) return;
    Ask(fuzzed.shrunk);
    if (!result_.unexplained.empty() || Interrupted()) return;
    if (std::ranges::count(left_, result_.rules) > 0) {
      // Answers that vary from run to run follow no rules.
      const Failure& failure = *fuzzed.failure;
      result_.unexplained.push_back(
          {ToText(fuzzed.shrunk),
           fmt::format("{}: {}", failure.check, failure.text),
           failure.party() != Party::kBackend});
      return;
    }
    Choose();
  }
}

// Returns the rules of a profile that the backend shows not to follow.
std::vector<RuleException> Inference::ExceptionsTo(const Rules& profile) const {
  std::vector<RuleException> exceptions;
  for (const FoundRule& found : result_.found) {
    const RuleInfo& rule = AllRules()[found.rule];
    const int expected = rule.get(profile);
    if (!HasRule(result_.rules, rule)) continue;
    if (std::ranges::count(found.values, expected) > 0) continue;
    exceptions.push_back({found.rule, rule.get(result_.rules), expected,
                          Showing(found.rule, expected)});
  }
  return exceptions;
}

InferredProfile Inference::Work() {
  for (const RuleProbe& probe : RuleProbes()) {
    if (!Interrupted()) Ask(*ParseHistory(probe.history));
  }
  Choose();
  if (result_.asked > 0 && limits_.operations > 0) TryRandomHistories();
  std::ranges::stable_sort(
      asked_, {}, [](const Asked& asked) { return asked.text.size(); });
  for (std::size_t rule = 0; rule < AllRules().size(); ++rule) {
    result_.found.push_back(Find(rule));
  }
  std::ptrdiff_t least = std::ssize(AllRules()) + 1;
  for (const Profile& profile : Profiles()) {
    std::vector<RuleException> exceptions = ExceptionsTo(profile.rules);
    // Exceptions are counted only in rules that this profile can have: the
    // others come with another exception.
    const auto count =
        std::ranges::count_if(exceptions, [&](const RuleException& exception) {
          return HasRule(profile.rules, AllRules()[exception.rule]);
        });
    if (count > least) continue;
    if (count < least) result_.nearest.clear();
    least = count;
    result_.nearest.push_back(
        {profile.name, profile.rules, std::move(exceptions)});
  }
  return std::move(result_);
}

// Returns "like A except ... or B except ...".
std::string NearestText(const InferredProfile& profile) {
  std::string text = "like ";
  for (const NearProfile& near : profile.nearest) {
    text += fmt::format("{}{}", text.size() > 5 ? " or " : "", near.name);
    for (const RuleException& exception : near.exceptions) {
      const RuleInfo& rule = AllRules()[exception.rule];
      text += fmt::format(
          "{} {} {} ({})", &exception == &near.exceptions[0] ? " except" : ",",
          rule.name, At(rule.values, exception.found), exception.history);
    }
  }
  return text;
}

}  // namespace

std::span<const RuleProbe> RuleProbes() { return kRuleProbes; }

RunResult RunLedgers(const History& history, const Rules& cache,
                     const Rules& judge, const Abilities& abilities) {
  Subject subject;
  subject.name = "ledger";
  subject.make_of = [&](const Setup& setup) -> Result<std::unique_ptr<Cache>> {
    const bool can = setup.spec.kind <= Kind::kChunked &&
                     setup.config.v_layout == VLayout::kPlain &&
                     setup.config.mask_dtype == DType::kF32;
    if (!can) return Status(StatusCode::kNotSupported, "no such ledger");
    return MakeLedgerCache(setup.spec, cache);
  };
  subject.level = Level::kVisibility;
  subject.rules = judge;
  subject.mask_rows_too = true;
  subject.abilities = abilities;
  subject.abilities.can &=
      ~std::uint32_t{KVTWIN_CAN_RESERVE | KVTWIN_CAN_REFUSE_MISUSE |
                     KVTWIN_CAN_DRAFT | KVTWIN_CAN_FIND_PREFIX};
  return RunHistory(history, subject);
}

std::vector<Rules> AllOfRules() {
  std::vector<Rules> all = {Rules()};
  for (std::size_t rule = 0; rule < AllRules().size(); ++rule) {
    const std::size_t count = all.size();
    const int values = Size(AllRules()[rule].values);
    for (int value = 1; value < values; ++value) {
      for (std::size_t i = 0; i < count; ++i) {
        all.push_back(With(all[i], rule, value));
      }
    }
  }
  std::erase_if(all, [](const Rules& rules) {
    return std::ranges::any_of(AllRules(), [&](const RuleInfo& rule) {
      return rule.get(rules) != 0 && !HasRule(rules, rule);
    });
  });
  return all;
}

InferredProfile InferProfile(const RunByRules& run, const Abilities& abilities,
                             const InferenceLimits& limits) {
  return Inference(run, abilities, limits).Work();
}

InferredProfile InferProfile(const BackendInfo& info,
                             const InferenceLimits& limits) {
  const Level level = std::max(info.claims, Level::kVisibility);
  Subject subject = BackendSubject(info, level, "");
  subject.mask_rows_too = true;
  const auto run = [&](const History& history, const Rules& rules) {
    subject.rules = rules;
    return RunHistory(history, subject);
  };
  return InferProfile(run, info.abilities, limits);
}

bool IsWrong(const InferredProfile& profile) {
  return std::ranges::any_of(profile.unexplained,
                             &InferredProfile::Unexplained::answered);
}

std::string SummaryOf(const InferredProfile& profile) {
  if (profile.asked == 0) {
    return "like none: it ran no history, because it made none of their "
           "caches, which are causal or swa";
  }
  if (profile.asked == std::ssize(profile.unexplained)) {
    return "like none: each history failed";
  }
  const std::string nearest = NearestText(profile);
  if (!IsWrong(profile)) return nearest;
  // The probes ran without a finding before the random histories.
  return fmt::format(
      "like none: it is wrong under any rules on {} of {} histories{}",
      profile.unexplained.size(), profile.asked,
      profile.operations > 0 ? ", on the others " + nearest : "");
}

std::string TriedText(const InferredProfile& profile) {
  std::string text = fmt::format("{} histories", profile.asked);
  if (profile.operations > 0) {
    text += fmt::format(" and {} operations of random histories",
                        profile.operations);
  }
  return text;
}

}  // namespace kvtwin::props
