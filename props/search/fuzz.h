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
#include "props/paged/paged_runner.h"

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
  bool drawn = false;       // A failure gets the drawings that a page needs.
  // Checks that are known to fail: histories that do are only counted.
  std::set<std::string> known = {};
  // Buckets (props/search/explain.h) that are known, or the part of a bucket
  // before the first plus, for all failures of a check: such a failure is
  // counted, and the run continues (props/report/sieve.h).
  std::set<std::string> known_buckets = {};
  // Called now and then, from one thread.
  std::function<void(std::int64_t operations, double seconds)> progress;
};

// How often each bucket that is known was met.
using PassedOver = std::map<std::string, std::int64_t>;

// `AnyHistory` is a history of a cache or of a pool.
template <class AnyHistory, class AnyCensus>
struct FuzzResultOf {
  // At least one for each history: a process that died in the first call
  // counts, and so does a history that the subject has no cache for.
  std::int64_t operations = 0;
  std::int64_t histories = 0;
  double seconds = 0;  // To the failure, if there is one.
  // Of all histories and answers, in the order of the seed. Depends on the
  // seed, the kind and the number of operations only.
  std::uint64_t digest = 0;
  std::int64_t repeated = 0;  // Histories that were run a second time.
  std::int64_t known = 0;     // Histories that failed in a known way.
  std::int64_t ran = 0;       // Histories that the subject has a cache for.
  PassedOver passed_over;
  AnyCensus census;
  // The first failure, explained, and the shortest history that shows it; the
  // run ends with it.
  std::optional<Failure> failure;
  AnyHistory shrunk;
};
using FuzzResult = FuzzResultOf<History, Census>;
using PagedFuzzResult = FuzzResultOf<PagedHistory, PagedCensus>;

// A subject that has no cache for nearly all of a thousand histories ends the
// run. Of pools that are refused, every other history gets rows as a pool had
// them that was not.
FuzzResult Fuzz(const FuzzOptions& options, const Subject& subject);
PagedFuzzResult Fuzz(const FuzzOptions& options, const PagedSubject& subject);

// Runs every history of this many operations, of some twenty that matter, in a
// pool of three blocks of two tokens, where there is a sequence of three.
PagedFuzzResult ExplorePaged(int depth, const FuzzOptions& options,
                             const PagedSubject& subject = {});

// "3 findings passed over: a-subject-rows x 2, a-backend-crash x 1", and which
// are known that were never met; a line for each, or nothing.
std::string PassedOverText(const PassedOver& passed_over,
                           const std::set<std::string>& known_buckets);
std::vector<std::string> NeverMet(const PassedOver& passed_over,
                                  const std::set<std::string>& known_buckets);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_FUZZ_H_
