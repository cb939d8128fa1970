// Moves of rows and copies of blocks by CUDA kernels; see cuda_rows_test.cc.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "core/index.h"
#include "core/names.h"
#include "optimized/cuda/rows.h"
#include "props/cuda/cuda_rows.h"

namespace kvtwin::optimized::cuda {
namespace {

// Moves of distinct cells to distinct cells: chains, cycles, cells that stay.
std::vector<CellMove> SomeMoves(Random& random, int cells) {
  const int count = random.Pick(cells + 1);
  const std::vector<int> from = random.Cells(count, cells);
  std::vector<int> to = random.Cells(count, cells);
  if (random.Pick(2) == 0) {  // The same cells.
    to = from;
    if (random.Pick(2) == 0) {
      std::shuffle(to.begin(), to.end(), random.engine());
    } else if (!to.empty()) {
      std::rotate(to.begin(), to.begin() + 1, to.end());
    }
  }
  std::vector<CellMove> moves;
  for (std::size_t i = 0; i < from.size(); ++i) {
    moves.push_back({AsSize(from[i]), AsSize(to[i])});
  }
  return moves;
}

TEST(CudaMoves, AreOrderedInChains) {
  for (std::uint32_t seed = 0; seed < 2000; ++seed) {
    Random random(seed);
    const int cells = random.Pick(20) + 1;
    const std::vector<CellMove> moves = SomeMoves(random, cells);
    std::vector<int> expected(AsSize(cells));
    std::iota(expected.begin(), expected.end(), 0);
    std::vector<int> actual = expected;
    for (const auto& [from, to] : moves) expected[to] = AsInt(from);
    MoveChains chains;
    chains.cells = {1, 2, 3};  // Left over from another call.
    OrderMoves(moves, chains);
    std::vector<int> seen(AsSize(cells));
    for (const int cell : chains.cells) {
      EXPECT_EQ(++At(seen, cell), 1) << seed;
    }
    ASSERT_EQ(chains.begins.size(), chains.cycles.size() + 1);
    ASSERT_EQ(chains.begins.front(), 0);
    ASSERT_EQ(chains.begins.back(), std::ssize(chains.cells));
    for (std::size_t c = 0; c < chains.cycles.size(); ++c) {
      const auto chain =
          std::span(chains.cells)
              .subspan(AsSize(chains.begins[c]),
                       AsSize(chains.begins[c + 1] - chains.begins[c]));
      ASSERT_GE(chain.size(), 2U);
      const auto at = [&](std::size_t i) -> int& {
        return At(actual, chain[i]);
      };
      const int first = at(0);
      for (std::size_t i = 1; i < chain.size(); ++i) at(i - 1) = at(i);
      if (chains.cycles[c] != 0) at(chain.size() - 1) = first;
    }
    EXPECT_EQ(actual, expected) << seed;
  }
}

TEST(CudaRows, MoveInAllTensorsAtOnce) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    SCOPED_TRACE(seed);
    std::vector<Rows> all;
    int cells = INT32_MAX;
    for (int i = random.Pick(3); i >= 0; --i) {
      const Twin twin(random);
      cells = std::min(cells, twin.cells());
      all.push_back(twin.Keys());
      all.push_back(twin.Values());
    }
    const std::vector<CellMove> moves = SomeMoves(random, cells);
    MoveChains chains;
    OrderMoves(moves, chains);
    const ChainsThere there(chains);
    std::vector<std::unique_ptr<DeviceBytes>> memory;
    std::vector<StoredRows> tensors;
    std::size_t max_bytes = 0;
    std::size_t max_elements = 0;
    for (const Rows& rows : all) {
      memory.push_back(std::make_unique<DeviceBytes>(rows.bytes));
      tensors.push_back(On(*memory.back(), rows));
      max_bytes = std::max(max_bytes, rows.row_bytes());
      max_elements = std::max(max_elements, rows.row_elements());
    }
    const DeviceBytes list(tensors);
    ASSERT_EQ(MoveRows(list.data<StoredRows>(), Size(tensors), there.there,
                       static_cast<std::int64_t>(max_bytes),
                       static_cast<std::int64_t>(max_elements), nullptr),
              cudaSuccess);
    for (std::size_t t = 0; t < all.size(); ++t) {
      Rows& rows = all[t];
      const Bytes before = rows.bytes;
      for (const auto& [from, to] : moves) {
        for (std::size_t i = 0; i < rows.parts(); ++i) {
          rows.CopyPart(before, rows.At(from, i), rows.At(to, i));
        }
      }
      ASSERT_TRUE(memory[t]->Download() == rows.bytes)
          << t << ' ' << DTypeName(rows.stored.dtype) << " layout "
          << AsInt(rows.stored.layout);
    }
  }
}

TEST(CudaRows, MoveAsTheHostDoes) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    Twin twin(random);
    SCOPED_TRACE(::testing::Message()
                 << "seed " << seed << ": " << twin.Text());
    // No cell is in two moves.
    const std::vector<int> cells =
        random.Cells(random.Pick(twin.cells() / 2 + 1) * 2, twin.cells());
    std::vector<CellMove> moves;
    for (std::size_t i = 0; i < cells.size(); i += 2) {
      moves.push_back({AsSize(cells[i]), AsSize(cells[i + 1])});
    }
    MoveChains chains;
    OrderMoves(moves, chains);
    const ChainsThere there(chains);
    const Rows keys = twin.Keys();
    const Rows values = twin.Values();
    const DeviceBytes key_bytes(keys.bytes);
    const DeviceBytes value_bytes(values.bytes);
    const DeviceBytes list(
        std::vector{On(key_bytes, keys), On(value_bytes, values)});
    ASSERT_EQ(MoveRows(list.data<StoredRows>(), 2, there.there, 1, 1, nullptr),
              cudaSuccess);
    twin.layer().Move(moves, Share{0, 1});
    ASSERT_TRUE(key_bytes.Download() == twin.Keys().bytes);
    ASSERT_TRUE(value_bytes.Download() == twin.Values().bytes);
  }
}

TEST(CudaRows, CopyBlocksOfAPool) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    SCOPED_TRACE(seed);
    constexpr int kBlocks = 40;
    const std::vector<int> from_to =
        random.Cells(random.Pick(kBlocks / 2 + 1) * 2, kBlocks);
    std::vector<Bytes> all;
    std::vector<std::unique_ptr<DeviceBytes>> memory;
    std::vector<StoredBlocks> tensors;
    std::int64_t max = 0;
    for (int t = random.Pick(4); t >= 0; --t) {
      const std::int64_t bytes =
          random.OneOf({1, 34, 136, 256, 1088, 2048, 3000});
      max = std::max(max, bytes);
      Bytes blocks(AsSize(bytes * kBlocks));
      for (std::byte& byte : blocks) {
        byte = static_cast<std::byte>(random.Bits());
      }
      memory.push_back(std::make_unique<DeviceBytes>(blocks));
      tensors.push_back({memory.back()->data(), bytes});
      all.push_back(std::move(blocks));
    }
    const DeviceBytes list(tensors);
    const DeviceBytes pairs(from_to);
    ASSERT_EQ(
        CopyBlocks(list.data<StoredBlocks>(), Size(tensors), pairs.data<int>(),
                   std::ssize(from_to) / 2, max, nullptr),
        cudaSuccess);
    for (std::size_t t = 0; t < all.size(); ++t) {
      for (std::size_t i = 0; i < from_to.size(); i += 2) {
        const auto bytes = tensors[t].block_bytes;
        std::copy_n(all[t].begin() + from_to[i] * bytes, bytes,
                    all[t].begin() + from_to[i + 1] * bytes);
      }
      ASSERT_TRUE(memory[t]->Download() == all[t]);
    }
  }
}

// With many tensors, each gets few threads.
TEST(CudaRows, MoveMoreThanAGridHasThreads) {
  constexpr int kTensors = 1000;
  constexpr int kCells = 4096;
  Random random(1);
  for (const VLayout layout : {VLayout::kPlain, VLayout::kTiled}) {
    Rows rows{{nullptr, DType::kF8, layout, 1, 1, kCells}, Bytes(kCells)};
    for (std::byte& byte : rows.bytes)
      byte = static_cast<std::byte>(random.Bits());
    Bytes all;
    for (int t = 0; t < kTensors; ++t) {
      all.insert(all.end(), rows.bytes.begin(), rows.bytes.end());
    }
    const DeviceBytes bytes(all);
    std::vector<StoredRows> tensors;
    std::vector<StoredBlocks> blocks;
    for (std::ptrdiff_t t = 0; t < kTensors; ++t) {
      tensors.push_back(rows.stored);
      tensors.back().data = bytes.data() + t * kCells;
      blocks.push_back({tensors.back().data, 1});
    }
    std::vector<CellMove> moves;
    std::vector<int> pairs;
    for (std::size_t cell = 0; cell < kCells / 2; ++cell) {
      moves.push_back({cell + kCells / 2, cell});
      pairs.push_back(AsInt(cell));
      pairs.push_back(AsInt(cell) + kCells / 2);
    }
    MoveChains chains;
    OrderMoves(moves, chains);
    const ChainsThere there(chains);
    const DeviceBytes list(tensors);
    ASSERT_EQ(
        MoveRows(list.data<StoredRows>(), kTensors, there.there, 1, 1, nullptr),
        cudaSuccess);
    const auto half = all.begin() + kCells / 2;
    for (std::ptrdiff_t t = 0; t < kTensors; ++t) {
      std::copy_n(half + t * kCells, kCells / 2, all.begin() + t * kCells);
    }
    EXPECT_TRUE(bytes.Download() == all);
    // The second half gets other bytes.
    for (std::byte& byte : all) byte ^= std::byte{0x55};
    ASSERT_EQ(cudaMemcpy(bytes.data(), all.data(), all.size(),
                         cudaMemcpyHostToDevice),
              cudaSuccess);
    for (std::size_t at = 0; at < all.size(); at += kCells) {
      all[at] ^= std::byte{1};
    }
    ASSERT_EQ(cudaMemcpy(bytes.data(), all.data(), all.size(),
                         cudaMemcpyHostToDevice),
              cudaSuccess);
    const DeviceBytes block_list(blocks);
    const DeviceBytes pair_list(pairs);
    ASSERT_EQ(CopyBlocks(block_list.data<StoredBlocks>(), kTensors,
                         pair_list.data<int>(), kCells / 2, 1, nullptr),
              cudaSuccess);
    for (std::ptrdiff_t t = 0; t < kTensors; ++t) {
      std::copy_n(all.begin() + t * kCells, kCells / 2, half + t * kCells);
    }
    EXPECT_TRUE(bytes.Download() == all);
  }
}

}  // namespace
}  // namespace kvtwin::optimized::cuda
