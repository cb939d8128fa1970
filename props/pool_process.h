// A pool backend in a process of its own for each history: a crash, a call that
// does not end and memory that has no end are findings.

#ifndef KVTWIN_PROPS_POOL_PROCESS_H_
#define KVTWIN_PROPS_POOL_PROCESS_H_

#include <string>

#include "props/backend_command.h"
#include "props/paged_fuzz.h"
#include "props/pool_backend.h"

namespace kvtwin::props {

// Errors: no such library, or it has no pool. It stays loaded.
Result<PoolBackend> LoadPoolBackend(const std::string& library);

// Runs `run` in a fork of this process, which has one thread. A history that
// takes longer than a call may is taken to hang.
PagedRun InProcess(const PagedRun& run, const BackendArguments& limits);

// At the level that is asked for, or that the backend claims. Errors: none of
// pools.
Result<Level> LevelOf(const BackendArguments& arguments,
                      const PoolBackend& backend);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_POOL_PROCESS_H_
