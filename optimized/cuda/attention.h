// Decode attention over what a cache holds: one query row for each row of the
// mask, or for each sequence of a block table. K and V are read once for up to
// 8 heads that share them, by as many blocks as fill the device (split over the
// cells), and the parts are then combined. Of 32 cells none of which a row sees
// nothing is read.
//
// Products are of 16 bits on tensor cores and summed as f32, but no f32 is
// rounded to 16 bits: queries and weights, and elements of K and V that are no
// f16, bf16 or f8, are two such numbers or three. No element of the result is
// further from exact arithmetic than
//
//   max |v| (e^(2 d) - 1 + r + 2^-17 c (t + splits)), where
//   d = |scale| (|q|.|k| (r + 2^-18 c s) + 2^-39 max |q_i| sum |k_i|)
//       + 2^-22 (range + t + 18),
//
// the largest over the cells that the row sees, t times 32 cells one of which
// it sees. r is 2^-21, of bf16 rows 2^-15; s is k_head_dim / 16, rounded up; c
// is 1, or 4 where rows are read by element (below); the range is that of the
// scores, as logarithms to base 2. That is the worst case; in tests, errors are
// an eighth of it at most. props/cuda/cuda_attention.h has the steps.
//
// Requires: scores are finite, also 2^15 times those of a query whose largest
// number is 1; what is infinite and seen gives infinities or NaN.

#ifndef KVTWIN_OPTIMIZED_CUDA_ATTENTION_H_
#define KVTWIN_OPTIMIZED_CUDA_ATTENTION_H_

#include <cstddef>
#include <cstdint>

#include "kvtwin/cache.h"
#include "kvtwin/cuda.h"
#include "optimized/cuda/runtime.h"

namespace kvtwin::optimized::cuda {

using kvtwin::DecodeQuery;
using kvtwin::DecodeScratchBytes;

// K and V of a pool's layer, dense, [head_dim, kv_heads, block_size, blocks],
// or of the head-major layout [head_dim, block_size, kv_heads, blocks].
struct PagedRows {
  const std::byte* key;
  const std::byte* value;
  DType k_dtype;
  DType v_dtype;
  int k_head_dim;
  int v_head_dim;
  int kv_heads;
  int block_size;
  bool head_major;
  const int* table;  // [most_blocks, rows]: the blocks of each row's tokens.
  int most_blocks;
  const int* lengths;  // [rows]: in tokens.
};

// Over the cells of a view, of any dtype and V layout; all are seen if it has
// no mask. Puts work on the stream and returns what the launches answered;
// allocates nothing, so that it can be captured. Requires: a row and a cell;
// rows of neighbouring cells less than 4 GiB apart; of a head-major pool, less
// than 2^32 - 1 rows of a head.
//
// Fastest are K and V of the same dtype, f16, bf16 or f8_e4m3, with head_dims
// that are multiples of 16 and all runs on 16-byte boundaries. Anything else
// takes the same way, but is read by element. Error: rows that are too wide for
// the shared memory of the device (a k_head_dim of some 2000), as the launch
// has it.
cudaError_t DecodeView(const DecodeQuery& query, const KvView& view,
                       VLayout v_layout, void* scratch, cudaStream_t stream);
cudaError_t DecodePaged(const DecodeQuery& query, const PagedRows& rows,
                        void* scratch, cudaStream_t stream);

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_OPTIMIZED_CUDA_ATTENTION_H_
