// Short recordings of caches that answer otherwise than ours, with prompts,
// pinned states and answers of can_resume.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/index.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

using Recording = std::vector<std::string>;
using testing::HasSubstr;

std::string Header(const std::string& cache, int layers = 1,
                   int sequences = 3) {
  return fmt::format(
      R"({{"kvtrace":4,"placement":"other","cache":{{{}}},"config":{{}},)"
      R"("init":{{"dtype":"f32","max_sequences":{},"capacity":9,)"
      R"("max_batch":9}},)"
      R"("model":{{"layers":{},"k_head_dim":1,"kv_heads":1,"v_head_dim":1}}}})",
      cache, sequences, layers);
}
const std::string kCausal = Header(R"("type":"causal","shift":"none")");

std::string Find(int seq, const std::vector<int>& tokens, int len) {
  return fmt::format(
      R"({{"op":"find_prefix","seq":{},"tokens":[{}],"len":{}}})", seq,
      fmt::join(tokens, ","), len);
}
std::string Start(int seq, int begin, int count,
                  const std::string& more = R"("result":"ok")") {
  std::vector<int> positions;
  for (int i = 0; i < count; ++i) positions.push_back(begin + i);
  return fmt::format(
      R"({{"op":"start_forward","positions":[{}],"sequences":[{}],{}}})",
      fmt::join(positions, ","),
      fmt::join(std::vector(AsSize(count), seq), ","), more);
}
std::string Rows(const std::vector<int>& rows) {
  return fmt::format(R"({{"shape":[1,1,{}],"data":[{}]}})", rows.size(),
                     fmt::join(rows, ","));
}
std::string Put(const std::vector<int>& rows, int layer = 0) {
  return fmt::format(R"({{"op":"put","layer":{},"key":{},"value":{}}})", layer,
                     Rows(rows), Rows(rows));
}
// Returns a get whose mask is causal: the last row sees all columns, each row
// before it a column less.
std::string Get(const std::vector<int>& rows, int batch, int layer = 0) {
  std::vector<std::string> mask;
  for (int i = 1; i <= batch; ++i) {
    const std::size_t sees = rows.size() - AsSize(batch - i);
    mask.push_back("\"" + std::string(sees, '1') +
                   std::string(rows.size() - sees, '0') + "\"");
  }
  return fmt::format(R"({{"op":"get","layer":{},"key":{},"value":{},)"
                     R"("mask":{{"shape":[{},{}],"rows":[{}]}}}})",
                     layer, Rows(rows), Rows(rows), rows.size(), batch,
                     fmt::join(mask, ","));
}
Recording operator+(Recording a, const Recording& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// A cache of another kind may have no limits of its own.
TEST(Headers, MayHaveTheLargestSizes) {
  std::string header = Header(R"("type":"causal","shift":"none")", 1,
                              /*sequences=*/2147483647);
  header = Replaced(header, R"("capacity":9)", R"("capacity":2147483647)");
  header = Replaced(header, R"("max_batch":9)", R"("max_batch":2147483647)");
  ExpectAccept(Lines({header, Start(2147483646, 0, 1), Put({3}), Get({3}, 1)}),
               Level::kVisibility);
}

// Nothing says which rows a pass without a put has.
TEST(TokensWithoutAPut, AreCounted) {
  const Recording recording = {kCausal, Start(0, 0, 2), Start(0, 2, 1),
                               Put({3}), Get({8, 9, 3}, 1)};
  ExpectAccept(Lines(recording), Level::kVisibility);
  EXPECT_EQ(JudgedText(JudgeText(Lines(recording)).judged),
            "4 calls: 1 get of 3 rows; in 1 get, tokens without a put could "
            "have any rows");
}

const std::string kFrom1 =
    R"({"op":"remove","seq":0,"begin":1,"end":2147483647,"result":"ok"})";

const Recording kFirst = {kCausal, Find(0, {7, 8, 9}, 0), Start(0, 0, 3),
                          Put({1, 2, 3}), Get({1, 2, 3}, 3)};

TEST(Prompts, AreJudged) {
  const auto accept = [](const Recording& recording) {
    ExpectAccept(Lines(recording), Level::kVisibility);
  };
  const auto reject = [](const Recording& recording, std::int64_t line) {
    ExpectReject(Lines(recording), line, Level::kNone);
  };
  const Recording next = {Start(1, 2, 1), Put({4}), Get({1, 2, 4}, 1)};
  accept(kFirst + Recording{Find(1, {7, 8, 5}, 2)} + next);
  // A shorter prefix; the rest is computed again, with the same rows.
  accept(kFirst + Recording{Find(1, {7, 8, 5}, 1), Start(1, 1, 2), Put({2, 4}),
                            Get({1, 2, 4}, 2)});
  // The sequence that computed it is gone.
  accept(kFirst +
         Recording{R"({"op":"remove","seq":0,"begin":0,"end":2147483647,)"
                   R"("result":"ok"})",
                   Find(1, {7, 8, 5}, 2)} +
         next);
  reject(kFirst + Recording{Find(1, {7, 5, 9}, 2)} + next, 6);
  reject(kFirst + Recording{Find(1, {8, 9}, 1)} + next, 6);
  // Rows of other tokens.
  reject(kFirst + Recording{Find(1, {7, 8, 5}, 2), Start(1, 2, 1), Put({4}),
                            Get({1, 3, 4}, 1)},
         9);
}

TEST(Prompts, AreFoundAfterAllLayersOnly) {
  const Recording start = {Header(R"("type":"causal","shift":"none")", 2),
                           Find(0, {7, 8}, 0), Start(0, 0, 2), Put({1, 2}, 0)};
  const Recording found = {Find(1, {7, 8, 9}, 2)};
  ExpectReject(Lines(start + found), 5, Level::kNone);
  ExpectAccept(Lines(start + Recording{Put({3, 4}, 1)} + found),
               Level::kVisibility);
}

TEST(Prompts, OverAWindowNeedOnlyTheWindow) {
  const Recording swa = {Header(R"("type":"swa","window":1,"shift":"none")"),
                         Find(0, {7, 8, 9}, 0),
                         Start(0, 0, 3),
                         Put({1, 2, 3}),
                         Find(1, {7, 8, 5}, 2),
                         Start(1, 2, 1),
                         Put({4})};
  ExpectAccept(Lines(swa + Recording{Get({2, 4}, 1)}), Level::kVisibility);
  ExpectReject(Lines(swa + Recording{Get({1, 2, 4}, 1)}), 8, Level::kNone);
}

// The last token of a prompt is computed, for its output (F1).
TEST(Prompts, AreNeverFoundWhole) {
  for (const int len : {1, 2, 1000}) {
    ExpectReject(Lines(kFirst + Recording{Find(1, {7}, len)}), 6, Level::kNone);
  }
  EXPECT_THAT(JudgeText(Lines(kFirst + Recording{Find(1, {7}, 1)})).reason(),
              HasSubstr("len is 1, but the prompt has 1 token: its last"));
}

TEST(Prompts, ThatCannotBeAreBadInput) {
  ExpectBadInput(Lines(kFirst + Recording{Find(0, {7, 8}, 1)}), 6,
                 "sequence 0 has tokens: remove them first");
  ExpectBadInput(Lines(kFirst + Recording{Find(-1, {7, 8}, 1)}), 6,
                 "seq is -1, it must not be negative");
  ExpectBadInput(Replaced(Lines(kFirst), R"("kvtrace":4)", R"("kvtrace":3)"), 2,
                 "find_prefix needs kvtrace 4");
  ExpectBadInput(Replaced(Lines(kFirst), "other", "scatter"), 2,
                 "find_prefix needs the placement");
  // Each prompt adds prefixes: a recording of many is refused.
  Recording many = {kCausal};
  for (int i = 0; i < 64; ++i) {
    std::vector<int> tokens(10'000, 1);
    tokens[0] = i;
    many.push_back(Find(i, tokens, 0));
  }
  ExpectBadInput(Lines(many), 54, "prompts and tokens would now need");
}

// The state at 2 is pinned, and so it is still there at 6.
TEST(PinnedStates, AreJudged) {
  const std::string header =
      Header(R"("type":"recurrent","checkpoint_every":0,"pins":1)");
  const std::string pin = R"({"op":"checkpoint","seq":0})";
  const auto recording = [&](const Recording& pinned) {
    return Lines(Recording{header, Start(0, 0, 2), Put({1, 2})} + pinned +
                 Recording{Start(0, 2, 2), Put({3, 4}), Start(0, 4, 2),
                           Put({5, 6}),
                           R"({"op":"can_resume","seq":0,"pos":2,)"
                           R"("result":true})"});
  };
  ExpectAccept(recording({pin}), Level::kVisibility);
  ExpectReject(recording({}), 8, Level::kNone);
  ExpectBadInput(Replaced(recording({pin}), R"("pins":1)", R"("pins":0)"), 4,
                 "pins no states");
}

// Right caches, which have an answer of their own (S3, S19, R2, F2).
TEST(OtherAnswers, AreAccepted) {
  // Each of eight sequences has a state.
  Recording states = {Header(R"("type":"recurrent")", 1, 8)};
  for (int seq = 0; seq < 8; ++seq) {
    states = states + Recording{Start(seq, 0, 1), Put({1})};
  }
  const Recording two = {kCausal, Start(0, 0, 2), Put({1, 2}), Get({1, 2}, 2)};
  for (const Recording& recording : std::vector<Recording>{
           states,
           // An absent window is unbounded, and so is a memory of all cells.
           {Header(R"("type":"swa_mem","memory":9,"shift":"none")", 1, 1),
            Start(0, 0, 1), Put({1}), Get({1}, 1)},
           // The view of the pass does not have the cells of the copied tokens.
           two + Recording{Start(1, 0, 1), Put({3}),
                           R"({"op":"copy_prefix","src":0,"dst":1,"len":2})",
                           R"({"op":"set_causal","except":[0]})",
                           Replaced(Get({3}, 1), R"("1")", R"("0")")},
           // A copy of an empty sequence to itself keeps its prompt.
           {kCausal, Find(0, {5, 6}, 0),
            R"({"op":"copy_prefix","src":0,"dst":0,"len":1})", Start(0, 0, 2),
            Put({1, 2}), Get({1, 2}, 2), Find(1, {5, 6, 7}, 2), Start(1, 2, 1),
            Put({3}), Get({1, 2, 3}, 1)}}) {
    ExpectAccept(Lines(recording), Level::kVisibility);
  }
}

// Where a sequence with states ends, it can resume (R8).
TEST(OtherAnswers, AStateAtTheEndMustResume) {
  const Recording two = {Header(R"("type":"recurrent","checkpoint_every":0)"),
                         Start(0, 0, 2), Put({1, 2})};
  const auto asked = [&](int pos) {
    return Lines(
        two + Recording{fmt::format(R"({{"op":"can_resume","seq":0,"pos":{},)"
                                    R"("result":false}})",
                                    pos)});
  };
  ExpectReject(asked(2), 4, Level::kNone);
  for (const int pos : {0, 1, 3}) {
    ExpectAccept(asked(pos), Level::kVisibility);
  }
}

// A cache may answer shared_cells only if a shared token would move (S32).
TEST(OtherAnswers, SharedCellsNeedSharedTokens) {
  const std::string copy = R"({"op":"copy_prefix","src":0,"dst":1,"len":2})";
  const auto removed = [&](const Recording& before, int begin, int end) {
    const Recording start = {kCausal, Start(0, 0, 3), Put({1, 2, 3})};
    return Lines(
        start + before +
        Recording{fmt::format(R"({{"op":"remove","seq":0,"begin":{},"end":{},)"
                              R"("result":"shared_cells"}})",
                              begin, end)});
  };
  ExpectAccept(removed({copy}, 0, 1), Level::kVisibility);
  ExpectReject(removed({}, 0, 1), 4, Level::kNone);
  ExpectReject(removed({copy}, 0, 2), 5, Level::kNone);  // Only 2 would move.
  ExpectReject(removed({copy}, 0, kOpenEnd), 5, Level::kNone);
  // A prompt's tokens may be shared with the cache of prompts (F4).
  ExpectAccept(Lines(kFirst + Recording{R"({"op":"remove","seq":0,"begin":0,)"
                                        R"("end":1,"result":"shared_cells"})"}),
               Level::kVisibility);
}

// A refused batch may have evicted tokens (S12), and later lines tell. Here
// each cache has evicted those of sequence 0; after the last line, another
// sight of the same rows is wrong.
TEST(OtherAnswers, MayFollowARefusedBatch) {
  const std::string window = R"("type":"swa","window":1,"shift":"none")";
  const std::string full = R"("result":"cache_full")";
  const std::string draft = R"("parents":[-1],"result":)";
  const Recording lost = {Header(window, 1, 1), Start(0, 0, 2), Put({1, 2}),
                          Start(0, 8, 1, full)};
  const Recording anew = {Start(0, 0, 1), Put({3}), Get({3}, 1)};
  std::vector<Recording> histories = {
      // The sequence begins anew, so that its draft is at position 1.
      lost + Recording{Start(0, 0, 1), Put({3}),
                       Start(0, 1, 1, draft + R"("ok")"), Put({4}),
                       Get({3, 4}, 1)},
      // All tokens of the sequence are gone: a draft may be anywhere, also a
      // draft that is refused, or only planned.
      lost + Recording{Start(0, 5, 1, draft + R"("cache_full")")} + anew,
      lost + Recording{Start(0, 5, 1, draft + R"("ok","reserve":true)")} + anew,
      // So may a prompt be given.
      lost + Recording{Find(0, {5, 6}, 0)} + anew,
      // The sequence ends at 2, so that the batch of another evicts nothing.
      {Header(window, 1, 2), Start(0, 4, 1), Put({9}), Start(0, 8, 1, full),
       Start(0, 0, 2), Put({1, 2}), Start(1, 0, 1), Put({5}), Start(0, 2, 1),
       Put({3}), Replaced(Get({1, 2, 3}, 1), "111", "011")},
      // The new token at position 1 has the cell of the evicted token at 0, and
      // its rows until they are put (S13).
      {Header(window, 1, 1), Start(0, 0, 2), Put({1, 2}), Start(0, 2, 1, full),
       kFrom1, Start(0, 1, 1), Get({1}, 1)}};
  // A hybrid whose window has evicted its tokens goes back to 0 (H3, R3).
  for (const std::string second :
       {R"("type":"causal","shift":"none")",
        R"("type":"recurrent","checkpoints":4)",
        R"("type":"recurrent","checkpoints":4,"checkpoint_every":1)"}) {
    const std::string caches = fmt::format(
        R"("type":"hybrid","caches":[{{{}}},{{{}}}])", window, second);
    histories.push_back(Recording{Header(caches, 1, 1), Start(0, 0, 2),
                                  Put({1, 2}),
                                  R"({"op":"set_layer_type","type":1})",
                                  Put({1, 2}), Start(0, 2, 1, full), kFrom1,
                                  R"({"op":"can_resume","seq":0,"pos":1,)"
                                  R"("result":false})"} +
                        anew);
  }
  for (const Recording& recording : histories) {
    ExpectAccept(Lines(recording), Level::kVisibility);
    Recording blind = recording;
    blind.back()[blind.back().rfind('1')] = '0';
    EXPECT_EQ(VerdictName(JudgeText(Lines(blind)).verdict()), "reject");
  }
}

const std::string kAsked =
    R"({"op":"can_resume","seq":0,"pos":1,"result":true})";
const std::string kBack =
    R"({"op":"remove","seq":0,"begin":1,"end":2147483647,"result":"ok"})";
const std::string kPromised =
    " (can_resume on line 4 promised sequence 0 the tokens before position 1)";

std::string Pass(int position) {
  return fmt::format(
      R"({{"op":"start_forward","positions":[{}],"sequences":[0],)"
      R"("result":"ok"}})",
      position);
}
const std::string kRow =
    R"({"op":"put","layer":0,"key":{"shape":[2,1,1],"data":[300,1001]},)"
    R"("value":{"shape":[1,1,1],"data":[300]}})";

// A get of one row, which sees these of the tokens at positions 0 and 1.
std::string Sees(const std::string& mask) {
  return fmt::format(R"({{"op":"get","layer":0,)"
                     R"("key":{{"shape":[2,1,2],"data":[100,1000,300,1001]}},)"
                     R"("value":{{"shape":[1,1,2],"data":[100,300]}},)"
                     R"("mask":{{"shape":[2,1],"rows":["{}"]}}}})",
                     mask);
}

std::string CacheLines(const Recording& lines) {
  const std::string start = Replaced(kStart, R"(,"cells":[0,1])", "");
  return Lines(
      Recording{Replaced(kHeader, "contiguous", "other"), start, kPut} + lines);
}

void ExpectNamed(const Recording& lines, bool named) {
  const std::string reason = JudgeText(CacheLines(lines)).reason();
  EXPECT_NE(reason.find(" misses the token (sequence 0, position "),
            std::string::npos)
      << reason;
  EXPECT_EQ(reason.find(kPromised) != std::string::npos, named) << reason;
}

// If a get misses a token that can_resume promised, the report names that call.
TEST(Promises, AreNamedIfTheyWereFalse) {
  ExpectAccept(CacheLines({kAsked, kBack, Pass(1), kRow, Sees("11")}),
               Level::kVisibility);
  ExpectNamed({kAsked, kBack, Pass(1), kRow, Sees("01")}, true);
  const std::string reserve =
      Replaced(Pass(1), R"("result")", R"("reserve":true,"result")");
  ExpectNamed({kAsked, reserve, kBack, Pass(1), kRow, Sees("01")}, true);
}

TEST(Promises, AreNotNamedForOtherReasons) {
  const std::string unasked = Replaced(kAsked, "true", "false");
  ExpectNamed({unasked, kBack, Pass(1), kRow, Sees("01")}, false);
  // The token that is missing is that of the batch.
  ExpectNamed({kAsked, kBack, Pass(1), kRow, Sees("10")}, false);
  // A later call may have changed what the sequence has.
  const std::string copy = R"({"op":"copy_prefix","src":0,"dst":0,"len":1})";
  ExpectNamed({kAsked, copy, Pass(1), kRow, Sees("01")}, false);
  const std::string full =
      Replaced(Replaced(Pass(1), "ok", "cache_full"), "[0]", "[5]");
  ExpectNamed({kAsked, full, kBack, Pass(1), kRow, Sees("01")}, false);
}

}  // namespace
}  // namespace kvtwin::props
