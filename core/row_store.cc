#include "core/row_store.h"

#include "core/elements.h"

namespace kvtwin {

RowStore::RowStore(DType dtype, const Shape& row, int cells, bool permuted)
    : dtype_(dtype),
      shape_{row[0], row[1], cells, 1},
      cell_dim_(permuted ? 0 : 2) {
  if (permuted) shape_ = {cells, row[0], row[1], 1};
  if (dtype == DType::kF16) rows_ = MatrixOf<Eigen::half>();
  if (dtype == DType::kBF16) rows_ = MatrixOf<Eigen::bfloat16>();
  const std::int64_t elements = row[0] * row[1];
  std::visit(
      [&](auto& rows) {
        permuted ? rows.setZero(cells, elements)
                 : rows.setZero(elements, cells);
      },
      rows_);
}

void RowStore::Store(int cell, const TensorView& row) {
  const TensorView to = Row(cell);
  for (std::int64_t j = 0; j < to.shape[1]; ++j) {
    for (std::int64_t i = 0; i < to.shape[0]; ++i) {
      // The rows are ours: only views of them are not to be written to.
      CopyElement(row.at(i, j), row.dtype,
                  const_cast<std::byte*>(to.at(i, j)),  // NOLINT
                  dtype_);
    }
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
  const void* data = std::visit(
      [](const auto& rows) { return static_cast<const void*>(rows.data()); },
      rows_);
  TensorView view =
      Slice(DenseView(data, dtype_, shape_), cell_dim_, first_cell);
  view.shape[cell_dim_] = count;
  return view;
}

}  // namespace kvtwin
