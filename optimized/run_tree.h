// Where the runs of free cells are: the first one that is long enough, in steps
// that do not depend on how many cells lie before it.
//
// A tree over the words of a set of cells, thirty-two children to a node. Each
// child is known by its longest run, and by those that touch its two ends.

#ifndef KVTWIN_OPTIMIZED_RUN_TREE_H_
#define KVTWIN_OPTIMIZED_RUN_TREE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "optimized/aligned_buffer.h"
#include "optimized/bit_tree.h"

namespace kvtwin::optimized {

class RunTree {
 public:
  static constexpr std::size_t kFanOut = 32;

  // Over `cells`, which it refers to from then on. The set may change at any
  // time, as long as Changed is called for each word that did.
  explicit RunTree(const BitTree& cells);

  // Costs next to nothing: the next Find looks at the word.
  void Changed(std::size_t w) { changed_.Set(w); }
  void AllChanged() { changed_.SetAll(); }

  // The first cell of the first `count` cells in a row that are in the set, or
  // kNone. Requires: count >= 1.
  std::size_t Find(std::size_t count);

 private:
  static constexpr std::size_t kLevelsMax = 5;  // 64 * 32^5 = 2^31 cells.

  // Lengths in cells.
  struct Runs {
    std::uint32_t first;  // Of the run that begins with the first cell,
    std::uint32_t last;   // of that which ends with the last one,
    std::uint32_t most;   // of the longest one.

    bool operator==(const Runs&) const = default;
  };

  struct Node {
    // Of those that begin in one of the children 0 .. i and end anywhere in
    // the node: the longest. So the first child in which a long enough one
    // begins is found by a comparison with all of them.
    std::array<std::uint32_t, kFanOut> most_so_far;
    std::array<Runs, kFanOut> children;
  };

  void Update();
  void Tell(std::size_t level, std::size_t child, const Runs& runs);
  static Runs OfWord(std::uint64_t word);
  static Runs Join(Node& node, std::uint32_t child_cells);

  const BitTree& cells_;
  // Level 0's children are words; the last level is one node.
  std::size_t level_count_ = 0;
  std::array<Node*, kLevelsMax> levels_ = {};
  AlignedBuffer nodes_;
  BitTree changed_;  // Words.
  // Nodes of the level at hand, and of the one above it.
  std::vector<std::size_t> joining_;
  std::vector<std::size_t> to_join_;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_RUN_TREE_H_
