#include "optimized/move_rows.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/assert.h"
#include "optimized/distinct.h"
#include "optimized/fast_paths.h"
#include "optimized/row_kernels.h"

namespace kvtwin::optimized {
namespace {

// Moves elements in kTogether columns at a time: the moves are then read once
// for all of them.
template <std::size_t kTogether, class T>
void MoveTogether(std::span<const CellMove> moves, const StoredColumns& columns,
                  std::size_t first) {
  T* column = reinterpret_cast<T*>(columns.data + first * columns.stride);
  const std::size_t stride = columns.stride / sizeof(T);
  const std::size_t tile = columns.tile_stride / sizeof(T);
  const auto at = [&](std::size_t cell) {
    return cell / kTileCells * tile + cell % kTileCells;
  };
  for (const CellMove& move : moves) {
    const std::size_t from = at(move.from);
    const std::size_t to = at(move.to);
#pragma GCC unroll 8
    for (std::size_t c = 0; c < kTogether; ++c) {
      column[c * stride + to] = column[c * stride + from];
    }
  }
}

template <class T>
void MoveElements(std::span<const CellMove> moves, const StoredColumns& columns,
                  std::size_t count) {
  constexpr std::size_t kMax = 8;
  std::size_t c = 0;
  for (; c + kMax <= count; c += kMax) {
    MoveTogether<kMax, T>(moves, columns, c);
  }
  for (; c < count; ++c) MoveTogether<1, T>(moves, columns, c);
}

}  // namespace

void MoveRows(std::span<const CellMove> moves, std::byte* rows,
              std::size_t row_bytes) {
  KVTWIN_DCHECK(AreIndependent(moves));
  // Less data than this may still be in the caches, and should stay there.
  constexpr std::size_t kCached = std::size_t{1} << 20;
  if (!TakeFastPath(moves.size() * row_bytes > kCached)) {
    for (const CellMove& move : moves) {
      std::memcpy(rows + move.to * row_bytes, rows + move.from * row_bytes,
                  row_bytes);
    }
    return;
  }
  const auto copy = [&](std::size_t i) {
    const CellMove& move = moves[std::min(i, moves.size() - 1)];
    return RowCopy{.from = rows + move.from * row_bytes,
                   .to = rows + move.to * row_bytes};
  };
  const auto copies = [&](std::size_t i) {
    return RowCopies{copy(i), copy(i + 1), copy(i + 2), copy(i + 3)};
  };
  std::size_t i = 0;
  for (; i + RowCopies().size() <= moves.size(); i += RowCopies().size()) {
    StreamRows(copies(i), copies(i + RowCopies().size()), row_bytes);
  }
  for (; i < moves.size(); ++i) {
    StreamBytes(copy(i).from, copy(i).to, row_bytes);
  }
  FenceStreams();
}

void MoveInColumns(std::span<const CellMove> moves,
                   const StoredColumns& columns, std::size_t count) {
  KVTWIN_DCHECK(AreIndependent(moves));
  if (columns.dtype == DType::kF32) {
    MoveElements<float>(moves, columns, count);
  } else if (columns.dtype == DType::kF8) {
    MoveElements<std::uint8_t>(moves, columns, count);
  } else {
    MoveElements<std::uint16_t>(moves, columns, count);
  }
}

}  // namespace kvtwin::optimized
