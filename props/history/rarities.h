// Cases that small histories of whole passes never reach: caches and batches
// that are large in one dimension, and the calls of a pass in any order.

#ifndef KVTWIN_PROPS_HISTORY_RARITIES_H_
#define KVTWIN_PROPS_HISTORY_RARITIES_H_

#include <optional>

#include "props/base/pick.h"
#include "props/history/history.h"

namespace kvtwin::props {

// Draws a short history that is large in one dimension: sequences, owners of a
// token, tokens of a batch, columns, layers, elements of a row, or paddings.
// With a `cells_max`, the history needs at most that many cells.
History DrawLarge(const Pick& pick, std::optional<Kind> kind, int cells_max);

// Puts a defrag of more than 64 cells before the operations of a swa_mem: three
// sequences of 40 tokens each are stored, and the removal of one of them leaves
// holes that are too short for the next batch. At most 12 of the operations
// follow. Other kinds, and hybrids, stay as they are.
void AddDefrag(History& history);

// Replaces some passes by their single calls: layers come in any order, twice
// or not at all, before or after their layer type; a layer may be read before
// the last one is put; other calls come in between.
void TakeApart(const Pick& pick, History& history);

// Adds a batch of about 64 or 128 tokens, as a tile of an attention kernel has,
// and a few tokens after it, and makes the cache large enough.
void AddLongBatch(const Pick& pick, History& history);

// Makes the cache large, for three sequences at most, and begins the history
// with a sequence of more than 128, 256, 512 or 1,024 tokens. A window or a
// chunk may end just before the last token; nearly all tokens may move, in many
// layers or by a long way.
void AddLongSequence(const Pick& pick, History& history);

// Makes ids of sequences equal in their last 6 to 24 bits.
void SpreadIds(const Pick& pick, Setup& setup);

// Goes back over about a batch, as far as a ring of window + max_batch slots
// still has the window.
void AddReturns(const Pick& pick, History& history);

// Gives up some passes: their tokens are removed before some layers have rows
// (S13).
void AddStops(const Pick& pick, History& history);

// Inserts passes that only reserve, at positions that sequences have already
// (S18), as an engine warms up while it holds requests.
void AddWarmUps(const Pick& pick, History& history);

// Makes some batches overfull: longer than the rest of the capacity (S12).
void AddOverfull(const Pick& pick, History& history);

// Gives some recurrent caches pins, and inserts Checkpoints. Draws nothing
// for histories without a recurrent cache.
void AddPins(const Pick& pick, int cells_max, History& history);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_HISTORY_RARITIES_H_
