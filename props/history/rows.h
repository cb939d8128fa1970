// K and V rows that carry the identity of their token, so that a row in the
// wrong place shows at once; and poison for places that nobody may look at.

#ifndef KVTWIN_PROPS_HISTORY_ROWS_H_
#define KVTWIN_PROPS_HISTORY_ROWS_H_

#include <cstdint>
#include <vector>

#include "kvtwin/cache.h"

namespace kvtwin::props {

enum class RowRole { kKey, kValue };

// Which rows: those of the tokens `first`, `first` + 1, ... in a layer.
struct RowSource {
  RowRole role;
  int layer;
  std::int64_t first;
  bool plain = false;  // From -1 to 1: attention is to be computed.
  bool nan = true;     // Now and then.
};

// Memory for the rows of a batch, used again and again.
class RowBuffer {
 public:
  // [head_dim, kv_heads, tokens] rows. With `strided`, elements and heads
  // have gaps full of NaN between them.
  TensorView Fill(const Shape& shape, DType dtype, const RowSource& source,
                  bool strided);

 private:
  std::vector<std::byte> bytes_;
};

// Overwrites the K and V rows of every cell of a whole-cache view that `used`
// does not list.
void PoisonFreeCells(const KvView& view, const std::vector<CellEntry>& used,
                     VLayout v_layout);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_HISTORY_ROWS_H_
