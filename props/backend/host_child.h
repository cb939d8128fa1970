// A process of kvtwin-host, with all processes that it starts. The harness
// sends it requests, watches it while it answers, and ends it if it hangs or
// takes too much memory.

#ifndef KVTWIN_PROPS_BACKEND_HOST_CHILD_H_
#define KVTWIN_PROPS_BACKEND_HOST_CHILD_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "props/backend/host/host.h"
#include "props/backend/host_process.h"
#include "props/base/check_name.h"

namespace kvtwin::props {

// After the process has failed, died() says why.
class HostProcess {
 public:
  using Json = nlohmann::ordered_json;

  // Requires: the options outlive the object.
  explicit HostProcess(const HostOptions& options) : options_(options) {
    Start();
  }
  HostProcess(const HostProcess&) = delete;
  HostProcess& operator=(const HostProcess&) = delete;
  ~HostProcess();

  bool alive() const { return child_ > 0; }
  // The failed check and a text. Requires: not alive().
  const Failure& died() const { return died_; }
  // Returns the backend's function that is running.
  std::string function() const;
  // The step of the history at which the process died; -1: before the first.
  std::int64_t step() const {
    return state_ == nullptr ? -1 : state_->step.load();
  }

  // Returns the calls to a pool, up to the last one.
  std::vector<Step> PoolSteps() const;

  // Kills the process if it has not answered in `seconds`, even if it tells
  // that calls begin.
  bool Ask(const Json& json, double seconds);
  // Returns the next line; nothing if the process died or was killed. It is
  // killed if no call begins for `call_seconds`, even while lines come.
  std::optional<Json> Answer(double call_seconds);
  // From now on, memory beyond the present size counts as the backend's.
  void Remember() { data_at_first_ = DataBytes(); }

 private:
  void Start();
  int Spawn(int asked, int answers, int printed, int shared);
  void Died(CheckName check, std::string text);
  // Ends the process and all that it started. Returns its wait status.
  int End();
  void Ended(double call_seconds);
  bool HasEnded() const;
  void BeginToWait(double seconds);
  // Kills the process if a call, or all calls together, take too long.
  bool KilledForHang(double call_seconds);
  std::optional<Json> Kill(CheckName check, const std::string& what);
  std::optional<Json> KillForLength();
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
  double asked_at_ = 0;           // When the question was asked.
  double seconds_ = 0;            // The limit of the whole answer.
  std::int64_t calls_asked_ = 0;  // The calls before the question.
  std::int64_t calls_ = 0;  // The calls that KilledForHang has seen begin.
  double since_ = 0;        // When the last of them was seen, or the question.
  std::size_t answered_ = 0;  // Bytes of the answer so far.
  Failure died_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_HOST_CHILD_H_
