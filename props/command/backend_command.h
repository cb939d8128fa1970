// The subcommands with --backend.

#ifndef KVTWIN_PROPS_COMMAND_BACKEND_COMMAND_H_
#define KVTWIN_PROPS_COMMAND_BACKEND_COMMAND_H_

#include <functional>
#include <string>
#include <string_view>

#include "props/backend/host_process.h"
#include "props/base/level.h"
#include "props/history/history.h"
#include "props/paged/paged_fuzz.h"
#include "props/search/fuzz.h"

namespace CLI {
class App;
}

namespace kvtwin::props {

struct BackendArguments {
  HostOptions host;
  std::int64_t memory_mib = 1024;
  std::string level;  // None: from the strongest on.

  bool given() const { return !host.library.empty(); }
};

// The options that name a backend and set its bounds.
void AddBackendOptions(CLI::App& command, BackendArguments& arguments);

// And what says whose rules it is held to.
void AddProfileOption(CLI::App& command, BackendArguments& arguments);

// The exit code: 0 if it keeps what it says of itself, else 1; 2 if it is no
// backend. `html`, if not empty, is where the page of a failure goes.
int FuzzBackend(const BackendArguments& arguments, const FuzzOptions& options,
                bool json, const std::string& html);
// Of a pool: at the level that is asked for, else at that which it claims. What
// `act` returns, if it is called.
int OnPoolBackend(const BackendArguments& arguments,
                  const std::function<int(const PagedSubject&)>& act);
// "--backend ./libyours.so", and the level if one is asked for.
std::string PoolArgumentsText(const BackendArguments& arguments);

// Acts on a cache that follows our rules, at the level that is asked for, or
// else claimed. Returns 2 if it follows others, and says so of `what`.
int OnOurBackend(
    const BackendArguments& arguments, std::string_view what,
    const std::function<int(Host&, const BackendInfo&, const Subject&)>& act);
// Prints why the command cannot go on. Returns 2, the exit code.
int Complain(const std::string& text);

int RunOnBackend(const BackendArguments& arguments, const History& history,
                 bool json, const std::string& html);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMMAND_BACKEND_COMMAND_H_
