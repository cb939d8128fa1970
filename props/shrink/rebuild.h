// A state of a cache, reached in a few operations.

#ifndef KVTWIN_PROPS_SHRINK_REBUILD_H_
#define KVTWIN_PROPS_SHRINK_REBUILD_H_

#include <optional>

#include "props/history/history.h"

namespace kvtwin::props {

// Of one cache, not of a wrapper: the last `kept` operations of `history`,
// after one batch that fills the cells as they were then, with a sequence that
// goes again where they were free, and copies where sequences share tokens.
// What no cell shows is lost. Nothing: there is no such history.
std::optional<History> Rebuilt(const History& history, std::size_t kept);

// As many tokens as all batches have, of one sequence in one batch. Nothing:
// there are none, or thousands.
std::optional<History> PutAtOnce(const History& history);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SHRINK_REBUILD_H_
