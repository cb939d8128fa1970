// The inner loops of attention, each compiled for every instruction set (see
// targets.h): one tile of cells against the queries that share it, with an
// online softmax. Results differ between targets by rounding.

#ifndef KVTWIN_OPTIMIZED_ATTENTION_KERNELS_H_
#define KVTWIN_OPTIMIZED_ATTENTION_KERNELS_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/index.h"
#include "kvtwin/tensor.h"

namespace kvtwin::optimized {

// Cells of a tile: one word of visibility for each row.
inline constexpr std::size_t kAttentionTile = 64;

// Heads are padded with zeros to whole vectors of every target.
inline constexpr std::size_t kHeadPadding = 16;
constexpr std::size_t Padded(std::size_t head_dim) {
  return (head_dim + kHeadPadding - 1) / kHeadPadding * kHeadPadding;
}

inline constexpr std::size_t kCellsPadding = 16;

// The rows of few queries are read in this number of streams, which the
// processor reads faster than one stream.
inline constexpr std::size_t kStreams = 4;

// K or V rows of the cells of a tile. Element i of KV head h of cell t lies at
// rows[t] + h * head_stride + i * stride; if `adjacent`, as a run of the dtype
// lies in memory. Up to the next multiple of kCellsPadding, the last cell is
// repeated.
struct TileRows {
  std::array<const std::byte*, kAttentionTile> rows;
  DType dtype;
  bool adjacent;
  std::size_t head_dim;
  std::int64_t head_stride;
  std::int64_t stride;
};

struct AttentionTile {
  std::size_t cells;  // 1 to kAttentionTile.
  TileRows keys;
  TileRows values;
  const AttentionTile* next;  // Read after this tile. Null: none is known.
};

// A word of visibility for the first `cells` cells of a tile.
constexpr std::uint64_t FirstBits(std::size_t cells) {
  return ~std::uint64_t{0} >> (kAttentionTile - cells);
}

// The most rows of a group: their queries of one KV head are computed together.
inline constexpr std::size_t kMostGroupRows = 512;

// A tile of which each row of a group may see other cells.
struct GroupTile {
  AttentionTile tile;
  // Row r sees cell t if bit t of visible[r] is set.
  std::array<std::uint64_t, kMostGroupRows> visible;
};

// The kernels read rows of a dtype in units of this number.
constexpr float RowUnit(DType dtype) {
  return dtype == DType::kF8 ? 256.0f : 1.0f;
}

// The queries that share a KV head, and what is known of their attention after
// some tiles: `out` is the sum of exp2(score - largest) V, and `sum` the sum of
// these weights; out = sum = 0 and largest = -infinity at the start. Scores are
// in units of log 2.
struct QueryHeads {
  std::size_t kv_head;
  std::size_t count;
  const float* queries;  // [padded k_head_dim, count]
  float* out;            // [padded v_head_dim, count]
  float* largest;        // [count]
  float* sum;            // [count]
};

struct ScoreScale {
  float cap;  // In units of log 2; 0: none. With a cap, score =
              // cap * tanh(query.key).
};

// The queries of a head from `first` on, and tiles of which they see cells.
struct WeighedQueries {
  std::span<const GroupTile> tiles;
  const QueryHeads& head;
  std::size_t first;
  std::size_t count;
  std::size_t queries_per_row;
  ScoreScale scale;
};

// The most queries that AttendFew takes.
inline constexpr std::size_t kFewQueries = 8;

// Queries that AttendMany computes at once: their scores stay in the
// first-level cache between the two products.
inline constexpr std::size_t kManyQueries = 48;

// Numbers of floats of scratch that AttendFew needs for some heads of up to
// kFewQueries queries, and that AttendMany needs.
std::size_t FewScratch(std::size_t k_head_dim, std::size_t v_head_dim,
                       std::size_t head_count);
std::size_t ManyScratch(std::size_t k_head_dim, std::size_t v_head_dim);

// Stores a head of the first row, times `factor`, to [padded head_dim].
void LoadHead(const TileRows& row, std::size_t head, float factor, float* to);

// Stores numbers times `factor`. `from` lies on a cache line.
void StoreScaled(const float* from, float factor, std::size_t count, float* to);

// Adds a tile that all queries see to each of `heads`, which have equally many
// queries. K and V are read once, in the order of the cells. Scratch, queries
// and results lie on cache lines.
void AttendFew(const AttentionTile& tile, const QueryHeads* heads,
               std::size_t head_count, ScoreScale scale, float* scratch);

// Adds a tile to one head, whose queries are those of the rows of a group,
// `queries_per_row` of each.
void AttendMany(const GroupTile& seen, const QueryHeads& head,
                std::size_t queries_per_row, ScoreScale scale, float* scratch);

// The steps of AttendFew: the scores [kAttentionTile, queries, head_count] of
// the keys, weights in their place, and the sums of the values. `rows` is
// scratch for the rows of a head.
void ScoreFew(const AttentionTile& tile, const QueryHeads* heads,
              std::size_t head_count, float* scores, float* rows);
void WeighFew(const AttentionTile& tile, const QueryHeads* heads,
              std::size_t head_count, ScoreScale scale, float* scores);
void AddFew(const AttentionTile& tile, const QueryHeads* heads,
            std::size_t head_count, const float* weights, float* rows);

// The step of AttendMany before its products: copies one head of the rows of
// some cells to [padded head_dim, cells].
void UnpackRows(const TileRows& rows, std::size_t cells, std::size_t kv_head,
                float* to);

// Whether the first rows see all cells of a tile.
inline bool SeeAll(const GroupTile& seen, std::size_t rows) {
  const std::uint64_t all = FirstBits(seen.tile.cells);
  return std::all_of(seen.visible.begin(), seen.visible.begin() + AsInt(rows),
                     [&](std::uint64_t sees) { return (sees & all) == all; });
}

// Whether one of the rows of some queries sees a cell of a tile.
inline bool SeeAny(std::span<const GroupTile> tiles, std::size_t first,
                   std::size_t count, std::size_t queries_per_row) {
  const std::size_t first_row = first / queries_per_row;
  const std::size_t last_row = (first + count - 1) / queries_per_row;
  return std::ranges::any_of(tiles, [&](const GroupTile& seen) {
    const auto rows = std::span(seen.visible).first(last_row + 1);
    return std::ranges::any_of(rows.subspan(first_row),
                               [](std::uint64_t sees) { return sees != 0; });
  });
}

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_ATTENTION_KERNELS_H_
