// The optimized twin of the paged pool.

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/assert.h"
#include "core/guarded_paged.h"
#include "core/index.h"
#include "core/twin.h"
#include "optimized/bit_tree.h"
#include "optimized/pool_memory.h"
#include "optimized/prefix_index.h"

namespace kvtwin::optimized {
namespace {

constexpr int kNoBlock = -1;

// A block without an owner is free, or, if it has a node, in the list of
// released blocks.
struct Block {
  int owners = 0;
  int node = -1;  // The node of the prefix that this block ends.
  int before = kNoBlock;
  int after = kNoBlock;
};

struct Sequence {
  std::vector<int> blocks;
  std::vector<std::int32_t> known;  // Token ids, from the sequence's start.
  // The root, then the node of each block whose tokens are all known.
  std::vector<int> nodes;
};

class Pool final : public GuardedPaged {
 public:
  Pool(const PagedSpec& spec, std::unique_ptr<PoolMemory> memory)
      : GuardedPaged(spec),
        size_(AsSize(spec.block_size)),
        blocks_(AsSize(spec.blocks)),
        free_(blocks_.size()),
        memory_(std::move(memory)) {
    free_.SetAll();
    usage_.free = spec.blocks;
    for (int layer = 0; layer < spec.layers; ++layer) {
      rows_.push_back(MakeRows(k_dtype(), spec.k_head_dim));
      rows_.push_back(MakeRows(v_dtype(), spec.v_head_dim));
    }
  }

  PagedUsage Usage() const override { return usage_; }

 protected:
  int DoOpen(int sequence, std::span<const std::int32_t> prompt,
             const PrefixKey& key) override {
    Sequence& opened = sequences_[sequence];
    opened.nodes = {index_.NeedRoot(key)};
    const std::size_t max =
        std::min(prompt.size(), AsSize(spec().max_seq_len) + 1);
    std::size_t end = size_;
    for (; end < max; end += size_) {
      const auto tokens = prompt.subspan(end - size_, size_);
      const int node = index_.FindChild(opened.nodes.back(), tokens);
      if (node < 0 || index_.block(node) == kNoBlock) break;
      index_.Need(node);
      opened.nodes.push_back(node);
      Take(opened, index_.block(node));
    }
    const auto taken = prompt.first(end - size_);
    opened.known.assign(taken.begin(), taken.end());
    return Size(taken);
  }

  void DoFork(int from, int sequence, int len) override {
    Sequence& forked = sequences_[sequence];
    const Sequence& source = sequences_.at(from);
    for (int i = 0; i < BlocksFor(len); ++i) {
      Take(forked, At(source.blocks, i));
    }
    forked.known = source.known;
    forked.nodes = source.nodes;
    for (const int node : forked.nodes) index_.Need(node);
    DropTokens(forked, len);
  }

  bool DoReserve(int sequence, int begin, int end) override {
    std::vector<int>& blocks = sequences_.at(sequence).blocks;
    const auto first = AsSize(begin) / size_;
    const bool copies =
        first < blocks.size() && BlockOf(blocks[first]).owners > 1;
    const int missing = std::max(0, BlocksFor(end) - Size(blocks));
    if (missing + (copies ? 1 : 0) > usage_.free + usage_.cached) return false;
    if (copies) {
      const int shared = blocks[first];
      blocks[first] = Fresh();
      memory_->CopyBlock(rows_, shared, blocks[first]);
      Drop(shared);
    } else if (first < blocks.size()) {
      Hide(blocks[first]);
    }
    for (int i = 0; i < missing; ++i) blocks.push_back(Fresh());
    return true;
  }

  void DoStore(int sequence, int layer, int start, const TensorView& key,
               const TensorView& value) override {
    memory_->Store(sequences_.at(sequence).blocks, start, key, KeysOf(layer),
                   value, ValuesOf(layer));
  }

  void DoCommit(int sequence, int len,
                std::span<const std::int32_t> tokens) override {
    Sequence& to = sequences_.at(sequence);
    DropBlocks(to, BlocksFor(len));
    const std::size_t known = to.known.size() + tokens.size();
    if (known != AsSize(len)) return;
    to.known.insert(to.known.end(), tokens.begin(), tokens.end());
    for (std::size_t i = to.nodes.size() - 1; i < known / size_; ++i) {
      const int node = index_.NeedChild(
          to.nodes.back(), std::span(to.known).subspan(i * size_, size_));
      to.nodes.push_back(node);
      if (index_.block(node) == kNoBlock) Show(to.blocks[i], node);
    }
  }

  void DoTruncate(int sequence, int len) override {
    Sequence& of = sequences_.at(sequence);
    DropBlocks(of, BlocksFor(len));
    DropTokens(of, len);
  }

  void DoFree(int sequence) override {
    Sequence& freed = sequences_.at(sequence);
    DropBlocks(freed, 0);
    for (const int node : freed.nodes) index_.Release(node);
    sequences_.erase(sequence);
  }

  std::span<const int> DoBlocks(int sequence) const override {
    return sequences_.at(sequence).blocks;
  }

  PagedKv DoRows(int layer, std::int64_t slot, int count) const override {
    const auto at = AsSize(slot);
    return {memory_->Show(KeysOf(layer).View(at, count)),
            memory_->Show(ValuesOf(layer).View(at, count))};
  }

  PagedKv DoAllRows(int layer) const override {
    const auto all = [&](const PoolRows& rows) {
      const Shape shape = {static_cast<std::int64_t>(rows.head_dim),
                           static_cast<std::int64_t>(rows.heads),
                           static_cast<std::int64_t>(blocks_.size() * size_),
                           1};
      return memory_->Show(DenseView(rows.data, rows.dtype, shape));
    };
    return {all(KeysOf(layer)), all(ValuesOf(layer))};
  }

  Device DoDevice() const override { return memory_->device(); }

 private:
  Block& BlockOf(int block) { return At(blocks_, block); }

  PoolRows MakeRows(DType dtype, int head_dim) {
    PoolRows rows{.data = nullptr,
                  .dtype = dtype,
                  .head_dim = AsSize(head_dim),
                  .heads = AsSize(spec().kv_heads),
                  .block_size = size_,
                  .layout = spec().layout};
    rows.data = memory_->Allocate(blocks_.size() * rows.block_bytes());
    return rows;
  }

  // rows_ has K, then V, of each layer.
  const PoolRows& KeysOf(int layer) const { return rows_[2 * AsSize(layer)]; }
  const PoolRows& ValuesOf(int layer) const {
    return rows_[2 * AsSize(layer) + 1];
  }

  // Returns a new block. Requires: a block is free or cached.
  int Fresh() {
    std::size_t fresh = free_.First();
    if (fresh != kNone) {
      free_.Clear(fresh);
      --usage_.free;
    } else {
      KVTWIN_ASSERT(oldest_ != kNoBlock);
      fresh = AsSize(oldest_);
      Unlist(oldest_);
      Hide(AsInt(fresh));
    }
    blocks_[fresh].owners = 1;
    ++usage_.used;
    return AsInt(fresh);
  }

  void Take(Sequence& sequence, int block) {
    Block& taken = BlockOf(block);
    if (taken.owners == 0) {
      Unlist(block);
      ++usage_.used;
    }
    if (++taken.owners == 2) ++usage_.shared;
    sequence.blocks.push_back(block);
  }

  void Drop(int block) {
    Block& dropped = BlockOf(block);
    if (--dropped.owners == 1) --usage_.shared;
    if (dropped.owners > 0) return;
    --usage_.used;
    if (dropped.node >= 0) {
      List(block);
    } else {
      free_.Set(AsSize(block));
      ++usage_.free;
    }
  }

  void DropBlocks(Sequence& sequence, int count) {
    while (Size(sequence.blocks) > count) {
      Drop(sequence.blocks.back());
      sequence.blocks.pop_back();
    }
  }

  // Show lets prompts find the block; Hide ends that.
  void Show(int block, int node) {
    index_.Need(node);
    index_.SetBlock(node, block);
    BlockOf(block).node = node;
  }
  void Hide(int block) {
    int& node = BlockOf(block).node;
    if (node < 0) return;
    index_.SetBlock(node, kNoBlock);
    index_.Release(node);
    node = -1;
  }

  // List and Unlist maintain the list of released blocks, oldest first.
  void List(int block) {
    BlockOf(block).before = newest_;
    BlockOf(block).after = kNoBlock;
    (newest_ == kNoBlock ? oldest_ : BlockOf(newest_).after) = block;
    newest_ = block;
    ++usage_.cached;
  }
  void Unlist(int block) {
    const auto [owners, node, before, after] = BlockOf(block);
    (before == kNoBlock ? oldest_ : BlockOf(before).after) = after;
    (after == kNoBlock ? newest_ : BlockOf(after).before) = before;
    --usage_.cached;
  }

  void DropTokens(Sequence& sequence, int len) {
    const std::size_t known = std::min(sequence.known.size(), AsSize(len));
    sequence.known.resize(known);
    while (sequence.nodes.size() > known / size_ + 1) {
      index_.Release(sequence.nodes.back());
      sequence.nodes.pop_back();
    }
  }

  std::size_t size_;  // Tokens per block.
  std::vector<Block> blocks_;
  BitTree free_;
  int oldest_ = kNoBlock;
  int newest_ = kNoBlock;
  PagedUsage usage_;
  PrefixIndex index_;
  std::map<int, Sequence> sequences_;
  std::unique_ptr<PoolMemory> memory_;
  std::vector<PoolRows> rows_;
};

}  // namespace

std::unique_ptr<PagedPool> MakePool(const PagedSpec& spec,
                                    std::unique_ptr<PoolMemory> memory) {
  return std::make_unique<Pool>(spec, std::move(memory));
}

Result<std::unique_ptr<PagedPool>> MakePagedPool(const PagedSpec& spec) {
  return MakePool(spec, std::make_unique<HostPoolMemory>());
}

}  // namespace kvtwin::optimized
