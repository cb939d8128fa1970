// The subcommand `laws`.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "props/backend/backend_laws.h"
#include "props/base/interrupt.h"
#include "props/command/backend_command.h"
#include "props/command/command.h"
#include "props/laws/laws.h"
#include "props/laws/pool_laws.h"
#include "props/search/fuzz.h"

namespace kvtwin::props {
namespace {

struct LawsArguments {
  std::uint64_t seed = 1;
  std::int64_t runs = 200;
  std::string law;
  std::string twin;
  std::string history;
  std::string kind;  // "paged" or "groups": pools in place of caches.
  bool json = false;
  BackendArguments backend;  // Instead of the twins, if one is given.
};

LawHistories HistoriesOf(const LawsArguments& arguments) {
  LawHistories histories{
      .seed = arguments.seed, .count = arguments.runs, .history = {}};
  if (!arguments.history.empty()) {
    histories.history = *ParseHistory(arguments.history);
  }
  return histories;
}

// `why_not`, if not empty, says why the law is not judged.
nlohmann::ordered_json LawJson(const Law& law, const Subject& subject,
                               const LawRun& run, const std::string& why_not) {
  nlohmann::ordered_json json = {
      {"law", law.name},
      {subject.is_twin() ? "twin" : "backend", subject.name},
      {"histories", run.histories},
      {"judged", run.judged},
      {"holds", !run.failure}};
  if (!why_not.empty()) {  // Neither true nor false.
    json["holds"] = nullptr;
    json["not_judged"] = why_not;
  }
  if (!run.failure) return json;
  json["history"] = ToText(run.shrunk);
  json["shrunk_to"] = run.shrunk.ops.size();
  json["reason"] = run.failure->text;
  if (run.failure->check == law.name) {
    json["rules"] = law.rules;
  } else {
    json["check"] = run.failure->check;
  }
  json["rerun"] = LawCommand(law, run.shrunk, subject);
  return json;
}

std::string Text(const Law& law, const Subject& subject, const LawRun& run,
                 const std::string& why_not) {
  if (!why_not.empty()) {
    return fmt::format("-      {:<22} {:<10} not judged: {}\n", law.name,
                       subject.name, why_not);
  }
  std::string text =
      fmt::format("{:<6} {:<22} {:<10} {:>6} histories, judged {:>6} times\n",
                  run.failure ? "BROKEN" : "holds", law.name, subject.name,
                  run.histories, run.judged);
  if (!run.failure) return text;
  if (run.failure->check != law.name) {  // Another check failed.
    return text + fmt::format("\n  {}: {}\n  rerun   {}\n\n",
                              run.failure->check, run.failure->text,
                              LawCommand(law, run.shrunk, subject));
  }
  return text + fmt::format("\n  {} ({})\n  {}\n  rerun   {}\n\n",
                            law.statement, law.rules, run.failure->text,
                            LawCommand(law, run.shrunk, subject));
}

// Reports on the laws, on one cache after another.
class LawsReport {
 public:
  explicit LawsReport(const LawsArguments& arguments) : arguments_(arguments) {}

  void Add(const Law& law, const Subject& subject, const LawRun& run,
           const std::string& why_not) {
    broken_ += run.failure ? 1 : 0;
    (why_not.empty() ? judged_ : not_judged_) += 1;
    if (arguments_.json) {
      laws_.push_back(LawJson(law, subject, run, why_not));
    } else {
      fmt::print("{}", Text(law, subject, run, why_not));
    }
  }
  void Add(const PoolLaw& law, const Subject& subject,
           const PagedFuzzResult& result, std::string why_not = "") {
    if (why_not.empty() && result.ran == 0) {
      why_not = "it has no such pool";
    }
    broken_ += result.failure ? 1 : 0;
    (result.ran > 0 ? judged_ : not_judged_) += 1;
    if (arguments_.json) {
      nlohmann::ordered_json json = {
          {"law", law.name},
          {subject.arguments.empty() ? "twin" : "backend", subject.name},
          {"histories", result.ran},
          {"judged", result.judged},
          {"holds", !result.failure}};
      if (result.ran == 0) {
        json["holds"] = nullptr;
        json["not_judged"] = why_not;
      }
      if (result.failure) {
        json.update({{"history", ToText(result.shrunk)},
                     {"shrunk_to", result.shrunk.ops.size()},
                     {"reason", result.failure->text},
                     {"rules", law.rules},
                     {"rerun", LawCommand(law, result.shrunk, subject)}});
      }
      laws_.push_back(std::move(json));
    } else if (result.ran == 0) {
      fmt::print("-      {:<22} {:<10} not judged: {}\n", law.name,
                 subject.name, why_not);
    } else {
      fmt::print("{:<6} {:<22} {:<10} {:>6} histories, judged in {:>6}\n",
                 result.failure ? "BROKEN" : "holds", law.name, subject.name,
                 result.ran, result.judged);
      if (result.failure) {
        fmt::print("\n  {} ({})\n  {}\n  rerun   {}\n\n", law.statement,
                   law.rules, result.failure->text,
                   LawCommand(law, result.shrunk, subject));
      }
    }
  }
  // Adds a line to the summary.
  void Note(std::string text) { note_ = std::move(text); }
  // The exit code.
  int End() {
    if (arguments_.json) {
      const nlohmann::ordered_json whole = {
          {"broken", broken_}, {"seed", arguments_.seed}, {"laws", laws_}};
      PrintJson(whole);
    } else if (arguments_.backend.given()) {
      fmt::print("{} broken, {} hold, {} not judged, seed {}\n", broken_,
                 judged_ - broken_, not_judged_, arguments_.seed);
      if (!note_.empty()) fmt::print("{}\n", note_);
    } else {
      fmt::print("{} broken, seed {}\n", broken_, arguments_.seed);
    }
    if (broken_ > 0) return 1;
    return judged_ == 0 && not_judged_ > 0 && !Interrupted() ? 2 : 0;
  }

 private:
  const LawsArguments& arguments_;
  nlohmann::ordered_json laws_ = nlohmann::ordered_json::array();
  int broken_ = 0;
  int judged_ = 0;
  int not_judged_ = 0;
  std::string note_;
};

// Whether a Remove may rewrite K rows.
bool MovesKRows(const Abilities& can) {
  return can.Can(KVTWIN_CAN_REMOVE_MIDDLE) &&
         (can.shifts & ~(1U << KVTWIN_SHIFT_NONE)) != 0;
}

int RunOnBackend(const LawsArguments& arguments) {
  return OnOurBackend(
      arguments.backend, "a law",
      [&](Host& host, const BackendInfo& info, const Subject& subject) {
        if (subject.level > Level::kVisibility) {
          return Complain(
              fmt::format("a law compares rows bit for bit, but {} claims the "
                          "{} level: "
                          "`kvtwin fuzz --backend` compares attention instead",
                          info.name, LevelName(subject.level)));
        }
        const LawHistories histories = HistoriesOf(arguments);
        if (histories.history &&
            !info.abilities.Fits(histories.history->setup)) {
          return Complain(WhyNotMade(info, histories.history->setup));
        }
        LawsReport report(arguments);
        BackendLaws laws(
            subject, histories,
            [&](const Law& law, const History& history, bool known_to_hang) {
              return host.Judge(law, history, subject.level, known_to_hang);
            });
        for (const Law& law : Laws()) {
          if (!arguments.law.empty() && law.name != arguments.law) continue;
          if (Interrupted()) break;
          const LawAnswer answer = laws.Run(law);
          report.Add(law, subject, answer.run, answer.why_not);
          if (law.name == "shift_back" && !answer.why_not.empty() &&
              MovesKRows(info.abilities)) {
            report.Note(
                "no law judged K rows after a removal; `kvtwin fuzz "
                "--backend` compares them");
          }
        }
        return report.End();
      });
}

int RunPoolLaws(const LawsArguments& arguments,
                const std::optional<PagedHistory>& history) {
  LawsReport report(arguments);
  FuzzOptions options;
  options.seed = arguments.seed;
  options.groups = arguments.kind == "groups";
  const auto judge_by = [&](const PoolLaw& law, const Subject& subject,
                            std::string why_not = "") {
    const PagedFuzzResult result =
        why_not.empty() ? JudgePools(options, arguments.runs, history, subject)
                        : PagedFuzzResult();
    report.Add(law, subject, result, std::move(why_not));
  };
  const auto each = [&](const auto& judge) {
    for (const PoolLaw& law : PoolLaws()) {
      if (!arguments.law.empty() && law.name != arguments.law) continue;
      if (!Interrupted()) judge(law);
    }
    return report.End();
  };
  if (arguments.backend.given()) {
    return OnPoolHost(arguments.backend, options.groups,
                      [&](const PoolInfo& info, Level level,
                          const PoolSubjectAt& subject_at) {
                        return each([&](const PoolLaw& law) {
                          judge_by(law, subject_at(level, &law),
                                   WhyNotJudged(law, info));
                        });
                      });
  }
  return each([&](const PoolLaw& law) {
    for (const std::string_view twin : TwinNames()) {
      if (!arguments.twin.empty() && twin != arguments.twin) continue;
      judge_by(law, LawSubject(law, twin));
    }
  });
}

// Whether the arguments name pools; throws if they contradict one another.
bool AreOfPools(const LawsArguments& arguments) {
  const bool pools =
      !arguments.kind.empty() || arguments.history.starts_with("kvp1");
  if (!arguments.law.empty() &&
      (FindPoolLaw(arguments.law) != nullptr) != pools) {
    throw CLI::ValidationError("--law",
                               fmt::format("{} is a law of {}", arguments.law,
                                           pools ? "caches"
                                                 : "pools: --kind paged or "
                                                   "--kind groups"));
  }
  return pools;
}

int RunLaws(const LawsArguments& arguments) {
  if (AreOfPools(arguments)) {
    if (arguments.history.empty()) return RunPoolLaws(arguments, std::nullopt);
    const Result<PagedHistory> history = ParsePagedHistory(arguments.history);
    if (!history.ok()) {
      fmt::print(stderr, "kvtwin laws: {}\n", history.status().message());
      return 2;
    }
    return RunPoolLaws(arguments, *history);
  }
  if (!arguments.history.empty()) {
    const Result<History> history = ParseHistory(arguments.history);
    if (!history.ok()) {
      fmt::print(stderr, "kvtwin laws: {}\n", history.status().message());
      return 2;
    }
  }
  if (arguments.backend.given()) return RunOnBackend(arguments);
  LawsReport report(arguments);
  const LawHistories histories = HistoriesOf(arguments);
  for (const Law& law : Laws()) {
    if (!arguments.law.empty() && law.name != arguments.law) continue;
    for (const std::string_view twin : TwinNames()) {
      if (!arguments.twin.empty() && twin != arguments.twin) continue;
      if (Interrupted()) break;
      const Subject subject = TwinSubject(twin);
      report.Add(law, subject, RunLawOn(law, subject, histories), "");
    }
  }
  return report.End();
}

}  // namespace

void AddLawsCommand(CLI::App& app, int& exit_code) {
  const auto arguments = std::make_shared<LawsArguments>();
  CLI::App* command =
      app.add_subcommand("laws",
                         "Check the twins, or a third-party cache, by the laws "
                         "of docs/laws.md");
  std::vector<std::string> laws;
  for (const Law& law : Laws()) laws.emplace_back(law.name);
  for (const PoolLaw& law : PoolLaws()) laws.emplace_back(law.name);
  const std::vector<std::string> twins(TwinNames().begin(), TwinNames().end());
  command->add_option("--law", arguments->law, "check only this law")
      ->check(CLI::IsMember(laws));
  command->add_option("--twin", arguments->twin, "check only this twin")
      ->check(CLI::IsMember(twins));
  auto* runs =
      command->add_option("--runs", arguments->runs, "histories for each law")
          ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40))
          ->capture_default_str();
  command->add_option("--seed", arguments->seed, "the seed of the histories")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 62))
      ->capture_default_str();
  command->add_option("--kind", arguments->kind, "judge pools, by their laws")
      ->check(CLI::IsMember({"paged", "groups"}));
  command
      ->add_option("--history", arguments->history,
                   "only this history, 'kvt1 ... | ...', or of a pool 'kvp1 "
                   "... | ...' (docs/histories.md)")
      ->excludes(runs);
  AddBackendOptions(*command, arguments->backend);
  AddProfileOption(*command, arguments->backend);
  command->add_flag("--json", arguments->json, "print one JSON object");
  command->callback([arguments, &exit_code] {
    if (arguments->history.empty()) {
      SetKindOfPool(arguments->backend, arguments->kind);
    }
    CatchInterrupts();
    exit_code = RunLaws(*arguments);
  });
}

}  // namespace kvtwin::props
