// The kernels that write masks, and those that update their input on the
// device. The functions put work on a stream and return the error of the
// launch. Pointers are device pointers.

#ifndef KVTWIN_OPTIMIZED_CUDA_MASK_KERNELS_H_
#define KVTWIN_OPTIMIZED_CUDA_MASK_KERNELS_H_

#include <cstdint>

#include "kvtwin/tensor.h"
#include "optimized/cuda/runtime.h"
#include "optimized/kernels.h"

namespace kvtwin::optimized::cuda {

// The current state of a word of 64 cells: which of them a sequence has, and
// the positions of all. `range` is that of CellTable::ranges().
struct WordUpdate {
  std::uint64_t* members;  // The sequence's, from cell 0 on.
  std::uint64_t word;
  std::int64_t index;
  PosRange range;
  std::int32_t positions[64];
};
// UpdateWords also copies the cells of a batch to the memory that Put reads.
struct BatchCells {
  const int* from;
  int* to;
  std::int64_t count;
};
cudaError_t UpdateWords(const WordUpdate* updates, std::int64_t count,
                        std::int32_t* positions, PosRange* ranges,
                        const BatchCells& cells, cudaStream_t stream);

// Some columns of one row. Of the cells first .. end - 1, those of `members`
// (from cell 0 on; null: none) at positions in `range` are visible.
struct MaskPiece {
  std::byte* out;  // The column of `first`.
  const std::uint64_t* members;
  PosRange range;
  std::int64_t first;
  std::int64_t end;
};
// Writes 0 or -inf; as bits, whole words, the last one padded with zeros.
// Unless the dtype is bits, `first` is a multiple of 64, and `out` on a
// boundary of 64 elements. `longest`: cells of the longest piece.
cudaError_t WriteMask(const MaskPiece* pieces, std::int64_t count,
                      std::int64_t longest, const std::int32_t* positions,
                      const PosRange* ranges, std::int64_t cells, DType dtype,
                      cudaStream_t stream);

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_OPTIMIZED_CUDA_MASK_KERNELS_H_
