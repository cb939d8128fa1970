// The common part of both twins of the paged pool: the gate that refuses
// misuse, the lengths of sequences, and the views and tables that follow from
// their blocks.

#ifndef KVTWIN_CORE_GUARDED_PAGED_H_
#define KVTWIN_CORE_GUARDED_PAGED_H_

#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "core/assert.h"
#include "kvtwin/paged.h"

namespace kvtwin {

// Returns the error of MakePagedPool for a bad spec.
Status CheckPagedSpec(const PagedSpec& spec);

class GuardedPaged : public PagedPool {
 public:
  // Requires: CheckPagedSpec accepts `spec`.
  explicit GuardedPaged(const PagedSpec& spec) : spec_(spec) {
    KVTWIN_ASSERT(CheckPagedSpec(spec).ok());
  }

  const PagedSpec& spec() const final { return spec_; }
  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) final;
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
  Status Truncate(int sequence, int len) final;
  Status Free(int sequence) final;
  Result<Device> LayerDevice(int layer) const final;
  Result<PagedCsr> ExportCsr(std::span<const int> sequences) const final;
  Result<PagedTable> ExportTable(std::span<const int> sequences) const final;
  Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                int end) const final;
  Result<PagedKv> Blocks(int layer) const final;

 protected:
  // The number of the next sequence: the lowest that is not in use.
  virtual int NextSequence() const;

  // The twin's part, called with valid arguments only. DoOpen and DoFork make
  // `sequence`; DoOpen returns the number of tokens that it begins with.
  virtual int DoOpen(int sequence, std::span<const std::int32_t> prompt,
                     const PrefixKey& key) = 0;
  virtual void DoFork(int from, int sequence, int len) = 0;
  // Gets blocks for the positions up to `end`; those from `begin` on are in
  // blocks that no other sequence has. If there are not enough blocks, returns
  // false and changes nothing.
  virtual bool DoReserve(int sequence, int begin, int end) = 0;
  virtual void DoStore(int sequence, int layer, int start,
                       const TensorView& key, const TensorView& value) = 0;
  // Sets the sequence's length to `len`. `tokens` are the ids of the committed
  // tokens; empty if they are unknown.
  virtual void DoCommit(int sequence, int len,
                        std::span<const std::int32_t> tokens) = 0;
  virtual void DoTruncate(int sequence, int len) = 0;
  virtual void DoFree(int sequence) = 0;
  virtual std::span<const int> DoBlocks(int sequence) const = 0;
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
    return (tokens + spec_.block_size - 1) / spec_.block_size;
  }

 private:
  struct Length {
    int len = 0;
    std::vector<int> appended;  // Rows after `len`, by layer.
  };

  Status CheckSequence(int sequence) const;
  Status CheckLayer(int layer) const;
  Status CheckRowsOf(int sequence, int layer) const;
  Status CheckRows(const TensorView& key, const TensorView& value) const;
  Status CheckCommit(int sequence, std::int64_t new_tokens) const;
  Status CheckSequences(std::span<const int> sequences) const;
  std::vector<PagedView> ViewsOf(int sequence, int layer, int begin,
                                 int end) const;
  Length& Add(int sequence, int len);

  PagedSpec spec_;
  std::map<int, Length> sequences_;
};

}  // namespace kvtwin

#endif  // KVTWIN_CORE_GUARDED_PAGED_H_
