// The inner loops over rows of K and V, each compiled for every instruction set
// (see targets.h). What they compute does not depend on the target, to the bit.

#ifndef KVTWIN_OPTIMIZED_ROW_KERNELS_H_
#define KVTWIN_OPTIMIZED_ROW_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "kvtwin/tensor.h"

namespace kvtwin::optimized {

// To and from any dtype of rows but f32, as core/elements.h: rounds to the
// nearest, ties to even, every NaN becomes the first quiet one and its sign;
// and back, exactly. 16 bits lie on even addresses; blocks are whole.
void RoundF32(DType dtype, const float* from, std::byte* to, std::size_t count);
void WidenToF32(DType dtype, const std::byte* from, float* to,
                std::size_t count);

// RoundF32, not of blocks, and memcpy, past the caches: for memory that is not
// in them and will not be read soon. Others may not see what was
// written before this thread's FenceStreams.
void StreamRoundedF32(DType dtype, const float* from, std::byte* to,
                      std::size_t count);
void StreamBytes(const std::byte* from, std::byte* to, std::size_t bytes);
// StreamBytes, while `ahead` and as many bytes after it come to the caches.
void StreamBytesAhead(const std::byte* from, std::byte* to, std::size_t bytes,
                      const std::byte* ahead);
void FenceStreams();

// Tiles, through which rows become columns. Rows are `row_stride` elements
// apart.
inline constexpr std::size_t kTileRows = 32;
inline constexpr std::size_t kTileColumns = 16;

// Element c of row r < count goes to tile[c * kTileRows + r]. Rows and elements
// of the tile from `count` on may be read and written: there are kTileRows.
// Requires: `tile` lies on a cache line.
void Transpose(const float* rows, std::size_t row_stride, std::size_t count,
               float* tile);
void Transpose(const std::uint16_t* rows, std::size_t row_stride,
               std::size_t count, std::uint16_t* tile);
void Transpose(const std::uint8_t* rows, std::size_t row_stride,
               std::size_t count, std::uint8_t* tile);  // An even stride.

// All of a whole tile, past the caches, to columns that are `stride` bytes
// apart. Requires: each goes to cache lines of its own.
void StreamTransposed(const float* rows, std::size_t row_stride, std::byte* to,
                      std::size_t stride);
void StreamTransposed(const std::uint16_t* rows, std::size_t row_stride,
                      std::byte* to, std::size_t stride);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ROW_KERNELS_H_
