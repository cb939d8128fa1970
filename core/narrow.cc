#include "core/narrow.h"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/index.h"

namespace kvtwin {
namespace {

constexpr std::uint8_t kF8Sign = 0x80;
constexpr std::uint8_t kF8NaN = 0x7F;
constexpr std::uint8_t kF8Largest = 0x7E;
constexpr int kF8FirstExponent = -6;
constexpr int kF8Mantissa = 3;  // Bits.

}  // namespace

std::uint8_t F8FromF32(float value) {
  const std::uint8_t sign = std::signbit(value) ? kF8Sign : 0;
  const float size = std::fabs(value);
  if (std::isnan(size)) return sign | kF8NaN;
  if (size >= F32FromF8(kF8Largest)) return sign | kF8Largest;
  const int exponent = size == 0 ? kF8FirstExponent
                                 : std::max(std::ilogb(size), kF8FirstExponent);
  // In units of the last place, up to 16, which is 8 units of the next
  // exponent.
  const float units = std::nearbyint(std::ldexp(size, kF8Mantissa - exponent));
  const int above = (exponent - kF8FirstExponent) << kF8Mantissa;
  return sign | static_cast<std::uint8_t>(above + static_cast<int>(units));
}

float F32FromF8(std::uint8_t bits) {
  const std::uint8_t code = bits & kF8NaN;
  const int exponent = code >> kF8Mantissa;
  const int mantissa = code & ((1 << kF8Mantissa) - 1);
  // Exponent 0 scales like exponent 1, but without the leading one.
  const int units = exponent == 0 ? mantissa : mantissa + (1 << kF8Mantissa);
  const int scale = std::max(exponent, 1) - 1 + kF8FirstExponent - kF8Mantissa;
  const float size = code == kF8NaN
                         ? std::numeric_limits<float>::quiet_NaN()
                         : std::ldexp(static_cast<float>(units), scale);
  return std::copysign(size, (bits & kF8Sign) != 0 ? -1.0F : 1.0F);
}

void StoreBlock(std::span<const float, kBlockElements> from, DType dtype,
                std::byte* block) {
  float largest = 0;  // The first of the largest magnitude.
  bool finite = true;
  for (const float value : from) {
    finite = finite && std::isfinite(value);
    if (std::fabs(value) > std::fabs(largest)) largest = value;
  }
  // In q4_0 the largest number is -8 times the scale, whatever its sign.
  const float exact =
      dtype == DType::kQ8 ? std::fabs(largest) / 127 : largest / -8;
  Eigen::half scale(exact);
  std::memset(block, 0, AsSize(RunBytes(dtype, 1)));
  const bool fits = finite && std::isfinite(static_cast<float>(scale));
  if (!fits)
    scale = Eigen::numext::bit_cast<Eigen::half>(std::uint16_t{0x7E00});
  std::memcpy(block, &scale, sizeof(scale));
  if (!fits) return;
  const float inverse = static_cast<float>(scale) == 0 ? 0 : 1 / exact;
  std::byte* numbers = block + sizeof(scale);
  for (std::size_t i = 0; i < from.size(); ++i) {
    const int number = static_cast<int>(std::nearbyint(from[i] * inverse));
    if (dtype == DType::kQ8) {
      numbers[i] = static_cast<std::byte>(number);
    } else {
      const auto nibble = static_cast<std::byte>(std::min(number + 8, 15));
      numbers[i % 16] |= i < 16 ? nibble : nibble << 4;
    }
  }
}

float LoadFromBlock(const std::byte* block, DType dtype, std::size_t i) {
  Eigen::half scale;
  std::memcpy(&scale, block, sizeof(scale));
  const std::byte* numbers = block + sizeof(scale);
  int number = 0;
  if (dtype == DType::kQ8) {
    number = static_cast<std::int8_t>(numbers[i]);
  } else {
    const auto pair = AsInt(numbers[i % 16]);
    number = (i < 16 ? pair & 15 : pair >> 4) - 8;
  }
  return static_cast<float>(scale) * static_cast<float>(number);
}

}  // namespace kvtwin
