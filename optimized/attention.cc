// Attention of the optimized twin: gives the tiles of a plan to the kernels,
// and merges and writes their results.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <numbers>
#include <numeric>
#include <span>
#include <vector>

#include "core/elements.h"
#include "core/guarded_attention.h"
#include "core/index.h"
#include "core/twin.h"
#include "optimized/aligned_buffer.h"
#include "optimized/attention_bf16.h"
#include "optimized/attention_kernels.h"
#include "optimized/attention_plan.h"
#include "optimized/fast_paths.h"
#include "optimized/parallel.h"
#include "optimized/targets.h"

namespace kvtwin::optimized {
namespace {

constexpr std::size_t kTile = kAttentionTile;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr auto kLog2E = std::numbers::log2e_v<float>;

// Without a number of splits: work is split into at least kItems items, of
// at least kItemTiles tiles each.
constexpr std::size_t kItems = 16;
constexpr std::size_t kItemTiles = 8;

// With fewer queries, splitting K and V into terms takes longer than tiles of
// AMX save. K and V of one term are not split.
constexpr std::size_t kLeastQueries = 16;
constexpr std::size_t kLeastQueriesOfTerms = 192;

// The rows of a group. Each group converts K and V anew: with larger groups
// this takes less time, but fewer items are left for threads. With AMX, items
// are so short that smaller groups cost little.
constexpr std::size_t kGroupRows = 256;
constexpr std::size_t kGroupRowsOfAmx = 128;
constexpr std::size_t kLeastLargeGroups = 8;
std::size_t RowsOfGroup(std::size_t rows) {
  if (TermsMultiplier() == nullptr) return kGroupRows;
  const bool large = rows >= kLeastLargeGroups * kMostGroupRows;
  return large ? kMostGroupRows : kGroupRowsOfAmx;
}

// The size of a block that has all cells.
constexpr std::int64_t kAllCells = std::numeric_limits<std::int64_t>::max();

// The address of K or V of a cell, head 0: cells are numbered in blocks of
// `size`.
struct CellRows {
  const std::byte* base = nullptr;
  std::int64_t size = kAllCells;
  std::int64_t block_stride = 0;
  std::int64_t cell_stride = 0;
  TileRows tile = {};

  const std::byte* At(std::int64_t block, std::int64_t cell) const {
    return base + block * block_stride + cell * cell_stride;
  }
};

// The rows of a view, plain or as V lies in memory.
CellRows RowsOfView(const TensorView& rows, VLayout layout) {
  CellRows out;
  out.base = rows.at(0);
  out.tile.dtype = rows.dtype;
  const bool plain = layout == VLayout::kPlain;
  const int dim = plain ? 0 : 1;
  out.tile.adjacent = plain;
  out.tile.head_dim = AsSize(At(rows.shape, dim));
  out.tile.stride = At(rows.stride, dim);
  out.tile.head_stride = At(rows.stride, dim + 1);
  out.cell_stride = At(rows.stride, plain ? 2 : 0);
  if (layout == VLayout::kTiled) {
    out.size = kTileCells;
    out.block_stride = rows.stride[3];
  }
  return out;
}

CellRows RowsOfBlocks(const TensorView& rows, PagedLayout layout) {
  const bool head_major = layout == PagedLayout::kHeadMajor;
  CellRows out;
  out.base = rows.at(0);
  out.tile.dtype = rows.dtype;
  out.tile.adjacent = true;
  out.tile.head_dim = AsSize(rows.shape[0]);
  out.tile.stride = rows.stride[0];
  out.tile.head_stride = At(rows.stride, head_major ? 2 : 1);
  out.cell_stride = At(rows.stride, head_major ? 1 : 2);
  out.size = At(rows.shape, head_major ? 1 : 2);
  out.block_stride = rows.stride[3];
  return out;
}

// Few queries see all cells of their tiles, so that a tile may have any cells:
// the streams are the quarters of a tile, or of all tiles of an item if a row
// of K, with all of its heads, has few bytes.
constexpr std::size_t kFewRowBytes = 1024;

// Sets the rows of a tile of few queries: a row of each stream, then the next
// row of each stream. The streams are the quarters of `cells`.
void SetStreams(std::span<const std::byte* const> cells, TileRows& out) {
  const std::size_t length = cells.size() / kStreams;
  std::size_t cell = 0;
  for (std::size_t stream = 0; stream < kStreams; ++stream) {
    for (std::size_t i = 0; i < length; ++i) {
      out.rows[i * kStreams + stream] = cells[cell++];
    }
  }
  for (; cell < cells.size(); ++cell) out.rows[cell] = cells[cell];
}

class TwinAttention final : public GuardedAttention {
 protected:
  void DoPlan(const TensorView& mask, int rows, int first_row) override {
    plan_.Make(mask, rows, first_row, RowsOfGroup(AsSize(rows)));
  }
  void DoPlan(const AttentionTable& table) override {
    const std::int64_t rows = std::accumulate(
        table.query_rows.begin(), table.query_rows.end(), std::int64_t{0});
    plan_.Make(table, RowsOfGroup(AsSize(rows)));
  }
  void DoAttend(const TensorView& query, const KvView& view, VLayout v_layout,
                const AttentionOptions& options,
                const AttentionOut& out) override {
    Run({.query = query,
         .keys = RowsOfView(view.key, VLayout::kPlain),
         .values = RowsOfView(view.value, v_layout),
         .kv_heads = AsSize(view.key.shape[1]),
         .options = options,
         .out = out});
  }
  void DoAttend(const TensorView& query, const PagedKv& blocks,
                PagedLayout layout, const AttentionOptions& options,
                const AttentionOut& out) override {
    const int heads = layout == PagedLayout::kHeadMajor ? 2 : 1;
    Run({.query = query,
         .keys = RowsOfBlocks(blocks.key, layout),
         .values = RowsOfBlocks(blocks.value, layout),
         .kv_heads = AsSize(At(blocks.key.shape, heads)),
         .options = options,
         .out = out});
  }

 private:
  struct Call {
    const TensorView& query;
    CellRows keys;
    CellRows values;
    std::size_t kv_heads;
    const AttentionOptions& options;
    const AttentionOut& out;
    // For few rows and for many. Null: the kernels of f32.
    MultiplyBf16 multiply = options.bf16_products ? Bf16Multiplier() : nullptr;
    MultiplyBf16 multiply_many =
        options.bf16_products ? multiply : TermsMultiplier();

    std::size_t heads() const { return AsSize(query.shape[1]); }
    std::size_t queries_per_head() const { return heads() / kv_heads; }
    ManyTerms terms() const {
      if (options.bf16_products) return {};
      return {.queries = kMostTerms,
              .keys = TermsOf(keys.tile.dtype),
              .values = TermsOf(values.tile.dtype)};
    }
    std::size_t k_padded() const { return Padded(keys.tile.head_dim); }
    std::size_t v_padded() const { return Padded(values.tile.head_dim); }
  };

  // One part of the cells of a group, for some KV heads; `state` is where its
  // results begin in states_.
  struct Item {
    std::size_t group;
    std::size_t part;
    std::size_t parts;
    std::size_t first_head;
    std::size_t heads;
    std::size_t state;
  };

  // Some results: for each query `out`, then all `largest`, then all `sum`.
  struct State {
    float* out;
    float* largest;
    float* sum;
  };
  static std::size_t StateFloats(std::size_t queries, std::size_t v_padded) {
    return queries * v_padded + Padded(2 * queries);
  }
  // Floats that QueryHeads of this many heads take, whole cache lines.
  static std::size_t HeadFloats(std::size_t heads) {
    return Padded(heads * sizeof(QueryHeads) / sizeof(float));
  }
  static State StateAt(float* at, std::size_t queries, std::size_t v_padded) {
    float* largest = at + queries * v_padded;
    return {.out = at, .largest = largest, .sum = largest + queries};
  }

  void Run(const Call& call);
  void ListItems(const Call& call);
  bool IsFew(const RowGroup& group, const Call& call) const {
    return group.rows == 1 && call.queries_per_head() <= kFewQueries;
  }
  // Returns the number of streams of the cells of an item. The layout of the
  // rows does not change it, so that it does not change the order of sums.
  std::size_t StreamsOf(const RowGroup& group, const Call& call) const {
    const TileRows& keys = call.keys.tile;
    const std::size_t bytes =
        call.kv_heads * AsSize(RunBytes(keys.dtype, AsInt(keys.head_dim)));
    return IsFew(group, call) && bytes <= kFewRowBytes ? kStreams : 1;
  }
  // The products of a group, by bf16. Null: the kernels of f32.
  MultiplyBf16 MultiplierOf(const RowGroup& group, const Call& call) const {
    if (IsFew(group, call)) return call.multiply;
    const bool split = call.terms().keys + call.terms().values > 2;
    const std::size_t least = split ? kLeastQueriesOfTerms : kLeastQueries;
    const bool enough = group.rows * call.queries_per_head() >= least;
    return call.options.bf16_products || enough ? call.multiply_many : nullptr;
  }
  // The floats that the queries of one head of a group take.
  std::size_t QueryFloats(const RowGroup& group, const Call& call) const {
    const bool split = !IsFew(group, call) && MultiplierOf(group, call);
    return group.rows * call.queries_per_head() * call.k_padded() *
           (split ? call.terms().queries : 1);
  }
  // `next`: computed after this item, if it is known.
  void Compute(const Item& item, const Item* next, const Call& call,
               float* scratch, const State& state) const;
  QueryHeads* BeginHeads(const Item& item, const Call& call, float* scratch,
                         const State& state) const;
  void SetFirstTile(const Item& item, std::size_t first_head, const Call& call,
                    AttentionTile& tile) const;
  std::size_t WorkBytes(const Call& call) const;
  void LoadQueries(const RowGroup& group, std::size_t kv_head, const Call& call,
                   float* to) const;
  void SetCells(const RowGroup& group, std::span<const std::int64_t> cells,
                const Call& call, AttentionTile& tile) const;
  static void Merge(const State& from, std::size_t queries,
                    std::size_t v_padded, const State& to);
  void Finish(const Item& item, const Call& call, const State& state) const;

  AttentionPlan plan_;
  std::vector<Item> items_;
  std::size_t states_ = 0;  // Floats of the states of items of several parts.
  AlignedBuffer memory_;
};

void TwinAttention::ListItems(const Call& call) {
  items_.clear();
  std::size_t base = 0;
  for (const RowGroup& group : plan_.groups()) {
    base += IsFew(group, call) ? 1 : call.kv_heads;
  }
  const std::size_t wanted = (kItems + base - 1) / base;
  states_ = 0;
  for (const std::size_t g : plan_.longest_first()) {
    const RowGroup& group = plan_.groups()[g];
    // More parts than tiles would be empty, and take memory.
    const std::size_t parts =
        call.options.splits > 0
            ? std::min(AsSize(call.options.splits),
                       std::max<std::size_t>(group.tiles(), 1))
            : std::clamp<std::size_t>(group.tiles() / kItemTiles, 1, wanted);
    const std::size_t heads = IsFew(group, call) ? call.kv_heads : 1;
    for (std::size_t h = 0; h < call.kv_heads; h += heads) {
      for (std::size_t part = 0; part < parts; ++part) {
        items_.push_back({.group = g,
                          .part = part,
                          .parts = parts,
                          .first_head = h,
                          .heads = heads,
                          .state = states_});
        if (parts == 1) continue;
        states_ += StateFloats(heads * group.rows * call.queries_per_head(),
                               call.v_padded());
      }
    }
  }
}

void TwinAttention::LoadQueries(const RowGroup& group, std::size_t kv_head,
                                const Call& call, float* to) const {
  const float cap = call.options.soft_cap;
  const float factor =
      (cap == 0 ? call.options.scale * kLog2E : call.options.scale / cap) *
      RowUnit(call.keys.tile.dtype);
  const std::size_t per_head = call.queries_per_head();
  const TensorView& query = call.query;
  TileRows row;
  row.dtype = query.dtype;
  row.adjacent = query.stride[0] == RunBytes(query.dtype, 1);
  row.head_dim = call.keys.tile.head_dim;
  row.head_stride = query.stride[1];
  row.stride = query.stride[0];
  for (std::size_t i = 0; i < group.rows * per_head; ++i) {
    row.rows[0] = query.at(
        0, 0, static_cast<std::int64_t>(group.first_row + i / per_head));
    LoadHead(row, kv_head * per_head + i % per_head, factor, to);
    to += call.k_padded();
  }
}

void TwinAttention::SetCells(const RowGroup& group,
                             std::span<const std::int64_t> cells,
                             const Call& call, AttentionTile& tile) const {
  tile.cells = cells.size();
  const bool few = IsFew(group, call);
  const std::int32_t* blocks = plan_.BlocksOf(group);
  constexpr std::size_t kRange = kTile / kStreams;
  const auto set = [&](const CellRows& rows, TileRows& out) {
    const std::int64_t stride = rows.cell_stride;
    std::int64_t begin = 0;  // The first cell of a block.
    std::int64_t end = 0;
    const std::byte* block = nullptr;
    std::array<const std::byte*, kTile> found;
    for (std::size_t i = 0; i < cells.size();) {
      const std::int64_t cell = cells[i];
      if (cell < begin || cell >= end) {
        const std::int64_t column = cell / rows.size;
        begin = column * rows.size;
        end = begin + rows.size;
        block = rows.At(blocks == nullptr ? column : blocks[column], 0);
      }
      const std::byte* row = block + (cell - begin) * stride;
      // The cells of a stream are in ascending order.
      const std::size_t range =
          std::min(cells.size(), (i / kRange + 1) * kRange);
      const bool in_a_row = cells[range - 1] - cell == AsInt(range - 1 - i);
      const std::size_t last =
          in_a_row ? std::min(range, i + AsSize(end - cell)) : i + 1;
      for (; i < last; ++i, row += stride) found[i] = row;
    }
    const auto all = std::span(found).first(cells.size());
    if (few) {
      SetStreams(all, out);
    } else {
      std::ranges::copy(all, out.rows.begin());
    }
    for (std::size_t i = cells.size(); i % kCellsPadding != 0; ++i) {
      out.rows[i] = out.rows[i - 1];
    }
  };
  set(call.keys, tile.keys);
  set(call.values, tile.values);
}

// Loads the queries of an item to `scratch`, and returns its heads, whose
// results are those of no cell.
QueryHeads* TwinAttention::BeginHeads(const Item& item, const Call& call,
                                      float* scratch,
                                      const State& state) const {
  const RowGroup& group = plan_.groups()[item.group];
  const std::size_t queries = item.heads * group.rows * call.queries_per_head();
  std::fill_n(state.out, queries * call.v_padded(), 0.0f);
  std::fill_n(state.largest, queries, -kInfinity);
  std::fill_n(state.sum, queries, 0.0f);
  const std::size_t per_head = queries / item.heads;
  const MultiplyBf16 multiply = MultiplierOf(group, call);
  auto* heads = reinterpret_cast<QueryHeads*>(
      scratch + item.heads * QueryFloats(group, call));
  for (std::size_t h = 0; h < item.heads; ++h) {
    const std::size_t before = h * per_head;
    float* loaded = scratch + before * call.k_padded();
    LoadQueries(group, item.first_head + h, call, loaded);
    if (multiply != nullptr && IsFew(group, call)) {
      RoundFewToBf16(call.keys.tile, multiply, loaded, call.k_padded(),
                     per_head);
    } else if (multiply != nullptr) {
      SplitQueries(loaded, call.k_padded(), per_head, call.terms().queries);
    }
    heads[h] = {.kv_head = item.first_head + h,
                .count = per_head,
                .queries = loaded,
                .out = state.out + before * call.v_padded(),
                .largest = state.largest + before,
                .sum = state.sum + before};
  }
  return heads;
}

void TwinAttention::Compute(const Item& item, const Item* next,
                            const Call& call, float* scratch,
                            const State& state) const {
  const RowGroup& group = plan_.groups()[item.group];
  QueryHeads* heads = BeginHeads(item, call, scratch, state);
  auto* rest = reinterpret_cast<float*>(heads) + HeadFloats(item.heads);
  const ScoreScale scale = {.cap = call.options.soft_cap * kLog2E};
  // Tiles are computed when those after them are known, which are fetched
  // meanwhile.
  const bool few = IsFew(group, call);
  const MultiplyBf16 multiply = MultiplierOf(group, call);
  const std::size_t most = few || multiply == nullptr ? 1 : kManyBf16Tiles;
  struct Tiles {
    std::array<GroupTile, kManyBf16Tiles> all;
    std::size_t count = 0;
  };
  std::array<Tiles, 2> both;
  Tiles* now = &both[0];
  Tiles* later = &both[1];
  for (Tiles& tiles : both) {
    for (GroupTile& seen : std::span(tiles.all).first(most)) {
      seen.tile = {.cells = 0,
                   .keys = call.keys.tile,
                   .values = call.values.tile,
                   .next = nullptr};
    }
  }
  const auto attend = [&] {
    const auto tiles = std::span(now->all).first(now->count);
    for (std::size_t i = 0; i < tiles.size(); ++i) {
      tiles[i].tile.next = i < later->count ? &later->all[i].tile : nullptr;
    }
    if (tiles.empty()) {
    } else if (few && multiply != nullptr) {
      AttendFewInBf16(tiles[0].tile, heads, item.heads, scale, multiply, rest);
    } else if (few) {
      AttendFew(tiles[0].tile, heads, item.heads, scale, rest);
    } else if (multiply != nullptr) {
      AttendManyInBf16(tiles, heads[0], call.queries_per_head(), scale,
                       call.terms(), multiply, rest);
    } else {
      AttendMany(tiles[0], heads[0], call.queries_per_head(), scale, rest);
    }
    std::swap(now, later);
    later->count = 0;
  };
  plan_.ForEachTile(group, item.part, item.parts, StreamsOf(group, call),
                    group.tiles(), [&](std::span<std::int64_t> cells) {
                      if (later->count == most) attend();
                      GroupTile& seen = At(later->all, later->count++);
                      if (!few) {
                        plan_.SetVisible(group, cells, seen.visible);
                      }
                      SetCells(group, cells, call, seen.tile);
                    });
  attend();
  if (next != nullptr) {
    SetFirstTile(*next, item.first_head, call, later->all[0].tile);
    later->count = 1;
  }
  attend();
}

// Sets the first tile of an item, as seen from another item, whose heads begin
// with `first_head`.
void TwinAttention::SetFirstTile(const Item& item, std::size_t first_head,
                                 const Call& call, AttentionTile& tile) const {
  const RowGroup& group = plan_.groups()[item.group];
  tile.cells = 0;
  plan_.ForEachTile(group, item.part, item.parts, StreamsOf(group, call), 1,
                    [&](std::span<std::int64_t> cells) {
                      SetCells(group, cells, call, tile);
                    });
  const auto heads = static_cast<std::ptrdiff_t>(item.first_head) -
                     static_cast<std::ptrdiff_t>(first_head);
  for (std::size_t t = 0; heads != 0 && t < tile.cells; ++t) {
    tile.keys.rows[t] += heads * tile.keys.head_stride;
    tile.values.rows[t] += heads * tile.values.head_stride;
  }
}

// Adds `from`, results over other cells of the same queries, to `to`.
void TwinAttention::Merge(const State& from, std::size_t queries,
                          std::size_t v_padded, const State& to) {
  for (std::size_t q = 0; q < queries; ++q) {
    const float largest = std::max(from.largest[q], to.largest[q]);
    if (largest == -kInfinity) continue;
    const float from_factor = std::exp2(from.largest[q] - largest);
    const float to_factor = std::exp2(to.largest[q] - largest);
    to.largest[q] = largest;
    to.sum[q] = to.sum[q] * to_factor + from.sum[q] * from_factor;
    for (std::size_t i = q * v_padded; i < (q + 1) * v_padded; ++i) {
      to.out[i] = to.out[i] * to_factor + from.out[i] * from_factor;
    }
  }
}

// Adds the sinks, divides by the sums, and writes the results.
void TwinAttention::Finish(const Item& item, const Call& call,
                           const State& state) const {
  const RowGroup& group = plan_.groups()[item.group];
  const std::size_t per_row = call.queries_per_head();
  const std::size_t v_head_dim = call.values.tile.head_dim;
  const AttentionOptions& options = call.options;
  for (std::size_t q = 0; q < item.heads * group.rows * per_row; ++q) {
    const std::size_t kv_head = item.first_head + q / (group.rows * per_row);
    const std::size_t row = group.first_row + q / per_row % group.rows;
    const std::size_t head = kv_head * per_row + q % per_row;
    const std::size_t result = row * call.heads() + head;
    const float sink =
        options.sinks.empty() ? -kInfinity : options.sinks[head] * kLog2E;
    const float largest = std::max(state.largest[q], sink);
    const bool empty = largest == -kInfinity;
    const float seen = empty ? 0 : std::exp2(state.largest[q] - largest);
    const float sum =
        empty ? 0 : state.sum[q] * seen + std::exp2(sink - largest);
    const float factor =
        sum == 0 ? 0 : seen / sum * RowUnit(call.values.tile.dtype);
    StoreScaled(state.out + q * call.v_padded(), factor, v_head_dim,
                call.out.out + result * v_head_dim);
    if (call.out.log_sum_exp == nullptr) continue;
    call.out.log_sum_exp[result] =
        sum == 0 ? -kInfinity
                 : static_cast<float>((largest + std::log2(double{sum})) *
                                      std::numbers::ln2);
  }
}

// Bytes of K and V that a call reads, and of the work that it does on them:
// whether threads are worth their start.
std::size_t TwinAttention::WorkBytes(const Call& call) const {
  std::size_t cells = 0;
  for (const RowGroup& group : plan_.groups()) {
    cells += group.cells * group.rows;
  }
  return cells * call.heads() * (call.k_padded() + call.v_padded());
}

void TwinAttention::Run(const Call& call) {
  ListItems(call);
  std::size_t most = 0;  // Queries of an item.
  std::size_t scratch = 0;
  const std::size_t k = call.keys.tile.head_dim;
  const std::size_t v = call.values.tile.head_dim;
  for (const Item& item : items_) {
    const RowGroup& group = plan_.groups()[item.group];
    const std::size_t per_head = group.rows * call.queries_per_head();
    most = std::max(most, item.heads * per_head);
    const std::size_t kernel = IsFew(group, call) ? FewScratch(k, v, item.heads)
                               : MultiplierOf(group, call)
                                   ? ManyBf16Scratch(k, v, call.terms())
                                   : ManyScratch(k, v);
    scratch = std::max(scratch, item.heads * QueryFloats(group, call) +
                                    HeadFloats(item.heads) + kernel);
  }
  const std::size_t own = scratch + StateFloats(most, call.v_padded());
  const std::size_t bytes = WorkBytes(call);
  const std::size_t workers = ShareCount(bytes);
  const std::size_t floats = own * workers + states_;
  if (memory_.bytes() < floats * sizeof(float)) {
    memory_ = AlignedBuffer(floats * sizeof(float));
  }
  auto* memory = memory_.as<float>();
  const auto state_of = [&](const Item& item, std::size_t worker) {
    const std::size_t queries =
        item.heads * plan_.groups()[item.group].rows * call.queries_per_head();
    float* at = item.parts == 1 ? memory + worker * own + scratch
                                : memory + workers * own + item.state;
    return StateAt(at, queries, call.v_padded());
  };
  ParallelForUneven(
      items_.size(), bytes, [&](std::size_t i, std::size_t worker) {
        const Item& item = items_[i];
        const Item* next =
            i + workers < items_.size() ? &items_[i + workers] : nullptr;
        const State state = state_of(item, worker);
        Compute(item, next, call, memory + worker * own, state);
        if (item.parts == 1) Finish(item, call, state);
      });
  ParallelFor(items_.size(), bytes, [&](std::size_t i) {
    const Item& item = items_[i];
    if (item.parts == 1 || item.part != 0) return;
    const State state = state_of(item, 0);
    const std::size_t queries =
        item.heads * plan_.groups()[item.group].rows * call.queries_per_head();
    for (std::size_t part = 1; part < item.parts; ++part) {
      Merge(state_of(items_[i + part], 0), queries, call.v_padded(), state);
    }
    Finish(item, call, state);
  });
}

}  // namespace

std::unique_ptr<Attention> MakeAttention() {
  (void)UseTargetFromEnvironment();
  (void)UseFastPathsFromEnvironment();
  return std::make_unique<TwinAttention>();
}

}  // namespace kvtwin::optimized
