// The inner loops that write masks, each compiled for every instruction set
// (see targets.h). What they write does not depend on the target.

#ifndef KVTWIN_OPTIMIZED_MASK_KERNELS_H_
#define KVTWIN_OPTIMIZED_MASK_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "kvtwin/tensor.h"
#include "optimized/kernels.h"

namespace kvtwin::optimized {

// Words of 64 cells whose ranges are known together, see MaskRow.
constexpr std::size_t kBlockWords = 16;

// A stretch of one row of a mask, for the cells first .. end - 1: those of
// `members` (from cell 0 on) at positions in `range` may be attended to.
struct MaskRow {
  const std::int32_t* positions;
  const std::uint64_t* members;  // Null: none.
  PosRange range;
  std::size_t first;
  std::size_t end;
  // For each word of 64 cells, from cell 0 on: none of its members is at a
  // position outside of it.
  const PosRange* ranges;
  // The same for each kBlockWords words; null: nobody knows. Only speed.
  const PosRange* blocks = nullptr;
  // Write past the cache. The caller must then call hwy::FlushStream() before
  // another thread reads. Only speed.
  bool stream = false;
};

// Bytes of a row of `cells` cells; of the columns before column `cells`, if
// that is a multiple of 64.
constexpr std::size_t MaskRowBytes(DType dtype, std::size_t cells) {
  return static_cast<std::size_t>(
      RunBytes(dtype, static_cast<std::int64_t>(cells)));
}

// Writes end - first columns: 0 or -inf. As bits, whole words, the last filled
// up with zeros: so a stretch ends after a multiple of 64 columns, or a row
// does.
void WriteMaskRow(const MaskRow& row, DType dtype, std::byte* out);

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_MASK_KERNELS_H_
