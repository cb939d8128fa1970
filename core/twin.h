// What a twin gives to the factory.

#ifndef KVTWIN_CORE_TWIN_H_
#define KVTWIN_CORE_TWIN_H_

#include <memory>

#include "kvtwin/cache.h"

namespace kvtwin {

// Requires: a spec that MakeCache accepts.
namespace reference {
std::unique_ptr<Cache> MakeCache(const CacheSpec& spec);
}
namespace optimized {
std::unique_ptr<Cache> MakeCache(const CacheSpec& spec);
}

}  // namespace kvtwin

#endif  // KVTWIN_CORE_TWIN_H_
