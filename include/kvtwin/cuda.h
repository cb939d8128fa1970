// Caches and pools in the memory of an NVIDIA GPU, and decode attention over
// them. Only in libraries built with KVTWIN_CUDA=ON; see docs/cuda.md.
//
// The host decides which cell holds which token, with the code of the twin
// "optimized". Rows and masks are in device memory, and are written, moved and
// shifted there. The twin "cuda" of MakeCache and MakePagedPool is the same
// cache, but its views are in host memory, and it waits for the device to fill
// them: it is for comparing twins, not for production.
//
// A call puts its work on the stream it names, and does not wait for it. If the
// previous call was on another stream, which must still exist, the work is
// ordered after everything on that stream at the time of the call. These calls
// wait for the device, because the host needs an answer: snapshots; Restore and
// AddSequence; Remove with the caller's own shift function; a Put that needs
// new memory for its dtype, shape or size, as the first Put of a layer does; a
// StartForward whose mask needs more memory than any before; and any call while
// the last dozens of StartForwards, or some hundred KiB of host tensors, still
// wait for the device. All calls leave the thread's current device as it was.
//
// Put and Get, and decode attention, can be captured in a graph. A graph that
// is launched again stores to the cells of the last StartForward, which must
// have had the same number of tokens, and whose views, as Get returns them,
// must be at the same addresses. If the graph is launched on a stream other
// than that of the StartForwards, the caller must make sure that it begins
// after the last StartForward and ends before the next one. While the stream of
// a call, or of the call before it, is being captured, all other calls that
// need the device, and tensors in host memory, are a failed_precondition.
//
// An error of CUDA is a device_error whose message begins with the error's
// name, such as "cudaErrorMemoryAllocation". If StartForward found no memory
// for its mask, or Put no memory for its layer, the cache is as it was before,
// except for evictions; such a Put can be called again. After any other error
// of a call that changes the cache, every later call is a device_error that
// says so, and the cache may only be closed.

#ifndef KVTWIN_CUDA_H_
#define KVTWIN_CUDA_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvtwin/cache.h"
#include "kvtwin/paged.h"
#include "kvtwin/status.h"

struct CUstream_st;

namespace kvtwin {

using CudaStream = CUstream_st*;  // cudaStream_t. Null: the default stream.

class CudaCache {
 public:
  // Errors: as MakeCache. Init returns the error if there is no such device.
  static Result<std::unique_ptr<CudaCache>> Make(const CacheSpec& spec,
                                                 int device = 0);
  virtual ~CudaCache() = default;

  // Returns the cache; its next calls put their work on this stream. Put takes
  // tensors in device memory, or in host memory, which it copies. Views are in
  // device memory, ready for work that is put on the stream after Get.
  virtual Cache& On(CudaStream stream) = 0;
};

class CudaPool {
 public:
  // Errors: as MakePagedPool; no such device; not enough memory; a head-major
  // pool with more than INT32_MAX tokens times heads.
  static Result<std::unique_ptr<CudaPool>> Make(const PagedSpec& spec,
                                                int device = 0);
  virtual ~CudaPool() = default;

  // As CudaCache::On, with Append in the place of Put.
  virtual PagedPool& On(CudaStream stream) = 0;
  // As PagedPool::Blocks, in device memory.
  virtual Result<PagedKv> Blocks(int layer) const = 0;
};

// Decode attention. Column h of row r of the result is the sum over the cells
// of softmax(q.k * scale + mask) v, where q is query (h, r); heads / kv_heads
// consecutive heads share a KV head. The result of a row that sees no cell is
// zeros. Cells that the mask hides may hold anything, NaN as well. The accuracy
// is stated in optimized/cuda/attention.h. All pointers are to device memory.
struct DecodeQuery {
  const float* query;  // [k_head_dim, heads, rows], dense.
  float* out;          // [v_head_dim, heads, rows], dense.
  int heads;           // A multiple of kv_heads.
  int rows;
  float scale;
  int splits = 0;  // Parts that the cells are split into; 0: chosen by Decode.
};

// Bytes of scratch in device memory, 256-byte aligned, that Decode needs with
// these arguments. `cells`: cells of the view, or most_blocks * block_size.
std::size_t DecodeScratchBytes(const DecodeQuery& query, int kv_heads,
                               int v_head_dim, std::int64_t cells);

// Computes decode attention over the view of a cache; row r of the query
// belongs to row r of the mask. Everything must be on the current device.
// Takes all dtypes and layouts; fastest are K and V of the same dtype, f16,
// bf16 or f8_e4m3, with head_dims that are multiples of 16. Errors: a view that
// is not in device memory; heads that are not a multiple of the view's KV
// heads; more rows than the mask has; a null pointer.
Status Decode(const DecodeQuery& query, const KvView& view, VLayout v_layout,
              void* scratch, CudaStream stream);

// Decode attention over the blocks of a pool, as CudaPool::Blocks returns them:
// row r of the query attends to the first lengths[r] tokens in the blocks that
// column r of the table lists.
struct DecodeTable {
  const int* blocks;  // [most_blocks, rows].
  int most_blocks;
  const int* lengths;  // [rows]
};
Status Decode(const DecodeQuery& query, const PagedKv& blocks,
              PagedLayout layout, const DecodeTable& table, void* scratch,
              CudaStream stream);

}  // namespace kvtwin

#endif  // KVTWIN_CUDA_H_
