// The command line of `kvtwin`. Exit codes: 0 success, 1 a difference, 2 bad
// input or usage; for several recordings, the highest of their codes.

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "core/index.h"
#include "core/json_line.h"
#include "optimized/fast_paths.h"
#include "optimized/targets.h"
#include "props/base/did_you_mean.h"
#include "props/base/interrupt.h"
#include "props/base/program.h"
#include "props/command/command.h"
#include "props/oracle/judge.h"
#include "props/report/page_file.h"
#include "props/report/show.h"

namespace kvtwin::props {
namespace {

namespace fs = std::filesystem;

int ExitCode(Verdict verdict) {
  switch (verdict) {
    case Verdict::kAccept:
      return 0;
    case Verdict::kReject:
      return 1;
    case Verdict::kBadInput:
      return 2;
  }
  return 2;
}

std::vector<std::string> TwinsNamed(const std::string& name) {
  if (name != "both") return {name};
  return {TwinNames().begin(), TwinNames().end()};
}

void AddTwin(CLI::App& command, std::string& twin) {
  std::vector<std::string> names = TwinsNamed("both");
  names.emplace_back("both");
  command.add_option("--twin", twin, "the twin to compare with")
      ->check(CLI::IsMember(names))
      ->capture_default_str();
}

// Returns the recordings of a path: the path itself, or all recordings in a
// folder, sorted. Sets `error` if the folder could not be read to its end.
std::vector<std::string> FilesOf(const std::string& path,
                                 std::error_code& error) {
  std::error_code not_there;
  if (!fs::is_directory(path, not_there)) return {path};
  std::vector<std::string> files;
  fs::recursive_directory_iterator at(path, error);
  for (; !error && at != fs::recursive_directory_iterator();
       at.increment(error)) {
    std::error_code ignored;
    if (at->path().extension() == ".jsonl" && at->is_regular_file(ignored)) {
      files.push_back(at->path().string());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::string TextLine(const std::string& file, const Judgement& judgement) {
  const std::string name = Printable(file, file.size());
  if (judgement.verdict() == Verdict::kAccept) {
    return fmt::format(
        "accept     {:<11} {} ({}){}{}\n", LevelName(judgement.level), name,
        JudgedText(judgement.judged), judgement.reason().empty() ? "" : ": ",
        judgement.reason());
  }
  const std::string line =
      judgement.line() > 0 ? fmt::format("line {}", judgement.line()) : "";
  std::string rules;
  if (judgement.failure && !judgement.failure->rules.empty()) {
    rules = fmt::format(" ({})", judgement.failure->rules);
  }
  return fmt::format("{:<10} {:<11} {}: {}{}\n",
                     VerdictName(judgement.verdict()), line, name,
                     judgement.reason(), rules);
}

// Judges standard input, which may have several recordings one after another.
void JudgeInput(
    const std::vector<std::string>& twins,
    const std::function<void(const std::string&, const Judgement&)>& tell) {
  // The stream would otherwise take an error of a read for the end.
  std::ios::sync_with_stdio(false);
  TraceReader reader(std::cin, /*several=*/true);
  int count = 0;
  do {
    Judgement judgement;
    try {
      judgement = Judge(reader, twins);
    } catch (const std::bad_alloc&) {
      judgement.bad_input = {0, "there is not enough memory"};
    }
    tell(fmt::format("-:{}", ++count), judgement);
    if (std::cin.bad()) return;  // The judgement says so.
  } while (reader.SkipToHeader());
  if (!reader.error()) return;
  tell("-", {.bad_input = reader.error()});
}

struct CheckArguments {
  std::vector<std::string> paths;
  std::string twin = "both";
  std::string html;  // Where pages go; empty: no pages.
  bool json = false;
};

// Returns the path of each recording's page: the path that --html names; if it
// is a folder, a file in it, named after the recording's path.
std::vector<std::string> PagesOf(const std::string& html,
                                 const std::vector<std::string>& recordings) {
  std::vector<std::string> pages;
  std::set<std::string> taken;
  for (const std::string& recording : recordings) {
    if (!fs::is_directory(html)) {
      pages.push_back(html);
      continue;
    }
    std::string name = fs::path(recording).lexically_normal().string();
    name.erase(0, name.find_first_not_of("./"));
    std::replace(name.begin(), name.end(), '/', '-');
    while (!taken.insert(name).second) name += "-2";  // Such as a/b after a-b.
    pages.push_back((fs::path(html) / (name + ".html")).string());
  }
  return pages;
}

// Returns `exit_code`, or 2 if the page cannot be written.
int WritePageOf(const std::string& recording, const std::string& path,
                const std::vector<std::string>& twins, int exit_code) {
  const auto failure = ExplainRecording(recording, twins);
  return AfterPage(
      failure ? WritePage(*failure, path)
              : Status(StatusCode::kFailedPrecondition,
                       "--html needs a recording that can be read twice"),
      path, exit_code);
}

int ComplainOfCheck(std::string_view text) {
  fmt::print(stderr, "kvtwin check: {}\n", text);
  return 2;
}

// Errors: a path that cannot be read, or that has no recordings.
Result<std::vector<std::string>> FilesToCheck(const CheckArguments& arguments) {
  std::vector<std::string> files;
  for (const std::string& path : arguments.paths) {
    std::error_code error;
    const std::vector<std::string> found = FilesOf(path, error);
    if (error) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("{} cannot be read to its end: {}",
                                Printable(path, path.size()), error.message()));
    }
    if (found.empty()) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("no recordings (*.jsonl) in {}",
                                Printable(path, path.size())));
    }
    files.insert(files.end(), found.begin(), found.end());
  }
  return files;
}

// Returns the page of each file, ready to be written; none without --html.
Result<std::vector<std::string>> PreparePages(
    const std::string& html, const std::vector<std::string>& files) {
  if (html.empty()) return std::vector<std::string>();
  std::error_code error;
  if (files.size() > 1 && !fs::is_directory(html, error) &&
      !fs::create_directory(html, error)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("with several recordings, --html names a folder, "
                              "and {} cannot be made: {}",
                              Printable(html, 200), error.message()));
  }
  std::vector<std::string> pages = PagesOf(html, files);
  for (const std::string& page : pages) {
    Status status = PreparePage(page);
    if (!status.ok()) return status;
  }
  return pages;
}

int Check(const CheckArguments& arguments) {
  const auto found = FilesToCheck(arguments);
  if (!found.ok()) return ComplainOfCheck(found.status().message());
  const std::vector<std::string>& files = *found;
  const auto prepared = PreparePages(arguments.html, files);
  if (!prepared.ok()) return ComplainOfCheck(prepared.status().message());
  const std::vector<std::string>& pages = *prepared;
  std::string page;  // That of the current recording.
  const bool counts = files.size() > 1 && isatty(STDERR_FILENO) == 1;
  const std::vector<std::string> twins = TwinsNamed(arguments.twin);
  std::vector<std::size_t> verdicts(3);
  int not_judged = 0;
  int exit_code = 0;
  const auto tell = [&](const std::string& file, const Judgement& judgement) {
    if (arguments.json) {
      fmt::print("{}\n", JudgementJson(file, judgement));
    } else {
      fmt::print("{}", TextLine(file, judgement));
    }
    ++At(verdicts, judgement.verdict());
    const bool accepted = judgement.verdict() == Verdict::kAccept;
    if (accepted && judgement.judged.answers == 0) ++not_judged;
    exit_code = std::max(exit_code, ExitCode(judgement.verdict()));
    if (judgement.verdict() == Verdict::kReject && !page.empty()) {
      exit_code = WritePageOf(file, page, twins, exit_code);
    }
  };
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (!pages.empty()) page = pages[i];
    if (files[i] == "-") {
      JudgeInput(twins, tell);
      continue;
    }
    if (counts) fmt::print(stderr, "\r{} of {} ", i + 1, files.size());
    const Judgement judgement =
        OnFile(files[i], [&](std::istream& in) { return Judge(in, twins); });
    if (counts) fmt::print(stderr, "\r{:24}\r", "");
    tell(files[i], judgement);
  }
  if (!pages.empty() && verdicts[1] == 0) {
    fmt::print(stderr, "kvtwin: no page: no recording was rejected\n");
  }
  if (!arguments.json && not_judged > 0) {
    fmt::print("Nothing was judged in {} of {} accepted\n", not_judged,
               verdicts[0]);
  }
  if (!arguments.json) {
    fmt::print("{} accepted, {} rejected, {} bad input\n", verdicts[0],
               verdicts[1], verdicts[2]);
  }
  return exit_code;
}

void AddCheckCommand(CLI::App& app, int& exit_code) {
  const auto arguments = std::make_shared<CheckArguments>();
  CLI::App* check = app.add_subcommand(
      "check", "Judge recordings of caches and pools (docs/trace_format.md)");
  check
      ->add_option("path", arguments->paths,
                   "recordings, folders of *.jsonl files, or - for "
                   "standard input, which may hold several recordings")
      ->required();
  AddTwin(*check, arguments->twin);
  check->add_flag("--json", arguments->json,
                  "print one JSON object per recording");
  check->add_option("--html", arguments->html,
                    "draw the rejected recording as a page (HTML); with "
                    "several recordings, the folder for their pages");
  check->callback([arguments, &exit_code] { exit_code = Check(*arguments); });
}

struct ShowArguments {
  std::string path;
  std::string twin = "both";
  std::int64_t line = 0;
  ShowOptions options;
};

int RunShow(const ShowArguments& arguments) {
  ShowOptions options = arguments.options;
  options.twins = TwinsNamed(arguments.twin);
  options.color =
      isatty(STDOUT_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr;
  if (arguments.line > 0) options.from = options.to = arguments.line;
  bool shown = false;
  const Judgement judgement = OnFile(arguments.path, [&](std::istream& in) {
    Judgement found = Show(in, arguments.path, options);
    shown = true;
    return found;
  });
  if (!shown) {
    fmt::print(stderr, "kvtwin show: {}: {}\n",
               Printable(arguments.path, arguments.path.size()),
               judgement.reason());
  }
  return ExitCode(judgement.verdict());
}

void AddShowCommand(CLI::App& app, int& exit_code) {
  const auto arguments = std::make_shared<ShowArguments>();
  ShowOptions& options = arguments->options;
  CLI::App* show = app.add_subcommand(
      "show", "Draw a recording step by step, and its first wrong line");
  show->add_option("file", arguments->path, "a recording")->required();
  AddTwin(*show, arguments->twin);
  show->add_flag("--json", options.json, "print one JSON object per step");
  show->add_flag("--all", options.all, "continue after the first wrong line");
  const CLI::Range lines(std::int64_t{1}, std::int64_t{1} << 53);
  auto* from = show->add_option("--from", options.from, "first line to show")
                   ->check(lines);
  auto* to =
      show->add_option("--to", options.to, "last line to show")->check(lines);
  show->add_option("--line", arguments->line, "the only line to show")
      ->check(lines)
      ->excludes(from)
      ->excludes(to);
  show->callback([arguments, &exit_code] {
    const ShowOptions& chosen = arguments->options;
    if (chosen.from > chosen.to) {
      throw CLI::ValidationError(
          "--to",
          fmt::format("line {} is before --from {}", chosen.to, chosen.from));
    }
    exit_code = RunShow(*arguments);
  });
}

// Returns the error number if output was lost, or 0.
int OutputError() {
  if (std::fflush(stdout) != 0) return errno;
  if (std::ferror(stdout) == 0) return 0;
  // The stream no longer has the error number: another write returns it again.
  return write(STDOUT_FILENO, "\n", 1) < 0 ? errno : EIO;
}

// Returns `exit_code`, or 2 with a message if output was lost, as on a full
// disk. A reader that has seen enough, such as `head`, needs no message.
int AfterOutput(int exit_code) {
  const int error = OutputError();
  if (error == 0) return exit_code;
  if (error == EPIPE) return 2;
  fmt::print(stderr, "kvtwin: the output cannot be written: {}\n",
             strerror(error));
  return 2;
}

// Handles command lines that do not name a subcommand: `kvtwin`, `kvtwin help
// [SUBCOMMAND]` and `kvtwin chek`. Returns nullopt for all others.
std::optional<int> WithoutSubcommand(const CLI::App& app, int argc,
                                     char** argv) {
  if (argc < 2) {
    fmt::print(stderr, "{}", app.help());
    return 2;
  }
  const bool help = std::string_view(argv[1]) == "help";
  if (help && argc == 2) {
    fmt::print("{}", app.help());
    return 0;
  }
  if (help && argc > 3) {
    fmt::print(stderr, "kvtwin: help takes one subcommand, there are {}\n",
               argc - 2);
    return 2;
  }
  const std::string name = argv[help ? 2 : 1];
  if (name.starts_with("-")) {
    if (app.get_option_no_throw(name) != nullptr) return std::nullopt;
    fmt::print(stderr, "kvtwin: unknown option '{}' before a subcommand\n",
               Printable(name, 40));
    return 2;
  }
  std::vector<std::string> names;
  for (const CLI::App* each : app.get_subcommands({})) {
    names.push_back(each->get_name());
    if (names.back() != name) continue;
    if (help) fmt::print("{}", each->help("kvtwin"));
    return help ? std::optional(0) : std::nullopt;
  }
  if (name == "museum") {
    fmt::print(stderr,
               "kvtwin: museum is only in a full build: run ./dev build\n");
    return 2;
  }
  const std::string nearest = DidYouMean(name, names);
  fmt::print(stderr,
             "kvtwin: unknown subcommand '{}'{} `kvtwin help` lists all\n",
             Printable(name, 40), nearest.empty() ? ":" : nearest);
  return 2;
}

// Whether the option takes integers.
bool IsWhole(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  return type.starts_with("INT") || type.starts_with("UINT");
}

// Refuses the values that CLI11 and the subcommands would misread: 010 would be
// 8, and an empty text is how they represent an option that is not given.
void CheckValues(CLI::App& command) {
  for (CLI::Option* option : command.get_options()) {
    // Flags, and --known, may have no value. The model of a state may be "".
    if (option->get_expected_min() == 0 || option->check_name("--model")) {
      continue;
    }
    const auto why_not = [whole = IsWhole(*option)](const std::string& value) {
      if (value.empty()) return std::string("the value is empty");
      const std::size_t sign = value.find_first_not_of("+-");
      const bool octal = whole && sign != std::string::npos &&
                         sign + 1 < value.size() && value[sign] == '0';
      if (!octal) return std::string();
      return fmt::format("'{}' begins with 0: numbers are decimal",
                         Printable(value, 40));
    };
    option->transform(CLI::Validator(why_not, ""));  // The first check.
  }
}

// Says why the arguments of a subcommand are refused. Returns the exit code.
int RefuseArguments(const CLI::App& app, const CLI::ParseError& error) {
  const std::vector<CLI::App*> used = app.get_subcommands();
  const CLI::App& command = used.empty() ? app : *used.front();
  std::string text = error.what();
  for (const std::string& word : command.remaining()) {
    if (!word.starts_with("-")) continue;
    std::vector<std::string> names;
    for (const CLI::Option* option : command.get_options()) {
      for (const std::string& name : option->get_lnames()) {
        names.push_back("--" + name);
      }
    }
    text = fmt::format("unknown option '{}'{}", Printable(word, 40),
                       DidYouMean(word, names));
  }
  fmt::print(stderr, "kvtwin {0}: {1}\n`kvtwin help {0}` lists its options\n",
             command.get_name(), text);
  return 2;
}

int Main(int argc, char** argv, AddCommand more) {
  if (argc > 0) SetProgram(argv[0]);
  CLI::App app("Finds bugs in KV caches", "kvtwin");
  app.set_version_flag("-v,--version", fmt::format("kvtwin {}", kVersion));
  app.require_subcommand(1);
  app.footer("`kvtwin help SUBCOMMAND` has the options of a subcommand.");
  int exit_code = 0;
  AddCheckCommand(app, exit_code);
  AddShowCommand(app, exit_code);
  AddShrinkCommand(app, exit_code);
  AddFuzzCommand(app, exit_code);
  AddGenCommand(app, exit_code);
  AddLawsCommand(app, exit_code);
  AddExploreCommand(app, exit_code);
  AddStateCommand(app, exit_code);
  AddProfileCommand(app, exit_code);
  AddCertifyCommand(app, exit_code);
  AddBisectCommand(app, exit_code);
  if (more != nullptr) more(app, exit_code);
  for (CLI::App* command : app.get_subcommands({})) CheckValues(*command);
  if (!optimized::UseTargetFromEnvironment()) {
    fmt::print(stderr, "kvtwin: KVTWIN_TARGET is '{}', this machine has {}\n",
               Printable(std::getenv("KVTWIN_TARGET"), 40),
               fmt::join(optimized::SupportedTargets(), ", "));
    return 2;
  }
  if (!optimized::UseFastPathsFromEnvironment()) {
    fmt::print(stderr, "kvtwin: KVTWIN_FAST_PATHS is '{}', not on or off\n",
               Printable(std::getenv("KVTWIN_FAST_PATHS"), 40));
    return 2;
  }
  if (const std::optional<int> answered = WithoutSubcommand(app, argc, argv)) {
    return *answered;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // Help.
    return RefuseArguments(app, error);
  }
  if (Interrupted()) {
    fmt::print(stderr, "kvtwin: interrupted: these are the results so far\n");
  }
  return ExitCodeAfter(exit_code);
}

}  // namespace

int RunCommandLine(int argc, char** argv, AddCommand more) {
  try {
    return AfterOutput(Main(argc, argv, more));
  } catch (const std::bad_alloc&) {
    std::fputs("kvtwin: there is not enough memory\n", stderr);
    return 2;
  } catch (const std::exception& error) {  // Such as a full disk.
    std::fprintf(stderr, "kvtwin: %s\n", error.what());
    return 2;
  }
}

}  // namespace kvtwin::props
