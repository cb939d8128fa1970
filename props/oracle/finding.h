// An error in a line of a recording.

#ifndef KVTWIN_PROPS_ORACLE_FINDING_H_
#define KVTWIN_PROPS_ORACLE_FINDING_H_

#include <fmt/format.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace kvtwin::props {

// An answer that is wrong.
struct Finding {
  std::string text;
  std::string twin;  // The twin that disagrees; empty if all twins do.
  int row = -1;      // Row of the mask; -1: no particular one.
  int column = -1;   // Column of the view; -1: no particular one.
};

template <class... Args>
Finding Found(fmt::format_string<Args...> format, Args&&... args) {
  return {fmt::format(format, std::forward<Args>(args)...), ""};
}

// Returns nothing if the recorded value is the expected one.
template <class Value>
std::optional<Finding> FoundUnlessEqual(std::string_view what,
                                        const Value& recorded,
                                        const Value& due) {
  if (recorded == due) return std::nullopt;
  return Found("{} is {}, due is {}", what, recorded, due);
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ORACLE_FINDING_H_
