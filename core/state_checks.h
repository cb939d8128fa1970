// What is wrong with a state that no cache could have: one that comes from a
// file may be anything.

#ifndef KVTWIN_CORE_STATE_CHECKS_H_
#define KVTWIN_CORE_STATE_CHECKS_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "kvtwin/state.h"
#include "kvtwin/status.h"

namespace kvtwin {

// Errors: invalid_argument unless some cache could hold it, of which nothing is
// known: Restore knows more.
Status CheckState(const CacheState& state);

// Its parts, for who knows the cache.
//
// Cells in order, below `cells`, each with one position.
Status CheckCells(const CacheState& state, int cells);
// Of an encoder.
Status CheckSlots(const CacheState& state);
// Of a layer: whole, and not too large.
Status CheckTensors(int layer, const KvRows& rows);
// The same of all layers, in all caches.
bool HasWholeTensors(const CacheState& state);
// Of a tensor, which has at least one element: of a dtype of rows, whole
// blocks, and not too large to count its bytes.
Status CheckShape(std::string_view name, const Shape& shape, DType dtype);

// What is added as a sequence: of one.
Status CheckAdded(int sequence, const CacheState& added);
Status CheckRoom(std::int64_t held, std::int64_t cells, std::int64_t tokens);

// Whether these are the rows of so many cells.
bool AreRowsOf(const KvRows& rows, std::int64_t held);
// Whether there is what only an encoder has, apart from its rows; and if it
// must be one.
bool HasSlots(const CacheState& state);
bool IsOfEncoder(const CacheState& state);
// Whether there is nothing, apart from caches.
bool IsBare(const CacheState& state);

// Calls visit(cell) for the cells of `entries`, each once.
template <class Visit>
void ForEachHeld(const std::vector<CellEntry>& entries, const Visit& visit) {
  int last = -1;
  for (const CellEntry& entry : entries) {
    if (entry.cell != last) visit(entry.cell);
    last = entry.cell;
  }
}
std::int64_t CountHeld(const std::vector<CellEntry>& entries);

}  // namespace kvtwin

#endif  // KVTWIN_CORE_STATE_CHECKS_H_
