// Legal clients of a search: the calls that they make, the shortest histories
// of faults that only their rare calls show, and correct caches that these
// calls must not accuse.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/dialects/profiles.h"
#include "core/index.h"
#include "props/base/forwarding_cache.h"
#include "props/compare/runner.h"
#include "props/search/fuzz.h"
#include "props/shrink/shrink.h"

namespace kvtwin::props {
namespace {

// Returns the calls that change the reference twin, with their answers, for a
// history that it passes at this level.
std::vector<std::string> CallsOf(const std::string& line,
                                 Level level = Level::kIdentity) {
  const Result<History> history = ParseHistory("kvt1 legal=1 " + line);
  EXPECT_TRUE(history.ok()) << history.status().message();
  Subject subject = TwinSubject("reference");
  subject.level = level;
  struct CallTrace trace;
  const RunResult result = RunHistory(*history, subject, {.trace = &trace});
  EXPECT_FALSE(result.failure) << result.failure->text;
  std::vector<std::string> calls;
  for (const Step& step : trace.steps) {
    const bool changes = step.call.find("(") != std::string::npos &&
                         !step.call.starts_with("Get");
    if (!changes) continue;
    calls.push_back(CallLineOf(step));
  }
  return calls;
}

using CallLines = std::vector<std::string>;

TEST(Client, ReservesAtAnyPositionsBelowTheCapacity) {
  const std::string held = "StartForward(positions [0 1 2], sequences [0 0 0])";
  const auto reserved = [&](const std::string& segment) {
    const CallLines calls =
        CallsOf("cells=4 | put 0*3 | put " + segment + " reserve");
    EXPECT_EQ(calls.size(), 4U) << testing::PrintToString(calls);
    EXPECT_EQ(calls.empty() ? "" : calls[0], held + " -> ok");
    return calls.size() < 3 ? "" : calls[2];
  };
  EXPECT_EQ(reserved("0*2@-8"),
            "StartForward(positions [0 1], sequences [0 0], reserve) -> ok");
  EXPECT_EQ(reserved("0*2@-2"),
            "StartForward(positions [1 2], sequences [0 0], reserve) -> ok");
  EXPECT_EQ(reserved("0*3"),
            "StartForward(positions [1 2 3], sequences [0 0 0], reserve) -> ok")
      << "nothing is removed to make room";
  EXPECT_EQ(reserved("0*1@+9"),
            "StartForward(positions [3], sequences [0], reserve) -> ok");
}

TEST(Client, AsksBeforeItTakesBackAPass) {
  EXPECT_EQ(CallsOf("kind=swa window=1 cells=8 layers=2 | put 0*2 | "
                    "put 0*1 stop=1 | ask 0@2"),
            (CallLines{"StartForward(positions [0 1], sequences [0 0]) -> ok",
                       "Put(layer 0, rows of tokens 0 to 1) -> ok",
                       "Put(layer 1, rows of tokens 0 to 1) -> ok",
                       "StartForward(positions [2], sequences [0]) -> ok",
                       "Put(layer 0, rows of token 2) -> ok",
                       "CanResume(0, 2) -> yes", "Remove(0, 2, open) -> ok",
                       "CanResume(0, 2) -> yes"}));
}

// The reference twin, for one setup.
class ForSetup : public ForwardingCache {
 public:
  explicit ForSetup(const Setup& setup)
      : ForwardingCache(*MakeCache(setup.spec, "reference")),
        layers_(setup.layers) {}

 protected:
  // The position after the last token of a sequence.
  std::int32_t EndOf(int seq) const {
    std::vector<CellEntry> cells;
    cache_->ListCells(cells);
    std::int32_t end = 0;
    for (const CellEntry& entry : cells) {
      if (entry.sequence == seq) end = std::max(end, entry.position + 1);
    }
    return end;
  }
  const int layers_;
};

// Does not clear a sequence whose last pass has no rows in some layers.
class KeepsShortLayers : public ForSetup {
 public:
  using ForSetup::ForSetup;

  Status SetLayer(int layer) override {
    layer_ = layer;
    return cache_->SetLayer(layer);
  }
  Status StartForward(const Batch& batch, bool reserve) override {
    put_.clear();
    return cache_->StartForward(batch, reserve);
  }
  Status Put(const TensorView& key, const TensorView& value) override {
    put_.insert(layer_);
    return cache_->Put(key, value);
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    const int put = Size(put_);
    const bool in_part = put > 0 && put < layers_;
    return cache_->Remove(seq, in_part ? begin + 1 : begin, end);
  }

 private:
  int layer_ = 0;
  std::set<int> put_;  // The layers of the current pass that have rows.
};

// A reserving pass overwrites the rows of its positions.
class WritesWhatItReserves : public ForSetup {
 public:
  using ForSetup::ForSetup;

  Status StartForward(const Batch& batch, bool reserve) override {
    for (std::size_t i = 0; reserve && i < batch.positions.size(); ++i) {
      const int seq = batch.sequences[i];
      if (batch.positions[i] >= EndOf(seq)) continue;
      (void)cache_->Remove(seq, batch.positions[i], kOpenEnd).ok();
    }
    return cache_->StartForward(batch, reserve);
  }
};

// The cache as a third party's that has legal clients only.
template <class Backend>
Subject ThirdParty() {
  Subject subject = {.name = "faulty"};
  subject.level = Level::kVisibility;
  subject.make_of = [](const Setup& setup) -> Result<std::unique_ptr<Cache>> {
    return std::unique_ptr<Cache>(std::make_unique<Backend>(setup));
  };
  Abilities& able = subject.abilities;
  able.kinds = KVTWIN_HAS_CAUSAL | KVTWIN_HAS_SWA | KVTWIN_HAS_RECURRENT |
               KVTWIN_HAS_HYBRID;
  able.can = KVTWIN_CAN_REMOVE_TAIL | KVTWIN_CAN_RESERVE | KVTWIN_CAN_MIX |
             KVTWIN_CAN_COPY_PREFIX | KVTWIN_CAN_SHARE;
  return subject;
}

template <class Backend>
FuzzResult Search(std::int64_t operations, std::optional<Kind> kind = {},
                  bool unshrunk = false) {
  FuzzOptions options;
  options.operations = operations;
  options.kind = kind;
  options.unshrunk = unshrunk;
  return Fuzz(options, ThirdParty<Backend>());
}
// Returns the shortest history that shows the fault.
template <class Backend>
std::string LineOf(std::int64_t operations, std::optional<Kind> kind = {}) {
  const FuzzResult result = Search<Backend>(operations, kind);
  return result.failure ? ToText(result.shrunk) : "";
}

TEST(LegalClients, HavePassesThatAreGivenUp) {
  EXPECT_EQ(LineOf<KeepsShortLayers>(50000, Kind::kCausal),
            "kvt1 cells=1 layers=2 legal=1 | put 0*1 stop=1 | put 0*1");
}

TEST(LegalClients, HaveWarmUpsOfFilledCaches) {
  EXPECT_EQ(LineOf<WritesWhatItReserves>(50000, Kind::kCausal),
            "kvt1 cells=2 legal=1 | put 0*1 | put 0*2 reserve | put 0*1");
}

TEST(LegalClients, DoNotAccuseCorrectCaches) {
  for (const auto kind : {std::optional<Kind>(), std::optional(Kind::kHybrid),
                          std::optional(Kind::kRecurrent)}) {
    const FuzzResult result = Search<ForSetup>(20000, kind, true);
    EXPECT_FALSE(result.failure) << result.failure->text;
    EXPECT_GT(result.ran, 50);
  }
}

// Refuses batches beyond the capacity of a sequence; has room for more.
class Limited : public ForSetup {
 public:
  using ForSetup::ForSetup;

  Status Init(const InitArgs& args) override {
    capacity_ = args.capacity;
    InitArgs larger = args;
    larger.capacity = 2 * args.capacity + args.max_batch;
    return cache_->Init(larger);
  }
  Status StartForward(const Batch& batch, bool reserve) override {
    const auto over = std::ranges::find_if(
        batch.positions, [&](auto position) { return position >= capacity_; });
    if (over == batch.positions.end()) {
      return cache_->StartForward(batch, reserve);
    }
    return Overfull(batch, AsSize(over - batch.positions.begin()));
  }

 protected:
  // The answer to a batch whose entry `first` is the first that does not fit.
  virtual Status Overfull(const Batch& /*batch*/, std::size_t /*first*/) {
    return {StatusCode::kCacheFull, "no more room"};
  }
  int capacity_ = 0;
};

// Has room for more tokens than its capacity.
class TakesMore : public Limited {
 public:
  using Limited::Limited;

 protected:
  Status Overfull(const Batch& batch, std::size_t /*first*/) override {
    return cache_->StartForward(batch, false);
  }
};

// A refused batch has stored the tokens that fit.
class KeepsRefusedTokens : public Limited {
 public:
  using Limited::Limited;

 protected:
  Status Overfull(const Batch& batch, std::size_t first) override {
    Batch some = batch;
    some.positions = some.positions.first(first);
    some.sequences = some.sequences.first(first);
    if (first > 0) (void)cache_->StartForward(some, false).ok();
    return {StatusCode::kCacheFull, "no more room"};
  }
};

// Positions stay below the capacity: the last ones are the same.
class ClampsPositions : public Limited {
 public:
  using Limited::Limited;

 protected:
  Status Overfull(const Batch& batch, std::size_t /*first*/) override {
    std::vector<std::int32_t> positions(batch.positions.begin(),
                                        batch.positions.end());
    for (std::int32_t& at : positions) at = std::min(at, capacity_ - 1);
    Batch clamped = batch;
    clamped.positions = positions;
    return cache_->StartForward(clamped, false);
  }
};

template <class Backend>
Subject ThatMayRefuse() {
  Subject subject = ThirdParty<Backend>();
  subject.abilities.can |= KVTWIN_CAN_REFUSE_FULL;
  return subject;
}

FuzzResult Overfill(const Subject& subject, std::optional<Kind> kind = {}) {
  FuzzOptions options;
  options.operations = 20000;
  options.kind = kind;
  return Fuzz(options, subject);
}

TEST(LegalClients, OverfillCachesThatMayRefuse) {
  const FuzzResult kept =
      Overfill(ThatMayRefuse<KeepsRefusedTokens>(), Kind::kCausal);
  EXPECT_EQ(kept.failure ? ToText(kept.shrunk) : "",
            "kvt1 cells=1 batch=2 legal=1 | put 0*1 overfull | put 0*1");
  const FuzzResult clamped =
      Overfill(ThatMayRefuse<ClampsPositions>(), Kind::kCausal);
  EXPECT_EQ(clamped.failure ? ToText(clamped.shrunk) : "",
            "kvt1 cells=1 batch=2 legal=1 | put 0*1 overfull");
  // Without the ability, no batch is too long.
  EXPECT_FALSE(Overfill(ThirdParty<ClampsPositions>()).failure);
}

// By these rules, a window may still have tokens that it does not need.
template <class Backend>
Subject LazyThatMayRefuse() {
  Subject subject = ThatMayRefuse<Backend>();
  subject.rules = *ParseRules("ollama-0.12 except eviction is lazy");
  return subject;
}

TEST(LegalClients, GoOnAfterARefusalOfALazyWindow) {
  const FuzzResult kept =
      Overfill(LazyThatMayRefuse<KeepsRefusedTokens>(), Kind::kSwa);
  ASSERT_TRUE(kept.failure);
  EXPECT_NE(ToText(kept.shrunk).find("overfull | "), std::string::npos)
      << ToText(kept.shrunk);
}

TEST(LegalClients, DoNotAccuseCachesThatRefuseOrTakeMore) {
  for (const auto kind :
       {std::optional<Kind>(), std::optional(Kind::kSwa),
        std::optional(Kind::kHybrid), std::optional(Kind::kRecurrent)}) {
    for (const Subject& subject :
         {ThatMayRefuse<Limited>(), ThatMayRefuse<TakesMore>(),
          ThatMayRefuse<ForSetup>(), LazyThatMayRefuse<ForSetup>(),
          LazyThatMayRefuse<Limited>()}) {
      const FuzzResult result = Overfill(subject, kind);
      EXPECT_FALSE(result.failure) << result.failure->text;
    }
  }
}

// Shares a token too few.
class SharesOneLess : public ForSetup {
 public:
  using ForSetup::ForSetup;

  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    return cache_->CopyPrefix(src, dst, len > 1 ? len - 1 : len);
  }
};

TEST(LegalClients, ShrinkToHistoriesWithoutTheirRareCalls) {
  const Subject subject = ThirdParty<SharesOneLess>();
  for (const char* line :
       {"kvt1 cells=8 layers=2 legal=1 | put 1*1 stop=0 | put 0*2 | "
        "copy 0>0:2 | put 0*1",
        "kvt1 cells=8 legal=1 | put 0*2 | put 0*2@-8 reserve | copy 0>0:2 | "
        "put 0*1"}) {
    const std::string shrunk = ToText(Shrink(*ParseHistory(line), subject));
    EXPECT_EQ(shrunk, "kvt1 cells=3 legal=1 | put 0*2 | copy 0>0:2 | put 0*1")
        << line;
  }
}

}  // namespace
}  // namespace kvtwin::props
