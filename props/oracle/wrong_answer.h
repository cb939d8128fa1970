// Failures of a recording: answers that are not the expected ones.

#ifndef KVTWIN_PROPS_ORACLE_WRONG_ANSWER_H_
#define KVTWIN_PROPS_ORACLE_WRONG_ANSWER_H_

#include <fmt/format.h>

#include <optional>
#include <string_view>
#include <utility>

#include "props/compare/failure.h"

namespace kvtwin::props {

template <class... Args>
Failure WrongAnswer(fmt::format_string<Args...> format, Args&&... args) {
  return {.text = fmt::format(format, std::forward<Args>(args)...)};
}

// Returns nothing if the recording has the expected value.
template <class Value>
std::optional<Failure> WrongUnlessEqual(std::string_view what,
                                        const Value& recorded,
                                        const Value& expected) {
  if (recorded == expected) return std::nullopt;
  return WrongAnswer("{} is {}, expected {}", what, recorded, expected);
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ORACLE_WRONG_ANSWER_H_
