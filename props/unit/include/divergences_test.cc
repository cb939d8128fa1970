// Each test covers one line of docs/divergences.md, on both twins: what kvtwin
// does differently from the program that it comes from.

#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

using Floats = std::vector<float>;

class Divergences : public EachTwin {
 protected:
  static CacheSpec Spec(Kind kind, ShiftKind shift = ShiftKind::kAdd) {
    CacheSpec spec;
    spec.kind = kind;
    spec.shift.kind = shift;
    return spec;
  }
};

INSTANTIATE_TEST_SUITE_P(Twins, Divergences, ::testing::ValuesIn(TwinList()),
                         TwinTestName);

// There are holes at the front, and moves that the original merges into one.
TEST_P(Divergences, DefragKeepsRowsAndCellsTogether) {
  TestCache cache(Spec(Kind::kCausal), GetParam());
  ASSERT_EQ(cache.Init(1, 6, 6), StatusCode::kOk);
  cache.Append(0, 0, {1, 2});
  cache.Append(1, 0, {3});
  cache.Append(2, 0, {4});
  cache.Append(1, 1, {5});
  ASSERT_TRUE(cache->Remove(0, 0, kOpenEnd).ok());
  // Cells 0, 1 and 5 are free: a batch of three needs defrag.
  ASSERT_EQ(cache.Start({2, 3, 4}, {1, 1, 1}), StatusCode::kOk);
  ASSERT_EQ(cache.Put({6, 7, 8}), StatusCode::kOk);
  const std::vector<CellEntry> cells = {{0, 1, 1}, {1, 0, 2}, {2, 0, 1},
                                        {3, 2, 1}, {4, 3, 1}, {5, 4, 1}};
  EXPECT_EQ(cache.Cells(), cells);
  EXPECT_EQ(cache.SeenV(0), (Floats{5, 3, 6}));
  EXPECT_EQ(cache.SeenK(0), (Floats{5, 3, 6}));
}

TEST_P(Divergences, FullBeforeTheFirstPutIsCacheFull) {
  TestCache cache(Spec(Kind::kCausal), GetParam());
  ASSERT_EQ(cache.Init(1, 2, 4), StatusCode::kOk);
  EXPECT_EQ(cache.Start({0, 1, 2}, {0, 0, 0}), StatusCode::kCacheFull);
  EXPECT_EQ(cache.Start({0, 1}, {0, 0}), StatusCode::kOk);
}

TEST_P(Divergences, RefusedStartForwardEndsThePass) {
  TestCache cache(Spec(Kind::kCausal), GetParam());
  ASSERT_EQ(cache.Init(1, 2, 4), StatusCode::kOk);
  cache.Append(0, 0, {1});
  ASSERT_EQ(cache.Start({1, 2}, {0, 0}), StatusCode::kCacheFull);
  EXPECT_EQ(cache.Put({2, 3}), StatusCode::kFailedPrecondition);
  EXPECT_EQ(cache->Get().status().code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(cache->BatchCells().empty());
}

TEST_P(Divergences, RefusedRemoveChangesNothing) {
  TestCache cache(Spec(Kind::kCausal), GetParam());
  ASSERT_EQ(cache.Init(2, 4, 4), StatusCode::kOk);
  cache.Append(0, 0, {1, 2, 3});
  ASSERT_TRUE(cache->CopyPrefix(0, 1, 3).ok());
  const std::vector<CellEntry> before = cache.Cells();
  EXPECT_EQ(cache->Remove(0, 0, 1).code(), StatusCode::kSharedCells);
  EXPECT_EQ(cache.Cells(), before);
  cache.Append(0, 3, {4});
  EXPECT_EQ(cache.SeenK(0), (Floats{1, 2, 3, 4}));
}

TEST_P(Divergences, WrapperRemoveChangesAllOrNone) {
  CacheSpec spec = Spec(Kind::kWrapper);
  spec.caches = {Spec(Kind::kCausal, ShiftKind::kAdd),
                 Spec(Kind::kCausal, ShiftKind::kNone)};
  TestCache cache(spec, GetParam());
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  cache.Append(0, 0, {1, 2, 3});
  const std::vector<CellEntry> before = cache.Cells();
  EXPECT_EQ(cache->Remove(0, 0, 1).code(), StatusCode::kNotSupported);
  EXPECT_EQ(cache.Cells(), before);
  EXPECT_EQ(cache.SeenK(0), (Floats{1}));
}

// The first cache has a token above the batch that must survive.
TEST_P(Divergences, WrapperGivesBackOnlyTheBatch) {
  CacheSpec small = Spec(Kind::kSwa);
  small.window = 1;
  CacheSpec spec = Spec(Kind::kWrapper);
  spec.caches = {Spec(Kind::kCausal), small};
  TestCache cache(spec, GetParam());
  // The first cache has 8 cells, the second 1 * 1 + 2.
  ASSERT_EQ(cache.Init(1, 8, 2), StatusCode::kOk);
  ASSERT_EQ(cache.Start({4}, {0}), StatusCode::kOk);
  ASSERT_EQ(cache.Start({4, 4}, {1, 1}), StatusCode::kOk);
  const std::vector<CellEntry> before = cache.Cells();
  EXPECT_EQ(cache.Start({2}, {0}), StatusCode::kCacheFull);
  EXPECT_EQ(cache.Cells(), before);
}

TEST_P(Divergences, CopyPrefixOntoItselfTruncates) {
  TestCache cache(Spec(Kind::kCausal), GetParam());
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  cache.Append(0, 0, {1, 2, 3});
  ASSERT_TRUE(cache->CopyPrefix(0, 0, 2).ok());
  const std::vector<CellEntry> expected = {{0, 0, 0}, {1, 1, 0}};
  EXPECT_EQ(cache.Cells(), expected);
}

TEST_P(Divergences, WindowZeroIsAWindow) {
  CacheSpec spec = Spec(Kind::kSwa);
  spec.window = 0;
  TestCache cache(spec, GetParam());
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  cache.Append(0, 0, {1, 2});
  EXPECT_EQ(cache.SeenV(0), (Floats{1}));
  EXPECT_EQ(cache.SeenV(1), (Floats{2}));
}

TEST_P(Divergences, SetCausalAlwaysRebuilds) {
  TestCache cache(Spec(Kind::kCausal), GetParam());
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  cache.Append(0, 0, {1, 2});
  ASSERT_TRUE(cache->SetCausal({}).ok());
  EXPECT_EQ(cache.SeenV(1), (Floats{1, 2}));
  ASSERT_TRUE(cache->Remove(0, 1, kOpenEnd).ok());
  EXPECT_EQ(cache.SeenV(1), (Floats{1, 2}));  // Views stay as they were.
  ASSERT_TRUE(cache->SetCausal({}).ok());
  EXPECT_EQ(cache.SeenV(1), (Floats{1}));
}

TEST_P(Divergences, ExceptOutsideOfTheBatchIsRefused) {
  TestCache cache(Spec(Kind::kCausal), GetParam());
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  cache.Append(0, 0, {1, 2});
  const int outside = 2;
  const Status status = cache->SetCausal({&outside, 1});
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find('2'), std::string::npos);
  EXPECT_EQ(cache.SeenV(0), (Floats{1}));
}

TEST_P(Divergences, EncoderTakesANewShape) {
  TestCache cache(Spec(Kind::kEncoder), GetParam());
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  ASSERT_EQ(cache.Start({0}, {0}, {0}), StatusCode::kOk);
  ASSERT_EQ(cache.Put({1, 2}), StatusCode::kOk);
  ASSERT_EQ(cache.Put({3, 4, 5}), StatusCode::kOk);
  const Result<KvView> view = cache->Get();
  ASSERT_TRUE(view.ok());
  EXPECT_EQ(view->key.shape, (Shape{1, 1, 3, 1}));
  EXPECT_EQ(LoadElement(view->value.at(0, 0, 2), DType::kF32), 5);
  EXPECT_EQ(view->mask.data, nullptr);
}

// props/history/misuse.h lists all misuse.
TEST_P(Divergences, RefusesBadInputWithAStatus) {
  TestCache cache(Spec(Kind::kCausal), GetParam());
  EXPECT_EQ(cache.Init(0, 4, 4), StatusCode::kInvalidArgument);
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  const Status status = cache->Remove(0, 3, 2);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "begin is 3, end is 2");
}

TEST_P(Divergences, PositionsAreCountedIn64Bits) {
  CacheSpec spec = Spec(Kind::kSwa);
  spec.window = 2;
  TestCache cache(spec, GetParam());
  ASSERT_EQ(cache.Init(1, 8, 4), StatusCode::kOk);
  cache.Append(0, kOpenEnd - 2, {1, 2, 3});
  const Result<bool> can = cache->CanResume(0, kOpenEnd);
  ASSERT_TRUE(can.ok());
  EXPECT_TRUE(*can);
  EXPECT_EQ(cache.SeenV(2), (Floats{1, 2, 3}));
}

}  // namespace
}  // namespace kvtwin::props
