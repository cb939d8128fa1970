// K or V rows in device memory. The layouts, the numbers and what is rounded
// how are those of the host's (optimized/storage.h), to the bit.
//
// All of these put work on a stream and return; what they answer is what the
// launch answered. Pointers are the device's.

#ifndef KVTWIN_OPTIMIZED_CUDA_ROWS_H_
#define KVTWIN_OPTIMIZED_CUDA_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvtwin/tensor.h"
#include "optimized/cell_table.h"
#include "optimized/cuda/runtime.h"

namespace kvtwin::optimized::cuda {

// The K or V rows of all cells of a layer, dense.
struct StoredRows {
  std::byte* data;
  DType dtype;
  VLayout layout;
  int head_dim;
  int heads;
  std::int64_t cells;
};

// Rows have fewer than 2^30 elements: what is asked of others answers
// cudaErrorInvalidValue.

// Stores row i of `from`, [head_dim, heads, tokens], any strides, of f32 or the
// dtype that is stored, in cells[i]. Requires: distinct cells.
cudaError_t PutRows(const TensorView& from, const int* cells,
                    const StoredRows& to, cudaStream_t stream);

// The other way, without a conversion: row i of `out`, dense, is that of
// cells[i].
cudaError_t GatherRows(const StoredRows& from, const int* cells,
                       std::int64_t count, std::byte* out, cudaStream_t stream);

// Moves, ordered so that each can be done without a copy of all that is moved:
// in a chain, the row of each cell goes to the cell before it; in a cycle, the
// row of the first goes to the last as well.
struct MoveChains {
  std::vector<int> cells;
  // Chain i is cells[begins[i]] .. cells[begins[i + 1] - 1].
  std::vector<int> begins;
  std::vector<int> cycles;  // 1 for each chain that is one, else 0.
};
// All sources are read before any cell is written: a cell may be in two moves,
// once as a source, once as a destination. Replaces `out`. Requires: no cell is
// twice a destination.
void OrderMoves(std::span<const CellMove> moves, MoveChains& out);

// The same in device memory.
struct DeviceChains {
  const int* cells;
  const int* begins;
  const int* cycles;
  int count;  // Of chains.
};
// Moves the rows of `tensors`, at most 65535 in device memory, in one launch.
// `most_row_bytes`: of the widest of them, and `most_row_elements`.
cudaError_t MoveRows(const StoredRows* tensors, int tensor_count,
                     const DeviceChains& chains, std::int64_t most_row_bytes,
                     std::int64_t most_row_elements, cudaStream_t stream);

// Blocks of a paged pool, of K or V of a layer, one after another.
struct StoredBlocks {
  std::byte* data;
  std::int64_t block_bytes;
};
// Copies block from_to[2 * i] of each of `tensors`, at most 65535 in device
// memory, to block from_to[2 * i + 1], for i < count. `most_block_bytes`: of
// the largest, below 4 GiB. Requires: no block that is written is in two pairs.
cudaError_t CopyBlocks(const StoredBlocks* tensors, int tensor_count,
                       const int* from_to, std::int64_t count,
                       std::int64_t most_block_bytes, cudaStream_t stream);

// A shift of K rows by one offset, as RowShift has it (optimized/row_shift.h).
struct DeviceShift {
  enum class Kind { kAdd, kTagAdd, kTurnAdjacent, kTurnHalves };
  Kind kind;
  float offset;
  int pairs;             // Of a head, that turn.
  const float* cosines;  // For each of 2 * pairs elements of a head; the sine
  const float* sines;    // with the sign that it has for that element.
};
// Shifts the K rows of cells[0 .. count - 1]. What does not change keeps its
// bits: an element, or a block of them. Of blocks, a head that turns by halves
// takes no more than 48 KiB, or the answer is cudaErrorInvalidValue.
cudaError_t ShiftRows(const StoredRows& keys, const int* cells,
                      std::int64_t count, const DeviceShift& shift,
                      cudaStream_t stream);

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_OPTIMIZED_CUDA_ROWS_H_
