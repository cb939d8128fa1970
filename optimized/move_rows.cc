#include "optimized/move_rows.h"

#include <cstdint>
#include <cstring>

#include "optimized/fast_paths.h"
#include "optimized/row_kernels.h"

namespace kvtwin::optimized {
namespace {

// In kColumns columns at a time: the moves are read once for all of them.
template <std::size_t kColumns, class T>
void MoveTogether(std::span<const CellMove> moves, T* column,
                  std::size_t stride) {
  for (const auto& [from, to] : moves) {
#pragma GCC unroll 8
    for (std::size_t c = 0; c < kColumns; ++c) {
      column[c * stride + to] = column[c * stride + from];
    }
  }
}

template <class T>
void MoveElements(std::span<const CellMove> moves, T* columns,
                  std::size_t count, std::size_t stride) {
  constexpr std::size_t kTogether = 8;
  std::size_t c = 0;
  for (; c + kTogether <= count; c += kTogether) {
    MoveTogether<kTogether>(moves, columns + c * stride, stride);
  }
  for (; c < count; ++c) MoveTogether<1>(moves, columns + c * stride, stride);
}

}  // namespace

void MoveRows(std::span<const CellMove> moves, std::byte* rows,
              std::size_t row_bytes) {
  // Less than this may still be in the caches, and stay there.
  constexpr std::size_t kCached = std::size_t{1} << 20;
  if (!TakeFastPath(moves.size() * row_bytes > kCached)) {
    for (const CellMove& move : moves) {
      std::memcpy(rows + move.to * row_bytes, rows + move.from * row_bytes,
                  row_bytes);
    }
    return;
  }
  for (std::size_t i = 0; i < moves.size(); ++i) {
    // The last one fetches itself.
    const CellMove& next = moves[i + 1 < moves.size() ? i + 1 : i];
    StreamBytesAhead(rows + moves[i].from * row_bytes,
                     rows + moves[i].to * row_bytes, row_bytes,
                     rows + next.from * row_bytes);
  }
  FenceStreams();
}

void MoveInColumns(std::span<const CellMove> moves, DType dtype,
                   std::byte* columns, std::size_t count, std::size_t stride) {
  if (dtype == DType::kF32) {
    MoveElements(moves, reinterpret_cast<float*>(columns), count,
                 stride / sizeof(float));
  } else if (dtype == DType::kF8) {
    MoveElements(moves, reinterpret_cast<std::uint8_t*>(columns), count,
                 stride);
  } else {
    MoveElements(moves, reinterpret_cast<std::uint16_t*>(columns), count,
                 stride / sizeof(std::uint16_t));
  }
}

}  // namespace kvtwin::optimized
