#ifndef KVTWIN_REFERENCE_CAUSAL_H_
#define KVTWIN_REFERENCE_CAUSAL_H_

#include <memory>

#include "core/guarded_cache.h"

namespace kvtwin::reference {

std::unique_ptr<GuardedCache> MakeCausal(const CacheSpec& spec);

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_CAUSAL_H_
