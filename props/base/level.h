// How closely two caches must agree (docs/semantics.md, S51 to S54, S58).

#ifndef KVTWIN_PROPS_BASE_LEVEL_H_
#define KVTWIN_PROPS_BASE_LEVEL_H_

#include <array>
#include <string_view>

#include "core/index.h"

namespace kvtwin::props {

// The levels, from the strongest to the weakest. kNumeric: attention over the
// views gives the same result within a tolerance (S54); kAttention: the cache's
// own attention does (S58), its views are not asked for; kNone: nothing is
// compared.
enum class Level { kIdentity, kVisibility, kNumeric, kAttention, kNone };

// The names, in the order of the enum.
inline constexpr std::array<std::string_view, 5> kLevelNames = {
    "identity", "visibility", "numeric", "attention", "none"};

inline std::string_view LevelName(Level level) {
  return At(kLevelNames, level);
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_LEVEL_H_
