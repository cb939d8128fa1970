// The rules by which correct pools of blocks differ from kvtwin's (P1 to P18).

#ifndef KVTWIN_CORE_DIALECTS_POOL_RULES_H_
#define KVTWIN_CORE_DIALECTS_POOL_RULES_H_

#include <algorithm>
#include <optional>

namespace kvtwin {

// A pool declares which of these rules it follows, in the first line of its
// recording (docs/trace_format.md) or in its description
// (kvtwin/pool_backend.h). By default it follows none of them.
struct PoolRules {
  // A commit swaps the whole blocks of a sequence for others of the same tokens
  // under the same key, which may have other rows.
  bool deduplicates = false;
  // A prompt of whole blocks may be found up to its last token. This token is
  // then computed again, in the block where it was found.
  bool recomputes_last = false;
  // The number of positions before its own that a token sees; unset: all.
  // Tokens that no later token sees may be gone.
  std::optional<int> window = {};
  // In groups with states, a pass may write over the state that it reads.
  bool states_in_place = false;
  // All groups take their blocks from one stock: a block is in one group at a
  // time.
  bool one_stock = false;
  // A sequence holds no more blocks than its tokens and appended rows took
  // while it had the most of them.
  bool no_reserve = false;

  bool any() const {
    return deduplicates || recomputes_last || window || need_groups() ||
           no_reserve;
  }
  bool need_groups() const { return states_in_place || one_stock; }
  // The first position that the token after `len` tokens sees.
  int FirstSeen(int len) const {
    return window ? std::max(0, len - *window) : 0;
  }
  bool operator==(const PoolRules&) const = default;
};

}  // namespace kvtwin

#endif  // KVTWIN_CORE_DIALECTS_POOL_RULES_H_
