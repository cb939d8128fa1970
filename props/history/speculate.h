// Drafts for random histories: speculative decoding, as docs/speculation.md
// describes it.

#ifndef KVTWIN_PROPS_HISTORY_SPECULATE_H_
#define KVTWIN_PROPS_HISTORY_SPECULATE_H_

#include <cstdint>
#include <optional>

#include "props/base/pick.h"
#include "props/history/history.h"

namespace kvtwin::props {

// Inserts drafts and commits, and calls between these: linear drafts, trees,
// several levels, commits of all, some or none of the drafts.
void Speculate(const Pick& pick, History& history);

// Makes room for drafts in recurrent caches, and inserts drafts.
void AddDrafts(const Pick& pick, int cells_max, History& history);

// As MakeHistory with rarities, with drafts in every history. Without a kind,
// it is never a lone encoder.
History MakeSpeculation(std::uint64_t seed, std::uint64_t number,
                        std::optional<Kind> kind, int ops, int cells_max);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_HISTORY_SPECULATE_H_
