// The K and V rows of one layer.
//
// K is [k_head_dim, kv_heads, cells], first dimension fastest. V is
// [v_head_dim, kv_heads, cells], or as VLayout says.

#ifndef KVTWIN_OPTIMIZED_STORAGE_H_
#define KVTWIN_OPTIMIZED_STORAGE_H_

#include <cstddef>
#include <span>

#include "core/guarded_cache.h"
#include "kvtwin/tensor.h"
#include "optimized/aligned_buffer.h"
#include "optimized/cell_table.h"
#include "optimized/mask.h"
#include "optimized/parallel.h"
#include "optimized/put_rows.h"
#include "optimized/row_shift.h"

namespace kvtwin::optimized {

// How the layers of a cache store their rows.
struct LayerFormat {
  DType k_dtype;
  DType v_dtype;
  VLayout v_layout;
  std::size_t cells;
};

class Layer {
 public:
  // The rows are zeroed.
  Layer(const RowDims& dims, const LayerFormat& format);

  const RowDims& dims() const { return dims_; }
  DType k_dtype() const { return k_dtype_; }
  std::size_t cells() const { return cells_; }
  std::size_t key_row_elements() const { return key_row_; }
  std::size_t key_row_bytes() const { return key_row_bytes_; }
  std::size_t value_row_bytes() const { return value_row_bytes_; }

  // Stores row i of the tensors in cells[i]. Requires: distinct cells.
  void Put(const TensorView& key, const TensorView& value,
           std::span<const int> cells);

  // Copies rows, or a share's part of them. Requires: no cell is in two moves.
  void Move(std::span<const CellMove> moves, Share share);

  // Shifts the K rows of the selected cells, or a share's part of them. The
  // share has its own scratch, see RowShift::Apply.
  void Shift(const Selection& cells, const RowShift& shift,
             std::span<float> scratch, Share share);

  // Load or store one K row as f32; `row` has k_head_dim x kv_heads elements.
  void LoadKey(std::size_t cell, std::span<float> row) const;
  void StoreKey(std::size_t cell, std::span<const float> row);

  TensorView KeyView(CellSpan cells) const;
  TensorView ValueView(CellSpan cells) const;

 private:
  // For V that is permuted or in tiles.
  StoredColumns Columns(bool stream);
  void PutInColumns(const TensorView& value, std::span<const int> cells,
                    Share share, bool stream);

  RowDims dims_;
  DType k_dtype_;
  DType v_dtype_;
  VLayout v_layout_;
  std::size_t cells_;
  std::size_t key_row_;  // Elements in a row.
  std::size_t value_row_;
  std::size_t key_row_bytes_;
  std::size_t value_row_bytes_;
  // The distance from one column of V to the next, and from one tile to the
  // next; tiles of permuted V are stretches of its columns.
  std::size_t column_bytes_;
  std::size_t tile_bytes_;
  AlignedBuffer key_;
  AlignedBuffer value_;
};

// A view of consecutive cells of rows in this layout; K is always plain. The
// columns of permuted rows are column_bytes apart.
TensorView RowsView(const std::byte* rows, DType dtype, VLayout layout,
                    int head_dim, int heads, std::size_t column_bytes,
                    CellSpan cells);

// Copies a tensor of any strides to dense memory, dtype unchanged.
void CopyDense(const TensorView& from, std::byte* to);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_STORAGE_H_
