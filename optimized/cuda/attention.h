// Decode attention over the cells of a cache: one query row for each row of the
// mask, or for each sequence of a block table. K and V are read once for up to
// 8 heads that share them. As many blocks as fill the device take a part of the
// cells each, and the parts are then combined. Tiles of 32 cells are not read
// if the row sees none of their cells.
//
// Products are of 16-bit numbers on tensor cores, summed as f32, but no f32 is
// rounded to 16 bits: queries and weights, and elements of K and V that are not
// f16, bf16 or f8, are split into two or three such numbers. No element of the
// result is further from exact arithmetic than
//
//   max |v| (e^(2 d) - 1 + r + 2^-17 c (t + splits)), where
//   d = |scale| (|q|.|k| (r + 2^-18 c s) + 2^-39 max |q_i| sum |k_i|)
//       + 2^-22 (range + t + 18),
//
// with d and max |v| the largest over the cells that the row sees, and t the
// number of tiles of 32 cells of which it sees at least one. r is 2^-21, or
// 2^-15 for bf16 rows; s is k_head_dim / 16, rounded up; c is 1, or 4 where
// rows are read by element (below); the range is that of the scores, as
// logarithms to base 2. That is the worst case: in tests, errors are at most an
// eighth of it. props/cuda/cuda_attention.h has the derivation.
//
// Requires: scores are finite, also 2^15 times the scores of a query whose
// largest number is 1. Visible infinities give infinities or NaN. (Not checked:
// that would be as much work as the scores themselves.)

#ifndef KVTWIN_OPTIMIZED_CUDA_ATTENTION_H_
#define KVTWIN_OPTIMIZED_CUDA_ATTENTION_H_

#include <cstddef>
#include <cstdint>

#include "kvtwin/cache.h"
#include "optimized/cuda/runtime.h"

namespace kvtwin::optimized::cuda {

// Queries and results.
struct DecodeQuery {
  const float* query;  // [k_head_dim, heads, rows], dense.
  float* out;          // [v_head_dim, heads, rows], dense.
  int heads;           // A multiple of kv_heads.
  int rows;
  float scale;
  int splits;  // Parts that the cells are split into; 0: chosen.
};

// K and V of a pool's layer, dense: [head_dim, kv_heads, block_size, blocks],
// or [head_dim, block_size, kv_heads, blocks] if head-major.
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
  const int* lengths;  // [rows]: tokens.
};

// Bytes of scratch that a call needs, 256-byte aligned. `cells`: cells of the
// view, or most_blocks * block_size.
std::size_t DecodeScratchBytes(const DecodeQuery& query, int kv_heads,
                               int v_head_dim, std::int64_t cells);

// Attends to the cells of a view, or to the blocks of a table, of any dtype and
// V layout; without a mask, all cells of a view are visible. Puts work on the
// stream and returns the error of the launches; allocates nothing, so that it
// can be captured. Requires: at least one row and one cell; rows of
// neighbouring cells less than 4 GiB apart; in a head-major pool, less than
// 2^32 - 1 rows of a head. (Not checked: the last, because PagedRows does not
// say how many blocks there are.)
//
// Fastest if K and V have the same dtype, f16, bf16 or f8_e4m3, head_dims that
// are multiples of 16, and all runs on 16-byte boundaries. Other rows are read
// element by element. Errors: the launch fails if rows are too wide for the
// shared memory of the device (a k_head_dim of some 2000).
cudaError_t DecodeView(const DecodeQuery& query, const KvView& view,
                       VLayout v_layout, void* scratch, cudaStream_t stream);
cudaError_t DecodePaged(const DecodeQuery& query, const PagedRows& rows,
                        void* scratch, cudaStream_t stream);

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_OPTIMIZED_CUDA_ATTENTION_H_
