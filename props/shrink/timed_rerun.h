// Runs the candidates of a shrinker, of caches or pools.

#ifndef KVTWIN_PROPS_SHRINK_TIMED_RERUN_H_
#define KVTWIN_PROPS_SHRINK_TIMED_RERUN_H_

#include <optional>

#include "props/base/clock.h"
#include "props/base/interrupt.h"
#include "props/compare/failure.h"
#include "props/compare/runner.h"

namespace kvtwin::props {

// Returns a function that runs a history on `subject` and returns its failure.
// The function returns nothing after `subject.shrink_seconds`, after an
// interrupt, and for a failure that `refuses`, if it is set, returns true for.
// Requires: both arguments outlive the function.
template <class Refuses>
auto TimedRerun(const Subject& subject, const Refuses& refuses) {
  const double end = Now() + subject.shrink_seconds;
  return
      [&subject, &refuses, end](const auto& history) -> std::optional<Failure> {
        const bool over = subject.shrink_seconds > 0 && Now() > end;
        if (over || Interrupted()) return std::nullopt;
        std::optional<Failure> failure = RunHistory(history, subject).failure;
        if (failure && refuses && refuses(history, *failure)) failure.reset();
        return failure;
      };
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SHRINK_TIMED_RERUN_H_
