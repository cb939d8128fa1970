// Prefixes of prompts in histories (F1 to F5): a cache that finds them in other
// sequences, and its faults.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/index.h"
#include "props/base/optional_calls.h"
#include "props/history/generate.h"
#include "props/testing/faulty_twins.h"

namespace kvtwin::props {
namespace {

enum class Fault {
  kNone,
  kPlanned,      // Tokens are found once they are planned.
  kFirstLayer,   // Tokens are found once one layer has their rows.
  kGoneWindow,   // Rows of the window may be gone.
  kWholePrompt,  // Nothing is left to compute.
  kLastId,       // A prefix is looked for by its last id only.
  kOneTooMany,   // The answer is one more than what is shared.
  kMoved,        // Tokens are known after a Remove has moved them.
};

// The reference twin, which also looks for the prefixes of prompts in all
// sequences.
class FindingTwin final : public ForwardingCache, public PrefixFinding {
 public:
  FindingTwin(std::unique_ptr<Cache> cache, int layers, Fault fault)
      : ForwardingCache(std::move(cache)), layers_(layers), fault_(fault) {}

  Status StartForward(const Batch& batch, bool reserve) override {
    Status status = cache_->StartForward(batch, reserve);
    found_ = found_ && !status.ok();
    puts_ = 0;
    ends_.clear();
    for (std::size_t i = 0; status.ok() && i < batch.positions.size(); ++i) {
      ends_[batch.sequences[i]] = batch.positions[i] + 1;
    }
    if (fault_ == Fault::kPlanned) Publish();
    return status;
  }
  Status Put(const TensorView& key, const TensorView& value) override {
    if (found_) return {StatusCode::kFailedPrecondition, "no pass"};
    Status status = cache_->Put(key, value);
    const int layers = fault_ == Fault::kFirstLayer ? 1 : layers_;
    if (status.ok() && ++puts_ == layers) Publish();
    return status;
  }
  Status SetCausal(std::span<const int> except) override {
    return found_ ? Status(StatusCode::kFailedPrecondition, "no pass")
                  : cache_->SetCausal(except);
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    Status status = cache_->CopyPrefix(src, dst, len);
    if (!status.ok()) return status;
    Known known = known_[src];
    if (src == dst)
      return Remove(src, *cache_->ResumeBefore(dst, len), kOpenEnd);
    known.Cut(*cache_->ResumeBefore(dst, len));
    known_[dst] = known;
    return status;
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    Status status = cache_->Remove(seq, begin, end);
    if (!status.ok()) return status;
    Known& known = known_[seq];
    if (end == kOpenEnd) {
      known.computed = std::min(known.computed, begin);
    } else if (fault_ != Fault::kMoved) {
      known.Cut(begin);
    }
    if (begin == 0 && end == kOpenEnd) known = {};
    return status;
  }

  Result<std::int32_t> FindPrefix(
      int seq, std::span<const std::int32_t> tokens) override {
    const std::vector<std::int32_t> ids(tokens.begin(), tokens.end());
    found_ = true;
    known_[seq] = {ids, 0};
    int best = 0;
    for (const auto& [src, known] : known_) {
      int length = std::min(Common(ids, known.ids), known.computed);
      const bool whole = length == Size(ids);
      if (fault_ != Fault::kWholePrompt && whole) --length;
      if (fault_ != Fault::kGoneWindow) {
        length = *cache_->ResumeBefore(src, length);
      }
      if (src == seq || length <= best) continue;
      if (cache_->CopyPrefix(src, seq, length).ok()) best = length;
    }
    known_[seq].computed = best;
    const bool more = fault_ == Fault::kOneTooMany && best + 1 < Size(ids);
    return best + (more && best > 0 ? 1 : 0);
  }

 private:
  struct Known {
    std::vector<std::int32_t> ids;
    std::int32_t computed = 0;
    void Cut(std::int32_t length) {
      if (length < std::ssize(ids)) ids.resize(AsSize(length));
      computed = std::min(computed, length);
    }
  };

  int Common(const std::vector<std::int32_t>& a,
             const std::vector<std::int32_t>& b) const {
    if (fault_ == Fault::kLastId) {
      for (int i = std::min(Size(a), Size(b)); i > 0; --i) {
        if (At(a, i - 1) == At(b, i - 1)) return i;
      }
      return 0;
    }
    const auto end = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    return AsInt(end.first - a.begin());
  }
  void Publish() {
    for (const auto& [seq, end] : ends_) known_[seq].computed = end;
  }

  const int layers_;
  const Fault fault_;
  bool found_ = false;  // FindPrefix came after the last batch.
  int puts_ = 0;
  std::map<int, std::int32_t> ends_;  // By sequence of the pass.
  std::map<int, Known> known_;
};

Subject Finding(Fault fault, Level level = Level::kVisibility) {
  Subject subject = {.name = "finding twin"};
  subject.level = level;
  subject.tolerance = 1e-9;
  subject.abilities.snapshots = false;
  subject.abilities.can |= KVTWIN_CAN_FIND_PREFIX;
  subject.make_of = [=](const Setup& setup) -> Result<std::unique_ptr<Cache>> {
    auto cache = MakeCache(setup.spec, "reference");
    if (!cache.ok()) return cache.status();
    return std::unique_ptr<Cache>(
        std::make_unique<FindingTwin>(std::move(*cache), setup.layers, fault));
  };
  return subject;
}

// Returns the check that finds a fault in random histories of a kind.
std::string CheckOf(Fault fault, std::optional<Kind> kind,
                    Level level = Level::kVisibility) {
  const Subject subject = Finding(fault, level);
  for (std::uint64_t number = 0; number < 150; ++number) {
    History history = MakePrefixes(1, number, kind, 60, /*cells_max=*/0);
    for (CacheSpec& part : history.setup.spec.caches) part.pins = 0;
    history.setup.spec.pins = 0;  // Copies would have the pins.
    const auto failure = RunHistory(history, subject).failure;
    if (failure) {
      return failure->check + " " + failure->text + " " +
             std::to_string(number);
    }
  }
  return "";
}

constexpr std::array<std::optional<Kind>, 7> kKinds = {
    std::nullopt,   Kind::kCausal, Kind::kSwa,      Kind::kSwaMem,
    Kind::kChunked, Kind::kHybrid, Kind::kRecurrent};

TEST(Prefixes, ARightCacheIsAccepted) {
  for (const std::optional<Kind> kind : kKinds) {
    EXPECT_EQ(CheckOf(Fault::kNone, kind), "");
  }
  EXPECT_EQ(CheckOf(Fault::kNone, Kind::kSwa, Level::kNumeric), "");
}

// The copy of the prefix has the checkpoint after 7 tokens as well, and goes
// back to it; a cache that copies only the last state goes back to 0 (F4).
TEST(Prefixes, MayHaveStatesBeforeTheLast) {
  const History history = *ParseHistory(
      "kvt1 kind=recurrent every=7 keep=1 cap=38 legal=1 | "
      "find 1:1,1,1,0,1,0,2,0 | put 1*8 | find 0:1,1,1,0,1,0,2,0,0 | put 0*1 | "
      "put 0*2 | drop 0:~3- | put 0*1");
  const auto failure = RunHistory(history, Finding(Fault::kNone)).failure;
  EXPECT_FALSE(failure) << failure->text;
}

// Sequence 1 shares the tokens that a Remove would move (F4); in the second
// history, it has none of them.
TEST(Prefixes, MayBeShared) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"find 1:0,1,0 | put 1*1", "shared_cells"},
      {"find 1:1,1,0 | put 1*1", "ok"}};
  for (const auto& [other, answer] : cases) {
    const History history = *ParseHistory(
        "kvt1 shift=add seqs=2 legal=1 | find 0:0,1,0 | put 0*3 | " + other +
        " | drop 0:0-1 | put 0*1 1*1");
    CallTrace trace;
    const auto failure =
        RunHistory(history, Finding(Fault::kNone), {.trace = &trace}).failure;
    EXPECT_FALSE(failure) << failure->text;
    const auto step =
        std::ranges::find(trace.steps, "Remove(0, 0, 1)", &Step::call);
    ASSERT_NE(step, trace.steps.end()) << other;
    EXPECT_EQ(step->answer, answer) << other;
  }
}

// FindPrefix ends the pass (F1): a right cache then answers
// failed_precondition to calls that need a pass (S47).
TEST(Prefixes, EndThePass) {
  const History history =
      *ParseHistory("kvt1 cells=1 legal=1 | put 0*1 | find 0:0 | misuse 19");
  const auto failure = RunHistory(history, Finding(Fault::kNone)).failure;
  EXPECT_FALSE(failure) << failure->text;
}

TEST(Prefixes, AreFound) {
  std::int64_t found = 0;
  for (std::uint64_t number = 0; number < 20; ++number) {
    const History history =
        MakePrefixes(1, number, Kind::kCausal, 60, /*cells_max=*/0);
    CallTrace trace;
    RunHistory(history, Finding(Fault::kNone), {.trace = &trace});
    for (const Step& step : trace.steps) {
      const bool find = step.call.starts_with("FindPrefix(");
      found += find && step.answer != "0" ? 1 : 0;
    }
  }
  EXPECT_GT(found, 50);
}

TEST(Prefixes, AreDrawnWithDrafts) {
  int both = 0;
  for (std::uint64_t number = 0; number < 20; ++number) {
    const History history = MakePrefixes(1, number, Kind::kCausal, 60,
                                         /*cells_max=*/0, /*drafts=*/true);
    const auto has = [&](OpKind kind) {
      return std::ranges::count(history.ops, kind, &Op::kind) > 0;
    };
    both += has(OpKind::kFind) && has(OpKind::kCommit) ? 1 : 0;
  }
  EXPECT_GT(both, 15);
}

TEST(Prefixes, FaultsAreFound) {
  const std::vector<std::tuple<Fault, std::string, std::string>> cases = {
      {Fault::kPlanned, "layers=2 | find 0:0,1 | put 0*2 stop=0 | find 1:0,1",
       "subject: prefix"},
      {Fault::kFirstLayer,
       "layers=2 | find 0:0,1 | put 0*2 stop=1 | find 1:0,1",
       "subject: prefix"},
      {Fault::kWholePrompt, "| find 0:0 | put 0*1 | find 1:0",
       "subject: prefix"},
      {Fault::kLastId, "| find 0:0,1 | put 0*2 | find 1:1,1,0",
       "subject: prefix"},
      {Fault::kOneTooMany, "| find 0:0,1 | put 0*1 | find 1:0,1,1",
       "subject: prefix"},
      // The answers are right, but not the rows.
      {Fault::kPlanned,
       "layers=2 seqs=3 | find 0:0,1 | put 0*2 | drop 0:0- | put 2*2 | "
       "find 0:0,1 | put 0*2 stop=0 | find 1:0,1 | put 1*1",
       "subject: rows"},
      {Fault::kGoneWindow,
       "kind=swa window=1 seqs=2 | find 0:0,1,0,1 | put 0*3 | put 0*1 | "
       "find 1:0,0 | put 1*1",
       "subject: rows"},
      {Fault::kMoved,
       "shift=add | find 0:0,1,0 | put 0*3 | drop 0:0-1 | put 0*1 | "
       "find 1:0,1,0 | put 1*1",
       "subject: rows"},
      {Fault::kGoneWindow,
       "kind=recurrent | find 0:0,1,0,1 | put 0*4 | find 1:0,1,1 | put 1*1",
       "subject: result"}};
  for (const auto& [fault, line, check] : cases) {
    const History history = *ParseHistory("kvt1 legal=1 " + line);
    EXPECT_FALSE(RunHistory(history, Finding(Fault::kNone)).failure) << line;
    const auto failure = RunHistory(history, Finding(fault)).failure;
    EXPECT_EQ(failure ? failure->check : "", check) << line;
  }
}

// A state that is not there is the fault of the answer that promised it.
TEST(Prefixes, AFalsePromiseIsNamed) {
  const History history = *ParseHistory(
      "kvt1 legal=1 kind=recurrent | find 0:0,1,0,1 | put 0*4 | find 1:0,1,1 "
      "| ask 1@2");
  EXPECT_FALSE(RunHistory(history, Finding(Fault::kNone)).failure);
  const auto failure = RunHistory(history, Finding(Fault::kGoneWindow)).failure;
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->check, "subject: resume");
  EXPECT_EQ(failure->text,
            "CanResume(1, 2) is false, but FindPrefix(1, [0 1 1]) was 2: the "
            "prompt continues there");
}

TEST(Prefixes, FaultsAreFoundAtRandom) {
  for (const Fault fault :
       {Fault::kPlanned, Fault::kFirstLayer, Fault::kGoneWindow,
        Fault::kWholePrompt, Fault::kLastId, Fault::kOneTooMany,
        Fault::kMoved}) {
    EXPECT_NE(CheckOf(fault, Kind::kSwa), "") << AsInt(fault);
  }
}

}  // namespace
}  // namespace kvtwin::props
