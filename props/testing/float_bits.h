// The bits of floats.

#ifndef KVTWIN_PROPS_TESTING_FLOAT_BITS_H_
#define KVTWIN_PROPS_TESTING_FLOAT_BITS_H_

#include <bit>
#include <cstdint>
#include <vector>

namespace kvtwin::props {

// Returns the bits of each number. A test compares these where a number may be
// NaN, which is not equal to itself.
inline std::vector<std::uint32_t> FloatBits(const std::vector<float>& numbers) {
  std::vector<std::uint32_t> bits;
  bits.reserve(numbers.size());
  for (const float number : numbers) {
    bits.push_back(std::bit_cast<std::uint32_t>(number));
  }
  return bits;
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_TESTING_FLOAT_BITS_H_
