// A backend in a process of its own: a crash, a call that does not end, or
// memory that has no end is a finding, and the next history gets a new process.

#ifndef KVTWIN_PROPS_BACKEND_HOST_PROCESS_H_
#define KVTWIN_PROPS_BACKEND_HOST_PROCESS_H_

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvtwin/status.h"
#include "props/backend/backend.h"
#include "props/compare/runner.h"
#include "props/laws/laws.h"
#include "props/paged/paged_fuzz.h"
#include "props/search/explore.h"

namespace kvtwin::props {

// What kvtwin-host shares with the command: files by number, and this.
inline constexpr int kHostAsked = 3;
inline constexpr int kHostAnswers = 4;
inline constexpr int kHostShared = 5;
struct HostState {
  std::atomic<std::int64_t> step;   // Of the history; -1 before the first.
  std::atomic<std::int64_t> calls;  // Of the backend.
  std::atomic<int> function;        // Which it is in; -1: none.
  std::atomic<std::int64_t> memory_bytes;  // HostOptions has it.
  // If it asked for more memory than there may be: 2 more than the number of
  // the function that did so first. Else 0.
  std::atomic<int> refused;
};
// Of what MemoryWatch::Enter is told.
int FunctionNumber(std::string_view name);
std::string_view FunctionName(int number);

// All but the table.
nlohmann::ordered_json ToJson(const BackendInfo& info);
BackendInfo BackendInfoFromJson(const nlohmann::ordered_json& json);

nlohmann::ordered_json ToJson(const Expansion& expansion);
Expansion ExpansionFromJson(const nlohmann::ordered_json& json);

struct PoolInfo {
  std::string name;
  Level claims = Level::kVisibility;
};

struct HostOptions {
  std::string library;         // A path.
  std::string profile;         // Instead of the one that it names.
  double call_seconds = 5;     // A call that takes longer hangs.
  double shrink_seconds = 60;  // For each failure.
  std::int64_t memory_bytes = std::int64_t{1} << 30;  // More than at first.
};

class HostProcess;

// As many processes as there are histories at once.
class Host {
 public:
  explicit Host(HostOptions options);
  ~Host();

  // First. Errors: no kvtwin-host, no such library, or it is no backend.
  Result<BackendInfo> Describe();

  // From any thread. A story has the calls only, and no pictures. `hasty`: what
  // hangs is known to, and not waited for. With `rules`, by these instead of
  // its profile's, and mask rows too.
  RunResult Run(const History& history, Level level, Story* story,
                bool hasty = false, const Rules* rules = nullptr);
  // The page of a history that fails; empty if there is none, as of a crash.
  std::string Page(const History& history, Level level,
                   const std::string& arguments);

  // By a law. What a process dies of is wrong, too: "backend: crash: ...".
  LawResult Judge(const Law& law, const History& history, Level level,
                  bool hasty);
  // All steps from one state of `what`. One that ends its process is the
  // last, and named.
  Expansion Expand(const ExploreSize& size, const ExploreCase& what,
                   std::uint64_t state);

  // The same for pools.
  Result<PoolInfo> DescribePool();
  PagedSubject PoolSubjectAt(Level level);

  // Of its histories at a level; the host outlives it.
  Subject SubjectAt(const BackendInfo& info, Level level,
                    std::string arguments);

 private:
  Result<nlohmann::ordered_json> Greet();
  RunResult Ask(const History& history, Level level, Story* story, bool page,
                const std::string& arguments, std::string* html,
                const Rules* rules = nullptr, bool hasty = false);
  std::string AskPool(const PagedHistory& history, Level level, bool hasty,
                      PagedCensus* census);
  std::unique_ptr<HostProcess> Take();
  void GiveBack(std::unique_ptr<HostProcess> process);
  // One question, one answer. Nothing if the process died, and `process` says
  // how.
  std::optional<nlohmann::ordered_json> AskOnce(
      const nlohmann::ordered_json& asked, bool hasty,
      std::unique_ptr<HostProcess>& process);
  double Patience(bool hasty) const;

  HostOptions options_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<HostProcess>> idle_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_HOST_PROCESS_H_
