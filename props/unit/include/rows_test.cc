#include "kvtwin/rows.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "core/index.h"
#include "core/mask_elements.h"

namespace kvtwin::props {
namespace {

std::vector<std::byte> Stored(DType dtype, const std::vector<float>& numbers) {
  const auto count = std::ssize(numbers);
  std::vector<std::byte> row(AsSize(RunBytes(dtype, count)));
  const Status status = RowFromF32(numbers, dtype, row);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return row;
}

std::vector<float> Read(DType dtype, const std::vector<std::byte>& row,
                        std::size_t count) {
  std::vector<float> numbers(count);
  const Status status = RowToF32(row, dtype, numbers);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return numbers;
}

// Written by hand: the expected bytes come from the formats' definitions.
TEST(Rows, ConvertBothWays) {
  const auto bytes = [](DType dtype, float number) {
    std::uint32_t bits = 0;
    const std::vector<std::byte> row = Stored(dtype, {number});
    std::memcpy(&bits, row.data(), row.size());
    return bits;
  };
  EXPECT_EQ(bytes(DType::kF32, -1.5F), 0xBFC00000U);
  EXPECT_EQ(bytes(DType::kF16, -1.5F), 0xBE00U);
  EXPECT_EQ(bytes(DType::kF16, 65520.0F), 0x7C00U);      // Rounds to infinity.
  EXPECT_EQ(bytes(DType::kBF16, 1.00390625F), 0x3F80U);  // A tie, to even.
  EXPECT_EQ(bytes(DType::kF8, 448.0F), 0x7EU);
  EXPECT_EQ(bytes(DType::kF8, -1.0F), 0xB8U);
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kF8}) {
    const std::vector<float> exact = {0, -1, 0.5F, 448, -0.25F};
    EXPECT_EQ(Read(dtype, Stored(dtype, exact), exact.size()), exact);
  }
}

TEST(Rows, ConvertBlocks) {
  std::vector<float> numbers(64);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = static_cast<float>(i) - 32;
  }
  const std::vector<std::byte> q8 = Stored(DType::kQ8, numbers);
  ASSERT_EQ(q8.size(), 68U);
  EXPECT_EQ(AsInt(q8[2]), 256 - 127);  // -32 is -127 * scale.
  const std::vector<float> again = Read(DType::kQ8, q8, numbers.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    EXPECT_NEAR(again[i], numbers[i], 32.0F / 127 / 2 + 0.02F) << i;
  }
  const std::vector<std::byte> q4 = Stored(DType::kQ4, numbers);
  ASSERT_EQ(q4.size(), 36U);
  const std::vector<float> coarse = Read(DType::kQ4, q4, numbers.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    EXPECT_NEAR(coarse[i], numbers[i], 4.01F) << i;
  }
}

TEST(Rows, RefuseWhatDoesNotFit) {
  std::vector<std::byte> row(6);
  std::vector<float> numbers(3);
  EXPECT_TRUE(RowToF32(row, DType::kF16, numbers).ok());
  EXPECT_TRUE(RowToF32({}, DType::kF16, {}).ok());
  const auto why = [&](DType dtype) {
    const Status status = RowToF32(row, dtype, numbers);
    EXPECT_EQ(status.message(), RowFromF32(numbers, dtype, row).message());
    return status.message();
  };
  EXPECT_EQ(why(DType::kF32), "3 elements of f32 have 12 bytes, the row has 6");
  EXPECT_EQ(why(DType::kQ4), "q4_0 has blocks of 32 elements, the row has 3");
  EXPECT_EQ(why(DType::kBits), "dtype is bits, which rows cannot have");
  // The bytes of so many elements would be 0 in 64 bits.
  const std::size_t count = std::size_t{1} << 62;
  EXPECT_EQ(RowToF32({}, DType::kF32, {numbers.data(), count}).message(),
            "numbers has 4611686018427387904 elements, a row has at most "
            "2305843009213693951");
}

TEST(Rows, ElementsOfViewsAreFoundByTheirStrides) {
  const std::array<float, 12> numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  TensorView view = DenseView(numbers.data(), DType::kF32, {2, 3, 2, 1});
  EXPECT_EQ(ElementAsF32(view, 1, 2, 1), 11);
  EXPECT_EQ(ElementOf<float>(view, 0, 1, 1), 8);
  EXPECT_EQ(&ElementOf<float>(view, 1), &numbers[1]);
  view.shape = {3, 2, 2, 1};  // Transposed.
  std::swap(view.stride[0], view.stride[1]);
  EXPECT_EQ(ElementAsF32(view, 2, 1, 1), 11);
  EXPECT_EQ(ElementOf<float>(view, 1, 0, 1), 8);

  const std::vector<std::byte> half = Stored(DType::kF16, {1, -1.5F});
  const TensorView row = DenseView(half.data(), DType::kF16, {2, 1, 1, 1});
  EXPECT_EQ(ElementAsF32(row, 1), -1.5F);
  EXPECT_EQ(ElementOf<std::uint16_t>(row, 1), 0xBE00);

  std::vector<float> blocks(64);
  blocks[33] = 8;
  const std::vector<std::byte> q4 = Stored(DType::kQ4, blocks);
  const TensorView quantized = DenseView(q4.data(), DType::kQ4, {32, 2, 1, 1});
  EXPECT_EQ(std::abs(ElementAsF32(quantized, 1, 1)), 8);
  EXPECT_EQ(ElementAsF32(quantized, 2, 1), 0);
}

TEST(Rows, MasksOfAllDTypesSayWhoMayAttend) {
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kBits}) {
    DenseTensor mask = HidingMask(dtype, 70, 2);
    AllowInMask(mask, 65, 1);
    EXPECT_TRUE(MayAttend(mask.view(), 65, 1)) << DTypeName(dtype);
    EXPECT_FALSE(MayAttend(mask.view(), 65, 0)) << DTypeName(dtype);
    EXPECT_FALSE(MayAttend(mask.view(), 64, 1)) << DTypeName(dtype);
  }
}

}  // namespace
}  // namespace kvtwin::props
