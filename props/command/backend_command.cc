#include "props/command/backend_command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "core/dialects/profiles.h"
#include "core/names.h"
#include "core/save/file.h"
#include "props/backend/live.h"
#include "props/base/counted.h"
#include "props/base/interrupt.h"
#include "props/base/program.h"
#include "props/base/text_file.h"
#include "props/command/option_checks.h"
#include "props/report/page.h"
#include "props/report/page_file.h"
#include "props/search/explain.h"

namespace kvtwin::props {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array kLevels = {Level::kIdentity, Level::kVisibility,
                                Level::kNumeric, Level::kAttention};

// Returns the options that reproduce a run on the backend, without the level.
std::string GivenText(const BackendArguments& arguments) {
  const BackendArguments defaults;
  std::string text = "--backend " + ShellWord(arguments.host.library);
  if (arguments.host.call_seconds != defaults.host.call_seconds) {
    text += fmt::format(" --call-seconds {}", arguments.host.call_seconds);
  }
  if (arguments.memory_mib != defaults.memory_mib) {
    text += fmt::format(" --memory-mib {}", arguments.memory_mib);
  }
  if (!arguments.host.profile.empty()) {
    text += " --profile " + ShellWord(arguments.host.profile);
  }
  return text;
}

std::string ArgumentsText(const BackendArguments& arguments, Level level) {
  return fmt::format("{} --level {}", GivenText(arguments), LevelName(level));
}

// Writes the page of a failure. If the backend's process survives the history,
// it draws the page itself, with cells and rows.
Status WritePageOf(Host& host, const Failure& failure, const Subject& subject,
                   const std::string& path) {
  const std::string html = IsHang(failure)
                               ? ""
                               : host.Page(*ParseHistory(failure.history),
                                           subject.level, subject.arguments);
  return html.empty() ? WritePage(failure, path) : WriteFile(path, html);
}

constexpr const char* kNoLevel =
    "identity needs a backend that lists its cells and follows our rules, "
    "attention one that has `attend`, and other levels one that has `get`";

HostOptions OptionsOf(const BackendArguments& arguments) {
  HostOptions options = arguments.host;
  options.memory_bytes = arguments.memory_mib << 20;
  return options;
}

// Returns the levels to try; none if the backend cannot run at the level that
// the user gave.
std::vector<Level> LevelsFor(const BackendArguments& arguments,
                             const BackendInfo& info) {
  return LevelsOf(info, FromName<Level>(kLevelNames, arguments.level));
}

Json FindingJson(const Failure& finding) {
  Json json = {{"level", LevelName(finding.level)}};
  json.update(FailureJson(finding));
  return json;
}

// Returns the line of the final report about a level.
std::string LevelLine(Level level, const LiveResult& result,
                      const BackendInfo& info) {
  return fmt::format("{:<11} {}{}\n", LevelName(level),
                     VerdictOn(level, result, info).text,
                     level == info.claims ? " (claimed)" : "");
}

void PrintFindings(const BackendInfo& info, const FuzzOptions& options,
                   const LiveResult& result) {
  Json findings = Json::array();
  for (const Failure& finding : result.findings) {
    findings.push_back(FindingJson(finding));
  }
  Json all = {{"backend", info.name},
              {"profile", info.profile},
              {"claims", LevelName(info.claims)},
              {"holds", LevelName(result.holds)},
              {"not_judged", LevelName(result.not_judged)},
              {"right", result.Right(info)},
              {"operations", result.operations},
              {"histories", result.histories},
              {"seconds", result.seconds},
              {"seed", options.seed},
              {"digest", fmt::format("{:016x}", result.digest)},
              {"notes", NotesOn(result.answers)}};
  if (!options.known_buckets.empty()) {
    all["passed_over"] = result.passed_over;
    all["never_met"] = NeverMet(result.passed_over, options.known_buckets);
  }
  if (!findings.empty()) all.update(findings[0]);  // As of a twin.
  all["findings"] = std::move(findings);
  PrintJson(all);
}

// Returns the line of what a backend does not declare, or "".
std::string NeverTriedText(const std::vector<std::string>& not_declared) {
  if (not_declared.empty()) return "";
  return fmt::format("not declared, so never tried: {}",
                     fmt::join(not_declared, ", "));
}

void PrintText(const BackendInfo& info, const FuzzOptions& options,
               const LiveResult& result) {
  fmt::print("{}, by the rules of {}\n", info.name, info.profile);
  for (const Level level : kLevels) {
    if (level == Level::kAttention && !info.attend) continue;
    fmt::print("{}", LevelLine(level, result, info));
  }
  const std::string not_declared = NeverTriedText(NotDeclared(info));
  if (result.holds != Level::kNone && !not_declared.empty()) {
    fmt::print("{:12}{}\n", "", not_declared);
  }
  const std::string more =
      result.known > 0 ? fmt::format(" ({} one of these findings)",
                                     Counted(result.known, "more history has",
                                             "more histories have"))
                       : "";
  fmt::print("{} in {}, {}{}, seed {}, digest {:016x}\n",
             Counted(result.operations, "operation"),
             Counted(result.histories, "history", "histories"),
             Counted(std::ssize(result.findings), "finding"), more,
             options.seed, result.digest);
  fmt::print("{}{}", PassedOverText(result.passed_over, options.known_buckets),
             NotesText(result.answers));
}

// Lists the kinds that a backend says it has: "causal, swa".
std::string KindsText(const Abilities& abilities) {
  std::vector<std::string_view> names;
  for (std::size_t i = 0; i < kKindNames.size(); ++i) {
    if (abilities.HasKind(static_cast<Kind>(i))) names.push_back(kKindNames[i]);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

// Returns why a path cannot name a library, or "". HostProcess reports a
// missing file.
std::string WhyNoLibrary(const std::string& path) {
  struct stat found = {};
  if (stat(path.c_str(), &found) != 0) return "";
  return CheckRegular(path, found.st_mode).message();
}

}  // namespace

void PrintJson(const Json& json) {
  fmt::print("{}\n", json.dump(-1, ' ', false,
                               nlohmann::json::error_handler_t::replace));
}

LeftOut LeftOutOf(const PagedHistory& history, const RunResult& result,
                  const Subject& subject, const PoolInfo& info) {
  return {
      .operations = NotRun(history, subject.level, info.not_declared),
      .nothing_judged = !result.failure && !HasJudged(result, subject.level)};
}

std::string WhyNoPool(const PoolInfo& info, const PagedHistory& history) {
  return WhyNoPool(info.name, info.abilities, info.groups, history);
}

std::string LeftOutText(const LeftOut& left_out) {
  std::string text;
  for (const std::string& operation : left_out.operations) {
    text += fmt::format("  not run {}\n", operation);
  }
  return text;
}

Json LeftOutJson(const LeftOut& left_out) {
  return {{"not_run", left_out.operations},
          {"nothing_judged", left_out.nothing_judged}};
}

bool SaysNotJudged(const PagedCoverageCounts& counts, std::string_view name) {
  if (!counts.StoredNothing()) return false;
  fmt::print(stderr,
             "kvtwin: not judged: no append to all layers of {} succeeded\n",
             name);
  return true;
}

int Complain(const std::string& text) {
  fmt::print(stderr, "kvtwin: {}\n", text);
  return 2;
}

void AddBackendOptions(CLI::App& command, BackendArguments& arguments) {
  CLI::Option* backend =
      command
          .add_option("--backend", arguments.host.library,
                      "a third-party cache, as a shared library (docs/live.md)")
          ->check(CLI::Validator(WhyNoLibrary, "PATH"));
  if (CLI::Option* twin = command.get_option_no_throw("--twin")) {
    backend->excludes(twin);
  }
  AddLevelOption(command, arguments);
  command
      .add_option("--call-seconds", arguments.host.call_seconds,
                  "a call of a backend that takes longer counts as a hang")
      ->needs(backend)
      ->check(RealRange(0.01, 1e6))
      ->capture_default_str();
  command
      .add_option("--shrink-seconds", arguments.host.shrink_seconds,
                  "seconds for shrinking a failure of a backend")
      ->needs(backend)
      ->check(RealRange(0.01, 1e6))
      ->capture_default_str();
  command
      .add_option("--memory-mib", arguments.memory_mib,
                  "end a backend that uses more memory than this")
      ->needs(backend)
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30))
      ->capture_default_str();
}

void AddLevelOption(CLI::App& command, BackendArguments& arguments) {
  command.add_option("--level", arguments.level, "compare at this level only")
      ->check(CLI::IsMember(std::vector<std::string>(
          kLevelNames.begin(), kLevelNames.begin() + kLevels.size())))
      ->transform(CLI::Transformer({{"entitlement", "visibility"}}))
      ->needs("--backend");
}

std::string ArgumentsText(const BackendArguments& arguments) {
  return fmt::format("{}{}{}", GivenText(arguments),
                     arguments.level.empty() ? "" : " --level ",
                     arguments.level);
}

void AddProfileOption(CLI::App& command, BackendArguments& arguments) {
  command
      .add_option("--profile", arguments.host.profile,
                  "judge a backend by the rules of this profile, with "
                  "exceptions if needed: 'mlx except copy adds' "
                  "(docs/profiles.md)")
      ->check(CLI::Validator(
          [](const std::string& text) {
            return ParseRules(text).status().message();
          },
          "PROFILE"))
      ->needs("--backend");
}

int OnLevels(const BackendArguments& arguments,
             const std::function<
                 int(Host&, const BackendInfo&, const std::vector<Level>&,
                     const std::function<Subject(Level)>&)>& act) {
  Host host(OptionsOf(arguments));
  const Result<BackendInfo> info = host.Describe();
  if (!info.ok()) return Complain(info.status().message());
  const std::vector<Level> levels = LevelsFor(arguments, *info);
  if (levels.empty()) return Complain(kNoLevel);
  return act(host, *info, levels, [&](Level level) {
    return host.SubjectAt(*info, level, ArgumentsText(arguments, level));
  });
}

namespace {

// Searches at all levels, and reports. Returns the exit code.
int FuzzLevels(Host& host, const BackendInfo& info,
               const std::vector<Level>& levels,
               const std::function<Subject(Level)>& subject_at,
               const FuzzOptions& options, bool json, const std::string& html) {
  // Without this check, another kind would run and be reported to hold.
  if (options.kind && !info.abilities.HasKind(*options.kind)) {
    return Complain(fmt::format(
        "--kind {}: {} does not declare such a cache, only {}",
        KindName(*options.kind), info.name, KindsText(info.abilities)));
  }
  if (options.speculate && !info.abilities.CanDraft()) {
    return Complain(fmt::format(
        "--speculate: {} does not declare drafts (CAN_DRAFT)", info.name));
  }
  if (options.speculate && options.kind &&
      !info.abilities.CanDraft(*options.kind)) {
    return Complain(
        fmt::format("--speculate: {} does not declare drafts of states "
                    "(CAN_DRAFT_STATES)",
                    info.name));
  }
  const auto clear = [&] {
    if (options.progress) fmt::print(stderr, "\r{:40}\r", "");
  };
  const auto print = [&](const Failure& finding) {
    clear();
    if (!json) {
      fmt::print("{}\n", FindingText(finding, info.abilities.can_resume));
    }
    std::fflush(stdout);
  };
  const LiveResult result = FuzzLive(options, levels, subject_at, print);
  clear();
  if (result.ran == 0 && !Interrupted()) {
    return Complain(
        fmt::format("{} supports none of the caches of {} "
                    "histories",
                    info.name, result.histories));
  }
  const bool right = result.Right(info);
  if (json) {
    PrintFindings(info, options, result);
  } else {
    PrintText(info, options, result);
  }
  const int code = right ? 0 : 1;
  if (html.empty() || result.findings.empty()) return code;
  // The page shows a finding at the claimed level, if there is one.
  const auto claimed =
      std::ranges::find(result.findings, info.claims, &Failure::level);
  const Failure& shown =
      claimed != result.findings.end() ? *claimed : result.findings.front();
  return AfterPage(WritePageOf(host, shown, subject_at(shown.level), html),
                   html, code);
}

}  // namespace

int FuzzBackend(const BackendArguments& arguments, const FuzzOptions& options,
                bool json, const std::string& html) {
  return OnLevels(arguments, [&](Host& host, const BackendInfo& info,
                                 const std::vector<Level>& levels,
                                 const std::function<Subject(Level)>& at) {
    return FuzzLevels(host, info, levels, at, options, json, html);
  });
}

bool IsPool(const BackendArguments& arguments) {
  Host host(OptionsOf(arguments));
  return !host.Describe().ok() && host.DescribePool().ok();
}

void SetKindOfPool(const BackendArguments& arguments, std::string& kind) {
  if (kind.empty() && arguments.given() && IsPool(arguments)) kind = "paged";
}

int OnPoolBackend(
    const BackendArguments& arguments, bool groups,
    const std::function<int(const Subject&, const PoolInfo*)>& act) {
  return OnPoolHost(
      arguments, groups,
      [&](const PoolInfo& info, Level level, const PoolSubjectAt& subject_at) {
        return act(subject_at(level, nullptr), &info);
      });
}

std::string DeclaredText(const PoolInfo& info, Level level) {
  const std::string not_declared = NeverTriedText(info.not_declared);
  return fmt::format("level {}{}{}{}\n", LevelName(level),
                     level == info.claims ? " (claimed)" : "",
                     not_declared.empty() ? "" : "; ", not_declared);
}

int OnPoolHost(const BackendArguments& arguments, bool groups,
               const std::function<int(const PoolInfo&, Level,
                                       const PoolSubjectAt&)>& act) {
  Host host(OptionsOf(arguments));
  const Result<PoolInfo> info = host.DescribePool();
  if (!info.ok()) return Complain(info.status().message());
  const Level level =
      FromName<Level>(kLevelNames, arguments.level).value_or(info->claims);
  if (level == Level::kNumeric) {
    return Complain(fmt::format("pools have no {} level", LevelName(level)));
  }
  if (groups && !info->groups) {
    return Complain(fmt::format(
        "--kind groups: {} does not declare groups (KVTWIN_POOL_HAS_GROUPS)",
        info->name));
  }
  if (std::ranges::count(info->levels, level) == 0) {
    return Complain(
        level == Level::kIdentity
            ? fmt::format("{} does not claim identity", info->name)
            : fmt::format("--level {}: the table of {} has no {}",
                          LevelName(level), info->name,
                          level == Level::kAttention ? "attend" : "views"));
  }
  return act(*info, level, [&](Level at, const PoolLaw* law) {
    return host.SubjectAt(*info, at, ArgumentsText(arguments), law);
  });
}

int OnOurBackend(
    const BackendArguments& arguments, std::string_view what,
    const std::function<int(Host&, const BackendInfo&, const Subject&)>& act) {
  Host host(OptionsOf(arguments));
  const Result<BackendInfo> info = host.Describe();
  if (!info.ok()) return Complain(info.status().message());
  if (info->rules != RulesAt(*info, Level::kIdentity)) {
    return Complain(fmt::format(
        "{} needs a backend that follows our rules, but {} follows those of "
        "{}; `kvtwin fuzz --backend` supports these",
        what, info->name, info->profile));
  }
  const std::vector<Level> levels = LevelsFor(arguments, *info);
  if (levels.empty()) return Complain(kNoLevel);
  const Level level = ClaimedOf(levels, *info);
  return act(host, *info,
             host.SubjectAt(*info, level, ArgumentsText(arguments, level)));
}

int RunOnBackend(const BackendArguments& arguments, const History& history,
                 bool json, const std::string& html) {
  Host host(OptionsOf(arguments));
  const Result<BackendInfo> info = host.Describe();
  if (!info.ok()) return Complain(info.status().message());
  const std::vector<Level> levels = LevelsFor(arguments, *info);
  if (levels.empty()) return Complain(kNoLevel);
  const Level level = ClaimedOf(levels, *info);
  const Subject subject =
      host.SubjectAt(*info, level, ArgumentsText(arguments, level));
  CallTrace trace;
  const RunResult result = RunHistory(history, subject, {.trace = &trace});
  if (!result.ran && !result.failure) {
    return Complain(WhyNotMade(*info, history.setup));
  }
  std::optional<Failure> failure;
  if (result.failure) failure = Explain(history, *result.failure, subject);
  const LeftOut left_out = {
      .operations = NotRun(history, subject.abilities),
      .nothing_judged = !failure && !HasJudged(result, level)};
  if (json) {
    std::vector<std::string> calls;
    for (const Step& step : trace.steps) calls.push_back(CallLineOf(step));
    Json answer = {{"operations", result.operations},
                   {"level", LevelName(level)},
                   {"differences", failure ? 1 : 0},
                   {"digest", fmt::format("{:016x}", result.digest)},
                   {"check", failure ? failure->check : ""},
                   {"reason", failure ? failure->text : ""},
                   {"calls", calls}};
    if (failure) answer["bucket"] = failure->bucket;
    answer.update(LeftOutJson(left_out));
    PrintJson(answer);
  } else if (failure) {
    fmt::print("{}{}", FailureText(*failure), LeftOutText(left_out));
  } else {
    for (const Step& step : trace.steps) fmt::print("  {}\n", CallLineOf(step));
    fmt::print("{}", LeftOutText(left_out));
    fmt::print("{} operations, {} ({})\n", result.operations,
               left_out.nothing_judged ? kNothingJudged : "no difference",
               LevelName(level));
  }
  if (!failure) return left_out.nothing_judged ? 2 : 0;
  if (html.empty()) return 1;
  return AfterPage(WritePageOf(host, *failure, subject, html), html, 1);
}

}  // namespace kvtwin::props
