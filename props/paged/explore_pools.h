// Visits every state that a small pool with groups can reach, and makes every
// operation in each of them.

#ifndef KVTWIN_PROPS_PAGED_EXPLORE_POOLS_H_
#define KVTWIN_PROPS_PAGED_EXPLORE_POOLS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "props/paged/paged_runner.h"

namespace kvtwin::props {

struct PoolSpace {
  std::string name;
  PagedSpec spec;
};
// Pools of two groups: all tokens and a window, all tokens and states, a window
// and states.
std::vector<PoolSpace> PoolSpaces();

struct PoolSpaceResult {
  std::int64_t states = 0;
  std::int64_t transitions = 0;
  int depth = 0;             // The length of the longest path to a state.
  bool fixed_point = false;  // All states were visited.
  std::optional<Failure> failure;
  PagedHistory history;  // The history of the failure.
};

// Compares the pools that `make` makes with the reference twin and the ledger
// after each operation. Ends at the first failure, or when `stop`, which gets
// the numbers so far, returns true.
PoolSpaceResult ExploreSpace(
    const PoolSpace& space, const PagedMaker& make,
    const std::function<bool(const PoolSpaceResult&)>& stop);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGED_EXPLORE_POOLS_H_
