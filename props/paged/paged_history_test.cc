// Tests that histories of pools are varied enough: the search must find faults
// that only a few of their calls show.

#include "props/paged/paged_history.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "props/base/forwarding_pool.h"
#include "props/paged/paged_client.h"
#include "props/paged/paged_runner.h"
#include "props/testing/pools.h"

namespace kvtwin::props {
namespace {

// Opens sequences with changed keys.
template <void (*kChange)(PrefixKey& key)>
class ChangesKeys : public ForwardingPool {
 public:
  using ForwardingPool::ForwardingPool;
  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    PrefixKey changed = key;
    kChange(changed);
    return pool_->Open(prompt, changed);
  }
};

void SortExtras(PrefixKey& key) { std::ranges::sort(key.extra); }
void ClearSalt(PrefixKey& key) { key.salt.clear(); }
void ForgetHashes(PrefixKey& key) {
  for (PrefixMedia& media : key.media) media.hash = "any";
}
// The order of a key's extras does not matter.
using SortsExtras = ChangesKeys<SortExtras>;
// All salts are the same.
using IgnoresSalts = ChangesKeys<ClearSalt>;

// All media are the same.
class IgnoresMedia : public ChangesKeys<ForgetHashes> {
 public:
  using ChangesKeys::ChangesKeys;
  Status AddMedia(int sequence, const PrefixMedia& media) override {
    return pool_->AddMedia(sequence, {media.position, "any"});
  }
};

// A prompt has each image once.
void ForgetRepeatedHashes(PrefixKey& key) {
  std::set<std::string> seen;
  std::erase_if(key.media, [&](const PrefixMedia& media) {
    return !seen.insert(media.hash).second;
  });
}
using IgnoresRepeatedMedia = ChangesKeys<ForgetRepeatedHashes>;

// There are at most 64 sequences.
class HasNoMoreSequences : public ForwardingPool {
 public:
  using ForwardingPool::ForwardingPool;
  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    return Within(pool_->Open(prompt, key));
  }
  Result<int> Fork(int sequence, int len) override {
    return Within(pool_->Fork(sequence, len));
  }

 private:
  static Result<int> Within(const Result<int>& made) {
    if (!made.ok() || *made < 64) return made;
    return Status(StatusCode::kCacheFull, "there are 64 sequences");
  }
};

// Truncate keeps the media of the tokens that it drops (P17).
class TruncationKeepsMedia : public ForwardingPool {
 public:
  using ForwardingPool::ForwardingPool;
  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    Result<int> made = pool_->Open(prompt, key);
    if (made.ok()) media_[*made] = key.media;
    return made;
  }
  Status AddMedia(int sequence, const PrefixMedia& media) override {
    Status status = pool_->AddMedia(sequence, media);
    if (status.ok()) media_[sequence].push_back(media);
    return status;
  }
  Status Truncate(int sequence, int len) override {
    const int before = *pool_->SeqLen(sequence);
    Status status = pool_->Truncate(sequence, len);
    if (!status.ok()) return status;
    const int kept = *pool_->SeqLen(sequence);
    for (const PrefixMedia& media : media_[sequence]) {
      const bool dropped = media.position >= kept && media.position < before;
      if (dropped) (void)pool_->AddMedia(sequence, media);
    }
    return status;
  }

 private:
  std::map<int, std::vector<PrefixMedia>> media_;
};

enum class Mistake {
  kLongFork,          // Takes a fork to have all tokens of its source.
  kKnown,             // Takes unknown tokens for 0.
  kForkKnows,         // Takes unknown tokens for 0 in forks.
  kTruncationKnows,   // Takes unknown tokens for 0 after Truncate.
  kForkWithoutMedia,  // Takes a fork to have no media.
  kFreedMedia,        // Takes a sequence without media to have the media of the
                      // sequence that had its number before.
};

// Refuses each prompt that begins with blocks which a pool would find if it
// made this mistake.
template <Mistake kMistake>
class RefusesMistakes : public ForwardingPool {
 public:
  using ForwardingPool::ForwardingPool;

  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    for (const auto& [other, tokens] : mistakes_) {
      if (other == key && prompt.size() > tokens.size() &&
          std::ranges::equal(tokens, prompt.first(tokens.size()))) {
        return Status(StatusCode::kCacheFull, "a mistake");
      }
    }
    Result<int> made = pool_->Open(prompt, key);
    if (!made.ok()) return made;
    const auto found = prompt.first(AsSize(*pool_->SeqLen(*made)));
    const Tokens tokens(found.begin(), found.end());
    sequences_[*made] = {key, key, tokens, tokens};
    if (kMistake == Mistake::kFreedMedia && key.media.empty()) {
      sequences_[*made].mistaken_key.media = freed_media_[*made];
    }
    return made;
  }
  Status Free(int sequence) override {
    freed_media_[sequence] = sequences_[sequence].key.media;
    return pool_->Free(sequence);
  }
  Result<int> Fork(int sequence, int len) override {
    Result<int> made = pool_->Fork(sequence, len);
    if (!made.ok()) return made;
    Sequence& fork = sequences_[*made] = sequences_[sequence];
    const int kept = *pool_->SeqLen(*made);
    fork.tokens.resize(AsSize(kept));
    fork.mistaken = fork.tokens;
    if (kMistake == Mistake::kLongFork) {
      fork.mistaken = sequences_[sequence].tokens;
    }
    if (kMistake == Mistake::kForkKnows) ReplaceUnknown(fork.mistaken);
    std::erase_if(fork.key.media,
                  [&](auto& at) { return at.position >= kept; });
    if (kMistake == Mistake::kForkWithoutMedia) fork.mistaken_key.media.clear();
    return made;
  }
  Status AddMedia(int sequence, const PrefixMedia& media) override {
    Status status = pool_->AddMedia(sequence, media);
    if (!status.ok()) return status;
    sequences_[sequence].key.media.push_back(media);
    sequences_[sequence].mistaken_key.media.push_back(media);
    return status;
  }
  Status Commit(int sequence, int new_tokens) override {
    const Status status = pool_->Commit(sequence, new_tokens);
    if (!status.ok()) return status;
    Add(sequence, Tokens(AsSize(new_tokens), -1),
        Tokens(AsSize(new_tokens), kMistake == Mistake::kKnown ? 0 : -1));
    return status;
  }
  Status Commit(int sequence, std::span<const std::int32_t> tokens) override {
    const Status status = pool_->Commit(sequence, tokens);
    if (!status.ok()) return status;
    const Tokens committed(tokens.begin(), tokens.end());
    Add(sequence, committed, committed);
    return status;
  }
  Status Truncate(int sequence, int len) override {
    const Status status = pool_->Truncate(sequence, len);
    if (!status.ok()) return status;
    Sequence& cut = sequences_[sequence];
    const int before = Size(cut.tokens), kept = *pool_->SeqLen(sequence);
    for (PrefixKey* key : {&cut.key, &cut.mistaken_key}) {
      std::erase_if(key->media, [&](auto& at) {
        return at.position >= kept && at.position < before;
      });
    }
    cut.tokens.resize(AsSize(kept));
    cut.mistaken = cut.tokens;
    if (kMistake == Mistake::kTruncationKnows) ReplaceUnknown(cut.mistaken);
    return status;
  }

 private:
  using Tokens = std::vector<std::int32_t>;
  struct Sequence {
    PrefixKey key;
    PrefixKey mistaken_key;
    Tokens tokens;  // -1: unknown.
    Tokens mistaken;
  };

  static void ReplaceUnknown(Tokens& tokens) {
    std::ranges::replace(tokens, -1, 0);
  }

  // Adds tokens, and the mistaken blocks that they fill.
  void Add(int sequence, const Tokens& tokens, const Tokens& mistaken) {
    Sequence& to = sequences_[sequence];
    const int block = spec().block_size;
    int end = Size(to.tokens) / block * block + block;
    to.tokens.insert(to.tokens.end(), tokens.begin(), tokens.end());
    to.mistaken.insert(to.mistaken.end(), mistaken.begin(), mistaken.end());
    for (; end <= Size(to.tokens); end += block) {
      const Tokens wrong(to.mistaken.begin(), to.mistaken.begin() + end);
      const auto has_media = [&](const PrefixKey& key) {
        return std::ranges::any_of(key.media,
                                   [&](auto& at) { return at.position < end; });
      };
      const bool other_media =
          (to.mistaken_key.media.empty() && has_media(to.key)) ||
          (to.key.media.empty() && has_media(to.mistaken_key));
      if (other_media ||
          !std::equal(wrong.begin(), wrong.end(), to.tokens.begin())) {
        mistakes_.emplace_back(to.mistaken_key, wrong);
      }
    }
  }

  std::map<int, Sequence> sequences_;
  std::map<int, std::vector<PrefixMedia>> freed_media_;
  std::vector<std::pair<PrefixKey, Tokens>> mistakes_;
};

// Refuses rows of a layer before the first layer has any.
class NeedsTheFirstLayer : public ForwardingPool {
 public:
  using ForwardingPool::ForwardingPool;
  Result<PagedAppend> Append(int sequence, int layer, const TensorView& key,
                             const TensorView& value) override {
    if (layer == 0) begun_.insert(sequence);
    if (!begun_.contains(sequence)) {
      return Status(StatusCode::kCacheFull, "a mistake");
    }
    return pool_->Append(sequence, layer, key, value);
  }

 private:
  std::set<int> begun_;
};

// Refuses a call in a pass that some layers missed: rows of another layer after
// a fork; or to give the pass up, if only the last layer was given rows.
template <bool kAfterForks>
class NeedsWholePasses : public ForwardingPool {
 public:
  using ForwardingPool::ForwardingPool;
  Result<int> Fork(int sequence, int len) override {
    if (kAfterForks) forked_[sequence] = layers_[sequence];
    return pool_->Fork(sequence, len);
  }
  Result<PagedAppend> Append(int sequence, int layer, const TensorView& key,
                             const TensorView& value) override {
    const std::set<int>& before = forked_[sequence];
    if (!before.empty() && !before.contains(layer)) return mistake_;
    auto appended = pool_->Append(sequence, layer, key, value);
    layers_[sequence].insert(appended.ok() ? layer : kFull);
    return appended;
  }
  Status Commit(int sequence, std::span<const std::int32_t> tokens) override {
    if (tokens.empty() && OnlyTheLast(sequence)) return mistake_;
    End(sequence);
    return pool_->Commit(sequence, tokens);
  }
  Status Commit(int sequence, int new_tokens) override {
    End(sequence);
    return pool_->Commit(sequence, new_tokens);
  }
  Status Truncate(int sequence, int len) override {
    if (OnlyTheLast(sequence)) return mistake_;
    End(sequence);
    return pool_->Truncate(sequence, len);
  }
  Status Free(int sequence) override {
    End(sequence);
    return pool_->Free(sequence);
  }

 private:
  bool OnlyTheLast(int sequence) {
    const int last = spec().layers - 1;
    return !kAfterForks && last > 0 && layers_[sequence] == std::set{last};
  }
  void End(int sequence) {
    layers_.erase(sequence);
    forked_.erase(sequence);
  }

  static constexpr int kFull = -1;
  const Status mistake_ = {StatusCode::kCacheFull, "a mistake"};
  // That have rows of the pass; kFull if the pool refused rows.
  std::map<int, std::set<int>> layers_;
  std::map<int, std::set<int>> forked_;  // As `layers_`, at the last fork.
};

// Refuses prompts that find more than 256 tokens.
class FindsFewTokens : public ForwardingPool {
 public:
  using ForwardingPool::ForwardingPool;
  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    Result<int> opened = pool_->Open(prompt, key);
    if (!opened.ok() || *pool_->SeqLen(*opened) <= 256) return opened;
    return Status(StatusCode::kCacheFull, "a mistake");
  }
};

// Whether the search finds the fault of the optimized pool in this many
// operations.
template <class Pool>
bool IsFound(std::int64_t operations, std::uint64_t seed = 1,
             bool groups = false) {
  Subject subject;
  subject.run_pool = [](const PagedHistory& history,
                        const PoolRunOptions& options) {
    return RunPaged(
        history, options.counts,
        [](const PagedSpec& spec,
           std::string_view twin) -> Result<std::unique_ptr<PagedPool>> {
          auto pool = MakePagedPool(spec, twin);
          if (!pool.ok() || twin == "reference") return pool;
          return std::unique_ptr<PagedPool>(
              std::make_unique<Pool>(std::move(*pool)));
        });
  };
  FuzzOptions options;
  options.seed = seed;
  options.operations = operations;
  options.groups = groups;
  options.unshrunk = true;
  return FuzzPools(options, subject).failure.has_value();
}

// Returns by how many of the seeds from 1 on the search finds the fault, in
// histories of pools with groups unless `groups` is false.
template <class Pool>
int SeedsThatFind(int seeds, std::int64_t operations, bool groups = true) {
  int found = 0;
  for (int seed = 1; seed <= seeds; ++seed) {
    found += IsFound<Pool>(operations, AsSize(seed), groups);
  }
  return found;
}

// Kernels divide rows of a head into vectors.
TEST(PagedHistories, SomeHaveWideRows) {
  int wide = 0;
  int wide_groups = 0;
  for (std::uint64_t i = 0; i < 200; ++i) {
    const PagedSpec spec = MakePagedHistory(1, i).spec;
    const bool f32 = spec.v_dtype.value_or(spec.dtype) == DType::kF32;
    wide += f32 && spec.v_head_dim > 3 ? 1 : 0;
    for (const PagedSpec& group : MakeGroupsHistory(1, i).spec.groups) {
      const bool plain = group.v_dtype.value_or(group.dtype) == DType::kF32;
      wide_groups += plain && group.v_head_dim > 3 ? 1 : 0;
    }
  }
  EXPECT_GT(wide, 2);
  EXPECT_GT(wide_groups, 5);
}

// Whether the dtype holds all numbers of the rows exactly.
bool Holds(DType dtype, const DenseTensor& rows) {
  const DenseTensor stored = CopyOf(rows.view(), dtype);
  return CopyOf(stored.view(), DType::kF32).bytes == rows.bytes;
}

// A pool that cuts bits off where it should round is found, unless its outputs
// are compared, which may be of rows before or after they are stored.
TEST(PendingRows, RoundUnlessThePoolAttends) {
  PagedClient client;
  client.pending.assign(40, 1);
  PagedSpec spec = Completed({.k_head_dim = 4, .v_head_dim = 4});
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    spec.dtype = dtype;
    const PagedRows rows = PendingRows(client, spec, 0);
    EXPECT_EQ(Holds(dtype, rows.key), dtype == DType::kF32);
    EXPECT_EQ(Holds(dtype, rows.value), dtype == DType::kF32);
    for (const DType rounds : {DType::kF32, DType::kF16, DType::kBF16}) {
      const std::optional<PoolAsker> asker(
          std::in_place, spec, PoolAttention{.precision = {.dtype = rounds}});
      const PagedRows exact = PendingRows(client, spec, 0, asker);
      EXPECT_TRUE(Holds(dtype, exact.key) && Holds(rounds, exact.key));
      EXPECT_TRUE(Holds(dtype, exact.value) && Holds(rounds, exact.value));
    }
  }
}

TEST(PagedHistories, LinesSuggestNames) {
  const auto why = [](const std::string& line) {
    return ParsePagedHistory("kvp1 " + line).status().message();
  };
  const std::string not_known = "character 6: 'blok' is not a setting";
  EXPECT_EQ(why("blok=3"), not_known + ", did you mean 'block'?");
  EXPECT_EQ(why("grups=block:3"),
            "character 6: 'grups' is not a setting, did you mean 'groups'?");
  EXPECT_EQ(why("groups=widow:3"),
            "character 13: 'widow' is not a setting, did you mean 'window'?");
  // A group has no limit of its own, and a pool no window.
  EXPECT_EQ(why("groups=mast:3"), "character 13: 'mast' is not a setting");
  EXPECT_EQ(why("widow=3"), "character 6: 'widow' is not a setting");
  EXPECT_NE(why("sinks=2").find("sinks is not 1"), std::string::npos);
  EXPECT_EQ(why("frobnicate=3"), "character 6: 'frobnicate' is not a setting");
  EXPECT_EQ(why("| apend 0 0 0"),
            "character 8: 'apend' is not an operation with three numbers, did "
            "you mean 'append'?");
  EXPECT_EQ(why("| append 0 0"),
            "character 8: 'append' is not an operation with three numbers");
}

TEST(PagedHistories, HaveKeysOfOtherOrders) {
  EXPECT_TRUE(IsFound<SortsExtras>(100000));
}

TEST(PagedHistories, HavePromptsOfForksThatWereNotCut) {
  EXPECT_TRUE(IsFound<RefusesMistakes<Mistake::kLongFork>>(100000));
}

TEST(PagedHistories, HavePromptsOfUnknownTokens) {
  EXPECT_TRUE(IsFound<RefusesMistakes<Mistake::kKnown>>(100000));
}

TEST(PagedHistories, HavePromptsOfForksWithUnknownTokens) {
  // 7 seeds find it.
  constexpr auto kMistake = Mistake::kForkKnows;
  EXPECT_GE(
      SeedsThatFind<RefusesMistakes<kMistake>>(10, 30000, /*groups=*/false), 7);
}

TEST(PagedHistories, HavePromptsOfTruncationsWithUnknownTokens) {
  // 8 seeds find it; 4 if prompts had only the tokens of the first 20
  // sequences.
  constexpr auto kMistake = Mistake::kTruncationKnows;
  EXPECT_GE(
      SeedsThatFind<RefusesMistakes<kMistake>>(10, 30000, /*groups=*/false), 6);
}

// Most of these histories begin with a long sequence and its fork.
TEST(PagedHistories, ForkSequencesOfLargePools) {
  int layers = 0;
  int tokens = 0;
  int blocks = 0;
  for (std::uint64_t number = 0; number < 2000; ++number) {
    const PagedHistory history = MakePagedHistory(1, number);
    if (std::ranges::count(history.ops, PagedOpKind::kFork, &PagedOp::kind) ==
        0) {
      continue;
    }
    layers += history.spec.layers > 32 ? 1 : 0;
    tokens += history.spec.block_size > 16 ? 1 : 0;
    blocks += history.spec.blocks > 128 ? 1 : 0;
  }
  EXPECT_GE(layers, 5);
  EXPECT_GE(tokens, 15);
  EXPECT_GE(blocks, 15);
}

TEST(PagedHistories, FindLongPrefixes) {
  // 4 seeds find it; 0 if no groups were large.
  EXPECT_GE(SeedsThatFind<FindsFewTokens>(10, 8000), 2);
}

TEST(PagedHistories, AppendToTheLastLayerFirst) {
  EXPECT_TRUE(IsFound<NeedsTheFirstLayer>(100));
}

TEST(PagedHistories, ForkPassesThatLayersMiss) {
  // 18 seeds find it; 10 if passes were not interrupted.
  EXPECT_GE(SeedsThatFind<NeedsWholePasses</*kAfterForks=*/true>>(20, 600), 14);
}

TEST(PagedHistories, GiveUpPassesOfTheLastLayer) {
  EXPECT_TRUE(IsFound<NeedsWholePasses<false>>(1000, 1, /*groups=*/true));
  EXPECT_TRUE(IsFound<NeedsWholePasses<false>>(10000));
}

TEST(PagedHistories, HavePromptsWithOtherMedia) {
  // Of 400 seeds 110; 145 without histories in which keys often have salts.
  EXPECT_GE(SeedsThatFind<IgnoresMedia>(100, 500), 20);
}

TEST(PagedHistories, HavePromptsWithOtherSalts) {
  // Of 400 seeds 107; 58 without histories in which keys often have salts.
  EXPECT_GE(SeedsThatFind<IgnoresSalts>(100, 500), 20);
}

TEST(PagedHistories, HaveAnImageTwice) {
  // All 10 seeds find it; 1 if images were not drawn a second time.
  EXPECT_GE(SeedsThatFind<IgnoresRepeatedMedia>(10, 20000), 7);
}

TEST(PagedHistories, HaveManySequences) {
  EXPECT_TRUE(IsFound<HasNoMoreSequences>(10000));
}

TEST(PagedHistories, ForkSequencesWithMedia) {
  // 7 seeds find it; 0 would if servers did not fork after media.
  constexpr auto kMistake = Mistake::kForkWithoutMedia;
  EXPECT_GE(SeedsThatFind<RefusesMistakes<kMistake>>(10, 20000), 5);
}

TEST(PagedHistories, HavePromptsWithTheMediaOfFreedSequences) {
  // 13; 5 if prompts had no media of freed sequences.
  constexpr auto kMistake = Mistake::kFreedMedia;
  EXPECT_GE(SeedsThatFind<RefusesMistakes<kMistake>>(20, 20000), 9);
}

TEST(PagedHistories, TruncateTokensWithMedia) {
  // 16; 4 if servers did not truncate after media.
  EXPECT_GE(SeedsThatFind<TruncationKeepsMedia>(30, 4000), 10);
}

}  // namespace
}  // namespace kvtwin::props
