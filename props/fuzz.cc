#include "props/fuzz.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>
#include <vector>

#include "props/generate.h"
#include "props/shrink.h"

namespace kvtwin::props {
namespace {

constexpr int kOpsInHistory = 60;
// Histories between two looks at the clock and the count.
constexpr std::size_t kBlock = 64;

double Now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// What this thread is running, for OnCrash.
thread_local const History* running = nullptr;
thread_local const Subject* running_on = nullptr;

// Not what a signal handler may do, but the process is lost anyway.
void OnCrash(int signal) {
  std::signal(signal, SIG_DFL);
  if (running != nullptr) {
    fmt::print(stderr, "\ncrashed in\n  rerun   kvtwin run '{}' --twin {}\n",
               ToText(*running), running_on->name);
  }
  std::raise(signal);
}

// Runs the histories from `first` on, each into its place in `results`.
void RunBlock(const FuzzOptions& options, const Subject& subject,
              std::uint64_t first, std::vector<RunResult>& results) {
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    for (std::size_t i = next++; i < results.size(); i = next++) {
      const History history =
          MakeHistory(options.seed, first + i, options.kind, kOpsInHistory);
      running = &history;
      running_on = &subject;
      results[i] = RunHistory(history, subject);
      running = nullptr;
    }
  };
  std::vector<std::jthread> helpers;
  for (int i = 1; i < options.threads; ++i) helpers.emplace_back(work);
  work();
}

FuzzFailure Explain(const FuzzOptions& options, const Subject& subject,
                    std::uint64_t number) {
  FuzzFailure failure;
  failure.history_number = number;
  const History found =
      MakeHistory(options.seed, number, options.kind, kOpsInHistory);
  failure.operations = found.ops.size();
  failure.shrunk = Shrink(found, subject);
  failure.difference = *RunHistory(failure.shrunk, subject).difference;
  return failure;
}

}  // namespace

void ReportCrashes() {
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
    std::signal(signal, OnCrash);
  }
}

FuzzResult Fuzz(const FuzzOptions& options, const Subject& subject) {
  FuzzResult result;
  const double start = Now();
  const auto done = [&] {
    if (options.operations > 0) return result.operations >= options.operations;
    return Now() - start >= options.seconds;
  };
  while (!done() && !result.failure) {
    const auto first = static_cast<std::uint64_t>(result.histories);
    std::vector<RunResult> block(kBlock);
    RunBlock(options, subject, first, block);
    // In the order of the seed, whichever thread was first.
    for (std::size_t i = 0; i < block.size(); ++i) {
      const RunResult& one = block[i];
      result.operations += one.operations;
      result.digest =
          XXH3_64bits_withSeed(&one.digest, sizeof(one.digest), result.digest);
      ++result.histories;
      if (one.difference) {
        result.seconds = Now() - start;  // Without the shrinking.
        result.failure = Explain(options, subject, first + i);
        break;
      }
      if (options.operations > 0 && done()) break;
    }
    if (!result.failure) result.seconds = Now() - start;
    if (options.progress) options.progress(result.operations, result.seconds);
  }
  return result;
}

std::string FailureText(const History& history, const Difference& difference,
                        const Subject& subject) {
  Story story;
  RunHistory(history, subject, &story);
  std::string text =
      fmt::format("FAIL {}    {} against the reference and the ledger\n\n",
                  difference.check, subject.name);
  const std::size_t calls = story.steps.size();
  for (std::size_t i = 0; i < calls; ++i) {
    if (i >= 40 && i + 10 < calls) continue;  // The middle of a long one.
    text += fmt::format("  {:3} {}{}\n", i + 1, StoryLine(story.steps[i]),
                        i + 1 == calls ? "   <- then" : "");
  }
  text += fmt::format("\n  {}\n", difference.text);
  text += "\n";
  text += fmt::format("  rerun   {}\n", RerunCommand(history, subject));
  return text;
}

std::string RerunCommand(const History& history, const Subject& subject) {
  return fmt::format("kvtwin run '{}' --twin {}", ToText(history),
                     subject.name);
}

Failure ExplainHistory(const History& history, const Difference& difference,
                       const Subject& subject) {
  Failure failure{.name = "a history of calls",
                  .setup = ToText(history.setup),
                  .unit = "Call",
                  .check = difference.check,
                  .reason = difference.text,
                  .command = RerunCommand(history, subject),
                  .text = FailureText(history, difference, subject),
                  .frame = Frame::Around(difference.first_cell,
                                         difference.column, difference.row),
                  .steps = {},
                  .left_out = 0};
  // Once to count the calls, and once more to draw the last of them.
  Story story;
  RunHistory(history, subject, &story);
  const auto calls = std::ssize(story.steps);
  failure.left_out = std::max<std::int64_t>(0, calls - Failure::kSteps);
  story = {.steps = {}, .frame = failure.frame, .from = failure.left_out + 1};
  RunHistory(history, subject, &story);
  failure.steps.assign(story.steps.begin() + failure.left_out,
                       story.steps.end());
  if (failure.steps.empty()) failure.steps.emplace_back().call = "setup";
  failure.steps.back().wrong_row = difference.row;
  failure.steps.back().wrong_column = difference.column;
  return failure;
}

}  // namespace kvtwin::props
