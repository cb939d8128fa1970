// Moves stored rows to other cells.

#ifndef KVTWIN_OPTIMIZED_MOVE_ROWS_H_
#define KVTWIN_OPTIMIZED_MOVE_ROWS_H_

#include <cstddef>
#include <span>

#include "optimized/cell_table.h"
#include "optimized/put_rows.h"

namespace kvtwin::optimized {

// Copies rows of `row_bytes` each. Requires: no cell is in two moves.
void MoveRows(std::span<const CellMove> moves, std::byte* rows,
              std::size_t row_bytes);

// Moves the elements within each of `count` columns. Requires: no cell is in
// two moves.
void MoveInColumns(std::span<const CellMove> moves,
                   const StoredColumns& columns, std::size_t count);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_MOVE_ROWS_H_
