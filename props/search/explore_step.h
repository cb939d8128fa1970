// What the explorer tries in every state.

#ifndef KVTWIN_PROPS_SEARCH_EXPLORE_STEP_H_
#define KVTWIN_PROPS_SEARCH_EXPLORE_STEP_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "kvtwin/state.h"
#include "props/history/abilities.h"
#include "props/history/history.h"
#include "props/search/explore.h"

namespace kvtwin::props {

// The tokens of a batch have these tags, and no other token has them.
inline constexpr std::array<float, 2> kBatchTags = {-1, -2};

struct ExploreStep {
  OpKind kind = OpKind::kPut;  // kPut, kDrop, kCopy or kAsk.
  std::vector<std::int32_t> positions = {};
  std::vector<int> sequences = {};
  bool reserve = false;
  std::vector<int> except = {};  // Only of one that went wrong.
  int seq = 0;
  int dst = 0;
  std::int32_t begin = 0;
  std::int32_t end = 0;
};

// Every operation with every argument that the cache can be asked for.
std::vector<ExploreStep> AllSteps(const ExploreSize& size,
                                  const Abilities& abilities = {});

std::string ToText(const ExploreStep& step);

// The step as an operation of a history that has come to `before`. Sequence s
// is called names[s] there.
Op ToOp(const ExploreStep& step, const CacheState& before,
        const std::vector<int>& names);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_EXPLORE_STEP_H_
