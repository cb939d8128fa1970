// Layers: any number of them, each with its own dimensions (S20). A layer holds
// what it would hold if it were the only one.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "core/names.h"
#include "props/paged/paged_runner.h"
#include "props/search/explain.h"
#include "props/testing/pools.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

constexpr std::array kCounts = {1,  2,  3,  4,  5,  7,  8,  9, 15,
                                16, 17, 31, 32, 33, 63, 64, 65};

// A fork that ends within a block copies all its layers when it is appended to.
TEST(Layers, OfAPool) {
  for (const int layers : kCounts) {
    for (const char* layout : {"", " layout=head"}) {
      const std::string line = fmt::format(
          "kvp1 block=3 blocks=6 most=12 layers={} heads=1 kdim=1 vdim=1 "
          "dtype=f32{} | open 0 0 0 | append 0 1 1 | commit 0 1 0 | "
          "fork 0 1 0 | append 1 3 1 | commit 1 1 0 | truncate 1 1 0",
          layers, layout);
      const Result<PagedHistory> history = ParsePagedHistory(line);
      ASSERT_TRUE(history.ok()) << history.status().ToString();
      PagedCoverageCounts counts;
      EXPECT_EQ(TextOf(RunPaged(*history, &counts)), "") << line;
      EXPECT_GT(counts.copied, 0);
    }
  }
}

// Rows are shifted, moved by a defrag, shared and loaded in each layer.
TEST(Layers, OfACache) {
  const Subject subject = TwinSubject("optimized");
  for (const int layers : kCounts) {
    const History history = *ParseHistory(fmt::format(
        "kvt1 cells=8 layers={} shift=rope | put 0*2 1*2 | drop 0:0- | "
        "put 1*5 | drop 1:0-1 | copy 1>2:2 | reload | put 0*1",
        layers));
    const RunResult result = RunHistory(history, subject);
    EXPECT_TRUE(result.ran);
    ASSERT_FALSE(result.failure)
        << FailureText(history, *result.failure, subject);
  }
}

// A head of q8_0 or q4_0 has whole blocks of 32 elements.
std::vector<RowDims> DimsOf(DType dtype) {
  if (IsBlockDType(dtype)) return {{64, 2, 32}, {32, 1, 64}, {96, 3, 32}};
  return {{8, 2, 4}, {4, 1, 8}, {6, 3, 1}, {1, 2, 3}, {40, 1, 2}, {8, 5, 9}};
}

struct Case {
  Shift shift;
  DType dtype = DType::kF32;
  VLayout v_layout = VLayout::kPlain;
};

std::vector<Case> Cases() {
  std::vector<Shift> shifts(5);
  shifts[0].kind = ShiftKind::kAdd;
  shifts[1].kind = ShiftKind::kTagAdd;
  shifts[2].kind = ShiftKind::kRope;
  shifts[3].kind = ShiftKind::kRope;
  shifts[3].rope = {.pairing = Rope::Pairing::kHalves, .dims = 4};
  shifts[4].kind = ShiftKind::kCustom;
  shifts[4].fn = [](int layer, std::int32_t offset, int k_head_dim,
                    int kv_heads, std::span<float> key) -> Status {
    key.back() += static_cast<float>(layer * 1000 + offset * k_head_dim);
    key.front() -= static_cast<float>(kv_heads);
    return {};
  };
  std::vector<Case> cases;
  for (const Shift& shift : shifts) {
    for (const DType dtype : kRowDTypes) {
      cases.push_back({shift, dtype});
      if (IsBlockDType(dtype)) continue;
      cases.push_back({shift, dtype, VLayout::kPermuted});
      cases.push_back({shift, dtype, VLayout::kTiled});
    }
  }
  return cases;
}

// Returns the final state of a cache with these layers only.
CacheState StateAfter(const Case& variant, const std::string& twin,
                      std::span<const int> layers) {
  CacheSpec spec;
  spec.shift = variant.shift;
  const auto cache = *MakeCache(spec, twin);
  EXPECT_TRUE(cache->SetConfig(ConfigOf(variant.v_layout)).ok());
  EXPECT_TRUE(cache->Init({variant.dtype, 4, 8, 8}).ok());
  const std::vector<RowDims> all = DimsOf(variant.dtype);
  float number = 0;
  const auto put = [&](const std::vector<std::int32_t>& positions, int seq) {
    const std::vector<int> sequences(positions.size(), seq);
    EXPECT_TRUE(cache->StartForward({positions, sequences}, false).ok());
    for (const int layer : layers) {
      const auto& [k_dim, heads, v_dim] = At(all, layer);
      const auto tokens = std::ssize(positions);
      std::vector<float> numbers(
          AsSize((k_dim + v_dim) * heads * AsInt(tokens)));
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        numbers[i] = number + static_cast<float>(i % 7) / 8;
      }
      const float* values = &At(numbers, k_dim * heads * AsInt(tokens));
      EXPECT_TRUE(cache->SetLayer(layer).ok());
      EXPECT_TRUE(
          cache
              ->Put(DenseView(numbers.data(), DType::kF32,
                              {k_dim, heads, tokens, 1}),
                    DenseView(values, DType::kF32, {v_dim, heads, tokens, 1}))
              .ok());
    }
    ++number;
  };
  put({0, 1, 2, 3}, 0);
  for (const int seq : {1, 2, 3}) put({0, 1, 2, 3, 4, 5, 6}, seq);
  EXPECT_TRUE(cache->Remove(1, 0, 2).ok());
  EXPECT_TRUE(cache->Remove(3, 1, 4).ok());
  EXPECT_TRUE(cache->CopyPrefix(2, 4, 3).ok());
  // Then no run of free cells is long enough, so that a batch needs a defrag.
  EXPECT_TRUE(cache->Remove(0, 1, kOpenEnd).ok());
  put({7, 8, 9, 10, 11, 12, 13, 14}, 2);
  EXPECT_TRUE(cache->Remove(4, 0, kOpenEnd).ok());
  EXPECT_TRUE(cache->Remove(2, 0, 1).ok());
  const CacheState state = *cache->Snapshot();
  EXPECT_TRUE(cache->Restore(state).ok());
  EXPECT_TRUE(*cache->Snapshot() == state);
  return state;
}

class EachLayer : public EachTwin {};
INSTANTIATE_TEST_SUITE_P(Twins, EachLayer, ::testing::ValuesIn(TwinList()),
                         TwinTestName);

TEST_P(EachLayer, HoldsTheSameAsAlone) {
  for (const Case& variant : Cases()) {
    SCOPED_TRACE(
        fmt::format("shift {}, dtype {}, V {}", AsInt(variant.shift.kind),
                    DTypeName(variant.dtype), VLayoutName(variant.v_layout)));
    std::vector<int> layers(DimsOf(variant.dtype).size());
    for (std::size_t i = 0; i < layers.size(); ++i) {
      layers[i] = AsInt(i);
    }
    const CacheState state = StateAfter(variant, GetParam(), layers);
    ASSERT_EQ(state.layers.size(), layers.size());
    for (const int layer : layers) {
      const CacheState alone =
          StateAfter(variant, GetParam(), std::vector<int>{layer});
      EXPECT_TRUE(state.cells == alone.cells);
      EXPECT_TRUE(state.layers.at(layer) == alone.layers.at(layer)) << layer;
    }
  }
}

}  // namespace
}  // namespace kvtwin::props
