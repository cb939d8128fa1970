// The attention cache of a language model: which K and V rows a batch of
// tokens may attend to.
//
// A cache holds tokens in cells. A forward pass is
//
//   StartForward(batch)              finds a cell for every token
//   for each layer: SetLayer(layer)
//                   Put(key, value)  stores the batch's rows
//                   Get()            views of all rows, and the mask
//
// and between passes CopyPrefix, Remove and CanResume manage sequences. What
// each call must do is defined in docs/semantics.md and by the two models in
// reference/; every other implementation is a claim that props/ tries to
// refute.
//
// Misuse (empty batch, negative position, wrong shape, call out of order, ...)
// returns invalid_argument or failed_precondition and changes nothing.
//
// Not thread-safe: one call at a time on one cache. Views stay valid until the
// next StartForward, SetCausal, Put to the same encoder layer, Restore,
// AddSequence, Close or destruction. Any number of threads may read a view
// meanwhile, also while another thread makes calls that leave it valid, but for
// what these write: Put, the batch's rows of its layer; Remove with a shift,
// rows of K. Where memory runs out, std::bad_alloc passes through; the cache
// may then only be closed.

#ifndef KVTWIN_CACHE_H_
#define KVTWIN_CACHE_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "kvtwin/shift.h"
#include "kvtwin/state.h"
#include "kvtwin/status.h"
#include "kvtwin/tensor.h"

namespace kvtwin {

// As the end of a range: everything from its begin on.
inline constexpr std::int32_t kOpenEnd =
    std::numeric_limits<std::int32_t>::max();

enum class Kind {
  kCausal,   // Every token sees all of its past.
  kSwa,      // Sliding window: only the last `window` positions and itself.
  kSwaMem,   // The same, and keeps `memory` positions for resuming.
  kChunked,  // Only its own chunk of `chunk` positions.
  kEncoder,  // One slot of any shape, without positions.
  kWrapper,  // Several caches behind one interface.
};

// How a batch gets its cells.
enum class Placement {
  kContiguous,  // The first free run that is long enough, else defrag, retry.
  kScatter,     // The lowest free cells, wherever they are.
};

// What kind of cache to make. Fields that a kind does not use are ignored.
struct CacheSpec {
  Kind kind = Kind::kCausal;
  Placement placement = Placement::kContiguous;
  std::optional<std::int32_t> window = {};  // >= 0. Unset: unbounded.
  std::optional<std::int32_t> memory = {};  // >= window. Unset: the window.
  std::int32_t chunk = 0;                   // > 0 for kChunked.
  Shift shift = {};
  std::vector<CacheSpec> caches = {};  // For kWrapper, at least one, no
                                       // wrappers. Each has its own placement.
};

// Wishes of the kernels that read the views.
struct CacheConfig {
  int cache_padding = 1;       // Views begin and end at multiples of this.
  int mask_batch_padding = 1;  // Mask rows are rounded up to this; extra rows
                               // are all -inf.
  VLayout v_layout = VLayout::kPlain;  // Encoders have no tiles.
  DType mask_dtype = DType::kF32;      // f32, f16, bf16 or bits.
  std::optional<DType> v_dtype = {};   // Of stored V rows. Unset: as of K.
};

// The tokens of one forward pass, entry i being token i.
struct Batch {
  std::span<const std::int32_t> positions;  // >= 0, in any order.
  std::span<const int> sequences;           // >= 0, as many as positions.
  // Indices of the entries that carry an image or sound (encoder caches).
  std::span<const int> multimodal = {};
};

// What attention reads. No copy: these point into the cache.
struct KvView {
  TensorView key;      // [k_head_dim, kv_heads, cells]
  TensorView value;    // [v_head_dim, kv_heads, cells], or as VLayout says.
  TensorView mask;     // [cells, rows]: 0 may attend, -inf may not; of bits,
                       // 1 may. Column 0 is first_cell, wherever that is.
                       // Rows may lie apart: stride[1].
  int first_cell = 0;  // The cell of the views' first column.
  // Where they lie. On a device they are ready for work that is put on this
  // stream, a cudaStream_t, or behind it; see kvtwin/cuda.h.
  Device device = Device::kCpu;
  void* stream = nullptr;
};

class Cache {
 public:
  virtual ~Cache() = default;

  // Before Init, and at most once. Errors: a padding < 1; tiled V unless
  // cache_padding is of whole tiles; a mask of f8 or in blocks; V rows of bits.
  virtual Status SetConfig(const CacheConfig& config) = 0;

  // Once. `dtype` is that of the stored rows, but for V if the configuration
  // has another: any but bits. `capacity` is in tokens for each sequence,
  // `max_batch` in tokens. Errors: bits; blocks of permuted or tiled V; a value
  // < 1; memory < window; more than INT32_MAX cells; an encoder with several
  // sequences or a padding.
  virtual Status Init(DType dtype, int max_sequences, int capacity,
                      int max_batch) = 0;

  // Frees everything. Every later call is a failed_precondition. Idempotent.
  virtual void Close() = 0;

  // Picks the layer of the next Put and Get; >= 0, 0 at first.
  virtual Status SetLayer(int layer) = 0;

  // Finds a cell for each batch token: cache_full if there is none (the pass
  // is then over). With `reserve` nothing is stored or changed, and views and
  // mask have their worst-case size: all cells.
  virtual Status StartForward(const Batch& batch, bool reserve) = 0;

  // From now on the batch entries at the indices `except` also see tokens
  // after them. Replaces the indices of an earlier call; forgotten by the next
  // StartForward. Encoder: not_supported. Wrapper: the active cache.
  virtual Status SetCausal(std::span<const int> except) = 0;

  // Stores the batch's rows in the current layer: key = [k_head_dim, kv_heads,
  // batch], value = [v_head_dim, kv_heads, batch], any strides, dtype f32 or
  // that of the stored rows. The first Put of a layer fixes its dimensions.
  // Errors: a head_dim that is not of whole blocks where the stored rows are.
  // Encoder: any shape; stored as they come.
  virtual Status Put(const TensorView& key, const TensorView& value) = 0;

  // Views of the current layer. Needs a pass and an earlier Put to the layer.
  virtual Result<KvView> Get() = 0;

  // `dst` becomes the tokens of `src` at positions < len. Rows are shared, not
  // copied. dst == src truncates. Encoder: not_supported.
  virtual Status CopyPrefix(int src, int dst, std::int32_t len) = 0;

  // Whether `seq` can go on at `pos` with its whole window still stored.
  virtual Result<bool> CanResume(int seq, std::int32_t pos) = 0;

  // Tokens at positions in [begin, end) leave `seq`; unless end is kOpenEnd,
  // later ones move down by end - begin. Errors: shared_cells, not_supported.
  virtual Status Remove(int seq, std::int32_t begin, std::int32_t end) = 0;

  // Wrapper: picks the active cache, 0 after each StartForward. Others:
  // not_supported.
  virtual Status SetLayerType(int type) = 0;

  // Wrapper: the active cache, owned by the wrapper. Others: this one.
  virtual Cache* UnderlyingCache() = 0;

  // Encoder: whether the slot holds something. Wrapper: asks the active cache.
  // Others: not_supported.
  virtual Result<bool> EncoderCached() = 0;

  // What the cache holds, without the current pass. A cache of your own may
  // leave this and Restore out: not_supported.
  Result<CacheState> Snapshot() const;
  // The same; replaces `state` and uses its memory again.
  virtual Status SnapshotTo(CacheState& state) const;

  // Holds exactly that from now on, as if Init were just over: no pass, layer
  // and layer type 0. The state may come from a cache with another padding,
  // placement, V layout (encoders: the same) or number of cells, if it fits.
  // Else it is an invalid_argument.
  virtual Status Restore(const CacheState& state);

  // One sequence alone, to park it and to load it beside others. These are
  // SequenceOf of a Snapshot, and Restore of WithSequence (kvtwin/save.h), but
  // copy nothing of the others, and leave the rows of free cells alone. A cache
  // of your own may leave AddSequence out: not_supported. Errors: a negative
  // sequence; as WithSequence.
  virtual Result<CacheState> SnapshotOf(int sequence) const;
  virtual Status AddSequence(int sequence, const CacheState& added);

  // For inspection. All of a wrapper's are those of its active cache.
  //
  // Cells in all; 0 before Init and for an encoder.
  virtual int CellCount() const = 0;
  // The cell of each batch token of the current pass; empty without one.
  virtual std::span<const int> BatchCells() const = 0;
  // Replaces `out` by all memberships, by cell, then by sequence.
  virtual void ListCells(std::vector<CellEntry>& out) const = 0;
};

// Makes a cache; `twin` is one of TwinNames(). Errors: an unknown twin, or a
// spec that no Init could accept.
Result<std::unique_ptr<Cache>> MakeCache(const CacheSpec& spec,
                                         std::string_view twin = "optimized");

// "reference", "optimized"; in a library with CUDA "cuda" as well.
std::span<const std::string_view> TwinNames();

}  // namespace kvtwin

#endif  // KVTWIN_CACHE_H_
