// Judging recordings of pools that have their own rules.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "props/oracle/judge.h"
#include "props/testing/test_pool_lines.h"
#include "props/testing/test_trace.h"
#include "reference/paged_ledger.h"

namespace kvtwin::props {
namespace {

using Json = nlohmann::ordered_json;

TEST(OtherPools, FollowsTheRulesOfOtherPools) {
  // The pool has its own numbers, blocks and refusals, and finds fewer
  // prefixes.
  ExpectOther(kThree + Recording{Views(4, {1, 2, 3}), Blocks(4, {3, 0}, 1),
                                 Append(4, {4}, "cache_full"),
                                 Views(4, {1, 2, 3}), Free(4),
                                 Open(4, {7, 8, 9, 7}), Usage(4, 0, 0, 0)});
  // Fewer tokens are committed than were appended, or shown.
  ExpectOther({Open(0), Append(0, {1, 2}), Append(0, {3, 4, 5}),
               Views(0, {3, 4, 5}), Commit(0, {7}), Views(0, {3})});
  // A shared block is written in place, after the tokens that the other
  // sequence has in it.
  ExpectOther(kThree + Recording{Fork(4, 3, 2), Append(4, {4}), Commit(4, {5}),
                                 Blocks(4, {0, 1}, 2), Blocks(2, {0, 1}, 1),
                                 Usage(1, 1, 2, 2)});
  // The same tokens are committed twice, with different rows. A prefix that is
  // found may have either row for each token, and then keeps it.
  const Recording twice =
      kThree + Recording{Open(5), Append(5, {11, 12, 13}), Commit(5, {7, 8, 9}),
                         Open(6, {7, 8, 9}, 2)};
  for (const std::vector<int>& rows :
       std::vector<std::vector<int>>{{1, 2}, {11, 12}, {1, 12}}) {
    ExpectOther(twice + Recording{Views(6, rows), Views(6, rows)});
  }
  ExpectWrong(twice + Recording{Views(6, {1, 2}), Views(6, {11, 2})},
              "position 0 of sequence 6 has the row of sequence 5");
  ExpectWrong(twice + Recording{Views(6, {1, 13})}, "position 1");
  // Both sequences still have their own rows.
  ExpectOther(twice + Recording{Views(4, {1, 2, 3}), Views(5, {11, 12, 13})});
  ExpectWrong(twice + Recording{Views(5, {1, 12, 13})}, "position 0");
  // So they cannot share a block, although their tokens are the same.
  ExpectWrong(twice + Recording{Blocks(4, {0, 1}, 1), Blocks(5, {0, 2}, 1)},
              "block 0 is shared by sequences 4 and 5, whose rows at position "
              "0 are not the same");
  // A found prefix may share a block with one of them: then its rows are known.
  const Recording found =
      twice + Recording{Blocks(5, {0, 1}, 1), Blocks(6, {0}, 2)};
  ExpectOther(found + Recording{Views(6, {11, 12})});
  ExpectWrong(found + Recording{Views(6, {1, 2})}, "position 0 of sequence 6");
  // They may share a block if their rows are the same.
  ExpectOther(kThree + Recording{Open(5), Append(5, {1, 2, 4}),
                                 Commit(5, {7, 8, 9}), Blocks(4, {0, 1}, 1),
                                 Blocks(5, {0, 2}, 1)});
}

TEST(OtherPools, ChecksWhichPrefixesMayBeFound) {
  const std::string never = "tokens of the prompt were never committed";
  ExpectOther(kThree + Recording{Open(1, {7, 8, 9}, 2), Views(1, {1, 2})});
  ExpectWrong(kThree + Recording{Open(1, {7, 8, 9}, 1)},
              "len is 1: a prefix is found in whole blocks of 2");
  ExpectWrong(kThree + Recording{Open(1, {7, 8}, 2)},
              "len is 2: a prefix is found without the prompt's last token");
  ExpectWrong(kThree + Recording{Open(1, {7, 8}, 4)},
              "len is 4: the prompt has 2 tokens");
  ExpectWrong(kThree + Recording{Open(1, {7, 9, 9}, 2)},
              "len is 2: the first 2 " + never);
  ExpectWrong(kThree + Recording{Open(1, {8, 7, 9}, 2)}, never);
  ExpectWrong(kThree + Recording{Open(1, {7, 8, 9, 9, 9}, 4)}, never);
  const std::string other =
      "len is 2: these tokens were committed under another key, line 4";
  ExpectWrong(kThree + Recording{Open(1, {7, 8, 9}, 2, "s")}, other);
  ExpectWrong(kThree + Recording{Open(1, {}, 0, "s"), Append(1, {1, 2}),
                                 Commit(1, {7, 8}), Open(2, {7, 8, 9}, 2, "t")},
              other);
  ExpectWrong(kThree + Recording{Open(1, {7, 8, 9, 9, 9}, 4, "s")}, never);
  std::vector<std::string> ours = kPoolLines;
  ours.resize(4);
  ours.push_back(Open(1, {7, 8, 5}, 2, "t"));
  EXPECT_EQ(JudgeText(Lines(ours)).reason(),
            "open: len is 2, expected 0: these tokens were committed under "
            "another key, line 4");
  ExpectWrong({Open(0), Append(0, {1, 2}), Open(1, {7, 8, 9}, 2)}, never);
  ExpectWrong(
      {Open(0), Append(0, {1, 2}), R"({"op":"commit","seq":0,"new_tokens":2})",
       Open(1, {7, 8, 9}, 2)},
      never);
  // The prefix is not longer than max_seq_len, which is 8.
  const std::vector<int> eight = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<int> eleven = eight;
  eleven.insert(eleven.end(), {9, 10, 11});
  ExpectWrong(
      {Open(0), Append(0, eight), Commit(0, eight), Open(1, eleven, 10)},
      "len is 10: max_seq_len is 8");
  // The block was overwritten, but a prompt still finds it.
  ExpectWrong(
      kThree + Recording{Truncate(4, 1), Append(4, {5}), Commit(4, {6}),
                         Open(1, {7, 8, 9}, 2), Views(1, {1, 5})},
      "position 1 of sequence 1 has the row of sequence 4, position 1 "
      "(appended on line 6); expected the row of sequence 4, position 1 "
      "(appended on line 3)");
}

TEST(OtherPools, ChecksWhichBlocksMayBeShared) {
  ExpectWrong(kThree + Recording{Open(4)}, "result is 4, but that sequence");
  ExpectWrong(kThree + Recording{Fork(4, 1, 4)},
              "result is 4, but that sequence");
  ExpectWrong(kThree + Recording{Blocks(4, {4, 0}, 1)},
              "block 0 of sequence 4 is 4, the pool has 4");
  ExpectWrong(kThree + Recording{Blocks(4, {0, -1}, 1)}, "the pool has 4");
  ExpectWrong(kThree + Recording{Blocks(4, {1, 1}, 1)},
              "block 1 is block 0 of sequence 4, and block 1 of 4");
  ExpectWrong(kThree + Recording{Blocks(4, {0, 1}, 1), Blocks(4, {0, 2}, 1)},
              "block 1 of sequence 4 is 2, and was 1 on line 5");
  // A block of the same tokens under another key, and one of unknown tokens.
  const Recording salted =
      kThree + Recording{Open(5, {}, 0, "s"), Append(5, {1, 2}),
                         Commit(5, {7, 8}), Blocks(4, {0, 1}, 1)};
  ExpectOther(salted + Recording{Blocks(5, {2}, 2)});
  ExpectWrong(salted + Recording{Blocks(5, {0}, 2)},
              "block 0 is shared by sequences 4 and 5, whose tokens at "
              "position 0 are not the same");
  ExpectWrong(salted + Recording{Blocks(5, {1}, 2)},
              "block 1 is block 1 of sequence 4, and block 0 of 5");
  const Recording unknown = Recording{
      Open(0),      Append(0, {1}), R"({"op":"commit","seq":0,"new_tokens":1})",
      Open(1),      Append(1, {1}), R"({"op":"commit","seq":1,"new_tokens":1})",
      Fork(0, 1, 2)};
  ExpectOther(unknown + Recording{Blocks(0, {0}, 1), Blocks(2, {0}, 1)});
  ExpectWrong(unknown + Recording{Blocks(0, {0}, 1), Blocks(1, {0}, 1)},
              "whose tokens at position 0 are not the same");
  // Without copy on write, the fork's row is in the block of the other
  // sequence.
  const Recording forked =
      kThree + Recording{Fork(4, 3, 5), Append(4, {4}), Append(5, {5})};
  ExpectOther(forked +
              Recording{Views(4, {1, 2, 3, 4}), Views(5, {1, 2, 3, 5})});
  ExpectWrong(forked + Recording{Blocks(5, {0, 1}, 1), Blocks(4, {0, 1}, 1)},
              "block 1 is shared by sequences 5 and 4, whose tokens at "
              "position 3 are not the same");
  ExpectWrong(forked + Recording{Views(4, {1, 2, 3, 5})},
              "position 3 of sequence 4 has the row of sequence 5, position 3 "
              "(appended on line 7); expected the row of sequence 4");
  // A block is compared with the longest of its owners.
  ExpectWrong(kThree + Recording{Fork(4, 1, 5), Fork(4, 1, 6), Append(5, {8}),
                                 Blocks(6, {0}, 1), Blocks(5, {0}, 1),
                                 Blocks(4, {0, 1}, 1)},
              "block 0 is shared by sequences 5 and 4");
}

// A call moves blocks only of the sequence that it is about.
TEST(OtherPools, RemembersTheBlocksOfOtherSequences) {
  const Recording forked =
      kThree + Recording{Blocks(4, {0, 1}, 1), Fork(4, 3, 5), Append(5, {5})};
  // Without copy on write, sequence 4 is wrong, but its rows are not shown.
  ExpectWrong(forked + Recording{Commit(5, {9}), Blocks(5, {0, 1}, 2),
                                 Append(4, {4}), Blocks(4, {0, 1}, 1)},
              "block 1 is shared by sequences 5 and 4, whose tokens at "
              "position 3 are not the same");
  ExpectWrong(
      kThree + Recording{Fork(4, 2, 5), Blocks(4, {0, 1}, 1), Append(5, {5}),
                         Commit(5, {6}), Blocks(5, {0, 1}, 1)},
      "block 1 is shared by sequences 4 and 5, whose tokens at "
      "position 2 are not the same");
  ExpectOther(forked + Recording{Blocks(4, {0, 1}, 1), Commit(5, {9}),
                                 Blocks(5, {0, 2}, 2)});
  ExpectWrong(forked + Recording{Blocks(4, {0, 2}, 1)},
              "block 1 of sequence 4 is 2, and was 1 on line 5");
  // The call may move blocks of its own sequence; any other pool may do so.
  ExpectOther(kThree + Recording{Blocks(4, {0, 1}, 1), Append(4, {4}),
                                 Blocks(4, {2, 3}, 1), Commit(4, {1}),
                                 Blocks(4, {1, 0}, 2), Truncate(4, 3),
                                 Blocks(4, {0, 1}, 1)});
  // A block that its sequence gives up is free for others.
  const Recording two = kThree + Recording{Blocks(4, {0, 1}, 1), Open(5),
                                           Append(5, {5}), Commit(5, {6})};
  ExpectWrong(two + Recording{Blocks(5, {0}, 1)}, "block 0 is shared by");
  ExpectOther(two + Recording{Free(4), Blocks(5, {0}, 1)});
  ExpectOther(two + Recording{Truncate(4, 2), Blocks(5, {1}, 1)});
  // Three sequences have a block, and one of them gives it up.
  const Recording three =
      kThree + Recording{Fork(4, 3, 5), Fork(4, 2, 6), Blocks(4, {0, 1}, 1),
                         Blocks(5, {0, 1}, 1), Blocks(6, {0}, 2)};
  ExpectWrong(three + Recording{Free(4), Usage(2, 0, 2, 0)},
              "shared is 0, it must be at least 1: block 0 is shown in "
              "sequences 5 and 6");
  ExpectOther(three + Recording{Free(4), Free(5), Usage(2, 1, 1, 0)});
}

TEST(OtherPools, LimitsSequencesAndCommits) {
  Recording opens;
  for (int i = 0; i < kTracePoolSequencesMax; ++i) opens.push_back(Open(i));
  ExpectOther(opens + Recording{Free(7), Open(7)});
  for (const char* placement : {"lowest", "other"}) {
    ExpectBadInput(
        Replaced(Other(opens + Recording{Open(5000)}), "other", placement),
        kTracePoolSequencesMax + 2,
        "open: there are 4096 sequences, this program stops there");
  }
  Recording commits;
  const auto add = [&] {
    commits =
        commits + Recording{Open(0), Append(0, {1}), Commit(0, {7}), Free(0)};
  };
  for (int i = 0; i < kTracePoolCommitsMax; ++i) add();
  ExpectOther(commits);
  add();
  ExpectBadInput(Other(commits), 4 * kTracePoolCommitsMax + 4,
                 "commit: the same tokens were committed more than 1024 times");
}

// A recording like this once took a minute.
TEST(OtherPools, TakesLinearTime) {
  Recording lines;
  for (int i = 1; i < kTracePoolSequencesMax; ++i) {
    lines.push_back(Open(i));
    lines.push_back(Append(i, {1, 2, 3}));
    lines.push_back(Commit(i, {i, 8, 9}));
  }
  for (int i = 0; i < 2000; ++i) {
    lines.push_back(Open(0));
    lines.push_back(Usage(2, 0, 8190, 0));
    lines.push_back(Free(0));
  }
  lines.push_back(Fork(1, 3, 0));
  for (int i = 0; i < 20000; ++i) lines.push_back(Usage(2, 0, 8190, 1));
  const std::string text =
      Replaced(Other(lines), R"("blocks":4)", R"("blocks":8192)");
  const auto begin = std::chrono::steady_clock::now();
  ExpectAccept(text, Level::kVisibility);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

TEST(OtherPools, ExplainsAWrongRow) {
  // Only V is wrong.
  const std::string views = Views(4, {1, 2, 3});
  const std::string values =
      Replaced(views, R"("data":[1,2,3]}})", R"("data":[1,2,1]}})");
  ExpectWrong(
      kThree + Recording{values},
      "position 2 of sequence 4 has, as its V, that of the row of "
      "sequence 4, position 0 (appended on line 3); expected the row of "
      "sequence 4, position 2");
  // The row belongs to another layer.
  const std::string behind =
      Replaced(Append(4, {1}), R"("layer":0)", R"("layer":1)");
  const Judgement judgement = JudgeText(
      Replaced(Other({Open(4), behind, Append(4, {2}), Views(4, {1})}),
               R"("layers":1)", R"("layers":2)"));
  EXPECT_NE(judgement.reason().find("has the row of sequence 4, position 0 "
                                    "(appended to layer 1 on line 3)"),
            std::string::npos)
      << judgement.reason();
}

TEST(OtherPools, RecognizesRoundedRows) {
  std::vector<float> put(32);
  for (std::size_t i = 0; i < put.size(); ++i) {
    put[i] = static_cast<float>(i) - 15.7F;
  }
  const auto lines = [&](float change) {
    std::vector<float> found = put;
    found[31] += change;
    const auto tensor = [](const std::vector<float>& rows) {
      return fmt::format(R"({{"shape":[32,1,1],"data":[{}]}})",
                         fmt::join(rows, ","));
    };
    const std::string rows =
        R"({{"op":"{}","seq":0,"layer":0,"key":{},"value":{{"shape":[1,1,1],)"
        R"("data":[1]}}{}}})";
    return std::vector<std::string>{
        Replaced(
            Replaced(kPoolLines[0], R"("k_head_dim":2)", R"("k_head_dim":32)"),
            R"("dtype":"f32")", R"("dtype":"q8_0","v_dtype":"f32")"),
        R"({"op":"open","result":0,"len":0})",
        fmt::format(fmt::runtime(rows), "append", tensor(put),
                    R"(,"result":"ok")"),
        fmt::format(fmt::runtime(rows), "views", tensor(found), "")};
  };
  for (const char* placement : {"lowest", "other"}) {
    std::vector<std::string> raw = lines(0);
    raw[0] = Replaced(raw[0], "lowest", placement);
    const std::string reason = JudgeText(Lines(raw)).reason();
    EXPECT_NE(reason.find("has the row of sequence 0, position 0 (appended on "
                          "line 3) as it was put, not as q8_0 stores it; "),
              std::string::npos)
        << reason;
  }
  const std::string reason = JudgeText(Lines(lines(40))).reason();
  EXPECT_EQ(reason.find("as it was put"), std::string::npos) << reason;
}

TEST(OtherPools, ChecksTheResultsOfAppends) {
  ExpectWrong(
      kThree + Recording{Append(4, {4}, "cache_full"), Views(4, {1, 2, 3, 4})},
      "the number of rows is 4, expected 3");
  ExpectWrong(kThree + Recording{Append(4, {4}), Views(4, {1, 2, 3})},
              "the number of rows is 3, expected 4");
  ExpectWrong({Open(0), Append(0, {1, 2, 3, 4, 5, 6, 7, 8, 9})},
              "result is ok, but sequence 0 cannot have 9 tokens");
  ExpectWrong(kThree + Recording{Append(4, {4, 5, 6, 7, 8, 9})},
              "sequence 4 cannot have 9 tokens");
  // The pool, 4 blocks of 2 tokens, may be smaller than max_seq_len.
  const std::string longer =
      Replaced(Other(kThree + Recording{Append(4, {4, 5, 6, 7, 8, 9})}),
               R"("max_seq_len":8)", R"("max_seq_len":100)");
  ExpectReject(longer, 5, Level::kNone);
  ExpectWrong(
      kThree + Recording{R"({"op":"views","seq":4,"layer":0,"key":null})"},
      "the number of rows is 0, expected 3");
  // V is wrong, or not recorded.
  const std::string views = Views(4, {1, 2, 3});
  ExpectWrong(kThree + Recording{Replaced(views, R"("data":[1,2,3]}})",
                                          R"("data":[1,2,4]}})")},
              "position 2 of sequence 4");
  Json keys = Json::parse(views);
  keys.erase("value");
  ExpectOther(kThree + Recording{keys.dump()});
  keys["key"]["data"][2] = 9;
  ExpectWrong(kThree + Recording{keys.dump()}, "a row that was never appended");
}

TEST(OtherPools, CountsBlocks) {
  ExpectOther({Usage(4, 0, 0, 0)});
  ExpectOther({Usage(1, 3, 0, 0)});
  ExpectWrong({Usage(3, 0, 0, 0)}, "add up to 3, the pool has 4");
  ExpectWrong({Usage(2147483647, 2147483647, 6, 0)}, "add up to 4294967300");
  ExpectWrong({Usage(3, 0, 1, 0)}, "used is 1, it must be at most 0");
  ExpectOther(kThree + Recording{Usage(2, 0, 2, 0)});
  ExpectOther(kThree + Recording{Usage(0, 0, 4, 0)});  // Two are in reserve.
  ExpectWrong(kThree + Recording{Usage(3, 0, 1, 0)}, "used is 1, it must be a");
  ExpectWrong(kThree + Recording{Usage(2, 0, 2, 1)}, "shared is 1, it must be");
  const Recording forked = kThree + Recording{Fork(4, 2, 0)};
  ExpectOther(forked + Recording{Usage(1, 1, 2, 1)});
  ExpectWrong(forked + Recording{Usage(1, 1, 2, 3)}, "shared is 3");
  const Recording shown =
      forked + Recording{Blocks(4, {0, 1}, 1), Blocks(0, {2}, 2)};
  ExpectWrong(shown + Recording{Usage(2, 0, 2, 0)},
              "used is 2, it must be at least 3");
  ExpectWrong(forked + Recording{Blocks(4, {0, 1}, 1), Blocks(0, {0}, 2),
                                 Usage(2, 0, 2, 0)},
              "shared is 0, it must be at least 1: block 0 is shown in "
              "sequences 0 and 4");
  // A shared block does not explain how many are used.
  const Recording few =
      forked +
      Recording{Blocks(4, {0, 1}, 1), Blocks(0, {0}, 2), Usage(3, 0, 1, 0)};
  EXPECT_TRUE(JudgeText(Other(few)).reason().ends_with("be at least 2"));
}

// A block is shared only by sequences that have the same tokens in it.
TEST(OtherPools, BoundsSharedBlocks) {
  // A fork and a prompt have the first block; all forks have both blocks.
  const Recording two_forks = kThree + Recording{Fork(4, 3, 0), Fork(4, 3, 1)};
  ExpectOther(two_forks + Recording{Usage(2, 0, 2, 2)});
  for (const std::string& second : {Fork(4, 2, 0), Open(0, {7, 8, 1}, 2)}) {
    const Recording lines = kThree + Recording{second};
    ExpectOther(lines + Recording{Usage(2, 0, 2, 0)});
    ExpectOther(lines + Recording{Usage(2, 0, 2, 1)});
    ExpectWrong(lines + Recording{Usage(2, 0, 2, 2)},
                "shared is 2, it must be at most 1: the number of "
                "blocks with tokens that only one sequence has is at least "
                "1, and used is 2");
  }
  // Other tokens; the same tokens under another key.
  ExpectWrong(kThree + Recording{Open(0), Append(0, {5, 6, 7}),
                                 Commit(0, {1, 2, 3}), Usage(0, 0, 4, 1)},
              "shared is 1, it must be at most 0");
  ExpectWrong(kThree + Recording{Open(0, {}, 0, "s"), Append(0, {5, 6, 7}),
                                 Commit(0, {7, 8, 9}), Usage(0, 0, 4, 1)},
              "shared is 1, it must be at most 0");
  ExpectWrong(kThree + Recording{Open(0), Append(0, {5, 6, 7}),
                                 Commit(0, {1, 2, 3}), Usage(1, 0, 3, 0)},
              "used is 3, it must be at least 4: the number of blocks with "
              "tokens that only one sequence has is at least 4, and used is 3");
  // Sequences that are gone do not count; blocks in reserve may be shared.
  const Recording alone =
      two_forks + Recording{Free(0), Append(1, {5, 6}), Commit(1, {5, 6})};
  ExpectOther(alone + Recording{Usage(0, 0, 4, 1)});
  ExpectOther(alone + Recording{Free(1), Open(1), Usage(2, 0, 2, 0)});
  ExpectWrong(alone + Recording{Free(1), Open(1), Usage(2, 0, 2, 1)},
              "shared is 1, it must be at most 0");
  ExpectOther(kThree + Recording{Fork(4, 2, 0), Usage(1, 0, 3, 2)});
  // A fork within a block has this block.
  const Recording within = kThree + Recording{Fork(4, 1, 0)};
  ExpectOther(within + Recording{Usage(2, 0, 2, 1)});
  ExpectWrong(within + Recording{Usage(2, 0, 2, 2)}, "at most 1");
  ExpectOther(within + Recording{Fork(4, 1, 1), Usage(2, 0, 2, 1)});
  ExpectWrong(within + Recording{Append(0, {5, 6}), Commit(0, {5, 6}),
                                 Usage(0, 0, 4, 1)},
              "at most 0");
  // Two forks of equal length may both end within the block of a longer one.
  ExpectOther(kThree + Recording{Open(0), Append(0, {4, 5, 6}),
                                 Commit(0, {7, 1, 2}), Fork(4, 1, 1),
                                 Fork(0, 1, 2), Usage(0, 0, 4, 2)});
  // Appended rows are not tokens yet.
  ExpectOther(kThree +
              Recording{Append(4, {4}), Fork(4, 3, 0), Usage(2, 0, 2, 2)});
}

// A pool may keep blocks after a truncate, and copy a whole list for a fork of
// all tokens, until the sequence has tokens there again.
TEST(OtherPools, MayShareBlocksPastTheEndOfASequence) {
  const Recording cut =
      kThree + Recording{Fork(4, 3, 0), Truncate(0, 1), Usage(2, 0, 2, 2)};
  ExpectOther(cut);
  ExpectWrong(
      cut + Recording{Append(0, {5, 6}), Commit(0, {5, 6}), Usage(0, 0, 4, 1)},
      "shared is 1, it must be at most 0");
  ExpectWrong(cut + Recording{Free(0), Open(0), Usage(2, 0, 2, 1)},
              "shared is 1, it must be at most 0");
  ExpectOther(kThree + Recording{Fork(4, 3, 0), Truncate(0, 2), Truncate(0, 1),
                                 Usage(2, 0, 2, 2)});
  // A later append has replaced rows of the blocks that the fork got.
  ExpectOther({Open(0), Append(0, {1, 2, 3, 4}), Append(0, {5}), Commit(0, {7}),
               Fork(0, 1, 1), Append(0, {6, 7}), Commit(0, {8, 9}),
               Usage(2, 0, 2, 2)});
  // A pool may hold the block of a prompt's last token, which it does not find.
  const Recording four = kThree + Recording{Append(4, {4}), Commit(4, {1})};
  ExpectOther(four + Recording{Open(0, {7, 8, 9, 1}, 2), Usage(2, 0, 2, 2)});
  ExpectWrong(four + Recording{Open(0, {7, 8, 9}, 2), Usage(2, 0, 2, 2)},
              "shared is 2, it must be at most 1");
  const Recording five = kThree + Recording{Append(4, {4, 5})};
  const Recording last = {Commit(4, {4, 5}), Usage(1, 0, 3, 3)};
  ExpectOther(five + Recording{Fork(4, 3, 0)} + last);
  ExpectWrong(five + Recording{Fork(4, 2, 0)} + last,
              "shared is 3, it must be at most 1");
}

// After a wrong line, a list of slots may go past the last position.
TEST(OtherPools, RejectsSlotsPastTheLastPosition) {
  std::istringstream in(
      Other({Open(0), R"({"op":"seq_len","seq":0,"len":3})",
             R"({"op":"slots","seq":0,"begin":2147483647,"slots":[1,2,3]})"}));
  const auto go_on = [](const auto&...) { return true; };
  EXPECT_EQ(Judge(in, kTwins, {go_on, go_on}).line(), 3);
}

// The ledger counts the tokens that it holds as they come and go.
TEST(OtherPools, ReleasesEverythingInTheEnd) {
  const PagedSpec spec = {.block_size = 1, .blocks = 8, .max_seq_len = 4};
  reference::PagedLedger ledger(spec);
  const std::vector<std::int32_t> tokens = {7};
  const std::vector<std::int32_t> prompt = {7, 8};
  for (int sequence = 0; sequence < 3; ++sequence) {
    const DenseTensor row =
        FilledTensor(DType::kF32, {1, 1, 1, 1}, static_cast<float>(sequence));
    ledger.Open(sequence, {}, {}, 0);
    ledger.Append(sequence, 0, row.view(), row.view());
    ledger.Commit(sequence, 1, tokens);
  }
  ledger.Open(3, prompt, {}, 1);
  ledger.Open(4, prompt, {}, 1);
  EXPECT_EQ(ledger.Held(), 3 * 2U + 2 * 4U);
  EXPECT_TRUE(ledger.ShareRows(3, 1, 0));
  EXPECT_TRUE(ledger.ShareRows(4, 3, 0));
  EXPECT_FALSE(ledger.ShareRows(4, 2, 0));
  EXPECT_EQ(ledger.Held(), 5 * 2U);
  for (int sequence = 0; sequence < 5; ++sequence) ledger.Free(sequence);
  EXPECT_EQ(ledger.Held(), 0U);
}

}  // namespace
}  // namespace kvtwin::props
