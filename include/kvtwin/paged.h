// A pool of blocks that many sequences share: the attention cache of engines
// that keep each sequence apart, with prefixes that are found again by their
// tokens.
//
// A sequence is a list of blocks and a length. A forward pass is
//
//   for each layer: Append(sequence, layer, key, value)   stores rows behind it
//                   Views(sequence, layer)                what attention reads
//   Commit(sequence, tokens)                              they now belong to it
//
// Blocks are shared by reference: Fork and Open copy none, and whoever appends
// to a block that others have too gets one of his own first. What each call
// must do is defined in docs/semantics.md.
//
// Misuse returns invalid_argument or failed_precondition and changes nothing.
// Not thread-safe: one call at a time on one pool. Views stay valid until the
// next call that is not const, or destruction. Where memory runs out,
// std::bad_alloc passes through; the pool may then only be destroyed.

#ifndef KVTWIN_PAGED_H_
#define KVTWIN_PAGED_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvtwin/status.h"
#include "kvtwin/tensor.h"

namespace kvtwin {

// How the rows of a block lie in memory, first dimension fastest.
enum class PagedLayout {
  kTokenMajor,  // [head_dim, kv_heads, tokens of the block]
  kHeadMajor,   // [head_dim, tokens of the block, kv_heads]
};

struct PagedSpec {
  int block_size = 16;  // Tokens.
  int blocks = 1;       // In all.
  int max_seq_len = 1;  // Tokens of one sequence.
  int layers = 1;
  int kv_heads = 1;
  int k_head_dim = 1;
  int v_head_dim = 1;
  DType dtype = DType::kF16;          // Of the stored rows.
  std::optional<DType> v_dtype = {};  // Of those of V. Unset: as of K.
  PagedLayout layout = PagedLayout::kTokenMajor;
};

// Rows are those of the same tokens only if these are the same too.
struct PrefixKey {
  std::string salt;                // Of a tenant, who must not see others'.
  std::vector<std::string> extra;  // An adapter, the image that a token names.
  bool operator==(const PrefixKey&) const = default;
};

// The rows of a sequence that are in one block.
struct PagedView {
  TensorView key;    // [k_head_dim, kv_heads, length]; packed: [k_head_dim,
                     // length, kv_heads].
  TensorView value;  // The same of V.
  int start = 0;     // Position of the first.
  int length = 0;
  int block = 0;
};

struct PagedAppend {
  int start = 0;                 // Position of the first row.
  std::vector<PagedView> views;  // Of what was appended.
};

struct PagedKv {
  TensorView key;    // [k_head_dim, kv_heads, kv_len]
  TensorView value;  // [v_head_dim, kv_heads, kv_len]
};

// Blocks; the first three add up to all.
struct PagedUsage {
  int free = 0;    // That hold nothing.
  int cached = 0;  // That no sequence has, but a prompt may find.
  int used = 0;    // That sequences have.
  int shared = 0;  // Of these, several.
  bool operator==(const PagedUsage&) const = default;
};

// Sequence i has blocks indices[indptr[i]] to before indices[indptr[i + 1]], of
// which the last has last_page_len[i] tokens; 0 if there is none.
struct PagedCsr {
  std::vector<std::int32_t> indptr;
  std::vector<std::int32_t> indices;
  std::vector<std::int32_t> last_page_len;
  bool operator==(const PagedCsr&) const = default;
};

// Row i, of `columns` blocks, is sequence i's, filled up with -1.
struct PagedTable {
  int columns = 0;
  std::vector<std::int32_t> blocks;
  std::vector<std::int32_t> seq_lens;
  bool operator==(const PagedTable&) const = default;
};

class PagedPool {
 public:
  virtual ~PagedPool() = default;

  virtual const PagedSpec& spec() const = 0;

  // A new sequence, by the lowest number that none has. It begins with the
  // blocks of the longest prefix of `prompt`, in whole blocks and without its
  // last token, that was committed with these tokens and this key and is still
  // there. Errors: a negative token.
  virtual Result<int> Open(std::span<const std::int32_t> prompt = {},
                           const PrefixKey& key = {}) = 0;

  // A new sequence of the first `len` tokens of another one.
  virtual Result<int> Fork(int sequence, int len) = 0;

  // Tokens that are committed.
  virtual Result<int> SeqLen(int sequence) const = 0;

  // Stores rows of a layer at positions from SeqLen on, in place of what was
  // appended there since the last Commit: key = [k_head_dim, kv_heads, tokens],
  // value = [v_head_dim, kv_heads, tokens], any strides, dtype f32 or that of
  // the stored rows. Errors: cache_full if that is more than max_seq_len, or
  // there are not enough blocks; then nothing is stored.
  virtual Result<PagedAppend> Append(int sequence, int layer,
                                     const TensorView& key,
                                     const TensorView& value) = 0;

  // The next `new_tokens` tokens belong to the sequence, and what was appended
  // behind them is forgotten. Every layer must have as many. From then on the
  // sequence has tokens that nobody knows: its later blocks are not found.
  virtual Status Commit(int sequence, int new_tokens) = 0;
  // The same, and says which they are: prompts find the blocks that are full.
  virtual Status Commit(int sequence, std::span<const std::int32_t> tokens) = 0;

  // What the layer has of a sequence, block by block: its tokens, and what was
  // appended behind them.
  virtual Result<std::vector<PagedView>> Views(int sequence,
                                               int layer) const = 0;
  // The same in their packed shape. not_supported unless kHeadMajor.
  virtual Result<std::vector<PagedView>> ViewsPacked(int sequence,
                                                     int layer) const = 0;
  // The first kv_len tokens of these as one tensor, if they lie one after
  // another.
  virtual Result<std::optional<PagedKv>> ContiguousKV(int sequence, int layer,
                                                      int kv_len) const = 0;

  // Keeps the first `len` tokens, and nothing that was appended.
  virtual Status Truncate(int sequence, int len) = 0;
  // Ends a sequence. Blocks that a prompt may find stay until there is need for
  // them, the one that was released first being the first to go.
  virtual Status Free(int sequence) = 0;

  bool IsOnGPU() const { return *LayerDevice(0) == Device::kCuda; }
  virtual Result<Device> LayerDevice(int layer) const = 0;
  int MaxSeqLen() const { return spec().max_seq_len; }

  virtual PagedUsage Usage() const = 0;

  // For kernels that read by table. Of the committed tokens.
  virtual Result<PagedCsr> ExportCsr(std::span<const int> sequences) const = 0;
  virtual Result<PagedTable> ExportTable(
      std::span<const int> sequences) const = 0;
  // block * block_size + offset, of positions begin .. end - 1, appended ones
  // included.
  virtual Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                        int end) const = 0;
};

// `twin` is one of TwinNames(). Errors: an unknown twin; a number < 1; rows of
// bits; more than INT32_MAX tokens in all.
Result<std::unique_ptr<PagedPool>> MakePagedPool(
    const PagedSpec& spec, std::string_view twin = "optimized");

// One sequence of a pool, which must outlive it: the interface of engines whose
// cache is of one sequence.
class PagedSequence {
 public:
  // Requires: `sequence` is one of the pool's.
  PagedSequence(PagedPool& pool, int sequence)
      : pool_(&pool), sequence_(sequence) {}

  int sequence() const { return sequence_; }
  int SeqLen() const;  // 0 after Free.
  Status Commit(int new_tokens) { return pool_->Commit(sequence_, new_tokens); }
  Result<PagedAppend> Append(int layer, const TensorView& key,
                             const TensorView& value) {
    return pool_->Append(sequence_, layer, key, value);
  }
  Result<std::optional<PagedKv>> ContiguousKV(int layer, int kv_len) const {
    return pool_->ContiguousKV(sequence_, layer, kv_len);
  }
  Result<std::vector<PagedView>> Views(int layer) const {
    return pool_->Views(sequence_, layer);
  }
  Result<std::vector<PagedView>> ViewsPacked(int layer) const {
    return pool_->ViewsPacked(sequence_, layer);
  }
  bool IsOnGPU() const { return pool_->IsOnGPU(); }
  Result<Device> LayerDevice(int layer) const {
    return pool_->LayerDevice(layer);
  }
  int MaxSeqLen() const { return pool_->MaxSeqLen(); }
  Status Truncate(int seq_len) { return pool_->Truncate(sequence_, seq_len); }
  Status Free() { return pool_->Free(sequence_); }

 private:
  PagedPool* pool_;
  int sequence_;
};

}  // namespace kvtwin

#endif  // KVTWIN_PAGED_H_
