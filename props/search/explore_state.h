// The states of a small cache, and the numbers that name them.

#ifndef KVTWIN_PROPS_SEARCH_EXPLORE_STATE_H_
#define KVTWIN_PROPS_SEARCH_EXPLORE_STATE_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvtwin/state.h"
#include "props/search/explore.h"

namespace kvtwin::props {

// The row of a token: its tag, and what tag_add shifts, which is its position
// more than kPositionBase, in all other elements. A value row is the tag. So
// small that the narrowest dtype tells them apart.
inline constexpr int kPositionBase = 8;

struct ExploreRow {
  float tag;
  int position;
};

// K and V of f32. Heads are as narrow as `dtype` has them.
KvRows RowsOf(std::span<const ExploreRow> rows, DType dtype);

// A state: the cells as digits, cell 0 lowest. 0 is a free cell, and
// 1 + position * (2^sequences - 1) + owners - 1 a held one, owners being a set
// of bits. Of all that renaming its sequences gives, the least is its name.
using StateKey = std::uint64_t;

class StateCodec {
 public:
  explicit StateCodec(const ExploreSize& size);
  const ExploreSize& size() const { return size_; }

  // How many keys there can be; more than a StateKey holds, perhaps.
  double keys() const;

  CacheState Decode(StateKey key) const;
  // The name of what `cells` hold. `renaming`, if given, is what it takes.
  StateKey Encode(const std::vector<CellEntry>& cells,
                  const std::vector<int>** renaming = nullptr) const;

 private:
  StateKey PositionCount() const {
    return static_cast<StateKey>(size_.positions);
  }
  StateKey Digits() const { return 1 + PositionCount() * owner_sets_; }
  StateKey Digit(StateKey position, StateKey owners) const {
    return 1 + position * owner_sets_ + owners - 1;
  }
  // Every digit after renaming sequence s to renaming[s].
  std::vector<StateKey> RenamedDigits(const std::vector<int>& renaming) const;

  ExploreSize size_;
  StateKey owner_sets_;
  std::vector<std::vector<int>> renamings_;
  std::vector<std::vector<StateKey>> renamed_digits_;  // By renaming, by digit.
};

// " 0:1@s0+s1 2:0@s1": cell, position, sequences; or " none".
std::string CellsText(const std::vector<CellEntry>& cells);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_EXPLORE_STATE_H_
