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
// reference/; props/ tests every other implementation against these models.
//
// Misuse (empty batch, negative position, wrong shape, call out of order, ...)
// returns invalid_argument or failed_precondition and changes nothing.
//
// Not thread-safe: one call at a time on one cache. Views stay valid until the
// next StartForward, SetCausal, Put to the same encoder layer, Restore,
// AddSequence, Close or destruction. Until then any number of threads may read
// a view, even while another thread makes calls that leave it valid, except for
// the rows that such a call writes: Put writes the batch's rows of its layer,
// Remove with a shift writes rows of K. If memory runs out, std::bad_alloc
// passes through; after that the cache may only be closed.

#ifndef KVTWIN_CACHE_H_
#define KVTWIN_CACHE_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvtwin/shift.h"
#include "kvtwin/state.h"
#include "kvtwin/status.h"
#include "kvtwin/tensor.h"

namespace kvtwin {

// As the parent of a batch token: it is an ordinary token, or a draft that
// follows the committed tokens of its sequence.
inline constexpr int kNotADraft = -2;
inline constexpr int kCommitted = -1;

// As the end of a range: the range has every position from its begin on.
inline constexpr std::int32_t kOpenEnd =
    std::numeric_limits<std::int32_t>::max();

// The tokens that a token of a cache sees, and the tokens that the cache keeps.
enum class Kind {
  kCausal,     // Every token sees all of its past.
  kSwa,        // Sliding window: only the last `window` positions and itself.
  kSwaMem,     // The same, and keeps `memory` positions for resuming.
  kChunked,    // Only its own chunk of `chunk` positions.
  kEncoder,    // One slot of any shape, without positions.
  kWrapper,    // Several caches behind one interface.
  kRecurrent,  // States: each folds the tokens of a sequence up to one.
  kHybrid,     // A wrapper whose caches have one length.
};

// Whether caches of this kind consist of other caches.
constexpr bool IsWrapper(Kind kind) {
  return kind == Kind::kWrapper || kind == Kind::kHybrid;
}

// Whether caches of this kind have a window.
constexpr bool IsWindowed(Kind kind) {
  return kind == Kind::kSwa || kind == Kind::kSwaMem;
}

// How a batch gets its cells.
enum class Placement {
  kContiguous,  // The first free run that is long enough, else defrag, retry.
  kScatter,     // The lowest free cells, wherever they are.
};

// The cache to make. Fields that a kind does not use are ignored.
struct CacheSpec {
  Kind kind = Kind::kCausal;  // The tokens that a token sees.
  Placement placement = Placement::kContiguous;  // How a batch gets its cells.
  std::optional<std::int32_t> window = {};       // >= 0. Unset: unbounded.
  std::optional<std::int32_t> memory = {};  // >= window. Unset: the window.
  std::int32_t chunk = 0;                   // > 0 for kChunked.
  // For kRecurrent: a sequence keeps its last `checkpoints` states after a
  // number of tokens that is a multiple of `checkpoint_every`; 0: it keeps
  // none. Both >= 0.
  std::int32_t checkpoint_every = 0;
  std::int32_t checkpoints = 0;
  // For kRecurrent, both >= 0: a sequence keeps up to `pins` states that
  // Checkpoint pinned, and has room for the states of `drafts` drafts. With 0,
  // Checkpoint, or drafts, are not_supported.
  std::int32_t pins = 0;
  std::int32_t drafts = 0;
  // How K rows change when their position does.
  Shift shift = {};
  // The caches of a kWrapper or a kHybrid: at least one. None of them is a
  // kWrapper or a kHybrid. Each has its own placement.
  std::vector<CacheSpec> caches = {};
};

// How the kernels that read the views need them to be.
struct CacheConfig {
  int cache_padding = 1;       // Views begin and end at multiples of this.
  int mask_batch_padding = 1;  // Mask rows are rounded up to this; extra rows
                               // are all -inf.
  VLayout v_layout = VLayout::kPlain;  // Encoders have no tiles.
  DType mask_dtype = DType::kF32;      // f32, f16, bf16 or bits.
  std::optional<DType> v_dtype = {};   // Stored V rows. Unset: same as K.
};

// The dtype and the size of a cache.
struct InitArgs {
  DType dtype = DType::kF32;  // The stored rows: any but bits. V rows too,
                              // unless CacheConfig sets v_dtype.
  // There are max_sequences * capacity cells, or fewer with a window (S4). All
  // sequences share them: these limit neither sequence ids nor positions.
  int max_sequences = 0;
  int capacity = 0;
  int max_batch = 0;  // Tokens of a batch.
};

// The tokens of one forward pass. Entry i of each list is for token i.
struct Batch {
  std::span<const std::int32_t> positions = {};  // >= 0, in any order.
  std::span<const int> sequences = {};           // >= 0, as many as positions.
  // Indices of the tokens that carry an image or sound (encoder caches).
  std::span<const int> multimodal = {};
  // Speculative decoding (docs/speculation.md): empty, or as many as positions.
  // Token i is a draft that follows draft number parents[i] of its sequence, or
  // the committed tokens (kCommitted); or it is an ordinary token (kNotADraft).
  // The drafts of a sequence are numbered 0, 1, 2, ... in the order of the
  // batches since its last Commit. Siblings have the same position. A draft
  // sees the committed tokens, its ancestors and itself; only the draft itself
  // and its descendants see it.
  std::span<const int> parents = {};
};

// The tensors that attention reads. They are not copies: they point into the
// cache.
struct KvView {
  TensorView key = {};    // [k_head_dim, kv_heads, cells]
  TensorView value = {};  // [v_head_dim, kv_heads, cells], or as VLayout says.
  // [cells, rows]: 0 may attend, -inf may not; in a mask of bits, 1 may attend.
  // Column 0 is first_cell. There may be gaps between rows: see stride[1].
  TensorView mask = {};
  int first_cell = 0;  // The cell of the views' first column.
  // Where the tensors lie. On a device they are ready for work on this stream,
  // a cudaStream_t, or work ordered after it; see kvtwin/cuda.h.
  Device device = Device::kCpu;
  void* stream = nullptr;
};

// A cache of the K and V rows of a model, as the top of the header says.
class Cache {
 public:
  virtual ~Cache() = default;

  // This call must come before Init, at most once. Errors: a padding < 1; tiled
  // V unless cache_padding is a multiple of kTileCells; a mask of f8 or in
  // blocks; V rows of bits.
  virtual Status SetConfig(const CacheConfig& config) = 0;

  // This call must come once. Errors: bits; a block dtype for permuted or tiled
  // V; a number < 1; memory < window; more than INT32_MAX cells; an encoder
  // with several sequences or a padding.
  virtual Status Init(const InitArgs& args) = 0;

  // Frees everything. Idempotent; every other call after it is a
  // failed_precondition.
  virtual void Close() = 0;

  // Sets the layer of the next Put and Get; >= 0, initially 0.
  virtual Status SetLayer(int layer) = 0;

  // Finds a cell for each batch token. Errors: cache_full if there are not
  // enough cells; there is no pass then. With `reserve` nothing is stored or
  // changed, and views and mask have their worst-case size: all cells.
  // Recurrent: only states get a cell; invalid_argument unless each sequence
  // continues at its end. Drafts: failed_precondition for an ordinary token of
  // a sequence that has drafts; not_supported by an encoder, by a recurrent
  // cache without room for drafts (CacheSpec::drafts) and by the twin "cuda".
  virtual Status StartForward(const Batch& batch, bool reserve) = 0;

  // From now on the batch tokens at the indices `except` also see tokens at
  // later positions. Replaces the indices of an earlier call; the next
  // StartForward resets them. Encoder, recurrent: not_supported. Wrapper: calls
  // the active cache.
  virtual Status SetCausal(std::span<const int> except) = 0;

  // Stores the batch's rows in the current layer: key = [k_head_dim, kv_heads,
  // batch], value = [v_head_dim, kv_heads, batch], any strides (stride[0] is 0
  // if the rows are in blocks), dtype f32 or the dtype of the stored rows. The
  // first Put of a layer fixes its dimensions. Errors: stored rows in blocks
  // whose head_dim is not a multiple of kBlockElements. Encoder: tensors of any
  // shape, stored as they are.
  // Recurrent: row i is the state after token i, such as its convolution window
  // (K) and its matrix (V); rows without a cell (BatchCells) are not read.
  virtual Status Put(const TensorView& key, const TensorView& value) = 0;

  // Views of the current layer. Needs a pass and an earlier Put to the layer.
  virtual Result<KvView> Get() = 0;

  // Replaces the tokens of `dst` by those of `src` at positions < len. Rows are
  // shared, not copied. dst == src truncates. With a window, tokens that dst
  // needs may have been evicted, although the answer is ok: call
  // CanResume(dst, len) before dst continues. Encoder: not_supported. Recurrent
  // and hybrid: dst may be shorter than len; see ResumeBefore.
  virtual Status CopyPrefix(int src, int dst, std::int32_t len) = 0;

  // Returns whether `seq` can continue at `pos` with its whole window still
  // stored.
  virtual Result<bool> CanResume(int seq, std::int32_t pos) = 0;

  // Returns a text for people that says why CanResume is false, such as
  // "position 12 needs 8 to 11; 8 and 9 were evicted"; empty if it is true.
  virtual Result<std::string> WhyNotResume(int seq, std::int32_t pos);

  // Returns the greatest position <= pos where `seq` can resume, 0 if there is
  // none. The caller removes the tokens from there on, and computes them again.
  virtual Result<std::int32_t> ResumeBefore(int seq, std::int32_t pos);

  // Removes the tokens at positions in [begin, end) from `seq`; unless end is
  // kOpenEnd, later tokens move down by end - begin. With a window, call
  // CanResume(seq, its new length) before `seq` continues. Errors:
  // shared_cells, not_supported. Recurrent and hybrid: `seq` may become shorter
  // than begin.
  virtual Status Remove(int seq, std::int32_t begin, std::int32_t end) = 0;

  // The drafts of `seq` with the numbers in `path` become ordinary tokens; its
  // other drafts are gone. `path` is empty, or its first draft follows the
  // committed tokens, and each other draft follows the one before it. No row
  // moves, and the pass continues. A class of the caller that does not override
  // this answers not_supported. Errors: invalid_argument for any other path.
  // CopyPrefix to a sequence, and Remove from it, drop its drafts; Restore and
  // AddSequence drop all drafts; snapshots leave them out. Encoder:
  // not_supported. Recurrent: the state after the last draft of the path
  // becomes the last state.
  virtual Status Commit(int seq, std::span<const int> path);

  // Recurrent: pins the last state of `seq`, so that later passes keep it. A
  // sequence keeps its last CacheSpec::pins pinned states. CopyPrefix copies
  // pins; Remove takes them away with their states; snapshots have the states
  // without the pins. Hybrid, wrapper: calls the recurrent caches with pins.
  // Errors: not_supported by any other cache.
  virtual Status Checkpoint(int seq);

  // Wrapper: selects the active cache, which is 0 after each StartForward.
  // Other kinds: not_supported.
  virtual Status SetLayerType(int type) = 0;

  // Wrapper: the active cache, owned by the wrapper. Other kinds: this cache.
  virtual Cache* UnderlyingCache() = 0;

  // Encoder: whether the slot holds something. Wrapper: calls the active cache.
  // Other kinds: not_supported.
  virtual Result<bool> EncoderCached() = 0;

  // Returns all that the cache holds, without the current pass. A class of the
  // caller that does not override SnapshotTo and Restore answers not_supported.
  Result<CacheState> Snapshot() const;
  // Replaces `state` by the snapshot and reuses its memory.
  virtual Status SnapshotTo(CacheState& state) const;

  // Makes the cache hold exactly `state`, as right after Init: no pass, layer
  // and layer type 0. The state may come from a cache with another padding,
  // placement, V layout (encoders: the same) or number of cells, if it fits:
  // tokens keep their cells (AddSequence finds new ones). Errors:
  // invalid_argument if it does not fit.
  virtual Status Restore(const CacheState& state);

  // Save one sequence, and load it beside others. SnapshotOf is SequenceOf of a
  // Snapshot, and AddSequence is Restore of WithSequence (kvtwin/save.h), but
  // they copy nothing of other sequences, and leave the rows of free cells
  // unchanged. A class of the caller that does not override AddSequence answers
  // not_supported. Errors: a negative sequence; those of WithSequence.
  virtual Result<CacheState> SnapshotOf(int sequence) const;
  virtual Status AddSequence(int sequence, const CacheState& added);

  // The calls below are for inspection. A wrapper answers for its active cache.
  //
  // The number of cells; 0 before Init and for an encoder.
  virtual int CellCount() const = 0;
  // The cell of each batch token, -1 for a token that has none (recurrent);
  // empty without a current pass.
  virtual std::span<const int> BatchCells() const = 0;
  // Replaces `out` by all memberships, sorted by cell, then by sequence. Drafts
  // are listed as well, because they use cells.
  virtual void ListCells(std::vector<CellEntry>& out) const = 0;
};

// Makes a cache; `twin` is one of TwinNames(). Errors: an unknown twin, or a
// spec that no Init could accept.
Result<std::unique_ptr<Cache>> MakeCache(const CacheSpec& spec,
                                         std::string_view twin = "optimized");

// "reference", "optimized"; in a library with CUDA also "cuda".
std::span<const std::string_view> TwinNames();

}  // namespace kvtwin

#endif  // KVTWIN_CACHE_H_
