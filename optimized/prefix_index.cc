#include "optimized/prefix_index.h"

#include <algorithm>
#include <cstring>
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

// Returns the number of a new element of `all`.
template <class T>
int Unused(std::vector<T>& all, std::vector<int>& unused) {
  if (unused.empty()) {
    all.emplace_back();
    return Size(all) - 1;
  }
  const int number = unused.back();
  unused.pop_back();
  return number;
}

}  // namespace

std::size_t PrefixIndex::Hash::operator()(const Step& step) const {
  std::uint64_t hash = HashOf(step.key.salt, 0);
  for (const std::string& extra : step.key.extra) hash = HashOf(extra, hash);
  for (const auto& [position, media] : step.key.media) {
    hash = HashOf(media, hash + AsSize(position));
  }
  hash = XXH3_64bits_withSeed(&step.parent, sizeof(step.parent), hash);
  return XXH3_64bits_withSeed(step.tokens.data(),
                              step.tokens.size() * sizeof(std::int32_t), hash);
}

PrefixIndex::Media PrefixIndex::MediaIn(Media media, std::size_t begin,
                                        std::size_t end) {
  const auto at = [&](std::size_t position) {
    return std::ranges::lower_bound(
        media, position, {},
        [](const PrefixMedia& one) { return AsSize(one.position); });
  };
  return {at(begin), at(end)};
}

PrefixIndex::Step PrefixIndex::StepOf(int node, Tokens tokens, Media media) {
  Step step = {node, {tokens.begin(), tokens.end()}, {}};
  step.key.media.assign(media.begin(), media.end());
  return step;
}

int PrefixIndex::FindStep(const Step& step) const {
  const auto found = by_step_.find(step);
  return found == by_step_.end() ? -1 : found->second;
}

PrefixIndex::Step PrefixIndex::RootOf(const PrefixKey& key) {
  return {-1, {}, {key.salt, key.extra}};
}

int PrefixIndex::FindRoot(const PrefixKey& key) const {
  return FindStep(RootOf(key));
}

int PrefixIndex::FindChild(int node, Tokens tokens, Media media) const {
  const Run& run = RunOf(node);
  const std::size_t next = PlaceOf(node) + 1;
  if (media.empty() && next < run.nodes.size() &&
      std::ranges::equal(std::span(run.tokens).subspan(next * size_, size_),
                         tokens)) {
    return run.nodes[next];
  }
  return FindStep(StepOf(node, tokens, media));
}

int PrefixIndex::AddNode(int run, Tokens tokens) {
  const int node = Unused(nodes_, unused_);
  Run& to = At(runs_, run);
  At(nodes_, node) = {run, Size(to.nodes), 0};
  to.tokens.insert(to.tokens.end(), tokens.begin(), tokens.end());
  to.nodes.push_back(node);
  to.blocks.push_back(-1);
  return node;
}

int PrefixIndex::NeedStep(Step step) {
  int node = FindStep(step);
  if (node < 0) {
    if (step.parent >= 0) Need(step.parent);
    const int run = Unused(runs_, unused_runs_);
    node = AddNode(run, step.tokens);
    by_step_.emplace(step, node);
    At(runs_, run).first = std::move(step);
  }
  Need(node);
  return node;
}

int PrefixIndex::NeedRoot(const PrefixKey& key) {
  return NeedStep(RootOf(key));
}

int PrefixIndex::NeedChild(int node, Tokens tokens, Media media) {
  int child = FindChild(node, tokens, media);
  if (child >= 0) {
    Need(child);
    return child;
  }
  const Run& run = RunOf(node);
  const bool is_root = run.first.parent < 0;
  if (is_root || !media.empty() || run.nodes.back() != node) {
    return NeedStep(StepOf(node, tokens, media));
  }
  Need(node);
  child = AddNode(At(nodes_, node).run, tokens);
  Need(child);
  return child;
}

void PrefixIndex::Release(int node) {
  while (node >= 0 && --At(nodes_, node).needs == 0) {
    const int number = At(nodes_, node).run;
    Run& run = At(runs_, number);
    unused_.push_back(node);
    run.nodes.pop_back();
    run.blocks.pop_back();
    run.tokens.resize(run.nodes.size() * size_);
    if (!run.nodes.empty()) {
      node = run.nodes.back();
      continue;
    }
    by_step_.erase(run.first);
    node = run.first.parent;
    run = Run();
    unused_runs_.push_back(number);
  }
}

std::size_t PrefixIndex::SameBlocks(Tokens a, Tokens b) const {
  const std::size_t all = std::min(a.size(), b.size()) / size_;
  std::size_t same = 0;
  for (std::size_t step = all; same < all && step > 0;) {
    step = std::min(step, all - same);
    const bool equal = std::memcmp(&a[same * size_], &b[same * size_],
                                   step * size_ * sizeof(std::int32_t)) == 0;
    if (equal) {
      same += step;
    } else {
      step /= 2;
    }
  }
  return same;
}

void PrefixIndex::Walk(int root, Tokens prompt, Media media,
                       const Visit& visit) const {
  int node = root;
  for (std::size_t at = 0; at + size_ <= prompt.size();) {
    const Tokens rest = prompt.subspan(at);
    node = FindStep(
        StepOf(node, rest.first(size_), MediaIn(media, at, at + size_)));
    if (node < 0) return;
    // Later media are in the first block of another run.
    const Media later = MediaIn(media, at + size_, prompt.size());
    const std::size_t end =
        later.empty() ? rest.size()
                      : AsSize(later.front().position) / size_ * size_ - at;
    const Run& run = RunOf(node);
    const std::size_t count = SameBlocks(rest.first(end), run.tokens);
    visit(std::span(run.nodes).first(count),
          std::span(run.blocks).first(count));
    node = run.nodes[count - 1];
    at += count * size_;
  }
}

}  // namespace kvtwin::optimized
