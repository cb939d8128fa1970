// Reading and writing recordings of pools.

#include "core/trace/paged_trace.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "core/json_line.h"
#include "core/names.h"
#include "core/trace/trace.h"
#include "core/trace/trace_reader.h"
#include "props/base/scratch_folder.h"
#include "props/oracle/judge.h"
#include "props/paged/paged_runner.h"
#include "props/report/show.h"
#include "props/report/show_pool.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

// The pool's lines with a change in line `line`, counted from 1.
std::string Changed(int line, const std::string& from, const std::string& to,
                    const char* placement = "lowest") {
  std::vector<std::string> lines = kPoolLines;
  std::string& changed = lines.at(AsSize(line - 1));
  changed = Replaced(changed, from, to);
  if (placement == std::string("other")) {
    lines[0] = Replaced(lines[0], "lowest", "other");
  }
  return Lines(lines);
}

TEST(PagedTrace, AcceptsTheUnchangedRecording) {
  ExpectAccept(Lines(kPoolLines), Level::kIdentity);
  ExpectAccept(Changed(1, "", "", "other"), Level::kVisibility);
  ExpectAccept(Lines({kPoolLines[0]}), Level::kIdentity);
}

// The documentation has examples of a cache and of a pool.
TEST(PagedTrace, AcceptsTheExamplesOfTheDocumentation) {
  std::ifstream in(KVTWIN_DOCS "/trace_format.md");
  std::vector<std::string> examples;
  std::string before;
  bool inside = false;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("```")) {
      // The comment before an outline says that it is not run.
      inside = line == "```json" && before.find("not run") == std::string::npos;
      if (inside) examples.emplace_back();
    } else if (inside) {
      examples.back() += line + "\n";
    }
    before = line;
  }
  ASSERT_EQ(examples.size(), 2U);
  for (const std::string& example : examples) {
    ExpectAccept(example, Level::kIdentity);
    EXPECT_GE(std::count(example.begin(), example.end(), '\n'), 7);
  }
  ExpectAccept(Replaced(examples[0], "lowest", "other"), Level::kVisibility);
}

struct Case {
  int line;
  std::string from;
  std::string to;
  std::string reason;
};

// Expects that each case is bad input, at both levels.
void ExpectBad(const std::vector<Case>& cases) {
  for (const auto& [line, from, to, reason] : cases) {
    SCOPED_TRACE(fmt::format("line {}: {}", line, to));
    for (const char* placement : {"lowest", "other"}) {
      ExpectBadInput(Changed(line, from, to, placement), line, reason);
    }
  }
}

TEST(PagedTrace, RefusesBadFirstLines) {
  ExpectBad({
      {1, R"("pool":{)", R"("pol":{)", "pool is missing"},
      {1, R"("pool":{)", R"("pool":7,"x":{)", "pool is 7, it must be an obj"},
      {1, R"("blocks":4)", R"("blocks":0)", "pool.blocks is 0"},
      {1, R"("blocks":4)", R"("blocks":4.5)", "pool.blocks is 4.5"},
      {1, R"("blocks":4)", R"("blocks":"4")", "pool.blocks is '4'"},
      {1, R"("blocks":4)", R"("blocks":2147483648)", "blocks is 2147483648"},
      {1, R"("blocks":4)", R"("blocks":2147483647)", "2147483647"},
      {1, R"("blocks":4,)", "", "pool.blocks is missing"},
      {1, R"("block_size":2)", R"("block_size":-2)", "pool.block_size is -2"},
      {1, R"("max_seq_len":8)", R"("max_seq_len":0)", "max_seq_len is 0"},
      {1, R"("layers":1)", R"("layers":4097)", "from 1 to 4096"},
      {1, R"("kv_heads":1)", R"("kv_heads":null)", "kv_heads is null"},
      {1, R"("k_head_dim":2)", R"("k_head_dim":[2])", "k_head_dim is a list"},
      {1, R"("v_head_dim":1)", R"("v_head_dim":true)", "v_head_dim is true"},
      {1, R"("dtype":"f32")", R"("dtype":"f64")", "pool.dtype is 'f64'"},
      {1, R"("dtype":"f32")", R"("dtype":"bits")", "pool.dtype is 'bits'"},
      {1, R"("dtype":"f32")", R"("dtype":"f32","v_dtype":1)", "v_dtype is 1"},
      {1, R"("dtype":"f32")", R"("dtype":"q8_0")", "blocks of 32"},
      {1, "token_major", "flat", "pool.layout is 'flat'"},
      {1, R"("kvtrace":1)", R"("kvtrace":3)", "kvtrace is 3"},
  });
  ExpectBadInput(Changed(1, R"("paged")", R"("page")", "other"), 1,
                 "cache.type is 'page'");
  ExpectBadInput(Changed(1, R"("cache":)", R"("cash":)", "other"), 1,
                 "cache is missing");
  ExpectBadInput(Changed(1, "lowest", "scatter"), 1, "placement is 'scatter'");
  ExpectBadInput(Changed(1, R"("placement":"lowest",)", ""), 1,
                 "placement is missing");
  const std::string large =
      Replaced(kPoolLines[0], R"("blocks":4)", R"("blocks":40000000)");
  ExpectBadInput(Lines({large}), 1, "the pool would need");
  ExpectAccept(Lines({Replaced(large, "lowest", "other")}),
               Level::kVisibility);  // No pool is made.
  ExpectAccept(Changed(1, R"("k_head_dim":2,"v_head_dim":1)",
                       R"("k_head_dim":2,"v_head_dim":1,"v_dtype":"f16")"),
               Level::kIdentity);
  // The lines of a cache are not those of a pool.
  ExpectBadInput(Lines({kPoolLines[0], kStart}), 2, "op is 'start_forward'");
  ExpectBadInput(Lines({kHeader, kPoolLines[1]}), 2, "op is 'open'");
  ExpectBadInput(Lines({kPoolLines[0], kPoolLines[1], kHeader}), 3,
                 "a second header");
}

TEST(PagedTrace, RefusesBadLines) {
  ExpectBad({
      {2, R"("op":"open")", R"("op":"opened")", "op is 'opened'"},
      {2, R"("op":"open")", R"("op":1)", "op is 1"},
      {2, "[7,8,9]", "[7,8,9.5]", "prompt[2] is 9.5"},
      {2, "[7,8,9]", "[7,8,2147483648]", "prompt[2] is 2147483648"},
      {2, "[7,8,9]", R"(["a"])", "prompt[0] is 'a', it must be an integer"},
      {2, "[7,8,9]", "7", "prompt is 7"},
      {2, R"("salt":"s")", R"("salt":7)", "salt is 7, it must be a string"},
      {2, R"(["x","y"])", R"("x")", "extra is 'x', it must be a list of str"},
      {2, R"(["x","y"])", "[1]", "extra[0] is 1, it must be a string"},
      {2, R"(["x","y"])", R"(["x","y\n"])", "extra has a string with a line"},
      {2, R"("len":0)", R"("len":-1)", "len is -1"},
      {2, R"("len":0)", R"("length":0)", "len is missing"},
      {2, R"("result":0)", R"("result":-1)", "result is -1"},
      {2, R"(,"result":0)", "", "result is missing"},
      {3, R"("seq":0)", R"("seq":0.5)", "seq is 0.5"},
      {3, R"("layer":0)", R"("layer":1)", "layer is 1"},
      {3, R"("layer":0)", R"("layer":-1)", "layer is -1"},
      {3, R"("result":"ok")", R"("result":"fine")", "result is 'fine'"},
      {3, R"("result":"ok")", R"("result":"not_supported")", "result is 'not"},
      {3, R"("start":0)", R"("start":-1)", "start is -1"},
      {3, "[2,1,3]", "[2,1,4]", "key.data has 6 numbers"},
      {3, "[100,1000", "[NaN,1000", "not JSON"},
      {3, "[100,1000", "[1e999,1000", "1e999"},
      {3, "[100,1000", "[1e39,1000", "key.data[0] is 1e+39, out of the range"},
      {3, R"("value":)", R"("val":)", "value is missing"},
      {4, "[7,8,9]", "[7,8,null]", "tokens[2] is null"},
      {4, R"("tokens":)", R"("tocens":)", "new_tokens is missing"},
      {4, R"("tokens":)", R"("new_tokens":3,"tokens":)", "new_tokens is there"},
      {5, R"("len":3)", R"("len":"3")", "len is '3'"},
      {5, R"("result":1)", R"("result":1.0)", "result is 1.0"},
      {8, R"(,"len":4)", "", "len is missing"},
      {9, R"("blocks":[0,2])", R"("blocks":[0,{}])", "blocks[1] is an object"},
      {9, R"("key":)", R"("kay":)", "key is missing"},
      {9, R"([1,1,4],"data":[100,200,300,400])", R"([1,1,2],"data":[1,2])",
       "value has 2 rows, key has 4"},
      {9, "[1,1,4]", "[1,1,5]", "value.data has 4 numbers"},
      {9, R"({"shape":[2,1,4],"data":[100,1000,200,1001,300,1002,400,1003]})",
       "null", "value has rows, key has none"},
      {9, "[100,1000,200,1001,300,1002,400,1003]", "[]",
       "key.data has 0 numbers"},
      {9, R"("shape":[2,1,4])", R"("shape":[2,-1,4])", "key.shape[1] is -1"},
      {10, R"("begin":1)", R"("begin":"1")", "begin is '1'"},
      {10, "[1,2]", "[1,3000000000]", "slots[1] is 3000000000"},
      {11, "[0,2,4]", "[0,2]", "indptr has 2 numbers, expected 3"},
      {11, "[1,2]", "[1]", "last_page_len has 1 numbers, expected 2"},
      {11, R"("seqs":[0,1])", R"("seqs":null)", "seqs is null"},
      {12, R"("columns":2)", R"("columns":3)",
       "blocks has 4 numbers, expected 6"},
      {12, R"("columns":2)", R"("columns":-2)", "columns is -2"},
      {12, "[4,3]", "[4]", "seq_lens has 1 numbers, expected 2"},
      {13, R"("shared":1)", R"("shared":-1)", "shared is -1"},
      {13, R"("cached":0,)", "", "cached is missing"},
      {15, R"("seq":0)", R"("sec":0)", "seq is missing"},
  });
}

TEST(PagedTrace, ReadsATensorOfNoRows) {
  const std::string views = R"({"op":"views","seq":0,"layer":0,"blocks":[],)"
                            R"("key":{"shape":[2,1,0],"data":[]},)"
                            R"("value":{"shape":[1,1,0],"data":[]}})";
  ExpectAccept(Lines({kPoolLines[0], kPoolLines[1], views}), Level::kIdentity);
  ExpectReject(Lines({kPoolLines[0], kPoolLines[1], kPoolLines[2], views}), 4,
               Level::kNone);
}

TEST(PagedTrace, IsShownWithTheContentOfItsLines) {
  std::vector<std::string> lines = kPoolLines;
  lines[0] = Replaced(lines[0], "lowest", "other");
  lines[3] = R"({"op":"views","seq":0,"layer":0,"key":null,"blocks":[3,1]})";
  lines.resize(4);
  const ScratchFolder folder("show");
  const std::string path = folder.File("pool.jsonl");
  std::ofstream(path) << Lines(lines);
  const auto failure = ExplainRecording(path, kTwins);
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->trace[0].arguments,
            "prompt [7, 8, 9], salt 's', extra 'x' 'y': sequence 0, 0 tokens "
            "found");
  for (const char* text :
       {"    sequence 0      0 tokens and 3 appended\n",
        "    this line has\n    sequence 0    blocks 3 1\n"}) {
    EXPECT_NE(failure->report.find(text), std::string::npos) << failure->report;
  }
}

TEST(PagedTrace, ShowsWhatLedToALine) {
  const auto calls = [](const std::vector<std::string>& lines, int line) {
    std::istringstream in(Lines(lines));
    TraceReader reader(in);
    EXPECT_TRUE(reader.ReadHeader());
    std::vector<PagedTraceOp> ops(1);
    while (reader.ReadOp(ops.back())) ops.emplace_back();
    ops.pop_back();
    std::vector<std::string> texts;
    for (const Step& step : PoolSteps(ops, line)) {
      texts.push_back(fmt::format("{} {}", step.number, step.call));
    }
    return texts;
  };
  // Queries are left out, unless they are the last line.
  std::vector<std::string> lines = kPoolLines;
  lines.insert(lines.begin() + 4, R"({"op":"seq_len","seq":0,"len":3})");
  const std::string open =
      "2 open  prompt [7, 8, 9], salt 's', extra 'x' 'y': sequence 0, 0 tokens "
      "found";
  EXPECT_THAT(calls(lines, 2), testing::ElementsAre(open));
  EXPECT_THAT(calls(lines, 6),
              testing::ElementsAre(
                  open, "3 append  sequence 0, layer 0, K [2, 1, 3]: ok",
                  "4 commit  sequence 0, tokens [7, 8, 9]",
                  "6 fork  sequence 0, len 3: sequence 1"));
  EXPECT_EQ(calls(lines, 5).back(), "5 seq_len  sequence 0, len 3");
}

DenseTensor RowOf(const std::vector<float>& numbers) {
  return CopyOf(
      DenseView(numbers.data(), DType::kF32, {std::ssize(numbers), 1, 1, 1}),
      DType::kF32);
}

// A live pool is judged by the same numbers as its recording.
TEST(PagedTrace, ACallIsReadLikeItsLine) {
  std::vector<float> numbers;
  for (int i = 0; i < 32; ++i)
    numbers.push_back(0.1F * static_cast<float>(i) - 1);
  for (const DType dtype : kRowDTypes) {
    PagedTraceHeader header;
    header.spec = {.k_head_dim = 32, .v_head_dim = 32, .dtype = DType::kF16};
    header.spec.v_dtype = dtype;
    header.attention.emplace();
    for (const auto kind : {PagedTraceOpKind::kAppend, PagedTraceOpKind::kViews,
                            PagedTraceOpKind::kAttend}) {
      const PagedTraceOp op = {
          .kind = kind, .key = RowOf(numbers), .value = RowOf(numbers)};
      std::stringstream lines;
      ASSERT_TRUE(WriteTraceHeader(header, lines).ok());
      ASSERT_TRUE(WriteTraceOp(op, lines).ok());
      TraceReader reader(lines);
      ASSERT_TRUE(reader.ReadHeader()) << reader.error()->reason;
      PagedTraceOp line;
      ASSERT_TRUE(reader.ReadOp(line)) << reader.error()->reason;
      const auto call = AsRead(op, header);
      ASSERT_TRUE(call.ok()) << call.status().ToString();
      EXPECT_EQ(call->key, line.key);
      EXPECT_EQ(call->value, line.value);
    }
  }
}

TEST(PagedTrace, ACallThatNoLineHoldsIsRefused) {
  const auto why = [](const PagedTraceOp& op) {
    PagedTraceHeader header;
    header.spec.v_dtype = DType::kF8;
    return AsRead(op, header).status().message();
  };
  using enum PagedTraceOpKind;
  EXPECT_EQ(why({.kind = kUsage, .usage = {.used = -1}}),
            "used is -1, it must be at least 0");
  EXPECT_EQ(why({.kind = kTable, .table = {.columns = -1}}),
            "columns is -1, it must be at least 0");
  EXPECT_EQ(why({.kind = kTable, .sequences = {0}, .table = {.columns = 1}}),
            "blocks has 0 numbers, expected 1");
  EXPECT_EQ(why({.kind = kTable, .sequences = {0}}),
            "seq_lens has 0 numbers, expected 1");
  EXPECT_EQ(why({.kind = kCsr}), "indptr has 0 numbers, expected 1");
  EXPECT_EQ(why({.kind = kCsr, .sequences = {0}, .csr = {.indptr = {0, 0}}}),
            "last_page_len has 0 numbers, expected 1");
  EXPECT_EQ(why({.kind = kViews, .key = RowOf({0, NAN})}),
            "key: element 1 is nan, which no recording can hold");
  EXPECT_EQ(why({.kind = kViews, .key = RowOf({0}), .value = RowOf({449})}),
            "value: element 0 is 449, which no recording can hold");
  EXPECT_EQ(why({.kind = kAttend, .value = RowOf({-INFINITY})}),
            "out: element 0 is -inf, which no recording can hold");
}

TEST(PagedTrace, RefusesMisuse) {
  ExpectBad({
      {2, "[7,8,9]", "[7,-8,9]", "token 1 is -8"},
      {3, R"("seq":0)", R"("seq":2)",
       "append: invalid_argument: sequence 2 does"},
      {3, R"("seq":0)", R"("seq":-1)", "sequence -1 does not exist"},
      {3, R"("shape":[2,1,3])", R"("shape":[1,2,3])",
       "key has shape [1, 2, 3]"},
      {3, R"("shape":[1,1,3])", R"("shape":[1,3,1])", "value has shape"},
      {4, "[7,8,9]", "[7,8,9,9]", "new_tokens is 4, layer 0 of"},
      {4, "[7,8,9]", "[7,8,-9]", "token 2 is -9"},
      {4, R"("tokens":[7,8,9])", R"("new_tokens":-1)", "new_tokens is -1"},
      {5, R"("len":3)", R"("len":4)", "len is 4, sequence 0 has 3 tokens"},
      {5, R"("len":3)", R"("len":-1)", "len is -1"},
      {7, R"("new_tokens":1)", R"("new_tokens":2)", "new_tokens is 2"},
      {8, R"("seq":1)", R"("seq":7)", "sequence 7 does not exist"},
      {9, R"("seq":1)", R"("seq":7)", "sequence 7 does not exist"},
      {10, R"("begin":1)", R"("begin":-1)", "positions -1 to 1 are not within"},
      {10, R"("begin":1)", R"("begin":2)", "positions 2 to 4 are not within"},
      {10, R"("seq":0)", R"("seq":5)", "sequence 5 does not exist"},
      {11, R"("seqs":[0,1])", R"("seqs":[0,2])", "sequence 2 does not exist"},
      {12, R"("seqs":[1,0])", R"("seqs":[-1,0])", "sequence -1 does not exist"},
      {14, R"("len":1)", R"("len":5)", "len is 5"},
      {15, R"("seq":0)", R"("seq":3)", "sequence 3 does not exist"},
  });
}

constexpr int kLong = 100000;

// The header of a pool for a sequence of kLong tokens, and lines that fill it.
std::vector<std::string> LongSequence() {
  const std::string large =
      Replaced(Replaced(kPoolLines[0], R"("blocks":4)", R"("blocks":100)"),
               R"("block_size":2)", R"("block_size":1000)");
  const std::string header =
      Replaced(Replaced(large, R"("max_seq_len":8)", R"("max_seq_len":100000)"),
               R"("k_head_dim":2)", R"("k_head_dim":1)");
  std::string zeros = "0";
  for (int i = 1; i < kLong; ++i) zeros += ",0";
  return {header, R"({"op":"open","result":0,"len":0})",
          fmt::format(R"({{"op":"append","seq":0,"layer":0,"result":"ok",)"
                      R"("key":{{"shape":[1,1,{0}],"data":[{1}]}},)"
                      R"("value":{{"shape":[1,1,{0}],"data":[{1}]}}}})",
                      kLong, zeros),
          fmt::format(R"({{"op":"commit","seq":0,"new_tokens":{}}})", kLong)};
}

TEST(PagedTrace, RefusesPoolsThatAreTooLarge) {
  const std::string deep(100000, '[');
  ExpectBadInput(Lines({kPoolLines[0], R"({"op":)" + deep}), 2, "16 deep");
  // A short line that copies a long sequence.
  std::vector<std::string> lines = LongSequence();
  const std::string header = lines[0];
  for (int i = 1; i < 1000; ++i) {
    lines.push_back(fmt::format(
        R"({{"op":"fork","seq":0,"len":{},"result":{}}})", kLong, i));
  }
  for (const char* placement : {"lowest", "other"}) {
    lines[0] = Replaced(header, "lowest", placement);
    const Judgement judgement = JudgeText(Lines(lines));
    EXPECT_EQ(VerdictName(judgement.verdict()), "bad_input");
    EXPECT_NE(judgement.reason().find("the pool would now need"),
              std::string::npos)
        << judgement.reason();
    // A token and its row take at least 160 bytes.
    EXPECT_LT(judgement.line(), 4 + kTraceTokenBytesMax / (160 * kLong));
  }
  // A block of two tokens of three floats takes another 128 bytes.
  for (const int more : {0, 1}) {
    const int blocks = static_cast<int>(kTraceCacheBytesMax / (128 + 24));
    std::istringstream first(
        Replaced(kPoolLines[0], R"("blocks":4)",
                 fmt::format(R"("blocks":{})", blocks + more)));
    EXPECT_EQ(TraceReader(first).ReadHeader(), more == 0);
  }
  // Sequences of many layers that hold nothing.
  std::vector<std::string> opens = {
      Replaced(kPoolLines[0], R"("layers":1)", R"("layers":4096)")};
  for (int i = 0; i < 5000; ++i) {
    opens.push_back(fmt::format(R"({{"op":"open","len":0,"result":{}}})", i));
  }
  EXPECT_LT(JudgeText(Lines(opens)).line(), 4200);
  // Appended rows count for good, even if they are replaced later.
  std::vector<std::string> appends(lines.begin(), lines.begin() + 2);
  for (int i = 0; i < 10; ++i) appends.push_back(lines[2]);
  for (const char* placement : {"lowest", "other"}) {
    appends[0] = Replaced(header, "lowest", placement);
    ExpectBadInput(Lines(appends), 8, "append: the pool would now need");
  }
  // A list that names a sequence many times.
  std::string again = "0";
  for (int i = 0; i < 100000; ++i) again += ",0";
  lines.resize(4);
  lines.push_back(fmt::format(R"({{"op":"csr","seqs":[{0}],"indptr":[0,{0}],)"
                              R"("indices":[],"last_page_len":[{0}]}})",
                              again));
  EXPECT_EQ(JudgeText(Lines(lines)).line(), 5);
}

TEST(PagedTrace, RefusesKeysThatAreTooLarge) {
  // A long prefix key counts for each block; a key of many strings is accepted.
  const std::string pool =
      Replaced(kPoolLines[0], R"("blocks":4)", R"("blocks":100000)");
  const std::string salted =
      Replaced(kPoolLines[1], R"("s")", '"' + std::string(4000, 's') + '"');
  ExpectBadInput(Lines({pool, salted}), 2, "the pool would now need");
  ExpectAccept(Lines({Replaced(pool, "lowest", "other"), salted}),
               Level::kVisibility);
  std::string many = "\"x\"";
  for (int i = 0; i < 100000; ++i) many += ",\"x\"";
  ExpectAccept(Lines({kPoolLines[0], Replaced(kPoolLines[1], R"("x")", many)}),
               Level::kIdentity);
  // Empty strings take memory, too; and each sequence has the key.
  std::string empty = "\"\"";
  for (int i = 0; i < 100000; ++i) empty += ",\"\"";
  const std::string keyed = Replaced(kPoolLines[1], R"("x")", empty);
  ExpectBadInput(
      Lines({Replaced(pool, R"("blocks":100000)", R"("blocks":100)"), keyed}),
      2, "the pool would now need");
  std::vector<std::string> forks = {kPoolLines[0], keyed};
  for (int i = 1; i < 100; ++i) {
    forks.push_back(
        fmt::format(R"({{"op":"fork","seq":0,"len":0,"result":{}}})", i));
  }
  EXPECT_LT(JudgeText(Lines(forks)).line(), 60);
  EXPECT_EQ(JudgeText(Lines(forks)).reason().substr(0, 32),
            "fork: the pool would now need 2.");
}

TEST(PagedTrace, AcceptsOrRefusesARecordingCutAnywhere) {
  const std::string text = Lines(kPoolLines);
  for (std::size_t length = 0; length <= text.size(); ++length) {
    const Judgement judgement = JudgeText(text.substr(0, length));
    const bool whole_line =
        length > 0 && (text[length - 1] == '\n' ||
                       text[std::min(text.size() - 1, length)] == '\n');
    EXPECT_EQ(VerdictName(judgement.verdict()),
              whole_line ? "accept" : "bad_input")
        << length;
  }
}

RC_GTEST_PROP(PagedTrace, SurvivesChangedBytes, ()) {
  std::string text = Lines(kPoolLines);
  if (*rc::gen::arbitrary<bool>()) text = Replaced(text, "lowest", "other");
  text = WithChangedBytes(text);
  const Judgement judgement = JudgeText(text);
  RC_ASSERT((judgement.verdict() == Verdict::kAccept) ==
            judgement.reason().empty());
  RC_CLASSIFY(judgement.verdict() == Verdict::kAccept, "accept");
  RC_CLASSIFY(judgement.verdict() == Verdict::kReject, "reject");
  RC_CLASSIFY(judgement.verdict() == Verdict::kBadInput, "bad input");
}

std::string RewrittenPools(const std::string& text) {
  std::istringstream in(text);
  std::ostringstream out;
  TraceReader reader(in);
  EXPECT_TRUE(reader.ReadHeader());
  if (!reader.paged()) return "";
  EXPECT_TRUE(WriteTraceHeader(*reader.paged(), out).ok());
  PagedTraceOp op;
  while (reader.ReadOp(op)) EXPECT_TRUE(WriteTraceOp(op, out).ok());
  EXPECT_FALSE(reader.error()) << reader.error()->reason;
  return out.str();
}

// The output is the same byte for byte, with the keys in the writer's order.
TEST(PagedTrace, WritesWhatItRead) {
  std::vector<std::string> lines = kPoolLines;
  const auto expect_same = [&] {
    const std::string written = RewrittenPools(Lines(lines));
    std::istringstream actual(written);
    std::string line;
    for (const std::string& expected : lines) {
      ASSERT_TRUE(std::getline(actual, line));
      EXPECT_EQ(nlohmann::json::parse(line), nlohmann::json::parse(expected));
    }
    EXPECT_EQ(RewrittenPools(written), written);
  };
  expect_same();
  // Optional fields are left out, and others have other values.
  lines[0] = Replaced(Replaced(lines[0], "lowest", "other"), R"("dtype":"f32")",
                      R"("dtype":"f32","v_dtype":"bf16")");
  lines[0] = Replaced(lines[0], "token_major", "head_major");
  lines[1] = R"({"op":"open","len":0,"result":3})";
  lines[2] = Replaced(Replaced(lines[2], R"("start":0,)", ""), R"("ok")",
                      R"("cache_full")");
  lines[3] = R"({"op":"views","seq":0,"layer":0,"key":null})";
  lines[8] = R"({"op":"views","seq":0,"layer":0,)"
             R"("key":{"shape":[2,1,1],"data":[-0.5,1e-45]}})";
  lines[9] = R"({"op":"slots","seq":0,"begin":0,"slots":[]})";
  lines[10] = R"({"op":"csr","seqs":[],"indptr":[0],"indices":[],)"
              R"("last_page_len":[]})";
  lines[11] = R"({"op":"table","seqs":[],"columns":0,"blocks":[],)"
              R"("seq_lens":[]})";
  expect_same();
}

TEST(PagedTrace, WritesOnlyWhatReadsBackEqual) {
  std::ostringstream out;
  PagedTraceOp open;
  open.prefix_key.salt = "\xff";
  EXPECT_FALSE(WriteTraceOp(open, out).ok());
  open.prefix_key = {"", {"a\nb"}};
  EXPECT_FALSE(WriteTraceOp(open, out).ok());
  PagedTraceOp append;
  append.kind = PagedTraceOpKind::kAppend;
  append.key = FilledTensor(DType::kF16, {1, 1, 1, 1}, 1e30F);
  append.value = FilledTensor(DType::kF16, {1, 1, 1, 1}, 1);
  EXPECT_FALSE(WriteTraceOp(append, out).ok());
  std::swap(append.key, append.value);
  EXPECT_FALSE(WriteTraceOp(append, out).ok());
  EXPECT_EQ(out.str(), "");
}

TEST(PagedTrace, ReadsStrings) {
  JsonValue object;
  std::string problem = ParseJsonLine(R"({"a":["","x"],"b":"y"})", object);
  const JsonFields fields(object, "", problem);
  EXPECT_EQ(fields.Strings("a"), (std::vector<std::string>{"", "x"}));
  EXPECT_EQ(fields.String("b"), "y");
  EXPECT_EQ(problem, "");
  EXPECT_TRUE(fields.Strings("c").empty());
  EXPECT_EQ(problem, "c is missing");
  problem.clear();
  EXPECT_EQ(fields.String("d"), "");
  EXPECT_EQ(problem, "d is missing");
}

}  // namespace
}  // namespace kvtwin::props
