// Many random histories, on any number of threads, with one answer.

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
#include "props/report/page.h"

namespace kvtwin::props {

struct FuzzOptions {
  // Runs at least this many operations, or, if 0, for `seconds`: no history
  // begins later. A failure is shrunk in a time of its own.
  std::int64_t operations = 0;
  double seconds = 10;
  std::uint64_t seed = 1;
  int threads = 1;
  std::optional<Kind> kind;
  int cells_max = 0;    // If not 0, of each cache.
  bool probes = false;  // Take a census.
  // All pairs of dtypes of K and V take turns.
  bool dtypes = false;
  std::uint64_t first = 0;  // The number of the first history.
  // Checks that are known to fail: histories that do are only counted.
  std::set<std::string> known = {};
  // Buckets (see BucketOf) that are known, or what they have before the first
  // plus, for all failures of a check: such a failure is counted, and the run
  // goes on (props/report/sieve.h).
  std::set<std::string> known_buckets = {};
  // Called now and then, from one thread.
  std::function<void(std::int64_t operations, double seconds)> progress;
};

struct FuzzFailure {
  std::uint64_t history_number = 0;  // Of the seed's histories, from 0.
  std::size_t operations = 0;        // Of the history as it was found.
  std::string check;                 // That failed then.
  History shrunk;
  Difference difference;  // Of `shrunk`.
};

// How often each bucket that is known was met.
using PassedOver = std::map<std::string, std::int64_t>;

struct FuzzResult {
  std::int64_t operations = 0;
  std::int64_t histories = 0;
  double seconds = 0;  // To the failure, if there is one.
  // Of all histories and answers, in the order of the seed. Depends on the
  // seed, the kind and the number of operations only.
  std::uint64_t digest = 0;
  std::int64_t repeated = 0;  // Histories that were run a second time.
  std::int64_t known = 0;     // That failed in a way that was known.
  std::int64_t ran = 0;       // The others: of caches that there are not.
  PassedOver passed_over;
  Census census;
  std::optional<FuzzFailure> failure;  // The first; the run ends with it.
};

FuzzResult Fuzz(const FuzzOptions& options, const Subject& subject);

// What tells bugs apart: "optimized-subject-mask-bytes+swa+put+copy", the
// subject, the check that the shrunk history fails, the kinds of its caches,
// but causal, and its operations; after the subject the SIMD target, if the
// history does not fail on all that this machine has. "toy-not-reproduced" if
// it does not fail at all, as with a backend whose answers change from run to
// run.
std::string BucketOf(const History& shrunk, const Subject& subject);

// "3 findings passed over: a-subject-rows x 2, a-backend-crash x 1", and which
// are known that were never met; a line for each, or nothing.
std::string PassedOverText(const PassedOver& passed_over,
                           const std::set<std::string>& known_buckets);
std::vector<std::string> NeverMet(const PassedOver& passed_over,
                                  const std::set<std::string>& known_buckets);

// The failure as a story: what disagreed, every call up to the difference, the
// bucket, which is that of this history unless another is given, and the
// command that shows it again.
std::string FailureText(
    const History& history, const Difference& difference,
    const Subject& subject,
    const std::optional<std::string>& bucket = std::nullopt);

// The same for a page.
Failure ExplainHistory(const History& history, const Difference& difference,
                       const Subject& subject);

// "kvtwin run 'kvt1 ...' --twin optimized", or as the subject has it.
std::string RerunCommand(const History& history, const Subject& subject);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_FUZZ_H_
