// The kernels that write masks, and those that keep what they read up to date
// on the device. They put work on a stream and return; what they answer is what
// the launch answered. Pointers are the device's.

#ifndef KVTWIN_OPTIMIZED_CUDA_MASK_KERNELS_H_
#define KVTWIN_OPTIMIZED_CUDA_MASK_KERNELS_H_

#include <cstdint>

#include "kvtwin/tensor.h"
#include "optimized/cuda/runtime.h"
#include "optimized/kernels.h"

namespace kvtwin::optimized::cuda {

// A word of 64 cells, as it is now: whose of a sequence it has, and where all
// are. PosRange as CellTable::ranges().
struct WordUpdate {
  std::uint64_t* members;  // Of the sequence, from cell 0 on.
  std::uint64_t word;
  std::int64_t index;
  PosRange range;
  std::int32_t positions[64];
};
// Also copies the cells of a batch to where Put looks for them.
struct BatchCells {
  const int* from;
  int* to;
  std::int64_t count;
};
cudaError_t UpdateWords(const WordUpdate* updates, std::int64_t count,
                        std::int32_t* positions, PosRange* ranges,
                        const BatchCells& cells, cudaStream_t stream);

// Some columns of one row: of the cells first .. end - 1, those of `members`
// (from cell 0 on; null: none) at positions in `range` may be attended to.
struct MaskPiece {
  std::byte* out;  // Where the column of `first` is.
  const std::uint64_t* members;
  PosRange range;
  std::int64_t first;
  std::int64_t end;
};
// Writes 0 or -inf; of bits, whole words, the last one filled up with zeros.
// Cells other than those of bits begin at multiples of 64, and their columns on
// boundaries of 64 of them. `longest`: cells of the longest piece.
cudaError_t WriteMask(const MaskPiece* pieces, std::int64_t count,
                      std::int64_t longest, const std::int32_t* positions,
                      const PosRange* ranges, std::int64_t cells, DType dtype,
                      cudaStream_t stream);

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_OPTIMIZED_CUDA_MASK_KERNELS_H_
