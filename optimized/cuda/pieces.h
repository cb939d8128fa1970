// How kernels divide rows among threads: in pieces of up to 16 bytes, of which
// every thread has several in flight.

#ifndef KVTWIN_OPTIMIZED_CUDA_PIECES_H_
#define KVTWIN_OPTIMIZED_CUDA_PIECES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "optimized/cuda/rows.h"

namespace kvtwin::optimized::cuda {

inline constexpr unsigned kBlockThreads = 256;
inline constexpr unsigned kWarpLanes = 32;
// Several times more than any device runs at once.
inline constexpr std::int64_t kMaxBlocks = 4096;
// The number of pieces that a thread reads before it writes them.
inline constexpr unsigned kTogether = 4;

// The number of blocks for this many threads; kernels loop over the rest if
// kMaxBlocks is not enough.
inline unsigned BlocksFor(std::int64_t threads, std::int64_t max = kMaxBlocks) {
  const std::int64_t blocks = (threads + kBlockThreads - 1) / kBlockThreads;
  return static_cast<unsigned>(std::clamp<std::int64_t>(blocks, 1, max));
}

__device__ inline std::int64_t GridThread() {
  return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
__device__ inline std::int64_t GridThreads() {
  return std::int64_t{gridDim.x} * blockDim.x;
}

// Divides rows of pieces among teams of neighbouring threads: a team takes a
// part of a row, and each of its threads `together` pieces of the part.
struct Parts {
  std::int64_t rows;
  std::uint32_t pieces;  // Pieces in a row.
  unsigned lane_bits;    // A team has 2^lane_bits threads, at most a warp.
  std::uint32_t parts;   // Parts in a row.

  __host__ __device__ std::uint32_t lanes() const { return 1U << lane_bits; }
  std::int64_t threads() const { return rows * parts * lanes(); }
};

__host__ __device__ inline Parts PartsOf(std::int64_t rows,
                                         std::uint32_t pieces,
                                         unsigned together) {
  unsigned bits = 0;
  while (1U << bits < kWarpLanes && 1U << bits < pieces) ++bits;
  return {rows, pieces, bits, (pieces - 1) / (together << bits) + 1};
}

// Calls does(row, first) for the parts of this thread; its pieces are `first`,
// first + lanes, ..., up to the end of the row.
template <class Does>
__device__ void ForEachPart(const Parts& parts, unsigned together,
                            const Does& does) {
  const std::int64_t teams = GridThreads() >> parts.lane_bits;
  const std::uint32_t lane = threadIdx.x & (parts.lanes() - 1);
  for (std::int64_t i = GridThread() >> parts.lane_bits;
       i < parts.rows * parts.parts; i += teams) {
    const std::int64_t row = parts.parts == 1 ? i : i / parts.parts;
    const auto part = static_cast<std::uint32_t>(i - row * parts.parts);
    does(row, part * parts.lanes() * together + lane);
  }
}

// Calls does(k, piece) for the pieces of a part, k < kTogether.
template <class Does>
__device__ void ForEachPiece(const Parts& parts, std::uint32_t first,
                             const Does& does) {
  for (unsigned k = 0; k < kTogether; ++k) {
    const std::uint32_t piece = first + k * parts.lanes();
    if (piece < parts.pieces) does(k, piece);
  }
}

// The largest piece size for copies whose addresses, lengths and distances have
// this bitwise or: 16, 8, 4, 2 or 1.
__host__ __device__ inline unsigned PieceBytes(std::uint64_t all) {
  const std::uint64_t bits = all | 16;
  return static_cast<unsigned>(bits & (~bits + 1));
}

// Calls does(piece) with a piece of that size.
template <class Does>
__host__ __device__ auto WithPiece(unsigned bytes, const Does& does) {
  switch (bytes) {
    case 16:
      return does(uint4());
    case 8:
      return does(uint2());
    case 4:
      return does(std::uint32_t());
    case 2:
      return does(std::uint16_t());
    default:
      return does(std::uint8_t());
  }
}

// The type of pieces of that size.
template <unsigned kBytes>
constexpr auto PieceOfBytes() {
  if constexpr (kBytes == 16) {
    return uint4();
  } else if constexpr (kBytes == 8) {
    return uint2();
  } else if constexpr (kBytes == 4) {
    return std::uint32_t();
  } else if constexpr (kBytes == 2) {
    return std::uint16_t();
  } else {
    return std::uint8_t();
  }
}
template <unsigned kBytes>
using PieceOf = decltype(PieceOfBytes<kBytes>());

template <class Piece>
__device__ std::uint32_t PiecesOf(std::int64_t bytes) {
  return static_cast<std::uint32_t>(bytes / std::int64_t{sizeof(Piece)});
}

template <class Piece>
__device__ Piece LoadPiece(const std::byte* from) {
  return *reinterpret_cast<const Piece*>(from);
}
template <class Piece>
__device__ void StorePiece(const Piece& piece, std::byte* to) {
  *reinterpret_cast<Piece*>(to) = piece;
}

// Rows that are stored in columns, see StoredColumns (optimized/put_rows.h).
// Columns are not padded.
struct Columns {
  std::byte* data;
  std::uint32_t size;  // Bytes per element.
  std::int64_t stride;
  std::int64_t tile_stride;

  __device__ std::byte* Cell(int cell) const {
    return data + cell / kTileCells * tile_stride +
           std::int64_t{cell % kTileCells} * size;
  }
};

__host__ __device__ inline Columns ColumnsOf(const StoredRows& rows) {
  const auto size = static_cast<std::uint32_t>(SizeOf(rows.dtype));
  const std::int64_t tile = std::int64_t{kTileCells} * size;
  const std::int64_t elements = std::int64_t{rows.head_dim} * rows.heads;
  if (rows.layout == VLayout::kTiled) {
    return {rows.data, size, tile, elements * tile};
  }
  return {rows.data, size, rows.cells * size, tile};
}

__host__ __device__ inline std::int64_t RowBytes(const StoredRows& rows) {
  return RunBytes(rows.dtype, rows.head_dim) * rows.heads;
}

// Larger rows would need 64-bit numbers in kernels.
inline bool Fits(const StoredRows& rows) {
  return std::int64_t{rows.head_dim} * rows.heads < std::int64_t{1} << 30;
}

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_OPTIMIZED_CUDA_PIECES_H_
