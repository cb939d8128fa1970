// Backends that answer `attend`, besides `get` or in place of it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "props/backend/backend.h"
#include "props/backend/ledger_backend.h"
#include "props/backend/live.h"
#include "props/compare/runner.h"

namespace kvtwin::props {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// Describe adds these members to the ledger's description.
struct Said {
  kvtwin_level level = KVTWIN_VISIBILITY;
  kvtwin_dtype dtype = KVTWIN_F32;
  std::int32_t query_heads = 0;
  double tolerance = 0;
  std::uint32_t can = 0;
} said;
std::int64_t heads = 0;  // The last query has this number of heads.
std::int64_t wrote = 0;  // The index at which Attend writes a number.

int Describe(kvtwin_description_v1* out) {
  const int code = LedgerBackend("ollama-0.15")->describe(out);
  out->level = said.level;
  out->attend_dtype = said.dtype;
  out->max_query_heads = said.query_heads;
  out->attend_tolerance = said.tolerance;
  out->can |= said.can;
  return code;
}

float soft_cap = 0;  // The last setup's.
std::vector<float> sinks;

int Init(const kvtwin_setup_v1* setup, void** cache) {
  soft_cap = setup->soft_cap;
  sinks.assign(setup->sinks, setup->sinks + setup->sink_count);
  return LedgerBackend("ollama-0.15")->init(setup, cache);
}

// Answers zeros.
int Attend(void* /*cache*/, std::int32_t /*layer*/, const kvtwin_tensor* query,
           float* out) {
  heads = query->shape[1];
  const std::int64_t count = query->shape[1] * query->shape[2];
  std::fill(out, out + count, 0.0F);  // v_head_dim is 1.
  out[wrote < 0 ? wrote : count - 1 + wrote] = 0;
  return KVTWIN_OK;
}

kvtwin_backend_v1 Table() {
  kvtwin_backend_v1 table = *LedgerBackend("ollama-0.15");
  table.describe = Describe;
  table.init = Init;
  table.attend = Attend;
  said = {};
  wrote = 0;
  return table;
}

std::optional<Failure> FailureOf(const kvtwin_backend_v1& table) {
  const Result<BackendInfo> info = DescribeBackend(&table);
  EXPECT_TRUE(info.ok()) << info.status().message();
  const History history = *ParseHistory("kvt1 cells=4 legal=1 | put 0*2");
  return RunHistory(history, BackendSubject(*info, Level::kAttention, ""))
      .failure;
}

TEST(BackendAttends, OneOfGetAndAttendIsNeeded) {
  kvtwin_backend_v1 table = Table();
  EXPECT_THAT(
      LevelsOf(*DescribeBackend(&table)),
      ElementsAre(Level::kVisibility, Level::kNumeric, Level::kAttention));
  table.get = nullptr;
  EXPECT_THAT(DescribeBackend(&table).status().message(),
              HasSubstr("can claim the level ATTENTION only"));
  said.level = KVTWIN_ATTENTION;
  const Result<BackendInfo> info = DescribeBackend(&table);
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->claims, Level::kAttention);
  EXPECT_THAT(LevelsOf(*info), ElementsAre(Level::kAttention));
  table.attend = nullptr;
  EXPECT_THAT(DescribeBackend(&table).status().message(), HasSubstr("get"));
  table = Table();
  said.level = KVTWIN_ATTENTION;
  table.attend = nullptr;
  EXPECT_THAT(DescribeBackend(&table).status().message(),
              HasSubstr("its table has no attend"));
}

TEST(BackendAttends, DescriptionsAreChecked) {
  const kvtwin_backend_v1 table = Table();
  said.dtype = KVTWIN_Q8_0;
  EXPECT_THAT(DescribeBackend(&table).status().message(),
              HasSubstr("attend_dtype"));
  said = {.query_heads = -1};
  EXPECT_THAT(DescribeBackend(&table).status().message(),
              HasSubstr("negative"));
  said = {.tolerance = -0.5};
  EXPECT_THAT(DescribeBackend(&table).status().message(),
              HasSubstr("negative"));
  said = {.dtype = KVTWIN_BF16, .query_heads = 3, .tolerance = 0.5};
  const BackendInfo info = *DescribeBackend(&table);
  const Subject attends = BackendSubject(info, Level::kAttention, "");
  EXPECT_EQ(attends.precision().dtype, DType::kBF16);
  EXPECT_EQ(attends.precision().tolerance, 0.5);
  EXPECT_EQ(attends.query_heads, 3);
  EXPECT_FALSE(attends.abilities.HasKind(Kind::kEncoder));
  EXPECT_EQ(BackendSubject(info, Level::kNumeric, "").tolerance,
            info.tolerance);
}

TEST(BackendAttends, WrongOutputsAndWritesAreFound) {
  const kvtwin_backend_v1 table = Table();
  std::optional<Failure> failure = FailureOf(table);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->check, "subject: output");
  EXPECT_THAT(failure->text, HasSubstr("it were zeros"));
  EXPECT_EQ(heads, 4);
  said.query_heads = 3;
  EXPECT_TRUE(FailureOf(table));
  EXPECT_EQ(heads, 3);
  for (const std::int64_t at : {-1, 1}) {
    wrote = at;
    failure = FailureOf(table);
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->check, "backend: out of bounds") << failure->text;
  }
  wrote = 0;
  said.tolerance = 2;  // The numbers of V are smaller.
  EXPECT_FALSE(FailureOf(table));
}

// Only a backend that declares it gets a soft cap, or sinks.
TEST(BackendAttends, SetupsHaveWhatTheBackendDeclares) {
  kvtwin_backend_v1 table = Table();
  History history =
      *ParseHistory("kvt1 cells=4 legal=1 softcap=4 sinks=1 | put 0*2");
  const auto fitted = [&](std::uint32_t can) {
    said = {.can = can};
    props::Setup setup = history.setup;
    DescribeBackend(&table)->abilities.Fit(setup);
    return ToText(setup);
  };
  EXPECT_THAT(fitted(0), Not(HasSubstr("s=1")));
  EXPECT_THAT(fitted(0), Not(HasSubstr("softcap")));
  EXPECT_THAT(fitted(KVTWIN_CAN_SOFT_CAP), HasSubstr("softcap=4"));
  EXPECT_THAT(fitted(KVTWIN_CAN_SINKS), HasSubstr("sinks=1"));

  said = {.query_heads = 3, .can = KVTWIN_CAN_SOFT_CAP | KVTWIN_CAN_SINKS};
  const BackendInfo info = *DescribeBackend(&table);
  RunHistory(history, BackendSubject(info, Level::kAttention, ""));
  EXPECT_EQ(soft_cap, 4);
  EXPECT_THAT(sinks, ElementsAre(-1, 0.5, -0.5));
  history = *ParseHistory("kvt1 cells=4 legal=1 sinks=1 group=16 | put 0*2");
  RunHistory(history, BackendSubject(info, Level::kAttention, ""));
  EXPECT_EQ(heads, 3);
  EXPECT_EQ(sinks.size(), 3U);
  said.query_heads = 0;
  RunHistory(history,
             BackendSubject(*DescribeBackend(&table), Level::kAttention, ""));
  EXPECT_EQ(heads, 16);
  EXPECT_EQ(sinks.size(), 16U);
  table.attend = nullptr;
  EXPECT_THAT(DescribeBackend(&table).status().message(),
              HasSubstr("CAN_SOFT_CAP or CAN_SINKS"));
}

// Its rows are right, and its attention is wrong.
TEST(BackendAttends, AttentionIsJudgedEvenIfTheRowsAreRight) {
  const kvtwin_backend_v1 table = Table();
  const BackendInfo info = *DescribeBackend(&table);
  FuzzOptions options;
  options.operations = 2'000;
  const LiveResult result = FuzzLive(options, LevelsOf(info), [&](Level level) {
    return BackendSubject(info, level, "");
  });
  EXPECT_EQ(result.holds, Level::kVisibility);
  EXPECT_TRUE(result.attends_wrong);
  EXPECT_FALSE(result.Right(info));
  ASSERT_EQ(result.findings.size(), 1);
  EXPECT_EQ(result.findings[0].level, Level::kAttention);
}

}  // namespace
}  // namespace kvtwin::props
