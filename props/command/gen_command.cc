// The subcommand `gen`.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/names.h"
#include "props/command/command.h"
#include "props/command/option_checks.h"
#include "props/paged/paged_runner.h"
#include "props/search/gen.h"

namespace kvtwin::props {
namespace {

int RunGen(const GenOptions& options, const std::string& line) {
  const bool pools = options.paged || options.groups;
  if (options.limits.any() && (!pools || !line.empty())) {
    fmt::print(stderr,
               "kvtwin gen: --without and --dtype are for random histories of "
               "pools: --kind paged or --kind groups\n");
    return 2;
  }
  Status status;
  if (line.empty()) {
    status = Generate(options, std::cout);
  } else if (line.starts_with("kvp1")) {
    const Result<PagedHistory> history = ParsePagedHistory(line);
    if (!history.ok()) {
      fmt::print(stderr, "kvtwin gen: {}\n", history.status().message());
      return 2;
    }
    status = WritePagedRecording(*history, "reference", std::cout).status();
  } else {
    const Result<History> history = ParseHistory(line);
    if (!history.ok()) {
      fmt::print(stderr, "kvtwin gen: {}\n", history.status().message());
      return 2;
    }
    status = WriteCalls(*history, std::cout).status();
  }
  if (!status.ok()) {
    fmt::print(stderr, "kvtwin gen: {}\n", status.message());
    return 2;
  }
  std::cout.flush();
  return std::cout ? 0 : 2;  // Main reports the error.
}

}  // namespace

void AddGenCommand(CLI::App& app, int& exit_code) {
  struct GenArguments {
    GenOptions options;
    std::string kind;
    std::string history;
    std::vector<std::string> without;
    std::string dtype;
  };
  const auto arguments = std::make_shared<GenArguments>();
  GenOptions& options = arguments->options;
  CLI::App* gen = app.add_subcommand(
      "gen",
      "Print random histories, or one, for your program to answer and "
      "`check -` to judge (docs/adapter.md)");
  gen->add_option("history", arguments->history,
                  "'kvt1 ... | ...', or of a pool 'kvp1 ... | ...'");
  const CLI::Range count(std::int64_t{1}, std::int64_t{1} << 50);
  auto* ops = gen->add_option("--ops", options.operations,
                              "print at least this many calls")
                  ->check(count);
  gen->add_option("--histories", options.histories, "print this many histories")
      ->check(count)
      ->excludes(ops)
      ->capture_default_str();
  AddSeedAndKind(*gen, options.seed, arguments->kind, {"groups"});
  gen->add_flag("--speculate", options.speculate,
                "give every history drafts, and recurrent caches pins");
  gen->add_option("--without", arguments->without,
                  "leave these out of histories of pools, separated by commas: "
                  "fork, truncate, commit_unknown, keys (salts and extra "
                  "keys), media")
      ->delimiter(',')
      ->check(CLI::IsMember(
          {"fork", "truncate", "commit_unknown", "keys", "media"}));
  gen->add_option("--dtype", arguments->dtype, "the dtype of rows in all pools")
      ->check(CLI::IsMember(std::vector<std::string>(kRowDTypeNames.begin(),
                                                     kRowDTypeNames.end())));
  gen->callback([arguments, &exit_code] {
    GenOptions& chosen = arguments->options;
    const auto left_out = [&](std::string_view what) {
      return std::ranges::count(arguments->without, what) > 0;
    };
    chosen.limits = {
        .fork = left_out("fork"),
        .truncate = left_out("truncate"),
        .commit_unknown = left_out("commit_unknown"),
        .keys = left_out("keys"),
        .media = left_out("media"),
        .dtype = FromName<DType>(kRowDTypeNames, arguments->dtype)};
    chosen.paged = arguments->kind == "paged";
    chosen.groups = arguments->kind == "groups";
    const bool pools = chosen.paged || chosen.groups;
    if (chosen.speculate && (pools || arguments->kind == "encoder" ||
                             !arguments->history.empty())) {
      throw CLI::ValidationError(
          "--speculate", "is for random histories of caches that have drafts");
    }
    if (!arguments->kind.empty() && !pools) {
      chosen.kind = FromName<Kind>(kKindNames, arguments->kind);
    }
    exit_code = RunGen(chosen, arguments->history);
  });
}

}  // namespace kvtwin::props
