// The subcommands with --backend.

#ifndef KVTWIN_PROPS_COMMAND_BACKEND_COMMAND_H_
#define KVTWIN_PROPS_COMMAND_BACKEND_COMMAND_H_

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "props/backend/host_process.h"
#include "props/base/level.h"
#include "props/history/history.h"
#include "props/search/fuzz.h"

namespace CLI {
class App;
}

namespace kvtwin::props {

struct BackendArguments {
  HostOptions host;
  std::int64_t memory_mib = 1024;
  std::string level;  // Empty: all, from the strongest on.

  bool given() const { return !host.library.empty(); }
};

// Adds the options that name a backend and set its limits.
void AddBackendOptions(CLI::App& command, BackendArguments& arguments);

// Adds the option of the level, which needs --backend.
void AddLevelOption(CLI::App& command, BackendArguments& arguments);

// Adds the option that names the profile to check the backend against.
void AddProfileOption(CLI::App& command, BackendArguments& arguments);

// Returns "--backend ./libyours.so" and other options, and the level if the
// user gave one.
std::string ArgumentsText(const BackendArguments& arguments);

// Returns the exit code: 0 if the level that the backend claims holds and it
// has no crash or leak, otherwise 1; 2 if there is no usable backend. `html`,
// if not empty, is the path of the page of a failure.
int FuzzBackend(const BackendArguments& arguments, const FuzzOptions& options,
                bool json, const std::string& html);
// Calls `act` with the backend's pool as subject, at the level that the user
// gave or else the claimed level, and its declarations. Returns the result of
// `act`; 2 if the backend is unusable, or has no groups although `groups` is
// true.
int OnPoolBackend(
    const BackendArguments& arguments, bool groups,
    const std::function<int(const Subject&, const PoolInfo*)>& act);
// Returns a line with the level of a run, and what the pool does not declare.
std::string DeclaredText(const PoolInfo& info, Level level);
// Whether the library has a pool and no cache.
bool IsPool(const BackendArguments& arguments);
// Sets an empty kind to "paged" if the backend is a pool.
void SetKindOfPool(const BackendArguments& arguments, std::string& kind);
// Calls `act` with the declarations of the backend's pool, its level, and a
// function that makes the subject, which the law judges if it is not null.
using PoolSubjectAt = std::function<Subject(Level, const PoolLaw*)>;
int OnPoolHost(const BackendArguments& arguments, bool groups,
               const std::function<int(const PoolInfo&, Level,
                                       const PoolSubjectAt&)>& act);
// Calls `act` with the levels that the backend can be tried at: the level that
// the user gave, or else all. Returns the result of `act`, or 2 if there is no
// usable backend.
int OnLevels(const BackendArguments& arguments,
             const std::function<
                 int(Host&, const BackendInfo&, const std::vector<Level>&,
                     const std::function<Subject(Level)>&)>& act);
// Calls `act` with a cache that follows our rules, at the level that the user
// gave or else the claimed level. Returns 2 if the cache follows other rules,
// which it reports with `what`.
int OnOurBackend(
    const BackendArguments& arguments, std::string_view what,
    const std::function<int(Host&, const BackendInfo&, const Subject&)>& act);
// Prints the object as one line.
void PrintJson(const nlohmann::ordered_json& json);

// The parts of a history that a backend did not run, and whether the run
// compared anything.
struct LeftOut {
  std::vector<std::string> operations;  // As NotRun returns them.
  bool nothing_judged = false;          // And no difference was found.
};
LeftOut LeftOutOf(const PagedHistory& history, const RunResult& result,
                  const Subject& subject, const PoolInfo& info);
// Returns why the backend makes no pool of the history.
std::string WhyNoPool(const PoolInfo& info, const PagedHistory& history);
// Returns a line for each operation.
std::string LeftOutText(const LeftOut& left_out);
// Returns the keys `not_run` and `nothing_judged`.
nlohmann::ordered_json LeftOutJson(const LeftOut& left_out);

// Whether a pool took no token in all its layers. Then says so on stderr.
bool SaysNotJudged(const PagedCoverageCounts& counts, std::string_view name);
// Prints why the command cannot continue. Returns 2, the exit code.
int Complain(const std::string& text);

int RunOnBackend(const BackendArguments& arguments, const History& history,
                 bool json, const std::string& html);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMMAND_BACKEND_COMMAND_H_
