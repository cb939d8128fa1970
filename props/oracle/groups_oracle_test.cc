// Recordings of pools with groups: those of the twins are right, and each wrong
// line has its reason.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "props/base/scratch_folder.h"
#include "props/oracle/judge.h"
#include "props/paged/paged_history.h"
#include "props/paged/paged_runner.h"
#include "props/report/show.h"
#include "props/testing/test_pool_lines.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

std::string GroupsRecordingOf(std::uint64_t number) {
  std::ostringstream out;
  EXPECT_TRUE(
      WritePagedRecording(MakeGroupsHistory(5, number), "reference", out).ok());
  return out.str();
}

TEST(GroupsRecordings, OfATwinAreAccepted) {
  int media = 0;
  int states = 0;
  for (std::uint64_t number = 0; number < 150; ++number) {
    const std::string text = GroupsRecordingOf(number);
    ExpectAccept(text, Level::kIdentity);
    ExpectAccept(Replaced(text, "lowest", "other"), Level::kVisibility);
    media += text.find("\"media_at\"") != text.npos ? 1 : 0;
    states += text.find("\"positions\"") != text.npos ? 1 : 0;
  }
  EXPECT_GT(media, 10);
  EXPECT_GT(states, 30);
}

// There are three groups of one layer: full attention, a window of three, and
// states.
const std::string kGroupsHeader =
    R"({"kvtrace":1,"placement":"other","cache":{"type":"paged"},)"
    R"("pool":{"max_seq_len":12,"groups":[)"
    R"({"block_size":2,"blocks":6,"layers":1,"kv_heads":1,"k_head_dim":1,)"
    R"("v_head_dim":1,"dtype":"f32"},)"
    R"({"block_size":2,"blocks":6,"layers":1,"kv_heads":1,"k_head_dim":1,)"
    R"("v_head_dim":1,"dtype":"f32","window":3},)"
    R"({"block_size":4,"blocks":4,"layers":1,"kv_heads":1,"k_head_dim":1,)"
    R"("v_head_dim":1,"dtype":"f32","states":true}]}})";

std::string AppendTo(int layer, const std::vector<int>& rows) {
  return Replaced(Append(0, rows), R"("layer":0)",
                  fmt::format(R"("layer":{})", layer));
}
std::string ViewsAt(int sequence, int start, const std::vector<int>& rows,
                    int layer) {
  return Replaced(Views(sequence, rows), R"("layer":0)",
                  fmt::format(R"("layer":{},"start":{})", layer, start));
}
std::string States(int sequence, const std::vector<int>& positions,
                   const std::vector<int>& rows) {
  return Replaced(
      Views(sequence, rows), R"("layer":0)",
      fmt::format(R"("layer":2,"positions":[{}])", fmt::join(positions, ",")));
}
std::string TruncateTo(int len, int kept) {
  return fmt::format(R"({{"op":"truncate","seq":0,"len":{},"kept":{}}})", len,
                     kept);
}
std::string TableOfGroup(int group, const std::vector<int>& sequences,
                         int columns, const std::vector<int>& blocks,
                         const std::vector<int>& lengths) {
  return fmt::format(
      R"({{"op":"table","group":{},"seqs":[{}],"columns":{},"blocks":[{}],)"
      R"("seq_lens":[{}]}})",
      group, fmt::join(sequences, ","), columns, fmt::join(blocks, ","),
      fmt::join(lengths, ","));
}

// Sequence 0 has seven tokens.
const Recording kSeven = {Open(0), AppendTo(0, {1, 2, 3, 4, 5, 6, 7}),
                          AppendTo(1, {11, 12, 13, 14, 15, 16, 17}),
                          AppendTo(2, {21, 22, 23, 24, 25, 26, 27}),
                          Commit(0, {1, 2, 3, 4, 5, 6, 7})};
// Sequence 1 begins with four of them.
const Recording kFound = kSeven + Recording{Open(1, {1, 2, 3, 4, 5}, 4)};

Recording WithGroups(const Recording& lines, const std::string& header) {
  return Recording{header} + lines;
}
void ExpectRightGroups(const Recording& lines,
                       const std::string& header = kGroupsHeader) {
  ExpectAccept(Lines(WithGroups(lines, header)), Level::kVisibility);
}
void ExpectGroupsVerdict(const Recording& lines, const std::string& verdict,
                         const std::string& reason,
                         const std::string& header = kGroupsHeader) {
  const Judgement judgement = JudgeText(Lines(WithGroups(lines, header)));
  EXPECT_EQ(VerdictName(judgement.verdict()), verdict) << judgement.reason();
  EXPECT_NE(judgement.reason().find(reason), std::string::npos)
      << "'" << judgement.reason() << "' lacks '" << reason << "'";
}
void ExpectWrongGroups(const Recording& lines, const std::string& reason) {
  ExpectGroupsVerdict(lines, "reject", reason);
}

TEST(GroupsRecordings, APrefixIsServedByAllGroups) {
  ExpectRightGroups(kFound + Recording{Views(1, {1, 2, 3, 4}),
                                       ViewsAt(1, 0, {11, 12, 13, 14}, 1),
                                       ViewsAt(1, 1, {12, 13, 14}, 1),
                                       States(1, {3}, {24})});
  ExpectWrongGroups(kSeven + Recording{Open(1, {1, 2, 3, 4, 5, 6, 7}, 6)},
                    "a prefix is found in whole blocks of 4");
  ExpectWrongGroups(kFound + Recording{ViewsAt(1, 2, {13, 14}, 1)},
                    "a window of 3 positions needs them from 1 on");
  ExpectWrongGroups(kFound + Recording{ViewsAt(1, 1, {2, 3, 4}, 0)},
                    "a pool without a window shows all rows");
  ExpectWrongGroups(kFound + Recording{States(1, {}, {})},
                    "the state after the token at position 3 is missing");
}

TEST(GroupsRecordings, StatesAreThoseOfTheirTokens) {
  ExpectRightGroups(
      kSeven + Recording{States(0, {3, 6}, {24, 27}), States(0, {6}, {27})});
  ExpectWrongGroups(kSeven + Recording{States(0, {3}, {24})},
                    "the state after the token at position 6 is missing");
  ExpectWrongGroups(kSeven + Recording{States(0, {3, 6}, {24, 26})},
                    "position 6 of sequence 0 has the row of sequence 0, "
                    "position 5");
  ExpectWrongGroups(kSeven + Recording{States(0, {6, 3}, {27, 24})},
                    "positions has 3 after 6");
  ExpectWrongGroups(kSeven + Recording{States(0, {6, 7}, {27, 27})},
                    "positions has 7");
}

// A pass reads a state while it writes another.
TEST(GroupsRecordings, APassMayWriteOverAStateIfItSaysSo) {
  const Recording pass = kSeven + Recording{AppendTo(2, {28})};
  ExpectRightGroups(pass + Recording{States(0, {6, 7}, {27, 28})});
  ExpectWrongGroups(pass + Recording{States(0, {7}, {28})},
                    "the state after the token at position 6 is missing");
  const std::string in_place = Replaced(kGroupsHeader, R"("paged")",
                                        R"("paged","states_in_place":true)");
  ExpectRightGroups(pass + Recording{States(0, {7}, {28})}, in_place);
  // The state after the last committed token is lost, and its length, too.
  ExpectRightGroups(pass + Recording{TruncateTo(7, 0), Views(0, {})}, in_place);
  ExpectGroupsVerdict(kSeven + Recording{TruncateTo(7, 0)}, "reject",
                      "kept is 0, sequence 0 can continue at 7", in_place);
}

TEST(GroupsRecordings, ATruncationKeepsWhatTheNextTokenNeeds) {
  ExpectRightGroups(kSeven + Recording{TruncateTo(5, 4), Views(0, {1, 2, 3, 4}),
                                       ViewsAt(0, 1, {12, 13, 14}, 1),
                                       States(0, {3}, {24})});
  ExpectRightGroups(kSeven + Recording{TruncateTo(5, 0), Views(0, {})});
  ExpectWrongGroups(kSeven + Recording{TruncateTo(5, 6)},
                    "kept is 6, the first 5 tokens were asked for");
  ExpectWrongGroups(kSeven + Recording{TruncateTo(7, 4)},
                    "kept is 4, sequence 0 can continue at 7");
  ExpectWrongGroups(
      kSeven + Recording{TruncateTo(5, 4), ViewsAt(0, 2, {13, 14}, 1)},
      "a window of 3 positions needs them from 1 on");
  // A pool whose groups keep all tokens can always continue.
  const std::string all = Replaced(
      Replaced(kGroupsHeader, R"(,"window":3)", ""), R"(,"states":true)", "");
  ExpectGroupsVerdict(kSeven + Recording{TruncateTo(5, 4)}, "reject",
                      "kept is 4, sequence 0 can continue at 5", all);
}

TEST(GroupsRecordings, MediaAreAPartOfTheKey) {
  const std::string found = Open(1, {1, 2, 3, 4, 5}, 4);
  const auto with = [](const std::string& line, int position) {
    return Replaced(
        line, R"("len")",
        fmt::format(R"("media":["a"],"media_at":[{}],"len")", position));
  };
  ExpectRightGroups(kSeven + Recording{with(found, 4)});
  ExpectWrongGroups(kSeven + Recording{with(found, 3)},
                    "these tokens were committed with other media, line ");
  const std::string image = R"({"op":"media","seq":0,"at":3,"hash":"a"})";
  Recording late = kSeven;
  late.insert(late.begin() + 1, image);
  ExpectRightGroups(late + Recording{with(found, 3)});
  ExpectWrongGroups(late + Recording{found},
                    "these tokens were committed with other media, line ");
  ExpectGroupsVerdict(kSeven + Recording{image}, "bad_input",
                      "a position of media is 3, sequence 0 has 7 tokens");
}

TEST(GroupsRecordings, ABlockOfOneStockIsInOneGroup) {
  const std::string full = TableOfGroup(0, {0}, 4, {0, 1, 2, 3}, {7});
  const std::string apart = TableOfGroup(1, {0}, 4, {9, 4, 5, 6}, {7});
  // Blocks of both groups have the number 3.
  const std::string same = TableOfGroup(1, {0}, 4, {9, 4, 5, 3}, {7});
  const std::string stock =
      Replaced(kGroupsHeader, R"("paged")", R"("paged","one_stock":true)");
  ExpectRightGroups(kSeven + Recording{full, same});
  ExpectRightGroups(kSeven + Recording{full, apart}, stock);
  ExpectGroupsVerdict(kSeven + Recording{full, same}, "reject",
                      "block 3 is block 3 of sequence 0 in group 0, and block "
                      "3 of sequence 0 in group 1",
                      stock);
  // The token after seven does not see block 0 of the window, and the block may
  // be in another group.
  ExpectRightGroups(
      kSeven + Recording{full, TableOfGroup(1, {0}, 4, {0, 4, 5, 6}, {7})},
      stock);
  // A sequence that is gone has no blocks.
  ExpectRightGroups(
      kSeven + Recording{full, R"({"op":"free","seq":0})", Open(0),
                         AppendTo(0, {8}), AppendTo(1, {18}), AppendTo(2, {28}),
                         Commit(0, {8}), TableOfGroup(1, {0}, 1, {3}, {1})},
      stock);
}

TEST(GroupsRecordings, TablesAreThoseOfAGroup) {
  ExpectRightGroups(
      kFound +
      Recording{TableOfGroup(0, {0, 1}, 4, {0, 1, 2, 3, 0, 1, -1, -1}, {7, 4}),
                TableOfGroup(2, {0, 1}, 2, {0, 1, 0, -1}, {7, 4})});
  // Block 1 has the state after seven tokens, or after four.
  ExpectWrongGroups(
      kFound + Recording{TableOfGroup(2, {0, 1}, 2, {0, 1, 1, -1}, {7, 4})},
      "block 1 is the block of the state at position 6 of sequence 0, and the "
      "block of the state at position 3 of 1");
  // The states of seven tokens are in two blocks, the second after the last.
  ExpectWrongGroups(
      kSeven + Recording{TableOfGroup(2, {0}, 2, {0, 16}, {7})},
      "the block of the state at position 6 of sequence 0 is 16, the pool has");
  ExpectWrongGroups(
      kFound + Recording{TableOfGroup(0, {0, 1}, 4, {0, 1, 2, 3, 0, 2, -1, -1},
                                      {7, 4})},
      "block 2 is block 2 of sequence 0, and block 1 of 1");
  ExpectWrongGroups(
      kSeven + Recording{TableOfGroup(0, {0}, 4, {0, 1, 2, 16}, {7})},
      "block 3 of sequence 0 is 16, the pool has 16");
  // The window's first two blocks may be anything.
  ExpectRightGroups(kSeven +
                    Recording{TableOfGroup(1, {0}, 4, {-1, 99, 2, 3}, {7})});
  ExpectWrongGroups(
      kSeven + Recording{TableOfGroup(1, {0}, 4, {-1, 99, 99, 3}, {7})},
      "block 2 of sequence 0 is 99, the pool has 16");
}

// The index of a state is its position, which is not the number of a block.
TEST(GroupsRecordings, AReportSaysWhichStatesALineHas) {
  const ScratchFolder folder("groups");
  const std::string path = folder.File("states.jsonl");
  std::ofstream(path) << Lines(
      WithGroups(kSeven + Recording{TableOfGroup(2, {0}, 2, {0, 16}, {7})},
                 kGroupsHeader));
  const auto failure = ExplainRecording(path, {"reference"});
  ASSERT_TRUE(failure.has_value());
  const std::string text =
      "    this line has\n    sequence 0    of the states at [3, 6],  blocks 0 "
      "16\n";
  EXPECT_NE(failure->report.find(text), std::string::npos) << failure->report;
}

// Four blocks of the first group, those in the window of the second, and the
// states of both lengths: 10, of which five have tokens of sequence 0 alone.
TEST(GroupsRecordings, SharedBlocksAreThoseOfTheSameTokens) {
  ExpectRightGroups(kFound + Recording{Usage(6, 0, 10, 2)});
  ExpectRightGroups(kFound + Recording{Usage(6, 0, 10, 5)});
  ExpectWrongGroups(kFound + Recording{Usage(6, 0, 10, 6)},
                    "shared is 6, it must be at most 5");
  // A pool may keep the states of truncated tokens.
  const Recording cut = kSeven + Recording{Fork(0, 7, 1), Truncate(1, 0)};
  ExpectRightGroups(cut + Recording{Usage(8, 0, 8, 8)});
}

// A pool with groups may hold the block of a prompt's last token, too.
TEST(GroupsRecordings, TheBlockOfALastTokenMayBeShared) {
  const std::string header =
      R"({"kvtrace":1,"placement":"other","cache":{"type":"paged"},"pool":)"
      R"({"max_seq_len":8,"groups":[{"block_size":2,"blocks":8,"layers":1,)"
      R"("kv_heads":1,"k_head_dim":1,"v_head_dim":1,"dtype":"f32"}]}})";
  const Recording found = {header, Open(0), Append(0, {1, 2, 3, 4}),
                           Commit(0, {7, 8, 9, 1}), Open(1, {7, 8, 9, 1}, 2)};
  ExpectAccept(Lines(found + Recording{Usage(6, 0, 2, 2)}), Level::kVisibility);
}

TEST(GroupsRecordings, BadInputIsNamed) {
  const auto bad = [](const std::string& header, const std::string& reason) {
    ExpectGroupsVerdict({}, "bad_input", reason, header);
  };
  bad(Replaced(kGroupsHeader, R"("window":3)", R"("window":0)"), "window is 0");
  bad(Replaced(kGroupsHeader, R"("paged")", R"("paged","deduplicates":true)"),
      "groups and the rule deduplicates exclude each other");
  bad(R"({"kvtrace":1,"placement":"other","cache":{"type":"paged"},)"
      R"("pool":{"max_seq_len":12,"groups":[]}})",
      "groups is ");
  bad(Replaced(kGroupsHeader, R"("block_size":4)", R"("block_size":0)"),
      "pool.groups[2].block_size is 0");
  ExpectGroupsVerdict(
      kSeven + Recording{TableOfGroup(3, {0}, 4, {0, 1, 2, 3}, {7})},
      "bad_input", "group is 3");
  ExpectGroupsVerdict(
      kSeven + Recording{Replaced(States(0, {6}, {27}), "[6]", "[3,6]")},
      "bad_input", "positions has 2 numbers, expected 1");
  ExpectGroupsVerdict(
      kSeven +
          Recording{Replaced(Views(0, {27}), R"("layer":0)", R"("layer":2)")},
      "bad_input", "positions is missing");
  // A pool without groups has no media.
  const std::string media =
      Replaced(Open(0), R"("len")", R"("media":["a"],"media_at":[0],"len")");
  const Judgement judgement = JudgeText(Other({media}));
  EXPECT_NE(judgement.reason().find("media is for pools with groups"),
            std::string::npos)
      << judgement.reason();
}

}  // namespace
}  // namespace kvtwin::props
