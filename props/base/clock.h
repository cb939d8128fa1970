// A clock that only goes forward.

#ifndef KVTWIN_PROPS_BASE_CLOCK_H_
#define KVTWIN_PROPS_BASE_CLOCK_H_

#include <chrono>

namespace kvtwin::props {

// Returns the seconds since a fixed moment.
inline double Now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_CLOCK_H_
