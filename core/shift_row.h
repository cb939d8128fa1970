// The definition of the shift functions of kvtwin/shift.h, for one K row.

#ifndef KVTWIN_CORE_SHIFT_ROW_H_
#define KVTWIN_CORE_SHIFT_ROW_H_

#include <cstdint>
#include <span>

#include "kvtwin/shift.h"

namespace kvtwin {

// The cosine and sine by which pair p turns.
struct Turn {
  float cosine;
  float sine;
};
Turn RopeTurn(const Rope& rope, int dims, int p, std::int32_t offset);

// The number of elements of a head that turn: rope.dims, or k_head_dim if that
// is less or rope.dims is 0; rounded down to an even number.
int RopeDims(const Rope& rope, int k_head_dim);

// Rewrites `key` = [k_head_dim, kv_heads] for a position that changed by
// `offset`. Offset 0 leaves it as it is. Only a custom function can fail.
Status ShiftRow(const Shift& shift, int layer, std::int32_t offset,
                int k_head_dim, int kv_heads, std::span<float> key);

}  // namespace kvtwin

#endif  // KVTWIN_CORE_SHIFT_ROW_H_
