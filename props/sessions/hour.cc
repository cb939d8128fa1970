// The program kvtwin_hour: plays the recorded hour of a chat service through
// sessions (docs/testing.md).

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "props/sessions/hour_player.h"

namespace kvtwin::props {
namespace {

constexpr int kSkipped = 77;

struct Arguments {
  std::string workload;
  int made = 0;
  bool divided = false;
  std::int64_t batches = 0;
  std::uint64_t seed = 1;
  int every = 997;
};

// Requests like those of the hour: half continue an earlier one.
std::vector<ServiceRequest> MadeHour(int count) {
  std::vector<ServiceRequest> requests;
  for (int i = 0; i < count; ++i) {
    ServiceRequest request = {.input_length = 700 + i * 7919 % 20000,
                              .output_length = 1 + i * 31 % 400,
                              .blocks = {0}};
    for (int block = 1; block <= request.input_length / kBlockTokens; ++block) {
      const bool shared = i % 2 == 1 && block < 6;
      request.blocks.push_back(100 * (shared ? i / 8 : i) + block);
    }
    requests.push_back(request);
  }
  return requests;
}

class Progress {
 public:
  Progress(std::string_view name, std::size_t requests)
      : name_(name), requests_(requests) {}
  ~Progress() { Clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Tell(std::int64_t batch, std::int64_t submitted) {
    if (!shown_ || batch % 256 != 0) return;
    fmt::print(stderr, "\r\x1b[K{}: {} of {} requests, {} batches", name_,
               submitted, requests_, batch);
  }

 private:
  void Clear() const {
    if (shown_) fmt::print(stderr, "\r\x1b[K");
  }

  std::string_view name_;
  std::size_t requests_;
  bool shown_ = isatty(STDERR_FILENO) == 1;
};

void Print(std::string_view name, const HourCounts& counts, double seconds) {
  const SessionGauges& gauges = counts.gauges;
  fmt::print(
      "{}: {} batches, {} calls of sessions, {} of {} prompt tokens reused, {} "
      "forks, {} shifts, {} computed again, {} prefixes missed; {} rows, {} "
      "masks, {} checks of everything; {} refusals; {:.0f} s\n",
      name, counts.batches, counts.calls, gauges.hit_tokens,
      gauges.prompt_tokens, gauges.forks, gauges.shifts, gauges.reprocessed,
      gauges.missed, counts.rows, counts.masks, counts.checks, gauges.refusals,
      seconds);
  std::fflush(stdout);
}

// Plays until there were `batches` batches, of which each play has a share.
int PlayAll(const Arguments& arguments,
            const std::vector<ServiceRequest>& requests) {
  const std::vector<HourPlay> plays =
      arguments.divided ? DividedHours() : std::vector{WholeHour()};
  const std::int64_t share =
      (arguments.batches + std::ssize(plays) - 1) / std::ssize(plays);
  std::int64_t batches = 0;
  for (std::size_t turn = 0; turn < plays.size() || batches < arguments.batches;
       ++turn) {
    const HourPlay& play = plays[turn % plays.size()];
    if (arguments.batches > 0 && batches >= arguments.batches) break;
    const auto start = std::chrono::steady_clock::now();
    Progress progress(play.name, requests.size());
    std::int64_t done = 0;
    const HourOptions options = {
        .batches = share,
        .seed = arguments.seed + turn / plays.size(),
        .every = arguments.every,
        .progress = [&](std::int64_t told) { progress.Tell(++done, told); }};
    HourCounts counts;
    const std::string wrong = PlayHour(play, requests, options, counts);
    const std::chrono::duration<double> took =
        std::chrono::steady_clock::now() - start;
    Print(play.name, counts, took.count());
    if (!wrong.empty()) {
      fmt::print("wrong: {}\n", wrong);
      return 1;
    }
    batches += counts.batches;
  }
  fmt::print("{} batches: no refusal, no difference\n", batches);
  return 0;
}

int RunHour(const Arguments& arguments) {
  // The longest request of the recorded hour has 126,527 tokens.
  auto requests = arguments.made > 0
                      ? Result(MadeHour(arguments.made))
                      : ReadServiceHour(arguments.workload, 1 << 17);
  if (!requests.ok()) {
    fmt::print(stderr, "kvtwin_hour: {}\n", requests.status().message());
    return 2;
  }
  if (requests->empty()) {
    fmt::print(stderr,
               "kvtwin_hour: skipped: {} has no requests; docs/performance.md "
               "says which file --workload or KVTWIN_BENCH_WORKLOAD names\n",
               arguments.workload.empty() ? "no file" : arguments.workload);
    return kSkipped;
  }
  return PlayAll(arguments, *requests);
}

}  // namespace
}  // namespace kvtwin::props

int main(int argc, char** argv) {
  kvtwin::props::Arguments arguments;
  CLI::App app("Plays the recorded hour of a chat service through sessions");
  app.add_option("--workload", arguments.workload, "the file of the hour")
      ->envname("KVTWIN_BENCH_WORKLOAD");
  app.add_option("--made", arguments.made, "plays this many made-up requests")
      ->check(CLI::NonNegativeNumber);
  app.add_flag(
      "--divided", arguments.divided,
      "one in 64 tokens of the prompts, with a reference cache beside: "
      "ahead, layers, pool");
  app.add_option("--batches", arguments.batches,
                 "plays until there were this many batches")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--seed", arguments.seed);
  app.add_option("--every", arguments.every,
                 "checks everything in each batch with this divisor")
      ->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  return kvtwin::props::RunHour(arguments);
}
