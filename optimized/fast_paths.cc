#include "optimized/fast_paths.h"

#include <atomic>
#include <cstdlib>
#include <string_view>

namespace kvtwin::optimized {
namespace {

std::atomic<FastPaths> forced = FastPaths::kAuto;

}  // namespace

void ForceFastPaths(FastPaths use) {
  // First, so that the environment does not override this later.
  (void)UseFastPathsFromEnvironment();
  forced.store(use, std::memory_order_relaxed);
}

bool UseFastPathsFromEnvironment() {
  static const bool known = [] {
    const char* text = std::getenv("KVTWIN_FAST_PATHS");
    const std::string_view name = text == nullptr ? "" : text;
    if (name == "on") forced = FastPaths::kOn;
    if (name == "off") forced = FastPaths::kOff;
    return name.empty() || name == "on" || name == "off";
  }();
  return known;
}

bool TakeFastPath(bool pays) {
  const FastPaths use = forced.load(std::memory_order_relaxed);
  return use == FastPaths::kAuto ? pays : use == FastPaths::kOn;
}

}  // namespace kvtwin::optimized
