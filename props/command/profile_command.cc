// The subcommand `profile`.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "core/index.h"
#include "core/names.h"
#include "props/backend/backend.h"
#include "props/backend/host_process.h"
#include "props/backend/ledger_backend.h"
#include "props/backend/profile.h"
#include "props/base/interrupt.h"
#include "props/command/backend_command.h"
#include "props/command/command.h"

namespace kvtwin::props {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kLedger = "ledger:";

struct ProfileArguments {
  BackendArguments backend;
  InferenceLimits limits;
  bool list = false;
  bool json = false;
};

std::string_view ValueName(const RuleInfo& rule, int value) {
  return At(rule.values, value);
}

int List(bool as_json) {
  Json json = Json::object();
  for (const Profile& profile : Profiles()) {
    if (!as_json) fmt::print("{}\n", profile.name);
    Json& rules = json[std::string(profile.name)] = Json::object();
    for (const RuleInfo& rule : AllRules()) {
      if (!HasRule(profile.rules, rule)) continue;
      rules[std::string(rule.name)] = rule.ValueOf(profile.rules);
      if (as_json) continue;
      fmt::print("  {:<24}{}\n", rule.name, rule.ValueOf(profile.rules));
    }
  }
  if (as_json) PrintJson(json);
  return 0;
}

std::string ValuesText(const FoundRule& found) {
  const RuleInfo& rule = AllRules()[found.rule];
  if (found.values.size() == rule.values.size()) return "unknown";
  std::string text;
  for (const int value : found.values) {
    text +=
        fmt::format("{}{}", text.empty() ? "" : " or ", ValueName(rule, value));
  }
  return text;
}

Json ToJson(const BackendInfo& info, const InferredProfile& profile) {
  Json json = {{"backend", info.name}, {"says", info.profile}};
  json["like"] = Json::array();
  json["exceptions"] = Json::array();
  for (const NearProfile& near : profile.nearest) {
    json["like"].push_back(near.name);
    for (const RuleException& exception : near.exceptions) {
      const RuleInfo& rule = AllRules()[exception.rule];
      json["exceptions"].push_back(
          {{"to", near.name},
           {"rule", rule.name},
           {"found", ValueName(rule, exception.found)},
           {"profile", ValueName(rule, exception.profile)},
           {"history", exception.history}});
    }
  }
  json["summary"] = SummaryOf(profile);
  json["rules"] = Json::array();
  for (const FoundRule& found : profile.found) {
    const RuleInfo& rule = AllRules()[found.rule];
    Json values = Json::array();
    for (const int value : found.values) {
      values.push_back(At(rule.values, value));
    }
    json["rules"].push_back({{"rule", rule.name},
                             {"values", values},
                             {"known", found.known()},
                             {"history", found.history}});
  }
  json["unexplained"] = Json::array();
  json["ended"] = Json::object();
  for (const auto& [history, ended, answered] : profile.unexplained) {
    json["unexplained"].push_back(history);
    if (!ended.empty()) json["ended"][history] = ended;
  }
  json["asked"] = profile.asked;
  json["operations"] = profile.operations;
  return json;
}

void PrintRules(const InferredProfile& profile) {
  for (const FoundRule& found : profile.found) {
    fmt::print("  {:<24}{:<34}{}\n", AllRules()[found.rule].name,
               ValuesText(found), found.history);
  }
  fmt::print("\n");
}

int Report(const BackendInfo& info, const InferredProfile& profile, bool json) {
  const bool judged = profile.asked > 0 || Interrupted();
  const int code = !judged ? 2 : profile.unexplained.empty() ? 0 : 1;
  if (json) {
    PrintJson(ToJson(info, profile));
    return code;
  }
  fmt::print("{} is {}\n", info.name, SummaryOf(profile));
  if (code == 1)
    fmt::print("It is wrong under any rules on these histories:\n");
  for (const auto& [history, ended, answered] : profile.unexplained) {
    fmt::print("  {}\n", history);
    if (!ended.empty()) fmt::print("    {}\n", ended);
  }
  fmt::print("\n");
  if (!IsWrong(profile)) PrintRules(profile);
  fmt::print("{}\n", TriedText(profile));
  return code;
}

int RefuseProfile(std::string_view text) {
  fmt::print(stderr, "kvtwin profile: {}\n", text);
  return 2;
}

// Infers the profile of a ledger backend of kvtwin, in this process.
int ProfileLedger(std::string_view name, const InferenceLimits& limits,
                  bool json) {
  const kvtwin_backend_v1* table = LedgerBackend(name, /*anonymous=*/true);
  if (table == nullptr) {
    return RefuseProfile(fmt::format("unknown profile '{}', see --list", name));
  }
  const Result<BackendInfo> info = DescribeBackend(table);
  if (!info.ok()) return RefuseProfile(info.status().message());
  return Report(*info, InferProfile(*info, limits), json);
}

int RunProfile(ProfileArguments arguments) {
  const std::string& library = arguments.backend.host.library;
  if (arguments.list) {
    if (library.empty()) return List(arguments.json);
    return RefuseProfile("--list prints all profiles, without a --backend");
  }
  if (library.empty()) return RefuseProfile("--backend or --list is needed");
  if (library.starts_with(kLedger)) {
    return ProfileLedger(std::string_view(library).substr(kLedger.size()),
                         arguments.limits, arguments.json);
  }
  arguments.backend.host.memory_bytes = arguments.backend.memory_mib << 20;
  Host host(arguments.backend.host);
  const Result<BackendInfo> info = host.Describe();
  if (!info.ok()) return RefuseProfile(info.status().message());
  const Level asked = FromName<Level>(kLevelNames, arguments.backend.level)
                          .value_or(info->claims);
  const Level level = std::max(asked, Level::kVisibility);
  bool hangs = false;
  const auto run = [&](const History& history, const Rules& rules) {
    RunResult result =
        host.Run(history, level, {.known_to_hang = hangs}, &rules);
    hangs = hangs || (result.failure && IsHang(*result.failure));
    return result;
  };
  arguments.limits.shrink_seconds = arguments.backend.host.shrink_seconds;
  return Report(*info, InferProfile(run, info->abilities, arguments.limits),
                arguments.json);
}

}  // namespace

void AddProfileCommand(CLI::App& app, int& exit_code) {
  const auto arguments = std::make_shared<ProfileArguments>();
  CLI::App* command = app.add_subcommand(
      "profile", "Work out which rules a backend follows (docs/profiles.md)");
  AddBackendOptions(*command, arguments->backend);
  command
      ->add_option("--ops", arguments->limits.operations,
                   "run random histories of at least this many operations by "
                   "the rules found; 0 runs none")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 50))
      ->capture_default_str();
  command->add_flag("--list", arguments->list,
                    "print the rules of each profile");
  command->add_flag("--json", arguments->json, "print one JSON object");
  command->footer(
      "--backend ledger:NAME is the specification itself, by the "
      "rules of a profile");
  command->callback([arguments, &exit_code] {
    CatchInterrupts();
    exit_code = RunProfile(*arguments);
  });
}

}  // namespace kvtwin::props
