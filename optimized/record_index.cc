#include "optimized/record_index.h"

#include <algorithm>

#include "core/index.h"

namespace kvtwin::optimized {
namespace {

constexpr int kNumbers = 4 * RecordIndex::kBlock;

// A block of inputs, from input `begin` on, as the numbers that the tree
// compares.
std::vector<std::int32_t> Numbers(std::span<const SessionInput> inputs,
                                  int begin) {
  std::vector<std::int32_t> numbers;
  numbers.reserve(AsSize(kNumbers));
  for (int i = begin; i < begin + RecordIndex::kBlock; ++i) {
    const SessionInput& input = At(inputs, i);
    numbers.push_back(input.token);
    numbers.push_back(input.same_batch);
    numbers.push_back(static_cast<std::int32_t>(input.multimodal));
    numbers.push_back(static_cast<std::int32_t>(input.multimodal >> 32));
  }
  return numbers;
}

}  // namespace

RecordIndex::RecordIndex(int slots)
    : tree_(AsSize(kNumbers)),
      root_(tree_.NeedRoot({})),
      paths_(AsSize(slots)) {}

void RecordIndex::Set(int slot, std::span<const SessionInput> record,
                      int reusable) {
  std::vector<int>& path = At(paths_, slot);
  while (Size(path) > reusable / kBlock) {
    std::erase(At(slots_, path.back()), slot);
    tree_.Release(path.back());
    path.pop_back();
  }
  while (Size(path) < reusable / kBlock) {
    const int parent = path.empty() ? root_ : path.back();
    const int node =
        tree_.NeedChild(parent, Numbers(record, Size(path) * kBlock));
    if (node >= Size(slots_)) slots_.resize(AsSize(node) + 1);
    std::vector<int>& slots = At(slots_, node);
    slots.insert(std::ranges::lower_bound(slots, slot), slot);
    path.push_back(node);
  }
}

std::vector<int> RecordIndex::NodesOf(
    std::span<const SessionInput> prompt) const {
  std::vector<int> nodes;
  while (Size(nodes) < Size(prompt) / kBlock) {
    const int node = tree_.FindChild(nodes.empty() ? root_ : nodes.back(),
                                     Numbers(prompt, Size(nodes) * kBlock));
    if (node < 0) break;
    nodes.push_back(node);
  }
  return nodes;
}

}  // namespace kvtwin::optimized
