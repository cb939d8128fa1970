// Tests that the explorer ends, is deterministic, and finds faults.

#include "props/search/explore.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "props/base/forwarding_cache.h"
#include "props/base/hash.h"
#include "props/paged/paged_runner.h"
#include "props/search/explore_step.h"
#include "props/testing/pools.h"
#include "props/testing/tampered_cache.h"

namespace kvtwin::props {
namespace {

constexpr ExploreSize kSmall = {.cells = 3, .sequences = 2, .positions = 2};

std::unique_ptr<Explorer> MakeExplorer(const ExploreCase& what,
                                       const Subject& subject) {
  auto explorer = Explorer::Make(kSmall, what, subject);
  EXPECT_TRUE(explorer.ok());
  return std::move(*explorer);
}

ExploreResult Explored(Explorer& explorer, int threads) {
  return explorer.Run(threads, [](const ExploreResult&) { return false; });
}

std::string Saved(const Explorer& explorer) {
  std::ostringstream out;
  explorer.Save(out);
  return out.str();
}

TEST(Explorer, ReachesTheFixedPointOfEveryKind) {
  std::set<Kind> kinds;
  for (const ExploreCase& what : ExploreCases(kSmall)) {
    const auto explorer = MakeExplorer(what, TwinSubject("optimized"));
    const ExploreResult result = Explored(*explorer, 1);
    EXPECT_TRUE(result.fixed_point) << what.name;
    EXPECT_EQ(result.differences, 0) << what.name;
    kinds.insert(what.setup.spec.kind);
  }
  EXPECT_EQ(kinds, (std::set{Kind::kCausal, Kind::kSwa, Kind::kSwaMem,
                             Kind::kChunked}));
}

// A toy cache of three cells with scatter placement: position and owners (bits)
// of each cell; a cell without an owner is free.
using Toy = std::array<std::pair<int, unsigned>, 3>;

bool ToyPut(Toy& toy, int position, int seq) {
  for (auto& [at, owners] : toy) {
    if (owners != 0) continue;
    at = position;
    owners = 1U << seq;
    return true;
  }
  return false;
}

bool ToyRemove(Toy& toy, int seq, int begin, int end, bool open) {
  for (auto& [at, owners] : toy) {
    if ((owners >> seq & 1U) == 0 || at < begin) continue;
    if (open || at < end) {
      owners &= ~(1U << seq);
    } else if (owners == 1U << seq) {
      at -= end - begin;
    } else {
      return false;
    }
  }
  return true;
}

void ToyCopy(Toy& toy, int src, int dst, int len) {
  for (auto& [at, owners] : toy) {
    const bool copied = (owners >> src & 1U) != 0 && at < len;
    owners &= ~(1U << dst);
    if (copied) owners |= 1U << dst;
  }
}

// Returns the smaller of the two namings of the sequences, with position 0 in
// free cells.
Toy ToyName(Toy toy) {
  Toy swapped;
  for (std::size_t i = 0; i < toy.size(); ++i) {
    auto& [at, owners] = toy[i];
    if (owners == 0) at = 0;
    swapped[i] = {at, (owners >> 1) | (owners & 1U) << 1};
  }
  return std::min(toy, swapped);
}

std::vector<Toy> ToyNext(const Toy& toy, int positions) {
  std::vector<Toy> next;
  for (int i = 0; i < 2 * positions; ++i) {
    Toy one = toy;
    if (!ToyPut(one, i / 2, i % 2)) break;
    next.push_back(one);
    for (int j = 0; j < 2 * positions; ++j) {
      Toy two = one;
      if (ToyPut(two, j / 2, j % 2)) next.push_back(two);
    }
  }
  for (int seq = 0; seq < 2; ++seq) {
    for (int begin = 0; begin <= positions; ++begin) {
      for (int end = begin; end <= positions + 1; ++end) {
        Toy removed = toy;
        const bool open = end > positions;
        if (ToyRemove(removed, seq, begin, end, open)) next.push_back(removed);
      }
      Toy copied = toy;
      ToyCopy(copied, seq, 1 - seq, begin);
      next.push_back(copied);
      copied = toy;
      ToyCopy(copied, seq, seq, begin);
      next.push_back(copied);
    }
  }
  return next;
}

TEST(Explorer, ReachesEveryStateOfAToyModel) {
  std::set<Toy> seen = {Toy{}};
  std::vector<Toy> queue = {Toy{}};
  for (std::size_t i = 0; i < queue.size(); ++i) {
    for (const Toy& next : ToyNext(queue[i], kSmall.positions)) {
      const Toy name = ToyName(next);
      if (seen.insert(name).second) queue.push_back(name);
    }
  }
  const ExploreCase what = ExploreCases(kSmall)[1];
  ASSERT_EQ(what.name, "causal place=scatter");
  const auto explorer = MakeExplorer(what, TwinSubject("optimized"));
  EXPECT_EQ(Explored(*explorer, 1).states, std::ssize(seen));
}

TEST(Explorer, GivesTheSameResultOnAnyNumberOfThreads) {
  for (const ExploreCase& what : ExploreCases(kSmall)) {
    const auto one = MakeExplorer(what, TwinSubject("optimized"));
    const auto three = MakeExplorer(what, TwinSubject("optimized"));
    Explored(*one, 1);
    Explored(*three, 3);
    EXPECT_EQ(Saved(*one), Saved(*three)) << what.name;
  }
}

TEST(Explorer, ContinuesFromASavedState) {
  const ExploreCase what = ExploreCases({.cells = 4}).front();
  const auto make = [&] {
    auto made = Explorer::Make({.cells = 4, .positions = 2}, what,
                               TwinSubject("optimized"));
    EXPECT_TRUE(made.ok());
    return std::move(*made);
  };
  const auto whole = make();
  Explored(*whole, 1);
  std::string saved = Saved(*make());
  int parts = 0;
  for (bool done = false; !done; ++parts) {
    const auto part = make();
    std::istringstream in(saved);
    ASSERT_TRUE(part->Load(in).ok());
    done = part->Run(1, [](const ExploreResult&) { return true; }).fixed_point;
    saved = Saved(*part);
  }
  EXPECT_GT(parts, 2);
  EXPECT_EQ(saved, Saved(*whole));
}

TEST(Explorer, RefusesForeignSavedStates) {
  const std::vector<ExploreCase> cases = ExploreCases(kSmall);
  const auto explorer = MakeExplorer(cases[0], TwinSubject("optimized"));
  Explored(*explorer, 1);
  const std::string saved = Saved(*explorer);
  const auto refused = [&](const ExploreCase& what, const std::string& text) {
    const auto other = MakeExplorer(what, TwinSubject("optimized"));
    const std::string before = Saved(*other);
    std::istringstream in(text);
    const Status status = other->Load(in);
    return !status.ok() && !status.message().empty() && Saved(*other) == before;
  };
  EXPECT_TRUE(refused(cases[1], saved));
  EXPECT_TRUE(refused(cases[0], ""));
  EXPECT_TRUE(refused(cases[0], saved.substr(0, saved.size() / 2)));
  EXPECT_FALSE(refused(cases[0], saved));
  // The file has another number of transitions and is otherwise valid.
  std::string fewer = saved;
  char& digit = fewer[fewer.find('\n', fewer.find('\n') + 1) - 3];
  ASSERT_TRUE(digit >= '0' && digit <= '9');
  digit = digit == '0' ? '1' : '0';
  EXPECT_TRUE(refused(cases[0], fewer));
  // An exploration of another twin is refused.
  const auto reference = MakeExplorer(cases[0], TwinSubject("reference"));
  Explored(*reference, 1);
  EXPECT_TRUE(refused(cases[0], Saved(*reference)));

  const std::size_t counts = saved.find('\n') + 1;
  const auto with_checksum = [](const std::string& text) {
    return text + fmt::format("checksum {:016x}\n",
                              HashBytes(text.data(), text.size(), 0));
  };
  EXPECT_FALSE(refused(
      cases[0], with_checksum(saved.substr(0, counts) + "0 1 0 0\n0 0 0\n")));
  for (const std::string wrong :
       {"2 1 0 0\n0 0 0\n", "0 2 0 0\n0 0 0\n99999999 0 0\n",
        "0 2 0 0\n0 0 0\n0 0 0\n", "0 2 0 0\n0 0 0\n1 7 0\n",
        "0 2 0 0\n0 0 0\n1 0 9999\n", "-1 1 0 0\n0 0 0\n", "x", "0 0 0 0\n"}) {
    const std::string text = saved.substr(0, counts) + wrong;
    EXPECT_TRUE(refused(cases[0], with_checksum(text))) << wrong;
  }
}

// Removes one position less if later tokens move down.
class KeepsOne : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    const bool middle = end != kOpenEnd && end > begin + 1;
    return cache_->Remove(seq, begin, middle ? end - 1 : end);
  }
};

TEST(Explorer, FindsARemoveThatKeepsAToken) {
  const Subject subject = {
      .name = "faulty",
      .make = [](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
        return std::unique_ptr<Cache>(
            std::make_unique<KeepsOne>(*MakeCache(spec, "reference")));
      }};
  const auto explorer = MakeExplorer(ExploreCases(kSmall)[0], subject);
  const ExploreResult result = Explored(*explorer, 2);
  EXPECT_GT(result.differences, 0);
  ASSERT_TRUE(result.failure.has_value());
  // The history reproduces the failure in its last operation.
  const RunResult run = RunHistory(result.history, subject);
  ASSERT_TRUE(run.failure.has_value()) << ToText(result.history);
  EXPECT_EQ(run.failure->step, result.history.ops.size() - 1);

  // The differences are saved, and count in the run that continues from there.
  const auto next = MakeExplorer(ExploreCases(kSmall)[0], subject);
  std::istringstream saved(Saved(*explorer));
  ASSERT_TRUE(next->Load(saved).ok());
  const ExploreResult after = Explored(*next, 1);
  EXPECT_GE(after.differences, result.differences);
  EXPECT_GE(after.transitions, result.transitions);
}

// Removes a range, but leaves the positions after it as they were.
class KeepsPositions : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    CacheState before;
    CacheState after;
    if (!cache_->SnapshotTo(before).ok()) return {};
    Status status = cache_->Remove(seq, begin, end);
    if (!status.ok() || !cache_->SnapshotTo(after).ok()) return status;
    for (CellEntry& entry : after.cells) {
      const auto at = std::ranges::find_if(before.cells, [&](auto& one) {
        return one.cell == entry.cell && one.sequence == entry.sequence;
      });
      entry.position = at->position;
    }
    return cache_->Restore(after);
  }
};

// Commits the first sibling, whichever was accepted.
class CommitsTheFirst final : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Status Commit(int seq, std::span<const int> path) override {
    const std::array<int, 1> first = {0};
    return ForwardingCache::Commit(
        seq, path.size() == 1 ? std::span<const int>(first) : path);
  }
};

// Keeps a rejected draft until the next commit.
class ForgetsToReject final : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Status Commit(int seq, std::span<const int> path) override {
    return path.empty() ? Status() : ForwardingCache::Commit(seq, path);
  }
};

template <class Fault>
Subject FaultyCommits() {
  return {.name = "faulty",
          .make = [](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
            return std::unique_ptr<Cache>(
                std::make_unique<Fault>(*MakeCache(spec)));
          }};
}

// Draws nothing at random: each fault is found in each kind of cache.
TEST(Explorer, FindsFaultsOfDrafts) {
  ExploreSize size = kSmall;
  size.drafts = true;
  std::set<std::string> names;
  for (const bool states : {false, true}) {
    for (const ExploreCase& what : ExploreCases(size, states)) {
      names.insert(what.name.substr(0, what.name.find(' ')));
      for (const Subject& subject : {FaultyCommits<CommitsTheFirst>(),
                                     FaultyCommits<ForgetsToReject>()}) {
        auto explorer = *Explorer::Make(size, what, subject);
        const ExploreResult result = explorer->Run(
            1, [](auto& so_far) { return so_far.differences > 0; });
        ASSERT_TRUE(result.failure.has_value()) << what.name;
        EXPECT_EQ(result.failure->party(), Party::kSubject);
        // The history that leads there fails, too.
        const RunResult run = RunHistory(result.history, subject);
        EXPECT_TRUE(run.failure) << ToText(result.history);
      }
    }
  }
  EXPECT_EQ(names, (std::set<std::string>{"causal", "chunked", "hybrid",
                                          "recurrent", "swa", "swa_mem"}));
}

TEST(Explorer, UsesAShiftFunctionThatTheCacheDeclares) {
  Subject subject = TwinSubject("reference");
  for (const auto& [shifts, name] :
       std::map<std::uint32_t, std::string>{{0b00001, "causal shift=none"},
                                            {0b00011, "causal shift=identity"},
                                            {0b00111, "causal shift=add"},
                                            {0b10011, "causal shift=rope"},
                                            {0b01111, "causal"},
                                            {~0U, "causal"}}) {
    ExploreCase what = ExploreCases(kSmall)[0];
    subject.abilities.shifts = shifts;
    ASSERT_TRUE(FitCase(subject.abilities, what));
    EXPECT_EQ(what.name, name);
    subject = TwinSubject("optimized");
    EXPECT_EQ(Explored(*MakeExplorer(what, subject), 1).differences, 0) << name;
    subject.make = [](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
      return std::unique_ptr<Cache>(
          std::make_unique<KeepsPositions>(*MakeCache(spec, "reference")));
    };
    const auto found = Explored(*MakeExplorer(what, subject), 1).differences;
    EXPECT_EQ(found > 0, shifts > 1) << name;
  }
  ExploreCase what = ExploreCases(kSmall)[0];
  subject.abilities.kinds = KVTWIN_HAS_SWA;
  EXPECT_FALSE(FitCase(subject.abilities, what));
}

// Every call that two sequences and three positions allow is made once.
TEST(Explorer, TriesEveryCall) {
  std::map<OpKind, std::set<std::string>> texts;
  std::size_t count = 0;
  for (const ExploreStep& step : AllSteps({.sequences = 2, .positions = 3})) {
    texts[step.kind].insert(ToText(step));
    ++count;
  }
  // Copies to any sequence, including the source; len from 0 to 3.
  EXPECT_EQ(texts[OpKind::kCopy].size(), 2U * 2 * 4);
  // 10 ranges from 0 to 3, including empty ranges, and 4 with an open end.
  EXPECT_EQ(texts[OpKind::kDrop].size(), 2U * (10 + 4));
  // Positions up to one past the next position of a full sequence.
  EXPECT_EQ(texts[OpKind::kAsk].size(), 2U * 5);
  // One of 6 tokens, or an ordered pair, perhaps of equal tokens; when
  // reserving, one.
  EXPECT_EQ(texts[OpKind::kPut].size(), 6U + 6 * 6 + 6);
  EXPECT_EQ(texts.size(), 4U);
  EXPECT_EQ(count, 16U + 28 + 10 + 48);
}

// For each part of an answer, a cache that is wrong in this part only.
TEST(Explorer, ComparesEachPartOfAnAnswer) {
  const auto changes = [](DenseTensor OwnedView::*tensor) {
    Fault fault;
    fault.view = [=](OwnedView& view) {
      (view.*tensor).bytes.back() ^= std::byte{1};
    };
    return fault;
  };
  std::vector<Fault> faults = {Fault(), changes(&OwnedView::key),
                               changes(&OwnedView::value),
                               changes(&OwnedView::mask)};
  faults.emplace_back().batch = [](std::vector<int>& cells) { ++cells[0]; };
  faults.emplace_back().resume = [](bool yes) { return !yes; };
  for (std::size_t i = 0; i < faults.size(); ++i) {
    Subject subject;
    subject.name = "faulty";
    subject.make =
        [&](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
      return std::unique_ptr<Cache>(std::make_unique<TamperedCache>(
          *MakeCache(spec, "reference"), faults[i]));
    };
    const auto explorer = MakeExplorer(ExploreCases(kSmall)[0], subject);
    EXPECT_EQ(Explored(*explorer, 2).differences > 0, i > 0) << i;
  }
}

// The number of tokens of a batch, and the tokens that SetCausal excepts, as
// bits.
struct ExceptedSet {
  std::size_t tokens = 0;
  unsigned excepted = 0;
};

// Shows a wrong mask for one set of excepted tokens.
class WrongForOneSet : public ForwardingCache {
 public:
  WrongForOneSet(std::unique_ptr<Cache> cache, ExceptedSet wrong)
      : ForwardingCache(std::move(cache)), wrong_(wrong) {}
  Status StartForward(const Batch& batch, bool reserve) override {
    now_ = {batch.positions.size(), 0};
    return cache_->StartForward(batch, reserve);
  }
  Status SetCausal(std::span<const int> except) override {
    now_.excepted = 0;
    for (const int i : except) now_.excepted |= 1U << i;
    return cache_->SetCausal(except);
  }
  Result<KvView> Get() override {
    Result<KvView> view = cache_->Get();
    const bool wrong =
        now_.tokens == wrong_.tokens && now_.excepted == wrong_.excepted;
    if (!view.ok() || !wrong) return view;
    mask_ = CopyOf(view->mask, view->mask.dtype);
    mask_.bytes.back() ^= std::byte{1};
    view->mask = mask_.view();
    return view;
  }

 private:
  const ExceptedSet wrong_;
  ExceptedSet now_;
  DenseTensor mask_;
};

TEST(Explorer, TriesEachSetOfExceptedTokens) {
  for (const std::size_t tokens : {1U, 2U}) {
    for (unsigned excepted = 0; excepted < 1U << tokens; ++excepted) {
      Subject subject;
      subject.name = "faulty";
      subject.make =
          [&](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
        return std::unique_ptr<Cache>(std::make_unique<WrongForOneSet>(
            *MakeCache(spec, "reference"), ExceptedSet{tokens, excepted}));
      };
      const auto explorer = MakeExplorer(ExploreCases(kSmall)[0], subject);
      EXPECT_GT(Explored(*explorer, 2).differences, 0)
          << tokens << " tokens, set " << excepted;
    }
  }
}

// The pool explorer's operations make each call with an effect in two steps.
TEST(Explorer, TriesEveryCallOfPools) {
  std::string calls;
  Subject subject;
  subject.run_pool = [&](const PagedHistory& history,
                         const PoolRunOptions& options) {
    std::ostringstream out;
    EXPECT_TRUE(WritePagedRecording(history, "optimized", out).ok());
    calls += out.str();
    return RunPaged(history, options.counts);
  };
  const PagedFuzzResult result = ExplorePaged(2, {}, subject);
  EXPECT_EQ(result.histories, 19 * 19);
  EXPECT_EQ(TextOf(result.failure), "");
  for (const char* call :
       {R"("op":"open","prompt":\[[0-9,]*\],"len":2,)",
        R"("op":"open","prompt":\[[0-9,]*\],"salt":"[^"]*","len":0)",
        R"("op":"fork","seq":0,"len":1)", R"("op":"fork","seq":0,"len":2)",
        R"("op":"fork","seq":1,"len":[1-9])",
        R"("op":"append","seq":0,"layer":0,"start":[3-9])",
        R"("op":"append","seq":1)", R"("result":"cache_full")",
        R"("op":"commit","seq":0,"tokens":\[[0-9,]+\])",
        R"("op":"commit","seq":0,"new_tokens":[1-9])",
        R"("op":"commit","seq":1)", R"("op":"truncate","seq":0,"len":1)",
        R"("op":"truncate","seq":1,"len":2)", R"("op":"free","seq":1)"}) {
    EXPECT_TRUE(std::regex_search(calls, std::regex(call))) << call;
  }
}

// A cache that lacks most operations is asked for none of them, here or
// somewhere else, with the same result.
TEST(Explore, CallsOnlyDeclaredOperations) {
  const ExploreSize size = {.cells = 2, .sequences = 1, .positions = 2};
  const ExploreCase what = ExploreCases(size)[0];
  Subject few = TwinSubject("optimized");
  few.abilities.can = KVTWIN_CAN_ANY_ORDER | KVTWIN_CAN_REMOVE_TAIL;
  few.abilities.can_resume = few.abilities.set_causal = false;
  for (const ExploreStep& step : AllSteps(size, few.abilities)) {
    EXPECT_FALSE(step.reserve);
    EXPECT_TRUE(step.kind == OpKind::kPut || step.kind == OpKind::kDrop);
    EXPECT_TRUE(step.kind == OpKind::kPut || step.end == kOpenEnd);
  }
  const auto never = [](const ExploreResult&) { return false; };
  int steps = 0;
  few.on_step = [&](std::size_t) { ++steps; };
  const ExpandFn expand = [&](const ExploreSize& a, const ExploreCase& b,
                              const ExploreWay& way) {
    return ExpandState(a, b, few, way);
  };
  const ExploreResult here = (*Explorer::Make(size, what, few))->Run(1, never);
  EXPECT_EQ(steps, 0);
  const ExploreResult there =
      (*Explorer::Make(size, what, few, expand))->Run(1, never);
  EXPECT_GT(steps, 0);
  EXPECT_TRUE(here.fixed_point && there.fixed_point);
  EXPECT_GT(here.states, 4);
  EXPECT_EQ(here.states, there.states);
  EXPECT_EQ(here.transitions, there.transitions);
}

// States with drafts are reached by a path of steps, as another process needs
// it.
TEST(Explore, DraftsAreTheSameSomewhereElse) {
  const ExploreSize size = {
      .cells = 3, .sequences = 2, .positions = 2, .drafts = true};
  const auto never = [](const ExploreResult&) { return false; };
  for (const bool states : {false, true}) {
    const ExploreCase what = ExploreCases(size, states).back();
    const auto there = [&](const Subject& subject) {
      const ExpandFn expand = [&](const ExploreSize& a, const ExploreCase& b,
                                  const ExploreWay& way) {
        return ExpandState(a, b, subject, way);
      };
      return (*Explorer::Make(size, what, subject, expand))->Run(1, never);
    };
    const Subject twin = TwinSubject("optimized");
    const ExploreResult here =
        (*Explorer::Make(size, what, twin))->Run(1, never);
    const ExploreResult same = there(twin);
    EXPECT_TRUE(here.fixed_point && same.fixed_point) << what.name;
    EXPECT_EQ(here.states, same.states) << what.name;
    EXPECT_EQ(here.transitions, same.transitions) << what.name;
    const Subject faulty = FaultyCommits<ForgetsToReject>();
    EXPECT_GT(there(faulty).differences, 0) << what.name;
  }
}

}  // namespace
}  // namespace kvtwin::props
