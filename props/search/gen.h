// Histories for programs in any language: calls with absolute arguments and
// rows, as a recording has them (docs/trace_format.md) but without answers.
// Those of pools have the answers of the reference, since the calls depend on
// them: what a prompt finds need not be appended.

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
  bool keys = false;           // Salts, and extra keys.
  std::optional<DType> dtype;  // Of K and V, instead of any.

  bool any() const {
    return fork || truncate || commit_unknown || keys || dtype;
  }
};

struct GenOptions {
  std::uint64_t seed = 1;
  std::optional<Kind> kind;
  bool paged = false;  // Of pools.
  PoolLimits limits = {};
  // Stops behind the history with which there are as many calls, or, if 0, as
  // many histories.
  std::int64_t operations = 0;
  std::int64_t histories = 10;
};

// The calls of one history; returns their number. Nothing, and 0, if no cache
// can be made of its setup. Left out are misuse, which no recording has, and
// what is done behind a cache's back.
std::int64_t WriteCalls(History history, std::ostream& out);

// The call of a line of a recording of a cache, without its answers.
std::string CallLine(const std::string& line);

// Random histories, one after the other. Errors: see WritePagedRecording.
Status Generate(const GenOptions& options, std::ostream& out);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_GEN_H_
