// The inner loops that write masks, each compiled for every instruction set
// (see targets.h). What they write does not depend on the target.

#ifndef KVTWIN_OPTIMIZED_MASK_KERNELS_H_
#define KVTWIN_OPTIMIZED_MASK_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "core/index.h"
#include "kvtwin/tensor.h"
#include "optimized/kernels.h"

namespace kvtwin::optimized {

// Words of 64 cells that share a block range, see MaskRow.
constexpr std::size_t kBlockWords = 16;

// A stretch of one row of a mask, for the cells first .. end - 1. Visible are
// the cells of `members` (from cell 0 on) at positions in `range`.
struct MaskRow {
  const std::int32_t* positions;
  const std::uint64_t* members;  // Null: none.
  PosRange range;
  std::size_t first;
  std::size_t end;
  // For each word of 64 cells, from cell 0 on: all its members are at positions
  // in this range.
  const PosRange* ranges;
  // The same for each kBlockWords words; null: unknown. Affects only speed.
  const PosRange* blocks = nullptr;
  // Write past the cache. The caller must then call hwy::FlushStream() before
  // another thread reads. Affects only speed.
  bool stream = false;
};

// The bytes of a row of `cells` cells. If `cells` is a multiple of 64, also the
// bytes before column `cells`.
constexpr std::size_t MaskRowBytes(DType dtype, std::size_t cells) {
  return AsSize(RunBytes(dtype, static_cast<std::int64_t>(cells)));
}

// Writes end - first columns: 0 or -inf. Bits are written as whole words, the
// last one padded with zeros: so a stretch must end after a multiple of 64
// columns, or with its row.
void WriteMaskRow(const MaskRow& row, DType dtype, std::byte* out);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_MASK_KERNELS_H_
