// The goals of putting, moving, shifting and copying rows, beside a copy of as
// many bytes.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "bench/cuda/gpu.h"
#include "bench/cuda/suite.h"
#include "bench/twins.h"
#include "core/elements.h"
#include "core/index.h"
#include "optimized/cuda/rows.h"
#include "optimized/row_shift.h"

namespace kvtwin::bench {
namespace {

using optimized::CellMove;
using optimized::RowShift;
using optimized::cuda::DeviceChains;
using optimized::cuda::DeviceShift;
using optimized::cuda::MoveChains;
using optimized::cuda::StoredBlocks;
using optimized::cuda::StoredRows;

constexpr double kMoveGoal = 1 / 0.8;
constexpr double kShiftGoal = 1 / 0.75;

// At least this many rows of a GiB are checked.
constexpr std::int64_t kChecked = 4096;

Shape RowShape(std::int64_t rows) { return {kHeadDim, kHeads, rows, 1}; }

std::vector<int> AllCells(std::int64_t cells, bool shuffled) {
  std::vector<int> all(AsSize(cells));
  std::iota(all.begin(), all.end(), 0);
  if (shuffled) std::ranges::shuffle(all, std::mt19937(1));
  return all;
}

StoredRows RowsIn(const GpuBuffer& memory, DType dtype, VLayout layout,
                  std::int64_t cells) {
  return {.data = memory.data(),
          .dtype = dtype,
          .layout = layout,
          .head_dim = kHeadDim,
          .heads = kHeads,
          .cells = cells};
}

struct PutCase {
  DType from;
  DType stored;
  VLayout layout = VLayout::kPlain;
  bool shuffled = true;
};

// Checks rows 0, step, 2 * step ... of the stored rows.
void CheckPut(const std::string& name, const PutCase& what,
              const std::vector<std::byte>& from,
              const std::vector<std::byte>& stored,
              const std::vector<int>& cells) {
  const std::int64_t count = std::ssize(cells);
  const TensorView rows = DenseView(from.data(), what.from, RowShape(count));
  const bool plain = what.layout == VLayout::kPlain;
  const TensorView in =
      DenseView(stored.data(), what.stored,
                plain ? RowShape(count) : Shape{count, kHeadDim, kHeads, 1});
  for (std::int64_t row = 0; row < count;
       row += std::max<std::int64_t>(1, count / kChecked)) {
    const std::int64_t cell = At(cells, row);
    for (int head = 0; head < kHeads; ++head) {
      for (int i = 0; i < kHeadDim; ++i) {
        std::array<std::byte, sizeof(float)> want = {};
        StoreElement(LoadElement(rows.at(i, head, row), what.from), want.data(),
                     what.stored);
        const std::byte* got =
            plain ? in.at(i, head, cell) : in.at(cell, i, head);
        if (std::memcmp(got, want.data(), SizeOf(what.stored)) != 0) {
          Wrong(name, fmt::format("row {}, head {}, element {}", row, head, i));
        }
      }
    }
  }
}

// The limit is a copy of half of the bytes that are read or written in all.
void JudgePut(Goals& goals, const PutCase& what) {
  const std::string name =
      fmt::format("put {} rows as {}{}, {} / copy", DTypeName(what.from),
                  DTypeName(what.stored),
                  what.layout == VLayout::kPlain ? "" : ", permuted",
                  what.shuffled ? "shuffled cells" : "cells in order");
  if (!goals.Wanted(name)) return;
  const std::int64_t count = Gib(goals) / RowBytes(what.from);
  const std::int64_t moved =
      count * (RowBytes(what.from) + RowBytes(what.stored)) / 2;
  const auto elements =
      RandomElements(what.from, count * kHeads * kHeadDim, /*seed=*/1);
  const auto cells = AllCells(count, what.shuffled);
  const GpuBuffer from(elements);
  const GpuBuffer device_cells(cells);
  const GpuBuffer memory(count * RowBytes(what.stored));
  const GpuBuffer copied(moved);
  const TensorView rows = DenseView(from.data(), what.from, RowShape(count));
  const StoredRows to = RowsIn(memory, what.stored, what.layout, count);
  const GpuWork put = [&](cudaStream_t stream) {
    return PutRows(rows, device_cells.as<int>(), to, stream);
  };
  RunOnGpu(put);
  CheckPut(name, what, elements, memory.Download(), cells);
  goals.Judge(name, kMoveGoal, OnGpu(put), {CopyLimit(from, copied, moved)});
}

// Half of the cells, at random, are holes. The first holes get the rows of the
// last used cells, until no hole lies before a used cell.
std::vector<CellMove> FillingMoves(std::int64_t cells) {
  std::mt19937 random(1);
  std::vector<std::size_t> kept;
  std::vector<std::size_t> holes;
  for (std::size_t cell = 0; cell < AsSize(cells); ++cell) {
    (random() % 2 == 0 ? kept : holes).push_back(cell);
  }
  std::vector<CellMove> moves;
  while (moves.size() < std::min(kept.size(), holes.size()) &&
         kept[kept.size() - 1 - moves.size()] > holes[moves.size()]) {
    moves.push_back({.from = kept[kept.size() - 1 - moves.size()],
                     .to = holes[moves.size()]});
  }
  return moves;
}

void JudgeMoves(Goals& goals) {
  const std::string name = "defrag of f16 rows, random half holes / copy";
  if (!goals.Wanted(name)) return;
  // A quarter of the rows of K and V moves: 1 GiB.
  const std::int64_t row_bytes = RowBytes(DType::kF16);
  const std::int64_t cells = 2 * Gib(goals) / row_bytes;
  const auto moves = FillingMoves(cells);
  const std::int64_t moved = 2 * std::ssize(moves) * row_bytes;
  MoveChains chains;
  OrderMoves(moves, chains);
  const auto elements =
      RandomElements(DType::kF16, cells * kHeads * kHeadDim, /*seed=*/2);
  const GpuBuffer key(elements);
  const GpuBuffer value(elements);
  const GpuBuffer copied(moved);
  const std::vector<StoredRows> tensors = {
      RowsIn(key, DType::kF16, VLayout::kPlain, cells),
      RowsIn(value, DType::kF16, VLayout::kPlain, cells)};
  const GpuBuffer device_tensors(tensors);
  const GpuBuffer device_cells(chains.cells);
  const GpuBuffer begins(chains.begins);
  const GpuBuffer cycles(chains.cycles);
  const DeviceChains on_device = {.cells = device_cells.as<int>(),
                                  .begins = begins.as<int>(),
                                  .cycles = cycles.as<int>(),
                                  .count = Size(chains.cycles)};
  const GpuWork move = [&](cudaStream_t stream) {
    return MoveRows(device_tensors.as<StoredRows>(), 2, on_device, row_bytes,
                    kHeads * kHeadDim, stream);
  };
  RunOnGpu(move);
  for (const GpuBuffer* memory : {&key, &value}) {
    const auto got = memory->Download();
    const auto bytes = AsSize(row_bytes);
    for (const CellMove& cell_move : moves) {
      if (std::memcmp(got.data() + cell_move.to * bytes,
                      elements.data() + cell_move.from * bytes, bytes) != 0) {
        Wrong(name, fmt::format("cell {} has another row", cell_move.to));
      }
    }
  }
  goals.Judge(name, kMoveGoal, OnGpu(move), {CopyLimit(key, copied, moved)});
}

void JudgeBlocks(Goals& goals) {
  const std::string name = "copy of pool blocks, shuffled / copy";
  if (!goals.Wanted(name)) return;
  const std::int64_t block_bytes = 16 * RowBytes(DType::kF16);
  const std::int64_t count = std::max<std::int64_t>(
      1, Gib(goals) / 2 / block_bytes);  // For each of K and V.
  const auto blocks = AllCells(2 * count, /*shuffled=*/true);
  const auto elements =
      RandomElements(DType::kF16, 2 * count * block_bytes / 2, /*seed=*/3);
  const GpuBuffer key(elements);
  const GpuBuffer value(elements);
  const GpuBuffer pairs(blocks);
  const std::vector<StoredBlocks> tensors = {{key.data(), block_bytes},
                                             {value.data(), block_bytes}};
  const GpuBuffer device_tensors(tensors);
  const GpuWork copy = [&](cudaStream_t stream) {
    return CopyBlocks(device_tensors.as<StoredBlocks>(), 2, pairs.as<int>(),
                      count, block_bytes, stream);
  };
  RunOnGpu(copy);
  for (const GpuBuffer* memory : {&key, &value}) {
    const auto got = memory->Download();
    const auto bytes = AsSize(block_bytes);
    for (std::size_t i = 0; i < blocks.size(); i += 2) {
      const auto from = AsSize(blocks[i]);
      const auto to = AsSize(blocks[i + 1]);
      if (std::memcmp(got.data() + to * bytes, elements.data() + from * bytes,
                      bytes) != 0) {
        Wrong(name, fmt::format("block {} is another", to));
      }
    }
  }
  goals.Judge(name, kMoveGoal, OnGpu(copy),
              {CopyLimit(key, value, 2 * count * block_bytes)});
}

void CheckShift(const std::string& name, DType dtype, const RowShift& shift,
                std::vector<std::byte> rows,
                const std::vector<std::byte>& got) {
  const auto bytes = AsSize(RowBytes(dtype));
  const std::size_t count = rows.size() / bytes;
  for (std::size_t row = 0; row < count;
       row += std::max<std::size_t>(1, count / kChecked)) {
    const std::span<std::byte> want =
        std::span(rows).subspan(row * bytes, bytes);
    shift.Apply(dtype, want);
    if (std::memcmp(want.data(), got.data() + row * bytes, bytes) != 0) {
      Wrong(name, fmt::format("row {} is shifted otherwise", row));
    }
  }
}

// Shifts in place: as many bytes are read and written as by a copy.
void JudgeShift(Goals& goals, DType dtype) {
  const std::string name =
      fmt::format("shift of {} rows / copy", DTypeName(dtype));
  if (!goals.Wanted(name)) return;
  const std::int64_t count = Gib(goals) / RowBytes(dtype);
  const std::int64_t bytes = count * RowBytes(dtype);
  const auto elements =
      RandomElements(dtype, count * kHeads * kHeadDim, /*seed=*/4);
  const auto cells = AllCells(count, /*shuffled=*/false);
  const GpuBuffer memory(elements);
  const GpuBuffer copied(bytes);
  const GpuBuffer device_cells(cells);
  const Shift rope = {.kind = ShiftKind::kRope,
                      .rope = {.pairing = Rope::Pairing::kHalves},
                      .fn = {}};
  RowShift on_host;
  on_host.Prepare(rope, /*offset=*/-3, kHeadDim);
  const auto copy_of = [](std::span<const float> values) {
    return std::vector<float>(values.begin(), values.end());
  };
  const GpuBuffer cosines(copy_of(on_host.cosines()));
  const GpuBuffer sines(copy_of(on_host.sines()));
  const DeviceShift shift = {.kind = DeviceShift::Kind::kTurnHalves,
                             .offset = -3,
                             .pairs = Size(on_host.cosines()) / 2,
                             .cosines = cosines.as<float>(),
                             .sines = sines.as<float>()};
  const StoredRows keys = RowsIn(memory, dtype, VLayout::kPlain, count);
  const GpuWork work = [&](cudaStream_t stream) {
    return ShiftRows(keys, device_cells.as<int>(), count, shift, stream);
  };
  RunOnGpu(work);
  CheckShift(name, dtype, on_host, elements, memory.Download());
  goals.Judge(name, kShiftGoal, OnGpu(work),
              {CopyLimit(memory, copied, bytes)});
}

}  // namespace

void CudaRowGoals(Goals& goals) {
  JudgePut(goals, {.from = DType::kF16, .stored = DType::kF16});
  JudgePut(goals, {.from = DType::kF32, .stored = DType::kF16});
  JudgePut(goals, {.from = DType::kF16,
                   .stored = DType::kF16,
                   .layout = VLayout::kPermuted,
                   .shuffled = false});
  JudgeMoves(goals);
  JudgeBlocks(goals);
  for (const DType dtype : {DType::kF16, DType::kF32, DType::kQ8}) {
    JudgeShift(goals, dtype);
  }
}

}  // namespace kvtwin::bench
