// The inner loops over rows of K and V, each compiled for every instruction set
// (see targets.h). Results are bit-identical on all targets.

#ifndef KVTWIN_OPTIMIZED_ROW_KERNELS_H_
#define KVTWIN_OPTIMIZED_ROW_KERNELS_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "kvtwin/tensor.h"

namespace kvtwin::optimized {

// RoundF32 converts f32 to any other dtype of rows, as core/elements.h does: to
// nearest, ties to even; every NaN becomes the format's first quiet NaN with
// its sign. WidenToF32 converts back, exactly. 16-bit elements lie on even
// addresses; blocks are whole.
void RoundF32(DType dtype, const float* from, std::byte* to, std::size_t count);
void WidenToF32(DType dtype, const std::byte* from, float* to,
                std::size_t count);

// RoundF32 (without block dtypes) and memcpy, writing past the caches: for
// memory that is not cached and will not be read soon. Other threads may not
// see the data until this thread calls FenceStreams.
void StreamRoundedF32(DType dtype, const float* from, std::byte* to,
                      std::size_t count);
void StreamBytes(const std::byte* from, std::byte* to, std::size_t bytes);
// StreamBytes for four rows at once, which the processor reads and writes
// faster than one after the other. Meanwhile the rows of `next` are fetched.
struct RowCopy {
  const std::byte* from;
  std::byte* to;
};
using RowCopies = std::array<RowCopy, 4>;
void StreamRows(const RowCopies& rows, const RowCopies& next,
                std::size_t bytes);
void FenceStreams();

// Rows become columns tile by tile. Rows are `row_stride` elements apart.
inline constexpr std::size_t kTileRows = 32;
inline constexpr std::size_t kTileColumns = 16;

// Element c of row r < count goes to tile[c * kTileRows + r]. The rest of the
// kTileRows rows, and of the tile, may be read and written. Requires: `tile`
// lies on a cache line.
void Transpose(const float* rows, std::size_t row_stride, std::size_t count,
               float* tile);
void Transpose(const std::uint16_t* rows, std::size_t row_stride,
               std::size_t count, std::uint16_t* tile);
void Transpose(const std::uint8_t* rows, std::size_t row_stride,
               std::size_t count, std::uint8_t* tile);  // Even row_stride.

// Transposes a whole tile, writing past the caches, to columns that are
// `stride` bytes apart. Requires: the tile's part of each column is whole cache
// lines.
void StreamTransposed(const float* rows, std::size_t row_stride, std::byte* to,
                      std::size_t stride);
void StreamTransposed(const std::uint16_t* rows, std::size_t row_stride,
                      std::byte* to, std::size_t stride);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ROW_KERNELS_H_
