#include "props/laws/laws.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>

#include "props/base/interrupt.h"
#include "props/base/program.h"
#include "props/history/generate.h"
#include "props/laws/alike.h"
#include "props/shrink/shrink.h"

namespace kvtwin::props {
namespace {

constexpr int kOpsOfLaw = 20;

constexpr std::uint32_t kAttention = KVTWIN_HAS_CAUSAL | KVTWIN_HAS_SWA |
                                     KVTWIN_HAS_SWA_MEM | KVTWIN_HAS_CHUNKED |
                                     KVTWIN_HAS_ENCODER;

// Returns the abilities for the histories of a law.
Abilities AbilitiesOf(const Law& law, Abilities can) {
  if ((law.needs & kNeedsTokens) != 0) {
    can.kinds &= kAttention | KVTWIN_HAS_WRAPPER;
  }
  return can;
}

// Returns a random history for the law, of a cache that the subject declares.
History HistoryOf(const Law& law, const Subject& subject, std::uint64_t seed,
                  std::uint64_t number) {
  History history = MakeHistory(seed, number, std::nullopt, kOpsOfLaw);
  if (!subject.is_twin()) {
    AbilitiesOf(law, subject.abilities).Fit(history.setup);
  }
  return history;
}

LawResult JudgeBy(const LawJudge& judge, const Law& law, const History& history,
                  const Subject& subject, bool known_to_hang) {
  return judge ? judge(law, history, known_to_hang)
               : Judge(law, history, subject);
}

}  // namespace

const std::vector<Law>& Laws() {
  static const std::vector<Law> laws = [] {
    std::vector<Law> all = SequenceLaws();
    for (const Law& law : PassLaws()) all.push_back(law);
    for (const Law& law : StorageLaws()) all.push_back(law);
    for (const Law& law : StateLaws()) all.push_back(law);
    for (const Law& law : DraftLaws()) all.push_back(law);
    return all;
  }();
  return laws;
}

const Law* FindLaw(std::string_view name) {
  for (const Law& law : Laws()) {
    if (law.name == name) return &law;
  }
  return nullptr;
}

std::string WhyNotJudged(const Law& law, const Subject& subject) {
  if (subject.is_twin()) return "";
  const Abilities& can = subject.abilities;
  const bool cells = subject.level == Level::kIdentity;
  const struct {
    unsigned need;
    bool has;
    std::string_view why;
  } kNeeds[] = {
      {kNeedsSnapshot, can.snapshots, "has no snapshot and restore"},
      {kNeedsResume, can.can_resume, "has no can_resume"},
      {kNeedsCausal, can.set_causal, "has no set_causal"},
      {kNeedsRemove, can.Can(KVTWIN_CAN_REMOVE_TAIL), "has no remove"},
      {kNeedsMiddle, can.Can(KVTWIN_CAN_REMOVE_MIDDLE),
       "does not say KVTWIN_CAN_REMOVE_MIDDLE"},
      {kNeedsCopy, can.Can(KVTWIN_CAN_COPY_PREFIX), "has no copy_prefix"},
      {kNeedsReserve | kNeedsLook, can.Can(KVTWIN_CAN_RESERVE),
       "does not say KVTWIN_CAN_RESERVE"},
      {kNeedsAnyOrder | kNeedsLook, !can.OnlyGoesOn(),
       "does not say KVTWIN_CAN_ANY_ORDER"},
      {kNeedsMisuse, can.Can(KVTWIN_CAN_REFUSE_MISUSE),
       "does not say KVTWIN_CAN_REFUSE_MISUSE"},
      {kNeedsPoison, can.Can(KVTWIN_CAN_BE_POISONED),
       "does not say KVTWIN_CAN_BE_POISONED"},
      {kNeedsAnySequence, can.Can(KVTWIN_CAN_ANY_SEQUENCE),
       "does not say KVTWIN_CAN_ANY_SEQUENCE"},
      {kNeedsStates, can.HasKind(Kind::kRecurrent), "has no recurrent caches"},
      {kNeedsTokens, (can.kinds & kAttention) != 0, "has no attention caches"},
      {kNeedsHybrids, can.HasKind(Kind::kHybrid), "has no hybrid caches"},
      {kNeedsDrafts, can.CanDraft(), "does not say KVTWIN_CAN_DRAFT"},
      {kNeedsTrees, can.Can(KVTWIN_CAN_DRAFT_TREES),
       "does not say KVTWIN_CAN_DRAFT_TREES"},
      {kNeedsCells | kNeedsLook | kNeedsSnapshot, cells,
       "is not held to identity, and the law asks for cells or states"},
      {kNeedsOurs, false, "may not be called after close"}};
  std::string all;
  for (const auto& [need, has, why] : kNeeds) {
    if ((law.needs & need) == 0 || has) continue;
    all += fmt::format("{} {}", all.empty() ? "the backend" : " and", why);
  }
  return all;
}

LawResult Judge(const Law& law, const History& history,
                const Subject& subject) {
  const CacheSpec& spec = history.setup.spec;
  if ((law.needs & kNeedsTokens) != 0 && HasStates(spec)) return {};
  const bool fits = subject.is_twin() || subject.abilities.Fits(history.setup);
  if (!fits || !WhyNotJudged(law, subject).empty()) return {};
  LawResult result;
  try {
    result = law.judge(history, subject);
  } catch (const NotJudged&) {
    return {};
  } catch (const Failure& failure) {
    result = {.judged = 1, .failure = failure};
  } catch (const std::exception& error) {
    result = Violation(fmt::format("exception: {}", error.what()));
  }
  if (result.failure && result.failure->check.empty()) {
    result.failure->check = law.name;
  }
  return result;
}

std::string WhyNoneJudged(const Law& law, const Subject& subject,
                          std::uint64_t seed,
                          const std::optional<History>& history,
                          std::int64_t count) {
  std::int64_t refused = 0;
  std::string first;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto number = static_cast<std::uint64_t>(i);
    const Setup setup =
        history ? history->setup : HistoryOf(law, subject, seed, number).setup;
    const RunResult ran = RunHistory({.setup = setup, .ops = {}}, subject);
    if (ran.ran || ran.failure) continue;
    ++refused;
    if (first.empty()) first = ToText(setup);
  }
  if (refused < count) {
    return fmt::format("none of {} histories has what the law judges{}", count,
                       refused > 0 ? fmt::format(", and init refuses the "
                                                 "caches of {} of them",
                                                 refused)
                                   : "");
  }
  const bool of_tokens = (law.needs & kNeedsTokens) != 0;
  return fmt::format("init refuses the caches of all of {} histories{}: '{}'",
                     count, of_tokens ? ", which have no states" : "", first);
}

LawRun RunLaw(const Law& law, const Subject& subject, std::uint64_t seed,
              std::int64_t histories, const LawJudge& judge) {
  LawRun run;
  while (run.histories < histories && !Interrupted()) {
    const auto number = static_cast<std::uint64_t>(run.histories++);
    const History history = HistoryOf(law, subject, seed, number);
    const LawResult result =
        JudgeBy(judge, law, history, subject, /*known_to_hang=*/false);
    run.judged += result.judged;
    if (!result.failure) continue;
    run.shrunk = ShrinkUnderLaw(law, history, subject, judge);
    LawResult shown =
        JudgeBy(judge, law, run.shrunk, subject, /*known_to_hang=*/false);
    if (!shown.failure) {  // It was slow, or changes from run to run.
      run.shrunk = history;
      shown = result;
    }
    run.failure = std::move(shown.failure);
    run.failure->history_number = number;
    break;
  }
  return run;
}

History ShrinkUnderLaw(const Law& law, const History& history,
                       const Subject& subject, const LawJudge& judge) {
  bool known_to_hang = false;
  const auto rerun = [&](const History& candidate) {
    std::optional<Failure> failure =
        JudgeBy(judge, law, candidate, subject, known_to_hang).failure;
    if (!failure) return failure;
    failure->step = candidate.ops.size();
    known_to_hang = known_to_hang || IsHang(*failure);
    return failure;
  };
  if (subject.is_twin()) return Shrink(history, rerun);
  // In its time, and within what it can.
  Subject judged = subject;
  judged.run = [&](const History& candidate, const RunOptions&) {
    return RunResult{.ran = true, .failure = rerun(candidate)};
  };
  return Shrink(history, judged);
}

std::string LawCommand(const Law& law, const History& history,
                       const Subject& subject) {
  return LawCommand(law.name, ToText(history), subject);
}

std::string LawCommand(std::string_view law, const std::string& history,
                       const Subject& subject) {
  const std::string arguments =
      subject.arguments.empty() ? "--twin " + subject.name : subject.arguments;
  return CommandLine(
      fmt::format("laws --law {} {} --history '{}'", law, arguments, history));
}

}  // namespace kvtwin::props
