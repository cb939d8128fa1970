// From a long history that goes wrong to the shortest that does so too.

#ifndef KVTWIN_PROPS_SHRINK_SHRINK_H_
#define KVTWIN_PROPS_SHRINK_SHRINK_H_

#include <functional>
#include <optional>

#include "props/compare/runner.h"
#include "props/history/history.h"

namespace kvtwin::props {

// A history that ends in the same check as `history`, from which no operation
// can be left out, and no value made plainer, without losing the failure.
// One that does not fail, as of a backend whose answers change from run to run,
// stays as it is. When `subject.shrink_seconds` are over, it is the shortest
// that was found. With a `kind`, of this kind of cache;
// with `refuses`, a history that it is false for, with what the history fails.
using RefusesHistory = std::function<bool(const History&, const Failure&)>;
History Shrink(const History& history, const Subject& subject,
               std::optional<Kind> kind = std::nullopt,
               const RefusesHistory& refuses = nullptr);

// The same for another judge than RunHistory: what is wrong, if anything.
using Rerun = std::function<std::optional<Failure>(const History&)>;
History Shrink(const History& history, const Rerun& rerun);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SHRINK_SHRINK_H_
