// One step of the explorer from one state, checked three ways.

#ifndef KVTWIN_PROPS_SEARCH_EXPLORE_WORKER_H_
#define KVTWIN_PROPS_SEARCH_EXPLORE_WORKER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvtwin/cache.h"
#include "props/base/differs.h"
#include "props/compare/runner.h"
#include "props/history/history.h"
#include "props/search/explore_state.h"
#include "props/search/explore_step.h"
#include "reference/dialects.h"

namespace kvtwin::props {

// Thrown by a worker of a third-party cache that says that it has no such one.
struct NotMade {};

// The ledger and two caches that are put into one state after another.
class ExploreWorker {
 public:
  // Requires: `codec` outlives this.
  ExploreWorker(const Setup& setup, const StateCodec& codec,
                const Subject& subject);

  void Enter(StateKey key);

  // Does all of `steps` in a state. `on_step`, if set, is called before each.
  Expansion Expand(StateKey key, const std::vector<ExploreStep>& steps,
                   const std::function<void(std::size_t)>& on_step = nullptr);

  // Does it in the state that was entered, checks it, and says whether it
  // changed that state. Adds what it checked to `checked`.
  bool Do(const ExploreStep& step, std::int64_t& checked);

  // After Do: the cells.
  const std::vector<CellEntry>& cells() const { return due_.cells; }

 private:
  void RestoreCaches();
  // What was excepted when a difference was thrown, the reserving pass, and
  // whether it came before the step and after it.
  Expansion::Failure FailureAt(std::int64_t step, const Differs& differs) const;
  void Remove(const ExploreStep& step);
  void Reserve(const ExploreStep& step);
  void GoOn();
  void DoBatch(const ExploreStep& step, std::int64_t& checked);
  void PutRows(const ExploreStep& step);
  void SetCausal();
  void Ask(const ExploreStep& step);
  void CheckView();
  void CheckAll();
  void CheckTokens();
  bool TakeToken(std::span<const CellEntry> owners, std::size_t row);

  const StateCodec& codec_;
  const Abilities can_;
  reference::Ledger ledger_;
  reference::Ledger entered_;  // What ledger_ is in state_.
  std::unique_ptr<Cache> reference_;
  std::unique_ptr<Cache> tested_;
  CacheState state_;
  bool changed_ = false;  // By the last step: the caches are in due_.
  std::vector<int> except_;
  ExploreStep reserving_;
  int turn_ = 0;
  bool reserved_ = false;
  bool went_on_ = false;

  // Scratch.
  CacheState due_;
  CacheState found_;
  std::vector<bool> taken_;  // The ledger's tokens that a cell holds.
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_EXPLORE_WORKER_H_
