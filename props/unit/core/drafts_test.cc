// Drafts of both twins, call by call (D1 to D8).

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kvtwin/save.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

using Floats = std::vector<float>;
using Ints = std::vector<int>;
using enum StatusCode;

class Drafts : public EachTwin {
 protected:
  static CacheSpec Windowed(std::int32_t window) {
    CacheSpec spec;
    spec.kind = Kind::kSwa;
    spec.window = window;
    return spec;
  }
  Status Draft(Cache& cache, const std::vector<std::int32_t>& positions,
               const Ints& parents, int seq = 0) {
    const Ints sequences(positions.size(), seq);
    return cache.StartForward(
        {.positions = positions, .sequences = sequences, .parents = parents},
        /*reserve=*/false);
  }
  // A cache of the tokens 1 and 2 of sequence 0.
  TestCache Begun(const CacheSpec& spec = {}) {
    TestCache cache(spec, GetParam());
    EXPECT_EQ(cache.Init(2, 8, 8), kOk);
    cache.Append(0, 0, {1, 2});
    return cache;
  }
};
INSTANTIATE_TEST_SUITE_P(Twins, Drafts,
                         ::testing::Values("reference", "optimized"),
                         TwinTestName);

TEST_P(Drafts, SeeTheirAncestorsAlone) {
  TestCache cache = Begun();
  // 10 and 20 follow the tokens; 30 and 40 follow 10; 50 follows 30.
  ASSERT_TRUE(Draft(*cache, {2, 2, 3, 3, 4}, {-1, -1, 0, 0, 2}).ok());
  ASSERT_EQ(cache.Put({10, 20, 30, 40, 50}), kOk);
  EXPECT_EQ(cache.SeenV(0), Floats({1, 2, 10}));
  EXPECT_EQ(cache.SeenV(1), Floats({1, 2, 20}));
  EXPECT_EQ(cache.SeenV(2), Floats({1, 2, 10, 30}));
  EXPECT_EQ(cache.SeenV(3), Floats({1, 2, 10, 40}));
  EXPECT_EQ(cache.SeenV(4), Floats({1, 2, 10, 30, 50}));
  // A second level, and an exception, which reveals no other draft.
  ASSERT_TRUE(Draft(*cache, {4, 3}, {3, 1}).ok());
  ASSERT_EQ(cache.Put({60, 70}), kOk);
  const Ints all = {0, 1};
  ASSERT_TRUE(cache->SetCausal(all).ok());
  EXPECT_EQ(cache.SeenV(0), Floats({1, 2, 10, 40, 60}));
  EXPECT_EQ(cache.SeenV(1), Floats({1, 2, 20, 70}));
  // The committed path is seen, the rest is gone.
  ASSERT_TRUE(cache->Commit(0, Ints{0, 3, 5}).ok());
  EXPECT_EQ(cache.Cells().size(), 5U);
  cache.Append(0, 5, {80});
  EXPECT_EQ(cache.SeenV(0), Floats({1, 2, 10, 80, 40, 60}));
}

TEST_P(Drafts, WithAWindowSeePartOfTheirAncestors) {
  TestCache cache = Begun(Windowed(1));
  ASSERT_TRUE(Draft(*cache, {2, 3, 4}, {-1, 0, 1}).ok());
  ASSERT_EQ(cache.Put({10, 20, 30}), kOk);
  EXPECT_EQ(cache.SeenV(0), Floats({2, 10}));
  EXPECT_EQ(cache.SeenV(1), Floats({10, 20}));
  EXPECT_EQ(cache.SeenV(2), Floats({20, 30}));
  // The window of position 2 survives the second level, and the rejection.
  ASSERT_TRUE(Draft(*cache, {5, 6}, {2, 3}).ok());
  ASSERT_TRUE(cache->Commit(0, {}).ok());
  cache.Append(0, 2, {40});
  EXPECT_EQ(cache.SeenV(0), Floats({2, 40}));
}

TEST_P(Drafts, NameWhatIsWrong) {
  TestCache cache = Begun();
  ASSERT_TRUE(Draft(*cache, {2, 3}, {-1, 0}).ok());
  EXPECT_EQ(Draft(*cache, {4}, {2}).message(),
            "token 0 of the batch follows draft 2, sequence 0 has 2 drafts "
            "before it");
  EXPECT_EQ(Draft(*cache, {4, 4}, {1, 0}).message(),
            "token 1 of the batch is at position 4 and follows draft 0 of "
            "sequence 0: its position must be 3");
  EXPECT_EQ(Draft(*cache, {3}, {-1}).message(),
            "token 0 of the batch is at position 3 and follows the committed "
            "tokens of sequence 0: its position must be 2");
  EXPECT_EQ(Draft(*cache, {0}, {0}, 1).message(),
            "token 0 of the batch follows draft 0, sequence 1 has 0 drafts "
            "before it");
  EXPECT_EQ(Draft(*cache, {2}, {-2}).message(),
            "sequence 0 has 2 drafts: commit first");
  EXPECT_EQ(Draft(*cache, {2}, {}).code(), kFailedPrecondition);
  EXPECT_EQ(Draft(*cache, {2}, {-3}).message(),
            "the parent of token 0 is -3, it must be at least -2");
  EXPECT_EQ(Draft(*cache, {2}, {-1, 0}).message(),
            "the batch has 1 positions and 2 parents");
  EXPECT_EQ(Draft(*cache, {0, 1}, {-1, -2}, 1).message(),
            "token 1 of the batch is not a draft, others of sequence 1 are");
  EXPECT_EQ(cache->Commit(0, Ints{1}).message(),
            "the path has draft 1 of sequence 0 after the committed tokens, it "
            "follows draft 0");
  EXPECT_EQ(cache->Commit(0, Ints{0, 2}).message(),
            "the path has draft 2, sequence 0 has 2 drafts");
  EXPECT_EQ(cache->Commit(-1, {}).message(),
            "seq is -1, it must not be negative");
  EXPECT_EQ(cache->Commit(1, Ints{0}).code(), kInvalidArgument);
  EXPECT_TRUE(cache->Commit(1, {}).ok());
  // Nothing changed, and the pass continues.
  EXPECT_EQ(cache->BatchCells().size(), 2U);
  EXPECT_TRUE(cache->Commit(0, Ints{0, 1}).ok());
}

TEST_P(Drafts, OfASequenceWithoutTokensBeginAnywhere) {
  TestCache cache = Begun();
  ASSERT_TRUE(Draft(*cache, {7, 8, 7}, {-1, 0, -1}, 1).ok());
  EXPECT_EQ(Draft(*cache, {0}, {-1}, 1).code(), kInvalidArgument);
  ASSERT_TRUE(Draft(*cache, {7}, {-1}, 1).ok());
  ASSERT_TRUE(cache->Commit(1, Ints{2}).ok());
  EXPECT_EQ(Draft(*cache, {7}, {-1}, 1).code(), kInvalidArgument);
  EXPECT_TRUE(Draft(*cache, {8}, {-1}, 1).ok());
}

TEST_P(Drafts, AreNeitherSharedNorSaved) {
  TestCache cache = Begun();
  const CacheState before = *cache->Snapshot();
  ASSERT_TRUE(Draft(*cache, {2, 3}, {-1, 0}).ok());
  ASSERT_EQ(cache.Put({10, 20}), kOk);
  EXPECT_EQ(*cache->Snapshot(), before);
  EXPECT_EQ(*cache->SnapshotOf(0), SequenceOf(before, 0));
  EXPECT_EQ(cache.Cells().size(), 4U);
  EXPECT_TRUE(*cache->CanResume(0, 2));
  ASSERT_TRUE(cache->CopyPrefix(0, 1, 4).ok());
  EXPECT_EQ(cache->SnapshotOf(1)->cells.size(), 2U);
  // The copy's source still has its drafts.
  ASSERT_TRUE(cache->Commit(0, Ints{0}).ok());
  EXPECT_EQ(cache->SnapshotOf(0)->cells.size(), 3U);
}

TEST_P(Drafts, AreDroppedByOtherChanges) {
  using Change = std::function<Status(Cache&, const CacheState&)>;
  const Change changes[] = {
      [](Cache& c, auto&) { return c.Remove(0, 5, 5); },
      [](Cache& c, auto&) { return c.CopyPrefix(0, 0, 8); },
      [](Cache& c, auto&) { return c.CopyPrefix(1, 0, 8); },
      [](Cache& c, auto& state) { return c.Restore(state); },
      [](Cache& c, auto&) { return c.AddSequence(3, {}); },
  };
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kIdentity;
  for (const Change& change : changes) {
    TestCache cache = Begun(spec);
    const CacheState state = *cache->Snapshot();
    ASSERT_TRUE(Draft(*cache, {2, 3}, {-1, 0}).ok());
    ASSERT_TRUE(change(*cache, state).ok());
    EXPECT_EQ(cache->Commit(0, Ints{0}).code(), kInvalidArgument);
    EXPECT_LE(cache.Cells().size(), 2U);
  }
  // A refusal changes nothing.
  TestCache cache = Begun();
  ASSERT_TRUE(Draft(*cache, {2, 3}, {-1, 0}).ok());
  EXPECT_EQ(cache->Remove(0, 0, 1).code(), kNotSupported);
  EXPECT_TRUE(cache->Commit(0, Ints{0}).ok());
}

// The window before the cache that refuses them evicts nothing (D8).
TEST_P(Drafts, AreRefusedBeforeAnyCacheOfAWrapperChanges) {
  for (const Kind kind : {Kind::kWrapper, Kind::kHybrid}) {
    CacheSpec states;
    states.kind = Kind::kRecurrent;
    CacheSpec spec;
    spec.kind = kind;
    spec.caches = {Windowed(0), states};
    TestCache cache = Begun(spec);
    const CacheState before = *cache->Snapshot();
    EXPECT_EQ(Draft(*cache, {2}, {-1}).code(), kNotSupported);
    EXPECT_EQ(*cache->Snapshot(), before);
    EXPECT_EQ(cache.Put({10}), kFailedPrecondition);  // No pass is left (S5).
    EXPECT_EQ(cache->Commit(0, Ints{}).code(), kNotSupported);
  }
}

TEST_P(Drafts, StayWhereTheyAreWhenACommitComesInAPass) {
  TestCache cache = Begun();
  ASSERT_TRUE(Draft(*cache, {2, 2}, {-1, -1}).ok());
  ASSERT_EQ(cache.Put({10, 20}), kOk);
  ASSERT_TRUE(cache->Commit(0, Ints{1}).ok());
  // The view and the mask are those of the pass.
  EXPECT_EQ(cache.SeenV(0), Floats({1, 2, 10}));
  EXPECT_EQ(cache.SeenV(1), Floats({1, 2, 20}));
  // A rebuilt mask shows what is left.
  ASSERT_TRUE(cache->SetCausal({}).ok());
  EXPECT_EQ(cache.SeenV(0), Floats({1, 2, 20}));
  EXPECT_EQ(cache.Cells().back().cell, 3);
}

TEST_P(Drafts, OfAWrapperAreTakenByAllOrNone) {
  CacheSpec spec;
  spec.kind = Kind::kWrapper;
  spec.caches = {CacheSpec(), Windowed(0)};
  TestCache cache(spec, GetParam());
  ASSERT_EQ(cache.Init(1, 6, 2), kOk);
  cache.Append(0, 0, {1, 2});
  ASSERT_TRUE(Draft(*cache, {2, 2}, {-1, -1}).ok());
  // The second cache has 2 cells.
  EXPECT_EQ(Draft(*cache, {3}, {0}).code(), kCacheFull);
  EXPECT_EQ(cache->Commit(0, Ints{0, 2}).code(), kInvalidArgument);
  ASSERT_TRUE(cache->Commit(0, Ints{1}).ok());
  EXPECT_EQ(cache.Cells().size(), 3U);
  ASSERT_TRUE(cache->SetLayerType(1).ok());
  EXPECT_EQ(cache.Cells().size(), 1U);
}

TEST_P(Drafts, AreNotForEncoders) {
  CacheSpec spec;
  spec.kind = Kind::kWrapper;
  spec.caches.resize(2);
  spec.caches[1].kind = Kind::kEncoder;
  TestCache cache(spec, GetParam());
  ASSERT_EQ(cache.Init(1, 4, 4), kOk);
  EXPECT_EQ(Draft(*cache, {0}, {-1}).code(), kNotSupported);
  EXPECT_TRUE(cache.Cells().empty());
  EXPECT_EQ(cache->Commit(0, {}).code(), kNotSupported);
  EXPECT_EQ(cache.Start({0}, {0}), kOk);
}

TEST_P(Drafts, MoveWithADefrag) {
  TestCache cache(CacheSpec(), GetParam());
  ASSERT_EQ(cache.Init(1, 6, 4), kOk);
  cache.Append(1, 0, {1});
  cache.Append(0, 0, {2, 3});
  ASSERT_TRUE(Draft(*cache, {2, 2}, {-1, -1}).ok());
  ASSERT_EQ(cache.Put({10, 20}), kOk);
  ASSERT_TRUE(cache->Remove(1, 0, kOpenEnd).ok());
  ASSERT_TRUE(Draft(*cache, {3, 3}, {1, 0}).ok());
  ASSERT_EQ(cache.Put({30, 40}), kOk);
  EXPECT_THAT(cache.SeenV(0), ::testing::UnorderedElementsAre(2, 3, 20, 30));
  ASSERT_TRUE(cache->Commit(0, Ints{1, 2}).ok());
  cache.Append(0, 4, {50});
  EXPECT_THAT(cache.SeenV(0),
              ::testing::UnorderedElementsAre(2, 3, 20, 30, 50));
}

}  // namespace
}  // namespace kvtwin::props
