// Prompts for random histories, for backends that find prefixes of them (F1 to
// F5 of docs/semantics.md).

#ifndef KVTWIN_PROPS_HISTORY_PREFIXES_H_
#define KVTWIN_PROPS_HISTORY_PREFIXES_H_

#include <cstdint>
#include <optional>

#include "props/history/history.h"

namespace kvtwin::props {

// As MakeHistory, of a legal client whose sequences often begin with a prompt:
// many prompts have a common prefix. Some passes are given up, with other
// prompts before they are taken back.
History MakePrefixes(std::uint64_t seed, std::uint64_t number,
                     std::optional<Kind> kind, int ops, int cells_max);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_HISTORY_PREFIXES_H_
