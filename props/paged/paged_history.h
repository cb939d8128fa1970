// Random histories of paged pools, and their form as a line of text, which
// `kvtwin run` reads.

#ifndef KVTWIN_PROPS_PAGED_PAGED_HISTORY_H_
#define KVTWIN_PROPS_PAGED_PAGED_HISTORY_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "props/history/abilities.h"
#include "props/history/generate.h"
#include "props/paged/paged_driver.h"

namespace kvtwin::props {

struct PagedHistory {
  PagedSpec spec;
  std::vector<PagedOp> ops;
  // For pools that attend. Others ignore these.
  int soft_cap = 0;    // Of the scores; 0: none.
  bool sinks = false;  // Each query head has one (SinksOf).
};

// Returns an empty list: pools are of one kind.
inline std::vector<std::string> KindNames(const PagedHistory&) { return {}; }

// Whether the first operation opens a sequence, whichever operation it is: a
// pool begins without sequences, and every operation needs one.
inline bool FirstOperationOpens(const PagedHistory&) { return true; }

// Returns the history as a line:
// "kvp1 block=4 blocks=8 ... | append 0 3 1 | commit 0 1 0".
std::string ToText(const PagedHistory& history);
// Errors: `text` is not such a line; the pool would be too large.
Result<PagedHistory> ParsePagedHistory(std::string_view text);

// Draws a history from the numbers that `pick` returns.
PagedHistory DrawPagedHistory(const Pick& pick);
// Draws a history from a seed and a number: the same one on every machine.
inline PagedHistory MakePagedHistory(std::uint64_t seed, std::uint64_t number) {
  return DrawPagedHistory(SeededPick(seed, number));
}

// The same for pools with groups, windows and states: their histories have
// media, and passes that are planned but not computed.
PagedHistory DrawGroupsHistory(const Pick& pick);
inline PagedHistory MakeGroupsHistory(std::uint64_t seed,
                                      std::uint64_t number) {
  return DrawGroupsHistory(SeededPick(seed, number));
}

// Gives one history in four a soft cap, and one in four sinks, if the pool has
// these abilities (KVTWIN_CAN_SOFT_CAP, KVTWIN_CAN_SINKS).
void DrawWeighing(const Pick& pick, const Abilities& can,
                  PagedHistory& history);

// How a pool stores its rows.
struct PoolStorage {
  DType dtype = DType::kF32;
  std::optional<DType> v_dtype;
  PagedLayout layout = PagedLayout::kTokenMajor;

  bool operator==(const PoolStorage&) const = default;
};
// Returns the storage of the first group if there are groups.
inline PoolStorage StorageOf(const PagedSpec& spec) {
  const PagedSpec& first = spec.groups.empty() ? spec : spec.groups.front();
  return {first.dtype, first.v_dtype, first.layout};
}
// Changes the storage, and the dimensions of the rows where the storage
// requires it.
void UseStorage(const PoolStorage& storage, PagedSpec& spec);

// Returns the nearest storage with dtypes that a pool with these abilities has.
PoolStorage FitStorage(const Abilities& able, PoolStorage storage);
// Changes the pool of a history to one that a pool with these abilities can be:
// with its dtypes, and its multiples for blocks and heads.
void FitPool(const Abilities& able, PagedHistory& history);
// Whether a pool with these abilities can be such a pool.
bool FitsPool(const Abilities& able, const PagedSpec& spec);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGED_PAGED_HISTORY_H_
