// kvtwin-bench: the goals of kvtwin's speed, or the suites of Google Benchmark.

#include <benchmark/benchmark.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "bench/goals.h"
#include "bench/limits.h"
#include "bench/suites.h"
#include "core/index.h"

namespace {

constexpr const char* kAbout =
    "How fast the optimized twin is. Without --goals, every benchmark of both "
    "twins; options that begin with --benchmark_ go to Google Benchmark.";

int Main(int argc, char** argv) {
  using namespace kvtwin;
  bench::GoalOptions options;
  bool goals = false;
  bool cuda = false;
  bool limits = false;
  CLI::App app(kAbout);
  app.allow_extras();
  app.add_flag("--goals", goals,
               "Measure each goal beside its limit; exit with 0 if all are "
               "met, with 1 if not or if something is wrong");
  if (bench::run_cuda_goals != nullptr) {
    app.add_flag("--cuda", cuda, "The goals of the twin cuda, on the device");
  }
  app.add_flag("--limits", limits,
               "For each line of stdin, a number of threads: the bytes that "
               "they read and the floats that they multiply or add, in "
               "billions a second");
  app.add_flag("--json", options.json, "The goals as a list of objects");
  app.add_flag("--quick", options.quick,
               "Small and few: says whether it works; no goal is missed");
  app.add_option("--only", options.only, "Goals whose name contains this");
  app.add_option("--save", options.save,
                 "A file that gets what --json prints as well");
  app.add_option("--spin", options.spin,
                 "Run each measured operation for this many seconds, and "
                 "nothing else, for a profiler");
  app.add_option("--workload", options.workload,
                 "The file of chat requests; without it, no chat")
      ->envname("KVTWIN_BENCH_WORKLOAD");
  CLI11_PARSE(app, argc, argv);

  std::vector<std::string> extras = app.remaining();
  if (limits) return bench::ServeLimits();
  if (goals || cuda) {
    if (!extras.empty()) return app.exit(CLI::ExtrasError(extras));
    if (cuda) return bench::run_cuda_goals(options);
    return bench::RunGoals(options);
  }
  std::vector<char*> arguments = {argv[0]};
  for (std::string& extra : extras) arguments.push_back(extra.data());
  auto count = Size(arguments);
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 2;
  return bench::RunSuites();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Main(argc, argv);
  } catch (const std::exception& error) {  // E.g. no memory for a limit.
    std::fprintf(stderr, "kvtwin-bench: %s\n", error.what());
    return 1;
  }
}
