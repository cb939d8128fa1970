// Which block has the rows of which prefix: a tree over whole blocks of tokens,
// the children of a node found by the xxHash of their tokens, chained to the
// node. Equal hashes are not taken for equal tokens.

#ifndef KVTWIN_OPTIMIZED_PREFIX_INDEX_H_
#define KVTWIN_OPTIMIZED_PREFIX_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "kvtwin/paged.h"

namespace kvtwin::optimized {

class PrefixIndex {
 public:
  // The node of no tokens at all, or of these behind those of `node`; it is
  // made if there is none, and kept until each Need has its Release.
  int NeedRoot(const PrefixKey& key);
  int NeedChild(int node, std::span<const std::int32_t> tokens);
  void Need(int node) { ++nodes_[static_cast<std::size_t>(node)].needs; }
  void Release(int node);

  // As NeedChild, but -1 if there is none, and needs nothing.
  int FindChild(int node, std::span<const std::int32_t> tokens) const;

  // The block with the rows of the node's last tokens; -1: none.
  int block(int node) const {
    return nodes_[static_cast<std::size_t>(node)].block;
  }
  void SetBlock(int node, int block) {
    nodes_[static_cast<std::size_t>(node)].block = block;
  }

 private:
  // Whole blocks of tokens behind a node, or behind none: a root's key.
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
    std::int64_t needs = 0;  // Its children need it too.
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
