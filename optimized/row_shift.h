// One shift of K rows by one offset, prepared once for all rows that have it.
// Same results as ShiftRow (core/shift_row.h), to the bit.

#ifndef KVTWIN_OPTIMIZED_ROW_SHIFT_H_
#define KVTWIN_OPTIMIZED_ROW_SHIFT_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvtwin/shift.h"
#include "kvtwin/tensor.h"

namespace kvtwin::optimized {

// Stores numbers in place of those that are there, of another dtype than f32.
// What did not change keeps its bits: an element, or a block of them.
void StoreChanged(DType dtype, std::span<const float> row, std::byte* to);

// For every kind but a custom function, which may fail.
class RowShift {
 public:
  // Computes the turns of a Rope, if this is not what is prepared already.
  // Refers to `shift` from then on. Requires: offset is not 0.
  void Prepare(const Shift& shift, std::int32_t offset, int k_head_dim);

  // Rewrites rows that lie one after another, [k_head_dim, kv_heads, any
  // number]; k_head_dim as prepared. They are shifted as f32 and rounded; what
  // does not change keeps its bits. Requires: not idle.
  void Apply(DType dtype, std::span<std::byte> rows) const;

  // Whether Apply leaves every row as it is.
  bool idle() const;

  // Of a Rope, as prepared; see Turns.
  std::span<const float> cosines() const { return cosines_; }
  std::span<const float> sines() const { return sines_; }

 private:
  void ApplyToBlocks(DType dtype, std::span<std::byte> rows) const;

  const Shift* shift_ = nullptr;
  std::int32_t offset_ = 0;
  std::size_t head_dim_ = 0;
  // By element of a head, of those that turn; a sine with the sign that it has
  // for this element of its pair.
  std::vector<float> cosines_;
  std::vector<float> sines_;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ROW_SHIFT_H_
