// Compares the index of prefixes with a map of all prefixes.

#include "optimized/prefix_index.h"

#include <gtest/gtest.h>

#include <map>
#include <span>
#include <vector>

#include "core/index.h"
#include "props/history/generate.h"

namespace kvtwin::optimized {
namespace {

constexpr std::size_t kSize = 2;

// Blocks from the root on, each by its number, and the root's salt.
struct Path {
  std::string salt;
  std::vector<int> blocks;
  auto operator<=>(const Path&) const = default;
};

// Block n has the tokens n / 2 and 7; odd ones have an image.
std::vector<std::int32_t> TokensOf(int block) { return {block / 2, 7}; }
std::vector<PrefixMedia> MediaOf(int block, int place) {
  if (block % 2 == 0) return {};
  return {{2 * place + 1, "a"}};
}

class Model {
 public:
  PrefixIndex index{kSize};

  // Needs the whole path, a node at a time, and returns its last node.
  int Need(const Path& path) {
    int node = index.NeedRoot({.salt = path.salt});
    std::vector<int> nodes = {node};
    for (int i = 0; i < Size(path.blocks); ++i) {
      const int block = At(path.blocks, i);
      node = index.NeedChild(node, TokensOf(block), MediaOf(block, i));
      nodes.push_back(node);
    }
    nodes.pop_back();
    for (const int before : nodes) index.Release(before);
    ++needs_[path];
    if (!block_of_.contains(path)) {
      block_of_[path] = next_;
      index.SetBlock(node, next_++);
    }
    return node;
  }
  void Release(const Path& path, int node) {
    index.Release(node);
    if (--needs_[path] == 0) needs_.erase(path);
    // A path is forgotten with the last path that it begins.
    std::erase_if(block_of_,
                  [&](const auto& known) { return !Exists(known.first); });
  }
  bool Exists(const Path& path) const {
    for (const auto& [needed, count] : needs_) {
      if (needed.salt == path.salt &&
          std::ranges::equal(
              std::span(needed.blocks)
                  .first(std::min(needed.blocks.size(), path.blocks.size())),
              path.blocks)) {
        return true;
      }
    }
    return false;
  }
  // The blocks that a walk should visit; -1 for nodes that were never last.
  std::vector<int> Walked(const Path& path) const {
    std::vector<int> walked;
    Path part{path.salt, {}};
    for (const int block : path.blocks) {
      part.blocks.push_back(block);
      if (!Exists(part)) break;
      const auto at = block_of_.find(part);
      walked.push_back(at == block_of_.end() ? -1 : at->second);
    }
    return walked;
  }

 private:
  std::map<Path, int> needs_;
  std::map<Path, int> block_of_;
  int next_ = 0;
};

TEST(PrefixIndex, IsAMapOfAllPrefixes) {
  int longest = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const props::Pick pick = props::SeededPick(5, seed);
    const int kinds = pick(1, 5);
    const auto draw = [&] {
      Path path{pick(0, 3) == 0 ? "s" : "", {}};
      for (int i = pick(1, 12); i > 0; --i) {
        path.blocks.push_back(pick(0, 2) == 0 ? pick(0, kinds) : 0);
      }
      return path;
    };
    Model model;
    std::vector<std::pair<Path, int>> held;
    for (int step = 0; step < 200; ++step) {
      if (held.empty() || pick(0, 2) > 0) {
        const Path path = draw();
        held.emplace_back(path, model.Need(path));
      } else {
        const auto at = IteratorAt(held, pick(0, Size(held) - 1));
        model.Release(at->first, at->second);
        held.erase(at);
      }
      const Path path = draw();
      std::vector<std::int32_t> prompt;
      std::vector<PrefixMedia> media;
      for (int i = 0; i < Size(path.blocks); ++i) {
        for (const auto token : TokensOf(At(path.blocks, i))) {
          prompt.push_back(token);
        }
        for (const auto& one : MediaOf(At(path.blocks, i), i)) {
          media.push_back(one);
        }
      }
      const int root = model.index.FindRoot({.salt = path.salt});
      std::vector<int> walked;
      if (root >= 0) {
        model.index.Walk(
            root, prompt, media,
            [&](std::span<const int> nodes, std::span<const int> blocks) {
              ASSERT_EQ(nodes.size(), blocks.size());
              for (std::size_t i = 0; i < nodes.size(); ++i) {
                EXPECT_EQ(model.index.block(nodes[i]), blocks[i]);
              }
              walked.insert(walked.end(), blocks.begin(), blocks.end());
            });
      }
      ASSERT_EQ(walked, model.Walked(path)) << seed << ' ' << step;
      longest = std::max(longest, Size(walked));
    }
    while (!held.empty()) {
      model.Release(held.back().first, held.back().second);
      held.pop_back();
    }
    EXPECT_EQ(model.index.FindRoot({}), -1);
    EXPECT_EQ(model.index.FindRoot({.salt = "s"}), -1);
  }
  EXPECT_GT(longest, 8);
}

}  // namespace
}  // namespace kvtwin::optimized
