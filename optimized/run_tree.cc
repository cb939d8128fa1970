#include "optimized/run_tree.h"

#include <algorithm>
#include <bit>

#include "core/assert.h"
#include "core/index.h"

namespace kvtwin::optimized {
namespace {

// The number of cells of each child of a node at this level.
constexpr std::uint32_t ChildCells(std::size_t level) {
  std::size_t cells = kWordBits;
  for (; level > 0; --level) cells *= RunTree::kFanOut;
  return static_cast<std::uint32_t>(cells);
}

// The first cell of the first run of `count` cells in a word that has such a
// run.
std::size_t FirstRun(std::uint64_t word, std::size_t count) {
  // Bit i of `word`: cells i .. i + known - 1 are in the set.
  std::size_t known = 1;
  while (known < count) {
    const std::size_t step = std::min(known, count - known);
    word &= word >> step;
    known += step;
  }
  return AsSize(std::countr_zero(word));
}

}  // namespace

RunTree::RunTree(const BitTree& cells)
    : cells_(cells), changed_(cells.word_count()) {
  // Number of nodes at lower levels.
  std::array<std::size_t, kLevelsMax> first{};
  std::size_t nodes = 0;
  std::size_t children = cells.word_count();
  do {
    KVTWIN_ASSERT(level_count_ < kLevelsMax);
    first[level_count_++] = nodes;
    children = (children + kFanOut - 1) / kFanOut;
    nodes += children;
  } while (children > 1);
  nodes_ = AlignedBuffer(nodes * sizeof(Node));
  for (std::size_t level = 0; level < level_count_; ++level) {
    levels_[level] = nodes_.as<Node>() + first[level];
  }
  to_join_.reserve(first[1] + 1);
  joining_.reserve(first[1] + 1);
  AllChanged();
}

RunTree::Runs RunTree::OfWord(std::uint64_t word) {
  Runs runs{.first = static_cast<std::uint32_t>(std::countr_one(word)),
            .last = static_cast<std::uint32_t>(std::countl_one(word)),
            .longest = 0};
  if (runs.first == kWordBits) {
    runs.longest = kWordBits;
    return runs;
  }
  for (; word != 0; word &= word << 1) ++runs.longest;
  return runs;
}

// Updates a node after a child changed. Returns its runs as a child.
RunTree::Runs RunTree::Join(Node& node, std::uint32_t child_cells) {
  // The length of the run that begins with the next child's first cell.
  std::uint32_t on = 0;
  for (std::size_t i = kFanOut; i-- > 0;) {
    const Runs& runs = node.children[i];
    // If the child's last cell is not in the set, this is the run that begins
    // with the next child's first cell. Find then returns that cell.
    node.longest_so_far[i] = std::max(runs.longest, runs.last + on);
    on = runs.first == child_cells ? child_cells + on : runs.first;
  }
  // Length of the run that ends with the last cell so far.
  std::uint32_t before = 0;
  std::uint32_t longest = 0;
  for (std::size_t i = 0; i < kFanOut; ++i) {
    const Runs& runs = node.children[i];
    before = runs.last == child_cells ? child_cells + before : runs.last;
    longest = std::max(longest, node.longest_so_far[i]);
    node.longest_so_far[i] = longest;
  }
  return {.first = on, .last = before, .longest = longest};
}

// Reports a child's runs to the node above; does nothing if they are the same.
void RunTree::Report(std::size_t level, std::size_t child, const Runs& runs) {
  if (level == level_count_) return;
  const std::size_t node = child / kFanOut;
  Runs& known = levels_[level][node].children[child % kFanOut];
  if (known == runs) return;
  known = runs;
  if (to_join_.empty() || to_join_.back() != node) to_join_.push_back(node);
}

void RunTree::Update() {
  if (changed_.empty()) return;
  for (std::size_t w = changed_.First(); w != kNone; w = changed_.Next(w)) {
    changed_.Clear(w);
    Report(0, w, OfWord(cells_.word(w)));
  }
  // Updates level by level, so that no node is joined twice.
  for (std::size_t level = 0; level < level_count_; ++level) {
    std::swap(joining_, to_join_);
    to_join_.clear();
    for (const std::size_t node : joining_) {
      Report(level + 1, node, Join(levels_[level][node], ChildCells(level)));
    }
  }
}

std::size_t RunTree::Find(std::size_t count) {
  KVTWIN_ASSERT(count >= 1);
  Update();
  const auto wanted = static_cast<std::uint32_t>(count);
  std::size_t node = 0;
  for (std::size_t level = level_count_; level-- > 0;) {
    const Node& here = levels_[level][node];
    std::uint32_t child = 0;
    for (const std::uint32_t longest : here.longest_so_far)
      child += longest < wanted;
    if (child == kFanOut) return kNone;  // Happens only at the root.
    node = node * kFanOut + child;
    const Runs& runs = here.children[child];
    if (runs.longest < wanted) {
      return (node + 1) * ChildCells(level) - runs.last;
    }
  }
  return node * kWordBits + FirstRun(cells_.word(node), count);
}

}  // namespace kvtwin::optimized
