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

#include "kvtwin/attention.h"
#include "kvtwin/cache.h"
#include "kvtwin/paged.h"
#include "kvtwin/status.h"
#include "kvtwin/tensor.h"

struct CUstream_st;

namespace kvtwin {

using CudaStream = CUstream_st*;  // cudaStream_t. Null: the default stream.

// A cache whose K, V and mask are in the memory of a GPU.
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

// A pool of blocks in the memory of a GPU.
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

// Decode attention, by the formula and with the structures of
// kvtwin/attention.h. All of their pointers are to memory of the current
// device. The accuracy is stated in optimized/cuda/attention.h.
//
// query = [k_head_dim, heads, rows], dense f32; `heads` is a multiple of the KV
// heads. Of the options, `scale` and `splits` are taken. Errors: not_supported:
// soft_cap, sinks, log_sum_exp, a window, sees_all, query_rows, or a query of
// another dtype or other strides, which the other twins have; invalid_argument:
// a view in host memory; a null pointer; shapes that do not fit to each other;
// a scale or splits outside of their range.

// Bytes of scratch in device memory, 256-byte aligned, that Decode needs for a
// query of this shape. `cells`: cells of the view, or columns * block_size of
// the table. `splits`: as in the options. Requires: dimensions of at least 1.
std::size_t DecodeScratchBytes(const Shape& query, int kv_heads, int v_head_dim,
                               std::int64_t cells, int splits = 0);

// Computes attention over the view of a cache; row r of the query belongs to
// row r of the mask. Without a mask, all cells are visible. Takes all dtypes
// and layouts; fastest are K and V of the same dtype, f16, bf16 or f8_e4m3,
// with head_dims that are multiples of 16. Other errors: more rows than the
// mask has.
Status Decode(const TensorView& query, const KvView& view, VLayout v_layout,
              const AttentionOptions& options, const AttentionOut& out,
              void* scratch, CudaStream stream);

// Computes attention over the blocks of a layer, as a CudaPool returns them.
// Each sequence of the table has one row of the query, so `query_rows` is
// empty. Entries of `blocks` past a sequence's end are not read; the result of
// a length of 0 is zeros. The numbers in the table's lists are not checked.
Status Decode(const TensorView& query, const PagedKv& blocks,
              PagedLayout layout, const AttentionTable& table,
              const AttentionOptions& options, const AttentionOut& out,
              void* scratch, CudaStream stream);

}  // namespace kvtwin

#endif  // KVTWIN_CUDA_H_
