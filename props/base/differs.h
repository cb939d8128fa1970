// The exception for the first difference. It is caught where the step is known.

#ifndef KVTWIN_PROPS_BASE_DIFFERS_H_
#define KVTWIN_PROPS_BASE_DIFFERS_H_

#include <string>
#include <type_traits>

#include "props/base/check_name.h"

namespace kvtwin::props {

struct Differs {
  std::string check;  // The name of a CheckName.
  std::string text;
  // The place in the view, or -1 if it is not known, and the cell of column 0.
  int row = -1;
  int column = -1;
  int first_cell = 0;
};

// Returns `text`, or calls it if it is a function: most texts are never needed.
template <class Text>
std::string Made(const Text& text) {
  if constexpr (std::is_invocable_v<Text>) {
    return text();
  } else {
    return std::string(text);
  }
}

// Throws Differs unless `holds`.
template <class Text>
void Check(bool holds, CheckName check, const Text& text) {
  if (!holds) throw Differs{std::string(check.name()), Made(text)};
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_DIFFERS_H_
