// Recordings with outputs of attention: `attend` lines.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "core/index.h"
#include "core/trace/trace.h"
#include "core/trace/trace_reader.h"
#include "props/oracle/judge.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

std::string Header(const std::string& version = "2",
                   const std::string& more = "") {
  return R"({"kvtrace":)" + version +
         R"(,"placement":"other","cache":{"type":"swa","window":1,)"
         R"("shift":"none"},"config":{},"init":{"dtype":"f32",)"
         R"("max_sequences":1,"capacity":8,"max_batch":8},)" +
         more +
         R"("model":{"layers":1,"k_head_dim":2,"kv_heads":1,)"
         R"("v_head_dim":1}})"
         "\n";
}

// Three tokens. Each sees itself and the token before it.
const std::string kPass =
    R"({"op":"start_forward","positions":[0,1,2],"sequences":[0,0,0],)"
    R"("result":"ok"})"
    "\n"
    R"({"op":"put","layer":0,"key":{"shape":[2,1,3],"data":[1,0,0,1,1,1]},)"
    R"("value":{"shape":[1,1,3],"data":[1,3,8]}})"
    "\n";

// An attend with two heads whose queries are 0: the outputs are means of V.
std::string Attend(const std::string& out,
                   const std::string& query = R"({"shape":[2,2,3],"data":)"
                                              R"([0,0,0,0,0,0,0,0,0,0,0,0]})") {
  return R"({"op":"attend","layer":0,"query":)" + query +
         R"(,"out":{"shape":[1,2,3],"data":[)" + out + "]}}\n";
}

TEST(RecordedAttention, OutputsAreJudged) {
  const Judgement right =
      JudgeText(Header() + kPass + Attend("1,1,2,2,5.5,5.5"));
  EXPECT_EQ(right.verdict(), Verdict::kAccept) << right.reason();
  EXPECT_EQ(right.level, Level::kAttention);
  EXPECT_EQ(right.judged.outputs, 1);

  const Judgement wrong = JudgeText(Header() + kPass + Attend("1,1,2,2,5.5,8"));
  EXPECT_EQ(wrong.verdict(), Verdict::kReject);
  ASSERT_TRUE(wrong.failure);
  EXPECT_EQ(wrong.line(), 4);
  EXPECT_EQ(wrong.level, Level::kNone);
  EXPECT_EQ(wrong.failure->rules, "S2, S16, S17, S58");

  const Judgement all = JudgeText(Header() + kPass + Attend("1,1,2,2,4,4"));
  EXPECT_THAT(all.reason(), HasSubstr("row 2 (sequence 0, position 2)"));
  EXPECT_THAT(all.reason(), HasSubstr("position 0 were seen, or"));
  EXPECT_THAT(all.reason(), HasSubstr("the window were 2"));
}

// The same pass of two layers: layer 1 has other V, and perhaps wider K or V.
std::string TwoLayers(int k_head_dim, int v_head_dim) {
  std::vector<int> key(AsSize(3 * k_head_dim), 1);
  std::vector<int> value(AsSize(3 * v_head_dim));
  std::iota(value.begin(), value.end(), 20);
  std::string header = Header();
  header.replace(header.find(R"("layers":1)"), 10, R"("layers":2)");
  return header + kPass +
         fmt::format(
             R"({{"op":"put","layer":1,"key":{{"shape":[{},1,3],"data":{}}},)"
             R"("value":{{"shape":[{},1,3],"data":{}}}}})"
             "\n",
             k_head_dim, key, v_head_dim, value);
}

// The rows of layers may differ in size (S20).
TEST(RecordedAttention, OutputsOverAnotherLayerAreNamed) {
  const std::string of_layer_1 = Attend("20,20,20.5,20.5,21.5,21.5");
  EXPECT_THAT(JudgeText(TwoLayers(2, 1) + of_layer_1).reason(),
              HasSubstr("as if K and V were those of layer 1"));
  for (const auto& [k_head_dim, v_head_dim] :
       {std::pair(4, 1), {1, 1}, {2, 3}, {4, 3}}) {
    const Judgement judged =
        JudgeText(TwoLayers(k_head_dim, v_head_dim) + of_layer_1);
    EXPECT_EQ(judged.verdict(), Verdict::kReject) << judged.reason();
    EXPECT_THAT(judged.reason(), HasSubstr("row 0 (sequence 0, position 0)"));
    EXPECT_THAT(judged.reason(), Not(HasSubstr("those of layer")));
  }
}

// Returns a recording of a batch of 512 tokens whose V is their position. All
// queries are 0, so that an output is the mean; that of row `wrong` is not.
std::string LargeBatch(int wrong, int heads, int k_head_dim) {
  constexpr int kRows = 512;
  std::vector<int> positions(kRows);
  std::iota(positions.begin(), positions.end(), 0);
  const auto numbers = [](int count) {
    return std::vector<int>(AsSize(count));
  };
  std::vector<double> out;
  for (int row = 0; row < kRows; ++row) {
    const double mean = 0.5 * row;
    out.insert(out.end(), AsSize(heads), row == wrong ? mean + 1 : mean);
  }
  const std::string all = fmt::format("{}", fmt::join(positions, ","));
  std::string header = Replaced(Header(), R"("swa","window":1)", R"("causal")");
  header = Replaced(header, R"("capacity":8,"max_batch":8)",
                    R"("capacity":512,"max_batch":512)");
  header = Replaced(header, "\"k_head_dim\":2",
                    fmt::format("\"k_head_dim\":{}", k_head_dim));
  return header +
         fmt::format(R"({{"op":"start_forward","positions":[{}],)"
                     R"("sequences":[{}],"result":"ok"}})",
                     all, fmt::join(numbers(kRows), ",")) +
         fmt::format(
             "\n"
             R"({{"op":"put","layer":0,"key":{{"shape":[{},1,512],)"
             R"("data":[{}]}},"value":{{"shape":[1,1,512],"data":[{}]}}}})",
             k_head_dim, fmt::join(numbers(kRows * k_head_dim), ","), all) +
         fmt::format(
             "\n"
             R"({{"op":"attend","layer":0,"query":{{"shape":[{},{},)"
             R"(512],"data":[{}]}},"out":{{"shape":[1,{},512],)"
             R"("data":[{}]}}}})"
             "\n",
             k_head_dim, heads,
             fmt::join(numbers(kRows * heads * k_head_dim), ","), heads,
             fmt::join(out, ","));
}

TEST(RecordedAttention, AllRowsOfALargeBatchAreJudged) {
  const Judgement right = JudgeText(LargeBatch(-1, 1, 2));
  EXPECT_EQ(right.verdict(), Verdict::kAccept) << right.reason();
  EXPECT_EQ(right.judged.output_rows_judged, 512);
  EXPECT_THAT(JudgedText(right.judged), HasSubstr("1 output"));
  EXPECT_THAT(JudgedText(right.judged), Not(HasSubstr("judged: ")));
  for (const int row : {0, 3, 17, 130, 255, 256, 510, 511}) {
    const Judgement wrong = JudgeText(LargeBatch(row, 1, 2));
    EXPECT_EQ(wrong.verdict(), Verdict::kReject) << row;
    ASSERT_TRUE(wrong.failure);
    EXPECT_EQ(wrong.failure->row, row);
  }
}

// The rows see 131,328 tokens; with 16 heads of 64 and 1 elements these are 137
// million products, a little more than 2^27.
TEST(RecordedAttention, SomeRowsOfALongLineAreJudged) {
  const Judgement some = JudgeText(LargeBatch(-1, 16, 64));
  EXPECT_EQ(some.verdict(), Verdict::kAccept) << some.reason();
  EXPECT_EQ(some.judged.output_rows, 512);
  EXPECT_EQ(some.judged.output_rows_judged, 257);
  EXPECT_THAT(JudgedText(some.judged),
              HasSubstr("1 output (judged: 257 of their 512 rows)"));
}

TEST(RecordedAttention, LargeScoresAreJudged) {
  // In rows 1 and 2 one of two tokens has all of the weight, except for the
  // last head, whose scores are equal.
  const std::string query = R"({"shape":[2,2,3],"data":)"
                            R"([0,0,0,0,0,9999,9999,0,-9999,0,0,-9999]})";
  const Judgement right =
      JudgeText(Header() + kPass + Attend("1,1,3,1,3,5.5", query));
  EXPECT_EQ(right.verdict(), Verdict::kAccept) << right.reason();
  for (const std::string out :
       {"1,1,3,1,3,5.7", "1,1,3,1,8,5.5", "1,1,0,1,3,5.5", "0,1,3,1,3,5.5"}) {
    EXPECT_EQ(JudgeText(Header() + kPass + Attend(out, query)).verdict(),
              Verdict::kReject)
        << out;
  }
}

TEST(RecordedAttention, TheHeaderSaysHowExactItIs) {
  const std::string out = "1,1,2,2,5.51,5.5";
  EXPECT_EQ(JudgeText(Header() + kPass + Attend(out)).verdict(),
            Verdict::kReject);
  for (const std::string attend :
       {R"("attend":{"tolerance":0.02},)", R"("attend":{"dtype":"bf16"},)"}) {
    EXPECT_EQ(JudgeText(Header("2", attend) + kPass + Attend(out)).verdict(),
              Verdict::kAccept)
        << attend;
  }
  // The right output is near, but no fault makes it.
  EXPECT_THAT(JudgeText(Header("2", R"("attend":{"tolerance":0.02},)") + kPass +
                        Attend("1,1,2,2,5.55,5.5"))
                  .reason(),
              HasSubstr("no fault of one token explains it"));
  for (const std::string attend :
       {R"("attend":{"tolerance":-1},)", R"("attend":{"dtype":"q8_0"},)"}) {
    EXPECT_EQ(JudgeText(Header("2", attend)).verdict(), Verdict::kBadInput)
        << attend;
  }
}

// In f16, a weight of e^-18 is 0, and small numbers are multiples of 2^-24.
TEST(RecordedAttention, SmallNumbersOfF16AreRounded) {
  const auto verdict = [](const std::string& keys, const std::string& values,
                          const std::string& out) {
    const std::string shape = R"({"shape":[2,2,3],"data":)";
    const std::string put =
        R"({"op":"put","layer":0,"key":{"shape":[2,1,3],"data":)" + keys +
        R"(},"value":{"shape":[1,1,3],"data":)" + values + "}}\n";
    return JudgeText(Header("2", R"("attend":{"dtype":"f16"},)") +
                     kPass.substr(0, kPass.find('\n') + 1) + put +
                     Attend(out, shape + "[1,0,1,0,1,0,1,0,1,0,1,0]}"))
        .verdict();
  };
  const std::string zeros = "0,0,0,0,0,0";
  const std::string small = "[2e-7,2e-7,2e-7]";
  const std::string steps = "1.8e-7,1.8e-7,1.8e-7,1.8e-7,1.8e-7,1.8e-7";
  // The scores are divided by the root of 2.
  EXPECT_EQ(verdict("[0,0,-26,0,0,0]", "[0,1000,0]", zeros), Verdict::kAccept);
  EXPECT_EQ(verdict("[0,0,-18,0,0,0]", "[0,1000,0]", zeros), Verdict::kReject);
  EXPECT_EQ(verdict("[0,0,0,0,0,0]", small, steps), Verdict::kAccept);
  EXPECT_EQ(verdict("[0,0,0,0,0,0]", small, zeros), Verdict::kReject);
}

// Two scores are 2 before they are capped.
TEST(RecordedAttention, TheHeaderHasTheSoftCapAndTheSinks) {
  const std::string query = R"({"shape":[2,2,3],"data":)"
                            R"([0,0,0,0,2.8284271,0,0,0,0,0,2.8284271,0]})";
  const std::string attend = R"("attend":{"soft_cap":1,"sinks":[-1,1]},)";
  const auto judge = [&](const std::string& out) {
    return JudgeText(Header("2", attend) + kPass + Attend(out, query));
  };
  const std::string right =
      "0.731058579,0.268941421,1.40904089,"
      "0.84776623,4.64550678,3.78169272";
  EXPECT_EQ(judge(right).verdict(), Verdict::kAccept) << judge(right).reason();
  EXPECT_THAT(judge("0.731058579,0.268941421,1.18638034,"
                    "0.84776623,4.64550678,5.59201934")
                  .reason(),
              HasSubstr("as if the soft cap were absent"));
  EXPECT_THAT(judge("1,1,1.55214506,"
                    "2,5.5,6.61963734")
                  .reason(),
              HasSubstr("as if the sinks were absent"));

  const auto reason = [](const std::string& header) {
    return JudgeText(Header("2", header) + kPass + Attend("1,1,2,2,5.5,5.5"))
        .reason();
  };
  EXPECT_THAT(reason(R"("attend":{"soft_cap":-1},)"),
              HasSubstr("soft_cap is -1, it must not be negative"));
  EXPECT_THAT(reason(R"("attend":{"sinks":["1"]},)"),
              HasSubstr("attend.sinks[0] is '1', it must be a number"));
  EXPECT_THAT(reason(R"("attend":{"sinks":[1]},)"),
              HasSubstr("query has 2 heads, sinks has 1 numbers"));
}

TEST(RecordedAttention, OnlyThePassIsJudged) {
  const std::string gone = R"({"op":"remove","seq":0,"begin":0,)"
                           R"("end":2147483647,"result":"ok"})"
                           "\n";
  const Judgement judgement =
      JudgeText(Header() + kPass + gone + Attend("7,7,7,7,7,7"));
  EXPECT_EQ(judgement.verdict(), Verdict::kAccept);
  EXPECT_EQ(judgement.judged.outputs, 0);
  EXPECT_EQ(judgement.level, Level::kVisibility);
}

TEST(RecordedAttention, BadInputIsNamed) {
  const auto reason = [](const std::string& text) {
    const Judgement judgement = JudgeText(text);
    EXPECT_EQ(judgement.verdict(), Verdict::kBadInput);
    return judgement.reason();
  };
  const std::string right = Attend("1,1,2,2,5.5,5.5");
  EXPECT_THAT(reason(Header("1") + kPass + right),
              HasSubstr("attend needs kvtrace 2"));
  EXPECT_THAT(reason(Header("5")), HasSubstr("1, 2, 3 or 4"));
  EXPECT_THAT(reason(Header() + right), HasSubstr("no pass has started"));
  EXPECT_THAT(reason(Header() + kPass.substr(0, kPass.find('\n') + 1) + right),
              HasSubstr("nothing was put into this layer"));
  EXPECT_THAT(reason(Header() + kPass +
                     Attend("1,1,2,2,5.5,5.5", R"({"shape":[1,2,3],"data":)"
                                               R"([0,0,0,0,0,0]})")),
              HasSubstr("the shape of query is [1, 2, 3], expected [2, 2, 3]"));
  EXPECT_THAT(reason(Header() + kPass +
                     Attend("1,1,2,2,5.5,5.5", R"({"shape":[2,1,3],"data":)"
                                               R"([0,0,0,0,0,0]})")),
              HasSubstr("the shape of out"));
  EXPECT_THAT(reason(Header() + kPass + Attend("1,1,2,2,5.5")),
              HasSubstr("out.data has 5 numbers"));
}

// No token is left that could explain the output.
TEST(RecordedAttention, AnOutputWithoutTokensIsWrong) {
  const Judgement judgement = JudgeText(
      Header() + kPass +
      R"({"op":"remove","seq":0,"begin":0,"end":2147483647,"result":"ok"})"
      "\n"
      R"({"op":"set_causal","except":[]})"
      "\n" +
      Attend("1,1,2,2,5.5,5.5"));
  EXPECT_EQ(judgement.verdict(), Verdict::kReject);
  EXPECT_THAT(judgement.reason(), HasSubstr("no fault of one token"));
}

TEST(RecordedAttention, LinesAreWrittenAsTheyAreRead) {
  const std::string text =
      Header("2", R"("attend":{"dtype":"f16","tolerance":0.25,)"
                  R"("soft_cap":30,"sinks":[0.5,-1]},)") +
      kPass + Attend("1,1,2,2,5.5,5.5");
  std::istringstream in(text);
  TraceReader reader(in);
  ASSERT_TRUE(reader.ReadHeader());
  std::ostringstream out;
  ASSERT_TRUE(WriteTraceHeader(reader.header(), out).ok());
  TraceOp op;
  std::vector<TraceOp> ops;
  while (reader.ReadOp(op)) ASSERT_TRUE(WriteTraceOp(op, out).ok());
  ASSERT_FALSE(reader.error());
  EXPECT_THAT(out.str(), HasSubstr(Attend("1,1,2,2,5.5,5.5")));
  std::istringstream again(out.str());
  TraceReader second(again);
  ASSERT_TRUE(second.ReadHeader());
  EXPECT_EQ(second.header().version, 2);
  EXPECT_EQ(second.header().attend_dtype, DType::kF16);
  EXPECT_EQ(second.header().attend_tolerance, 0.25);
  EXPECT_EQ(second.header().attend_soft_cap, 30);
  EXPECT_THAT(second.header().attend_sinks, ElementsAre(0.5, -1));
}

}  // namespace
}  // namespace kvtwin::props
