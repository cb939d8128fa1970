// Tests the shrinker: the catalog of short histories, states that are rebuilt
// at once, and steps.

#include "props/shrink/minimal_cases.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "props/base/forwarding_cache.h"
#include "props/history/generate.h"
#include "props/shrink/cost.h"
#include "props/shrink/rebuild.h"
#include "props/shrink/shrink.h"

namespace kvtwin::props {
namespace {

std::vector<History> AllOf(const History& model) {
  std::vector<History> all;
  PlainestThatFails(model, [&](const History& history) {
    all.push_back(history);
    return false;
  });
  return all;
}

TEST(MinimalCases, StartWithTheSimplest) {
  const History model =
      *ParseHistory("kvt1 cells=6 | put 0*2 1*2 | drop 0:0- | put 1*4@+1");
  const std::vector<History> all = AllOf(model);
  ASSERT_GT(all.size(), 5000U);
  EXPECT_LT(all.size(), 30000U);
  EXPECT_EQ(ToText(all.front()), "kvt1 cells=1 | drop 0:0-");
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_LT(CostOf(all[i]), CostOf(model)) << ToText(all[i]);
    if (i == 0) continue;
    EXPECT_LE(CostOf(all[i - 1]), CostOf(all[i])) << ToText(all[i]);
  }
}

TEST(MinimalCases, KeepSpecialSettings) {
  for (const std::string line :
       {"cells=2 permuted=1 | put 0*3 image=2", "cells=2 pad=2 | put 0*3 keep",
        "kind=swa_mem window=1 memory=4 cells=5 | put 0*3",
        "kind=chunked chunk=3 cells=3 | put 0*3",
        "kind=encoder seqs=1 cap=1 | put 0*2 image=1 | put 0*1 | misuse 3",
        "kind=wrapper shift=add caches=causal/encoder cells=2 | put 0*2",
        "cap=4 | put 0*3 | put 0*2 | causal 0"}) {
    const History model = *ParseHistory("kvt1 " + line);
    std::map<std::string, int> seen;
    for (const History& history : AllOf(model)) {
      EXPECT_EQ(++seen[ToText(history)], 1) << ToText(history);
    }
    EXPECT_GT(seen.size(), 20U) << line;
  }
  EXPECT_TRUE(AllOf(*ParseHistory("kvt1 kind=swa window=0 cap=2")).empty());
}

// Batches have images and exceptions if the model has them.
TEST(MinimalCases, MarkTokensAsTheModelDoes) {
  for (const std::string mark : {"image", "except"}) {
    for (const bool marks : {false, true}) {
      const History model =
          *ParseHistory("kvt1 cap=4 | put 0*3" +
                        (marks ? " " + mark + "=2" : "") + " | drop 0:1-");
      const std::vector<History> all = AllOf(model);
      const auto count =
          std::count_if(all.begin(), all.end(), [&](const History& history) {
            return ToText(history).find(" " + mark + "=0") != std::string::npos;
          });
      EXPECT_EQ(count > 0, marks) << mark;
    }
  }
}

// The catalog has all kinds of operations, up to the last OpKind.
TEST(MinimalCases, HaveCallsInAnyOrder) {
  const std::string setup =
      "kvt1 kind=wrapper caches=causal cells=1 layers=2 | ";
  std::set<std::string> texts;
  const std::string ops =
      "put 0*1 | start 0*1 | store | layer 1 | type 0 | except 0 | cached | "
      "snapshot 0 | add 0>1 | read";
  for (const History& history : AllOf(*ParseHistory(setup + ops))) {
    texts.insert(ToText(history));
  }
  for (const std::string line :
       {"put 0*1 | add 0>1", "put 0*1 | layer 0 | read",
        "put 0*1 | type 0 | read", "put 0*1 | cached | read"}) {
    EXPECT_TRUE(texts.contains(setup + line)) << line;
  }
}

// No operation refers to tokens that a legal client has removed.
TEST(MinimalCases, FollowTheEndsOfSequences) {
  std::set<std::string> texts;
  const History model = *ParseHistory(
      "kvt1 cells=8 legal=1 | put 0*3 | put 0*3 | drop 0:1- | copy 0>1:1 | ask "
      "1@1 | put 1*1");
  for (const History& history : AllOf(model)) {
    const std::string text = ToText(history);
    texts.insert(text.substr(text.find('|')));
  }
  EXPECT_TRUE(texts.contains("| put 0*2 | drop 0:1- | ask 0@1"));
  EXPECT_FALSE(texts.contains("| put 0*2 | drop 0:1- | ask 0@2"));
  EXPECT_TRUE(texts.contains("| put 0*2 | copy 0>1:2 | put 1*1"));
  EXPECT_FALSE(texts.contains("| put 0*2 | copy 0>1:3 | put 1*1"));
}

TEST(StatePrefix, MakesTheStateInOneBatch) {
  const History history = *ParseHistory(
      "kvt1 cells=6 | put 0*1 | put 1*1 | put 0*2 | copy 0>2:1 | drop 1:0- | "
      "ask 0@1");
  EXPECT_EQ(ToText(Rebuilt(history, 1).at(0)),
            "kvt1 cells=6 | put 0*1 3*1 0*2@+1 | copy 0>2:1 | drop 3:0- | "
            "ask 0@1");
  EXPECT_EQ(ToText(Rebuilt(history, 3).at(0)),
            "kvt1 cells=6 | put 0*1 1*1 0*2@+1 | copy 0>2:1 | drop 1:0- | "
            "ask 0@1");
  EXPECT_TRUE(Rebuilt(history, 5).empty());
  EXPECT_TRUE(
      Rebuilt(*ParseHistory("kvt1 cap=0 | put 0*1 | get | get"), 1).empty());
  EXPECT_TRUE(Rebuilt(*ParseHistory("kvt1 kind=wrapper caches=causal/causal "
                                    "cells=2 | put 0*1 | put 0*1 | get"),
                      1)
                  .empty());
}

// The text of a rebuilt history can be read back.
TEST(StatePrefix, GoesUpToTheLargestPosition) {
  const History history = *ParseHistory(
      "kvt1 cells=8 | put 0*1@+2147483646 | put 0*3 2147483647*1 | "
      "copy 0>1:2147483647 | get");
  const std::vector<History> rebuilt = Rebuilt(history, 1);
  ASSERT_FALSE(rebuilt.empty());
  const auto again = ParseHistory(ToText(rebuilt[0]));
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(ToText(*again), ToText(rebuilt[0]));
}

TEST(StatePrefix, KeepsTheOrderOfPositions) {
  const History history = *ParseHistory(
      "kvt1 cells=8 | put 0*3r | put 1*2= | put 0*1@+1 | put 2*1 | drop 0:0-0 |"
      " get");
  EXPECT_EQ(ToText(Rebuilt(history, 1).at(0)),
            "kvt1 cells=8 | put 0*3r 1*2= 0*1@+4 2*1 | get");
}

TEST(StatePrefix, PutsAllTokensAtOnce) {
  const auto at_once = [](const std::string& line) {
    const auto made = PutAtOnce(*ParseHistory(line));
    return made ? ToText(*made) : "";
  };
  EXPECT_EQ(at_once("kvt1 cap=5 legal=1 | put 0*4 1*1 | get | put 1*4"),
            "kvt1 cells=9 legal=1 | put 0*9");
  EXPECT_EQ(at_once("kvt1 cap=5 | get | copy 0>1:2"), "");
  EXPECT_EQ(at_once("kvt1 cap=5 | put 0*4000 | put 0*free"), "");
  EXPECT_EQ(at_once("kvt1 | put 0*4000 | put 1*96"),
            "kvt1 cells=4096 | put 0*4096");
  EXPECT_EQ(at_once("kvt1 | put 0*4000 | put 1*97"), "");
}

// With a thousand operations in a cache of hundreds of cells, leaving out
// unneeded operations takes all the work that shrinking may do.
TEST(Shrink, TriesFewMinimalCasesAfterMuchWork) {
  const auto tries = [](const std::string& line, std::size_t gets) {
    History history = *ParseHistory(line);
    const std::vector<Op> pair = {history.ops.begin() + 1, history.ops.end()};
    history.ops.resize(1);
    for (int i = 0; i < 8; ++i) {
      history.ops.insert(history.ops.end(), gets, pair[0]);
      history.ops.push_back(pair[1]);
    }
    std::size_t count = 0;
    const Rerun rerun = [&](const History& one) -> std::optional<Failure> {
      ++count;
      const auto& segments = one.ops.front().segments;
      if (segments.empty() || segments.front().count != 37) return std::nullopt;
      if (std::ranges::count(one.ops, pair[1].kind, &Op::kind) < 8) {
        return std::nullopt;
      }
      return Failure{
          .step = one.ops.size() - 1, .check = "subject: cells", .text = ""};
    };
    EXPECT_EQ(Shrink(history, rerun).ops.size(), 9U);
    return count;
  };
  const std::size_t all = tries("kvt1 cells=37 | put 0*37 | get | causal 0", 0);
  EXPECT_GT(all, 10000U);
  EXPECT_LT(tries("kvt1 cells=700 | put 0*37 | get | causal 0", 125), all / 2);
}

// Refuses to resume a sequence whose cells are not in the order of positions.
class ResumesInOrder : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    std::vector<CellEntry> cells;
    ListCells(cells);
    std::int32_t last = -1;
    for (const CellEntry& entry : cells) {
      if (entry.sequence != seq) continue;
      if (entry.position < last) return false;
      last = entry.position;
    }
    return ForwardingCache::CanResume(seq, pos);
  }
};

TEST(Shrink, WritesOutTheCallsOfALegalClient) {
  for (std::uint64_t number = 0, legal = 0; legal < 50; ++number) {
    const History history = MakeHistory(1, number, {}, 60);
    if (!history.setup.legal) continue;
    ++legal;
    const History open = ExpandImplicit(history);
    EXPECT_FALSE(open.setup.legal);
    const Subject twin = TwinSubject("optimized");
    const RunResult want = RunHistory(history, twin);
    const RunResult got = RunHistory(open, twin);
    EXPECT_EQ(got.operations, want.operations) << ToText(history);
    EXPECT_EQ(got.digest, want.digest) << ToText(history) << ToText(open);
  }
}

TEST(Shrink, LeavesAPassingHistoryUnchanged) {
  const History history = *ParseHistory("kvt1 cells=4 | put 0*2 | get");
  EXPECT_EQ(ToText(Shrink(history, TwinSubject("reference"))), ToText(history));
}

// Nearly every history fails, but with another failure than the first one.
TEST(Shrink, KeepsTheSameFailure) {
  const Rerun rerun = [](const History& history) -> std::optional<Failure> {
    for (std::size_t i = 0; i < history.ops.size(); ++i) {
      if (history.ops[i].kind == OpKind::kDrop) {
        return Failure{.step = i, .check = "subject: cells", .text = ""};
      }
    }
    return Failure{.check = "reference: result", .text = ""};
  };
  const History shrunk = Shrink(
      *ParseHistory("kvt1 cells=4 | put 0*3 | get | drop 0:1- | get"), rerun);
  ASSERT_EQ(shrunk.ops.size(), 1U) << ToText(shrunk);
  EXPECT_EQ(shrunk.ops[0].kind, OpKind::kDrop);
}

TEST(Shrink, FindsTheSmallestDimensions) {
  for (const RowDims least : {RowDims{1, 1, 2}, RowDims{1, 1, 3},
                              RowDims{2, 1, 1}, RowDims{1, 2, 1}}) {
    const Rerun rerun = [&](const History& history) -> std::optional<Failure> {
      const RowDims& rows = history.setup.rows;
      if (rows.k_head_dim < least.k_head_dim ||
          rows.kv_heads < least.kv_heads ||
          rows.v_head_dim < least.v_head_dim) {
        return std::nullopt;
      }
      return Failure{.check = "subject: K bytes", .text = ""};
    };
    const History shrunk =
        Shrink(*ParseHistory("kvt1 cells=4 dims=6,3,5 | put 0*3"), rerun);
    EXPECT_EQ(shrunk.setup.rows, least) << ToText(shrunk);
  }
}

// A reference cache that answers through `Faulty`, which forwards to it.
template <class Faulty>
Result<std::unique_ptr<Cache>> MakeFaulty(const CacheSpec& spec) {
  auto cache = MakeCache(spec, "reference");
  if (!cache.ok()) return cache.status();
  return std::unique_ptr<Cache>(std::make_unique<Faulty>(std::move(*cache)));
}

// Bounds of a range are tried from 0 to 3, and then halved.
TEST(Shrink, FindsTheSmallestBoundsOfARange) {
  const auto least = [](const std::string& line, auto fails) {
    const Rerun rerun = [&](const History& history) -> std::optional<Failure> {
      Failure difference;
      difference.check = "subject: cells";
      for (const Op& op : history.ops) {
        if (op.kind == OpKind::kDrop && fails(op)) return difference;
        ++difference.step;
      }
      return std::nullopt;
    };
    const History shrunk = Shrink(*ParseHistory(line), rerun);
    EXPECT_EQ(shrunk.ops.size(), 1U) << ToText(shrunk);
    return shrunk.ops[0];
  };
  for (int bound = 0; bound <= 4; ++bound) {
    const Op begin = least("kvt1 cells=9 | put 0*9 | drop 0:8-", [=](auto& op) {
      return !op.begin.from_end && op.begin.offset >= bound;
    });
    EXPECT_EQ(begin.begin.offset, bound);
    const Op end = least("kvt1 cells=9 | put 0*9 | drop 0:0-8", [=](auto& op) {
      return !op.open && !op.end.from_end && op.end.offset >= bound;
    });
    EXPECT_EQ(end.end.offset, bound);
  }
}

TEST(Shrink, GivesOneLineWhereNoStepLeadsToIt) {
  const Subject subject = {.name = "faulty",
                           .make = MakeFaulty<ResumesInOrder>};
  std::map<std::string, int> lines;
  for (std::uint64_t number = 0, failed = 0; failed < 20; ++number) {
    const History history = MakeHistory(1, number, {}, 60);
    if (!RunHistory(history, subject).failure) continue;
    ++failed;
    ++lines[ToText(Shrink(history, subject))];
  }
  EXPECT_GE(lines["kvt1 cells=2 | put 0*2r | ask 0@0"], 18)
      << testing::PrintToString(lines);
}

// Clears all sequences that share a token with the cleared sequence.
class ClearsSharers : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    const bool clears = begin == 0 && end == kOpenEnd;
    std::vector<CellEntry> cells;
    if (clears) ListCells(cells);
    std::set<int> held;
    for (const CellEntry& entry : cells) {
      if (entry.sequence == seq) held.insert(entry.cell);
    }
    for (const CellEntry& entry : cells) {
      if (held.contains(entry.cell)) {
        EXPECT_TRUE(ForwardingCache::Remove(entry.sequence, 0, end).ok());
      }
    }
    return ForwardingCache::Remove(seq, begin, end);
  }
};

// Returns the shortest lines for a faulty backend that accepts legal clients
// only, and how often each line was found.
std::map<std::string, int> LinesOfLegalClients(int histories) {
  Subject subject;
  subject.name = "faulty";
  subject.make_of = [](const Setup& setup) -> Result<std::unique_ptr<Cache>> {
    return MakeFaulty<ClearsSharers>(setup.spec);
  };
  subject.tried_outside_of_life = false;
  subject.level = Level::kVisibility;
  subject.abilities.kinds = KVTWIN_HAS_CAUSAL | KVTWIN_HAS_SWA;
  subject.abilities.can &=
      ~std::uint32_t{KVTWIN_CAN_ANY_ORDER | KVTWIN_CAN_REFUSE_MISUSE};
  std::map<std::string, int> lines;
  for (std::uint64_t number = 0; histories > 0; ++number) {
    History history = MakeHistory(1, number, {}, 60);
    subject.abilities.Fit(history.setup);
    if (!RunHistory(history, subject).failure) continue;
    --histories;
    ++lines[ToText(Shrink(history, subject))];
  }
  return lines;
}

TEST(Shrink, GivesOneLineOfLegalClientsWhereNoStepLeadsToIt) {
  std::map<std::string, int> lines = LinesOfLegalClients(10);
  // In some histories, an operation clears the sequence: another line.
  EXPECT_GE(lines["kvt1 cap=2 legal=1 | put 0*2 | copy 0>1:1 | put 0*1 1*1"], 6)
      << testing::PrintToString(lines);
}

// In a wrapper, SetLayer sets the layer of the active cache only.
class TellsTheActiveCache : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Status SetLayer(int layer) override {
    Status status = ForwardingCache::SetLayer(layer);
    if (status.ok()) layers_[active_] = layer;
    return status;
  }
  Status SetLayerType(int type) override {
    Status status = ForwardingCache::SetLayerType(type);
    return status.ok() ? Become(type) : status;
  }
  Status StartForward(const Batch& batch, bool reserve) override {
    Status status = ForwardingCache::StartForward(batch, reserve);
    return status.ok() ? Become(0) : status;
  }

 private:
  Status Become(int type) {
    active_ = type;
    return ForwardingCache::SetLayer(layers_[type]);
  }

  int active_ = 0;
  std::map<int, int> layers_;
};

TEST(Shrink, GivesOneLineOfCallsInAnyOrder) {
  const Subject subject = {.name = "faulty",
                           .make = MakeFaulty<TellsTheActiveCache>,
                           .tried_outside_of_life = false};
  std::map<std::string, int> lines;
  for (std::uint64_t number = 0, failed = 0; failed < 8; ++number) {
    const History history =
        MakeHistory(2, number, Kind::kWrapper, 60, 0, /*rarities=*/true);
    if (!RunHistory(history, subject).failure) continue;
    ++failed;
    ++lines[ToText(Shrink(history, subject, Kind::kWrapper))];
  }
  const std::map<std::string, int> want = {
      {"kvt1 kind=wrapper caches=causal/causal cells=1 layers=2 | put 0*1 | "
       "type 0 | read",
       8}};
  EXPECT_EQ(lines, want);
}

// Shrinks a history that fails if `wrong`.
std::string ShrunkIf(const std::string& line,
                     const std::function<bool(const History&)>& wrong) {
  const Rerun rerun = [&](const History& history) -> std::optional<Failure> {
    if (history.ops.empty() || !wrong(history)) return std::nullopt;
    Failure failure = MakeFailure("subject: rows", "wrong");
    failure.step = history.ops.size() - 1;
    return failure;
  };
  return ToText(Shrink(*ParseHistory("kvt1 " + line), rerun));
}

TEST(Shrink, NarrowsWindowsAndChunks) {
  EXPECT_EQ(ShrunkIf("kind=swa window=514 cells=4 | put 0*3",
                     [](const History& history) {
                       return history.setup.spec.window.value_or(0) > 40;
                     }),
            "kvt1 kind=swa window=41 cells=1 | ask 0@0");
  EXPECT_EQ(ShrunkIf("kind=chunked chunk=50 cells=4 | put 0*3",
                     [](const History& history) {
                       return history.setup.spec.chunk > 12;
                     }),
            "kvt1 kind=chunked chunk=13 cells=1 | ask 0@0");
  // With several sequences, a memory may be less than the window.
  EXPECT_EQ(ShrunkIf("kind=swa_mem window=50 memory=2 seqs=2 cap=4 | put 0*3",
                     [](const History& history) {
                       return history.setup.spec.kind == Kind::kSwaMem &&
                              history.setup.init.max_sequences == 2 &&
                              history.setup.spec.window.value_or(0) > 5;
                     }),
            "kvt1 kind=swa_mem window=6 memory=0 cap=1 | ask 0@0");
}

TEST(Shrink, LowersTheNumberOfSequences) {
  EXPECT_EQ(ShrunkIf("seqs=17 cap=2 legal=1 | put 0*1",
                     [](const History& history) {
                       const auto& setup = history.setup;
                       return setup.legal && setup.init.max_sequences >= 5 &&
                              !history.ops.empty();
                     }),
            "kvt1 seqs=5 cap=1 legal=1 | ask 0@0");
}

TEST(Shrink, LowersTheNumberOfLayers) {
  for (const int least : {2, 10, 17, 65}) {
    EXPECT_EQ(ShrunkIf("cap=2 layers=65 | put 0*1",
                       [&](const History& history) {
                         return history.setup.layers >= least &&
                                !history.ops.empty();
                       }),
              fmt::format("kvt1 cells=1 layers={} | ask 0@0", least));
  }
}

// A position in a later operation follows the tokens before it.
TEST(Shrink, LeavesOutTokensBeforeAPosition) {
  const auto wrong = [](const History& history) {
    const auto& ops = history.ops;
    const auto one = [](const Op& op) {
      return op.kind == OpKind::kPut && op.segments.size() == 1 &&
             op.segments[0].count == 1;
    };
    const auto puts = std::ranges::count_if(ops, one);
    return puts > 8 && puts + 1 == std::ssize(ops) &&
           ops.back().kind == OpKind::kDrop && ops.back().open &&
           ops.back().begin == RelativePos{false, AsInt(puts) - 1};
  };
  std::string begin = "cap=16 ";
  for (int i = 0; i < 12; ++i) begin += "| put 0*1 ";
  std::string least = "kvt1 cells=1 ";
  for (int i = 0; i < 9; ++i) least += "| put 0*1 ";
  EXPECT_EQ(ShrunkIf(begin + "| drop 0:11-", wrong), least + "| drop 0:8-");
}

// A legal client takes the id of a sequence modulo max_sequences.
TEST(Shrink, NamesSequencesBelowMaxSequences) {
  const auto wrong = [](const History& history) {
    const auto& ops = history.ops;
    const auto puts = [&](std::size_t at, int seq) {
      return ops[at].segments.size() == 1 && ops[at].segments[0].seq % 4 == seq;
    };
    return history.setup.legal && history.setup.init.max_sequences == 4 &&
           ops.size() == 3 && puts(0, 0) && puts(1, 3) && puts(2, 1);
  };
  EXPECT_EQ(
      ShrunkIf("seqs=4 cap=8 legal=1 | put 4*2 | put 23*1 | put 5*1", wrong),
      "kvt1 seqs=4 cap=1 legal=1 | put 0*1 | put 3*1 | put 1*1");
}

// The V rows of a later batch are lost if it fills the 65th cell.
class LosesRowsAt65 : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Status StartForward(const Batch& batch, bool reserve) override {
    const std::size_t before = HeldCells(*cache_).size();
    Status status = cache_->StartForward(batch, reserve);
    loses_ = before > 0 && before <= 64 && HeldCells(*cache_).size() > 64;
    return status;
  }
  Status Put(const TensorView& key, const TensorView& value) override {
    DenseTensor lost = CopyOf(value, value.dtype);
    if (loses_) std::ranges::fill(lost.bytes, std::byte{0});
    return cache_->Put(key, lost.view());
  }

 private:
  bool loses_ = false;
};

TEST(Shrink, FillsCellsAtOnce) {
  Subject subject = {.name = "faulty"};
  subject.level = Level::kVisibility;
  subject.make_of = [](const auto& setup) {
    return MakeFaulty<LosesRowsAt65>(setup.spec);
  };
  subject.abilities.can &=
      ~std::uint32_t{KVTWIN_CAN_ANY_ORDER | KVTWIN_CAN_REFUSE_MISUSE};
  std::string line = "kvt1 seqs=3 cap=38 legal=1";
  for (int i = 0; i < 30; ++i) line += " | put 0*1 1*1 2*1";
  const History history = *ParseHistory(line);
  ASSERT_TRUE(RunHistory(history, subject).failure);
  const History shrunk = Shrink(history, subject);
  EXPECT_EQ(shrunk.ops.size(), 2U) << ToText(shrunk);
}

// The commit must choose the last of the siblings in each smaller history, too.
TEST(Shrink, LeavesOutAPassOfDraftsBeforeTheCommittedDraft) {
  EXPECT_EQ(ShrunkIf("cells=8 | put 0*1:-1 | put 0*2:-1,-1 | commit 0:2 | "
                     "put 0*1",
                     [](const History& history) {
                       int siblings = 0;
                       for (const Op& op : history.ops) {
                         if (op.segments.size() > 1) return false;
                         if (!op.path.empty()) {
                           return siblings > 1 && op.path[0] + 1 == siblings;
                         }
                         for (const Segment& one : op.segments) {
                           siblings +=
                               AsInt(std::ranges::count(one.parents, -1));
                         }
                       }
                       return false;
                     }),
            "kvt1 cells=1 | put 0*1:-1,-1 | commit 0:1");
}

TEST(Shrink, LeavesOutDraftsBelowTheCommittedDraft) {
  EXPECT_EQ(ShrunkIf("cells=8 | put 0*3:-1,-1,-1 | commit 0:2 | put 0*1",
                     [](const History& history) {
                       if (history.ops.size() != 3) return false;
                       const auto& drafts = history.ops[0].segments;
                       const auto& path = history.ops[1].path;
                       return drafts.size() == 1 && !path.empty() &&
                              drafts[0].parents.size() > 1 &&
                              path[0] + 1 == Size(drafts[0].parents);
                     }),
            "kvt1 cells=1 | put 0*1:-1,-1 | commit 0:1 | ask 0@0");
}

}  // namespace
}  // namespace kvtwin::props
