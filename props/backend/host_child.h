// A process of kvtwin-host, with all processes that it starts: the harness asks
// it, watches it while it answers, and ends it if it hangs or takes too much
// memory.

#ifndef KVTWIN_PROPS_BACKEND_HOST_CHILD_H_
#define KVTWIN_PROPS_BACKEND_HOST_CHILD_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "props/backend/host_process.h"
#include "props/base/check_name.h"
#include "props/compare/runner.h"

namespace kvtwin::props {

// Once the process fails, `died` says why.
class HostProcess {
 public:
  using Json = nlohmann::ordered_json;

  // The options outlive it.
  explicit HostProcess(const HostOptions& options) : options_(options) {
    Start();
  }
  HostProcess(const HostProcess&) = delete;
  HostProcess& operator=(const HostProcess&) = delete;
  ~HostProcess();

  bool alive() const { return child_ > 0; }
  // A check and what happened, once it is not alive.
  const Failure& died() const { return died_; }
  // The function of the backend that is being called.
  std::string function() const;
  // The step of the history at which the process died; -1: before the first.
  std::int64_t step() const {
    return state_ == nullptr ? -1 : state_->step.load();
  }

  bool Ask(const Json& json);
  // The next line; nothing if it died, or was killed.
  std::optional<Json> Answer(double call_seconds);
  // Memory beyond the present size counts as the backend's.
  void Remember() { data_at_first_ = DataBytes(); }

 private:
  void Start();
  int Spawn(int asked, int answers, int printed, int shared);
  void Died(CheckName check, std::string text);
  // With all that it started. Returns how it ended, if it had.
  int End();
  void Ended(double call_seconds);
  bool HasEnded() const;
  std::optional<Json> Kill(CheckName check, const std::string& what);
  std::optional<Json> KillForMemory();
  std::optional<Json> KillForProcesses();

  std::optional<Json> ParseLine(std::size_t end);
  bool ReadSome();
  void Drain();
  std::string Output() const;
  std::int64_t DataBytes() const;
  bool TakesTooMuch() const;
  bool StartsTooMany() const;

  const HostOptions& options_;
  pid_t child_ = -1;
  int asked_ = -1;
  int answers_ = -1;
  int printed_ = -1;
  HostState* state_ = nullptr;
  std::string read_;
  std::string output_;
  std::int64_t data_at_first_ = 0;
  Failure died_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_HOST_CHILD_H_
