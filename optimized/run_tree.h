// Finds the first run of free cells that is long enough, in a number of steps
// that does not depend on how many cells lie before it.
//
// A tree over the words of a set of cells, 32 children to a node. Each node
// stores the longest run of each child, and the runs at the child's two ends.

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

  // Builds a tree over `cells`, and keeps a reference to it. The set may change
  // at any time, as long as Changed is called for each changed word.
  explicit RunTree(const BitTree& cells);

  // Marks a word as changed; cheap, because the next Find reads the word.
  void Changed(std::size_t w) { changed_.Set(w); }
  void AllChanged() { changed_.SetAll(); }

  // The first cell of the first run of `count` cells in the set, or kNone.
  // Requires: count >= 1.
  std::size_t Find(std::size_t count);

 private:
  static constexpr std::size_t kLevelsMax = 5;  // 64 * 32^5 = 2^31 cells.

  // Lengths of runs, in cells.
  struct Runs {
    std::uint32_t first;    // The run that begins with the first cell.
    std::uint32_t last;     // The run that ends with the last cell.
    std::uint32_t longest;  // The longest run.

    bool operator==(const Runs&) const = default;
  };

  struct Node {
    // The longest run that begins in one of the children 0 .. i and ends
    // anywhere in the node. So comparing all of them with a length finds the
    // first child in which a long enough run begins.
    std::array<std::uint32_t, kFanOut> longest_so_far;
    std::array<Runs, kFanOut> children;
  };

  void Update();
  void Report(std::size_t level, std::size_t child, const Runs& runs);
  static Runs OfWord(std::uint64_t word);
  static Runs Join(Node& node, std::uint32_t child_cells);

  const BitTree& cells_;
  // The children of level 0 are words; the last level is one node.
  std::size_t level_count_ = 0;
  std::array<Node*, kLevelsMax> levels_ = {};
  AlignedBuffer nodes_;
  BitTree changed_;  // Changed words.
  // Nodes to update at the current level, and at the level above.
  std::vector<std::size_t> joining_;
  std::vector<std::size_t> to_join_;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_RUN_TREE_H_
