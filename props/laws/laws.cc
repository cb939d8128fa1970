#include "props/laws/laws.h"

#include <fmt/format.h>

#include <exception>

#include "props/base/interrupt.h"
#include "props/base/program.h"
#include "props/history/generate.h"
#include "props/laws/alike.h"
#include "props/shrink/shrink.h"

namespace kvtwin::props {
namespace {

constexpr int kOpsInHistory = 20;

}  // namespace

const std::vector<Law>& Laws() {
  static const std::vector<Law> laws = [] {
    std::vector<Law> all = SequenceLaws();
    for (const Law& law : PassLaws()) all.push_back(law);
    for (const Law& law : StorageLaws()) all.push_back(law);
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

LawResult Judge(const Law& law, const History& history,
                const Subject& subject) {
  try {
    return law.judge(history, subject);
  } catch (const std::exception& error) {
    return {1, fmt::format("exception: {}", error.what())};
  }
}

LawRun RunLaw(const Law& law, const Subject& subject, std::uint64_t seed,
              std::int64_t histories) {
  LawRun run;
  while (run.histories < histories && !Interrupted()) {
    const auto number = static_cast<std::uint64_t>(run.histories++);
    const History history =
        MakeHistory(seed, number, std::nullopt, kOpsInHistory);
    const LawResult result = Judge(law, history, subject);
    run.judged += result.judged;
    if (result.wrong.empty()) continue;
    LawFailure& failure = run.failure.emplace();
    failure.number = number;
    failure.shrunk = ShrinkUnderLaw(law, history, subject);
    failure.wrong = Judge(law, failure.shrunk, subject).wrong;
    break;
  }
  return run;
}

History ShrinkUnderLaw(const Law& law, const History& history,
                       const Subject& subject) {
  return Shrink(history, [&](const History& candidate) {
    std::optional<Failure> difference;
    const LawResult result = Judge(law, candidate, subject);
    if (result.wrong.empty()) return difference;
    difference = {candidate.ops.size(), std::string(law.name), result.wrong};
    return difference;
  });
}

std::string LawCommand(const Law& law, const History& history,
                       const Subject& subject) {
  return CommandLine(fmt::format("laws --law {} --twin {} --history '{}'",
                                 law.name, subject.name, ToText(history)));
}

}  // namespace kvtwin::props
