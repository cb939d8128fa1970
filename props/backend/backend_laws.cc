#include "props/backend/backend_laws.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvtwin::props {

LawRun RunLawOn(const Law& law, const Subject& subject,
                const LawHistories& histories, const LawJudge& judge) {
  if (!histories.history) {
    return RunLaw(law, subject, histories.seed, histories.count, judge);
  }
  const History& history = *histories.history;
  const LawResult result = judge ? judge(law, history, /*known_to_hang=*/false)
                                 : Judge(law, history, subject);
  return {.histories = 1,
          .judged = result.judged,
          .failure = result.failure,
          .shrunk = history};
}

LawAnswer BackendLaws::Run(const Law& law) {
  LawAnswer answer;
  answer.why_not = WhyNotJudged(law, subject_);
  if (!answer.why_not.empty()) return answer;
  std::string again;  // A check that is reported already.
  const LawJudge judge = [&](const Law& tried_law, const History& history,
                             bool known_to_hang) {
    if (!again.empty()) return LawResult();
    LawResult result = judge_(tried_law, history, known_to_hang);
    if (!result.failure || !reported_.contains(result.failure->check)) {
      return result;
    }
    again = result.failure->check;
    return LawResult();
  };
  answer.run = RunLawOn(law, subject_, histories_, judge);
  const auto& failure = answer.run.failure;
  if (!again.empty()) {
    answer.why_not = again + ", as above";
  } else if (!failure && answer.run.judged == 0) {
    answer.why_not = WhyNoneJudged(law, subject_, histories_.seed,
                                   histories_.history, answer.run.histories);
  }
  if (failure && failure->check != law.name) reported_.insert(failure->check);
  return answer;
}

std::string WhyNotJudged(const PoolLaw& law, const PoolInfo& info) {
  if (std::ranges::count(info.laws, law.name) > 0) return "";
  if (std::ranges::count(info.levels, Level::kVisibility) == 0) {
    return "the law compares views, and the pool has no views";
  }
  return fmt::format("the law needs {}", law.needs);
}

}  // namespace kvtwin::props
