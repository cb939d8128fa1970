#include "props/backend/host_child.h"

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
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <mutex>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "core/index.h"
#include "core/json_line.h"
#include "props/base/clock.h"
#include "props/base/crash.h"

namespace kvtwin::props {
namespace {

namespace fs = std::filesystem;

// The longest answer: one line; a page may have some megabytes.
constexpr std::size_t kAnswerMax = std::size_t{16} << 20;
// The limit of all lines of the answer to one question, each with its Step.
constexpr std::size_t kAnswersMax = std::size_t{1} << 30;
constexpr int kDepthMax = 64;   // Of JSON: copies of values recurse.
constexpr int kLookEvery = 20;  // Milliseconds.
// Between two calls the harness compares views. It may take this many times as
// long as a call.
constexpr double kComparesFactor = 60;
constexpr std::size_t kOutputShown = 2000;
constexpr std::size_t kProcessesMax = 256;  // Children of a host.

fs::path HostPath() {
  if (const char* path = std::getenv("KVTWIN_HOST")) return path;
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).parent_path() /
         "kvtwin-host";
}

// Running hosts, which are not orphans.
std::mutex hosts_mutex;
std::set<pid_t> hosts;

// Returns the children of a process that no one has waited for yet.
std::vector<pid_t> ChildrenOf(std::string_view process) {
  std::vector<pid_t> children;
  std::error_code error;
  for (const auto& thread :
       fs::directory_iterator(fmt::format("/proc/{}/task", process), error)) {
    std::ifstream in(thread.path() / "children");
    for (pid_t child = 0; in >> child;) children.push_back(child);
  }
  return children;
}

// Returns the processes that a backend started and that outlived it. Host has
// told the kernel to make them children of this process.
std::vector<pid_t> Orphans() {
  std::vector<pid_t> orphans = ChildrenOf("self");
  std::erase_if(orphans, [](pid_t child) { return hosts.contains(child); });
  return orphans;
}

// Ends all processes that a host leaves behind, and those that they started.
void EndOrphans(pid_t host) {
  constexpr int kGenerationsMax = 100;  // Orphans may start others.
  const std::lock_guard lock(hosts_mutex);
  hosts.erase(host);
  for (int i = 0; i < kGenerationsMax; ++i) {
    const std::vector<pid_t> orphans = Orphans();
    if (orphans.empty()) return;
    for (const pid_t orphan : orphans) kill(orphan, SIGKILL);
    for (const pid_t orphan : orphans) waitpid(orphan, nullptr, 0);
  }
}

// Returns a file in memory that is gone with its last descriptor. The number of
// the descriptor is above those that the child gets.
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

HostProcess::~HostProcess() {
  if (child_ > 0) End();
  if (state_ != nullptr) munmap(state_, sizeof(HostState));
  for (const int file : {asked_, answers_, printed_}) {
    if (file >= 0) close(file);
  }
}

std::string HostProcess::function() const {
  const std::string_view name =
      state_ == nullptr ? "" : FunctionName(state_->function);
  return name.empty() ? "the backend" : std::string(name);
}

// The backend may have written to this memory.
std::vector<Step> HostProcess::PoolSteps() const {
  std::vector<Step> steps;
  if (state_ == nullptr) return steps;
  const std::size_t count = state_->listed;
  for (std::size_t i = 0; i < std::min(count, state_->list.size()); ++i) {
    const auto& text = state_->list[i];
    Step& step = steps.emplace_back();
    const bool last = i + 1 == state_->list.size();
    step.number = static_cast<std::int64_t>(last ? count : i + 1);
    step.call =
        Printable({text.data(), strnlen(text.data(), text.size())}, 1000);
  }
  return steps;
}

bool HostProcess::Ask(const Json& json, double seconds) {
  Drain();
  output_.clear();
  state_->step = -1;
  state_->listed = 0;
  BeginToWait(seconds);
  const std::string line = json.dump() + "\n";
  for (std::size_t at = 0; at < line.size();) {
    const ssize_t wrote = write(asked_, line.data() + at, line.size() - at);
    if (wrote < 0 && errno == EAGAIN) {  // The process does not read.
      pollfd wait = {.fd = asked_, .events = POLLOUT, .revents = 0};
      poll(&wait, 1, kLookEvery);
      if (KilledForHang(options_.call_seconds)) return false;
      continue;
    }
    if (wrote <= 0) {
      Ended(options_.call_seconds);
      return false;
    }
    at += AsSize(wrote);
  }
  return true;
}

void HostProcess::BeginToWait(double seconds) {
  seconds_ = seconds;
  calls_asked_ = calls_ = state_->calls;
  asked_at_ = since_ = Now();
  answered_ = 0;
}

// The backend may write to the number of calls, and so renew the time of a
// call. It cannot renew the time of the whole answer.
bool HostProcess::KilledForHang(double call_seconds) {
  const double now = Now();
  const std::int64_t calls = state_->calls;
  if (calls > calls_) {
    calls_ = calls;
    since_ = now;
  }
  // After a call has returned, the harness works: it compares what is seen.
  const bool compares = calls_ > calls_asked_ && state_->function < 0;
  const double limit = call_seconds * (compares ? kComparesFactor : 1);
  if (now - since_ > limit) {
    Kill("backend: hang", fmt::format("did not return in {:g} seconds", limit));
  } else if (now - asked_at_ > seconds_) {
    Kill("backend: hang",
         fmt::format("was running when all calls together had taken {:g} "
                     "seconds",
                     seconds_));
  }
  return !alive();
}

std::optional<HostProcess::Json> HostProcess::Answer(double call_seconds) {
  double looked = Now();
  std::size_t seen = 0;
  bool prints = true;  // False once the host has closed the file.
  for (;;) {
    const std::size_t end = read_.find('\n', seen);
    if (end != std::string::npos) {
      if (TakesTooMuch()) return KillForMemory();
      if (StartsTooMany()) return KillForProcesses();
      std::optional<Json> said = ParseLine(end);
      answered_ += end + sizeof(Step);
      // Only the calls of a backend renew the time for lines of steps.
      if (!said || !said->contains("step")) return said;
      if (answered_ > kAnswersMax) return KillForLength();
      if (KilledForHang(call_seconds)) return std::nullopt;
      return said;
    }
    seen = read_.size();
    std::array<pollfd, 2> waits = {
        {{.fd = answers_, .events = POLLIN, .revents = 0},
         {.fd = prints ? printed_ : -1, .events = POLLIN, .revents = 0}}};
    poll(waits.data(), waits.size(), kLookEvery);
    if ((waits[1].revents & POLLIN) != 0) {
      Drain();
    } else if (waits[1].revents != 0) {
      prints = false;
    }
    if (waits[0].revents != 0 && !ReadSome()) {
      Ended(call_seconds);
      return std::nullopt;
    }
    if (read_.size() > kAnswerMax) return KillForLength();
    // These checks are made even while the host prints or answers.
    if ((Now() - looked) * 1000 < kLookEvery) continue;
    looked = Now();
    if (TakesTooMuch()) return KillForMemory();
    if (StartsTooMany()) return KillForProcesses();
    // A process that the host started may keep the pipe open.
    if (waits[0].revents == 0 && HasEnded()) {
      Ended(call_seconds);
      return std::nullopt;
    }
    if (KilledForHang(call_seconds)) return std::nullopt;
  }
}

void HostProcess::Start() {
  std::array<int, 2> asked = Pipe();
  std::array<int, 2> answers = Pipe();
  std::array<int, 2> printed = Pipe();
  const int shared = MemoryFile("kvtwin-shared");
  asked_ = asked[1];
  answers_ = answers[0];
  printed_ = printed[0];
  fcntl(asked_, F_SETFL, O_NONBLOCK);
  fcntl(printed_, F_SETFL, O_NONBLOCK);
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
  BeginToWait(options_.SecondsOf(/*operations=*/0));
  state_->memory_bytes = options_.memory_bytes;
  const int failed = Spawn(asked[0], answers[1], printed[1], shared);
  for (const int file : {asked[0], answers[1], printed[1], shared}) {
    close(file);
  }
  if (failed == 0) return;
  child_ = -1;
  Died("backend: error", fmt::format("{} cannot be run: {}",
                                     HostPath().string(), strerror(failed)));
}

// Starts the child with these files, by fixed numbers. Returns an errno.
int HostProcess::Spawn(int asked, int answers, int printed, int shared) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, printed, 1);
  posix_spawn_file_actions_adddup2(&actions, printed, 2);
  posix_spawn_file_actions_adddup2(&actions, asked, kHostAsked);
  posix_spawn_file_actions_adddup2(&actions, answers, kHostAnswers);
  posix_spawn_file_actions_adddup2(&actions, shared, kHostShared);
  std::string host = HostPath().string();
  std::string library = options_.library;
  std::array<char*, 3> arguments = {host.data(), library.data(), nullptr};
  // Processes that the host starts belong to its group, unless they leave it.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&attributes, 0);
  int failed = 0;
  {
    const std::lock_guard lock(hosts_mutex);
    failed = posix_spawn(&child_, host.c_str(), &actions, &attributes,
                         arguments.data(), environ);
    if (failed == 0) hosts.insert(child_);
  }
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  return failed;
}

void HostProcess::Died(CheckName check, std::string text) {
  died_ = MakeFailure(check, std::move(text));
  died_.function = function();
}

int HostProcess::End() {
  kill(-child_, SIGKILL);
  kill(child_, SIGKILL);
  int status = 0;
  waitpid(child_, &status, 0);
  EndOrphans(child_);
  child_ = -1;
  return status;
}

std::optional<HostProcess::Json> HostProcess::Kill(CheckName check,
                                                   const std::string& what) {
  const std::string where = function();
  End();
  Died(check, where + " " + what);
  return std::nullopt;
}

std::optional<HostProcess::Json> HostProcess::KillForLength() {
  return Kill("backend: crash", "wrote without end");
}

std::optional<HostProcess::Json> HostProcess::KillForMemory() {
  if (state_->refused != 0) state_->function = state_->refused - 2;
  return Kill("backend: memory", fmt::format("has allocated more than {} MiB",
                                             options_.memory_bytes >> 20));
}

bool HostProcess::StartsTooMany() const {
  return ChildrenOf(std::to_string(child_)).size() > kProcessesMax;
}

std::optional<HostProcess::Json> HostProcess::KillForProcesses() {
  return Kill("backend: memory",
              fmt::format("has started more than {} processes, and not waited "
                          "for their end",
                          kProcessesMax));
}

bool HostProcess::HasEnded() const {
  siginfo_t info = {};
  const int answer = waitid(P_PID, static_cast<id_t>(child_), &info,
                            WEXITED | WNOHANG | WNOWAIT);
  return answer == 0 && info.si_pid == child_;
}

void HostProcess::Ended(double call_seconds) {
  // The process may have closed its files and still run.
  const double since = Now();
  while (!HasEnded()) {
    if (Now() - since > call_seconds) {
      Kill("backend: hang", "closed the files of its process, and runs on");
      return;
    }
    usleep(1000);
  }
  const int status = End();
  Drain();
  const std::string how =
      WIFSIGNALED(status)
          ? fmt::format("SIG{} ({})", ShortSignalName(WTERMSIG(status)),
                        strsignal(WTERMSIG(status)))
          : fmt::format("exit({})", WEXITSTATUS(status));
  if (state_->refused != 0) {
    Died("backend: memory",
         fmt::format("{} has allocated more than {} MiB, and ended its "
                     "process with {}{}",
                     function(), options_.memory_bytes >> 20, how, Output()));
    return;
  }
  const std::string_view why =
      state_->past_loan ? ": it used memory past the end of an argument" : "";
  Died("backend: crash", fmt::format("{} ended its process with {}{}{}",
                                     function(), how, why, Output()));
}

std::optional<HostProcess::Json> HostProcess::ParseLine(std::size_t end) {
  const std::string line = read_.substr(0, end);
  read_.erase(0, end + 1);
  // If this is not JSON, the backend wrote to memory that is not its own.
  bool deep = false;
  const auto keep = [&](int depth, Json::parse_event_t, Json&) {
    deep = deep || depth > kDepthMax;
    return !deep;
  };
  Json json = Json::parse(line, keep, /*allow_exceptions=*/false);
  const bool sound = !deep && json.is_object();
  if (!sound) return Kill("backend: crash", "wrote nonsense");
  return json;
}

// Reads some of the host's answers. Returns false at their end.
bool HostProcess::ReadSome() {
  std::array<char, 65536> some;
  const ssize_t count = read(answers_, some.data(), some.size());
  if (count <= 0) return false;
  read_.append(some.data(), AsSize(count));
  return true;
}

// Reads all that the host printed so far, and keeps the end. A pipe holds 64
// KiB, so that a host that prints more waits until it is drained.
void HostProcess::Drain() {
  std::array<char, 65536> some;
  const ssize_t count = read(printed_, some.data(), some.size());
  if (count <= 0) return;
  output_.append(some.data(), AsSize(count));
  if (output_.size() <= kOutputShown) return;
  output_.erase(0, output_.size() - kOutputShown);
}

std::string HostProcess::Output() const {
  std::string text = output_;
  for (char& c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte != '\n' && (byte < 32 || byte > 126)) c = '?';
  }
  while (text.ends_with('\n')) text.pop_back();
  return text.empty() ? "" : ", having printed\n    " + text;
}

// Bytes of writable memory, touched or not, and touched shared pages.
std::int64_t HostProcess::DataBytes() const {
  std::ifstream in(fmt::format("/proc/{}/status", child_));
  std::int64_t kilobytes = 0;
  for (std::string name; in >> name;) {
    if (name == "VmData:" || name == "VmStk:" || name == "RssShmem:") {
      std::int64_t more = 0;
      if (in >> more) kilobytes += more;
    }
    in.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return kilobytes << 10;
}

bool HostProcess::TakesTooMuch() const {
  return state_->refused != 0 ||
         (data_at_first_ > 0 &&
          DataBytes() - data_at_first_ > options_.memory_bytes);
}

}  // namespace kvtwin::props
