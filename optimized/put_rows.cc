#include "optimized/put_rows.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "core/assert.h"
#include "core/index.h"
#include "optimized/distinct.h"
#include "optimized/row_kernels.h"

namespace kvtwin::optimized {
namespace {

// How many elements of a row are gathered at a time.
constexpr std::size_t kPieceElements = 256;
using Piece = std::array<std::byte, kPieceElements * sizeof(float)>;

template <class T>
void CopyStrided(const std::byte* from, std::int64_t stride, std::size_t count,
                 std::byte* to) {
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(to, from, sizeof(T));
    from += stride;
    to += sizeof(T);
  }
}

// A view of rows of a block dtype as bytes: block rows are copied, not
// converted.
TensorView InBytes(TensorView blocks) {
  blocks.shape[0] = RunBytes(blocks.dtype, blocks.shape[0]);
  blocks.stride[0] = 1;
  return blocks;
}

// A tensor of rows to store.
class Source {
 public:
  explicit Source(const TensorView& tensor)
      : tensor_(IsBlockDType(tensor.dtype) ? InBytes(tensor) : tensor),
        size_(IsBlockDType(tensor.dtype) ? 1 : SizeOf(tensor.dtype)),
        head_dim_(AsSize(tensor_.shape[0])),
        heads_(AsSize(tensor_.shape[1])) {
    KVTWIN_ASSERT(size_ > 0);
    const auto size = static_cast<std::int64_t>(size_);
    const std::int64_t head = size * tensor_.shape[0];
    dense_heads_ = tensor_.shape[0] == 1 || tensor_.stride[0] == size;
    const auto address = reinterpret_cast<std::uintptr_t>(tensor_.data);
    const auto offsets =
        static_cast<std::uintptr_t>(tensor_.stride[1] | tensor_.stride[2]);
    readable_ = dense_heads_ && (address | offsets) % size_ == 0;
    in_order_ = readable_ && (heads_ == 1 || tensor_.stride[1] == head);
    touching_ = in_order_ && tensor_.stride[2] == head * tensor_.shape[1];
  }

  DType dtype() const { return tensor_.dtype; }
  // The bytes that this many elements take, stored as `dtype`.
  std::size_t StoredBytes(std::size_t count, DType dtype) const {
    if (dtype == tensor_.dtype) return count * size_;
    const auto elements = static_cast<std::int64_t>(count);
    return AsSize(RunBytes(dtype, elements));
  }
  std::size_t head_dim() const { return head_dim_; }
  std::size_t row_elements() const { return head_dim_ * heads_; }

  // Whether the elements of each head (readable), of each row (in_order), or of
  // all rows (touching) are contiguous, and aligned for their type.
  bool readable() const { return readable_; }
  bool in_order() const { return in_order_; }
  bool touching() const { return touching_; }

  const std::byte* At(std::size_t token, std::size_t element) const {
    return tensor_.at(static_cast<std::int64_t>(element % head_dim_),
                      static_cast<std::int64_t>(element / head_dim_),
                      static_cast<std::int64_t>(token));
  }

  // Copies elements [begin, begin + count) of a row, in order.
  void Gather(std::size_t token, std::size_t begin, std::size_t count,
              std::byte* to) const {
    while (count > 0) {
      const std::size_t line = std::min(count, head_dim_ - begin % head_dim_);
      const std::byte* from = At(token, begin);
      if (dense_heads_) {
        std::memcpy(to, from, line * size_);
      } else if (size_ == sizeof(float)) {
        CopyStrided<float>(from, tensor_.stride[0], line, to);
      } else if (size_ == sizeof(std::uint16_t)) {
        CopyStrided<std::uint16_t>(from, tensor_.stride[0], line, to);
      } else {
        CopyStrided<std::byte>(from, tensor_.stride[0], line, to);
      }
      begin += line;
      count -= line;
      to += line * size_;
    }
  }

 private:
  TensorView tensor_;
  std::size_t size_;  // Bytes per element.
  std::size_t head_dim_;
  std::size_t heads_;
  bool dense_heads_;
  bool readable_;
  bool in_order_;
  bool touching_;
};

// Stores contiguous elements of the source. If `dtype` is another one, the
// elements are f32 and are rounded.
void Store(const Source& source, const std::byte* from, std::size_t count,
           std::byte* to, DType dtype, bool stream) {
  if (source.dtype() != dtype) {
    const auto* floats = reinterpret_cast<const float*>(from);
    KVTWIN_ASSERT(reinterpret_cast<std::uintptr_t>(from) % alignof(float) == 0);
    // Blocks straddle cache lines, so they are better written through the
    // caches.
    stream && !IsBlockDType(dtype) ? StreamRoundedF32(dtype, floats, to, count)
                                   : RoundF32(dtype, floats, to, count);
  } else if (stream) {
    StreamBytes(from, to, source.StoredBytes(count, dtype));
  } else {
    std::memcpy(to, from, source.StoredBytes(count, dtype));
  }
}

// The end of the longest run of consecutive cells that begins with token i.
std::size_t RunEnd(std::span<const int> cells, std::size_t i) {
  std::size_t end = i + 1;
  while (end < cells.size() && cells[end] == cells[end - 1] + 1) ++end;
  return end;
}

// Stores elements [begin, end) of a row, in order.
void StorePart(const Source& source, std::size_t token, std::size_t begin,
               std::size_t end, std::byte* to, DType dtype, bool stream) {
  alignas(64) Piece piece;
  while (begin < end) {
    const std::byte* from = source.At(token, begin);
    std::size_t count = end - begin;
    if (!source.in_order()) {
      // Takes part of a head, or, of scattered elements, as many as fit in a
      // piece.
      const std::size_t max =
          source.readable() ? source.head_dim() - begin % source.head_dim()
                            : kPieceElements;
      count = std::min(count, max);
    }
    if (!source.readable()) {
      source.Gather(token, begin, count, piece.data());
      from = piece.data();
    }
    Store(source, from, count, to, dtype, stream);
    begin += count;
    to += source.StoredBytes(count, dtype);
  }
}

// The end of the tile that begins with token `first`: at a line boundary if
// consecutive cells reach it.
std::size_t TileEnd(std::span<const int> cells, std::size_t first) {
  const std::size_t max = std::min(cells.size(), first + kTileRows);
  const std::size_t to_line =
      first + kTileRows - AsSize(cells[first]) % kTileRows;
  return RunEnd(cells.first(max), first) >= to_line ? to_line : max;
}

// So a run of consecutive cells that is written at once lies in one tile.
static_assert(kTileCells % kTileRows == 0);

// Writes rows of up to kTileRows tokens as columns of elements of type T.
template <class T>
class ColumnWriter {
 public:
  // Writes the tokens from `first` on to `cells`.
  ColumnWriter(const Source& source, std::size_t first,
               std::span<const int> cells, const StoredColumns& to)
      : source_(source), first_(first), cells_(cells), to_(to) {
    std::size_t line = SIZE_MAX;
    for (const int cell : cells) {
      const std::size_t next = Offset(cell) / kLine;
      if (next != line) lines_[line_count_++] = next * kLine;
      line = next;
    }
    const std::byte* run = to.data + Offset(cells[0]);
    run_ = cells.size() > 1 && RunEnd(cells, 0) == cells.size();
    stream_ = kWholeLines && to.stream && run_ && cells.size() == kTileRows &&
              (reinterpret_cast<std::uintptr_t>(run) | to.stride) % kLine == 0;
  }

  // Stores elements [begin, end).
  void Put(std::size_t begin, std::size_t end) {
    for (std::size_t e = begin; e < end; e += kStaged) {
      const std::size_t count = std::min(kStaged, end - e);
      std::byte* columns = to_.data + e * to_.stride;
      Prefetch(columns, std::min(count, kTileColumns));
      for (std::size_t r = 0; r < cells_.size(); ++r) {
        StorePart(source_, first_ + r, e, e + count,
                  reinterpret_cast<std::byte*>(staged_[r].data()), to_.dtype,
                  /*stream=*/false);
      }
      for (std::size_t c = 0; c < count; c += kTileColumns) {
        const std::size_t rest = count - c;
        const std::size_t next = std::min(rest, kTileColumns);
        Prefetch(columns + next * to_.stride,
                 std::min(rest - next, kTileColumns));
        Write(c, next, columns);
        columns += next * to_.stride;
      }
    }
  }

 private:
  // Elements of each row that are converted before they are written to columns.
  // Staged rows have a cache line of padding, so that they do not map to the
  // same cache set.
  static constexpr std::size_t kLine = 64;
  static constexpr bool kWholeLines = kTileRows * sizeof(T) % kLine == 0;
  static constexpr std::size_t kStaged = 512 / sizeof(T);
  static constexpr std::size_t kStride = kStaged + kLine / sizeof(T);

  std::size_t Offset(int cell) const { return to_.Offset(AsSize(cell)); }

  // Inlined, because g++ removes calls of functions that only prefetch.
  [[gnu::always_inline]] void Prefetch(const std::byte* columns,
                                       std::size_t count) const {
    if (stream_) return;
    for (std::size_t c = 0; c < count; ++c, columns += to_.stride) {
      for (std::size_t i = 0; i < line_count_; ++i) {
        __builtin_prefetch(columns + lines_[i], /*rw=*/1);
      }
    }
  }

  // Writes `count` staged elements of each row, from element c on, to columns.
  void Write(std::size_t c, std::size_t count, std::byte* columns) {
    if constexpr (kWholeLines) {
      if (stream_ && count == kTileColumns) {
        StreamTransposed(&staged_[0][c], kStride, columns + Offset(cells_[0]),
                         to_.stride);
        return;
      }
    }
    if (run_) {
      Transpose(&staged_[0][c], kStride, cells_.size(), tile_.data());
      columns += Offset(cells_[0]);
      for (std::size_t k = 0; k < count; ++k, columns += to_.stride) {
        std::memcpy(columns, &tile_[k * kTileRows], cells_.size() * sizeof(T));
      }
    } else {
      for (std::size_t r = 0; r < cells_.size(); ++r) {
        std::byte* column = columns + Offset(cells_[r]);
        const T* row = &staged_[r][c];
        for (std::size_t k = 0; k < count; ++k, column += to_.stride) {
          std::memcpy(column, &row[k], sizeof(T));
        }
      }
    }
  }

  const Source& source_;
  std::size_t first_;
  std::span<const int> cells_;
  const StoredColumns& to_;
  bool run_;     // Several consecutive cells.
  bool stream_;  // The cells fill whole lines.
  // Lines of a column that hold the cells.
  std::array<std::size_t, kTileRows> lines_;
  std::size_t line_count_ = 0;
  alignas(64) std::array<std::array<T, kStride>, kTileRows> staged_;
  alignas(64) std::array<T, kTileRows * kTileColumns> tile_;
};

template <class T>
void PutTiles(const Source& source, std::span<const int> cells,
              std::size_t begin, std::size_t end, const StoredColumns& to) {
  for (std::size_t i = 0; i < cells.size();) {
    const std::size_t last = TileEnd(cells, i);
    ColumnWriter<T>(source, i, cells.subspan(i, last - i), to).Put(begin, end);
    i = last;
  }
}

}  // namespace

void PutRows(const TensorView& from, std::span<const int> cells,
             std::size_t begin, std::size_t end, const StoredRows& to) {
  KVTWIN_DCHECK(AreDistinct(cells));
  const Source source(from);
  for (std::size_t i = begin; i < end;) {
    std::byte* row = to.data + AsSize(cells[i]) * to.stride;
    if (!source.touching()) {
      StorePart(source, i, 0, source.row_elements(), row, to.dtype, to.stream);
      ++i;
      continue;
    }
    const std::size_t run = RunEnd(cells.first(end), i);
    Store(source, source.At(i, 0), (run - i) * source.row_elements(), row,
          to.dtype, to.stream);
    i = run;
  }
}

void PutRowParts(const TensorView& from, std::span<const int> cells,
                 Share share, const StoredRows& to) {
  const Source source(from);
  const std::size_t elements = source.row_elements();
  // Whole blocks, whether they are copied as bytes or rounded from f32.
  const std::size_t parts = (elements + kPieceElements - 1) / kPieceElements;
  const std::size_t begin = share.Begin(parts) * kPieceElements;
  const std::size_t end = std::min(share.End(parts) * kPieceElements, elements);
  for (std::size_t i = 0; i < cells.size(); ++i) {
    std::byte* row = to.data + AsSize(cells[i]) * to.stride;
    StorePart(source, i, begin, end, row + source.StoredBytes(begin, to.dtype),
              to.dtype, to.stream);
  }
}

void PutColumns(const TensorView& from, std::span<const int> cells,
                std::size_t begin, std::size_t end, const StoredColumns& to) {
  const Source source(from);
  if (to.dtype == DType::kF32) {
    PutTiles<float>(source, cells, begin, end, to);
  } else if (to.dtype == DType::kF8) {
    PutTiles<std::uint8_t>(source, cells, begin, end, to);
  } else {
    PutTiles<std::uint16_t>(source, cells, begin, end, to);
  }
}

}  // namespace kvtwin::optimized
