// Shrinks a long failing history to the shortest one that still fails.

#ifndef KVTWIN_PROPS_SHRINK_SHRINK_H_
#define KVTWIN_PROPS_SHRINK_SHRINK_H_

#include <functional>
#include <optional>

#include "props/compare/runner.h"
#include "props/history/history.h"

namespace kvtwin::props {

// Returns a history that fails a check of the same party as `history`, and from
// which no operation can be left out, and no value made plainer, without losing
// the failure. A history that does not fail, as of a backend whose answers
// change from run to run, is returned unchanged. After
// `subject.shrink_seconds`, the shortest history so far is returned. With a
// `kind`, histories have this kind of cache; with `refuses`, histories for
// which it returns true, given their failure, count as passing.
using RefusesHistory = std::function<bool(const History&, const Failure&)>;
History Shrink(const History& history, const Subject& subject,
               std::optional<Kind> kind = std::nullopt,
               const RefusesHistory& refuses = nullptr);

// As above, with `rerun` in place of RunHistory: returns the failure, if any.
using Rerun = std::function<std::optional<Failure>(const History&)>;
History Shrink(const History& history, const Rerun& rerun);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SHRINK_SHRINK_H_
