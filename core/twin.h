// The functions of the twins that the factory calls.

#ifndef KVTWIN_CORE_TWIN_H_
#define KVTWIN_CORE_TWIN_H_

#include <memory>

#include "kvtwin/attention.h"
#include "kvtwin/cache.h"
#include "kvtwin/paged.h"
#include "kvtwin/sessions.h"

namespace kvtwin {

// Returns the error of MakeCache for a bad spec.
Status CheckSpec(const CacheSpec& spec);

// Whether the cache is recurrent, or has a recurrent cache.
bool HasRecurrent(const CacheSpec& spec);

// Requires: a spec that MakeCache, MakePagedPool or MakeSessions accepts.
// (MakeWrapped, GuardedPaged and GuardedSessions check it.)
namespace reference {
std::unique_ptr<Cache> MakeCache(const CacheSpec& spec);
Result<std::unique_ptr<PagedPool>> MakePagedPool(const PagedSpec& spec);
std::unique_ptr<Attention> MakeAttention();
std::unique_ptr<Sessions> MakeSessions(Cache& cache, const SessionsSpec& spec);
}  // namespace reference
namespace optimized {
std::unique_ptr<Cache> MakeCache(const CacheSpec& spec);
Result<std::unique_ptr<PagedPool>> MakePagedPool(const PagedSpec& spec);
std::unique_ptr<Attention> MakeAttention();
std::unique_ptr<Sessions> MakeSessions(Cache& cache, const SessionsSpec& spec);
// Only in libraries built with KVTWIN_CUDA.
namespace cuda {
std::unique_ptr<Cache> MakeCache(const CacheSpec& spec);
Result<std::unique_ptr<PagedPool>> MakePagedPool(const PagedSpec& spec);
}  // namespace cuda
}  // namespace optimized

}  // namespace kvtwin

#endif  // KVTWIN_CORE_TWIN_H_
