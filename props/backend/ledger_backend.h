// The ledger of any rules, as a cache and as a backend: what is right by
// definition where no program is at hand.

#ifndef KVTWIN_PROPS_BACKEND_LEDGER_BACKEND_H_
#define KVTWIN_PROPS_BACKEND_LEDGER_BACKEND_H_

#include <memory>
#include <string_view>

#include "core/dialects/rules.h"
#include "kvtwin/cache.h"
#include "kvtwin/kvtwin.h"

namespace kvtwin::props {

// A cache that is a ledger: its views have a column for each token that it
// holds, without cells, and it is never full. It is Shifting, too. Not:
// reserving passes, encoders and wrappers, V that is permuted or tiled, masks
// of other dtypes than f32. Calls are taken as legal.
std::unique_ptr<Cache> MakeLedgerCache(const CacheSpec& spec,
                                       const Rules& rules);

// The same as a backend, of a profile's rules; null if there is no such
// profile. It can be asked for anything: to refuse is an answer. `anonymous`:
// it does not say which profile it follows.
const kvtwin_backend_v1* LedgerBackend(std::string_view profile,
                                       bool anonymous = false);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BACKEND_LEDGER_BACKEND_H_
