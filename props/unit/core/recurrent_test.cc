// Recurrent and hybrid caches, call by call (R1 to R15, H1 to H4).

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "kvtwin/save.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

using Tags = std::vector<float>;
using enum StatusCode;

CacheSpec Recurrent(int every, int checkpoints,
                    Placement placement = Placement::kContiguous) {
  CacheSpec spec;
  spec.kind = Kind::kRecurrent;
  spec.placement = placement;
  spec.checkpoint_every = every;
  spec.checkpoints = checkpoints;
  return spec;
}

CacheSpec Windowed(int window) {
  CacheSpec spec;
  spec.kind = Kind::kSwa;
  spec.window = window;
  return spec;
}

CacheSpec Hybrid(std::vector<CacheSpec> caches) {
  CacheSpec spec;
  spec.kind = Kind::kHybrid;
  spec.caches = std::move(caches);
  return spec;
}

// The positions of the states of `seq`.
std::vector<std::int32_t> StatesOf(TestCache& cache, int seq) {
  std::vector<std::int32_t> positions;
  for (const CellEntry& entry : cache.Cells()) {
    if (entry.sequence == seq) positions.push_back(entry.position);
  }
  std::ranges::sort(positions);
  return positions;
}

std::vector<int> BatchCells(TestCache& cache) {
  const auto cells = cache->BatchCells();
  return {cells.begin(), cells.end()};
}

using Positions = std::vector<std::int32_t>;

Status Draft(TestCache& cache, const Positions& positions,
             const std::vector<int>& parents, int seq = 0) {
  const std::vector<int> sequences(positions.size(), seq);
  return cache->StartForward(
      {.positions = positions, .sequences = sequences, .parents = parents},
      /*reserve=*/false);
}

CacheSpec WithDrafts(int every, int checkpoints, int drafts) {
  CacheSpec spec = Recurrent(every, checkpoints);
  spec.drafts = drafts;
  return spec;
}

class Recurrence : public EachTwin {};

INSTANTIATE_TEST_SUITE_P(Twins, Recurrence,
                         ::testing::Values("reference", "optimized"),
                         TwinTestName);

TEST_P(Recurrence, ABatchReadsTheStateBeforeIt) {
  TestCache cache(Recurrent(0, 0), GetParam());
  ASSERT_EQ(cache.Init(2, 100, 4), kOk);
  EXPECT_EQ(cache->CellCount(), 4);
  cache.Append(0, 0, {1, 2, 3});
  EXPECT_EQ(BatchCells(cache), (std::vector<int>{-1, -1, 0}));
  for (int row = 0; row < 3; ++row) EXPECT_EQ(cache.SeenV(row), Tags());
  cache.Append(0, 3, {4, 5});
  EXPECT_EQ(cache.SeenV(0), Tags{3});
  EXPECT_EQ(cache.SeenV(1), Tags{3});
  EXPECT_EQ(StatesOf(cache, 0), (Positions{2, 4}));
  cache.Append(0, 5, {6});
  EXPECT_EQ(cache.SeenK(0), Tags{5});
  EXPECT_EQ(StatesOf(cache, 0), (Positions{4, 5}));
}

TEST_P(Recurrence, KeepsTheLastCheckpoints) {
  TestCache cache(Recurrent(2, 2), GetParam());
  ASSERT_EQ(cache.Init(1, 100, 9), kOk);
  EXPECT_EQ(cache->CellCount(), 4);
  cache.Append(0, 0, {1, 2, 3, 4, 5, 6, 7, 8, 9});
  EXPECT_EQ(BatchCells(cache),
            (std::vector<int>{-1, -1, -1, -1, -1, 0, -1, 1, 2}));
  EXPECT_EQ(StatesOf(cache, 0), (Positions{5, 7, 8}));
  EXPECT_TRUE(*cache->CanResume(0, 6));
  EXPECT_TRUE(*cache->CanResume(0, 0));
  EXPECT_FALSE(*cache->CanResume(0, 7));
  EXPECT_EQ(*cache->ResumeBefore(0, 7), 6);
  EXPECT_EQ(*cache->ResumeBefore(0, 5), 0);
  EXPECT_EQ(*cache->ResumeBefore(0, kOpenEnd), 9);
  EXPECT_EQ(*cache->ResumeBefore(1, 5), 0);
  EXPECT_EQ(*cache->WhyNotResume(0, 7),
            "no state at 7; the latest before it is at 6");
  EXPECT_EQ(*cache->WhyNotResume(0, 5), "no state at or before 5");
  EXPECT_EQ(*cache->WhyNotResume(0, 8), "");
  cache.Append(0, 9, {10});
  EXPECT_EQ(cache.SeenV(0), Tags{9});
  EXPECT_EQ(StatesOf(cache, 0), (Positions{7, 8, 9}));
}

TEST_P(Recurrence, RollsBackAndForks) {
  TestCache cache(Recurrent(2, 2), GetParam());
  ASSERT_EQ(cache.Init(2, 100, 9), kOk);
  cache.Append(0, 0, {1, 2, 3, 4, 5});
  ASSERT_TRUE(cache->CopyPrefix(0, 1, 3).ok());  // It has no state at 3.
  EXPECT_EQ(StatesOf(cache, 1), (Positions{1}));
  cache.Append(1, 2, {30});
  EXPECT_EQ(cache.SeenV(0), Tags{2});
  ASSERT_TRUE(cache->Remove(0, 4, kOpenEnd).ok());
  EXPECT_EQ(*cache->ResumeBefore(0, 9), 4);
  cache.Append(0, 4, {50});
  EXPECT_EQ(cache.SeenV(0), Tags{4});
  ASSERT_TRUE(cache->CopyPrefix(0, 0, 2).ok());
  EXPECT_EQ(StatesOf(cache, 0), (Positions{1}));
}

TEST_P(Recurrence, RefusesBatchesThatDoNotContinue) {
  TestCache cache(Recurrent(0, 0), GetParam());
  ASSERT_EQ(cache.Init(2, 100, 4), kOk);
  EXPECT_EQ(cache.Start({1}, {0}), kInvalidArgument);
  cache.Append(0, 0, {1, 2});
  const std::vector<CellEntry> before = cache.Cells();
  for (const auto& [positions, sequences] :
       std::vector<std::pair<Positions, std::vector<int>>>{{{1}, {0}},
                                                           {{3}, {0}},
                                                           {{2, 2}, {0, 0}},
                                                           {{3, 2}, {0, 0}},
                                                           {{2, 4}, {0, 0}},
                                                           {{2, 3}, {0, 1}}}) {
    EXPECT_EQ(cache.Start(positions, sequences), kInvalidArgument);
    EXPECT_EQ(cache.Cells(), before);
    EXPECT_EQ(cache.SeenV(0), Tags());  // The pass continues (S47).
  }
  EXPECT_EQ(cache.Start({2, 0, 3, 1}, {0, 1, 0, 1}), kOk);
  EXPECT_EQ(cache.Put({3, 11, 4, 12}), kOk);
  EXPECT_EQ(cache.SeenV(0), Tags{2});
  EXPECT_EQ(cache.SeenV(1), Tags());
}

TEST_P(Recurrence, CannotLoseTokensInTheMiddle) {
  TestCache cache(Recurrent(1, 9), GetParam());
  ASSERT_EQ(cache.Init(1, 100, 4), kOk);
  cache.Append(0, 0, {1, 2, 3});
  EXPECT_EQ(cache->SetCausal({}).code(), kNotSupported);
  for (const auto& [begin, end] :
       {std::pair(0, 1), {0, 3}, {1, 9}, {2, 3}, {1, 1}}) {
    EXPECT_EQ(cache->Remove(0, begin, end).code(), kNotSupported);
  }
  EXPECT_EQ(cache->Remove(0, 3, 4).code(), kOk);
  EXPECT_EQ(cache->Remove(1, 0, 4).code(), kOk);
  EXPECT_EQ(StatesOf(cache, 0), (Positions{0, 1, 2}));
}

// The pass does not overwrite the state that it reads.
TEST_P(Recurrence, RowsWithoutACellAreNotRead) {
  for (const Placement placement :
       {Placement::kContiguous, Placement::kScatter}) {
    TestCache cache(Recurrent(3, 1, placement), GetParam());
    ASSERT_EQ(cache.Init(1, 100, 4), kOk);
    EXPECT_EQ(cache->CellCount(), 3);
    for (std::int32_t at = 0; at < 40; at += 4) {
      const auto first = static_cast<float>(at);
      cache.Append(0, at, {first, first + 1, first + 2, first + 3});
      EXPECT_EQ(cache.SeenV(3), at == 0 ? Tags() : Tags{first - 1});
      EXPECT_TRUE(*cache->CanResume(0, (at + 4) / 3 * 3));
    }
  }
}

TEST_P(Recurrence, RefusesSnapshotsOfTwoStatesAtOnePosition) {
  TestCache cache(Recurrent(1, 1), GetParam());
  ASSERT_EQ(cache.Init(1, 100, 4), kOk);
  cache.Append(0, 0, {1});
  cache.Append(0, 1, {2});
  CacheState state = *cache->Snapshot();
  ASSERT_EQ(state.cells.size(), 2U);
  state.cells[1].position = state.cells[0].position;
  EXPECT_EQ(cache->Restore(state).code(), kInvalidArgument);
  EXPECT_EQ(cache->AddSequence(3, state).code(), kInvalidArgument);
  state.cells[1].position = 9;  // A state of a cache with other checkpoints.
  EXPECT_TRUE(cache->Restore(state).ok());
  cache.Append(0, 10, {11});
  EXPECT_EQ(cache.SeenV(0), Tags{2});
}

TEST_P(Recurrence, CountsCellsWithoutOverflow) {
  constexpr int kMax = std::numeric_limits<int>::max();
  CacheSpec most = Recurrent(1, kMax - 2);
  EXPECT_EQ(TestCache(most, GetParam()).Init(kMax, 1, 1), kInvalidArgument);
  most.pins = most.drafts = kMax;
  EXPECT_EQ(MakeCache(most, GetParam()).status().message(),
            "a sequence would have 6442450941 states, there can be 2147483647");
  EXPECT_EQ(MakeCache(Recurrent(1, kMax - 1), GetParam()).status().code(),
            kInvalidArgument);
  EXPECT_EQ(TestCache(Recurrent(1, 1), GetParam()).Init(kMax, 1, 1),
            kInvalidArgument);
  EXPECT_EQ(TestCache(Recurrent(0, kMax), GetParam()).Init(1, 1, 1), kOk);
}

TEST_P(Recurrence, SpecsAreChecked) {
  EXPECT_EQ(MakeCache(Recurrent(-1, 0), GetParam()).status().code(),
            kInvalidArgument);
  EXPECT_EQ(MakeCache(Recurrent(0, -1), GetParam()).status().code(),
            kInvalidArgument);
  CacheSpec negative = WithDrafts(0, 0, -1);
  EXPECT_EQ(MakeCache(negative, GetParam()).status().message(),
            "drafts is -1, it must not be negative");
  negative.drafts = 0;
  negative.pins = -1;
  EXPECT_EQ(MakeCache(negative, GetParam()).status().message(),
            "pins is -1, it must not be negative");
  EXPECT_EQ(MakeCache(Hybrid({}), GetParam()).status().code(),
            kInvalidArgument);
  EXPECT_EQ(
      MakeCache(Hybrid({Hybrid({CacheSpec()})}), GetParam()).status().code(),
      kInvalidArgument);
}

// The tree of docs/hybrid.md.
TEST_P(Recurrence, EachDraftHasAState) {
  TestCache cache(WithDrafts(0, 0, 8), GetParam());
  ASSERT_EQ(cache.Init(1, 100, 9), kOk);
  EXPECT_EQ(cache->CellCount(), 10);
  cache.Append(0, 0, {1, 2, 3, 4, 5});
  ASSERT_TRUE(Draft(cache, {5, 6, 5}, {-1, 0, -1}).ok());
  ASSERT_EQ(cache.Put({60, 70, 61}), kOk);
  for (int row = 0; row < 3; ++row) EXPECT_EQ(cache.SeenV(row), Tags{5});
  ASSERT_TRUE(Draft(cache, {6, 7}, {0, 3}).ok());
  ASSERT_EQ(cache.Put({71, 80}), kOk);
  EXPECT_EQ(cache.SeenV(0), Tags{60});
  EXPECT_EQ(cache.SeenV(1), Tags{60});
  EXPECT_EQ(*cache->ResumeBefore(0, 9), 5);
  EXPECT_EQ(cache->Snapshot()->cells.size(), 1U);
  ASSERT_TRUE(cache->Commit(0, std::vector<int>{0, 3}).ok());
  EXPECT_EQ(StatesOf(cache, 0), (Positions{4, 6}));
  cache.Append(0, 7, {81});
  EXPECT_EQ(cache.SeenV(0), Tags{71});
}

TEST_P(Recurrence, ACommittedPathLeavesWhatABatchLeaves) {
  TestCache cache(WithDrafts(2, 2, 8), GetParam());
  ASSERT_EQ(cache.Init(1, 100, 9), kOk);
  cache.Append(0, 0, {1, 2, 3, 4, 5});
  EXPECT_EQ(StatesOf(cache, 0), (Positions{1, 3, 4}));
  ASSERT_TRUE(Draft(cache, {5, 6, 7, 8, 9}, {-1, 0, 1, 2, 3}).ok());
  ASSERT_EQ(cache.Put({6, 7, 8, 9, 10}), kOk);
  ASSERT_TRUE(cache->Commit(0, std::vector<int>{0, 1, 2, 3}).ok());
  EXPECT_EQ(StatesOf(cache, 0), (Positions{4, 5, 7, 8}));
  // The whole path can be taken back.
  ASSERT_TRUE(cache->Remove(0, 5, kOpenEnd).ok());
  cache.Append(0, 5, {60});
  EXPECT_EQ(cache.SeenV(0), Tags{5});
}

TEST_P(Recurrence, RejectedDraftsChangeNothing) {
  TestCache cache(WithDrafts(2, 2, 8), GetParam());
  ASSERT_EQ(cache.Init(2, 100, 9), kOk);
  cache.Append(0, 0, {1, 2, 3, 4, 5});
  for (int way = 0; way < 3; ++way) {
    ASSERT_TRUE(Draft(cache, {5, 6}, {-1, 0}).ok());
    ASSERT_EQ(cache.Put({60, 70}), kOk);
    EXPECT_EQ(cache.Start({5}, {0}), kFailedPrecondition);
    const Status status = way == 0   ? cache->Commit(0, {})
                          : way == 1 ? cache->Remove(0, 9, kOpenEnd)
                                     : cache->CopyPrefix(0, 0, 9);
    ASSERT_TRUE(status.ok());
    EXPECT_EQ(StatesOf(cache, 0), (Positions{1, 3, 4}));
  }
  cache.Append(0, 5, {6});
  EXPECT_EQ(cache.SeenV(0), Tags{5});
}

TEST_P(Recurrence, DraftsBeginAtTheEndAndNeedRoom) {
  TestCache cache(WithDrafts(0, 0, 1), GetParam());
  ASSERT_EQ(cache.Init(2, 100, 9), kOk);
  EXPECT_EQ(Draft(cache, {3}, {-1}).code(), kInvalidArgument);
  EXPECT_EQ(Draft(cache, {0, 0}, {-1, -1}).code(), kOk);
  ASSERT_EQ(cache.Put({1, 10}), kOk);
  EXPECT_EQ(cache.SeenV(1), Tags());
  EXPECT_EQ(Draft(cache, {1}, {-1}).code(), kInvalidArgument);
  // Six cells: four more drafts find room, the next do not.
  EXPECT_EQ(Draft(cache, {1, 1, 1, 1}, {0, 0, 1, 1}).code(), kOk);
  ASSERT_EQ(cache.Put({2, 3, 4, 5}), kOk);
  EXPECT_EQ(cache.SeenV(2), Tags{10});
  EXPECT_EQ(Draft(cache, {0}, {-1}).code(), kCacheFull);
  ASSERT_TRUE(cache->Commit(0, std::vector<int>{1, 4}).ok());
  cache.Append(0, 2, {6});
  EXPECT_EQ(cache.SeenV(0), Tags{4});
  TestCache none(Recurrent(2, 2), GetParam());
  ASSERT_EQ(none.Init(1, 100, 9), kOk);
  EXPECT_EQ(Draft(none, {0}, {-1}).code(), kNotSupported);
  EXPECT_EQ(none->Commit(0, {}).code(), kNotSupported);
}

// A hybrid commits all parts, and gives drafts back if one part has no room.
TEST_P(Recurrence, AHybridCommitsAllParts) {
  TestCache cache(Hybrid({CacheSpec(), WithDrafts(2, 1, 2), Windowed(2)}),
                  GetParam());
  ASSERT_EQ(cache.Init(1, 100, 9), kOk);
  ASSERT_EQ(cache.Start({0, 1, 2}, std::vector<int>(3)), kOk);
  ASSERT_TRUE(Draft(cache, {3, 4}, {-1, 0}).ok());
  EXPECT_EQ(Draft(cache, {4, 4}, {0, 0}).code(), kCacheFull);
  ASSERT_TRUE(cache->Commit(0, std::vector<int>{0, 1}).ok());
  const std::vector<Positions> ends = {
      {0, 1, 2, 3, 4}, {2, 3, 4}, {1, 2, 3, 4}};
  for (int type = 0; type < 3; ++type) {
    ASSERT_TRUE(cache->SetLayerType(type).ok());
    EXPECT_EQ(StatesOf(cache, 0), ends[static_cast<std::size_t>(type)]);
  }
  EXPECT_EQ(cache.Start({5}, {0}), kOk);
}

TEST_P(Recurrence, PinnedStatesStay) {
  CacheSpec spec = Recurrent(0, 0);
  spec.pins = 2;
  TestCache cache(spec, GetParam());
  EXPECT_EQ(cache->Checkpoint(0).code(), kFailedPrecondition);
  ASSERT_EQ(cache.Init(2, 100, 9), kOk);
  EXPECT_EQ(cache->CellCount(), 8);
  EXPECT_EQ(cache->Checkpoint(-1).message(),
            "seq is -1, it must not be negative");
  EXPECT_EQ(cache->Checkpoint(0).code(), kOk);  // There is nothing to pin.
  cache.Append(0, 0, {1, 2, 3, 4, 5});
  ASSERT_TRUE(cache->Checkpoint(0).ok());
  ASSERT_TRUE(cache->Checkpoint(0).ok());
  cache.Append(0, 5, {6, 7});
  ASSERT_TRUE(cache->Checkpoint(0).ok());
  cache.Append(0, 7, {8});
  cache.Append(0, 8, {9});
  EXPECT_EQ(StatesOf(cache, 0), (Positions{4, 6, 7, 8}));
  // The budget is used up: the oldest state leaves with the next pass.
  ASSERT_TRUE(cache->Checkpoint(0).ok());
  EXPECT_EQ(StatesOf(cache, 0), (Positions{4, 6, 7, 8}));
  cache.Append(0, 9, {10});
  EXPECT_EQ(StatesOf(cache, 0), (Positions{6, 8, 9}));
  // A fork has the pins of its states.
  ASSERT_TRUE(cache->CopyPrefix(0, 1, 9).ok());
  cache.Append(1, 9, {20});
  cache.Append(1, 10, {21});
  EXPECT_EQ(StatesOf(cache, 1), (Positions{6, 8, 9, 10}));
  // Remove takes a pin away with its state.
  ASSERT_TRUE(cache->Remove(0, 8, kOpenEnd).ok());
  cache.Append(0, 7, {80, 90});
  cache.Append(0, 9, {100});
  cache.Append(0, 10, {110});
  EXPECT_EQ(StatesOf(cache, 0), (Positions{6, 9, 10}));
  // So does Restore, but the states stay until the next pass.
  ASSERT_TRUE(cache->Restore(*cache->Snapshot()).ok());
  EXPECT_EQ(StatesOf(cache, 0), (Positions{6, 9, 10}));
  cache.Append(0, 11, {120});
  EXPECT_EQ(StatesOf(cache, 0), (Positions{10, 11}));
}

TEST_P(Recurrence, OnlyCachesWithPinsHaveCheckpoint) {
  CacheSpec pinned = Recurrent(0, 0);
  pinned.pins = 1;
  for (const auto& [spec, code] :
       {std::pair(CacheSpec(), kNotSupported),
        {Recurrent(2, 2), kNotSupported},
        {Hybrid({CacheSpec(), Recurrent(2, 2)}), kNotSupported},
        {Hybrid({CacheSpec(), Recurrent(2, 2), pinned}), kOk}}) {
    TestCache cache(spec, GetParam());
    ASSERT_EQ(cache.Init(1, 100, 9), kOk);
    EXPECT_EQ(cache->Checkpoint(-1).code(), kInvalidArgument);
    EXPECT_EQ(cache->Checkpoint(-1).message(),
              "seq is -1, it must not be negative");
    EXPECT_EQ(cache->Checkpoint(0).code(), code);
  }
}

TEST_P(Recurrence, AHybridHasOneLength) {
  TestCache cache(Hybrid({CacheSpec(), Recurrent(3, 2), Windowed(2)}),
                  GetParam());
  ASSERT_EQ(cache.Init(2, 100, 9), kOk);
  ASSERT_EQ(cache.Start({0, 1, 2, 3, 4, 5, 6}, std::vector<int>(7)), kOk);
  EXPECT_FALSE(*cache->CanResume(0, 5));
  EXPECT_EQ(*cache->ResumeBefore(0, 5), 3);
  EXPECT_EQ(*cache->WhyNotResume(0, 5),
            "caches[1]: no state at 5; the latest before it is at 3");
  ASSERT_TRUE(cache->CopyPrefix(0, 1, 5).ok());
  const std::vector<Positions> prefix = {{0, 1, 2}, {2}, {0, 1, 2}};
  for (int type = 0; type < 3; ++type) {
    ASSERT_TRUE(cache->SetLayerType(type).ok());
    EXPECT_EQ(StatesOf(cache, 1), prefix[static_cast<std::size_t>(type)]);
  }
  EXPECT_EQ(cache->Remove(0, 5, 6).code(), kNotSupported);
  ASSERT_TRUE(cache->Remove(0, 5, kOpenEnd).ok());
  EXPECT_EQ(cache.Start({5}, {0}), kInvalidArgument);
  EXPECT_EQ(cache.Start({3, 3}, {0, 1}), kOk);
}

// The window of one cache is gone, so that the others go back, too.
TEST_P(Recurrence, AHybridStepsBackUntilAllAgree) {
  TestCache cache(Hybrid({Windowed(2), Recurrent(2, 9)}), GetParam());
  ASSERT_EQ(cache.Init(1, 100, 1), kOk);
  for (std::int32_t at = 0; at < 9; ++at)
    EXPECT_EQ(cache.Start({at}, {0}), kOk);
  EXPECT_EQ(*cache->ResumeBefore(0, 8), 8);
  EXPECT_EQ(*cache->ResumeBefore(0, 7), 0);
  ASSERT_TRUE(cache->Remove(0, 7, kOpenEnd).ok());
  EXPECT_EQ(cache.Cells(), std::vector<CellEntry>());
  EXPECT_EQ(cache.Start({0}, {0}), kOk);
}

TEST_P(Recurrence, MisuseOfResumeBeforeIsRefused) {
  for (const CacheSpec& spec :
       {CacheSpec(), Recurrent(1, 1), Hybrid({CacheSpec()})}) {
    TestCache cache(spec, GetParam());
    EXPECT_EQ(cache->ResumeBefore(0, 0).status().code(), kFailedPrecondition);
    ASSERT_EQ(cache.Init(1, 4, 4), kOk);
    EXPECT_EQ(cache->ResumeBefore(-1, 0).status().code(), kInvalidArgument);
    EXPECT_EQ(cache->ResumeBefore(0, -1).status().code(), kInvalidArgument);
    EXPECT_EQ(*cache->ResumeBefore(0, 0), 0);
    cache->Close();
    EXPECT_EQ(cache->ResumeBefore(0, 0).status().code(), kFailedPrecondition);
  }
}

}  // namespace
}  // namespace kvtwin::props
