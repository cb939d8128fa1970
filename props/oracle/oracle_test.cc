// Judging recordings, real ones and modified ones.

#include "props/oracle/oracle.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/index.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::ordered_json;

TEST(Oracle, AcceptsEveryRecordingInAccept) {
  for (const auto& file : Recordings("accept")) {
    SCOPED_TRACE(file);
    ExpectAccept(ReadFile(file), Level::kIdentity);
  }
}

TEST(Oracle, RejectsEveryRecordingInRejectAtItsFirstWrongLine) {
  for (const auto& file : Recordings("reject")) {
    std::ifstream table(file.parent_path() / "FIRST_WRONG_LINE.tsv");
    std::map<std::string, std::int64_t> lines;
    std::string name;
    for (std::int64_t line = 0; table >> name >> line;) lines[name] = line;
    const Judgement judgement = JudgeText(ReadFile(file));
    EXPECT_EQ(VerdictName(judgement.verdict()), "reject") << file;
    EXPECT_EQ(judgement.line(), lines[file.filename()]) << file;
    EXPECT_NE(judgement.reason().find("expected the row of sequence"),
              std::string::npos)
        << judgement.reason();
  }
}

// Each draft follows the draft before it. Comparisons of whole paths took more
// than a minute.
TEST(Oracle, JudgesALongChainOfDrafts) {
  constexpr int kDrafts = 1024;
  std::vector<int> positions(kDrafts);
  std::iota(positions.begin(), positions.end(), 0);
  std::vector<int> parents(kDrafts);
  std::iota(parents.begin(), parents.end(), kCommitted);
  std::string mask;
  for (int row = 0; row < kDrafts; ++row) {
    mask += fmt::format("{}\"{}{}\"", row == 0 ? "" : ",",
                        std::string(AsSize(row + 1), '1'),
                        std::string(AsSize(kDrafts - 1 - row), '0'));
  }
  const std::string rows =
      fmt::format(R"("key":{{"shape":[1,1,{0}],"data":[{1}]}},)"
                  R"("value":{{"shape":[1,1,{0}],"data":[{1}]}})",
                  kDrafts, fmt::join(positions, ","));
  const std::string header =
      fmt::format(R"({{"kvtrace":4,"placement":"contiguous","config":{{}},)"
                  R"("cache":{{"type":"causal","shift":"none"}},)"
                  R"("init":{{"dtype":"f32","max_sequences":1,"capacity":{0},)"
                  R"("max_batch":{0}}},"model":{{"layers":1,"k_head_dim":1,)"
                  R"("kv_heads":1,"v_head_dim":1}}}})",
                  kDrafts);
  ExpectAccept(
      Lines({header,
             fmt::format(R"({{"op":"start_forward","positions":[{0}],)"
                         R"("sequences":[{1}],"parents":[{2}],"result":"ok",)"
                         R"("cells":[{0}]}})",
                         fmt::join(positions, ","),
                         fmt::join(std::vector<int>(kDrafts), ","),
                         fmt::join(parents, ",")),
             fmt::format(R"({{"op":"put","layer":0,{}}})", rows),
             fmt::format(R"({{"op":"get","layer":0,"first_cell":0,{},)"
                         R"("mask":{{"shape":[{},{}],"rows":[{}]}}}})",
                         rows, kDrafts, kDrafts, mask)}),
      Level::kIdentity);
}

std::string DraftRecording(const std::string& name) {
  return ReadFile(std::string(KVTWIN_RECORDINGS) + "/drafts/" + name);
}

TEST(Oracle, JudgesDrafts) {
  ExpectAccept(DraftRecording("tree.jsonl"), Level::kIdentity);
  ExpectAccept(DraftRecording("tree-other.jsonl"), Level::kVisibility);
  ExpectReject(DraftRecording("sees-a-sibling.jsonl"), 7, Level::kNone);
  ExpectReject(DraftRecording("sees-a-rejected-draft.jsonl"), 14, Level::kNone);
}

// A line of a right recording, changed.
TEST(Oracle, RefusesDraftsThatCannotBe) {
  const std::string right = DraftRecording("tree.jsonl");
  const auto changed = [&](const std::string& from, const std::string& to,
                           std::int64_t line, const std::string& reason) {
    ExpectBadInput(Replaced(right, from, to), line, reason);
  };
  changed(R"("kvtrace": 3)", R"("kvtrace": 2)", 5, "parents needs kvtrace 3");
  changed(R"("kvtrace": 3)", R"("kvtrace": 5)", 1, "1, 2, 3 or 4");
  changed("[-1, -1, 0, 0]", "[-1, -1, 0]", 5,
          "parents has 3 numbers, positions has 4");
  changed("[-1, -1, 0, 0]", "[-1, -1, 0, 3]", 5, "follows draft 3");
  changed("[2, 2, 3, 3]", "[3, 3, 4, 4]", 5, "is at position 3");
  changed(R"("path": [0, 2])", R"("path": [1, 2])", 11, "after draft 1");
  changed(R"("path": [0, 2])", R"("path": 0)", 11, "path");
  changed(R"("seq": 0, "path")", R"("seq": 1, "path")", 11, "1 has 0 drafts");
  changed(R"({"op": "commit", "seq": 0, "path": [0, 2]}
)",
          "", 11, "commit first");
  // Encoders have none (D8).
  const std::string encoder =
      Replaced(Replaced(kHeader, R"("kvtrace":1)", R"("kvtrace":3)"),
               R"("type":"causal","shift":"tag_add")", R"("type":"encoder")");
  ExpectBadInput(
      Lines({encoder, R"({"op":"start_forward","positions":[0],)"
                      R"("sequences":[0],"parents":[-1],"result":"ok"})"}),
      2, "no drafts");
  const std::string none = Replaced(right, ", \"parents\": [-1, -1, 0, 0]", "");
  EXPECT_NE(VerdictName(JudgeText(none).verdict()), "accept");
}

// Properties
// -------------------------------------------------------------------

std::vector<Json> ReadLines(const std::string& text) {
  std::istringstream in(text);
  std::vector<Json> lines;
  for (std::string line; std::getline(in, line);) {
    lines.push_back(Json::parse(line));
  }
  return lines;
}

std::string Text(const std::vector<Json>& lines) {
  std::string text;
  for (const Json& line : lines) text += line.dump() + "\n";
  return text;
}

// A recording of 40 tokens, with V in two tiles; no recorded program has tiles.
std::string TiledRecording() {
  constexpr std::size_t kTokens = 40;
  constexpr std::size_t kColumns = 64;
  std::vector<Json> lines = {Json::parse(kHeader)};
  Json& header = lines[0];
  header["config"]["cache_padding"] = kTileCells;
  header["config"]["tiled_v"] = true;
  header["init"] = {{"dtype", "f32"},
                    {"max_sequences", 1},
                    {"capacity", kTokens},
                    {"max_batch", kTokens}};
  header["model"] = {
      {"layers", 1}, {"k_head_dim", 1}, {"kv_heads", 1}, {"v_head_dim", 2}};
  Json start = {{"op", "start_forward"}, {"result", "ok"}};
  std::vector<std::size_t> keys;
  std::vector<std::size_t> put_values;
  std::vector<std::size_t> got_values(2 * kColumns);
  std::vector<std::string> mask;
  for (std::size_t i = 0; i < kTokens; ++i) {
    start["positions"].push_back(i);
    start["sequences"].push_back(0);
    start["cells"].push_back(i);
    keys.push_back(i + 1);
    mask.push_back(std::string(i + 1, '1') +
                   std::string(kColumns - i - 1, '0'));
    for (std::size_t element = 0; element < 2; ++element) {
      put_values.push_back(100 * (i + 1) + element);
      got_values[64 * (i / 32) + 32 * element + i % 32] = put_values.back();
    }
  }
  lines.push_back(start);
  lines.push_back(
      {{"op", "put"},
       {"layer", 0},
       {"key", {{"shape", {1, 1, kTokens}}, {"data", keys}}},
       {"value", {{"shape", {2, 1, kTokens}}, {"data", put_values}}}});
  keys.resize(kColumns);
  lines.push_back({{"op", "get"},
                   {"layer", 0},
                   {"first_cell", 0},
                   {"key", {{"shape", {1, 1, kColumns}}, {"data", keys}}},
                   {"value", {{"shape", {32, 2, 1, 2}}, {"data", got_values}}},
                   {"mask", {{"shape", {kColumns, kTokens}}, {"rows", mask}}}});
  return Text(lines);
}

std::string AnyAccepted() {
  static const std::vector<std::string> kTexts = [] {
    std::vector<std::string> texts = {TiledRecording()};
    for (const auto& file : Recordings("accept")) {
      texts.push_back(ReadFile(file));
    }
    return texts;
  }();
  return *rc::gen::elementOf(kTexts);
}

TEST(Oracle, AcceptsTiledV) {
  EXPECT_EQ(VerdictName(JudgeText(TiledRecording()).verdict()), "accept");
  // Another shape of the same number of elements.
  std::string text = TiledRecording();
  const std::string shape = "\"shape\":[32,2,1,2]";
  text.replace(text.find(shape), shape.size(), "\"shape\":[2,1,64,1]");
  EXPECT_EQ(VerdictName(JudgeText(text).verdict()), "bad_input");
}

// A message shows only the first few cells of a batch.
TEST(Oracle, RejectsAWrongCellOfALargeBatch) {
  std::string text = TiledRecording();
  const std::string cells = "37,38,39]}";
  text.replace(text.find(cells), cells.size(), "37,38,40]}");
  const Judgement judgement = JudgeText(text);
  EXPECT_EQ(VerdictName(judgement.verdict()), "reject");
  EXPECT_EQ(judgement.line(), 2);
  EXPECT_NE(judgement.reason().find("cells[39] is 40, expected 39"),
            std::string::npos)
      << judgement.reason();
}

VLayout VLayoutOf(const Json& header) {
  const Json& config = header.at("config");
  if (config.value("tiled_v", false)) return VLayout::kTiled;
  return config.value("permuted_v", false) ? VLayout::kPermuted
                                           : VLayout::kPlain;
}

// Returns the column of element `at` of K or V.
std::size_t ColumnAt(std::size_t at, std::size_t numbers, std::size_t columns,
                     VLayout layout) {
  const std::size_t row = numbers / columns;
  if (layout == VLayout::kPlain) return at / row;
  if (layout == VLayout::kPermuted) return at % columns;
  return at / (row * kTileCells) * kTileCells + at % kTileCells;
}

// Changes one value of an answer that no cache may answer differently; returns
// false if the line has no such value.
bool Mutate(Json& line, VLayout v_layout) {
  const std::string op = line.at("op");
  std::vector<std::string> choices;
  for (const char* key : {"result", "cells", "first_cell", "shape", "mask"}) {
    if (line.contains(key) && !line[key].is_null()) choices.push_back(key);
  }
  if (op == "get") choices.insert(choices.end(), {"key", "value"});
  if (choices.empty()) return false;
  const std::string key = *rc::gen::elementOf(choices);
  Json& field = line[key];
  if (field.is_boolean()) {
    field = !field.get<bool>();
  } else if (key == "result") {
    const bool starts = op == "start_forward";
    field = field != "ok" ? "ok" : starts ? "cache_full" : "not_supported";
  } else if (key == "first_cell") {
    field = field.get<int>() + 1;
  } else if (key == "cells" || key == "shape") {
    Json& value = field[*rc::gen::inRange<std::size_t>(0, field.size())];
    value = value.get<int>() + 1;
  } else if (key == "mask") {
    Json& row =
        field["rows"][*rc::gen::inRange<std::size_t>(0, field["rows"].size())];
    std::string bits = row;
    char& bit = bits[*rc::gen::inRange<std::size_t>(0, bits.size())];
    bit = bit == '1' ? '0' : '1';
    row = bits;
  } else {
    // The element is in a row that the mask shows, or anywhere for an encoder.
    Json& data = field["data"];
    const VLayout layout = key == "value" ? v_layout : VLayout::kPlain;
    std::size_t at = *rc::gen::inRange<std::size_t>(0, data.size());
    if (line["mask"].is_object()) {
      const std::size_t columns = line["mask"]["shape"][0];
      const std::size_t column = ColumnAt(at, data.size(), columns, layout);
      bool seen = false;
      for (const std::string bits : line["mask"]["rows"]) {
        seen = seen || bits[column] == '1';
      }
      if (!seen) return false;
    }
    data[at] = data[at].get<double>() + 1;
  }
  return true;
}

RC_GTEST_PROP(Oracle, RejectsAnyOneChangedAnswerAtItsLine, ()) {
  std::vector<Json> lines = ReadLines(AnyAccepted());
  const auto at = *rc::gen::inRange<std::size_t>(1, lines.size());
  const Json before = lines[at];
  RC_PRE(Mutate(lines[at], VLayoutOf(lines[0])));
  RC_LOG() << before.dump() << "\nbecame\n" << lines[at].dump() << "\n";
  RC_TAG(before.at("op").get<std::string>());
  const Judgement judgement = JudgeText(Text(lines));
  RC_LOG() << VerdictName(judgement.verdict()) << judgement.line() << ": "
           << judgement.reason() << "\n";
  RC_ASSERT(judgement.verdict() == Verdict::kReject);
  RC_ASSERT(judgement.line() == static_cast<std::int64_t>(at) + 1);
}

TEST(Oracle, AcceptsOrRefusesATruncatedRecording) {
  const std::vector<std::string> lines = {kHeader, kStart, kPut, kGet, kRemove};
  const std::string text = Lines(lines);
  for (std::size_t length = 0; length <= text.size(); ++length) {
    const Judgement judgement = JudgeText(text.substr(0, length));
    const std::size_t at = std::min(text.size() - 1, length);
    const bool whole_line =
        length > 0 && (text[length - 1] == '\n' || text[at] == '\n');
    const auto cut_line =
        1 + std::count(text.begin(), IteratorAt(text, length), '\n');
    if (whole_line) {
      EXPECT_EQ(VerdictName(judgement.verdict()), "accept") << length;
    } else {
      EXPECT_EQ(VerdictName(judgement.verdict()), "bad_input") << length;
      EXPECT_EQ(judgement.line(), cut_line) << length;
    }
  }
}

RC_GTEST_PROP(Oracle, SurvivesChangedBytes, ()) {
  const std::string text = WithChangedBytes(AnyAccepted());
  const Judgement judgement = JudgeText(text);
  RC_ASSERT(judgement.line() <= std::count(text.begin(), text.end(), '\n') + 1);
  RC_ASSERT((judgement.verdict() == Verdict::kAccept) ==
            judgement.reason().empty());
  RC_CLASSIFY(judgement.verdict() == Verdict::kAccept, "accept");
  RC_CLASSIFY(judgement.verdict() == Verdict::kReject, "reject");
  RC_CLASSIFY(judgement.verdict() == Verdict::kBadInput, "bad input");
}

// Visibility
// ------------------------------------------------------------------

// Moves column order[i] of a view to column i: another placement.
void Reorder(Json& get, const std::vector<std::size_t>& order,
             VLayout v_layout) {
  const std::size_t columns = order.size();
  for (const char* key : {"key", "value"}) {
    const Json data = get[key]["data"];
    const VLayout layout =
        key == std::string("value") ? v_layout : VLayout::kPlain;
    // The indices of each column's elements.
    std::vector<std::vector<std::size_t>> places(columns);
    for (std::size_t i = 0; i < data.size(); ++i) {
      places[ColumnAt(i, data.size(), columns, layout)].push_back(i);
    }
    for (std::size_t column = 0; column < columns; ++column) {
      for (std::size_t n = 0; n < places[column].size(); ++n) {
        get[key]["data"][places[column][n]] = data[places[order[column]][n]];
      }
    }
  }
  for (Json& row : get["mask"]["rows"]) {
    const std::string bits = row;
    std::string reordered;
    for (const std::size_t column : order) reordered += bits[column];
    row = reordered;
  }
}

RC_GTEST_PROP(Oracle, AcceptsAnyPlacementAtTheVisibilityLevel, ()) {
  std::vector<Json> lines = ReadLines(AnyAccepted());
  lines[0]["placement"] = "other";
  const VLayout v_layout = VLayoutOf(lines[0]);
  const bool without_value = *rc::gen::arbitrary<bool>();
  for (Json& line : lines) {
    line.erase("cells");
    line.erase("first_cell");
    if (line.value("op", "") != "get" || !line["mask"].is_object()) continue;
    std::vector<std::size_t> order(line["mask"]["shape"][0].get<std::size_t>());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    for (std::size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[*rc::gen::inRange<std::size_t>(0, i)]);
    }
    Reorder(line, order, v_layout);
    if (without_value) line.erase("value");
  }
  const Judgement judgement = JudgeText(Text(lines));
  RC_LOG() << judgement.line() << ": " << judgement.reason() << "\n";
  RC_ASSERT(judgement.verdict() == Verdict::kAccept);
  RC_ASSERT(judgement.level == Level::kVisibility);
}

// A recording, "other", of one causal cache without a shift function.
std::string OtherCacheLines(const std::vector<std::string>& lines) {
  std::vector<std::string> all = {Replaced(
      Replaced(kHeader, "contiguous", "other"), "\"tag_add\"", "\"none\"")};
  all.insert(all.end(), lines.begin(), lines.end());
  return Lines(all);
}

// A pass of one token. Its view shows the rows `shown`, and it sees all of
// them.
std::vector<std::string> Pass(int seq, int pos, int row,
                              const std::vector<int>& shown,
                              const std::string& result = "ok") {
  std::vector<std::string> lines = {
      fmt::format(R"({{"op":"start_forward","positions":[{}],"sequences":[{}],)"
                  R"("result":"{}"}})",
                  pos, seq, result)};
  if (result != "ok") return lines;
  lines.push_back(
      fmt::format(R"({{"op":"put","layer":0,"key":{{"shape":[1,1,1],)"
                  R"("data":[{}]}},"value":{{"shape":[1,1,1],"data":[{}]}}}})",
                  row, row));
  lines.push_back(fmt::format(
      R"({{"op":"get","layer":0,"key":{{"shape":[1,1,{0}],"data":[{1}]}},)"
      R"("value":{{"shape":[1,1,{0}],"data":[{1}]}},)"
      R"("mask":{{"shape":[{0},1],"rows":["{2}"]}}}})",
      shown.size(), fmt::join(shown, ","), std::string(shown.size(), '1')));
  return lines;
}

std::vector<std::string> Joined(
    const std::vector<std::vector<std::string>>& parts) {
  std::vector<std::string> all;
  for (const auto& part : parts) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

TEST(Oracle, FollowsTheResultsOfOtherCaches) {
  const std::vector<std::string> copy = {
      R"({"op":"copy_prefix","src":0,"dst":1,"len":9})"};
  const std::vector<std::string> remove = {kRemove};
  // The cache copies a shared token that it must move, and shifts without a
  // shift function; sequence 1 keeps its token.
  ExpectAccept(OtherCacheLines(Joined(
                   {Pass(0, 0, 7, {7}), Pass(0, 1, 8, {8, 7}), copy, remove,
                    Pass(0, 1, 9, {9, 8}), Pass(1, 2, 10, {8, 7, 10})})),
               Level::kVisibility);
  // The cache holds more tokens than ours of 4 cells.
  ExpectAccept(
      OtherCacheLines(
          Joined({Pass(0, 0, 1, {1}), Pass(1, 0, 2, {2}), Pass(2, 0, 3, {3}),
                  Pass(3, 0, 4, {4}), Pass(4, 0, 5, {5}), Pass(5, 0, 6, {6})})),
      Level::kVisibility);
  // The cache refuses calls that ours accepts: then nothing is stored, and a
  // refused removal changes nothing.
  const std::vector<std::string> refused = {
      Replaced(kRemove, "\"ok\"", "\"not_supported\"")};
  ExpectAccept(OtherCacheLines(
                   Joined({Pass(0, 0, 1, {1}), Pass(0, 1, 2, {}, "cache_full"),
                           refused, Pass(0, 1, 3, {3, 1})})),
               Level::kVisibility);
  const std::vector<std::string> no = {
      R"({"op":"can_resume","seq":0,"pos":1,"result":false})"};
  ExpectAccept(OtherCacheLines(Joined({Pass(0, 0, 1, {1}), no})),
               Level::kVisibility);
}

TEST(Oracle, RejectsWrongRowsOfOtherCaches) {
  const auto rejected = [](const std::vector<int>& shown) {
    ExpectReject(OtherCacheLines(Joined({Pass(0, 0, 1, {1}), Pass(1, 0, 2, {2}),
                                         Pass(0, 1, 3, shown)})),
                 10, Level::kNone);
  };
  rejected({3});        // A row is missing.
  rejected({1, 3, 2});  // A row is another sequence's.
  rejected({1, 3, 3});  // A row appears twice.
  rejected({3, 4});     // A row belongs to no token.
  rejected({1, 2});     // A row replaces another.
  // The shape is wrong.
  ExpectReject(
      OtherCacheLines({kStart, kPut, Replaced(kGet, "[2,1,2]", "[1,2,2]")}), 4,
      Level::kNone);
  // The answer "true" must be right.
  const std::string swa =
      Replaced(OtherCacheLines(Joined({Pass(0, 9, 1, {1}),
                                       {R"({"op":"can_resume","seq":0,"pos":5,)"
                                        R"("result":true})"}})),
               R"("type":"causal")", R"("type":"swa","window":2)");
  ExpectReject(swa, 5, Level::kNone);
  // No token is before position 0, whatever was evicted.
  ExpectAccept(Replaced(swa, "\"pos\":5", "\"pos\":0"), Level::kVisibility);
  // A window of 0 sees the row alone, up to the end of the sequence.
  const std::string alone = Replaced(swa, "\"window\":2", "\"window\":0");
  ExpectAccept(alone, Level::kVisibility);
  ExpectReject(Replaced(alone, "\"pos\":5", "\"pos\":11"), 5, Level::kNone);
}

// Without a put, the rows of a batch are not known.
TEST(Oracle, CountsNoRowsWithoutAPut) {
  std::vector<std::string> no_put = Pass(0, 1, 2, {1, 2});
  no_put.erase(no_put.begin() + 1);
  const Judged judged =
      JudgeText(OtherCacheLines(Joined({Pass(0, 0, 1, {1}), no_put}))).judged;
  EXPECT_EQ(judged.gets, 1);
  EXPECT_EQ(judged.rows, 1);
  EXPECT_EQ(judged.answers, 1);
}

TEST(Oracle, SaysOnceWhatARowSees) {
  EXPECT_EQ(
      JudgeText(OtherCacheLines(Joined({Pass(0, 0, 1, {1}), Pass(1, 0, 2, {2}),
                                        Pass(0, 1, 3, {1, 3, 2})})))
          .reason(),
      "get: mask row 0 (sequence 0, position 1) sees at column 2 the row of "
      "token sequence 1, position 0 (put on line 6) K [2] V [2], which it must "
      "not see");
}

// A recording may leave out the window (S2), but a cache that has a window is
// rejected for its right answers.
TEST(Oracle, NotesThatAWindowIsAbsent) {
  const auto reason = [](const std::string& type) {
    return JudgeText(Replaced(OtherCacheLines(Joined(
                                  {Pass(0, 0, 1, {1}), Pass(0, 1, 3, {3})})),
                              R"("type":"causal")", type))
        .reason();
  };
  const auto note = HasSubstr("(cache.window is absent");
  EXPECT_THAT(reason(R"("type":"swa")"), note);
  EXPECT_THAT(reason(R"("type":"swa","window":4)"),
              AllOf(HasSubstr("misses the token"), Not(note)));
  EXPECT_EQ(reason(R"("type":"swa","window":0)"), "");
}

// A cache that keeps one token more than its window shows goes back.
TEST(Oracle, NotesThatACacheWithAMemoryIsASwaMem) {
  std::vector<std::string> lines =
      Joined({Pass(0, 0, 1, {1}), Pass(0, 1, 2, {1, 2}), Pass(0, 2, 3, {2, 3}),
              Pass(0, 3, 4, {3, 4})});
  lines.emplace_back(
      R"({"op":"remove","seq":0,"begin":2,"end":2147483647,"result":"ok"})");
  for (const std::string& line : Pass(0, 2, 5, {2, 5})) lines.push_back(line);
  const auto reason = [&](const std::string& type) {
    return JudgeText(
               Replaced(OtherCacheLines(lines), R"("type":"causal")", type))
        .reason();
  };
  const auto note = HasSubstr("is recorded as swa_mem, with its memory)");
  EXPECT_THAT(reason(R"("type":"swa","window":1)"), note);
  EXPECT_EQ(reason(R"("type":"swa_mem","window":1,"memory":2)"), "");
  // Another failure of such a cache has no note.
  lines = Joined({Pass(0, 0, 1, {1}), Pass(0, 1, 2, {2})});
  EXPECT_THAT(reason(R"("type":"swa","window":1)"),
              AllOf(HasSubstr("misses the token"), Not(note)));
}

TEST(Oracle, ChecksKnownRowsBesideUnknownRows) {
  // Position 1 was not put in this layer, and 0 and 2 were.
  const std::string never = Pass(0, 1, 0, {0})[0];
  const auto shown = [&](const std::vector<int>& rows) {
    return OtherCacheLines(
        Joined({Pass(0, 0, 1, {1}), {never}, Pass(0, 2, 3, rows)}));
  };
  ExpectAccept(shown({1, 99, 3}), Level::kVisibility);
  ExpectAccept(shown({3, 1, 3}), Level::kVisibility);
  for (const std::vector<int>& rows : std::vector<std::vector<int>>{
           {7, 99, 3}, {99, 98, 97}, {1, 3}, {1, 99, 98, 3}, {1, 1, 1}}) {
    ExpectReject(shown(rows), 8, Level::kNone);
    std::string keys = shown(rows);
    const auto value = keys.rfind(R"("value")");
    keys.erase(value, keys.rfind(R"("mask")") - value);
    ExpectReject(keys, 8, Level::kNone);
  }
}

TEST(Oracle, NamesTheStrongestLevelThatHeld) {
  // The token is in another cell than in ours, but attention is right.
  const std::string moved =
      Lines({kHeader, Replaced(kStart, R"("cells":[0,1])", R"("cells":[1,2])"),
             kPut, Replaced(kGet, R"("first_cell":0)", R"("first_cell":1)")});
  ExpectReject(moved, 2, Level::kVisibility);
  // Attention is wrong, too.
  ExpectReject(Replaced(moved, R"(["10","11"])", R"(["11","11"])"), 2,
               Level::kNone);
  // The recording is cut off.
  ExpectReject(moved + "{", 2, Level::kNone);
}

}  // namespace
}  // namespace kvtwin::props
