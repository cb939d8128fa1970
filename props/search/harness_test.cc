// Tests the harness: backends with bugs on purpose must be found, and the bugs
// shrunk to a few operations.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <thread>
#include <utility>

#include "core/dialects/profiles.h"
#include "props/base/forwarding_cache.h"
#include "props/base/program.h"
#include "props/history/generate.h"
#include "props/laws/laws.h"
#include "props/paged/paged_client.h"
#include "props/paged/paged_runner.h"
#include "props/report/page.h"
#include "props/search/explain.h"
#include "props/search/fuzz.h"
#include "props/shrink/shrink.h"
#include "props/testing/pools.h"

namespace kvtwin::props {
namespace {

// The reference twin, except for the calls that a test overrides.
class Faulty : public ForwardingCache {
 public:
  explicit Faulty(const CacheSpec& spec)
      : ForwardingCache(*MakeCache(spec, "reference")) {}
};

// Seed 004's bug: a copy of a sequence to itself erases it.
class SelfCopyErases : public Faulty {
 public:
  using Faulty::Faulty;
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    return cache_->CopyPrefix(src, dst, src == dst ? 0 : len);
  }
};

class KeepsTheLastRemoved : public Faulty {
 public:
  using Faulty::Faulty;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    const bool later = end == kOpenEnd && begin > 0;
    return cache_->Remove(seq, begin + (later ? 1 : 0), end);
  }
};

class ForgetsExceptions : public Faulty {
 public:
  using Faulty::Faulty;
  Status SetCausal(std::span<const int> except) override {
    Status status = cache_->SetCausal(except);
    return status.ok() ? cache_->SetCausal({}) : status;
  }
};

class ResumesTooFar : public Faulty {
 public:
  using Faulty::Faulty;
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    const Result<bool> can = cache_->CanResume(seq, pos);
    return can.ok() && pos > 0 ? cache_->CanResume(seq, pos - 1) : can;
  }
};

// Behaves like a cache without snapshots.
class HasNoSnapshots : public Faulty {
 public:
  using Faulty::Faulty;
  // NOLINTBEGIN(bugprone-parent-virtual-call): the interface's own are meant.
  Status SnapshotTo(CacheState& state) const override {
    return Cache::SnapshotTo(state);
  }
  Status Restore(const CacheState& state) override {
    return Cache::Restore(state);
  }
  // NOLINTEND(bugprone-parent-virtual-call)
};

class AcceptsAnything : public Faulty {
 public:
  using Faulty::Faulty;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    return begin > end ? Status() : cache_->Remove(seq, begin, end);
  }
};

class ReserveStores : public Faulty {
 public:
  using Faulty::Faulty;
  Status StartForward(const Batch& batch, bool reserve) override {
    if (reserve && batch.positions.size() > 1) reserve = false;
    return cache_->StartForward(batch, reserve);
  }
};

template <class Backend>
void IsFoundAndShrunk(std::size_t most_ops) {
  const Subject subject = {
      .name = "faulty",
      .make = [](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
        return std::unique_ptr<Cache>(std::make_unique<Backend>(spec));
      }};
  FuzzOptions options;
  options.operations = 300000;
  const FuzzResult result = Fuzz(options, subject);
  ASSERT_TRUE(result.failure.has_value());
  const History& shrunk = result.shrunk;
  EXPECT_LE(shrunk.ops.size(), most_ops) << ToText(shrunk);
  // The printed line reproduces the failure.
  const Result<History> read = ParseHistory(ToText(shrunk));
  ASSERT_TRUE(read.ok());
  const RunResult again = RunHistory(*read, subject);
  ASSERT_TRUE(again.failure.has_value());
  EXPECT_EQ(again.failure->check, result.failure->check);
  const std::string text = FailureText(shrunk, *again.failure, subject);
  EXPECT_NE(text.find("kvtwin run 'kvt1"), std::string::npos) << text;
}

TEST(Harness, FindsASelfCopyThatErases) { IsFoundAndShrunk<SelfCopyErases>(3); }
TEST(Harness, FindsARemoveThatKeepsAToken) {
  IsFoundAndShrunk<KeepsTheLastRemoved>(3);
}
TEST(Harness, FindsForgottenExceptions) {
  IsFoundAndShrunk<ForgetsExceptions>(3);
}
TEST(Harness, FindsADishonestResume) { IsFoundAndShrunk<ResumesTooFar>(4); }
TEST(Harness, FindsAMisuseThatIsAccepted) {
  IsFoundAndShrunk<AcceptsAnything>(2);
}
TEST(Harness, FindsAReservationThatStores) {
  IsFoundAndShrunk<ReserveStores>(2);
}

// Loses all tokens when a batch is cache_full.
class ForgetsWhenFull : public Faulty {
 public:
  using Faulty::Faulty;
  Status StartForward(const Batch& batch, bool reserve) override {
    Status status = cache_->StartForward(batch, reserve);
    std::vector<CellEntry> cells;
    if (status.code() == StatusCode::kCacheFull) cache_->ListCells(cells);
    for (const CellEntry& entry : cells) {
      EXPECT_TRUE(cache_->Remove(entry.sequence, 0, kOpenEnd).ok());
    }
    return status;
  }
};

// A full cache with a window has lost only the tokens that it evicts (S12).
TEST(Harness, FindsAWindowThatForgetsWhenItIsFull) {
  Subject subject = TwinSubject("reference", Level::kVisibility);
  subject.make_of = [](const auto& setup) -> Result<std::unique_ptr<Cache>> {
    return std::unique_ptr<Cache>(
        std::make_unique<ForgetsWhenFull>(setup.spec));
  };
  FuzzOptions options;
  options.kind = Kind::kSwa;
  options.operations = 100000;
  const FuzzResult result = Fuzz(options, subject);
  ASSERT_TRUE(result.failure.has_value());
  EXPECT_LE(result.shrunk.ops.size(), 4U) << ToText(result.shrunk);
}

// Evicts nothing before it answers that it is full.
class EvictsNothingWhenFull : public Faulty {
 public:
  using Faulty::Faulty;
  Status StartForward(const Batch& batch, bool reserve) override {
    CacheState before;
    const bool kept = cache_->SnapshotTo(before).ok();
    Status status = cache_->StartForward(batch, reserve);
    if (kept && status.code() == StatusCode::kCacheFull) {
      ++times_full;
      EXPECT_TRUE(cache_->Restore(before).ok());
      EXPECT_TRUE(!type_ || cache_->SetLayerType(*type_).ok());
    }
    return status;
  }
  Status SetLayerType(int type) override {
    Status status = cache_->SetLayerType(type);
    if (status.ok()) type_ = type;
    return status;
  }
  static inline int times_full = 0;

 private:
  std::optional<int> type_;
};

// A full cache may have evicted all, or nothing (S12), also if its masks have
// rows for the batch only.
TEST(Harness, AFullCacheMayHaveEvicted) {
  for (const char* profile : {"", "ollama-0.15"}) {
    for (const bool evicts : {false, true}) {
      Subject subject = TwinSubject("reference", Level::kVisibility);
      subject.mask_rows_too = false;
      if (*profile != 0) subject.rules = FindProfile(profile)->rules;
      const auto twin = subject.make_of;
      subject.make_of =
          [&](const auto& setup) -> Result<std::unique_ptr<Cache>> {
        if (evicts) return twin(setup);
        return std::unique_ptr<Cache>(
            std::make_unique<EvictsNothingWhenFull>(setup.spec));
      };
      for (const Kind kind : {Kind::kSwa, Kind::kSwaMem, Kind::kWrapper}) {
        EvictsNothingWhenFull::times_full = 0;
        FuzzOptions options;
        options.kind = kind;
        options.operations = 30000;
        const FuzzResult result = Fuzz(options, subject);
        EXPECT_FALSE(result.failure) << result.failure->text << "\n"
                                     << ToText(result.shrunk);
        EXPECT_TRUE(evicts || EvictsNothingWhenFull::times_full > 10);
      }
    }
  }
}

// Gives one wrong answer in its life.
class WrongOnce : public Faulty {
 public:
  using Faulty::Faulty;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    std::vector<CellEntry> cells;
    cache_->ListCells(cells);
    const bool shows =
        std::any_of(cells.begin(), cells.end(), [&](const CellEntry& entry) {
          return entry.sequence == seq && entry.position >= begin;
        });
    if (expected && shows && end == kOpenEnd) {
      expected = false;
      return {};
    }
    return cache_->Remove(seq, begin, end);
  }
  static inline bool expected = true;
};

TEST(Harness, FindsAFailureThatHappensOnce) {
  FuzzOptions options;
  options.operations = 100000;
  const Subject subject = {
      .name = "faulty",
      .make = [](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
        return std::unique_ptr<Cache>(std::make_unique<WrongOnce>(spec));
      }};
  const FuzzResult result = Fuzz(options, subject);
  ASSERT_TRUE(result.failure.has_value());
  EXPECT_EQ(result.failure->check, "harness: not the same twice");
  EXPECT_EQ(result.failure->bucket, "faulty-harness-not-the-same-twice");
}

// Returns a subject that runs elsewhere, as a backend does: histories of at
// least `ops` operations fail, and shorter histories do not.
Subject FailsFrom(std::size_t ops, std::string check, int& runs) {
  Subject subject;
  subject.name = "elsewhere";
  subject.run = [=, &runs](const History& history, const RunOptions&) {
    ++runs;
    RunResult result;
    result.ran = true;
    result.operations = std::ssize(history.ops);
    if (history.ops.size() >= ops) {
      result.failure = {.step = ops - 1, .check = check, .text = "so it is"};
    }
    return result;
  };
  return subject;
}

// A cache that writes past the end of a buffer may answer at random.
TEST(Harness, ReportsTheCrashOfABackendThatVaries) {
  int runs = 0;
  Subject subject = FailsFrom(3, "backend: crash", runs);
  subject.run = [&, crashes = subject.run](const History& history,
                                           const RunOptions& run_options) {
    RunResult result = crashes(history, run_options);
    if (runs == 1 && result.failure) {
      result.failure->check = "subject: rows";
      result.digest = 1;
    }
    return result;
  };
  FuzzOptions options;
  options.operations = 100000;
  const FuzzResult result = Fuzz(options, subject);
  ASSERT_TRUE(result.failure.has_value());
  EXPECT_EQ(result.failure->check, "backend: crash");
  EXPECT_EQ(result.failure->operations, 3U);
  // A known crash does not hide the other failure.
  runs = 0;
  options.known = {"backend: crash"};
  const FuzzResult known = Fuzz(options, subject);
  ASSERT_TRUE(known.failure.has_value());
  EXPECT_EQ(known.failure->found_check, "subject: rows");
}

// Shrinking has a shorter timeout for a call, so that it may mistake a slow
// call for one that hangs.
TEST(Harness, ReportsAHangOnlyForACallThatHangs) {
  int patient = 0;
  int hurried_runs = 0;
  Subject subject = FailsFrom(3, "backend: hang", patient);
  const auto or_hurried = [&](const Subject& patiently) {
    return [&, run = patiently.run,
            hurried = FailsFrom(1, "backend: hang", hurried_runs).run](
               const History& history, const RunOptions& options) {
      return (options.known_to_hang ? hurried : run)(history, options);
    };
  };
  subject.run = or_hurried(subject);
  FuzzOptions options;
  options.operations = 1;
  const FuzzResult slow = Fuzz(options, subject);
  ASSERT_TRUE(slow.failure);
  EXPECT_EQ(slow.shrunk.ops.size(), 3U);
  EXPECT_TRUE(RunHistory(slow.shrunk, subject).failure);

  // A subject that still hangs when shrunk gets the long timeout only twice.
  subject = FailsFrom(1, "backend: hang", patient);
  subject.run = or_hurried(subject);
  patient = hurried_runs = 0;
  const FuzzResult hangs = Fuzz(options, subject);
  EXPECT_EQ(patient, 2);
  EXPECT_GT(hurried_runs, 2);
  options.known = {"backend: hang"};
  options.operations = 5000;
  EXPECT_GT(Fuzz(options, subject).known, 10);
  EXPECT_EQ(patient, 2);

  // The same for pools.
  Subject pools;
  pools.run_pool = [](const PagedHistory& history,
                      const PoolRunOptions& options) {
    RunResult result = {.ran = true};
    if (history.ops.size() >= (options.known_to_hang ? 1U : 3U)) {
      result.failure =
          MakeFailure("backend: hang", options.known_to_hang ? "0.2" : "1");
      result.failure->step = history.ops.size() - 1;
    }
    return result;
  };
  const PagedFuzzResult found = FuzzPools(1, 1, pools);
  EXPECT_EQ(TextOf(found.failure), "1");
  EXPECT_EQ(found.shrunk.ops.size(), 3U);
}

// How far a backend gets may vary from run to run.
TEST(Harness, ReportsAFailureThatDoesNotRepeat) {
  int runs = 0;
  Subject subject;
  subject.name = "elsewhere";
  subject.run = [&](const History& history, const RunOptions& options) {
    // Every other run has far fewer calls, and no failure.
    const std::size_t calls = ++runs % 2 == 0 ? 500 : 4;
    for (std::size_t i = 0; options.trace != nullptr && i < calls; ++i) {
      options.trace->steps.emplace_back().call = fmt::format("call {}", i);
    }
    RunResult result;
    result.ran = true;
    if (calls > 5) {
      result.failure = {
          .step = calls, .check = "backend: crash", .text = "it died"};
    }
    result.operations = std::ssize(history.ops);
    return result;
  };
  const History history = MakeHistory(1, 1, std::nullopt, 100);
  const Failure first = {.step = 90,
                         .check = "backend: crash",
                         .text = "it died at the end of 90"};
  for (runs = 0; runs < 6;) {
    const int before = runs;
    const Failure failure = Explain(history, first, subject, /*drawn=*/true);
    EXPECT_FALSE(failure.trace.empty());
    EXPECT_LE(std::ssize(failure.trace), Failure::kSteps);
    for (const std::string& text : {PageHtml(failure), failure.report}) {
      EXPECT_NE(text.find("it died at the end of 90"), std::string::npos);
      EXPECT_NE(text.find("It does not repeat: another run "),
                std::string::npos);
    }
    EXPECT_EQ(failure.report.find("<- then"), std::string::npos);
    const bool is_long = failure.report.find("call 5") != std::string::npos;
    const auto gap = failure.report.find(
        "call 39\n  ...  450 calls not shown\n  491 call 490");
    EXPECT_EQ(gap != std::string::npos, is_long) << failure.report;
    runs = before + 1;
  }
  // A failure that repeats is reported without a note.
  subject = FailsFrom(1, "backend: crash", runs);
  const std::string text = FailureText(
      history, {.step = 0, .check = "backend: crash", .text = "so it is"},
      subject);
  EXPECT_EQ(text.find("does not repeat"), std::string::npos);

  // The same for pools.
  Subject pools;
  runs = 0;
  pools.run_pool = [&](const PagedHistory&, const PoolRunOptions&) {
    RunResult result = {.ran = true};
    if (++runs <= 2) result.failure = MakeFailure("backend: crash", "once");
    return result;
  };
  const PagedFuzzResult once = FuzzPools(1, 1, pools);
  EXPECT_EQ(TextOf(once.failure), "once");
  EXPECT_EQ(once.failure->note,
            "It does not repeat: another run shows no difference.");
}

TEST(Explain, NamesTheHeadsOfAttention) {
  const History history = *ParseHistory("kvt1 dims=4,2,3 | put 0*1");
  const auto setup = [&](Level level) {
    return Explain(history, MakeFailure("subject: output", "wrong"),
                   TwinSubject("optimized", level))
        .setup;
  };
  const std::string text = setup(Level::kVisibility);
  EXPECT_EQ(setup(Level::kAttention),
            text + "; 4 query heads, 2 KV heads of 4 (K) and 3 (V) elements");
}

TEST(Harness, StopsShrinkingAfterItsTimeLimit) {
  int runs = 0;
  Subject subject = FailsFrom(5, "backend: crash", runs);
  const History history = MakeHistory(1, 1, std::nullopt, 100);
  EXPECT_EQ(Shrink(history, subject).ops.size(), 5U);
  const int all = runs;
  runs = 0;
  subject.shrink_seconds = 1e-9;
  EXPECT_TRUE(RunHistory(Shrink(history, subject), subject).failure);
  EXPECT_EQ(runs, 2);
  EXPECT_GT(all, 10);

  Subject pools;
  runs = 0;
  pools.run_pool = [&](const PagedHistory&, const PoolRunOptions&) {
    ++runs;
    return RunResult{.ran = true, .failure = PoolFailure("wrong")};
  };
  pools.shrink_seconds = 1e-9;
  FuzzPools(1, 1, pools);
  EXPECT_EQ(runs, 4);  // Found, again, shrunk, explained.
}

TEST(Harness, SkipsHistoriesAfterTheFirstFailure) {
  int runs = 0;
  Subject subject = FailsFrom(1000, "", runs);
  subject.run = [run = subject.run](const History& history,
                                    const RunOptions& options) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return run(history, options);
  };
  FuzzOptions options;
  options.seconds = 0.1;
  const FuzzResult late = Fuzz(options, subject);
  EXPECT_GE(late.histories, 1);
  EXPECT_LE(late.histories, 6);
  EXPECT_LE(late.ran, late.histories);

  // No history runs after the first that fails, which is run again, shrunk,
  // judged and explained.
  runs = 0;
  subject = FailsFrom(1, "backend: crash", runs);
  subject.shrink_seconds = 1e-9;
  EXPECT_EQ(Fuzz(options, subject).histories, 1);
  EXPECT_EQ(runs, 6);
}

// A share of the histories of a backend that declares all abilities is
// ordinary. Some begin with a long sequence, and a window or a chunk ends just
// before its last token.
TEST(Harness, DrawsOrdinaryAndLongHistoriesForBackendsThatDeclareAll) {
  std::map<std::string, int> counts;
  Subject subject;
  subject.level = Level::kVisibility;
  subject.abilities.can = ~0U;
  subject.run = [&](const History& history, const RunOptions& /*options*/) {
    const auto& setup = history.setup;
    const auto& ops = history.ops;
    const auto has = [&](const auto& test) {
      return std::ranges::any_of(ops, test);
    };
    const auto tokens = [](const Op& op) {
      return op.segments.empty() ? 0 : op.segments[0].count;
    };
    const bool finds =
        has([](const Op& op) { return op.kind == OpKind::kFind; });
    const bool drafts = has([](const Op& op) {
      return !op.segments.empty() && !op.segments[0].parents.empty();
    });
    const Kind kind = setup.spec.kind;
    const bool states = kind == Kind::kRecurrent || kind == Kind::kHybrid;
    const bool is_long =
        tokens(ops[0]) > 128 && tokens(ops[0]) < 2000 &&
        setup.rows.kv_heads == 1 &&
        has([](const Op& op) { return op.kind == OpKind::kDrop && !op.open; });
    counts["all"] += 1;
    counts["prompts"] += finds;
    counts["drafts"] += drafts;
    counts["both"] += finds && drafts;
    counts["neither"] += !finds && !drafts;
    counts["ordinary"] += !finds && !drafts && !states;
    counts["chunk"] += kind == Kind::kChunked && setup.spec.chunk > 128;
    counts["window"] += is_long && setup.spec.window.value_or(0) > 128;
    counts["512"] += is_long && tokens(ops[0]) > 512;
    counts["except"] += is_long && !ops[0].except.empty();
    counts["layers"] += is_long && setup.layers > 8;
    counts["ids"] += setup.id_step > 1;
    counts["far"] +=
        is_long && tokens(ops[1]) == 1 && ops[1].segments[0].delta > 2048;
    EXPECT_TRUE(!is_long || ParseHistory(ToText(history)).ok());
    return RunResult{.ran = true, .operations = std::ssize(ops)};
  };
  FuzzOptions options;
  options.operations = 2'000'000;
  EXPECT_FALSE(Fuzz(options, subject).failure);
  const int all = counts["all"];
  EXPECT_GT(all, 10'000);
  for (const auto& [name, share] :
       {std::pair("prompts", 4), std::pair("drafts", 4), std::pair("both", 8),
        std::pair("neither", 4), std::pair("ordinary", 7)}) {
    EXPECT_GT(counts[name] * share, all) << name;
  }
  for (const char* const name :
       {"chunk", "window", "512", "except", "layers", "far", "ids"}) {
    EXPECT_GT(counts[name], 2) << name;
  }
}

TEST(Harness, NamesTheProgramAsItWasCalled) {
  const Subject twin = TwinSubject("optimized");
  EXPECT_EQ(RerunCommand(History(), twin).find("kvtwin run '"), 0U);
  SetProgram("./a b/kvtwin");
  EXPECT_EQ(RerunCommand(History(), twin).find("'./a b/kvtwin' run '"), 0U);
  EXPECT_EQ(RerunCommand(PagedHistory(), TwinSubject("optimized"))
                .find("'./a b/kvtwin' run '"),
            0U);
  EXPECT_EQ(LawCommand(Laws()[0], {}, twin).find("'./a b/kvtwin' laws "), 0U);
  SetProgram("kvtwin");
}

TEST(Harness, AcceptsCachesWithoutSnapshots) {
  const Subject subject = {
      .name = "right",
      .make = [](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
        return std::unique_ptr<Cache>(std::make_unique<HasNoSnapshots>(spec));
      }};
  const History history =
      *ParseHistory("kvt1 cells=4 | put 0*2 | reload | get");
  EXPECT_FALSE(RunHistory(history, subject).failure.has_value());
  const auto made = subject.make({});
  EXPECT_EQ((*made)->Restore({}).code(), StatusCode::kNotSupported);
}

TEST(Harness, RunsOneHistoryInTwentyTwice) {
  FuzzOptions options;
  options.operations = 100000;
  const FuzzResult result = Fuzz(options, TwinSubject("optimized"));
  EXPECT_FALSE(result.failure.has_value());
  EXPECT_GE(result.repeated * 20, result.histories);
}

TEST(Harness, GivesTheSameDigestOnAnyNumberOfThreads) {
  FuzzOptions options;
  options.operations = 30000;
  options.seed = 9;
  const FuzzResult one = Fuzz(options, TwinSubject("optimized"));
  options.threads = 3;
  const FuzzResult three = Fuzz(options, TwinSubject("optimized"));
  EXPECT_EQ(one.digest, three.digest);
  EXPECT_EQ(one.operations, three.operations);
  EXPECT_GE(one.operations, options.operations);
  options.seed = 10;
  EXPECT_NE(Fuzz(options, TwinSubject("optimized")).digest, one.digest);
}

// Both twins refuse sizes of 0, and the driver expects that.
TEST(Harness, ExpectsThatASizeOfZeroIsRefused) {
  for (const std::string size : {"cap", "seqs", "batch", "pad"}) {
    const auto history = ParseHistory("kvt1 " + size + "=0 | put 0*1");
    ASSERT_TRUE(history.ok()) << history.status().ToString();
    const RunResult result = RunHistory(*history, TwinSubject("optimized"));
    EXPECT_FALSE(result.ran) << size;
    EXPECT_FALSE(result.failure) << result.failure->text;
  }
}

TEST(Harness, RefusesTextThatIsNotAHistory) {
  for (const std::string text :
       {"", "kvt2", "kvt1 kind=tree", "kvt1 | put", "kvt1 | put 0*0",
        "kvt1 | put 0*99999999999", "kvt1 | drop 0", "kvt1 | copy 0>1",
        "kvt1 cap=-1", "kvt1 cap=99999999", "kvt1 layers=0",
        "kvt1 dims=4096,4096,1", "kvt1 dims=1,2", "kvt1 | fly",
        "kvt1 | put -1*1"}) {
    EXPECT_FALSE(ParseHistory(text).ok()) << text;
  }
}

TEST(Harness, ReadsHandWrittenLines) {
  const Result<History> history =
      ParseHistory("kvt1  cap=4 |put 0*free  1*2@-1r|  drop 0:~1-");
  ASSERT_TRUE(history.ok()) << history.status().ToString();
  EXPECT_EQ(ToText(*history), "kvt1 cap=4 | put 0*free+0 1*2@-1r | drop 0:~1-");
}

}  // namespace
}  // namespace kvtwin::props
