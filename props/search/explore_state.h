// The states of a small cache, and the keys (numbers) that name them.

#ifndef KVTWIN_PROPS_SEARCH_EXPLORE_STATE_H_
#define KVTWIN_PROPS_SEARCH_EXPLORE_STATE_H_

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvtwin/state.h"
#include "props/search/explore.h"

namespace kvtwin::props {

// The row of a token. A K row is its tag, then kPositionBase + position, which
// tag_add shifts, in all other elements. A V row is the tag. The numbers are so
// small that the narrowest dtype keeps them distinct.
inline constexpr int kPositionBase = 8;

struct ExploreRow {
  float tag;
  int position;
};

// Returns K and V as f32, with the narrowest head_dim that `dtype` allows.
KvRows RowsOf(std::span<const ExploreRow> rows, DType dtype);

// Names a state. A digit for each cell, cell 0 lowest: 0 is a free cell, and
// 1 + position * (2^sequences - 1) + owners - 1 a held cell, where owners is a
// set of bits. Larger digits are drafts, by position and sequence: of two
// drafts at most, these tell which follows which. A state's key is the smallest
// over all renamings of sequences.
using StateKey = std::uint64_t;

// The cells of drafts, for each cache of a wrapper; empty if there are none.
using DraftCells = std::vector<std::vector<CellEntry>>;

class StateCodec {
 public:
  // `caches`: the number of caches of a wrapper, each of size.cells cells; 0 if
  // the cache is not a wrapper. Cache i holds rows of layer i.
  explicit StateCodec(const ExploreSize& size, int caches = 0);
  const ExploreSize& size() const { return size_; }

  // Returns how many keys are possible; may exceed the range of StateKey.
  double keys() const;

  // Without drafts.
  CacheState Decode(StateKey key) const;
  // Returns the key of the state with these cells. If `renaming` is not null,
  // sets it to the renaming of sequences that gives the key.
  StateKey Encode(const CacheState& state, const DraftCells& drafts = {},
                  const std::vector<int>** renaming = nullptr) const;
  // Returns the cells of a state as text (CellsText), and its drafts.
  std::string TextOf(StateKey key) const;

 private:
  StateKey PositionCount() const {
    return static_cast<StateKey>(size_.positions);
  }
  StateKey TokenDigits() const { return 1 + PositionCount() * owner_sets_; }
  StateKey SequenceCount() const {
    return static_cast<StateKey>(size_.sequences);
  }
  StateKey Digits() const {
    return TokenDigits() +
           (size_.drafts ? PositionCount() * SequenceCount() : 0);
  }
  StateKey DraftDigit(StateKey position, StateKey sequence) const {
    return TokenDigits() + position * SequenceCount() + sequence;
  }
  // The number of cells, in all caches.
  int CellCount() const { return size_.cells * std::max(caches_, 1); }
  void DecodePart(int layer, StateKey& key, CacheState& part) const;
  StateKey Digit(StateKey position, StateKey owners) const {
    return 1 + position * owner_sets_ + owners - 1;
  }
  // Returns, for every digit, its value after renaming sequence s to
  // renaming[s].
  std::vector<StateKey> RenamedDigits(const std::vector<int>& renaming) const;

  ExploreSize size_;
  int caches_;
  StateKey owner_sets_;
  std::vector<std::vector<int>> renamings_;
  std::vector<std::vector<StateKey>> renamed_digits_;  // By renaming, by digit.
};

// Returns the cells as text, as cell, position, sequences: " 0:1@s0+s1 2:0@s1";
// or " none".
std::string CellsText(const std::vector<CellEntry>& cells);
// The same, for each cache of a wrapper.
std::string CellsText(const CacheState& state);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_EXPLORE_STATE_H_
