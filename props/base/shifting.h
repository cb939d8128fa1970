// What a cache has beside kvtwin::Cache if its Remove leaves a gap.

#ifndef KVTWIN_PROPS_BASE_SHIFTING_H_
#define KVTWIN_PROPS_BASE_SHIFTING_H_

#include <cstdint>

#include "kvtwin/status.h"

namespace kvtwin::props {

class Shifting {
 public:
  virtual ~Shifting() = default;
  // Adds `delta` to the positions in [begin, end) of `seq`, everything from
  // `begin` on if end is kOpenEnd, and rewrites their K rows. What falls below
  // 0 leaves. Errors: shared_cells, not_supported.
  virtual Status Shift(int seq, std::int32_t begin, std::int32_t end,
                       std::int32_t delta) = 0;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_SHIFTING_H_
