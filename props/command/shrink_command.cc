// The subcommand `shrink`.

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "core/index.h"
#include "core/json_line.h"
#include "kvtwin/cache.h"
#include "props/base/clock.h"
#include "props/base/filter.h"
#include "props/base/program.h"
#include "props/base/text_file.h"
#include "props/command/command.h"
#include "props/command/option_checks.h"
#include "props/report/finding_filter.h"
#include "props/search/shrink_recording.h"

namespace kvtwin::props {
namespace {

struct ShrinkArguments {
  std::string path;
  std::string command;
  std::string out;
  std::string twin = "both";
  std::int64_t runs = 2000;
  double seconds = 10;
  std::int64_t output_mib = 64;
};

int RefuseToShrink(const std::string& text) {
  fmt::print(stderr, "kvtwin shrink: {}\n", text);
  return 2;
}

// Shows the number of runs: on a terminal after each run, in a log every ten
// seconds.
std::function<void(std::int64_t runs, std::size_t calls)> ShowShrinking(
    bool terminal) {
  if (terminal) {
    return [](std::int64_t runs, std::size_t calls) {
      fmt::print(stderr, "\r{:>8} runs, {} calls ", runs, calls);
    };
  }
  constexpr double kSeconds = 10;
  return
      [next = Now() + kSeconds](std::int64_t runs, std::size_t calls) mutable {
        if (Now() < next) return;
        next = Now() + kSeconds;
        fmt::print(stderr, "kvtwin shrink: {} runs, {} calls\n", runs, calls);
      };
}

// Returns "bug.short.jsonl" for "bug.jsonl".
std::string ShortName(const std::string& path) {
  std::filesystem::path name = path;
  name.replace_extension(".short.jsonl");
  return name.string();
}

int Write(const std::string& path, const ShrunkRecording& shrunk) {
  const Status written = WriteFile(path, shrunk.text);
  if (!written.ok()) return RefuseToShrink(written.message());
  const Judgement& judgement = shrunk.judgement;
  fmt::print(
      "{} calls of {}, after {} runs{}\n\nline {}: {}\n\n  bucket  {}\n  "
      "written {}\n  show    {}\n",
      shrunk.calls, shrunk.calls_before, shrunk.runs,
      shrunk.is_shortest ? "" : " (the limit: --runs raises it)",
      judgement.line(), judgement.reason(), BucketOfReason(judgement.reason()),
      Printable(path, path.size()), CommandLine("show " + ShellWord(path)));
  return 1;
}

int RunShrink(const ShrinkArguments& arguments) {
  const FilterLimits limits = {.seconds = arguments.seconds,
                               .bytes = AsSize(arguments.output_mib) << 20};
  // The command prints a recording of about the same size.
  const Result<std::string> recording =
      ReadInput(arguments.path, arguments.output_mib << 20,
                fmt::format("--output-mib {}", arguments.output_mib));
  if (!recording.ok()) return RefuseToShrink(recording.status().message());
  if (recording->empty()) {
    return RefuseToShrink(Printable(arguments.path, arguments.path.size()) +
                          " is empty");
  }
  std::error_code none;
  if (std::filesystem::equivalent(arguments.path, arguments.out, none)) {
    return RefuseToShrink("--out is the recording itself");
  }
  if (arguments.out.empty() &&
      !std::filesystem::is_regular_file(arguments.path, none)) {
    return RefuseToShrink(
        fmt::format("--out is required: {} is not a regular file",
                    Printable(arguments.path, arguments.path.size())));
  }
  const std::string out =
      arguments.out.empty() ? ShortName(arguments.path) : arguments.out;
  if (const Status status = CheckWritable(out); !status.ok()) {
    return RefuseToShrink((arguments.out.empty() ? "" : "--out: ") +
                          status.message());
  }
  RecordingShrinkOptions options;
  options.twins =
      arguments.twin == "both"
          ? std::vector<std::string>(TwinNames().begin(), TwinNames().end())
          : std::vector<std::string>{arguments.twin};
  options.runs = arguments.runs;
  const bool terminal = isatty(STDERR_FILENO) == 1;
  options.progress = ShowShrinking(terminal);
  const Recorder record = [&](const std::string& calls) {
    return Filter(arguments.command, calls, limits);
  };
  try {
    const auto shrunk = ShrinkRecording(*recording, record, options);
    if (terminal) fmt::print(stderr, "\r{:40}\r", "");
    if (!shrunk.ok()) return RefuseToShrink(shrunk.status().message());
    return Write(out, *shrunk);
  } catch (const std::bad_alloc&) {
    return RefuseToShrink("there is not enough memory");
  }
}

}  // namespace

void AddShrinkCommand(CLI::App& app, int& exit_code) {
  const auto arguments = std::make_shared<ShrinkArguments>();
  CLI::App* shrink = app.add_subcommand(
      "shrink",
      "Shorten a rejected recording, with a program that answers shorter lists "
      "of calls (docs/adapter.md)");
  shrink->add_option("file", arguments->path, "a recording")->required();
  shrink
      ->add_option(
          "--with", arguments->command,
          "a command for the shell, which reads calls, as `gen` prints "
          "them, and prints the recording")
      ->required();
  shrink->add_option("--out", arguments->out,
                     "write the shortest recording here (FILE.short.jsonl)");
  std::vector<std::string> twins(TwinNames().begin(), TwinNames().end());
  twins.emplace_back("both");
  shrink->add_option("--twin", arguments->twin, "the twin to compare with")
      ->check(CLI::IsMember(twins))
      ->capture_default_str();
  shrink
      ->add_option("--runs", arguments->runs,
                   "run the command at most this many times")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40))
      ->capture_default_str();
  shrink
      ->add_option("--seconds", arguments->seconds,
                   "end a run of the command that takes longer")
      ->check(RealRange(0.01, 1e6))
      ->capture_default_str();
  shrink
      ->add_option("--output-mib", arguments->output_mib,
                   "largest output of a run of the command, and size of the "
                   "recording")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{4096}))
      ->capture_default_str();
  shrink->callback(
      [arguments, &exit_code] { exit_code = RunShrink(*arguments); });
}

}  // namespace kvtwin::props
