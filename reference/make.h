// Makes the caches that the reference twin consists of.

#ifndef KVTWIN_REFERENCE_MAKE_H_
#define KVTWIN_REFERENCE_MAKE_H_

#include <memory>

#include "core/guarded_cache.h"

namespace kvtwin::reference {

// Requires: `spec` is not that of an encoder or a wrapper.
std::unique_ptr<GuardedCache> MakeCausal(const CacheSpec& spec);
std::unique_ptr<GuardedCache> MakeEncoder();

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_MAKE_H_
