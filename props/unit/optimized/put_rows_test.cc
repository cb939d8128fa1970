// Rows that lie anywhere in memory, and rows that are larger than memory.

#include "optimized/put_rows.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/names.h"
#include "kvtwin/cache.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

class PutRows : public EachTwin {};
INSTANTIATE_TEST_SUITE_P(Twins, PutRows, ::testing::ValuesIn(TwinList()),
                         TwinTestName);

// Rows lie anywhere: repeated, at odd addresses, with heads of one element.
TEST_P(PutRows, TakesRowsOfAnyStrides) {
  std::vector<std::byte> bytes(4096);
  for (std::size_t i = 0; i + 8 < bytes.size(); i += 4) {
    const auto number = static_cast<float>(i);
    std::memcpy(&bytes[i + 1], &number, sizeof(number));
  }
  const std::vector<std::array<std::int64_t, 4>> strides = {
      {4, 12, 24, 0}, {0, 12, 24, 0}, {4, 0, 24, 0},  {4, 12, 25, 0},
      {4, 12, 0, 0},  {8, 4, 24, 0},  {2, 12, 24, 0}, {4, 16, 48, 0}};
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kF8}) {
    for (const VLayout layout : kVLayouts) {
      for (const auto& stride : strides) {
        for (const std::int64_t head_dim : {1, 3}) {
          TensorView view;
          view.data = &bytes[stride[2] % 4 == 0 ? 401 : 403];
          view.shape = {head_dim, 2, 5, 1};
          view.stride = stride;
          TestCache cache({}, GetParam(), ConfigOf(layout));
          ASSERT_TRUE(cache->Init({dtype, 1, 8, 8}).ok());
          ASSERT_EQ(cache.Start({0, 1, 2, 3, 4}, {0, 0, 0, 0, 0}),
                    StatusCode::kOk);
          ASSERT_TRUE(cache->Put(view, view).ok());
          const CacheState state = *cache->Snapshot();
          EXPECT_TRUE(state.layers.at(0).key == CopyOf(view, dtype));
          EXPECT_TRUE(state.layers.at(0).value == CopyOf(view, dtype));
        }
      }
    }
  }
}

// The shares of a row are the row, whatever their number.
TEST(PutRowParts, MakeWholeRows) {
  constexpr std::int64_t kHeadDim = 96, kHeads = 11, kTokens = 2;
  const DenseTensor dense =
      FilledTensor(DType::kF32, {kHeadDim, kHeads, kTokens, 1}, 0);
  std::vector<float> numbers(dense.bytes.size() / sizeof(float) + 64);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = static_cast<float>(i % 251) / 8;
  }
  TensorView apart = dense.view();  // With a gap after each head.
  apart.data = reinterpret_cast<const std::byte*>(numbers.data());
  TensorView turned = apart;
  apart.shape[1] = kHeads / 2;
  apart.stride[1] *= 2;
  turned.stride[0] = sizeof(float) * kHeads;
  turned.stride[1] = sizeof(float);
  const std::vector<int> cells = {2, 0};
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8,
                            DType::kQ8, DType::kQ4}) {
    const DenseTensor stored = CopyOf(apart, dtype);
    for (const TensorView& from : {apart, turned, stored.view()}) {
      const auto row =
          AsSize(RunBytes(dtype, from.shape[0])) * AsSize(from.shape[1]);
      std::vector<std::byte> expected(3 * row);
      optimized::PutRows(from, cells, 0, 2,
                         {expected.data(), dtype, row, /*stream=*/false});
      for (const std::size_t shares : {1U, 2U, 3U, 16U}) {
        std::vector<std::byte> rows(3 * row);
        for (std::size_t i = 0; i < shares; ++i) {
          optimized::PutRowParts(from, cells, {.index = i, .count = shares},
                                 {rows.data(), dtype, row, /*stream=*/false});
        }
        EXPECT_EQ(rows, expected) << DTypeName(dtype) << " in " << shares;
      }
    }
  }
}

// A row of megabytes, which threads divide.
TEST_P(PutRows, TakesAFewLargeRows) {
  const Shape shape = {64, 8192, 3, 1};
  DenseTensor rows = FilledTensor(DType::kF32, shape, 0);
  for (std::size_t i = 0; i < rows.bytes.size(); i += sizeof(float)) {
    const auto number = static_cast<float>(i % 4093);
    std::memcpy(&rows.bytes[i], &number, sizeof(number));
  }
  for (const DType dtype : {DType::kF32, DType::kQ8}) {
    TestCache cache({}, GetParam());
    ASSERT_TRUE(cache->Init({dtype, 1, 8, 8}).ok());
    ASSERT_EQ(cache.Start({0, 1, 2}, {0, 0, 0}), StatusCode::kOk);
    ASSERT_TRUE(cache->Put(rows.view(), rows.view()).ok());
    const CacheState state = *cache->Snapshot();
    EXPECT_TRUE(state.layers.at(0).key == CopyOf(rows.view(), dtype));
    EXPECT_TRUE(state.layers.at(0).value == CopyOf(rows.view(), dtype));
  }
}

// The elements lie at strides that no array has.
TEST_P(PutRows, TakesRowsAtOddStrides) {
  TestCache cache({}, GetParam());
  ASSERT_EQ(cache.Init(1, 4, 2), StatusCode::kOk);
  ASSERT_EQ(cache.Start({0, 1}, {0, 0}), StatusCode::kOk);
  std::array<std::byte, 32> bytes = {};
  std::int64_t step = 6;
  for (const std::size_t first : {0U, 2U}) {
    StoreElement(1, &bytes[first], DType::kF32);
    StoreElement(2, &bytes[first + AsSize(step)], DType::kF32);
    TensorView rows = DenseView(&bytes[first], DType::kF32, {1, 1, 2, 1});
    rows.stride[2] = step;
    ASSERT_TRUE(cache->Put(rows, rows).ok());
    EXPECT_EQ(cache.SeenK(1), (std::vector<float>{1, 2}));
    EXPECT_EQ(cache.SeenV(1), (std::vector<float>{1, 2}));
    step = 8;
  }
}

TEST_P(PutRows, ThrowsWhenThereIsNoMemory) {
  TestCache cache({}, GetParam());
  ASSERT_EQ(cache.Init(1, 1 << 20, 1), StatusCode::kOk);
  ASSERT_EQ(cache.Start({0}, {0}), StatusCode::kOk);
  const float element = 0;
  TensorView rows = DenseView(&element, DType::kF32, {1, 1, 1, 1});
  rows.shape = {1 << 30, 1 << 30, 1, 1};  // All elements are the same one.
  rows.stride = {0, 0, 0, 1};
  EXPECT_THROW((void)cache->Put(rows, rows), std::bad_alloc);
  cache->Close();
}

}  // namespace
}  // namespace kvtwin::props
