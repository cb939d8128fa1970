// Every rule of docs/semantics.md is cited by a check or a law, and has a place
// in the code: in reference/, in core/ if both twins share the code, or where
// recordings and twins are compared. Every cited rule exists.

#include "props/compare/cited_rules.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cctype>
#include <filesystem>
#include <iterator>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/index.h"
#include "core/trace/paged_trace.h"
#include "props/base/check_name.h"
#include "props/base/text_file.h"
#include "props/laws/laws.h"
#include "props/paged/paged_driver.h"
#include "props/search/explain.h"
#include "props/testing/faulty_twins.h"

namespace kvtwin::props {
namespace {

using Rules = std::set<std::string>;

// Returns the first group of each match: "S31".
Rules Matches(const std::string& text, const std::regex& pattern) {
  Rules found;
  for (std::sregex_iterator at(text.begin(), text.end(), pattern), end;
       at != end; ++at) {
    found.insert((*at)[1]);
  }
  return found;
}

void AddRules(std::string_view text, Rules& rules) {
  // H11 and the like are bugs of the museum.
  static const std::regex kRule("\\b([SPDRF][0-9]+|H[0-9])\\b");
  rules.merge(Matches(std::string(text), kRule));
}

Rules RulesThereAre() {
  static const std::regex kRule(R"(\n- \*\*([SPDRHF][0-9]+)\*\*)");
  return Matches(ReadFile(KVTWIN_DOCS "/semantics.md"), kRule);
}

Rules CitedByReports() {
  Rules cited;
  for (const std::string_view check : kCheckNames) {
    for (int kind = 0; kind <= AsInt(OpKind::kFind); ++kind) {
      for (const bool states : {false, true}) {
        AddRules(CitedRules(check, static_cast<OpKind>(kind), states), cited);
      }
    }
  }
  for (int kind = 0; kind <= AsInt(TraceOpKind::kAttend); ++kind) {
    for (const bool of_row : {true, false}) {
      AddRules(CitedRules(static_cast<TraceOpKind>(kind), of_row), cited);
    }
  }
  for (int kind = 0; kind <= AsInt(PagedTraceOpKind::kAttend); ++kind) {
    const auto call = static_cast<PagedTraceOpKind>(kind);
    AddRules(CitedPoolRules(TraceOpName(call)), cited);
    EXPECT_NE(CitedPoolRules(TraceOpName(call)), "") << TraceOpName(call);
  }
  for (const std::string_view operation : kPagedOpNames) {
    AddRules(CitedPoolRules(operation), cited);
    EXPECT_NE(CitedPoolRules(operation), "") << operation;
  }
  for (const Law& law : Laws()) {
    EXPECT_NE(law.rules, "") << law.name;
    AddRules(law.rules, cited);
  }
  return cited;
}

// Comments write a single rule as (S7), several as (S29 to S33) or (S2, S16).
Rules CitedIn(const std::string& folder) {
  Rules cited;
  for (const auto& file : std::filesystem::recursive_directory_iterator(
           std::filesystem::path(KVTWIN_DOCS).parent_path() / folder)) {
    if (!file.is_regular_file()) continue;
    const std::string name = file.path().filename().string();
    if (name.starts_with("cited_rules") || name.ends_with("_test.cc")) continue;
    std::string text;
    std::istringstream lines(ReadFile(file.path()));
    for (std::string line; std::getline(lines, line);) {
      const std::size_t comment = line.find("//");
      if (comment != line.npos) text += line.substr(comment + 2) + " ";
    }
    AddRules(text, cited);
    static const std::regex kRange("([SPDRH])([0-9]+) to \\1([0-9]+)");
    for (std::sregex_iterator at(text.begin(), text.end(), kRange), end;
         at != end; ++at) {
      for (int i = std::stoi((*at)[2]); i <= std::stoi((*at)[3]); ++i) {
        cited.insert(fmt::format("{}{}", (*at)[1].str(), i));
      }
    }
  }
  return cited;
}

Rules Without(const Rules& rules, const Rules& others) {
  Rules rest;
  std::ranges::set_difference(rules, others, std::inserter(rest, rest.end()));
  return rest;
}

TEST(CitedRules, CoverAllOfSemantics) {
  const Rules rules = RulesThereAre();
  EXPECT_EQ(rules.size(), 58U + 19U + 15U + 4U + 8U + 5U);
  const Rules reports = CitedByReports();
  EXPECT_EQ(Without(rules, reports), Rules()) << "no check or law cites them";
  EXPECT_EQ(Without(reports, rules), Rules()) << "there are no such rules";
}

TEST(CitedRules, AreCitedInTheCode) {
  const Rules rules = RulesThereAre();
  Rules code;
  for (const std::string folder :
       {"reference", "core", "props/compare", "props/oracle", "props/search"}) {
    code.merge(CitedIn(folder));
  }
  EXPECT_EQ(Without(rules, code), Rules()) << "no code cites them";
  EXPECT_EQ(Without(code, rules), Rules()) << "there are no such rules";
}

TEST(CitedRules, HaveAnchorsInSemantics) {
  const std::string text = ReadFile(KVTWIN_DOCS "/semantics.md");
  static const std::regex kAnchored(
      R"re(\n- \*\*([SPDRHF])([0-9]+)\*\* <a id="([spdrhf])([0-9]+)"></a>)re");
  Rules anchored;
  for (std::sregex_iterator at(text.begin(), text.end(), kAnchored), end;
       at != end; ++at) {
    const std::smatch& match = *at;
    EXPECT_EQ(match[2], match[4]);
    EXPECT_EQ(std::tolower(match[1].str()[0]), match[3].str()[0]);
    anchored.insert(match[1].str() + match[2].str());
  }
  EXPECT_EQ(Without(RulesThereAre(), anchored), Rules());
}

TEST(CitedRules, DependOnTheOperationThatAnsweredWrong) {
  EXPECT_EQ(CitedRules("subject: result", OpKind::kAsk), "S28, S44");
  EXPECT_EQ(CitedRules("subject: view cells", OpKind::kAsk), "S14");
  EXPECT_EQ(CitedRules("backend: crash", OpKind::kAsk), "");
  EXPECT_EQ(CitedRules(TraceOpKind::kGet, true), "S16, S21, S51, S53");
  EXPECT_EQ(CitedRules(TraceOpKind::kGet, false), "S14, S15, S23, S24");
  const History history = *ParseHistory("kvt1 | put 0*1 | ask 0@1");
  EXPECT_EQ(
      CitedRules({.step = 1, .check = "subject: result", .text = ""}, history),
      "S28, S44");
  EXPECT_EQ(
      CitedRules({.step = 2, .check = "subject: result", .text = ""}, history),
      "S1, S2, S3, S4");
  // A legal client removes tokens to make room for a batch.
  EXPECT_EQ(
      CitedRules({.step = 0, .check = "subject: result", .call = OpKind::kDrop},
                 history),
      "S29, S30, S31, S32, S33, S45");
  EXPECT_EQ(CitedRules({.step = 0, .check = "subject: result"}, history),
            "S5, S6, S7, S8, S9, S10, S11, S12, S13, S43, S49");
  EXPECT_EQ(CitedRules({.step = 0, .check = "subject: rows"}, history),
            "S2, S16, S17, S53");
  // A leak that shows after the last call breaks no rule.
  EXPECT_EQ(
      CitedRules({.step = 2, .check = "backend: memory", .text = ""}, history),
      "");
}

// Returns what the report of the history on a twin with the fault cites.
std::string CitedOfFault(const std::string& line, const Subject& subject) {
  const History history = *ParseHistory("kvt1 " + line);
  const auto failure = RunHistory(history, subject).failure;
  if (!failure) return "no failure";
  EXPECT_EQ(failure->check, "subject: rows") << failure->text;
  return Explain(history, *failure, subject).rules;
}
std::string CitedOfView(const std::string& line, const View& change) {
  return CitedOfFault(line, Tampered(Shows(change), Level::kVisibility));
}

TEST(CitedRules, AreThoseOfStorageForAWrongRow) {
  const View key = First(kKey);
  const View value = First(kValue);
  const View both = [&](OwnedView& view) {
    key(view);
    value(view);
  };
  EXPECT_EQ(CitedOfView("| put 0*2", key), "S21, S22, S53");
  EXPECT_EQ(CitedOfView("| put 0*2", value), "S21, S22, S53");
  EXPECT_EQ(CitedOfView("| put 0*2", both), "S2, S16, S17, S53, S21, S22");
  EXPECT_EQ(CitedOfView("permuted=1 | put 0*2", key), "S21, S22, S53");
  EXPECT_EQ(CitedOfView("permuted=1 | put 0*2", value), "S21, S22, S23, S53");
  EXPECT_EQ(CitedOfView("| put 0*2 | copy 0>1:2 | put 1*1", key),
            "S21, S22, S26, S53");
  EXPECT_EQ(CitedOfView("kind=encoder seqs=1 | put 0*1 image=0", key),
            "S22, S37, S53");
  EXPECT_EQ(CitedOfView("kind=recurrent | put 0*1 | put 0*1", key),
            "S21, S22, S53, R1, R7");
  // The row that the batch misses is not in the view, and no row is wrong.
  const View none = [](OwnedView& view) {
    for (std::byte& byte : view.mask.bytes) byte = view.mask.bytes[8];
  };
  EXPECT_EQ(CitedOfView("| put 0*2", none), "S2, S16, S17, S53");
  EXPECT_EQ(CitedOfView("| put 0*2 | copy 0>1:2 | put 1*1", none),
            "S2, S16, S17, S53, S26");
}

TEST(CitedRules, AreThoseOfShiftsWhereTokensMove) {
  const std::string put = "shift=add | put 0*3 | ";
  const std::string moved = "S21, S22, S31, S34, S35, S53";
  EXPECT_EQ(CitedOfView(put + "drop 0:0-1 | put 0*1", First(kKey)), moved);
  EXPECT_EQ(CitedOfView(put + "drop 0:0-1 | put 0*1", First(kValue)),
            "S21, S22, S53");
  EXPECT_EQ(CitedOfView(put + "drop 0:1- | put 0*1", First(kKey)),
            "S21, S22, S53");
  EXPECT_EQ(CitedOfView(put + "drop 0:1-1 | put 0*1", First(kKey)),
            "S21, S22, S53");
  // A legal client moves tokens without an operation that says so.
  Subject faulty = Tampered({}, Level::kVisibility);
  faulty.make = [](CacheSpec spec) {  // It does not shift K rows.
    spec.shift.kind = ShiftKind::kIdentity;
    return MakeCache(spec, "reference");
  };
  EXPECT_EQ(
      CitedOfFault("shift=add cells=4 legal=1 | put 0*4 | put 0*2", faulty),
      moved);
  const auto cited = [](const std::string& line) {
    return CitedRules({.step = 0, .check = "subject: K bytes"},
                      *ParseHistory("kvt1 " + line));
  };
  EXPECT_EQ(cited("| put 0*2"), "S20, S21, S22, S51");
  EXPECT_EQ(cited("| put 0*2 | move 0:0-1@+1 | get"),
            "S20, S21, S22, S34, S35, S36, S51");
}

// Returns what a failure in the last operation of the history cites.
std::string CitedAtEnd(const std::string& check, const std::string& line,
                       std::vector<Step> trace = {}) {
  const History history = *ParseHistory("kvt1 " + line);
  return CitedRules({.step = history.ops.size() - 1,
                     .check = check,
                     .trace = std::move(trace)},
                    history);
}

// The answers show what an earlier call did, or did not do.
TEST(CitedRules, NameTheCallsWhoseEffectAnAnswerShows) {
  const auto cited = [](const std::string& check, const std::string& line,
                        std::vector<Step> trace = {}) {
    return CitedAtEnd("subject: " + check, line, std::move(trace));
  };
  const std::string start = "S5, S6, S7, S8, S9, S10, S11, S12, S13, S43, S49";
  const std::string drafts = "| put 0*1:-1 ";
  EXPECT_EQ(cited("result", drafts + "| put 0*1"), start + ", D4");
  EXPECT_EQ(cited("result", drafts + "| drop 0:0- | put 0*1"),
            start + ", D4, D6");
  EXPECT_EQ(cited("result", drafts + "| copy 1>0:1 | put 0*1"),
            start + ", S26, D4, D6");
  EXPECT_EQ(cited("result", drafts + "| commit 0:0 | put 0*1"),
            start + ", D4, D5");
  EXPECT_EQ(cited("result", drafts + "| drop 0:0- | put 0*1:-1"),
            "S5, S6, S7, S8, S9, S10, S11, S12, S13, S43, D1, D3, D4, D8, D6");
  Step by_client;
  by_client.call = "Remove(0, 0, open)";
  by_client.own_call = OwnCall::kRemoveToTheEnd;
  EXPECT_EQ(cited("result", "legal=1 " + drafts + "| put 0*1", {by_client}),
            start + ", D4, D6");
  by_client.own_call = OwnCall::kCommit;
  EXPECT_EQ(cited("result", "legal=1 " + drafts + "| put 0*1", {by_client}),
            start + ", D4, D5");
  EXPECT_EQ(cited("result", "| put 0*1 | drop 0:0- | put 0*1"), start);
  EXPECT_EQ(cited("result", drafts + "| drop 0:0- | ask 0@1"), "S28, S44, D6");
  EXPECT_EQ(cited("room", drafts + "| drop 0:0- | put 0*1"), "S4, S12, D3, D6");
  EXPECT_EQ(cited("rows", drafts + "| drop 0:0- | put 0*1"),
            "S2, S16, S17, S53, D2, S29");
  EXPECT_EQ(cited("rows", "shift=add | put 0*3 | drop 0:0-1 | put 0*1"),
            "S2, S16, S17, S53, S29, S31");
  EXPECT_EQ(cited("rows", "kind=recurrent | put 0*2 | drop 0:0- | put 0*1"),
            "S53, R1, R6, R7, R12, R10");
  EXPECT_EQ(cited("rows", "legal=1 | find 0:1,2 | put 0*1"),
            "S2, S16, S17, S53, F3, F4");
  EXPECT_EQ(cited("output", "| put 0*1"), "S2, S16, S17, S58");
  EXPECT_EQ(cited("output", "| put 0*2 | copy 0>1:1 | put 1*1"),
            "S2, S16, S17, S58, S26");
  EXPECT_EQ(cited("output", "shift=add | put 0*2 | move 0:0-1@+1 | put 0*1"),
            "S2, S16, S17, S58, S31, S34, S35");
  EXPECT_EQ(cited("room", "| put 0*1 | copy 0>1:1 | put 1*1"), "S4, S12, S26");
}

// What evicts, removes, excepts, commits and cuts hybrids shows in later views.
TEST(CitedRules, NameTheCallsWhoseEffectAViewShows) {
  const auto cited = [](const std::string& check, const std::string& line) {
    return CitedAtEnd("subject: " + check, line);
  };
  const std::string drafts = "| put 0*1:-1 ";
  const std::string swa = "kind=swa window=1 seqs=1 ";
  EXPECT_EQ(cited("rows", swa + "| put 0*1 | put 0*1"),
            "S2, S16, S17, S53, S7");
  // The client went back to where CanResume said that it could.
  EXPECT_EQ(cited("rows", swa + "| put 0*3 | drop 0:2- | put 0*1"),
            "S2, S16, S17, S53, S29, S7, S28");
  EXPECT_EQ(cited("rows", swa + "| put 0*1:-1 | put 0*1:0"),
            "S2, S16, S17, S53, D2, S7, D3");
  EXPECT_EQ(cited("rows", "| put 0*2 | causal 0 | get"),
            "S2, S16, S17, S53, S19");
  EXPECT_EQ(cited("rows", drafts + "| commit 0:0 | put 0*1"),
            "S2, S16, S17, S53, D2, D5");
  EXPECT_EQ(cited("rows",
                  "kind=hybrid caches=causal/recurrent | put 0*2 | "
                  "drop 0:1- | put 0*1"),
            "S53, R1, R6, R7, R12, R10, S16, H3, H4");
  EXPECT_EQ(cited("resume",
                  "kind=recurrent drafts=1 | put 0*1:-1 | commit 0:0 | "
                  "ask 0@1"),
            "S44, R8, R9, R4, D5, R13");
  // A reserving pass stores nothing, so that nothing stays.
  const std::string reserves = "kind=swa window=0 | put 0*1 reserve ";
  EXPECT_EQ(cited("result", reserves + "| drop 0:0-0"),
            "S29, S30, S31, S32, S33, S45, S18");
  EXPECT_EQ(cited("result", "| put 0*1 | drop 0:0-0"),
            "S29, S30, S31, S32, S33, S45");
  EXPECT_EQ(cited("room", reserves + "| put 0*1"), "S4, S12, S18");
  EXPECT_EQ(cited("rows", reserves + "| put 0*1"), "S2, S16, S17, S53, S18");
  EXPECT_EQ(cited("resume", reserves + "| ask 0@1"), "S7, S28, S44, S18");
  EXPECT_EQ(cited("misuse", reserves + "| misuse 0"), "S47");
}

TEST(CitedRules, NameTheRefusedCallsThatChangedSomething) {
  const auto cited = [](const std::string& line, StatusCode refusal,
                        const std::string& check = "subject: rows") {
    std::vector<Step> calls(3);
    calls[1].code = refusal;
    return CitedAtEnd(check, line, calls);
  };
  const std::string drop = "| put 0*2 | drop 0:0-1 | put 0*1";
  const std::string wrapper = "kind=wrapper caches=causal/swa:w1 ";
  const std::string rows = "S2, S16, S17, S53";
  EXPECT_EQ(cited(drop, StatusCode::kSharedCells), rows + ", S29, S31, S33");
  EXPECT_EQ(cited(drop, StatusCode::kNotSupported), rows + ", S29, S31, S33");
  EXPECT_EQ(cited(wrapper + drop, StatusCode::kSharedCells),
            rows + ", S29, S31, S7, S28, S33, S45");
  const std::string full = "| put 0*2 | put 0*9 | put 0*1";
  EXPECT_EQ(cited(full, StatusCode::kCacheFull), rows + ", S12");
  EXPECT_EQ(cited(wrapper + full, StatusCode::kCacheFull),
            rows + ", S7, S12, S43");
  // No cache changes if a later one refuses drafts.
  EXPECT_EQ(cited("kind=hybrid caches=swa:w0/recurrent | put 0*1 | put 0*1:-1 "
                  "| ask 0@1",
                  StatusCode::kNotSupported, "subject: resume"),
            "S44, R8, R9, S28, R4, D8");
  // A crash breaks no rule, whatever was refused before.
  EXPECT_EQ(cited(full, StatusCode::kCacheFull, "backend: crash"), "");
}

// Neither a write past the end of a buffer nor an exception of Python breaks a
// rule.
TEST(CitedRules, AreNoneForFailuresOfTheBackend) {
  for (const std::string_view check : kCheckNames) {
    if (check.starts_with("backend: ")) {
      EXPECT_EQ(CitedRules(check, OpKind::kPut), "") << check;
    }
  }
}

TEST(CitedRules, AreThoseThatAPoolCanBreak) {
  PagedSpec spec;
  EXPECT_EQ(CitedPoolRules("views", spec), "P7");
  EXPECT_EQ(CitedPoolRules("views", spec, /*window=*/true), "P7, P12");
  EXPECT_EQ(CitedPoolRules("truncate", spec), "P8");
  const auto after = [&](PagedTraceOpKind last) {
    return CitedPoolRules("views", spec, /*window=*/false, last);
  };
  EXPECT_EQ(after(PagedTraceOpKind::kFork), "P7, P2");
  EXPECT_EQ(after(PagedTraceOpKind::kAppend), "P7, P3, P4");
  EXPECT_EQ(after(PagedTraceOpKind::kTruncate), "P7, P8");
  EXPECT_EQ(
      CitedPoolRules("commit", spec, /*window=*/false, PagedTraceOpKind::kFork),
      "P5, P6");
  EXPECT_EQ(CitedPoolRules("open", spec), "P1, P4, P6, P17, P18");
  spec.groups = {{.window = 3}, {.states = true}};
  for (const char* call : {"open", "views", "truncate", "commit"}) {
    EXPECT_EQ(CitedPoolRules(call, spec), CitedPoolRules(call)) << call;
  }
  EXPECT_EQ(after(PagedTraceOpKind::kOpen),
            "P7, P12, P13, P1, P4, P6, P16, P17, P18");
  EXPECT_EQ(after(PagedTraceOpKind::kTruncate), "P7, P12, P13, P8, P14");
}

TEST(CitedRules, NameThePinsAndWindowsOfStates) {
  const auto cited = [](const std::string& check, const std::string& line) {
    const History history = *ParseHistory("kvt1 " + line);
    return CitedRules(
        {.step = history.ops.size() - 1, .check = "subject: " + check},
        history);
  };
  const std::string recurrent = "kind=recurrent pins=1 every=2 keep=1 ";
  const std::string pinned = recurrent + "| put 0*1 | pin 0 | put 0*1 ";
  EXPECT_EQ(cited("resume", recurrent + "| put 0*1 | ask 0@1"),
            "S44, R8, R9, R4");
  EXPECT_EQ(cited("resume", pinned + "| ask 0@1"), "S44, R8, R9, R14, R4");
  EXPECT_EQ(cited("resume", pinned + "| drop 0:1- | ask 0@1"),
            "S44, R8, R9, R14, R15, R4");
  EXPECT_EQ(cited("rows", pinned), "S53, R1, R6, R7, R12, R14");
  const std::string hybrid = "kind=hybrid caches=recurrent:e2:k1:p1/swa:w3 ";
  EXPECT_EQ(cited("rows", hybrid + "| put 0*1 | pin 0 | put 0*1"),
            "S53, R1, R6, R7, R12, R14, S16, S7");
  EXPECT_EQ(cited("resume", hybrid + "| put 0*1 | ask 0@1"),
            "S44, R8, R9, S28, R4");
}

TEST(CitedRules, OfRecordingsNameTheRulesOfStates) {
  CacheSpec recurrent;
  recurrent.kind = Kind::kRecurrent;
  CacheSpec window;
  window.kind = Kind::kSwa;
  window.window = 3;
  CacheSpec hybrid;
  hybrid.kind = Kind::kHybrid;
  hybrid.caches = {recurrent, window};
  using enum TraceOpKind;
  const auto cited = [](TraceOpKind kind, const CacheSpec& spec,
                        const std::vector<TraceOpKind>& before = {},
                        bool drafts = false) {
    RowPast past = RowPast::Of(spec, {});
    TraceOp op;
    for (const TraceOpKind earlier : before) {
      op.kind = earlier;
      past.Add(op);
    }
    op.kind = kind;
    if (drafts) op.parents = {-1};
    return CitedRules(op, {}, past);
  };
  EXPECT_EQ(cited(kCanResume, window), "S28, S44");
  EXPECT_EQ(cited(kCanResume, recurrent), "R8, R9");
  EXPECT_EQ(cited(kCanResume, hybrid), "S28, S44, R8, R9");
  EXPECT_EQ(cited(kCanResume, recurrent, {kCheckpoint}), "R8, R9, R14");
  EXPECT_EQ(cited(kCanResume, recurrent, {kCheckpoint, kRemove}),
            "R8, R9, R14, R15");
  EXPECT_EQ(cited(kStartForward, recurrent),
            "S5, S12, S43, S49, R2, R3, R4, R5");
  EXPECT_EQ(cited(kStartForward, hybrid),
            "S5, S6, S7, S8, S9, S10, S11, S12, S13, S43, S49, R2, R3, R4, R5, "
            "H2");
  EXPECT_EQ(cited(kStartForward, recurrent, {}, /*drafts=*/true),
            "S5, S12, S43, R2, R3, R4, R5, R11, D1, D3, D4, D8");
  EXPECT_EQ(cited(kStartForward, window, {}, /*drafts=*/true),
            "S5, S6, S7, S8, S9, S10, S11, S12, S13, S43, D1, D3, D4, D8");
  EXPECT_EQ(cited(kRemove, recurrent), "S30, S33, R10");
  EXPECT_EQ(cited(kRemove, hybrid),
            "S29, S30, S31, S32, S33, S45, R10, H3, H4");
  EXPECT_EQ(cited(kCopyPrefix, recurrent), "S26, S27, R10");
  EXPECT_EQ(cited(kCopyPrefix, recurrent, {kCheckpoint, kCopyPrefix}),
            "S26, S27, R10, R14, R15");
  EXPECT_EQ(cited(kCommit, recurrent), "D3, D4, D5, D8, R13");
  EXPECT_EQ(cited(kSetCausal, recurrent), "R10");
  EXPECT_EQ(cited(kSetCausal, recurrent, {kCheckpoint}), "R10");
  CacheSpec unbounded;
  hybrid.caches = {recurrent, unbounded};
  EXPECT_EQ(cited(kCanResume, hybrid), "S44, R8, R9");
  EXPECT_EQ(cited(kCheckpoint, recurrent), "R14");
  EXPECT_EQ(cited(kGet, recurrent), "S14, S15, S23, S24");
}

TEST(CitedRules, NameHowATokenLeft) {
  const auto cited = [](const std::string& line) {
    return CitedRules({.step = 0, .check = "subject: rows", .of_left = true},
                      *ParseHistory(line));
  };
  EXPECT_EQ(cited("kvt1 kind=swa window=0 | put 0*2 | put 0*1 | copy 0>1:1"),
            "S2, S16, S17, S53, S7, S26, S27");
  EXPECT_EQ(cited("kvt1 | put 0*2 | drop 0:1- | put 0*1"),
            "S2, S16, S17, S53, S29, S30");
  EXPECT_EQ(cited("kvt1 | put 0*2:-1,-1 | drop 0:5- | causal"),
            "S2, S16, S17, S53, D2, S29, S30, D6, S19");
  EXPECT_EQ(cited("kvt1 | put 0*2:-1,-1 | copy 1>0:0 | causal"),
            "S2, S16, S17, S53, D2, S26, S27, D6, S19, D7");
  EXPECT_EQ(cited("kvt1 | put 0*2:-1,-1 | commit 0:1 | put 0*1"),
            "S2, S16, S17, S53, D2, D5");
}

}  // namespace
}  // namespace kvtwin::props
