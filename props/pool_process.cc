#include "props/pool_process.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <memory>
#include <new>
#include <utility>

#include "core/refusals.h"

namespace kvtwin::props {
namespace {

// Whatever a history finds, its text is not longer.
constexpr std::size_t kTextMax = 1 << 16;
constexpr std::string_view kHang = "backend: hang:";
constexpr double kHungSeconds = 0.5;

// Of address space, now.
std::int64_t BytesInUse() {
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

// In the child: what was found, and then what was counted.
[[noreturn]] void RunInChild(const PagedRun& run, const PagedHistory& history,
                             std::int64_t memory_bytes, int to) {
  const auto most = static_cast<rlim_t>(BytesInUse() + memory_bytes);
  const rlimit limit = {most, most};
  setrlimit(RLIMIT_AS, &limit);
  const rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  PagedCensus census;
  std::string text;
  try {
    text = run(history, &census).substr(0, kTextMax);
  } catch (const std::bad_alloc&) {
    text = "backend: memory: there is no more than --memory-mib";
  }
  std::string answer(sizeof(census), '\0');
  std::memcpy(answer.data(), &census, sizeof(census));
  answer += text;
  for (std::size_t at = 0; at < answer.size();) {
    const ssize_t wrote = write(to, &answer[at], answer.size() - at);
    if (wrote <= 0) _exit(1);
    at += static_cast<std::size_t>(wrote);
  }
  _exit(0);  // What the backend does at exit is not asked.
}

// All that is written, until there is no more, or no more time. False: time.
bool ReadAll(int from, double seconds, std::string& text) {
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::string part(4096, '\0');
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    if (left.count() <= 0) return false;
    pollfd ready = {from, POLLIN, 0};
    const auto wait = std::min<std::int64_t>(left.count(), 60'000);
    if (poll(&ready, 1, static_cast<int>(wait)) <= 0) continue;
    const ssize_t count = read(from, part.data(), part.size());
    if (count <= 0) return true;
    text.append(part, 0, static_cast<std::size_t>(count));
  }
}

std::string EndOf(pid_t child) {
  int state = 0;
  while (waitpid(child, &state, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(state) && WEXITSTATUS(state) == 0) return "";
  if (WIFEXITED(state)) {
    return fmt::format("backend: crash: it exited with {}", WEXITSTATUS(state));
  }
  return fmt::format("backend: crash: {}", strsignal(WTERMSIG(state)));
}

void Add(const PagedCensus& more, PagedCensus& to) {
  to.operations += more.operations;
  to.found += more.found;
  to.copied += more.copied;
  to.evicted += more.evicted;
  to.truncated += more.truncated;
  to.full += more.full;
}

std::string RunForked(const PagedRun& run, const PagedHistory& history,
                      PagedCensus* census, double seconds,
                      std::int64_t memory_bytes) {
  int ends[2];
  if (pipe(ends) != 0) return "harness: there is no pipe";
  const pid_t child = fork();
  if (child < 0) return "harness: there is no process";
  if (child == 0) {
    close(ends[0]);
    RunInChild(run, history, memory_bytes, ends[1]);
  }
  close(ends[1]);
  std::string answer;
  const bool ended = ReadAll(ends[0], seconds, answer);
  close(ends[0]);
  if (!ended) kill(child, SIGKILL);
  const std::string end = EndOf(child);
  const auto operations = static_cast<std::int64_t>(history.ops.size());
  PagedCensus seen{.operations = operations};  // Of one that died.
  const bool whole = ended && end.empty() && answer.size() >= sizeof(seen);
  if (whole) std::memcpy(&seen, answer.data(), sizeof(seen));
  if (census != nullptr) Add(seen, *census);
  if (!ended) {
    return fmt::format("{} a history takes more than {} s", kHang, seconds);
  }
  if (whole) return answer.substr(sizeof(seen));
  return end.empty() ? "backend: crash: it ended" : end;
}

}  // namespace

Result<PoolBackend> LoadPoolBackend(const std::string& library) {
  void* loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) return Invalid("{}", dlerror());
  void* symbol = dlsym(loaded, KVTWIN_GET_POOL_BACKEND_V1);
  if (symbol == nullptr) {
    return Invalid("{} exports no {}: see <kvtwin/pool_backend.h>", library,
                   KVTWIN_GET_POOL_BACKEND_V1);
  }
  return DescribePoolBackend(
      reinterpret_cast<kvtwin_get_pool_backend_v1_fn>(symbol)());
}

PagedRun InProcess(const PagedRun& run, const BackendArguments& limits) {
  // Shorter once one has hung: its history is run often, to be shrunk.
  const auto seconds = std::make_shared<double>(limits.host.call_seconds);
  return [run, seconds, bytes = limits.memory_mib << 20](
             const PagedHistory& history, PagedCensus* census) {
    std::string wrong = RunForked(run, history, census, *seconds, bytes);
    if (wrong.starts_with(kHang)) *seconds = std::min(*seconds, kHungSeconds);
    return wrong;
  };
}

Result<Level> LevelOf(const BackendArguments& arguments,
                      const PoolBackend& backend) {
  if (arguments.level.empty()) return backend.level;
  for (const Level level : {Level::kIdentity, Level::kEntitlement}) {
    if (LevelName(level) == arguments.level) return level;
  }
  return Invalid("pools are compared at identity or entitlement, not {}",
                 arguments.level);
}

}  // namespace kvtwin::props
