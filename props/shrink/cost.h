// How plain a history is.

#ifndef KVTWIN_PROPS_SHRINK_COST_H_
#define KVTWIN_PROPS_SHRINK_COST_H_

#include <compare>
#include <cstddef>
#include <cstdint>

#include "props/history/history.h"

namespace kvtwin::props {

// How far a history is from the plainest one: first by operations, then by
// what is special about it, then by the sizes of its numbers.
struct Cost {
  std::size_t operations = 0;
  std::int64_t special = 0;
  std::int64_t numbers = 0;
  // NOLINTNEXTLINE(modernize-use-nullptr): there is no pointer here.
  auto operator<=>(const Cost&) const = default;
};

Cost CostOf(const History& history);
// Leaves out the sizes of Init, whose cost takes longer to compute.
Cost CostWithoutSizes(const History& history);
// Returns what an operation adds to the cost of its history.
Cost CostOf(const Op& op);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SHRINK_COST_H_
