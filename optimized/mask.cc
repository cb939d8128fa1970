#include "optimized/mask.h"

#include <algorithm>
#include <new>

#include "hwy/cache_control.h"
#include "optimized/fast_paths.h"
#include "optimized/mask_kernels.h"
#include "optimized/parallel.h"

namespace kvtwin::optimized {
namespace {

// Rows are cut into pieces of this many cells, so that several threads can
// write one long row. A multiple of a word.
constexpr std::size_t kPieceCells = std::size_t{16} * 1024;

// A buffer that no cache holds is written past them.
constexpr std::size_t kBeyondCaches = std::size_t{16} << 20;

void WriteRows(const std::int32_t* positions, std::span<const RowRule> rules,
               std::size_t row_count, CellSpan view, DType dtype,
               std::byte* out) {
  const std::size_t pieces = (view.size() + kPieceCells - 1) / kPieceCells;
  const std::size_t row_bytes = MaskRowBytes(dtype, view.size());
  const std::size_t bytes = row_count * row_bytes;
  const bool stream = TakeFastPath(bytes > kBeyondCaches);
  ParallelFor(row_count * pieces, bytes, [&](std::size_t i) {
    const std::size_t row = i / pieces;
    const std::size_t column = i % pieces * kPieceCells;
    const RowRule rule =
        row < rules.size() ? rules[row] : RowRule{nullptr, {0, -1}};
    const std::size_t first = view.first + column;
    const std::size_t end = std::min(view.end, first + kPieceCells);
    WriteMaskRow({.positions = positions,
                  .members = rule.members,
                  .range = rule.range,
                  .first = first,
                  .end = end,
                  .ranges = nullptr,
                  .stream = stream},
                 dtype, out + row * row_bytes + MaskRowBytes(dtype, column));
    if (stream) hwy::FlushStream();
  });
}

}  // namespace

void Mask::Build(const std::int32_t* positions, std::span<const RowRule> rules,
                 std::size_t row_count, CellSpan view, DType dtype) {
  std::size_t bytes;
  if (__builtin_mul_overflow(MaskRowBytes(dtype, view.size()), row_count,
                             &bytes)) {
    throw std::bad_alloc();
  }
  if (bytes > buffer_.bytes()) {
    // The view of a decode step grows by a cell at a time: not by as little.
    const std::size_t grown = buffer_.bytes() + buffer_.bytes() / 2;
    buffer_ = AlignedBuffer();  // Never both at once.
    buffer_ = AlignedBuffer(std::max(bytes, grown));
  }
  WriteRows(positions, rules, row_count, view, dtype, buffer_.data());
  view_ = DenseView(buffer_.data(), dtype,
                    {static_cast<std::int64_t>(view.size()),
                     static_cast<std::int64_t>(row_count), 1, 1});
}

}  // namespace kvtwin::optimized
