// The ledger with any rules, as a cache and as a backend: a cache that is
// correct by definition, for rules that no available program follows.

#ifndef KVTWIN_PROPS_BACKEND_LEDGER_BACKEND_H_
#define KVTWIN_PROPS_BACKEND_LEDGER_BACKEND_H_

#include <memory>
#include <string_view>

#include "core/dialects/rules.h"
#include "kvtwin/cache.h"
#include "kvtwin/kvtwin.h"

namespace kvtwin::props {

// A cache that is a ledger: its views have a column for each token that it
// holds; it has no cells and is never full. It is also Shifting. It does not
// support reserving passes, encoders, wrappers, permuted or tiled V, or masks
// of dtypes other than f32. It does not check for misuse.
std::unique_ptr<Cache> MakeLedgerCache(const CacheSpec& spec,
                                       const Rules& rules);

// The same cache as a backend with a profile's rules; null if there is no such
// profile. It refuses calls that it does not support. `anonymous`: it does not
// say which profile it follows.
const kvtwin_backend_v1* LedgerBackend(std::string_view profile,
                                       bool anonymous = false);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_LEDGER_BACKEND_H_
