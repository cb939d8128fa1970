// Runs histories on pools: those of twins, and those of others.

#ifndef KVTWIN_PROPS_PAGED_PAGED_RUNNER_H_
#define KVTWIN_PROPS_PAGED_PAGED_RUNNER_H_

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <string_view>

#include "props/compare/runner.h"
#include "props/paged/paged_history.h"
#include "props/paged/paged_trio.h"

namespace kvtwin::props {

// Runs a history on the ledger, the reference and the optimized twin. `ran` of
// the result is false where the backend has no such pool.
RunResult RunPaged(const PagedHistory& history, PagedCensus* census = nullptr,
                   const PagedMaker& make = MakePagedPool,
                   bool same_messages = true);

// How a history is run. `hasty`: the history is known to hang, and the run
// waits less long for that.
using PagedRun = std::function<RunResult(const PagedHistory& history,
                                         PagedCensus* census, bool hasty)>;

// The pools under test, as Subject is the cache under test.
struct PagedSubject {
  std::string name = "optimized";
  PagedRun run = [](const PagedHistory& history, PagedCensus* census, bool) {
    return RunPaged(history, census);
  };
  // For how long a failure is shrunk; 0: until it cannot be any shorter.
  double shrink_seconds = 0;
  // What is compared. The census counts blocks that are copied and evicted at
  // identity only: elsewhere a pool does so by rules of its own.
  Level level = Level::kIdentity;
  // "--backend ./libyours.so", or empty: "--twin NAME".
  std::string arguments = {};
  bool hasty = false;

  bool is_twin() const { return arguments.empty(); }
};

// This twin in place of the optimized one.
PagedSubject TwinPools(std::string twin);

inline RunResult RunHistory(const PagedHistory& history,
                            const PagedSubject& subject,
                            PagedCensus* census = nullptr) {
  return subject.run(history, census, subject.hasty);
}

// The recording of a twin (docs/trace_format.md): what the history asks of it,
// but for misuse, and the answers. Returns the number of lines after the first.
// Errors: it ends early, where a twin is wrong, or cannot be recorded.
Result<std::int64_t> WritePagedRecording(
    PagedHistory history, std::string_view twin, std::ostream& out,
    const PagedMaker& make = MakePagedPool);

// Returns the shortest history, of the smallest numbers, that fails, in the
// time that the subject allows; with `refuses`, one that it is false for.
using RefusesPaged = std::function<bool(const PagedHistory&, const Failure&)>;
PagedHistory Shrink(const PagedHistory& history, const PagedSubject& subject,
                    const RefusesPaged& refuses = nullptr);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGED_PAGED_RUNNER_H_
