// Recordings of pools with outputs of attention: `attend` lines.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <utility>

#include "props/oracle/judge.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

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

TEST(RecordedPoolAttention, RecordingsAreJudged) {
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

// Position 1 has all digits of the sum of the weights, so that the sum without
// it cannot be a difference.
TEST(RecordedPoolAttention, AMissingTokenOfAllWeightIsNamed) {
  const Judgement judgement =
      JudgeText(std::string(kPoolHead) + kTwoPoolTokens +
                PoolAttendLine("1", "60", "10", 1));
  EXPECT_THAT(judgement.reason(), HasSubstr("position 1 were missing"));
}

// exp(0) is the weight of each token and of a sink of 0. With a soft cap of 1,
// the scores 100 and 200 are alike.
TEST(RecordedPoolAttention, LinesMayHaveASoftCapAndSinks) {
  const auto judge = [](const std::string& fields, const std::string& query,
                        const std::string& out) {
    std::string line = PoolAttendLine("1", query, out, 1);
    return JudgeText(std::string(kPoolHead) + kTwoPoolTokens +
                     line.insert(line.find(R"("seqs")"), fields));
  };
  const std::string sinks = R"("sinks":[0],)";
  const std::string cap = R"("soft_cap":1,)";
  EXPECT_EQ(judge(sinks, "0", "10").verdict(), Verdict::kAccept);
  EXPECT_THAT(judge(sinks, "0", "15").reason(),
              HasSubstr("as if the sinks were absent"));
  EXPECT_EQ(judge(cap, "100", "15").verdict(), Verdict::kAccept);
  EXPECT_EQ(judge(cap, "100", "20").verdict(), Verdict::kReject);
  EXPECT_EQ(judge("", "100", "20").verdict(), Verdict::kAccept);
}

// Rounding takes all digits of scores of a million, so that a right output may
// be anywhere between the V rows that the token sees. Nothing is said about
// queries whose products with K are not finite in f32.
TEST(RecordedPoolAttention, LargeScoresLeaveTheRangeOfV) {
  const auto verdict = [](const std::string& query, const std::string& out) {
    return JudgeText(std::string(kPoolHead) + kTwoPoolTokens +
                     PoolAttendLine("1", query, out, 1))
        .verdict();
  };
  EXPECT_EQ(verdict("0", "15"), Verdict::kAccept);
  EXPECT_EQ(verdict("0", "16"), Verdict::kReject);
  for (const char* query : {"1e6", "-1e6"}) {
    EXPECT_EQ(verdict(query, "10"), Verdict::kAccept) << query;
    EXPECT_EQ(verdict(query, "20"), Verdict::kAccept) << query;
    EXPECT_EQ(verdict(query, "9.9"), Verdict::kReject) << query;
    EXPECT_EQ(verdict(query, "20.1"), Verdict::kReject) << query;
  }
  EXPECT_EQ(verdict("3e38", "50"), Verdict::kAccept);
}

// Each kind of fault of one token is tried for the first 16,384 tokens.
TEST(RecordedPoolAttention, TheFirstTokensOfALongRowAreTried) {
  static constexpr int kCount = 16'390;
  const auto reason = [](int missing) {
    std::string keys;
    std::string values;
    for (int i = 0; i < kCount; ++i) {
      keys += i == missing ? ",12" : ",0";
      values += fmt::format(",{}", i % 7);
    }
    std::string head = kPoolHead;
    head.replace(head.find(R"("blocks":4,"max_seq_len":8)"), 26,
                 R"("blocks":9000,"max_seq_len":18000)");
    const std::string append = fmt::format(
        R"({{"op":"open","result":0,"len":0}}
{{"op":"append","seq":0,"layer":0,"key":{{"shape":[1,1,{0}],"data":[{1}]}},)"
        R"("value":{{"shape":[1,1,{0}],"data":[{2}]}},"result":"ok"}}
)",
        kCount, keys.substr(1), values.substr(1));
    double sum = 0;
    for (int i = 0; i < kCount; ++i) sum += i == missing ? 0 : i % 7;
    const double mean = sum / (kCount - 1);
    return JudgeText(head + append +
                     PoolAttendLine("1", "1", fmt::format("{}", mean), 1))
        .reason();
  };
  EXPECT_THAT(reason(16'380), HasSubstr("position 16380 were missing"));
  EXPECT_THAT(reason(16'385), Not(HasSubstr("position 16385 were missing")));
}

TEST(RecordedPoolAttention, BadWeighingIsNamed) {
  for (const auto& [field, text] :
       {std::pair(R"("soft_cap":-1)",
                  "soft_cap is -1, it must not be negative"),
        {R"("soft_cap":"4")", "soft_cap is '4'"},
        {R"("sinks":[0.5,1])", "query has 1 heads, sinks has 2 numbers"},
        {R"("sinks":[[1]])", "sinks[0] is a list, it must be a number"},
        {R"("sinks":3)", "sinks is 3"},
        {R"("sinks":[1e300])", "which is not from -2^50 to 2^50"},
        {R"("soft_cap":1e300)", "soft_cap is above 2^50"}}) {
    std::string line = PoolAttendLine("1", "0", "15", 1);
    line.insert(line.find(R"("seqs")"), std::string(field) + ",");
    const Judgement judgement =
        JudgeText(std::string(kPoolHead) + kTwoPoolTokens + line);
    EXPECT_EQ(judgement.verdict(), Verdict::kBadInput);
    EXPECT_THAT(judgement.reason(), HasSubstr(text));
  }
}

TEST(RecordedPoolAttention, BadLinesAreNamed) {
  const auto why = [](const std::string& head, const std::string& line) {
    const Judgement judgement = JudgeText(head + kTwoPoolTokens + line);
    EXPECT_EQ(judgement.verdict(), Verdict::kBadInput);
    return judgement.reason();
  };
  EXPECT_THAT(why(kPoolHead, PoolAttendLine("3", "0,0,0", "1,1,1", 3)),
              HasSubstr("rows[0] is 3, but sequence 0 has 2 rows in layer 0"));
  EXPECT_THAT(why(kPoolHead, PoolAttendLine("0", "0", "1", 1)),
              HasSubstr("rows[0] is 0, it must be at least 1"));
  EXPECT_THAT(why(kPoolHead, PoolAttendLine("2", "0", "1", 1)),
              HasSubstr("the shape of query is [1, 1, 1], expected [1, 1, 2]"));
  EXPECT_THAT(why(kPoolHead, PoolAttendLine("1,1", "0,0", "1,1", 2)),
              HasSubstr("rows has 2 numbers, expected 1"));
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string line = PoolAttendLine("1", "0", "15", 1);
    return line.replace(line.find(from), from.size(), to);
  };
  EXPECT_THAT(why(kPoolHead, changed(R"("seqs":[0],"rows":[1])",
                                     R"("seqs":[],"rows":[])")),
              HasSubstr("seqs is empty"));
  EXPECT_THAT(why(kPoolHead, changed(R"("seqs":[0],"rows":[1])",
                                     R"("seqs":[0,0],"rows":[1,1])")),
              HasSubstr("sequence 0 is listed twice"));
  EXPECT_THAT(why(kPoolHead, changed(R"("seqs":[0])", R"("seqs":[5])")),
              HasSubstr("sequence 5 does not exist"));
  EXPECT_THAT(why(kPoolHead, changed(R"("layer":0)", R"("layer":1)")),
              HasSubstr("layer is 1"));
  std::string wide = kPoolHead;
  wide.replace(wide.find(R"("kv_heads":1)"), 12, R"("kv_heads":2)");
  std::string narrow = kTwoPoolTokens;
  for (std::size_t at; (at = narrow.find("[1,1,2]")) != std::string::npos;) {
    narrow.replace(at, 7, "[1,2,1]");
  }
  EXPECT_THAT(
      JudgeText(wide + narrow + PoolAttendLine("1", "0", "15", 1)).reason(),
      HasSubstr("query has 1 heads, which are not a multiple of 2"));
  for (const auto& [key, value, text] :
       {std::tuple("dtype", R"("f64")", "attend.dtype is 'f64'"),
        std::tuple("soft_cap", "8", "attend.soft_cap is a field of each line"),
        std::tuple("sinks", "[1]", "attend.sinks is a field of each line"),
        std::tuple("tolerance", "-1", "attend.tolerance is -1")}) {
    std::string head = kPoolHead;
    head.insert(head.find(R"("pool")"),
                fmt::format(R"("attend":{{"{}":{}}},)", key, value));
    EXPECT_THAT(why(head, ""), HasSubstr(text));
  }
  // An unknown key of version 1.
  std::string before = kPoolHead;
  before.replace(before.find("2"), 1, R"(1,"attend":7)");
  EXPECT_EQ(JudgeText(before + kTwoPoolTokens).verdict(), Verdict::kAccept);
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
