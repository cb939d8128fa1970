// Runs many random histories on any number of threads. The result is the same
// for any number of threads.

#ifndef KVTWIN_PROPS_SEARCH_FUZZ_H_
#define KVTWIN_PROPS_SEARCH_FUZZ_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "props/compare/runner.h"
#include "props/history/history.h"
#include "props/paged/paged_runner.h"
#include "props/sessions/session_history.h"

namespace kvtwin::props {

struct FuzzOptions {
  // Runs at least this many operations, or, if 0, for `seconds`, after which no
  // history begins. Shrinking does not count as part of that time.
  std::int64_t operations = 0;
  double seconds = 10;
  std::uint64_t seed = 1;
  int threads = 1;
  std::optional<Kind> kind;
  int cells_max = 0;  // Limit of each cache; 0: none.
  bool count_marks = false;
  // Histories take all pairs of dtypes of K and V in turn.
  bool dtypes = false;
  // Every history has drafts (props/history/speculate.h).
  bool speculate = false;
  bool groups = false;      // Only pools with groups.
  std::uint64_t first = 0;  // The number of the first history.
  bool drawn = false;       // Draw the failure's calls, for a page.
  // Report the failure as it was found. Ignored if known buckets are given.
  bool unshrunk = false;
  // Checks that are known to fail: histories that fail them are only counted.
  std::set<std::string> known = {};
  // Known buckets (props/search/explain.h). The part of a bucket before the
  // first plus stands for all failures of a check. A known failure is counted,
  // and the run continues (props/report/finding_filter.h).
  std::set<std::string> known_buckets = {};
  // Called from time to time, from one thread.
  std::function<void(std::int64_t operations, double seconds)> progress;
};

// How often each known bucket was met.
using PassedOver = std::map<std::string, std::int64_t>;

// `AnyHistory` is a history of a cache, of a pool or of sessions.
template <class AnyHistory, class AnyCounts>
struct FuzzResultOf {
  // Counts at least one for each history, also if its process died in the first
  // call. A history counts if the subject has no cache for it, but not if it
  // has no pool for it.
  std::int64_t operations = 0;
  std::int64_t histories = 0;
  double seconds = 0;  // Until the failure, if there is one.
  // Digest of all histories and answers, in the order of the seed. Depends only
  // on the seed, the kind and the number of operations.
  std::uint64_t digest = 0;
  std::int64_t repeated = 0;  // Every twentieth history, run twice (S50).
  std::int64_t known = 0;     // Histories that failed in a known way.
  std::int64_t ran = 0;       // Histories that the subject has a cache for.
  // Histories without a failure in which a view was compared; for pools, in
  // which a law was judged.
  std::int64_t judged = 0;
  PassedOver passed_over;
  AnswerCounts answers = {};
  AnyCounts counts;
  // The first failure, explained, and the shortest history that shows it. The
  // run ends with this failure.
  std::optional<Failure> failure;
  AnyHistory shrunk;
};
using FuzzResult = FuzzResultOf<History, CoverageCounts>;
using PagedFuzzResult = FuzzResultOf<PagedHistory, PagedCoverageCounts>;
using SessionFuzzResult = FuzzResultOf<SessionHistory, PlayCounts>;

// Runs random histories until the options' limit, the first failure, or a
// thousand histories for nearly all of which the subject has no cache. If a
// subject refuses pools, every other history stores its rows as a pool that the
// subject accepted.
FuzzResult Fuzz(const FuzzOptions& options, const Subject& subject);
PagedFuzzResult FuzzPools(const FuzzOptions& options, const Subject& subject);
// The number of operations, about, of each history on which a pool is judged by
// a law.
inline constexpr std::int64_t kPoolLawOperations = 40;
// Judges the pools of a subject that a law judges, on `history` or, without it,
// on about `count` random histories.
PagedFuzzResult JudgePools(FuzzOptions options, std::int64_t count,
                           const std::optional<PagedHistory>& history,
                           const Subject& subject);
// The sessions of a twin; an operation is a step of a server.
SessionFuzzResult FuzzSessions(const FuzzOptions& options,
                               const Subject& subject);

// Runs every history of `depth` operations, out of about twenty, in a pool
// of three blocks of two tokens that has a sequence of three tokens; with
// `groups`, in a pool with three small groups.
PagedFuzzResult ExplorePaged(int depth, const FuzzOptions& options,
                             const Subject& subject);

// PassedOverText returns
// "3 findings passed over: a-subject-rows x 2, a-backend-crash x 1", and a line
// with the known buckets that were never met (NeverMet); or "".
std::string PassedOverText(const PassedOver& passed_over,
                           const std::set<std::string>& known_buckets);
// Returns a line for each note on the answers: "note: open found nothing ...".
std::string NotesText(const AnswerCounts& answers);
std::vector<std::string> NeverMet(const PassedOver& passed_over,
                                  const std::set<std::string>& known_buckets);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_FUZZ_H_
