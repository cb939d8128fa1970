#include "optimized/prefix_index.h"

#include <algorithm>
#include <string_view>
#include <utility>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvtwin::optimized {
namespace {

std::uint64_t HashOf(std::string_view text, std::uint64_t seed) {
  const std::uint64_t size = text.size();
  seed = XXH3_64bits_withSeed(&size, sizeof(size), seed);
  return XXH3_64bits_withSeed(text.data(), text.size(), seed);
}

std::uint64_t HashOf(const PrefixKey& key) {
  std::uint64_t hash = HashOf(key.salt, 0);
  for (const std::string& extra : key.extra) hash = HashOf(extra, hash);
  return hash;
}

std::uint64_t HashOf(std::span<const std::int32_t> tokens, std::uint64_t seed) {
  return XXH3_64bits_withSeed(tokens.data(), tokens.size_bytes(), seed);
}

}  // namespace

int PrefixIndex::FindRoot(const PrefixKey& key) const {
  const auto [begin, end] = by_hash_.equal_range(HashOf(key));
  for (auto it = begin; it != end; ++it) {
    const Node& node = nodes_[static_cast<std::size_t>(it->second)];
    if (node.parent < 0 && node.key == key) return it->second;
  }
  return -1;
}

int PrefixIndex::FindChild(int node,
                           std::span<const std::int32_t> tokens) const {
  const std::uint64_t before = nodes_[static_cast<std::size_t>(node)].hash;
  const auto [begin, end] = by_hash_.equal_range(HashOf(tokens, before));
  for (auto it = begin; it != end; ++it) {
    const Node& child = nodes_[static_cast<std::size_t>(it->second)];
    if (child.parent == node && std::ranges::equal(child.tokens, tokens)) {
      return it->second;
    }
  }
  return -1;
}

int PrefixIndex::Add(Node node) {
  int added;
  const std::uint64_t hash = node.hash;
  if (unused_.empty()) {
    added = static_cast<int>(nodes_.size());
    nodes_.push_back(std::move(node));
  } else {
    added = unused_.back();
    unused_.pop_back();
    nodes_[static_cast<std::size_t>(added)] = std::move(node);
  }
  by_hash_.emplace(hash, added);
  return added;
}

int PrefixIndex::NeedRoot(const PrefixKey& key) {
  int root = FindRoot(key);
  if (root < 0) {
    Node node;
    node.hash = HashOf(key);
    node.key = key;
    root = Add(std::move(node));
  }
  Need(root);
  return root;
}

int PrefixIndex::NeedChild(int node, std::span<const std::int32_t> tokens) {
  int child = FindChild(node, tokens);
  if (child < 0) {
    Node made;
    made.parent = node;
    made.hash = HashOf(tokens, nodes_[static_cast<std::size_t>(node)].hash);
    made.tokens.assign(tokens.begin(), tokens.end());
    child = Add(std::move(made));
    Need(node);
  }
  Need(child);
  return child;
}

void PrefixIndex::Release(int node) {
  while (node >= 0) {
    Node& released = nodes_[static_cast<std::size_t>(node)];
    if (--released.needs > 0) return;
    const auto [begin, end] = by_hash_.equal_range(released.hash);
    for (auto it = begin; it != end; ++it) {
      if (it->second != node) continue;
      by_hash_.erase(it);
      break;
    }
    const int parent = released.parent;
    released = Node();
    unused_.push_back(node);
    node = parent;
  }
}

}  // namespace kvtwin::optimized
