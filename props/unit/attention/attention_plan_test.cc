// Compares plans of attention with what masks and tables say.

#include "optimized/attention_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "props/base/pick.h"
#include "props/history/generate.h"

namespace kvtwin::props {
namespace {

using optimized::AttentionPlan;
using optimized::kAttentionTile;
using optimized::kMostGroupRows;
using optimized::RowGroup;

using Cells = std::set<std::int64_t>;

// The cells that rows of a mask, or of one sequence, see.
using SeenBy = std::vector<Cells>;

Cells Joined(std::span<const Cells> rows) {
  Cells joined;
  for (const Cells& row : rows) joined.insert(row.begin(), row.end());
  return joined;
}

// Expects that a full tile has the next cells of each of four streams, which
// are the quarters of the cells of full tiles; and that a walk over one tile
// has the first tile.
void ExpectStreams(const AttentionPlan& plan, const RowGroup& group,
                   std::span<const std::int64_t> expected) {
  using Tile = std::vector<std::int64_t>;
  for (const std::size_t parts : {1U, 3U}) {
    for (std::size_t part = 0; part < parts; ++part) {
      const auto tiles_of = [&](std::size_t most) {
        std::vector<Tile> tiles;
        plan.ForEachTile(group, part, parts, 4, most,
                         [&](std::span<std::int64_t> tile) {
                           tiles.emplace_back(tile.begin(), tile.end());
                         });
        return tiles;
      };
      const std::size_t begin = group.tiles() * part / parts * 64;
      const std::size_t end =
          std::min(group.tiles() * (part + 1) / parts * 64, expected.size());
      const auto cells = expected.subspan(begin, end - begin);
      std::vector<Tile> streams;
      const std::size_t full = cells.size() / 64;
      for (std::size_t i = 0; i < full; ++i) {
        Tile tile;
        for (std::size_t stream = 0; stream < 4; ++stream) {
          const auto run = cells.subspan((stream * full + i) * 16, 16);
          tile.insert(tile.end(), run.begin(), run.end());
        }
        streams.push_back(tile);
      }
      const auto rest = cells.subspan(full * 64);
      if (!rest.empty()) streams.emplace_back(rest.begin(), rest.end());
      ASSERT_EQ(tiles_of(group.tiles()), streams) << part << " of " << parts;
      if (streams.empty()) continue;
      ASSERT_EQ(tiles_of(1), std::vector<Tile>{streams[0]});
    }
  }
}

// Expects that the tiles of a group, in any number of parts, are the cells that
// its rows see, in order, and that each row sees what it should of each tile.
void ExpectTiles(const AttentionPlan& plan, const RowGroup& group,
                 std::span<const Cells> rows) {
  const Cells expected = Joined(rows);
  ASSERT_EQ(group.rows, rows.size());
  ASSERT_EQ(group.cells, expected.size());
  EXPECT_EQ(group.tiles(), (expected.size() + 63) / 64);
  for (const std::size_t parts : {1U, 2U, 3U, 64U}) {
    std::vector<std::int64_t> cells;
    for (std::size_t part = 0; part < parts; ++part) {
      ASSERT_EQ(cells.size(),
                std::min(group.tiles() * part / parts * 64, expected.size()));
      plan.ForEachTile(group, part, parts, 1, group.tiles(),
                       [&](std::span<std::int64_t> tile) {
                         std::array<std::uint64_t, kMostGroupRows> visible;
                         plan.SetVisible(group, tile, visible);
                         for (std::size_t row = 0; row < rows.size(); ++row) {
                           for (std::size_t t = 0; t < tile.size(); ++t) {
                             ASSERT_EQ(At(visible, row) >> t & 1,
                                       rows[row].count(tile[t]));
                           }
                         }
                         cells.insert(cells.end(), tile.begin(), tile.end());
                         const bool last = cells.size() == expected.size();
                         ASSERT_TRUE(tile.size() == kAttentionTile || last);
                       });
    }
    ASSERT_TRUE(std::ranges::equal(cells, expected)) << parts << " parts";
  }
  ExpectStreams(plan, group, std::vector(expected.begin(), expected.end()));
}

// Expects that the order of groups has each group once, the longest first.
void ExpectOrder(const AttentionPlan& plan) {
  const std::vector<std::size_t>& order = plan.longest_first();
  ASSERT_EQ(std::set(order.begin(), order.end()).size(), plan.groups().size());
  EXPECT_TRUE(std::ranges::is_sorted(
      order, std::ranges::greater(),
      [&](std::size_t g) { return plan.groups().at(g).cells; }));
}

// Rows that are much alike, or not.
SeenBy DrawRows(const Pick& pick, int columns, int count) {
  SeenBy rows;
  Cells seen;
  for (int row = 0; row < count; ++row) {
    const int change = pick(0, 9);
    if (row == 0 || change == 0) {
      seen.clear();
      const int begin = pick(0, columns);
      const int end = pick(begin, columns);
      for (int cell = begin; cell < end; ++cell) seen.insert(cell);
    }
    const int flips = change < 5 ? 1 : pick(0, columns);
    for (int i = 0; i < flips && change != 9; ++i) {
      const int cell = pick(0, columns - 1);
      if (seen.erase(cell) == 0) seen.insert(cell);
    }
    rows.push_back(seen);
  }
  return rows;
}

// The cells that rows read as one group, and those that they see.
struct Reading {
  std::size_t reads;
  std::size_t sees;
};

Reading ReadingOf(std::span<const Cells> rows) {
  Reading reading = {.reads = Joined(rows).size() * rows.size(), .sees = 0};
  for (const Cells& row : rows) reading.sees += row.size();
  return reading;
}

TEST(AttentionPlan, GroupsTheRowsOfAMask) {
  AttentionPlan plan;
  for (std::size_t number = 0; number < 300; ++number) {
    const Pick pick = SeededPick(7, number);
    const int columns = OneOf(pick, {1, 63, 64, 65, 128, 129, pick(1, 200)});
    const int count = Chance(pick, 20) ? pick(60, 140) : pick(1, 20);
    SeenBy rows = DrawRows(pick, columns, count);
    const DType dtype =
        OneOf(pick, {DType::kF32, DType::kF16, DType::kBF16, DType::kBits});
    const int first_row = pick(0, 2);
    DenseTensor mask = HidingMask(dtype, columns, first_row + count);
    for (int row = 0; row < count; ++row) {
      for (const std::int64_t cell : rows[AsSize(row)]) {
        AllowInMask(mask, cell, first_row + row);
      }
    }
    // Bits past the columns do not count, if they are set.
    if (dtype == DType::kBits && columns % 8 != 0) {
      const std::int64_t bytes = mask.view().stride[1];
      for (std::int64_t at = columns / 8; at < std::ssize(mask.bytes);
           at += bytes) {
        mask.bytes[AsSize(at)] |= std::byte(0xff << columns % 8);
      }
    }
    const std::size_t most_rows = OneOf(pick, {7U, 128U});
    TensorView view = mask.view();
    if (Chance(pick, 20)) {  // One row for all.
      view.data = view.at(0, first_row);
      view.stride[1] = 0;
      rows.assign(rows.size(), Cells(rows[0]));
    }
    plan.Make(view, count, first_row, most_rows);
    ExpectOrder(plan);
    std::size_t row = 0;
    for (const RowGroup& group : plan.groups()) {
      ASSERT_EQ(group.first_row, row);
      ASSERT_LE(group.rows, most_rows);
      const std::span all(rows);
      ExpectTiles(plan, group, all.subspan(row, group.rows));
      // A group reads at most half as many cells again as its rows see. The
      // row after it does not fit.
      for (std::size_t i = 1; i <= group.rows; ++i) {
        const Reading reading = ReadingOf(all.subspan(row, i));
        ASSERT_LE(2 * reading.reads, 3 * reading.sees);
      }
      row += group.rows;
      if (row == rows.size() || group.rows == most_rows) continue;
      const Reading more =
          ReadingOf(all.subspan(group.first_row, group.rows + 1));
      ASSERT_GT(2 * more.reads, 3 * more.sees);
    }
    ASSERT_EQ(row, rows.size());
    ASSERT_EQ(plan.BlocksOf(plan.groups()[0]), nullptr);
  }
}

TEST(AttentionPlan, GroupsTheRowsOfATable) {
  AttentionPlan plan;
  for (std::size_t number = 0; number < 300; ++number) {
    const Pick pick = SeededPick(8, number);
    const int sequences = pick(1, 4);
    std::vector<std::int32_t> lengths;
    std::vector<std::int32_t> query_rows;
    std::vector<std::int32_t> blocks;
    const bool sees_all = Chance(pick, 30);
    for (int i = 0; i < sequences; ++i) {
      lengths.push_back(OneOf(pick, {0, 64, 65, 129, pick(1, 200)}));
      query_rows.push_back(pick(0, sees_all ? 200 : lengths.back()));
      for (int column = 0; column < 3; ++column) {
        blocks.push_back(3 * i + column);
      }
    }
    const int window = sees_all || Chance(pick, 50) ? kOpenEnd : pick(0, 100);
    const std::size_t most_rows = OneOf(pick, {64U, 128U});
    plan.Make(AttentionTable{.blocks = blocks,
                             .columns = 3,
                             .lengths = lengths,
                             .query_rows = query_rows,
                             .block_size = 100,
                             .window = window,
                             .sees_all = sees_all},
              most_rows);
    std::size_t row = 0;
    ExpectOrder(plan);
    auto group = plan.groups().begin();
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      SeenBy rows;
      for (int position = lengths[i] - query_rows[i]; position < lengths[i];
           ++position) {
        Cells& cells = rows.emplace_back();
        for (int cell = 0; cell < lengths[i]; ++cell) {
          const bool sees = cell <= position && position - cell <= window;
          if (sees || sees_all) cells.insert(cell);
        }
      }
      for (std::size_t first = 0; first < rows.size(); first += most_rows) {
        ASSERT_NE(group, plan.groups().end());
        EXPECT_EQ(group->first_row, row + first);
        EXPECT_EQ(plan.BlocksOf(*group)[1], 3 * AsInt(i) + 1);
        ExpectTiles(plan, *group,
                    std::span(rows).subspan(
                        first, std::min(most_rows, rows.size() - first)));
        ++group;
      }
      row += rows.size();
    }
    EXPECT_EQ(group, plan.groups().end());
  }
}

}  // namespace
}  // namespace kvtwin::props
