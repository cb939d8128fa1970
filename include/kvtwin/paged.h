// A pool of blocks that many sequences share (paged attention): a cache for
// engines that store each sequence by itself. A new sequence reuses the blocks
// of a stored prefix, which is found by its tokens.
//
// A sequence is a list of blocks and a length. A forward pass is
//
//   for each layer: Append(sequence, layer, key, value)  stores rows at its end
//                   Views(sequence, layer)               what attention reads
//   Commit(sequence, tokens)                             adds the rows to it
//
// Blocks are shared by reference: Fork and Open copy no block, and a sequence
// that appends to a shared block first gets its own copy. docs/semantics.md
// defines each call.
//
// Misuse returns invalid_argument or failed_precondition and changes nothing.
// Not thread-safe: one call at a time on one pool. Views stay valid until the
// next call that is not const, or destruction; until then any number of threads
// may read them. If memory runs out, std::bad_alloc passes through; after that
// the pool may only be destroyed.

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

// The sizes of a pool, and of a group of layers in it.
struct PagedSpec {
  int block_size = 16;  // Tokens of a block.
  int blocks = 1;       // Blocks of the pool.
  int max_seq_len = 1;  // Tokens of one sequence, at most.
  // The shape of the rows: K rows of a token are [k_head_dim, kv_heads].
  int layers = 1;
  int kv_heads = 1;
  int k_head_dim = 1;
  int v_head_dim = 1;
  DType dtype = DType::kF16;          // The stored rows.
  std::optional<DType> v_dtype = {};  // The stored V rows. Unset: same as K.
  // The order of rows in a block.
  PagedLayout layout = PagedLayout::kTokenMajor;
  // A token sees this many positions before its own, at least 1; a block that
  // no later token sees is given up. Unset: a token sees all.
  std::optional<int> window = {};
  // Whether a block has one row, the state after its tokens, in place of a row
  // for each token.
  bool states = false;
  // Groups of layers, each with blocks of its own (docs/hybrid.md). Layers are
  // numbered through all groups. If there are groups, max_seq_len is the only
  // other member that counts, and it counts for all of them.
  std::vector<PagedSpec> groups = {};
};

// An image or another input besides tokens. Rows of positions from `position`
// on depend on it.
struct PrefixMedia {
  int position = 0;       // The token where it begins.
  std::string hash = {};  // Equal hashes mean equal contents.
  bool operator==(const PrefixMedia&) const = default;
};

// A prompt finds stored blocks only if they have the same tokens, the same salt
// and extras, and the same media at positions before their end.
struct PrefixKey {
  std::string salt = {};                // Keeps tenants from sharing blocks.
  std::vector<std::string> extra = {};  // An adapter and its version.
  std::vector<PrefixMedia> media = {};  // By position, ascending.
  bool operator==(const PrefixKey&) const = default;
};

// The rows of a sequence that are in one block.
struct PagedView {
  // [k_head_dim, kv_heads, length]; packed: [k_head_dim, length, kv_heads].
  TensorView key = {};
  TensorView value = {};  // The same with v_head_dim.
  int start = 0;          // Position of the first row.
  int length = 0;         // Number of rows.
  int block = 0;          // The number of the block.
};

// The rows that Append stored.
struct PagedAppend {
  int start = 0;                      // Position of the first row.
  std::vector<PagedView> views = {};  // The appended rows.
};

// K and V of tokens that lie one after another, or of all blocks of a layer.
struct PagedKv {
  TensorView key = {};    // [k_head_dim, kv_heads, kv_len], or see Blocks.
  TensorView value = {};  // The same with v_head_dim.
};

// Numbers of blocks; the first three add up to all blocks of the pool.
struct PagedUsage {
  int free = 0;    // Blocks that hold nothing.
  int cached = 0;  // Blocks that no sequence has, but a prompt may find.
  int used = 0;    // Blocks that at least one sequence has.
  int shared = 0;  // Blocks that several sequences have.
  bool operator==(const PagedUsage&) const = default;
};

// Sequence i has the blocks indices[j] with indptr[i] <= j < indptr[i + 1]. Its
// last block has last_page_len[i] tokens; 0 if the sequence has no block.
struct PagedCsr {
  std::vector<std::int32_t> indptr = {};         // [sequences + 1]
  std::vector<std::int32_t> indices = {};        // Numbers of blocks.
  std::vector<std::int32_t> last_page_len = {};  // [sequences], in tokens.
  bool operator==(const PagedCsr&) const = default;
};

// Row i has the blocks of sequence i, padded with -1 to `columns` entries.
struct PagedTable {
  int columns = 0;                          // Blocks of the longest sequence.
  std::vector<std::int32_t> blocks = {};    // [columns, sequences]
  std::vector<std::int32_t> seq_lens = {};  // [sequences], in tokens.
  bool operator==(const PagedTable&) const = default;
};

// A pool of blocks, as the top of the header says.
class PagedPool {
 public:
  virtual ~PagedPool() = default;

  // The sizes with which the pool was made.
  virtual const PagedSpec& spec() const = 0;

  // Makes a sequence and returns its number, the lowest that is not in use. It
  // begins with the blocks of the longest prefix of `prompt` (whole blocks,
  // without the prompt's last token) that was committed with these tokens and
  // this key and is still stored. Errors: a negative token.
  virtual Result<int> Open(std::span<const std::int32_t> prompt = {},
                           const PrefixKey& key = {}) = 0;

  // Returns with how many tokens of the prompt Open would begin. A class of the
  // caller that does not override this answers not_supported.
  virtual Result<int> Find(std::span<const std::int32_t> prompt,
                           const PrefixKey& key = {}) const;

  // Adds media to the key of a sequence, for tokens that are committed later.
  // Errors: a position < SeqLen. A class of the caller that does not override
  // this answers not_supported.
  virtual Status AddMedia(int sequence, const PrefixMedia& media);

  // Makes a sequence of the first `len` tokens of another one, or of its first
  // ResumeBefore(sequence, len) tokens.
  virtual Result<int> Fork(int sequence, int len) = 0;

  // The number of committed tokens.
  virtual Result<int> SeqLen(int sequence) const = 0;

  // Stores rows of a layer at positions from SeqLen on, in place of the rows
  // appended there since the last Commit: key = [k_head_dim, kv_heads, tokens],
  // value = [v_head_dim, kv_heads, tokens], any strides (stride[0] is 0 if the
  // rows are in blocks), dtype f32 or the dtype of the stored rows. Errors:
  // cache_full if the sequence would have more than max_seq_len tokens, or
  // there are not enough blocks; nothing is stored then.
  virtual Result<PagedAppend> Append(int sequence, int layer,
                                     const TensorView& key,
                                     const TensorView& value) = 0;

  // Makes the next `new_tokens` tokens belong to the sequence, and discards the
  // rows that were appended after them. Every layer must have this many rows.
  // The ids of these tokens are unknown: from then on no prompt finds later
  // blocks of the sequence.
  virtual Status Commit(int sequence, int new_tokens) = 0;
  // The same with the ids of the tokens, so that prompts find the full blocks.
  virtual Status Commit(int sequence, std::span<const std::int32_t> tokens) = 0;

  // The rows of a sequence in one layer, block by block: the committed rows,
  // then the appended ones. Rows that were given up are left out.
  virtual Result<std::vector<PagedView>> Views(int sequence,
                                               int layer) const = 0;
  // The same rows in packed shape. Errors: not_supported unless kHeadMajor.
  virtual Result<std::vector<PagedView>> ViewsPacked(int sequence,
                                                     int layer) const = 0;
  // The first kv_len of these rows as one tensor, if they lie one after
  // another; else nothing.
  virtual Result<std::optional<PagedKv>> ContiguousKV(int sequence, int layer,
                                                      int kv_len) const = 0;

  // Returns the greatest length up to `len` at which the sequence can resume.
  // With a window or states, earlier blocks may be gone; otherwise it is `len`.
  virtual Result<int> ResumeBefore(int sequence, int len) const;

  // Keeps the first ResumeBefore(sequence, len) tokens, and discards the
  // appended rows.
  virtual Status Truncate(int sequence, int len) = 0;
  // Ends a sequence. Blocks that a prompt may find stay stored until a block is
  // needed and none is free; the block that was released first goes first.
  virtual Status Free(int sequence) = 0;

  // Where the rows of the pool lie: all layers are on one device. Errors: a
  // layer that does not exist.
  bool IsOnGPU() const { return *LayerDevice(0) == Device::kCuda; }
  virtual Result<Device> LayerDevice(int layer) const = 0;

  // Tokens of a sequence, at most.
  int MaxSeqLen() const { return spec().max_seq_len; }
  // Counts the blocks. In a pool with groups, the blocks of all groups are
  // added up.
  virtual PagedUsage Usage() const = 0;

  // Returns a group of layers as a pool of its own, with the same sequences.
  // Null if the group does not exist. The calls below, except ExportLayerTable
  // and Blocks, are not_supported by a pool with groups: call them on a group.
  virtual const PagedPool* Group(int group) const {
    return group == 0 ? this : nullptr;
  }

  // Block lists for kernels. ExportCsr and ExportTable have committed tokens
  // only. -1 stands for a block that was given up.
  virtual Result<PagedCsr> ExportCsr(std::span<const int> sequences) const = 0;
  virtual Result<PagedTable> ExportTable(
      std::span<const int> sequences) const = 0;
  // The table of one layer, also of a pool with groups: the blocks of the rows
  // that Views shows, committed and appended. Attention reads it between Append
  // and Commit; one table serves all layers of a group that have as many rows.
  // With states, the block that a pass writes takes the place of the block of
  // the state that it reads; Views has both. Errors: a sequence or a layer that
  // does not exist. A class of the caller that does not override this answers
  // not_supported.
  virtual Result<PagedTable> ExportLayerTable(std::span<const int> sequences,
                                              int layer) const;
  // block * block_size + offset for each of the positions begin .. end - 1,
  // which may be appended ones. -1: the position has no row. With states, a
  // block has the row of one state: the slot is the block.
  virtual Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                        int end) const = 0;
  // K and V of all blocks of a layer: [head_dim, kv_heads, block_size, blocks],
  // or [head_dim, block_size, kv_heads, blocks] if kHeadMajor. With states,
  // block_size counts as 1. Slots without a token may hold anything.
  virtual Result<PagedKv> Blocks(int layer) const = 0;
};

// Makes a pool; `twin` is one of TwinNames(). Errors: an unknown twin; a number
// < 1; rows of bits; more than INT32_MAX tokens in all; groups in a group; a
// twin without windows, states and groups (cuda: not_supported).
Result<std::unique_ptr<PagedPool>> MakePagedPool(
    const PagedSpec& spec, std::string_view twin = "optimized");

// One sequence of a pool, for engines whose cache holds one sequence. The pool
// must outlive it.
class PagedSequence {
 public:
  // If the pool does not have the sequence, it refuses the calls below.
  PagedSequence(PagedPool& pool, int sequence)
      : pool_(&pool), sequence_(sequence) {}

  // The number of the sequence in its pool.
  int sequence() const { return sequence_; }
  // 0 after Free, until the number is given to another sequence.
  int SeqLen() const;
  // The pool's functions of the same names, for this sequence.
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
