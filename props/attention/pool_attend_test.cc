// Pools that compute attention: right pools of all rules are accepted, and each
// fault is found, at each level of the pool.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "props/backend/pool_backend.h"
#include "props/paged/paged_runner.h"
#include "props/search/explain.h"
#include "props/search/fuzz.h"
#include "props/testing/other_pool.h"
#include "props/testing/pools.h"

namespace kvtwin::props {
namespace {

using ::testing::HasSubstr;
using OutputFault = OtherAttentionFault;

constexpr int kAttendHistories = 50;

PoolBackend DescribedPool(const kvtwin_pool_backend_v1& table) {
  const auto backend = DescribePoolBackend(&table);
  EXPECT_TRUE(backend.ok()) << backend.status().message();
  return *backend;
}

// A history whose rows are f32, as OtherPool stores them.
PagedHistory F32History(int number) {
  PagedHistory history = MakePagedHistory(5, AsSize(number));
  history.spec.dtype = DType::kF32;
  history.spec.v_dtype.reset();
  history.spec.k_head_dim = 1 + history.spec.k_head_dim % 6;
  history.spec.v_head_dim = 1 + history.spec.v_head_dim % 9;
  DrawWeighing(SeededPick(6, AsSize(number)), {}, history);
  return history;
}

// Returns the first failure of a pool with this fault. Adds to `counts`.
std::optional<Failure> FindFault(const PoolRules& rules, OutputFault fault,
                                 Level level,
                                 PagedCoverageCounts* counts = nullptr,
                                 bool weighs = true) {
  OtherPool::rules = rules;
  OtherPool::weighs = weighs;
  OtherPool::fault = OtherPoolFault::kNone;
  OtherPool::attention = fault;
  kvtwin_pool_backend_v1 table = OtherPoolTable();
  const Subject subject = BackendSubject(DescribedPool(table), level);
  std::optional<Failure> found;
  for (int i = 0; i < kAttendHistories && !found; ++i) {
    PagedHistory history = F32History(i);
    found = RunHistory(history, subject, {.counts = counts}).failure;
    if (!found) continue;
    history.ops.resize(std::min(history.ops.size(), found->step + 1));
    found = Explain(history, *found, subject);
  }
  OtherPool::attention = OutputFault::kNone;
  OtherPool::rules = {};
  OtherPool::weighs = false;
  return found;
}

const PoolRules kOurPoolRules = {};
const PoolRules kSwapsBlocks = {.deduplicates = true};
const PoolRules kComputesAgain = {.recomputes_last = true};
PoolRules WindowOf(int positions) { return {.window = positions}; }

TEST(PoolAttend, RightPoolsAreAccepted) {
  PoolRules all = WindowOf(3);
  all.deduplicates = all.recomputes_last = true;
  for (const PoolRules& rules : {kOurPoolRules, kSwapsBlocks, kComputesAgain,
                                 WindowOf(0), WindowOf(1), WindowOf(5), all}) {
    for (const Level level : {Level::kVisibility, Level::kAttention}) {
      PagedCoverageCounts counts;
      EXPECT_EQ(TextOf(FindFault(rules, OutputFault::kNone, level, &counts)),
                "");
      EXPECT_GT(counts.outputs, 1000);
    }
  }
}

struct OutputCase {
  OutputFault fault;
  PoolRules rules;
  const char* text;  // A part of the report.
};

class PoolAttendFaults : public ::testing::TestWithParam<OutputCase> {};

TEST_P(PoolAttendFaults, AreFound) {
  for (const Level level : {Level::kVisibility, Level::kAttention}) {
    const auto failure = FindFault(GetParam().rules, GetParam().fault, level);
    ASSERT_TRUE(failure) << LevelName(level);
    EXPECT_THAT(failure->text, HasSubstr(GetParam().text));
    EXPECT_THAT(failure->rules, HasSubstr("P19"));
    ASSERT_FALSE(failure->trace.empty());
    EXPECT_THAT(failure->trace.back().call, HasSubstr("attend"));
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, PoolAttendFaults,
    ::testing::Values(
        OutputCase{OutputFault::kSeesLater, kOurPoolRules, "the output of row"},
        OutputCase{OutputFault::kMissesAppended, kOurPoolRules, "were missing"},
        OutputCase{OutputFault::kMissesFirst, kOurPoolRules,
                   "position 0 were missing"},
        OutputCase{OutputFault::kMissesFirst, WindowOf(2), "the output of row"},
        OutputCase{OutputFault::kSeesBeforeFirst, WindowOf(1),
                   "the window were 2"},
        OutputCase{OutputFault::kNoWindow, WindowOf(2), " or more"},
        OutputCase{OutputFault::kSeesStale, kOurPoolRules, "the output of row"},
        OutputCase{OutputFault::kSwapsSequences, kOurPoolRules,
                   "the query were that of row"},
        OutputCase{OutputFault::kBaseTwo, kOurPoolRules,
                   "the weights were powers of 2"},
        OutputCase{OutputFault::kPlusOne, kOurPoolRules,
                   "1 were added to the sum of the weights"},
        OutputCase{OutputFault::kHeadsBelow, kOurPoolRules,
                   "the output of row"},
        OutputCase{OutputFault::kNarrowV, kOurPoolRules, "the output of row"},
        OutputCase{OutputFault::kMissesLast, kOurPoolRules, "as if positions "},
        OutputCase{OutputFault::kLastZeros, kOurPoolRules, "had rows of zeros"},
        OutputCase{OutputFault::kHeadsReversed, kOurPoolRules,
                   "head 0 had the output of head"},
        OutputCase{OutputFault::kNoSoftCap, kOurPoolRules,
                   "the soft cap were absent"},
        OutputCase{OutputFault::kCapsUnscaled, kOurPoolRules,
                   "the output of row"},
        OutputCase{OutputFault::kNoSinks, kOurPoolRules,
                   "the sinks were absent"},
        OutputCase{OutputFault::kFirstSink, kOurPoolRules,
                   "head 1 had the sink of head "},
        OutputCase{OutputFault::kFromLength, kOurPoolRules,
                   "the output of row"},
        OutputCase{OutputFault::kOtherLayer, kOurPoolRules,
                   "K and V were those of layer "},
        OutputCase{OutputFault::kOtherHead, kOurPoolRules,
                   "head 0 read KV head 1"},
        OutputCase{OutputFault::kMissesFirst, kSwapsBlocks,
                   "position 0 were missing"},
        OutputCase{OutputFault::kMissesFirst, kComputesAgain,
                   "position 0 were missing"},
        OutputCase{OutputFault::kNoScale, kOurPoolRules, "the scale were 1"},
        OutputCase{OutputFault::kNextValue, kOurPoolRules, "V of"},
        OutputCase{OutputFault::kNotANumber, kOurPoolRules,
                   "it is not a number"},
        OutputCase{OutputFault::kRefuses, kOurPoolRules,
                   "Attend is not_supported"}));

TEST(PoolAttend, AnOutputThatIsTooLongIsFound) {
  const auto failure =
      FindFault(kOurPoolRules, OutputFault::kWritesBehind, Level::kVisibility);
  ASSERT_TRUE(failure);
  EXPECT_THAT(failure->text, HasSubstr("attend wrote outside of the"));
}

TEST(PoolAttend, AQueryMayNotChange) {
  const auto failure =
      FindFault(kOurPoolRules, OutputFault::kWritesQuery, Level::kAttention);
  ASSERT_TRUE(failure);
  EXPECT_THAT(failure->text, HasSubstr("attend wrote to its query"));
}

// An attention in bf16 over 200 tokens that lacks one of them. A bound of bf16
// allows a difference of nearly one token, so that only queries which point at
// a token show it: K of different tokens must point in different directions.
TEST(PoolAttend, OneOfManyTokensShowsInBf16) {
  OtherPool::rules = {};
  kvtwin_pool_backend_v1 table = OtherPoolTable();
  table.describe = [](kvtwin_pool_description_v1* out) -> int {
    out->attend_dtype = KVTWIN_BF16;
    return OtherPoolTable().describe(out);
  };
  const Subject subject =
      BackendSubject(DescribedPool(table), Level::kAttention);
  const auto failure = [&](OutputFault fault) {
    OtherPool::attention = fault;
    std::optional<Failure> found;
    for (int turn = 0; turn < 8 && !found; ++turn) {
      const auto history = ParsePagedHistory(fmt::format(
          "kvp1 block=16 blocks=20 most=256 layers=1 heads=1 kdim=64 vdim=64 "
          "dtype=f32 | open 0 0 0 | append 0 263 {} | commit 0 1 0 | append 0 "
          "3 1 | append 0 4 1 | append 0 5 1 | append 0 6 1",
          5 * turn + 1));
      found = RunHistory(*history, subject).failure;
    }
    OtherPool::attention = OutputFault::kNone;
    return TextOf(found);
  };
  EXPECT_EQ(failure(OutputFault::kNone), "");
  EXPECT_THAT(failure(OutputFault::kMissesOne),
              HasSubstr("position 20 were missing"));
}

// The last of 21 or of 41 tokens in blocks of 16.
TEST(PoolAttend, CausesHaveNames) {
  OtherPool::rules = {};
  OtherPool::weighs = true;
  const Subject subject =
      BackendSubject(DescribedPool(OtherPoolTable()), Level::kAttention);
  OtherPool::weighs = false;
  struct Case {
    OutputFault fault;
    const char* text;
  };
  for (const Case& test :
       {Case{OutputFault::kOtherBlock,
             "as if positions 16 to 20 had K and V of positions 0 to 4"},
        Case{OutputFault::kMissesBlock,
             "as if positions 16 to 31 were missing"},
        Case{OutputFault::kRoundsRows, "as if K and V were rounded to bf16"},
        Case{OutputFault::kRoundsK, "as if K were rounded to bf16"},
        Case{OutputFault::kRoundsV, ", or V were rounded to bf16"},
        Case{OutputFault::kOtherHead, "as if head 0 read KV head 1"},
        Case{OutputFault::kHeadsReversed, "head 0 had the output of head"},
        Case{OutputFault::kNoSinks, "as if the sinks were absent"}}) {
    for (const char* sinks : {"", "sinks=1 "}) {
      if (test.fault == OutputFault::kNoSinks && *sinks == '\0') continue;
      OtherPool::attention = test.fault;
      const auto history = ParsePagedHistory(fmt::format(
          "kvp1 block=16 blocks=20 most=256 layers=1 heads=2 kdim=16 vdim=16 "
          "dtype=f32 {}| open 0 0 0 | append 0 103 1 | commit 0 1 0 | append 0 "
          "0 1",
          sinks));
      const std::string text = TextOf(RunHistory(*history, subject).failure);
      EXPECT_THAT(text, HasSubstr(test.text)) << sinks;
    }
  }
  OtherPool::attention = OutputFault::kNone;
}

// Each query head keeps its own sink.
TEST(PoolAttend, KvHeadsInTurnAreNamedWithSinks) {
  OtherPool::rules = {};
  OtherPool::weighs = true;
  const Subject subject =
      BackendSubject(DescribedPool(OtherPoolTable()), Level::kAttention);
  OtherPool::weighs = false;
  OtherPool::attention = OutputFault::kHeadModulo;
  for (const char* sinks : {"", "sinks=1 "}) {
    const auto history = ParsePagedHistory(fmt::format(
        "kvp1 block=4 blocks=9 most=20 layers=1 heads=2 kdim=16 vdim=16 "
        "dtype=f32 {}| open 0 0 0 | append 0 3 1",
        sinks));
    EXPECT_THAT(TextOf(RunHistory(*history, subject).failure),
                HasSubstr("head h read KV head h % kv_heads"));
  }
  OtherPool::attention = OutputFault::kNone;
}

// Of 41 * 40 pairs of tokens, the first 1,000 do not have positions 30 and 31.
TEST(PoolAttend, PairsOfNeighboursAreTriedBeyondTheFirstThousand) {
  OtherPool::rules = {};
  const Subject subject =
      BackendSubject(DescribedPool(OtherPoolTable()), Level::kAttention);
  OtherPool::attention = OutputFault::kOneOtherValue;
  const auto history = ParsePagedHistory(
      "kvp1 block=16 blocks=20 most=256 layers=1 heads=1 kdim=16 vdim=16 "
      "dtype=f32 | open 0 0 0 | append 0 103 1 | commit 0 1 0 | append 0 0 1");
  EXPECT_THAT(TextOf(RunHistory(*history, subject).failure),
              HasSubstr("position 30 had V of position 31"));
  OtherPool::attention = OutputFault::kNone;
}

// A pool of f32 that stores fewer digits is found by its rows, and by its
// outputs.
TEST(PoolAttend, RowsNeedTheDigitsOfTheirDType) {
  OtherPool::rules = {};
  const PoolBackend backend = DescribedPool(OtherPoolTable());
  for (const Level level : {Level::kVisibility, Level::kAttention}) {
    const Subject subject = BackendSubject(backend, level);
    for (const OtherPoolFault fault :
         {OtherPoolFault::kStoresF16, OtherPoolFault::kStoresBf16}) {
      OtherPool::fault = fault;
      std::optional<Failure> found;
      for (int i = 0; i < 20 && !found; ++i) {
        found = RunHistory(F32History(i), subject).failure;
      }
      OtherPool::fault = OtherPoolFault::kNone;
      EXPECT_TRUE(found) << LevelName(level);
    }
  }
}

// A pool is only asked for what its description says that it makes.
TEST(PoolAttend, DescriptionsMayLimitPools) {
  static int asked = 0;
  static std::string odd;  // A pool that should not have been asked for.
  kvtwin_pool_backend_v1 table = OtherPoolTable();
  table.describe = [](kvtwin_pool_description_v1* out) -> int {
    out->dtypes = 1U << KVTWIN_BF16 | 1U << KVTWIN_F16;
    out->block_multiple = 16;
    out->head_dim_multiple = 8;
    out->can = KVTWIN_POOL_HAS_GROUPS;
    return KVTWIN_OK;
  };
  table.init = [](const kvtwin_pool_params* params, void**) -> int {
    const auto check = [](const kvtwin_pool_params& is) {
      ++asked;
      const bool right =
          (is.dtype == KVTWIN_F16 || is.dtype == KVTWIN_BF16) &&
          (is.v_dtype == KVTWIN_F16 || is.v_dtype == KVTWIN_BF16) &&
          is.block_size % 16 == 0 && is.k_head_dim % 8 == 0 &&
          is.v_head_dim % 8 == 0;
      if (right) return;
      odd = fmt::format("block {}, heads of {} and {}, dtypes {} and {}",
                        is.block_size, is.k_head_dim, is.v_head_dim,
                        AsInt(is.dtype), AsInt(is.v_dtype));
    };
    for (std::size_t i = 0; i < params->group_count; ++i) {
      check(params->groups[i]);
    }
    if (params->group_count == 0) check(*params);
    return KVTWIN_NOT_SUPPORTED;
  };
  const Subject subject =
      BackendSubject(DescribedPool(table), Level::kVisibility);
  for (const bool groups : {false, true}) {
    asked = 0;
    FuzzOptions options;
    options.operations = 1000;
    options.groups = groups;
    FuzzPools(options, subject);
    EXPECT_GT(asked, 500);
    EXPECT_EQ(odd, "");
  }
  asked = 0;
  ExplorePaged(/*depth=*/1, {}, subject);
  EXPECT_GT(asked, 10);
  EXPECT_EQ(odd, "");
}

// Pools of every multiple are small enough for a test, and of the declared
// multiples; long appends fill them.
TEST(PoolAttend, PoolsOfLargeMultiplesAreSmallEnough) {
  for (const int block : {1, 16, 1024}) {
    for (const int head_dim : {1, 48, 128, 1024}) {
      const Abilities able = {.block_multiple = block,
                              .head_dim_multiple = head_dim};
      for (std::uint64_t number = 0; number < 300; ++number) {
        PagedHistory history = number % 2 == 0 ? MakePagedHistory(1, number)
                                               : MakeGroupsHistory(1, number);
        FitPool(able, history);
        EXPECT_TRUE(FitsPool(able, history.spec));
        EXPECT_EQ(ParsePagedHistory(ToText(history)).status().message(), "");
      }
    }
  }
}

// A history is not shrunk to a pool that the backend does not declare.
TEST(PoolAttend, ShrunkPoolsAreDeclaredOnes) {
  OtherPool::rules = {};
  kvtwin_pool_backend_v1 table = OtherPoolTable();
  table.describe = [](kvtwin_pool_description_v1* out) -> int {
    out->dtypes = 1U << KVTWIN_F32;
    out->block_multiple = 16;
    out->head_dim_multiple = 8;
    return KVTWIN_OK;
  };
  OtherPool::attention = OutputFault::kMissesFirst;
  FuzzOptions options;
  options.operations = 5000;
  const PagedFuzzResult result = FuzzPools(
      options, BackendSubject(DescribedPool(table), Level::kAttention));
  OtherPool::attention = OutputFault::kNone;
  ASSERT_TRUE(result.failure);
  EXPECT_GT(result.counts.longest, 16);
  EXPECT_EQ(result.shrunk.spec.block_size, 16);
  EXPECT_EQ(result.shrunk.spec.k_head_dim, 8);
}

// After a refusal, every other history has a storage that the pool accepted.
TEST(PoolAttend, AcceptedStorageFollowsARefusal) {
  static int made = 0;
  static int asked = 0;
  kvtwin_pool_backend_v1 table = OtherPoolTable();
  table.describe = [](kvtwin_pool_description_v1* out) -> int {
    out->dtypes = 1U << KVTWIN_BF16;
    return KVTWIN_OK;
  };
  table.init = [](const kvtwin_pool_params* params, void** pool) -> int {
    ++asked;
    if (params->layout != KVTWIN_HEAD_MAJOR) return KVTWIN_NOT_SUPPORTED;
    ++made;
    kvtwin_pool_params f32 = *params;
    f32.dtype = f32.v_dtype = KVTWIN_F32;
    return OtherPoolTable().init(&f32, pool);
  };
  table.append = [](auto...) -> int { return KVTWIN_CACHE_FULL; };
  FuzzOptions options;
  options.operations = 3000;
  options.unshrunk = true;
  FuzzPools(options, BackendSubject(DescribedPool(table), Level::kVisibility));
  EXPECT_GT(asked, 20);
  EXPECT_GT(made * 3, asked * 2);  // Half of them, and half of the others.
}

// A pool that shows no rows is compared by its outputs alone.
TEST(PoolAttend, ViewsMayBeAbsent) {
  OtherPool::rules = {};
  kvtwin_pool_backend_v1 table = OtherPoolTable();
  table.views = nullptr;
  EXPECT_THAT(DescribePoolBackend(&table).status().message(),
              HasSubstr("the backend has no views"));
  table.describe = [](kvtwin_pool_description_v1* out) -> int {
    out->level = KVTWIN_ATTENTION;
    return KVTWIN_OK;
  };
  const PoolBackend backend = DescribedPool(table);
  EXPECT_EQ(LevelsOf(backend), std::vector{Level::kAttention});
  EXPECT_FALSE(MayBeJudged(backend, PoolLaws().front()));
  const Subject subject = BackendSubject(backend, Level::kAttention);
  const auto failures = [&](OutputFault fault) {
    OtherPool::attention = fault;
    int count = 0;
    for (int i = 0; i < 50; ++i) {
      count += RunHistory(F32History(i), subject).failure ? 1 : 0;
    }
    OtherPool::attention = OutputFault::kNone;
    return count;
  };
  EXPECT_EQ(failures(OutputFault::kNone), 0);
  EXPECT_GT(failures(OutputFault::kMissesFirst), 25);
}

// A pool without these abilities is never asked with a soft cap or sinks.
TEST(PoolAttend, OnlyDeclaredWeighingIsAsked) {
  for (const OutputFault fault :
       {OutputFault::kNoSoftCap, OutputFault::kNoSinks}) {
    EXPECT_EQ(TextOf(FindFault(kOurPoolRules, fault, Level::kAttention,
                               /*counts=*/nullptr, /*weighs=*/false)),
              "");
  }
}

TEST(PoolAttend, TheSearchDrawsWeighing) {
  OtherPool::rules = {};
  OtherPool::weighs = true;
  kvtwin_pool_backend_v1 table = OtherPoolTable();
  table.init = [](const kvtwin_pool_params* params, void** pool) -> int {
    const bool f32 =
        params->dtype == KVTWIN_F32 && params->v_dtype == KVTWIN_F32;
    return f32 ? OtherPoolTable().init(params, pool) : KVTWIN_NOT_SUPPORTED;
  };
  const Subject subject =
      BackendSubject(DescribedPool(table), Level::kAttention);
  OtherPool::weighs = false;
  for (const OutputFault fault :
       {OutputFault::kNoSoftCap, OutputFault::kNoSinks,
        OutputFault::kPlusOne}) {
    OtherPool::attention = fault;
    FuzzOptions options;
    options.operations = 50000;
    PagedHistory history = FuzzPools(options, subject).shrunk;
    // Begins with more than the fault needs.
    history.soft_cap = std::max(history.soft_cap, 30);
    history.sinks = true;
    ASSERT_TRUE(RunHistory(history, subject).failure);
    const PagedHistory shrunk = Shrink(history, subject);
    // The shrunk history, and its line, have only what the fault needs. Two
    // tokens, or one token and a sink, show a soft cap.
    EXPECT_EQ(shrunk.soft_cap, fault == OutputFault::kNoSoftCap ? 4 : 0);
    if (fault != OutputFault::kNoSoftCap) {
      EXPECT_EQ(shrunk.sinks, fault == OutputFault::kNoSinks);
    }
    const auto again = ParsePagedHistory(ToText(shrunk));
    ASSERT_TRUE(again.ok());
    EXPECT_EQ(again->soft_cap, shrunk.soft_cap);
    EXPECT_EQ(again->sinks, shrunk.sinks);
    const auto failure = RunHistory(*again, subject).failure;
    ASSERT_TRUE(failure);
    if (shrunk.soft_cap > 0) {
      EXPECT_THAT(failure->trace.back().call, HasSubstr(", soft cap 4"));
    }
    if (shrunk.sinks) {
      EXPECT_THAT(failure->trace.back().call, HasSubstr(", with sinks"));
    }
  }
  OtherPool::attention = OutputFault::kNone;
}

// The description of a pool that attends.
TEST(PoolAttend, DescriptionsAreChecked) {
  static kvtwin_pool_description_v1 said;
  kvtwin_pool_backend_v1 table = OtherPoolTable();
  table.describe = [](kvtwin_pool_description_v1* out) -> int {
    out->level = said.level;
    out->can = said.can;
    out->attend_dtype = said.attend_dtype;
    out->max_query_heads = said.max_query_heads;
    out->attend_tolerance = said.attend_tolerance;
    out->dtypes = said.dtypes;
    out->block_multiple = said.block_multiple;
    out->head_dim_multiple = said.head_dim_multiple;
    out->max_sequences = said.max_sequences;
    return KVTWIN_OK;
  };
  const auto why = [&](auto change) {
    said = {};
    said.level = KVTWIN_ATTENTION;
    change(said);
    return DescribePoolBackend(&table).status().message();
  };
  EXPECT_EQ(why([](auto&) {}), "");
  EXPECT_EQ(why([](auto& d) { d.attend_dtype = KVTWIN_Q8_0; }),
            "attend_dtype of the backend's description is 4");
  EXPECT_EQ(
      why([](auto& d) { d.max_query_heads = -1; }),
      "max_query_heads of the backend's description is -1, it must not be "
      "negative");
  EXPECT_EQ(why([](auto& d) { d.attend_tolerance = NAN; }),
            "attend_tolerance of the backend's description is nan, it must be "
            "finite and not negative");
  EXPECT_EQ(why([](auto& d) { d.dtypes = 1U << KVTWIN_BITS; }),
            "dtypes of the backend's description is 0x40, but the known flags "
            "are 0x3f");
  EXPECT_EQ(why([](auto& d) { d.block_multiple = -1; }),
            "block_multiple of the backend's description is -1, it must be "
            "from 0 to 1024");
  EXPECT_EQ(why([](auto& d) { d.head_dim_multiple = 2048; }),
            "head_dim_multiple of the backend's description is 2048, it must "
            "be from 0 to 1024");
  EXPECT_EQ(why([](auto& d) { d.max_sequences = -1; }),
            "max_sequences of the backend's description is -1, it must not be "
            "negative");
  table.attend = nullptr;
  EXPECT_EQ(why([](auto& d) {
              d.level = KVTWIN_VISIBILITY;
              d.can = KVTWIN_POOL_HAS_SINKS;
            }),
            "the backend declares HAS_SOFT_CAP or HAS_SINKS, but its table has "
            "no attend");
  EXPECT_EQ(why([](auto&) {}),
            "the backend claims ATTENTION, but its table has no attend");
}

// Our own pools attend in splits, and in parts that are merged.
TEST(PoolAttend, OurTwinsAreRight) {
  for (const char* twin : {"reference", "optimized"}) {
    for (const bool groups : {false, true}) {
      FuzzOptions options;
      options.seed = 9;
      options.operations = 3000;
      options.groups = groups;
      const auto result =
          FuzzPools(options, TwinSubject(twin, Level::kAttention));
      EXPECT_EQ(TextOf(result.failure), "");
      EXPECT_GT(result.counts.outputs, 3000);
    }
  }
}

// A token of a sequence that is not asked now is not gone.
TEST(PoolAttend, OnlyTokensOfFreedSequencesAreGone) {
  PagedSpec spec;
  spec.block_size = 4;
  spec.blocks = 10;
  spec.max_seq_len = 20;
  spec.layers = spec.kv_heads = spec.k_head_dim = spec.v_head_dim = 1;
  reference::PagedLedger ledger(spec);
  for (const int sequence : {0, 1}) {
    ledger.Open(sequence, {}, {}, 0);
    std::vector<float> numbers(12);
    std::iota(numbers.begin(), numbers.end(), sequence == 0 ? 100.0F : 200.0F);
    const TensorView rows =
        DenseView(numbers.data(), DType::kF32, {1, 1, 12, 1});
    ledger.Append(sequence, 0, rows, rows);
  }
  const auto ask = [&](const std::vector<int>& sequences,
                       const AttentionQuestion* before) {
    const std::vector<int> rows(sequences.size(), 1);
    return AttentionQuestion({.ledger = ledger,
                              .spec = spec,
                              .layer = 0,
                              .sequences = sequences,
                              .query_rows = rows},
                             /*group=*/1, /*seed=*/1, before);
  };
  const auto gone = [](const AttentionQuestion& question) {
    return std::ranges::count(question.tokens(), true, &AskedToken::gone);
  };
  const AttentionQuestion both = ask({0, 1}, nullptr);
  EXPECT_EQ(gone(ask({0}, &both)), 0);
  ledger.Free(1);
  EXPECT_EQ(gone(ask({0}, &both)), 4);
}

}  // namespace
}  // namespace kvtwin::props
