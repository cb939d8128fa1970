// The reference twin of the paged pool, written in the most obvious way.
// docs/semantics.md says what it must do.

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <vector>

#include "core/assert.h"
#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/guarded_paged.h"
#include "core/index.h"
#include "core/twin.h"

namespace kvtwin::reference {
namespace {

// The tokens from the start of a sequence, and the key on which rows depend,
// too.
struct Prefix {
  PrefixKey key;
  std::vector<std::int32_t> tokens;
  bool operator==(const Prefix&) const = default;
};

struct Block {
  int owners = 0;  // The number of sequences that have it.
  // The tokens up to the block's end, if prompts may find the block.
  std::optional<Prefix> prefix;
};

struct Sequence {
  std::vector<int> blocks;
  Prefix known;  // The known tokens from the start of the sequence.
};

class Pool final : public GuardedPaged {
 public:
  explicit Pool(const PagedSpec& spec)
      : GuardedPaged(spec), blocks_(AsSize(spec.blocks)) {
    const std::int64_t tokens = std::int64_t{spec.blocks} * spec.block_size;
    for (int layer = 0; layer < spec.layers; ++layer) {
      keys_.push_back(FilledTensor(
          k_dtype(), {spec.k_head_dim, spec.kv_heads, tokens, 1}, 0));
      values_.push_back(FilledTensor(
          v_dtype(), {spec.v_head_dim, spec.kv_heads, tokens, 1}, 0));
    }
  }

  // Counts free, cached, used and shared blocks (P9).
  PagedUsage Usage() const override {
    PagedUsage usage;
    for (const Block& block : blocks_) {
      if (block.owners > 0) ++usage.used;
      if (block.owners > 1) ++usage.shared;
      if (block.owners == 0) ++(block.prefix ? usage.cached : usage.free);
    }
    return usage;
  }

 protected:
  // Takes the longest run of known blocks (P1).
  int DoOpen(int sequence, std::span<const std::int32_t> prompt,
             const PrefixKey& key) override {
    Sequence& opened = sequences_[sequence];
    opened.known.key = key;
    const std::size_t size = AsSize(spec().block_size);
    for (std::size_t end = size; end < prompt.size(); end += size) {
      if (end > AsSize(spec().max_seq_len)) break;
      const Prefix wanted{key, {prompt.begin(), IteratorAt(prompt, end)}};
      const auto found = std::ranges::find(blocks_, wanted, &Block::prefix);
      if (found == blocks_.end()) break;
      Take(opened, AsInt(found - blocks_.begin()));
      opened.known = wanted;
    }
    return Size(opened.known.tokens);
  }

  // Shares the blocks of the first `len` tokens (P2).
  void DoFork(int from, int sequence, int len) override {
    const Sequence& source = sequences_.at(from);
    Sequence& forked = sequences_[sequence];
    for (int i = 0; i < BlocksFor(len); ++i) {
      Take(forked, At(source.blocks, i));
    }
    forked.known = source.known;
    DropTokens(forked, len);
  }

  // Gets missing blocks, and copies shared ones (P3).
  bool DoReserve(int sequence, int begin, int end) override {
    std::vector<int>& blocks = sequences_.at(sequence).blocks;
    const auto first = AsSize(begin / spec().block_size);
    const bool copies =
        first < blocks.size() && BlockOf(blocks[first]).owners > 1;
    const int missing = std::max(0, BlocksFor(end) - Size(blocks));
    const PagedUsage usage = Usage();
    if (missing + (copies ? 1 : 0) > usage.free + usage.cached) return false;
    if (copies) {
      const int shared = blocks[first];
      blocks[first] = Fresh();
      CopyBlock(shared, blocks[first]);
      --BlockOf(shared).owners;
    }
    // The rows of the block are about to change.
    if (first < blocks.size()) BlockOf(blocks[first]).prefix.reset();
    for (int i = 0; i < missing; ++i) blocks.push_back(Fresh());
    return true;
  }

  void DoStore(int sequence, int layer, int start, const TensorView& key,
               const TensorView& value) override {
    const auto at = AsSize(layer);
    for (std::int64_t i = 0; i < key.shape[2]; ++i) {
      const auto position = AsSize(start + i);
      const auto size = AsSize(spec().block_size);
      const int block = sequences_.at(sequence).blocks[position / size];
      const std::int64_t slot = std::int64_t{block} * spec().block_size +
                                static_cast<std::int64_t>(position % size);
      CopyRow(Slice(key, 2, i), keys_[at], slot);
      CopyRow(Slice(value, 2, i), values_[at], slot);
    }
  }

  // Adds the appended tokens, and makes filled blocks known (P5, P6).
  void DoCommit(int sequence, int len,
                std::span<const std::int32_t> tokens) override {
    Sequence& to = sequences_.at(sequence);
    DropBlocks(to, BlocksFor(len));
    std::vector<std::int32_t>& known = to.known.tokens;
    const bool all_known = AsInt(known.size() + tokens.size()) == len;
    if (!all_known) return;
    // The blocks that the new tokens filled become known.
    const int first = Size(known) / spec().block_size;
    known.insert(known.end(), tokens.begin(), tokens.end());
    for (int i = first; i < len / spec().block_size; ++i) {
      Block& block = BlockOf(At(to.blocks, i));
      const Prefix prefix{
          to.known.key,
          {known.begin(), known.begin() + (i + 1) * spec().block_size}};
      const bool is_known =
          std::ranges::find(blocks_, prefix, &Block::prefix) != blocks_.end();
      if (!is_known) block.prefix = prefix;
    }
  }

  // Keeps the first `len` tokens (P8).
  void DoTruncate(int sequence, int len) override {
    Sequence& of = sequences_.at(sequence);
    DropBlocks(of, BlocksFor(len));
    DropTokens(of, len);
  }

  void DoFree(int sequence) override {
    DropBlocks(sequences_.at(sequence), 0);
    sequences_.erase(sequence);
  }

  // Returns the blocks of a sequence, from which the exports are made (P10).
  std::span<const int> DoBlocks(int sequence) const override {
    return sequences_.at(sequence).blocks;
  }

  // Returns the rows of a view (P7).
  PagedKv DoRows(int layer, std::int64_t slot, int count) const override {
    const auto at = AsSize(layer);
    return {Rows(keys_[at], slot, count), Rows(values_[at], slot, count)};
  }

  PagedKv DoAllRows(int layer) const override {
    return {At(keys_, layer).view(), At(values_, layer).view()};
  }

 private:
  Block& BlockOf(int block) { return At(blocks_, block); }

  // Returns `count` rows of `all` from `slot` on, as the layout places them.
  TensorView Rows(const DenseTensor& all, std::int64_t slot, int count) const {
    TensorView view = all.view();
    if (spec().layout == PagedLayout::kHeadMajor) {
      // In a block, the tokens of a head lie one after another.
      view.stride[2] = view.stride[1];
      view.stride[1] *= spec().block_size;
      const std::int64_t block = slot / spec().block_size;
      view.data = static_cast<const std::byte*>(view.data) +
                  block * view.stride[1] * spec().kv_heads +
                  slot % spec().block_size * view.stride[2];
    } else {
      view.data = view.at(0, 0, slot);
    }
    view.shape[2] = count;
    view.stride[3] = view.stride[2] * count;
    return view;
  }

  void CopyRow(const TensorView& row, DenseTensor& all, std::int64_t slot) {
    const TensorView to = Rows(all, slot, 1);
    for (std::int64_t j = 0; j < row.shape[1]; ++j) {
      // The rows belong to this pool, so it may write through the const view.
      CopyRun(row, j, 0, 0, const_cast<std::byte*>(to.at(0, j)),  // NOLINT
              to.stride[0], to.dtype);
    }
  }

  void CopyBlock(int from, int to) {
    const std::int64_t size = spec().block_size;
    for (std::vector<DenseTensor>* tensors : {&keys_, &values_}) {
      for (DenseTensor& all : *tensors) {
        for (std::int64_t i = 0; i < size; ++i) {
          CopyRow(Rows(all, from * size + i, 1), all, to * size + i);
        }
      }
    }
  }

  // Returns the lowest free block, else the one that was released first of
  // those that prompts may find (P4). Requires: there is one.
  int Fresh() {
    for (std::size_t b = 0; b < blocks_.size(); ++b) {
      if (blocks_[b].owners == 0 && !blocks_[b].prefix) {
        blocks_[b].owners = 1;
        return AsInt(b);
      }
    }
    KVTWIN_ASSERT(!released_.empty());
    const int oldest = released_.front();
    released_.erase(released_.begin());
    BlockOf(oldest) = {1, std::nullopt};
    return oldest;
  }

  void Take(Sequence& sequence, int block) {
    if (BlockOf(block).owners++ == 0) std::erase(released_, block);
    sequence.blocks.push_back(block);
  }

  // Keeps the first `count` blocks, and releases the others from the last on.
  void DropBlocks(Sequence& sequence, int count) {
    while (Size(sequence.blocks) > count) {
      const int block = sequence.blocks.back();
      sequence.blocks.pop_back();
      if (--BlockOf(block).owners == 0 && BlockOf(block).prefix) {
        released_.push_back(block);
      }
    }
  }

  void DropTokens(Sequence& sequence, int len) {
    std::vector<std::int32_t>& known = sequence.known.tokens;
    known.resize(std::min(known.size(), AsSize(len)));
  }

  std::vector<Block> blocks_;
  // Blocks without an owner that prompts may find, in the order of release.
  std::vector<int> released_;
  std::map<int, Sequence> sequences_;
  std::vector<DenseTensor> keys_;  // [k_head_dim, kv_heads, all slots]
  std::vector<DenseTensor> values_;
};

}  // namespace

Result<std::unique_ptr<PagedPool>> MakePagedPool(const PagedSpec& spec) {
  return std::unique_ptr<PagedPool>(std::make_unique<Pool>(spec));
}

}  // namespace kvtwin::reference
