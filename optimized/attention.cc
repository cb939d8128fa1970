// Attention of the optimized twin: plans which cells each group of rows reads,
// and gives tiles of these cells to the kernels.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numbers>
#include <span>
#include <utility>
#include <vector>

#include "core/elements.h"
#include "core/guarded_attention.h"
#include "core/index.h"
#include "core/twin.h"
#include "optimized/aligned_buffer.h"
#include "optimized/attention_kernels.h"
#include "optimized/fast_paths.h"
#include "optimized/parallel.h"
#include "optimized/targets.h"

namespace kvtwin::optimized {
namespace {

constexpr std::size_t kTile = kAttentionTile;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr auto kLog2E = std::numbers::log2e_v<float>;

// Rows of a group: their queries of one KV head are computed together.
constexpr std::size_t kGroupRows = 64;
// Cells that the rows of a group read without seeing them, at most, for each
// cell that they see: in eighths.
constexpr std::size_t kUnseenEighths = 4;
// Without a number of splits: work is split into at least this many items, of
// at least so many tiles each.
constexpr std::size_t kItems = 16;
constexpr std::size_t kItemTiles = 8;

// The size of a block that has all cells.
constexpr std::int64_t kAllCells = std::numeric_limits<std::int64_t>::max();

struct Run {
  std::int64_t begin;
  std::int64_t end;
};

// Rows that follow each other and see nearly the same cells.
struct Group {
  std::size_t first_row = 0;
  std::size_t rows = 0;
  std::size_t cells = 0;  // That at least one row sees: the runs.
  std::size_t first_run = 0;
  std::size_t sequence = 0;         // Which sequence of a table it is.
  std::int64_t first_position = 0;  // The first row has it, in a table.

  std::size_t tiles() const { return (cells + kTile - 1) / kTile; }
};

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

// The bits of a word from `begin` to `end`, at most 64 of them.
std::uint64_t BitsBetween(std::int64_t begin, std::int64_t end) {
  begin = std::clamp<std::int64_t>(begin, 0, 64);
  end = std::clamp<std::int64_t>(end, 0, 64);
  if (begin >= end) return 0;
  const std::uint64_t ones = ~std::uint64_t{0};
  return (ones >> (64 - (end - begin))) << begin;
}

// Orders the cells of a tile so that four cells that follow each other are the
// next ones of four streams, which the processor reads faster than one. Few
// rows see all cells of a tile, in any order.
void ReadInFourStreams(std::span<std::int64_t> cells) {
  if (cells.size() != kTile) return;
  std::array<std::int64_t, kTile> in_order;
  std::ranges::copy(cells, in_order.begin());
  for (std::size_t i = 0; i < kTile; ++i) {
    cells[i] = At(in_order, i % 4 * (kTile / 4) + i / 4);
  }
}

class TwinAttention final : public GuardedAttention {
 protected:
  void DoPlan(const TensorView& mask, int rows, int first_row) override;
  void DoPlan(const AttentionTable& table) override;
  void DoAttend(const TensorView& query, const KvView& view, VLayout v_layout,
                const AttentionOptions& options,
                const AttentionOut& out) override {
    Attend({.query = query,
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
    Attend({.query = query,
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

    std::size_t heads() const { return AsSize(query.shape[1]); }
    std::size_t queries_per_head() const { return heads() / kv_heads; }
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

  void ReadMask(const TensorView& mask, int rows, int first_row);
  void GroupRows(std::size_t rows);
  void AddRuns(Group& group, const std::vector<std::uint64_t>& seen);
  void Attend(const Call& call);
  void ListItems(const Call& call);
  bool IsFew(const Group& group, const Call& call) const {
    return group.rows == 1 && call.queries_per_head() <= kFewQueries;
  }
  void Compute(const Item& item, const Call& call, float* scratch,
               const State& state) const;
  // Calls does(cells) with the cells of each tile of an item.
  template <class Does>
  void ForEachTile(const Item& item, const Does& does) const;
  std::size_t WorkBytes(const Call& call) const;
  void LoadQueries(const Group& group, std::size_t kv_head, const Call& call,
                   float* to) const;
  void SetCells(const Group& group, std::span<const std::int64_t> cells,
                const Call& call, AttentionTile& tile) const;
  void SetVisible(const Group& group, std::span<const std::int64_t> cells,
                  std::span<std::uint64_t> visible) const;
  static void Merge(const State& from, std::size_t queries,
                    std::size_t v_padded, const State& to);
  void Finish(const Item& item, const Call& call, const State& state) const;

  std::vector<Group> groups_;
  std::vector<Run> runs_;
  std::vector<std::uint64_t> bits_;  // [words_, rows] of a mask.
  std::size_t words_ = 0;
  std::vector<std::int32_t> blocks_;  // [columns_, sequences] of a table.
  std::size_t columns_ = 0;
  std::int64_t window_ = 0;

  std::vector<Item> items_;
  std::size_t states_ = 0;  // Floats of the states of items of several parts.
  AlignedBuffer memory_;
};

template <class T>
void ReadMaskRow(const TensorView& mask, std::int64_t row,
                 std::uint64_t* bits) {
  const std::byte* from = mask.at(0, row);
  for (std::int64_t begin = 0; begin < mask.shape[0]; begin += 64) {
    const std::int64_t count =
        std::min<std::int64_t>(64, mask.shape[0] - begin);
    std::uint64_t word = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      T element;
      std::memcpy(&element, from + (begin + i) * AsInt(sizeof(T)), sizeof(T));
      word |= std::uint64_t{element == 0} << i;
    }
    bits[begin / 64] = word;
  }
}

std::size_t Population(const std::vector<std::uint64_t>& words) {
  std::size_t count = 0;
  for (const std::uint64_t word : words) count += AsSize(std::popcount(word));
  return count;
}

void TwinAttention::AddRuns(Group& group,
                            const std::vector<std::uint64_t>& seen) {
  group.first_run = runs_.size();
  group.cells = Population(seen);
  std::int64_t end = -1;  // The last run ends there.
  for (std::size_t w = 0; w < seen.size(); ++w) {
    const auto base = static_cast<std::int64_t>(w * 64);
    for (std::uint64_t word = seen[w]; word != 0;) {
      const int begin = std::countr_zero(word);
      const int length = std::countr_one(word >> begin);
      if (base + begin == end) {
        runs_.back().end += length;
      } else {
        runs_.push_back({base + begin, base + begin + length});
      }
      end = base + begin + length;
      word &= ~BitsBetween(begin, begin + length);
    }
  }
}

void TwinAttention::DoPlan(const TensorView& mask, int rows, int first_row) {
  groups_.clear();
  runs_.clear();
  blocks_.clear();
  ReadMask(mask, rows, first_row);
  GroupRows(AsSize(rows));
}

void TwinAttention::ReadMask(const TensorView& mask, int rows, int first_row) {
  words_ = AsSize((mask.shape[0] + 63) / 64);
  bits_.assign(words_ * AsSize(rows), 0);
  for (int row = 0; row < rows; ++row) {
    std::uint64_t* bits = bits_.data() + AsSize(row) * words_;
    if (mask.dtype == DType::kBits) {
      std::memcpy(bits, mask.at(0, first_row + row), words_ * 8);
      // Bits past the columns are 0 in a valid mask.
      const auto last = static_cast<std::int64_t>(words_ - 1) * 64;
      bits[words_ - 1] &= BitsBetween(0, mask.shape[0] - last);
    } else if (mask.dtype == DType::kF32) {
      ReadMaskRow<std::uint32_t>(mask, first_row + row, bits);
    } else {
      ReadMaskRow<std::uint16_t>(mask, first_row + row, bits);
    }
  }
}

// A row joins the group before it if the group then reads few cells for rows
// that do not see them.
void TwinAttention::GroupRows(std::size_t rows) {
  std::vector<std::uint64_t> seen(words_);
  std::vector<std::uint64_t> joined(words_);
  std::size_t seen_sum = 0;  // Cells that the rows see, row by row.
  Group group;
  for (std::size_t row = 0; row < rows; ++row) {
    std::size_t sees = 0;
    for (std::size_t w = 0; w < words_; ++w) {
      const std::uint64_t word = bits_[row * words_ + w];
      joined[w] = seen[w] | word;
      sees += AsSize(std::popcount(word));
    }
    const std::size_t reads = Population(joined) * (group.rows + 1);
    const bool joins = group.rows > 0 && group.rows < kGroupRows &&
                       8 * reads <= (8 + kUnseenEighths) * (seen_sum + sees);
    if (!joins && group.rows > 0) {
      AddRuns(group, seen);
      groups_.push_back(group);
      group = {.first_row = row};
      seen_sum = 0;
      std::copy_n(bits_.data() + row * words_, words_, joined.data());
    }
    ++group.rows;
    seen_sum += sees;
    std::swap(seen, joined);
  }
  AddRuns(group, seen);
  groups_.push_back(group);
}

void TwinAttention::DoPlan(const AttentionTable& table) {
  groups_.clear();
  runs_.clear();
  bits_.clear();
  blocks_.assign(table.blocks.begin(), table.blocks.end());
  columns_ = AsSize(table.columns);
  window_ = table.window;
  std::size_t row = 0;
  for (std::size_t i = 0; i < table.lengths.size(); ++i) {
    const std::int64_t length = table.lengths[i];
    const std::int64_t rows = table.query_rows[i];
    for (std::int64_t first = 0; first < rows; first += kGroupRows) {
      Group group = {.first_row = row, .sequence = i};
      const std::int64_t count =
          std::min(std::int64_t{kGroupRows}, rows - first);
      group.rows = AsSize(count);
      group.first_position = length - rows + first;
      group.first_run = runs_.size();
      const Run run = {
          .begin = std::max<std::int64_t>(0, group.first_position - window_),
          .end = group.first_position + count};
      group.cells = AsSize(run.end - run.begin);
      runs_.push_back(run);
      groups_.push_back(group);
      row += group.rows;
    }
  }
}

void TwinAttention::ListItems(const Call& call) {
  items_.clear();
  std::size_t base = 0;
  for (const Group& group : groups_) {
    base += IsFew(group, call) ? 1 : call.kv_heads;
  }
  const std::size_t wanted = (kItems + base - 1) / base;
  states_ = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
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

void TwinAttention::LoadQueries(const Group& group, std::size_t kv_head,
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

void TwinAttention::SetCells(const Group& group,
                             std::span<const std::int64_t> cells,
                             const Call& call, AttentionTile& tile) const {
  tile.cells = cells.size();
  const auto set = [&](const CellRows& rows, TileRows& out) {
    const std::int32_t* blocks =
        blocks_.empty() ? nullptr : blocks_.data() + group.sequence * columns_;
    std::int64_t begin = 0;  // The first cell of a block.
    std::int64_t end = 0;
    const std::byte* block = nullptr;
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const std::int64_t cell = cells[i];
      if (cell < begin || cell >= end) {
        const std::int64_t column = cell / rows.size;
        begin = column * rows.size;
        end = begin + rows.size;
        block = rows.At(blocks == nullptr ? column : blocks[column], 0);
      }
      out.rows[i] = block + (cell - begin) * rows.cell_stride;
    }
    for (std::size_t i = cells.size(); i % 4 != 0; ++i) {
      out.rows[i] = out.rows[i - 1];
    }
  };
  set(call.keys, tile.keys);
  set(call.values, tile.values);
}

void TwinAttention::SetVisible(const Group& group,
                               std::span<const std::int64_t> cells,
                               std::span<std::uint64_t> visible) const {
  const std::int64_t first = cells.front();
  const auto count = static_cast<std::int64_t>(cells.size());
  const bool adjacent = cells.back() - first + 1 == count;
  for (std::size_t i = 0; i < group.rows; ++i) {
    if (!blocks_.empty()) {
      const std::int64_t position =
          group.first_position + static_cast<std::int64_t>(i);
      visible[i] =
          BitsBetween(position - window_ - first, position + 1 - first);
      continue;
    }
    const std::uint64_t* bits = bits_.data() + (group.first_row + i) * words_;
    std::uint64_t word = 0;
    if (adjacent) {
      const std::size_t w = AsSize(first / 64);
      const int shift = AsInt(first % 64);
      word = bits[w] >> shift;
      if (shift != 0 && w + 1 < words_) word |= bits[w + 1] << (64 - shift);
    } else {
      for (std::size_t t = 0; t < cells.size(); ++t) {
        const std::size_t cell = AsSize(cells[t]);
        word |= (bits[cell / 64] >> (cell % 64) & 1) << t;
      }
    }
    visible[i] = word;
  }
}

void TwinAttention::Compute(const Item& item, const Call& call, float* scratch,
                            const State& state) const {
  const Group& group = groups_[item.group];
  const std::size_t queries = item.heads * group.rows * call.queries_per_head();
  std::fill_n(state.out, queries * call.v_padded(), 0.0f);
  std::fill_n(state.largest, queries, -kInfinity);
  std::fill_n(state.sum, queries, 0.0f);
  const std::size_t per_head = queries / item.heads;
  float* query = scratch;
  auto* heads =
      reinterpret_cast<QueryHeads*>(query + queries * call.k_padded());
  for (std::size_t h = 0; h < item.heads; ++h) {
    const std::size_t before = h * per_head;
    LoadQueries(group, item.first_head + h, call,
                query + before * call.k_padded());
    heads[h] = {.kv_head = item.first_head + h,
                .count = per_head,
                .queries = query + before * call.k_padded(),
                .out = state.out + before * call.v_padded(),
                .largest = state.largest + before,
                .sum = state.sum + before};
  }
  auto* rest = reinterpret_cast<float*>(heads) + HeadFloats(item.heads);
  const ScoreScale scale = {.cap = call.options.soft_cap * kLog2E};
  struct Step {
    AttentionTile tile;
    std::array<std::uint64_t, kGroupRows> visible;
  };
  std::array<Step, 2> steps;
  for (Step& step : steps) {
    step.tile = {.cells = 0,
                 .keys = call.keys.tile,
                 .values = call.values.tile,
                 .next = nullptr};
  }
  const auto attend = [&](const Step& step) {
    if (IsFew(group, call)) {
      AttendFew(step.tile, heads, item.heads, scale, rest);
    } else {
      AttendMany(step.tile, heads[0], step.visible.data(),
                 call.queries_per_head(), scale, rest);
    }
  };
  // A tile is computed when the tile after it is known, which is fetched
  // meanwhile.
  std::size_t count = 0;
  ForEachTile(item, [&](std::span<std::int64_t> cells) {
    Step& step = steps[count % 2];
    if (IsFew(group, call)) {
      ReadInFourStreams(cells);
    } else {
      SetVisible(group, cells, step.visible);
    }
    SetCells(group, cells, call, step.tile);
    Step& before = steps[(count + 1) % 2];
    before.tile.next = &step.tile;
    if (count > 0) attend(before);
    ++count;
  });
  if (count == 0) return;
  Step& last = steps[(count + 1) % 2];
  last.tile.next = nullptr;
  attend(last);
}

template <class Does>
void TwinAttention::ForEachTile(const Item& item, const Does& does) const {
  const Group& group = groups_[item.group];
  std::size_t skip = group.tiles() * item.part / item.parts * kTile;
  const std::size_t end = std::min(
      group.tiles() * (item.part + 1) / item.parts * kTile, group.cells);
  std::size_t left = end - std::min(skip, end);
  std::array<std::int64_t, kTile> cells;
  std::size_t count = 0;
  for (std::size_t r = group.first_run; left > 0; ++r) {
    const std::size_t length = AsSize(runs_[r].end - runs_[r].begin);
    const std::size_t skipped = std::min(skip, length);
    skip -= skipped;
    std::int64_t cell = runs_[r].begin + static_cast<std::int64_t>(skipped);
    for (; cell < runs_[r].end && left > 0; ++cell) {
      At(cells, count++) = cell;
      --left;
      if (count < kTile && left > 0) continue;
      does(std::span(cells).first(count));
      count = 0;
    }
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
  const Group& group = groups_[item.group];
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
    const float* from = state.out + q * call.v_padded();
    float* to = call.out.out + result * v_head_dim;
    for (std::size_t i = 0; i < v_head_dim; ++i) to[i] = from[i] * factor;
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
  for (const Group& group : groups_) cells += group.cells * group.rows;
  return cells * call.heads() * (call.k_padded() + call.v_padded());
}

void TwinAttention::Attend(const Call& call) {
  ListItems(call);
  std::size_t most = 0;  // Queries of an item.
  std::size_t scratch = 0;
  const std::size_t k = call.keys.tile.head_dim;
  const std::size_t v = call.values.tile.head_dim;
  for (const Item& item : items_) {
    const Group& group = groups_[item.group];
    const std::size_t per_head = group.rows * call.queries_per_head();
    most = std::max(most, item.heads * per_head);
    scratch = std::max(scratch,
                       item.heads * per_head * call.k_padded() +
                           HeadFloats(item.heads) +
                           (IsFew(group, call) ? FewScratch(k, v, item.heads)
                                               : ManyScratch(k, v, per_head)));
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
        item.heads * groups_[item.group].rows * call.queries_per_head();
    float* at = item.parts == 1 ? memory + worker * own + scratch
                                : memory + workers * own + item.state;
    return StateAt(at, queries, call.v_padded());
  };
  ParallelForUneven(items_.size(), bytes,
                    [&](std::size_t i, std::size_t worker) {
                      const Item& item = items_[i];
                      const State state = state_of(item, worker);
                      Compute(item, call, memory + worker * own, state);
                      if (item.parts == 1) Finish(item, call, state);
                    });
  ParallelFor(items_.size(), bytes, [&](std::size_t i) {
    const Item& item = items_[i];
    if (item.parts == 1 || item.part != 0) return;
    const State state = state_of(item, 0);
    const std::size_t queries =
        item.heads * groups_[item.group].rows * call.queries_per_head();
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
