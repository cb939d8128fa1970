// Finds the block with the rows of a prefix. The index is a tree over whole
// blocks of tokens; the child of a node is found by the xxHash of its tokens
// and the node. Tokens are compared too, not only hashes.

#ifndef KVTWIN_OPTIMIZED_PREFIX_INDEX_H_
#define KVTWIN_OPTIMIZED_PREFIX_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/index.h"
#include "kvtwin/paged.h"

namespace kvtwin::optimized {

class PrefixIndex {
 public:
  // The root for `key`, or the child of `node` for these tokens. Creates the
  // node if it is missing. It is kept until each Need has its Release.
  int NeedRoot(const PrefixKey& key);
  int NeedChild(int node, std::span<const std::int32_t> tokens);
  void Need(int node) { ++At(nodes_, node).needs; }
  void Release(int node);

  // Same as NeedChild, but returns -1 if there is none, and does not Need it.
  int FindChild(int node, std::span<const std::int32_t> tokens) const;

  // The block with the rows of the node's last tokens, or -1.
  int block(int node) const { return At(nodes_, node).block; }
  void SetBlock(int node, int block) { At(nodes_, node).block = block; }

 private:
  // How a node follows from its parent: by a block of tokens, or, for a root
  // (parent -1), by its key.
  struct Step {
    int parent = -1;
    std::vector<std::int32_t> tokens;
    PrefixKey key;
    bool operator==(const Step&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Step& step) const;
  };
  struct Node {
    Step step;
    std::int64_t needs = 0;  // Includes one for each child.
    int block = -1;
  };

  int NeedStep(Step step);
  int FindStep(const Step& step) const;

  std::vector<Node> nodes_;
  std::vector<int> unused_;
  std::unordered_map<Step, int, Hash> by_step_;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_PREFIX_INDEX_H_
