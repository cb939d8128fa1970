// Correct caches of an independent implementation: nothing is found in them,
// and every planted fault is found.

#include "props/testing/other_caches.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/dialects/profiles.h"
#include "core/index.h"
#include "props/compare/visibility.h"
#include "props/history/generate.h"
#include "props/history/rarities.h"
#include "props/search/fuzz.h"
#include "props/shrink/shrink.h"
#include "reference/dialects.h"

namespace kvtwin::props {
namespace {

// Draws a history for the subject, with shifts if its rules allow them.
History HistoryFor(const Subject& subject, std::uint64_t seed,
                   std::uint64_t number) {
  History history = MakeHistory(seed, number, std::nullopt, 60);
  subject.abilities.Fit(history.setup);
  const bool moves = subject.rules.middle == Rules::Middle::kLeavesGap;
  if (moves) AddShifts(history, 5, 11);
  if (history.setup.legal && number % 3 == 0 && subject.Overfills()) {
    AddOverfull(SeededPick(seed, number), history);
  }
  return history;
}

struct Found {
  std::int64_t operations = 0;
  std::optional<History> history;
};

// Searches until a difference is found; the choices change every few histories.
Found Search(std::string_view profile, std::uint64_t seed, bool any_order,
             std::int64_t most, CacheFault fault = CacheFault::kNone) {
  Found found;
  for (std::uint64_t number = 0; found.operations < most; ++number) {
    const Subject subject =
        OtherSubject(profile, seed * 1000 + number / 8, any_order, fault);
    const History history = HistoryFor(subject, seed, number);
    const RunResult result = RunHistory(history, subject);
    found.operations += std::max<std::int64_t>(1, result.operations);
    if (!result.failure) continue;
    found.history = Shrink(history, subject);
    break;
  }
  return found;
}

std::string Explained(const History& history, std::string_view profile) {
  return fmt::format("{}: {}", profile, ToText(history));
}

class EachProfile : public ::testing::TestWithParam<std::string_view> {};

// KVTWIN_OTHER_OPS=1000000 KVTWIN_OTHER_SEED=7 searches longer, with that seed.
std::int64_t FromEnvironment(const char* name, std::int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

TEST_P(EachProfile, NothingIsFoundInACorrectCache) {
  const std::int64_t most = FromEnvironment("KVTWIN_OTHER_OPS", 30'000);
  const auto seed =
      static_cast<std::uint64_t>(FromEnvironment("KVTWIN_OTHER_SEED", 1));
  for (const bool any_order : {false, true}) {
    const Found found = Search(GetParam(), seed, any_order, most / 2);
    EXPECT_FALSE(found.history) << Explained(*found.history, GetParam());
    EXPECT_GE(found.operations, found.history ? 0 : most / 2);
  }
}

// Whether the fault can show in a cache with these rules.
bool Applies(CacheFault fault, const Rules& rules) {
  switch (fault) {
    case CacheFault::kForgetsTheTurn:
      return rules.middle != Rules::Middle::kRefused;
    case CacheFault::kTakesAnyBatch:
      return rules.positions != Rules::Positions::kAny;
    default:
      return true;
  }
}

TEST_P(EachProfile, EveryFaultIsFound) {
  for (const CacheFault fault : kFaults) {
    if (!Applies(fault, FindProfile(GetParam())->rules)) continue;
    const bool found =
        Search(GetParam(), 3, /*any_order=*/true, 200'000, fault).history ||
        Search(GetParam(), 3, /*any_order=*/false, 200'000, fault).history;
    EXPECT_TRUE(found) << GetParam() << ", fault " << AsInt(fault);
  }
}

INSTANTIATE_TEST_SUITE_P(OtherCaches, EachProfile,
                         ::testing::Values("ollama-0.12", "ollama-0.15",
                                           "llama.cpp", "transformers", "mlx",
                                           "executorch"));

// Correct caches once failed these: whether a sequence has an end is unknown.
TEST(OtherCaches, TokensThatMayHaveLeftDecideNothing) {
  for (const std::string line :
       {"kind=swa window=2 shift=identity cells=2 | put 0*2 | put 0*1 | "
        "drop 0:1- | put 0*1@+1",
        "kind=swa window=1 shift=identity cap=1 | put 0*1 | put 1*1 | "
        "put 0*1@+1",
        "kind=swa window=1 shift=identity cap=4 legal=1 | put 0*1 | put 0*1 | "
        "put 0*1 | copy 0>1:3 | put 1*1 0*2",
        // Either of two tokens at one position may have left.
        "kind=swa window=2 cap=6 batch=4 legal=1 | put 0*3 | put 1*1 | "
        "copy 1>0:1 | drop 0:1- | put 0*1"}) {
    const Result<History> history = ParseHistory("kvt1 " + line);
    ASSERT_TRUE(history.ok()) << line;
    for (std::uint64_t choices = 0; choices < 60; ++choices) {
      const Subject subject = OtherSubject("llama.cpp", choices, true);
      const RunResult result = RunHistory(*history, subject);
      EXPECT_TRUE(result.ran);
      EXPECT_FALSE(result.failure) << line << ": " << result.failure->text;
    }
  }
}

// One cache of a wrapper refuses a batch that would set a sequence of the other
// cache back.
TEST(OtherCaches, ARefusedBatchChangesNoCacheOfAWrapper) {
  const Result<History> history = ParseHistory(
      "kvt1 kind=wrapper caches=causal/swa:w1 cells=1 batch=6 | put 0*5 | "
      "put 1*1 0*2 | drop 0:1- | put 1*1@-1 0*1 | put 1*1");
  ASSERT_TRUE(history.ok());
  for (std::uint64_t choices = 0; choices < 100; ++choices) {
    const Subject subject = OtherSubject("executorch", choices, true);
    const RunResult result = RunHistory(*history, subject);
    EXPECT_TRUE(result.ran);
    EXPECT_FALSE(result.failure) << choices << ": " << result.failure->text;
  }
}

// Runs a batch of sequence 0; returns the positions that row 0 may then miss.
std::set<std::int64_t> MayMiss(reference::CacheLedger& ledger,
                               std::vector<std::int32_t> positions) {
  const std::vector<int> sequences(positions.size(), 0);
  EXPECT_TRUE(ledger.StartForward({positions, sequences}, false).ok());
  std::set<std::int64_t> missed;
  for (const auto& token : ledger.tokens()) {
    const bool sees = ledger.MaySee(0, token);
    if (sees && ledger.MayMiss(0, token)) missed.insert(token.position);
  }
  return missed;
}

TEST(OtherCaches, AYesOfCanResumeIsAPromise) {
  for (const bool asked : {false, true}) {
    CacheSpec spec;
    spec.kind = Kind::kSwa;
    spec.window = 3;  // Two positions before the query.
    reference::CacheLedger ledger(spec, FindProfile("llama.cpp")->rules);
    ASSERT_TRUE(ledger.Init({}, {DType::kF32, 1, 16, 8}).ok());
    EXPECT_TRUE(MayMiss(ledger, {0, 1, 2, 3, 4, 5}).empty());
    EXPECT_TRUE(MayMiss(ledger, {6}).empty());
    EXPECT_TRUE(ledger.Remove(0, 4, kOpenEnd).ok());
    EXPECT_TRUE(ledger.CanResume(0, 4));
    EXPECT_FALSE(ledger.CanResume(0, 4, /*surely=*/true));
    if (asked) ledger.Resumes(0, 4);
    EXPECT_EQ(ledger.CanResume(0, 4, /*surely=*/true), asked);
    EXPECT_EQ(ledger.EndIsOpen(0), !asked);
    EXPECT_EQ(MayMiss(ledger, {4}), asked ? std::set<std::int64_t>()
                                          : std::set<std::int64_t>({2, 3}));
  }
}

// A cache that evicts at once is also right by lazy eviction
// (docs/profiles.md): a hybrid that goes back then has a shorter length, where
// batches continue.
TEST(OtherCaches, AnEagerHybridIsRightByTheLazyRule) {
  Subject subject = TwinSubject("optimized", Level::kVisibility);
  subject.rules = *ParseRules("ollama-0.15 except eviction is lazy");
  std::vector<History> histories = {
      *ParseHistory("kvt1 kind=hybrid caches=recurrent/swa:w1 cap=3 | put 0*1 "
                    "| put 0*2 | put 1*1 | copy 0>1:1 | put 1*1")};
  for (std::uint64_t number = 0; number < 400; ++number) {
    histories.push_back(MakeHistory(/*seed=*/1, number, Kind::kHybrid, 40));
    subject.abilities.Fit(histories.back().setup);
  }
  int ran = 0;
  for (const History& history : histories) {
    const RunResult result = RunHistory(history, subject);
    ran += result.ran ? 1 : 0;
    EXPECT_FALSE(result.failure) << result.failure->text << "\n"
                                 << ToText(Shrink(history, subject));
  }
  EXPECT_GT(ran, 390);
}

// Checks a view in which one row sees columns with these rows.
std::string WrongIn(const reference::Ledger& ledger, int layer,
                    const std::vector<float>& rows) {
  const auto columns = std::ssize(rows);
  const TensorView row =
      DenseView(rows.data(), DType::kF32, {1, 1, columns, 1});
  const DenseTensor mask = FilledTensor(DType::kF32, {columns, 1, 1, 1}, 0);
  const auto wrong =
      FindWrongRow(ledger, layer, {row, row, mask.view(), 0}, VLayout::kPlain);
  return wrong ? wrong->text : "";
}

// Positions 2 and 3 may be gone; 4 must be there, and has the row of 2. Layer 1
// has no rows.
TEST(OtherCaches, EqualRowsBelongToRequiredTokens) {
  CacheSpec spec;
  spec.kind = Kind::kSwa;
  spec.window = 3;
  reference::Ledger ledger(spec, FindProfile("llama.cpp")->rules);
  ASSERT_TRUE(ledger.Init({}, {DType::kF32, 1, 16, 8}).ok());
  const auto pass = [&](const std::vector<std::int32_t>& positions,
                        const std::vector<float>& numbers) {
    const std::vector<int> sequences(positions.size(), 0);
    EXPECT_TRUE(ledger.StartForward({positions, sequences}, false).ok());
    const TensorView rows =
        DenseView(numbers.data(), DType::kF32, {1, 1, std::ssize(numbers), 1});
    ledger.active().Put(0, rows, rows);
  };
  pass({0, 1, 2, 3, 4, 5}, {10, 11, 7, 8, 14, 15});
  pass({6}, {16});
  ASSERT_TRUE(ledger.Remove(0, 4, kOpenEnd).ok());
  pass({4}, {7});
  for (const std::vector<float>& right :
       {std::vector<float>{7}, {7, 7}, {8, 7}, {7, 8}, {8, 7, 7}}) {
    EXPECT_EQ(WrongIn(ledger, 0, right), "");
  }
  for (const std::vector<float>& wrong :
       {std::vector<float>{8}, {8, 8, 7}, {7, 7, 7}, {9, 7}}) {
    EXPECT_NE(WrongIn(ledger, 0, wrong), "");
  }
  // In layer 1, any row may belong to one of them.
  for (const std::vector<float>& right :
       {std::vector<float>{1}, {1, 2}, {1, 2, 3}}) {
    EXPECT_EQ(WrongIn(ledger, 1, right), "");
  }
  EXPECT_NE(WrongIn(ledger, 1, {1, 2, 3, 4}), "");
}

// The shrunk failing histories of legal clients, from many seeds, with counts.
std::map<std::string, int> LinesOf(std::string_view profile, CacheFault fault,
                                   int seeds) {
  std::map<std::string, int> lines;
  const Subject subject = OtherSubject(profile, 7, /*any_order=*/false, fault);
  for (int seed = 1; seed <= seeds; ++seed) {
    FuzzOptions options;
    options.seed = static_cast<std::uint64_t>(seed);
    options.operations = 20'000;
    const FuzzResult result = Fuzz(options, subject);
    if (result.failure) ++lines[result.failure->history];
  }
  return lines;
}

// KVTWIN_OTHER_LINES=20 prints the histories of every fault, from 20 seeds.
TEST(LegalClients, ABugHasOneLineForEverySeed) {
  const auto all = AsInt(FromEnvironment("KVTWIN_OTHER_LINES", 0));
  for (const Profile& profile : Profiles()) {
    for (const CacheFault fault : kFaults) {
      const bool quick = profile.name == "llama.cpp" &&
                         (fault == CacheFault::kKeepsRemoved ||
                          fault == CacheFault::kForgetsTheTurn ||
                          fault == CacheFault::kSeesOthers);
      if (all == 0 && !quick) continue;
      const auto lines = LinesOf(profile.name, fault, all == 0 ? 8 : all);
      EXPECT_LE(lines.size(), 1U) << profile.name;
      EXPECT_FALSE(quick && lines.empty()) << profile.name;
      for (const auto& [line, count] : lines) {
        if (all > 0 || lines.size() > 1) {
          fmt::print("{} fault {}: {:3} {}\n", profile.name, AsInt(fault),
                     count, line);
        }
      }
    }
  }
}

TEST(LegalClients, AShrunkHistoryKeepsItsKind) {
  const Subject subject =
      OtherSubject("llama.cpp", 7, /*any_order=*/false, CacheFault::kMixesRows);
  for (const Kind kind :
       {Kind::kCausal, Kind::kChunked, Kind::kSwa, Kind::kWrapper}) {
    FuzzOptions options;
    options.kind = kind;
    options.operations = 20'000;
    const FuzzResult result = Fuzz(options, subject);
    ASSERT_TRUE(result.failure);
    EXPECT_EQ(result.shrunk.setup.spec.kind, kind) << result.failure->history;
  }
}

}  // namespace
}  // namespace kvtwin::props
