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
#include "props/compare/cited_rules.h"
#include "props/report/page.h"

namespace kvtwin::props {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array kLevels = {Level::kIdentity, Level::kVisibility,
                                Level::kNumeric};

// The options that another run needs to find the same, but the level.
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

void Print(const Json& json) {
  fmt::print("{}\n", json.dump(-1, ' ', false,
                               nlohmann::json::error_handler_t::replace));
}

// Of what the process survives it draws the page itself, with cells and rows.
Status WritePageOf(Host& host, const History& history,
                   const Difference& difference, const Subject& subject,
                   const std::string& path) {
  const std::string html =
      IsHang(difference.check)
          ? ""
          : host.Page(history, subject.level, subject.arguments);
  if (html.empty()) {
    return WritePage(ExplainHistory(history, difference, subject), path);
  }
  return WriteFile(path, html);
}

constexpr const char* kNoIdentity =
    "identity needs a backend that lists its cells and follows our rules";

HostOptions OptionsOf(const BackendArguments& arguments) {
  HostOptions options = arguments.host;
  options.memory_bytes = arguments.memory_mib << 20;
  return options;
}

// The levels to try; none if the one that is asked for cannot be.
std::vector<Level> LevelsFor(const BackendArguments& arguments,
                             const BackendInfo& info) {
  std::vector<Level> levels = LevelsOf(info);
  const auto asked = FromName<Level>(kLevelNames, arguments.level);
  if (asked) std::erase_if(levels, [&](Level one) { return one != *asked; });
  return levels;
}

Json FindingJson(const LiveFinding& finding, const Subject& subject) {
  const FuzzFailure& failure = finding.failure;
  return {{"level", LevelName(finding.level)},
          {"check", failure.difference.check},
          {"rules", CitedRules(failure.difference, failure.shrunk)},
          {"bucket", BucketOf(failure.shrunk,
                              Hastily(subject, failure.difference.check))},
          {"history", ToText(failure.shrunk)},
          {"shrunk_to", failure.shrunk.ops.size()},
          {"reason", failure.difference.text},
          {"rerun", RerunCommand(failure.shrunk, subject)}};
}

// What is said of a level when all is over.
std::string LevelLine(Level level, const LiveResult& result,
                      const BackendInfo& info) {
  const bool tried = std::ranges::count(result.tried, level) > 0;
  const auto said = [&]() -> std::string {
    if (level == result.holds) {
      const bool all = std::ranges::all_of(
          result.findings, [](auto& one) { return one.breaks_level; });
      if (!all) return "holds but for what is above";
      return result.holds_but ? "holds but for what is passed over" : "holds";
    }
    if (level == result.unjudged) return "nothing was judged";
    if (tried) return "does not hold, see above";
    if (level == Level::kIdentity && !info.has_cells) {
      return "not tried: it does not say which cells it uses";
    }
    if (level == Level::kIdentity && LevelsOf(info).front() != level) {
      return "not tried: its rules are not ours";
    }
    return level > result.holds ? "holds, being weaker" : "not tried";
  };
  return fmt::format("{:<11} {}{}\n", LevelName(level), said(),
                     level == info.claims ? " (it says that it does)" : "");
}

// Lists the kinds that a backend says it has: "causal, swa".
std::string KindsText(const Abilities& abilities) {
  std::vector<std::string_view> names;
  for (std::size_t i = 0; i < kKindNames.size(); ++i) {
    if (abilities.HasKind(static_cast<Kind>(i))) names.push_back(kKindNames[i]);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

// Says why a path cannot name a library; empty if it can. HostProcess reports a
// file that is missing.
std::string WhyNoLibrary(const std::string& path) {
  if (path.empty()) return "no path";
  struct stat found = {};
  if (stat(path.c_str(), &found) != 0) return "";
  return CheckRegular(path, found.st_mode).message();
}

}  // namespace

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
                  "a backend that takes more memory than this is ended")
      ->needs(backend)
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30))
      ->capture_default_str();
}

void AddProfileOption(CLI::App& command, BackendArguments& arguments) {
  command
      .add_option("--profile", arguments.host.profile,
                  "hold a backend to the rules of this profile, perhaps with "
                  "exceptions: 'mlx except copy adds' (docs/profiles.md)")
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
  if (levels.empty()) return Complain(kNoIdentity);
  // Without this check another kind would be driven, and reported to hold.
  if (options.kind && !info->abilities.HasKind(*options.kind)) {
    return Complain(fmt::format(
        "--kind {}: {} says that it has no such cache, but {}",
        KindName(*options.kind), info->name, KindsText(info->abilities)));
  }
  const auto subject_at = [&](Level level) {
    return host.SubjectAt(*info, level, ArgumentsText(arguments, level));
  };
  const LiveResult result = FuzzLive(options, levels, subject_at);
  if (options.progress) fmt::print(stderr, "\r{:40}\r", "");
  if (result.ran == 0 && !Interrupted()) {
    return Complain(
        fmt::format("{} has none of the caches that {} histories "
                    "asked for",
                    info->name, result.histories));
  }
  const bool right = result.Right(*info);
  if (json) {
    Json findings = Json::array();
    for (const LiveFinding& finding : result.findings) {
      findings.push_back(FindingJson(finding, subject_at(finding.level)));
    }
    Json all = {{"backend", info->name},
                {"profile", info->profile},
                {"claims", LevelName(info->claims)},
                {"holds", LevelName(result.holds)},
                {"right", right},
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
    Print(all);
  } else {
    for (const LiveFinding& finding : result.findings) {
      fmt::print("{}\n", FindingText(finding, subject_at(finding.level)));
    }
    fmt::print("{}, by the rules of {}\n", info->name, info->profile);
    for (const Level level : kLevels) {
      fmt::print("{}", LevelLine(level, result, *info));
    }
    fmt::print(
        "{} operations in {} histories, {} findings ({} more histories with "
        "one of them), seed {}, digest {:016x}\n",
        result.operations, result.histories, result.findings.size(),
        result.known, options.seed, result.digest);
    fmt::print("{}", PassedOverText(result.passed_over, options.known_buckets));
  }
  if (!html.empty() && !result.findings.empty()) {
    // Of what it says that it keeps, if that is broken.
    const LiveFinding* shown = &result.findings.front();
    for (const LiveFinding& finding : result.findings) {
      if (finding.level == info->claims && shown->level != info->claims) {
        shown = &finding;
      }
    }
    return AfterPage(
        WritePageOf(host, shown->failure.shrunk, shown->failure.difference,
                    subject_at(shown->level), html),
        html, right ? 0 : 1);
  }
  return right ? 0 : 1;
}

int OnPoolBackend(const BackendArguments& arguments,
                  const std::function<int(const PagedSubject&)>& act) {
  Host host(OptionsOf(arguments));
  const Result<PoolInfo> info = host.DescribePool();
  if (!info.ok()) return Complain(info.status().message());
  const Level level =
      FromName<Level>(kLevelNames, arguments.level).value_or(info->claims);
  if (level == Level::kNumeric) return Complain("pools have no numeric level");
  if (level < info->claims) {
    return Complain(fmt::format("{} says that it has no identity", info->name));
  }
  PagedSubject subject = host.PoolSubjectAt(level);
  subject.name = info->name;
  return act(subject);
}

int OnOurBackend(
    const BackendArguments& arguments, std::string_view what,
    const std::function<int(Host&, const BackendInfo&, const Subject&)>& act) {
  Host host(OptionsOf(arguments));
  const Result<BackendInfo> info = host.Describe();
  if (!info.ok()) return Complain(info.status().message());
  if (info->rules != RulesAt(*info, Level::kIdentity)) {
    return Complain(fmt::format(
        "{} goes by our rules, and {} by those of {}, which `kvtwin "
        "fuzz --backend` knows, too",
        what, info->name, info->profile));
  }
  const std::vector<Level> levels = LevelsFor(arguments, *info);
  if (levels.empty()) return Complain(kNoIdentity);
  const bool can_claim = std::ranges::count(levels, info->claims) > 0;
  const Level level = can_claim ? info->claims : levels.front();
  return act(host, *info,
             host.SubjectAt(*info, level, ArgumentsText(arguments, level)));
}

std::string PoolArgumentsText(const BackendArguments& arguments) {
  return fmt::format("{}{}{}", GivenText(arguments),
                     arguments.level.empty() ? "" : " --level ",
                     arguments.level);
}

int RunOnBackend(const BackendArguments& arguments, const History& history,
                 bool json, const std::string& html) {
  Host host(OptionsOf(arguments));
  const Result<BackendInfo> info = host.Describe();
  if (!info.ok()) return Complain(info.status().message());
  const std::vector<Level> levels = LevelsFor(arguments, *info);
  if (levels.empty()) return Complain(kNoIdentity);
  // The one that it is held to, unless another one is asked for.
  const bool can_claim = std::ranges::count(levels, info->claims) > 0;
  const Level level = can_claim ? info->claims : levels.front();
  const Subject subject =
      host.SubjectAt(*info, level, ArgumentsText(arguments, level));
  Story story;
  const RunResult result = RunHistory(history, subject, &story);
  const auto& difference = result.difference;
  if (!result.ran && !difference) {
    if (info->abilities.Fits(history.setup)) {
      return Complain(fmt::format("{} has no such cache: '{}', by its init",
                                  info->name, ToText(history.setup)));
    }
    Setup nearest = history.setup;
    info->abilities.Fit(nearest);
    return Complain(fmt::format(
        "{} has no such cache: '{}'; the nearest that it says that it has is "
        "'{}'",
        info->name, ToText(history.setup), ToText(nearest)));
  }
  if (json) {
    std::vector<std::string> calls;
    for (const Step& step : story.steps) calls.push_back(StoryLine(step));
    Print({{"operations", result.operations},
           {"level", LevelName(level)},
           {"differences", difference ? 1 : 0},
           {"digest", fmt::format("{:016x}", result.digest)},
           {"check", difference ? difference->check : ""},
           {"reason", difference ? difference->text : ""},
           {"calls", calls}});
  } else if (difference) {
    fmt::print("{}", FailureText(history, *difference, subject));
  } else {
    for (const Step& step : story.steps) fmt::print("  {}\n", StoryLine(step));
    fmt::print("{} operations, no difference ({})\n", result.operations,
               LevelName(level));
  }
  if (!difference) return 0;
  if (html.empty()) return 1;
  return AfterPage(WritePageOf(host, history, *difference, subject, html), html,
                   1);
}

}  // namespace kvtwin::props
