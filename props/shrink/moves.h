// The single steps by which the history of a cache is shrunk.

#ifndef KVTWIN_PROPS_SHRINK_MOVES_H_
#define KVTWIN_PROPS_SHRINK_MOVES_H_

#include <functional>
#include <vector>

#include "props/history/history.h"

namespace kvtwin::props {

using Move = std::function<void(History&)>;

// Returns steps that may make a history plainer. Each step may also do nothing.
// Without `all`, operations are only left out or joined.
std::vector<Move> MovesOf(const History& history, bool all);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SHRINK_MOVES_H_
