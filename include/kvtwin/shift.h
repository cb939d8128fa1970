// Shift functions: how the K row of a token changes when its position does.
//
// K rows are stored with their position mixed in (RoPE), so that Remove, which
// moves later tokens down, has to rewrite them. V rows never change.

#ifndef KVTWIN_SHIFT_H_
#define KVTWIN_SHIFT_H_

#include <cstdint>
#include <functional>
#include <span>

#include "kvtwin/status.h"

namespace kvtwin {

enum class ShiftKind {
  kNone,      // The model cannot shift: Remove from the middle is refused.
  kIdentity,  // K holds no position.
  kAdd,       // The offset is added to every element.
  kTagAdd,    // The offset is added to all of a head but its first element.
  kRope,      // Rotary embedding, see Rope.
  kCustom,    // Shift::fn.
};

// Rotary position embedding. Pair p of 0 .. dims/2 - 1 turns by
//   angle = offset * scale * base^(-2p / dims),
// computed in double; its cosine c and sine s are rounded to f32, and the pair
// (x, y) becomes (x*c - y*s, x*s + y*c) in f32, each operation rounded. A NaN
// keeps its bits; what becomes one is the quiet NaN 0x7FC00000.
struct Rope {
  // Which elements of a head make pair p: (2p, 2p + 1), or (p, p + dims/2),
  // known as the NeoX order.
  enum class Pairing { kAdjacent, kHalves };
  Pairing pairing = Pairing::kAdjacent;
  double base = 10000.0;  // > 0, finite.
  double scale = 1.0;     // Finite.
  // Even; 0: the whole head. Elements beyond stay. If a head has fewer, all of
  // it turns; of an odd number of elements the last one stays.
  int dims = 0;
};

// A shift function of your own: rewrites one token's K row, `key` =
// [k_head_dim, kv_heads] as f32, for a position that changed by `offset`.
// Anything but ok refuses the Remove, which then changes nothing; so does what
// it throws, as failed_precondition. It may be called for rows that are then
// thrown away, and from several threads at once. The cache refuses its calls.
using ShiftFn =
    std::function<Status(int layer, std::int32_t offset, int k_head_dim,
                         int kv_heads, std::span<float> key)>;

struct Shift {
  ShiftKind kind = ShiftKind::kNone;
  Rope rope;   // For kRope.
  ShiftFn fn;  // For kCustom.
};

}  // namespace kvtwin

#endif  // KVTWIN_SHIFT_H_
