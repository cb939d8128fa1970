// Writes histories for programs in any language: calls with absolute arguments
// and rows, as in a recording (docs/trace_format.md) but without answers.
// Histories of pools have the answers of the reference, since the calls depend
// on them: tokens that a prompt finds need not be appended.

#ifndef KVTWIN_PROPS_SEARCH_GEN_H_
#define KVTWIN_PROPS_SEARCH_GEN_H_

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>

#include "kvtwin/cache.h"
#include "props/history/history.h"

namespace kvtwin::props {

// Operations that histories leave out for a pool that lacks them.
struct PoolLimits {
  bool fork = false;
  bool truncate = false;
  bool commit_unknown = false;
  bool keys = false;           // Salts and extra keys.
  bool media = false;          // Images, in pools with groups.
  std::optional<DType> dtype;  // The dtype of K and V; any if unset.

  bool any() const {
    return fork || truncate || commit_unknown || keys || media || dtype;
  }
};

struct GenOptions {
  std::uint64_t seed = 1;
  std::optional<Kind> kind;
  bool paged = false;      // Draws histories of pools.
  bool groups = false;     // Draws pools with groups.
  bool speculate = false;  // Draws drafts in each history, and pins.
  PoolLimits limits = {};
  // Stops after the history that completes this many calls, or, if 0, this many
  // histories.
  std::int64_t operations = 0;
  std::int64_t histories = 10;
};

// Writes the calls of one history and returns their number. Leaves out misuse,
// which recordings do not have, and operations that are not calls (poison,
// reload). Errors: no cache can be made from the setup; nothing is written.
Result<std::int64_t> WriteCalls(History history, std::ostream& out);

// Returns a line of a cache's recording without the answers.
std::string CallLine(const std::string& line);

// Writes random histories one after another. Errors: see WritePagedRecording.
Status Generate(const GenOptions& options, std::ostream& out);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_GEN_H_
