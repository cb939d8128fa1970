// What a cache holds, apart from the cache: to clone it, to keep it, to look.

#ifndef KVTWIN_STATE_H_
#define KVTWIN_STATE_H_

#include <cstdint>
#include <map>
#include <vector>

#include "kvtwin/tensor.h"

namespace kvtwin {

// One membership: `cell` holds the token at `position` of `sequence`.
struct CellEntry {
  int cell = 0;
  std::int32_t position = 0;
  int sequence = 0;
  bool operator==(const CellEntry&) const = default;
};

struct KvRows {
  DenseTensor key;
  DenseTensor value;
  bool operator==(const KvRows&) const = default;
};

// All that outlives a pass. Rows of free cells are not kept: whoever gets such
// a cell and puts nothing in it finds zeros.
struct CacheState {
  std::vector<CellEntry> cells;  // By cell, then by sequence.
  // By layer, if anything was ever put there: key = [k_head_dim, kv_heads, n]
  // and value = [v_head_dim, kv_heads, n] of the n cells above, in their order
  // and the dtype of the cache, however the cache lays out its V. An encoder's
  // slots, as they are stored.
  std::map<int, KvRows> layers;
  // An encoder's.
  bool cached = false;
  std::int32_t position = 0;       // Of what the slots hold.
  std::int32_t next_position = 0;  // Of the next Put.
  // A wrapper's; it has nothing else.
  std::vector<CacheState> caches;
  bool operator==(const CacheState&) const = default;
};

}  // namespace kvtwin

#endif  // KVTWIN_STATE_H_
