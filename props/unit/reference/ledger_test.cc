// Tests of the ledger alone.

#include "reference/ledger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <set>
#include <span>
#include <tuple>
#include <vector>

#include "core/dense_tensor.h"
#include "kvtwin/cache.h"
#include "props/testing/test_cache.h"
#include "reference/dialects.h"

namespace kvtwin::props {
namespace {

TEST(Ledger, AnswersAlone) {
  reference::CacheLedger causal({});
  EXPECT_EQ(causal.Init({}, {DType::kF32, 1 << 20, 1 << 20, 1}).code(),
            StatusCode::kInvalidArgument);
  CacheSpec spec;
  spec.kind = Kind::kEncoder;
  EXPECT_TRUE(reference::CacheLedger(spec).slots().layers.empty());

  spec.kind = Kind::kCausal;
  spec.shift.kind = ShiftKind::kCustom;
  spec.shift.fn = [](int, std::int32_t, int, int, std::span<float>) {
    return Status(StatusCode::kNotSupported, "not this one");
  };
  reference::CacheLedger ledger(spec);
  ASSERT_TRUE(ledger.Init({}, {DType::kF32, 2, 8, 8}).ok());
  const std::array<std::int32_t, 3> positions = {0, 1, 0};
  const std::array<int, 3> sequences = {0, 0, 1};
  ASSERT_TRUE(ledger.StartForward({positions, sequences}, false).ok());
  const std::array<float, 3> rows = {1, 2, 3};
  const TensorView view = DenseView(rows.data(), DType::kF32, {1, 1, 3, 1});
  ledger.Put(0, view, view);
  EXPECT_EQ(ledger.Remove(0, 0, 1).message(), "not this one");
  EXPECT_EQ(ledger.tokens().size(), 3);
}

TEST(Ledger, CopiesSharedTokensIfAsked) {
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kIdentity;
  reference::CacheLedger ledger(spec);
  ASSERT_TRUE(ledger.Init({}, {DType::kF32, 2, 8, 8}).ok());
  const std::array<std::int32_t, 4> positions = {0, 1, 2, 3};
  const std::array<int, 4> sequences = {0, 0, 0, 0};
  ASSERT_TRUE(ledger.StartForward({positions, sequences}, false).ok());
  ASSERT_TRUE(ledger.CopyPrefix(0, 1, 3).ok());
  EXPECT_EQ(ledger.Remove(0, 0, 2).code(), StatusCode::kSharedCells);
  ASSERT_TRUE(ledger.Remove(0, 0, 2, StatusCode::kOk).ok());
  // Token 2 is now two tokens; that of the other sequence is unchanged.
  std::vector<std::tuple<std::int64_t, std::set<int>, int>> found;
  for (const reference::LedgerToken& token : ledger.tokens()) {
    found.emplace_back(token.position, token.sequences, token.row);
  }
  EXPECT_THAT(found,
              ::testing::UnorderedElementsAre(
                  std::tuple(0, std::set{1}, 0), std::tuple(1, std::set{1}, 1),
                  std::tuple(2, std::set{1}, 2), std::tuple(0, std::set{0}, -1),
                  std::tuple(1, std::set{0}, 3)));
}

TEST(Ledger, TakesTheStateOfAWrapper) {
  CacheSpec spec;
  spec.kind = Kind::kWrapper;
  spec.caches = {CacheSpec(), CacheSpec()};
  spec.caches[1].kind = Kind::kEncoder;
  TestCache cache(spec, "reference");
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  cache.Append(0, 0, {1, 2});
  ASSERT_TRUE(cache->SetLayerType(1).ok());
  ASSERT_EQ(cache.Put({3}), StatusCode::kOk);
  reference::Ledger ledger(spec);
  ASSERT_TRUE(ledger.Init({}, {DType::kF32, 1, 4, 4}).ok());
  ledger.Restore(*cache->Snapshot());
  EXPECT_EQ(ledger.parts()[0].tokens().size(), 2);
  EXPECT_TRUE(ledger.parts()[0].slots().layers.empty());
  EXPECT_EQ(ledger.parts()[1].slots(), cache->Snapshot()->caches[1]);
}

TEST(Ledger, RestoresEveryCacheOfAWrapper) {
  CacheSpec spec;
  spec.kind = Kind::kWrapper;
  spec.caches.resize(2);
  spec.caches[1].kind = Kind::kSwa;
  spec.caches[1].window = 1;
  TestCache cache(spec, "reference");
  ASSERT_EQ(cache.Init(1, 8, 8), StatusCode::kOk);
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(cache.Start({i}, {0}), StatusCode::kOk);
  }
  reference::Ledger ledger(spec);
  ASSERT_TRUE(ledger.Init({}, {DType::kF32, 1, 8, 8}).ok());
  ledger.Restore(*cache->Snapshot());
  ASSERT_EQ(ledger.parts().size(), 2U);
  EXPECT_EQ(ledger.parts()[0].tokens().size(), 5U);
  EXPECT_EQ(ledger.parts()[1].tokens().size(), 2U);
}

}  // namespace
}  // namespace kvtwin::props
