// The subcommand `laws`.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "props/base/interrupt.h"
#include "props/command/command.h"
#include "props/laws/laws.h"

namespace kvtwin::props {
namespace {

struct Arguments {
  std::uint64_t seed = 1;
  std::int64_t runs = 200;
  std::string law;
  std::string twin;
  std::string history;
  bool json = false;
};

// Checks a law on random histories, or on the history that was given.
LawRun RunOne(const Law& law, const Subject& subject,
              const Arguments& arguments) {
  if (arguments.history.empty()) {
    return RunLaw(law, subject, arguments.seed, arguments.runs);
  }
  const Result<History> history = ParseHistory(arguments.history);
  const LawResult result = Judge(law, *history, subject);
  LawRun run{.histories = 1, .judged = result.judged, .failure = {}};
  if (!result.wrong.empty()) run.failure = {0, *history, result.wrong};
  return run;
}

nlohmann::ordered_json Json(const Law& law, const Subject& subject,
                            const LawRun& run) {
  nlohmann::ordered_json json = {{"law", law.name},
                                 {"twin", subject.name},
                                 {"histories", run.histories},
                                 {"judged", run.judged},
                                 {"holds", !run.failure}};
  if (!run.failure) return json;
  json["history"] = ToText(run.failure->shrunk);
  json["shrunk_to"] = run.failure->shrunk.ops.size();
  json["reason"] = run.failure->wrong;
  json["rules"] = law.rules;
  json["rerun"] = LawCommand(law, run.failure->shrunk, subject);
  return json;
}

std::string Text(const Law& law, const Subject& subject, const LawRun& run) {
  std::string text =
      fmt::format("{:<6} {:<22} {:<10} {:>6} histories, judged {:>6} times\n",
                  run.failure ? "BROKEN" : "holds", law.name, subject.name,
                  run.histories, run.judged);
  if (!run.failure) return text;
  return text + fmt::format("\n  {} ({})\n  {}\n  rerun   {}\n\n",
                            law.statement, law.rules, run.failure->wrong,
                            LawCommand(law, run.failure->shrunk, subject));
}

int RunLaws(const Arguments& arguments) {
  if (!arguments.history.empty()) {
    const Result<History> history = ParseHistory(arguments.history);
    if (!history.ok()) {
      fmt::print(stderr, "kvtwin laws: {}\n", history.status().message());
      return 2;
    }
  }
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  int broken = 0;
  for (const Law& law : Laws()) {
    if (!arguments.law.empty() && law.name != arguments.law) continue;
    for (const std::string_view twin : TwinNames()) {
      if (!arguments.twin.empty() && twin != arguments.twin) continue;
      if (Interrupted()) break;
      const Subject subject = TwinSubject(twin);
      const LawRun run = RunOne(law, subject, arguments);
      broken += run.failure ? 1 : 0;
      if (arguments.json) {
        json.push_back(Json(law, subject, run));
      } else {
        fmt::print("{}", Text(law, subject, run));
      }
    }
  }
  if (arguments.json) {
    const nlohmann::ordered_json whole = {
        {"broken", broken}, {"seed", arguments.seed}, {"laws", json}};
    fmt::print("{}\n", whole.dump());
  } else {
    fmt::print("{} broken, seed {}\n", broken, arguments.seed);
  }
  return broken > 0 ? 1 : 0;
}

}  // namespace

void AddLawsCommand(CLI::App& app, int& exit_code) {
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* command =
      app.add_subcommand("laws", "Check the twins by the laws of docs/laws.md");
  std::vector<std::string> laws;
  for (const Law& law : Laws()) laws.emplace_back(law.name);
  const std::vector<std::string> twins(TwinNames().begin(), TwinNames().end());
  command->add_option("--law", arguments->law, "check only this one")
      ->check(CLI::IsMember(laws));
  command->add_option("--twin", arguments->twin, "check only this one")
      ->check(CLI::IsMember(twins));
  auto* runs =
      command->add_option("--runs", arguments->runs, "histories for each law")
          ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40))
          ->capture_default_str();
  command->add_option("--seed", arguments->seed, "the seed of the histories")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 62))
      ->capture_default_str();
  command
      ->add_option("--history", arguments->history,
                   "only this one, 'kvt1 ... | ...' (docs/histories.md)")
      ->excludes(runs);
  command->add_flag("--json", arguments->json, "print one JSON object");
  command->callback([arguments, &exit_code] {
    CatchInterrupts();
    exit_code = RunLaws(*arguments);
  });
}

}  // namespace kvtwin::props
