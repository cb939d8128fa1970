// K and V rows that carry the identity of their token, so that a row in the
// wrong place shows at once; and poison for cells that no one may read.

#ifndef KVTWIN_PROPS_HISTORY_ROWS_H_
#define KVTWIN_PROPS_HISTORY_ROWS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kvtwin/cache.h"

namespace kvtwin::props {

enum class RowRole { kKey, kValue };

// The rows of the tokens `first`, `first` + 1, ... in a layer.
struct RowSource {
  RowRole role;
  int layer;
  std::int64_t first;
  bool plain = false;  // Numbers from -1 to 1, to compute attention with.
  bool nan = true;     // Some elements are NaN.
  // Some are zero, subnormal or very large; with `nan`, also infinite.
  bool extremes = false;
  // Random numbers from -1 to 1 that every dtype of floats holds exactly, to
  // recognize each token in the output of attention.
  bool distinct = false;
  // If not empty, the rows are those of these tokens.
  std::span<const std::int64_t> tokens = {};
};

// A buffer for the rows of a batch, reused by each Fill.
class RowBuffer {
 public:
  // Returns rows of [head_dim, kv_heads, tokens]. With `gaps`, there are
  // gaps full of NaN between elements and between heads.
  TensorView Fill(const Shape& shape, DType dtype, const RowSource& source,
                  bool gaps);

 private:
  std::vector<std::byte> bytes_;
};

// Overwrites the K and V rows of every cell that `used` does not list. The view
// must be of the whole cache.
void PoisonFreeCells(const KvView& view, const std::vector<CellEntry>& used,
                     VLayout v_layout);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_HISTORY_ROWS_H_
