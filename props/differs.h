// Thrown at the first difference, caught where the step is known.

#ifndef KVTWIN_PROPS_DIFFERS_H_
#define KVTWIN_PROPS_DIFFERS_H_

#include <string>

namespace kvtwin::props {

struct Differs {
  std::string check;  // The name of a CheckName.
  std::string text;
  // Of a view, if it is known; and the cell of its first column.
  int row = -1;
  int column = -1;
  int first_cell = 0;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_DIFFERS_H_
