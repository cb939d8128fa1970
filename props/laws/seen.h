// The rows that a caller sees of a cache, in a form that does not name cells.

#ifndef KVTWIN_PROPS_LAWS_SEEN_H_
#define KVTWIN_PROPS_LAWS_SEEN_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvtwin/cache.h"

namespace kvtwin::props {

// A token as a batch row sees it. Position -1: its cell is free by now.
struct SeenToken {
  std::int32_t position = 0;
  std::vector<std::byte> value = {};  // [v_head_dim, kv_heads], dense.
  std::vector<std::byte> key = {};    // [k_head_dim, kv_heads], dense.
  // NOLINTNEXTLINE(modernize-use-nullptr): there is no pointer here.
  auto operator<=>(const SeenToken&) const = default;
};

struct Query {
  std::int32_t position = 0;
  int seq = 0;
};

// The tokens that a query sees in a layer, by position; for an encoder, its
// slot.
struct SeenRow {
  int layer = 0;
  Query query;
  std::vector<SeenToken> tokens;
};

// Everything that a caller can see, byte for byte. `cells` and `batch_cells`
// have an entry for each cache of a wrapper.
struct Picture {
  std::vector<std::vector<CellEntry>> cells = {};
  std::vector<std::vector<int>> batch_cells = {};
  // By layer; empty without a pass.
  std::vector<std::vector<std::byte>> views = {};
  bool shown = true;  // Else no rule says what would be seen.
};

// Returns the first difference between the rows, if any. K elements may differ
// by `slack` times the row's largest, at least `size`; 0 compares bits.
std::optional<std::string> CompareRows(const std::vector<SeenRow>& left,
                                       const std::vector<SeenRow>& right,
                                       DType dtype, double slack,
                                       double size = 1);
// Leaves the queries that both could ask: caches of other sizes have room for
// other tokens.
void KeepCommon(std::vector<SeenRow>& left, std::vector<SeenRow>& right);
std::optional<std::string> ComparePictures(const Picture& left,
                                           const Picture& right);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_LAWS_SEEN_H_
