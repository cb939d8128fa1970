// Random histories of paged pools: drawn, played, shortened, and written on a
// line that `kvtwin run` plays again.

#ifndef KVTWIN_PROPS_PAGED_PAGED_FUZZ_H_
#define KVTWIN_PROPS_PAGED_PAGED_FUZZ_H_

#include <cstdint>
#include <functional>
#include <map>
#include <ostream>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "props/history/generate.h"
#include "props/paged/paged_trio.h"

namespace kvtwin::props {

struct PagedHistory {
  PagedSpec spec;
  std::vector<PagedOp> ops;
};

// Pools are of one kind.
inline std::vector<std::string> KindNames(const PagedHistory&) { return {}; }

// "kvp1 block=4 blocks=8 ... | append 0 3 1 | commit 0 1 0".
std::string ToText(const PagedHistory& history);
// "kvtwin run 'kvp1 ...' --backend ./libyours.so": the arguments say of whom,
// if not of the twins.
std::string RerunCommand(const PagedHistory& history,
                         std::string_view arguments = "");
// Errors: anything else; more than a few thousand tokens.
Result<PagedHistory> ParsePagedHistory(std::string_view text);

// Of numbers that are picked.
PagedHistory DrawPagedHistory(const Pick& pick);
// The same for the same arguments, on every machine.
PagedHistory MakePagedHistory(std::uint64_t seed, std::uint64_t number);

// What is wrong, and empty if nothing is.
std::string RunPaged(const PagedHistory& history, PagedCensus* census = nullptr,
                     const PagedMaker& make = MakePagedPool);

// The recording of a twin (docs/trace_format.md): what the history asks of it,
// but for misuse, and the answers. Returns the number of lines behind the
// first. Errors: it ends early, where a twin is wrong, or cannot be recorded.
Result<std::int64_t> WritePagedRecording(
    PagedHistory history, std::string_view twin, std::ostream& out,
    const PagedMaker& make = MakePagedPool);

// How a history is run: what is wrong, and empty if nothing is.
using PagedRun = std::function<std::string(const PagedHistory& history,
                                           PagedCensus* census)>;
// By the twins.
std::string RunTwins(const PagedHistory& history, PagedCensus* census);

// Who answers: the twins, or somebody else.
struct PagedSubject {
  std::string name = "optimized";
  PagedRun run = RunTwins;
  // Instead of it, where it is known to hang: it waits less long for that.
  PagedRun run_hastily = {};
  // For how long a failure is shrunk; 0: until it cannot be any shorter.
  double shrink_seconds = 0;
  // Whether the census counts blocks that are copied and evicted: what a
  // backend does at visibility is its own affair.
  bool counts_blocks = true;
};
// This twin in place of the optimized one.
PagedSubject TwinPools(std::string twin);

// The name of the pool, and the sentence on what is wrong, with a dash before
// each word.
std::string SentenceBucket(std::string_view name, const std::string& wrong);

// The bucket of a failure of a pool: the name of the pool, the sentence on what
// is wrong (BucketOfReason) with a dash before each word, and the operations of
// the shrunk history with a plus before each.
std::string PoolBucketOf(std::string_view name, const std::string& wrong,
                         const PagedHistory& shrunk);

// As short, and of numbers as small, as it can be. Requires: something is
// wrong.
PagedHistory ShrinkPaged(PagedHistory history, const PagedRun& run = RunTwins);
// The same in the subject's time. Requires: this is `wrong`.
PagedHistory ShrinkPaged(const PagedHistory& history,
                         const PagedSubject& subject, std::string_view wrong);

struct PagedFuzzResult {
  PagedCensus census;
  std::int64_t histories = 0;
  std::set<std::pair<DType, DType>> dtypes;  // Of K and V, of those that ran.

  std::int64_t ran() const { return histories - census.not_made; }

  double seconds = 0;
  std::string wrong;  // With `shrunk`; the run ends with the first.
  PagedHistory shrunk;
  // How often each bucket that is known was met.
  std::map<std::string, std::int64_t> passed_over;
};

// Runs at least so many operations, or, if 0, for so long. A failure whose
// bucket, or sentence, is known is counted, and the run goes on. A subject that
// refuses some pools gets one that it had, or the plainest, in every other
// history from then on; one that refuses all gets a thousand.
PagedFuzzResult FuzzPaged(
    std::uint64_t seed, std::int64_t operations, double seconds,
    const std::function<void(std::int64_t, double)>& progress,
    const PagedSubject& subject = {},
    const std::set<std::string>& known_buckets = {});

// Every history of so many operations, of some twenty that matter, in a pool of
// three blocks of two tokens, where there is a sequence of three.
PagedFuzzResult ExplorePaged(
    int depth, const std::function<void(std::int64_t, double)>& progress,
    const PagedSubject& subject = {});

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGED_PAGED_FUZZ_H_
