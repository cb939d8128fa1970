// Failures of a recording: answers that are not the expected ones.

#ifndef KVTWIN_PROPS_ORACLE_WRONG_ANSWER_H_
#define KVTWIN_PROPS_ORACLE_WRONG_ANSWER_H_

#include <fmt/format.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "props/compare/failure.h"

namespace kvtwin::props {

// The place is a row of the mask and a column of the view; -1: none.
inline Failure WrongAnswer(std::string text, int row = -1, int column = -1) {
  Failure failure;
  failure.text = std::move(text);
  failure.row = row;
  failure.column = column;
  return failure;
}

template <class... Args>
Failure Found(fmt::format_string<Args...> format, Args&&... args) {
  return WrongAnswer(fmt::format(format, std::forward<Args>(args)...));
}

// Returns nothing if the recording has the expected value.
template <class Value>
std::optional<Failure> FoundUnlessEqual(std::string_view what,
                                        const Value& recorded,
                                        const Value& expected) {
  if (recorded == expected) return std::nullopt;
  return Found("{} is {}, due is {}", what, recorded, expected);
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ORACLE_WRONG_ANSWER_H_
