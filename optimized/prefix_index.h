// Finds the blocks with the rows of a prefix. The index is a tree over whole
// blocks of tokens. Blocks that follow one another lie in one run, so that a
// long prompt is compared with a run as a whole. A run is found by the xxHash
// of its first block and of the node that it follows. Tokens are always
// compared, too, not only hashes.

#ifndef KVTWIN_OPTIMIZED_PREFIX_INDEX_H_
#define KVTWIN_OPTIMIZED_PREFIX_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/index.h"
#include "kvtwin/paged.h"

namespace kvtwin::optimized {

class PrefixIndex {
 public:
  using Tokens = std::span<const std::int32_t>;
  using Media = std::span<const PrefixMedia>;

  // A block has `block_size` tokens.
  explicit PrefixIndex(std::size_t block_size) : size_(block_size) {}

  // The root for the salt and the extras of `key`, or the child of `node` for a
  // block of tokens, with the media among them. Creates the node if it is
  // missing. It is kept until each Need has its Release.
  int NeedRoot(const PrefixKey& key);
  int NeedChild(int node, Tokens tokens, Media media = {});
  void Need(int node) { ++At(nodes_, node).needs; }
  void Release(int node);

  // The same, but they return -1 if there is none, and do not Need it.
  int FindRoot(const PrefixKey& key) const;
  int FindChild(int node, Tokens tokens, Media media = {}) const;

  // Calls `visit` for each run of the nodes of a prompt's first blocks, in
  // order, as far as there are such nodes. `blocks` are theirs, or -1. `media`
  // are those of the prompt.
  using Visit = std::function<void(std::span<const int> nodes,
                                   std::span<const int> blocks)>;
  void Walk(int root, Tokens prompt, Media media, const Visit& visit) const;

  // The block with the rows of the node's last tokens, or -1.
  int block(int node) const { return RunOf(node).blocks[PlaceOf(node)]; }
  void SetBlock(int node, int block) {
    At(runs_, At(nodes_, node).run).blocks[PlaceOf(node)] = block;
  }

  // The media at positions from `begin` to `end`.
  static Media MediaIn(Media media, std::size_t begin, std::size_t end);

 private:
  // How a run begins: after its parent, by a block of tokens and the media in
  // `key`; a root (parent -1), by the rest of the key.
  struct Step {
    int parent = -1;
    std::vector<std::int32_t> tokens;
    PrefixKey key;
    bool operator==(const Step&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Step& step) const;
  };
  // Nodes, each of which follows the one before it. Media are in the block of
  // the first node only. A node is kept as long as the next one, so that nodes
  // leave a run from the last one on.
  struct Run {
    Step first;
    std::vector<std::int32_t> tokens;  // All nodes have some; a root has none.
    std::vector<int> nodes;
    std::vector<int> blocks;
  };
  struct Node {
    int run = 0;
    int place = 0;           // In the run.
    std::int64_t needs = 0;  // Includes one for each child.
  };

  const Run& RunOf(int node) const { return At(runs_, At(nodes_, node).run); }
  std::size_t PlaceOf(int node) const { return AsSize(At(nodes_, node).place); }
  static Step RootOf(const PrefixKey& key);
  static Step StepOf(int node, Tokens tokens, Media media);
  int FindStep(const Step& step) const;
  int NeedStep(Step step);
  // Adds a node to the end of a run.
  int AddNode(int run, Tokens tokens);
  // The number of whole blocks that both begin with.
  std::size_t SameBlocks(Tokens a, Tokens b) const;

  std::size_t size_;
  std::vector<Node> nodes_;
  std::vector<int> unused_;
  std::vector<Run> runs_;
  std::vector<int> unused_runs_;
  std::unordered_map<Step, int, Hash> by_step_;  // The first nodes of runs.
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_PREFIX_INDEX_H_
