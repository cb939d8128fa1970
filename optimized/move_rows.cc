#include "optimized/move_rows.h"

#include <cstdint>
#include <cstring>

#include "optimized/fast_paths.h"
#include "optimized/row_kernels.h"

namespace kvtwin::optimized {
namespace {

template <class T>
void MoveElements(std::span<const CellMove> moves, std::byte* columns,
                  std::size_t count, std::size_t stride) {
  for (std::size_t c = 0; c < count; ++c, columns += stride) {
    T* column = reinterpret_cast<T*>(columns);
    for (const CellMove& move : moves) column[move.to] = column[move.from];
  }
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
    MoveElements<float>(moves, columns, count, stride);
  } else {
    MoveElements<std::uint16_t>(moves, columns, count, stride);
  }
}

}  // namespace kvtwin::optimized
