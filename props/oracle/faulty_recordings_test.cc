// Changes each answer of a correct recording alone: the oracle must find it.
// See props/compare/faulty_twins_test.cc.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "props/compare/cited_rules.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

using Recording = std::vector<std::string>;
using testing::HasSubstr;
using testing::Not;

struct Case {
  std::size_t line;
  std::string from;
  std::string to;
  std::string reason;  // Part of the reason; empty: accepted.
};

// Expects that each case alone makes `right` wrong at its line.
void ExpectFound(const Recording& right, const std::vector<Case>& cases) {
  const Judgement whole = JudgeText(Lines(right));
  ASSERT_EQ(whole.verdict(), Verdict::kAccept) << whole.reason();
  for (const Case& test_case : cases) {
    SCOPED_TRACE(fmt::format("line {}: {}", test_case.line, test_case.to));
    Recording lines = right;
    lines.at(test_case.line - 1) =
        Replaced(lines.at(test_case.line - 1), test_case.from, test_case.to);
    const Judgement judgement = JudgeText(Lines(lines));
    EXPECT_EQ(VerdictName(judgement.verdict()),
              test_case.reason.empty() ? "accept" : "reject")
        << judgement.reason();
    if (test_case.reason.empty()) continue;
    EXPECT_EQ(judgement.line(), static_cast<std::int64_t>(test_case.line));
    EXPECT_NE(judgement.reason().find(test_case.reason), std::string::npos)
        << judgement.reason();
  }
}

std::string OtherHeader(const std::string& header) {
  return Replaced(header, "contiguous", "other");
}

const Recording kRight = {kHeader, kStart, kPut, kGet, kRemove};

TEST(FaultyRecordings, EachAnswerIsCompared) {
  ExpectFound(
      kRight,
      {{2, R"("ok")", R"("cache_full")", "result is cache_full, expected ok"},
       {2, R"("cells":[0,1])", R"("cells":[0,2])",
        "cells is [0, 2], expected [0, 1]"},
       {2, R"("cells":[0,1])", R"("cells":[1,1])",
        "cells is [1, 1], expected [0, 1]"},
       {4, R"("first_cell":0)", R"("first_cell":1)",
        "first_cell is 1, expected 0"},
       {4, "[100,1000,200,1001]", "[101,1000,200,1001]",
        "mask row 0 (sequence 0, position 0) sees at column 0"},
       {4, "[100,1000,200,1001]", "[100,1000,200,1002]",
        "mask row 1 (sequence 0, position 1) sees at column 1"},
       {4, "[100,1000,200,1001]", "[101,1000,201,1001]",
        "mask row 0 (sequence 0, position 0) sees at column 0"},
       {4, "[100,200]", "[101,200]", "mask row 0"},
       {4, "[100,200]", "[100,201]", "mask row 1"},
       {4, R"(["10","11"])", R"(["11","11"])",
        "mask row 0 (sequence 0, position 0) sees column 1 (cell 1: sequence "
        "0, position 1), which must be hidden"},
       {4, R"(["10","11"])", R"(["10","10"])",
        "mask row 1 (sequence 0, position 1) does not see column 1"},
       {4, R"({"shape":[2,2],"rows":["10","11"]})", "null",
        "mask is null, expected a mask"},
       {4, "[2,1,2]", "[1,2,2]", "the shape of key is [1, 2, 2]"},
       {4, R"([1,1,2],"data":[100,200])", R"([2,1,2],"data":[1,2,3,4])",
        "the shape of value is [2, 1, 2]"},
       {4, R"([2,2],"rows":["10","11"])", R"([2,3],"rows":["10","11","00"])",
        "the shape of mask is [2, 3, 1], expected [2, 2, 1]"},
       {5, R"("ok")", R"("not_supported")",
        "result is not_supported, expected ok"}});
}

// The row of a token that was not put may hold anything: the wrong column is
// the column with the V row of the token that has moved.
TEST(FaultyRecordings, AnUnknownRowIsNotBlamed) {
  ExpectFound(
      {OtherHeader(kHeader), kStart, kPut, kRemove,
       R"({"op":"start_forward","positions":[1],"sequences":[0],)"
       R"("result":"ok"})",
       R"({"op":"get","layer":0,)"
       R"("key":{"shape":[2,1,2],"data":[200,1000,0,0]},)"
       R"("value":{"shape":[1,1,2],"data":[200,0]},)"
       R"("mask":{"shape":[2,1],"rows":["11"]}})"},
      {{6, "[200,1000,0,0]", "[200,1001,0,0]",
        "mask row 0 (sequence 0, position 1) sees at column 0 the row of token "
        "sequence 0, position 1 (put on line 3)"}});
}

// A reserving pass reports the cells of the worst case.
TEST(FaultyRecordings, CellsOfAReservingPassAreCompared) {
  const std::string reserve =
      Replaced(kStart, R"("result")", R"("reserve":true,"result")");
  ExpectFound({kHeader, reserve},
              {{2, "[0,1]}", "[0,2]}", "cells is [0, 2], expected [0, 1]"},
               {2, R"("cells":[0,1])", R"("cells":[])", ""}});
}

// A recording of two layers and two sequences: no row of the second pass sees
// sequence 1, in cell 0, and cell 3 is free.
Recording Hidden() {
  const std::string header =
      Replaced(Replaced(Replaced(kHeader, R"("layers":1)", R"("layers":2)"),
                        R"("cache_padding":1)", R"("cache_padding":4)"),
               R"("max_sequences":1)", R"("max_sequences":2)");
  const auto put = [](int layer, const std::string& key,
                      const std::string& value, int tokens) {
    return fmt::format(
        R"({{"op":"put","layer":{},"key":{{"shape":[2,1,{}],"data":[{}]}},)"
        R"("value":{{"shape":[1,1,{}],"data":[{}]}}}})",
        layer, tokens, key, tokens, value);
  };
  const auto get = [](int layer, const std::string& key,
                      const std::string& value) {
    return fmt::format(R"({{"op":"get","layer":{},"first_cell":0,)"
                       R"("key":{{"shape":[2,1,4],"data":[{},0,0]}},)"
                       R"("value":{{"shape":[1,1,4],"data":[{},0]}},)"
                       R"("mask":{{"shape":[4,2],"rows":["0100","0110"]}}}})",
                       layer, key, value);
  };
  return {header,
          R"({"op":"start_forward","positions":[0],"sequences":[1],)"
          R"("result":"ok","cells":[0]})",
          put(0, "1,2", "3", 1),
          put(1, "4,5", "6", 1),
          R"({"op":"start_forward","positions":[0,1],"sequences":[0,0],)"
          R"("result":"ok","cells":[1,2]})",
          put(0, "11,12,13,14", "15,16", 2),
          put(1, "21,22,23,24", "25,26", 2),
          get(0, "1,2,11,12,13,14", "3,15,16"),
          get(1, "4,5,21,22,23,24", "6,25,26")};
}

TEST(FaultyRecordings, RowsOfHiddenTokensAreCompared) {
  const std::string hidden =
      "column 0 (cell 0), which holds a token that no mask row sees, has";
  ExpectFound(Hidden(), {{8, "[1,2,", "[7,2,", hidden},
                         {8, "[1,2,", "[1,7,", hidden},
                         {8, "[3,", "[7,", hidden},
                         {9, "[4,5,", "[4,7,", hidden},
                         {9, "[6,", "[7,", hidden},
                         {9, "26,0]", "7,0]", "mask row 1"},
                         // Rows of a free cell do not count (S52).
                         {8, ",0,0]", ",0,9]", ""},
                         {8, "16,0]", "16,9]", ""},
                         {9, ",0,0]", ",8,9]", ""}});
  // If two rows are wrong, the report names the visible one.
  Recording both = Hidden();
  both[7] = Replaced(Replaced(both[7], "[1,2,", "[7,2,"), "13,14", "13,7");
  EXPECT_NE(JudgeText(Lines(both)).reason().find("mask row 1"),
            std::string::npos);
  // Visibility compares visible rows only.
  Recording other = Hidden();
  other[0] = OtherHeader(other[0]);
  ExpectFound(other, {{8, "[1,2,", "[7,2,", ""},
                      {8, "[3,", "[7,", ""},
                      {8, "13,14", "13,7", "mask row 1"},
                      {8, "16,0]", "7,0]", "mask row 1"},
                      {9, "26,0]", "7,0]", "mask row 1"},
                      {9, "21,22", "21,7", "mask row 0"}});
}

TEST(FaultyRecordings, PaddingRowsMustSeeNothing) {
  const std::string padded = R"({"shape":[2,3],"rows":["10","11","00"]})";
  Recording lines = kRight;
  lines[0] = Replaced(lines[0], R"("mask_batch_padding":1)",
                      R"("mask_batch_padding":3)");
  lines[3] =
      Replaced(lines[3], R"({"shape":[2,2],"rows":["10","11"]})", padded);
  ExpectFound(
      lines, {{4, R"("00")", R"("01")", "mask row 2 (padding) sees column 1"}});
  lines[0] = OtherHeader(lines[0]);
  ExpectFound(lines,
              {{4, R"("00")", R"("01")", "a padding row sees something"},
               {4, R"("00")", R"("10")", "a padding row sees something"},
               {4, R"([2,3],"rows":["10","11","00"])", R"([2,1],"rows":["10"])",
                "the mask has 1 rows, the batch 2 tokens"}});
}

const std::string kYes = R"({"op":"can_resume","seq":0,"pos":1,"result":true})";
const std::string kReserve =
    R"({"op":"start_forward","positions":[0,1],"sequences":[0,0],)"
    R"("reserve":true,"result":"ok","cells":[]})";

TEST(FaultyRecordings, OtherAnswersAreCompared) {
  const std::string mask =
      R"({"op":"reserved_mask","shape":[4,2],"first_cell":0})";
  ExpectFound({kHeader, kStart, kPut, kYes, kReserve, mask},
              {{4, "true", "false", "result is false, expected true"},
               {6, "[4,2]", "[4,1]", "shape is [4, 1, 1], expected [4, 2, 1]"},
               {6, "[4,2]", "[2,2]", "shape is [2, 2, 1], expected [4, 2, 1]"},
               {6, R"("first_cell":0)", R"("first_cell":1)",
                "first_cell is 1, expected 0"},
               {6, R"(,"first_cell":0)", "", ""}});
  // The answer "false" is always allowed, "true" is not.
  ExpectFound({OtherHeader(kHeader), kStart, kPut, kYes},
              {{4, "true", "false", ""}});
  const std::string window =
      Replaced(kHeader, R"("type":"causal")", R"("type":"swa","window":1)");
  const std::string far =
      R"({"op":"start_forward","positions":[9],"sequences":[0],)"
      R"("result":"ok"})";
  const std::string no =
      R"({"op":"can_resume","seq":0,"pos":2,"result":false})";
  ExpectFound({window, kStart, far, no},
              {{4, "false", "true", "result is true, expected false"}});
  ExpectFound({OtherHeader(window), kStart, far, no},
              {{4, "false", "true",
                "the sequence's tokens begin at position 9, later than the "
                "window (S28)"}});
  const std::string beyond =
      R"({"op":"can_resume","seq":0,"pos":11,"result":false})";
  ExpectFound(
      {OtherHeader(window), kStart, far, beyond},
      {{4, "false", "true", "position 11 is beyond the end, which is 10"}});
}

// Column 2 repeats the row of the second token.
TEST(FaultyRecordings, ATokenMayBeSeenOnlyOnce) {
  const std::string get = R"({"op":"get","layer":0,"key":{"shape":[2,1,3],)"
                          R"("data":[100,1000,200,1001,200,1001]},)"
                          R"("value":{"shape":[1,1,3],"data":[100,200,200]},)"
                          R"("mask":{"shape":[3,2],"rows":["100","110"]}})";
  ExpectFound({OtherHeader(kHeader), kStart, kPut, get},
              {{4, R"("110")", R"("111")", "which it sees more than once"},
               {4, R"("100")", R"("101")", "which it must not see"}});
}

// The window counts the positions before the token's own.
TEST(FaultyRecordings, AWindowThatCountsTheTokenIsNamed) {
  const std::string window =
      Replaced(kHeader, R"("type":"causal")", R"("type":"swa","window":3)");
  const std::string start =
      Replaced(kStart, R"("positions":[0,1])", R"("positions":[0,3])");
  ExpectFound({OtherHeader(window), start, kPut, kGet},
              {{4, R"("11")", R"("01")", "(as if the window were 2: "},
               {4, R"("10")", R"("00")", "misses the token"}});
  const std::string later =
      Replaced(kStart, R"("positions":[0,1])", R"("positions":[0,4])");
  const std::string get = Replaced(kGet, R"("11")", R"("01")");
  ExpectFound({OtherHeader(window), later, kPut, get},
              {{4, R"("01")", R"("11")", "(as if the window were 4: "}});
}

// Lines of a pass of one token of sequence 0; its first K element is its V.
std::string StartAt(int position) {
  return fmt::format(
      R"({{"op":"start_forward","positions":[{}],"sequences":[0],)"
      R"("result":"ok"}})",
      position);
}
std::string PutToken(int value, int position) {
  return fmt::format(R"({{"op":"put","layer":0,"key":{{"shape":[2,1,1],)"
                     R"("data":[{0},{1}]}},"value":{{"shape":[1,1,1],)"
                     R"("data":[{0}]}}}})",
                     value, 1000 + position);
}
std::string GetTokens(const std::string& keys, const std::string& values,
                      const std::string& mask) {
  return fmt::format(
      R"({{"op":"get","layer":0,"key":{{"shape":[2,1,{0}],"data":[{1}]}},)"
      R"("value":{{"shape":[1,1,{0}],"data":[{2}]}},)"
      R"("mask":{{"shape":[{0},1],"rows":["{3}"]}}}})",
      mask.size(), keys, values, mask);
}

// With a window of 0, the next batch evicts the tokens before it (S7).
TEST(FaultyRecordings, ATokenThatLeftIsNamed) {
  const std::string window =
      Replaced(kHeader, R"("type":"causal")", R"("type":"swa","window":0)");
  ExpectFound({OtherHeader(window), kStart, kPut, StartAt(2), PutToken(300, 2),
               GetTokens("300,1002,200,1001", "300,200", "10")},
              {{6, R"("10")", R"("11")",
                "which it must not see; that token has left"}});
}

// The token at position 1 is removed, and another one comes to its position.
TEST(FaultyRecordings, AReplacedTokenIsNamed) {
  const std::string remove =
      R"({"op":"remove","seq":0,"begin":1,"end":2147483647,"result":"ok"})";
  ExpectFound(
      {OtherHeader(kHeader), kStart, kPut, remove, StartAt(1), PutToken(300, 1),
       GetTokens("100,1000,200,1001,300,1001", "100,200,300", "101")},
      {{7, R"("101")", R"("111")",
        "which it must not see; that token has left"}});
}

// A row of line 4 sees three positions back, so that the window is right.
TEST(FaultyRecordings, AWindowThatWasShownIsNotBlamed) {
  const std::string window =
      Replaced(kHeader, R"("type":"causal")", R"("type":"swa","window":3)");
  const std::string start =
      Replaced(kStart, R"("positions":[0,1])", R"("positions":[0,3])");
  const Recording recording = {OtherHeader(window),
                               start,
                               kPut,
                               kGet,
                               StartAt(6),
                               PutToken(300, 6),
                               GetTokens("200,1001,300,1006", "200,300", "01")};
  const Judgement judgement = JudgeText(Lines(recording));
  EXPECT_EQ(judgement.line(), 7);
  EXPECT_THAT(judgement.reason(), HasSubstr("misses the token"));
  EXPECT_THAT(judgement.reason(), Not(HasSubstr("as if the window")));
}

TEST(FaultyRecordings, EncodersAreCompared) {
  const std::string header =
      Replaced(Replaced(kHeader, R"("type":"causal","shift":"tag_add")",
                        R"("type":"encoder")"),
               R"("max_batch":2)", R"("max_batch":2)");
  const std::string start =
      R"({"op":"start_forward","positions":[0,1],"sequences":[0,0],)"
      R"("multimodal":[0],"result":"ok"})";
  const std::string get =
      R"({"op":"get","layer":0,)"
      R"("key":{"shape":[2,1,2],"data":[100,1000,200,1001]},)"
      R"("value":{"shape":[1,1,2],"data":[100,200]},"mask":null})";
  const std::string cached = R"({"op":"encoder_cached","result":true})";
  const std::string none = R"({"op":"encoder_cached","result":false})";
  for (const bool other : {false, true}) {
    SCOPED_TRACE(other);
    const Recording lines = {
        other ? OtherHeader(header) : header,          start, kPut, get, cached,
        Replaced(kRemove, R"("end":1)", R"("end":9)"), none};
    const std::string key = other ? "K differs" : "key is not what was put";
    const std::string value = other ? "V differs" : "value is not what was put";
    ExpectFound(
        lines,
        {{4, "[100,1000,200,1001]", "[101,1000,200,1001]", key},
         {4, "[100,1000,200,1001]", "[100,1000,200,1002]", key},
         {4, "[100,200]", "[101,200]", value},
         {4, "[100,200]", "[100,201]", value},
         {4, R"("value":{"shape":[1,1,2],"data":[100,200]},)", "", ""},
         {4, "[2,1,2]", "[1,2,2]", other ? "K differs" : "the shape of key"},
         {4, "[1,1,2]", "[2,1,1]", other ? "V differs" : "the shape of value"},
         {4, R"("mask":null)", R"("mask":{"shape":[2,2],"rows":["10","11"]})",
          other ? "there is a mask" : "there is a mask, expected none"},
         {5, "true", "false", other ? "" : "result is false, expected true"},
         {7, "false", "true",
          other ? "nothing is cached" : "result is true, expected false"}});
  }
}

// Each cache of a wrapper is compared, and each has its own mask.
TEST(FaultyRecordings, EachCacheOfAWrapperIsCompared) {
  const std::string header =
      Replaced(kHeader, R"({"type":"causal","shift":"tag_add"})",
               R"({"type":"wrapper","caches":[{"type":"swa","window":0,)"
               R"("shift":"tag_add"},{"type":"causal","shift":"tag_add"}]})");
  const std::string second = R"({"op":"set_layer_type","type":1})";
  const std::string narrow = Replaced(kGet, R"(["10","11"])", R"(["10","01"])");
  const Recording lines = {header,
                           kStart,
                           kPut,
                           narrow,
                           second,
                           kPut,
                           kGet,
                           R"({"op":"set_causal","except":[0]})",
                           Replaced(kGet, R"("10")", R"("11")")};
  for (const bool other : {false, true}) {
    SCOPED_TRACE(other);
    Recording all = lines;
    if (other) all[0] = OtherHeader(all[0]);
    ExpectFound(all, {{4, R"("01")", R"("11")", "mask row 1"},
                      {4, "200,1001", "200,1002", "mask row 1"},
                      {7, R"("10")", R"("11")", "mask row 0"},
                      {7, "200,1001", "200,1002", "mask row 1"},
                      {7, "[100,200]", "[100,201]", "mask row 1"},
                      {9, R"(["11","11"])", R"(["10","11"])",
                       other ? "mask row 0 (sequence 0, position 0) misses"
                             : "mask row 0"}});
  }
}

// Other rules than those of shapes say which tokens a row must see.
TEST(FaultyRecordings, RulesOfARowAreCitedForWhatItMisses) {
  for (const char* mask : {R"(["10","01"])", R"(["11","11"])"}) {
    const std::string get = Replaced(kGet, R"(["10","11"])", mask);
    EXPECT_EQ(JudgeText(Lines({OtherHeader(kHeader), kStart, kPut, get}))
                  .failure->rules,
              "S16, S21, S53");
  }
  const std::string none =
      Replaced(kGet, R"({"shape":[2,2],"rows":["10","11"]})", "null");
  EXPECT_EQ(JudgeText(Lines({OtherHeader(kHeader), kStart, kPut, none}))
                .failure->rules,
            CitedRules(TraceOpKind::kGet, /*of_row=*/false));
}

// Returns the rules that the recording with this last line cites.
std::string CitedOf(Recording lines, const std::string& from,
                    const std::string& to) {
  lines.back() = Replaced(lines.back(), from, to);
  const Judgement judgement = JudgeText(Lines(lines));
  return judgement.failure ? judgement.failure->rules : judgement.reason();
}

TEST(FaultyRecordings, RulesOfStorageAreCitedForAWrongRow) {
  const std::string copy = R"({"op":"copy_prefix","src":0,"dst":1,"len":1})";
  const std::string key = "[100,1000,200,1001]";
  for (const bool other : {false, true}) {
    SCOPED_TRACE(other);
    const std::string header = other ? OtherHeader(kHeader) : kHeader;
    const std::string level = other ? "S53" : "S51, S53";
    const Recording lines = {header, kStart, kPut, kGet};
    EXPECT_EQ(CitedOf(lines, key, "[100,1000,200,1002]"), "S21, S22, " + level);
    EXPECT_EQ(CitedOf(lines, "[100,200]", "[100,201]"), "S21, S22, " + level);
    EXPECT_EQ(CitedOf(lines, key + R"(},"value":{"shape":[1,1,2],"data":[100,)",
                      R"([101,1000,200,1001]},)"
                      R"("value":{"shape":[1,1,2],"data":[101,)"),
              "S16, S21, S22, " + level);
    // The rows of another token are whole: the view or the mask is wrong.
    EXPECT_EQ(CitedOf(lines, key + R"(},"value":{"shape":[1,1,2],"data":[100,)",
                      R"([200,1001,200,1001]},)"
                      R"("value":{"shape":[1,1,2],"data":[200,)"),
              "S16, S21, " + level);
    const Recording moved = {
        header,
        kStart,
        kPut,
        kRemove,
        R"({"op":"start_forward","positions":[1],"sequences":[0],)"
        R"("result":"ok"})",
        R"({"op":"get","layer":0,)"
        R"("key":{"shape":[2,1,2],"data":[100,1000,200,1000]},)"
        R"("value":{"shape":[1,1,2],"data":[100,200]},)"
        R"("mask":{"shape":[2,1],"rows":["11"]}})"};
    EXPECT_EQ(CitedOf(moved, "200,1000]", "200,1001]"),
              "S21, S22, S31, S34, S35, " + level);
    EXPECT_EQ(CitedOf(moved, "[100,200]", "[100,201]"), "S21, S22, " + level);
  }
  const std::string encoder = Replaced(
      kHeader, R"("type":"causal","shift":"tag_add")", R"("type":"encoder")");
  const std::string image =
      Replaced(kStart, R"("result")", R"("multimodal":[0],"result")");
  const std::string get =
      Replaced(Replaced(kGet, R"("first_cell":0,)", ""),
               R"({"shape":[2,2],"rows":["10","11"]})", "null");
  for (const bool other : {false, true}) {
    const std::string level = other ? "S53" : "S51, S53";
    const Recording lines = {other ? OtherHeader(encoder) : encoder,
                             Replaced(image, R"(,"cells":[0,1])", ""), kPut,
                             get};
    EXPECT_EQ(CitedOf(lines, key, "[101,1000,200,1001]"), "S22, S37, " + level);
    EXPECT_EQ(CitedOf(lines, "[100,200]", "[101,200]"), "S22, S37, " + level);
  }
  EXPECT_EQ(
      CitedOf({kHeader, kStart, kPut, copy, kGet}, key, "[100,1000,200,1002]"),
      "S21, S22, S26, S51, S53");
  EXPECT_EQ(CitedOf({kHeader, kStart}, "[0,1]}", "[0,2]}"),
            "S9, S10, S13, S18");
}

// At visibility, rows are judged until a call changes what the mask shows.
TEST(FaultyRecordings, RowsAreComparedUntilACallChangesThem) {
  const std::string header = OtherHeader(kHeader);
  const Case wrong = {0, R"(["10","11"])", R"(["11","11"])", "mask row 0"};
  const auto judged = [&](const Recording& between, bool yes) {
    Recording lines = {header, kStart, kPut};
    lines.insert(lines.end(), between.begin(), between.end());
    lines.emplace_back(kGet);
    Case test_case = wrong;
    test_case.line = lines.size();
    if (!yes) test_case.reason.clear();
    ExpectFound(lines, {test_case});
  };
  const std::string copy = R"({"op":"copy_prefix","src":0,"dst":1,"len":9})";
  const std::string causal = R"({"op":"set_causal","except":[]})";
  const std::string nothing =
      R"({"op":"remove","seq":5,"begin":0,"end":1,"result":"ok"})";
  judged({}, true);
  judged({kYes}, true);
  judged({copy}, false);
  judged({nothing}, false);
  judged({Replaced(nothing, "ok", "not_supported")}, true);
  judged({copy, causal}, true);
  judged({nothing, causal}, true);
  judged({nothing, Replaced(kStart, "[0,0]", "[7,7]"), kPut}, true);
}

TEST(FaultyRecordings, OtherCachesMustHaveMasks) {
  ExpectFound({OtherHeader(kHeader), kStart, kPut, kGet},
              {{4, R"({"shape":[2,2],"rows":["10","11"]})", "null",
                "mask is null, expected a mask"}});
}

// SetCausal makes a new mask for the active cache only.
TEST(FaultyRecordings, EachCacheOfAWrapperHasAMaskOfItsOwn) {
  const std::string header = Replaced(
      OtherHeader(kHeader), R"({"type":"causal","shift":"tag_add"})",
      R"({"type":"wrapper","caches":[{"type":"causal","shift":"tag_add"},)"
      R"({"type":"causal","shift":"tag_add"}]})");
  const std::string first = R"({"op":"set_layer_type","type":0})";
  const std::string second = R"({"op":"set_layer_type","type":1})";
  const std::string copy = R"({"op":"copy_prefix","src":0,"dst":1,"len":9})";
  const std::string causal = R"({"op":"set_causal","except":[]})";
  ExpectFound(
      {header, kStart, kPut, second, kPut, copy, causal, kGet, first, kGet},
      {{8, R"(["10","11"])", R"(["11","11"])", "mask row 0"},
       {10, R"(["10","11"])", R"(["11","11"])", ""}});
}

// A refused batch has already evicted tokens; the defrag before it leaves cell
// 2 free.
TEST(FaultyRecordings, ARefusedBatchStillEvicts) {
  const std::string header =
      Replaced(kHeader, R"("type":"causal")", R"("type":"swa","window":1)");
  const auto pass = [](int sequence, int position, int cell) {
    return fmt::format(
        R"({{"op":"start_forward","positions":[{}],"sequences":[{}],)"
        R"("result":"ok","cells":[{}]}})",
        position, sequence, cell);
  };
  const std::string put =
      R"({"op":"put","layer":0,"key":{"shape":[2,1,1],"data":[1,2]},)"
      R"("value":{"shape":[1,1,1],"data":[3]}})";
  const std::string get = R"({"op":"get","layer":0,"first_cell":2,)"
                          R"("key":{"shape":[2,1,1],"data":[1,2]},)"
                          R"("value":{"shape":[1,1,1],"data":[3]},)"
                          R"("mask":{"shape":[1,1],"rows":["1"]}})";
  const std::string full =
      R"({"op":"start_forward","positions":[9,0],"sequences":[1,3],)"
      R"("result":"cache_full"})";
  ExpectFound({header, pass(1, 0, 0), put, pass(2, 0, 1), put, pass(0, 0, 2),
               put, full, pass(1, 1, 2), put, get},
              {{11, "[1,2]", "[1,3]", "mask row 0"}});
}

// A batch that fits is not refused, and removed tokens are gone.
TEST(FaultyRecordings, ImpossibleResultsAreRejected) {
  const std::string shared =
      R"({"op":"remove","seq":0,"begin":0,"end":1,"result":"shared_cells"})";
  const std::string copy = R"({"op":"copy_prefix","src":0,"dst":1,"len":2})";
  ExpectFound({kHeader, kStart, kPut, copy, shared},
              {{5, "shared_cells", "ok", "result is ok, expected shared_cells"},
               {5, "shared_cells", "not_supported",
                "result is not_supported, expected shared_cells"}});
  const std::string none = Replaced(kHeader, R"("tag_add")", R"("none")");
  ExpectFound({none, kStart, kPut, Replaced(kRemove, "ok", "not_supported")},
              {{4, "not_supported", "ok", "result is ok, expected not_supp"}});
  const std::string three =
      R"({"op":"start_forward","positions":[2,3],"sequences":[0,0],)"
      R"("result":"ok","cells":[2,3]})";
  const std::string full =
      R"({"op":"start_forward","positions":[4],"sequences":[0],)"
      R"("result":"cache_full"})";
  ExpectFound(
      {kHeader, kStart, three, full},
      {{4, R"("cache_full")", R"("ok")", "result is ok, expected cache_full"}});
}

// At visibility, too, a cache without tokens is not full (S4, S8, S12), unless
// the batch may be more than it was made for.
TEST(FaultyRecordings, ACacheWithoutTokensIsNotFull) {
  const std::string header = OtherHeader(kHeader);
  const auto start = [](const std::string& positions,
                        const std::string& sequences,
                        const std::string& result) {
    return fmt::format(
        R"({{"op":"start_forward","positions":[{}],"sequences":[{}],)"
        R"("result":"{}"}})",
        positions, sequences, result);
  };
  const std::string full = start("0,1", "0,0", "cache_full");
  const std::string reason =
      "start_forward: result is cache_full, but the cache has no tokens";
  const std::string remove =
      R"({"op":"remove","seq":0,"begin":0,"end":2147483647,"result":"ok"})";
  for (const Recording& lines :
       {Recording{header, full},
        Recording{header, start("0,1", "0,0", "ok"), kPut, remove, full}}) {
    const Judgement judgement = JudgeText(Lines(lines));
    EXPECT_EQ(VerdictName(judgement.verdict()), "reject");
    EXPECT_TRUE(judgement.reason().starts_with(reason)) << judgement.reason();
  }
  for (const auto& [positions, sequences] :
       {std::pair("1,2", "0,0"), std::pair("0,0", "0,0"),
        std::pair("0,0", "0,1")}) {
    SCOPED_TRACE(positions);
    ExpectAccept(Lines({header, start(positions, sequences, "cache_full")}),
                 Level::kVisibility);
  }
  ExpectAccept(Lines({header, start("0", "0", "ok"), full}),
               Level::kVisibility);
}

}  // namespace
}  // namespace kvtwin::props
