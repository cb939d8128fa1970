#include "core/row_store.h"

#include <cstring>

#include "core/elements.h"

namespace kvtwin {

RowStore::RowStore(DType dtype, const Shape& row, int cells, bool permuted)
    : dtype_(dtype),
      shape_{row[0], row[1], cells, 1},
      cell_dim_(permuted ? 0 : 2) {
  if (permuted) shape_ = {cells, row[0], row[1], 1};
  if (dtype == DType::kF16) rows_ = MatrixOf<Eigen::half>();
  const std::int64_t elements = row[0] * row[1];
  std::visit(
      [&](auto& rows) {
        permuted ? rows.setZero(cells, elements)
                 : rows.setZero(elements, cells);
      },
      rows_);
}

void RowStore::Store(int cell, const TensorView& row) {
  const DenseTensor rounded = CopyOf(row, dtype_);
  std::visit(
      [&](auto& rows) {
        // Bytes, so that a NaN keeps its bits.
        using Element = typename std::decay_t<decltype(rows)>::Scalar;
        Eigen::Matrix<Element, Eigen::Dynamic, 1> column(row.elements());
        std::memcpy(column.data(), rounded.bytes.data(), rounded.bytes.size());
        if (cell_dim_ == 0) {
          rows.row(cell) = column.transpose();
        } else {
          rows.col(cell) = column;
        }
      },
      rows_);
}

DenseTensor RowStore::Load(int cell) const {
  TensorView row =
      Slice(View(0, static_cast<int>(shape_[cell_dim_])), cell_dim_, cell);
  if (cell_dim_ == 0) {
    row.shape = {row.shape[1], row.shape[2], 1, 1};
    row.stride = {row.stride[1], row.stride[2], 0, 0};
  }
  return CopyOf(row, dtype_);
}

void RowStore::Copy(int from_cell, int to_cell) {
  std::visit(
      [&](auto& rows) {
        if (cell_dim_ == 0) {
          rows.row(to_cell) = rows.row(from_cell);
        } else {
          rows.col(to_cell) = rows.col(from_cell);
        }
      },
      rows_);
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
