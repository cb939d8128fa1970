// Caches and pools in the memory of an NVIDIA GPU, and decode attention over
// them. In libraries that were built with KVTWIN_CUDA=ON; docs/cuda.md.
//
// What is kept in which cell is decided on the host, by the code of the twin
// "optimized"; rows and masks are the device's, and are written, moved and
// shifted there. The twin "cuda" of MakeCache and MakePagedPool is the same,
// but gives views in the memory of the host, and waits for the device to do so:
// to be compared, not to be used.
//
// A call names the stream that its work is put on, and does not wait for it.
// One that comes on another stream than the call before is put behind all that
// is on that one by then, which must still exist. Waits, for the host needs an
// answer: snapshots; Restore and AddSequence; Remove with a shift function of
// your own; a Put of a dtype, shape or size that needs new memory, that is the
// first one of a layer; a StartForward whose mask needs more memory than any
// before; and any call that finds the last dozens of StartForwards, or some
// hundred KiB of tensors of the host, still waiting for the device. All leave
// the thread's current device as it was.
//
// Put and Get, and decode attention, can be captured in a graph. A graph that
// is launched again stores to the cells of the last StartForward, which must
// have had as many tokens, and whose views, as Get tells them, must be where
// they were. That it is done before the next StartForward begins, and begins
// after the last one, is yours to see to, if it is launched on another stream
// than these. What else needs the device is refused (failed_precondition) while
// its stream is captured, or that of the call before, if that was another one;
// and so are tensors in the memory of the host.
//
// What CUDA refuses is a device_error whose message begins with its name, such
// as "cudaErrorMemoryAllocation". If StartForward found no memory for its mask,
// or Put none for its layer, the cache is as it was before, but for what was
// evicted; a Put that fails can be called again. After any other error of a
// call that changes it, all that follows is a device_error that says so, and it
// may only be closed.

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
  // Errors: as MakeCache. Whether there is such a device is for Init to say.
  static Result<std::unique_ptr<CudaCache>> Make(const CacheSpec& spec,
                                                 int device = 0);
  virtual ~CudaCache() = default;

  // The cache: what is called next is put on this stream. Its Put takes tensors
  // in the memory of the device, or of the host, which it copies; its views are
  // in that of the device, ready for what is put on the stream after Get.
  virtual Cache& On(CudaStream stream) = 0;
};

class CudaPool {
 public:
  // Errors: as MakePagedPool; no such device, or no memory; head-major rows of
  // more than INT32_MAX tokens times heads.
  static Result<std::unique_ptr<CudaPool>> Make(const PagedSpec& spec,
                                                int device = 0);
  virtual ~CudaPool() = default;

  // As CudaCache::On, of Append.
  virtual PagedPool& On(CudaStream stream) = 0;
  // K and V of all blocks of a layer: [head_dim, kv_heads, block_size, blocks],
  // or [head_dim, block_size, kv_heads, blocks] if head-major. Errors: no such
  // layer.
  virtual Result<PagedKv> Blocks(int layer) const = 0;
};

// Decode attention. Column h of row r of the result is the sum over the cells
// of softmax(q.k * scale + mask) v, q being query (h, r); heads / kv_heads
// heads in a row share a KV head. A row that sees nothing gives zeros; what the
// mask hides may hold anything, NaN as well. How exact it is: see
// optimized/cuda/attention.h. All pointers are the device's.
struct DecodeQuery {
  const float* query;  // [k_head_dim, heads, rows], dense.
  float* out;          // [v_head_dim, heads, rows], dense.
  int heads;           // A multiple of kv_heads.
  int rows;
  float scale;
  int splits = 0;  // Parts that the cells are taken in; 0: as many as it takes.
};

// Bytes of memory of the device, on a boundary of 256, that a call with these
// numbers needs. `cells`: of the view, or most_blocks * block_size.
std::size_t DecodeScratchBytes(const DecodeQuery& query, int kv_heads,
                               int v_head_dim, std::int64_t cells);

// Over what a cache gave, row r of the query being row r of the mask. The
// current device must be that of all of it. Of any dtypes and layout; fastest
// are K and V of the same dtype, f16, bf16 or f8_e4m3, with head_dims that are
// multiples of 16. Errors: a view that is not the device's; heads that are no
// multiple of its KV heads; more rows than the mask has; a null pointer.
Status Decode(const DecodeQuery& query, const KvView& view, VLayout v_layout,
              void* scratch, CudaStream stream);

// Over blocks of a pool, as CudaPool::Blocks gives them: row r of the query is
// for the first lengths[r] tokens in the blocks that column r of the table has.
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
