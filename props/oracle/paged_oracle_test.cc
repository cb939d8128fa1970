// Judging recordings of pools: those of the twins, and modified ones.

#include "props/oracle/paged_oracle.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "props/base/forwarding_pool.h"
#include "props/oracle/judge.h"
#include "props/paged/paged_runner.h"
#include "props/paged/pool_recorder.h"
#include "props/report/show.h"
#include "props/testing/pools.h"
#include "props/testing/test_trace.h"
#include "reference/paged_ledger.h"

namespace kvtwin::props {
namespace {

using Json = nlohmann::ordered_json;

std::string Recorded(const PagedHistory& history, std::string_view twin) {
  std::ostringstream out;
  EXPECT_TRUE(WritePagedRecording(history, twin, out).ok());
  return out.str();
}

PagedHistory AnyHistory() {
  PagedHistory history =
      MakePagedHistory(5, *rc::gen::inRange<std::uint64_t>(0, 100000));
  history.ops.resize(std::min<std::size_t>(history.ops.size(), 25));
  return history;
}

// Properties
// ---------------------------------------------------------------------------

RC_GTEST_PROP(PagedOracle, AcceptsRecordingsOfTheTwins, ()) {
  const PagedHistory history = AnyHistory();
  const std::string text = Recorded(history, *rc::gen::elementOf(kTwins));
  RC_LOG() << ToText(history) << "\n";
  RC_ASSERT(JudgeText(text).reason().empty());
  const Judgement other = JudgeText(Replaced(text, "lowest", "other"));
  RC_LOG() << other.line() << ": " << other.reason() << "\n";
  RC_ASSERT(other.verdict() == Verdict::kAccept);
  RC_ASSERT(other.level == Level::kVisibility);
}

// Changes one number of an answer; returns false if the line has none.
bool Mutate(Json& line) {
  static const std::vector<std::string> kNumbers = {"start", "free", "cached",
                                                    "used", "shared"};
  static const std::vector<std::string> kLists = {
      "indptr", "indices", "last_page_len", "seq_lens", "blocks", "slots"};
  const std::string op = line.at("op");
  std::vector<std::string> choices;
  if (op == "open" || op == "fork" || op == "append") choices = {"result"};
  if (op == "open" || op == "seq_len") choices.emplace_back("len");
  for (const std::string& key : kNumbers) {
    if (line.contains(key)) choices.push_back(key);
  }
  for (const std::string& key : kLists) {
    if (line.contains(key) && !line[key].empty()) choices.push_back(key);
  }
  if (op == "views" && line["key"].is_object()) {
    choices.insert(choices.end(), {"key", "value", "key"});
  }
  if (choices.empty()) return false;
  const std::string key = *rc::gen::elementOf(choices);
  Json& field = line[key];
  if (field.is_string()) {
    field = field == "ok" ? "cache_full" : "ok";
  } else if (field.is_number()) {
    field = field.get<int>() + 1;
  } else {
    Json& list = field.is_object() ? field["data"] : field;
    Json& value = list[*rc::gen::inRange<std::size_t>(0, list.size())];
    // A different number in any dtype.
    if (field.is_object()) {
      value = -value.get<double>() - 1;
    } else {
      value = value.get<int>() + 1;
    }
  }
  RC_TAG(op + "." + key);
  return true;
}

RC_GTEST_PROP(PagedOracle, RejectsAnyOneChangedAnswerAtItsLine, ()) {
  std::istringstream in(Recorded(AnyHistory(), "reference"));
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  const auto at = *rc::gen::inRange<std::size_t>(1, lines.size());
  Json line = Json::parse(lines[at]);
  RC_PRE(Mutate(line));
  RC_LOG() << lines[at] << "\nbecame\n" << line.dump() << "\n";
  lines[at] = line.dump();
  const Judgement judgement = JudgeText(Lines(lines));
  RC_LOG() << VerdictName(judgement.verdict()) << judgement.line() << ": "
           << judgement.reason() << "\n";
  RC_ASSERT(judgement.verdict() == Verdict::kReject);
  RC_ASSERT(judgement.line() == static_cast<std::int64_t>(at) + 1);
}

TEST(PagedOracle, AcceptsTheRecordingsOfPools) {
  PagedCoverageCounts counts;
  for (const auto& file : Recordings("pools")) {
    SCOPED_TRACE(file);
    const std::string text = ReadFile(file);
    ExpectAccept(text, Level::kIdentity);
    ExpectAccept(Replaced(text, "lowest", "other"), Level::kVisibility);
    const Json header = Json::parse(text.substr(0, text.find('\n')));
    const auto history =
        ParsePagedHistory(header.at("history").get<std::string>());
    ASSERT_TRUE(history.ok());
    EXPECT_EQ(Recorded(*history, "reference"), text);
    EXPECT_EQ(TextOf(RunPaged(*history, &counts)), "");
  }
  EXPECT_GT(counts.found, 0);
  EXPECT_GT(counts.copied, 0);
  EXPECT_GT(counts.evicted, 0);
  EXPECT_GT(counts.truncated, 0);
  EXPECT_GT(counts.full, 0);
}

// The errors that each kind of line can have
// ---------------------------------------------------------------------------

struct Case {
  int line;
  std::string from;
  std::string to;
  std::string reason;
};

std::string Changed(const Case& test_case, bool other) {
  std::vector<std::string> lines = kPoolLines;
  if (other) lines[0] = Replaced(lines[0], "lowest", "other");
  std::string& changed = lines.at(AsSize(test_case.line - 1));
  changed = Replaced(changed, test_case.from, test_case.to);
  return Lines(lines);
}

void ExpectRejects(const std::vector<Case>& cases, bool other) {
  for (const Case& test_case : cases) {
    SCOPED_TRACE(test_case.to);
    const Judgement judgement = JudgeText(Changed(test_case, other));
    EXPECT_EQ(VerdictName(judgement.verdict()), "reject") << judgement.reason();
    EXPECT_EQ(judgement.line(), test_case.line) << judgement.reason();
    EXPECT_NE(judgement.reason().find(test_case.reason), std::string::npos)
        << "'" << judgement.reason() << "' lacks '" << test_case.reason << "'";
  }
}

// Answers that no pool may give: rejected at both levels.
TEST(PagedOracle, RejectsAnswersThatAreWrongForEveryPool) {
  const std::vector<Case> cases = {
      {3, R"("start":0)", R"("start":1)", "append: start is 1"},
      {6, R"("start":3)", R"("start":2)", "append: start is 2"},
      {8, R"("len":4)", R"("len":3)", "seq_len: len is 3, expected 4"},
      {9, "400,1003]", "100,1003]", "views: position 3 of sequence 1 has"},
      {9, "300,400]", "400,300]", "position 2 of sequence 1 has"},
      {9, "100,1000,200,1001", "200,1001,100,1000",
       "position 0 of sequence 1 has the row of sequence 0, position 1 "
       "(appended on line 3); expected the row of sequence 0, position 0 "
       "(appended on line 3); found K [200, 1001] V [100], expected K [100, "
       "1000] V "
       "[100]"},
      {9,
       R"({"shape":[2,1,4],"data":[100,1000,200,1001,300,1002,400,1003]},)"
       R"("value":{"shape":[1,1,4],"data":[100,200,300,400]})",
       "null", "the number of rows is 0, expected 4: 4 are missing"},
      {9, "[2,1,4]", "[1,2,4]", "the shape of key is [1, 2, 4], expected [2,"},
      {9, "[1,1,4]", "[1,1,4,1]", ""},
      {9, "[0,2]", "[0]", "the number of blocks is 1, expected 2"},
      {9, "[0,2]", "[0,2,3]", "the number of blocks is 3, expected 2"},
      {10, "[1,2]", "[0,2]", "slot 0 of position 1 is not at offset 1"},
      {10, "[1,2]", "[1,-2]", "slot -2 of position 2 is not at offset 0"},
      {11, "[0,2,4]", "[0,1,4]", "indptr has 0 and 1 for sequence 0, expected"},
      {11, "[0,2,4]", "[1,2,4]", "indptr has 1 and 2 for sequence 0"},
      {11, "[1,2]", "[2,2]", "last_page_len[0] is 2, sequence 0 has 3 tokens"},
      {11, "[0,1,0,2]", "[0,1,0]", "the number of indices is 3, expected 4"},
      {11, "[0,1,0,2]", "[0,1,0,2,3]", "the number of indices is 5"},
      {12, "[4,3]", "[4,4]", "seq_lens[1] is 4, sequence 0 has 3 tokens"},
      {12, R"("columns":2,"blocks":[0,2,0,1])", R"("columns":1,"blocks":[0,0])",
       "columns is 1, sequence 1 has 2 blocks"},
      {12, R"("columns":2,"blocks":[0,2,0,1])",
       R"("columns":3,"blocks":[0,2,-1,0,1,2])",
       "column 2 of sequence 0, which has 2 blocks, is 2"},
      {13, R"("free":1)", R"("free":2)", "free"},
  };
  std::vector<Case> wrong;
  for (const Case& test_case : cases) {
    if (!test_case.reason.empty()) wrong.push_back(test_case);
  }
  ExpectRejects(wrong, /*other=*/true);
  for (Case& test_case : wrong) {
    if (test_case.line == 13 || test_case.line == 3 || test_case.line == 6)
      test_case.reason = "";
  }
  ExpectRejects(wrong, /*other=*/false);
}

// Answers that only another pool may give: rejected with "lowest".
TEST(PagedOracle, RejectsAnswersThatDifferFromOurTwins) {
  const std::vector<Case> cases = {
      {2, R"("result":0)", R"("result":1)", "open: result is 1, expected 0"},
      {3, R"("ok")", R"("cache_full")",
       "append: result is cache_full, expected"},
      {5, R"("result":1)", R"("result":2)", "fork: result is 2, expected 1"},
      {9, R"("blocks":[0,2])", R"("blocks":[0,3])",
       "views: block 1 of sequence 1 is 3, expected 2"},
      {10, "[1,2]", "[1,6]", "slots: block 1 of sequence 0 is 3, expected 1"},
      {11, "[0,1,0,2]", "[0,1,0,3]",
       "csr: block 1 of sequence 1 is 3, expected"},
      {12, "[0,2,0,1]", "[0,3,0,1]",
       "table: block 1 of sequence 1 is 3, expected"},
      {12, R"("columns":2,"blocks":[0,2,0,1])",
       R"("columns":3,"blocks":[0,2,-1,0,1,-1])", "columns is 3, expected 2"},
      {13, R"("free":1,"cached":0)", R"("free":0,"cached":1)",
       "usage: free is 0, expected 1"},
      {13, R"("shared":1)", R"("shared":2)", "usage: shared is 2, expected 1"},
  };
  ExpectRejects(cases, /*other=*/false);
  // A prompt whose first block is still there.
  const std::string open =
      R"({"op":"open","prompt":[7,8,5],"salt":"s","extra":["x","y"],)"
      R"("len":0,"result":0})";
  std::vector<std::string> lines = kPoolLines;
  lines.push_back(open);
  ExpectReject(Lines(lines), 17, Level::kVisibility);
  EXPECT_EQ(JudgeText(Lines(lines)).reason(), "open: len is 0, expected 2");
  lines[0] = Replaced(lines[0], "lowest", "other");
  ExpectAccept(Lines(lines), Level::kVisibility);
}

// The strongest level that held, and whether the file continues.
TEST(PagedOracle, NamesTheStrongestLevelThatHeld) {
  const Case moved = {11, "[0,1,0,2]", "[0,1,0,3]", ""};
  std::vector<std::string> lines = kPoolLines;
  lines[8] = Replaced(lines[8], R"("blocks":[0,2],)", "");
  lines[10] = Replaced(lines[10], moved.from, moved.to);
  lines.resize(11);
  ExpectReject(Lines(lines), 11, Level::kVisibility);
  ExpectReject(Lines(lines) + "{", 11, Level::kNone);
  // Another block, though no call came between.
  lines.push_back(kPoolLines[11]);
  ExpectReject(Lines(lines), 11, Level::kNone);
}

TEST(PagedOracle, NamesTheCallThatTheRecorderAdds) {
  class HasNoLengths final : public ForwardingPool {
   public:
    using ForwardingPool::ForwardingPool;
    Result<int> SeqLen(int /*sequence*/) const override {
      return Status(StatusCode::kInvalidArgument, "no");
    }
  };
  PoolRecorder pool(
      std::make_unique<HasNoLengths>(*MakePagedPool(PagedSpec())),
      [](const PagedTraceOp& op) { ADD_FAILURE() << TraceOpName(op.kind); });
  EXPECT_EQ(pool.Open({}, {}).status().message(),
            "after Open, SeqLen of sequence 0: no");
}

// A pool under a recorder gives the same answers as without it.
TEST(PagedOracle, RecordsRefusedCalls) {
  PagedTraceHeader header;
  header.spec = {
      .block_size = 2, .blocks = 1, .max_seq_len = 4, .dtype = DType::kF32};
  std::vector<PagedTraceOp> ops;
  PoolRecorder pool(*MakePagedPool(header.spec), [&](PagedTraceOp op) {
    op.line = std::ssize(ops) + 2;
    ops.push_back(std::move(op));
  });
  const DenseTensor rows = FilledTensor(DType::kF32, {1, 1, 3, 1}, 1);
  const std::vector<std::int32_t> negative = {-1};
  EXPECT_FALSE(pool.Open(negative, {}).ok());
  EXPECT_FALSE(pool.Fork(0, 0).ok());
  EXPECT_FALSE(pool.SeqLen(0).ok());
  EXPECT_FALSE(pool.Views(0, 0).ok());
  EXPECT_FALSE(pool.ViewsPacked(0, 0).ok());
  EXPECT_FALSE(pool.ContiguousKV(0, 0, 1).ok());
  EXPECT_FALSE(pool.Append(0, 0, rows.view(), rows.view()).ok());
  EXPECT_FALSE(pool.Commit(0, 1).ok());
  EXPECT_FALSE(pool.Commit(0, negative).ok());
  EXPECT_FALSE(pool.Truncate(0, 0).ok());
  EXPECT_FALSE(pool.Free(0).ok());
  EXPECT_FALSE(pool.SlotMapping(0, 0, 1).ok());
  EXPECT_FALSE(pool.LayerDevice(1).ok());
  const std::vector<int> none = {3};
  EXPECT_FALSE(pool.ExportCsr(none).ok());
  EXPECT_FALSE(pool.ExportTable(none).ok());
  EXPECT_THAT(ops, testing::IsEmpty());
  ASSERT_TRUE(pool.Open({}, {}).ok());
  EXPECT_EQ(pool.Append(0, 0, rows.view(), rows.view()).status().code(),
            StatusCode::kCacheFull);
  EXPECT_THAT(ops, testing::SizeIs(2));
  const auto judged = [&] { return Judge(header, ops, kTwins); };
  EXPECT_EQ(judged().verdict(), Verdict::kAccept);
  EXPECT_EQ(judged().level, Level::kIdentity);
  const DenseTensor infinite = FilledTensor(DType::kF32, {1, 1, 1, 1}, 1e38F);
  TensorView view = infinite.view();
  const float bad = std::numeric_limits<float>::infinity();
  view.data = &bad;
  EXPECT_TRUE(pool.Append(0, 0, view, view).ok());
  EXPECT_EQ(AsRead(ops.back(), header).status().message(),
            "key: element 0 is inf, which no recording can hold");
}

}  // namespace
}  // namespace kvtwin::props
