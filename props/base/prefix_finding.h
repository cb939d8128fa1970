// The interface of a cache that can find prefixes of prompts, in addition to
// kvtwin::Cache.

#ifndef KVTWIN_PROPS_BASE_PREFIX_FINDING_H_
#define KVTWIN_PROPS_BASE_PREFIX_FINDING_H_

#include <cstdint>
#include <span>

#include "kvtwin/status.h"

namespace kvtwin::props {

class PrefixFinding {
 public:
  virtual ~PrefixFinding() = default;
  // Gives `seq`, which has no tokens, a prompt of these tokens, and returns how
  // many of them it has from now on (F1 to F5).
  virtual Result<std::int32_t> FindPrefix(
      int seq, std::span<const std::int32_t> tokens) = 0;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_PREFIX_FINDING_H_
