// The ledger, the reference twin and the optimized twin give the same answers
// on every history (S50 and S51), whatever the kind of cache.
//
// `kvtwin fuzz` runs many more histories. Here they come from RapidCheck, which
// has its own way of shrinking.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "optimized/targets.h"
#include "props/history/misuse.h"
#include "props/search/fuzz.h"
#include "props/testing/arbitrary.h"

namespace kvtwin::props {
namespace {

constexpr int kOps = 25;

void Agrees(Kind kind) {
  const History history = *ArbitraryHistory(kind, kOps);
  const bool legal = history.setup.legal;
  RC_CLASSIFY(legal, "legal client");
  RC_CLASSIFY(history.setup.config.v_layout == VLayout::kPermuted,
              "permuted V");
  RC_CLASSIFY(history.setup.config.v_layout == VLayout::kTiled, "tiled V");
  RC_CLASSIFY(history.setup.spec.placement == Placement::kScatter, "scatter");
  AssertAgreement(history, TwinSubject("optimized"));
}

RC_GTEST_PROP(TwinsProps, CausalCachesAgree, ()) { Agrees(Kind::kCausal); }
RC_GTEST_PROP(TwinsProps, WindowsAgree, ()) { Agrees(Kind::kSwa); }
RC_GTEST_PROP(TwinsProps, WindowsWithMemoryAgree, ()) { Agrees(Kind::kSwaMem); }
RC_GTEST_PROP(TwinsProps, ChunksAgree, ()) { Agrees(Kind::kChunked); }
RC_GTEST_PROP(TwinsProps, EncodersAgree, ()) { Agrees(Kind::kEncoder); }
RC_GTEST_PROP(TwinsProps, WrappersAgree, ()) { Agrees(Kind::kWrapper); }
RC_GTEST_PROP(TwinsProps, RecurrentCachesAgree, ()) {
  Agrees(Kind::kRecurrent);
}
RC_GTEST_PROP(TwinsProps, HybridsAgree, ()) { Agrees(Kind::kHybrid); }

// Every kind of misuse, in any state, has the expected status with a message,
// the same in each twin, and changes nothing.
RC_GTEST_PROP(MisuseProps, MisuseChangesNothing, ()) {
  History history = *ArbitraryHistory(std::nullopt, 8);
  for (int which = 0; which < MisuseCount(); ++which) {
    Op op;
    op.kind = OpKind::kMisuse;
    op.misuse = which;
    history.ops.push_back(op);
  }
  AssertAgreement(history, TwinSubject("optimized"));
}

// The line of a history contains everything about it.
RC_GTEST_PROP(HistoryProps, TextReadsBackAsTheSameHistory, ()) {
  const History history = *ArbitraryHistory(std::nullopt, kOps);
  const std::string text = ToText(history);
  const Result<History> read = ParseHistory(text);
  RC_ASSERT(read.ok());
  RC_ASSERT(ToText(*read) == text);
  const Subject subject = TwinSubject("reference");
  RC_ASSERT(RunHistory(*read, subject).digest ==
            RunHistory(history, subject).digest);
}

// These caches are large enough for the optimized twin to use several threads,
// for mask rows, moves of a defrag and shifted rows.
TEST(Twins, LargeCachesAgree) {
  for (const std::string setup :
       {"", "dtype=bf16 vdtype=f32 ", "place=scatter permuted=1 dtype=f16 ",
        "dtype=f16 vdtype=bf16 permuted=1 "}) {
    const std::string text =
        "kvt1 cap=2500 batch=500 dims=128,4,128 layers=2 shift=rope " + setup +
        "| put 0*250 1*250 | put 1*250 0*250 | put 0*500 | put 1*500 "
        "| drop 0:100-300 | drop 1:0-50 | put 0*500 | put 1*500 | put 0*500";
    const Result<History> history = ParseHistory(text);
    ASSERT_TRUE(history.ok()) << history.status().ToString();
    const Subject subject = TwinSubject("optimized");
    const RunResult result = RunHistory(*history, subject);
    EXPECT_GT(result.operations, 30);
    ASSERT_FALSE(result.failure.has_value()) << result.failure->text;
  }
}

// These rows see some blocks of words whole, and parts of others.
TEST(Twins, MasksOfManyBlocksAgree) {
  for (const std::string& target : optimized::SupportedTargets()) {
    ASSERT_TRUE(optimized::SelectTarget(target));
    const char* mask =
        target == optimized::SupportedTargets().front() ? "f32" : "bits";
    std::string line =
        fmt::format("kvt1 seqs=1 cap=4096 batch=490 mask={}", mask);
    for (int i = 0; i < 8; ++i) line += " | put 0*490";
    const Result<History> history = ParseHistory(line);
    ASSERT_TRUE(history.ok()) << history.status().ToString();
    const RunResult result = RunHistory(*history, TwinSubject("optimized"));
    EXPECT_GT(result.operations, 24);
    ASSERT_FALSE(result.failure.has_value()) << result.failure->text;
  }
  optimized::SelectTarget(optimized::SupportedTargets().front());
}

// Each instruction set gives the same bytes, and each is actually selected.
TEST(Targets, EveryTargetGivesTheSameDigest) {
  const std::vector<std::string> targets = optimized::SupportedTargets();
  ASSERT_FALSE(targets.empty());
  FuzzOptions options;
  options.operations = 20000;
  options.seed = 5;
  const FuzzResult best = Fuzz(options, TwinSubject("optimized"));
  EXPECT_FALSE(best.failure.has_value());
  for (const std::string& target : targets) {
    ASSERT_TRUE(optimized::SelectTarget(target));
    EXPECT_EQ(optimized::ActiveTarget(), target);
    const FuzzResult result = Fuzz(options, TwinSubject("optimized"));
    EXPECT_FALSE(result.failure.has_value()) << target;
    EXPECT_EQ(result.digest, best.digest) << target;
  }
  EXPECT_TRUE(optimized::SelectTarget(targets.front()));
  EXPECT_FALSE(optimized::SelectTarget("MMX"));
  EXPECT_EQ(optimized::ActiveTarget(), targets.front());
}

}  // namespace
}  // namespace kvtwin::props
