// What is wrong in a line of a recording.

#ifndef KVTWIN_PROPS_ORACLE_FINDING_H_
#define KVTWIN_PROPS_ORACLE_FINDING_H_

#include <fmt/format.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace kvtwin::props {

// An answer that is not what it must be.
struct Finding {
  std::string text;
  std::string twin;  // The one that disagrees, unless all do.
  int row = -1;      // Of the mask; -1: none in particular.
  int column = -1;   // Of the view; -1: none in particular.
};

template <class... Args>
Finding Found(fmt::format_string<Args...> format, Args&&... args) {
  return {fmt::format(format, std::forward<Args>(args)...), ""};
}

// Returns nothing if the recording has the value that is due.
template <class Value>
std::optional<Finding> FoundUnlessEqual(std::string_view what,
                                        const Value& recorded,
                                        const Value& due) {
  if (recorded == due) return std::nullopt;
  return Found("{} is {}, due is {}", what, recorded, due);
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ORACLE_FINDING_H_
