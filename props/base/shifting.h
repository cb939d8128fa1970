// The interface of a cache that can also move positions, in addition to
// kvtwin::Cache: its Remove leaves a gap, and Shift closes it.

#ifndef KVTWIN_PROPS_BASE_SHIFTING_H_
#define KVTWIN_PROPS_BASE_SHIFTING_H_

#include <cstdint>

#include "kvtwin/status.h"

namespace kvtwin::props {

class Shifting {
 public:
  virtual ~Shifting() = default;
  // Adds `delta` to the positions in [begin, end) of `seq`, or from `begin` on
  // if end is kOpenEnd, and rewrites the K rows of these tokens. Tokens whose
  // position falls below 0 leave. Errors: shared_cells, not_supported.
  virtual Status Shift(int seq, std::int32_t begin, std::int32_t end,
                       std::int32_t delta) = 0;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_SHIFTING_H_
