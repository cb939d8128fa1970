// Tests the shrinking of recordings with programs that have bugs.

#include "props/search/shrink_recording.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/index.h"
#include "props/base/clock.h"
#include "props/base/filter.h"
#include "props/paged/paged_runner.h"
#include "props/report/finding_filter.h"
#include "props/search/gen.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

using Json = nlohmann::ordered_json;

// A program with a pool of one layer, which keeps the rows of each sequence.
// The last K row of its forks is wrong.
class ForkingProgram {
 public:
  std::string Answer(const std::string& calls) {
    std::istringstream in(calls);
    std::string text;
    for (std::string line; std::getline(in, line);) {
      Json call = Json::parse(line);
      if (call.contains("kvtrace")) {
        call["placement"] = "other";
        head_ = call.at("pool").at("k_head_dim").get<std::size_t>() *
                call.at("pool").at("kv_heads").get<std::size_t>();
      } else if (!Do(call)) {
        continue;
      }
      if (stopped_) break;
      text += call.dump() + "\n";
    }
    return text;
  }

 private:
  struct Sequence {
    std::vector<double> rows;
    std::vector<double> appended;
  };

  // Executes a call; returns false if the line is left out.
  bool Do(Json& call) {
    const std::string op = call.at("op");
    if (op == "open") {
      stopped_ = call.at("len") != 0;  // This pool never finds prompts.
      sequences_[call.at("result").get<int>()] = {};
      return true;
    }
    if (!call.contains("seq")) return false;
    Sequence& of = sequences_.at(call.at("seq").get<int>());
    if (op == "fork") {
      Sequence forked{of.rows, {}};
      forked.rows.resize(call.at("len").get<std::size_t>() * head_);
      if (!forked.rows.empty()) forked.rows.back() += 1;
      sequences_[call.at("result").get<int>()] = forked;
    } else if (op == "append") {
      call["result"] = "ok";
      call.erase("start");
      of.appended = call.at("key").at("data").get<std::vector<double>>();
    } else if (op == "commit") {
      const std::size_t count = call.contains("tokens")
                                    ? call.at("tokens").size()
                                    : call.at("new_tokens").get<std::size_t>();
      if (of.appended.size() < count * head_) {
        throw std::out_of_range("more is committed than was appended");
      }
      of.rows.insert(of.rows.end(), of.appended.begin(),
                     IteratorAt(of.appended, count * head_));
      of.appended.clear();
    } else if (op == "truncate") {
      of.rows.resize(call.at("len").get<std::size_t>() * head_);
      of.appended.clear();
    } else if (op == "views") {
      std::vector<double> rows = of.rows;
      rows.insert(rows.end(), of.appended.begin(), of.appended.end());
      call.erase("value");
      call.erase("blocks");
      if (rows.empty()) return false;
      call["key"]["data"] = rows;
      const auto dims = call["key"]["shape"];
      call["key"]["shape"] = {dims[0], dims[1], rows.size() / head_};
    } else if (op == "free") {
      sequences_.erase(call.at("seq").get<int>());
    } else {
      return false;
    }
    return true;
  }

  std::size_t head_ = 1;
  bool stopped_ = false;
  std::map<int, Sequence> sequences_;
};

// Runs the program. Like any program, it may crash if a call names an unknown
// sequence.
Result<std::string> Fork(const std::string& calls) {
  try {
    return ForkingProgram().Answer(calls);
  } catch (const std::out_of_range& error) {
    return Status(StatusCode::kFailedPrecondition, error.what());
  }
}

// Returns a recording that this program fails late.
std::string LongRecording() {
  for (std::uint64_t number = 0;; ++number) {
    PagedHistory history = MakePagedHistory(3, number);
    history.spec = {.block_size = 2,
                    .blocks = 40,
                    .max_seq_len = 60,
                    .k_head_dim = 2,
                    .dtype = DType::kF32};
    std::ostringstream calls;
    EXPECT_TRUE(WritePagedRecording(history, "reference", calls).ok());
    std::string text = ForkingProgram().Answer(calls.str());
    const Judgement judgement = JudgeText(text);
    if (judgement.verdict() == Verdict::kReject && judgement.line() > 40) {
      return text;
    }
  }
}

TEST(ShrinkRecording, FindsTheShortestRecordingOfAPool) {
  const std::string text = LongRecording();
  const auto shrunk = ShrinkRecording(text, Fork, {.twins = kTwins});
  ASSERT_TRUE(shrunk.ok()) << shrunk.status().message();
  EXPECT_GT(shrunk->calls_before, 38U);
  // The calls are open, append, commit, fork, views.
  EXPECT_EQ(shrunk->calls, 5U) << shrunk->text;
  EXPECT_TRUE(shrunk->is_shortest);
  EXPECT_EQ(BucketOfReason(shrunk->judgement.reason()),
            BucketOfReason(JudgeText(text).reason()));
  EXPECT_EQ(JudgeText(shrunk->text).reason(), shrunk->judgement.reason());
  EXPECT_EQ(shrunk->text.find("history"), std::string::npos);
  // Sequences have the lowest numbers.
  EXPECT_NE(shrunk->text.find(R"("op":"fork","seq":0)"), std::string::npos)
      << shrunk->text;
  // Shrinking again has the same result.
  EXPECT_EQ(ShrinkRecording(text, Fork, {.twins = kTwins})->text, shrunk->text);
}

// Replaces the last rows, each a list, by those of a tensor.
void ReplaceRows(const Json& tensor, std::vector<Json>& rows) {
  const Json& shape = tensor.at("shape");
  const auto size = shape[0].get<int>() * shape[1].get<int>();
  std::size_t to = rows.size() - shape[2].get<std::size_t>();
  for (auto at = tensor.at("data").begin(); at != tensor.at("data").end();) {
    Json row = Json::array();
    while (AsInt(row.size()) < size) row.push_back(*at++);
    rows[to++] = std::move(row);
  }
}

// Gives a tensor these rows.
void SetRows(const std::vector<Json>& rows, Json& tensor) {
  tensor["shape"][2] = rows.size();
  tensor["data"] = Json::array();
  for (const Json& row : rows) {
    for (const Json& number : row) tensor["data"].push_back(number);
  }
}

// Answers as a program with one sequence and one layer, in lists: its positions
// are the places in the lists, whatever positions a batch has. Rows are zeros
// until they are put; a put without a pass ends the program. Its Remove keeps
// `extra` tokens too many.
std::string AnswerOfLists(const std::string& calls, std::size_t extra) {
  std::istringstream in(calls);
  std::string text;
  std::vector<Json> keys;
  std::vector<Json> values;
  std::size_t before = 0;
  Json model;
  Json put;
  for (std::string line; std::getline(in, line);) {
    Json call = Json::parse(line);
    const std::string op = call.value("op", "");
    if (op.empty()) call["placement"] = "other";
    if (op == "start_forward" || op == "remove") call["result"] = "ok";
    const auto zeros = [&](const char* head_dim) {
      return Json(std::vector<int>(model.value(head_dim, 1U) *
                                   model.value("kv_heads", 1U)));
    };
    if (op.empty()) model = call.at("model");
    if (op == "start_forward") {
      before = keys.size();
      keys.resize(before + call.at("positions").size(), zeros("k_head_dim"));
      values.resize(keys.size(), zeros("v_head_dim"));
    }
    if (op == "remove") {
      const auto kept = call.at("begin").get<std::size_t>() + extra;
      keys.resize(std::min(keys.size(), kept));
      values.resize(keys.size());
    } else if (op == "put") {
      put = call;
      if (call["key"]["shape"][2] != keys.size() - before) return "";
      ReplaceRows(call.at("key"), keys);
      ReplaceRows(call.at("value"), values);
    } else if (op == "get") {
      if (put.is_null()) continue;
      call["key"] = put.at("key");
      call["value"] = put.at("value");
      SetRows(keys, call["key"]);
      SetRows(values, call["value"]);
      Json& mask = call["mask"];
      mask["rows"] = Json::array();
      mask["shape"] = {keys.size(), keys.size() - before};
      for (std::size_t seen = before + 1; seen <= keys.size(); ++seen) {
        mask["rows"].push_back(std::string(seen, '1') +
                               std::string(keys.size() - seen, '0'));
      }
    }
    text += call.dump() + "\n";
  }
  return text;
}

// A right program of that form is wrong if a batch goes back or leaves a gap.
TEST(ShrinkRecording, ContinuesSequencesAsTheRecordingDoes) {
  const auto wrong = [](const std::string& calls) -> Result<std::string> {
    return AnswerOfLists(calls, 1);
  };
  const Result<History> history = ParseHistory(
      "kvt1 | put 0*3 | put 0*3 | put 0*1 | drop 0:5- | put 0*2 | put 0*1");
  ASSERT_TRUE(history.ok()) << history.status().message();
  std::ostringstream calls;
  ASSERT_TRUE(WriteCalls(*history, calls).ok());
  const std::string text = AnswerOfLists(calls.str(), 1);
  const auto shrunk = ShrinkRecording(text, wrong, {.twins = kTwins});
  ASSERT_TRUE(shrunk.ok()) << shrunk.status().message();
  EXPECT_LT(shrunk->calls, shrunk->calls_before);
  EXPECT_NE(shrunk->text.find("remove"), std::string::npos) << shrunk->text;
  const Judgement right = JudgeText(AnswerOfLists(shrunk->text, 0));
  EXPECT_EQ(right.verdict(), Verdict::kAccept) << right.reason();
}

// A pass without a put has tokens that may have any rows: then one of these
// tokens would be said to have the wrong row, and another one to be missing.
TEST(ShrinkRecording, KeepsThePutsOfEachPass) {
  const Recorder spoiled = [](const std::string& calls) -> Result<std::string> {
    std::istringstream in(AnswerOfLists(calls, 0));
    std::string text;
    for (std::string line; std::getline(in, line);) {
      Json call = Json::parse(line);
      if (call.value("op", "") == "get" && call["key"]["shape"][2] > 4) {
        call["key"]["data"][0] = 7;
        call["value"]["data"][0] = 7;
      }
      text += call.dump() + "\n";
    }
    return text;
  };
  const Result<History> history = ParseHistory(
      "kvt1 | put 0*2 | put 0*2 | drop 0:3- | put 0*1 | put 0*1 | put 0*1");
  ASSERT_TRUE(history.ok()) << history.status().message();
  std::ostringstream calls;
  ASSERT_TRUE(WriteCalls(*history, calls).ok());
  const std::string text = *spoiled(calls.str());
  const auto shrunk = ShrinkRecording(text, spoiled, {.twins = kTwins});
  ASSERT_TRUE(shrunk.ok()) << shrunk.status().message();
  EXPECT_LT(shrunk->calls, shrunk->calls_before);
  const auto count = [&](const std::string& op) {
    std::istringstream in(shrunk->text);
    int lines = 0;
    for (std::string line; std::getline(in, line);) {
      lines += AsInt(line.find("\"op\":\"" + op + "\"") != std::string::npos);
    }
    return lines;
  };
  EXPECT_GT(count("start_forward"), 0) << shrunk->text;
  EXPECT_EQ(count("put"), count("start_forward")) << shrunk->text;
}

// The query of an attend has a row for each token of the batch. Its output and
// the answer of a find_prefix are not among the calls.
TEST(ShrinkRecording, ShortensBatchesThatAttend) {
  const Recorder nines = [](const std::string& calls) -> Result<std::string> {
    std::istringstream in(calls);
    std::string text;
    for (std::string line; std::getline(in, line);) {
      Json call = Json::parse(line);
      const std::string op = call.value("op", "");
      if (call.contains("out") || call.contains("len")) return std::string();
      if (op == "start_forward") call["result"] = "ok";
      if (op == "find_prefix") call["len"] = 0;
      if (op == "attend") {
        const Json& shape = call["query"]["shape"];
        call["out"] = {{"shape", shape},
                       {"data", std::vector<int>(shape[2], 9)}};
      }
      text += call.dump() + "\n";
    }
    return text;
  };
  const std::string rows = R"({"shape":[1,1,3],"data":[1,2,3]})";
  const std::string calls =
      R"({"kvtrace":4,"placement":"other",)"
      R"("cache":{"type":"causal","shift":"none"},"config":{},)"
      R"("init":{"dtype":"f32","max_sequences":2,"capacity":4,"max_batch":4},)"
      R"("model":{"layers":1,"k_head_dim":1,"kv_heads":1,"v_head_dim":1}})"
      "\n"
      R"({"op":"find_prefix","seq":1,"tokens":[5,6]})"
      "\n"
      R"({"op":"start_forward","positions":[0,1,2],"sequences":[0,0,0]})"
      "\n"
      R"({"op":"put","layer":0,"key":)" +
      rows + R"(,"value":)" + rows + "}\n" +
      R"({"op":"attend","layer":0,"query":)" + rows + "}\n";
  const auto shrunk = ShrinkRecording(*nines(calls), nines, {.twins = kTwins});
  ASSERT_TRUE(shrunk.ok()) << shrunk.status().message();
  EXPECT_EQ(shrunk->calls, 3U) << shrunk->text;
  EXPECT_NE(shrunk->text.find(R"("positions":[0])"), std::string::npos)
      << shrunk->text;
}

// Returns a program whose recordings of fewer than `lines` lines fail in
// another way, in the same op: the start of views.
Recorder ForkOrStart(std::size_t lines) {
  return [=](const std::string& calls) -> Result<std::string> {
    Result<std::string> text = Fork(calls);
    const auto count =
        text.ok() ? std::ranges::count(*text, '\n') : std::int64_t{0};
    if (count == 0 || AsSize(count) >= lines) return text;
    std::istringstream in(*text);
    std::string wrong;
    for (std::string line; std::getline(in, line);) {
      Json call = Json::parse(line);
      if (call.value("op", "") == "views") call["start"] = 1;
      wrong += call.dump() + "\n";
    }
    return wrong;
  };
}

TEST(ShrinkRecording, KeepsTheSameFailure) {
  const std::string text = LongRecording();
  const std::string bucket = BucketOfReason(JudgeText(text).reason());
  for (const std::size_t lines : {7U, 9U, 12U, 20U}) {
    const auto shrunk =
        ShrinkRecording(text, ForkOrStart(lines), {.twins = kTwins});
    ASSERT_TRUE(shrunk.ok()) << shrunk.status().message();
    // The recording is a header and these calls; none can be removed.
    EXPECT_GE(shrunk->calls + 1, lines);
    EXPECT_LT(shrunk->calls, shrunk->calls_before);
    EXPECT_EQ(BucketOfReason(shrunk->judgement.reason()), bucket);
    EXPECT_EQ(BucketOfReason(JudgeText(shrunk->text).reason()), bucket);
  }
}

TEST(ShrinkRecording, StopsAfterItsLimitOfRuns) {
  std::int64_t runs = 0;
  const auto shrunk = ShrinkRecording(
      LongRecording(), Fork,
      {.twins = kTwins, .runs = 7, .progress = [&](std::int64_t now, auto) {
         runs = now;
       }});
  ASSERT_TRUE(shrunk.ok());
  EXPECT_FALSE(shrunk->is_shortest);
  EXPECT_EQ(runs, 7);
  EXPECT_EQ(JudgeText(shrunk->text).verdict(), Verdict::kReject);
}

void ExpectNoShrink(const std::string& text, const Recorder& record,
                    const std::string& why) {
  const auto shrunk = ShrinkRecording(text, record, {.twins = kTwins});
  ASSERT_FALSE(shrunk.ok());
  EXPECT_NE(shrunk.status().message().find(why), std::string::npos)
      << shrunk.status().message();
}

TEST(ShrinkRecording, ExplainsWhyItCannotShrink) {
  const std::string text = LongRecording();
  const auto prints = [](const std::string& out) {
    return [out](const std::string&) -> Result<std::string> { return out; };
  };
  ExpectNoShrink(Lines(kPoolLines), Fork, "there is nothing to shrink");
  ExpectNoShrink("{", Fork, "the recording is bad input: line 1");
  ExpectNoShrink(text, prints(Lines(kPoolLines)), "is accepted");
  ExpectNoShrink(text, prints("garbage\n"), "is not a recording: line 1");
  ExpectNoShrink(text, prints(""), "is not a recording: line 1");
  ExpectNoShrink(text, prints(text), "it does not read what it is given");
  std::vector<std::string> other = kPoolLines;
  other[7] = Replaced(other[7], R"("len":4)", R"("len":3)");
  ExpectNoShrink(text, prints(Lines(other)),
                 "wrong in another way: seq_len: len is 3");
  ExpectNoShrink(
      text,
      [](const std::string&) -> Result<std::string> {
        return Status(StatusCode::kFailedPrecondition, "it burns");
      },
      "the command fails: it burns");
}

TEST(ShrinkRecording, DistinguishesFailuresByTheirText) {
  EXPECT_EQ(BucketOfReason("get: mask row 1 (sequence 1, position 4) sees at "
                           "column 3 (cell 11 (so)) a row that was never put; "
                           "expected 7"),
            "get: mask row sees at column a row that was never put");
  EXPECT_EQ(BucketOfReason("views: the number of rows is 12, expected 3"),
            "views: the number of rows is , expected");
}

TEST(Filter, TransfersMoreThanAPipeHolds) {
  std::string input;
  for (int i = 0; i < 100000; ++i) input += "a line of text\n";
  const auto output = Filter("cat; echo end", input, {});
  ASSERT_TRUE(output.ok()) << output.status().message();
  EXPECT_EQ(*output, input + "end\n");
  // A command may leave its input unread.
  EXPECT_EQ(*Filter("echo early", input, {}), "early\n");
}

void ExpectFails(const std::string& command, const FilterLimits& limits,
                 const std::string& why) {
  const double begin = Now();
  const auto output = Filter(command, std::string(1 << 20, 'x'), limits);
  EXPECT_LT(Now() - begin, 10);
  ASSERT_FALSE(output.ok());
  EXPECT_NE(output.status().message().find(why), std::string::npos)
      << output.status().message();
}

TEST(Filter, EndsFailingCommands) {
  ExpectFails("echo broken >&2; exit 3", {},
              "it ends with exit code 3, having printed: broken");
  ExpectFails("kill -SEGV $$", {}, "it ends with SIGSEGV");
  ExpectFails("no-such-program-at-all", {}, "exit code 127");
  ExpectFails("sleep 100", {.seconds = 0.2}, "longer than 0.2 seconds");
  ExpectFails("exec >&-; sleep 100", {.seconds = 0.2}, "longer than 0.2");
  ExpectFails("sleep 100 & sleep 100 | sleep 100", {.seconds = 0.2},
              "longer than 0.2 seconds");
  ExpectFails("yes", {.seconds = 9, .bytes = 1 << 20}, "more than 1 MiB");
}

}  // namespace
}  // namespace kvtwin::props
