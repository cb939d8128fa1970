#include "props/backend/live.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "props/base/interrupt.h"

namespace kvtwin::props {
namespace {

// The search ends when a backend has this many findings.
constexpr std::size_t kFindingsMax = 6;

// Returns whether the history of a finding breaks this level, too.
bool FailsToo(const Failure& finding, const Subject& subject) {
  if (IsOfBackend(finding)) return false;
  const Result<History> history = ParseHistory(finding.history);
  if (!history.ok()) return false;
  const auto failure = RunHistory(*history, subject).failure;
  return failure && !IsOfBackend(*failure);
}

// The search at one level, which adds to the result of all levels.
class LevelSearch {
 public:
  LevelSearch(const FuzzOptions& options, const Subject& subject,
              const std::function<void(const Failure&)>& found,
              LiveResult& result)
      : options_(options),
        subject_(subject),
        found_(found),
        result_(result),
        rest_(options) {}

  // Returns whether the level is broken.
  bool Run() {
    for (const Failure& finding : result_.findings) {
      if (IsOfBackend(finding)) rest_.known.insert(finding.check);
    }
    bool broken = false;
    while (!broken && result_.findings.size() < kFindingsMax) {
      const FuzzResult fuzzed = Fuzz(rest_, subject_);
      Add(fuzzed);
      if (!fuzzed.failure) break;
      broken = !IsOfBackend(*fuzzed.failure);
      Keep(*fuzzed.failure);
      if (!Continue(fuzzed.failure->history_number + 1)) break;
    }
    result_.operations += operations_;
    result_.seconds += seconds_;
    if (broken) return true;
    result_.holds_but = result_.holds_but || passed_over_;
    if (judged_ > 0) result_.holds = std::min(result_.holds, subject_.level);
    if (judged_ == 0 && ran_ > 0) result_.not_judged = subject_.level;
    return false;
  }

 private:
  void Add(const FuzzResult& fuzzed) {
    operations_ += fuzzed.operations;
    seconds_ += fuzzed.seconds;
    ran_ += fuzzed.ran;
    judged_ += fuzzed.judged;
    result_.histories += fuzzed.histories;
    result_.ran += fuzzed.ran;
    result_.known += fuzzed.known;
    result_.answers.Add(fuzzed.answers);
    for (const auto& [bucket, count] : fuzzed.passed_over) {
      result_.passed_over[bucket] += count;
      passed_over_ = true;
    }
    result_.digest = fuzzed.digest;
  }

  void Keep(const Failure& failure) {
    // A failure of another check may shrink to a known one.
    if (rest_.known.contains(failure.check)) {
      ++result_.known;
    } else {
      result_.findings.push_back(failure);
      if (found_) found_(failure);
    }
    rest_.known.insert({failure.found_check, failure.check});
  }

  // Returns false if no operations or no time are left.
  bool Continue(std::uint64_t first) {
    rest_.first = first;
    rest_.operations = options_.operations - operations_;
    rest_.seconds = options_.seconds - seconds_;
    return options_.operations > 0 ? rest_.operations > 0 : rest_.seconds > 0;
  }

  const FuzzOptions& options_;
  const Subject& subject_;
  const std::function<void(const Failure&)>& found_;
  LiveResult& result_;
  FuzzOptions rest_;
  std::int64_t operations_ = 0;
  double seconds_ = 0;
  std::int64_t ran_ = 0;
  std::int64_t judged_ = 0;
  bool passed_over_ = false;
};

}  // namespace

std::vector<Level> LevelsOf(const BackendInfo& info,
                            std::optional<Level> asked) {
  std::vector<Level> levels;
  // The reference twin follows kvtwin's own rules only; its masks can do
  // without padding rows.
  const bool ours = info.rules == RulesAt(info, Level::kIdentity);
  if (info.has_get) {
    if (info.has_cells && ours) levels.push_back(Level::kIdentity);
    levels.push_back(Level::kVisibility);
    levels.push_back(Level::kNumeric);
  }
  if (info.attend) levels.push_back(Level::kAttention);
  if (asked) {
    std::erase_if(levels, [&](Level level) { return level != *asked; });
  }
  return levels;
}

Level ClaimedOf(const std::vector<Level>& levels, const BackendInfo& info) {
  const bool can_claim = std::ranges::count(levels, info.claims) > 0;
  return can_claim ? info.claims : levels.front();
}

bool LiveResult::Right(const BackendInfo& info) const {
  // Without the claimed level, the strongest level that was tried must hold.
  const bool claimed = std::ranges::count(tried, info.claims) > 0;
  return !attends_wrong &&
         (holds <= info.claims || (!claimed && holds == tried.front())) &&
         std::ranges::none_of(findings, IsOfBackend);
}

LiveResult FuzzLive(const FuzzOptions& options,
                    const std::vector<Level>& levels,
                    const std::function<Subject(Level)>& subject_at,
                    const std::function<void(const Failure&)>& found) {
  LiveResult result;
  bool settled = false;  // A level of the rows holds.
  for (const Level level : levels) {
    // Whatever its rows are, a backend's own attention can be wrong.
    const bool attends = level == Level::kAttention;
    if (settled && !attends) continue;
    result.tried.push_back(level);
    const Subject subject = subject_at(level);
    if (std::ranges::any_of(result.findings, [&](const Failure& finding) {
          return FailsToo(finding, subject);
        })) {
      result.broken_again.push_back(level);
      result.attends_wrong = attends;
      continue;
    }
    const bool broken = LevelSearch(options, subject, found, result).Run();
    if (attends) result.attends_wrong = broken;
    if (Interrupted()) break;
    settled = !broken;
  }
  return result;
}

LevelVerdict VerdictOn(Level level, const LiveResult& result,
                       const BackendInfo& info) {
  using enum Outcome;
  const bool tried = std::ranges::count(result.tried, level) > 0;
  if (level == result.holds) {
    if (std::ranges::any_of(result.findings, IsOfBackend)) {
      return {kHolds, "holds, except for findings of the backend"};
    }
    return {kHolds,
            result.holds_but ? "holds, except for known findings" : "holds"};
  }
  if (level == result.not_judged) {
    if (result.findings.empty() && result.known == 0) {
      return {kNotJudged, "not judged: no view was compared"};
    }
    return {kNotJudged,
            "not judged: every history that compares a view ended in a "
            "finding"};
  }
  if (std::ranges::count(result.broken_again, level) > 0) {
    return {kBroken, "does not hold: the history of a finding fails here, too"};
  }
  if (tried && level == Level::kAttention && !result.attends_wrong) {
    return {kHolds, "holds"};
  }
  if (tried) return {kBroken, "does not hold"};
  if (level == Level::kAttention) return {kNotJudged, "not tried"};
  if (!info.has_get) return {kNotJudged, "not tried: its table has no get"};
  if (level == Level::kIdentity && !info.has_cells) {
    return {kNotJudged, "not tried: its table has no cells"};
  }
  if (level == Level::kIdentity && LevelsOf(info).front() != level) {
    return {kNotJudged, "not tried: it follows the rules of another system"};
  }
  if (level > result.holds) return {kHolds, "holds, because it is weaker"};
  return {kNotJudged, "not tried"};
}

std::vector<std::string> NotDeclared(const BackendInfo& info) {
  const Abilities& able = info.abilities;
  std::vector<std::string> names;
  for (const auto& [name, ability] :
       {std::pair("CAN_REMOVE_TAIL", KVTWIN_CAN_REMOVE_TAIL),
        std::pair("CAN_REMOVE_MIDDLE", KVTWIN_CAN_REMOVE_MIDDLE),
        std::pair("CAN_COPY_PREFIX", KVTWIN_CAN_COPY_PREFIX),
        std::pair("CAN_SHARE", KVTWIN_CAN_SHARE),
        std::pair("CAN_MIX", KVTWIN_CAN_MIX),
        std::pair("CAN_ANY_ORDER", KVTWIN_CAN_ANY_ORDER),
        std::pair("CAN_ANY_SEQUENCE", KVTWIN_CAN_ANY_SEQUENCE),
        std::pair("CAN_FIND_PREFIX", KVTWIN_CAN_FIND_PREFIX),
        std::pair("CAN_RESERVE", KVTWIN_CAN_RESERVE),
        std::pair("CAN_REFUSE_FULL", KVTWIN_CAN_REFUSE_FULL),
        std::pair("CAN_REFUSE_MISUSE", KVTWIN_CAN_REFUSE_MISUSE),
        std::pair("CAN_TAKE_STRIDED", KVTWIN_CAN_TAKE_STRIDED),
        std::pair("CAN_MIX_DTYPES", KVTWIN_CAN_MIX_DTYPES),
        std::pair("CAN_DRAFT", KVTWIN_CAN_DRAFT),
        std::pair("CAN_DRAFT_TREES", KVTWIN_CAN_DRAFT_TREES),
        std::pair("CAN_DRAFT_STATES", KVTWIN_CAN_DRAFT_STATES),
        std::pair("CAN_PIN", KVTWIN_CAN_PIN),
        std::pair("CAN_SOFT_CAP", KVTWIN_CAN_SOFT_CAP),
        std::pair("CAN_SINKS", KVTWIN_CAN_SINKS)}) {
    if (!able.Can(ability)) names.emplace_back(name);
  }
  if (!able.can_resume) names.emplace_back("can_resume");
  if (!able.set_causal) names.emplace_back("set_causal");
  return names;
}

std::string HintOn(const Failure& finding, std::string_view profile,
                   bool may_resume) {
  constexpr std::array<std::string_view, 4> kConventions = {
      "subject: rows", "subject: resume", "subject: result", "subject: room"};
  if (std::ranges::count(kConventions, finding.check) == 0) return "";
  const auto has = [&](std::string_view text) {
    return finding.history.find(text) != std::string::npos;
  };
  std::string hints;
  // With one sequence, or a memory of its own, the window needs another number.
  const bool raised =
      has("window=") && !has("memory=") && !has("seqs=1 ") && !has("cells=");
  if (!may_resume && finding.Is("subject: rows") && raised &&
      (has("| drop") || has("| copy"))) {
    hints =
        "  hint    without can_resume, clients may go back to one token before "
        "the last batch: keep window + 1 + max_batch tokens, or add "
        "can_resume (docs/live.md, \"If your cache has a window\")\n";
  }
  return hints + fmt::format(
                     "  hint    another convention is not a bug: `{}` works "
                     "out which it follows\n",
                     profile);
}

std::string FindingText(const Failure& finding, bool may_resume) {
  return fmt::format(
      "{}  found   history {}; shrunk from {} operations to {}\n{}",
      FailureText(finding), finding.history_number, finding.found_operations,
      finding.operations, HintOn(finding, "kvtwin profile", may_resume));
}

}  // namespace kvtwin::props
