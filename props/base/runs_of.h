// Lists of numbers in reports.

#ifndef KVTWIN_PROPS_BASE_RUNS_OF_H_
#define KVTWIN_PROPS_BASE_RUNS_OF_H_

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace kvtwin::props {

// Returns "0 1 5". Of 8 numbers or more, those that ascend by one become
// "0 to 39", and equal ones "40 times 0".
inline std::string RunsOf(std::span<const std::int32_t> numbers) {
  constexpr std::size_t kShort = 8;
  std::string text;
  for (std::size_t begin = 0; begin < numbers.size();) {
    const std::int64_t first = numbers[begin];
    // Returns how many numbers from `begin` on ascend by `step`.
    const auto run = [&](std::int64_t step) {
      std::size_t count = 1;
      while (begin + count < numbers.size() &&
             numbers[begin + count] ==
                 first + step * static_cast<std::int64_t>(count)) {
        ++count;
      }
      return count;
    };
    const std::size_t up = run(1);
    const std::size_t same = run(0);
    if (!text.empty()) text += ' ';
    if (up >= kShort) {
      text += fmt::format("{} to {}", first, numbers[begin + up - 1]);
      begin += up;
    } else if (same >= kShort) {
      text += fmt::format("{} times {}", same, first);
      begin += same;
    } else {
      text += fmt::format("{}", first);
      ++begin;
    }
  }
  return text;
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_RUNS_OF_H_
