// Calls that a cache must refuse, with the right code and a message, and
// without a change.

#ifndef KVTWIN_PROPS_HISTORY_MISUSE_H_
#define KVTWIN_PROPS_HISTORY_MISUSE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "kvtwin/cache.h"
#include "props/history/abilities.h"
#include "props/history/history.h"

namespace kvtwin::props {

// The state that decides which code is expected.
struct MisuseContext {
  const Setup& setup;
  int pass_tokens;  // Tokens of the current pass; 0 without a pass.
  bool encoder;     // The active cache is an encoder.
  bool no_causal;   // The active cache has no SetCausal.
  bool layer_put;   // The current layer holds rows of setup.rows.
  int layer;        // The current layer.
  // Returns a hash of what the rows of a view see, where its columns may come
  // in another order at each Get. Null: its bytes stay the same.
  std::uint64_t (*hash_sights)(const KvView& view, VLayout v_layout) = nullptr;
};

// Returns the number of misuses, and the name of each.
int MisuseCount();
// Misuses of drafts have the numbers from kDraftMisuse on, so that histories
// without drafts stay as they are.
inline constexpr int kDraftMisuse = 1000;
int DraftMisuseCount();
std::string_view MisuseName(int which);
// Whether a cache of `spec` with these abilities has the call that the misuse
// makes; for a misuse of drafts, whether the cache can have drafts.
bool HasMisuse(const Abilities& can, const CacheSpec& spec, int which);

// Misuses a cache after Init in way `which` (modulo the count). Returns an
// error if the answer, or the state after it, is wrong.
std::optional<std::string> TryMisuse(Cache& cache, int which,
                                     const MisuseContext& context);

// Makes every call on a cache before Init or after Close.
std::optional<std::string> MisuseOutsideOfLife(Cache& cache);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_HISTORY_MISUSE_H_
