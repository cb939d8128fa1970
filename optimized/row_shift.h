// A shift of K rows by one offset, prepared once for all rows. Same results as
// ShiftRow (core/shift_row.h), to the bit.

#ifndef KVTWIN_OPTIMIZED_ROW_SHIFT_H_
#define KVTWIN_OPTIMIZED_ROW_SHIFT_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvtwin/shift.h"
#include "kvtwin/tensor.h"

namespace kvtwin::optimized {

// Stores `row` over the elements at `to`, whose dtype is not f32. Elements, or
// blocks of them, that did not change keep their bits.
void StoreChanged(DType dtype, std::span<const float> row, std::byte* to);

// Supports every kind but a custom function, which may fail.
class RowShift {
 public:
  // Computes the turns of a Rope, unless they are prepared already. Keeps a
  // reference to `shift`. Requires: offset is not 0; not custom.
  void Prepare(const Shift& shift, std::int32_t offset, int k_head_dim);

  // Returns how many elements of scratch Apply needs for rows of this dtype.
  std::size_t ScratchSize(DType dtype) const;

  // Rewrites contiguous rows, [k_head_dim, kv_heads, any number], with
  // k_head_dim as prepared. They are shifted as f32 and rounded; elements that
  // do not change keep their bits. Allocates nothing, so that several threads
  // can call it, each with its own scratch. Requires: not idle(); `scratch` has
  // ScratchSize(dtype) elements or more.
  void Apply(DType dtype, std::span<std::byte> rows,
             std::span<float> scratch = {}) const;

  // Whether Apply leaves every row as it is.
  bool idle() const;

  // The prepared turns of a Rope; see Turns.
  std::span<const float> cosines() const { return cosines_; }
  std::span<const float> sines() const { return sines_; }

 private:
  void ApplyToBlocks(DType dtype, std::span<std::byte> rows,
                     std::span<float> scratch) const;

  const Shift* shift_ = nullptr;
  std::int32_t offset_ = 0;
  std::size_t head_dim_ = 0;
  // For each element of a head that turns. Each sine has the sign for its
  // element of the pair.
  std::vector<float> cosines_;
  std::vector<float> sines_;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ROW_SHIFT_H_
