#include "optimized/prefix_index.h"

#include <string_view>
#include <utility>

#include "core/index.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvtwin::optimized {
namespace {

std::uint64_t HashOf(std::string_view text, std::uint64_t seed) {
  const std::uint64_t size = text.size();
  seed = XXH3_64bits_withSeed(&size, sizeof(size), seed);
  return XXH3_64bits_withSeed(text.data(), text.size(), seed);
}

}  // namespace

std::size_t PrefixIndex::Hash::operator()(const Step& step) const {
  std::uint64_t hash = HashOf(step.key.salt, 0);
  for (const std::string& extra : step.key.extra) hash = HashOf(extra, hash);
  hash = XXH3_64bits_withSeed(&step.parent, sizeof(step.parent), hash);
  return XXH3_64bits_withSeed(step.tokens.data(),
                              step.tokens.size() * sizeof(std::int32_t), hash);
}

int PrefixIndex::FindStep(const Step& step) const {
  const auto found = by_step_.find(step);
  return found == by_step_.end() ? -1 : found->second;
}

int PrefixIndex::FindChild(int node,
                           std::span<const std::int32_t> tokens) const {
  return FindStep({node, {tokens.begin(), tokens.end()}, {}});
}

int PrefixIndex::NeedStep(Step step) {
  int node = FindStep(step);
  if (node < 0) {
    if (unused_.empty()) {
      unused_.push_back(Size(nodes_));
      nodes_.emplace_back();
    }
    node = unused_.back();
    unused_.pop_back();
    if (step.parent >= 0) Need(step.parent);
    by_step_.emplace(step, node);
    At(nodes_, node).step = std::move(step);
  }
  Need(node);
  return node;
}

int PrefixIndex::NeedRoot(const PrefixKey& key) {
  return NeedStep({-1, {}, key});
}

int PrefixIndex::NeedChild(int node, std::span<const std::int32_t> tokens) {
  return NeedStep({node, {tokens.begin(), tokens.end()}, {}});
}

void PrefixIndex::Release(int node) {
  while (node >= 0) {
    Node& released = At(nodes_, node);
    if (--released.needs > 0) return;
    by_step_.erase(released.step);
    unused_.push_back(node);
    node = released.step.parent;
    released = Node();
  }
}

}  // namespace kvtwin::optimized
