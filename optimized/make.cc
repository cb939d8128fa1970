#include <memory>

#include "core/twin.h"
#include "core/wrapper.h"
#include "optimized/causal.h"
#include "optimized/encoder.h"
#include "optimized/fast_paths.h"
#include "optimized/recurrent.h"
#include "optimized/targets.h"

namespace kvtwin::optimized {
namespace {

std::unique_ptr<GuardedCache> MakeOne(const CacheSpec& spec) {
  if (spec.kind == Kind::kEncoder) {
    return std::make_unique<EncoderCache>(std::make_unique<SlotMemory>());
  }
  if (spec.kind == Kind::kRecurrent) {
    return std::make_unique<RecurrentCache>(spec,
                                            std::make_unique<HostMemory>());
  }
  return std::make_unique<CausalCache>(spec, std::make_unique<HostMemory>());
}

}  // namespace

std::unique_ptr<Cache> MakeCache(const CacheSpec& spec) {
  // An unknown name in the environment is reported by the command line.
  (void)UseTargetFromEnvironment();
  (void)UseFastPathsFromEnvironment();
  return MakeWrapped(spec, MakeOne);
}

}  // namespace kvtwin::optimized
