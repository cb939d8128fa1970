#include "optimized/storage.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <new>

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
  return Product(
      {static_cast<std::size_t>(head_dim), static_cast<std::size_t>(heads)});
}

std::size_t RowBytes(DType dtype, int head_dim, int heads) {
  return Product({static_cast<std::size_t>(RunBytes(dtype, head_dim)),
                  static_cast<std::size_t>(heads)});
}

// The columns of permuted V begin on cache lines, and not too many of them in
// the same set of a cache: unless they are so short that it does not matter,
// they are an odd number of lines apart.
std::size_t ColumnBytes(std::size_t cells, DType dtype) {
  constexpr std::size_t kLine = 64;
  constexpr std::size_t kShort = 4096;
  const std::size_t bytes = Product({cells, SizeOf(dtype)});
  if (bytes < kShort) return bytes;
  return ((bytes + kLine - 1) / kLine | 1) * kLine;
}

// Of one column, what is of a tile.
std::size_t TileBytes(DType dtype) { return kTileCells * SizeOf(dtype); }

// Whether to write so much to buffers of that size past the caches. Little of
// it will soon be read there, and small buffers have a place in them. So has
// what is copied to the threads' own caches, which take `own` bytes.
bool Streams(std::size_t bytes, std::size_t buffer_bytes, std::size_t own) {
  constexpr std::size_t kMuch = std::size_t{128} << 10;
  constexpr std::size_t kLarge = std::size_t{8} << 20;
  return TakeFastPath(bytes >= std::max(kMuch, own + 1) &&
                      buffer_bytes >= kLarge);
}

// Has the beginning of what is turned next on its way. (g++ leaves out calls of
// functions that only prefetch.)
[[gnu::always_inline]] inline void FetchAhead(std::span<std::byte> next) {
  constexpr std::size_t kLine = 64;
  for (std::size_t i = 0; i < std::min(next.size(), kTurnsAhead); i += kLine) {
    __builtin_prefetch(&next[i]);
  }
}

// A stretch of cells of a tensor whose last dimension is cells.
TensorView RowsView(const AlignedBuffer& buffer, DType dtype, int head_dim,
                    int heads, CellSpan cells) {
  return DenseView(
      buffer.data() + cells.first * RowBytes(dtype, head_dim, heads), dtype,
      {head_dim, heads, static_cast<std::int64_t>(cells.size()), 1});
}

}  // namespace

void CopyDense(const TensorView& from, std::byte* to) {
  const std::size_t element = SizeOf(from.dtype);
  const auto line =
      static_cast<std::size_t>(RunBytes(from.dtype, from.shape[0]));
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

Layer::Layer(const RowDims& dims, DType k_dtype, DType v_dtype,
             VLayout v_layout, std::size_t cells)
    : dims_(dims),
      k_dtype_(k_dtype),
      v_dtype_(v_dtype),
      v_layout_(v_layout),
      key_row_(RowElements(dims.k_head_dim, dims.kv_heads)),
      value_row_(RowElements(dims.v_head_dim, dims.kv_heads)),
      key_row_bytes_(RowBytes(k_dtype, dims.k_head_dim, dims.kv_heads)),
      value_row_bytes_(RowBytes(v_dtype, dims.v_head_dim, dims.kv_heads)),
      column_bytes_(v_layout == VLayout::kTiled ? TileBytes(v_dtype)
                                                : ColumnBytes(cells, v_dtype)),
      tile_bytes_(v_layout == VLayout::kTiled
                      ? Product({value_row_, TileBytes(v_dtype)})
                      : TileBytes(v_dtype)),
      key_(Product({key_row_bytes_, cells})),
      value_(v_layout == VLayout::kPermuted
                 ? Product({value_row_, column_bytes_})
                 : Product({value_row_bytes_, cells})) {}

void Layer::Put(const TensorView& key, const TensorView& value,
                std::span<const int> cells) {
  const std::size_t bytes =
      cells.size() * (key_row_bytes() + value_row_bytes());
  const std::size_t touched = 2 * bytes;  // What is read is as much, or twice.
  const bool plain = v_layout_ == VLayout::kPlain;
  const bool copies = key.dtype == k_dtype_ && value.dtype == v_dtype_ && plain;
  const bool stream =
      Streams(bytes, key_.bytes() + value_.bytes(),
              static_cast<std::size_t>(copies) * OwnCacheBytes(touched));
  const StoredRows keys{key_.data(), k_dtype_, key_row_bytes(), stream};
  const StoredRows values{value_.data(), v_dtype_, value_row_bytes(), stream};
  ParallelShares(1, touched, [&](std::size_t, Share share) {
    const std::size_t begin = share.Begin(cells.size());
    const std::size_t end = share.End(cells.size());
    PutRows(key, cells, begin, end, keys);
    if (plain) {
      PutRows(value, cells, begin, end, values);
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

void Layer::Shift(const Selection& cells, const RowShift& shift, Share share) {
  if (shift.idle()) return;
  std::span<std::byte> run;
  const std::size_t words = cells.end - cells.begin;
  const std::size_t end = cells.begin + share.End(words);
  for (std::size_t w = cells.begin + share.Begin(words); w < end; ++w) {
    std::uint64_t left = cells.words[w];
    while (left != 0) {
      const auto first = static_cast<std::size_t>(std::countr_zero(left));
      const auto rows =
          static_cast<std::size_t>(std::countr_one(left >> first));
      const std::size_t cell = w * kWordBits + first;
      const std::span<std::byte> next(key_.data() + cell * key_row_bytes(),
                                      rows * key_row_bytes());
      FetchAhead(next);
      shift.Apply(k_dtype_, run);
      run = next;
      // All below the run are zeros: this carries them and it away.
      left &= left + (std::uint64_t{1} << first);
    }
  }
  shift.Apply(k_dtype_, run);
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
  return RowsView(key_, k_dtype_, dims_.k_head_dim, dims_.kv_heads, cells);
}

TensorView Layer::ValueView(CellSpan cells) const {
  if (v_layout_ == VLayout::kPlain) {
    return RowsView(value_, v_dtype_, dims_.v_head_dim, dims_.kv_heads, cells);
  }
  if (v_layout_ == VLayout::kTiled) {
    return DenseView(value_.data() + cells.first / kTileCells * tile_bytes_,
                     v_dtype_,
                     {kTileCells, dims_.v_head_dim, dims_.kv_heads,
                      static_cast<std::int64_t>(cells.size()) / kTileCells});
  }
  const auto element = static_cast<std::int64_t>(SizeOf(v_dtype_));
  const auto column = static_cast<std::int64_t>(column_bytes_);
  const std::int64_t head = column * dims_.v_head_dim;
  return {.data = value_.data() + cells.first * SizeOf(v_dtype_),
          .dtype = v_dtype_,
          .shape = {static_cast<std::int64_t>(cells.size()), dims_.v_head_dim,
                    dims_.kv_heads, 1},
          .stride = {element, column, head, head * dims_.kv_heads}};
}

}  // namespace kvtwin::optimized
