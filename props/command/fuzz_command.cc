// The subcommands `fuzz`, `run` and `gen`.

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/names.h"
#include "optimized/targets.h"
#include "props/base/crash.h"
#include "props/base/interrupt.h"
#include "props/command/backend_command.h"
#include "props/command/command.h"
#include "props/command/option_checks.h"
#include "props/command/page_file.h"
#include "props/paged/paged_runner.h"
#include "props/report/page.h"
#include "props/search/explain.h"
#include "props/search/fuzz.h"
#include "props/search/gen.h"
#include "props/shrink/shrink.h"

namespace kvtwin::props {
namespace {

struct FuzzArguments {
  FuzzOptions options;
  std::string kind;
  std::string twin = "optimized";
  std::string history;
  std::string html;  // Path of the page of a failure.
  bool json = false;
  BackendArguments backend;  // In place of a twin, if given.
};

std::vector<std::string> Twins() {
  const auto names = TwinNames();
  return {names.begin(), names.end()};
}

void AddTwin(CLI::App& command, FuzzArguments& arguments) {
  command
      .add_option("--twin", arguments.twin,
                  "the twin that is checked against reference and ledger")
      ->check(CLI::IsMember(Twins()))
      ->capture_default_str();
  AddBackendOptions(command, arguments.backend);
  AddProfileOption(command, arguments.backend);
  command.add_flag("--json", arguments.json, "print one JSON object");
  command.add_option("--html", arguments.html,
                     "write the failure, if there is one, as a page (HTML)");
}

// Throws if --html is given with an unusable path.
void CheckPage(const CLI::App& command, const std::string& html) {
  if (command.count("--html") == 0) return;
  const Status status = PreparePage(html);
  if (!status.ok()) throw CLI::ValidationError(status.message());
}

// Writes the page of a failure if --html is given. Returns the exit code.
int Failed(const FuzzArguments& arguments, const Failure& failure) {
  if (arguments.html.empty()) return 1;
  return AfterPage(WritePage(failure, arguments.html), arguments.html, 1);
}

void ShowProgress(std::int64_t operations, double seconds) {
  static double shown = 0;
  if (seconds - shown < 0.2) return;
  shown = seconds;
  fmt::print(stderr, "\r{:>12} operations, {:.0f} s ", operations, seconds);
}

// Returns the target that KVTWIN_TARGET names, or "".
std::string ForcedTarget() {
  const char* forced = std::getenv("KVTWIN_TARGET");
  return forced == nullptr ? "" : forced;
}

std::vector<std::string> VacuityOf(const CoverageCounts& counts) {
  std::vector<std::string> reasons = CoverageGaps(counts);
  const std::string forced = ForcedTarget();
  // The target that the kernels report, not the setting.
  const std::string active = optimized::ActiveTarget();
  if (!forced.empty() && forced != active) {
    reasons.push_back(fmt::format("{} was forced, {} ran", forced, active));
  }
  return reasons;
}

nlohmann::ordered_json CensusJson(const CoverageCounts& counts) {
  nlohmann::ordered_json probes;
  for (std::size_t i = 0; i < kCoverageMarks.size(); ++i) {
    probes[std::string(kCoverageMarks[i].name)] = counts.hits[i];
  }
  return {{"probes", probes},
          {"calls", counts.calls},
          {"refused", counts.refused},
          {"discarded", counts.discarded},
          {"full", counts.full},
          {"forced_target", ForcedTarget()},
          {"vacuity", VacuityOf(counts)}};
}

void PrintCensus(const CoverageCounts& counts) {
  for (std::size_t i = 0; i < kCoverageMarks.size(); ++i) {
    fmt::print("{:>12} {:<22} {}\n", counts.hits[i], kCoverageMarks[i].name,
               kCoverageMarks[i].statement);
  }
  const auto print = [](std::int64_t count, std::int64_t of,
                        std::string_view what) {
    fmt::print("{:>12} of {} {}\n", count, of, what);
  };
  print(counts.refused, counts.calls, "calls were refused");
  print(counts.discarded, counts.histories, "histories were discarded");
  print(counts.full, counts.histories, "histories had a full cache");
  for (const std::string& reason : VacuityOf(counts)) {
    fmt::print("VACUOUS {}\n", reason);
  }
}

// Returns the line that says where a failure was found.
std::string FoundText(const Failure& failure, std::uint64_t seed) {
  return fmt::format(
      "  found   seed {}, history {}; shrunk from {} operations to {}\n", seed,
      failure.history_number, failure.found_operations, failure.operations);
}

nlohmann::ordered_json FuzzPagedJson(const FuzzOptions& options,
                                     const PagedSubject& subject,
                                     const PagedFuzzResult& result) {
  const PagedCoverageCounts& counts = result.counts;
  nlohmann::ordered_json json = {
      {"operations", counts.operations},
      {"histories", result.ran},
      {"not_made", counts.not_made},
      {"differences", result.failure ? 1 : 0},
      {"digest", fmt::format("{:016x}", result.digest)},
      {"seconds", result.seconds},
      {"seed", options.seed},
      {"blocks_found", counts.found}};
  if (subject.level == Level::kIdentity) {
    json["blocks_copied"] = counts.copied;
    json["blocks_evicted"] = counts.evicted;
  }
  json["truncations"] = counts.truncated;
  json["refused"] = counts.full;
  json["longest_append"] = counts.longest;
  json["dtype_pairs"] = counts.dtypes.size();
  if (result.failure) json.update(FailureJson(*result.failure));
  if (!options.known_buckets.empty()) {
    json["passed_over"] = result.passed_over;
    json["never_met"] = NeverMet(result.passed_over, options.known_buckets);
  }
  return json;
}

// Says how much ran, and how often rare states were reached.
std::string CensusLine(const PagedSubject& subject,
                       const PagedFuzzResult& result, std::uint64_t seed) {
  const PagedCoverageCounts& counts = result.counts;
  std::string line = fmt::format(
      "{} operations in {} histories, {} differences, seed {}; {} blocks found "
      "by prompts, ",
      counts.operations, result.ran, result.failure ? 1 : 0, seed,
      counts.found);
  if (subject.level == Level::kIdentity) {
    line += fmt::format("{} copied on write, {} evicted, ", counts.copied,
                        counts.evicted);
  }
  line += fmt::format("{} truncations, {} appends refused, {} pairs of dtypes",
                      counts.truncated, counts.full, counts.dtypes.size());
  if (counts.not_made > 0) {
    line += fmt::format("; {} more histories passed over: it has no such pools",
                        counts.not_made);
  }
  return line + "\n";
}

int RunFuzzPaged(const FuzzArguments& arguments, const PagedSubject& subject) {
  FuzzOptions options = arguments.options;
  const bool terminal = isatty(STDERR_FILENO) == 1;
  if (terminal) options.progress = ShowProgress;
  const PagedFuzzResult result = Fuzz(options, subject);
  if (terminal) fmt::print(stderr, "\r{:40}\r", "");
  if (result.ran == 0 && !Interrupted()) {
    fmt::print(stderr,
               "kvtwin: {} has none of the pools that {} histories asked for\n",
               subject.name, result.histories);
    return 2;
  }
  if (arguments.json) {
    fmt::print("{}\n", FuzzPagedJson(options, subject, result).dump());
  } else {
    if (result.failure) {
      fmt::print("{}{}", FailureText(*result.failure),
                 FoundText(*result.failure, options.seed));
    }
    fmt::print("{}{}", CensusLine(subject, result, options.seed),
               PassedOverText(result.passed_over, options.known_buckets));
  }
  return result.failure ? Failed(arguments, *result.failure) : 0;
}

void RefuseForPools(const CLI::App& command,
                    std::initializer_list<const char*> options) {
  for (const char* option : options) {
    if (command.count(option) == 0) continue;
    throw CLI::ValidationError(option, "pools have no such option");
  }
}

// Calls `act` with the pools of a twin, or of a backend in its own process.
template <class Do>
int OnPools(const FuzzArguments& arguments, const Do& act) {
  if (arguments.backend.given()) {
    return OnPoolBackend(arguments.backend, act);
  }
  ReportCrashes();
  return act(TwinPools(arguments.twin));
}

int RunFuzz(const FuzzArguments& arguments) {
  if (arguments.kind == "paged") {
    return OnPools(arguments, [&](const PagedSubject& subject) {
      return RunFuzzPaged(arguments, subject);
    });
  }
  FuzzOptions options = arguments.options;
  options.drawn = !arguments.html.empty();
  if (!arguments.kind.empty()) {
    options.kind = FromName<Kind>(kKindNames, arguments.kind);
  }
  const bool terminal = isatty(STDERR_FILENO) == 1;
  if (terminal) options.progress = ShowProgress;
  if (arguments.backend.given()) {
    if (options.probes || options.dtypes) {
      fmt::print(stderr, "kvtwin fuzz: --backend has no --{}\n",
                 options.probes ? "probes" : "dtypes");
      return 2;
    }
    return FuzzBackend(arguments.backend, options, arguments.json,
                       arguments.html);
  }
  const Subject subject = TwinSubject(arguments.twin);
  ReportCrashes();
  const FuzzResult result = Fuzz(options, subject);
  if (terminal) fmt::print(stderr, "\r{:40}\r", "");
  const double rate =
      static_cast<double>(result.operations) / std::max(result.seconds, 1e-9);
  if (arguments.json) {
    nlohmann::ordered_json json = {
        {"operations", result.operations},
        {"histories", result.histories},
        {"repeated", result.repeated},
        {"differences", result.failure ? 1 : 0},
        {"digest", fmt::format("{:016x}", result.digest)},
        {"seconds", result.seconds},
        {"operations_per_second", static_cast<std::int64_t>(rate)},
        {"seed", options.seed},
        {"twin", arguments.twin},
        {"target", optimized::ActiveTarget()}};
    if (!options.known_buckets.empty()) {
      json["passed_over"] = result.passed_over;
      json["never_met"] = NeverMet(result.passed_over, options.known_buckets);
    }
    if (options.probes) json.update(CensusJson(result.counts));
    if (result.failure) json.update(FailureJson(*result.failure));
    fmt::print("{}\n", json.dump(-1, ' ', false,
                                 nlohmann::json::error_handler_t::replace));
  } else {
    if (options.probes) PrintCensus(result.counts);
    if (result.failure) {
      fmt::print("{}{}", FailureText(*result.failure),
                 FoundText(*result.failure, options.seed));
    }
    fmt::print(
        "{} operations in {} histories, {} differences, {:.0f} operations a "
        "second, seed {}, digest {:016x}\n",
        result.operations, result.histories, result.failure ? 1 : 0, rate,
        options.seed, result.digest);
    fmt::print("{}", PassedOverText(result.passed_over, options.known_buckets));
  }
  if (result.failure) return Failed(arguments, *result.failure);
  return options.probes && !VacuityOf(result.counts).empty() ? 1 : 0;
}

int RunOnePaged(const FuzzArguments& arguments, const PagedSubject& subject) {
  const Result<PagedHistory> history = ParsePagedHistory(arguments.history);
  if (!history.ok()) {
    fmt::print(stderr, "kvtwin run: {}\n", history.status().message());
    return 2;
  }
  const RunResult result = RunHistory(*history, subject);
  if (!result.ran && !result.failure) {
    fmt::print(stderr, "kvtwin run: {} has no such pool: '{}', by its init\n",
               subject.name, ToText(PagedHistory{history->spec, {}}));
    return 2;
  }
  std::optional<Failure> failure;
  if (result.failure) {
    const PagedHistory shortest =
        Shrink(*history, WithShortTimeout(subject, *result.failure));
    failure = Explain(shortest, *result.failure, subject);
  }
  if (arguments.json) {
    nlohmann::ordered_json json = {{"operations", history->ops.size()},
                                   {"differences", failure ? 1 : 0},
                                   {"reason", failure ? failure->text : ""}};
    if (failure) json.update(FailureJson(*failure));
    fmt::print("{}\n", json.dump());
  } else if (failure) {
    fmt::print("{}", FailureText(*failure));
  } else {
    fmt::print("{} operations, no difference\n", history->ops.size());
  }
  return failure ? Failed(arguments, *failure) : 0;
}

int RunOne(const FuzzArguments& arguments) {
  if (arguments.history.starts_with("kvp1")) {
    return OnPools(arguments, [&](const PagedSubject& subject) {
      return RunOnePaged(arguments, subject);
    });
  }
  const Result<History> history = ParseHistory(arguments.history);
  if (!history.ok()) {
    fmt::print(stderr, "kvtwin run: {}\n", history.status().message());
    return 2;
  }
  if (arguments.backend.given()) {
    return RunOnBackend(arguments.backend, *history, arguments.json,
                        arguments.html);
  }
  const Subject subject = TwinSubject(arguments.twin);
  CallTrace story;
  const RunResult result = RunHistory(*history, subject, &story);
  std::vector<std::string> calls;
  for (const Step& step : story.steps) calls.push_back(CallLineOf(step));
  if (!result.ran && !result.failure) {
    fmt::print(stderr, "kvtwin run: no cache can be made of '{}'{}{}\n",
               ToText(history->setup), calls.empty() ? "" : ": ",
               calls.empty() ? "" : calls.back());
    return 2;
  }
  std::optional<Failure> failure;
  std::string shrunk;
  if (result.failure) {
    const History shortest = Shrink(*history, subject);
    shrunk = ToText(shortest);
    failure =
        Explain(*history, *result.failure, subject,
                /*drawn=*/!arguments.html.empty(), BucketOf(shortest, subject));
  }
  if (arguments.json) {
    nlohmann::ordered_json json = {
        {"operations", result.operations},
        {"differences", failure ? 1 : 0},
        {"digest", fmt::format("{:016x}", result.digest)},
        {"check", failure ? failure->check : ""},
        {"reason", failure ? failure->text : ""},
        {"rules", failure ? failure->rules : ""},
        {"calls", calls}};
    if (failure) {
      json["bucket"] = failure->bucket;
      json["history"] = shrunk;
    }
    fmt::print("{}\n", json.dump(-1, ' ', false,
                                 nlohmann::json::error_handler_t::replace));
  } else if (failure) {
    fmt::print("{}", FailureText(*failure));
    if (shrunk != failure->history) {
      fmt::print("  shrunk  {}\n",
                 RerunCommand(*ParseHistory(shrunk), subject));
    }
  } else {
    for (const std::string& line : calls) fmt::print("  {}\n", line);
    fmt::print("{} operations, no difference\n", result.operations);
  }
  return failure ? Failed(arguments, *failure) : 0;
}

int RunGen(const GenOptions& options, const std::string& line) {
  if (options.limits.any() && (!options.paged || !line.empty())) {
    fmt::print(stderr,
               "kvtwin gen: --without and --dtype are for random histories of "
               "pools: --kind paged\n");
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
    if (WriteCalls(*history, std::cout) == 0) {
      fmt::print(stderr, "kvtwin gen: no cache can be made of '{}'\n",
                 ToText(history->setup));
      return 2;
    }
  }
  if (!status.ok()) {
    fmt::print(stderr, "kvtwin gen: {}\n", status.message());
    return 2;
  }
  std::cout.flush();
  return std::cout ? 0 : 2;  // Main reports the error.
}

// Accepts any 64-bit number in decimal.
CLI::Validator Whole() {
  return {[](const std::string& text) {
            const bool digits =
                text.find_first_not_of("0123456789") == std::string::npos;
            return digits && text.size() < 20
                       ? ""
                       : "not a whole number from 0 to 10^19 - 1";
          },
          "UINT"};
}

void AddSeedAndKind(CLI::App& command, std::uint64_t& seed, std::string& kind) {
  std::vector<std::string> kinds(kKindNames.begin(), kKindNames.end());
  kinds.emplace_back("paged");
  command.add_option("--seed", seed, "the seed of all random numbers")
      ->check(Whole())
      ->capture_default_str();
  command.add_option("--kind", kind, "only this kind of cache")
      ->check(CLI::IsMember(std::move(kinds)));
}

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
      "Print random histories, or one, for a program of yours to answer and "
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
  AddSeedAndKind(*gen, options.seed, arguments->kind);
  gen->add_option("--without", arguments->without,
                  "what histories of pools leave out, as a list with commas: "
                  "fork, truncate, commit_unknown, keys (salts and extra keys)")
      ->delimiter(',')
      ->check(CLI::IsMember({"fork", "truncate", "commit_unknown", "keys"}));
  gen->add_option("--dtype", arguments->dtype,
                  "the dtype of the rows of all pools")
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
        .dtype = FromName<DType>(kRowDTypeNames, arguments->dtype)};
    chosen.paged = arguments->kind == "paged";
    if (!arguments->kind.empty() && !chosen.paged) {
      chosen.kind = FromName<Kind>(kKindNames, arguments->kind);
    }
    exit_code = RunGen(chosen, arguments->history);
  });
}

}  // namespace

void AddFuzzCommand(CLI::App& app, int& exit_code) {
  const auto fuzz_arguments = std::make_shared<FuzzArguments>();
  CLI::App* fuzz = app.add_subcommand(
      "fuzz",
      "Run random histories on the twins, or on a third-party cache; for 10 "
      "seconds by default");
  FuzzOptions& options = fuzz_arguments->options;
  auto* ops = fuzz->add_option("--ops", options.operations,
                               "run at least this many operations")
                  ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 50));
  fuzz->add_option("--seconds", options.seconds, "run for this many seconds")
      ->check(RealRange(0.01, 1e7))
      ->excludes(ops);
  AddSeedAndKind(*fuzz, options.seed, fuzz_arguments->kind);
  fuzz->add_option("--threads", options.threads,
                   "threads; the result does not depend on them")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  fuzz->add_option("--cells-max", options.cells_max,
                   "only caches of at most this many cells")
      ->check(CLI::Range(1, 1 << 20));
  fuzz->add_option("--known", options.known_buckets,
                   "buckets of findings that are known: they are counted, and "
                   "the run goes on")
      ->expected(0, CLI::detail::expected_max_vector_size)
      ->type_name("BUCKET ...")
      ->each(
          [&options](const std::string&) { options.known_buckets.erase(""); });
  fuzz->add_flag("--dtypes", options.dtypes,
                 "draw all pairs of dtypes of K and V in turn");
  fuzz->add_flag("--probes", options.probes,
                 "count rare states, and fail if one was never seen");
  AddTwin(*fuzz, *fuzz_arguments);
  fuzz->callback([fuzz, fuzz_arguments, &exit_code] {
    if (fuzz_arguments->kind == "paged") {
      RefuseForPools(*fuzz, {"--probes", "--profile"});
    }
    CheckPage(*fuzz, fuzz_arguments->html);
    CatchInterrupts();
    exit_code = RunFuzz(*fuzz_arguments);
  });

  const auto run_arguments = std::make_shared<FuzzArguments>();
  CLI::App* run = app.add_subcommand(
      "run", "Run one history, as a failure prints it (docs/histories.md)");
  run->add_option("history", run_arguments->history, "'kvt1 ... | ...'")
      ->required();
  AddTwin(*run, *run_arguments);
  run->callback([run, run_arguments, &exit_code] {
    if (run_arguments->history.starts_with("kvp1")) {
      RefuseForPools(*run, {"--profile"});
    }
    CheckPage(*run, run_arguments->html);
    exit_code = RunOne(*run_arguments);
  });

  AddGenCommand(app, exit_code);
}

}  // namespace kvtwin::props
