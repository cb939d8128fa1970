// Where the runs of free cells are: the first one that is long enough, in steps
// that do not depend on how many cells lie before it.
//
// A binary tree over the words of a set of cells. Each node knows the longest
// run within its cells, and those that touch its two ends.

#ifndef KVTWIN_OPTIMIZED_RUN_TREE_H_
#define KVTWIN_OPTIMIZED_RUN_TREE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "optimized/aligned_buffer.h"
#include "optimized/bit_tree.h"

namespace kvtwin::optimized {

class RunTree {
 public:
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
  // Lengths in cells.
  struct Runs {
    std::uint32_t first;  // Of the run that begins with the first cell,
    std::uint32_t last;   // of that which ends with the last one,
    std::uint32_t most;   // of the longest one.
  };

  void Update();
  Runs At(std::size_t node) const;
  static Runs OfWord(std::uint64_t word);
  static Runs Join(const Runs& low, const Runs& high, std::size_t half);

  const BitTree& cells_;
  std::size_t leaves_;   // A power of two: leaf w is node leaves_ + w.
  AlignedBuffer nodes_;  // Without the leaves; the root is node 1.
  BitTree changed_;      // Words.
  std::vector<std::size_t> nodes_to_join_;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_RUN_TREE_H_
