#include "props/search/museum.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>

#include "core/index.h"
#include "core/threads.h"
#include "props/base/clock.h"
#include "props/base/crash.h"
#include "props/base/interrupt.h"
#include "props/base/scratch_folder.h"
#include "props/base/text_file.h"

namespace kvtwin::props {
namespace {

namespace fs = std::filesystem;

// The folders that a patch may change, or whose headers are included.
constexpr std::string_view kRooms[] = {"include", "core", "reference",
                                       "optimized", "props"};

// The objects of the twin cuda, compiled for the emulator.
constexpr std::string_view kEmulated = "/kvtwin_emulated.dir/";

Status Wrong(std::string message) {
  return {StatusCode::kInvalidArgument, std::move(message)};
}

struct Ran {
  int exit_code = -1;  // 128 + N if signal N ended it, as in a shell.
  std::string out;
  std::string err;
};

// Runs a shell command line in `folder`; its output goes through files in
// `scratch`.
Ran Run(const std::string& command, const fs::path& folder,
        const fs::path& scratch) {
  const fs::path out = scratch / "out";
  const fs::path err = scratch / "err";
  constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), kFlags, 0600);
  posix_spawn_file_actions_addopen(&actions, 2, err.c_str(), kFlags, 0600);
  posix_spawn_file_actions_addchdir_np(&actions, folder.c_str());
  // The command gets its own process group, which is killed on an interrupt.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&attributes, 0);
  // A mutant may hang, hence the timeout. A compiler that is killed leaves its
  // files in `scratch`, which is removed.
  std::string words[] = {
      // SIGABRT: a command that hangs in a call still names its history.
      "timeout",
      "--foreground",
      "--preserve-status",
      "-s",
      "ABRT",
      "-k",
      "20",
      "300",
      "env",
      "TMPDIR=" + scratch.string(),
      "sh",
      "-c",
      command};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  Ran ran;
  pid_t child = 0;
  const int failed = posix_spawnp(&child, "timeout", &actions, &attributes,
                                  arguments.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) {
    ran.err = "timeout cannot be run";
    return ran;
  }
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    constexpr int kMicroseconds = 2000;
    if (Interrupted()) kill(-child, SIGKILL);
    usleep(kMicroseconds);
  }
  ran.exit_code =
      WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  ran.out = ReadFile(out);
  ran.err = ReadFile(err);
  return ran;
}

// Quotes a path for the shell.
std::string Quoted(const fs::path& path) {
  std::string quoted = "'";
  for (const char c : path.string()) {
    quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  }
  return quoted + "'";
}

// Returns the end of a compiler's or a crash's output, as one line.
std::string LastLines(const std::string& text) {
  std::string line =
      text.substr(text.size() - std::min<std::size_t>(text.size(), 400));
  std::replace(line.begin(), line.end(), '\n', ' ');
  return line;
}

bool Replace(std::string& text, std::string_view from, const std::string& to) {
  bool found = false;
  for (std::size_t at = text.find(from); at != std::string::npos;
       at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
    found = true;
  }
  return found;
}

// Adds `file`, and all files of the project that it includes, directly or
// indirectly, to `seen`.
void AddIncluded(const fs::path& sources, const fs::path& file,
                 std::set<fs::path>& seen) {
  if (!seen.insert(file).second) return;
  std::ifstream in(sources / file);
  for (std::string line; std::getline(in, line);) {
    const bool ours = line.starts_with("#include <kvtwin/");
    if (!ours && !line.starts_with("#include \"")) continue;
    const std::size_t begin = line.find_first_of("<\"") + 1;
    const std::size_t end = line.find_first_of(">\"", begin);
    if (end == std::string::npos) continue;
    const fs::path name = line.substr(begin, end - begin);
    for (const fs::path& path : {name, "include" / name}) {
      if (fs::exists(sources / path)) AddIncluded(sources, path, seen);
    }
  }
}

// A shell adds this to the signal that ended a program.
constexpr int kSignalled = 128;

// Returns the history that a command names when it dies (props/base/crash.h),
// or "".
std::string HistoryOfCrash(const std::string& text) {
  constexpr std::string_view kRun = " run '";
  const std::size_t at = text.rfind("crashed in\n  rerun ");
  if (at == std::string::npos) return "";
  const std::size_t begin = text.find(kRun, at);
  if (begin == std::string::npos) return "";
  const std::size_t end = text.find('\'', begin + kRun.size());
  if (end == std::string::npos) return "";
  return text.substr(begin + kRun.size(), end - begin - kRun.size());
}

// Returns the files that a patch changes.
std::set<fs::path> ChangedBy(const fs::path& patch) {
  std::set<fs::path> changed;
  std::ifstream in(patch);
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("+++ b/")) {
      changed.insert(line.substr(6, line.find('\t') - 6));
    }
  }
  return changed;
}

// A copy of the sources, patched, and the command built from it.
class Copy {
 public:
  explicit Copy(const Workshop& workshop) : workshop_(workshop) {
    sources_ = scratch_.path() / "sources";
    fs::create_directories(sources_);
  }

  void CopyAll() {
    for (const std::string_view room : kRooms) {
      const auto all =
          fs::recursive_directory_iterator(workshop_.sources / room);
      for (const fs::directory_entry& entry : all) {
        const fs::path extension = entry.path().extension();
        if (extension == ".cc" || extension == ".h" || extension == ".cu") {
          CopyFile(entry.path().lexically_relative(workshop_.sources));
        }
      }
    }
  }

  // Copies only the files that the patch changes.
  void CopyChangedBy(const fs::path& patch) {
    for (const fs::path& file : ChangedBy(patch)) {
      if (fs::exists(workshop_.sources / file)) CopyFile(file);
    }
  }

  // Applies the patch. Returns an error message, or "".
  std::string Apply(const fs::path& patch) {
    // Lines may have moved, but all context lines of the patch must exist.
    const Ran ran = Run(fmt::format("patch -p1 --batch --forward --fuzz=0 "
                                    "--no-backup-if-mismatch --verbose -i {}",
                                    Quoted(fs::absolute(patch))),
                        sources_, scratch_.path());
    if (ran.exit_code != 0) {
      return "does not apply: " + LastLines(ran.out + ran.err);
    }
    changed_ = ChangedBy(patch);
    std::ifstream in(patch);
    std::size_t hunks = 0;
    for (std::string line; std::getline(in, line);) {
      hunks += line.starts_with("@@ ") ? 1 : 0;
    }
    // After a hunk with more lines than its header says, `patch` takes the rest
    // for a comment.
    std::size_t applied = 0;
    for (std::size_t at = 0;
         (at = ran.out.find("\nHunk #", at)) != ran.out.npos; ++at) {
      ++applied;
    }
    if (applied != hunks) {
      return fmt::format("of {} hunks, {} apply", hunks, applied);
    }
    return changed_.empty() ? "changes nothing" : "";
  }

  // `one_target`: kernels are compiled for one instruction set alone, which is
  // faster.
  std::string Build(bool one_target) {
    std::string link = workshop_.link;
    std::string objects;  // Objects not in the link command.
    int compiled = 0;
    for (const auto& [name, compile, source] : workshop_.objects) {
      if (!Changed(source)) continue;
      std::string command = compile;
      Replace(command, workshop_.sources.string(), sources_.string());
      const fs::path object = scratch_.path() / fmt::format("{}.o", compiled++);
      // A bug may leave something unused: no warnings.
      command += " -w -o " + Quoted(object);
      if (one_target) command += " -DHWY_COMPILE_ONLY_STATIC";
      const Ran ran = Run(command, workshop_.build, scratch_.path());
      if (ran.exit_code != 0) return "does not compile: " + LastLines(ran.err);
      const std::string replaced = " " + Quoted(object);
      if (!Replace(link, fmt::format(" {} ", name), replaced + " ")) {
        objects += replaced;
      }
    }
    if (compiled == 0) return "changes nothing that is compiled";
    // The objects go before the libraries, so that they replace the libraries'
    // objects.
    Replace(link, fmt::format(" -o {} ", workshop_.linked),
            fmt::format(" -o {}{} ", Quoted(linked()), objects));
    const Ran ran = Run(link, workshop_.build, scratch_.path());
    if (ran.exit_code != 0) return "does not link: " + LastLines(ran.err);
    return "";
  }

  // Runs a fuzz of one seed. Returns nullopt if it does not find the bug.
  std::optional<Catch> Fuzz(const Exhibit& exhibit, int seed, double seconds,
                            std::string& error) {
    std::string command = Quoted(linked());
    if (backend()) {  // Loaded by a command without the bug.
      command =
          fmt::format("env LD_LIBRARY_PATH={} {}", Quoted(scratch_.path()),
                      Quoted(workshop_.build / "kvtwin"));
    }
    command +=
        fmt::format(" fuzz --json --seed {} --seconds {}", seed, seconds);
    if (!exhibit.kind.empty()) command += " --kind " + Quoted(exhibit.kind);
    if (!exhibit.speculate.empty()) command += " --speculate";
    if (!exhibit.level.empty()) command += " --level " + Quoted(exhibit.level);
    if (backend()) {
      command += " --level identity --backend " +
                 Quoted(workshop_.build / "backends/twin_backend.so");
    } else {
      command += fmt::format(" --twin {}", Twin());
    }
    const double start = Now();
    // A bug that allocates without end must not take the machine's memory.
    const Ran ran = Run("ulimit -v 8000000; exec " + command, scratch_.path(),
                        scratch_.path());
    if (ran.exit_code == 0) return std::nullopt;
    if (ran.exit_code > kSignalled && !backend()) {
      auto crash = Crash(ran, error);
      if (crash) crash->seconds = Now() - start;
      if (!crash) error = fmt::format("seed {}: {}", seed, error);
      return crash;
    }
    const auto json =
        nlohmann::json::parse(ran.out, nullptr, /*allow_exceptions=*/false);
    if (ran.exit_code != 1 || !json.is_object()) {
      error = fmt::format("seed {} ends with {}: {}", seed, ran.exit_code,
                          LastLines(ran.err));
      return std::nullopt;
    }
    return Catch{
        .operations = json.value("operations", std::int64_t{0}),
        .seconds = json.value("seconds", 0.0),
        .failure = {.check = json.value("check", ""),
                    .history = json.value("history", ""),
                    .operations = json.value("shrunk_to", std::size_t{0})}};
  }

  // Lets the command with the bug judge the page of a history. Returns the
  // reason if it does not.
  std::string JudgePage(const std::string& history,
                        std::optional<PageVerdict>& page) {
    const Ran ran = Run(fmt::format("exec {} museum --judge {} --twin {}",
                                    Quoted(linked()), Quoted(history), Twin()),
                        scratch_.path(), scratch_.path());
    const auto json =
        nlohmann::json::parse(ran.out, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) {
      return fmt::format("the page of '{}' cannot be judged: {}", history,
                         LastLines(ran.err));
    }
    page = {.lies = json.value("lies", std::vector<std::string>()),
            .labels = json.value("labels", std::int64_t{0})};
    return "";
  }

  // The bug is in a library, which a command without it loads.
  bool backend() const { return workshop_.planted == Planted::kLibrary; }

 private:
  // A crash counts as a finding if it happened in a history that the command
  // without the bug passes. Otherwise sets `error` to the reason.
  std::optional<Catch> Crash(const Ran& ran, std::string& error) {
    const int signal = ran.exit_code - kSignalled;
    Catch found;
    Failure& failure = found.failure;
    failure = {.check = fmt::format("crashed with signal {} ({})", signal,
                                    ShortSignalName(signal)),
               .history = HistoryOfCrash(ran.err)};
    if (failure.history.empty()) {
      error = fmt::format("{}, in no history: {}", failure.check,
                          LastLines(ran.err));
      return std::nullopt;
    }
    failure.operations = AsSize(std::ranges::count(failure.history, '|'));
    const auto exit_code = [&](const fs::path& program) {
      return Run(fmt::format("exec {} run --json {} --twin {}", Quoted(program),
                             Quoted(failure.history), Twin()),
                 scratch_.path(), scratch_.path())
          .exit_code;
    };
    const int without = exit_code(workshop_.build / workshop_.linked);
    if (without != 0) {
      error =
          fmt::format("{}, and without the bug the history ends with {}: {}",
                      failure.check, without, failure.history);
      return std::nullopt;
    }
    if (exit_code(linked()) == 0) {
      failure.check += ", and not in this history alone";
    }
    return found;
  }

  std::string_view Twin() const {
    return workshop_.planted == Planted::kCuda ? "cuda" : "optimized";
  }

  fs::path linked() const {
    return scratch_.path() / (backend() ? "libkvtwin.so.0" : "kvtwin");
  }

  void CopyFile(const fs::path& file) {
    fs::create_directories((sources_ / file).parent_path());
    fs::copy_file(workshop_.sources / file, sources_ / file);
  }

  bool Changed(const fs::path& file) const {
    std::set<fs::path> included;
    AddIncluded(sources_, file, included);
    return std::any_of(changed_.begin(), changed_.end(),
                       [&](const auto& one) { return included.contains(one); });
  }

  const Workshop& workshop_;
  ScratchFolder scratch_{"museum"};
  fs::path sources_;
  std::set<fs::path> changed_;
};

// The build's names of the program or library that is linked again.
struct Link {
  std::string target;
  std::string output;  // As in the link command.
};

Link LinkOf(Planted planted) {
  switch (planted) {
    case Planted::kLibrary:
      return {"kvtwin_shared", " -o libkvtwin.so."};
    case Planted::kCuda:
      return {"kvtwin-emulated", " -o kvtwin-emulated "};
    default:
      return {"kvtwin_command", " -o kvtwin "};
  }
}

// Returns the object of an entry of compile_commands.json, whose command has
// "... -o CMakeFiles/kvtwin.dir/core/status.cc.o -c ...", if it belongs to the
// command and not to the tests.
std::optional<Workshop::Object> ObjectOf(const nlohmann::json& one,
                                         const fs::path& sources) {
  std::string command = one.value("command", "");
  const std::size_t begin = command.find(" -o ");
  const std::size_t end = command.find(' ', begin + 4);
  if (begin == std::string::npos || end == std::string::npos) {
    return std::nullopt;
  }
  Workshop::Object object;
  object.name = command.substr(begin + 4, end - begin - 4);
  constexpr std::string_view kOurs[] = {"/kvtwin.dir/", "/kvtwin_props.dir/",
                                        kEmulated};
  const bool ours =
      std::any_of(std::begin(kOurs), std::end(kOurs), [&](auto target) {
        return object.name.find(target) != std::string::npos;
      });
  if (!ours) return std::nullopt;
  command.erase(begin, end - begin);
  fs::path file = one.value("file", "");
  // For a kernel, the build compiles a generated file that includes it.
  constexpr std::string_view kGenerated = "/emulated/";
  const std::size_t at = file.string().rfind(kGenerated);
  if (at != std::string::npos && file.string().ends_with(".cu.cc")) {
    const fs::path kernel =
        (sources / file.string().substr(at + kGenerated.size()))
            .replace_extension();
    Replace(command, file.string(), "-x c++ " + kernel.string());
    file = kernel;
  }
  object.compile = command;
  object.source = file.lexically_relative(sources);
  return object;
}

// Builds the exhibit of `finding`, runs it with all seeds, and adds the result
// to `finding`.
void Visit(const Workshop& workshop, const MuseumOptions& options,
           ExhibitReport& finding) {
  Copy copy(workshop);
  if (options.apply_only) {
    copy.CopyChangedBy(finding.exhibit.patch);
  } else {
    copy.CopyAll();
  }
  finding.error = copy.Apply(finding.exhibit.patch);
  if (!finding.error.empty() || options.apply_only) return;
  const Exhibit& exhibit = finding.exhibit;
  finding.error = copy.Build(/*one_target=*/exhibit.level == "attention");
  for (int seed = 1; seed <= options.seeds && finding.error.empty(); ++seed) {
    if (Interrupted()) return;
    auto one = copy.Fuzz(exhibit, seed, options.seconds, finding.error);
    if (!one) continue;
    const bool crashed = one->operations == 0;
    // The judge of pages compares at the level identity.
    const bool judged = exhibit.level.empty() && !crashed && !copy.backend();
    if (options.pages && judged) {
      finding.error = copy.JudgePage(one->failure.history, one->page);
    }
    finding.catches.push_back(std::move(*one));
  }
}

}  // namespace

Result<std::vector<Exhibit>> ReadExhibits(const fs::path& folder) {
  std::error_code error;
  std::vector<Exhibit> exhibits;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() != ".patch") continue;
    Exhibit exhibit;
    exhibit.patch = entry.path();
    std::ifstream in(exhibit.patch);
    for (std::string line; std::getline(in, line);) {
      if (line.starts_with("--- a/")) break;
      for (const auto& [key, value] :
           {std::pair("id: ", &exhibit.id), std::pair("also: ", &exhibit.also),
            std::pair("reference: ", &exhibit.reference),
            std::pair("wrong: ", &exhibit.wrong),
            std::pair("operation: ", &exhibit.operation),
            std::pair("needs: ", &exhibit.needs),
            std::pair("kind: ", &exhibit.kind),
            std::pair("speculate: ", &exhibit.speculate),
            std::pair("level: ", &exhibit.level),
            std::pair("twin: ", &exhibit.twin)}) {
        if (line.starts_with(key)) {
          *value = line.substr(std::string_view(key).size());
        }
      }
    }
    const bool whole = exhibit.id == exhibit.patch.stem() &&
                       !exhibit.reference.empty() && !exhibit.wrong.empty() &&
                       !exhibit.operation.empty();
    if (!whole) {
      return Wrong(
          fmt::format("{}: the header needs id (the file's name), "
                      "reference, wrong and operation",
                      exhibit.patch.string()));
    }
    exhibits.push_back(std::move(exhibit));
  }
  if (exhibits.empty()) {
    return Wrong(fmt::format("no patches in {}", folder.string()));
  }
  std::sort(exhibits.begin(), exhibits.end(),
            [](const auto& a, const auto& b) { return a.id < b.id; });
  return exhibits;
}

Result<Workshop> FindWorkshop(const fs::path& build, Planted planted) {
  Workshop workshop;
  workshop.build = fs::absolute(build);
  workshop.planted = planted;
  std::ifstream cache(build / "CMakeCache.txt");
  constexpr std::string_view kHome = "CMAKE_HOME_DIRECTORY:INTERNAL=";
  for (std::string line; std::getline(cache, line);) {
    if (line.starts_with(kHome)) workshop.sources = line.substr(kHome.size());
  }
  const auto commands =
      nlohmann::json::parse(ReadFile(build / "compile_commands.json"), nullptr,
                            /*allow_exceptions=*/false);
  if (workshop.sources.empty() || !commands.is_array()) {
    return Wrong(
        fmt::format("{} is not a folder where kvtwin was built, with "
                    "CMAKE_EXPORT_COMPILE_COMMANDS on (the presets do that)",
                    build.string()));
  }
  std::set<fs::path> emulated;
  for (const auto& command : commands) {
    auto object = ObjectOf(command, workshop.sources);
    if (!object) continue;
    if (object->name.find(kEmulated) != std::string::npos) {
      if (planted != Planted::kCuda) continue;
      emulated.insert(object->source);
    }
    workshop.objects.push_back(std::move(*object));
  }
  // The emulated objects replace the library's objects of the same sources.
  std::erase_if(workshop.objects, [&](const Workshop::Object& one) {
    return one.name.find(kEmulated) == std::string::npos &&
           emulated.contains(one.source);
  });
  const auto [target, output] = LinkOf(planted);
  const fs::path make_link =
      build / "CMakeFiles" / (target + ".dir") / "link.txt";
  std::string links = ReadFile(make_link);
  if (!fs::exists(make_link)) {
    const ScratchFolder scratch("museum");
    links = Run("ninja -t commands " + target, build, scratch.path()).out;
  }
  std::istringstream lines(links);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t at = line.find(output);
    if (at == std::string::npos) continue;
    workshop.link = line;
    workshop.linked = line.substr(at + 4, line.find(' ', at + 4) - at - 4);
  }
  if (workshop.link.empty()) {
    // On a full disk, the output of ninja is cut off.
    const ScratchFolder scratch("museum");
    const Status room =
        WriteFile(scratch.File("room"), std::string(std::size_t{1} << 20, ' '));
    if (!room.ok()) return room;
    return Wrong(fmt::format("{}: how {} is linked cannot be found out",
                             build.string(), target));
  }
  return workshop;
}

std::vector<ExhibitReport> VisitMuseum(const Workshop& workshop,
                                       const std::vector<Exhibit>& exhibits,
                                       const MuseumOptions& options) {
  std::vector<ExhibitReport> findings(exhibits.size());
  std::atomic<std::size_t> next = 0;
  std::mutex progress;
  const auto work = [&] {
    for (std::size_t i = next++; i < exhibits.size(); i = next++) {
      if (Interrupted()) return;
      if (options.progress) {
        const std::scoped_lock lock(progress);
        options.progress(i, exhibits[i]);
      }
      findings[i].exhibit = exhibits[i];
      try {
        Visit(workshop, options, findings[i]);
      } catch (const std::exception& error) {  // Such as a full disk.
        findings[i].error = error.what();
      }
      if (Interrupted()) findings[i] = {};  // The exhibit is incomplete.
    }
  };
  OnThreads(options.threads, work);
  std::erase_if(findings, [](const ExhibitReport& finding) {
    return finding.exhibit.id.empty();
  });
  return findings;
}

}  // namespace kvtwin::props
