// See targets.h. Highway compiles this file once for each target.

#include "optimized/targets.h"

#include <unistd.h>

#include <cstdint>
#include <cstdlib>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimized/targets.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvtwin::optimized::HWY_NAMESPACE {

const char* TargetOfThisCode() { return hwy::TargetName(HWY_TARGET); }

}  // namespace kvtwin::optimized::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvtwin::optimized {

HWY_EXPORT(TargetOfThisCode);

namespace {

// Queried once, before any target is forced: afterwards Highway returns the
// forced target only.
const std::vector<std::int64_t>& TargetBits() {
  static const std::vector<std::int64_t> bits = [] {
    const auto found = hwy::SupportedAndGeneratedTargets();
    return std::vector<std::int64_t>(found.begin(), found.end());
  }();
  return bits;
}

bool ForceTarget(std::string_view name) {
  for (const std::int64_t bit : TargetBits()) {
    if (name != hwy::TargetName(bit)) continue;
    hwy::SetSupportedTargetsForTest(bit);
    return true;
  }
  return false;
}

}  // namespace

std::vector<std::string> SupportedTargets() {
  std::vector<std::string> names;
  for (const std::int64_t bit : TargetBits()) {
    names.emplace_back(hwy::TargetName(bit));
  }
  return names;
}

bool UseTargetFromEnvironment() {
  static const bool known = [] {
    const char* name = std::getenv("KVTWIN_TARGET");
    return name == nullptr || *name == '\0' || ForceTarget(name);
  }();
  return known;
}

bool SelectTarget(std::string_view name) {
  // Reads the environment first, so that it does not override this later.
  (void)UseTargetFromEnvironment();
  return ForceTarget(name);
}

std::string ActiveTarget() {
  (void)UseTargetFromEnvironment();
  return HWY_DYNAMIC_DISPATCH(TargetOfThisCode)();
}

bool IsIntel() {
#if HWY_ARCH_X86
  static const bool intel = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") != 0;
  }();
  return intel;
#else
  return false;
#endif
}

bool HasLargeFirstLevel() {
#ifdef _SC_LEVEL1_DCACHE_SIZE
  static const bool large = sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 << 10;
  return large;
#else
  return false;
#endif
}

bool FetchesIntoFirstLevel() {
#if HWY_ARCH_X86
  static const bool fetches = [] {
    __builtin_cpu_init();
    return HasLargeFirstLevel() || __builtin_cpu_supports("avx512f") == 0;
  }();
  return fetches;
#else
  return HasLargeFirstLevel();
#endif
}

}  // namespace kvtwin::optimized
#endif  // HWY_ONCE
