#include "optimized/fast_paths.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <string_view>

namespace kvtwin::optimized {
namespace {

std::atomic<FastPaths> forced = FastPaths::kAuto;

thread_local int objects_of_this_thread = 0;

}  // namespace

std::optional<FastPaths> FastPathsFromName(std::string_view name) {
  if (name.empty()) return FastPaths::kAuto;
  if (name == "on") return FastPaths::kOn;
  if (name == "off") return FastPaths::kOff;
  return std::nullopt;
}

void ForceFastPaths(FastPaths use) {
  // Reads the environment first, so that it does not override this later.
  (void)UseFastPathsFromEnvironment();
  forced.store(use, std::memory_order_relaxed);
}

bool UseFastPathsFromEnvironment() {
  static const bool known = [] {
    const char* name = std::getenv("KVTWIN_FAST_PATHS");
    const auto use = FastPathsFromName(name == nullptr ? "" : name);
    if (use) forced = *use;
    return use.has_value();
  }();
  return known;
}

SharesInTurn::SharesInTurn() { ++objects_of_this_thread; }
SharesInTurn::~SharesInTurn() { --objects_of_this_thread; }

bool SharesInTurn::On() {
  return objects_of_this_thread > 0 &&
         forced.load(std::memory_order_relaxed) == FastPaths::kAuto;
}

std::size_t SharesInTurn::Count(std::size_t bytes) {
  if (!On()) return 1;
  return 1 + (std::uint64_t{bytes} * 0x9E3779B97F4A7C15U >> 62);
}

bool TakeFastPath(bool pays) {
  const FastPaths use = forced.load(std::memory_order_relaxed);
  return use == FastPaths::kAuto ? pays : use == FastPaths::kOn;
}

}  // namespace kvtwin::optimized
