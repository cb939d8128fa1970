// K or V rows in device memory. Layouts, numbers and rounding are those of the
// host (optimized/storage.h), to the bit.
//
// All functions but OrderMoves put work on a stream and return the error of the
// launch. Pointers are device pointers.

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

// Rows must have fewer than 2^30 elements: otherwise the functions return
// cudaErrorInvalidValue.

// Stores row i of `from` in cells[i]. `from` is [head_dim, heads, tokens], with
// any strides, of f32 or the stored dtype. Requires: distinct cells. (Not
// checked here, because the cells are in device memory: DeviceMemory does it.)
cudaError_t PutRows(const TensorView& from, const int* cells,
                    const StoredRows& to, cudaStream_t stream);

// Reads rows without a conversion: row i of `out`, dense, is the row of
// cells[i].
cudaError_t GatherRows(const StoredRows& from, const int* cells,
                       std::int64_t count, std::byte* out, cudaStream_t stream);

// Moves in an order that needs no copy of all rows: in a chain, the row of each
// cell goes to the cell before it; in a cycle, the row of the first cell also
// goes to the last cell.
struct MoveChains {
  std::vector<int> cells;
  // Chain i is cells[begins[i]] .. cells[begins[i + 1] - 1].
  std::vector<int> begins;
  std::vector<int> cycles;  // 1 for each chain that is a cycle, else 0.
};
// Orders moves as if all sources were read before any cell is written: a cell
// may be in two moves, once as a source, once as a destination. Replaces `out`.
// Requires: no cell is twice a destination.
void OrderMoves(std::span<const CellMove> moves, MoveChains& out);

// MoveChains in device memory.
struct DeviceChains {
  const int* cells;
  const int* begins;
  const int* cycles;
  int count;  // Number of chains.
};
// Moves the rows of `tensors`, at most 65535 in device memory, in one launch.
// `max_row_bytes` and `max_row_elements` are maxima over the tensors.
cudaError_t MoveRows(const StoredRows* tensors, int tensor_count,
                     const DeviceChains& chains, std::int64_t max_row_bytes,
                     std::int64_t max_row_elements, cudaStream_t stream);

// The blocks of a paged pool, K or V of one layer, one after another.
struct StoredBlocks {
  std::byte* data;
  std::int64_t block_bytes;
};
// Copies block from_to[2 * i] of each of `tensors`, at most 65535 in device
// memory, to block from_to[2 * i + 1], for i < count. `max_block_bytes`: the
// size of the largest block, below 4 GiB. Requires: no block that is written is
// in two pairs. (Not checked: the pairs are in device memory.)
cudaError_t CopyBlocks(const StoredBlocks* tensors, int tensor_count,
                       const int* from_to, std::int64_t count,
                       std::int64_t max_block_bytes, cudaStream_t stream);

// A shift of K rows by one offset, as prepared by RowShift
// (optimized/row_shift.h).
struct DeviceShift {
  enum class Kind { kAdd, kTagAdd, kTurnAdjacent, kTurnHalves };
  Kind kind;
  float offset;
  int pairs;             // Pairs of a head that turn.
  const float* cosines;  // For each of 2 * pairs elements of a head.
  const float* sines;    // The same, with the sign for the element.
};
// Shifts the K rows of cells[0 .. count - 1]. Elements, or blocks of them, that
// do not change keep their bits. With a block dtype, a head that turns by
// halves may take at most 48 KiB; otherwise returns cudaErrorInvalidValue.
cudaError_t ShiftRows(const StoredRows& keys, const int* cells,
                      std::int64_t count, const DeviceShift& shift,
                      cudaStream_t stream);

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_OPTIMIZED_CUDA_ROWS_H_
