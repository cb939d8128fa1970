// Moves rows, and copies blocks, in one launch for all tensors of a cache.

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "core/assert.h"
#include "optimized/cuda/pieces.h"
#include "optimized/cuda/rows.h"

namespace kvtwin::optimized::cuda {
namespace {

// This many elements of a row in columns are moved together.
constexpr unsigned kColumnsTogether = 8;

// Limits registers to what the kernels need.
[[maybe_unused]] constexpr unsigned kBlocksAtOnce = 3;

template <class T, unsigned kCount>
struct Several {
  T values[kCount];
};

// Moves the part of each cell that `load` and `store` access, along a chain.
template <class Held, class Load, class Store>
__device__ void MoveAlong(const DeviceChains& chains, std::int64_t chain,
                          const Load& load, const Store& store) {
  const int* cells = chains.cells + chains.begins[chain];
  const int last = chains.begins[chain + 1] - chains.begins[chain] - 1;
  const bool cycle = chains.cycles[chain] != 0;
  Held first;
  Held moved;
  if (cycle) load(cells[0], first);
  for (int i = 1; i <= last; ++i) {
    load(cells[i], moved);
    store(moved, cells[i - 1]);
  }
  if (cycle) store(first, cells[last]);
}

template <class Piece>
__device__ void MoveInRows(const StoredRows& rows, const DeviceChains& chains) {
  using Held = Several<Piece, kTogether>;
  const std::int64_t row_bytes = RowBytes(rows);
  const Parts parts =
      PartsOf(chains.count, PiecesOf<Piece>(row_bytes), kTogether);
  ForEachPart(parts, kTogether, [&](std::int64_t chain, std::uint32_t first) {
    const auto load = [&](int cell, Held& held) {
      const std::byte* from = rows.data + cell * row_bytes;
      ForEachPiece(parts, first, [&](unsigned k, std::size_t piece) {
        held.values[k] = LoadPiece<Piece>(from + piece * sizeof(Piece));
      });
    };
    const auto store = [&](const Held& held, int cell) {
      std::byte* to = rows.data + cell * row_bytes;
      ForEachPiece(parts, first, [&](unsigned k, std::size_t piece) {
        StorePiece(held.values[k], to + piece * sizeof(Piece));
      });
    };
    MoveAlong<Held>(chains, chain, load, store);
  });
}

// Neighbouring threads have neighbouring chains.
template <class T>
__device__ void MoveInColumns(const StoredRows& rows,
                              const DeviceChains& chains) {
  using Held = Several<T, kColumnsTogether>;
  const Columns columns = ColumnsOf(rows);
  const std::int64_t count = std::int64_t{rows.head_dim} * rows.heads;
  const std::int64_t groups = (count - 1) / kColumnsTogether + 1;
  for (std::int64_t i = GridThread(); i < groups * chains.count;
       i += GridThreads()) {
    const std::int64_t group = i / chains.count;
    const std::int64_t first = group * kColumnsTogether;
    const std::int64_t rest = count - first;
    const auto load = [&](int cell, Held& held) {
      const std::byte* from = columns.Cell(cell) + first * columns.stride;
      for (unsigned k = 0; k < kColumnsTogether; ++k) {
        if (k < rest) held.values[k] = LoadPiece<T>(from + k * columns.stride);
      }
    };
    const auto store = [&](const Held& held, int cell) {
      std::byte* to = columns.Cell(cell) + first * columns.stride;
      for (unsigned k = 0; k < kColumnsTogether; ++k) {
        if (k < rest) StorePiece(held.values[k], to + k * columns.stride);
      }
    };
    MoveAlong<Held>(chains, i - group * chains.count, load, store);
  }
}

// The grid has a row of blocks for each tensor. (A loop over tensors would hold
// values common to all of them in registers, which are scarce.)
__global__ void __launch_bounds__(kBlockThreads, kBlocksAtOnce)
    MoveTensors(const StoredRows* tensors, DeviceChains chains) {
  const StoredRows rows = tensors[blockIdx.y];
  const bool plain = rows.layout == VLayout::kPlain;
  const auto address = reinterpret_cast<std::uintptr_t>(rows.data);
  const auto row_bytes = static_cast<std::uint64_t>(RowBytes(rows));
  WithPiece(plain ? PieceBytes(address | row_bytes)
                  : static_cast<unsigned>(SizeOf(rows.dtype)),
            [&](auto piece) {
              using Piece = decltype(piece);
              if (plain) {
                MoveInRows<Piece>(rows, chains);
              } else if constexpr (sizeof(Piece) <= sizeof(float)) {
                MoveInColumns<Piece>(rows, chains);
              }
            });
}

__global__ void __launch_bounds__(kBlockThreads, kBlocksAtOnce)
    CopyTensors(const StoredBlocks* tensors, const int* from_to,
                std::int64_t count) {
  const StoredBlocks blocks = tensors[blockIdx.y];
  const auto address = reinterpret_cast<std::uintptr_t>(blocks.data);
  const auto bytes = static_cast<std::uint64_t>(blocks.block_bytes);
  WithPiece(PieceBytes(address | bytes), [&](auto type) {
    using Piece = decltype(type);
    const Parts parts =
        PartsOf(count, PiecesOf<Piece>(blocks.block_bytes), kTogether);
    ForEachPart(parts, kTogether, [&](std::int64_t pair, std::uint32_t first) {
      const std::byte* from =
          blocks.data + from_to[2 * pair] * blocks.block_bytes;
      std::byte* to = blocks.data + from_to[2 * pair + 1] * blocks.block_bytes;
      Piece held[kTogether];
      ForEachPiece(parts, first, [&](unsigned k, std::size_t piece) {
        held[k] = LoadPiece<Piece>(from + piece * sizeof(Piece));
      });
      ForEachPiece(parts, first, [&](unsigned k, std::size_t piece) {
        StorePiece(held[k], to + piece * sizeof(Piece));
      });
    });
  });
}

// A grid has at most this many rows of blocks.
constexpr int kMaxTensors = 65535;

dim3 GridFor(std::int64_t threads, int tensors) {
  const std::int64_t max = std::max<std::int64_t>(kMaxBlocks / tensors, 1);
  return {BlocksFor(threads, max), static_cast<unsigned>(tensors)};
}

// Whether no cell is the destination of two moves.
bool OneMoveTo(std::span<const CellMove> moves) {
  std::set<std::size_t> cells;
  for (const CellMove& move : moves) cells.insert(move.to);
  return cells.size() == moves.size();
}

// Finds moves by their destination.
class ByTo {
 public:
  explicit ByTo(std::span<const CellMove> moves)
      : moves_(moves.begin(), moves.end()), done_(moves.size()) {
    std::ranges::sort(moves_, {}, &CellMove::to);
  }

  // Returns the move to this cell, and marks it taken; null if there is none or
  // it was taken before.
  const CellMove* Take(std::size_t to) {
    const auto found = std::ranges::lower_bound(moves_, to, {}, &CellMove::to);
    if (found == moves_.end() || found->to != to) return nullptr;
    const auto i = static_cast<std::size_t>(found - moves_.begin());
    if (done_[i]) return nullptr;
    done_[i] = true;
    return &*found;
  }

 private:
  std::vector<CellMove> moves_;
  std::vector<bool> done_;
};

// Adds the chain that begins with a cell; nothing if no move to it is left.
void AddChain(std::size_t first, ByTo& moves, MoveChains& out) {
  const CellMove* move = moves.Take(first);
  if (move == nullptr || move->from == first) return;
  out.cells.push_back(static_cast<int>(first));
  bool cycle = false;
  while (move != nullptr && !cycle) {
    const std::size_t from = move->from;
    out.cells.push_back(static_cast<int>(from));
    move = moves.Take(from);
    cycle = move != nullptr && move->from == first;
  }
  out.begins.push_back(static_cast<int>(out.cells.size()));
  out.cycles.push_back(cycle ? 1 : 0);
}

}  // namespace

void OrderMoves(std::span<const CellMove> moves, MoveChains& out) {
  KVTWIN_DCHECK(OneMoveTo(moves));
  out.cells.clear();
  out.begins.assign(1, 0);
  out.cycles.clear();
  ByTo by_to(moves);
  std::vector<std::size_t> sources;
  for (const CellMove& move : moves) sources.push_back(move.from);
  std::ranges::sort(sources);
  // A chain begins at a cell that is not a source; the remaining moves form
  // cycles.
  for (const CellMove& move : moves) {
    if (!std::ranges::binary_search(sources, move.to)) {
      AddChain(move.to, by_to, out);
    }
  }
  for (const CellMove& move : moves) AddChain(move.to, by_to, out);
}

cudaError_t MoveRows(const StoredRows* tensors, int tensor_count,
                     const DeviceChains& chains, std::int64_t max_row_bytes,
                     std::int64_t max_row_elements, cudaStream_t stream) {
  if (tensor_count == 0 || chains.count == 0) return cudaSuccess;
  if (max_row_elements >= std::int64_t{1} << 30 || tensor_count > kMaxTensors) {
    return cudaErrorInvalidValue;
  }
  const std::int64_t threads =
      chains.count *
      std::max(max_row_bytes / std::int64_t{sizeof(uint4) * kTogether},
               max_row_elements / kColumnsTogether);
  return Launch(MoveTensors, GridFor(threads, tensor_count), kBlockThreads, 0,
                stream, tensors, chains);
}

cudaError_t CopyBlocks(const StoredBlocks* tensors, int tensor_count,
                       const int* from_to, std::int64_t count,
                       std::int64_t max_block_bytes, cudaStream_t stream) {
  if (tensor_count == 0 || count == 0) return cudaSuccess;
  if (max_block_bytes > std::int64_t{UINT32_MAX} ||
      tensor_count > kMaxTensors) {
    return cudaErrorInvalidValue;
  }
  const std::int64_t threads =
      count * max_block_bytes / std::int64_t{sizeof(uint4) * kTogether};
  return Launch(CopyTensors, GridFor(threads, tensor_count), kBlockThreads, 0,
                stream, tensors, from_to, count);
}

}  // namespace kvtwin::optimized::cuda
