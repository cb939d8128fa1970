// A number and its noun in a report.

#ifndef KVTWIN_PROPS_BASE_COUNTED_H_
#define KVTWIN_PROPS_BASE_COUNTED_H_

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace kvtwin::props {

// Returns "1 row", "2 rows". `many` is the plural of a noun that has another
// plural than with -s.
inline std::string Counted(std::int64_t count, std::string_view noun,
                           std::string_view many = {}) {
  if (count == 1) return fmt::format("1 {}", noun);
  return many.empty() ? fmt::format("{} {}s", count, noun)
                      : fmt::format("{} {}", count, many);
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_COUNTED_H_
