#include "core/row_store.h"

#include <cstdint>
#include <new>

#include "core/elements.h"

namespace kvtwin {

RowStore::RowStore(DType dtype, const Shape& row, int cells, bool permuted)
    : dtype_(dtype),
      shape_{row[0], row[1], cells, 1},
      cell_dim_(permuted ? 0 : 2) {
  if (permuted) shape_ = {cells, row[0], row[1], 1};
  std::int64_t bytes = RunBytes(dtype, shape_[0]);
  if (__builtin_mul_overflow(bytes, shape_[1], &bytes) ||
      __builtin_mul_overflow(bytes, shape_[2], &bytes)) {
    throw std::bad_alloc();
  }
  rows_.resize(static_cast<std::size_t>(bytes));
}

void RowStore::Store(int cell, const TensorView& row) {
  const TensorView to = Row(cell);
  for (std::int64_t j = 0; j < to.shape[1]; ++j) {
    // The rows are ours: only views of them are not to be written to.
    CopyRun(row, j, 0, 0, const_cast<std::byte*>(to.at(0, j)),  // NOLINT
            to.stride[0], dtype_);
  }
}

DenseTensor RowStore::Load(int cell) const { return CopyOf(Row(cell), dtype_); }

void RowStore::Copy(int from_cell, int to_cell) {
  Store(to_cell, Row(from_cell));
}

TensorView RowStore::Row(int cell) const {
  TensorView row = View(cell, 1);
  if (cell_dim_ == 0) {
    row.shape = {row.shape[1], row.shape[2], 1, 1};
    row.stride = {row.stride[1], row.stride[2], 0, 0};
  }
  return row;
}

TensorView RowStore::View(int first_cell, int count) const {
  TensorView view =
      Slice(DenseView(rows_.data(), dtype_, shape_), cell_dim_, first_cell);
  view.shape[cell_dim_] = count;
  return view;
}

}  // namespace kvtwin
