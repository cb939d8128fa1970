// The statements of docs/dtypes.md about the dtypes of rows.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/names.h"
#include "kvtwin/paged.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = std::numeric_limits<float>::quiet_NaN();

using Block = std::array<float, kBlockElements>;

// Returns the stored bytes of a block, as hex.
std::string Stored(const Block& block, DType dtype) {
  std::vector<std::byte> bytes(AsSize(RunBytes(dtype, kBlockElements)));
  StoreBlock(block, dtype, bytes.data());
  std::string text;
  for (const std::byte byte : bytes) {
    text += fmt::format("{:02x}", AsInt(byte));
  }
  return text;
}

std::string Times(int count, std::string_view text) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

TEST(Dtypes, F8IsE4M3) {
  const std::vector<std::pair<float, int>> expected = {
      {0, 0x00},         {-0.0F, 0x80},      {1, 0x38},
      {-1, 0xB8},        {1.0625F, 0x38},    {1.1875F, 0x3A},
      {447, 0x7E},       {448, 0x7E},        {464, 0x7E},
      {1e9F, 0x7E},      {-kInfinity, 0xFE}, {kNaN, 0x7F},
      {-kNaN, 0xFF},     {0x1p-6F, 0x08},    {0x1p-9F, 0x01},
      {0x1p-10F, 0x00},  {0x1.8p-9F, 0x02},  {0x1.2p-10F, 0x01},
      {0x1.Fp-7F, 0x08}, {17, 0x58},         {19, 0x5A},
  };
  for (const auto& [value, bits] : expected) {
    EXPECT_EQ(F8FromF32(value), bits) << value;
  }
  for (int bits = 0; bits < 256; ++bits) {
    const auto code = static_cast<std::uint8_t>(bits);
    EXPECT_EQ(F8FromF32(F32FromF8(code)), code);
  }
  EXPECT_EQ(F32FromF8(0x7E), 448);
  EXPECT_EQ(F32FromF8(0x01), 0x1p-9F);
}

TEST(Dtypes, BlocksHaveTheCommonFormat) {
  // Scale 1 (f16 0x3C00, little-endian): the numbers themselves, halves rounded
  // to even.
  Block eight = {-127, 1, 2.5F, 3.5F, -1, -2.5F};
  EXPECT_EQ(Stored(eight, DType::kQ8),
            "003c"
            "81010204fffe" +
                Times(26, "00"));
  // Scale -1: a quotient of 8 is clipped to 7; the largest number has code 0.
  Block four = {8, -8, 1, -0.5F};
  four[16] = 7;
  four[17] = -7;
  EXPECT_EQ(Stored(four, DType::kQ4),
            "00bc"
            "10"
            "ff"
            "87"
            "88" +
                Times(12, "88"));
  EXPECT_EQ(Stored(Block{}, DType::kQ8), Times(34, "00"));
  EXPECT_EQ(Stored(Block{}, DType::kQ4), "0080" + Times(16, "88"));
}

TEST(Dtypes, AnUnrepresentableBlockIsAllNaN) {
  for (const DType dtype : {DType::kQ8, DType::kQ4}) {
    const float largest = dtype == DType::kQ8 ? 127 * 65504.0F : 8 * 65504.0F;
    for (const float bad :
         {kNaN, -kNaN, kInfinity, -kInfinity, 1.001F * largest}) {
      Block block = {1, 2, 3};
      block[5] = bad;
      EXPECT_EQ(Stored(block, dtype),
                "007e" + Times(dtype == DType::kQ8 ? 32 : 16, "00"))
          << bad;
      std::array<std::byte, 34> bytes;
      StoreBlock(block, dtype, bytes.data());
      for (std::size_t i = 0; i < block.size(); ++i) {
        EXPECT_TRUE(std::isnan(LoadFromBlock(bytes.data(), dtype, i)));
      }
    }
    Block large = {largest};
    EXPECT_NE(Stored(large, dtype).substr(0, 4), "007e");
  }
}

TEST(Dtypes, RowsOfBlocksMustBeWhole) {
  for (const DType dtype : {DType::kQ8, DType::kQ4}) {
    const std::string name(DTypeName(dtype));
    for (const std::string_view twin : TwinNames()) {
      auto cache = *MakeCache({}, twin);
      EXPECT_EQ(cache->SetConfig({.mask_dtype = dtype}).message(),
                "mask_dtype is " + name + ", masks are f32, f16, bf16 or bits");
      for (const VLayout layout : {VLayout::kPermuted, VLayout::kTiled}) {
        cache = *MakeCache({}, twin);
        EXPECT_TRUE(cache->SetConfig(ConfigOf(layout)).ok());
        EXPECT_EQ(cache->Init({dtype, 1, 4, 4}).message(),
                  std::string(VLayoutName(layout)) + " V is " + name +
                      ", whose blocks would be of 32 tokens");
      }
      cache = *MakeCache({}, twin);
      ASSERT_TRUE(cache->SetConfig({.v_dtype = DType::kF32}).ok());
      ASSERT_TRUE(cache->Init({dtype, 1, 4, 4}).ok());
      const std::vector<std::int32_t> positions = {0};
      const std::vector<int> sequences = {0};
      ASSERT_TRUE(cache->StartForward({positions, sequences}, false).ok());
      const DenseTensor odd = FilledTensor(DType::kF32, {33, 2, 1, 1}, 1);
      const DenseTensor even = FilledTensor(DType::kF32, {64, 2, 1, 1}, 1);
      EXPECT_EQ(cache->Put(odd.view(), odd.view()).message(),
                "key has a head_dim of 33, " + name + " is in blocks of 32");
      DenseTensor blocks = FilledTensor(dtype, {64, 2, 1, 1}, 0);
      TensorView apart = blocks.view();
      apart.stride[0] = 1;
      EXPECT_EQ(cache->Put(apart, odd.view()).message(),
                "key has a stride[0] of 1, " + name + " needs 0");
      EXPECT_EQ(cache->Put(even.view(), blocks.view()).message(),
                "value is " + name + ", the cache takes f32");
      EXPECT_TRUE(cache->Put(blocks.view(), odd.view()).ok());
      // V has another dtype in this cache.
      EXPECT_TRUE(cache->Put(even.view(), odd.view()).ok());
      cache = *MakeCache({}, twin);
      ASSERT_TRUE(cache->Init({dtype, 1, 4, 4}).ok());
      ASSERT_TRUE(cache->StartForward({positions, sequences}, false).ok());
      EXPECT_EQ(cache->Put(blocks.view(), apart).message(),
                "value has a stride[0] of 1, " + name + " needs 0");
      PagedSpec spec;
      spec.k_head_dim = 64;
      spec.v_head_dim = 31;
      spec.dtype = dtype;
      EXPECT_EQ(MakePagedPool(spec, twin).status().message(),
                "V has a head_dim of 31, " + name + " is in blocks of 32");
      spec.v_head_dim = 32;
      auto pool = *MakePagedPool(spec, twin);
      const int sequence = *pool->Open({}, {});
      EXPECT_EQ(pool->Append(sequence, 0, apart, odd.view()).status().message(),
                "key has a stride[0] of 1, " + name + " needs 0");
    }
  }
}

// The error of one rounding is at most `share` of the largest element, plus
// `least`.
struct Rounding {
  double share;
  double least;
};

Rounding RoundingOf(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return {0x1p-11, 0x1p-25};
    case DType::kBF16:
      return {0x1p-8, 0x1p-134};
    case DType::kF8:
      return {0x1p-4, 0x1p-10};
    case DType::kQ8:
      return {(0.5 + 127 * 0x1p-11) / 127, 127 * 0x1p-25};
    default:
      return {(1 + 8 * 0x1p-11) / 8, 8 * 0x1p-25};
  }
}

using Head = std::vector<double>;

// The head turned once by a sum of offsets, in double.
Head Turned(const Head& head, const Rope& rope, double offset) {
  Head turned = head;
  const auto dims = static_cast<double>(head.size());
  for (std::size_t x = 0; x < head.size(); x += 2) {
    const double angle =
        offset * std::pow(rope.base, -static_cast<double>(x) / dims);
    turned[x] = head[x] * std::cos(angle) - head[x + 1] * std::sin(angle);
    turned[x + 1] = head[x] * std::sin(angle) + head[x + 1] * std::cos(angle);
  }
  return turned;
}

// The largest error of an element after this many shifts, if the longest pair
// has length 1.
double Measure(DType dtype, int shifts) {
  constexpr int kDims = 128;
  constexpr int kRows = 40;
  Shift shift;
  shift.kind = ShiftKind::kRope;
  std::uint32_t state = 1;
  const auto next = [&state] {
    state = state * 1664525U + 1013904223U;
    return static_cast<double>(state >> 8) / (1 << 24);
  };
  double furthest = 0;
  for (int row = 0; row < kRows; ++row) {
    std::array<float, kDims> put;
    for (std::size_t i = 0; i < put.size(); i += 2) {
      const double angle = 6.3 * next();
      const double length = i == 0 || row % 2 == 0 ? 1 : next();
      put[i] = static_cast<float>(length * std::cos(angle));
      put[i + 1] = static_cast<float>(length * std::sin(angle));
    }
    DenseTensor key =
        CopyOf(DenseView(put.data(), DType::kF32, {kDims, 1, 1, 1}), dtype);
    std::int32_t sum = 0;
    for (int i = 0; i < shifts; ++i) {
      const auto offset = -1 - static_cast<std::int32_t>(3000 * next());
      EXPECT_TRUE(ShiftStored(shift, 0, offset, key).ok());
      sum += offset;
    }
    const Head expected = Turned(Head(put.begin(), put.end()), shift.rope, sum);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double actual = LoadFrom(key.view(), static_cast<std::int64_t>(i));
      furthest = std::max(furthest, std::fabs(actual - expected[i]));
    }
  }
  return furthest;
}

TEST(Dtypes, ShiftsStayBelowTheirBound) {
  for (const DType dtype : kRowDTypes) {
    if (dtype == DType::kF32) continue;
    const auto [share, least] = RoundingOf(dtype);
    const double c = std::sqrt(2) * share + 0x1p-20;
    const double t = std::sqrt(2) * least;
    std::string line =
        fmt::format("| `{}` | {:.3g} | {:.2g} |", DTypeName(dtype), c, t);
    for (const int shifts : {0, 1, 10, 100}) {
      const double bound = (1 + t / c) * (std::pow(1 + c, shifts + 1) - 1);
      const double measured = Measure(dtype, shifts);
      EXPECT_LE(measured, bound) << DTypeName(dtype) << ' ' << shifts;
      // The test is not vacuous: some row is rounded.
      EXPECT_GT(measured, share / 8) << DTypeName(dtype) << ' ' << shifts;
      if (shifts > 0) line += fmt::format(" {:.2g} / {:.2g},", measured, bound);
    }
    line.back() = ' ';
    fmt::print("{}|\n", line);
  }
}

TEST(Dtypes, RefusesUnknownNames) {
  EXPECT_EQ(DTypeFromName("f64"), std::nullopt);
}

}  // namespace
}  // namespace kvtwin::props
