// All that a cache holds, as a value: to clone it, save it, or inspect it.

#ifndef KVTWIN_STATE_H_
#define KVTWIN_STATE_H_

#include <cstdint>
#include <map>
#include <vector>

#include "kvtwin/tensor.h"

namespace kvtwin {

// One membership: `cell` holds the token at `position` of `sequence`.
struct CellEntry {
  int cell = 0;               // >= 0
  std::int32_t position = 0;  // >= 0
  int sequence = 0;           // >= 0
  bool operator==(const CellEntry&) const = default;
};

// The K and V rows of a layer.
struct KvRows {
  DenseTensor key = {};    // [k_head_dim, kv_heads, tokens]
  DenseTensor value = {};  // [v_head_dim, kv_heads, tokens]
  bool operator==(const KvRows&) const = default;
};

// Everything that outlives a pass. Rows of free cells are not kept: after
// Restore they are zeros.
struct CacheState {
  std::vector<CellEntry> cells = {};  // Sorted by cell, then by sequence.
  // By layer, if anything was ever put there: key = [k_head_dim, kv_heads, n]
  // and value = [v_head_dim, kv_heads, n] of the n different cells above, in
  // their order and in the dtype of the cache, whatever its V layout. For an
  // encoder, its slots as they are stored.
  std::map<int, KvRows> layers = {};
  // The next three are used by encoders only (S39, S40).
  bool cached = false;
  std::int32_t position = 0;       // The position of the slots' tensors.
  std::int32_t next_position = 0;  // The position of the next Put.
  // The states of a wrapper's caches. A wrapper uses no other field.
  std::vector<CacheState> caches = {};
  bool operator==(const CacheState&) const = default;
};

}  // namespace kvtwin

#endif  // KVTWIN_STATE_H_
