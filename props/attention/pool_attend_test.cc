// Pools that compute attention: right ones are accepted, whichever rules they
// have, and each fault is found, at each level that they have.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "props/backend/pool_backend.h"
#include "props/oracle/judge.h"
#include "props/paged/paged_runner.h"
#include "props/search/explain.h"
#include "props/testing/other_pool.h"
#include "props/testing/pools.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

using ::testing::HasSubstr;
using OutputFault = OtherAttentionFault;

constexpr int kAttendHistories = 60;

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
  history.spec.v_head_dim = 1 + history.spec.v_head_dim % 3;
  return history;
}

// Returns the first failure of a pool with this fault.
std::optional<Failure> FindFault(const PoolRules& rules, OutputFault fault,
                                 Level level,
                                 int histories = kAttendHistories) {
  OtherPool::rules = rules;
  OtherPool::fault = OtherPoolFault::kNone;
  OtherPool::attention = fault;
  kvtwin_pool_backend_v1 table = OtherPoolTable();
  const Subject subject = BackendSubject(DescribedPool(table), level);
  std::optional<Failure> found;
  for (int i = 0; i < histories && !found; ++i) {
    PagedHistory history = F32History(i);
    found = RunHistory(history, subject).failure;
    if (!found) continue;
    history.ops.resize(std::min(history.ops.size(), found->step + 1));
    found = Explain(history, *found, subject);
  }
  OtherPool::attention = OutputFault::kNone;
  OtherPool::rules = {};
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
      EXPECT_EQ(TextOf(FindFault(rules, OutputFault::kNone, level)), "");
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
        OutputCase{OutputFault::kSeesStale, kOurPoolRules, "the output of row"},
        OutputCase{OutputFault::kSwapsSequences, kOurPoolRules,
                   "the output of row"},
        OutputCase{OutputFault::kOtherLayer, kOurPoolRules,
                   "the output of row"},
        OutputCase{OutputFault::kOtherHead, kOurPoolRules, "the output of row"},
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

// The description of a pool that attends.
TEST(PoolAttend, DescriptionsAreChecked) {
  static kvtwin_pool_description_v1 said;
  kvtwin_pool_backend_v1 table = OtherPoolTable();
  table.describe = [](kvtwin_pool_description_v1* out) -> int {
    out->level = said.level;
    out->attend_dtype = said.attend_dtype;
    out->max_query_heads = said.max_query_heads;
    out->attend_tolerance = said.attend_tolerance;
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
  EXPECT_EQ(why([](auto& d) { d.max_query_heads = -1; }),
            "max_query_heads is -1, it must not be negative");
  EXPECT_EQ(why([](auto& d) { d.attend_tolerance = NAN; }),
            "attend_tolerance is nan, it must be finite and not negative");
  table.attend = nullptr;
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
    }
  }
}

constexpr const char* kPoolHead =
    R"({"kvtrace":2,"placement":"other","cache":{"type":"paged"},)"
    R"("pool":{"block_size":2,"blocks":4,"max_seq_len":8,"layers":1,)"
    R"("kv_heads":1,"k_head_dim":1,"v_head_dim":1,"dtype":"f32"}})"
    "\n";
constexpr const char* kTwoPoolTokens =
    R"({"op":"open","result":0,"len":0})"
    "\n"
    R"({"op":"append","seq":0,"layer":0,"key":{"shape":[1,1,2],"data":[1,2]},)"
    R"("value":{"shape":[1,1,2],"data":[10,20]},"result":"ok"})"
    "\n";

// A line with the outputs of the last `rows` tokens.
std::string PoolAttendLine(const std::string& rows, const std::string& query,
                           const std::string& out, int count) {
  return fmt::format(R"({{"op":"attend","layer":0,"seqs":[0],"rows":[{}],)"
                     R"("query":{{"shape":[1,1,{}],"data":[{}]}},)"
                     R"("out":{{"shape":[1,1,{}],"data":[{}]}}}})"
                     "\n",
                     rows, count, query, count, out);
}

TEST(PoolAttend, RecordingsAreJudged) {
  // The weights of queries of 0 are equal.
  const Judgement right = JudgeText(std::string(kPoolHead) + kTwoPoolTokens +
                                    PoolAttendLine("2", "0,0", "10,15", 2) +
                                    R"({"op":"commit","seq":0,"tokens":[7,8]})"
                                    "\n" +
                                    PoolAttendLine("1", "0", "15", 1));
  EXPECT_EQ(right.verdict(), Verdict::kAccept) << right.reason();
  EXPECT_EQ(right.judged.outputs, 2);
  EXPECT_EQ(right.judged.output_rows, 3);
  EXPECT_EQ(right.judged.output_rows_judged, 3);
  const Judgement wrong = JudgeText(std::string(kPoolHead) + kTwoPoolTokens +
                                    PoolAttendLine("2", "0,0", "10,20", 2));
  EXPECT_EQ(wrong.verdict(), Verdict::kReject);
  EXPECT_EQ(wrong.line(), 4);
  EXPECT_THAT(wrong.reason(),
              HasSubstr("the output of row 1 (sequence 0, position 1) is 20"));
  EXPECT_THAT(wrong.reason(), HasSubstr("as if position 0 were missing"));
}

TEST(PoolAttend, BadLinesAreNamed) {
  const auto why = [](const std::string& head, const std::string& line) {
    const Judgement judgement = JudgeText(head + kTwoPoolTokens + line);
    EXPECT_EQ(judgement.verdict(), Verdict::kBadInput);
    return judgement.reason();
  };
  EXPECT_THAT(why(kPoolHead, PoolAttendLine("3", "0,0,0", "1,1,1", 3)),
              HasSubstr("rows[0] is 3, sequence 0 has 2 rows in layer 0"));
  EXPECT_THAT(why(kPoolHead, PoolAttendLine("0", "0", "1", 1)),
              HasSubstr("rows[0] is 0"));
  EXPECT_THAT(why(kPoolHead, PoolAttendLine("2", "0", "1", 1)),
              HasSubstr("the shape of query is [1, 1, 1], expected [1, 1, 2]"));
  EXPECT_THAT(why(kPoolHead, PoolAttendLine("1,1", "0,0", "1,1", 2)),
              HasSubstr("rows has 2 numbers, expected 1"));
  std::string first = kPoolHead;
  first.replace(first.find("2"), 1, "1");
  EXPECT_THAT(why(first, PoolAttendLine("1", "0", "15", 1)),
              HasSubstr("attend needs kvtrace 2"));
  std::string third = kPoolHead;
  third.replace(third.find("2"), 1, "3");
  EXPECT_THAT(why(third, ""), HasSubstr("kvtrace is 3, it must be 1 or 2"));
}

}  // namespace
}  // namespace kvtwin::props
