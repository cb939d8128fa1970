// The reference twin of the paged pool, written in the most obvious way.
// docs/semantics.md says what it must do.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/assert.h"
#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/grouped_pool.h"
#include "core/index.h"
#include "core/twin.h"
#include "reference/pool_state.h"

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
  // The state that the pass reads: another block has its place (P13).
  int read = kNoBlock;
};

// Returns the first `len` tokens, with the media among them.
Prefix FirstOf(const PrefixKey& key, std::span<const std::int32_t> tokens,
               std::size_t len) {
  Prefix first{key, {tokens.begin(), IteratorAt(tokens, len)}};
  std::erase_if(first.key.media, [&](const PrefixMedia& media) {
    return AsSize(media.position) >= len;
  });
  return first;
}

std::string TextOf(const Prefix& prefix) {
  std::string text = fmt::format(
      "[{}] '{}' {}: '{}'", fmt::join(prefix.tokens, " "), prefix.key.salt,
      prefix.key.extra.size(), fmt::join(prefix.key.extra, "' '"));
  for (const PrefixMedia& media : prefix.key.media) {
    text += fmt::format(" {}@{}", media.hash, media.position);
  }
  return text + "\n";
}

class Pool final : public GuardedPaged {
 public:
  explicit Pool(const PagedSpec& spec)
      : GuardedPaged(spec), blocks_(AsSize(spec.blocks)) {
    const std::int64_t tokens = std::int64_t{spec.blocks} * RowsPerBlock();
    for (int layer = 0; layer < spec.layers; ++layer) {
      keys_.push_back(FilledTensor(
          k_dtype(), {spec.k_head_dim, spec.kv_heads, tokens, 1}, 0));
      values_.push_back(FilledTensor(
          v_dtype(), {spec.v_head_dim, spec.kv_heads, tokens, 1}, 0));
    }
  }

  std::string StateText() const {
    std::string text;
    for (const Block& block : blocks_) {
      text += fmt::format("{} ", block.owners);
      if (block.prefix) text += TextOf(*block.prefix);
    }
    text += fmt::format("released {}", fmt::join(released_, " "));
    for (const auto& [number, sequence] : sequences_) {
      text += fmt::format("; {}: {} read {} ", number,
                          fmt::join(sequence.blocks, " "), sequence.read);
      text += TextOf(sequence.known);
    }
    return text;
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
  // Finds the longest prefix of which all blocks that the next token needs are
  // known (P1, P12, P13).
  int DoFind(std::span<const std::int32_t> prompt,
             const PrefixKey& key) const override {
    const std::vector<int> known = KnownBlocks(prompt, key);
    for (int count = Size(known); count > 0; --count) {
      const auto needed =
          std::span(known)
              .first(AsSize(count))
              .subspan(AsSize(FirstNeeded(count * spec().block_size)));
      if (std::ranges::count(needed, kNoBlock) == 0) {
        return count * spec().block_size;
      }
    }
    return 0;
  }

  int DoOpen(int sequence, std::span<const std::int32_t> prompt,
             const PrefixKey& key) override {
    const int len = DoFind(prompt, key);
    const std::vector<int> known = KnownBlocks(prompt, key);
    Sequence& opened = sequences_[sequence];
    for (int i = 0; i < BlocksFor(len); ++i) {
      Take(opened, i < FirstNeeded(len) ? kNoBlock : At(known, i));
    }
    opened.known = {key, {prompt.begin(), prompt.begin() + len}};
    return len;
  }

  // Adds media of tokens that are committed later (P17).
  void DoAddMedia(int sequence, const PrefixMedia& media) override {
    std::vector<PrefixMedia>& all = sequences_.at(sequence).known.key.media;
    all.push_back(media);
    std::ranges::stable_sort(all, {}, &PrefixMedia::position);
  }

  // Looks for a length of which the sequence still has all needed blocks (P14).
  int DoResumeBefore(int sequence, int all, int len) const override {
    const std::span<const int> blocks = sequences_.at(sequence).blocks;
    if (len == all) return len;
    for (; len > 0; --len) {
      if (spec().states && len % spec().block_size != 0) continue;
      const auto needed = blocks.first(AsSize(BlocksFor(len)))
                              .subspan(AsSize(FirstNeeded(len)));
      if (std::ranges::count(needed, kNoBlock) == 0) return len;
    }
    return 0;
  }

  // Shares the blocks of the first `len` tokens (P2).
  void DoFork(int from, int sequence, int len) override {
    const Sequence& source = sequences_.at(from);
    Sequence& forked = sequences_[sequence];
    for (int i = 0; i < BlocksFor(len); ++i) {
      const bool is_read = source.read != kNoBlock &&
                           len % spec().block_size != 0 &&
                           i == len / spec().block_size;
      Take(forked, is_read ? source.read : At(source.blocks, i));
    }
    forked.known = source.known;
    DropTokens(forked, len);
    std::erase_if(forked.known.key.media, [&](const PrefixMedia& media) {
      return media.position >= len;
    });
  }

  // Gets missing blocks, and copies shared ones (P3).
  bool DoReserve(int sequence, int begin, int end) override {
    if (spec().states) return ReserveStates(sequence, begin, end);
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
    const auto size = AsSize(spec().block_size);
    for (std::int64_t i = 0; i < key.shape[2]; ++i) {
      const auto position = AsSize(start + i);
      const int block = sequences_.at(sequence).blocks[position / size];
      // The last state of a block stays.
      const std::int64_t slot =
          spec().states ? block
                        : std::int64_t{block} * spec().block_size +
                              static_cast<std::int64_t>(position % size);
      CopyRow(Slice(key, 2, i), keys_[at], slot);
      CopyRow(Slice(value, 2, i), values_[at], slot);
    }
  }

  // Adds the appended tokens, and makes filled blocks known (P5, P6, P18).
  void DoCommit(int sequence, int before, int len,
                std::span<const std::int32_t> tokens) override {
    Sequence& to = sequences_.at(sequence);
    if (len > before && to.read != kNoBlock) Drop(std::exchange(to.read, -1));
    DropPass(to, before);
    DropBlocks(to, BlocksFor(len));
    std::vector<std::int32_t>& known = to.known.tokens;
    const bool all_known = AsInt(known.size() + tokens.size()) == len;
    if (all_known) {
      // The blocks that the new tokens filled become known.
      const int first = Size(known) / spec().block_size;
      known.insert(known.end(), tokens.begin(), tokens.end());
      for (int i = first; i < len / spec().block_size; ++i) {
        Block& block = BlockOf(At(to.blocks, i));
        const Prefix prefix =
            FirstOf(to.known.key, known, AsSize((i + 1) * spec().block_size));
        const bool is_known =
            std::ranges::find(blocks_, prefix, &Block::prefix) != blocks_.end();
        if (!is_known) block.prefix = prefix;
      }
    }
    // No later token sees the blocks that lie before the window (P12).
    if (!spec().window) return;
    for (int i = FirstSeen(len) - 1; i >= 0; --i) {
      Drop(std::exchange(At(to.blocks, i), kNoBlock));
    }
  }

  // Keeps the first `len` tokens (P8).
  void DoTruncate(int sequence, int before, int len) override {
    Sequence& of = sequences_.at(sequence);
    DropPass(of, before);
    DropBlocks(of, BlocksFor(len));
    DropTokens(of, len);
    // Media of later tokens, not yet committed, stay.
    std::erase_if(of.known.key.media, [&](const PrefixMedia& media) {
      return media.position >= len && media.position < before;
    });
  }

  void DoFree(int sequence) override {
    Sequence& freed = sequences_.at(sequence);
    if (freed.read != kNoBlock) Drop(freed.read);
    DropBlocks(freed, 0);
    sequences_.erase(sequence);
  }

  // Returns the blocks of a sequence, from which the exports are made (P10).
  std::span<const int> DoBlocks(int sequence) const override {
    return sequences_.at(sequence).blocks;
  }
  int DoReadBlock(int sequence) const override {
    return sequences_.at(sequence).read;
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

  // The first block that the token after `len` tokens sees: the first that is
  // not wholly before its window.
  int FirstSeen(int len) const {
    if (!spec().window) return 0;
    return std::max(0, len - *spec().window) / spec().block_size;
  }
  // The first block that this token needs: a state has seen all tokens.
  int FirstNeeded(int len) const {
    return spec().states ? BlocksFor(len) - 1 : FirstSeen(len);
  }

  // The block of each whole block of the prompt's tokens, or kNoBlock.
  std::vector<int> KnownBlocks(std::span<const std::int32_t> prompt,
                               const PrefixKey& key) const {
    std::vector<int> known;
    const std::size_t size = AsSize(spec().block_size);
    for (std::size_t end = size; end < prompt.size(); end += size) {
      if (end > AsSize(spec().max_seq_len)) break;
      const auto found =
          std::ranges::find(blocks_, FirstOf(key, prompt, end), &Block::prefix);
      const bool is_known = found != blocks_.end();
      known.push_back(is_known ? AsInt(found - blocks_.begin()) : kNoBlock);
    }
    return known;
  }

  // Gets blocks for the states that a pass writes. The state that it reads
  // stays (P13).
  bool ReserveStates(int sequence, int begin, int end) {
    Sequence& of = sequences_.at(sequence);
    const bool replaces = begin % spec().block_size != 0 && of.read == kNoBlock;
    const int missing = std::max(0, BlocksFor(end) - Size(of.blocks));
    const PagedUsage usage = Usage();
    if (missing + (replaces ? 1 : 0) > usage.free + usage.cached) return false;
    if (replaces) {
      of.read =
          std::exchange(At(of.blocks, begin / spec().block_size), Fresh());
    }
    for (int i = 0; i < missing; ++i) of.blocks.push_back(Fresh());
    return true;
  }

  // Drops what a pass wrote: the state that it read gets its place back.
  // Requires: the sequence has `len` committed tokens.
  void DropPass(Sequence& of, int len) {
    if (of.read == kNoBlock) return;
    Drop(std::exchange(At(of.blocks, len / spec().block_size),
                       std::exchange(of.read, kNoBlock)));
  }

  // Returns `count` rows of `all` from `slot` on, as the layout places them.
  TensorView Rows(const DenseTensor& all, std::int64_t slot, int count) const {
    TensorView view = all.view();
    if (spec().layout == PagedLayout::kHeadMajor) {
      // In a block, the tokens of a head lie one after another.
      view.stride[2] = view.stride[1];
      view.stride[1] *= RowsPerBlock();
      const std::int64_t block = slot / RowsPerBlock();
      view.data = static_cast<const std::byte*>(view.data) +
                  block * view.stride[1] * spec().kv_heads +
                  slot % RowsPerBlock() * view.stride[2];
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
    const std::int64_t size = RowsPerBlock();
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
    sequence.blocks.push_back(block);
    if (block == kNoBlock) return;
    if (BlockOf(block).owners++ == 0) std::erase(released_, block);
  }

  void Drop(int block) {
    if (block == kNoBlock) return;
    if (--BlockOf(block).owners == 0 && BlockOf(block).prefix) {
      released_.push_back(block);
    }
  }

  // Keeps the first `count` blocks, and releases the others from the last on.
  void DropBlocks(Sequence& sequence, int count) {
    while (Size(sequence.blocks) > count) {
      Drop(sequence.blocks.back());
      sequence.blocks.pop_back();
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

// Tries all lengths, the longest first (P15, P16).
class Groups final : public GroupedPool {
 public:
  using GroupedPool::GroupedPool;

 protected:
  int DoFind(std::span<const std::int32_t> prompt,
             const PrefixKey& key) const override {
    for (std::size_t len = prompt.size(); len-- > 1;) {
      if (len % AsSize(spec().block_size) != 0) continue;
      const auto serves = [&](const auto& group) {
        return *group->Find(prompt.first(len + 1), key) == AsInt(len);
      };
      if (std::ranges::all_of(groups(), serves)) return AsInt(len);
    }
    return 0;
  }
  int DoResumeBefore(int sequence, int len) const override {
    const auto serves = [&](const auto& group) {
      return *group->ResumeBefore(sequence, len) == len;
    };
    while (!std::ranges::all_of(groups(), serves)) --len;
    return len;
  }
};

}  // namespace

std::string StateText(const PagedPool& pool) {
  std::string text;
  for (int group = 0; const PagedPool* of = pool.Group(group); ++group) {
    text += dynamic_cast<const Pool&>(*of).StateText() + "\n";
  }
  return text;
}

Result<std::unique_ptr<PagedPool>> MakePagedPool(const PagedSpec& spec) {
  if (spec.groups.empty()) {
    return std::unique_ptr<PagedPool>(std::make_unique<Pool>(spec));
  }
  GroupedPool::Groups pools;
  const PagedSpec all = Completed(spec);
  for (const PagedSpec& group : all.groups) {
    pools.push_back(std::make_unique<Pool>(group));
  }
  return std::unique_ptr<PagedPool>(
      std::make_unique<Groups>(spec, std::move(pools)));
}

}  // namespace kvtwin::reference
