#include "kvtwin/rows.h"

#include <cstdint>

#include "core/assert.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "core/refusals.h"

namespace kvtwin {
namespace {

Status CheckRow(DType dtype, std::size_t count, std::size_t bytes) {
  if (!IsRowDType(dtype)) {
    return Invalid("dtype is {}, which rows cannot have", DTypeName(dtype));
  }
  constexpr std::size_t kCountMax = PTRDIFF_MAX / sizeof(float);
  if (count > kCountMax) {
    return Invalid("numbers has {} elements, a row has at most {}", count,
                   kCountMax);
  }
  if (IsBlockDType(dtype) && count % kBlockElements != 0) {
    return Invalid("{} has blocks of {} elements, the row has {}",
                   DTypeName(dtype), kBlockElements, count);
  }
  const auto expected =
      AsSize(RunBytes(dtype, static_cast<std::int64_t>(count)));
  if (bytes == expected) return {};
  return Invalid("{} elements of {} have {} bytes, the row has {}", count,
                 DTypeName(dtype), expected, bytes);
}

[[maybe_unused]] bool IsInside(const TensorView& view, const Shape& index) {
  for (std::size_t dim = 0; dim < index.size(); ++dim) {
    if (index[dim] < 0 || index[dim] >= view.shape[dim]) return false;
  }
  return view.data != nullptr;
}

}  // namespace

Status RowToF32(std::span<const std::byte> row, DType dtype,
                std::span<float> numbers) {
  Status status = CheckRow(dtype, numbers.size(), row.size());
  if (!status.ok()) return status;
  const TensorView view =
      DenseView(row.data(), dtype, {std::ssize(numbers), 1, 1, 1});
  std::int64_t i = 0;
  for (float& number : numbers) number = LoadFrom(view, i++);
  return {};
}

Status RowFromF32(std::span<const float> numbers, DType dtype,
                  std::span<std::byte> row) {
  Status status = CheckRow(dtype, numbers.size(), row.size());
  if (!status.ok()) return status;
  if (IsBlockDType(dtype)) {
    StoreBlocks(numbers, dtype, row.data());
    return {};
  }
  std::byte* to = row.data();
  for (const float number : numbers) {
    StoreElement(number, to, dtype);
    to += SizeOf(dtype);
  }
  return {};
}

float ElementAsF32(const TensorView& view, std::int64_t i, std::int64_t j,
                   std::int64_t k, std::int64_t l) {
  KVTWIN_DCHECK(IsRowDType(view.dtype) && IsInside(view, {i, j, k, l}));
  return LoadFrom(view, i, j, k, l);
}

bool MayAttend(const TensorView& mask, std::int64_t column, std::int64_t row) {
  KVTWIN_DCHECK(IsMaskDType(mask.dtype) && IsInside(mask, {column, row, 0, 0}));
  return MaskAllows(mask, column, row);
}

}  // namespace kvtwin
