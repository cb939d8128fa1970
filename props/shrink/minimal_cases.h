// A catalog of short histories, the plainest first.

#ifndef KVTWIN_PROPS_SHRINK_MINIMAL_CASES_H_
#define KVTWIN_PROPS_SHRINK_MINIMAL_CASES_H_

#include <functional>
#include <optional>

#include "props/history/history.h"
#include "props/shrink/bounds.h"

namespace kvtwin::props {

// Returns the plainest history of a catalog that `fails`, if it is plainer than
// `model`. The catalog has all short histories with plain arguments on plain
// caches, of the kinds of operations that `model` has, and, one at a time, what
// else is special about `model`. So one bug has the same catalog, whichever
// history shows it. If the client of `model` is legal, so are all clients. The
// search gives up after some thousand tries.
std::optional<History> PlainestThatFails(
    const History& model, const std::function<bool(const History&)>& fails,
    const Bounds& bounds = {});

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SHRINK_MINIMAL_CASES_H_
