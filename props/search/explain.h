// Completes a failure: the calls that led there, the rules that it breaks, the
// command that shows it again. Reports are made of the completed failure alone.

#ifndef KVTWIN_PROPS_SEARCH_EXPLAIN_H_
#define KVTWIN_PROPS_SEARCH_EXPLAIN_H_

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "props/base/program.h"
#include "props/compare/runner.h"
#include "props/history/history.h"
#include "props/paged/paged_runner.h"

namespace kvtwin::props {

// Returns `failure`, which `history` shows, with all that reports have. The
// history is run again, once for each SIMD target, and once more if `drawn`: if
// the trace is to have cells, views and masks, for a page. `bucket` is given
// where it is that of another history, the shortest that fails.
Failure Explain(const History& history, const Failure& failure,
                const Subject& subject, bool drawn = false,
                const std::optional<std::string>& bucket = std::nullopt);
Failure Explain(const PagedHistory& history, const Failure& failure,
                const PagedSubject& subject);

// Returns a failure that was explained as text: what differs, each call up to
// it, the bucket, the rules, and the command that shows it again.
std::string FailureText(const Failure& failure);
// Returns the same as the keys of a JSON object.
nlohmann::ordered_json FailureJson(const Failure& failure);

// Explains the failure, and returns its text.
inline std::string FailureText(const History& history, const Failure& failure,
                               const Subject& subject) {
  return FailureText(Explain(history, failure, subject));
}

// Returns the name of a bug, which tells it from others:
// "optimized-subject-mask-bytes+swa+put+copy" has the subject, the check that
// the shortest history fails, the kinds of its caches but causal, and its
// operations; after the subject the SIMD target, if the history does not fail
// on all that this machine has. "toy-not-reproduced" if the history does not
// fail at all, as with a backend whose answers change from run to run. Of a
// pool the words of the sentence are in place of the check.
std::string BucketOf(const History& shrunk, const Subject& subject);

// Returns "kvtwin run 'kvt1 ...' --twin optimized", or as the subject has it.
template <class AnyHistory, class AnySubject>
std::string RerunCommand(const AnyHistory& history, const AnySubject& subject) {
  const std::string arguments =
      subject.arguments.empty() ? "--twin " + subject.name : subject.arguments;
  return CommandLine(fmt::format("run '{}' {}", ToText(history), arguments));
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_EXPLAIN_H_
