// Each faulty pool here breaks one law of pools, and no other law finds it.
// In python/tests, test_pool.py has a pool that breaks given_up_pass, and
// test_pool_groups.py a pool that breaks keys_keep_apart;
// docs/examples/c_pool.c with POOL_BUG breaks a_fork_is_equal.

#include "props/laws/pool_laws.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/guarded_paged.h"
#include "core/index.h"
#include "kvtwin/paged.h"
#include "props/base/forwarding_pool.h"
#include "props/paged/paged_history.h"

namespace kvtwin::props {
namespace {

using Ids = std::vector<std::int32_t>;

// Takes the tokens of a pass for stored as soon as the last layer has their
// rows: a prompt that continues the sequence finds blocks of them.
class FindsPlannedTokens final : public ForwardingPool {
 public:
  using ForwardingPool::ForwardingPool;

  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    const Result<int> opened = ForwardingPool::Open(prompt, key);
    if (!opened.ok()) return opened;
    const int found = *ForwardingPool::SeqLen(*opened);
    int computed = found;  // Tokens that a sequence has committed.
    int planned = 0;
    for (const auto& [sequence, of] : sequences_) {
      const int len = Size(of.tokens);
      if (of.key != key || !Continues(prompt, of.tokens)) continue;
      computed = std::max(computed, len);
      const int blocks = (len + of.appended) / spec().block_size;
      if (of.appended > 0) {
        planned = std::max(planned, blocks * spec().block_size);
      }
    }
    const bool takes = computed < planned && planned < AsInt(prompt.size());
    const int len = takes ? planned : found;
    sequences_[*opened] = {.tokens = Ids(prompt.begin(), prompt.begin() + len),
                           .key = key,
                           .not_stored = len - found};
    return opened;
  }
  Result<int> Fork(int sequence, int len) override {
    const Result<int> forked = ForwardingPool::Fork(sequence, len);
    if (forked.ok()) {
      const Sequence& from = sequences_[sequence];
      sequences_[*forked] = {.tokens = from.tokens, .key = from.key};
      sequences_[*forked].tokens.resize(AsSize(*SeqLen(*forked)));
    }
    return forked;
  }
  Status Truncate(int sequence, int len) override {
    sequences_[sequence].tokens.resize(AsSize(len));
    sequences_[sequence].appended = 0;
    return ForwardingPool::Truncate(sequence, len);
  }
  Result<int> SeqLen(int sequence) const override {
    const Result<int> len = ForwardingPool::SeqLen(sequence);
    return len.ok() ? *len + sequences_.at(sequence).not_stored : len;
  }
  Result<PagedAppend> Append(int sequence, int layer, const TensorView& key,
                             const TensorView& value) override {
    auto appended = ForwardingPool::Append(sequence, layer, key, value);
    if (appended.ok() && layer == spec().layers - 1) {
      sequences_[sequence].appended = AsInt(key.shape[2]);
    }
    return appended;
  }
  Status Commit(int sequence, std::span<const std::int32_t> tokens) override {
    Sequence& of = sequences_[sequence];
    of.tokens.insert(of.tokens.end(), tokens.begin(), tokens.end());
    of.appended = 0;
    return ForwardingPool::Commit(sequence, tokens);
  }
  Status Free(int sequence) override {
    sequences_.erase(sequence);
    return ForwardingPool::Free(sequence);
  }

 private:
  struct Sequence {
    Ids tokens = {};
    PrefixKey key = {};
    int appended = 0;
    int not_stored = 0;  // Of `tokens`.
  };
  static bool Continues(std::span<const std::int32_t> prompt,
                        const Ids& tokens) {
    return tokens.size() <= prompt.size() &&
           std::ranges::equal(tokens, prompt.first(tokens.size()));
  }

  std::map<int, Sequence> sequences_;
};

// A right pool that finds a prompt from the second time on that it is opened.
class FindsTheSecondTime final : public ForwardingPool {
 public:
  using ForwardingPool::ForwardingPool;

  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    const Ids tokens(prompt.begin(), prompt.end());
    const bool asked = std::ranges::count(asked_, std::pair(tokens, key)) > 0;
    asked_.emplace_back(tokens, key);
    return ForwardingPool::Open(asked ? prompt : prompt.first(0), key);
  }

 private:
  std::vector<std::pair<Ids, PrefixKey>> asked_;
};

// A prompt finds blocks, but the pool does not show the last of them.
class HidesAFoundBlock final : public ForwardingPool {
 public:
  using ForwardingPool::ForwardingPool;

  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    const Result<int> opened = ForwardingPool::Open(prompt, key);
    if (opened.ok()) found_[*opened] = *SeqLen(*opened);
    return opened;
  }
  Result<std::vector<PagedView>> Views(int sequence, int layer) const override {
    auto views = ForwardingPool::Views(sequence, layer);
    const auto found = found_.find(sequence);
    if (!views.ok() || found == found_.end()) return views;
    const int last = found->second - 1;
    std::erase_if(*views, [&](const PagedView& view) {
      return view.start <= last && last < view.start + view.length;
    });
    return views;
  }
  Status Free(int sequence) override {
    found_.erase(sequence);
    return ForwardingPool::Free(sequence);
  }

 private:
  std::map<int, int> found_;
};

// Its tables name the first block of a sequence twice.
class RepeatsABlockInTables final : public ForwardingPool {
 public:
  using ForwardingPool::ForwardingPool;

  Result<PagedTable> ExportTable(
      std::span<const int> sequences) const override {
    auto table = ForwardingPool::ExportTable(sequences);
    if (table.ok() && table->columns > 1) table->blocks[1] = table->blocks[0];
    return table;
  }
};

// Loses a block each time that a sequence is cut, that a fork or another
// sequence ends, that rows are dropped, that a sequence is forked for the first
// time, or that a sequence ends to which an append was refused, until all
// sequences are gone.
enum class Loses { kCut, kFork, kOther, kDropped, kForked, kRefused };
template <Loses loses>
class LosesBlocks final : public ForwardingPool {
 public:
  using ForwardingPool::ForwardingPool;

  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    const Result<int> opened = ForwardingPool::Open(prompt, key);
    if (opened.ok()) sequences_[*opened] = Loses::kOther;
    return opened;
  }
  Result<int> Fork(int sequence, int len) override {
    const Result<int> forked = ForwardingPool::Fork(sequence, len);
    if (!forked.ok()) return forked;
    sequences_[*forked] = Loses::kFork;
    if (forked_.insert(sequence).second) Lose(Loses::kForked);
    return forked;
  }
  Status Truncate(int sequence, int len) override {
    const bool cuts = len < *SeqLen(sequence);
    Status status = ForwardingPool::Truncate(sequence, len);
    Lose(cuts ? Loses::kCut : Loses::kDropped);
    return status;
  }
  Result<PagedAppend> Append(int sequence, int layer, const TensorView& key,
                             const TensorView& value) override {
    auto appended = ForwardingPool::Append(sequence, layer, key, value);
    if (!appended.ok()) refused_.insert(sequence);
    return appended;
  }
  Status Commit(int sequence, std::span<const std::int32_t> tokens) override {
    Status status = ForwardingPool::Commit(sequence, tokens);
    if (tokens.empty()) Lose(Loses::kDropped);
    return status;
  }
  Status Free(int sequence) override {
    Status status = ForwardingPool::Free(sequence);
    Lose(sequences_.at(sequence));
    if (refused_.erase(sequence) > 0) Lose(Loses::kRefused);
    sequences_.erase(sequence);
    forked_.erase(sequence);
    for (; sequences_.empty() && !lost_.empty(); lost_.pop_back()) {
      EXPECT_TRUE(ForwardingPool::Free(lost_.back()).ok());
    }
    return status;
  }

 private:
  // A sequence of the pool's own has the block.
  void Lose(Loses when) {
    if (when != loses) return;
    lost_.push_back(*ForwardingPool::Open({}, {}));
    for (int layer = 0; layer < spec().layers; ++layer) {
      const PagedSpec& of = SpecOfLayer(spec(), layer);
      const DenseTensor key =
          FilledTensor(DType::kF32, {of.k_head_dim, of.kv_heads, 1, 1}, 1);
      const DenseTensor value =
          FilledTensor(DType::kF32, {of.v_head_dim, of.kv_heads, 1, 1}, 1);
      const auto held =
          ForwardingPool::Append(lost_.back(), layer, key.view(), value.view());
      if (!held.ok()) return;
    }
    EXPECT_TRUE(pool_->Commit(lost_.back(), 1).ok());
  }

  std::map<int, Loses> sequences_;  // How each was made.
  std::set<int> forked_;
  std::set<int> refused_;
  std::vector<int> lost_;
};

// Has room for six sequences, as python_pool.py of the examples may have.
class HasSixSequences final : public ForwardingPool {
 public:
  using ForwardingPool::ForwardingPool;

  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    return Made(ForwardingPool::Open(prompt, key));
  }
  Result<int> Fork(int sequence, int len) override {
    return Made(ForwardingPool::Fork(sequence, len));
  }
  Status Free(int sequence) override {
    --count_;
    return ForwardingPool::Free(sequence);
  }

 private:
  Result<int> Made(const Result<int>& made) {
    count_ += made.ok() ? 1 : 0;
    EXPECT_LE(count_, 6);
    return made;
  }

  int count_ = 0;
};

// Returns the failures of a Faulty in 60 histories, by the name of the law that
// is judged. With `of_laws_only`, failures of the histories' own calls do not
// count.
template <class Faulty>
std::map<std::string, std::string> Findings(bool of_laws_only = true) {
  std::map<std::string, std::string> findings;
  for (std::uint64_t number = 0; number < 60; ++number) {
    const PagedHistory history = MakePagedHistory(3, number);
    for (const PoolLaw& law : PoolLaws()) {
      const RunResult result = JudgePool(
          law, history,
          std::make_unique<Faulty>(*MakePagedPool(history.spec, "reference")),
          {.commit_unknown = false}, {});
      if (!result.failure) continue;
      const std::string& text = result.failure->text;
      if (of_laws_only && !text.starts_with("law ")) continue;
      findings[std::string(law.name)] = text;
    }
  }
  return findings;
}

// Returns after how many operations of a line a law is judged.
std::int64_t Judged(std::string_view name, const std::string& line) {
  const auto history = *ParsePagedHistory(line);
  const auto law = std::ranges::find(PoolLaws(), name, &PoolLaw::name);
  const RunResult result = JudgePool(
      *law, history, *MakePagedPool(history.spec, "reference"), {}, {});
  EXPECT_FALSE(result.failure) << line;
  return result.views;
}

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

TEST(PoolLaws, PlannedTokensAreFound) {
  EXPECT_THAT(
      Findings<FindsPlannedTokens>(),
      ElementsAre(Pair("planned_tokens",
                       AllOf(HasSubstr("law planned_tokens: "),
                             HasSubstr(" tokens are committed, "),
                             HasSubstr(" are found while a pass runs")))));
}

TEST(PoolLaws, AHitWithoutABlockIsFound) {
  EXPECT_THAT(Findings<HidesAFoundBlock>(),
              ElementsAre(Pair("a_hit_is_whole",
                               AllOf(HasSubstr("law a_hit_is_whole: a prompt "
                                               "finds "),
                                     HasSubstr(" has no row at ")))));
}

TEST(PoolLaws, ATableOfOtherBlocksIsFound) {
  EXPECT_THAT(
      Findings<RepeatsABlockInTables>(),
      ElementsAre(Pair("tables_are_views",
                       AllOf(HasSubstr("the table of group 0 has block "),
                             HasSubstr(" shows block ")))));
}

TEST(PoolLaws, RoomThatDoesNotComeBackIsFound) {
  const auto found = [](const auto& text) {
    return ElementsAre(Pair("room_comes_back",
                            AllOf(HasSubstr("law room_comes_back: "), text)));
  };
  const auto by_uses = HasSubstr(" times, and the next time the pool is full");
  const auto by_fills =
      HasSubstr(" tokens filled the pool and were freed; the next time ");
  EXPECT_THAT(Findings<LosesBlocks<Loses::kCut>>(), found(by_uses));
  EXPECT_THAT(Findings<LosesBlocks<Loses::kFork>>(), found(by_uses));
  EXPECT_THAT(Findings<LosesBlocks<Loses::kDropped>>(), found(by_uses));
  EXPECT_THAT(Findings<LosesBlocks<Loses::kForked>>(), found(by_uses));
  EXPECT_THAT(Findings<LosesBlocks<Loses::kRefused>>(), found(by_fills));
  // Both ways free a sequence.
  EXPECT_THAT(Findings<LosesBlocks<Loses::kOther>>(),
              found(AnyOf(by_uses, by_fills)));
}

// Tokens of the pool that the line begins.
PoolRoom RoomOf(const std::string& line) {
  const auto history = *ParsePagedHistory("kvp1 " + line + " | open 0 0 0");
  const auto pool = MakePagedPool(history.spec, "reference");
  const PoolRoom room = FillAndFree(**pool, {}, kOpenClientsMost);
  EXPECT_EQ((*pool)->Usage().used, 0) << line;
  return room;
}

TEST(PoolRoom, IsAllTokensThatFit) {
  const auto expect = [](const std::string& line, int tokens, bool is_full) {
    const PoolRoom room = RoomOf(line);
    EXPECT_EQ(room.tokens, tokens) << line;
    EXPECT_EQ(room.is_full, is_full) << line;
  };
  expect("block=4 blocks=14 most=100", 56, true);
  expect("block=4 blocks=14 most=12", 56, true);
  // After four tokens, two more fit into the second group.
  expect("most=9 groups=block:4,blocks:3/block:1,blocks:6", 6, true);
  // Six sequences have no more tokens than this.
  expect("block=4 blocks=14 most=8", 48, false);
  expect("block=4 blocks=14 most=1", 6, false);
  // The first sequence keeps two blocks, or all three; the second gets the
  // rest.
  expect("most=9 groups=block:1,blocks:3,window:2", 10, true);
  expect("most=9 groups=block:4,blocks:3,states:1", 9, true);
}

class NotesLayers final : public ForwardingPool {
 public:
  using ForwardingPool::ForwardingPool;

  Result<PagedAppend> Append(int sequence, int layer, const TensorView& key,
                             const TensorView& value) override {
    layers.push_back(layer);
    return ForwardingPool::Append(sequence, layer, key, value);
  }

  Ids layers;  // Of each append.
};

TEST(PoolRoom, IsFilledByFewAppends) {
  const auto history = *ParsePagedHistory(
      "kvp1 block=1 blocks=4096 most=4096 layers=1 heads=1 kdim=1 vdim=1 | "
      "open 0 0 0");
  NotesLayers pool(*MakePagedPool(history.spec, "reference"));
  EXPECT_EQ(FillAndFree(pool, {}, kOpenClientsMost).tokens, 4096);
  EXPECT_LT(pool.layers.size(), 60);
}

// A pass may not be given to a state twice, whichever layer was first.
TEST(PoolWorkload, GivesAPassToAStateOnce) {
  const auto history = *ParsePagedHistory(
      "kvp1 most=1 groups=block:1,blocks:1,layers:3,states:1 | open 0 0 0 | "
      "append 24 0 0 | layers 0 2 0");
  for (const bool in_place : {false, true}) {
    NotesLayers pool(*MakePagedPool(history.spec, "reference"));
    PoolWorkload workload(pool, {}, {.states_in_place = in_place});
    for (const PagedOp& op : history.ops) workload.Do(op);
    workload.End();
    EXPECT_EQ(pool.layers, in_place ? (Ids{2, 0, 1}) : (Ids{2, 0, 1, 2}));
  }
}

// Most histories open six sequences at most, whatever the pool may have.
TEST(PoolWorkload, OpensNoMoreSequencesThanThePoolMayHave) {
  const auto opened = [](int most, int b) {
    const auto history = *ParsePagedHistory(
        "kvp1 block=1 blocks=1 most=1 layers=1 heads=1 kdim=1 vdim=1 | "
        "open 0 0 0");
    NotesLayers pool(*MakePagedPool(history.spec, "reference"));
    PoolWorkload workload(pool, {.max_sequences = most});
    for (int i = 0; i < 80; ++i) {
      workload.Do({i % 2 == 0 ? PagedOpKind::kOpen : PagedOpKind::kFork, 0, b});
    }
    EXPECT_GE(workload.Room(), 0);
    return workload.sequences().size();
  };
  EXPECT_EQ(opened(1, 64), 1);
  EXPECT_EQ(opened(8, 64), 8);
  EXPECT_EQ(opened(100, 64), 72);
  EXPECT_EQ(opened(8, 63), 6);
}

// A pool that no sequences fill refuses nothing.
TEST(PoolLaws, RoomIsJudgedOfFullPools) {
  const std::string end = " | open 0 0 4";  // Tries refused appends.
  EXPECT_EQ(Judged("room_comes_back", "kvp1 block=4 blocks=14 most=99" + end),
            1);
  EXPECT_EQ(Judged("room_comes_back", "kvp1 block=4 blocks=14 most=8" + end),
            0);
}

TEST(PoolLaws, ARightPoolBreaksNone) {
  EXPECT_THAT(Findings<ForwardingPool>(/*of_laws_only=*/false), IsEmpty());
  EXPECT_THAT(Findings<FindsTheSecondTime>(/*of_laws_only=*/false), IsEmpty());
  EXPECT_THAT(Findings<HasSixSequences>(/*of_laws_only=*/false), IsEmpty());
}

}  // namespace
}  // namespace kvtwin::props
