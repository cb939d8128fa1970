// One shift of K rows by one offset, prepared once for all rows that have it.
// Same results as ShiftRow (core/shift_row.h), to the bit.

#ifndef KVTWIN_OPTIMIZED_ROW_SHIFT_H_
#define KVTWIN_OPTIMIZED_ROW_SHIFT_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kvtwin/shift.h"

namespace kvtwin::optimized {

// For every kind but a custom function, which may fail.
class RowShift {
 public:
  // Computes the turns of a Rope, if this is not what is prepared already.
  // Refers to `shift` from then on. Requires: offset is not 0.
  void Prepare(const Shift& shift, std::int32_t offset, int k_head_dim);

  // Rewrites one row, [k_head_dim, kv_heads]; k_head_dim as prepared.
  // Requires: not idle.
  void Apply(std::span<float> row) const;

  // Whether Apply leaves every row as it is.
  bool idle() const;

 private:
  void Turn(std::span<float> row) const;

  const Shift* shift_ = nullptr;
  std::int32_t offset_ = 0;
  std::size_t head_dim_ = 0;
  std::vector<float> cosines_;  // By pair.
  std::vector<float> sines_;
  bool nan_turns_ = false;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ROW_SHIFT_H_
