// Recurrent and hybrid caches, and caches with drafts, that have one fault
// each, and the check that finds it (faulty_twins_test.cc has the other
// faults). The coverage marks of states: what they count, and that random
// histories reach all of them.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/index.h"
#include "core/mask_elements.h"
#include "props/history/speculate.h"
#include "props/testing/faulty_twins.h"

namespace kvtwin::props {
namespace {

using SpecChange = std::function<void(CacheSpec&)>;

// A right cache of another spec.
Subject OfAnother(const SpecChange& change) {
  Subject subject;
  subject.name = "faulty";
  subject.make = [=](const CacheSpec& spec) {
    CacheSpec other = spec;
    change(other);
    return MakeReference(other);
  };
  return subject;
}

template <class Faulty>
Subject Of() {
  Subject subject;
  subject.name = "faulty";
  subject.make = [](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
    auto cache = MakeReference(spec);
    if (!cache.ok()) return cache;
    return std::unique_ptr<Cache>(std::make_unique<Faulty>(std::move(*cache)));
  };
  return subject;
}

// Rolls back one token too few.
struct RollsBackLess : ForwardingCache {
  using ForwardingCache::ForwardingCache;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    const bool some = begin > 0 && end == kOpenEnd;
    return cache_->Remove(seq, begin + (some ? 1 : 0), end);
  }
};

// Rolls back, and serves the state that was the last one before.
struct ServesTheOldState : ForwardingCache {
  using ForwardingCache::ForwardingCache;
  Status Put(const TensorView& key, const TensorView& value) override {
    last_ = CopyOf(Slice(value, 2, value.shape[2] - 1), value.dtype);
    return cache_->Put(key, value);
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    removed_ = removed_ || begin > 0;
    return cache_->Remove(seq, begin, end);
  }
  Result<KvView> Get() override {
    Result<KvView> view = cache_->Get();
    if (!view.ok() || !removed_) return view;
    shown_ = CopyOf(view->value, view->value.dtype);
    const std::size_t row = shown_.bytes.size() / AsSize(view->value.shape[2]);
    std::copy_n(last_.bytes.begin(), std::min(row, last_.bytes.size()),
                shown_.bytes.begin());
    view->value = shown_.view();
    return view;
  }
  bool removed_ = false;
  DenseTensor last_;
  DenseTensor shown_;
};

// Writes the new state over the state that the pass reads.
struct WritesInPlace : ForwardingCache {
  using ForwardingCache::ForwardingCache;
  Result<KvView> Get() override {
    Result<KvView> view = cache_->Get();
    if (!view.ok()) return view;
    shown_ = CopyOf(view->key, view->key.dtype);
    const std::size_t row = shown_.bytes.size() / AsSize(view->key.shape[2]);
    const int to = cache_->BatchCells().back() - view->first_cell;
    for (std::int64_t column = 0; column < view->mask.shape[0]; ++column) {
      if (!MaskAllows(view->mask, column, 0)) continue;
      std::copy_n(IteratorAt(shown_.bytes, AsSize(to) * row), row,
                  IteratorAt(shown_.bytes, AsSize(column) * row));
    }
    view->key = shown_.view();
    return view;
  }
  DenseTensor shown_;
};

// A fork has the last state only.
struct ForksTheLastState : ForwardingCache {
  using ForwardingCache::ForwardingCache;
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    Status status = cache_->CopyPrefix(src, dst, len);
    if (!status.ok() || src == dst) return status;
    CacheState state = *cache_->Snapshot();
    std::int32_t last = 0;
    for (const CellEntry& entry : state.cells) {
      if (entry.sequence == dst) last = std::max(last, entry.position);
    }
    std::erase_if(state.cells, [&](const CellEntry& entry) {
      return entry.sequence == dst && entry.position < last;
    });
    return cache_->Restore(state);
  }
};

// Lets the state that the pass reads leave before the pass.
struct EvictsTheStateInUse : ForwardingCache {
  using ForwardingCache::ForwardingCache;
  Status StartForward(const Batch& batch, bool reserve) override {
    Status status = cache_->StartForward(batch, reserve);
    gone_ = status.ok() && !reserve ? batch.positions.front() - 1 : -1;
    return status;
  }
  void ListCells(std::vector<CellEntry>& out) const override {
    cache_->ListCells(out);
    std::erase_if(out, [&](auto& entry) { return entry.position == gone_; });
  }
  std::int32_t gone_ = -1;
};

// Asks only the first cache of a hybrid where it can resume.
struct AsksTheFirst : ForwardingCache {
  using ForwardingCache::ForwardingCache;
  Result<std::int32_t> ResumeBefore(int seq, std::int32_t pos) override {
    const Result<std::int32_t> at = cache_->ResumeBefore(seq, pos);
    return at.ok() ? Result<std::int32_t>(pos) : at;
  }
};

// Commits all drafts of a path but the last.
struct CommitsLess : ForwardingCache {
  using ForwardingCache::ForwardingCache;
  Status Commit(int seq, std::span<const int> path) override {
    return cache_->Commit(seq, path.first(path.empty() ? 0 : path.size() - 1));
  }
};

// Shows each draft the state of its parent, also of one in its own batch.
struct ShowsTheParent : ForwardingCache {
  using ForwardingCache::ForwardingCache;
  Status StartForward(const Batch& batch, bool reserve) override {
    chain_ = !batch.parents.empty();
    return cache_->StartForward(batch, reserve);
  }
  Result<KvView> Get() override {
    Result<KvView> view = cache_->Get();
    if (!view.ok() || !chain_ || view->mask.shape[1] < 2) return view;
    shown_ = CopyOf(view->mask, view->mask.dtype);
    AllowInMask(shown_, cache_->BatchCells()[0] - view->first_cell, 1);
    view->mask = shown_.view();
    return view;
  }
  bool chain_ = false;
  DenseTensor shown_;
};

struct PinsNothing : ForwardingCache {
  using ForwardingCache::ForwardingCache;
  Status Checkpoint(int seq) override {
    return cache_->CellCount() == 0 ? cache_->Checkpoint(seq) : Status();
  }
};

// Restore undoes all pins.
struct ForksWithoutPins : ForwardingCache {
  using ForwardingCache::ForwardingCache;
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    Status status = cache_->CopyPrefix(src, dst, len);
    return status.ok() ? cache_->Restore(*cache_->Snapshot()) : status;
  }
};

// Each sequence has room for its own drafts (R11).
struct HasRoomForEachSequence : ForwardingCache {
  HasRoomForEachSequence(std::unique_ptr<Cache> cache, int room)
      : ForwardingCache(std::move(cache)), room_(room) {}
  Status StartForward(const Batch& batch, bool reserve) override {
    std::map<int, int> drafts = drafts_;
    for (std::size_t i = 0; i < batch.parents.size(); ++i) {
      if (batch.parents[i] == kNotADraft) continue;
      if (++drafts[batch.sequences[i]] > room_) {
        return {StatusCode::kCacheFull, "no room for a draft"};
      }
    }
    Status status = cache_->StartForward(batch, reserve);
    if (status.ok() && !reserve) drafts_ = drafts;
    return status;
  }
  Status Commit(int seq, std::span<const std::int32_t> path) override {
    drafts_[seq] = 0;
    return cache_->Commit(seq, path);
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    drafts_[dst] = 0;
    return cache_->CopyPrefix(src, dst, len);
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    drafts_[seq] = 0;
    return cache_->Remove(seq, begin, end);
  }

  const int room_;
  std::map<int, int> drafts_;
};

// Every sequence is said to be unable to continue.
struct NeverResumes : ForwardingCache {
  using ForwardingCache::ForwardingCache;
  Result<bool> CanResume(int /*seq*/, std::int32_t /*pos*/) override {
    return false;
  }
};

// A backend with states whose clients are legal.
template <class Made>
Subject OfLegalClients(const Made& made) {
  Subject subject = {.name = "backend"};
  subject.level = Level::kVisibility;
  subject.make_of = [=](const Setup& setup) -> Result<std::unique_ptr<Cache>> {
    auto cache = MakeReference(setup.spec);
    if (!cache.ok()) return cache;
    return made(setup, std::move(*cache));
  };
  return subject;
}

TEST(StatesOfLegalClients, DraftsHaveRoomInTheirSequence) {
  const Subject subject = OfLegalClients(
      [](const auto& setup, auto cache) -> std::unique_ptr<Cache> {
        return std::make_unique<HasRoomForEachSequence>(std::move(cache),
                                                        setup.spec.drafts);
      });
  int ran = 0;
  for (std::uint64_t number = 0; number < 60; ++number) {
    History history = MakeSpeculation(1, number, Kind::kRecurrent, 60, 0);
    history.setup.legal = true;
    std::erase_if(history.ops, [](const Op& op) {  // It is refused otherwise.
      return op.kind == OpKind::kMisuse;
    });
    const RunResult result = RunHistory(history, subject);
    ran += result.ran ? 1 : 0;
    EXPECT_FALSE(result.failure) << result.failure->text;
  }
  EXPECT_GT(ran, 40);
}

// A client that is refused begins the sequence anew, and finds no fault.
TEST(StatesOfLegalClients, ContinueWhereTheRulesLeaveThem) {
  const Subject subject = OfLegalClients(
      [](const auto& /*setup*/, auto cache) -> std::unique_ptr<Cache> {
        return std::make_unique<NeverResumes>(std::move(cache));
      });
  const auto failure = [&](const std::string& line) {
    const auto found =
        RunHistory(*ParseHistory("kvt1 legal=1 " + line), subject).failure;
    return found ? std::string(found->check) : "";
  };
  EXPECT_EQ(failure("kind=recurrent every=2 keep=2 | put 0*5 | drop 0:4-"),
            "subject: resume");
  EXPECT_EQ(failure("kind=recurrent every=2 keep=2 | put 0*5 | copy 0>1:4"),
            "subject: resume");
  // Without states, a cache may refuse at any time; every cache may refuse for
  // a sequence without tokens.
  EXPECT_EQ(failure("kind=recurrent | ask 0@0"), "");
  EXPECT_EQ(failure("kind=hybrid caches=causal/recurrent:e2:k2 | ask 0@0"), "");
  EXPECT_EQ(failure("kind=hybrid caches=causal/recurrent:e2:k2 layers=2 | "
                    "put 0*5 | drop 0:4-"),
            "subject: resume");
  EXPECT_EQ(failure("kind=swa window=1 | put 0*5 | drop 0:4-"), "");
}

struct StateCase {
  std::string name;
  Subject subject;
  std::string history;
  std::string check;
};

const std::string kStates = "kind=recurrent every=2 keep=2 cap=9 ";
const std::string kHybridOf =
    "kind=hybrid caches=causal/recurrent:e2:k2 "
    "layers=2 cap=9 ";

std::vector<StateCase> StateCases() {
  const auto hybrid_as_wrapper = [](CacheSpec& spec) {
    spec.kind = Kind::kWrapper;
  };
  return {
      {"rolls back one token too few", Of<RollsBackLess>(),
       kStates + "| put 0*5 | drop 0:4-", "subject: cells"},
      {"serves the old state after a roll back", Of<ServesTheOldState>(),
       kStates + "| put 0*4 | drop 0:2- | get", "subject: V bytes"},
      {"checkpoints after the wrong token",
       OfAnother([](CacheSpec& spec) { ++spec.checkpoint_every; }),
       kStates + "| put 0*5", "subject: cells"},
      {"keeps a checkpoint less",
       OfAnother([](CacheSpec& spec) { --spec.checkpoints; }),
       kStates + "| put 0*5", "subject: cell count"},
      {"writes in place", Of<WritesInPlace>(), kStates + "| put 0*1 | put 0*1",
       "subject: K bytes"},
      {"forks the last state only", Of<ForksTheLastState>(),
       kStates + "| put 0*5 | copy 0>1:5", "subject: cells"},
      {"evicts the state in use", Of<EvictsTheStateInUse>(),
       kStates + "| put 0*1 | put 0*1", "subject: cells"},
      {"copies each part as far as it goes", OfAnother(hybrid_as_wrapper),
       kHybridOf + "| put 0*5 | copy 0>1:3", "subject: cells"},
      {"drops from each part what was asked", OfAnother(hybrid_as_wrapper),
       kHybridOf + "| put 0*5 | drop 0:3-", "subject: cells"},
      {"commits a draft less", Of<CommitsLess>(),
       kStates + "drafts=4 | put 0*3:-1 | commit 0:0,0", "subject: cells"},
      {"has no room for drafts",
       OfAnother([](CacheSpec& spec) { --spec.drafts; }),
       kStates + "drafts=4 | put 0*3:-1", "subject: cell count"},
      {"shows a draft of the same batch", Of<ShowsTheParent>(),
       kStates + "drafts=4 | put 0*1 | put 0*2:-1", "subject: mask bytes"},
      {"pins nothing", Of<PinsNothing>(),
       kStates + "pins=1 | put 0*1 | pin 0 | put 0*1 | put 0*1",
       "subject: cells"},
      {"forks without pins", Of<ForksWithoutPins>(),
       kStates + "pins=1 | put 0*1 | pin 0 | copy 0>1:1 | put 1*1 | put 1*1",
       "subject: cells"},
      {"resumes where one part can", Of<AsksTheFirst>(),
       kHybridOf + "| put 0*5 | ask 0@3", "subject: resume"},
  };
}

TEST(FaultyStates, EachIsFound) {
  for (StateCase& test : StateCases()) {
    SCOPED_TRACE(test.name);
    const Result<History> history = ParseHistory("kvt1 " + test.history);
    ASSERT_TRUE(history.ok()) << history.status().ToString();
    const auto right = RunHistory(*history, TwinSubject("optimized")).failure;
    EXPECT_FALSE(right) << right->text;
    const auto wrong = RunHistory(*history, test.subject).failure;
    ASSERT_TRUE(wrong) << "was not found";
    EXPECT_EQ(wrong->check, test.check) << wrong->text;
  }
}

// A batch that the rules refuse because of its positions is refused, and the
// pass before it continues.
TEST(FaultyStates, ARefusedBatchChangesNothing) {
  struct TakesAll : ForwardingCache {
    using ForwardingCache::ForwardingCache;
    Status StartForward(const Batch& batch, bool reserve) override {
      Status status = cache_->StartForward(batch, reserve);
      return status.code() == StatusCode::kInvalidArgument ? Status() : status;
    }
  };
  const History history =
      *ParseHistory("kvt1 " + kStates + "| put 0*1 | put 0*1@+1 | get");
  const auto right = RunHistory(history, TwinSubject("optimized")).failure;
  EXPECT_FALSE(right) << right->text;
  const auto wrong = RunHistory(history, Of<TakesAll>()).failure;
  ASSERT_TRUE(wrong);
  EXPECT_TRUE(wrong->check == "subject: result" ||
              wrong->check == "subject: misuse")
      << wrong->check;
}

// "every=2 keep=2" keeps the last two states after an even number of tokens.
const std::vector<MarkRow> kRows = {
    {"state_inside",
     {"kind=recurrent every=2 keep=2 | put 0*3"},
     {"kind=recurrent every=2 keep=2 | put 0*2 | put 0*1",
      "kind=recurrent | put 0*3"}},
    {"state_passed_over",
     {"kind=recurrent every=2 keep=1 | put 0*5"},
     {"kind=recurrent every=2 keep=2 | put 0*5",
      "kind=recurrent every=2 keep=1 | put 0*3"}},
    {"state_evicted",
     {"kind=recurrent every=2 keep=1 | put 0*3 | put 0*3"},
     {"kind=recurrent every=2 keep=2 | put 0*3 | put 0*1"}},
    {"state_evicted_shared",
     {"kind=recurrent every=2 keep=1 | put 0*3 | copy 0>1:9 | put 0*3"},
     {"kind=recurrent every=2 keep=1 | put 0*3 | put 0*3",
      "kind=recurrent | put 0*3 | copy 0>1:9 | put 0*3"}},
    {"state_taken_back",
     {"kind=recurrent | put 0*2 | put 0*2 | drop 0:2-"},
     {"kind=recurrent every=1 keep=1 | put 0*2 | put 0*2 | drop 0:4-",
      "kind=recurrent | put 0*2 | put 0*2 | drop 0:1-"}},
    {"state_rollback",
     {"kind=recurrent every=2 keep=2 | put 0*3 | put 0*1 | put 0*1 | drop 0:2-",
      "kind=recurrent every=2 keep=2 | put 0*3 | put 0*2 | drop 0:2-"},
     {"kind=recurrent every=2 keep=2 | put 0*3 | put 0*2 | drop 0:3-"}},
    {"state_cut",
     {"kind=recurrent every=2 keep=2 | put 0*5 | drop 0:3-"},
     {"kind=recurrent every=2 keep=2 | put 0*5 | drop 0:2-"}},
    {"state_fork",
     {"kind=recurrent every=2 keep=2 | put 0*5 | copy 0>1:4"},
     {"kind=recurrent every=2 keep=2 | put 0*5 | copy 0>1:5",
      "kind=recurrent every=2 keep=2 | put 0*5 | copy 0>1:1"}},
    {"state_fork_cut",
     {"kind=recurrent every=2 keep=2 | put 0*5 | copy 0>1:3"},
     {"kind=recurrent every=2 keep=2 | put 0*5 | copy 0>1:4"}},
    {"pin_keeps",
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | put 0*1 | put 0*1"},
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | put 0*1",
      "kind=recurrent pins=1 every=1 keep=3 | put 0*1 | pin 0 | put 0*1 | "
      "put 0*1"}},
    {"pin_again",
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | pin 0"},
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | put 0*1 | pin 0",
      "kind=recurrent pins=1 | pin 0 | pin 0"}},
    {"pin_undone",
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | put 0*1 | pin 0"},
     {"kind=recurrent pins=2 | put 0*1 | pin 0 | put 0*1 | pin 0"}},
    {"pin_evicted",
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | put 0*1 | pin 0 | put 0*1"},
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | put 0*1 | pin 0",
      "kind=recurrent pins=1 | put 0*1 | put 0*1 | pin 0 | put 0*1"}},
    {"pin_forked",
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | put 0*1 | copy 0>1:2"},
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | copy 0>1:2",
      "kind=recurrent pins=1 | put 0*1 | put 0*1 | copy 0>1:2"}},
    {"pin_removed",
     {"kind=recurrent pins=1 | put 0*1 | put 0*1 | pin 0 | drop 0:1-"},
     {"kind=recurrent pins=1 | put 0*1 | pin 0 | put 0*1 | drop 0:1-"}},
    {"draft_state_chain",
     {"kind=recurrent drafts=4 | put 0*2:-1"},
     {"kind=recurrent drafts=4 | put 0*2:-1,-1"}},
    {"draft_state_read",
     {"kind=recurrent drafts=4 | put 0*1:-1 | put 0*1:0"},
     {"kind=recurrent drafts=4 | put 0*2:-1 | put 0*1:-1"}},
    {"draft_state_first",
     {"kind=recurrent drafts=4 | put 0*1:-1"},
     {"kind=recurrent drafts=4 | put 0*1 | put 0*1:-1"}},
    {"commit_state_inside",
     {"kind=recurrent every=2 keep=1 drafts=4 | put 0*3:-1 | commit 0:0,0,0"},
     {"kind=recurrent every=2 keep=1 drafts=4 | put 0*3:-1 | commit 0:0,0"}},
    {"commit_state_evicts",
     {"kind=recurrent every=2 keep=1 drafts=4 | put 0*3 | put 0*1:-1 | "
      "commit 0:0"},
     {"kind=recurrent every=2 keep=1 drafts=4 | put 0*3 | put 0*1:-1 | "
      "commit 0:",
      "kind=recurrent every=2 keep=2 drafts=4 | put 0*3 | put 0*1:-1 | "
      "commit 0:0"}},
    {"commit_state_pin",
     {"kind=recurrent pins=1 drafts=4 | put 0*1 | pin 0 | put 0*1 | "
      "put 0*1:-1 | commit 0:0"},
     {"kind=recurrent pins=1 drafts=4 | put 0*1 | pin 0 | put 0*1:-1 | "
      "commit 0:0"}},
    {"hybrid_cut",
     {"kind=hybrid caches=causal/recurrent:e2:k2 | put 0*5 | drop 0:3-"},
     {"kind=hybrid caches=causal/recurrent:e2:k2 | put 0*5 | drop 0:4-",
      "kind=hybrid caches=causal/recurrent:e2:k2 | put 0*5 | drop 0:1-"}},
    {"hybrid_emptied",
     {"kind=hybrid caches=causal/recurrent:e2:k2 | put 0*5 | drop 0:1-"},
     {"kind=hybrid caches=causal/recurrent:e2:k2 | put 0*5 | drop 0:3-",
      "kind=hybrid caches=causal/recurrent:e2:k2 | put 0*5 | drop 0:0-"}},
    {"hybrid_fork_cut",
     {"kind=hybrid caches=causal/recurrent:e2:k2 | put 0*5 | copy 0>1:3"},
     {"kind=hybrid caches=causal/recurrent:e2:k2 | put 0*5 | copy 0>1:4"}},
    {"hybrid_full",
     {"kind=hybrid caches=causal/recurrent seqs=1 cap=2 | put 0*3"},
     {"kind=hybrid caches=causal/recurrent seqs=1 cap=3 | put 0*3",
      "kind=wrapper caches=causal/recurrent seqs=1 cap=2 | put 0*3"}},
};

TEST(StateMarks, AreHitByTheirOwnStateOnly) {
  CheckMarkRows(kRows, kFirstStateMark, "");
}

// The generator must reach each of these states.
TEST(StateMarks, AreAllReached) {
  CoverageCounts counts;
  for (std::uint64_t number = 0; number < 150; ++number) {
    const History history =
        MakeSpeculation(1, number, Kind::kHybrid, 200, /*cells_max=*/0);
    const RunResult result =
        RunHistory(history, TwinSubject("optimized"), {.counts = &counts});
    EXPECT_FALSE(result.failure) << number;
  }
  auto mark =
      std::ranges::find(kCoverageMarks, kFirstStateMark, &CoverageMark::name);
  for (; mark != kCoverageMarks.end(); ++mark) {
    EXPECT_GT(At(counts.hits, mark - kCoverageMarks.begin()), 0) << mark->name;
  }
}

// Each group of marks is asked for only if some of them are hit.
TEST(StateMarks, AreExpectedTogether) {
  const auto gaps = [](std::string_view hit) {
    CoverageCounts counts;
    const auto mark =
        std::ranges::find(kCoverageMarks, hit, &CoverageMark::name);
    At(counts.hits, mark - kCoverageMarks.begin()) = 1;
    std::string all;
    for (const std::string& gap : CoverageGaps(counts)) all += gap + "\n";
    return all;
  };
  EXPECT_EQ(gaps("filled").find("never: state_cut"), std::string::npos);
  EXPECT_NE(gaps("state_fork").find("never: state_cut"), std::string::npos);
  EXPECT_EQ(gaps("state_fork").find("never: draft_"), std::string::npos);
  EXPECT_EQ(gaps("state_fork").find("never: hybrid_"), std::string::npos);
  EXPECT_NE(gaps("draft_state_read").find("never: commit_state_pin"),
            std::string::npos);
  EXPECT_NE(gaps("hybrid_cut").find("never: hybrid_full"), std::string::npos);
}

// A correct cache, except for what its faults change.
struct DraftFault {
  // Changes the path of a Commit.
  std::function<void(std::vector<int>&)> path = {};
  std::function<void(Cache&, int src, std::int32_t len)> before_copy = {};
  bool saves = false;  // Snapshots have the drafts, without their rows.
};

class FaultyDrafts final : public ForwardingCache {
 public:
  FaultyDrafts(std::unique_ptr<Cache> cache, DraftFault fault)
      : ForwardingCache(std::move(cache)), fault_(std::move(fault)) {}

  Status Commit(int seq, std::span<const int> path) override {
    std::vector<int> changed(path.begin(), path.end());
    if (fault_.path && !changed.empty()) fault_.path(changed);
    return cache_->Commit(seq, changed);
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    if (fault_.before_copy) fault_.before_copy(*cache_, src, len);
    return cache_->CopyPrefix(src, dst, len);
  }
  Status SnapshotTo(CacheState& state) const override {
    Status status = cache_->SnapshotTo(state);
    if (fault_.saves) cache_->ListCells(state.cells);
    return status;
  }

 private:
  const DraftFault fault_;
};

std::optional<Failure> SeenWith(const std::string& history,
                                const DraftFault& fault) {
  Subject subject;
  subject.name = "faulty";
  subject.make = [&](const CacheSpec& spec) -> Result<std::unique_ptr<Cache>> {
    return std::unique_ptr<Cache>(
        std::make_unique<FaultyDrafts>(*MakeReference(spec), fault));
  };
  return RunHistory(*ParseHistory("kvt1 " + history), subject).failure;
}

TEST(FaultyDrafts, AreFound) {
  const std::vector<std::tuple<std::string, std::string, DraftFault, CheckName>>
      cases = {
          {"a rejected draft stays",
           "| put 0*2:-1 | commit 0:0",
           {.path = [](auto& path) { path.push_back(Size(path)); }},
           "subject: cells"},
          {"an accepted draft goes",
           "| put 0*2:-1 | commit 0:0,0",
           {.path = [](auto& path) { path.pop_back(); }},
           "subject: cells"},
          {"the wrong branch is kept",
           "| put 0*2:-1,-1 | commit 0:1",
           {.path = [](auto& path) { path[0] = 1 - path[0]; }},
           "subject: cells"},
          {"a copy has the drafts",
           "| put 0*2:-1 | copy 0>1:9",
           {.before_copy =
                [](Cache& cache, int src, std::int32_t /*len*/) {
                  // It is also called before Init.
                  (void)cache.Commit(src, std::vector<int>{0, 1});
                }},
           "subject: cells"},
          // Its length is within the tokens and drafts.
          {"a copy of a legal client has the drafts",
           "legal=1 | put 0*1 | put 0*1:-1 | copy 0>1:2",
           {.before_copy =
                [](Cache& cache, int src, std::int32_t len) {
                  if (len == 2) (void)cache.Commit(src, std::vector<int>{0});
                }},
           "subject: cells"},
          {"a draft is saved",
           "| start 0*1:-1 | snapshot 0",
           {.saves = true},
           "subject: snapshot"},
      };
  for (const auto& [name, history, fault, check] : cases) {
    SCOPED_TRACE(name);
    EXPECT_FALSE(SeenWith(history, {}));
    const auto found = SeenWith(history, fault);
    ASSERT_TRUE(found);
    EXPECT_EQ(found->check, check.name()) << found->text;
  }
}

// Lets row `row` of the mask see a column.
View SeesColumn(int row, std::int64_t column) {
  return [=](OwnedView& view) {
    if (view.mask.shape[0] > column && view.mask.shape[1] > row) {
      AllowInMask(view.mask, column, row);
    }
  };
}

TEST(FaultyDrafts, AreFoundInViewsAndCells) {
  const auto drop_first = [](std::vector<CellEntry>& cells) {
    if (cells.size() == 5) cells.erase(cells.begin());
  };
  const auto move_last = [](std::vector<CellEntry>& cells) {
    if (cells.size() == 3) ++cells.back().position;
  };
  ExpectFound(
      {{"a sibling is visible", "| put 0*2:-1,-1", Shows(SeesColumn(0, 1)),
        "subject: mask bytes", "row 0 of the mask"},
       {"a nephew is visible", "| put 0*3:-1,-1,0", Shows(SeesColumn(1, 2)),
        "subject: mask bytes", "row 1 of the mask"},
       {"a rejected draft is visible",
        "| put 0*2 | put 0*2:-1,-1 | commit 0:1 | causal",
        Shows(SeesColumn(0, 2)), "subject: mask bytes", "row 0 of the mask"},
       {"a draft is hidden from its child", "| put 0*2:-1",
        Shows([](OwnedView& view) {
          if (view.mask.shape[1] == 2) ChangeByte(view.mask.bytes[8]);
        }),
        "subject: mask bytes", "row 1 of the mask"},
       {"the drafts' positions evict",
        "kind=swa window=2 seqs=1 cap=9 batch=4 | put 0*2 | put 0*3:-1",
        Fault{.cells = drop_first}, "subject: cells", ""},
       {"a committed token has another position",
        "| put 0*2 | put 0*1:-1 | commit 0:0", Fault{.cells = move_last},
        "subject: cells", ""}},
      Level::kIdentity);
}

// The plain reference's mistakes are found as well, by the ledger.
TEST(FaultyDrafts, AreFoundInTheReference) {
  ExpectFound({{"a sibling is visible", "| put 0*2:-1,-1",
                Shows(SeesColumn(0, 1)), "reference: rows", "", Who::kBoth}},
              Level::kIdentity);
}

// A wrapper that has refused drafts still has the layer type that it had.
TEST(RefusedDrafts, LeaveTheLayerType) {
  for (const std::string_view history :
       {"caches=encoder/causal cells=1 | type 1 | put 0*1:-1 | type 0 | cached",
        "caches=causal/encoder cells=1 | type 1 | put 0*1:-1 | cached"}) {
    Subject subject = TwinSubject("reference");
    subject.level = Level::kVisibility;
    const RunResult result = RunHistory(
        *ParseHistory("kvt1 kind=wrapper " + std::string(history)), subject);
    EXPECT_FALSE(result.failure) << history << ": " << result.failure->text;
  }
}

}  // namespace
}  // namespace kvtwin::props
