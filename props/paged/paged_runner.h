// Runs histories on pools: kvtwin's twins and third-party pools.

#ifndef KVTWIN_PROPS_PAGED_PAGED_RUNNER_H_
#define KVTWIN_PROPS_PAGED_PAGED_RUNNER_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "props/base/level.h"
#include "props/compare/runner.h"
#include "props/history/abilities.h"
#include "props/paged/paged_driver.h"
#include "props/paged/paged_history.h"
#include "props/paged/pool_log.h"

namespace kvtwin::props {

// Runs a history on the ledger, the reference and the optimized twin. `ran` in
// the result is always true. A failure has the calls to the latter pool as its
// trace; they are also left in `calls`, if given.
// With `attention`, the pool under test attends, with the soft cap and the
// sinks of `attention`.
RunResult RunPaged(const PagedHistory& history,
                   PagedCoverageCounts* counts = nullptr,
                   const PagedMaker& make = MakePagedPool,
                   bool same_messages = true, PoolCalls* calls = nullptr,
                   const std::optional<PoolAttention>& attention = {});

// Runs a history on the subject's pool.
RunResult RunHistory(const PagedHistory& history, const Subject& subject,
                     PoolRunOptions options = {});

// Writes the recording of a twin (docs/trace_format.md): the calls that the
// history makes, without misuse, and the answers. Returns the number of lines
// after the first. Errors: a twin fails, so that the recording ends early, or
// an answer cannot be recorded.
Result<std::int64_t> WritePagedRecording(
    PagedHistory history, std::string_view twin, std::ostream& out,
    const PagedMaker& make = MakePagedPool);

// Returns the shortest failing history, with the smallest numbers, that is
// found in the subject's `shrink_seconds`. Histories for which `refuses` is
// true do not count as failing.
using RefusesPaged = std::function<bool(const PagedHistory&, const Failure&)>;
PagedHistory Shrink(const PagedHistory& history, const Subject& subject,
                    const RefusesPaged& refuses = nullptr);

// Returns a text for each operation of the history that a pool does not get:
// "fork 0 1 0: it does not declare fork". `not_declared` are the operations
// that the pool lacks.
std::vector<std::string> NotRun(const PagedHistory& history, Level level,
                                const std::vector<std::string>& not_declared);

// Returns why a backend makes no pool of a history: it does not declare such a
// pool, or its init refused it.
std::string WhyNoPool(std::string_view name, const Abilities& abilities,
                      bool has_groups, const PagedHistory& history);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGED_PAGED_RUNNER_H_
