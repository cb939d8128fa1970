// Completes a failure: the calls that led to it, the rules that it breaks, the
// command that reproduces it. Reports are made from the completed failure
// alone.

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
#include "props/sessions/session_history.h"

namespace kvtwin::props {

// Returns `failure`, with which `history` fails, completed for reports. Runs
// the history again, once for each SIMD target, and once more if `drawn`: if
// the trace needs cells, views and masks, for a page. `bucket` is passed if it
// was named after another history, the shortest that fails.
Failure Explain(const History& history, const Failure& failure,
                const Subject& subject, bool drawn = false,
                const std::optional<std::string>& bucket = std::nullopt);
Failure Explain(const PagedHistory& history, const Failure& failure,
                const Subject& subject);
Failure Explain(const SessionHistory& history, const Failure& failure,
                const Subject& subject);

// Returns an explained failure as text: the difference, each call up to it, the
// bucket, the rules, and the command that reproduces it.
std::string FailureText(const Failure& failure);
// Returns the same as the keys of a JSON object.
nlohmann::ordered_json FailureJson(const Failure& failure);

// Explains the failure, and returns its text.
inline std::string FailureText(const History& history, const Failure& failure,
                               const Subject& subject) {
  return FailureText(Explain(history, failure, subject));
}

// Returns the bucket, a name that tells a bug from other bugs:
// "optimized-subject-mask-bytes+swa+put+copy" has the subject, the check that
// the shortest history fails, the kinds of its caches without causal, and its
// operations. The SIMD target follows the subject if the history does not fail
// on every target of this machine. The name is "toy-not-reproduced" if the
// history does not fail, as with a backend whose answers vary from run to run.
// If a legal client removed tokens by itself, the name ends with "+remove", or
// with "+shift" if only a K row is wrong. For a pool and for
// sessions, the words of the failure's sentence replace the check.
std::string BucketOf(const History& shrunk, const Subject& subject);

// Returns "kvtwin run 'kvt1 ...' --twin optimized", with the subject's
// arguments.
template <class AnyHistory>
std::string RerunCommand(const AnyHistory& history, const Subject& subject) {
  const std::string arguments =
      subject.arguments.empty() ? "--twin " + subject.name : subject.arguments;
  return CommandLine(fmt::format("run '{}' {}", ToText(history), arguments));
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_EXPLAIN_H_
