// The order in which the kernels of few queries read the rows of a tile.

#ifndef KVTWIN_OPTIMIZED_TILE_WALK_H_
#define KVTWIN_OPTIMIZED_TILE_WALK_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <type_traits>

#include "core/elements.h"
#include "core/index.h"
#include "hwy/base.h"
#include "optimized/attention_kernels.h"

namespace kvtwin::optimized {

HWY_INLINE std::ptrdiff_t HeadOffset(const TileRows& rows,
                                     std::size_t kv_head) {
  return static_cast<std::ptrdiff_t>(kv_head) * rows.head_stride;
}

// Bytes of a head of a row that lie one after another.
HWY_INLINE std::size_t HeadBytes(const TileRows& rows) {
  if (!rows.adjacent) return 0;
  return AsSize(RunBytes(rows.dtype, AsInt(rows.head_dim)));
}

// Calls does(n) with `count` as a constant, from 1 to 4.
template <class Does>
HWY_INLINE void WithCount(std::size_t count, const Does& does) {
  switch (count) {
    case 1:
      return does(std::integral_constant<std::size_t, 1>());
    case 2:
      return does(std::integral_constant<std::size_t, 2>());
    case 3:
      return does(std::integral_constant<std::size_t, 3>());
    default:
      return does(std::integral_constant<std::size_t, 4>());
  }
}

// Rows of some cells: element i of cell t lies at rows[t] + offset.
struct CellsRows {
  const std::byte* const* rows;
  std::ptrdiff_t offset;

  HWY_INLINE const std::byte* operator[](std::size_t t) const {
    return rows[t] + offset;
  }
};

// Rows that are read after others. Meanwhile they are fetched into the
// second-level cache, where they do not take the place of what is being read.
class RowsAhead {
 public:
  // The keys or the values of a tile. Null: no tile is known.
  HWY_INLINE RowsAhead(const AttentionTile* tile, TileRows AttentionTile::*rows)
      : rows_(tile == nullptr ? nullptr : &(tile->*rows)),
        cells_(tile == nullptr ? 0 : tile->cells),
        head_bytes_(tile == nullptr ? 0 : HeadBytes(tile->*rows)) {}

  std::size_t cells() const { return cells_; }

  // Fetches one head of some cells. Inlined: GCC finds that a function without
  // other effects does nothing, and leaves out its calls.
  HWY_INLINE void Fetch(std::size_t first, std::size_t end,
                        std::size_t kv_head) const {
    if (first >= cells_) return;
    const std::ptrdiff_t offset = HeadOffset(*rows_, kv_head);
    for (std::size_t t = first; t < std::min(end, cells_); ++t) {
      const std::byte* row = rows_->rows[t] + offset;
      for (std::size_t line = 0; line < head_bytes_; line += 64) {
        __builtin_prefetch(row + line, 0, 2);
      }
    }
  }

 private:
  const TileRows* rows_;
  std::size_t cells_;
  std::size_t head_bytes_;  // 0 if they do not lie one after another.
};

// Calls does(head index, first cell, rows of kCells cells, head_dim) for all
// cells of a tile and all heads: in the order in which the rows lie in memory,
// if they are read there.
template <std::size_t kCells, class Does>
HWY_INLINE void ForEachCells(const TileRows& rows, std::size_t cells,
                             bool read_there, const RowsAhead& ahead,
                             const QueryHeads* heads, std::size_t head_count,
                             float* scratch, const Does& does) {
  const std::size_t steps = (cells + kCells - 1) / kCells;
  const std::size_t step = (ahead.cells() + steps - 1) / steps;
  if (read_there) {
    for (std::size_t t = 0; t < cells; t += kCells) {
      for (std::size_t h = 0; h < head_count; ++h) {
        ahead.Fetch(t / kCells * step, (t / kCells + 1) * step,
                    heads[h].kv_head);
        does(
            h, t,
            CellsRows{rows.rows.data() + t, HeadOffset(rows, heads[h].kv_head)},
            rows.head_dim);
      }
    }
    return;
  }
  const std::size_t padded = Padded(rows.head_dim);
  std::array<const std::byte*, kAttentionTile> unpacked;
  for (std::size_t t = 0; t < kAttentionTile; ++t) {
    unpacked[t] = reinterpret_cast<const std::byte*>(
        scratch + std::min(t, cells - 1) * padded);
  }
  for (std::size_t h = 0; h < head_count; ++h) {
    UnpackRows(rows, cells, heads[h].kv_head, scratch);
    for (std::size_t t = 0; t < cells; t += kCells) {
      ahead.Fetch(t / kCells * step, (t / kCells + 1) * step, heads[h].kv_head);
      does(h, t, CellsRows{unpacked.data() + t, 0}, padded);
    }
  }
}

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_TILE_WALK_H_
