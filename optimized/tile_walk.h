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
#include "optimized/targets.h"

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

HWY_INLINE CellsRows RowsOfHead(const TileRows& rows, std::size_t kv_head) {
  return {rows.rows.data(), HeadOffset(rows, kv_head)};
}

// Rows that are read after others, and are fetched into a cache meanwhile.
class RowsAhead {
 public:
  HWY_INLINE RowsAhead(const TileRows& rows, std::size_t cells)
      : rows_(&rows), cells_(cells), head_bytes_(HeadBytes(rows)) {}
  // The keys or the values of a tile. Null: no tile is known.
  HWY_INLINE RowsAhead(const AttentionTile* tile, TileRows AttentionTile::*rows)
      : rows_(tile == nullptr ? nullptr : &(tile->*rows)),
        cells_(tile == nullptr ? 0 : tile->cells),
        head_bytes_(tile == nullptr ? 0 : HeadBytes(tile->*rows)) {}

  std::size_t cells() const { return cells_; }

  // Fetches one head of some cells into the second-level cache, where they do
  // not take the place of what is being read; or, if `first_level`, into the
  // first. Inlined: GCC finds that a function without other effects does
  // nothing, and leaves out its calls.
  template <bool first_level = false>
  HWY_INLINE void Fetch(std::size_t first, std::size_t end,
                        std::size_t kv_head) const {
    if (first >= cells_) return;
    const std::ptrdiff_t offset = HeadOffset(*rows_, kv_head);
    end = std::min(end, cells_);
    std::size_t t = first;
    if constexpr (first_level) {
      for (; t + kStreams <= end; t += kStreams) {
        FetchRows<kStreams, true>(t, offset);
      }
    }
    for (; t < end; ++t) FetchRows<1, first_level>(t, offset);
  }

 private:
  // Fetches a line of each row, then the next line of each row: the processor
  // also fetches lines of streams (SetStreams) ahead by itself.
  template <std::size_t kRows, bool first_level>
  HWY_INLINE void FetchRows(std::size_t first, std::ptrdiff_t offset) const {
    std::array<const std::byte*, kRows> rows;
    HWY_UNROLL(4)
    for (std::size_t i = 0; i < kRows; ++i) {
      rows[i] = rows_->rows[first + i] + offset;
    }
    for (std::size_t line = 0; line < head_bytes_; line += 64) {
      HWY_UNROLL(4)
      for (std::size_t i = 0; i < kRows; ++i) {
        __builtin_prefetch(rows[i] + line, 0, first_level ? 3 : 2);
      }
    }
  }

  const TileRows* rows_;
  std::size_t cells_;
  std::size_t head_bytes_;  // 0 if they do not lie one after another.
};

// Fetches rows that are read a tile later into the second-level cache: evenly,
// as a processor that is asked for many lines at once waits for them; and a
// line of a row of each stream (SetStreams) at a time, which the processor then
// fetches ahead by itself.
class EvenFetches {
 public:
  // Fetches rows from `first_cell` on.
  EvenFetches(const TileRows& rows, std::size_t cells, const QueryHeads* heads,
              std::size_t head_count, std::size_t first_cell = 0)
      : rows_(rows.rows.data() + first_cell),
        end_(rows.rows.data() + cells),
        first_byte_(HeadOffset(rows, heads[0].kv_head)),
        end_byte_(HeadOffset(rows, heads[head_count - 1].kv_head) +
                  AsInt(HeadBytes(rows))),
        byte_(first_byte_) {}

  // Fetches the next four lines. After the last ones, it begins the last rows
  // anew.
  HWY_INLINE void Next() {
    HWY_UNROLL(4)
    for (std::size_t i = 0; i < kStreams; ++i) {
      __builtin_prefetch(rows_[i] + byte_, 0, 2);
    }
    byte_ += 64;
    if (byte_ < end_byte_) return;
    byte_ = first_byte_;
    if (rows_ + kStreams < end_) rows_ += kStreams;
  }

 private:
  const std::byte* const* rows_;
  const std::byte* const* end_;
  std::ptrdiff_t first_byte_;
  std::ptrdiff_t end_byte_;
  std::ptrdiff_t byte_;
};

// Fetches into the first-level cache what a walk over rows, kCells cells and
// one head at a time, reads some steps later: the rest of the rows, then those
// ahead.
template <std::size_t kCells>
class NearFetches {
 public:
  // Bytes from a fetch to its use: a sixth of the first-level cache.
  static constexpr std::size_t kBytes = std::size_t{1} << 13;

  HWY_INLINE NearFetches(const TileRows& rows, std::size_t cells,
                         const RowsAhead& ahead, const QueryHeads* heads,
                         std::size_t head_count)
      : rows_(rows, cells),
        ahead_(ahead),
        heads_(heads),
        head_count_(head_count) {
    const std::size_t steps = StepsAhead(rows);
    cell_ = steps / head_count * kCells;
    head_ = steps % head_count;
  }

  // The cells of rows ahead that a walk has fetched entirely when it ends.
  static std::size_t CellsAhead(const TileRows& ahead, std::size_t head_count) {
    return StepsAhead(ahead) / head_count * kCells;
  }

  // The next step begins.
  HWY_INLINE void Step() {
    if (cell_ < rows_.cells()) {
      rows_.Fetch<true>(cell_, cell_ + kCells, heads_[head_].kv_head);
    } else {
      const std::size_t cell = cell_ - rows_.cells();
      ahead_.Fetch<true>(cell, cell + kCells, heads_[head_].kv_head);
    }
    if (++head_ < head_count_) return;
    head_ = 0;
    cell_ += kCells;
  }

 private:
  static std::size_t StepsAhead(const TileRows& rows) {
    return kBytes / std::max<std::size_t>(kCells * HeadBytes(rows), 1) + 1;
  }

  RowsAhead rows_;
  RowsAhead ahead_;
  const QueryHeads* heads_;
  std::size_t head_count_;
  std::size_t cell_;
  std::size_t head_;
};

// Calls does(head index, first cell, rows of kCells cells, head_dim) for all
// cells of a tile and all heads: in the order in which the rows lie in memory,
// if they are read there. Rows are then fetched shortly before into a
// first-level cache with room for them; else, a tile before into the second
// (docs/performance.md).
template <std::size_t kCells, class Does>
HWY_INLINE void ForEachCells(const TileRows& rows, std::size_t cells,
                             bool read_there, const RowsAhead& ahead,
                             const QueryHeads* heads, std::size_t head_count,
                             float* scratch, const Does& does) {
  const std::size_t steps = (cells + kCells - 1) / kCells;
  const std::size_t step = (ahead.cells() + steps - 1) / steps;
  if (read_there) {
    const bool near = HasLargeFirstLevel();
    NearFetches<kCells> fetches(rows, cells, ahead, heads, head_count);
    for (std::size_t t = 0; t < cells; t += kCells) {
      for (std::size_t h = 0; h < head_count; ++h) {
        if (near) {
          fetches.Step();
        } else {
          ahead.Fetch(t / kCells * step, (t / kCells + 1) * step,
                      heads[h].kv_head);
        }
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
