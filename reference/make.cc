#include "reference/make.h"

#include "core/twin.h"
#include "core/wrapper.h"

namespace kvtwin::reference {
namespace {

std::unique_ptr<GuardedCache> MakeOne(const CacheSpec& spec) {
  if (spec.kind == Kind::kEncoder) return MakeEncoder();
  return MakeCausal(spec);
}

}  // namespace

std::unique_ptr<Cache> MakeCache(const CacheSpec& spec) {
  return MakeWrapped(spec, MakeOne);
}

}  // namespace kvtwin::reference
