// Executes the explorer's steps from one state, and checks the cache under test
// against the reference and the ledger.

#ifndef KVTWIN_PROPS_SEARCH_EXPLORE_WORKER_H_
#define KVTWIN_PROPS_SEARCH_EXPLORE_WORKER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "kvtwin/cache.h"
#include "props/compare/failure.h"
#include "props/compare/runner.h"
#include "props/history/history.h"
#include "props/search/explore_state.h"
#include "props/search/explore_step.h"
#include "reference/dialects.h"

namespace kvtwin::props {

// Thrown by a worker whose third-party cache does not support the setup.
struct NotMade {};

// How a state is reached. A state with drafts cannot be restored: its base is,
// and then the steps of the path are made. The sequences of the path are those
// of the base; sequence s of the state is names[s] there.
struct ExploreEntry {
  StateKey base = 0;
  std::vector<ExploreStep> path = {};
  std::vector<int> names = {};
};

// Holds the ledger and two caches, and sets them to one state after another.
class ExploreWorker {
 public:
  // Requires: `codec` outlives the worker.
  ExploreWorker(const Setup& setup, const StateCodec& codec,
                const Subject& subject);

  void Enter(const ExploreEntry& entry);

  // Does all of `steps` in a state. Calls `on_step`, if set, before each.
  Expansion Expand(const ExploreEntry& entry,
                   const std::vector<ExploreStep>& steps,
                   const std::function<void(std::size_t)>& on_step = nullptr);

  // Executes the step in the entered state, checks it, and returns whether it
  // changed that state. Adds the number of checked operations to `checked`.
  // Does nothing if there are no such drafts. Throws a Failure if an answer
  // differs. The sequences are those of the base.
  bool Do(const ExploreStep& step, std::int64_t& checked);

  // Returns the state after Do.
  const CacheState& state() const { return expected_; }
  // Returns the state that was entered.
  const CacheState& entered() const { return state_; }
  const DraftCells& drafts() const { return drafts_; }
  // Returns its key, and the renaming that gives it.
  StateKey Key(const std::vector<int>** renaming) const {
    return codec_.Encode(expected_, drafts_, renaming);
  }

 private:
  void EnterBase(StateKey key);
  void RestoreCaches();
  // Returns the step with the positions of its drafts, or with the path of its
  // commit; nothing if there can be no such drafts.
  std::optional<ExploreStep> Resolved(const ExploreStep& step) const;
  std::optional<ExploreStep> ResolvedDrafts(ExploreStep step) const;
  std::optional<ExploreStep> ResolvedCommit(ExploreStep step) const;
  // Makes a resolved step of the path on a cache, without checks; `first` is
  // the first tag of its batch.
  void Replay(const ExploreStep& step, int first, Cache& cache);
  void FindDrafts();
  // Adds the failure of a step to `expansion`, unless an earlier step failed.
  void Note(const Failure& failure, std::int64_t step,
            Expansion& expansion) const;
  void Remove(const ExploreStep& step);
  void Reserve(const ExploreStep& step);
  void ReserveAgain();
  // Makes a cache of a wrapper the active one, and its layer the current one.
  void GoTo(int type);
  void DoBatch(const ExploreStep& step, std::int64_t& checked);
  void CheckBatchCells();
  // Returns rows for the batch, whose tags are negative: the first is -first.
  KvRows RowsOfBatch(const ExploreStep& step, int first) const;
  void PutRows(const ExploreStep& step);
  void SetCausal();
  void Ask(const ExploreStep& step);
  void CheckView();
  void CheckAll();
  void CheckTokens(const CacheState& part);
  bool TakeToken(std::span<const CellEntry> owners, std::size_t row,
                 const KvRows& rows);

  const StateCodec& codec_;
  const Abilities can_;
  const bool is_twin_;
  const int types_;  // 1 if the cache is not a wrapper.
  int type_ = 0;     // The active cache, and the current layer.
  reference::Ledger ledger_;
  reference::Ledger entered_;  // The ledger in state_.
  std::unique_ptr<Cache> reference_;
  std::unique_ptr<Cache> tested_;
  CacheState base_;                // Is restored before the path.
  std::vector<ExploreStep> path_;  // Resolved.
  CacheState state_;
  DraftCells entered_drafts_;
  DraftCells drafts_;     // After the last step.
  bool changed_ = false;  // By the last step: the caches hold due_.
  std::vector<int> except_;
  ExploreStep reserving_;
  int turn_ = 0;
  bool reserved_ = false;
  bool reserved_again_ = false;

  // Scratch.
  CacheState expected_;
  CacheState actual_;
  std::vector<bool> taken_;  // The ledger's tokens that a cell holds.
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_EXPLORE_WORKER_H_
