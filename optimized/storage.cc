#include "optimized/storage.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <new>

#include "core/assert.h"
#include "optimized/row_kernels.h"

namespace kvtwin::optimized {
namespace {

std::size_t Product(std::initializer_list<std::size_t> factors) {
  std::size_t product = 1;
  for (const std::size_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product)) {
      throw std::bad_alloc();
    }
  }
  return product;
}

std::size_t RowElements(int head_dim, int heads) {
  return Product(
      {static_cast<std::size_t>(head_dim), static_cast<std::size_t>(heads)});
}

// Where rows come from: a tensor [head_dim, heads, tokens] of any strides.
class Rows {
 public:
  // `scratch` holds a row that is not in order.
  Rows(const TensorView& tensor, std::vector<std::byte>& scratch)
      : tensor_(tensor), scratch_(scratch) {
    const auto element = static_cast<std::int64_t>(SizeOf(tensor.dtype));
    const bool heads_dense =
        tensor.shape[0] == 1 || tensor.stride[0] == element;
    const bool row_dense =
        tensor.shape[1] == 1 || tensor.stride[1] == element * tensor.shape[0];
    const auto misaligned = [&](std::uintptr_t offset) {
      return (offset & (SizeOf(tensor.dtype) - 1)) != 0;  // A power of 2.
    };
    in_order_ = heads_dense && row_dense &&
                !misaligned(reinterpret_cast<std::uintptr_t>(tensor.data)) &&
                !misaligned(static_cast<std::uintptr_t>(tensor.stride[2]));
    touching_ = in_order_ &&
                tensor.stride[2] == element * tensor.shape[0] * tensor.shape[1];
  }

  DType dtype() const { return tensor_.dtype; }

  // Whether a row and those after it are one dense piece of memory.
  bool touching() const { return touching_; }

  // The elements of a row in order, until the next call.
  const std::byte* Row(std::size_t token) {
    TensorView row = tensor_;
    row.data = tensor_.at(0, 0, static_cast<std::int64_t>(token));
    row.shape[2] = 1;
    if (in_order_) return row.at(0);
    scratch_.resize(static_cast<std::size_t>(row.elements()) *
                    SizeOf(row.dtype));
    CopyDense(row, scratch_.data());
    return scratch_.data();
  }

 private:
  const TensorView& tensor_;
  std::vector<std::byte>& scratch_;
  bool in_order_;
  bool touching_;
};

// Copies dense elements; f32 to f16 is the only conversion there is.
void Store(const std::byte* from, DType from_dtype, std::byte* to, DType dtype,
           std::size_t count) {
  if (from_dtype == dtype) {
    std::memcpy(to, from, count * SizeOf(dtype));
    return;
  }
  KVTWIN_ASSERT(reinterpret_cast<std::uintptr_t>(from) % alignof(float) == 0);
  F32ToF16(reinterpret_cast<const float*>(from),
           reinterpret_cast<std::uint16_t*>(to), count);
}

// Token i .. end - 1 lie in consecutive cells.
std::size_t RunEnd(std::span<const int> cells, std::size_t i) {
  std::size_t end = i + 1;
  while (end < cells.size() && cells[end] == cells[end - 1] + 1) ++end;
  return end;
}

void PutRows(Rows rows, std::size_t row_elements, std::span<const int> cells,
             std::byte* to, DType dtype) {
  const std::size_t row_bytes = row_elements * SizeOf(dtype);
  for (std::size_t i = 0; i < cells.size();) {
    const std::size_t end = rows.touching() ? RunEnd(cells, i) : i + 1;
    Store(rows.Row(i), rows.dtype(),
          to + static_cast<std::size_t>(cells[i]) * row_bytes, dtype,
          (end - i) * row_elements);
    i = end;
  }
}

// Element e of the tile's row i goes to cell cells[i] of column e.
template <class T>
void Scatter(const T* tile, std::size_t row_elements,
             std::span<const int> cells, T* to, std::size_t column_cells) {
  for (std::size_t e = 0; e < row_elements; ++e) {
    T* column = to + e * column_cells;
    for (std::size_t i = 0; i < cells.size(); ++i) {
      column[cells[i]] = tile[i * row_elements + e];
    }
  }
}

template <class T>
void MoveWithinColumns(std::span<const CellMove> moves, T* column,
                       std::size_t column_cells, std::size_t columns) {
  for (std::size_t e = 0; e < columns; ++e, column += column_cells) {
    for (const CellMove& move : moves) column[move.to] = column[move.from];
  }
}

void MoveRows(std::span<const CellMove> moves, std::byte* rows,
              std::size_t row_bytes) {
  for (const CellMove& move : moves) {
    std::memcpy(rows + move.to * row_bytes, rows + move.from * row_bytes,
                row_bytes);
  }
}

// A stretch of cells of a tensor whose last dimension is cells.
TensorView RowsView(const AlignedBuffer& buffer, DType dtype, int head_dim,
                    int heads, CellSpan cells) {
  const std::size_t row_bytes = static_cast<std::size_t>(head_dim) *
                                static_cast<std::size_t>(heads) * SizeOf(dtype);
  return DenseView(
      buffer.data() + cells.first * row_bytes, dtype,
      {head_dim, heads, static_cast<std::int64_t>(cells.size()), 1});
}

}  // namespace

void CopyDense(const TensorView& from, std::byte* to) {
  const std::size_t element = SizeOf(from.dtype);
  const bool dense_lines = from.stride[0] == static_cast<std::int64_t>(element);
  for (std::int64_t l = 0; l < from.shape[3]; ++l) {
    for (std::int64_t k = 0; k < from.shape[2]; ++k) {
      for (std::int64_t j = 0; j < from.shape[1]; ++j) {
        if (dense_lines) {
          const std::size_t line =
              element * static_cast<std::size_t>(from.shape[0]);
          std::memcpy(to, from.at(0, j, k, l), line);
          to += line;
          continue;
        }
        for (std::int64_t i = 0; i < from.shape[0]; ++i, to += element) {
          std::memcpy(to, from.at(i, j, k, l), element);
        }
      }
    }
  }
}

Layer::Layer(const RowDims& dims, DType dtype, bool permuted_v,
             std::size_t cells)
    : dims_(dims),
      dtype_(dtype),
      permuted_v_(permuted_v),
      cells_(cells),
      key_row_(RowElements(dims.k_head_dim, dims.kv_heads)),
      value_row_(RowElements(dims.v_head_dim, dims.kv_heads)),
      key_(Product({key_row_, cells, SizeOf(dtype)})),
      value_(Product({value_row_, cells, SizeOf(dtype)})),
      row_(dtype == DType::kF32 ? 0 : key_row_) {}

void Layer::Put(const TensorView& key, const TensorView& value,
                std::span<const int> cells) {
  PutRows(Rows(key, gathered_), key_row_, cells, key_.data(), dtype_);
  if (permuted_v_) {
    PutPermuted(value, cells);
  } else {
    PutRows(Rows(value, gathered_), value_row_, cells, value_.data(), dtype_);
  }
}

void Layer::PutPermuted(const TensorView& value, std::span<const int> cells) {
  // Every element of a row goes to another cache line: some rows at a time, so
  // that what one of them brought in serves the others.
  constexpr std::size_t kTileRows = 32;
  const std::size_t row_bytes = value_row_ * SizeOf(dtype_);
  Rows rows(value, gathered_);
  tile_.resize(kTileRows * row_bytes);
  for (std::size_t i = 0; i < cells.size(); i += kTileRows) {
    const std::size_t count = std::min(kTileRows, cells.size() - i);
    for (std::size_t r = 0; r < count; ++r) {
      Store(rows.Row(i + r), rows.dtype(), tile_.data() + r * row_bytes, dtype_,
            value_row_);
    }
    if (dtype_ == DType::kF32) {
      Scatter(reinterpret_cast<const float*>(tile_.data()), value_row_,
              cells.subspan(i, count), value_.as<float>(), cells_);
    } else {
      Scatter(reinterpret_cast<const std::uint16_t*>(tile_.data()), value_row_,
              cells.subspan(i, count), value_.as<std::uint16_t>(), cells_);
    }
  }
}

void Layer::Move(std::span<const CellMove> moves) {
  MoveRows(moves, key_.data(), key_row_bytes());
  if (!permuted_v_) {
    MoveRows(moves, value_.data(), value_row_ * SizeOf(dtype_));
  } else if (dtype_ == DType::kF32) {
    MoveWithinColumns(moves, value_.as<float>(), cells_, value_row_);
  } else {
    MoveWithinColumns(moves, value_.as<std::uint16_t>(), cells_, value_row_);
  }
}

void Layer::Shift(const Selection& cells, const RowShift& shift) {
  if (shift.idle()) return;
  for (std::size_t w = cells.begin; w < cells.end; ++w) {
    for (std::uint64_t left = cells.words[w]; left != 0; left &= left - 1) {
      const std::size_t cell =
          w * kWordBits + static_cast<std::size_t>(std::countr_zero(left));
      if (dtype_ == DType::kF32) {
        shift.Apply({key_.as<float>() + cell * key_row_, key_row_});
        continue;
      }
      LoadKey(cell, row_);
      shift.Apply(row_);
      StoreKey(cell, row_);
    }
  }
}

void Layer::LoadKey(std::size_t cell, std::span<float> row) const {
  if (dtype_ == DType::kF32) {
    std::memcpy(row.data(), key_.as<float>() + cell * key_row_,
                row.size_bytes());
  } else {
    F16ToF32(key_.as<std::uint16_t>() + cell * key_row_, row.data(),
             row.size());
  }
}

void Layer::StoreKey(std::size_t cell, std::span<const float> row) {
  if (dtype_ == DType::kF32) {
    std::memcpy(key_.as<float>() + cell * key_row_, row.data(),
                row.size_bytes());
    return;
  }
  auto* stored = key_.as<std::uint16_t>() + cell * key_row_;
  if (!HasNonFinite(row.data(), row.size())) {
    F32ToF16(row.data(), stored, row.size());
    return;
  }
  // What did not change keeps its bits; only a NaN would lose some.
  std::vector<float> before(row.size());
  F16ToF32(stored, before.data(), row.size());
  for (std::size_t i = 0; i < row.size(); ++i) {
    const bool same = std::bit_cast<std::uint32_t>(before[i]) ==
                      std::bit_cast<std::uint32_t>(row[i]);
    if (!same) F32ToF16(&row[i], &stored[i], 1);
  }
}

TensorView Layer::KeyView(CellSpan cells) const {
  return RowsView(key_, dtype_, dims_.k_head_dim, dims_.kv_heads, cells);
}

TensorView Layer::ValueView(CellSpan cells) const {
  if (!permuted_v_) {
    return RowsView(value_, dtype_, dims_.v_head_dim, dims_.kv_heads, cells);
  }
  TensorView view = DenseView(
      value_.data(), dtype_,
      {static_cast<std::int64_t>(cells_), dims_.v_head_dim, dims_.kv_heads, 1});
  view.data = view.at(static_cast<std::int64_t>(cells.first));
  view.shape[0] = static_cast<std::int64_t>(cells.size());
  return view;
}

}  // namespace kvtwin::optimized
