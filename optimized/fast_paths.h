// Ways to do the same thing faster, each of which pays for some sizes and some
// histories only. Tests force all of them on, and off: the bytes are the same.

#ifndef KVTWIN_OPTIMIZED_FAST_PATHS_H_
#define KVTWIN_OPTIMIZED_FAST_PATHS_H_

#include <optional>
#include <string_view>

namespace kvtwin::optimized {

enum class FastPaths { kAuto, kOn, kOff };

// "on", "off", and "" for kAuto; nothing for any other name.
std::optional<FastPaths> FastPathsFromName(std::string_view name);

// From now on, in all threads. Not while another thread is in a cache.
void ForceFastPaths(FastPaths use);

// Does what KVTWIN_FAST_PATHS asks for ("on", "off"), if it is set and not
// empty; false if it is something else, which is then ignored. Only the first
// call, or none after a ForceFastPaths, has an effect; later ones repeat its
// answer. MakeCache calls it.
bool UseFastPathsFromEnvironment();

// Whether to take a path that is open; `pays`: whether it is thought to pay.
bool TakeFastPath(bool pays);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_FAST_PATHS_H_
