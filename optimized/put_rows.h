// Stores the rows of a batch: from a tensor of any strides, converted if
// necessary, to rows or to columns.

#ifndef KVTWIN_OPTIMIZED_PUT_ROWS_H_
#define KVTWIN_OPTIMIZED_PUT_ROWS_H_

#include <cstddef>
#include <span>

#include "kvtwin/tensor.h"
#include "optimized/parallel.h"

namespace kvtwin::optimized {

// Stored rows: the row of cell c begins c * stride bytes after `data`.
struct StoredRows {
  std::byte* data;
  DType dtype;
  std::size_t stride;
  bool stream;  // Writes past the caches; see FenceStreams.
};

// Stored columns, one for each element of a row: the element of cell c in
// column e lies c / kTileCells * tile_stride + e * stride bytes, and c %
// kTileCells elements, after `data`.
struct StoredColumns {
  std::byte* data;
  DType dtype;
  std::size_t stride;
  std::size_t tile_stride;
  bool stream;

  std::size_t Offset(std::size_t cell) const {
    return cell / kTileCells * tile_stride + cell % kTileCells * SizeOf(dtype);
  }
};

// Stores the rows of tokens [begin, end): token i goes to cells[i]. `from` is
// [head_dim, heads, tokens], of f32 or the stored dtype. Requires: distinct
// cells.
void PutRows(const TensorView& from, std::span<const int> cells,
             std::size_t begin, std::size_t end, const StoredRows& to);

// Stores one share of each row: threads divide rows of megabytes.
void PutRowParts(const TensorView& from, std::span<const int> cells,
                 Share share, const StoredRows& to);

// Stores elements [begin, end) of the rows of all tokens.
void PutColumns(const TensorView& from, std::span<const int> cells,
                std::size_t begin, std::size_t end, const StoredColumns& to);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_PUT_ROWS_H_
