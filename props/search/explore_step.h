// The operations that the explorer tries in every state.

#ifndef KVTWIN_PROPS_SEARCH_EXPLORE_STEP_H_
#define KVTWIN_PROPS_SEARCH_EXPLORE_STEP_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "kvtwin/cache.h"
#include "kvtwin/state.h"
#include "props/history/abilities.h"
#include "props/history/history.h"
#include "props/search/explore.h"

namespace kvtwin::props {

// Tags of the batch's tokens; no other token has them.
inline constexpr std::array<float, 2> kBatchTags = {-1, -2};

struct ExploreStep {
  OpKind kind = OpKind::kPut;  // kPut, kDrop, kCopy, kAsk or kCommit.
  std::vector<std::int32_t> positions = {};
  std::vector<int> sequences = {};
  // As in Batch; empty if there are no drafts. The positions of drafts are 0
  // until the step is resolved (ExploreWorker).
  std::vector<int> parents = {};
  // kCommit: the path, by the index of each draft among its siblings; resolved,
  // by their numbers.
  std::vector<int> path = {};
  bool reserve = false;
  std::vector<int> except = {};  // Set for a failing step only.
  int seq = 0;
  int dst = 0;
  std::int32_t begin = 0;
  std::int32_t end = 0;

  Batch batch() const { return {positions, sequences, {}, parents}; }
};

// Returns every operation with every argument that the cache supports.
std::vector<ExploreStep> AllSteps(const ExploreSize& size,
                                  const Abilities& abilities = {});

std::string ToText(const ExploreStep& step);

// Returns the step with names[s] in place of each sequence s.
ExploreStep Renamed(ExploreStep step, const std::vector<int>& names);

// Returns the step as an operation of a history that has led to the state
// `before`. Sequence s is names[s] in the history.
Op ToOp(const ExploreStep& step, const CacheState& before,
        const std::vector<int>& names);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_EXPLORE_STEP_H_
