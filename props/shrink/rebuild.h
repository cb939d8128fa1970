// Rebuilds a state of a cache in a few operations.

#ifndef KVTWIN_PROPS_SHRINK_REBUILD_H_
#define KVTWIN_PROPS_SHRINK_REBUILD_H_

#include <optional>

#include "props/history/history.h"

namespace kvtwin::props {

// Returns the last `kept` operations of `history` after one batch that fills
// the cells as they were before these operations. An additional sequence fills
// the free cells and is removed again; copies make shared tokens. Anything that
// the cells do not show is lost. Returns nullopt if there is no such history,
// as for a wrapper.
std::optional<History> Rebuilt(const History& history, std::size_t kept);

// Returns the last `kept` operations of `history` after one batch that
// fills as many cells as were filled. Its tokens are of one sequence: the cache
// has no other. Returns nullopt if there is no such history, as for a wrapper.
std::optional<History> Filled(const History& history, std::size_t kept);

// Returns a history of one batch, which puts as many tokens as all batches of
// `history` into one sequence. Returns nullopt if there are none, or more than
// 4096.
std::optional<History> PutAtOnce(const History& history);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SHRINK_REBUILD_H_
