// A backend in its own process: a crash, a call that does not return, or too
// much memory is a finding, and the next history gets a new process.

#ifndef KVTWIN_PROPS_BACKEND_HOST_PROCESS_H_
#define KVTWIN_PROPS_BACKEND_HOST_PROCESS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "kvtwin/status.h"
#include "props/backend/backend.h"
#include "props/compare/runner.h"
#include "props/laws/laws.h"
#include "props/laws/pool_laws.h"
#include "props/search/explore.h"

namespace kvtwin::props {

// The failure as it is found, before it is explained.
nlohmann::ordered_json ToJson(const RunResult& result);
RunResult RunResultFromJson(const nlohmann::ordered_json& json);

// The JSON has all counts, without the dtypes.
nlohmann::ordered_json ToJson(const PagedCoverageCounts& counts);
PagedCoverageCounts PagedCountsFromJson(const nlohmann::ordered_json& json);

// The JSON has all fields but the table.
nlohmann::ordered_json ToJson(const BackendInfo& info);
BackendInfo BackendInfoFromJson(const nlohmann::ordered_json& json);

nlohmann::ordered_json ToJson(const Failure& failure);
Failure FailureFromJson(const nlohmann::ordered_json& json);
nlohmann::ordered_json ToJson(const Expansion& expansion);
Expansion ExpansionFromJson(const nlohmann::ordered_json& json);

struct PoolInfo {
  std::string name;
  Level claims = Level::kVisibility;
  std::vector<Level> levels = {};              // At which it can be compared.
  bool groups = false;                         // Pools may have groups.
  std::vector<std::string> laws = {};          // Laws that can judge it.
  std::vector<std::string> not_declared = {};  // "fork", "groups", ...
  Abilities abilities = {};                    // As in PoolBackend.
};

struct HostOptions {
  std::string library;         // The path of the library.
  std::string profile;         // Replaces the library's own profile.
  double call_seconds = 5;     // A call that takes longer hangs.
  double shrink_seconds = 60;  // Time to shrink one failure.
  // Limit for memory beyond the size of a new process.
  std::int64_t memory_bytes = std::int64_t{1} << 30;

  // Returns the limit for all calls of a history together: a backend whose
  // calls take `call_seconds` for each operation is within it.
  double SecondsOf(std::size_t operations) const {
    return call_seconds * (100 + static_cast<double>(operations));
  }
};

class HostProcess;

// Runs a process for each history that runs at the same time.
class Host {
 public:
  explicit Host(HostOptions options);
  ~Host();

  // Comes first. Errors: no kvtwin-host, no such library, or not a backend.
  Result<BackendInfo> Describe();

  // Any thread may call it. The trace has only calls, no pictures. With
  // `rules`, judges by them instead of the profile's rules, and judges mask
  // rows too.
  RunResult Run(const History& history, Level level, const RunOptions& options,
                const Rules* rules = nullptr);
  // Returns the page of a history that fails; empty if there is none, as after
  // a crash.
  std::string Page(const History& history, Level level,
                   const std::string& arguments);

  // Judges a history by a law. A process that dies is a failure, too, with its
  // own check: "backend: crash".
  LawResult Judge(const Law& law, const History& history, Level level,
                  bool known_to_hang);
  // Does all steps from one state of `what`. A step that ends the process is
  // the last, and is named.
  Expansion Expand(const ExploreSize& size, const ExploreCase& what,
                   const ExploreWay& way);

  // These functions do the same for pools.
  Result<PoolInfo> DescribePool();

  // Returns the caches or the pools as a subject that runs histories at this
  // level. Requires: the host outlives the subject.
  Subject SubjectAt(const PoolInfo& info, Level level, std::string arguments,
                    const PoolLaw* law = nullptr);
  Subject SubjectAt(const BackendInfo& info, Level level,
                    std::string arguments);

 private:
  Result<nlohmann::ordered_json> Greet();
  // `page` gets the history's page, if it is given.
  RunResult Ask(const History& history, Level level, const RunOptions& options,
                const Rules* rules, const std::string& arguments = {},
                std::string* page = nullptr);
  RunResult AskPool(const PagedHistory& history, Level level,
                    const PoolLaw* law, const PoolRunOptions& options);
  std::unique_ptr<HostProcess> Take();
  void GiveBack(std::unique_ptr<HostProcess> process);
  // One question, one answer. Nothing if the process died, and `process` says
  // how.
  std::optional<nlohmann::ordered_json> AskOnce(
      const nlohmann::ordered_json& asked, std::size_t operations,
      bool known_to_hang, std::unique_ptr<HostProcess>& process);
  double Patience(bool known_to_hang) const;

  HostOptions options_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<HostProcess>> idle_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_HOST_PROCESS_H_
