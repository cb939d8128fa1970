// Conversions between f32 and the narrow dtypes, for every number, on each
// instruction set.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/elements.h"
#include "core/names.h"
#include "optimized/row_kernels.h"
#include "optimized/targets.h"
#include "props/testing/each_target.h"
#include "props/testing/float_bits.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

using Floats = std::vector<float>;

class NarrowOn : public EachTarget {};
INSTANTIATE_TEST_SUITE_P(Targets, NarrowOn,
                         ::testing::ValuesIn(optimized::SupportedTargets()),
                         TwinTestName);

void ExpectConversions(DType dtype) {
  const std::size_t size = SizeOf(dtype);
  const std::size_t all = std::size_t{1} << (8 * size);
  std::vector<std::byte> codes(all * size);
  Floats expected(all);
  for (std::size_t i = 0; i < all; ++i) {
    std::memcpy(&codes[i * size], &i, size);
    expected[i] = LoadElement(&codes[i * size], dtype);
  }
  Floats floats(all);
  optimized::WidenToF32(dtype, codes.data(), floats.data(), floats.size());
  EXPECT_EQ(FloatBits(floats), FloatBits(expected));
  // Every number, the midpoint to the next one, and numbers just beside both.
  Floats from;
  from.reserve(12 * floats.size());
  for (const float number : floats) {
    const auto bits = std::bit_cast<std::uint32_t>(number);
    for (const std::uint32_t step :
         {0U, 1U, 0xFFFU, 0x1000U, 0x1001U, 0x7FFFU, 0x8000U, 0x8001U, 0x7FFFFU,
          0x80000U, 0x80001U, ~0U}) {
      from.push_back(std::bit_cast<float>(bits + step));
    }
  }
  std::vector<std::byte> rounded(from.size() * size);
  for (std::size_t i = 0; i < from.size(); ++i) {
    StoreElement(from[i], &rounded[i * size], dtype);
  }
  // One number at a time, then whole vectors and a rest.
  for (const std::size_t count : {std::size_t{1}, std::size_t{37}}) {
    std::vector<std::byte> actual(rounded.size());
    for (std::size_t i = 0; i < from.size(); i += count) {
      optimized::RoundF32(dtype, &from[i], &actual[i * size],
                          std::min(count, from.size() - i));
    }
    EXPECT_TRUE(actual == rounded);
  }
}

TEST_P(NarrowOn, ConvertsAsTheDefinitionDoes) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF8}) {
    SCOPED_TRACE(DTypeName(dtype));
    ExpectConversions(dtype);
  }
}

}  // namespace
}  // namespace kvtwin::props
