// The subcommand `bisect`.

#include <fmt/format.h>
#include <sys/wait.h>

#include <CLI/CLI.hpp>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/refusals.h"
#include "props/base/filter.h"
#include "props/base/program.h"
#include "props/command/backend_command.h"
#include "props/command/command.h"
#include "props/history/history.h"
#include "props/history/line_reader.h"
#include "props/paged/paged_history.h"

namespace kvtwin::props {
namespace {

constexpr int kRight = 0;
constexpr int kWrong = 1;
constexpr int kSkipped = 125;  // `git bisect run` then skips the commit.

struct BisectArguments {
  std::string history;
  BackendArguments backend;
  std::string build;
  std::string good;
  std::string bad = "HEAD";
  bool json = false;
};

// Runs a command whose output goes to stderr, and returns its exit code.
int RunCommand(const std::string& command) {
  std::fflush(nullptr);
  const int status = std::system(fmt::format("({}) >&2", command).c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

// Returns the output of git without the last newline.
Result<std::string> Git(const std::string& arguments) {
  Result<std::string> text =
      Filter("git " + arguments, "", {.seconds = 600, .bytes = 1 << 20});
  if (text.ok() && text->ends_with('\n')) text->pop_back();
  return text;
}

// Returns a shell script that builds the commit that is checked out and runs
// the history on it. The script exits with kRight, kWrong or kSkipped. The
// build's last line may end with a comment.
std::string StepScript(const BisectArguments& arguments) {
  std::string program = Program();
  if (program.find('/') != std::string::npos) {
    program = std::filesystem::absolute(program).string();
  }
  return fmt::format(
      "({}\n) || exit {}; {} run {} {}; "
      "case $? in 0) exit {};; 1) exit {};; *) exit {};; esac",
      arguments.build, kSkipped, ShellWord(program),
      ShellWord(arguments.history), ArgumentsText(arguments.backend), kRight,
      kWrong, kSkipped);
}

// Returns why an end differs from what the user says, or an empty string.
std::string WhyNotBetween(const BisectArguments& arguments,
                          const std::string& step,
                          const std::array<std::string, 2>& ends) {
  for (const bool good : {false, true}) {
    const std::string& commit = good ? arguments.good : arguments.bad;
    const Result<std::string> out = Git("checkout -q --detach " + ends[good]);
    if (!out.ok()) return out.status().message();
    const int code = RunCommand(step);
    if (code == (good ? kRight : kWrong)) continue;
    if (code != kRight && code != kWrong) {
      return fmt::format("{} cannot be built, or does not run", commit);
    }
    return fmt::format("the history {} at {}",
                       code == kWrong ? "fails" : "does not fail", commit);
  }
  return "";
}

// Prints the first commit at which the history fails, or several candidates if
// commits before it cannot be built.
int Print(const BisectArguments& arguments, const std::string& good) {
  const Result<std::string> lines =
      Git("log --reverse --format='%H %s' refs/bisect/bad --not " + good +
          " --glob='refs/bisect/good-*'");
  if (!lines.ok()) return Complain(lines.status().message());
  if (!arguments.json) {
    fmt::print("the first commit at which the history fails{}:\n  {}\n",
               lines->find('\n') == std::string::npos ? "" : " is one of",
               fmt::join(Split(*lines, "\n"), "\n  "));
    return 1;
  }
  auto commits = nlohmann::ordered_json::array();
  for (const std::string_view line : Split(*lines, "\n")) {
    const std::size_t space = line.find(' ');
    commits.push_back({{"commit", line.substr(0, space)},
                       {"subject", line.substr(space + 1)}});
  }
  PrintJson({{"first_bad", commits}});
  return 1;
}

// Requires: git is bisecting. Returns the exit code.
int Search(const BisectArguments& arguments,
           const std::array<std::string, 2>& ends) {
  const std::string step = StepScript(arguments);
  const std::string why = WhyNotBetween(arguments, step, ends);
  if (!why.empty()) return Complain(why);
  RunCommand("git bisect run sh -c " + ShellWord(step));
  return Print(arguments, ends[1]);
}

// Errors: text that is not a history of a cache or of a pool.
Status CheckHistory(const std::string& text) {
  return text.starts_with("kvp1") ? ParsePagedHistory(text).status()
                                  : ParseHistory(text).status();
}

// Errors: the checkout has changes, or a bisection of the user would be lost.
Status CheckCheckout() {
  const Result<std::string> changed =
      Git("status --porcelain --untracked-files=no");
  if (!changed.ok()) return changed.status();
  if (!changed->empty()) return Untimely("the checkout has changes");
  const Result<std::string> started = Git("rev-parse --git-path BISECT_START");
  if (!started.ok()) return started.status();
  if (!std::filesystem::exists(*started)) return {};
  return Untimely(
      "a bisection is in progress here: end it with 'git bisect reset' first");
}

int RunBisect(const BisectArguments& arguments) {
  Status status = CheckHistory(arguments.history);
  if (!status.ok()) return Complain("history: " + status.message());
  status = CheckCheckout();
  if (!status.ok()) return Complain(status.message());
  // During the bisection, names such as HEAD~4 would mean other commits.
  std::array<std::string, 2> ends;  // The bad commit and the good commit.
  for (const bool good : {false, true}) {
    const Result<std::string> commit =
        Git(fmt::format("rev-parse --verify {}^{{commit}}",
                        ShellWord(good ? arguments.good : arguments.bad)));
    if (!commit.ok()) return Complain(commit.status().message());
    ends[good] = *commit;
  }
  if (ends[0] == ends[1]) {
    return Complain("--good and --bad are the same commit");
  }
  const Result<std::string> started =
      Git(fmt::format("bisect start {} {}", ends[0], ends[1]));
  if (!started.ok()) return Complain(started.status().message());
  const int code = Search(arguments, ends);
  const Result<std::string> reset = Git("bisect reset");
  return reset.ok() ? code : Complain(reset.status().message());
}

}  // namespace

void AddBisectCommand(CLI::App& app, int& exit_code) {
  const auto arguments = std::make_shared<BisectArguments>();
  CLI::App* command = app.add_subcommand(
      "bisect",
      "Find the commit of a backend at which a history begins to fail, with "
      "git bisect (docs/ci.md)");
  command
      ->add_option("history", arguments->history,
                   "the history that fails, 'kvt1 ... | ...'")
      ->required();
  command
      ->add_option("--backend", arguments->backend.host.library,
                   "the shared library that --build makes")
      ->required();
  AddLevelOption(*command, arguments->backend);
  AddProfileOption(*command, arguments->backend);
  command
      ->add_option("--build", arguments->build,
                   "a shell command that builds the commit that is checked out")
      ->required();
  command
      ->add_option("--good", arguments->good,
                   "a commit at which the history does not fail")
      ->required();
  command
      ->add_option("--bad", arguments->bad, "a later commit, at which it fails")
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "print one JSON object");
  command->callback(
      [arguments, &exit_code] { exit_code = RunBisect(*arguments); });
}

}  // namespace kvtwin::props
