// Thrown at the first difference, caught where the step is known.

#ifndef KVTWIN_PROPS_BASE_DIFFERS_H_
#define KVTWIN_PROPS_BASE_DIFFERS_H_

#include <string>
#include <type_traits>

#include "props/base/check_name.h"

namespace kvtwin::props {

struct Differs {
  std::string check;  // The name of a CheckName.
  std::string text;
  // Of a view, if it is known; and the cell of its first column.
  int row = -1;
  int column = -1;
  int first_cell = 0;
};

// A text that may be given as a function that makes it: most are never needed.
template <class Text>
std::string Made(const Text& text) {
  if constexpr (std::is_invocable_v<Text>) {
    return text();
  } else {
    return std::string(text);
  }
}

// Throws unless it holds.
template <class Text>
void Check(bool holds, CheckName check, const Text& text) {
  if (!holds) throw Differs{std::string(check.name()), Made(text)};
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_DIFFERS_H_
