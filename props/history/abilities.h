// The abilities of a backend. Histories leave out whatever it cannot do.

#ifndef KVTWIN_PROPS_HISTORY_ABILITIES_H_
#define KVTWIN_PROPS_HISTORY_ABILITIES_H_

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "kvtwin/kvtwin.h"
#include "props/history/history.h"

namespace kvtwin::props {

// Returns whether the bit of an enumerator is set.
template <class Enum>
bool HasBit(std::uint32_t bits, Enum value) {
  return (bits >> static_cast<unsigned>(value) & 1U) != 0;
}

// Returns `value` if its bit is set or no bit is, else one of the set bits,
// chosen by `value` modulo their number.
template <class Enum>
Enum Nearest(std::uint32_t bits, Enum value, unsigned count) {
  bits &= (1U << count) - 1;
  if (bits == 0 || HasBit(bits, value)) return value;
  int skip = static_cast<int>(value) % std::popcount(bits);
  for (; skip > 0; --skip) bits &= bits - 1;
  return static_cast<Enum>(std::countr_zero(bits));
}

// Limits a number; a limit of 0 is no limit.
inline void LimitTo(int limit, int& value) {
  if (limit > 0) value = std::min(value, limit);
}

// Descriptions of pools have no larger multiples.
inline constexpr int kPoolMultipleMost = 1024;

// The bits are those of include/kvtwin/kvtwin.h. The default is every ability
// of our twins.
struct Abilities {
  std::uint32_t kinds = ~0U;
  std::uint32_t can = ~std::uint32_t{KVTWIN_CAN_FIND_PREFIX};
  std::uint32_t dtypes = ~0U;
  std::uint32_t v_layouts = ~0U;
  std::uint32_t shifts = ~0U;
  std::uint32_t mask_dtypes = ~0U;
  std::uint32_t placements = ~0U;
  std::uint32_t cannot = 0;
  int max_sequences = 0;  // 0: any number, as in the next two.
  int max_layers = 0;
  int max_padding = 0;
  int max_mask_padding = 0;       // 0: the same as max_padding.
  std::int32_t max_position = 0;  // The largest position of a token; 0: any.
  // Of pools: blocks have a multiple of this number of tokens, and heads a
  // multiple of this number of elements.
  int block_multiple = 1;
  int head_dim_multiple = 1;
  bool can_resume = true;
  bool set_causal = true;
  bool shift = true;
  bool snapshots = true;

  bool Can(std::uint32_t bit) const { return (can & bit) != 0; }
  bool CanDraft() const { return Can(KVTWIN_CAN_DRAFT); }
  // Whether caches of this kind may have drafts: states of drafts need room
  // (R11).
  bool CanDraft(Kind kind) const {
    const bool states = kind == Kind::kRecurrent || kind == Kind::kHybrid;
    return CanDraft() && kind != Kind::kEncoder &&
           (!states || Can(KVTWIN_CAN_DRAFT_STATES));
  }
  // Whether a cache of `spec`, and each cache in it, may have drafts.
  bool CanDraft(const CacheSpec& spec) const;
  bool Cannot(std::uint32_t bit) const { return (cannot & bit) != 0; }
  std::int32_t LastPosition() const {
    return max_position > 0 ? max_position : KVTWIN_OPEN_END;
  }
  // The largest end of a range of positions.
  std::int32_t LastEnd() const {
    return max_position > 0 && max_position < KVTWIN_OPEN_END ? max_position + 1
                                                              : KVTWIN_OPEN_END;
  }
  // Whether every batch must continue where its sequence ends, within its
  // capacity.
  bool OnlyGoesOn() const { return !Can(KVTWIN_CAN_ANY_ORDER); }

  bool HasKind(Kind kind) const { return HasBit(kinds, kind); }

  // Changes `setup` to the nearest one that the backend supports.
  void Fit(Setup& setup) const;
  // Whether Fit would change nothing.
  bool Fits(const Setup& setup) const;
};

// Whether the cache, or a cache in it, is recurrent.
bool HasStates(const CacheSpec& spec);

// Returns a text for each operation of the history that a backend does not get,
// or not as it is written, because it does not declare what it needs: "pin 0:
// it does not declare KVTWIN_CAN_PIN". Requires: the setup fits `abilities`.
std::vector<std::string> NotRun(const History& history,
                                const Abilities& abilities);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_HISTORY_ABILITIES_H_
