// A pool of blocks of somebody else's, behind the table of
// include/kvtwin/pool_backend.h: in a history of the harness it takes the place
// of the optimized twin, or is judged alone.

#ifndef KVTWIN_PROPS_BACKEND_POOL_BACKEND_H_
#define KVTWIN_PROPS_BACKEND_POOL_BACKEND_H_

#include <memory>
#include <string>

#include "core/dialects/pool_rules.h"
#include "kvtwin/paged.h"
#include "kvtwin/pool_backend.h"
#include "props/backend/backend.h"
#include "props/oracle/judge.h"
#include "props/paged/paged_runner.h"

namespace kvtwin::props {

struct PoolBackend {
  kvtwin_pool_backend_v1 table{};  // What it lacks is null.
  std::string name;
  Level level = Level::kVisibility;  // That it claims.
  PoolRules rules;
  MemoryWatch* watch = nullptr;  // Outlives its pools.
};

// What a backend says of itself. Errors: a table that is too small or lacks a
// function; a description that makes no sense.
Result<PoolBackend> DescribePoolBackend(const kvtwin_pool_backend_v1* given);

// Errors: what its init answers. Calls of the pool throw a Failure
// where the backend answers what no pool may: a number that is no status, views
// of other shapes, a list without end.
Result<std::unique_ptr<PagedPool>> MakeBackendPool(const PoolBackend& backend,
                                                   const PagedSpec& spec);

// Runs histories on pools of the backend. At Level::kIdentity they are compared
// with the ledger and the reference twin after each call; at kVisibility
// recorded, and the recording judged. What the backend has no such pool for is
// passed over. (Calls go to the backend in this process.)
PagedRun BackendRun(const PoolBackend& backend, Level level);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_POOL_BACKEND_H_
