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

// The cells that one batch token may attend to: those of `sequence` (null:
// none) at positions in `range`, and `more`, which no sequence holds.
struct RowRule {
  Sequence* sequence;
  PosRange range;
  std::span<const std::int32_t> more = {};
};

// The cells of a view.
struct CellSpan {
  std::size_t first = 0;
  std::size_t end = 0;
  std::size_t size() const { return end - first; }
};

// Rows stay in memory from one pass to the next. If a row is for the same
// sequence as before, only the columns that changed are rewritten: the columns
// of cells that were added, removed or moved, that are new in the view, or
// whose positions the rule now includes or excludes.
//
// Mask decides which columns change; HostMask writes them, or a device does
// (optimized/cuda/).
class Mask {
 public:
  virtual ~Mask() = default;

  // Builds a row for each rule, then rows of -inf, `row_count` rows in all.
  // `dtype` is the same in all calls.
  void Build(const CellTable& table, std::span<const RowRule> rules,
             std::size_t row_count, CellSpan view, DType dtype);

  // [cells of the view, row_count].
  const TensorView& view() const { return view_; }

  // Forgets the rows, and frees their memory.
  void Release();

 protected:
  // Columns of a row to write. No column is in two pieces.
  struct Piece {
    std::size_t row;
    CellSpan cells;
  };

  // Replaces the memory of the rows, on a boundary of 64 bytes, with
  // unspecified contents; 0 bytes free it. Throws if there is not enough
  // memory.
  virtual std::byte* Allocate(std::size_t bytes) = 0;

  // Writes the pieces.
  virtual void Write(const CellTable& table, CellSpan view, DType dtype) = 0;
  // Allows cells of a row that was written. Rows on a device have none.
  virtual void Allow(std::size_t, CellSpan, std::span<const std::int32_t>,
                     DType) {}

  const std::vector<Piece>& pieces() const { return pieces_; }
  const RowRule& RuleOf(std::size_t row) const { return rows_[row].rule; }
  // The cell of column 0.
  std::size_t first_cell() const { return base_; }
  // The address of a row's column for that cell.
  std::byte* At(std::size_t row, std::size_t cell, DType dtype) const;
  std::size_t RowBytes(DType dtype) const;

 private:
  // The contents of a row of the buffer.
  struct Row {
    CellSpan cells;  // Empty if unknown.
    RowRule rule;
    std::uint64_t changes;  // Sequence::changes when the row was written.
    PosRange extremes;      // Sequence::extremes, likewise.
    std::vector<std::int32_t> more;  // RowRule::more, likewise.
  };

  void FreeUnused(std::size_t row_count, CellSpan view, DType dtype);
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

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  int small_passes_ = 0;  // Passes in a row that hardly used the buffer.
  // Column 0 of the buffer is cell `base_`; a row has `columns_` columns.
  std::size_t base_ = 0;
  std::size_t columns_ = 0;
  std::vector<Row> rows_;
  std::vector<Piece> pieces_;
  TensorView view_;
};

class HostMask final : public Mask {
  std::byte* Allocate(std::size_t bytes) override;
  void Write(const CellTable& table, CellSpan view, DType dtype) override;
  void Allow(std::size_t row, CellSpan view,
             std::span<const std::int32_t> cells, DType dtype) override;
  const PosRange* Blocks(const CellTable& table, CellSpan cells);

  AlignedBuffer buffer_;
  std::vector<PosRange> blocks_;  // See MaskRow.
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_MASK_H_
