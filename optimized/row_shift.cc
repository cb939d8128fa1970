#include "optimized/row_shift.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "core/assert.h"
#include "core/index.h"
#include "core/shift_row.h"
#include "optimized/row_kernels.h"
#include "optimized/shift_kernels.h"

namespace kvtwin::optimized {
namespace {

// Elements of blocks that are converted at a time.
constexpr std::size_t kElementsAtATime = 2048;

}  // namespace

void RowShift::Prepare(const Shift& shift, std::int32_t offset,
                       int k_head_dim) {
  KVTWIN_ASSERT(shift.kind != ShiftKind::kCustom);
  KVTWIN_ASSERT(offset != 0);
  const auto head_dim = AsSize(k_head_dim);
  if (shift_ == &shift && offset_ == offset && head_dim_ == head_dim) return;
  shift_ = &shift;
  offset_ = offset;
  head_dim_ = head_dim;
  cosines_.clear();
  sines_.clear();
  if (shift.kind != ShiftKind::kRope) return;
  const int dims = RopeDims(shift.rope, k_head_dim);
  cosines_.resize(AsSize(dims));
  sines_.resize(cosines_.size());
  const bool halves = shift.rope.pairing == Rope::Pairing::kHalves;
  const std::size_t pairs = cosines_.size() / 2;
  for (std::size_t p = 0; p < pairs; ++p) {
    const auto [cosine, sine] = RopeTurn(shift.rope, dims, AsInt(p), offset);
    const std::size_t x = halves ? p : 2 * p;
    const std::size_t y = halves ? p + pairs : 2 * p + 1;
    cosines_[x] = cosines_[y] = cosine;
    sines_[x] = -sine;
    sines_[y] = sine;
  }
}

bool RowShift::idle() const {
  const ShiftKind kind = shift_->kind;
  if (kind == ShiftKind::kRope) return cosines_.empty();
  return kind != ShiftKind::kAdd && kind != ShiftKind::kTagAdd;
}

void StoreChanged(DType dtype, std::span<const float> row, std::byte* to) {
  constexpr std::size_t kPiece = 64;
  const std::size_t step = IsBlockDType(dtype) ? kBlockElements : 1;
  const auto bytes = AsSize(RunBytes(dtype, AsInt(step)));
  for (std::size_t i = 0; i < row.size(); i += kPiece) {
    const std::size_t count = std::min(kPiece, row.size() - i);
    std::array<float, kPiece> before;
    alignas(8) std::array<std::byte, kPiece * 2> rounded;
    WidenToF32(dtype, to, before.data(), count);
    RoundF32(dtype, &row[i], rounded.data(), count);
    const std::byte* from = rounded.data();
    for (std::size_t k = 0; k < count; k += step) {
      // Compares bits: equal NaNs are unchanged, and a zero may change its
      // sign.
      if (std::memcmp(&before[k], &row[i + k], step * sizeof(float)) != 0) {
        std::memcpy(to, from, bytes);
      }
      from += bytes;
      to += bytes;
    }
  }
}

std::size_t RowShift::ScratchSize(DType dtype) const {
  return IsBlockDType(dtype) && head_dim_ > kElementsAtATime ? head_dim_ : 0;
}

void RowShift::ApplyToBlocks(DType dtype, std::span<std::byte> rows,
                             std::span<float> scratch) const {
  // A wider head is converted as a whole.
  alignas(64) std::array<float, kElementsAtATime> few;
  const std::size_t wide = ScratchSize(dtype);
  KVTWIN_DCHECK(scratch.size() >= wide);
  const auto numbers = wide == 0 ? std::span<float>(few) : scratch.first(wide);
  const std::size_t max = numbers.size() / head_dim_ * head_dim_;
  const auto head_bytes =
      AsSize(RunBytes(dtype, static_cast<std::int64_t>(head_dim_)));
  while (!rows.empty()) {
    const std::size_t count =
        std::min(max, rows.size() / head_bytes * head_dim_);
    const auto some = numbers.first(count);
    WidenToF32(dtype, rows.data(), some.data(), count);
    Apply(DType::kF32, std::as_writable_bytes(some));
    StoreChanged(dtype, some, rows.data());
    rows = rows.subspan(count / head_dim_ * head_bytes);
  }
}

void RowShift::Apply(DType dtype, std::span<std::byte> rows,
                     std::span<float> scratch) const {
  KVTWIN_ASSERT(!idle());
  if (IsBlockDType(dtype)) return ApplyToBlocks(dtype, rows, scratch);
  const auto offset = static_cast<float>(offset_);
  const std::size_t size = SizeOf(dtype);
  const std::size_t heads = rows.size() / (head_dim_ * size);
  const Turns turns{.pairs = cosines_.size() / 2,
                    .cosines = cosines_.data(),
                    .sines = sines_.data()};
  if (shift_->kind == ShiftKind::kAdd) {
    AddToElements(dtype, rows.data(), heads * head_dim_, offset);
  } else if (shift_->kind == ShiftKind::kTagAdd) {
    for (std::size_t h = 0; h < heads; ++h) {
      AddToElements(dtype, rows.data() + (h * head_dim_ + 1) * size,
                    head_dim_ - 1, offset);
    }
  } else if (shift_->rope.pairing == Rope::Pairing::kHalves) {
    TurnHalves(dtype, rows.data(), heads, head_dim_, turns);
  } else {
    TurnAdjacent(dtype, rows.data(), heads, head_dim_, turns);
  }
}

}  // namespace kvtwin::optimized
