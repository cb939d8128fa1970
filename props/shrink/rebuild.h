// Rebuilds a state of a cache in a few operations.

#ifndef KVTWIN_PROPS_SHRINK_REBUILD_H_
#define KVTWIN_PROPS_SHRINK_REBUILD_H_

#include <optional>
#include <vector>

#include "props/history/history.h"

namespace kvtwin::props {

// Returns up to two histories that begin with one batch, and end with the last
// `kept` operations of `history`. In the first, the batch fills the cells as
// they were before these operations: an additional sequence fills the free
// cells and is removed again; copies make shared tokens. In the second, which
// is left out for more than 4096 tokens, the batch fills as many cells with the
// tokens of one sequence, the only sequence of the cache. Anything else is
// lost. Returns none for wrappers, states, and empty caches.
std::vector<History> Rebuilt(const History& history, std::size_t kept);

// Returns a history of one batch, which puts as many tokens as all batches of
// `history` into one sequence. Returns nullopt if there are none, or more than
// 4096.
std::optional<History> PutAtOnce(const History& history);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SHRINK_REBUILD_H_
