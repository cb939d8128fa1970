// Finds the slots whose records begin like a prompt. Records are cut into
// blocks, and equal prefixes of whole blocks are one node of a tree
// (prefix_index.h), which knows the slots that go through it.

#ifndef KVTWIN_OPTIMIZED_RECORD_INDEX_H_
#define KVTWIN_OPTIMIZED_RECORD_INDEX_H_

#include <span>
#include <vector>

#include "kvtwin/sessions.h"
#include "optimized/prefix_index.h"

namespace kvtwin::optimized {

class RecordIndex {
 public:
  static constexpr int kBlock = 64;  // Inputs.

  explicit RecordIndex(int slots);

  // The first `reusable` inputs of the slot's record can be found from now on.
  // Requires: the earlier ones that stay are unchanged since the last call.
  void Set(int slot, std::span<const SessionInput> record, int reusable);

  // Calls visit(slot, shared) for every slot, those that share more whole
  // blocks with the prompt first, then by slot, until it returns true;
  // `shared` is a number of inputs.
  template <typename Visit>
  void Find(std::span<const SessionInput> prompt, const Visit& visit) const;

 private:
  std::vector<int> NodesOf(std::span<const SessionInput> prompt) const;

  PrefixIndex tree_;
  int root_;
  std::vector<std::vector<int>> paths_;  // By slot: its nodes below the root.
  std::vector<std::vector<int>> slots_;  // By node: sorted.
};

template <typename Visit>
void RecordIndex::Find(std::span<const SessionInput> prompt,
                       const Visit& visit) const {
  const std::vector<int> nodes = NodesOf(prompt);
  for (int level = Size(nodes); level >= 0; --level) {
    const auto is_deeper = [&](int slot) {
      const std::vector<int>& path = At(paths_, slot);
      return level < Size(nodes) && level < Size(path) &&
             At(path, level) == At(nodes, level);
    };
    if (level > 0) {
      for (const int slot : At(slots_, At(nodes, level - 1))) {
        if (!is_deeper(slot) && visit(slot, level * kBlock)) return;
      }
      continue;
    }
    for (int slot = 0; slot < Size(paths_); ++slot) {
      if (!is_deeper(slot) && visit(slot, 0)) return;
    }
  }
}

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_RECORD_INDEX_H_
