#include "reference/row_store.h"

#include <cstdint>
#include <new>

#include "core/assert.h"
#include "core/elements.h"
#include "core/index.h"

namespace kvtwin::reference {

RowStore::RowStore(DType dtype, const Shape& row, int cells, VLayout layout)
    : dtype_(dtype), shape_{row[0], row[1], cells, 1}, layout_(layout) {
  if (layout == VLayout::kPermuted) shape_ = {cells, row[0], row[1], 1};
  if (layout == VLayout::kTiled) {
    shape_ = {kTileCells, row[0], row[1], cells / kTileCells};
  }
  std::int64_t bytes = RunBytes(dtype, shape_[0]);
  for (std::size_t dim = 1; dim < shape_.size(); ++dim) {
    if (__builtin_mul_overflow(bytes, shape_[dim], &bytes)) {
      throw std::bad_alloc();
    }
  }
  rows_.resize(AsSize(bytes));
}

void RowStore::Store(int cell, const TensorView& row) {
  const TensorView to = Row(cell);
  for (std::int64_t j = 0; j < to.shape[1]; ++j) {
    // The row belongs to this object, so it may write through the const view.
    CopyRun(row, j, 0, 0, const_cast<std::byte*>(to.at(0, j)),  // NOLINT
            to.stride[0], dtype_);
  }
}

DenseTensor RowStore::Load(int cell) const { return CopyOf(Row(cell), dtype_); }

void RowStore::Copy(int from_cell, int to_cell) {
  Store(to_cell, Row(from_cell));
}

TensorView RowStore::All() const {
  return DenseView(rows_.data(), dtype_, shape_);
}

TensorView RowStore::View(int first_cell, int count) const {
  if (layout_ == VLayout::kTiled) {
    KVTWIN_ASSERT(first_cell % kTileCells == 0 && count % kTileCells == 0);
    TensorView tiles = Slice(All(), 3, first_cell / kTileCells);
    tiles.shape[3] = count / kTileCells;
    return tiles;
  }
  const std::size_t cell_dim = layout_ == VLayout::kPermuted ? 0 : 2;
  TensorView view = Slice(All(), cell_dim, first_cell);
  view.shape[cell_dim] = count;
  return view;
}

}  // namespace kvtwin::reference
