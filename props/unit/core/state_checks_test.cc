// States that Restore refuses, each with one damage, and those that it accepts.

#include "core/state_checks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "kvtwin/cache.h"
#include "kvtwin/save.h"
#include "props/search/explore_state.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

class StateChecks : public EachTwin {};
INSTANTIATE_TEST_SUITE_P(Twins, StateChecks, ::testing::ValuesIn(TwinList()),
                         TwinTestName);

constexpr auto kInvalid = StatusCode::kInvalidArgument;

// Damages the cache's state, and expects that Restore refuses it.
void ExpectRefused(Cache& cache,
                   const std::function<void(CacheState&)>& damage) {
  const CacheState whole = *cache.Snapshot();
  CacheState state = whole;
  damage(state);
  const Status status = cache.Restore(state);
  EXPECT_EQ(status.code(), kInvalid);
  EXPECT_NE(status.message(), "");
  EXPECT_EQ(*cache.Snapshot(), whole);
}

TEST_P(StateChecks, RefusesEachDamageOfAState) {
  TestCache cache({}, GetParam());
  ASSERT_EQ(cache.Init(2, 4, 2), StatusCode::kOk);
  cache.Append(0, 0, {1, 2});
  const auto refused = [&](const std::function<void(CacheState&)>& damage) {
    ExpectRefused(*cache, damage);
  };
  refused([](auto& state) {
    state.layers.clear();
    state.cells[0].cell = -1;
  });
  refused([](auto& state) { std::swap(state.cells[0], state.cells[1]); });
  refused([](auto& state) { state.position = -1; });
  refused([](auto& state) { state.position = 1; });
  refused([](auto& state) { state.next_position = 1; });
  const auto wide = [](DenseTensor& tensor, std::size_t dim) {
    tensor.shape[dim] *= 2;
    tensor.bytes.resize(2 * tensor.bytes.size());
  };
  const auto half = [](DenseTensor& tensor) {
    tensor.dtype = DType::kF16;
    tensor.bytes.resize(tensor.bytes.size() / 2);
  };
  refused([&](auto& state) { half(state.layers[0].key); });
  refused([&](auto& state) { half(state.layers[0].value); });
  for (const std::size_t dim : {1U, 2U, 3U}) {
    refused([&](auto& state) { wide(state.layers[0].key, dim); });
    refused([&](auto& state) { wide(state.layers[0].value, dim); });
  }
  refused([](auto& state) {
    state.layers[0].key.shape.fill(std::int64_t{1} << 40);
  });
  refused([](auto& state) { state.layers[0].key.shape[2] = 0; });
}

// All lists of up to three memberships. A cache can have a list only if it is
// sorted by cell and then by sequence, has no duplicates, and gives each cell
// one position.
TEST_P(StateChecks, RequiresTheOrderOfListCells) {
  constexpr int kEntries = 3 * 2 * 2;
  const auto entry = [](int i) { return CellEntry{i / 4, i / 2 % 2, i % 2}; };
  TestCache cache({}, GetParam());
  ASSERT_EQ(cache.Init(1, 3, 3), StatusCode::kOk);
  int taken = 0;
  for (int list = 0; list < kEntries * kEntries * kEntries; ++list) {
    CacheState state;
    for (int rest = list; rest > 0 || state.cells.size() < 2;
         rest /= kEntries) {
      state.cells.push_back(entry(rest % kEntries));
    }
    const auto before = [](const CellEntry& a, const CellEntry& b) {
      return a.cell < b.cell || (a.cell == b.cell && a.position == b.position &&
                                 a.sequence < b.sequence);
    };
    const bool expected =
        std::ranges::adjacent_find(state.cells, [&](auto& a, auto& b) {
          return !before(a, b);
        }) == state.cells.end();
    ASSERT_EQ(cache->Restore(state).ok(), expected) << CellsText(state.cells);
    ASSERT_EQ(StateFromBytes(StateToBytes(state)).ok(), expected);
    if (!expected) continue;
    ++taken;
    ASSERT_EQ(*cache->Snapshot(), state);
  }
  EXPECT_GT(taken, 100);
}

TEST_P(StateChecks, ASnapshotReplacesTheState) {
  TestCache cache({}, GetParam());
  ASSERT_EQ(cache.Init(1, 4, 2), StatusCode::kOk);
  cache.Append(0, 0, {1, 2});
  CacheState state;
  state.cells = {{3, 3, 3}};
  state.layers[0].key.bytes.resize(100);
  state.layers[7];
  state.caches.resize(2);
  state.cached = true;
  state.position = 5;
  ASSERT_TRUE(cache->SnapshotTo(state).ok());
  EXPECT_EQ(state, *cache->Snapshot());
  EXPECT_EQ(state.cells.size(), 2);
}

TEST_P(StateChecks, RefusesEachDamageOfAnEncodersState) {
  for (const VLayout layout : {VLayout::kPlain, VLayout::kPermuted}) {
    const auto cache = MakeOfKind(Kind::kEncoder, GetParam());
    ASSERT_TRUE(cache->SetConfig({.v_layout = layout}).ok());
    ASSERT_TRUE(cache->Init({DType::kF32, 1, 1, 1}).ok());
    const DenseTensor row{DType::kF32, {1, 1, 1, 1}, {4, std::byte{}}};
    const KvRows rows = {row, row};
    const auto refused = [&](const std::function<void(CacheState&)>& damage) {
      ExpectRefused(*cache, [&](CacheState& state) {
        state.layers[0] = rows;
        damage(state);
      });
    };
    const DenseTensor none{DType::kF32, {1, 1, 0, 1}, {}};
    const DenseTensor half{DType::kF16, {1, 1, 1, 1}, {2, std::byte{}}};
    refused([&](auto& state) { state.layers[0].key = none; });
    refused([&](auto& state) { state.layers[0].value = none; });
    refused([&](auto& state) { state.layers[0].key = half; });
    refused([&](auto& state) { state.layers[0].value = half; });
    refused([](auto& state) { state.cells.push_back({0, 0, 0}); });
    CacheState state;
    const DenseTensor four{DType::kF32, {1, 1, 1, 2}, {8, std::byte{}}};
    state.layers[0] = {row, four};
    EXPECT_EQ(cache->Restore(state).ok(), layout == VLayout::kPlain);
    state.layers[0] = rows;
    EXPECT_TRUE(cache->Restore(state).ok());
    EXPECT_EQ(*cache->Snapshot(), state);
  }
}

TEST_P(StateChecks, AWrapperRefusesStatesOfOthers) {
  const auto cache = MakeOfKind(Kind::kWrapper, GetParam());
  ASSERT_TRUE(cache->Init({DType::kF32, 1, 4, 1}).ok());
  ExpectRefused(*cache, [](auto& state) { state.caches.pop_back(); });
  ExpectRefused(*cache, [](auto& state) { state.position = 1; });
  for (const std::size_t i : {0U, 1U}) {
    ExpectRefused(*cache, [i](auto& state) {
      state.caches[1 - i].cells = {{0, 0, 0}};
      state.caches[i].cells = {{-1, 0, 0}};
    });
  }
}

TEST_P(StateChecks, RestoreRefusesRowsOfAnotherDType) {
  std::vector<CacheState> states;
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kF8}) {
    TestCache cache({}, GetParam());
    ASSERT_TRUE(cache->Init({dtype, 1, 4, 4}).ok());
    cache.Append(0, 0, {1, 2});
    for (const CacheState& other : states) {
      EXPECT_FALSE(cache->Restore(other).ok());
    }
    states.push_back(*cache->Snapshot());
  }
  TestCache cache({}, GetParam());
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  EXPECT_FALSE(cache->Restore(states[1]).ok());
  EXPECT_TRUE(cache->Restore(states[0]).ok());
  TestCache half({}, GetParam());
  ASSERT_TRUE(half->Init({DType::kF16, 1, 4, 4}).ok());
  CacheState mixed = states[1];
  std::swap(mixed.layers[0].key, states[0].layers[0].key);
  EXPECT_FALSE(half->Restore(mixed).ok());
  std::swap(mixed.layers[0].key, states[0].layers[0].key);
  std::swap(mixed.layers[0].value, states[0].layers[0].value);
  EXPECT_FALSE(half->Restore(mixed).ok());
}

TEST_P(StateChecks, RestoreRefusesACellAtTwoPositions) {
  TestCache cache({}, GetParam());
  ASSERT_EQ(cache.Init(2, 4, 4), StatusCode::kOk);
  for (const std::int32_t second : {1, 3}) {
    CacheState state;
    state.cells = {{0, 2, 0}, {0, second, 1}};
    EXPECT_FALSE(cache->Restore(state).ok());
  }
}

TEST_P(StateChecks, AfterRestoreTheLayerIsTheFirst) {
  TestCache cache({}, GetParam());
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  const CacheState empty = *cache->Snapshot();
  ASSERT_TRUE(cache->SetLayer(7).ok());
  ASSERT_TRUE(cache->Restore(empty).ok());
  cache.Append(0, 0, {1});
  EXPECT_TRUE(cache->Snapshot()->layers.contains(0));
}

// V has a fourth dimension, for which permuted V has no place.
TEST_P(StateChecks, AnEncoderKeepsFourDimensionsUnlessPermuted) {
  CacheSpec spec;
  spec.kind = Kind::kEncoder;
  const std::vector<float> rows(4, 1);
  const TensorView view = DenseView(rows.data(), DType::kF32, {1, 1, 2, 2});
  TestCache plain(spec, GetParam());
  ASSERT_EQ(plain.Init(1, 4, 4), StatusCode::kOk);
  ASSERT_EQ(plain.Start({0}, {0}), StatusCode::kOk);
  ASSERT_TRUE(plain->Put(view, view).ok());
  const CacheState state = *plain->Snapshot();
  EXPECT_TRUE(plain->Restore(state).ok());
  TestCache permuted(spec, GetParam(), {.v_layout = VLayout::kPermuted});
  ASSERT_EQ(permuted.Init(1, 4, 4), StatusCode::kOk);
  EXPECT_FALSE(permuted->Restore(state).ok());
  ASSERT_EQ(permuted.Start({0}, {0}), StatusCode::kOk);
  EXPECT_FALSE(permuted->Put(view, view).ok());
  // K is not permuted.
  const TensorView three = DenseView(rows.data(), DType::kF32, {1, 2, 2, 1});
  EXPECT_TRUE(permuted->Put(view, three).ok());
  const CacheState mixed = *permuted->Snapshot();
  EXPECT_TRUE(permuted->Restore(mixed).ok());
}

// Evicted tokens are recorded for Restore, and for a batch that is given back.
TEST_P(StateChecks, ReleasesTheBatchAfterARestoreInPlace) {
  CacheSpec spec;
  spec.kind = Kind::kWrapper;
  spec.caches.resize(2);
  spec.caches[0].kind = Kind::kSwa;
  spec.caches[0].window = 1;
  TestCache cache(spec, GetParam());
  ASSERT_EQ(cache.Init(2, 4, 4), StatusCode::kOk);
  ASSERT_EQ(cache.Start({0, 1, 2, 3}, {0, 0, 0, 0}), StatusCode::kOk);
  ASSERT_EQ(cache.Start({4, 5, 6}, {0, 0, 0}), StatusCode::kOk);
  const CacheState seven = *cache->Snapshot();
  ASSERT_EQ(cache.Start({0}, {1}), StatusCode::kOk);
  ASSERT_TRUE(cache->Restore(seven).ok());
  ASSERT_EQ(cache.Start({0, 1}, {1, 1}), StatusCode::kCacheFull);
  const CacheState after = *cache->Snapshot();
  EXPECT_TRUE(after.caches[1] == seven.caches[1]);
  for (const CellEntry& entry : after.caches[0].cells) {
    EXPECT_EQ(entry.sequence, 0);
  }
}

}  // namespace
}  // namespace kvtwin::props
