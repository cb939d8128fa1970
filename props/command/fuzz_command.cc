// The subcommands `fuzz` and `run`.

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "core/index.h"
#include "core/names.h"
#include "optimized/targets.h"
#include "props/base/counted.h"
#include "props/base/crash.h"
#include "props/base/interrupt.h"
#include "props/command/backend_command.h"
#include "props/command/command.h"
#include "props/command/option_checks.h"
#include "props/paged/paged_runner.h"
#include "props/report/page.h"
#include "props/report/page_file.h"
#include "props/search/explain.h"
#include "props/search/fuzz.h"
#include "props/sessions/session_runner.h"
#include "props/shrink/shrink.h"

namespace kvtwin::props {
namespace {

using Json = nlohmann::ordered_json;

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
                  "the twin to compare with the reference twin and the ledger")
      ->check(CLI::IsMember(Twins()))
      ->capture_default_str();
  AddBackendOptions(command, arguments.backend);
  // The twins are compared at each level, too.
  command.get_option("--level")->remove_needs(command.get_option("--backend"));
  AddProfileOption(command, arguments.backend);
  command.add_flag("--json", arguments.json, "print one JSON object");
  command.add_option("--html", arguments.html,
                     "draw the failure, if there is one, as a page (HTML)");
}

// Throws if --html is given with an unusable path.
void CheckPage(const std::string& html) {
  if (html.empty()) return;
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

std::vector<std::string> VacuityOf(const Subject& /*subject*/,
                                   const CoverageCounts& counts) {
  std::vector<std::string> reasons = CoverageGaps(counts);
  const std::string forced = ForcedTarget();
  // The target that the kernels report, not the setting.
  const std::string active = optimized::ActiveTarget();
  if (!forced.empty() && forced != active) {
    reasons.push_back(fmt::format("{} was forced, {} ran", forced, active));
  }
  return reasons;
}

Json MarksJson(const Subject& subject, const CoverageCounts& counts) {
  Json probes;
  for (std::size_t i = 0; i < kCoverageMarks.size(); ++i) {
    probes[std::string(kCoverageMarks[i].name)] = counts.hits[i];
  }
  return {{"probes", probes},
          {"calls", counts.calls},
          {"refused", counts.refused},
          {"discarded", counts.discarded},
          {"full", counts.full},
          {"forced_target", ForcedTarget()},
          {"vacuity", VacuityOf(subject, counts)}};
}

void PrintMarks(const Subject& subject, const CoverageCounts& counts) {
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
  for (const std::string& reason : VacuityOf(subject, counts)) {
    fmt::print("VACUOUS {}\n", reason);
  }
}

std::int64_t OperationsPerSecond(const FuzzResult& result) {
  return static_cast<std::int64_t>(static_cast<double>(result.operations) /
                                   std::max(result.seconds, 1e-9));
}

// Returns the line that says where a failure was found.
std::string FoundText(const Failure& failure, std::uint64_t seed) {
  return fmt::format(
      "  found   seed {}, history {}; shrunk from {} operations to {}\n", seed,
      failure.history_number, failure.found_operations, failure.operations);
}

// Rare events in pools.
struct PoolMark {
  std::string_view name;
  std::string_view statement;
  std::int64_t PagedCoverageCounts::*count;
  bool at_identity_only = false;
};
constexpr auto kPoolMarks = std::to_array<PoolMark>({
    {"found", "a prompt finds a block", &PagedCoverageCounts::found},
    {"copied", "a shared block is copied before a write",
     &PagedCoverageCounts::copied, true},
    {"evicted", "a block of an unused prefix is taken",
     &PagedCoverageCounts::evicted, true},
    {"truncated", "a truncation takes tokens away",
     &PagedCoverageCounts::truncated},
    {"full", "an append is refused for lack of blocks",
     &PagedCoverageCounts::full},
});

std::vector<PoolMark> PoolMarksAt(Level level) {
  std::vector<PoolMark> marks(kPoolMarks.begin(), kPoolMarks.end());
  std::erase_if(marks, [&](const PoolMark& mark) {
    return mark.at_identity_only && level != Level::kIdentity;
  });
  return marks;
}

std::vector<std::string> VacuityOf(const Subject& subject,
                                   const PagedCoverageCounts& counts) {
  std::vector<std::string> reasons;
  for (const PoolMark& mark : PoolMarksAt(subject.level)) {
    if (counts.*mark.count > 0) continue;
    reasons.push_back(fmt::format("never: {}", mark.name));
  }
  return reasons;
}

void PrintMarks(const Subject& subject, const PagedCoverageCounts& counts) {
  for (const PoolMark& mark : PoolMarksAt(subject.level)) {
    fmt::print("{:>12} {:<22} {}\n", counts.*mark.count, mark.name,
               mark.statement);
  }
  for (const std::string& reason : VacuityOf(subject, counts)) {
    fmt::print("VACUOUS {}\n", reason);
  }
}

Json MarksJson(const Subject& subject, const PagedCoverageCounts& counts) {
  Json probes;
  for (const PoolMark& mark : PoolMarksAt(subject.level)) {
    probes[std::string(mark.name)] = counts.*mark.count;
  }
  return {{"probes", probes}, {"vacuity", VacuityOf(subject, counts)}};
}

// Rare events in sessions.
constexpr auto kSessionMarks = std::to_array<
    std::pair<std::string_view, std::int64_t (*)(const PlayCounts&)>>({
    {"reused tokens", [](const PlayCounts& c) { return c.gauges.hit_tokens; }},
    {"forks", [](const PlayCounts& c) { return c.gauges.forks; }},
    {"shifts", [](const PlayCounts& c) { return c.gauges.shifts; }},
    {"slots computed again",
     [](const PlayCounts& c) { return c.gauges.reprocessed; }},
    {"prefixes missed", [](const PlayCounts& c) { return c.gauges.missed; }},
    {"records adopted", [](const PlayCounts& c) { return c.adopted; }},
    {"requests replayed", [](const PlayCounts& c) { return c.replayed; }},
});

std::vector<std::string> VacuityOf(const Subject& /*subject*/,
                                   const PlayCounts& counts) {
  std::vector<std::string> reasons;
  for (const auto& [name, count] : kSessionMarks) {
    if (count(counts) == 0) reasons.push_back(fmt::format("never: {}", name));
  }
  return reasons;
}

void PrintMarks(const Subject& subject, const PlayCounts& counts) {
  for (const auto& [name, count] : kSessionMarks) {
    fmt::print("{:>12} {}\n", count(counts), name);
  }
  for (const std::string& reason : VacuityOf(subject, counts)) {
    fmt::print("VACUOUS {}\n", reason);
  }
}

Json MarksJson(const Subject& subject, const PlayCounts& counts) {
  Json probes;
  for (const auto& [name, count] : kSessionMarks) {
    probes[std::string(name)] = count(counts);
  }
  return {{"probes", probes}, {"vacuity", VacuityOf(subject, counts)}};
}

Json CountsJson(const Subject& /*subject*/, const SessionFuzzResult& result) {
  return {{"operations", result.operations},
          {"histories", result.ran},
          {"requests", result.counts.requests},
          {"judged", result.counts.judged}};
}

std::string CountsLine(const Subject& /*subject*/,
                       const SessionFuzzResult& result, std::uint64_t seed) {
  const PlayCounts& counts = result.counts;
  std::string line = fmt::format(
      "{} steps in {} histories, {} differences, seed {}; {} requests, {} "
      "tokens judged",
      result.operations, result.ran, result.failure ? 1 : 0, seed,
      counts.requests, counts.judged);
  for (const auto& [name, count] : kSessionMarks) {
    line += fmt::format(", {} {}", count(counts), name);
  }
  return line + "\n";
}

Json CountsJson(const Subject& subject, const FuzzResult& result) {
  return {{"operations", result.operations},
          {"histories", result.histories},
          {"repeated", result.repeated},
          {"operations_per_second", OperationsPerSecond(result)},
          {"twin", subject.name},
          {"target", optimized::ActiveTarget()}};
}

Json CountsJson(const Subject& subject, const PagedFuzzResult& result) {
  const PagedCoverageCounts& counts = result.counts;
  Json json = {{"operations", counts.operations},
               {"histories", result.ran},
               {"not_made", counts.not_made},
               {"blocks_found", counts.found}};
  if (subject.level == Level::kIdentity) {
    json["blocks_copied"] = counts.copied;
    json["blocks_evicted"] = counts.evicted;
  }
  json["truncations"] = counts.truncated;
  json["refused"] = counts.full;
  json["longest_append"] = counts.longest;
  json["outputs"] = counts.outputs;
  json["dtype_pairs"] = counts.dtypes.size();
  if (counts.StoredNothing()) json["not_judged"] = LevelName(subject.level);
  return json;
}

std::string CountsLine(const Subject& /*subject*/, const FuzzResult& result,
                       std::uint64_t seed) {
  return fmt::format(
      "{} operations in {} histories, {} differences, {} operations a second, "
      "seed {}, digest {:016x}\n",
      result.operations, result.histories, result.failure ? 1 : 0,
      OperationsPerSecond(result), seed, result.digest);
}

// Says how much ran, and how often rare states were reached.
std::string CountsLine(const Subject& subject, const PagedFuzzResult& result,
                       std::uint64_t seed) {
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
  line += fmt::format(
      "{}, {} refused, {} of dtypes", Counted(counts.truncated, "truncation"),
      Counted(counts.full, "append"), Counted(Size(counts.dtypes), "pair"));
  if (counts.not_made > 0) {
    line += fmt::format(
        "; {} more histories skipped, whose pools it does not support",
        counts.not_made);
  }
  return line + "\n";
}

template <class AnyResult>
Json SearchJson(const FuzzOptions& options, const Subject& subject,
                const AnyResult& result) {
  Json json = CountsJson(subject, result);
  json.update({{"differences", result.failure ? 1 : 0},
               {"digest", fmt::format("{:016x}", result.digest)},
               {"seconds", result.seconds},
               {"seed", options.seed}});
  if (!options.known_buckets.empty()) {
    json["passed_over"] = result.passed_over;
    json["never_met"] = NeverMet(result.passed_over, options.known_buckets);
  }
  if (subject.run_pool) json["notes"] = NotesOn(result.answers);
  if (options.count_marks) json.update(MarksJson(subject, result.counts));
  if (result.failure) json.update(FailureJson(*result.failure));
  return json;
}

template <class AnyResult>
void PrintSearch(const FuzzOptions& options, const Subject& subject,
                 const AnyResult& result) {
  if (options.count_marks) PrintMarks(subject, result.counts);
  if (result.failure) {
    fmt::print("{}{}", FailureText(*result.failure),
               FoundText(*result.failure, options.seed));
  }
  fmt::print("{}{}", CountsLine(subject, result, options.seed),
             PassedOverText(result.passed_over, options.known_buckets));
  if (subject.run_pool) fmt::print("{}", NotesText(result.answers));
}

// Runs random histories by `search`, which is Fuzz or FuzzPools. `info`, if not
// null, is that of the backend's pool.
template <class AnySearch>
int RunSearch(const FuzzArguments& arguments, FuzzOptions options,
              const Subject& subject, const AnySearch& search,
              const PoolInfo* info = nullptr) {
  const bool terminal = isatty(STDERR_FILENO) == 1;
  if (terminal) options.progress = ShowProgress;
  const auto result = search(options, subject);
  if (terminal) fmt::print(stderr, "\r{:40}\r", "");
  if (result.ran == 0 && !Interrupted()) {
    return Complain(
        fmt::format("{} supports none of the {} of {} histories", subject.name,
                    subject.run_pool ? "pools" : "caches", result.histories));
  }
  if (arguments.json) {
    Json json = SearchJson(options, subject, result);
    if (info != nullptr) json["not_declared"] = info->not_declared;
    PrintJson(json);
  } else {
    PrintSearch(options, subject, result);
    if (info != nullptr) fmt::print("{}", DeclaredText(*info, subject.level));
  }
  if (result.failure) return Failed(arguments, *result.failure);
  if constexpr (std::is_same_v<decltype(result), const PagedFuzzResult>) {
    if (SaysNotJudged(result.counts, subject.name)) return 1;
  }
  const bool vacuous =
      options.count_marks && !VacuityOf(subject, result.counts).empty();
  return vacuous ? 1 : 0;
}

// The twins reference and optimized have pools with groups, and backends may.
void RefuseForGroups(const CLI::App& command, const FuzzArguments& arguments) {
  for (const char* option : {"--cells-max", "--dtypes"}) {
    if (command.count(option) == 0) continue;
    throw CLI::ValidationError(option, "is not for pools with groups");
  }
  if (arguments.twin == "cuda") {
    throw CLI::ValidationError("--twin", "cuda has no pools with groups");
  }
}

// The sessions are those of the twins reference and optimized.
void RefuseForSessions(const CLI::App& command, const std::string& twin) {
  for (const char* option :
       {"--backend", "--level", "--profile", "--cells-max", "--dtypes"}) {
    const CLI::Option* given = command.get_option_no_throw(option);
    if (given == nullptr || given->count() == 0) continue;
    throw CLI::ValidationError(option, "is not for sessions");
  }
  if (twin == "cuda") {
    throw CLI::ValidationError("--twin", "cuda has no sessions");
  }
}

void RefuseForPools(const CLI::App& command,
                    std::initializer_list<const char*> options) {
  for (const char* option : options) {
    if (command.count(option) == 0) continue;
    throw CLI::ValidationError(option, "is for caches, not for pools");
  }
}

// Returns the level that the user gave for a twin. Throws if it has no such
// level.
Level LevelOfTwin(const FuzzArguments& arguments) {
  const Level level = FromName<Level>(kLevelNames, arguments.backend.level)
                          .value_or(Level::kIdentity);
  if (level == Level::kAttention && arguments.twin == "cuda") {
    throw CLI::ValidationError("--level", "attention is not for the twin cuda");
  }
  return level;
}

// Returns the pools of a twin at the level that the user gave: identity, or
// attention, where they also attend.
Subject PoolTwinAtLevel(const FuzzArguments& arguments) {
  const Level level = LevelOfTwin(arguments);
  if (level != Level::kIdentity && level != Level::kAttention) {
    throw CLI::ValidationError(
        "--level", "the pools of twins have identity and attention");
  }
  return TwinSubject(arguments.twin, level);
}

// Calls `act` with the pools of a twin, or of a backend in its own process.
template <class Do>
int OnPools(const FuzzArguments& arguments, const Do& act) {
  if (arguments.backend.given()) {
    return OnPoolBackend(arguments.backend, arguments.kind == "groups", act);
  }
  ReportCrashes();
  return act(PoolTwinAtLevel(arguments), nullptr);
}

// Returns the twin at the level that the user gave. Throws if it has no such
// level.
Subject TwinAtLevel(const FuzzArguments& arguments) {
  const Level level = LevelOfTwin(arguments);
  if (level == Level::kAttention && arguments.kind == "encoder") {
    throw CLI::ValidationError("--level", "attention is not for encoders");
  }
  if (level != Level::kIdentity && arguments.options.count_marks) {
    throw CLI::ValidationError("--marks", "counts at the level identity only");
  }
  return TwinSubject(arguments.twin, level);
}

// Throws if the caches do not have drafts that are wanted.
void CheckSpeculation(const FuzzArguments& arguments) {
  if (!arguments.options.speculate) return;
  const auto refuse = [](std::string_view name) {
    throw CLI::ValidationError("--speculate",
                               fmt::format("{} has no drafts", name));
  };
  for (const char* kind : {"paged", "groups", "encoder", "sessions"}) {
    if (arguments.kind == kind) refuse(fmt::format("kind {}", kind));
  }
  if (!arguments.backend.given() && arguments.twin == "cuda") {
    refuse("the twin cuda");
  }
}

int RunFuzz(const FuzzArguments& arguments) {
  FuzzOptions options = arguments.options;
  options.groups = arguments.kind == "groups";
  if (arguments.kind == "paged" || options.groups) {
    return OnPools(
        arguments, [&](const Subject& subject, const PoolInfo* info) {
          return RunSearch(arguments, options, subject, FuzzPools, info);
        });
  }
  if (arguments.kind == "sessions") {
    ReportCrashes();
    return RunSearch(arguments, options, TwinSubject(arguments.twin),
                     FuzzSessions);
  }
  options.drawn = !arguments.html.empty();
  if (!arguments.kind.empty()) {
    options.kind = FromName<Kind>(kKindNames, arguments.kind);
  }
  if (!arguments.backend.given()) {
    ReportCrashes();
    return RunSearch(arguments, options, TwinAtLevel(arguments), Fuzz);
  }
  if (options.count_marks) {
    return Complain(
        "--marks counts states of the twins' caches, and of pools: it cannot "
        "be used with --backend");
  }
  if (isatty(STDERR_FILENO) == 1) options.progress = ShowProgress;
  return FuzzBackend(arguments.backend, options, arguments.json,
                     arguments.html);
}

// Runs a history of a pool or of sessions. `info` is that of a backend.
template <class AnyHistory>
int RunOneOf(const FuzzArguments& arguments, const AnyHistory& history,
             const Subject& subject, const PoolInfo* info = nullptr) {
  const RunResult result = RunHistory(history, subject);
  LeftOut left_out;
  if constexpr (std::is_same_v<AnyHistory, PagedHistory>) {
    if (info != nullptr && !result.ran && !result.failure) {
      return Complain(WhyNoPool(*info, history));
    }
    if (info != nullptr) left_out = LeftOutOf(history, result, subject, *info);
  }
  std::optional<Failure> failure;
  if (result.failure) {
    const AnyHistory shortest =
        Shrink(history, WithShortTimeout(subject, *result.failure));
    const auto again = RunHistory(shortest, subject).failure;
    failure = Explain(shortest, again.value_or(*result.failure), subject);
  }
  if (arguments.json) {
    Json json = {{"operations", history.ops.size()},
                 {"differences", failure ? 1 : 0},
                 {"reason", failure ? failure->text : ""}};
    if (failure) json.update(FailureJson(*failure));
    if (info != nullptr) json.update(LeftOutJson(left_out));
    PrintJson(json);
  } else if (failure) {
    fmt::print("{}{}", FailureText(*failure), LeftOutText(left_out));
  } else {
    fmt::print("{}{} operations, {}\n", LeftOutText(left_out),
               history.ops.size(),
               left_out.nothing_judged ? kNothingJudged : "no difference");
  }
  if (failure) return Failed(arguments, *failure);
  return left_out.nothing_judged ? 2 : 0;
}

// Runs a history of a pool, of a twin or of a backend.
int RunPool(const FuzzArguments& arguments) {
  const Result<PagedHistory> history = ParsePagedHistory(arguments.history);
  if (!history.ok()) return Complain(history.status().message());
  if (!arguments.backend.given()) {
    ReportCrashes();
    return RunOneOf(arguments, *history, PoolTwinAtLevel(arguments));
  }
  return OnPoolHost(
      arguments.backend, /*groups=*/false,
      [&](const PoolInfo& info, Level level, const PoolSubjectAt& subject_at) {
        return RunOneOf(arguments, *history, subject_at(level, nullptr), &info);
      });
}

int RunOne(const FuzzArguments& arguments) {
  if (arguments.history.starts_with("kvp1")) return RunPool(arguments);
  if (arguments.history.starts_with("kvs1")) {
    ReportCrashes();
    const auto history = ParseSessionHistory(arguments.history);
    if (!history.ok()) return Complain(history.status().message());
    return RunOneOf(arguments, *history, TwinSubject(arguments.twin));
  }
  const Result<History> history = ParseHistory(arguments.history);
  if (!history.ok()) return Complain(history.status().message());
  if (arguments.backend.given()) {
    return RunOnBackend(arguments.backend, *history, arguments.json,
                        arguments.html);
  }
  const Subject subject = TwinAtLevel(arguments);
  CallTrace trace;
  const RunResult result = RunHistory(*history, subject, {.trace = &trace});
  std::vector<std::string> calls;
  for (const Step& step : trace.steps) calls.push_back(CallLineOf(step));
  if (!result.ran && !result.failure) {
    return Complain(NoCache(history->setup, subject).message());
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
    Json json = {{"operations", result.operations},
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
    PrintJson(json);
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

// Throws if there are options that pools, or sessions, do not have.
void RefuseOptions(CLI::App& command, const FuzzArguments& arguments,
                   bool pools, bool sessions) {
  if (pools) {
    RefuseForPools(command, {"--profile"});
  }
  if (sessions) RefuseForSessions(command, arguments.twin);
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
  AddSeedAndKind(*fuzz, options.seed, fuzz_arguments->kind,
                 {"groups", "sessions"});
  fuzz->add_option("--threads", options.threads,
                   "number of threads; does not change the result")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  fuzz->add_option("--cells-max", options.cells_max,
                   "only caches of at most this many cells")
      ->check(CLI::Range(1, 1 << 20));
  fuzz->add_option("--known", options.known_buckets,
                   "buckets of known findings, which are counted without "
                   "ending the run")
      ->expected(0, CLI::detail::expected_max_vector_size)
      ->type_name("BUCKET ...");
  fuzz->add_flag("--unshrunk", options.unshrunk,
                 "without --known: report a failure as it was found, without "
                 "shrinking it");
  fuzz->add_flag("--dtypes", options.dtypes,
                 "draw all pairs of dtypes of K and V in turn");
  fuzz->add_flag("--speculate", options.speculate,
                 "draw drafts and commits in every history");
  fuzz->add_flag(
      "--marks", options.count_marks,
      "count rare states (coverage marks), and fail if one was never "
      "reached");
  fuzz->add_flag("--probes", options.count_marks, "former name of --marks")
      ->group("");
  AddTwin(*fuzz, *fuzz_arguments);
  fuzz->callback([fuzz, fuzz_arguments, &exit_code] {
    fuzz_arguments->options.known_buckets.erase("");  // --known without names.
    SetKindOfPool(fuzz_arguments->backend, fuzz_arguments->kind);
    CheckSpeculation(*fuzz_arguments);
    const std::string& kind = fuzz_arguments->kind;
    RefuseOptions(*fuzz, *fuzz_arguments, kind == "paged" || kind == "groups",
                  kind == "sessions");
    if (kind == "groups") RefuseForGroups(*fuzz, *fuzz_arguments);
    CheckPage(fuzz_arguments->html);
    CatchInterrupts();
    exit_code = RunFuzz(*fuzz_arguments);
  });

  const auto run_arguments = std::make_shared<FuzzArguments>();
  CLI::App* run = app.add_subcommand(
      "run", "Run one history, such as a failure prints (docs/histories.md)");
  run->add_option("history", run_arguments->history, "'kvt1 ... | ...'")
      ->required();
  AddTwin(*run, *run_arguments);
  run->callback([run, run_arguments, &exit_code] {
    const std::string& history = run_arguments->history;
    RefuseOptions(*run, *run_arguments, history.starts_with("kvp1"),
                  history.starts_with("kvs1"));
    CheckPage(run_arguments->html);
    exit_code = RunOne(*run_arguments);
  });
}

}  // namespace kvtwin::props
