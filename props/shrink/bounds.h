// The limits of the histories in a catalog.

#ifndef KVTWIN_PROPS_SHRINK_BOUNDS_H_
#define KVTWIN_PROPS_SHRINK_BOUNDS_H_

#include <optional>

#include "props/history/abilities.h"
#include "props/history/history.h"

namespace kvtwin::props {

// Whether the operation is a single call, which may come at any time.
inline bool IsCall(const Op& op) {
  return op.single || (op.kind > OpKind::kShift && op.kind < OpKind::kCommit);
}

// Limits the histories to what a backend can be asked for, if there is a
// backend, and to one kind of cache, if a kind is chosen.
struct Bounds {
  std::optional<Abilities> abilities = {};
  std::optional<Kind> kind = {};

  bool Allow(const Setup& setup) const;
  // Whether a client, legal or not, would make this call as it stands: neither
  // leave it out nor replace it.
  bool Allow(const Op& op, bool legal) const;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SHRINK_BOUNDS_H_
