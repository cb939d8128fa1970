// Where K and V rows lie, and what happens when they move: layouts and sizes
// that the harness does not draw.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/names.h"
#include "kvtwin/cache.h"
#include "kvtwin/state.h"
#include "kvtwin/tensor.h"
#include "props/testing/agreement.h"
#include "props/testing/each_target.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

class Rows : public EachTwin {};

INSTANTIATE_TEST_SUITE_P(Twins, Rows, ::testing::ValuesIn(TwinList()),
                         TwinTestName);

// A user function shifts enough rows for threads to share the work.
TEST_P(Rows, ShiftsManyRowsByAFunction) {
  constexpr std::int64_t kWide = 4096;
  constexpr std::int64_t kTokens = 150;
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kCustom;
  spec.shift.fn = [](int layer, std::int32_t offset, int, int,
                     std::span<float> key) {
    key[7] += static_cast<float>(100 * layer + offset);
    return Status();
  };
  const auto cache = *MakeCache(spec, GetParam());
  ASSERT_TRUE(cache->Init({DType::kF32, 1, kTokens, kTokens}).ok());
  std::vector<std::int32_t> positions(kTokens);
  std::iota(positions.begin(), positions.end(), 0);
  const std::vector<int> sequences(kTokens, 0);
  ASSERT_TRUE(cache->StartForward({positions, sequences}, false).ok());
  const DenseTensor rows = FilledTensor(DType::kF32, {kWide, 1, kTokens, 1}, 1);
  for (const int layer : {0, 1}) {
    ASSERT_TRUE(cache->SetLayer(layer).ok());
    ASSERT_TRUE(cache->Put(rows.view(), rows.view()).ok());
  }
  ASSERT_TRUE(cache->Remove(0, 0, 2).ok());
  const CacheState state = *cache->Snapshot();
  for (const int layer : {0, 1}) {
    const TensorView key = state.layers.at(layer).key.view();
    ASSERT_EQ(key.shape[2], kTokens - 2);
    for (std::int64_t token = 0; token < kTokens - 2; ++token) {
      EXPECT_EQ(LoadElement(key.at(7, 0, token), key.dtype), 100 * layer - 1);
      EXPECT_EQ(LoadElement(key.at(8, 0, token), key.dtype), 1);
    }
  }
}

// An element that moved within a row is not mistaken for an unchanged one.
TEST_P(Rows, AFunctionMayMoveTheElementsOfARow) {
  constexpr std::int64_t kHeadDim = 70;
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kCustom;
  spec.shift.fn = [](int, std::int32_t, int, int, std::span<float> key) {
    std::rotate(key.begin(), key.begin() + 1, key.end());
    return Status();
  };
  const auto cache = *MakeCache(spec, GetParam());
  ASSERT_TRUE(cache->Init({DType::kF16, 1, 2, 2}).ok());
  const std::vector<std::int32_t> positions = {0, 1};
  const std::vector<int> sequences = {0, 0};
  ASSERT_TRUE(cache->StartForward({positions, sequences}, false).ok());
  std::vector<float> numbers(2 * kHeadDim);
  std::iota(numbers.begin(), numbers.end(), -kHeadDim);
  numbers[kHeadDim + 6] = 5;  // It moves to the place of a 5.
  const TensorView rows =
      DenseView(numbers.data(), DType::kF32, {kHeadDim, 1, 2, 1});
  ASSERT_TRUE(cache->Put(rows, rows).ok());
  ASSERT_TRUE(cache->Remove(0, 0, 1).ok());
  const CacheState state = *cache->Snapshot();
  const TensorView key = state.layers.at(0).key.view();
  for (std::int64_t i = 0; i < kHeadDim; ++i) {
    const auto from = AsSize((i + 1) % kHeadDim);
    EXPECT_EQ(LoadElement(key.at(i), key.dtype), numbers[kHeadDim + from]);
  }
}

// One number stands for a whole line.
TEST_P(Rows, AnEncoderTakesLinesThatRepeatAnElement) {
  CacheSpec spec;
  spec.kind = Kind::kEncoder;
  const auto cache = *MakeCache(spec, GetParam());
  ASSERT_TRUE(cache->Init({DType::kF32, 1, 1, 1}).ok());
  const std::vector<std::int32_t> positions = {0};
  const std::vector<int> sequences = {0};
  const std::vector<int> multimodal = {0};
  ASSERT_TRUE(
      cache->StartForward({positions, sequences, multimodal}, false).ok());
  const float numbers[] = {3, 4, 5};
  TensorView lines = DenseView(&numbers[0], DType::kF32, {3, 1, 1, 1});
  lines.stride[0] = 0;
  ASSERT_TRUE(cache->Put(lines, lines).ok());
  const KvView view = *cache->Get();
  for (std::int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(LoadElement(view.key.at(i), view.key.dtype), 3);
    EXPECT_EQ(LoadElement(view.value.at(i), view.value.dtype), 3);
  }
}

void PutFarApart(const std::string& twin, VLayout layout) {
  constexpr int kApart = 32;
  constexpr int kTokens = 40;
  CacheSpec spec;
  spec.placement = Placement::kScatter;
  TestCache cache(spec, twin, ConfigOf(layout));
  ASSERT_EQ(cache.Init(3, kApart * kTokens, kApart * kTokens), StatusCode::kOk);
  std::vector<std::int32_t> positions;
  std::vector<int> sequences;
  std::vector<float> tags;
  for (int cell = 0; cell < kApart * kTokens; ++cell) {
    positions.push_back(cell);
    sequences.push_back(cell % kApart == 0 ? 1 : 0);
    tags.push_back(static_cast<float>(cell));
  }
  ASSERT_EQ(cache.Start(positions, sequences), StatusCode::kOk);
  ASSERT_EQ(cache.Put(tags), StatusCode::kOk);
  ASSERT_TRUE(cache->Remove(1, 0, kOpenEnd).ok());
  std::vector<float> expected(kTokens);
  std::iota(expected.begin(), expected.end(), 0.5F);
  positions.resize(kTokens);
  ASSERT_EQ(cache.Start(positions, std::vector<int>(kTokens, 2)),
            StatusCode::kOk);
  ASSERT_EQ(cache.Put(expected), StatusCode::kOk);
  const KvView view = *cache->Get();
  for (int i = 0; i < kTokens; ++i) {
    ASSERT_EQ(At(cache->BatchCells(), i), i * kApart);
    const TensorView row =
        RowOf(view.value, layout, i * kApart - view.first_cell);
    EXPECT_EQ(LoadFrom(row, 0), At(expected, i));
  }
}

// Several sizes, because columns are padded by the processor's cache lines.
TEST_P(Rows, ColumnsOfPermutedVDoNotOverlap) {
  for (const int cells : {1023, 1024, 1025, 1041, 1057}) {
    TestCache cache({}, GetParam(), {.v_layout = VLayout::kPermuted});
    ASSERT_EQ(cache.Init(1, cells, cells), StatusCode::kOk);
    std::vector<std::int32_t> positions(AsSize(cells));
    std::iota(positions.begin(), positions.end(), 0);
    ASSERT_EQ(cache.Start(positions, std::vector<int>(positions.size(), 0)),
              StatusCode::kOk);
    std::vector<float> numbers(3 * positions.size());
    std::iota(numbers.begin(), numbers.end(), 0);
    const TensorView rows =
        DenseView(numbers.data(), DType::kF32, {3, 1, cells, 1});
    ASSERT_TRUE(cache->Put(rows, rows).ok());
    const TensorView value = cache->Get()->value;
    for (std::int64_t i = 0; i < 3; ++i) {
      for (std::int64_t cell = 0; cell < cells; ++cell) {
        ASSERT_EQ(LoadElement(value.at(cell, i), value.dtype), 3 * cell + i)
            << cells << " cells";
      }
    }
  }
}

// Tiles lie as VLayout defines: in a whole view, and in one that begins late.
TEST_P(Rows, TilesOfVHaveTheDocumentedLayout) {
  constexpr std::int64_t kCells = 128;
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kF8}) {
    SCOPED_TRACE(DTypeName(dtype));
    TestCache cache({}, GetParam(), ConfigOf(VLayout::kTiled));
    ASSERT_TRUE(cache->Init({dtype, 2, kCells / 2, kCells}).ok());
    std::vector<std::int32_t> positions(kCells);
    std::iota(positions.begin(), positions.end(), 0);
    std::vector<int> sequences(positions.size(), 0);
    std::fill(sequences.begin() + 70, sequences.end(), 1);
    ASSERT_EQ(cache.Start(positions, sequences), StatusCode::kOk);
    // 0 to 15 are exact in f8; the number depends on cell, element and head,
    // and on the tile.
    constexpr std::size_t kRow = 5 * 3;
    std::vector<float> numbers(kRow * positions.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      numbers[i] = static_cast<float>((i * 7 + i / (kRow * 32) * 5) % 16);
    }
    const TensorView rows =
        DenseView(numbers.data(), DType::kF32, {5, 3, kCells, 1});
    ASSERT_TRUE(cache->Put(rows, rows).ok());
    const auto check = [&](std::int64_t first) {
      const KvView view = *cache->Get();
      ASSERT_EQ(view.first_cell, first);
      ASSERT_EQ(view.value.shape, (Shape{32, 5, 3, (kCells - first) / 32}));
      for (std::int64_t cell = first; cell < kCells; ++cell) {
        const std::int64_t column = cell - first;
        for (std::int64_t i = 0; i < 5; ++i) {
          for (std::int64_t head = 0; head < 3; ++head) {
            ASSERT_EQ(LoadFrom(view.value, column % 32, i, head, column / 32),
                      LoadFrom(rows, i, head, cell))
                << cell;
          }
        }
      }
    };
    check(0);
    // The last token comes again: it takes its old cell, and the view begins
    // with the tile of its sequence's first cell.
    ASSERT_TRUE(cache->Remove(1, kCells - 1, kOpenEnd).ok());
    ASSERT_EQ(cache.Start({kCells - 1}, {1}), StatusCode::kOk);
    const TensorView last = Slice(rows, 2, kCells - 1);
    ASSERT_TRUE(cache->Put(last, last).ok());
    check(64);
  }
}

// The batch takes as many cache lines as are written together.
TEST_P(Rows, ColumnsAcceptDistantCells) {
  for (const VLayout layout : kVLayouts) {
    SCOPED_TRACE(VLayoutName(layout));
    PutFarApart(GetParam(), layout);
  }
}

TEST(Storage, BeginsOnACacheLine) {
  TestCache cache({}, "optimized");
  ASSERT_EQ(cache.Init(1, 4, 4), StatusCode::kOk);
  ASSERT_EQ(cache.Start({0}, {0}), StatusCode::kOk);
  for (int layer = 0; layer < 8; ++layer) {
    ASSERT_TRUE(cache->SetLayer(layer).ok());
    ASSERT_EQ(cache.Put({1}), StatusCode::kOk);
    const KvView view = *cache->Get();
    for (const TensorView& tensor : {view.key, view.value, view.mask}) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data) % 64, 0U);
    }
  }
}

class StorageWith : public EachPath {};
INSTANTIATE_TEST_SUITE_P(Paths, StorageWith, ::testing::ValuesIn(kEachPath),
                         EachPath::Name);

TEST_P(StorageWith, ElementsOfARow) {
  for (const int n : {8, 16, 64, 128, 256, 512, 2048}) {
    for (const int width : {n - 1, n, n + 1}) {
      for (const std::string_view how :
           {"strided=1 dtype=f16 shift=rope", "permuted=1 shift=rope_halves",
            "permuted=1 dtype=f8_e4m3 shift=tag_add",
            "permuted=1 dtype=bf16 shift=add",
            "tiled=1 pad=32 strided=1 shift=add",
            "dtype=f8_e4m3 strided=1 shift=identity"}) {
        ExpectAgreement(
            fmt::format("kvt1 seqs=1 cap=40 batch=40 dims={0},1,{0} {1} | "
                        "put 0*3 1*2 0*1 2*33 | drop 1:0- | drop 0:0-1 | "
                        "put 3*4 | put 2*1",
                        width, how));
      }
    }
  }
  for (const int width : {32, 64, 96, 2016, 2048, 2080}) {
    for (const std::string_view how : {"q8_0 shift=rope", "q4_0 shift=add"}) {
      ExpectAgreement(
          fmt::format("kvt1 cells=4 dims={0},2,{0} dtype={1} | "
                      "put 0*3 | drop 0:0-1 | put 0*1",
                      width, how));
    }
  }
}

// Columns of 4096 bytes begin on lines.
TEST_P(StorageWith, CellsOfPermutedRows) {
  for (const auto& [dtype, n] :
       {std::pair("f32", 1024), {"f16", 2048}, {"f8_e4m3", 4096}}) {
    for (const int cells : {n - 1, n, n + 1}) {
      ExpectAgreement(fmt::format(
          "kvt1 seqs=1 cap={} batch=8 permuted=1 dims=1,2,3 dtype={} | "
          "put 0*5 1*2 | put 1*1 reserve | drop 0:0-2 | put 1*6",
          cells, dtype));
    }
  }
}

}  // namespace
}  // namespace kvtwin::props
