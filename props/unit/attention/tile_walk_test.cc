#include "optimized/tile_walk.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "optimized/attention_kernels.h"
#include "optimized/fast_paths.h"

namespace kvtwin::props::attention {
namespace {

using optimized::AttentionTile;
using optimized::CellsRows;
using optimized::QueryHeads;
using optimized::TileRows;

// Walks over keys, of which values are ahead. Expects that each step fetches
// the rows after those of the step before, and none past the padding of a tile.
template <std::size_t kCells>
void ExpectOrder(std::size_t cells, std::size_t ahead, std::size_t head_count) {
  AttentionTile tile = {.cells = cells, .keys = {}, .values = {}, .next = {}};
  for (TileRows* rows : {&tile.keys, &tile.values}) {
    rows->dtype = DType::kF16;
    rows->adjacent = true;
    rows->head_dim = 64;
    rows->head_stride = 128;
  }
  std::vector<QueryHeads> heads(head_count);
  for (std::size_t h = 0; h < head_count; ++h) heads[h].kv_head = h;
  AttentionTile values = tile;
  values.cells = ahead;
  optimized::NearFetches<kCells> fetches(tile.keys, cells,
                                         {&values, &AttentionTile::values},
                                         heads.data(), head_count);
  std::vector<std::pair<std::size_t, std::size_t>> fetched;  // Cell and head.
  bool of_values = false;
  for (std::size_t t = 0; t < cells; t += kCells) {
    for (std::size_t h = 0; h < head_count; ++h) {
      const CellsRows* rows = fetches.Step();
      if (rows == nullptr) continue;
      const auto in = [&](const TileRows& of) {
        return rows->rows >= of.rows.data() &&
               rows->rows < of.rows.data() + of.rows.size();
      };
      ASSERT_NE(in(tile.keys), in(values.values));
      // After the last keys, the values come from the first on.
      const bool turns = in(values.values) && !std::exchange(of_values, true);
      const bool begins = turns && !fetched.empty();
      if (turns) fetched.clear();
      const TileRows& of = of_values ? values.values : tile.keys;
      const auto cell = static_cast<std::size_t>(rows->rows - of.rows.data());
      ASSERT_LT(cell, of_values ? ahead : cells);
      ASSERT_EQ(cell % kCells, 0U);
      const std::size_t head = static_cast<std::size_t>(rows->offset) / 128;
      if (begins) {
        ASSERT_EQ(cell, 0U);
        ASSERT_EQ(head, 0U);
      }
      if (!fetched.empty()) {
        const auto [cell_before, head_before] = fetched.back();
        ASSERT_EQ(cell * head_count + head * kCells,
                  cell_before * head_count + (head_before + 1) * kCells);
      }
      fetched.emplace_back(cell, head);
    }
  }
  // A whole tile is long enough to fetch something.
  EXPECT_TRUE(!fetched.empty() || cells < 64 || ahead < 64);
}

TEST(NearFetches, AreTheRowsOfLaterSteps) {
  optimized::ForceFastPaths(optimized::FastPaths::kOn);
  for (const std::size_t cells :
       {1U, 3U, 4U, 7U, 8U, 50U, 60U, 61U, 62U, 63U, 64U}) {
    for (const std::size_t ahead : {1U, 4U, 16U, 61U, 63U, 64U}) {
      for (const std::size_t heads : {1U, 2U, 3U, 8U}) {
        SCOPED_TRACE(::testing::Message() << cells << " cells, " << ahead
                                          << " ahead, " << heads << " heads");
        ExpectOrder<4>(cells, ahead, heads);
        ExpectOrder<8>(cells, ahead, heads);
        if (::testing::Test::HasFailure()) break;
      }
    }
  }
  optimized::ForceFastPaths(optimized::FastPaths::kAuto);
}

}  // namespace
}  // namespace kvtwin::props::attention
