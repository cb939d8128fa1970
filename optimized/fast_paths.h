// Faster ways to do the same, each of which pays off only for some sizes, some
// histories or some processors. Tests force all of them on, then off: the bytes
// are the same.

#ifndef KVTWIN_OPTIMIZED_FAST_PATHS_H_
#define KVTWIN_OPTIMIZED_FAST_PATHS_H_

#include <cstddef>
#include <optional>
#include <string_view>

namespace kvtwin::optimized {

enum class FastPaths { kAuto, kOn, kOff };

// "on", "off", and "" for kAuto; nothing for any other name.
std::optional<FastPaths> FastPathsFromName(std::string_view name);

// Takes effect in all threads. Not while another thread is in a cache.
void ForceFastPaths(FastPaths use);

// Applies the environment variable KVTWIN_FAST_PATHS ("on" or "off") if it is
// set and not empty. Returns false if it has another value, which is then
// ignored. Only the first call has an effect, and none after a ForceFastPaths;
// later calls return the same answer. MakeCache calls it.
bool UseFastPathsFromEnvironment();

// For tests of how work is divided. While an object exists, its thread divides
// small work, too, into one to four shares; the number depends on the size
// alone. This thread computes the shares one after another, from the last to
// the first, so that results are the same on all machines. Forced fast paths
// switch this off.
class SharesInTurn {
 public:
  SharesInTurn();
  ~SharesInTurn();
  SharesInTurn(const SharesInTurn&) = delete;
  SharesInTurn& operator=(const SharesInTurn&) = delete;

  // Whether this thread divides small work now.
  static bool On();
  // The number of shares for work of this size: 1 unless On().
  static std::size_t Count(std::size_t bytes);
};

// Whether to take an available fast path; `pays`: whether it is expected to pay
// off.
bool TakeFastPath(bool pays);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_FAST_PATHS_H_
