// kvtwin-host: loads a backend and runs histories on it, so that its faults do
// not harm the command. Each subcommand with --backend starts it
// (props/backend/host_process.h), writes requests to file 3, one JSON object a
// line, and reads answers from file 4.

#ifndef KVTWIN_PROPS_BACKEND_HOST_HOST_H_
#define KVTWIN_PROPS_BACKEND_HOST_HOST_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "props/backend/backend_cache.h"

namespace kvtwin::props {

// The files that kvtwin-host shares with the command, by number, and its state.
inline constexpr int kHostAsked = 3;
inline constexpr int kHostAnswers = 4;
inline constexpr int kHostShared = 5;
struct HostState {
  std::atomic<std::int64_t> step;   // In the history; -1 before the first.
  std::atomic<std::int64_t> calls;  // Calls of the backend.
  std::atomic<int> function;        // The running function; -1: none.
  std::atomic<std::int64_t> memory_bytes;  // HostOptions::memory_bytes.
  // If the backend asked for more memory than it may have, the number of the
  // first function that did so, plus 2; else 0.
  std::atomic<int> refused;
  // Whether a crash comes from memory past the end of an argument.
  std::atomic<bool> past_loan;

  // The list of a pool's calls (PoolCalls), for the case that the process dies.
  // Where the room ends, each call takes the place of the last one.
  static constexpr std::size_t kCallsMax = 256;
  static constexpr std::size_t kCallLength = 240;
  std::atomic<std::size_t> listed;
  std::array<std::array<char, kCallLength>, kCallsMax> list;
};
// The number and the name of a function that MemoryWatch::Enter gets.
int FunctionNumber(std::string_view name);
std::string_view FunctionName(int number);

// Watches what a backend does to memory, through the malloc of this process
// (props/backend/host/guard.cc), which all loaded libraries share.
class ProcessMemory : public MemoryWatch {
 public:
  // The bytes that were allocated or mapped between Enter and Leave and are not
  // freed, and the function that took the latest of them.
  virtual std::size_t Live() = 0;
  virtual const char* LatestFunction() = 0;

  // Sets *refused, once, when a request for memory is refused, to the number of
  // the function plus 2.
  virtual void TellRefusals(std::atomic<int>* refused) = 0;
  // Limits the bytes of shared mappings, such as those shared with children.
  virtual void LimitShared(std::size_t bytes) = 0;

  // Stops watching freed buffers, so that calls need not check them.
  virtual void Forget() = 0;
};

// Does what kvtwin-host does, and ends the process when the command has closed
// file 3. If it cannot start, it returns an exit status. (host.cc is compiled
// with the command, whose headers it shares; kvtwin-host adds only guard.cc.)
int RunHost(int argc, char** argv, ProcessMemory& memory);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_HOST_HOST_H_
