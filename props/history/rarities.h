// Cases that small histories of whole passes never reach: caches and batches
// large in one dimension, and the calls of a pass in any order.

#ifndef KVTWIN_PROPS_HISTORY_RARITIES_H_
#define KVTWIN_PROPS_HISTORY_RARITIES_H_

#include <optional>

#include "props/base/pick.h"
#include "props/history/history.h"

namespace kvtwin::props {

// A short history, large in one dimension: sequences, owners of a token, tokens
// of a batch, columns, layers, elements of a row, or paddings. With a
// `cells_max`, it is one that needs no more cells than that.
History DrawLarge(const Pick& pick, std::optional<Kind> kind, int cells_max);

// Makes single calls of some passes: layers come in any order, twice or not at
// all, before their type or after it, are read before the last one is put, and
// other calls come in between.
void TakeApart(const Pick& pick, History& history);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_HISTORY_RARITIES_H_
