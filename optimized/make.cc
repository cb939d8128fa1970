#include <memory>
#include <utility>
#include <vector>

#include "core/twin.h"
#include "optimized/causal.h"
#include "optimized/encoder.h"
#include "optimized/targets.h"
#include "optimized/wrapper.h"

namespace kvtwin::optimized {
namespace {

std::unique_ptr<GuardedCache> MakeOne(const CacheSpec& spec) {
  if (spec.kind == Kind::kEncoder) return std::make_unique<EncoderCache>();
  return std::make_unique<CausalCache>(spec);
}

}  // namespace

std::unique_ptr<Cache> MakeCache(const CacheSpec& spec) {
  // A target that does not exist is the command line's to report.
  (void)UseTargetFromEnvironment();
  if (spec.kind != Kind::kWrapper) return MakeOne(spec);
  std::vector<std::unique_ptr<GuardedCache>> caches;
  for (const CacheSpec& inner : spec.caches) caches.push_back(MakeOne(inner));
  return std::make_unique<WrapperCache>(std::move(caches));
}

}  // namespace kvtwin::optimized
