// The state of a pool of the reference twin, for the explorer.

#ifndef KVTWIN_REFERENCE_POOL_STATE_H_
#define KVTWIN_REFERENCE_POOL_STATE_H_

#include <string>

#include "kvtwin/paged.h"

namespace kvtwin::reference {

// Returns the state on which later calls depend, except rows and the lengths of
// sequences: owners, tokens and order of release of the blocks, and the blocks
// and keys of the sequences. Requires: a pool of the reference twin.
std::string StateText(const PagedPool& pool);

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_POOL_STATE_H_
