#include "optimized/run_tree.h"

#include <algorithm>
#include <bit>

namespace kvtwin::optimized {
namespace {

// The first cell of `count` cells in a row, within one word that has them.
std::size_t FirstRun(std::uint64_t word, std::size_t count) {
  // Bit i: cells i .. i + known - 1 are in the set.
  std::size_t known = 1;
  while (known < count) {
    const std::size_t step = std::min(known, count - known);
    word &= word >> step;
    known += step;
  }
  return static_cast<std::size_t>(std::countr_zero(word));
}

}  // namespace

RunTree::RunTree(const BitTree& cells)
    : cells_(cells),
      leaves_(std::bit_ceil(cells.word_count())),
      nodes_(leaves_ * sizeof(Runs)),
      changed_(cells.word_count()) {
  nodes_to_join_.reserve(cells.word_count());
  AllChanged();
}

RunTree::Runs RunTree::OfWord(std::uint64_t word) {
  Runs runs{.first = static_cast<std::uint32_t>(std::countr_one(word)),
            .last = static_cast<std::uint32_t>(std::countl_one(word)),
            .most = 0};
  if (runs.first == kWordBits) {
    runs.most = kWordBits;
    return runs;
  }
  for (; word != 0; word &= word << 1) ++runs.most;
  return runs;
}

// Of two neighbours of `half` cells each.
RunTree::Runs RunTree::Join(const Runs& low, const Runs& high,
                            std::size_t half) {
  return {.first = low.first == half ? low.first + high.first : low.first,
          .last = high.last == half ? high.last + low.last : high.last,
          .most = std::max({low.most, high.most, low.last + high.first})};
}

RunTree::Runs RunTree::At(std::size_t node) const {
  if (node < leaves_) return nodes_.as<Runs>()[node];
  const std::size_t w = node - leaves_;
  return OfWord(w < cells_.word_count() ? cells_.word(w) : 0);
}

void RunTree::Update() {
  nodes_to_join_.clear();
  for (std::size_t w = changed_.First(); w != kNone; w = changed_.Next(w + 1)) {
    nodes_to_join_.push_back(leaves_ + w);
    changed_.Clear(w);
  }
  // Level by level, so that no node is joined twice.
  for (std::size_t half = kWordBits; half < leaves_ * kWordBits; half *= 2) {
    std::size_t count = 0;
    for (const std::size_t child : nodes_to_join_) {
      const std::size_t node = child / 2;
      if (count > 0 && nodes_to_join_[count - 1] == node) continue;
      nodes_to_join_[count++] = node;
      nodes_.as<Runs>()[node] = Join(At(2 * node), At(2 * node + 1), half);
    }
    nodes_to_join_.resize(count);
  }
}

std::size_t RunTree::Find(std::size_t count) {
  Update();
  if (At(1).most < count) return kNone;
  std::size_t node = 1;
  std::size_t first = 0;  // Of its cells.
  for (std::size_t half = leaves_ * kWordBits / 2; node < leaves_; half /= 2) {
    const Runs low = At(2 * node);
    if (low.most < count) {
      if (low.last + At(2 * node + 1).first >= count) {
        return first + half - low.last;
      }
      first += half;
    }
    node = 2 * node + (low.most < count ? 1 : 0);
  }
  return first + FirstRun(cells_.word(node - leaves_), count);
}

}  // namespace kvtwin::optimized
