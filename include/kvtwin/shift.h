// Shift functions: how the K row of a token changes when its position does.
//
// K rows are stored with their position mixed in (RoPE). Remove moves later
// tokens down, and so has to rewrite their K rows. V rows never change.

#ifndef KVTWIN_SHIFT_H_
#define KVTWIN_SHIFT_H_

#include <cstdint>
#include <functional>
#include <span>

#include "kvtwin/status.h"

namespace kvtwin {

// How a K row changes when the position of its token does.
enum class ShiftKind {
  kNone,      // The model cannot shift: Remove from the middle is refused.
  kIdentity,  // K holds no position.
  kAdd,       // The offset is added to every element.
  kTagAdd,    // The same, except for the first element of each head.
  kRope,      // Rotary embedding, see Rope.
  kCustom,    // Shift::fn does it.
};

// Rotary position embedding. Pair p of 0 .. dims/2 - 1 turns by
//   angle = offset * scale * base^(-2p / dims),
// where `dims` is the number of elements of the head that turn (below),
// computed in double; its cosine c and sine s are rounded to f32, and the pair
// (x, y) becomes (x*c - y*s, x*s + y*c) in f32, each operation rounded. A NaN
// keeps its bits; a result that becomes NaN is the quiet NaN 0x7FC00000.
struct Rope {
  // Which elements of a head make pair p: (2p, 2p + 1), or (p, p + dims/2),
  // known as the NeoX order.
  enum class Pairing { kAdjacent, kHalves };
  Pairing pairing = Pairing::kAdjacent;
  double base = 10000.0;  // > 0, finite.
  double scale = 1.0;     // Finite.
  // Elements of a head that turn; even; 0: the whole head. Later elements stay
  // unchanged. If a head has fewer, all of it turns, except the last element of
  // an odd number.
  int dims = 0;
};

// The caller's shift function: rewrites one token's K row, `key` = [k_head_dim,
// kv_heads] as f32, for a position that changed by `offset`. If it returns an
// error, Remove returns this error and changes nothing; if it throws, Remove
// returns failed_precondition and changes nothing. It may be called for rows
// that are then discarded, and from several threads at once. Calls that it
// makes to the cache are refused (S36).
using ShiftFn =
    std::function<Status(int layer, std::int32_t offset, int k_head_dim,
                         int kv_heads, std::span<float> key)>;

// The shift function of a cache.
struct Shift {
  ShiftKind kind = ShiftKind::kNone;  // Which function.
  Rope rope = {};                     // For kRope.
  ShiftFn fn = {};                    // For kCustom.
};

}  // namespace kvtwin

#endif  // KVTWIN_SHIFT_H_
