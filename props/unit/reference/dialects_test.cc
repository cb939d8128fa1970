// The rules of other systems' caches: what a ledger does by each of them.

#include "reference/dialects.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

namespace kvtwin::props {
namespace {

using reference::CacheLedger;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Positions = std::multiset<std::int64_t>;

// A ledger with some rules, and the tokens that the rows of its pass may see.
class Play {
 public:
  explicit Play(const Rules& rules, std::optional<int> window = std::nullopt,
                int max_sequences = 1, std::optional<int> memory = std::nullopt)
      : ledger_(SpecOf(window, memory), rules) {
    const Status status = ledger_.Init({}, {DType::kF32, max_sequences, 16, 8});
    EXPECT_TRUE(status.ok()) << status.ToString();
  }

  StatusCode Put(int seq, std::vector<std::int32_t> positions,
                 std::vector<int> parents = {}) {
    const std::vector<int> sequences(positions.size(), seq);
    const Batch batch = {
        .positions = positions, .sequences = sequences, .parents = parents};
    return ledger_.StartForward(batch, false).code();
  }
  Positions Sees(int row) const {
    Positions seen;
    for (const auto& token : ledger_.tokens()) {
      if (ledger_.MaySee(row, token)) seen.insert(token.position);
    }
    return seen;
  }
  Positions Has(int seq) const {
    Positions held;
    for (const auto& token : ledger_.tokens()) {
      if (token.HeldBy(seq)) held.insert(token.position);
    }
    return held;
  }
  // Returns the tokens that the row may see but need not.
  Positions MayMiss(int row) const {
    Positions spare;
    for (const auto& token : ledger_.tokens()) {
      const bool sees = ledger_.MaySee(row, token);
      if (sees && ledger_.MayMiss(row, token)) spare.insert(token.position);
    }
    return spare;
  }
  CacheLedger* operator->() { return &ledger_; }

 private:
  static CacheSpec SpecOf(std::optional<int> window,
                          std::optional<int> memory) {
    CacheSpec spec;
    if (window) spec.kind = memory ? Kind::kSwaMem : Kind::kSwa;
    spec.window = window;
    spec.memory = memory;
    spec.shift.kind = ShiftKind::kIdentity;
    return spec;
  }

  CacheLedger ledger_;
};

TEST(Rules, AWindowCountsTheQueryOrNot) {
  Play before({}, 2);
  before.Put(0, {0, 1, 2, 3});
  EXPECT_THAT(before.Sees(3), ElementsAre(1, 2, 3));
  Play with({.window = Rules::Window::kWithQuery}, 2);
  with.Put(0, {0, 1, 2, 3});
  EXPECT_THAT(with.Sees(3), ElementsAre(2, 3));
  with.Put(0, {4});
  EXPECT_THAT(with.Has(0), ElementsAre(3, 4));

  CacheSpec spec;
  spec.kind = Kind::kSwa;
  spec.window = 0;
  CacheLedger none(spec, {.window = Rules::Window::kWithQuery});
  EXPECT_EQ(none.Init({}, {DType::kF32, 1, 4, 4}).code(),
            StatusCode::kInvalidArgument);
}

TEST(Rules, ACopyReplacesOrAdds) {
  for (const auto copy : {Rules::Copy::kReplaces, Rules::Copy::kAdds}) {
    Play play({.copy = copy});
    play.Put(0, {0, 1});
    play.Put(1, {0, 1, 2});
    EXPECT_TRUE(play->CopyPrefix(0, 1, 1).ok());
    const bool adds = copy == Rules::Copy::kAdds;
    EXPECT_EQ(play.Has(1), adds ? Positions({0, 0, 1, 2}) : Positions({0}));
    EXPECT_TRUE(play->CopyPrefix(0, 0, 1).ok());
    EXPECT_EQ(play.Has(0), adds ? Positions({0, 1}) : Positions({0}));
  }
}

TEST(Rules, ARemoveFromTheMiddleShiftsLeavesAGapOrIsRefused) {
  using enum Rules::Middle;
  const std::map<Rules::Middle, Positions> expected = {
      {kShifts, {0, 1, 2}}, {kLeavesGap, {0, 2, 3}}, {kRefused, {0, 1, 2, 3}}};
  for (const auto& [middle, left] : expected) {
    Play play({.middle = middle});
    play.Put(0, {0, 1, 2, 3});
    const Status status = play->Remove(0, 1, 2);
    EXPECT_EQ(status.code(),
              middle == kRefused ? StatusCode::kNotSupported : StatusCode::kOk);
    EXPECT_EQ(play.Has(0), left);
    EXPECT_TRUE(play->Remove(0, 2, kOpenEnd).ok());
    EXPECT_EQ(play.Has(0).count(2), 0U);
    EXPECT_TRUE(play->Remove(0, 0, 9).ok()) << "of all of it";
    EXPECT_THAT(play.Has(0), IsEmpty());
  }
}

TEST(Rules, AShiftClosesTheGapAndDropsWhatFallsBelow0) {
  Play play({.middle = Rules::Middle::kLeavesGap});
  play.Put(0, {0, 1, 2, 3});
  EXPECT_TRUE(play->Remove(0, 1, 2).ok());
  EXPECT_TRUE(play->Shift(0, 2, 3, -1).ok());
  EXPECT_THAT(play.Has(0), ElementsAre(0, 1, 3));
  EXPECT_TRUE(play->Shift(0, 0, kOpenEnd, -1).ok());
  EXPECT_THAT(play.Has(0), ElementsAre(0, 2));
  EXPECT_TRUE(play->Shift(0, 2, kOpenEnd, 5).ok());
  EXPECT_THAT(play.Has(0), ElementsAre(0, 7));
  Play ours({});
  EXPECT_EQ(ours->Shift(0, 0, 1, 1).code(), StatusCode::kNotSupported);
}

TEST(Rules, AShiftRewritesTheKeys) {
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kAdd;
  CacheLedger ledger(spec, {.middle = Rules::Middle::kLeavesGap});
  ASSERT_TRUE(ledger.Init({}, {DType::kF32, 1, 4, 4}).ok());
  const std::vector<std::int32_t> positions = {0, 1};
  const std::vector<int> sequences = {0, 0};
  ASSERT_TRUE(ledger.StartForward({positions, sequences}, false).ok());
  const std::vector<float> rows = {10, 20};
  const TensorView view = DenseView(rows.data(), DType::kF32, {1, 1, 2, 1});
  ledger.Put(0, view, view);
  ASSERT_TRUE(ledger.Shift(0, 1, kOpenEnd, 3).ok());
  const auto& moved = ledger.tokens().back();
  EXPECT_EQ(moved.position, 4);
  const auto first = [](const DenseTensor& row) {
    return *reinterpret_cast<const float*>(row.bytes.data());
  };
  EXPECT_EQ(first(moved.rows.at(0).key), 23);
  EXPECT_EQ(first(moved.rows.at(0).value), 20);
}

TEST(Rules, PositionsAreAnyContinueOrOverwrite) {
  using enum StatusCode;
  Play any({});
  any.Put(0, {0, 1, 2});
  EXPECT_EQ(any.Put(0, {1}), kOk);
  EXPECT_THAT(any.Has(0), ElementsAre(0, 1, 1, 2));

  Play going_on({.positions = Rules::Positions::kContinue});
  EXPECT_EQ(going_on.Put(0, {5, 6}), kOk) << "it may begin anywhere";
  EXPECT_EQ(going_on.Put(0, {7, 9}), kInvalidArgument);
  EXPECT_EQ(going_on.Put(0, {6}), kInvalidArgument);
  EXPECT_EQ(going_on.Put(0, {8}), kInvalidArgument);
  EXPECT_THAT(going_on.Has(0), ElementsAre(5, 6));
  EXPECT_EQ(going_on.Put(0, {7}), kOk);

  Play over({.positions = Rules::Positions::kOverwrite});
  EXPECT_EQ(over.Put(0, {1}), kInvalidArgument);
  EXPECT_EQ(over.Put(0, {0, 1, 2, 3}), kOk);
  EXPECT_EQ(over.Put(0, {5}), kInvalidArgument);
  EXPECT_EQ(over.Put(0, {1, 2}), kOk);
  EXPECT_THAT(over.Has(0), ElementsAre(0, 1, 2));
  EXPECT_EQ(over.Put(0, {3}), kOk);
  EXPECT_THAT(over.Sees(0), ElementsAre(0, 1, 2, 3));
}

TEST(Rules, DraftsHaveThePositionsOfTheirParents) {
  using enum StatusCode;
  for (const auto positions :
       {Rules::Positions::kContinue, Rules::Positions::kOverwrite}) {
    Play play({.positions = positions});
    EXPECT_EQ(play.Put(0, {0, 1}), kOk);
    // Two siblings and a child of the first one; then a child of the other.
    EXPECT_EQ(play.Put(0, {2, 2, 3}, {-1, -1, 0}), kOk);
    EXPECT_THAT(play.Sees(1), ElementsAre(0, 1, 2));
    EXPECT_THAT(play.Sees(2), ElementsAre(0, 1, 2, 3));
    EXPECT_EQ(play.Put(0, {3}, {1}), kOk);
    EXPECT_THAT(play.Sees(0), ElementsAre(0, 1, 2, 3));
    EXPECT_TRUE(play->Commit(0, std::vector<int>({1, 3})).ok());
    EXPECT_THAT(play.Has(0), ElementsAre(0, 1, 2, 3));
    EXPECT_EQ(play.Put(0, {5}), kInvalidArgument);
    EXPECT_EQ(play.Put(0, {4}), kOk);
  }
}

TEST(Rules, EvictionIsEagerOrMayWait) {
  for (const auto eviction :
       {Rules::Eviction::kEager, Rules::Eviction::kLazy}) {
    const bool lazy = eviction == Rules::Eviction::kLazy;
    Play play({.eviction = eviction}, 2);  // 2 + 8 cells.
    play.Put(0, {0, 1, 2, 3, 4});
    play.Put(0, {5});
    EXPECT_EQ(play.Has(0),
              lazy ? Positions({0, 1, 2, 3, 4, 5}) : Positions({3, 4, 5}));
    EXPECT_EQ(play->CanResume(0, 4), lazy);
    EXPECT_TRUE(play->Remove(0, 4, kOpenEnd).ok());
    play.Put(0, {4});
    EXPECT_EQ(play.Sees(0), lazy ? Positions({2, 3, 4}) : Positions({3, 4}));
    EXPECT_EQ(play.MayMiss(0), lazy ? Positions({2}) : Positions());
    // Both rules evict position 0 when a batch needs its cell.
    EXPECT_EQ(play.Put(0, {5, 6, 7, 8, 9, 10}), StatusCode::kOk);
    EXPECT_EQ(play.Has(0).count(0), 0U);
  }
}

TEST(Rules, TokensThatMayBeEvictedMayBeEvictedFromCopies) {
  Play play({.eviction = Rules::Eviction::kLazy}, 2);
  play.Put(0, {0, 1, 2, 3, 4});
  play.Put(0, {5});
  EXPECT_TRUE(play->CopyPrefix(0, 1, 3).ok());
  play.Put(1, {3});
  EXPECT_THAT(play.Sees(0), ElementsAre(1, 2, 3));
  EXPECT_THAT(play.MayMiss(0), ElementsAre(1, 2));
}

TEST(Rules, ASequenceGoesBackOrNoMoreOnceItsWindowIsFull) {
  using enum StatusCode;
  Play play({.back = Rules::Back::kUntilFull}, 2);
  play.Put(0, {0, 1});
  EXPECT_TRUE(play->CanResume(0, 1));
  EXPECT_EQ(play->Remove(0, 1, kOpenEnd).code(), kOk);
  play.Put(0, {1, 2});
  EXPECT_FALSE(play->CanResume(0, 2));
  EXPECT_TRUE(play->CanResume(0, 3));
  EXPECT_EQ(play->Remove(0, 2, kOpenEnd).code(), kNotSupported);
  EXPECT_EQ(play->Remove(0, 3, kOpenEnd).code(), kOk) << "there is nothing";
  EXPECT_EQ(play->CopyPrefix(0, 1, 2).code(), kNotSupported);
  EXPECT_EQ(play->CopyPrefix(0, 1, 3).code(), kOk);
  EXPECT_THAT(play.Has(0), ElementsAre(0, 1, 2));
  EXPECT_EQ(play->Remove(0, 0, kOpenEnd).code(), kOk);
  EXPECT_THAT(play.Has(0), IsEmpty());
}

// The rules of mlx-lm's RotatingKVCache(max_size=6, keep=4).
TEST(Rules, FirstTokensStayInTheWindow) {
  Play play({.window = Rules::Window::kWithQuery, .first = Rules::First::kStay},
            6, /*max_sequences=*/2, /*memory=*/9);
  play.Put(0, {0, 1, 2, 3, 4, 5, 6, 7});
  EXPECT_THAT(play.Sees(7), ElementsAre(2, 3, 4, 5, 6, 7));
  play.Put(0, {8});
  EXPECT_THAT(play.Sees(0), ElementsAre(0, 1, 2, 3, 7, 8));
  play.Put(0, {9, 10});
  EXPECT_THAT(play.Sees(0), ElementsAre(0, 1, 2, 3, 8, 9));
  EXPECT_THAT(play.Sees(1), ElementsAre(1, 2, 3, 8, 9, 10));
  // A smaller window keeps fewer first tokens.
  Play small(
      {.window = Rules::Window::kWithQuery, .first = Rules::First::kStay}, 2);
  small.Put(0, {0, 1, 2});
  small.Put(0, {3});
  EXPECT_THAT(small.Sees(0), ElementsAre(0, 3));
}

TEST(Rules, AShiftOfSharedTokensIsRefusedOrMovesAll) {
  for (const bool moves : {false, true}) {
    const auto shared =
        moves ? Rules::SharedShift::kMovesAll : Rules::SharedShift::kRefused;
    Play play({.shared_shift = shared});
    play.Put(0, {0, 1, 2});
    EXPECT_TRUE(play->CopyPrefix(0, 1, 3).ok());
    EXPECT_EQ(play->Remove(0, 0, 1).code(),
              moves ? StatusCode::kOk : StatusCode::kSharedCells);
    EXPECT_EQ(play.Has(0), moves ? Positions({0, 1}) : Positions({0, 1, 2}));
    // The tokens that left sequence 0 keep their positions.
    EXPECT_EQ(play.Has(1), moves ? Positions({0, 0, 1}) : Positions({0, 1, 2}));

    Play gap({.middle = Rules::Middle::kLeavesGap, .shared_shift = shared});
    gap.Put(0, {0, 1});
    EXPECT_TRUE(gap->CopyPrefix(0, 1, 2).ok());
    EXPECT_EQ(gap->Shift(0, 1, 2, 4).code(),
              moves ? StatusCode::kOk : StatusCode::kSharedCells);
    EXPECT_EQ(gap.Has(1), moves ? Positions({0, 5}) : Positions({0, 1}));
  }
}

// Without a shift function, the cache may remove the last tokens (S32).
TEST(Rules, ARemoveThatMovesNothingMayBeOk) {
  for (const Rules& rules :
       {Rules(), Rules{.window = Rules::Window::kWithQuery}}) {
    const auto remove = [&](std::int32_t begin, std::int32_t end,
                            reference::Heard heard) {
      reference::Ledger ledger(CacheSpec(), rules);
      EXPECT_TRUE(ledger.Init({}, {DType::kF32, 1, 8, 8}).ok());
      const std::vector<std::int32_t> positions = {0, 1, 2};
      const std::vector<int> sequences(3);
      EXPECT_TRUE(ledger.StartForward({positions, sequences}, false).ok());
      const StatusCode code = ledger.Remove(0, begin, end, heard).code();
      return std::pair(code, ledger.Next(0));
    };
    const auto ok = StatusCode::kOk;
    const auto refused = StatusCode::kNotSupported;
    EXPECT_EQ(remove(3, 3, ok), std::pair(ok, std::int64_t{3}));
    EXPECT_EQ(remove(1, 3, ok), std::pair(ok, std::int64_t{1}));
    EXPECT_EQ(remove(1, 2, ok), std::pair(refused, std::int64_t{3}));
    EXPECT_EQ(remove(1, 1, ok), std::pair(ok, std::int64_t{3}));
    for (const reference::Heard& heard :
         {reference::Heard(), reference::Heard(refused)}) {
      EXPECT_EQ(remove(3, 3, heard), std::pair(refused, std::int64_t{3}));
      EXPECT_EQ(remove(1, 3, heard), std::pair(refused, std::int64_t{3}));
    }
  }
}

// A message says whether the prompt was computed in no layer, or in some (F3).
TEST(Rules, FindPrefixSaysWhatWasNotComputed) {
  reference::Ledger ledger{CacheSpec()};
  EXPECT_TRUE(ledger.Init({}, {DType::kF32, 3, 8, 8}).ok());
  ledger.NeedLayers(0, 2);
  const std::vector<std::int32_t> ids = {7, 8, 9};
  const std::vector<std::int32_t> positions = {0, 1};
  const std::vector<int> sequences(2);
  EXPECT_TRUE(ledger.FindPrefix(0, ids, 0).ok());
  EXPECT_TRUE(ledger.StartForward({positions, sequences}, false).ok());
  const std::vector<float> numbers(2, 1);
  const TensorView rows = DenseView(numbers.data(), DType::kF32, {1, 1, 2, 1});
  ledger.Put(0, rows, rows);
  EXPECT_EQ(ledger.FindPrefix(1, ids, 2).message(),
            "the token at position 0 was never computed in all layers");
  ledger.Put(1, rows, rows);
  EXPECT_TRUE(ledger.FindPrefix(1, ids, 2).ok());
  const std::vector<std::int32_t> other = {7, 9, 9};
  EXPECT_EQ(ledger.FindPrefix(2, other, 2).message(),
            "the tokens up to position 1 were never computed as one prompt");
}

// Returns a ledger with four tokens of sequence 0, which has a prompt.
reference::Ledger PromptLedger(const Rules& rules, Kind kind = Kind::kCausal,
                               const std::vector<std::int32_t>& ids = {7, 8,
                                                                       9}) {
  CacheSpec spec;
  spec.kind = kind;
  spec.shift.kind = ShiftKind::kIdentity;
  reference::Ledger ledger(spec, rules);
  EXPECT_TRUE(ledger.Init({}, {DType::kF32, 2, 16, 8}).ok());
  const std::vector<std::int32_t> positions = {0, 1, 2, 3};
  const std::vector<int> sequences(4);
  EXPECT_TRUE(ledger.FindPrefix(0, ids, 0).ok());
  EXPECT_TRUE(ledger.StartForward({positions, sequences}, false).ok());
  return ledger;
}

// The tokens of a prompt may be shared (F4).
TEST(Rules, APromptIsMovedWhereTheCacheMayRefuse) {
  // Three of the four tokens are of the prompt.
  reference::Ledger ours = PromptLedger({});
  EXPECT_FALSE(ours.RemoveIsOpen(0, 0, 1));
  EXPECT_TRUE(ours.MoveIsOpen(0, 2, 3));
  EXPECT_FALSE(ours.MoveIsOpen(0, 3, 4));
  const auto heard = StatusCode::kSharedCells;
  EXPECT_EQ(ours.Remove(0, 0, 1, heard).code(), heard);
  // Nothing is removed: the prompt goes on.
  EXPECT_TRUE(ours.Remove(0, 1, 1).ok());
  EXPECT_TRUE(ours.MoveIsOpen(0, 2, 3));
  // The range reaches the end of the sequence: no token moves.
  EXPECT_TRUE(ours.Remove(0, 3, 5).ok());
  EXPECT_TRUE(ours.MoveIsOpen(0, 2, 3));
  EXPECT_TRUE(ours.Remove(0, 1, 2).ok());
  EXPECT_FALSE(ours.MoveIsOpen(0, 1, 2));
  // Only the last token moves, which is beyond the prompt.
  EXPECT_TRUE(PromptLedger({}).Remove(0, 1, 3, heard).ok());
  // The state after four tokens does not move.
  reference::Ledger states = PromptLedger({}, Kind::kRecurrent, {7, 8, 9, 6});
  EXPECT_EQ(states.Remove(0, 0, 1, heard).code(), StatusCode::kNotSupported);
  for (const Rules& rules :
       {Rules{.middle = Rules::Middle::kLeavesGap},
        Rules{.shared_shift = Rules::SharedShift::kMovesAll}}) {
    const reference::Ledger other = PromptLedger(rules);
    EXPECT_TRUE(other.RemoveIsOpen(0, 0, 1));
    EXPECT_FALSE(other.RemoveIsOpen(0, 0, 3));
    EXPECT_FALSE(other.RemoveIsOpen(0, 0, kOpenEnd));
  }
}

// A copy that adds leaves the tokens of its target, which may be shared.
TEST(Rules, APromptIsMixedByACopyThatAdds) {
  const auto heard = StatusCode::kSharedCells;
  const std::vector<std::int32_t> two = {0, 1};
  const std::vector<int> ones(2, 1);
  reference::Ledger added = PromptLedger({.copy = Rules::Copy::kAdds});
  EXPECT_TRUE(added.StartForward({two, ones}, false).ok());
  EXPECT_TRUE(added.CopyPrefix(1, 0, 1).ok());
  EXPECT_TRUE(added.MoveIsOpen(0, 2, 3));
  EXPECT_EQ(added.Remove(0, 0, 1, heard).code(), heard);
  EXPECT_TRUE(added.Remove(0, 0, kOpenEnd).ok());
  EXPECT_TRUE(added.StartForward({two, std::vector<int>(2)}, false).ok());
  EXPECT_FALSE(added.MoveIsOpen(0, 0, 2));
  // Without prompts, no other sequence shares the tokens by itself.
  CacheSpec spec;
  reference::Ledger plain(spec, {.copy = Rules::Copy::kAdds});
  EXPECT_TRUE(plain.Init({}, {DType::kF32, 2, 16, 8}).ok());
  EXPECT_TRUE(plain.StartForward({two, std::vector<int>(2)}, false).ok());
  EXPECT_TRUE(plain.StartForward({two, ones}, false).ok());
  EXPECT_TRUE(plain.CopyPrefix(1, 0, 1).ok());
  EXPECT_FALSE(plain.MoveIsOpen(0, 1, 2));
  EXPECT_EQ(plain.parts()[0].tokens().size(), 4U);
  EXPECT_FALSE(plain.parts()[0].HasEvictable());
  // A hybrid goes back to the last state before position 3 (H3).
  CacheSpec hybrid;
  hybrid.kind = Kind::kHybrid;
  hybrid.caches = {CacheSpec{.kind = Kind::kCausal},
                   CacheSpec{.kind = Kind::kRecurrent}};
  hybrid.caches[1].checkpoint_every = 2;
  hybrid.caches[1].checkpoints = 4;
  reference::Ledger back(hybrid);
  EXPECT_TRUE(back.Init({}, {DType::kF32, 2, 16, 8}).ok());
  const std::vector<std::int32_t> ids = {5, 6, 7, 8, 9};
  EXPECT_TRUE(back.FindPrefix(0, ids, 0).ok());
  const std::vector<std::int32_t> four = {0, 1, 2, 3};
  EXPECT_TRUE(back.StartForward({four, std::vector<int>(4)}, false).ok());
  EXPECT_TRUE(back.CopyPrefix(0, 1, 3).ok());
  EXPECT_EQ(back.Next(1), 2);
  EXPECT_NE(back.prefixes().PrefixAt(1, 1), 0);
  EXPECT_EQ(back.prefixes().PrefixAt(1, 2), 0);
  // Ids of tokens that the source does not have are not copied.
  reference::Ledger longer = PromptLedger({}, Kind::kCausal, {7, 8, 9, 6, 5});
  EXPECT_TRUE(longer.Remove(0, 2, kOpenEnd).ok());
  EXPECT_TRUE(longer.CopyPrefix(0, 1, 4).ok());
  EXPECT_EQ(longer.prefixes().PrefixAt(1, 2), 0);
  reference::Ledger replaced = PromptLedger({});
  EXPECT_TRUE(replaced.StartForward({two, ones}, false).ok());
  EXPECT_TRUE(replaced.CopyPrefix(1, 0, 2).ok());
  EXPECT_FALSE(replaced.MoveIsOpen(0, 0, 2));
}

}  // namespace
}  // namespace kvtwin::props
