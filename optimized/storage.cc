#include "optimized/storage.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <new>

#include "core/assert.h"
#include "core/index.h"
#include "optimized/distinct.h"
#include "optimized/fast_paths.h"
#include "optimized/move_rows.h"
#include "optimized/put_rows.h"
#include "optimized/row_kernels.h"
#include "optimized/shift_kernels.h"

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
  return Product({AsSize(head_dim), AsSize(heads)});
}

std::size_t RowBytes(DType dtype, int head_dim, int heads) {
  return Product({AsSize(RunBytes(dtype, head_dim)), AsSize(heads)});
}

// The bytes between columns of permuted V. Columns begin on cache lines, an odd
// number of lines apart, so that few of them share a set of a cache; short
// columns are dense, because it does not matter for them.
std::size_t ColumnBytes(std::size_t cells, DType dtype) {
  constexpr std::size_t kLine = 64;
  constexpr std::size_t kShort = 4096;
  const std::size_t bytes = Product({cells, SizeOf(dtype)});
  if (bytes < kShort) return bytes;
  return ((bytes + kLine - 1) / kLine | 1) * kLine;
}

// The bytes of one column within one tile.
std::size_t TileBytes(DType dtype) { return kTileCells * SizeOf(dtype); }

// Whether to write `bytes` past the caches to buffers of that size in all. Only
// a small part of a large buffer is read soon; a small buffer fits in the
// caches. So does data that is copied into the threads' own caches, which take
// `own` bytes.
bool Streams(std::size_t bytes, std::size_t buffer_bytes, std::size_t own) {
  constexpr std::size_t kMuch = std::size_t{128} << 10;
  constexpr std::size_t kLarge = std::size_t{8} << 20;
  return TakeFastPath(bytes >= std::max(kMuch, own + 1) &&
                      buffer_bytes >= kLarge);
}

}  // namespace

TensorView RowsView(const std::byte* rows, DType dtype, VLayout layout,
                    int head_dim, int heads, std::size_t column_bytes,
                    CellSpan cells) {
  const auto count = std::ssize(cells);
  if (layout == VLayout::kPlain) {
    return DenseView(rows + cells.first * RowBytes(dtype, head_dim, heads),
                     dtype, {head_dim, heads, count, 1});
  }
  if (layout == VLayout::kTiled) {
    return DenseView(rows + cells.first * RowBytes(dtype, head_dim, heads),
                     dtype, {kTileCells, head_dim, heads, count / kTileCells});
  }
  const auto column = static_cast<std::int64_t>(column_bytes);
  const std::int64_t head = column * head_dim;
  return {.data = rows + cells.first * SizeOf(dtype),
          .dtype = dtype,
          .shape = {count, head_dim, heads, 1},
          .stride = {static_cast<std::int64_t>(SizeOf(dtype)), column, head,
                     head * heads}};
}

void CopyDense(const TensorView& from, std::byte* to) {
  const std::size_t element = SizeOf(from.dtype);
  const auto line = AsSize(RunBytes(from.dtype, from.shape[0]));
  const bool dense_lines = IsBlockDType(from.dtype) ||
                           from.stride[0] == static_cast<std::int64_t>(element);
  for (std::int64_t l = 0; l < from.shape[3]; ++l) {
    for (std::int64_t k = 0; k < from.shape[2]; ++k) {
      for (std::int64_t j = 0; j < from.shape[1]; ++j) {
        if (dense_lines) {
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

Layer::Layer(const RowDims& dims, const LayerFormat& format)
    : dims_(dims),
      k_dtype_(format.k_dtype),
      v_dtype_(format.v_dtype),
      v_layout_(format.v_layout),
      cells_(format.cells),
      key_row_(RowElements(dims.k_head_dim, dims.kv_heads)),
      value_row_(RowElements(dims.v_head_dim, dims.kv_heads)),
      key_row_bytes_(RowBytes(k_dtype_, dims.k_head_dim, dims.kv_heads)),
      value_row_bytes_(RowBytes(v_dtype_, dims.v_head_dim, dims.kv_heads)),
      column_bytes_(v_layout_ == VLayout::kTiled
                        ? TileBytes(v_dtype_)
                        : ColumnBytes(cells_, v_dtype_)),
      tile_bytes_(v_layout_ == VLayout::kTiled
                      ? Product({value_row_, TileBytes(v_dtype_)})
                      : TileBytes(v_dtype_)),
      key_(Product({key_row_bytes_, cells_})),
      value_(v_layout_ == VLayout::kPermuted
                 ? Product({value_row_, column_bytes_})
                 : Product({value_row_bytes_, cells_})) {}

void Layer::Put(const TensorView& key, const TensorView& value,
                std::span<const int> cells) {
  KVTWIN_DCHECK(AreDistinct(cells));
  const std::size_t bytes =
      cells.size() * (key_row_bytes() + value_row_bytes());
  const std::size_t touched = 2 * bytes;  // As many bytes are read, or twice.
  const bool plain = v_layout_ == VLayout::kPlain;
  const bool copies = key.dtype == k_dtype_ && value.dtype == v_dtype_ && plain;
  const bool stream = Streams(bytes, key_.bytes() + value_.bytes(),
                              AsSize(copies) * OwnCacheBytes(touched));
  const StoredRows keys{key_.data(), k_dtype_, key_row_bytes(), stream};
  const StoredRows values{value_.data(), v_dtype_, value_row_bytes(), stream};
  const auto put = [&](const TensorView& from, const StoredRows& to,
                       Share share) {
    // Few rows, such as states, are divided themselves.
    constexpr std::size_t kManyRows = 8;
    if (share.count > 1 && cells.size() < kManyRows * share.count) {
      return PutRowParts(from, cells, share, to);
    }
    PutRows(from, cells, share.Begin(cells.size()), share.End(cells.size()),
            to);
  };
  ParallelShares(1, touched, [&](std::size_t, Share share) {
    put(key, keys, share);
    if (plain) {
      put(value, values, share);
    } else {
      PutInColumns(value, cells, share, stream);
    }
    if (stream) FenceStreams();
  });
}

StoredColumns Layer::Columns(bool stream) {
  return {value_.data(), v_dtype_, column_bytes_, tile_bytes_, stream};
}

void Layer::PutInColumns(const TensorView& value, std::span<const int> cells,
                         Share share, bool stream) {
  const std::size_t parts = (value_row_ + kTileColumns - 1) / kTileColumns;
  PutColumns(value, cells, share.Begin(parts) * kTileColumns,
             std::min(share.End(parts) * kTileColumns, value_row_),
             Columns(stream));
}

void Layer::Move(std::span<const CellMove> moves, Share share) {
  const std::size_t begin = share.Begin(moves.size());
  const auto part = moves.subspan(begin, share.End(moves.size()) - begin);
  MoveRows(part, key_.data(), key_row_bytes());
  if (v_layout_ == VLayout::kPlain) {
    MoveRows(part, value_.data(), value_row_bytes());
    return;
  }
  const std::size_t first = share.Begin(value_row_);
  StoredColumns columns = Columns(/*stream=*/false);
  columns.data += first * column_bytes_;
  MoveInColumns(moves, columns, share.End(value_row_) - first);
}

void Layer::Shift(const Selection& cells, const RowShift& shift,
                  std::span<float> scratch, Share share) {
  if (shift.idle()) return;
  const std::size_t words = cells.end - cells.begin;
  const std::size_t end = cells.begin + share.End(words);
  for (std::size_t w = cells.begin + share.Begin(words); w < end; ++w) {
    std::uint64_t left = cells.words[w];
    while (left != 0) {
      const auto first = AsSize(std::countr_zero(left));
      const auto rows = AsSize(std::countr_one(left >> first));
      const std::size_t cell = w * kWordBits + first;
      shift.Apply(
          k_dtype_,
          {key_.data() + cell * key_row_bytes(), rows * key_row_bytes()},
          scratch);
      // Below the run all bits are zero: the carry clears the run.
      left &= left + (std::uint64_t{1} << first);
    }
  }
}

void Layer::LoadKey(std::size_t cell, std::span<float> row) const {
  if (k_dtype_ == DType::kF32) {
    std::memcpy(row.data(), key_.as<float>() + cell * key_row_,
                row.size_bytes());
  } else {
    WidenToF32(k_dtype_, key_.data() + cell * key_row_bytes_, row.data(),
               row.size());
  }
}

void Layer::StoreKey(std::size_t cell, std::span<const float> row) {
  if (k_dtype_ == DType::kF32) {
    std::memcpy(key_.as<float>() + cell * key_row_, row.data(),
                row.size_bytes());
    return;
  }
  StoreChanged(k_dtype_, row, key_.data() + cell * key_row_bytes_);
}

TensorView Layer::KeyView(CellSpan cells) const {
  return RowsView(key_.data(), k_dtype_, VLayout::kPlain, dims_.k_head_dim,
                  dims_.kv_heads, column_bytes_, cells);
}

TensorView Layer::ValueView(CellSpan cells) const {
  return RowsView(value_.data(), v_dtype_, v_layout_, dims_.v_head_dim,
                  dims_.kv_heads, column_bytes_, cells);
}

}  // namespace kvtwin::optimized
