// Drives the ledger, the reference twin and a subject through one history and
// compares all their answers, after every call.

#ifndef KVTWIN_PROPS_COMPARE_RUNNER_H_
#define KVTWIN_PROPS_COMPARE_RUNNER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/dialects/rules.h"
#include "kvtwin/cache.h"
#include "props/base/level.h"
#include "props/compare/failure.h"
#include "props/compare/probes.h"
#include "props/compare/step.h"
#include "props/history/abilities.h"
#include "props/history/history.h"

namespace kvtwin::props {

struct RunResult;
struct Story;

// A backend under test: a name for reports, and what makes a cache of it.
struct Subject {
  std::string name;
  // not_supported: it has no such kind, and the history is passed over.
  std::function<Result<std::unique_ptr<Cache>>(const CacheSpec&)> make;
  // Views point to memory that may be written to, for poisoning.
  bool can_be_poisoned = false;
  // Misuse before Init and after Close is tried. It takes as long as a short
  // history.
  bool tried_outside_of_life = true;
  // About how long a run of no operations takes, in nanoseconds: a search for
  // the shortest history counts runs by it.
  std::int64_t start_work = 2'500;

  // What follows is for backends that are not ours.
  //
  // Instead of `make`: also of the rows that the cache will have.
  std::function<Result<std::unique_ptr<Cache>>(const Setup&)> make_of = {};
  // Instead of both: runs it somewhere else. `hasty`: the history is known to
  // hang, and the run waits less long for that.
  std::function<RunResult(const History&, Story*, bool hasty)> run = {};
  bool hasty = false;
  // For how long a failure is shrunk; 0: until it cannot be any shorter.
  double shrink_seconds = 0;
  // What is compared; for identity, with the reference twin.
  Level level = Level::kIdentity;
  Rules rules = {};  // Other than ours: not for identity.
  // The mask has as many rows as the rules say; else there may be more.
  bool mask_rows_too = false;
  Abilities abilities = {};
  double tolerance = 0;  // Of an element of the attention's output.
  // "--backend ./libyours.so", or empty: "--twin NAME".
  std::string arguments = {};
  // Called before each operation of a history.
  std::function<void(std::size_t step)> on_step = {};

  bool is_twin() const { return !make_of && !run; }
  Result<std::unique_ptr<Cache>> Make(const Setup& setup) const {
    return make_of ? make_of(setup) : make(setup.spec);
  }
};

// The twin of that name.
Subject TwinSubject(std::string_view twin);

// What a run tells: a step for each call; those from step number `from` on are
// drawn, if there is a frame.
struct Story {
  std::vector<Step> steps;
  std::optional<Frame> frame;
  std::int64_t from = 1;
  std::function<void(const Step&)> told = {};  // Called after each, if set.
  std::string calling = {};  // The call that is not answered yet, or empty.
};

// "Remove(0, 1, 2) -> ok"
std::string StoryLine(const Step& step);

struct RunResult {
  bool ran = false;  // False: no cache can be made of the setup.
  // Calls that the ledger (but for misuse) and both caches answered, and whose
  // answers, cells, views and masks were compared.
  std::int64_t operations = 0;
  std::uint64_t digest = 0;  // Of all calls and answers.
  std::optional<Failure> failure = {};
};

// To `census`, if given, is added what was seen on the way.
RunResult RunHistory(const History& history, const Subject& subject,
                     Story* story = nullptr, Census* census = nullptr);

// Returns `subject`, of caches or pools, as it is run where it is known to fail
// like this.
template <class AnySubject>
AnySubject Hastily(AnySubject subject, const Failure& failure) {
  subject.hasty = subject.hasty || IsHang(failure);
  return subject;
}

// What a legal client does in `history`, unseen things too, as that of one that
// is not legal.
History InTheOpen(const History& history);

// The reference twin as it is after `history`, before Close; null if its setup
// is refused.
std::unique_ptr<Cache> ReferenceAfter(const History& history);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMPARE_RUNNER_H_
