// Calls that must be refused, with the right code and a message, and change
// nothing.

#ifndef KVTWIN_PROPS_HISTORY_MISUSE_H_
#define KVTWIN_PROPS_HISTORY_MISUSE_H_

#include <optional>
#include <string>

#include "kvtwin/cache.h"
#include "props/history/history.h"

namespace kvtwin::props {

// What decides which code is due.
struct MisuseContext {
  const Setup& setup;
  int pass_tokens;  // Tokens of the current pass; 0 without one.
  bool encoder;     // The active cache is an encoder.
  bool layer_put;   // The current layer holds rows of setup.rows.
  int layer;        // Which it is.
};

// How many there are, and what each does.
int MisuseCount();
std::string_view MisuseName(int which);

// Misuses a cache after Init in the way of that number (modulo their count).
// Says what was wrong with the answer, or with the state after it.
std::optional<std::string> TryMisuse(Cache& cache, int which,
                                     const MisuseContext& context);

// Every call on a cache before Init or after Close.
std::optional<std::string> MisuseOutsideOfLife(Cache& cache);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_HISTORY_MISUSE_H_
