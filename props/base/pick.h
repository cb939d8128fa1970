// Random numbers.

#ifndef KVTWIN_PROPS_BASE_PICK_H_
#define KVTWIN_PROPS_BASE_PICK_H_

#include <functional>
#include <initializer_list>

#include "core/index.h"

namespace kvtwin::props {

// A function that returns a random number from lo to hi, both included.
using Pick = std::function<int(int lo, int hi)>;

template <class T>
T OneOf(const Pick& pick, std::initializer_list<T> values) {
  return values.begin()[pick(0, Size(values) - 1)];
}

inline bool Chance(const Pick& pick, int percent) {
  return pick(0, 99) < percent;
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_PICK_H_
