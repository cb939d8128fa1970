// The definition of a shift, and user functions that shift rows.

#include "core/shift_row.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <tuple>
#include <vector>

#include "core/dense_tensor.h"
#include "kvtwin/cache.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

using Floats = std::vector<float>;

TEST(ShiftRow, RopeTurnsAWholeHeadByDefault) {
  EXPECT_EQ(RopeDims({.dims = 0}, 6), 6);
  EXPECT_EQ(RopeDims({.dims = 0}, 7), 6);
  EXPECT_EQ(RopeDims({.dims = 4}, 6), 4);
  EXPECT_EQ(RopeDims({.dims = 10}, 7), 6);
}

class CustomShift : public EachTwin {};
INSTANTIATE_TEST_SUITE_P(Twins, CustomShift, ::testing::ValuesIn(TwinList()),
                         TwinTestName);

// Rows of several elements in several layers.
TEST_P(CustomShift, MatchesTheEqualBuiltInShift) {
  constexpr std::int64_t kTokens = 70;
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kF8}) {
    std::vector<CacheState> states;
    for (const ShiftKind kind : {ShiftKind::kAdd, ShiftKind::kCustom}) {
      CacheSpec spec;
      spec.shift.kind = kind;
      spec.shift.fn = [](int, std::int32_t offset, int, int,
                         std::span<float> key) -> Status {
        for (float& element : key) element += static_cast<float>(offset);
        return {};
      };
      auto cache = *MakeCache(spec, GetParam());
      ASSERT_TRUE(cache->Init({dtype, 1, 128, kTokens}).ok());
      std::vector<std::int32_t> positions(kTokens);
      std::iota(positions.begin(), positions.end(), 0);
      Floats rows(kTokens * 6);
      std::iota(rows.begin(), rows.end(), 0.0F);
      const std::vector<int> sequences(kTokens, 0);
      ASSERT_TRUE(cache->StartForward({positions, sequences}, false).ok());
      for (const int layer : {0, 3, 1}) {
        ASSERT_TRUE(cache->SetLayer(layer).ok());
        const TensorView view =
            DenseView(rows.data(), DType::kF32, {3, 2, kTokens, 1});
        ASSERT_TRUE(cache->Put(view, view).ok());
      }
      ASSERT_TRUE(cache->Remove(0, 2, 5).ok());
      ASSERT_TRUE(cache->Remove(0, 40, 41).ok());
      states.push_back(*cache->Snapshot());
    }
    EXPECT_TRUE(states[0] == states[1]);
  }
}

TEST_P(CustomShift, IsCalledWhenRowsMove) {
  int calls = 0;
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kCustom;
  spec.shift.fn = [&calls](int, std::int32_t, int, int, std::span<float>) {
    ++calls;
    return Status(StatusCode::kNotSupported, "none");
  };
  TestCache cache(spec, GetParam());
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  cache.Append(0, 0, {1, 2, 3, 4});
  EXPECT_TRUE(cache->Remove(0, 1, 1).ok());  // Nothing moves.
  EXPECT_EQ(calls, 0);
  EXPECT_EQ(cache->Remove(0, 0, 1).message(), "none");
  EXPECT_EQ(calls, 1);  // The function is not called again.
}

TEST(CustomShiftOf, ARowGetsTheArguments) {
  Shift shift;
  shift.kind = ShiftKind::kCustom;
  int calls = 0;
  shift.fn = [&calls](int layer, std::int32_t offset, int k_head_dim,
                      int kv_heads, std::span<float> key) -> Status {
    ++calls;
    EXPECT_EQ(std::tuple(layer, offset, k_head_dim, kv_heads),
              std::tuple(3, -2, 1, 4));
    std::ranges::reverse(key);
    return {};
  };
  std::vector<float> key = {1, 2, 3, 4};
  EXPECT_TRUE(ShiftRow(shift, /*layer=*/3, /*offset=*/-2, /*k_head_dim=*/1,
                       /*kv_heads=*/4, key)
                  .ok());
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(key, (std::vector<float>{4, 3, 2, 1}));
}

}  // namespace
}  // namespace kvtwin::props
