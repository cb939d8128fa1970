// Profiles: probes tell rules apart, and the ledger of each profile is
// recognised.

#include "props/backend/profile.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

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

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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
    // A cache that keeps tokens refuses a batch of the probe with `cap`.
    const int most = History().setup.init.capacity;
    ASSERT_TRUE(history->setup.init.capacity < most || IsPlain(*history));
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
    // It is for lists without can_resume, or for caches that copy rows: ledgers
    // need shorter histories.
    if (history->setup.legal) continue;
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

// The probes show the rules alone.
constexpr InferenceLimits kProbesOnly{.operations = 0};

// Infers the profile of a subject, whose rules become those that are tried
// last.
InferredProfile InferOf(Subject& subject,
                        const InferenceLimits& limits = kProbesOnly) {
  return InferProfile(
      [&](const History& history, const Rules& judge) {
        subject.rules = judge;
        return RunHistory(history, subject);
      },
      subject.abilities, limits);
}

InferredProfile InferTable(const kvtwin_backend_v1* table,
                           const Abilities* abilities = nullptr) {
  const Result<BackendInfo> info = DescribeBackend(table);
  EXPECT_TRUE(info.ok()) << info.status().ToString();
  Subject subject = BackendSubject(*info, Level::kVisibility, "");
  if (abilities != nullptr) subject.abilities = *abilities;
  subject.mask_rows_too = true;
  return InferOf(subject);
}

InferredProfile InferRules(const Rules& cache) {
  return InferProfile(
      [&](const History& history, const Rules& judge) {
        return RunLedgers(history, cache, judge);
      },
      Abilities(), kProbesOnly);
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
    if (mask.shape[0] == 0) return view;
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
  abilities.can &= ~std::uint32_t{KVTWIN_CAN_RESERVE |
                                  KVTWIN_CAN_REFUSE_MISUSE | KVTWIN_CAN_DRAFT};
  for (const Profile& profile : Profiles()) {
    subject.make_of = [&](const auto& setup) -> Result<std::unique_ptr<Cache>> {
      return std::unique_ptr<Cache>(std::make_unique<PadsItsMasks>(
          MakeLedgerCache(setup.spec, profile.rules)));
    };
    const auto run = [&](const History& history, const Rules& judge) {
      subject.rules = judge;
      return RunHistory(history, subject);
    };
    const InferredProfile found = InferProfile(run, abilities, kProbesOnly);
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
    const InferredProfile found = InferOf(subject);
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
              "CanResume(0, 1) is true, but the sequence's tokens begin at "
              "position 1, later than the window (S28): a batch also evicts "
              "in sequences that are not in it (S7)");
    EXPECT_EQ(CitedRules(*result.failure, back), "S7, S28, S44");
    EXPECT_THAT(HintOn(*result.failure, "kvtwin profile", true),
                HasSubstr("`kvtwin profile` works out"));
    EXPECT_NE(HintOn(MakeFailure("subject: room", ""), "profile", true), "");
    const auto hint = [](const std::string& line, bool may_resume) {
      Failure finding = MakeFailure("subject: rows", "");
      finding.history = "kvt1 kind=swa window=1 " + line;
      return HintOn(finding, "profile", may_resume);
    };
    const std::string went_back = "| put 0*3 | drop 0:1- | put 0*1";
    const auto slots = HasSubstr("keep window + 1 + max_batch tokens");
    EXPECT_THAT(hint(went_back, false), slots);
    EXPECT_THAT(hint(went_back, true), Not(slots));
    EXPECT_THAT(hint("| put 0*3", false), Not(slots));
    EXPECT_THAT(hint("seqs=1 " + went_back, false), Not(slots));
    EXPECT_THAT(hint("memory=4 " + went_back, false), Not(slots));
    EXPECT_EQ(HintOn(MakeFailure("backend: crash", ""), "profile", true), "");
    EXPECT_TRUE(summary.starts_with("like ollama-0.12 ")) << summary;
    // A cache that lets a legal client go back by chance may show nothing.
    if (!any_order && !is_lazy) continue;
    EXPECT_THAT(summary, HasSubstr(" except eviction is lazy (kvt1 "));
  }
  EXPECT_GE(yes, 5);
  EXPECT_GE(detected, 15);
}

// Without can_resume, a legal client never goes back; it copies the tokens that
// eager eviction would have removed.
TEST(Inference, LazyEvictionIsDetectedWithoutCanResume) {
  for (const CacheFault fault :
       {CacheFault::kNone, CacheFault::kEvictsItsOwn}) {
    int lazy = 0;
    for (std::uint64_t choices = 0; choices < 20; ++choices) {
      Subject subject =
          OtherSubject("ollama-0.12", choices, /*any_order=*/false, fault);
      subject.abilities.can_resume = false;
      const InferredProfile found = InferOf(subject);
      EXPECT_THAT(found.unexplained, IsEmpty());
      lazy += found.rules.eviction == Rules::Eviction::kLazy ? 1 : 0;
    }
    EXPECT_EQ(lazy, fault == CacheFault::kNone ? 0 : 20);
  }
  Rules rules;
  rules.eviction = Rules::Eviction::kLazy;
  Abilities few;
  few.can_resume = false;
  few.can &= ~std::uint32_t{KVTWIN_CAN_ANY_ORDER};
  const InferredProfile found = InferProfile(
      [&](const History& history, const Rules& judge) {
        return RunLedgers(history, rules, judge, few);
      },
      few);
  EXPECT_EQ(SummaryOf(found),
            "like ollama-0.12 except eviction is lazy (kvt1 kind=swa window=2 "
            "legal=1 | put 0*4 | put 0*1 | drop 0:1-5)");
}

// A table by position hides tokens in its mask: a sequence that begins again at
// 0 replaces them. They show only where a batch has no room beside them.
TEST(Inference, HiddenTokensThatTakeRoomAreLazilyEvicted) {
  const int most = History().setup.init.capacity;
  Rules rules = *ParseRules("ollama-0.15 except eviction is lazy");
  const InferredProfile found = InferProfile(
      [&](const History& history, const Rules& judge) {
        const bool full = history.setup.init.capacity < most;
        rules.eviction = full ? Rules::Eviction::kLazy : judge.eviction;
        return RunLedgers(history, rules, judge);
      },
      Abilities());
  EXPECT_EQ(found.rules.eviction, Rules::Eviction::kLazy) << SummaryOf(found);
}

// A refusal by an exception ends a history, but only by the rules of clients
// that make the call.
TEST(Inference, AnExceptionMayRefuseABatch) {
  const Rules rules =
      *ParseRules("ollama-0.15 except positions continue, eviction is lazy");
  Abilities few;
  few.can_resume = false;
  few.can &= ~std::uint32_t{KVTWIN_CAN_ANY_ORDER};
  int raised = 0;
  const InferredProfile found = InferProfile(
      [&](const History& history, const Rules& judge) {
        RunResult result = RunLedgers(history, rules, judge, few);
        std::optional<Failure>& failure = result.failure;
        if (failure &&
            failure->text.find("invalid_argument") != failure->text.npos) {
          ++raised;
          const std::size_t step = failure->step;
          failure = MakeFailure("backend: error", "exception: ValueError");
          failure->function = "start_forward";
          failure->step = step;
        }
        return result;
      },
      few);
  EXPECT_GT(raised, 0);
  EXPECT_THAT(found.unexplained, IsEmpty());
  EXPECT_EQ(found.rules.eviction, Rules::Eviction::kLazy);
  EXPECT_THAT(SummaryOf(found), HasSubstr("like ollama-0.15"));
}

// A cache that copies rows shares nothing: it shifts its own rows, or answers
// that it has no shift function.
TEST(Inference, ACacheThatCopiesMovesNoSharedToken) {
  for (const std::uint32_t shifts :
       {1U << KVTWIN_SHIFT_NONE,
        1U << KVTWIN_SHIFT_NONE | 1U << KVTWIN_SHIFT_IDENTITY}) {
    for (std::uint64_t choices = 0; choices < 8; ++choices) {
      Subject subject =
          OtherSubject("ollama-0.12", choices, /*any_order=*/false);
      subject.abilities.shifts = shifts;
      subject.mask_rows_too = true;
      const InferredProfile found = InferOf(subject);
      EXPECT_THAT(found.unexplained, IsEmpty());
      EXPECT_EQ(found.rules.shared_shift, Rules::SharedShift::kRefused)
          << SummaryOf(found);
    }
  }
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
      {"like none: it is wrong under any rules on 7 of 9 histories",
       "names no profile"},
      {"like none: each history failed", "names no profile"},
      {"nonesuch", "'nonesuch' is not a known profile"},
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
  EXPECT_EQ(found.unexplained.size(), 7U);
  EXPECT_TRUE(IsWrong(found));
  EXPECT_EQ(SummaryOf(found),
            fmt::format("like none: it is wrong under any rules on 7 of {} "
                        "histories",
                        found.asked));
  EXPECT_EQ(found.nearest[0].name, "ollama-0.12");
  EXPECT_THAT(found.nearest[0].exceptions, IsEmpty());
}

// By some rules it is wrong, and by others it raises an exception: both are
// told.
TEST(Inference, KeepsTheTextOfAnException) {
  const InferredProfile found = InferProfile(
      [](const History& history, const Rules& judge) {
        RunResult result = RunLedgers(history, {}, judge);
        if (ToText(history).find("copy") == std::string::npos) return result;
        if (judge.copy == Rules::Copy::kReplaces) {
          result.failure = MakeFailure("subject: rows", "row 0 misses");
        } else {
          result.failure = MakeFailure("backend: error", "exception: full");
          result.failure->function = "start_forward";
          result.failure->step = 1;
        }
        return result;
      },
      Abilities());
  ASSERT_EQ(found.unexplained.size(), 7U);
  EXPECT_TRUE(IsWrong(found));
  for (const auto& wrong : found.unexplained) {
    EXPECT_EQ(wrong.ended, "backend: error: exception: full");
  }
}

// The batches of the probes fit into the ring, those of random histories are
// longer.
TEST(Inference, RandomHistoriesFindWhatTheProbesMiss) {
  int missed = 0;
  for (std::uint64_t choices = 0; choices < 8; ++choices) {
    const bool any_order = choices % 2 == 0;
    Subject subject =
        OtherSubject("executorch", choices, any_order, CacheFault::kShortRing);
    const InferredProfile probed = InferOf(subject, {.operations = 0});
    EXPECT_THAT(probed.unexplained, IsEmpty());
    missed += SummaryOf(probed) == "like executorch" ? 1 : 0;
    const InferredProfile found = InferOf(subject, {});
    ASSERT_EQ(found.unexplained.size(), 1U) << SummaryOf(found);
    EXPECT_TRUE(IsWrong(found));
    EXPECT_THAT(SummaryOf(found),
                HasSubstr("like none: it is wrong under any rules on 1 of "));
    const History history = *ParseHistory(found.unexplained[0].history);
    EXPECT_TRUE(std::ranges::any_of(history.ops, [](const Op& op) {
      return op.kind == OpKind::kPut && op.segments[0].count > 4;
    })) << found.unexplained[0].history;
    subject = OtherSubject("executorch", choices, any_order);
    EXPECT_THAT(InferOf(subject, {}).unexplained, IsEmpty());
  }
  EXPECT_GT(missed, 0);
}

// Random histories find nothing in right caches, whatever these choose where
// several answers are right.
TEST(Inference, NoRightCacheIsWrong) {
  for (const Profile& profile : Profiles()) {
    for (std::uint64_t choices = 0; choices < 6; ++choices) {
      Subject subject =
          OtherSubject(profile.name, choices, /*any_order=*/choices % 2 == 0);
      const InferredProfile found = InferOf(subject, {.operations = 5'000});
      EXPECT_THAT(found.unexplained, IsEmpty())
          << profile.name << ", choices " << choices;
      EXPECT_GE(found.operations, 5'000);
      for (const FoundRule& rule : found.found) {
        const RuleInfo& info = AllRules()[rule.rule];
        if (!HasRule(profile.rules, info) || info.name == "eviction") continue;
        EXPECT_THAT(rule.values, Contains(info.get(profile.rules)))
            << profile.name << ", choices " << choices << ": " << info.name;
      }
    }
  }
}

// A history that fails by the chosen rules is one more probe: this cache
// follows no rules on the probes of the table, and those of llama.cpp on all
// others.
TEST(Inference, RandomHistoriesShowRulesThatTheProbesMiss) {
  std::set<std::string_view> probes;
  for (const RuleProbe& probe : RuleProbes()) probes.insert(probe.history);
  const Rules& rules = FindProfile("llama.cpp")->rules;
  const InferredProfile found = InferProfile(
      [&](const History& history, const Rules& judge) {
        const bool probe = probes.contains(ToText(history));
        return RunLedgers(history, probe ? judge : rules, judge);
      },
      Abilities());
  EXPECT_THAT(found.unexplained, IsEmpty());
  EXPECT_GT(found.asked, std::ssize(RuleProbes()));
  EXPECT_THAT(SummaryOf(found), HasSubstr("llama.cpp"));
  EXPECT_THAT(Between(found.rules, rules), IsEmpty());
  // Random histories do not judge the rows of masks.
  std::set<std::string_view> unknown;
  for (const FoundRule& rule : found.found) {
    if (!rule.known()) unknown.insert(AllRules()[rule.rule].name);
  }
  EXPECT_THAT(unknown, ElementsAre("mask rows"));
}

// No rules explain a failure that comes once, whichever rules are left.
TEST(Inference, AnswersThatVaryFollowNoRules) {
  int runs = 0;
  const InferredProfile found = InferProfile(
      [&](const History& history, const Rules& judge) {
        RunResult result = RunLedgers(history, {}, judge);
        if (++runs == 20'000) result.failure = MakeFailure("subject: rows", "");
        return result;
      },
      Abilities(), {.operations = 200'000});
  ASSERT_EQ(found.unexplained.size(), 1U);
  EXPECT_TRUE(IsWrong(found));
  EXPECT_THAT(found.unexplained[0].ended, HasSubstr("run twice"));
}

// A ledger that says yes holds the tokens of the window, and so do its own
// rules: no profile has both lazy eviction and first tokens that stay.
TEST(Backend, TheLedgerIsRightByItsOwnRulesAfterAYes) {
  const Rules rules =
      *ParseRules("ollama-0.12 except eviction is lazy, first tokens stay");
  const RunResult result = RunLedgers(
      *ParseHistory("kvt1 kind=swa window=1 cells=3 | put 0*2 | put 0*1 | "
                    "ask 0@2 | get"),
      rules, rules);
  EXPECT_TRUE(result.ran);
  EXPECT_FALSE(result.failure) << result.failure->text;
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

  BackendInfo told = *info;
  UseProfile("c is like mlx except first tokens leave (kvt1 | put 0*1) or mlx",
             told);
  EXPECT_EQ(told.profile, "mlx except first tokens leave");
  EXPECT_EQ(told.rules, *ParseRules(told.profile));

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
