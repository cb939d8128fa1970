// A third-party pool of blocks behind the table of
// include/kvtwin/pool_backend.h. In a history of the harness it takes the place
// of the optimized twin, or is judged alone.

#ifndef KVTWIN_PROPS_BACKEND_POOL_BACKEND_H_
#define KVTWIN_PROPS_BACKEND_POOL_BACKEND_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/dialects/pool_rules.h"
#include "kvtwin/paged.h"
#include "kvtwin/pool_backend.h"
#include "props/backend/backend.h"
#include "props/laws/pool_laws.h"
#include "props/oracle/judge.h"
#include "props/paged/pool_workload.h"

namespace kvtwin::props {

struct PoolBackend {
  kvtwin_pool_backend_v1 table{};  // Missing functions are null.
  std::string name;
  Level level = Level::kVisibility;  // The level that it claims.
  PoolRules rules;
  bool groups = false;  // Pools may have groups of layers.
  bool media = false;   // Prompts may have media.
  // Set if the pool has `attend`.
  std::optional<PoolAttention> attention = {};
  // What `attend` follows (CAN_SOFT_CAP, CAN_SINKS), and the pools that `init`
  // makes.
  Abilities abilities = {.can = 0};
  MemoryWatch* watch = nullptr;  // Outlives its pools.
};

// Reads the description of a backend. Errors: a table that is too small or
// lacks a function; an invalid description.
Result<PoolBackend> DescribePoolBackend(const kvtwin_pool_backend_v1* given);

// Returns the levels at which the backend can be compared.
std::vector<Level> LevelsOf(const PoolBackend& backend);

// Errors: those of the backend's init. Calls of the pool throw a Failure for an
// answer that no pool may give: a number that is not a status, views of other
// shapes, a list without end. The pool is a PoolAttending.
Result<std::unique_ptr<PagedPool>> MakeBackendPool(const PoolBackend& backend,
                                                   const PagedSpec& spec);

// Returns the operations and other abilities that the backend lacks.
std::vector<std::string> NotDeclared(const PoolBackend& backend);

// Whether pools of the backend, with groups or without, can be judged by a law.
bool MayBeJudged(const PoolBackend& backend, const PoolLaw& law);

// Returns the pools of the backend, in this process, as a subject that a law
// judges. `calls` is as below.
Subject LawSubject(const PoolBackend& backend, const PoolLaw& law,
                   PoolCalls* calls = nullptr);

// Returns the pools of the backend, in this process, as a subject. At
// Level::kIdentity they are compared with the ledger and the reference twin
// after each call; at kVisibility and kAttention they are recorded, and the
// recording is judged. Histories whose pool the backend does not support are
// skipped. `calls`, if given, gets the calls of each run, and outlives the
// subject.
Subject BackendSubject(const PoolBackend& backend, Level level,
                       PoolCalls* calls = nullptr);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_POOL_BACKEND_H_
