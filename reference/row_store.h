// The K or the V rows of all cells in one layer.

#ifndef KVTWIN_REFERENCE_ROW_STORE_H_
#define KVTWIN_REFERENCE_ROW_STORE_H_

#include <cstddef>
#include <vector>

#include "core/dense_tensor.h"
#include "kvtwin/tensor.h"

namespace kvtwin::reference {

class RowStore {
 public:
  // Makes rows of zeros, with the first two dimensions of `row`. For K, the
  // layout is plain.
  RowStore(DType dtype, const Shape& row, int cells, VLayout layout);

  // Stores `row`, [head_dim, kv_heads]; rounds it if it has another dtype.
  void Store(int cell, const TensorView& row);
  DenseTensor Load(int cell) const;
  void Copy(int from_cell, int to_cell);
  // Returns the rows of `count` cells: [head_dim, kv_heads, count], or as the
  // layout says. Requires: if the layout is tiled, the cells are whole tiles.
  TensorView View(int first_cell, int count) const;

 private:
  TensorView All() const;
  TensorView Row(int cell) const { return RowOf(All(), layout_, cell); }

  DType dtype_;
  Shape shape_;  // The shape of the rows of all cells.
  VLayout layout_;
  std::vector<std::byte> rows_;
};

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_ROW_STORE_H_
