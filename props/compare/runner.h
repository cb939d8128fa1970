// Drives the ledger, the reference twin and a subject through one history and
// compares all their answers, after every call.

#ifndef KVTWIN_PROPS_COMPARE_RUNNER_H_
#define KVTWIN_PROPS_COMPARE_RUNNER_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/dialects/rules.h"
#include "kvtwin/cache.h"
#include "props/attention/attention_question.h"
#include "props/base/level.h"
#include "props/compare/coverage_marks.h"
#include "props/compare/failure.h"
#include "props/compare/step.h"
#include "props/history/abilities.h"
#include "props/history/history.h"

namespace kvtwin::props {

struct RunResult;
struct CallTrace;
struct PagedHistory;         // props/paged/paged_history.h
struct PagedCoverageCounts;  // props/paged/paged_driver.h

// How a history of a cache or a pool is run. `Counts` counts coverage marks.
template <class Counts>
struct RunOptionsOf {
  CallTrace* trace = nullptr;  // Gets the calls of a cache, if given.
  Counts* counts = nullptr;    // Gets the marks that the history hits.
  // The history is known to hang, so that each call gets less time.
  bool known_to_hang = false;
};
using RunOptions = RunOptionsOf<CoverageCounts>;
using PoolRunOptions = RunOptionsOf<PagedCoverageCounts>;

// A system under test: a twin, a cache or a pool in this process, a library in
// another process, or a Python class. Every command takes any of them.
struct Subject {
  std::string name = {};  // In reports.
  // May answer not_supported for a kind; such a history is skipped.
  std::function<Result<std::unique_ptr<Cache>>(const CacheSpec&)> make = {};
  // Whether free cells may be overwritten through the pointers of its views.
  bool can_be_poisoned = false;
  // Whether misuse before Init and after Close is tried. This takes as long as
  // a short history.
  bool tried_outside_of_life = true;
  // Whether `reload` also restores an earlier snapshot, and adds a sequence to
  // a new cache.
  bool restores_earlier_states = true;
  // The approximate duration of a run without operations, in nanoseconds. The
  // search for the shortest history counts runs by it.
  std::int64_t start_work = 2'500;

  // The following fields are for third-party backends.
  //
  // Used instead of `make`, if set; the setup also says the rows' dimensions.
  std::function<Result<std::unique_ptr<Cache>>(const Setup&)> make_of = {};
  // Used instead of `make` and `make_of`, if set: runs the history somewhere
  // else.
  std::function<RunResult(const History&, const RunOptions&)> run = {};
  // Runs the history of a pool. If it is not set, the pools are those of the
  // twin `name`. `ran` in the result is false if the subject does not support
  // the history's pool.
  std::function<RunResult(const PagedHistory&, const PoolRunOptions&)>
      run_pool = {};
  bool known_to_hang = false;  // In all runs, see RunOptionsOf.
  // How long a failure is shrunk; 0: until it cannot be made any shorter.
  double shrink_seconds = 0;
  // The level of comparison. At identity, the subject is compared with the
  // reference twin. Blocks that are copied and evicted are counted at identity
  // only: at other levels, the pool's own rules decide about them.
  Level level = Level::kIdentity;
  Rules rules = {};  // Identity requires kvtwin's own rules.
  // Whether the mask must have the number of rows that the rules say; if not,
  // it may have more.
  bool mask_rows_too = false;
  Abilities abilities = {};
  double tolerance = 0;  // Maximal error of an element of attention's output.
  // The following two are for the level `attention`, which allows what rounding
  // to this dtype explains, and the tolerance.
  DType attend_dtype = DType::kF32;
  int query_heads = kGroupMax;  // At most, for each KV head.
  // "--backend ./libyours.so", or empty: "--twin NAME".
  std::string arguments = {};
  // Called before each operation of a history.
  std::function<void(std::size_t step)> on_step = {};

  AttentionPrecision precision() const {
    return {.dtype = attend_dtype, .tolerance = tolerance};
  }
  int QueriesPerKvHead(const Setup& setup) const {
    return props::QueriesPerKvHead(attend_dtype, setup.rows.kv_heads,
                                   setup.group, query_heads);
  }
  bool is_twin() const { return !make_of && !run; }
  // Whether legal clients send batches that do not fit. At identity the answer
  // would have to be that of our twins.
  bool Overfills() const {
    return !is_twin() && level != Level::kIdentity &&
           abilities.Can(KVTWIN_CAN_REFUSE_FULL);
  }
  Result<std::unique_ptr<Cache>> Make(const Setup& setup) const {
    return make_of ? make_of(setup) : make(setup.spec);
  }
};

// Returns the subject of the twin `twin`: "reference", "optimized" or "cuda".
Subject TwinSubject(std::string_view twin);

// Returns the same at another level, where it is compared with the ledger
// alone, as a backend is. At `attention`, the twin's attention computes over
// its views. Requires: not "cuda" at that level.
Subject TwinSubject(std::string_view twin, Level level);

// The record of a run: a step for each call. If there is a frame, the steps
// from number `from` on are drawn.
struct CallTrace {
  std::vector<Step> steps;
  std::optional<Viewport> frame;
  std::int64_t from = 1;
  // Called before each call, with its name or an empty text, and after each
  // step, if set.
  std::function<void(const std::string& call)> begun = {};
  std::function<void(const Step&)> told = {};
  std::string calling = {};  // The call that is not answered yet, or empty.
  bool calls_start_forward = false;   // `calling` is StartForward.
  OwnCall own_call = OwnCall::kNone;  // The next steps are such calls.

  // Names a call before it is made, because it may fail without an answer. An
  // empty name: no call is being made.
  void Begin(std::string call, bool begins_pass = false) {
    calling = std::move(call);
    calls_start_forward = begins_pass;
    if (begun) begun(calling);
  }
  // Adds the step of the call that was begun last, and returns it.
  Step& Add(std::string call, std::string_view answer,
            StatusCode code = StatusCode::kOk);
};

// "Remove(0, 1, 2) -> ok"
std::string CallLineOf(const Step& step);

// How often a question was asked, and how often the useful answer came. A
// cache, or a pool, may always give another answer, although that makes an
// ability worthless.
struct Answered {
  std::int64_t asked = 0;
  std::int64_t came = 0;

  void Count(bool is_useful) {
    ++asked;
    came += is_useful ? 1 : 0;
  }
  void Add(const Answered& other) {
    asked += other.asked;
    came += other.came;
  }
};

struct AnswerCounts {
  Answered prefixes;  // Prompts of find_prefix, and those that found tokens.
  Answered resumes;   // Calls of can_resume, and those that were true.
  Answered opens;     // Prompts of a pool's open, and those that found tokens.

  void Add(const AnswerCounts& other);

  // All counts, for another process.
  using AllNumbers = std::array<std::int64_t, 6>;
  AllNumbers Numbers() const;
  static AnswerCounts Of(const AllNumbers& numbers);
};

// Returns a note for each useful answer that never came: "find_prefix found
// nothing in 12 prompts". A note is not a failure.
std::vector<std::string> NotesOn(const AnswerCounts& counts);

struct RunResult {
  bool ran = false;  // False: no cache can be made from the setup.
  // Calls that were answered by the ledger (except for misuse) and both caches,
  // and whose answers, cells, views and masks were compared.
  std::int64_t operations = 0;
  std::int64_t views = 0;     // Views that were compared.
  std::uint64_t digest = 0;   // The hash of all calls and answers.
  AnswerCounts answers = {};  // Below identity.
  std::optional<Failure> failure = {};
};

// Whether a run without a failure compared what the subject shows. At identity
// each answer is compared.
inline bool HasJudged(const RunResult& result, Level level) {
  return result.views > 0 || level == Level::kIdentity;
}

// What reports say of a run that compared nothing.
inline constexpr std::string_view kNothingJudged =
    "nothing was judged: no operation of the history showed rows to compare";

// Returns the error that no cache can be made from the setup, with the first
// refusal.
Status NoCache(const Setup& setup, const Subject& subject);

// Runs `history` and compares every answer.
RunResult RunHistory(const History& history, const Subject& subject,
                     RunOptions options = {});

// Returns `subject` with a shorter time limit if `failure`, which the subject
// is known to have, is a hang.
inline Subject WithShortTimeout(Subject subject, const Failure& failure) {
  subject.known_to_hang = subject.known_to_hang || IsHang(failure);
  return subject;
}

// Returns `history` with a client that is not legal and makes the calls of the
// legal client explicitly, including those that it adds on its own.
History ExpandImplicit(const History& history);

// Returns the reference twin as it is after `history`, before Close; null if
// its setup is refused.
std::unique_ptr<Cache> ReferenceAfter(const History& history);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMPARE_RUNNER_H_
