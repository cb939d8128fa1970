// The first version of the interface, as a thin adapter over Cache: one
// capacity in tokens for all sequences, and StartForward with two lists.

#ifndef KVTWIN_LEGACY_H_
#define KVTWIN_LEGACY_H_

#include <cstdint>
#include <memory>
#include <span>

#include "kvtwin/cache.h"

namespace kvtwin {

// Owns a cache that it initializes in the old way. Make every other call on
// cache(). As in that version, nothing is ever evicted: a window only masks.
class LegacyCache {
 public:
  // `spec.memory` is ignored. Errors: as MakeCache.
  static Result<LegacyCache> Make(CacheSpec spec,
                                  std::string_view twin = "optimized");

  // Makes `capacity` cells for any number of sequences; a recurrent cache has
  // the number of cells of R2 (docs/semantics.md). A batch may have up to
  // `capacity` tokens. Errors: as Cache::Init.
  Status Init(DType dtype, std::int32_t capacity);

  // Errors: as Cache::StartForward.
  Status StartForward(std::span<const std::int32_t> positions,
                      std::span<const int> sequences);

  // The cache, for every other call. Valid as long as this object.
  Cache& cache() { return *cache_; }

 private:
  explicit LegacyCache(std::unique_ptr<Cache> cache)
      : cache_(std::move(cache)) {}

  std::unique_ptr<Cache> cache_;
};

}  // namespace kvtwin

#endif  // KVTWIN_LEGACY_H_
