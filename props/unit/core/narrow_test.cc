// Compares the conversions with the text of docs/dtypes.md, computed in double
// and long double: all numbers of the narrow dtypes, and f32 on both sides of
// each boundary. All twins must agree with core/narrow.h and core/elements.h.

#include "core/narrow.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "core/elements.h"
#include "core/index.h"

namespace kvtwin::props {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A format with a sign, an exponent and a mantissa, in this order.
struct Format {
  DType dtype;
  int exponent_bits;
  int mantissa_bits;
  std::uint32_t largest;  // The code of the largest finite number.
  std::uint32_t above;    // The code of all larger numbers.
  std::uint32_t nan;      // The first quiet NaN.
};
constexpr std::array kFormats = {
    Format{DType::kF16, 5, 10, 0x7BFF, 0x7C00, 0x7E00},
    Format{DType::kBF16, 8, 7, 0x7F7F, 0x7F80, 0x7FC0},
    Format{DType::kF8, 4, 3, 0x7E, 0x7E, 0x7F},
};

std::uint32_t SignOf(const Format& format) {
  return 1U << (format.exponent_bits + format.mantissa_bits);
}

// The number of a code up to the largest, without a sign.
double NumberOf(const Format& format, std::uint32_t code) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const auto exponent = AsInt(code >> format.mantissa_bits);
  const auto mantissa =
      static_cast<double>(code & ((1U << format.mantissa_bits) - 1));
  const double one = std::ldexp(1.0, format.mantissa_bits);
  if (exponent == 0) {
    return std::ldexp(mantissa, 1 - bias - format.mantissa_bits);
  }
  return std::ldexp(one + mantissa, exponent - bias - format.mantissa_bits);
}

// The least number that rounds past the largest: half a step above it. (f8 has
// no code for such numbers; they become the largest.)
double FirstAbove(const Format& format) {
  const double largest = NumberOf(format, format.largest);
  const double before = NumberOf(format, format.largest - 1);
  return largest + (largest - before) / 2;
}

// The code nearest to a finite f32 without its sign. `code` is the largest code
// whose number is not above `size`.
std::uint32_t NearestTo(const Format& format, double size, std::uint32_t code) {
  if (code == format.largest) {
    return size >= FirstAbove(format) ? format.above : code;
  }
  const double below = size - NumberOf(format, code);
  const double above = NumberOf(format, code + 1) - size;
  EXPECT_GE(below, 0);
  EXPECT_GE(above, 0);
  if (below != above) return below < above ? code : code + 1;
  return code % 2 == 0 ? code : code + 1;
}

std::uint32_t Stored(const Format& format, float value) {
  std::array<std::byte, 4> bytes = {};
  StoreElement(value, bytes.data(), format.dtype);
  return std::bit_cast<std::uint32_t>(bytes);
}

float Loaded(const Format& format, std::uint32_t code) {
  const auto bytes = std::bit_cast<std::array<std::byte, 4>>(code);
  return LoadElement(bytes.data(), format.dtype);
}

void ExpectStored(const Format& format, float size, std::uint32_t expected) {
  ASSERT_EQ(Stored(format, size), expected)
      << fmt::format("{} {:a}", DTypeName(format.dtype), size);
  ASSERT_EQ(Stored(format, -size), expected | SignOf(format))
      << fmt::format("{} {:a}", DTypeName(format.dtype), -size);
}

TEST(Narrow, DecodesEveryCode) {
  for (const Format& format : kFormats) {
    for (std::uint32_t code = 0; code <= format.largest; ++code) {
      const auto number = static_cast<float>(NumberOf(format, code));
      ASSERT_EQ(std::bit_cast<std::uint32_t>(Loaded(format, code)),
                std::bit_cast<std::uint32_t>(number))
          << code;
      ASSERT_EQ(
          std::bit_cast<std::uint32_t>(Loaded(format, code | SignOf(format))),
          std::bit_cast<std::uint32_t>(-number))
          << code;
      ExpectStored(format, number, code);  // The number rounds back.
    }
    const std::uint32_t sign = SignOf(format);
    std::uint32_t nan = format.largest + 1;
    if (format.above != format.largest) {
      EXPECT_EQ(Loaded(format, format.above), kInfinity);
      EXPECT_EQ(Loaded(format, format.above | sign), -kInfinity);
      nan = format.above + 1;
    }
    for (; nan < sign; ++nan) {
      ASSERT_TRUE(std::isnan(Loaded(format, nan))) << nan;
      ASSERT_TRUE(std::isnan(Loaded(format, nan | sign))) << nan;
    }
  }
}

// Numbers around each code's number, and around the midpoint to the next one.
TEST(Narrow, RoundsToTheNearest) {
  for (const Format& format : kFormats) {
    for (std::uint32_t code = 0; code < format.largest; ++code) {
      const auto low = static_cast<float>(NumberOf(format, code));
      const auto high = static_cast<float>(NumberOf(format, code + 1));
      const auto half = static_cast<float>(
          (static_cast<double>(low) + static_cast<double>(high)) / 2);
      for (const float size :
           {std::nextafter(low, high), std::nextafter(half, low), half,
            std::nextafter(half, high), std::nextafter(high, low),
            low + (half - low) / 2, half + (high - half) / 2}) {
        ExpectStored(format, size, NearestTo(format, size, code));
      }
    }
  }
}

TEST(Narrow, OverflowsAndNaNs) {
  for (const Format& format : kFormats) {
    const auto first = static_cast<float>(FirstAbove(format));
    const float largest = std::numeric_limits<float>::max();
    ExpectStored(format, std::nextafter(first, 0.0F), format.largest);
    // (For bf16, only the last half step of finite f32 numbers is that large.)
    for (const float size :
         {first, std::nextafter(first, kInfinity), largest, kInfinity}) {
      ExpectStored(format, size, format.above);
    }
    for (const std::uint32_t bits : {0x7F800001U, 0x7F801234U, 0x7FBFFFFFU,
                                     0x7FC00000U, 0x7FC00001U, 0x7FFFFFFFU}) {
      const auto nan = std::bit_cast<float>(bits);
      EXPECT_EQ(Stored(format, nan), format.nan) << bits;
      EXPECT_EQ(Stored(format, std::bit_cast<float>(bits | 0x80000000U)),
                format.nan | SignOf(format))
          << bits;
    }
  }
}

// The code of the largest number that is not above this one.
std::uint32_t CodeBelow(const Format& format, double size) {
  std::uint32_t low = 0;
  std::uint32_t high = format.largest;
  while (low < high) {
    const std::uint32_t middle = (low + high + 1) / 2;
    if (NumberOf(format, middle) <= size) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

TEST(Narrow, RoundsAnyF32ToTheNearest) {
  std::mt19937 random(1);
  for (int i = 0; i < 300000; ++i) {
    const auto size = std::bit_cast<float>(
        static_cast<std::uint32_t>(random()) & 0x7FFFFFFFU);
    if (!std::isfinite(size)) continue;
    for (const Format& format : kFormats) {
      const std::uint32_t code = CodeBelow(format, size);
      ExpectStored(format, size, NearestTo(format, size, code));
    }
  }
}

// Blocks ----------------------------------------------------------------------

using Block = std::array<float, kBlockElements>;

// Rounds to the nearest integer, ties to even.
int Nearest(long double number) {
  const long double below = std::floor(number);
  const long double rest = number - below;
  const auto whole = static_cast<int>(below);
  if (rest != 0.5L) return rest < 0.5L ? whole : whole + 1;
  return whole % 2 == 0 ? whole : whole + 1;
}

std::uint32_t HalfOf(float value) {
  const Format& half = kFormats[0];
  const double size = std::fabs(static_cast<double>(value));
  const std::uint32_t code = NearestTo(half, size, CodeBelow(half, size));
  return code | (std::signbit(value) ? SignOf(half) : 0);
}

using Bytes = std::vector<std::uint8_t>;

// The expected bytes of a block by docs/dtypes.md. f32 arithmetic is done in
// long double, which has more than twice the digits, and rounded.
Bytes DueBlock(const Block& block, DType dtype) {
  const bool eight = dtype == DType::kQ8;
  Bytes expected(eight ? 34 : 18);
  long double largest = 0;
  bool finite = true;
  for (const float value : block) {
    finite = finite && std::isfinite(value);
    if (std::fabs(static_cast<long double>(value)) > std::fabs(largest)) {
      largest = value;
    }
  }
  const auto s =
      static_cast<float>(eight ? std::fabs(largest) / 127 : largest / -8);
  const std::uint32_t scale = finite ? HalfOf(s) : kFormats[0].above;
  if ((scale & 0x7FFF) == kFormats[0].above) {
    expected[1] = 0x7E;
    return expected;
  }
  expected[0] = static_cast<std::uint8_t>(scale & 0xFF);
  expected[1] = static_cast<std::uint8_t>(scale >> 8);
  const bool zero = (scale & 0x7FFF) == 0;
  const float inverse = zero ? 0 : static_cast<float>(1.0L / s);
  for (std::size_t i = 0; i < block.size(); ++i) {
    const auto x = static_cast<float>(static_cast<long double>(block[i]) *
                                      static_cast<long double>(inverse));
    const int q = Nearest(x);
    if (eight) {
      expected[2 + i] = static_cast<std::uint8_t>(q);
      continue;
    }
    const int nibble = std::min(q + 8, 15);
    EXPECT_GE(nibble, 0);
    std::uint8_t& byte = expected[2 + i % 16];
    byte = static_cast<std::uint8_t>(byte | (i < 16 ? nibble : nibble << 4));
  }
  return expected;
}

void ExpectBlock(const Block& block) {
  for (const DType dtype : {DType::kQ8, DType::kQ4}) {
    const Bytes expected = DueBlock(block, dtype);
    Bytes actual(expected.size(), 0xAA);
    StoreBlock(block, dtype, std::as_writable_bytes(std::span(actual)).data());
    ASSERT_EQ(actual, expected)
        << fmt::format("{} of {:a}", DTypeName(dtype), fmt::join(block, " "));
    // The way back is a product of an f16 and a small number, which is exact.
    const std::uint32_t scale =
        expected[0] | static_cast<std::uint32_t>(expected[1]) << 8;
    const bool nan = (scale & 0x7FFF) > kFormats[0].above;
    const double size = nan ? 0 : NumberOf(kFormats[0], scale & 0x7FFF);
    const double d = (scale & 0x8000) != 0 ? -size : size;
    for (std::size_t i = 0; i < block.size(); ++i) {
      const std::uint8_t byte =
          expected[2 + (dtype == DType::kQ8 ? i : i % 16)];
      int q = byte < 128 ? byte : byte - 256;
      if (dtype == DType::kQ4) q = (i < 16 ? byte % 16 : byte / 16) - 8;
      const float value =
          LoadFromBlock(std::as_bytes(std::span(expected)).data(), dtype, i);
      if (nan) {
        ASSERT_TRUE(std::isnan(value));
      } else {
        ASSERT_EQ(value, static_cast<float>(d * q)) << i;
      }
    }
  }
}

TEST(Narrow, BlocksOfAnyNumbers) {
  std::mt19937 random(2);
  for (int i = 0; i < 20000; ++i) {
    Block block;
    const int exponent = AsInt(random() % 60) - 40;
    const auto range = AsInt(1 + random() % 12);
    for (float& value : block) {
      const auto unit = static_cast<float>(random() >> 8) * 0x1p-23F - 1;
      value = std::ldexp(unit, exponent - static_cast<int>(random()) % range);
    }
    ASSERT_NO_FATAL_FAILURE(ExpectBlock(block));
  }
}

// Multiples of half a scale, and their neighbours, of both signs.
TEST(Narrow, BlocksOfHalves) {
  for (const float largest :
       {127.0F, -127.0F, 8.0F, -8.0F, 254.0F, 12.7F, 1.0F}) {
    for (int first = -260; first < 260; first += 15) {
      for (const float beside : {-1.0F, 0.0F, 1.0F}) {
        Block block;
        for (std::size_t i = 0; i < block.size(); ++i) {
          const float half = static_cast<float>(first + AsInt(i) % 15) / 2;
          float value = largest > 100 || largest < -100 ? half : half / 16;
          if (beside != 0) value = std::nextafter(value, beside * kInfinity);
          block[i] = std::clamp(value, -std::fabs(largest), std::fabs(largest));
        }
        block[7] = largest;
        ASSERT_NO_FATAL_FAILURE(ExpectBlock(block));
        std::swap(block[7], block[30]);
        block[3] = -largest;  // The first of two largest numbers counts.
        ASSERT_NO_FATAL_FAILURE(ExpectBlock(block));
      }
    }
  }
}

// Scales that are zero, subnormal, the largest, and too large; infinity and
// NaN.
TEST(Narrow, BlocksAtTheirEnds) {
  for (const float share : {127.0F, 8.0F, -8.0F}) {
    for (const float scale : {0.0F, 0x1p-149F, 0x1p-26F, 0x1p-25F,
                              0x1.000002p-25F, 0x1p-24F, 0x1.8p-24F, 0x1p-14F,
                              65504.0F, 65519.0F, 65520.0F, 65536.0F, 1e30F}) {
      for (const float beside : {-1.0F, 0.0F, 1.0F}) {
        Block block = {};
        const float largest = share * scale;
        block[5] = std::nextafter(largest, beside * kInfinity);
        if (beside == 0) block[5] = largest;
        block[6] = largest / 2;
        block[31] = -largest / 3;
        ASSERT_NO_FATAL_FAILURE(ExpectBlock(block));
      }
    }
  }
  for (const float bad : {kInfinity, -kInfinity, std::nanf("")}) {
    for (const std::size_t at : {0U, 1U, 31U}) {
      Block block = {1, -2, 3};
      block[at] = bad;
      ASSERT_NO_FATAL_FAILURE(ExpectBlock(block));
    }
  }
  ASSERT_NO_FATAL_FAILURE(ExpectBlock(Block{}));
  ASSERT_NO_FATAL_FAILURE(ExpectBlock(Block{-0.0F}));
}

}  // namespace
}  // namespace kvtwin::props
