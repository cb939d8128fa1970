#include "props/backend/host/host.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "core/dialects/profiles.h"
#include "core/index.h"
#include "kvtwin/kvtwin.h"
#include "kvtwin/pool_backend.h"
#include "props/backend/backend.h"
#include "props/backend/host_process.h"
#include "props/backend/pool_backend.h"
#include "props/base/program.h"
#include "props/laws/laws.h"
#include "props/report/page.h"
#include "props/search/explain.h"
#include "props/search/explore.h"

namespace kvtwin::props {
namespace {

using Json = nlohmann::ordered_json;

// Ends a process that the backend forked and that returned from the call: only
// the host itself continues.
void EndIfForked() {
  static const pid_t host = getpid();
  if (getpid() != host) _exit(0);
}

void Answer(const Json& json) {
  EndIfForked();
  std::string line =
      json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  line += '\n';
  for (std::size_t at = 0; at < line.size();) {
    const ssize_t wrote =
        write(kHostAnswers, line.data() + at, line.size() - at);
    if (wrote <= 0) _exit(1);  // The command is gone.
    at += AsSize(wrote);
  }
}

// Also tells the parent which function runs.
class ReportingWatch final : public MemoryWatch {
 public:
  ReportingWatch(MemoryWatch& watch, HostState* state)
      : watch_(watch), state_(state) {}
  void Enter(const char* function) override {
    state_->function.store(FunctionNumber(function));
    ++state_->calls;
    watch_.Enter(function);
  }
  void Leave() override {
    EndIfForked();
    watch_.Leave();
    state_->function.store(-1);
  }
  std::optional<std::string> Damage() override { return watch_.Damage(); }
  std::optional<std::size_t> BytesFrom(const void* data) override {
    return watch_.BytesFrom(data);
  }

 private:
  MemoryWatch& watch_;
  HostState* state_;
};

// Finds memory that is not freed when a history ends, and grows when the
// history runs again. Memory that is allocated only once does not grow.
template <class Again>
std::optional<Failure> FindLeak(ProcessMemory& memory, const Again& again) {
  std::size_t leaked = 0;
  for (int i = 0; i < 2; ++i) {
    const std::size_t before = memory.Live();
    again();
    if (memory.Live() <= before) return std::nullopt;
    leaked = memory.Live() - before;
  }
  return MakeFailure(
      "backend: memory",
      fmt::format("{} bytes are not freed by close, the last of them allocated "
                  "in {}",
                  leaked, memory.LatestFunction()));
}

Json RunCache(const Json& asked, Subject subject, HostState* state,
              ProcessMemory& memory) {
  const Result<History> history =
      ParseHistory(asked.at("history").get<std::string>());
  if (!history.ok()) return {{"error", history.status().message()}};
  subject.on_step = [state](std::size_t step) {
    state->step.store(static_cast<std::int64_t>(step));
  };
  state->step.store(-1);
  CallTrace trace;
  const bool with_trace = asked.value("with_trace", false);
  trace.begun = [](const std::string& call) { Answer({{"begun", call}}); };
  trace.told = [](const Step& step) {
    Answer({{"step", CallLineOf(step)},
            {"code", step.code},
            {"begins_pass", step.begins_pass},
            {"own_call", step.own_call}});
  };
  memory.Forget();
  const std::size_t before = memory.Live();
  RunResult result =
      RunHistory(*history, subject, {.trace = with_trace ? &trace : nullptr});
  if (!result.failure && memory.Live() > before) {
    result.failure = FindLeak(memory, [&] { RunHistory(*history, subject); });
    if (result.failure) result.failure->step = history->ops.size();
  }
  Json json = ToJson(result);
  if (asked.value("page", false) && result.failure) {
    json["page"] =
        PageHtml(Explain(*history, *result.failure, subject, /*drawn=*/true));
  }
  return json;
}

// Judges a history by a law. Reports a leak only if nothing else is wrong.
Json JudgeByLaw(const Json& asked, const Subject& subject,
                ProcessMemory& memory) {
  const Law* law = FindLaw(asked.at("law").get<std::string>());
  const Result<History> history =
      ParseHistory(asked.at("history").get<std::string>());
  if (law == nullptr || !history.ok()) {
    return {
        {"error", fmt::format("{} of law {}: {}", asked.at("history").dump(),
                              asked.at("law").dump(),
                              history.ok() ? "there is no such law"
                                           : history.status().message())}};
  }
  memory.Forget();
  const std::size_t before = memory.Live();
  LawResult result = Judge(*law, *history, subject);
  if (!result.failure && memory.Live() > before) {
    result.failure =
        FindLeak(memory, [&] { (void)Judge(*law, *history, subject); });
    if (result.failure) result.judged = 1;
  }
  Json json = {{"judged", result.judged}};
  if (result.failure) json["failure"] = ToJson(*result.failure);
  return json;
}

// Does all steps from a state of the explorer, and stores the current step.
Json Expand(const Json& asked, Subject subject, HostState* state,
            ProcessMemory& memory) {
  const Result<History> setup =
      ParseHistory(asked.at("setup").get<std::string>());
  if (!setup.ok()) return {{"error", setup.status().message()}};
  const ExploreSize size = {.cells = asked.at("cells").get<int>(),
                            .sequences = asked.at("sequences").get<int>(),
                            .positions = asked.at("positions").get<int>(),
                            .dtype = asked.at("dtype").get<DType>(),
                            .drafts = asked.at("drafts").get<bool>()};
  const ExploreCase what = {asked.at("explore").get<std::string>(),
                            setup->setup};
  ExploreWay way = {.base = asked.at("state").get<std::uint64_t>(),
                    .path = {},
                    .names = asked.at("names").get<std::vector<int>>()};
  for (const Json& taken : asked.at("path")) {
    way.path.push_back({taken.at("step").get<std::uint32_t>(),
                        taken.at("names").get<std::vector<int>>()});
  }
  subject.on_step = [state](std::size_t step) {
    state->step.store(static_cast<std::int64_t>(step));
  };
  state->step.store(-1);
  memory.Forget();
  const std::size_t before = memory.Live();
  Expansion expansion = ExpandState(size, what, subject, way);
  if (!expansion.failure && memory.Live() > before) {
    expansion.failure =
        FindLeak(memory, [&] { (void)ExpandState(size, what, subject, way); });
    if (expansion.failure) ++expansion.differences;
  }
  return ToJson(expansion);
}

// Returns the declarations of a pool, and the laws that can judge it.
Json DeclarationsOf(const PoolBackend& pool) {
  Json laws = Json::array();
  for (const PoolLaw& law : PoolLaws()) {
    if (MayBeJudged(pool, law)) laws.push_back(law.name);
  }
  return {{"name", pool.name},
          {"claims", pool.level},
          {"levels", LevelsOf(pool)},
          {"groups", pool.groups},
          {"laws", laws},
          {"not_declared", NotDeclared(pool)},
          {"can", pool.abilities.can},
          {"dtypes", pool.abilities.dtypes},
          {"block_multiple", pool.abilities.block_multiple},
          {"head_dim_multiple", pool.abilities.head_dim_multiple}};
}

// Runs a history of a pool. A leak is reported only if nothing else is wrong.
Json RunPool(const Json& asked, const PoolBackend& pool, HostState* state,
             ProcessMemory& memory) {
  const Result<PagedHistory> history =
      ParsePagedHistory(asked.at("pool").get<std::string>());
  if (!history.ok()) return {{"error", history.status().message()}};
  PagedCoverageCounts counts;
  PoolCalls calls([state](std::size_t index, const std::string& text) {
    auto& line = At(state->list, std::min(index, state->list.size() - 1));
    line[text.copy(line.data(), line.size() - 1)] = '\0';
    state->listed = index + 1;
  });
  const PoolLaw* const law = FindPoolLaw(asked.value("law", ""));
  const Subject subject =
      law != nullptr
          ? LawSubject(pool, *law, &calls)
          : BackendSubject(pool, asked.at("level").get<Level>(), &calls);
  memory.Forget();
  std::size_t before = memory.Live();
  RunResult result = RunHistory(*history, subject, {.counts = &counts});
  auto& failure = result.failure;
  const bool ended = !failure;
  for (int i = 0; i < 2 && !failure && memory.Live() > before; ++i) {
    before = memory.Live();
    RunHistory(*history, subject);
    if (i == 0 || memory.Live() <= before) continue;
    failure = MakeFailure(
        "backend: memory",
        fmt::format("{} bytes are not freed by close", memory.Live() - before));
  }
  if (!failure) {  // Damage by close, which has no answer.
    if (const auto damage = pool.watch->Damage()) {
      failure =
          MakeFailure("backend: out of bounds", "after close: " + *damage);
    }
  }
  if (ended && failure) {
    failure->step = history->ops.size();
    failure->trace = calls.Steps();
  }
  Json json = ToJson(result);
  json["counts"] = ToJson(counts);
  return json;
}

struct Loaded {
  std::optional<BackendInfo> cache;
  std::optional<PoolBackend> pool;
};

Result<Loaded> Load(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("the file does not load as a shared library: {}",
                              dlerror()));
  }
  Loaded loaded;
  if (void* symbol = dlsym(library, KVTWIN_GET_BACKEND_V1)) {
    const auto get = reinterpret_cast<kvtwin_get_backend_v1_fn>(symbol);
    Result<BackendInfo> cache = DescribeBackend(get());
    if (!cache.ok()) return cache.status();
    loaded.cache = std::move(*cache);
  }
  if (void* symbol = dlsym(library, KVTWIN_GET_POOL_BACKEND_V1)) {
    const auto get = reinterpret_cast<kvtwin_get_pool_backend_v1_fn>(symbol);
    Result<PoolBackend> pool = DescribePoolBackend(get());
    if (!pool.ok()) return pool.status();
    loaded.pool = std::move(*pool);
  }
  if (loaded.cache || loaded.pool) return loaded;
  return Status(StatusCode::kInvalidArgument,
                fmt::format("{} exports no {}: see docs/live.md", path,
                            KVTWIN_GET_BACKEND_V1));
}

// Bytes that the harness may need in addition to the backend's limit.
constexpr std::int64_t kRoom = std::int64_t{64} << 20;

// Makes the kernel refuse this much more data than there is now.
void LimitMemory(std::int64_t bytes) {
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  long long pages = 0;
  const bool read = file != nullptr &&
                    std::fscanf(file, "%*s %*s %*s %*s %*s %lld", &pages) == 1;
  if (file != nullptr) std::fclose(file);
  if (!read) return;  // The parent checks the size.
  rlimit limit = {};
  getrlimit(RLIMIT_DATA, &limit);
  const std::int64_t now = pages * sysconf(_SC_PAGESIZE);
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max,
                                    static_cast<rlim_t>(now + bytes + kRoom));
  setrlimit(RLIMIT_DATA, &limit);
}

// Ends this process when the command is gone: no one else would end a call that
// hangs.
void EndWithTheCommand() {
  // The backend's signals go to its own threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([] {
    pollfd hangs_up = {.fd = kHostAsked, .events = 0, .revents = 0};
    while (poll(&hangs_up, 1, -1) <= 0) {
    }
    if (getpgrp() == getpid()) kill(0, SIGKILL);  // With its children.
    _exit(1);
  }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// Makes a crash tell the command whether the backend used memory past the end
// of an argument.
void TellBadAddresses(HostState* state) {
  static std::atomic<HostState*> told;
  told = state;
  struct sigaction action = {};
  action.sa_sigaction = [](int signal, siginfo_t* info, void*) {
    if (EndsALoan(info->si_addr)) told.load()->past_loan = true;
    std::signal(signal, SIG_DFL);  // The instruction runs again.
  };
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
}

}  // namespace

int RunHost(int argc, char** argv, ProcessMemory& memory) {
  void* shared = mmap(nullptr, sizeof(HostState), PROT_READ | PROT_WRITE,
                      MAP_SHARED, kHostShared, 0);
  if (argc != 2 || shared == MAP_FAILED) {
    std::fputs("kvtwin-host is started by kvtwin fuzz --backend\n", stderr);
    return 2;
  }
  // A crash is a finding, and shrinking repeats it: no core files are written.
  const rlimit none = {0, 0};
  setrlimit(RLIMIT_CORE, &none);
  std::signal(SIGPIPE, SIG_DFL);
  for (const int file : {kHostAsked, kHostAnswers, kHostShared}) {
    fcntl(file, F_SETFD, FD_CLOEXEC);
  }
  EndIfForked();  // Remembers that this is the host.
  EndWithTheCommand();
  setvbuf(stdout, nullptr, _IOLBF, 0);  // Reports show the last output.
  auto* state = static_cast<HostState*>(shared);
  memory.TellRefusals(&state->refused);
  memory.LimitShared(AsSize(state->memory_bytes.load()));
  LimitMemory(state->memory_bytes);
  TellBadAddresses(state);
  state->function.store(FunctionNumber("loading"));
  Result<Loaded> loaded = Load(argv[1]);
  state->function.store(-1);
  LimitMemory(state->memory_bytes);
  if (!loaded.ok()) {
    Answer({{"error", loaded.status().message()}});
    return 0;
  }
  ReportingWatch watch(memory, state);
  Json hello = Json::object();
  if (loaded->cache) hello["cache"] = ToJson(*loaded->cache);
  if (loaded->pool) {
    loaded->pool->watch = &watch;
    hello["pool"] = DeclarationsOf(*loaded->pool);
  }
  Answer(hello);
  std::FILE* asked = fdopen(kHostAsked, "r");
  char* line = nullptr;
  std::size_t room = 0;
  while (getline(&line, &room, asked) > 0) {
    const Json json = Json::parse(line);
    if (json.contains("pool")) {
      Answer(RunPool(json, *loaded->pool, state, memory));
      continue;
    }
    SetProgram(json.value("program", Program()));
    BackendInfo info = *loaded->cache;
    UseProfile(json.value("profile", ""), info);
    Subject subject = BackendSubject(info, json.at("level").get<Level>(),
                                     json.value("arguments", ""), &watch);
    if (json.contains("law")) {
      Answer(JudgeByLaw(json, subject, memory));
      continue;
    }
    if (json.contains("explore")) {
      Answer(Expand(json, subject, state, memory));
      continue;
    }
    if (const auto values = json.at("rules").get<std::vector<int>>();
        !values.empty()) {
      subject.rules = RulesOf(values);
      subject.mask_rows_too = true;
    }
    Answer(RunCache(json, subject, state, memory));
  }
  _exit(0);  // The backend's exit handlers do not run.
}

}  // namespace kvtwin::props
