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
#include "props/base/interrupt.h"
#include "props/base/program.h"
#include "props/base/text_file.h"
#include "props/command/option_checks.h"
#include "props/command/page_file.h"
#include "props/report/page.h"
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

// Returns "--backend ./libyours.so" and other options, and the level if the
// user gave one.
std::string PoolArgumentsText(const BackendArguments& arguments) {
  return fmt::format("{}{}{}", GivenText(arguments),
                     arguments.level.empty() ? "" : " --level ",
                     arguments.level);
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
  std::vector<Level> levels = LevelsOf(info);
  const auto asked = FromName<Level>(kLevelNames, arguments.level);
  if (asked)
    std::erase_if(levels, [&](Level level) { return level != *asked; });
  return levels;
}

Json FindingJson(const Failure& finding) {
  Json json = {{"level", LevelName(finding.level)}};
  json.update(FailureJson(finding));
  return json;
}

// Returns the line of the final report about a level.
std::string LevelLine(Level level, const LiveResult& result,
                      const BackendInfo& info) {
  const bool tried = std::ranges::count(result.tried, level) > 0;
  const auto said = [&]() -> std::string {
    if (level == result.holds) {
      if (std::ranges::any_of(result.findings, IsOfBackend)) {
        return "holds, except for the findings above";
      }
      return result.holds_but ? "holds, except for known findings" : "holds";
    }
    if (level == result.not_judged) return "not judged: no view was compared";
    if (std::ranges::count(result.broken_again, level) > 0) {
      return "does not hold: a history above fails here, too";
    }
    if (tried && level == Level::kAttention && !result.attends_wrong) {
      return "holds";
    }
    if (tried) return "does not hold, see above";
    if (level == Level::kAttention) return "not tried";
    if (!info.has_get) return "not tried: its table has no get";
    if (level == Level::kIdentity && !info.has_cells) {
      return "not tried: its table has no cells";
    }
    if (level == Level::kIdentity && LevelsOf(info).front() != level) {
      return "not tried: it follows the rules of another system";
    }
    return level > result.holds ? "holds, because it is weaker" : "not tried";
  };
  return fmt::format("{:<11} {}{}\n", LevelName(level), said(),
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
              {"digest", fmt::format("{:016x}", result.digest)}};
  if (!options.known_buckets.empty()) {
    all["passed_over"] = result.passed_over;
    all["never_met"] = NeverMet(result.passed_over, options.known_buckets);
  }
  if (!findings.empty()) all.update(findings[0]);  // As of a twin.
  all["findings"] = std::move(findings);
  PrintJson(all);
}

// Returns what the backend does not declare: a level that holds says nothing
// about it.
std::vector<std::string> Untried(const BackendInfo& info, Level holds) {
  if (holds == Level::kNone) return {};
  std::vector<std::string> untried;
  const auto add = [&](std::uint32_t ability, const char* name) {
    if (!info.abilities.Can(ability)) untried.emplace_back(name);
  };
  add(KVTWIN_CAN_REMOVE_TAIL, "CAN_REMOVE_TAIL");
  add(KVTWIN_CAN_REMOVE_MIDDLE, "CAN_REMOVE_MIDDLE");
  add(KVTWIN_CAN_COPY_PREFIX, "CAN_COPY_PREFIX");
  add(KVTWIN_CAN_SHARE, "CAN_SHARE");
  add(KVTWIN_CAN_MIX, "CAN_MIX");
  add(KVTWIN_CAN_ANY_ORDER, "CAN_ANY_ORDER");
  add(KVTWIN_CAN_RESERVE, "CAN_RESERVE");
  add(KVTWIN_CAN_REFUSE_MISUSE, "CAN_REFUSE_MISUSE");
  add(KVTWIN_CAN_DRAFT, "CAN_DRAFT");
  if (!info.abilities.can_resume) untried.emplace_back("can_resume");
  if (!info.abilities.set_causal) untried.emplace_back("set_causal");
  return untried;
}

void PrintText(const BackendInfo& info, const FuzzOptions& options,
               const LiveResult& result) {
  fmt::print("{}, by the rules of {}\n", info.name, info.profile);
  for (const Level level : kLevels) {
    if (level == Level::kAttention && !info.attend) continue;
    fmt::print("{}", LevelLine(level, result, info));
  }
  const std::vector<std::string> untried = Untried(info, result.holds);
  if (!untried.empty()) {
    fmt::print("{:12}not declared, so never tried: {}\n", "",
               fmt::join(untried, ", "));
  }
  const std::string more =
      result.known > 0
          ? fmt::format(" ({} more histories with one of them)", result.known)
          : "";
  fmt::print(
      "{} operations in {} histories, {} findings{}, seed {}, digest {:016x}\n",
      result.operations, result.histories, result.findings.size(), more,
      options.seed, result.digest);
  fmt::print("{}", PassedOverText(result.passed_over, options.known_buckets));
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
  if (path.empty()) return "no path";
  struct stat found = {};
  if (stat(path.c_str(), &found) != 0) return "";
  return CheckRegular(path, found.st_mode).message();
}

}  // namespace

void PrintJson(const Json& json) {
  fmt::print("{}\n", json.dump(-1, ' ', false,
                               nlohmann::json::error_handler_t::replace));
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
  command.add_option("--level", arguments.level, "compare at this level only")
      ->check(CLI::IsMember(std::vector<std::string>(
          kLevelNames.begin(), kLevelNames.begin() + kLevels.size())))
      ->transform(CLI::Transformer({{"entitlement", "visibility"}}))
      ->needs(backend);
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

int FuzzBackend(const BackendArguments& arguments, const FuzzOptions& options,
                bool json, const std::string& html) {
  Host host(OptionsOf(arguments));
  const Result<BackendInfo> info = host.Describe();
  if (!info.ok()) return Complain(info.status().message());
  const std::vector<Level> levels = LevelsFor(arguments, *info);
  if (levels.empty()) return Complain(kNoLevel);
  // Without this check, another kind would run and be reported to hold.
  if (options.kind && !info->abilities.HasKind(*options.kind)) {
    return Complain(fmt::format(
        "--kind {}: {} does not declare such a cache, only {}",
        KindName(*options.kind), info->name, KindsText(info->abilities)));
  }
  if (options.speculate && !info->abilities.CanDraft()) {
    return Complain(fmt::format(
        "--speculate: {} does not declare drafts (CAN_DRAFT)", info->name));
  }
  const auto subject_at = [&](Level level) {
    return host.SubjectAt(*info, level, ArgumentsText(arguments, level));
  };
  const auto clear = [&] {
    if (options.progress) fmt::print(stderr, "\r{:40}\r", "");
  };
  const auto print = [&](const Failure& finding) {
    clear();
    if (!json) fmt::print("{}\n", FindingText(finding));
    std::fflush(stdout);
  };
  const LiveResult result = FuzzLive(options, levels, subject_at, print);
  clear();
  if (result.ran == 0 && !Interrupted()) {
    return Complain(
        fmt::format("{} supports none of the caches of {} "
                    "histories",
                    info->name, result.histories));
  }
  const bool right = result.Right(*info);
  if (json) {
    PrintFindings(*info, options, result);
  } else {
    PrintText(*info, options, result);
  }
  const int code = right ? 0 : 1;
  if (html.empty() || result.findings.empty()) return code;
  // The page shows a finding at the claimed level, if there is one.
  const auto claimed =
      std::ranges::find(result.findings, info->claims, &Failure::level);
  const Failure& shown =
      claimed != result.findings.end() ? *claimed : result.findings.front();
  return AfterPage(WritePageOf(host, shown, subject_at(shown.level), html),
                   html, code);
}

int OnPoolBackend(const BackendArguments& arguments,
                  const std::function<int(const Subject&)>& act) {
  Host host(OptionsOf(arguments));
  const Result<PoolInfo> info = host.DescribePool();
  if (!info.ok()) return Complain(info.status().message());
  const Level level =
      FromName<Level>(kLevelNames, arguments.level).value_or(info->claims);
  if (level > Level::kVisibility) {
    return Complain(fmt::format("pools have no {} level", LevelName(level)));
  }
  if (level < info->claims) {
    return Complain(fmt::format("{} does not claim identity", info->name));
  }
  return act(host.SubjectAt(*info, level, PoolArgumentsText(arguments)));
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
  const bool can_claim = std::ranges::count(levels, info->claims) > 0;
  const Level level = can_claim ? info->claims : levels.front();
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
  // The level that the backend claims, unless the user gave another one.
  const bool can_claim = std::ranges::count(levels, info->claims) > 0;
  const Level level = can_claim ? info->claims : levels.front();
  const Subject subject =
      host.SubjectAt(*info, level, ArgumentsText(arguments, level));
  CallTrace trace;
  const RunResult result = RunHistory(history, subject, {.trace = &trace});
  if (!result.ran && !result.failure) {
    return Complain(WhyNotMade(*info, history.setup));
  }
  std::optional<Failure> failure;
  if (result.failure) failure = Explain(history, *result.failure, subject);
  if (json) {
    std::vector<std::string> calls;
    for (const Step& step : trace.steps) calls.push_back(CallLineOf(step));
    PrintJson({{"operations", result.operations},
               {"level", LevelName(level)},
               {"differences", failure ? 1 : 0},
               {"digest", fmt::format("{:016x}", result.digest)},
               {"check", failure ? failure->check : ""},
               {"reason", failure ? failure->text : ""},
               {"calls", calls}});
  } else if (failure) {
    fmt::print("{}", FailureText(*failure));
  } else {
    for (const Step& step : trace.steps) fmt::print("  {}\n", CallLineOf(step));
    fmt::print("{} operations, no difference ({})\n", result.operations,
               LevelName(level));
  }
  if (!failure) return 0;
  if (html.empty()) return 1;
  return AfterPage(WritePageOf(host, *failure, subject, html), html, 1);
}

}  // namespace kvtwin::props
