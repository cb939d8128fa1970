// The caches that the reference twin is made of.

#ifndef KVTWIN_REFERENCE_MAKE_H_
#define KVTWIN_REFERENCE_MAKE_H_

#include <memory>

#include "core/guarded_cache.h"

namespace kvtwin::reference {

// Requires: `spec` is neither an encoder's nor a wrapper's.
std::unique_ptr<GuardedCache> MakeCausal(const CacheSpec& spec);
std::unique_ptr<GuardedCache> MakeEncoder();

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_MAKE_H_
