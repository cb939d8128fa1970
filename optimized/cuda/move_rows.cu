// Rows that change places, and blocks that are copied, in one launch for all
// tensors of a cache.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "optimized/cuda/pieces.h"
#include "optimized/cuda/rows.h"

namespace kvtwin::optimized::cuda {
namespace {

// So many elements of a row that lies in columns are moved together.
constexpr unsigned kColumnsTogether = 8;

// Moves what `load` and `store` read and write of a cell, along a chain. What
// the next cell holds is on its way while that of this one is written.
template <class Held, class Load, class Store>
__device__ void MoveAlong(const DeviceChains& chains, std::int64_t chain,
                          const Load& load, const Store& store) {
  const int* cells = chains.cells + chains.begins[chain];
  const int last = chains.begins[chain + 1] - chains.begins[chain] - 1;
  const bool cycle = chains.cycles[chain] != 0;
  Held first;
  Held moved;
  Held next;
  if (cycle) load(cells[0], first);
  load(cells[1], moved);
  for (int i = 1; i < last; ++i) {
    load(cells[i + 1], next);
    store(moved, cells[i - 1]);
    moved = next;
  }
  store(moved, cells[last - 1]);
  if (cycle) store(first, cells[last]);
}

template <class T, unsigned kCount>
struct Several {
  T values[kCount];
};

template <class Piece>
[[gnu::noinline]] __device__ void MoveInRows(const StoredRows& rows,
                                             const DeviceChains& chains) {
  using Held = Several<Piece, kTogether>;
  const std::int64_t row_bytes = RowBytes(rows);
  const Parts parts =
      PartsOf(chains.count,
              static_cast<std::uint32_t>(row_bytes / sizeof(Piece)), kTogether);
  ForEachPart(parts, kTogether, [&](std::int64_t chain, std::uint32_t first) {
    const auto at = [&](int cell, std::uint32_t piece) {
      return rows.data + cell * row_bytes + std::size_t{piece} * sizeof(Piece);
    };
    const auto load = [&](int cell, Held& held) {
      for (unsigned k = 0; k < kTogether; ++k) {
        const std::uint32_t piece = first + k * parts.lanes;
        if (piece >= parts.pieces) break;
        held.values[k] = LoadPiece<Piece>(at(cell, piece));
      }
    };
    const auto store = [&](const Held& held, int cell) {
      for (unsigned k = 0; k < kTogether; ++k) {
        const std::uint32_t piece = first + k * parts.lanes;
        if (piece >= parts.pieces) break;
        StorePiece(held.values[k], at(cell, piece));
      }
    };
    MoveAlong<Held>(chains, chain, load, store);
  });
}

// Neighbouring threads have neighbouring chains.
template <class T>
[[gnu::noinline]] __device__ void MoveInColumns(const StoredRows& rows,
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
        if (k >= rest) break;
        held.values[k] = LoadPiece<T>(from + k * columns.stride);
      }
    };
    const auto store = [&](const Held& held, int cell) {
      std::byte* to = columns.Cell(cell) + first * columns.stride;
      for (unsigned k = 0; k < kColumnsTogether; ++k) {
        if (k >= rest) break;
        StorePiece(held.values[k], to + k * columns.stride);
      }
    };
    MoveAlong<Held>(chains, i - group * chains.count, load, store);
  }
}

__global__ void __launch_bounds__(kBlockThreads)
    MoveTensors(const StoredRows* tensors, int tensor_count,
                DeviceChains chains) {
  for (unsigned i = blockIdx.y; i < static_cast<unsigned>(tensor_count);
       i += gridDim.y) {
    const StoredRows rows = tensors[i];
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
}

template <class Piece>
[[gnu::noinline]] __device__ void CopyInPieces(const StoredBlocks& blocks,
                                               const int* from_to,
                                               std::int64_t count) {
  const Parts parts = PartsOf(
      count, static_cast<std::uint32_t>(blocks.block_bytes / sizeof(Piece)),
      kTogether);
  ForEachPart(parts, kTogether, [&](std::int64_t pair, std::uint32_t first) {
    const std::byte* from =
        blocks.data + from_to[2 * pair] * blocks.block_bytes;
    std::byte* to = blocks.data + from_to[2 * pair + 1] * blocks.block_bytes;
    Piece held[kTogether];
    for (unsigned k = 0; k < kTogether; ++k) {
      const std::size_t at = first + k * parts.lanes;
      if (at >= parts.pieces) break;
      held[k] = LoadPiece<Piece>(from + at * sizeof(Piece));
    }
    for (unsigned k = 0; k < kTogether; ++k) {
      const std::size_t at = first + k * parts.lanes;
      if (at >= parts.pieces) break;
      StorePiece(held[k], to + at * sizeof(Piece));
    }
  });
}

__global__ void __launch_bounds__(kBlockThreads)
    CopyTensors(const StoredBlocks* tensors, int tensor_count,
                const int* from_to, std::int64_t count) {
  for (unsigned i = blockIdx.y; i < static_cast<unsigned>(tensor_count);
       i += gridDim.y) {
    const StoredBlocks blocks = tensors[i];
    const auto address = reinterpret_cast<std::uintptr_t>(blocks.data);
    const auto bytes = static_cast<std::uint64_t>(blocks.block_bytes);
    WithPiece(PieceBytes(address | bytes), [&](auto piece) {
      CopyInPieces<decltype(piece)>(blocks, from_to, count);
    });
  }
}

// For so many tensors, each a row of blocks.
dim3 GridFor(std::int64_t threads, int tensors) {
  constexpr int kMostRows = 65535;
  const std::int64_t most = std::max<std::int64_t>(kMostBlocks / tensors, 1);
  return {BlocksFor(threads, most),
          static_cast<unsigned>(std::min(tensors, kMostRows))};
}

// Moves by the cell that is written.
class ByTo {
 public:
  explicit ByTo(std::span<const CellMove> moves)
      : moves_(moves.begin(), moves.end()), done_(moves.size()) {
    std::ranges::sort(moves_, {}, &CellMove::to);
  }

  // The move to this cell, if there is one and it was not taken: it is then.
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

// The chain that begins with a cell; none if nothing moves there any more.
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
  out.cells.clear();
  out.begins.assign(1, 0);
  out.cycles.clear();
  ByTo by_to(moves);
  std::vector<std::size_t> sources;
  for (const CellMove& move : moves) sources.push_back(move.from);
  std::ranges::sort(sources);
  // A chain begins where nothing is read; what is left are cycles.
  for (const CellMove& move : moves) {
    if (!std::ranges::binary_search(sources, move.to)) {
      AddChain(move.to, by_to, out);
    }
  }
  for (const CellMove& move : moves) AddChain(move.to, by_to, out);
}

cudaError_t MoveRows(const StoredRows* tensors, int tensor_count,
                     const DeviceChains& chains, std::int64_t most_row_bytes,
                     std::int64_t most_row_elements, cudaStream_t stream) {
  if (tensor_count == 0 || chains.count == 0) return cudaSuccess;
  if (most_row_elements >= std::int64_t{1} << 30) return cudaErrorInvalidValue;
  const std::int64_t threads =
      chains.count *
      std::max(most_row_bytes / std::int64_t{sizeof(uint4) * kTogether},
               most_row_elements / kColumnsTogether);
  return Launch(MoveTensors, GridFor(threads, tensor_count), kBlockThreads, 0,
                stream, tensors, tensor_count, chains);
}

cudaError_t CopyBlocks(const StoredBlocks* tensors, int tensor_count,
                       const int* from_to, std::int64_t count,
                       std::int64_t most_block_bytes, cudaStream_t stream) {
  if (tensor_count == 0 || count == 0) return cudaSuccess;
  if (most_block_bytes > std::int64_t{UINT32_MAX}) return cudaErrorInvalidValue;
  const std::int64_t threads =
      count * most_block_bytes / std::int64_t{sizeof(uint4) * kTogether};
  return Launch(CopyTensors, GridFor(threads, tensor_count), kBlockThreads, 0,
                stream, tensors, tensor_count, from_to, count);
}

}  // namespace kvtwin::optimized::cuda
