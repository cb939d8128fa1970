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
#include "optimized/fast_paths.h"
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
  const std::byte* const* rows = nullptr;
  std::ptrdiff_t offset = 0;

  HWY_INLINE const std::byte* operator[](std::size_t t) const {
    return rows[t] + offset;
  }
};

HWY_INLINE CellsRows RowsOfHead(const TileRows& rows, std::size_t kv_head) {
  return {rows.rows.data(), HeadOffset(rows, kv_head)};
}

// Rows of kCells cells that kernels fetch into the first-level cache while they
// multiply others.
template <std::size_t kCells>
class FetchedRows {
 public:
  // Null: none.
  HWY_INLINE explicit FetchedRows(const CellsRows* rows)
      : any_(rows != nullptr) {
    if (!any_) return;
    HWY_UNROLL(8)
    for (std::size_t t = 0; t < kCells; ++t) rows_[t] = (*rows)[t];
  }

  // Fetches a line of each row if element i begins it; nothing if a line has 0
  // elements. Inlined: GCC finds that a function without other effects does
  // nothing, and leaves out its calls.
  template <std::size_t line_elements>
  HWY_INLINE void Fetch(std::size_t i) const {
    if constexpr (line_elements > 0) {
      if (any_ && i % line_elements == 0) FetchLine(i / line_elements * 64);
    }
  }
  HWY_INLINE void FetchLine(std::size_t byte) const {
    HWY_UNROLL(8)
    for (std::size_t t = 0; t < kCells; ++t) {
      __builtin_prefetch(rows_[t] + byte, 0, 3);
    }
  }

 private:
  std::array<const std::byte*, kCells> rows_;
  bool any_;
};

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
  std::size_t head_bytes() const { return head_bytes_; }

  // One head of the cells from `first` on, which is a multiple of the cells of
  // a step, if it lies there as a whole.
  HWY_INLINE CellsRows At(std::size_t first, std::size_t kv_head) const {
    if (first >= cells_ || head_bytes_ == 0) return {};
    return {rows_->rows.data() + first, HeadOffset(*rows_, kv_head)};
  }

  // Fetches one head of some cells into the second-level cache, where they do
  // not take the place of what is being read. Inlined, as FetchedRows::Fetch.
  HWY_INLINE void Fetch(std::size_t first, std::size_t end,
                        std::size_t kv_head) const {
    if (first >= cells_) return;
    const std::ptrdiff_t offset = HeadOffset(*rows_, kv_head);
    end = std::min(end, cells_);
    for (std::size_t t = first; t < end; ++t) {
      for (std::size_t line = 0; line < head_bytes_; line += 64) {
        __builtin_prefetch(rows_->rows[t] + offset + line, 0, 2);
      }
    }
  }

 private:
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

// Whether rows are fetched into the first-level cache.
inline bool FetchesNear() { return TakeFastPath(FetchesIntoFirstLevel()); }

// Whether this is done while others are multiplied, rather than between
// products: it is faster, but for rows of 8 bits, whose products wait for the
// instructions that it takes.
inline bool FetchesWithin(DType dtype) {
  return SizeOf(dtype) > 1 && FetchesNear();
}

// Bytes from a fetch into the first-level cache to its use, as measured
// (docs/performance.md).
inline std::size_t NearBytes(DType dtype) {
  if (!FetchesWithin(dtype)) return std::size_t{8} << 10;
  const bool far = HasLargeFirstLevel() && dtype != DType::kF32 && !IsIntel();
  return std::size_t{far ? 12U : 4U} << 10;
}

// The rows that a walk over rows, kCells cells and one head at a time, reads
// some steps later: the rest of the rows, then those ahead.
template <std::size_t kCells>
class NearFetches {
 public:
  HWY_INLINE NearFetches(const TileRows& rows, std::size_t cells,
                         const RowsAhead& ahead, const QueryHeads* heads,
                         std::size_t head_count)
      : rows_(rows, (cells + kCells - 1) / kCells * kCells),
        ahead_(ahead),
        heads_(heads),
        head_count_(head_count),
        within_(FetchesWithin(rows.dtype)),
        ahead_within_(within_ && ahead.head_bytes() == rows_.head_bytes()) {
    const std::size_t steps = StepsAhead(rows);
    cell_ = steps / head_count * kCells;
    head_ = steps % head_count;
  }

  // The cells of the rows ahead that a walk over `rows` has fetched entirely
  // when it ends.
  static std::size_t CellsAhead(const TileRows& rows, std::size_t head_count) {
    return StepsAhead(rows) / head_count * kCells;
  }

  // A step begins: fetches rows, or returns those that the products of the step
  // fetch.
  HWY_INLINE const CellsRows* Step() {
    const bool here = cell_ < rows_.cells();
    const RowsAhead& of = here ? rows_ : ahead_;
    next_ = of.At(here ? cell_ : cell_ - rows_.cells(), heads_[head_].kv_head);
    if (++head_ == head_count_) {
      head_ = 0;
      cell_ += kCells;
    }
    if (next_.rows == nullptr) return nullptr;
    if (here ? within_ : ahead_within_) return &next_;
    // A line of each row, then the next line of each row: the processor also
    // fetches lines of streams (SetStreams) ahead by itself.
    for (std::size_t t = 0; t < kCells; t += kStreams) {
      const CellsRows streams = {next_.rows + t, next_.offset};
      const FetchedRows<kStreams> rows(&streams);
      for (std::size_t byte = 0; byte < of.head_bytes(); byte += 64) {
        rows.FetchLine(byte);
      }
    }
    return nullptr;
  }

 private:
  static std::size_t StepsAhead(const TileRows& rows) {
    const std::size_t bytes =
        std::max<std::size_t>(kCells * HeadBytes(rows), 1);
    return NearBytes(rows.dtype) / bytes + 1;
  }

  RowsAhead rows_;
  RowsAhead ahead_;
  const QueryHeads* heads_;
  std::size_t head_count_;
  // Whether products fetch the rest of the rows, and the rows ahead: those have
  // lines in other places if they have another size.
  bool within_;
  bool ahead_within_;
  std::size_t cell_;
  std::size_t head_;
  CellsRows next_;
};

// Calls does(head index, first cell, rows of kCells cells, head_dim, rows to
// fetch meanwhile) for all cells of a tile and all heads: in the order in which
// the rows lie in memory, if they are read there. Rows are then fetched shortly
// before into a first-level cache with room for them; else, a tile before into
// the second (docs/performance.md).
template <std::size_t kCells, class Does>
HWY_INLINE void ForEachCells(const TileRows& rows, std::size_t cells,
                             bool read_there, const RowsAhead& ahead,
                             const QueryHeads* heads, std::size_t head_count,
                             float* scratch, const Does& does) {
  const std::size_t steps = (cells + kCells - 1) / kCells;
  const std::size_t step = (ahead.cells() + steps - 1) / steps;
  if (read_there) {
    const bool near = FetchesNear();
    NearFetches<kCells> fetches(rows, cells, ahead, heads, head_count);
    for (std::size_t t = 0; t < cells; t += kCells) {
      for (std::size_t h = 0; h < head_count; ++h) {
        const CellsRows* fetched = nullptr;
        if (near) {
          fetched = fetches.Step();
        } else {
          ahead.Fetch(t / kCells * step, (t / kCells + 1) * step,
                      heads[h].kv_head);
        }
        does(
            h, t,
            CellsRows{rows.rows.data() + t, HeadOffset(rows, heads[h].kv_head)},
            rows.head_dim, fetched);
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
      does(h, t, CellsRows{unpacked.data() + t, 0}, padded, nullptr);
    }
  }
}

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_TILE_WALK_H_
