// The search for the simplest history that still fails, of caches and of pools.
// The differences between the two are in a domain, a class with
//
//   History           the history of a cache or of a pool
//   kMostWork         nanoseconds, see Work
//   kMostWorkLegal    the same, if the client of the history is legal
//   IsLegal(history)  whether it is
//   Allows(history)   whether the system under test supports the history
//   IsSame(failure)   whether a failure may be the one to shrink
//   CostOf(history)   how far it is from the plainest history; CostAtLeast: a
//                     lower bound, which takes less time
//   Work(history, n)  the approximate duration of a run of n operations. After
//                     kMostWork, neither pairs of steps nor minimal cases are
//                     tried
//   kRestartWork      is added if the run ends the process of a backend
//   Prepare(shrinker) tries to make a long history easier to shrink
//   Shortcuts(history), Halved(history)  histories to try: other ways to the
//                     same state, smaller sizes
//   Moves(history, all)  steps that may make a history plainer; without `all`,
//                     those that leave operations out
//   TryMinimalCases(shrinker)  tries short histories, the plainest first

#ifndef KVTWIN_PROPS_SHRINK_SHRINKER_H_
#define KVTWIN_PROPS_SHRINK_SHRINKER_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "props/compare/failure.h"
#include "props/shrink/cost.h"

namespace kvtwin::props {

template <class Domain>
class Shrinker {
 public:
  using History = typename Domain::History;
  using Move = std::function<void(History&)>;
  // Runs a history and returns its failure, if it fails.
  using Run = std::function<std::optional<Failure>(const History&)>;

  // Requires: `history` fails with `failure`; `domain` and `run` outlive the
  // shrinker.
  Shrinker(Domain& domain, const History& history, const Failure& failure,
           const Run& run)
      : domain_(domain), best_(history), run_(run) {
    Cut(failure.step);
  }

  History Shrink() {
    domain_.Prepare(*this);
    LeaveOut();
    cost_ = domain_.CostOf(best_);
    do {
      AnyPlainer(domain_.Shortcuts(best_));
      do {
        while (AnyPlainer(domain_.Halved(best_))) {
        }
      } while (Step());
    } while (AnyPlainer(domain_.Shortcuts(best_)));
    Cost minimal;
    std::string start;
    do {
      start = ToText(best_);
      const Cost before = cost_;
      domain_.TryMinimalCases(*this);
      cost_ = minimal = domain_.CostOf(best_);
      // A minimal case may be less plain than a history that was tried.
      if (minimal > before) tried_.clear();
      while (Step() || PairStep()) {
      }
      // If the kinds of operations have changed, so have the minimal cases.
    } while (cost_ != minimal && best_.ops.size() < 3 &&
             ToText(best_) != start);
    return best_;
  }

  // The following functions are for the domain.

  const History& best() const { return best_; }
  // If the candidate fails in the same way, makes it the best history.
  bool Try(const History& candidate) {
    if (!domain_.Allows(candidate)) return false;
    const std::optional<Failure> failure = run_(candidate);
    CountWork(candidate, failure);
    if (!failure || !domain_.IsSame(*failure)) return false;
    best_ = candidate;
    Cut(failure->step);
    return true;
  }
  // Tries a candidate that is plainer than the best history and was not tried
  // yet.
  bool TryPlainer(const History& candidate) {
    if (domain_.CostAtLeast(candidate) > cost_) return false;
    const Cost cost = domain_.CostOf(candidate);
    if (cost > cost_) return false;
    std::string text = ToText(candidate);
    if (cost == cost_ && text >= ToText(best_)) return false;
    if (!tried_.insert(std::move(text)).second) return false;
    if (!Try(candidate)) return false;
    cost_ = domain_.CostOf(best_);
    return true;
  }
  bool AnyPlainer(const std::vector<History>& candidates) {
    return std::ranges::any_of(candidates, [&](const History& candidate) {
      return TryPlainer(candidate);
    });
  }
  void UpdateCost() { cost_ = domain_.CostOf(best_); }
  bool IsOutOfTime() const {
    return work_ > (domain_.IsLegal(best_) ? Domain::kMostWorkLegal
                                           : Domain::kMostWork);
  }

 private:
  // Drops the operations after the failing one, which are not needed.
  void Cut(std::size_t step) {
    if (step + 1 < best_.ops.size()) best_.ops.resize(step + 1);
    fails_in_last_ = step + 1 == best_.ops.size();
  }

  // Adds the approximate duration of a run. It is computed, because a measured
  // time would depend on the machine.
  void CountWork(const History& history,
                 const std::optional<Failure>& failure) {
    if (IsOutOfTime()) return;
    work_ +=
        domain_.Work(history, failure ? failure->step : history.ops.size());
    if (failure && failure->party() == Party::kBackend) {
      work_ += Domain::kRestartWork;
    }
  }

  // Leaves out runs of operations: halves, quarters, ..., single ones. If the
  // last operation fails, it stays: without it, no other operation fails.
  void LeaveOut() {
    for (std::size_t run = best_.ops.size(); run > 0; run /= 2) {
      for (std::size_t at = best_.ops.size(); at > 0;) {
        at = std::min(at, best_.ops.size());
        const std::size_t begin = at > run ? at - run : 0;
        if (at < best_.ops.size() || !fails_in_last_) {
          History candidate = best_;
          const auto first = candidate.ops.begin();
          candidate.ops.erase(first + static_cast<std::ptrdiff_t>(begin),
                              first + static_cast<std::ptrdiff_t>(at));
          Try(candidate);
        }
        at = begin;
      }
    }
  }

  // Tries each step alone once. Returns whether a step made the history
  // plainer.
  bool Step() {
    // Most of many operations will go, so their details are not tried yet.
    constexpr std::size_t kMany = 12;
    const std::size_t before = best_.ops.size();
    if (before > kMany) Step(domain_.Moves(best_, /*all=*/false));
    return best_.ops.size() < before ||
           Step(domain_.Moves(best_, /*all=*/true));
  }
  bool Step(const std::vector<Move>& moves) {
    bool plainer = false;
    for (const Move& move : moves) {
      History candidate = best_;
      move(candidate);
      plainer = TryPlainer(candidate) || plainer;
    }
    return plainer;
  }

  // Tries pairs of steps, for when no single step makes the history plainer.
  bool PairStep() {
    // The number of pairs grows with the square of the number of operations.
    constexpr std::size_t kMostTries = 12000;
    const std::size_t enough =
        tried_.size() + kMostTries / std::max<std::size_t>(best_.ops.size(), 1);
    std::vector<Move> moves = domain_.Moves(best_, /*all=*/true);
    const std::string text = ToText(best_);
    std::erase_if(moves, [&](const Move& move) {  // Without effect.
      History changed = best_;
      move(changed);
      return ToText(changed) == text;
    });
    for (std::size_t i = 0; i < moves.size(); ++i) {
      History changed = best_;
      moves[i](changed);
      History candidate;
      for (std::size_t j = i + 1; j < moves.size(); ++j) {
        candidate = changed;
        moves[j](candidate);
        if (TryPlainer(candidate)) return true;
        if (tried_.size() == enough || IsOutOfTime()) return false;
      }
    }
    return false;
  }

  Domain& domain_;
  History best_;
  std::int64_t work_ = 0;
  bool fails_in_last_ = false;  // The failure is not in the set-up or the end.
  Cost cost_;                   // The cost of `best_`.
  const Run& run_;
  std::set<std::string> tried_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SHRINK_SHRINKER_H_
