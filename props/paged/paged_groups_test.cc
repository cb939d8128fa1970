// Tests windows, states, groups and media of paged pools on each twin alone,
// without the ledger or the other twin (P12 to P18).

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/guarded_paged.h"
#include "core/index.h"
#include "kvtwin/paged.h"
#include "props/base/forwarding_pool.h"
#include "props/base/hash.h"
#include "props/history/generate.h"
#include "props/paged/explore_pools.h"
#include "props/paged/paged_runner.h"
#include "props/testing/pools.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

using Tokens = std::vector<std::int32_t>;

Tokens Counting(int tokens, std::int32_t first = 0) {
  Tokens list;
  for (int i = 0; i < tokens; ++i) list.push_back(first + i);
  return list;
}

// A client of one pool. The rows of a token are a hash of the tokens up to it.
class GroupsClient {
 public:
  GroupsClient(const PagedSpec& spec, std::string_view twin)
      : pool_(*MakePagedPool(spec, twin)) {}

  PagedPool& pool() { return *pool_; }
  std::map<int, Tokens>& tokens() { return tokens_; }

  int Open(const Tokens& prompt, const PrefixKey& key = {}) {
    const int opened = *pool_->Open(prompt, key);
    tokens_[opened] =
        Tokens(prompt.begin(), prompt.begin() + *pool_->SeqLen(opened));
    return opened;
  }
  // Appends to the layers from `begin` to `end`.
  bool Append(int sequence, const Tokens& more, int begin, int end) {
    Tokens all = tokens_.at(sequence);
    all.insert(all.end(), more.begin(), more.end());
    for (int layer = begin; layer < end; ++layer) {
      const PagedSpec& spec = SpecOfLayer(pool_->spec(), layer);
      const DenseTensor key = Rows(all, Size(more), layer, spec.k_head_dim);
      const DenseTensor value = Rows(all, Size(more), -layer, spec.v_head_dim);
      if (!pool_->Append(sequence, layer, key.view(), value.view()).ok()) {
        return false;
      }
    }
    return true;
  }
  bool Add(int sequence, const Tokens& more) {
    if (!Append(sequence, more, 0, pool_->spec().layers)) {
      Truncate(sequence, Size(tokens_.at(sequence)));
      return false;
    }
    EXPECT_TRUE(pool_->Commit(sequence, more).ok());
    Tokens& all = tokens_.at(sequence);
    all.insert(all.end(), more.begin(), more.end());
    return true;
  }
  int Truncate(int sequence, int len) {
    EXPECT_TRUE(pool_->Truncate(sequence, len).ok());
    tokens_.at(sequence).resize(AsSize(*pool_->SeqLen(sequence)));
    return *pool_->SeqLen(sequence);
  }
  void Free(int sequence) {
    EXPECT_TRUE(pool_->Free(sequence).ok());
    tokens_.erase(sequence);
  }

  // Returns the first number of K of each row that a layer shows, by position.
  std::map<int, float> Shown(int sequence, int layer) const {
    std::map<int, float> shown;
    for (const PagedView& view : *pool_->Views(sequence, layer)) {
      for (int i = 0; i < view.length; ++i) {
        const DenseTensor row = CopyOf(Slice(view.key, 2, i), DType::kF32);
        shown[view.start + i] =
            *reinterpret_cast<const float*>(row.bytes.data());
      }
    }
    return shown;
  }

 private:
  DenseTensor Rows(const Tokens& all, int count, int role, int head_dim) const {
    const PagedSpec& spec = SpecOfLayer(pool_->spec(), std::abs(role));
    DenseTensor rows =
        FilledTensor(DType::kF32, {head_dim, spec.kv_heads, count, 1}, 0);
    auto* to = reinterpret_cast<float*>(rows.bytes.data());
    for (int i = Size(all) - count; i < Size(all); ++i) {
      const std::uint64_t hash = HashBytes(
          all.data(), AsSize(i + 1) * sizeof(all[0]), AsSize(role + 64));
      for (int e = 0; e < head_dim * spec.kv_heads; ++e) {
        *to++ = static_cast<float>((hash >> (e % 50)) & 15);
      }
    }
    return rows;
  }

  std::unique_ptr<PagedPool> pool_;
  std::map<int, Tokens> tokens_;
};

// The pool of docs/hybrid.md.
PagedSpec Documented() {
  return {.max_seq_len = 4096,
          .groups = {{.block_size = 2, .blocks = 9},
                     {.block_size = 2, .blocks = 6, .window = 3},
                     {.block_size = 4, .blocks = 4, .states = true}}};
}

class PagedGroups : public EachTwin {};
INSTANTIATE_TEST_SUITE_P(Twins, PagedGroups,
                         ::testing::Values("reference", "optimized"),
                         TwinTestName);

Tokens FirstTokens(const Tokens& tokens, int count) {
  return {tokens.begin(), tokens.begin() + count};
}

TEST_P(PagedGroups, AreAsDocumented) {
  GroupsClient client(Documented(), GetParam());
  PagedPool& pool = client.pool();
  EXPECT_EQ(pool.spec().block_size, 4);
  EXPECT_EQ(pool.spec().layers, 3);
  const int first = client.Open({});
  const Tokens twelve = Counting(12);
  for (int i = 0; i < 12; ++i) ASSERT_TRUE(client.Add(first, {i}));
  const int sequences[] = {first};
  EXPECT_EQ(pool.Group(1)->ExportCsr(sequences)->indices,
            (Tokens{-1, -1, -1, -1, 4, 5}));
  EXPECT_EQ(pool.Group(2)->ExportTable(sequences)->blocks.size(), 3U);
  EXPECT_EQ(client.Shown(first, 1).begin()->first, 8);
  std::vector<int> states;
  for (const auto& [position, row] : client.Shown(first, 2)) {
    states.push_back(position);
  }
  EXPECT_EQ(states, (std::vector<int>{3, 7, 11}));
  EXPECT_EQ(*pool.Find(FirstTokens(twelve, 11)), 8);
  EXPECT_EQ(pool.Group(1)->Usage(), (PagedUsage{0, 4, 2, 0}));
  // Other tokens take the block of tokens 4 and 5 in the window's group.
  const int other = client.Open(FirstTokens(twelve, 5));
  EXPECT_EQ(*pool.SeqLen(other), 4);
  ASSERT_TRUE(client.Add(other, Counting(2, 100)));
  const Tokens prompt = FirstTokens(twelve, 11);
  EXPECT_EQ(*pool.Group(0)->Find(prompt), 10);
  EXPECT_EQ(*pool.Group(1)->Find(prompt), 10);
  EXPECT_EQ(*pool.Group(1)->Find(FirstTokens(twelve, 9)), 4);
  EXPECT_EQ(*pool.Group(2)->Find(prompt), 8);
  EXPECT_EQ(*pool.Find(prompt), 4);
  EXPECT_EQ(*pool.SeqLen(client.Open(prompt)), 4);
  EXPECT_EQ(*pool.ResumeBefore(first, 12), 12);
  EXPECT_EQ(*pool.ResumeBefore(first, 11), 0);
  EXPECT_EQ(client.Truncate(first, 11), 0);
}

TEST_P(PagedGroups, APassThatIsGivenUpLeavesTheState) {
  const PagedSpec spec = {
      .max_seq_len = 64,
      .groups = {{.block_size = 4, .blocks = 9, .layers = 2, .states = true},
                 {.block_size = 4, .blocks = 9}}};
  GroupsClient client(spec, GetParam());
  PagedPool& pool = client.pool();
  const int sequence = client.Open({});
  ASSERT_TRUE(client.Add(sequence, Counting(6)));
  const std::map<int, float> before = client.Shown(sequence, 0);
  const std::map<int, float> other = client.Shown(sequence, 1);
  EXPECT_EQ(before.rbegin()->first, 5);
  const PagedUsage usage = pool.Usage();
  ASSERT_TRUE(client.Append(sequence, Counting(5, 6), 0, 2));
  std::map<int, float> pending = client.Shown(sequence, 0);
  EXPECT_EQ(pending.size(), 4U);  // 3, 5, 7 and 10.
  EXPECT_EQ(pending.at(5), before.at(5));
  EXPECT_EQ(client.Shown(sequence, 1).at(5), other.at(5));
  EXPECT_FALSE(
      pool.Commit(sequence, Counting(5, 6)).ok());  // No attention yet.
  client.Truncate(sequence, 6);
  EXPECT_EQ(client.Shown(sequence, 0), before);
  EXPECT_EQ(client.Shown(sequence, 1), other);
  EXPECT_EQ(pool.Usage(), usage);
  // A commit of some tokens ends at a state.
  ASSERT_TRUE(client.Append(sequence, Counting(5, 6), 0, 3));
  EXPECT_EQ(pool.Commit(sequence, Counting(3, 6)).code(),
            StatusCode::kFailedPrecondition);
  ASSERT_TRUE(pool.Commit(sequence, Counting(2, 6)).ok());
  EXPECT_EQ(client.Shown(sequence, 0).rbegin()->first, 7);
  EXPECT_EQ(client.Shown(sequence, 0).at(7), pending.at(7));
  client.Free(sequence);
  EXPECT_EQ(pool.Usage().used, 0);
}

TEST_P(PagedGroups, RefuseBadSpecs) {
  const auto refused = [&](const PagedSpec& spec) {
    return MakePagedPool(spec, GetParam()).status().code() ==
           StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused({.window = 0}));
  EXPECT_TRUE(refused({.groups = {{.window = 0}}}));
  EXPECT_TRUE(refused({.groups = {{.groups = {{}}}}}));
  EXPECT_TRUE(refused({.max_seq_len = 0, .groups = {{}}}));
  EXPECT_TRUE(
      refused({.groups = {{.block_size = 65537}, {.block_size = 65536}}}));
  const auto pool = *MakePagedPool(Documented(), GetParam());
  EXPECT_EQ(pool->Group(3), nullptr);
  EXPECT_EQ(pool->Group(-1), nullptr);
  EXPECT_EQ(pool->SlotMapping(0, 0, 0).status().code(),
            StatusCode::kNotSupported);
  EXPECT_EQ(pool->Views(*pool->Open(), 3).status().code(),
            StatusCode::kInvalidArgument);
}

// A prompt finds nothing of what another sequence only plans.
TEST_P(PagedGroups, PlannedTokensAreNotFound) {
  GroupsClient client(Documented(), GetParam());
  PagedPool& pool = client.pool();
  const Tokens tokens = Counting(8);
  const Tokens prompt = Counting(9);
  const int planned = client.Open(prompt);
  for (int layers = 1; layers <= 3; ++layers) {
    ASSERT_TRUE(client.Append(planned, tokens, layers - 1, layers));
    EXPECT_EQ(*pool.Find(prompt), 0) << layers;
  }
  const int other = client.Open(prompt);
  ASSERT_TRUE(client.Append(other, tokens, 0, 1));
  client.Truncate(planned, 0);
  EXPECT_EQ(*pool.Find(prompt), 0);
  client.Free(other);
  ASSERT_TRUE(client.Append(planned, tokens, 0, 3));
  ASSERT_TRUE(pool.Commit(planned, FirstTokens(tokens, 4)).ok());
  EXPECT_EQ(*pool.Find(prompt), 4);
}

// Checks a law at random moments of random histories, on one of the sequences.
using GroupsJudge =
    std::function<void(GroupsClient&, const Pick&, int sequence)>;

void PlayGroups(std::string_view twin, const GroupsJudge& judge) {
  for (std::uint64_t number = 0; number < 60; ++number) {
    SCOPED_TRACE(number);
    const Pick pick = SeededPick(12, number);
    PagedSpec spec = MakeGroupsHistory(12, number).spec;
    spec.max_seq_len += 20;
    for (PagedSpec& group : spec.groups) group.blocks += 20;
    GroupsClient client(spec, twin);
    for (int step = 0; step < 60; ++step) {
      const auto draw = [&](int least, int most) {
        Tokens tokens(AsSize(pick(least, most)));
        for (std::int32_t& token : tokens) token = pick(0, 7) == 0 ? 1 : 0;
        return tokens;
      };
      if (client.tokens().size() < 4) client.Open(draw(0, 12));
      const int at = pick(0, Size(client.tokens()) - 1);
      const int sequence = std::next(client.tokens().begin(), at)->first;
      const int len = Size(client.tokens().at(sequence));
      switch (pick(0, 7)) {
        case 0:
          client.Free(sequence);
          break;
        case 1:
          client.Truncate(sequence, pick(0, len));
          break;
        case 2:
        case 3:
          judge(client, pick, sequence);
          break;
        default:
          client.Add(sequence, draw(1, 6));
      }
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST_P(PagedGroups, AHitIsTheLongestThatEveryGroupServes) {
  int found = 0;
  int shortened = 0;  // Some group would serve more.
  PlayGroups(GetParam(), [&](GroupsClient& client, const Pick&, int sequence) {
    const PagedPool& pool = client.pool();
    Tokens prompt = client.tokens().at(sequence);
    prompt.push_back(0);
    const int hit = *pool.Find(prompt);
    const auto serves = [&](int group, int len) {
      return *pool.Group(group)->Find(FirstTokens(prompt, len + 1)) == len;
    };
    for (int len = hit; len < Size(prompt); ++len) {
      bool all = true;
      for (int group = 0; pool.Group(group) != nullptr; ++group) {
        all = all && serves(group, len);
      }
      EXPECT_EQ(all, len == hit) << len;
    }
    for (int group = 0; pool.Group(group) != nullptr; ++group) {
      shortened += *pool.Group(group)->Find(prompt) > hit ? 1 : 0;
    }
    const int opened = client.Open(prompt);
    EXPECT_EQ(*pool.SeqLen(opened), hit);
    for (int group = 0; pool.Group(group) != nullptr; ++group) {
      EXPECT_EQ(*pool.Group(group)->SeqLen(opened), hit);
    }
    client.Free(opened);
    found += hit > 0 ? 1 : 0;
  });
  EXPECT_GT(found, 100);
  EXPECT_GT(shortened, 20);
}

// Whatever the group, a position has the rows that it has in a plain pool.
TEST_P(PagedGroups, ShowThePlainRowsThatTheNextTokenNeeds) {
  int judged = 0;
  PlayGroups(GetParam(), [&](GroupsClient& client, const Pick&, int sequence) {
    const Tokens& tokens = client.tokens().at(sequence);
    if (tokens.empty()) return;
    const PagedSpec& spec = client.pool().spec();
    PagedSpec plain = {.block_size = 3, .blocks = 200, .max_seq_len = 500};
    plain.layers = spec.layers;
    plain.dtype = DType::kF32;
    GroupsClient alone(plain, "reference");
    const int same = alone.Open({});
    ASSERT_TRUE(alone.Add(same, tokens));
    for (int layer = 0; layer < spec.layers; ++layer) {
      const PagedSpec& group = SpecOfLayer(spec, layer);
      if (IsBlockDType(group.dtype)) continue;
      const std::map<int, float> rows = alone.Shown(same, layer);
      const std::map<int, float> shown = client.Shown(sequence, layer);
      const int last = Size(tokens) - 1;
      int needed = group.window ? std::max(0, last + 1 - *group.window) : 0;
      if (group.states) needed = last;
      for (int p = needed; p <= last; ++p) EXPECT_TRUE(shown.contains(p));
      for (const auto& [position, row] : shown) {
        EXPECT_EQ(row, rows.at(position)) << layer << ' ' << position;
        ++judged;
      }
    }
  });
  EXPECT_GT(judged, 1000);
}

// A key is found by itself, up to the block where it differs, and no other.
TEST_P(PagedGroups, KeysThatDifferInAPartShareNoLaterBlock) {
  const std::vector<PrefixKey> keys = {{},
                                       {.salt = "s"},
                                       {.extra = {"adapter", "1"}},
                                       {.extra = {"adapter", "2"}},
                                       {.media = {{5, "a"}}},
                                       {.media = {{5, "b"}}},
                                       {.media = {{4, "a"}}},
                                       {.media = {{5, "a"}, {9, "b"}}},
                                       {.media = {{5, "a"}, {9, "c"}}},
                                       {.media = {{5, "a"}, {5, "b"}}},
                                       {.media = {{5, "ab"}}},
                                       {.media = {{0, "a"}}},
                                       {.salt = "s", .media = {{5, "a"}}},
                                       {.media = {{12, "a"}}}};
  const Tokens prompt = Counting(13);
  const auto before = [](const PrefixKey& key, int end) {
    std::vector<PrefixMedia> media = key.media;
    std::erase_if(media, [&](const auto& one) { return one.position >= end; });
    return media;
  };
  for (const PrefixKey& own : keys) {
    for (const PrefixKey& other : keys) {
      GroupsClient client({.block_size = 2, .blocks = 60, .max_seq_len = 40},
                          GetParam());
      ASSERT_TRUE(client.Add(client.Open({}, own), Counting(12)));
      const bool may = own.salt == other.salt && own.extra == other.extra;
      int expected = may ? 12 : 0;
      while (before(own, expected) != before(other, expected)) expected -= 2;
      EXPECT_EQ(*client.pool().Find(prompt, other), expected);
      // The rest is computed and committed; then it is found, too.
      const int opened = client.Open(prompt, other);
      ASSERT_TRUE(
          client.Add(opened, {prompt.begin() + expected, prompt.end()}));
      EXPECT_EQ(*client.pool().Find(prompt, other), 12);
      EXPECT_EQ(*client.pool().Find(prompt, own), 12);
    }
  }
}

TEST_P(PagedGroups, MediaMayComeLaterAndGoWithTheirTokens) {
  GroupsClient client({.block_size = 2, .blocks = 60, .max_seq_len = 40},
                      GetParam());
  PagedPool& pool = client.pool();
  const Tokens prompt = Counting(9);
  const int first = client.Open({});
  ASSERT_TRUE(client.Add(first, Counting(4)));
  EXPECT_EQ(pool.AddMedia(first, {3, "a"}).code(),
            StatusCode::kInvalidArgument);
  ASSERT_TRUE(pool.AddMedia(first, {6, "late"}).ok());
  ASSERT_TRUE(pool.AddMedia(first, {5, "a"}).ok());
  client.Truncate(first, 4);  // Media of later tokens stay.
  ASSERT_TRUE(client.Add(first, Counting(4, 4)));
  const PrefixKey both{.media = {{5, "a"}, {6, "late"}}};
  EXPECT_EQ(*pool.Find(prompt, both), 8);
  EXPECT_EQ(*pool.Find(prompt, {.media = {{5, "a"}}}), 6);
  EXPECT_EQ(*pool.Find(prompt, {}), 4);
  // A fork has the media of its tokens only.
  const int forked = *pool.Fork(first, 6);
  client.tokens()[forked] = Counting(6);
  ASSERT_TRUE(client.Add(forked, Counting(2, 6)));
  EXPECT_EQ(*pool.Find(prompt, {.media = {{5, "a"}}}), 8);
  // So has a sequence that loses tokens.
  client.Truncate(first, 5);
  ASSERT_TRUE(client.Add(first, Counting(3, 5)));
  EXPECT_EQ(*pool.Find(prompt, {}), 8);
}

// When a faulty pool lets prompts find the blocks of another sequence's prompt,
// with the zeros that are in them.
enum class Early { kNever, kAtOpen, kAtFirstLayer, kAtAppend, kAfterAbort };

class EarlyPool final : public ForwardingPool {
 public:
  EarlyPool(std::unique_ptr<PagedPool> pool, Early early)
      : ForwardingPool(std::move(pool)), early_(early) {}

  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    const Result<int> opened = pool_->Open(prompt, key);
    if (!opened.ok()) return opened;
    plans_[*opened] = {{prompt.begin(), prompt.end()}, key, 0};
    if (early_ == Early::kAtOpen) Publish(*opened, Size(prompt));
    return opened;
  }
  Result<PagedAppend> Append(int sequence, int layer, const TensorView& key,
                             const TensorView& value) override {
    auto appended = pool_->Append(sequence, layer, key, value);
    if (!appended.ok() || !plans_.contains(sequence)) return appended;
    const int end = appended->start + AsInt(key.shape[2]);
    const bool last = layer == pool_->spec().layers - 1;
    if (last) plans_.at(sequence).end = end;
    if ((early_ == Early::kAtFirstLayer && layer == 0) ||
        (early_ == Early::kAtAppend && last)) {
      Publish(sequence, end);
    }
    return appended;
  }
  Status Truncate(int sequence, int len) override {
    Status status = pool_->Truncate(sequence, len);
    if (!status.ok() || !plans_.contains(sequence)) return status;
    if (early_ == Early::kAfterAbort) {
      Publish(sequence, plans_.at(sequence).end);
    }
    plans_.erase(sequence);
    return status;
  }
  Status Free(int sequence) override {
    plans_.erase(sequence);
    return pool_->Free(sequence);
  }

 private:
  struct Plan {
    Tokens prompt;
    PrefixKey key;
    int end = 0;  // The end of the tokens that all layers have.
  };

  // Commits the first tokens of the plan in a sequence of its own.
  void Publish(int sequence, int end) {
    const auto& [prompt, key, appended] = plans_.at(sequence);
    const int hidden = *pool_->Open(prompt, key);
    const int begin = *pool_->SeqLen(hidden);
    const int all = std::min(end, Size(prompt));
    bool fits = begin < all;
    for (int layer = 0; fits && layer < pool_->spec().layers; ++layer) {
      const PagedSpec& spec = SpecOfLayer(pool_->spec(), layer);
      const auto zeros = [&](int dim) {
        return FilledTensor(DType::kF32, {dim, spec.kv_heads, all - begin, 1},
                            0);
      };
      const DenseTensor k = zeros(spec.k_head_dim);
      const DenseTensor v = zeros(spec.v_head_dim);
      fits = pool_->Append(hidden, layer, k.view(), v.view()).ok();
    }
    if (fits) {
      const Tokens more(prompt.begin() + begin, prompt.begin() + all);
      EXPECT_TRUE(pool_->Commit(hidden, more).ok());
    }
    EXPECT_TRUE(pool_->Free(hidden).ok());
  }

  Early early_;
  std::map<int, Plan> plans_;
};

// Both twins have the same fault, so that only the ledger can find it.
PagedFuzzResult FuzzEarly(Early early, std::int64_t operations) {
  Subject subject;
  subject.run_pool = [=](const PagedHistory& history,
                         const PoolRunOptions& options) {
    return RunPaged(
        history, options.counts,
        [=](const PagedSpec& spec,
            std::string_view twin) -> Result<std::unique_ptr<PagedPool>> {
          auto pool = MakePagedPool(spec, twin);
          if (!pool.ok()) return pool;
          return std::unique_ptr<PagedPool>(
              std::make_unique<EarlyPool>(std::move(*pool), early));
        });
  };
  FuzzOptions options;
  options.operations = operations;
  options.groups = true;
  return FuzzPools(options, subject);
}

TEST(PagedGroupsFuzz, BlocksThatAreFoundBeforeTheirCommitAreWrong) {
  EXPECT_EQ(TextOf(FuzzEarly(Early::kNever, 5000).failure), "");
  for (const Early early : {Early::kAtOpen, Early::kAtFirstLayer,
                            Early::kAtAppend, Early::kAfterAbort}) {
    const PagedFuzzResult result = FuzzEarly(early, 20000);
    EXPECT_NE(TextOf(result.failure).find("never there"), std::string::npos)
        << static_cast<int>(early) << ": " << TextOf(result.failure);
    EXPECT_LE(result.shrunk.ops.size(), 6U) << ToText(result.shrunk);
  }
}

TEST(PagedGroupsFuzz, LinesAreReadBackAsWritten) {
  for (std::uint64_t number = 0; number < 500; ++number) {
    const std::string text = ToText(MakeGroupsHistory(3, number));
    const Result<PagedHistory> read = ParsePagedHistory(text);
    ASSERT_TRUE(read.ok()) << read.status().ToString() << "\n" << text;
    ASSERT_EQ(ToText(*read), text);
  }
  for (const char* text :
       {"kvp1 groups=", "kvp1 groups=block", "kvp1 groups=block:0",
        "kvp1 groups=most:3", "kvp1 groups=groups:block:3",
        "kvp1 groups=window:0", "kvp1 window=3"}) {
    EXPECT_FALSE(ParsePagedHistory(text).ok()) << text;
  }
}

// Histories of groups reach every rare event often.
TEST(PagedGroupsFuzz, HistoriesReachSharingCopiesEvictionAndTruncation) {
  FuzzOptions options;
  options.operations = 20000;
  options.groups = true;
  const PagedFuzzResult result = FuzzPools(options, TwinSubject("optimized"));
  EXPECT_EQ(TextOf(result.failure), "") << ToText(result.shrunk);
  EXPECT_GT(result.counts.found, 100);
  EXPECT_GT(result.counts.copied, 5);
  EXPECT_GT(result.counts.evicted, 50);
  EXPECT_GT(result.counts.truncated, 50);
  EXPECT_GT(result.counts.full, 100);
}

// Keeps a token that it was asked to drop. The explorer finds this fault on the
// shortest path.
class KeepsOneMore final : public ForwardingPool {
 public:
  using ForwardingPool::ForwardingPool;
  Status Truncate(int sequence, int len) override {
    const Result<int> all = SeqLen(sequence);
    const bool keeps = len == 1 && all.ok() && *all == 2;
    return ForwardingPool::Truncate(sequence, keeps ? 2 : len);
  }
};

PoolSpaceResult ExploreStates(bool faulty) {
  const PagedMaker make =
      [&](const PagedSpec& spec,
          std::string_view twin) -> Result<std::unique_ptr<PagedPool>> {
    auto pool = MakePagedPool(spec, twin);
    if (!pool.ok() || twin == "reference" || !faulty) return pool;
    return std::unique_ptr<PagedPool>(
        std::make_unique<KeepsOneMore>(std::move(*pool)));
  };
  return ExploreSpace(PoolSpaces()[1], make, [](const PoolSpaceResult& so_far) {
    return so_far.states > 500;
  });
}

TEST(PoolExplorer, FindsAFaultOnTheShortestPath) {
  const PoolSpaceResult right = ExploreStates(/*faulty=*/false);
  EXPECT_FALSE(right.failure) << TextOf(right.failure);
  EXPECT_FALSE(right.fixed_point);
  EXPECT_GT(right.states, 500);
  EXPECT_GT(right.transitions, 2000);
  const PoolSpaceResult wrong = ExploreStates(/*faulty=*/true);
  ASSERT_TRUE(wrong.failure);
  EXPECT_FALSE(wrong.fixed_point);
  // Open, append two tokens, commit them, truncate to one.
  EXPECT_EQ(wrong.history.ops.size(), 4U) << ToText(wrong.history);
  EXPECT_EQ(wrong.history.ops.back().kind, PagedOpKind::kTruncate);
}

}  // namespace
}  // namespace kvtwin::props
