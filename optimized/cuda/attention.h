// Decode attention over what a cache holds: one query row for each row of the
// mask, or for each sequence of a block table. K and V are read once for all
// heads that share them, by as many blocks as fill the device (split over the
// cells), and the parts are then combined.

#ifndef KVTWIN_OPTIMIZED_CUDA_ATTENTION_H_
#define KVTWIN_OPTIMIZED_CUDA_ATTENTION_H_

#include <cstddef>
#include <cstdint>

#include "kvtwin/cache.h"
#include "kvtwin/paged.h"
#include "optimized/cuda/runtime.h"

namespace kvtwin::optimized::cuda {

// All pointers are the device's. Column h of row r of the result is the sum
// over the cells of softmax(q.k * scale + mask) v, q being query (h, r); heads
// h * kv_heads / heads share a KV head. A row that sees nothing gives zeros;
// what the mask hides may hold anything, NaN as well.
struct DecodeQuery {
  const float* query;  // [k_head_dim, heads, rows], dense.
  float* out;          // [v_head_dim, heads, rows], dense.
  int heads;           // A multiple of kv_heads.
  int rows;
  float scale;
};

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

// Bytes of scratch memory that a call with these numbers may need, on a
// boundary of 256. `cells`: of the view, or most_blocks * block_size.
std::size_t DecodeScratchBytes(const DecodeQuery& query, int v_head_dim,
                               std::int64_t cells);

// Over the cells of a view, of any dtype and V layout. Puts work on the stream
// and returns what the launches answered; allocates nothing, so that it can be
// captured.
cudaError_t DecodeView(const DecodeQuery& query, const KvView& view,
                       VLayout v_layout, void* scratch, cudaStream_t stream);
cudaError_t DecodePaged(const DecodeQuery& query, const PagedRows& rows,
                        void* scratch, cudaStream_t stream);

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_OPTIMIZED_CUDA_ATTENTION_H_
