// The mask of a pass: which cells of the view each batch token may attend to.

#ifndef KVTWIN_OPTIMIZED_MASK_H_
#define KVTWIN_OPTIMIZED_MASK_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvtwin/tensor.h"
#include "optimized/aligned_buffer.h"
#include "optimized/cell_table.h"
#include "optimized/kernels.h"

namespace kvtwin::optimized {

// What one batch token may attend to: the cells of `sequence` (null: none) at
// positions in `range`.
struct RowRule {
  Sequence* sequence;
  PosRange range;
};

// The cells of a view.
struct CellSpan {
  std::size_t first = 0;
  std::size_t end = 0;
  std::size_t size() const { return end - first; }
};

// Rows stay in memory from one pass to the next. A row that is for the same
// sequence as before is not written again but for the columns that changed:
// those of cells that came, went or moved, that the view now has, or whose
// positions the rule now includes or excludes.
class Mask {
 public:
  // One row for each rule, then rows of -inf, `row_count` in all. `dtype` is
  // the same in all calls.
  void Build(const CellTable& table, std::span<const RowRule> rules,
             std::size_t row_count, CellSpan view, DType dtype);

  // [cells of the view, row_count].
  const TensorView& view() const { return view_; }

 private:
  // What a row of the buffer shows.
  struct Row {
    CellSpan cells;  // None: nothing.
    RowRule rule;
    std::uint64_t changes;  // Of the sequence, so far,
    PosRange extremes;      // and its extremes.
  };

  // Columns of a row that are to be written.
  struct Piece {
    std::size_t row;
    CellSpan cells;
  };

  void FindRoom(std::size_t row_count, CellSpan view, DType dtype,
                std::size_t cells);
  void Update(const CellTable& table, const RowRule& rule, std::size_t row,
              CellSpan view);
  bool AddChanges(const CellTable& table, const RowRule& rule, std::size_t row,
                  CellSpan view);
  bool AddCellsAt(const CellTable& table, std::size_t row, CellSpan cells,
                  PosRange range);
  std::size_t Word(std::size_t cell) const;
  void AddWordOf(std::size_t row, CellSpan cells, std::size_t cell);
  void Add(std::size_t row, CellSpan cells);
  const PosRange* Blocks(const CellTable& table, CellSpan cells);
  void Write(const CellTable& table, CellSpan view, DType dtype);

  AlignedBuffer buffer_;
  // Column 0 of the buffer is cell `base_`; a row has `columns_` of them.
  std::size_t base_ = 0;
  std::size_t columns_ = 0;
  std::vector<Row> rows_;
  std::vector<Piece> pieces_;
  std::vector<PosRange> blocks_;  // See MaskRow.
  TensorView view_;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_MASK_H_
