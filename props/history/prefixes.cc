// Prompts for random histories.

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "core/index.h"
#include "props/base/pick.h"
#include "props/history/generate.h"
#include "props/history/speculate.h"

namespace kvtwin::props {
namespace {

// Writes the operations of a server with a prefix cache.
class Prompts {
 public:
  Prompts(const Pick& pick, const Setup& setup, std::vector<Op>& ops)
      : pick_(pick), setup_(setup), ops_(ops) {
    alphabet_ = &kAlphabets.at(AsSize(pick_(0, Size(kAlphabets) - 1)));
    // The first tokens of all prompts, such as system prompts.
    for (std::vector<int>& base : bases_) {
      for (int i = 0; i < std::min(setup.init.capacity, 40); ++i) {
        base.push_back(Token());
      }
    }
  }

  // A request finds its prefix and computes its prompt, or a part of it.
  void Add() {
    const int seq = AnySequence();
    const int count = Find(seq);
    // Another request may come before this request has rows.
    if (Chance(pick_, 20)) Find(AnySequence());
    const int parts = OneOf(pick_, {0, 1, 1, 1, 2, 3});
    for (int i = 0; i < parts; ++i) {
      Put(seq, std::max(1, (count + pick_(0, 1)) / parts));
      if (ops_.back().stop >= 0 || Chance(pick_, 25)) Find(AnySequence());
    }
  }

 private:
  using Alphabet = std::array<int, 3>;
  // Plain tokens, mostly; tokens that are alike when they are joined as text,
  // or cut to 8 or 16 bits.
  static constexpr std::array<Alphabet, 5> kAlphabets = {
      Alphabet{0, 1, 2}, {0, 1, 2}, {1, 11, 111}, {0, 256, 512}, {7, 65543, 3}};

  int Token() { return alphabet_->at(AsSize(pick_(0, 2))); }
  int AnySequence() { return pick_(0, setup_.init.max_sequences - 1); }

  int Find(int seq) {
    Op& find = ops_.emplace_back();
    find.kind = OpKind::kFind;
    find.seq = seq;
    const std::vector<int>& base = bases_[AsSize(pick_(0, 1))];
    const int whole = Size(base);
    const int shared = Chance(pick_, 40) ? whole : pick_(0, whole);
    find.ids.assign(base.begin(), base.begin() + shared);
    for (int more = pick_(shared == 0 ? 1 : 0, 3); more > 0; --more) {
      find.ids.push_back(Token());
    }
    // A prompt with another token in the middle, or among the first ones.
    const int count = Size(find.ids);
    if (count > 0 && Chance(pick_, 20)) {
      const int place = pick_(0, std::min(count, OneOf(pick_, {3, 70})) - 1);
      At(find.ids, place) = Token();
    }
    return Size(find.ids);
  }

  void Put(int seq, int count) {
    Op& put = ops_.emplace_back();
    put.segments.push_back({.seq = seq, .count = count});
    if (Chance(pick_, 20)) {
      put.segments.push_back({.seq = AnySequence(), .count = pick_(1, 3)});
    }
    if (Chance(pick_, 20)) put.stop = pick_(0, setup_.layers - 1);
  }

  const Pick& pick_;
  const Setup& setup_;
  std::vector<Op>& ops_;
  std::vector<int> bases_[2];
  const Alphabet* alphabet_ = nullptr;
};

}  // namespace

History MakePrefixes(std::uint64_t seed, std::uint64_t number,
                     std::optional<Kind> kind, int ops, int cells_max,
                     bool drafts) {
  const Pick pick = SeededPick(~seed ^ 0x5EED, number);
  History history = MakeHistory(seed, number, kind, ops, cells_max);
  if (drafts) AddDrafts(pick, cells_max, history);
  Setup& setup = history.setup;
  setup.legal = true;
  // Prompts of several blocks of 16 tokens.
  if (cells_max == 0 && Chance(pick, 30)) {
    setup.init.capacity = std::max(setup.init.capacity, pick(17, 70));
    setup.init.max_batch = std::max(setup.init.max_batch, pick(8, 40));
  }
  setup.layers = std::max(setup.layers, pick(1, 3));
  // An encoder has no tokens.
  auto& caches = setup.spec.caches;
  const auto encodes = [](const CacheSpec& spec) {
    return spec.kind == Kind::kEncoder;
  };
  if (!std::ranges::all_of(caches, encodes)) std::erase_if(caches, encodes);
  std::vector<Op> woven;
  Prompts prompts(pick, setup, woven);
  prompts.Add();
  for (Op& op : history.ops) {
    op.keep_rows = op.reserve = op.single = false;
    woven.push_back(std::move(op));
    if (Chance(pick, 40)) prompts.Add();
  }
  history.ops = std::move(woven);
  return history;
}

}  // namespace kvtwin::props
