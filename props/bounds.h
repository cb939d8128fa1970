// What the histories of a catalog may have.

#ifndef KVTWIN_PROPS_BOUNDS_H_
#define KVTWIN_PROPS_BOUNDS_H_

#include <optional>

#include "props/abilities.h"
#include "props/history.h"

namespace kvtwin::props {

// Whether it is one call, which may come at any time.
inline bool IsCall(const Op& op) {
  return op.single || op.kind > OpKind::kShift;
}

// What histories may have: what a backend can be asked for, if it is given, and
// of one kind of cache only, if that is.
struct Bounds {
  std::optional<Abilities> abilities = {};
  std::optional<Kind> kind = {};

  bool Allow(const Setup& setup) const;
  // Of a client that is legal or not: what it would leave out, or do as if
  // something else had been said, is not allowed.
  bool Allow(const Op& op, bool legal) const;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BOUNDS_H_
