// Stored rows that change places.

#ifndef KVTWIN_OPTIMIZED_MOVE_ROWS_H_
#define KVTWIN_OPTIMIZED_MOVE_ROWS_H_

#include <cstddef>
#include <span>

#include "kvtwin/tensor.h"
#include "optimized/cell_table.h"

namespace kvtwin::optimized {

// Copies rows of `row_bytes` each. Requires: no cell is in two moves.
void MoveRows(std::span<const CellMove> moves, std::byte* rows,
              std::size_t row_bytes);

// The same within each of `count` columns, which are `stride` bytes apart.
void MoveInColumns(std::span<const CellMove> moves, DType dtype,
                   std::byte* columns, std::size_t count, std::size_t stride);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_MOVE_ROWS_H_
