#include "props/base/filter.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <string_view>

#include "core/index.h"
#include "core/json_line.h"
#include "props/base/clock.h"
#include "props/base/crash.h"

namespace kvtwin::props {
namespace {

constexpr std::size_t kErrorsShown = 500;
constexpr int kLookEvery = 20;  // Milliseconds.

Status FilterError(std::string text) {
  return {StatusCode::kFailedPrecondition, std::move(text)};
}

// The running command, with pipes to its standard input and from its output.
class Child {
 public:
  Child() = default;
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    End();
    for (const int file : {in_, out_, errors_}) {
      if (file >= 0) close(file);
    }
  }

  Status Start(const std::string& command) {
    std::array<int, 2> in = {-1, -1};
    std::array<int, 2> out = {-1, -1};
    errors_ = memfd_create("kvtwin-errors", MFD_CLOEXEC);
    const bool piped = pipe2(in.data(), O_CLOEXEC) == 0 &&
                       pipe2(out.data(), O_CLOEXEC) == 0 && errors_ >= 0;
    in_ = in[1];
    out_ = out[0];
    int failed = piped ? 0 : errno;
    if (piped) {
      fcntl(in_, F_SETFL, O_NONBLOCK);
      fcntl(out_, F_SETFL, O_NONBLOCK);
      failed = Spawn(command, in[0], out[1]);
    }
    for (const int file : {in[0], out[1]}) {
      if (file >= 0) close(file);
    }
    if (failed == 0) return {};
    child_ = -1;
    return FilterError(fmt::format("it cannot be run: {}", strerror(failed)));
  }

  // Writes a part of `rest` and removes it from `rest`; appends what it reads
  // to `output`. Returns false if the command has closed its output.
  bool Exchange(std::string_view& rest, std::string& output) {
    if (rest.empty() && in_ >= 0) {
      close(in_);
      in_ = -1;
    }
    std::array<pollfd, 2> waits = {
        pollfd{.fd = out_, .events = POLLIN, .revents = 0},
        pollfd{.fd = in_, .events = POLLOUT, .revents = 0}};
    poll(waits.data(), in_ >= 0 ? 2 : 1, kLookEvery);
    if (in_ >= 0 && waits[1].revents != 0) {
      const ssize_t wrote = write(in_, rest.data(), rest.size());
      if (wrote > 0) rest.remove_prefix(AsSize(wrote));
      // A command may stop reading before the end of its input.
      if (wrote < 0 && errno != EAGAIN) rest = {};
    }
    if (waits[0].revents == 0) return true;
    std::array<char, 65536> some;
    const ssize_t count = read(out_, some.data(), some.size());
    if (count < 0) return errno == EAGAIN || errno == EINTR;
    output.append(some.data(), AsSize(count));
    return count > 0;
  }

  // Returns the wait status of the command, or -1 if it still runs at `end`, or
  // prints more errors than this.
  int WaitUntil(double end, std::size_t errors_max) {
    int status = 0;
    while (waitpid(child_, &status, WNOHANG) == 0) {
      if (Now() > end || ErrorBytes() > errors_max) return -1;
      usleep(1000);
    }
    // Kills the processes that the command started in its group.
    kill(-child_, SIGKILL);
    child_ = -1;
    return status;
  }

  void End() {
    if (child_ < 0) return;
    kill(-child_, SIGKILL);
    waitpid(child_, nullptr, 0);
    child_ = -1;
  }

  // Returns how much the command has printed on its standard error.
  std::size_t ErrorBytes() const {
    struct stat file = {};
    return fstat(errors_, &file) == 0 ? AsSize(file.st_size) : 0;
  }

  // Returns ", having printed ..." with the end of its standard error, or "".
  std::string Errors() const {
    std::string text(kErrorsShown, 0);
    const std::size_t size = ErrorBytes();
    const auto from = static_cast<off_t>(size - std::min(size, text.size()));
    const ssize_t count = pread(errors_, text.data(), text.size(), from);
    text.resize(AsSize(std::max<ssize_t>(0, count)));
    while (text.ends_with('\n')) text.pop_back();
    if (text.empty()) return "";
    return ", having printed: " + Printable(text, kErrorsShown);
  }

 private:
  int Spawn(const std::string& command, int in, int out) {
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);
    posix_spawn_file_actions_adddup2(&actions, in, 0);
    posix_spawn_file_actions_adddup2(&actions, out, 1);
    posix_spawn_file_actions_adddup2(&actions, errors_, 2);
    // The command gets its own process group, so that a whole pipeline can be
    // killed, and the default SIGPIPE, which this program ignores.
    sigset_t defaults;
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGPIPE);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setflags(&attributes,
                             POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF);
    std::string shell = "/bin/sh";
    std::string flag = "-c";
    std::string text = command;
    std::array<char*, 4> arguments = {shell.data(), flag.data(), text.data(),
                                      nullptr};
    const int failed = posix_spawn(&child_, shell.c_str(), &actions,
                                   &attributes, arguments.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    return failed;
  }

  pid_t child_ = -1;
  int in_ = -1;
  int out_ = -1;
  int errors_ = -1;
};

}  // namespace

Result<std::string> Filter(const std::string& command, const std::string& input,
                           const FilterLimits& limits) {
  std::signal(SIGPIPE, SIG_IGN);  // The command may not read all.
  Child child;
  if (Status status = child.Start(command); !status.ok()) return status;
  const double end = Now() + limits.seconds;
  std::string_view rest = input;
  std::string output;
  const auto prints_too_much = [&] {
    return output.size() > limits.bytes || child.ErrorBytes() > limits.bytes;
  };
  while (child.Exchange(rest, output) && !prints_too_much() && Now() <= end) {
  }
  const int status =
      prints_too_much() ? -1 : child.WaitUntil(end, limits.bytes);
  if (prints_too_much()) {
    return FilterError(
        fmt::format("it prints more than {} MiB", limits.bytes >> 20));
  }
  if (status < 0) {
    return FilterError(fmt::format("it takes longer than {:g} seconds{}",
                                   limits.seconds, child.Errors()));
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return output;
  return FilterError(
      fmt::format("it ends with {}{}",
                  WIFSIGNALED(status)
                      ? fmt::format("SIG{}", ShortSignalName(WTERMSIG(status)))
                      : fmt::format("exit code {}", WEXITSTATUS(status)),
                  child.Errors()));
}

}  // namespace kvtwin::props
