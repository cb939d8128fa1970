#include "optimized/row_shift.h"

#include <cstddef>

#include "core/assert.h"
#include "core/shift_row.h"
#include "optimized/row_kernels.h"

namespace kvtwin::optimized {

void RowShift::Prepare(const Shift& shift, std::int32_t offset,
                       int k_head_dim) {
  KVTWIN_ASSERT(shift.kind != ShiftKind::kCustom);
  const auto head_dim = static_cast<std::size_t>(k_head_dim);
  if (shift_ == &shift && offset_ == offset && head_dim_ == head_dim) return;
  shift_ = &shift;
  offset_ = offset;
  head_dim_ = head_dim;
  cosines_.clear();
  sines_.clear();
  if (shift.kind != ShiftKind::kRope) return;
  const int dims = RopeDims(shift.rope, k_head_dim);
  for (int p = 0; p < dims / 2; ++p) {
    const auto [cosine, sine] = RopeTurn(shift.rope, dims, p, offset);
    cosines_.push_back(cosine);
    sines_.push_back(sine);
  }
  // An angle without a cosine has no sine either.
  nan_turns_ = HasNonFinite(cosines_.data(), cosines_.size());
}

bool RowShift::idle() const {
  const ShiftKind kind = shift_->kind;
  if (kind == ShiftKind::kRope) return cosines_.empty();
  return kind != ShiftKind::kAdd && kind != ShiftKind::kTagAdd;
}

void RowShift::Turn(std::span<float> row) const {
  // What becomes a NaN, and which one: leave it to the definition.
  if (nan_turns_ || HasNonFinite(row.data(), row.size())) {
    const Status status =
        ShiftRow(*shift_, /*layer=*/0, offset_, static_cast<int>(head_dim_),
                 static_cast<int>(row.size() / head_dim_), row);
    KVTWIN_ASSERT(status.ok());
    return;
  }
  const bool halves = shift_->rope.pairing == Rope::Pairing::kHalves;
  for (std::size_t head = 0; head < row.size(); head += head_dim_) {
    if (halves) {
      TurnHalves(&row[head], cosines_.size(), cosines_.data(), sines_.data());
    } else {
      TurnAdjacent(&row[head], cosines_.size(), cosines_.data(), sines_.data());
    }
  }
}

void RowShift::Apply(std::span<float> row) const {
  const auto offset = static_cast<float>(offset_);
  if (shift_->kind == ShiftKind::kAdd) {
    AddToElements(row.data(), row.size(), offset);
  } else if (shift_->kind == ShiftKind::kTagAdd) {
    for (std::size_t head = 0; head < row.size(); head += head_dim_) {
      AddToElements(&row[head] + 1, head_dim_ - 1, offset);
    }
  } else {
    Turn(row);
  }
}

}  // namespace kvtwin::optimized
