// Checks states, for example those from a file, which may be anything: finds
// what is wrong with a state that no cache could have.

#ifndef KVTWIN_CORE_STATE_CHECKS_H_
#define KVTWIN_CORE_STATE_CHECKS_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "kvtwin/state.h"
#include "kvtwin/status.h"

namespace kvtwin {

// Errors: invalid_argument if no cache could hold this state. Restore checks
// that the state fits a given cache.
Status CheckState(const CacheState& state);

// The parts of CheckState, for callers that know the cache.
//
// Checks that cells are in order and below `cells`, each with one position.
Status CheckCells(const CacheState& state, int cells);
// Refuses two states of one sequence at one position (R1).
Status CheckStates(const std::vector<CellEntry>& entries);
// Checks the fields of an encoder.
Status CheckSlots(const CacheState& state);
// Checks a layer: its tensors have all their bytes, and are not too large.
Status CheckTensors(int layer, const KvRows& rows);
// Whether CheckTensors accepts all layers of all caches.
bool HasWholeTensors(const CacheState& state);
// Checks the shape of a tensor: at least one element, of a row dtype, in whole
// blocks, and not too large to count its bytes.
Status CheckShape(std::string_view name, const Shape& shape, DType dtype);

// Checks the name of a model: files have it as a JSON string, in which bytes
// that are not UTF-8 would be replaced.
Status CheckModel(std::string_view model);

// Checks a state that is added as `sequence`: it may have one sequence only.
Status CheckAdded(int sequence, const CacheState& added);
Status CheckRoom(std::int64_t held, std::int64_t cells, std::int64_t tokens);

// Whether these are the rows of `held` cells.
bool AreRowsOf(const KvRows& rows, std::int64_t held);
// Whether a field that only encoders use is set; and whether the state must be
// that of an encoder, because of such a field or of rows without cells.
bool HasSlots(const CacheState& state);
bool IsOfEncoder(const CacheState& state);
// Whether the state is empty, except for `caches`.
bool IsBare(const CacheState& state);

// Calls visit(cell) once for each cell of `entries`.
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
