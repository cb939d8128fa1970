// The common part of both twins of the paged pool: the gate that refuses
// misuse, the lengths of sequences, and the views and tables that follow from
// their blocks.

#ifndef KVTWIN_CORE_GUARDED_PAGED_H_
#define KVTWIN_CORE_GUARDED_PAGED_H_

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "core/assert.h"
#include "kvtwin/paged.h"

namespace kvtwin {

inline constexpr int kNoBlock = -1;

// Returns the error of MakePagedPool for a bad spec.
Status CheckPagedSpec(const PagedSpec& spec);

// Returns the group of a layer, which becomes its number there; `spec` itself
// if it has no groups. Requires: the layer exists.
int GroupOf(const PagedSpec& spec, int& layer);
const PagedSpec& SpecOfLayer(const PagedSpec& spec, int layer);
// Returns the refusal of a group that the pool does not have. A pool without
// groups is its own group 0.
Status NoSuchGroup(const PagedSpec& spec, int group);
// Returns the spec with all numbers of a pool with groups: layers and blocks of
// all groups, and as block_size the least number that all block sizes divide.
PagedSpec Completed(PagedSpec spec);

class GuardedPaged : public PagedPool {
 public:
  // Requires: CheckPagedSpec accepts `spec`.
  explicit GuardedPaged(const PagedSpec& spec) : spec_(spec) {
    KVTWIN_ASSERT(CheckPagedSpec(spec).ok());
  }

  const PagedSpec& spec() const final { return spec_; }
  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) final;
  Result<int> Find(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) const final;
  Status AddMedia(int sequence, const PrefixMedia& media) final;
  Result<int> Fork(int sequence, int len) final;
  Result<int> SeqLen(int sequence) const final;
  Result<PagedAppend> Append(int sequence, int layer, const TensorView& key,
                             const TensorView& value) final;
  Status Commit(int sequence, int new_tokens) final;
  Status Commit(int sequence, std::span<const std::int32_t> tokens) final;
  Result<std::vector<PagedView>> Views(int sequence, int layer) const final;
  Result<std::vector<PagedView>> ViewsPacked(int sequence,
                                             int layer) const final;
  Result<std::optional<PagedKv>> ContiguousKV(int sequence, int layer,
                                              int kv_len) const final;
  Result<int> ResumeBefore(int sequence, int len) const final;
  Status Truncate(int sequence, int len) final;
  Status Free(int sequence) final;
  Result<Device> LayerDevice(int layer) const final;
  Result<PagedCsr> ExportCsr(std::span<const int> sequences) const final;
  Result<PagedTable> ExportTable(std::span<const int> sequences) const final;
  Result<PagedTable> ExportLayerTable(std::span<const int> sequences,
                                      int layer) const final;
  Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                int end) const final;
  Result<PagedKv> Blocks(int layer) const final;

  // Returns the error of a Commit of these tokens; changes nothing.
  Status CheckCommit(int sequence, std::int64_t new_tokens) const;
  static Status CheckTokens(std::span<const std::int32_t> tokens);
  static Status CheckPrompt(std::span<const std::int32_t> prompt,
                            const PrefixKey& key);
  // Find, without its checks.
  int FindChecked(std::span<const std::int32_t> prompt,
                  const PrefixKey& key) const {
    return DoFind(prompt, key);
  }

 protected:
  // The number of the next sequence: the lowest that is not in use.
  virtual int NextSequence() const;

  // The twin's part, called with valid arguments only. DoOpen and DoFork make
  // `sequence`; DoOpen returns the number of tokens that it begins with.
  virtual int DoOpen(int sequence, std::span<const std::int32_t> prompt,
                     const PrefixKey& key) = 0;
  virtual int DoFind(std::span<const std::int32_t> prompt,
                     const PrefixKey& key) const = 0;
  virtual void DoAddMedia(int sequence, const PrefixMedia& media) = 0;
  // Returns the greatest length up to `len` at which the sequence, of `all`
  // tokens, can resume.
  virtual int DoResumeBefore(int /*sequence*/, int /*all*/, int len) const {
    return len;
  }
  virtual void DoFork(int from, int sequence, int len) = 0;
  // Gets blocks for the positions up to `end`; those from `begin` on are in
  // blocks that no other sequence has. If there are not enough blocks, returns
  // false and changes nothing.
  virtual bool DoReserve(int sequence, int begin, int end) = 0;
  virtual void DoStore(int sequence, int layer, int start,
                       const TensorView& key, const TensorView& value) = 0;
  // Sets the sequence's length, which was `before`, to `len`. `tokens` are the
  // ids of the committed tokens; empty if they are unknown.
  virtual void DoCommit(int sequence, int before, int len,
                        std::span<const std::int32_t> tokens) = 0;
  virtual void DoTruncate(int sequence, int before, int len) = 0;
  virtual void DoFree(int sequence) = 0;
  // The blocks by position; kNoBlock for those that were given up.
  virtual std::span<const int> DoBlocks(int sequence) const = 0;
  // The block of the state that a pass reads, if a block for the state that it
  // writes took its place in DoBlocks; else kNoBlock.
  virtual int DoReadBlock(int /*sequence*/) const { return kNoBlock; }
  // Returns `count` rows from `slot` on, [head_dim, kv_heads, count]. They may
  // reach into other blocks if the blocks lie one after another.
  virtual PagedKv DoRows(int layer, std::int64_t slot, int count) const = 0;
  // Returns the memory of all blocks, block by block, as dense tensors of
  // [head_dim, kv_heads, slots]; Blocks gives them their shape.
  virtual PagedKv DoAllRows(int layer) const = 0;
  virtual Device DoDevice() const { return Device::kCpu; }

  DType k_dtype() const { return spec_.dtype; }
  DType v_dtype() const { return spec_.v_dtype.value_or(spec_.dtype); }
  int BlocksFor(int tokens) const {
    return tokens / spec_.block_size + (tokens % spec_.block_size == 0 ? 0 : 1);
  }
  int RowsPerBlock() const { return spec_.states ? 1 : spec_.block_size; }

 private:
  struct Length {
    int len = 0;
    std::vector<int> appended;  // Rows after `len`, by layer.
  };

  Status CheckSequence(int sequence) const;
  Status CheckLayer(int layer) const;
  Status CheckRowsOf(int sequence, int layer) const;
  Status CheckRows(const TensorView& key, const TensorView& value) const;
  Status CheckSequences(std::span<const int> sequences) const;
  std::vector<PagedView> ViewsOf(int sequence, int layer, int begin,
                                 int end) const;
  std::vector<PagedView> StatesOf(int sequence, int layer, int begin,
                                  int end) const;
  PagedView RowsOf(int layer, int start, int length, int block) const;
  // The blocks of the committed tokens: those of DoBlocks, except that the last
  // may be the block of the state that a pass reads.
  struct CommittedBlocks {
    std::span<const int> blocks;
    int last = kNoBlock;  // In place of blocks.back(), unless kNoBlock.
    std::size_t size() const { return blocks.size(); }
    int operator[](std::size_t i) const {
      return last != kNoBlock && i + 1 == size() ? last : blocks[i];
    }
    void AppendTo(std::vector<std::int32_t>& list) const {
      list.insert(list.end(), blocks.begin(), blocks.end());
      if (last != kNoBlock) list.back() = last;
    }
  };
  CommittedBlocks Committed(int sequence) const;
  PagedTable TableOf(std::span<const int> sequences,
                     std::optional<int> layer) const;
  Length& Add(int sequence, int len);

  PagedSpec spec_;
  std::map<int, Length> sequences_;
  // The numbers of sequences that were freed, until they are given again: all
  // unused numbers below the highest. Free only moves the node of a sequence.
  std::map<int, Length> unused_;
};

}  // namespace kvtwin

#endif  // KVTWIN_CORE_GUARDED_PAGED_H_
