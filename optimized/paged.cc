// The optimized twin of the paged pool.

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/assert.h"
#include "core/dense_tensor.h"
#include "core/grouped_pool.h"
#include "core/index.h"
#include "core/twin.h"
#include "optimized/bit_tree.h"
#include "optimized/pool_memory.h"
#include "optimized/prefix_index.h"

namespace kvtwin::optimized {
namespace {

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
  std::vector<PrefixMedia> media;  // By position.
  // The block of the state that the pass reads, and its place in `blocks`,
  // which the state that the pass writes has (P13).
  int read = kNoBlock;
  std::size_t read_at = 0;
  std::size_t held = 0;  // Blocks before this one were given up.
};

class Pool final : public GuardedPaged {
 public:
  Pool(const PagedSpec& spec, std::unique_ptr<PoolMemory> memory)
      : GuardedPaged(spec),
        size_(AsSize(spec.block_size)),
        blocks_(AsSize(spec.blocks)),
        free_(blocks_.size()),
        index_(size_),
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
  int DoFind(std::span<const std::int32_t> prompt,
             const PrefixKey& key) const override {
    Served served(*this);
    Walk(prompt, key, [&](std::span<const int>, std::span<const int> blocks) {
      served.Add(blocks);
    });
    return served.count() * spec().block_size;
  }

  int DoOpen(int sequence, std::span<const std::int32_t> prompt,
             const PrefixKey& key) override {
    Sequence& opened = sequences_[sequence];
    opened.media = key.media;
    opened.nodes = {index_.NeedRoot(key)};
    Served served(*this);
    std::vector<int> path;
    Walk(prompt, key,
         [&](std::span<const int> nodes, std::span<const int> blocks) {
           served.Add(blocks);
           path.insert(path.end(), nodes.begin(), nodes.end());
         });
    path.resize(AsSize(served.count()));
    const int len = served.count() * spec().block_size;
    opened.held = AsSize(len == 0 ? 0 : FirstNeeded(len));
    for (const int node : path) {
      index_.Need(node);
      opened.nodes.push_back(node);
      const bool is_held = opened.blocks.size() >= opened.held;
      Take(opened, is_held ? index_.block(node) : kNoBlock);
    }
    const auto taken = prompt.first(AsSize(len));
    opened.known.assign(taken.begin(), taken.end());
    return len;
  }

  void DoAddMedia(int sequence, const PrefixMedia& media) override {
    std::vector<PrefixMedia>& all = sequences_.at(sequence).media;
    const auto place = std::ranges::upper_bound(all, media.position, {},
                                                &PrefixMedia::position);
    all.insert(place, media);
  }

  int DoResumeBefore(int sequence, int all, int len) const override {
    if (len == all || (!spec().window && !spec().states)) return len;
    const std::vector<int>& blocks = sequences_.at(sequence).blocks;
    const int step = spec().states ? spec().block_size : 1;
    for (int at = len / step * step; at > 0; at -= step) {
      // Blocks are given up from the first on.
      if (At(blocks, FirstNeeded(at)) != kNoBlock) return at;
    }
    return 0;
  }

  void DoFork(int from, int sequence, int len) override {
    Sequence& forked = sequences_[sequence];
    const Sequence& source = sequences_.at(from);
    for (int i = 0; i < BlocksFor(len); ++i) {
      Take(forked, At(source.blocks, i));
    }
    if (source.read != kNoBlock && AsSize(len) > source.read_at * size_) {
      Drop(std::exchange(forked.blocks.back(), kNoBlock));
      forked.blocks.pop_back();
      Take(forked, source.read);
    }
    forked.held = std::min(source.held, forked.blocks.size());
    forked.known = source.known;
    forked.nodes = source.nodes;
    for (const int node : forked.nodes) index_.Need(node);
    DropTokens(forked, len);
    forked.media = source.media;
    DropMedia(forked, len, kAllLater);
  }

  bool DoReserve(int sequence, int begin, int end) override {
    if (spec().states) return ReserveStates(sequence, begin, end);
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
    const std::vector<int>& blocks = sequences_.at(sequence).blocks;
    if (spec().states) return StoreStates(blocks, layer, start, key, value);
    memory_->Store(blocks, start, key, KeysOf(layer), value, ValuesOf(layer));
  }

  void DoCommit(int sequence, int before, int len,
                std::span<const std::int32_t> tokens) override {
    Sequence& to = sequences_.at(sequence);
    EndPass(to, /*keeps_written=*/len > before);
    DropBlocks(to, BlocksFor(len));
    Publish(to, len, tokens);
    if (!spec().window) return;
    const std::size_t seen = FirstSeen(len);
    for (std::size_t i = seen; i > to.held; --i) {
      Drop(std::exchange(to.blocks[i - 1], kNoBlock));
    }
    to.held = std::max(to.held, seen);
  }

  void DoTruncate(int sequence, int before, int len) override {
    Sequence& of = sequences_.at(sequence);
    EndPass(of, /*keeps_written=*/false);
    DropBlocks(of, BlocksFor(len));
    DropTokens(of, len);
    DropMedia(of, len, before);
    of.held = std::min(of.held, of.blocks.size());
  }

  void DoFree(int sequence) override {
    Sequence& freed = sequences_.at(sequence);
    EndPass(freed, /*keeps_written=*/false);
    DropBlocks(freed, 0);
    for (const int node : freed.nodes) index_.Release(node);
    sequences_.erase(sequence);
  }

  std::span<const int> DoBlocks(int sequence) const override {
    return sequences_.at(sequence).blocks;
  }
  int DoReadBlock(int sequence) const override {
    return sequences_.at(sequence).read;
  }

  PagedKv DoRows(int layer, std::int64_t slot, int count) const override {
    const auto at = AsSize(slot);
    return {memory_->Show(KeysOf(layer).View(at, count)),
            memory_->Show(ValuesOf(layer).View(at, count))};
  }

  PagedKv DoAllRows(int layer) const override {
    const auto all = [&](const PoolRows& rows) {
      const Shape shape = {
          static_cast<std::int64_t>(rows.head_dim),
          static_cast<std::int64_t>(rows.heads),
          static_cast<std::int64_t>(blocks_.size()) * RowsPerBlock(), 1};
      return memory_->Show(DenseView(rows.data, rows.dtype, shape));
    };
    return {all(KeysOf(layer)), all(ValuesOf(layer))};
  }

  Device DoDevice() const override { return memory_->device(); }

 private:
  static constexpr int kAllLater = std::numeric_limits<int>::max();

  Block& BlockOf(int block) { return At(blocks_, block); }

  // The first block that the token after `len` tokens sees, or needs.
  std::size_t FirstSeen(int len) const {
    const int hidden = spec().window ? len - *spec().window : 0;
    return hidden > 0 ? AsSize(hidden) / size_ : 0;
  }
  int FirstNeeded(int len) const {
    return spec().states ? BlocksFor(len) - 1 : AsInt(FirstSeen(len));
  }

  // Counts the blocks of a prompt with which a sequence can begin.
  class Served {
   public:
    explicit Served(const Pool& pool) {
      const PagedSpec& spec = pool.spec();
      if (spec.states) {
        needed_ = 1;
      } else if (spec.window) {
        needed_ = pool.BlocksFor(*spec.window);
      }
    }
    // Adds the next blocks: of a node each, kNoBlock if it is not stored.
    void Add(std::span<const int> blocks) {
      for (const int block : blocks) {
        ++all_;
        stored_ = block == kNoBlock ? 0 : stored_ + 1;
        if (stored_ >= std::min(all_, needed_)) count_ = all_;
      }
    }
    int count() const { return count_; }

   private:
    int needed_ = std::numeric_limits<int>::max();  // Before the next token.
    int all_ = 0;
    int stored_ = 0;  // The last blocks, one after another.
    int count_ = 0;
  };

  // Visits the nodes of the prompt's whole blocks, without its last token.
  void Walk(std::span<const std::int32_t> prompt, const PrefixKey& key,
            const PrefixIndex::Visit& visit) const {
    const int root = index_.FindRoot(key);
    if (root < 0 || prompt.empty()) return;
    const std::size_t end =
        std::min(prompt.size() - 1, AsSize(spec().max_seq_len));
    index_.Walk(root, prompt.first(end), key.media, visit);
  }

  // Gets blocks for the states that a pass writes.
  bool ReserveStates(int sequence, int begin, int end) {
    Sequence& of = sequences_.at(sequence);
    const bool replaces = AsSize(begin) % size_ != 0 && of.read == kNoBlock;
    const int missing = std::max(0, BlocksFor(end) - Size(of.blocks));
    if (missing + (replaces ? 1 : 0) > usage_.free + usage_.cached) {
      return false;
    }
    if (replaces) {
      of.read_at = AsSize(begin) / size_;
      of.read = std::exchange(of.blocks[of.read_at], Fresh());
    }
    for (int i = 0; i < missing; ++i) of.blocks.push_back(Fresh());
    return true;
  }

  // Stores the last state of each block.
  void StoreStates(const std::vector<int>& blocks, int layer, int start,
                   const TensorView& key, const TensorView& value) {
    const int end = start + AsInt(key.shape[2]);
    for (int begin = start; begin < end;) {
      const int block = begin / spec().block_size;
      begin +=
          std::min(spec().block_size - begin % spec().block_size, end - begin);
      const std::int64_t last = begin - 1 - start;
      memory_->Store(blocks, block, Slice(key, 2, last), KeysOf(layer),
                     Slice(value, 2, last), ValuesOf(layer));
    }
  }

  // Drops the state that the pass read; without `keeps_written`, the state that
  // the pass wrote in place of it.
  void EndPass(Sequence& of, bool keeps_written) {
    if (of.read == kNoBlock) return;
    const int read = std::exchange(of.read, kNoBlock);
    Drop(keeps_written ? read : std::exchange(of.blocks[of.read_at], read));
  }

  // Lets prompts find the blocks that the new tokens filled.
  void Publish(Sequence& to, int len, std::span<const std::int32_t> tokens) {
    const std::size_t known = to.known.size() + tokens.size();
    if (known != AsSize(len)) return;
    to.known.insert(to.known.end(), tokens.begin(), tokens.end());
    for (std::size_t i = to.nodes.size() - 1; i < known / size_; ++i) {
      const int node = index_.NeedChild(
          to.nodes.back(), std::span(to.known).subspan(i * size_, size_),
          PrefixIndex::MediaIn(to.media, i * size_, (i + 1) * size_));
      to.nodes.push_back(node);
      if (index_.block(node) == kNoBlock) Show(to.blocks[i], node);
    }
  }

  // Drops the media at positions from `begin` to `end`.
  static void DropMedia(Sequence& of, int begin, int end) {
    std::erase_if(of.media, [&](const PrefixMedia& media) {
      return media.position >= begin && media.position < end;
    });
  }

  PoolRows MakeRows(DType dtype, int head_dim) {
    PoolRows rows{.data = nullptr,
                  .dtype = dtype,
                  .head_dim = AsSize(head_dim),
                  .heads = AsSize(spec().kv_heads),
                  .block_size = AsSize(RowsPerBlock()),
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
    sequence.blocks.push_back(block);
    if (block == kNoBlock) return;
    Block& taken = BlockOf(block);
    if (taken.owners == 0) {
      Unlist(block);
      ++usage_.used;
    }
    if (++taken.owners == 2) ++usage_.shared;
  }

  void Drop(int block) {
    if (block == kNoBlock) return;
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

// Asks the groups in turn, until all agree.
class Groups final : public GroupedPool {
 public:
  using GroupedPool::GroupedPool;

 protected:
  int DoFind(std::span<const std::int32_t> prompt,
             const PrefixKey& key) const override {
    return Agree(prompt.empty() ? 0 : Size(prompt) - 1,
                 [&](const GuardedPaged& group, int most) {
                   return group.FindChecked(prompt.first(AsSize(most) + 1),
                                            key);
                 });
  }
  int DoResumeBefore(int sequence, int len) const override {
    return Agree(len, [&](const GuardedPaged& group, int most) {
      return *group.ResumeBefore(sequence, most);
    });
  }

 private:
  // `longest` returns the greatest length up to a number that a group serves.
  template <class Longest>
  int Agree(int len, const Longest& longest) const {
    std::size_t agreed = 0;  // Groups in a row that serve `len`.
    for (std::size_t at = 0; len > 0 && agreed < groups().size(); ++at) {
      const int served = longest(*groups()[at % groups().size()], len);
      agreed = served == len ? agreed + 1 : 1;
      len = served;
    }
    return len;
  }
};

}  // namespace

std::unique_ptr<PagedPool> MakePool(const PagedSpec& spec,
                                    std::unique_ptr<PoolMemory> memory) {
  return std::make_unique<Pool>(spec, std::move(memory));
}

Result<std::unique_ptr<PagedPool>> MakePagedPool(const PagedSpec& spec) {
  if (spec.groups.empty()) {
    return MakePool(spec, std::make_unique<HostPoolMemory>());
  }
  GroupedPool::Groups pools;
  const PagedSpec all = Completed(spec);
  for (const PagedSpec& group : all.groups) {
    pools.push_back(
        std::make_unique<Pool>(group, std::make_unique<HostPoolMemory>()));
  }
  return std::unique_ptr<PagedPool>(
      std::make_unique<Groups>(spec, std::move(pools)));
}

}  // namespace kvtwin::optimized
