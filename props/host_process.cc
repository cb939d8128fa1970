#include "props/host_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <utility>

#include "core/profiles.h"
#include "kvtwin/pool_backend.h"
#include "props/check_name.h"
#include "props/clock.h"
#include "props/program.h"

namespace kvtwin::props {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr auto kFunctions = std::to_array<std::string_view>(
    {"loading", "init", "close", "start_forward", "put", "get",
     "get (reading what it returned)", "remove", "copy_prefix", "can_resume",
     "shift", "set_causal", "set_layer_type", "encoder_cached", "cells",
     "snapshot", "restore",
     // Of pools.
     "open", "fork", "seq_len", "append", "commit", "commit_unknown", "views",
     "views_packed", "contiguous_kv", "truncate", "free", "usage", "table",
     "csr", "slots"});

// An answer is one line; a page may be some megabytes.
constexpr std::size_t kAnswerMax = std::size_t{16} << 20;
constexpr int kLookEvery = 20;  // Milliseconds.
constexpr std::string_view kNonsense = "wrote nonsense to its harness: ";

fs::path HostPath() {
  if (const char* path = std::getenv("KVTWIN_HOST")) return path;
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).parent_path() /
         "kvtwin-host";
}

// A file in memory that is gone with its last descriptor, all above those that
// the child gets.
int MemoryFile(const char* name) {
  const int file = memfd_create(name, MFD_CLOEXEC);
  const int high = fcntl(file, F_DUPFD_CLOEXEC, 10);
  close(file);
  return high;
}

std::array<int, 2> Pipe() {
  std::array<int, 2> ends = {-1, -1};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return ends;
  for (int& end : ends) {
    const int high = fcntl(end, F_DUPFD_CLOEXEC, 10);
    close(end);
    end = high;
  }
  return ends;
}

}  // namespace

int FunctionNumber(std::string_view name) {
  const auto* at = std::ranges::find(kFunctions, name);
  return at == kFunctions.end() ? -1
                                : static_cast<int>(at - kFunctions.begin());
}

std::string_view FunctionName(int number) {
  const auto at = static_cast<std::size_t>(number);
  return number < 0 || at >= kFunctions.size() ? "" : kFunctions[at];
}

Json ToJson(const BackendInfo& info) {
  const Abilities& abilities = info.abilities;
  return {{"name", info.name},
          {"profile", info.profile},
          {"claims", info.claims},
          {"kinds", abilities.kinds},
          {"can", abilities.can},
          {"dtypes", abilities.dtypes},
          {"v_layouts", abilities.v_layouts},
          {"shifts", abilities.shifts},
          {"mask_dtypes", abilities.mask_dtypes},
          {"max_sequences", abilities.max_sequences},
          {"max_layers", abilities.max_layers},
          {"max_padding", abilities.max_padding},
          {"max_mask_padding", abilities.max_mask_padding},
          {"max_position", abilities.max_position},
          {"placements", abilities.placements},
          {"cannot", abilities.cannot},
          {"can_resume", abilities.can_resume},
          {"set_causal", abilities.set_causal},
          {"shift", abilities.shift},
          {"snapshots", abilities.snapshots},
          {"tolerance", info.tolerance},
          {"has_cells", info.has_cells}};
}

BackendInfo BackendInfoFromJson(const Json& json) {
  BackendInfo info;
  Abilities& abilities = info.abilities;
  json.at("name").get_to(info.name);
  json.at("profile").get_to(info.profile);
  if (const auto rules = ParseRules(info.profile); rules.ok()) {
    info.rules = *rules;
  }
  json.at("claims").get_to(info.claims);
  json.at("kinds").get_to(abilities.kinds);
  json.at("can").get_to(abilities.can);
  json.at("dtypes").get_to(abilities.dtypes);
  json.at("v_layouts").get_to(abilities.v_layouts);
  json.at("shifts").get_to(abilities.shifts);
  json.at("mask_dtypes").get_to(abilities.mask_dtypes);
  json.at("max_sequences").get_to(abilities.max_sequences);
  json.at("max_layers").get_to(abilities.max_layers);
  json.at("max_padding").get_to(abilities.max_padding);
  json.at("max_mask_padding").get_to(abilities.max_mask_padding);
  json.at("max_position").get_to(abilities.max_position);
  json.at("placements").get_to(abilities.placements);
  json.at("cannot").get_to(abilities.cannot);
  json.at("can_resume").get_to(abilities.can_resume);
  json.at("set_causal").get_to(abilities.set_causal);
  json.at("shift").get_to(abilities.shift);
  json.at("snapshots").get_to(abilities.snapshots);
  json.at("tolerance").get_to(info.tolerance);
  json.at("has_cells").get_to(info.has_cells);
  return info;
}

// One child. What it cannot do any more is in `died`.
class HostProcess {
 public:
  explicit HostProcess(const HostOptions& options) : options_(options) {
    Start();
  }
  HostProcess(const HostProcess&) = delete;
  HostProcess& operator=(const HostProcess&) = delete;
  ~HostProcess() {
    if (child_ > 0) {
      kill(child_, SIGKILL);
      waitpid(child_, nullptr, 0);
    }
    if (state_ != nullptr) munmap(state_, sizeof(HostState));
    for (const int file : {asked_, answers_, output_}) {
      if (file >= 0) close(file);
    }
  }

  bool alive() const { return child_ > 0; }
  // A check and what happened, once it is not alive.
  const Difference& died() const { return died_; }
  // That it is in.
  std::string function() const {
    const std::string_view name =
        state_ == nullptr ? "" : FunctionName(state_->function);
    return name.empty() ? "the backend" : std::string(name);
  }
  // Of the history that it died in; -1: before the first.
  std::int64_t step() const {
    return state_ == nullptr ? -1 : state_->step.load();
  }

  bool Ask(const Json& json) {
    if (ftruncate(output_, 0) != 0) return false;
    state_->step = -1;
    const std::string line = json.dump() + "\n";
    for (std::size_t at = 0; at < line.size();) {
      const ssize_t wrote = write(asked_, line.data() + at, line.size() - at);
      if (wrote <= 0) {
        Ended(options_.call_seconds);
        return false;
      }
      at += static_cast<std::size_t>(wrote);
    }
    return true;
  }

  // The next line; nothing if it died, or was killed.
  std::optional<Json> Answer(double call_seconds) {
    std::int64_t calls = state_->calls;
    double since = Now();
    std::size_t seen = 0;
    for (;;) {
      const std::size_t end = read_.find('\n', seen);
      if (end != std::string::npos) {
        const std::string line = read_.substr(0, end);
        read_.erase(0, end + 1);
        // It wrote memory that is not its own, if this is not JSON.
        Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
        if (!json.is_object()) return Kill("backend: crash", "wrote nonsense");
        return json;
      }
      seen = read_.size();
      pollfd waits = {.fd = answers_, .events = POLLIN, .revents = 0};
      const int ready = poll(&waits, 1, kLookEvery);
      if (ready > 0) {
        std::array<char, 65536> some;
        const ssize_t count = read(answers_, some.data(), some.size());
        if (count <= 0) {
          Ended(call_seconds);
          return std::nullopt;
        }
        read_.append(some.data(), static_cast<std::size_t>(count));
        if (read_.size() > kAnswerMax) {
          return Kill("backend: crash", "wrote without end");
        }
        continue;
      }
      const std::int64_t more = DataBytes() - data_at_first_;
      if (data_at_first_ > 0 && more > options_.memory_bytes) {
        return Kill("backend: memory",
                    fmt::format("has allocated more than {} MiB",
                                options_.memory_bytes >> 20));
      }
      if (state_->calls != calls) {
        calls = state_->calls;
        since = Now();
      }
      if (Now() - since > call_seconds) {
        return Kill(
            "backend: hang",
            fmt::format("did not return in {:g} seconds", call_seconds));
      }
    }
  }

  void Remember() { data_at_first_ = DataBytes(); }

 private:
  void Start() {
    std::array<int, 2> asked = Pipe();
    std::array<int, 2> answers = Pipe();
    const int shared = MemoryFile("kvtwin-shared");
    output_ = MemoryFile("kvtwin-output");
    fcntl(output_, F_SETFL, O_APPEND);  // It is cut to nothing now and then.
    asked_ = asked[1];
    answers_ = answers[0];
    void* memory = MAP_FAILED;
    if (ftruncate(shared, sizeof(HostState)) == 0) {
      memory = mmap(nullptr, sizeof(HostState), PROT_READ | PROT_WRITE,
                    MAP_SHARED, shared, 0);
    }
    if (memory == MAP_FAILED) {
      Died("backend: error", "no memory can be shared with it");
      return;
    }
    state_ = static_cast<HostState*>(memory);
    state_->function = -1;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, output_, 1);
    posix_spawn_file_actions_adddup2(&actions, output_, 2);
    posix_spawn_file_actions_adddup2(&actions, asked[0], kHostAsked);
    posix_spawn_file_actions_adddup2(&actions, answers[1], kHostAnswers);
    posix_spawn_file_actions_adddup2(&actions, shared, kHostShared);
    std::string host = HostPath();
    std::string library = options_.library;
    std::array<char*, 3> arguments = {host.data(), library.data(), nullptr};
    const int failed = posix_spawn(&child_, host.c_str(), &actions, nullptr,
                                   arguments.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    for (const int file : {asked[0], answers[1], shared}) close(file);
    if (failed == 0) return;
    child_ = -1;
    Died("backend: error",
         fmt::format("{} cannot be run: {}", host, strerror(failed)));
  }

  void Died(CheckName check, std::string text) {
    died_ = {
        .step = 0, .check = std::string(check.name()), .text = std::move(text)};
  }

  std::optional<Json> Kill(CheckName check, const std::string& what) {
    const std::string where = function();
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
    child_ = -1;
    Died(check, where + " " + what);
    return std::nullopt;
  }

  void Ended(double call_seconds) {
    int status = 0;
    // It may have closed its files, and go on.
    const double since = Now();
    while (waitpid(child_, &status, WNOHANG) == 0) {
      if (Now() - since > call_seconds) {
        Kill("backend: hang", "closed the files of its process, and goes on");
        return;
      }
      usleep(1000);
    }
    child_ = -1;
    const std::string how =
        WIFSIGNALED(status)
            ? fmt::format("SIG{} ({})", sigabbrev_np(WTERMSIG(status)),
                          strsignal(WTERMSIG(status)))
            : fmt::format("exit({})", WEXITSTATUS(status));
    Died("backend: crash", fmt::format("{} ended its process with {}{}",
                                       function(), how, Output()));
  }

  // The end of what it printed.
  std::string Output() const {
    const off_t size = lseek(output_, 0, SEEK_END);
    std::string text(static_cast<std::size_t>(std::clamp<off_t>(size, 0, 2000)),
                     0);
    if (size <= 0) return "";
    const off_t from = size - static_cast<off_t>(text.size());
    const ssize_t count = pread(output_, text.data(), text.size(), from);
    text.resize(static_cast<std::size_t>(std::max<ssize_t>(0, count)));
    for (char& c : text) {
      const auto byte = static_cast<unsigned char>(c);
      if (byte != '\n' && (byte < 32 || byte > 126)) c = '?';
    }
    while (text.ends_with('\n')) text.pop_back();
    return text.empty() ? "" : ", having printed\n    " + text;
  }

  // That it can write to and shares with nobody, whether touched or not.
  std::int64_t DataBytes() const {
    std::ifstream in(fmt::format("/proc/{}/statm", child_));
    std::int64_t pages = 0;
    for (int i = 0; i < 6; ++i) in >> pages;
    return in ? pages * sysconf(_SC_PAGESIZE) : 0;
  }

  const HostOptions& options_;
  pid_t child_ = -1;
  int asked_ = -1;
  int answers_ = -1;
  int output_ = -1;
  HostState* state_ = nullptr;
  std::string read_;
  std::int64_t data_at_first_ = 0;
  Difference died_;
};

Host::Host(HostOptions options) : options_(std::move(options)) {
  std::signal(SIGPIPE, SIG_IGN);  // A host that died says so otherwise.
  // dlopen looks for a name without a slash elsewhere.
  options_.library = fs::absolute(options_.library).string();
}

Host::~Host() = default;

// What the library says first.
Result<Json> Host::Greet() {
  const auto wrong = [](std::string text) {
    return Status(StatusCode::kInvalidArgument, std::move(text));
  };
  std::error_code error;
  if (!fs::is_regular_file(options_.library, error)) {
    return wrong(fmt::format("there is no file {}", options_.library));
  }
  auto process = std::make_unique<HostProcess>(options_);
  if (!process->alive()) return wrong(process->died().text);
  std::optional<Json> said = process->Answer(options_.call_seconds);
  if (!said) return wrong(process->died().text);
  if (said->contains("error")) {
    const Json& error = said->at("error");
    return wrong(error.is_string() ? error.get<std::string>()
                                   : std::string(kNonsense) + error.dump());
  }
  process->Remember();
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(process));
  return *std::move(said);
}

// What `read` makes of a part of that.
template <class Read>
auto ReadGreeting(const Json& part, const Read& read)
    -> Result<decltype(read(part))> {
  try {
    return read(part);
  } catch (const Json::exception& error) {
    return Status(StatusCode::kInvalidArgument,
                  std::string(kNonsense) + error.what());
  }
}

Result<BackendInfo> Host::Describe() {
  const Result<Json> said = Greet();
  if (!said.ok()) return said.status();
  if (said->contains("cache")) {
    return ReadGreeting(said->at("cache"), [&](const Json& cache) {
      BackendInfo info = BackendInfoFromJson(cache);
      UseProfile(options_.profile, info);
      return info;
    });
  }
  return Status(StatusCode::kInvalidArgument,
                fmt::format("{} is a pool: --kind paged", options_.library));
}

Result<PoolInfo> Host::DescribePool() {
  const Result<Json> said = Greet();
  if (!said.ok()) return said.status();
  if (!said->contains("pool")) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{} is no pool: it exports no {}",
                              options_.library, KVTWIN_GET_POOL_BACKEND_V1));
  }
  return ReadGreeting(said->at("pool"), [](const Json& pool) {
    return PoolInfo{pool.at("name").get<std::string>(),
                    pool.at("claims").get<Level>()};
  });
}

std::string Host::AskPool(const PagedHistory& history, Level level, bool hasty,
                          PagedCensus* census) {
  std::unique_ptr<HostProcess> process = Take();
  const auto died = [&] {
    return process->died().check + ": " + process->died().text;
  };
  if (!process->alive() ||
      !process->Ask({{"pool", ToText(history)}, {"level", level}})) {
    return died();
  }
  const std::optional<Json> said = process->Answer(Patience(hasty));
  if (!said) return died();
  if (census != nullptr) {
    const auto add = [&](const char* name, std::int64_t& to) {
      to += said->value(name, std::int64_t{0});
    };
    add("operations", census->operations);
    add("found", census->found);
    add("copied", census->copied);
    add("evicted", census->evicted);
    add("truncated", census->truncated);
    add("full", census->full);
  }
  std::string wrong = said->value("wrong", "");
  if (!wrong.starts_with("backend: ")) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(process));
  }
  return wrong;
}

PagedSubject Host::PoolSubjectAt(Level level) {
  const auto run = [this, level](bool hasty) {
    return [=, this](const PagedHistory& history, PagedCensus* census) {
      try {
        return AskPool(history, level, hasty, census);
      } catch (const Json::exception& error) {
        return "backend: crash: " + std::string(kNonsense) + error.what();
      }
    };
  };
  return {.run = run(/*hasty=*/false),
          .run_hastily = run(/*hasty=*/true),
          .shrink_seconds = options_.shrink_seconds};
}

double Host::Patience(bool hasty) const {
  return hasty ? std::min(options_.call_seconds, 0.2) : options_.call_seconds;
}

std::unique_ptr<HostProcess> Host::Take() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      std::unique_ptr<HostProcess> process = std::move(idle_.back());
      idle_.pop_back();
      return process;
    }
  }
  auto process = std::make_unique<HostProcess>(options_);
  if (process->alive() && process->Answer(options_.call_seconds)) {
    process->Remember();
  }
  return process;
}

RunResult Host::Ask(const History& history, Level level, Story* story,
                    bool page, const std::string& arguments, std::string* html,
                    const Rules* rules, bool hasty) {
  std::unique_ptr<HostProcess> process = Take();
  RunResult result;
  const auto died = [&] {
    result.difference = process->died();
    if (story != nullptr) {  // The call that did not return.
      Step& step = story->steps.emplace_back();
      step.number = std::ssize(story->steps);
      step.call = process->function();
    }
    const std::int64_t step = process->step();
    result.difference->step =
        step < 0 ? history.ops.size() : static_cast<std::size_t>(step);
    result.ran = true;
    return result;
  };
  const std::vector<int> values =
      rules == nullptr ? std::vector<int>() : ValuesOf(*rules);
  if (!process->alive() || !process->Ask({{"history", ToText(history)},
                                          {"level", level},
                                          {"story", story != nullptr},
                                          {"page", page},
                                          {"arguments", arguments},
                                          {"profile", options_.profile},
                                          {"program", Program()},
                                          {"rules", values}})) {
    return died();
  }
  for (;;) {
    const std::optional<Json> said = process->Answer(Patience(hasty));
    if (!said) return died();
    if (said->contains("told")) {
      if (story == nullptr) continue;
      Step& step = story->steps.emplace_back();
      step.number = std::ssize(story->steps);
      step.call = said->at("told").get<std::string>();
      continue;
    }
    if (said->contains("error")) {
      result.difference = {.step = history.ops.size(),
                           .check = "backend: error",
                           .text = "kvtwin-host: " + said->value("error", "")};
      break;
    }
    result.ran = said->at("ran").get<bool>();
    result.operations = said->value("operations", std::int64_t{0});
    result.digest = said->value("digest", std::uint64_t{0});
    if (said->contains("difference")) {
      const Json& json = said->at("difference");
      result.difference = {.step = json.at("step").get<std::size_t>(),
                           .check = json.at("check").get<std::string>(),
                           .text = json.at("text").get<std::string>(),
                           .row = json.at("row").get<int>(),
                           .column = json.at("column").get<int>(),
                           .first_cell = json.at("first_cell").get<int>()};
    }
    if (html != nullptr) *html = said->value("page", "");
    break;
  }
  // What wrote where it should not, or leaks, gets no second history.
  const bool sound =
      !result.difference || !result.difference->check.starts_with("backend");
  if (sound) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(process));
  }
  return result;
}

RunResult Host::Run(const History& history, Level level, Story* story,
                    bool hasty, const Rules* rules) {
  try {
    return Ask(history, level, story, /*page=*/false, "", nullptr, rules,
               hasty);
  } catch (const Json::exception& error) {
    RunResult result;
    result.difference = {.step = history.ops.size(),
                         .check = "backend: crash",
                         .text = std::string(kNonsense) + error.what()};
    return result;
  }
}

std::string Host::Page(const History& history, Level level,
                       const std::string& arguments) {
  std::string html;
  try {
    Ask(history, level, nullptr, /*page=*/true, arguments, &html);
  } catch (const Json::exception&) {  // Of what writes nonsense there is none.
    html.clear();
  }
  return html;
}

Subject Host::SubjectAt(const BackendInfo& info, Level level,
                        std::string arguments) {
  Subject subject;
  subject.name = info.name;
  subject.level = level;
  subject.rules = RulesAt(info, level);
  subject.abilities = info.abilities;
  subject.tolerance = info.tolerance;
  subject.arguments = std::move(arguments);
  subject.run = [this, level](const History& history, Story* story) {
    return Run(history, level, story);
  };
  subject.run_hastily = [this, level](const History& history, Story* story) {
    return Run(history, level, story, /*hasty=*/true);
  };
  subject.shrink_seconds = options_.shrink_seconds;
  return subject;
}

}  // namespace kvtwin::props
