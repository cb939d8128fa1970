// The goals of masks: the kernel that writes them, beside a memset of as many
// bytes.

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "bench/cuda/gpu.h"
#include "bench/cuda/suite.h"
#include "bench/goals.h"
#include "bench/twins.h"
#include "core/index.h"
#include "optimized/cuda/mask_kernels.h"
#include "optimized/mask_kernels.h"

namespace kvtwin::bench {
namespace {

using optimized::PosRange;
using optimized::cuda::MaskPiece;

constexpr std::int64_t kWord = 64;

// Cells that belong to one of two sequences at random; the position of each
// token is its cell.
struct Cells {
  explicit Cells(std::int64_t cells) {
    std::uint64_t random = 1;
    for (std::int64_t word = 0; word < cells / kWord; ++word) {
      random = random * 6364136223846793005 + 1442695040888963407;
      members.push_back(random ^ random >> 29);
      const auto first = static_cast<std::int32_t>(word * kWord);
      for (std::int32_t i = 0; i < kWord; ++i) positions.push_back(first + i);
      ranges.push_back({.first = first, .last = first + 63});
    }
  }

  std::vector<std::int32_t> positions;
  std::vector<std::uint64_t> members;
  std::vector<PosRange> ranges;
};

void CheckRows(const std::string& name, const Cells& cells, DType dtype,
               const std::vector<MaskPiece>& pieces, const std::byte* out,
               const std::vector<std::byte>& got) {
  std::vector<std::byte> want;
  const std::size_t step = std::max<std::size_t>(1, pieces.size() / 16);
  for (std::size_t i = 0; i < pieces.size(); i += step) {
    const MaskPiece& piece = pieces[i];
    const auto first = AsSize(piece.first);
    const auto end = AsSize(piece.end);
    want.resize(optimized::MaskRowBytes(dtype, end - first));
    optimized::WriteMaskRow({.positions = cells.positions.data(),
                             .members = cells.members.data(),
                             .range = piece.range,
                             .first = first,
                             .end = end,
                             .ranges = cells.ranges.data()},
                            dtype, want.data());
    if (std::memcmp(want.data(), got.data() + (piece.out - out), want.size()) !=
        0) {
      Wrong(name, fmt::format("row {} differs from the host's", i));
    }
  }
}

// Writes `columns` columns of each row; the last visible one lies among them.
void JudgeMask(Goals& goals, const std::string& name, double goal, DType dtype,
               std::int64_t rows, std::int64_t cells, std::int64_t columns) {
  if (!goals.Wanted(name)) return;
  const Cells on_host(cells);
  const std::int64_t row_bytes = RunBytes(dtype, cells);
  const GpuBuffer memory(rows * row_bytes);
  const GpuBuffer positions(on_host.positions);
  const GpuBuffer members(on_host.members);
  const GpuBuffer ranges(on_host.ranges);
  std::vector<MaskPiece> pieces;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t first = (cells - columns) * row / rows / kWord * kWord;
    const auto last = static_cast<std::int32_t>(first + columns * row / rows);
    pieces.push_back(
        {.out = memory.data() + row * row_bytes + RunBytes(dtype, first),
         .members = members.as<std::uint64_t>(),
         .range = {.first = 0, .last = last},
         .first = first,
         .end = first + columns});
  }
  const GpuBuffer device_pieces(pieces);
  const GpuWork write = [&](cudaStream_t stream) {
    return WriteMask(device_pieces.as<MaskPiece>(), rows, columns,
                     positions.as<std::int32_t>(), ranges.as<PosRange>(), cells,
                     dtype, stream);
  };
  RunOnGpu(write);
  CheckRows(name, on_host, dtype, pieces, memory.data(), memory.Download());
  goals.Judge(name, goal, OnGpu(write),
              {SetLimit(memory, rows * RunBytes(dtype, columns))});
}

}  // namespace

void CudaMaskGoals(Goals& goals) {
  const std::int64_t cells = goals.quick() ? 1024 : 1 << 19;
  for (const DType dtype : kMaskTypes) {
    JudgeMask(goals, fmt::format("mask {}, 1 GiB / memset", DTypeName(dtype)),
              1 / 0.8, dtype, Gib(goals) / RunBytes(dtype, cells), cells,
              cells);
  }
  // A word of each row changes; both take about as long as a launch.
  JudgeMask(goals, "mask f16, a word of each of 64 rows / memset", 2,
            DType::kF16, 64, cells, kWord);
}

}  // namespace kvtwin::bench
