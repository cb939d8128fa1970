// Rules of other caches: what each rule does, that probes tell them apart, and
// that the ledger of each profile is recognised.

#include "props/backend/profile.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "core/mask_elements.h"
#include "props/backend/backend.h"
#include "props/backend/ledger_backend.h"
#include "props/backend/live.h"
#include "props/base/forwarding_cache.h"
#include "props/compare/cited_rules.h"
#include "props/history/generate.h"
#include "props/shrink/shrink.h"
#include "props/testing/other_caches.h"
#include "reference/dialects.h"

namespace kvtwin::props {
namespace {

using reference::CacheLedger;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
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

  StatusCode Put(int seq, std::vector<std::int32_t> positions) {
    const std::vector<int> sequences(positions.size(), seq);
    return ledger_.StartForward({positions, sequences}, false).code();
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
    // Tokens are evicted if there is no room.
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

// Returns the rules that differ, of those that both caches can have.
std::set<std::string_view> Between(const Rules& rules, const Rules& other) {
  std::set<std::string_view> names;
  for (const RuleInfo& rule : AllRules()) {
    if (!HasRule(rules, rule) || !HasRule(other, rule)) continue;
    if (rule.get(rules) != rule.get(other)) names.insert(rule.name);
  }
  return names;
}

bool TellsApart(const History& history, const Rules& rules,
                const Rules& other) {
  return RunLedgers(history, rules, other).failure ||
         RunLedgers(history, other, rules).failure;
}

// Calls `fn` for all pairs that differ in one rule, which both caches can have.
template <class Fn>
void ForNeighbours(const RuleInfo& rule, const Fn& fn) {
  for (const Rules& rules : AllOfRules()) {
    for (int value = rule.get(rules) + 1; value < std::ssize(rule.values);
         ++value) {
      Rules other = rules;
      rule.set(other, value);
      if (HasRule(rules, rule) && HasRule(other, rule)) fn(rules, other);
    }
  }
}

const RuleInfo& RuleNamed(std::string_view name) {
  return *std::ranges::find(AllRules(), name, &RuleInfo::name);
}

TEST(Profiles, DifferFromEachOther) {
  ASSERT_EQ(Profiles().size(), kProfileCount);
  for (const Profile& profile : Profiles()) {
    EXPECT_EQ(FindProfile(profile.name)->rules, profile.rules);
    EXPECT_EQ(RulesOf(ValuesOf(profile.rules)), profile.rules);
    for (const Profile& other : Profiles()) {
      EXPECT_EQ(Between(profile.rules, other.rules).empty(),
                profile.name == other.name)
          << profile.name << " and " << other.name;
    }
  }
  EXPECT_FALSE(FindProfile("vllm"));
}

TEST(Probes, DistinguishTheValuesOfEveryRule) {
  std::vector<History> probes;
  for (const RuleProbe& probe : RuleProbes()) {
    probes.push_back(*ParseHistory(probe.history));
  }
  for (const RuleInfo& rule : AllRules()) {
    ForNeighbours(rule, [&](const Rules& one, const Rules& other) {
      EXPECT_TRUE(std::ranges::any_of(
          probes,
          [&](const History& probe) { return TellsApart(probe, one, other); }))
          << rule.name << " " << ::testing::PrintToString(ValuesOf(one)) << " "
          << ::testing::PrintToString(ValuesOf(other));
    });
  }
}

// Whether every cache can run the history: no more sequences than the cache is
// made for, windows of at least 2, positions without gaps, nothing empty.
bool IsPlain(const History& history) {
  const CacheSpec& spec = history.setup.spec;
  const InitArgs init = Setup().init;
  const InitArgs& own = history.setup.init;
  if (spec.kind == Kind::kChunked || own.capacity != init.capacity ||
      own.max_sequences != init.max_sequences ||
      own.max_batch != init.max_batch ||
      (spec.kind != Kind::kCausal && spec.window.value_or(0) < 2)) {
    return false;
  }
  std::map<int, int> length;
  for (const Op& op : history.ops) {
    const int held = length[op.seq];
    const bool inside =
        op.begin.offset < held &&
        (op.open || (op.end.offset > op.begin.offset && op.end.offset <= held));
    if (op.kind == OpKind::kPut) {
      const Segment& segment = op.segments[0];
      int& end = length[segment.seq];
      if (op.segments.size() > 1 || segment.seq > 1 || segment.delta > 0 ||
          segment.order != Segment::Order::kUp || end + segment.delta < 0 ||
          end + segment.delta + segment.count > init.capacity || op.reserve ||
          op.keep_rows || !op.except.empty() || !op.images.empty()) {
        return false;
      }
      end = std::max(end, end + segment.delta + segment.count);
    } else if (op.kind == OpKind::kCopy) {
      if (op.seq == op.dst || op.end.offset < 1 || op.end.offset > held) {
        return false;
      }
      length[op.dst] = std::max(length[op.dst], op.end.offset);
    } else if (op.kind == OpKind::kDrop || op.kind == OpKind::kShift) {
      if (!inside || (op.kind == OpKind::kShift && op.delta == 0)) return false;
      if (op.kind == OpKind::kDrop && op.open) length[op.seq] = op.begin.offset;
    } else {
      return false;
    }
  }
  return true;
}

TEST(Probes, DistinguishTheirValuesAndAreMinimal) {
  for (const RuleProbe& probe : RuleProbes()) {
    SCOPED_TRACE(probe.history);
    const Result<History> history = ParseHistory(probe.history);
    ASSERT_TRUE(history.ok());
    EXPECT_EQ(ToText(*history), probe.history);
    ASSERT_TRUE(IsPlain(*history));
    std::optional<std::pair<Rules, Rules>> pair;
    const RuleInfo& rule = RuleNamed(probe.rule);
    ForNeighbours(rule, [&](const Rules& one, const Rules& other) {
      if (pair || rule.get(one) != probe.one ||
          rule.get(other) != probe.other || !TellsApart(*history, one, other)) {
        return;
      }
      pair = {one, other};
    });
    ASSERT_TRUE(pair);
    const auto rerun = [&](const History& shorter) {
      std::optional<Failure> wrong;
      if (!IsPlain(shorter)) return wrong;
      for (const auto& [cache, judge] :
           {*pair, std::pair(pair->second, pair->first)}) {
        const auto found = RunLedgers(shorter, cache, judge).failure;
        if (found && (!wrong || found->step < wrong->step)) wrong = found;
      }
      if (wrong) wrong->check = "rules";
      return wrong;
    };
    const History shrunk = Shrink(*history, rerun);
    EXPECT_EQ(shrunk.ops.size(), history->ops.size()) << ToText(shrunk);
  }
}

InferredProfile InferTable(const kvtwin_backend_v1* table,
                           const Abilities* abilities = nullptr) {
  const Result<BackendInfo> info = DescribeBackend(table);
  EXPECT_TRUE(info.ok()) << info.status().ToString();
  Subject subject = BackendSubject(*info, Level::kVisibility, "");
  if (abilities != nullptr) subject.abilities = *abilities;
  subject.mask_rows_too = true;
  const auto run = [&](const History& history, const Rules& rules) {
    subject.rules = rules;
    return RunHistory(history, subject);
  };
  return InferProfile(run, subject.abilities);
}

InferredProfile InferRules(const Rules& cache) {
  return InferProfile(
      [&](const History& history, const Rules& judge) {
        return RunLedgers(history, cache, judge);
      },
      Abilities());
}

// A cache whose masks have a multiple of eight rows, whatever its padding; rows
// after the batch see nothing.
class PadsItsMasks final : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;

  Result<KvView> Get() override {
    Result<KvView> view = cache_->Get();
    if (!view.ok() || view->mask.data == nullptr) return view;
    const TensorView& mask = view->mask;
    mask_ = HidingMask(mask.dtype, mask.shape[0], (mask.shape[1] + 7) / 8 * 8);
    for (std::int64_t row = 0; row < mask.shape[1]; ++row) {
      for (std::int64_t column = 0; column < mask.shape[0]; ++column) {
        if (MaskAllows(mask, column, row)) AllowInMask(mask_, column, row);
      }
    }
    view->mask = mask_.view();
    return view;
  }

 private:
  DenseTensor mask_;
};

TEST(Inference, LeavesThePaddingOfMaskRowsOpen) {
  Subject subject;
  subject.name = "padded";
  subject.level = Level::kVisibility;
  subject.mask_rows_too = true;
  Abilities& abilities = subject.abilities;
  abilities.kinds = KVTWIN_HAS_CAUSAL | KVTWIN_HAS_SWA;
  abilities.v_layouts = 1U << KVTWIN_V_PLAIN;
  abilities.mask_dtypes = 1U << KVTWIN_F32;
  abilities.can &=
      ~std::uint32_t{KVTWIN_CAN_RESERVE | KVTWIN_CAN_REFUSE_MISUSE};
  for (const Profile& profile : Profiles()) {
    subject.make_of = [&](const auto& setup) -> Result<std::unique_ptr<Cache>> {
      return std::unique_ptr<Cache>(std::make_unique<PadsItsMasks>(
          MakeLedgerCache(setup.spec, profile.rules)));
    };
    const auto run = [&](const History& history, const Rules& judge) {
      subject.rules = judge;
      return RunHistory(history, subject);
    };
    const InferredProfile found = InferProfile(run, abilities);
    EXPECT_THAT(found.unexplained, IsEmpty()) << profile.name;
    const auto near =
        std::ranges::find(found.nearest, profile.name, &NearProfile::name);
    ASSERT_NE(near, found.nearest.end())
        << profile.name << ": " << SummaryOf(found);
    EXPECT_THAT(near->exceptions, IsEmpty()) << SummaryOf(found);
    for (const FoundRule& found_rule : found.found) {
      if (AllRules()[found_rule.rule].name != "mask rows") continue;
      EXPECT_THAT(found_rule.values, ElementsAre(0, 1)) << profile.name;
    }
  }
}

TEST(Inference, RecognisesTheLedgerOfEachProfile) {
  for (const Profile& profile : Profiles()) {
    SCOPED_TRACE(profile.name);
    const InferredProfile found =
        InferTable(LedgerBackend(profile.name, /*anonymous=*/true));
    EXPECT_EQ(SummaryOf(found), "like " + std::string(profile.name));
    EXPECT_THAT(found.nearest[0].exceptions, IsEmpty());
    EXPECT_THAT(found.unexplained, IsEmpty());
    EXPECT_EQ(found.asked, std::ssize(RuleProbes()));
    for (const FoundRule& found_rule : found.found) {
      const RuleInfo& rule = AllRules()[found_rule.rule];
      if (!HasRule(profile.rules, rule)) continue;
      EXPECT_THAT(found_rule.values, ElementsAre(rule.get(profile.rules)))
          << rule.name;
      EXPECT_NE(found_rule.history, "") << rule.name;
    }
  }
}

TEST(Inference, DistinguishesEachPairByTheRulesThatDiffer) {
  std::map<std::string_view, InferredProfile> found;
  for (const Profile& profile : Profiles()) {
    found[profile.name] =
        InferTable(LedgerBackend(profile.name, /*anonymous=*/true));
  }
  int pairs = 0;
  for (const Profile& profile : Profiles()) {
    for (const Profile& other : Profiles()) {
      if (profile.name >= other.name) continue;
      ++pairs;
      std::set<std::string_view> told;
      for (std::size_t i = 0; i < AllRules().size(); ++i) {
        const FoundRule& a = found[profile.name].found[i];
        const FoundRule& b = found[other.name].found[i];
        if (a.known() && b.known() && a.values != b.values) {
          told.insert(AllRules()[i].name);
        }
      }
      EXPECT_EQ(told, Between(profile.rules, other.rules))
          << profile.name << " and " << other.name;
    }
  }
  EXPECT_EQ(pairs, 15);
}

TEST(Inference, NamesTheExceptions) {
  Rules rules = FindProfile("llama.cpp")->rules;
  rules.copy = Rules::Copy::kReplaces;
  EXPECT_EQ(SummaryOf(InferRules(rules)),
            "like llama.cpp except copy replaces (kvt1 | put 0*1 | put 1*1 | "
            "copy 0>1:1 | put 1*1)");
  // The inference finds any rules that the ledger follows.
  const std::vector<Rules> all = AllOfRules();
  for (std::size_t i = 0; i < all.size(); i += 17) {
    const InferredProfile found = InferRules(all[i]);
    EXPECT_THAT(Between(found.rules, all[i]), IsEmpty())
        << ::testing::PrintToString(ValuesOf(all[i]));
    const NearProfile& near = found.nearest[0];
    EXPECT_EQ(std::ranges::count_if(
                  near.exceptions,
                  [&](const RuleException& exception) {
                    return HasRule(near.rules, AllRules()[exception.rule]);
                  }),
              std::ssize(Between(near.rules, all[i])));
  }
}

// A cache with a list for each sequence often evicts only with batches of the
// sequence itself.
TEST(Inference, EvictionWithOwnBatchesAloneIsLazy) {
  const History back = *ParseHistory(
      "kvt1 kind=swa window=1 cap=3 legal=1 | put 0*3 | put 1*1 "
      "| ask 0@1");
  int yes = 0;
  int detected = 0;
  for (std::uint64_t choices = 0; choices < 20; ++choices) {
    const bool any_order = choices % 2 == 0;
    Subject subject = OtherSubject("ollama-0.12", choices, any_order,
                                   CacheFault::kEvictsItsOwn);
    const InferredProfile found = InferProfile(
        [&](const History& history, const Rules& judge) {
          subject.rules = judge;
          return RunHistory(history, subject);
        },
        subject.abilities);
    const std::string summary = SummaryOf(found);
    SCOPED_TRACE(summary);
    EXPECT_THAT(found.unexplained, IsEmpty());
    const bool is_lazy = found.rules.eviction == Rules::Eviction::kLazy;
    detected += is_lazy ? 1 : 0;
    // It is right by the rules of lazy eviction. By those of eager eviction it
    // is not, unless it never lets a sequence go back.
    subject.rules = *ParseRules("ollama-0.12 except eviction is lazy");
    for (std::uint64_t number = 0; number < 200; ++number) {
      History history = MakeHistory(5, number, std::nullopt, 40);
      subject.abilities.Fit(history.setup);
      const RunResult result = RunHistory(history, subject);
      ASSERT_FALSE(result.failure) << result.failure->text << "\n"
                                   << ToText(history);
    }
    subject.rules = {};
    const RunResult result = RunHistory(back, subject);
    if (!result.failure) continue;
    ++yes;
    EXPECT_EQ(result.failure->text,
              "CanResume(0, 1) is true, but tokens in the window are gone: a "
              "batch also evicts in sequences that are not in it (S7)");
    EXPECT_EQ(CitedRules(*result.failure, back), "S7, S28, S44");
    EXPECT_THAT(HintOn(*result.failure, "kvtwin profile"),
                HasSubstr("`kvtwin profile` works out"));
    EXPECT_TRUE(summary.starts_with("like ollama-0.12 ")) << summary;
    // A cache that lets a legal client go back by chance may show nothing.
    if (!any_order && !is_lazy) continue;
    EXPECT_THAT(summary, HasSubstr(" except eviction is lazy (kvt1 "));
  }
  EXPECT_GE(yes, 5);
  EXPECT_GE(detected, 15);
}

// Returns the rules of a profile, changed by its exceptions.
Rules Excepted(const NearProfile& near) {
  Rules rules = near.rules;
  for (const RuleException& exception : near.exceptions) {
    const RuleInfo& rule = AllRules()[exception.rule];
    EXPECT_EQ(rule.get(near.rules), exception.profile) << near.name;
    EXPECT_NE(exception.found, exception.profile)
        << near.name << ": " << rule.name;
    rule.set(rules, exception.found);
  }
  return rules;
}

// The command prints the rules that it found. If it prints several profiles,
// each has its own exceptions.
TEST(Inference, ItsSummaryIsAProfile) {
  const std::vector<Rules> all = AllOfRules();
  int several = 0;
  for (std::size_t i = 0; i < all.size(); i += 23) {
    const InferredProfile found = InferRules(all[i]);
    const std::string text = SummaryOf(found);
    SCOPED_TRACE(text);
    const Result<Rules> said = ParseRules(text);
    ASSERT_TRUE(said.ok()) << said.status().ToString();
    EXPECT_THAT(Between(*said, all[i]), IsEmpty());
    EXPECT_EQ(*said, *ParseRules("yours is " + text));
    for (const NearProfile& near : found.nearest) {
      EXPECT_THAT(Between(Excepted(near), all[i]), IsEmpty()) << near.name;
    }
    several += found.nearest.size() > 1 ? 1 : 0;
  }
  EXPECT_GT(several, 0);
}

TEST(Profiles, AreParsedWithExceptions) {
  Rules rules = FindProfile("llama.cpp")->rules;
  rules.copy = Rules::Copy::kReplaces;
  rules.middle = Rules::Middle::kShifts;
  EXPECT_EQ(*ParseRules("llama.cpp except copy replaces, middle removal "
                        "shifts (kvt1 dims=2,1,1 | put 0*2 | causal 0,1)"),
            rules);
  EXPECT_EQ(*ParseRules("like mlx or ollama-0.15"), FindProfile("mlx")->rules);
  // Without removal from the middle, no shift of shared tokens is seen.
  EXPECT_EQ(
      ParseRules("llama.cpp except middle removal is refused")->shared_shift,
      Rules::SharedShift::kRefused);
  const std::map<std::string, std::string> wrong = {
      {"", "''"},
      {"vllm", "'vllm' is not a known profile"},
      {"mlx except", "'mlx except'"},
      {"mlx or vllm", "'vllm'"},
      {"mlx except copy flies", "'copy flies' is not a rule"},
      {"mlx except copy adds,window", "'copy adds,window'"},
      {"mlx except eviction is lazy", "'eviction is lazy' is nothing that"},
  };
  for (const auto& [text, message] : wrong) {
    const Status status = ParseRules(text).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << text;
    EXPECT_NE(status.message().find(message), std::string::npos)
        << text << ": " << status.message();
  }
}

TEST(Inference, ARuleThatCannotBeTestedIsUnknown) {
  const kvtwin_backend_v1* table = LedgerBackend("llama.cpp", true);
  Abilities few = DescribeBackend(table)->abilities;
  few.can &= ~std::uint32_t{KVTWIN_CAN_COPY_PREFIX | KVTWIN_CAN_ANY_ORDER};
  few.kinds = KVTWIN_HAS_CAUSAL;
  const InferredProfile found = InferTable(table, &few);
  EXPECT_THAT(found.nearest[0].exceptions, IsEmpty());
  EXPECT_EQ(found.nearest[0].name, "llama.cpp");
  std::set<std::string_view> known;
  for (const FoundRule& found_rule : found.found) {
    if (found_rule.known()) known.insert(AllRules()[found_rule.rule].name);
  }
  EXPECT_THAT(known, ElementsAre("mask rows", "middle removal"));
}

// A cache that is wrong under any rules.
TEST(Inference, ListsHistoriesThatNoRulesExplain) {
  const InferredProfile found = InferProfile(
      [](const History& history, const Rules& judge) {
        RunResult result = RunLedgers(history, {}, judge);
        if (ToText(history).find("copy") != std::string::npos) {
          result.failure.emplace();
        }
        return result;
      },
      Abilities());
  EXPECT_EQ(found.unexplained.size(), 3U);
  EXPECT_TRUE(IsWrong(found));
  EXPECT_EQ(SummaryOf(found),
            fmt::format("like none: it is wrong under any rules on 3 of {} "
                        "histories",
                        found.asked));
  EXPECT_EQ(found.nearest[0].name, "ollama-0.12");
  EXPECT_THAT(found.nearest[0].exceptions, IsEmpty());
}

// Runs random histories, with shifts if the cache has them.
TEST(Backend, TheLedgerOfEachProfileIsRightByItsOwnRules) {
  for (const Profile& profile : Profiles()) {
    const Result<BackendInfo> info =
        DescribeBackend(LedgerBackend(profile.name));
    ASSERT_TRUE(info.ok());
    Subject subject = BackendSubject(*info, Level::kVisibility, "");
    subject.mask_rows_too = true;
    int ran = 0;
    for (std::uint64_t number = 0; number < 150; ++number) {
      History history = MakeHistory(5, number, std::nullopt, 40);
      info->abilities.Fit(history.setup);
      AddShifts(history, 3, 7);
      const RunResult result = RunHistory(history, subject);
      if (result.ran) ++ran;
      ASSERT_FALSE(result.failure)
          << profile.name << " " << result.failure->text << "\n"
          << ToText(history);
    }
    EXPECT_GT(ran, 100) << profile.name;
  }
}

TEST(Backend, NamesItsProfile) {
  const Result<BackendInfo> info = DescribeBackend(LedgerBackend("mlx"));
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->profile, "mlx");
  EXPECT_EQ(info->name, "ledger:mlx");
  EXPECT_EQ(RulesAt(*info, Level::kVisibility), FindProfile("mlx")->rules);
  EXPECT_EQ(RulesAt(*info, Level::kIdentity),
            Rules{.mask_rows = Rules::MaskRows::kBatch});
  EXPECT_EQ(LedgerBackend("vllm"), nullptr);

  kvtwin_backend_v1 table = *LedgerBackend("mlx");
  table.describe = [](kvtwin_description_v1* out) {
    out->profile = "vllm";
    return 0;
  };
  EXPECT_NE(DescribeBackend(&table).status().message().find("'vllm'"),
            std::string::npos);
}

}  // namespace
}  // namespace kvtwin::props
