// Third-party pools that have their own rules (core/dialects/pool_rules.h): the
// harness accepts a correct pool, and rejects the same pool with a fault.

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "props/backend/pool_backend.h"
#include "props/paged/paged_runner.h"
#include "props/search/explain.h"
#include "props/testing/other_pool.h"
#include "props/testing/pools.h"
#include "props/testing/test_pool_lines.h"
#include "props/testing/test_trace.h"

namespace kvtwin::props {
namespace {

struct Tried {
  int histories = 0;
  std::string wrong;
  std::string history;
  std::string rules;  // That the failure cites.
};

// Runs this many random histories on pools of these rules, or up to the first
// wrong one. If `said` is given, the pool declares it instead of `rules`.
Tried Try(const PoolRules& rules, OtherPoolFault fault, int histories,
          const std::optional<PoolRules>& said = {}) {
  OtherPool::rules = said.value_or(rules);
  OtherPool::fault = fault;
  kvtwin_pool_backend_v1 table = OtherPoolTable();
  table.attend = nullptr;  // Outputs show a window before any block is gone.
  const auto backend = DescribePoolBackend(&table);
  OtherPool::rules = rules;
  EXPECT_TRUE(backend.ok()) << backend.status().message();
  const Subject pools = BackendSubject(*backend, Level::kVisibility);
  Tried tried;
  for (; tried.histories < histories && tried.wrong.empty();
       ++tried.histories) {
    PagedHistory history =
        MakePagedHistory(11, static_cast<std::uint64_t>(tried.histories));
    history.spec.dtype = DType::kF32;
    history.spec.v_dtype.reset();
    history.spec.k_head_dim = 1 + history.spec.k_head_dim % 3;
    history.spec.v_head_dim = 1;
    history.spec.kv_heads = 1;
    const auto failure = RunHistory(history, pools).failure;
    tried.wrong = TextOf(failure);
    tried.history = ToText(history);
    if (!failure) continue;
    history.ops.resize(std::min(history.ops.size(), failure->step + 1));
    tried.rules = Explain(history, *failure, pools).rules;
  }
  return tried;
}

constexpr int kHistories = 1000;
constexpr const char* kOtherRow = " has the row of sequence ";
const PoolRules kDeduplicates = {.deduplicates = true};
const PoolRules kRecomputes = {.recomputes_last = true};
PoolRules Window(int positions) { return {.window = positions}; }

void ExpectRight(const PoolRules& rules) {
  const Tried tried = Try(rules, OtherPoolFault::kNone, kHistories / 4);
  EXPECT_EQ(tried.wrong, "") << tried.history;
  EXPECT_EQ(tried.histories, kHistories / 4);
}

// Expects a wrong history, whose report contains `what`.
void ExpectFound(const PoolRules& rules, OtherPoolFault fault,
                 const std::string& what,
                 const std::optional<PoolRules>& said = {}) {
  const Tried tried = Try(rules, fault, kHistories, said);
  EXPECT_NE(tried.wrong, "") << tried.histories << " histories";
  EXPECT_NE(tried.wrong.find(what), std::string::npos)
      << "'" << tried.wrong << "' lacks '" << what << "', after "
      << tried.histories << " histories";
}

// A recording of a pool that declares these rules.
std::string Saying(const std::string& rules, const Recording& lines) {
  return Replaced(Other(lines), R"("type":"paged")",
                  R"("type":"paged",)" + rules);
}

void ExpectRightAs(const std::string& rules, const Recording& lines) {
  ExpectAccept(Saying(rules, lines), Level::kVisibility);
}

// The recording is wrong at its last line.
void ExpectWrongAs(const std::string& rules, const Recording& lines,
                   const std::string& reason) {
  const Judgement judgement = JudgeText(Saying(rules, lines));
  EXPECT_EQ(VerdictName(judgement.verdict()), "reject");
  EXPECT_EQ(judgement.line(), std::ssize(lines) + 1) << judgement.reason();
  EXPECT_NE(judgement.reason().find(reason), std::string::npos)
      << "'" << judgement.reason() << "' lacks '" << reason << "'";
}

// A line like that of Views, with the rows from position `start` on.
std::string ViewsFrom(int start, int sequence, const std::vector<int>& rows) {
  return Replaced(Views(sequence, rows), R"("layer":0)",
                  fmt::format(R"("layer":0,"start":{})", start));
}

TEST(PoolRules, AreInTheFirstLine) {
  const std::string deduplicates = R"("deduplicates":true)";
  const std::string lowest = Lines(
      {Replaced(kPoolLines[0], R"("paged")", R"("paged",)" + deduplicates)});
  ExpectBadInput(lowest, 1, "cache.deduplicates needs the placement other");
  ExpectBadInput(Saying(R"("window":-1)", {}), 1, "cache.window is -1");
  ExpectBadInput(Saying(R"("recomputes_last":1)", {}), 1,
                 "cache.recomputes_last is 1, it must be true or false");
  ExpectRightAs(R"("deduplicates":false,"recomputes_last":false)", {});
  // The rules are read as they were written.
  const PagedTraceHeader header = {.producer = "",
                                   .visibility_only = true,
                                   .spec = {},
                                   .rules = {.deduplicates = true,
                                             .recomputes_last = true,
                                             .window = 3,
                                             .no_reserve = true}};
  std::stringstream text;
  ASSERT_TRUE(WriteTraceHeader(header, text).ok());
  TraceReader reader(text);
  ASSERT_TRUE(reader.ReadHeader());
  EXPECT_EQ(reader.paged()->rules, header.rules);
}

TEST(PoolRules, CommitsSwapDuplicatesOnlyWhereThePoolSaysSo) {
  const std::string rules = R"("deduplicates":true)";
  const Recording twice =
      kThree + Recording{Open(5), Append(5, {11, 12, 13}),
                         Views(5, {11, 12, 13}), Commit(5, {7, 8, 9})};
  const Recording swapped = twice + Recording{Views(5, {1, 2, 13})};
  ExpectRightAs(rules, swapped);
  ExpectWrong(swapped, "position 0 of sequence 5 has the row of sequence 4");
  const Recording shared =
      twice + Recording{Blocks(4, {0, 1}, 1), Blocks(5, {0, 2}, 1)};
  ExpectRightAs(rules, shared);
  ExpectWrong(shared, "whose rows at position 0 are not the same");
  // The first sequence keeps its rows, and rows that were shown stay until the
  // next commit.
  ExpectWrongAs(rules, twice + Recording{Views(4, {11, 12, 3})}, "position 0");
  ExpectWrongAs(rules, swapped + Recording{Views(5, {11, 12, 13})},
                "position 0 of sequence 5");
  ExpectRightAs(rules,
                twice + Recording{Views(5, {11, 12, 13}), Append(5, {14}),
                                  Commit(5, {9}), Views(5, {1, 2, 13, 14})});
  // The last block is not full, so it is not shared.
  ExpectWrongAs(rules, twice + Recording{Views(5, {1, 2, 3})}, "position 2");
  // A block of other tokens, or under another key, is not a duplicate.
  ExpectWrongAs(rules,
                kThree + Recording{Open(5), Append(5, {11, 12}),
                                   Commit(5, {7, 9}), Views(5, {1, 12})},
                "position 0 of sequence 5");
  ExpectWrongAs(rules,
                kThree + Recording{Open(5, {}, 0, "s"), Append(5, {11, 12}),
                                   Commit(5, {7, 8}), Views(5, {1, 2})},
                "position 0 of sequence 5");
}

TEST(PoolRules, TheLastTokenOfAPromptIsComputedAgainInPlace) {
  const std::string rules = R"("recomputes_last":true)";
  const std::string found = Open(5, {7, 8}, 1);
  const Recording again =
      kThree + Recording{Blocks(4, {0, 1}, 1), found, Append(5, {22})};
  ExpectRightAs(
      rules,
      again + Recording{Views(5, {1, 22}), Commit(5, {8}), Blocks(5, {0}, 2),
                        Blocks(4, {0, 1}, 1), Views(4, {1, 22, 3})});
  ExpectRightAs(rules, again + Recording{Views(4, {1, 2, 3})});  // A copy.
  ExpectWrong(kThree + Recording{found}, "in whole blocks of 2");
  // Or the pool finds all of the prompt, and gives the last token back.
  const Recording all =
      kThree + Recording{Open(5, {7, 8}, 2), Truncate(5, 1), Append(5, {22})};
  ExpectRightAs(rules, all + Recording{Commit(5, {8}), Views(4, {1, 22, 3})});
  ExpectRightAs(rules,
                kThree + Recording{Open(5, {7, 8}, 2), Append(5, {23}),
                                   Commit(5, {1}), Views(5, {1, 2, 23})});
  // Rows that no sequence has; of an earlier position; of another pass.
  ExpectWrongAs(rules, again + Recording{Views(4, {1, 21, 3})}, "position 1");
  ExpectWrongAs(rules, again + Recording{Views(5, {22, 22})}, "position 0");
  ExpectWrongAs(rules, again + Recording{Views(5, {1, 2})},
                "position 1 of sequence 5 has the row of sequence 4");
  ExpectWrongAs(rules,
                kThree + Recording{Open(5, {7, 8}, 2), Append(5, {23}),
                                   Views(4, {1, 23, 3})},
                "position 1 of sequence 4");
  // A token that differs from the prompt's; a prompt that is not whole blocks,
  // or was never committed.
  ExpectWrongAs(rules, again + Recording{Commit(5, {9})},
                "tokens[0] is 9: the prompt of sequence 5 was found to its "
                "last token, which is 8");
  ExpectWrongAs(rules, kThree + Recording{Open(5, {7, 8, 9}, 3)},
                "in whole blocks of 2");
  ExpectWrongAs(rules, kThree + Recording{Open(5, {7, 9}, 1)},
                "never committed");
  ExpectWrongAs(rules, kThree + Recording{Open(5, {7, 9}, 2)},
                "never committed");
  // A fork of the sequence must get its own block.
  ExpectWrongAs(rules,
                kThree + Recording{found, Fork(5, 1, 6), Append(6, {22}),
                                   Views(4, {1, 22, 3})},
                "position 1 of sequence 4");
}

TEST(PoolRules, AWindowReleasesRows) {
  const std::string rules = R"("window":2)";
  const Recording five =
      kThree + Recording{Append(4, {4, 5}), Commit(4, {1, 2})};
  // The next token, at position 5, sees 3 and 4.
  ExpectRightAs(
      rules,
      five + Recording{Views(4, {1, 2, 3, 4, 5}), ViewsFrom(2, 4, {3, 4, 5}),
                       ViewsFrom(3, 4, {4, 5}), Blocks(4, {-1, 2, 0}, 1)});
  ExpectWrong(five + Recording{ViewsFrom(3, 4, {4, 5})},
              "start is 3, a pool without a window shows all rows");
  ExpectWrongAs(rules, five + Recording{ViewsFrom(4, 4, {5})},
                "the rows begin at position 4, a window of 2 positions needs "
                "them from 3 on");
  ExpectWrongAs(rules, five + Recording{ViewsFrom(3, 4, {4})},
                "the rows end at position 4, expected 5");
  ExpectWrongAs(rules, five + Recording{ViewsFrom(3, 4, {3, 4})},
                "position 3 of sequence 4 has the row of sequence 4, position "
                "2");
  ExpectWrongAs(rules, five + Recording{ViewsFrom(1, 4, {1, 3, 4, 5})},
                "position 1 of sequence 4");
  ExpectWrongAs(rules,
                five + Recording{R"({"op":"views","seq":4,"layer":0,)"
                                 R"("key":null})"},
                "the rows end at position 0, expected 5");
  // A view without rows may leave out the block of the next row.
  ExpectRightAs(R"("window":0)",
                five + Recording{R"({"op":"views","seq":4,"layer":0,"start":5,)"
                                 R"("key":null,"blocks":[]})"});
  ExpectWrongAs(rules, five + Recording{Blocks(4, {-1, -1, 0}, 1)},
                "block 1 of sequence 4 is -1, the pool has 4");
  // More tokens than the blocks can hold: only max_seq_len bounds them.
  Recording lines = five;
  for (int i = 0; i < 6; ++i) {
    lines = lines + Recording{Append(4, {6}), Commit(4, {1})};
  }
  std::string longer = Saying(rules, lines + Recording{Usage(2, 0, 2, 0)});
  longer = Replaced(longer, R"("max_seq_len":8)", R"("max_seq_len":11)");
  ExpectAccept(longer, Level::kVisibility);
  ExpectReject(Replaced(longer, R"("max_seq_len":11)", R"("max_seq_len":10)"),
               17, Level::kNone);
  ExpectWrongAs(rules, kThree + Recording{Append(4, {4, 5, 6, 7, 8, 9})},
                "sequence 4 cannot have 9 tokens: max_seq_len is 8");
  // Rows that are gone stay gone.
  const Recording back = five + Recording{Truncate(4, 2), Append(4, {33})};
  ExpectRightAs(rules, back + Recording{ViewsFrom(2, 4, {33})});
  ExpectRightAs(rules, back + Recording{Views(4, {1, 2, 33})});
  ExpectWrongAs(rules,
                back + Recording{R"({"op":"views","seq":4,"layer":0,)"
                                 R"("key":null})"},
                "the rows end at position 0, expected 3");
  ExpectRightAs(rules, five + Recording{Fork(4, 4, 5), ViewsFrom(3, 5, {4})});
  ExpectWrongAs(
      rules,
      five + Recording{Fork(4, 4, 5), Append(5, {6}), ViewsFrom(4, 5, {6})},
      "needs them from 3 on");
}

TEST(PoolRules, ADescriptionMayNameThem) {
  const auto said = [](std::uint32_t can, std::int32_t window, int level) {
    static kvtwin_pool_description_v1 is;
    is.can = can;
    is.window = window;
    is.level = static_cast<kvtwin_level>(level);
    kvtwin_pool_backend_v1 table = OtherPoolTable();
    table.describe = [](kvtwin_pool_description_v1* out) -> int {
      out->can = is.can;
      out->window = is.window;
      out->level = is.level;
      return KVTWIN_OK;
    };
    return DescribePoolBackend(&table).status().message();
  };
  EXPECT_EQ(said(KVTWIN_POOL_HAS_WINDOW, 0, KVTWIN_VISIBILITY), "");
  EXPECT_EQ(said(KVTWIN_POOL_NO_RESERVE, 0, KVTWIN_VISIBILITY), "");
  EXPECT_EQ(said(2 * KVTWIN_POOL_NO_RESERVE, 0, KVTWIN_VISIBILITY),
            "can is 0x400; this kvtwin does not know its flags 0x400");
  EXPECT_EQ(said(KVTWIN_POOL_HAS_WINDOW, -1, KVTWIN_VISIBILITY),
            "window is -1, it must not be negative");
  EXPECT_EQ(said(KVTWIN_POOL_DEDUPLICATES, 0, KVTWIN_IDENTITY),
            "can is 0x1, at identity a pool does as P1 to P18 say");
}

// A report names several of the expected rows, but not all of many.
TEST(PoolRules, ReportsNameTheExpectedRows) {
  const Recording twice = kThree + Recording{Open(5), Append(5, {11, 12, 13}),
                                             Commit(5, {7, 8, 9})};
  ExpectWrong(
      twice + Recording{Open(6, {7, 8, 9}, 2), Views(6, {1, 3})},
      "; expected any of 2 rows: the row of sequence 4, position 1 "
      "(appended on line 3), the row of sequence 5, position 1 "
      "(appended on line 6); found K [3] V [3], expected K [2] V [2] or K "
      "[12] V [12]");
  Recording many = twice;
  for (int i = 30; i < 37; ++i) {
    many = many + Recording{Open(i), Append(i, {i, i + 100, 13}),
                            Commit(i, {7, 8, 9})};
  }
  ExpectWrong(many + Recording{Open(6, {7, 8, 9}, 2), Views(6, {1, 3})},
              "(appended on line 12), 5 more; found");
}

TEST(PoolRules, AcceptsCorrectPoolsWithOtherRules) {
  ExpectRight({});
  ExpectRight(kDeduplicates);
  ExpectRight(kRecomputes);
  ExpectRight(Window(0));
  ExpectRight(Window(3));
  ExpectRight({.deduplicates = true, .recomputes_last = true, .window = 5});
}

TEST(PoolRules, FindsFaultsOfPoolsThatDeduplicate) {
  ExpectFound(kDeduplicates, OtherPoolFault::kSwapsAcrossKeys,
              "these tokens were committed under another key");
  ExpectFound(kDeduplicates, OtherPoolFault::kSwapsByBlock, kOtherRow);
  ExpectFound(kDeduplicates, OtherPoolFault::kSwapForgetsOwner, "usage: ");
  ExpectFound(kDeduplicates, OtherPoolFault::kWritesInShared, kOtherRow);
}

TEST(PoolRules, FindsFaultsOfPoolsThatRecompute) {
  ExpectFound(kRecomputes, OtherPoolFault::kWritesInShared, kOtherRow);
  ExpectFound(kRecomputes, OtherPoolFault::kRecomputesAtStart, kOtherRow);
  ExpectFound(kRecomputes, OtherPoolFault::kFindsOneMore,
              "a prefix is found in whole blocks");
}

TEST(PoolRules, FindsWrongCountsOfSharedBlocks) {
  for (const PoolRules& rules :
       {PoolRules{}, kDeduplicates, kRecomputes, Window(3)}) {
    ExpectFound(rules, OtherPoolFault::kCountsAllAsShared,
                "blocks with tokens that only one sequence has");
  }
}

// Blocks that a truncation gave up stay used until their sequence ends, when
// the other counts are right again.
TEST(PoolRules, APoolWithoutReserveHoldsNoOtherBlocks) {
  for (PoolRules rules : {PoolRules{}, kDeduplicates, kRecomputes, Window(3)}) {
    // Without the declaration, the blocks may be in reserve.
    const OtherPoolFault fault = OtherPoolFault::kLosesCutBlocks;
    EXPECT_EQ(Try(rules, fault, kHistories / 4).wrong, "");
    rules.no_reserve = true;
    ExpectRight(rules);
    ExpectFound(rules, fault, "and the pool keeps none in reserve");
  }
}

TEST(PoolRules, CountsTheBlocksOfAPoolWithoutReserve) {
  const std::string rules = R"("no_reserve":true)";
  const auto right = [&](const Recording& lines) {
    ExpectRightAs(rules, lines);
  };
  const auto wrong = [&](const Recording& lines, const std::string& reason) {
    ExpectWrongAs(rules, lines, reason);
  };
  right(kThree + Recording{Usage(2, 0, 2, 0)});
  wrong(kThree + Recording{Usage(1, 0, 3, 0)},
        "used and shared add up to 3, the sequences had 2 blocks when they had "
        "the most tokens");
  // It may keep the blocks of a sequence that is cut, or whose rows are
  // dropped, but takes no others when it grows again.
  const Recording cut =
      kThree + Recording{Truncate(4, 1), Usage(2, 0, 2, 0), Append(4, {5, 6}),
                         Commit(4, {5, 6})};
  right(cut + Recording{Usage(2, 0, 2, 0)});
  wrong(cut + Recording{Usage(1, 0, 3, 0)}, "add up to 3");
  const Recording dropped = {Open(0), Append(0, {1, 2, 3}), Append(0, {1}),
                             Commit(0, {7})};
  right(dropped + Recording{Usage(2, 0, 2, 0)});
  wrong(dropped + Recording{Usage(1, 0, 3, 0)}, "add up to 3");
  // A copy on write, a fork, and blocks that several sequences have.
  const Recording forked = kThree + Recording{Fork(4, 3, 0)};
  right(forked + Recording{Usage(2, 0, 2, 2)});
  right(forked + Recording{Append(0, {5}), Usage(1, 0, 3, 1)});
  wrong(forked + Recording{Usage(1, 0, 3, 2)}, "add up to 5");
  right(forked + Recording{Free(4), Usage(2, 0, 2, 0)});
  wrong(forked + Recording{Free(4), Usage(1, 0, 3, 0)}, "add up to 3");
  // A refused append takes none.
  const Recording refused =
      kThree + Recording{Append(4, {4, 5, 6}, "cache_full")};
  right(refused + Recording{Usage(2, 0, 2, 0)});
  wrong(refused + Recording{Usage(1, 0, 3, 0)}, "add up to 3");
}

TEST(PoolRules, FindsFaultsOfPoolsWithAWindow) {
  ExpectFound(Window(3), OtherPoolFault::kFreesEarly,
              "a window of 3 positions needs");
  ExpectFound(Window(3), OtherPoolFault::kShowsFreed, "views: position ");
  ExpectFound(Window(3), OtherPoolFault::kStartsLate,
              "views: the rows end at position");
  // The row of another token, or the block of another sequence's token.
  ExpectFound(Window(3), OtherPoolFault::kWritesInShared, "at position ");
}

// A window that the pool declares is a rule of its views, as in a recording.
TEST(PoolRules, AFailureCitesTheRulesOfTheWrongLine) {
  const auto cited = [](const PoolRules& rules, OtherPoolFault fault) {
    return Try(rules, fault, kHistories).rules;
  };
  EXPECT_EQ(cited(Window(3), OtherPoolFault::kFreesEarly), "P7, P12, P3, P4");
  EXPECT_EQ(cited(kRecomputes, OtherPoolFault::kRecomputesAtStart),
            "P7, P3, P4");
  EXPECT_EQ(cited(kRecomputes, OtherPoolFault::kFindsOneMore),
            "P1, P4, P6, P17, P18");
  EXPECT_EQ(cited(kDeduplicates, OtherPoolFault::kSwapForgetsOwner), "P9");
  const std::string views =
      Saying(R"("window":3)", kThree + Recording{ViewsFrom(1, 4, {12, 99})});
  ASSERT_TRUE(JudgeText(views).failure) << JudgeText(views).reason();
  EXPECT_EQ(JudgeText(views).failure->rules, "P7, P12, P5");
}

// Only an append of many tokens shows the fault.
TEST(PoolRules, FindsFaultsOfLongAppends) {
  ExpectFound({}, OtherPoolFault::kStores64, "views: position 64 of");
}

// A pool that declares no rules is judged by ours.
TEST(PoolRules, StaysStrictWithoutThem) {
  ExpectFound(kRecomputes, OtherPoolFault::kNone, "found in whole blocks",
              PoolRules());
  ExpectFound(Window(3), OtherPoolFault::kNone, "a pool without a window",
              PoolRules());
  ExpectFound(Window(3), OtherPoolFault::kNone, "a window of 4 positions needs",
              Window(4));
}

// A hit may be shorter than what is stored, but must be committed (P18).
TEST(PoolRules, PlannedTokensAreNotFound) {
  ExpectRight({});
  for (const OtherPoolFault fault :
       {OtherPoolFault::kFoundAtFirstLayer, OtherPoolFault::kFoundAtAppend,
        OtherPoolFault::kFoundAfterAbort}) {
    ExpectFound({}, fault, "never committed");
  }
}

}  // namespace
}  // namespace kvtwin::props
