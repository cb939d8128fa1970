// Put and gather; move_rows.cu and shift_rows.cu have the rest of rows.h.

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "optimized/cuda/elements.h"
#include "optimized/cuda/pieces.h"
#include "optimized/cuda/rows.h"

namespace kvtwin::optimized::cuda {
namespace {

std::uint64_t Address(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data);
}

// Rows to read: [head_dim, heads, rows] at any strides. The contiguous parts of
// a row are its runs: the row, a head, or an element.
class Source {
 public:
  explicit Source(const TensorView& tensor)
      : data_(static_cast<const std::byte*>(tensor.data)),
        row_stride_(tensor.stride[2]),
        head_stride_(tensor.stride[1]),
        element_stride_(tensor.stride[0]),
        row_(static_cast<std::uint32_t>(
            RunBytes(tensor.dtype, tensor.shape[0]) * tensor.shape[1])) {
    const std::int64_t head = RunBytes(tensor.dtype, tensor.shape[0]);
    const auto size = static_cast<std::int64_t>(SizeOf(tensor.dtype));
    const bool dense_heads = IsBlockDType(tensor.dtype) ||
                             tensor.shape[0] == 1 || tensor.stride[0] == size;
    std::int64_t run = size;
    if (dense_heads) {
      const bool dense = tensor.shape[1] == 1 || tensor.stride[1] == head;
      run = dense ? head * tensor.shape[1] : head;
    }
    run_ = static_cast<std::uint32_t>(run);
    head_runs_ = dense_heads ? 1 : static_cast<std::uint32_t>(tensor.shape[0]);
    all_ = Address(data_) | static_cast<std::uint64_t>(run);
    if (tensor.shape[2] > 1) all_ |= static_cast<std::uint64_t>(row_stride_);
    if (run_ < row_) all_ |= static_cast<std::uint64_t>(head_stride_);
    if (head_runs_ > 1) all_ |= static_cast<std::uint64_t>(element_stride_);
  }

  // Stored rows that do not lie in columns.
  explicit Source(const StoredRows& rows)
      : Source(DenseView(rows.data, rows.dtype,
                         {rows.head_dim, rows.heads, rows.cells, 1})) {}

  std::uint32_t row_bytes() const { return row_; }
  // The bitwise or of all addresses and distances; see PieceBytes.
  std::uint64_t all() const { return all_; }

  // The address of bytes in a row. Requires: they lie in one run. (Not checked:
  // the caller knows how many bytes it reads.)
  __device__ const std::byte* At(std::int64_t row, std::uint32_t byte) const {
    const std::byte* from = data_ + row * row_stride_;
    if (run_ >= row_) return from + byte;
    const std::uint32_t run = byte / run_;
    from += byte - run * run_;
    if (head_runs_ == 1) return from + run * head_stride_;
    const std::uint32_t head = run / head_runs_;
    return from + head * head_stride_ +
           (run - head * head_runs_) * element_stride_;
  }

 private:
  const std::byte* data_;
  std::int64_t row_stride_;
  std::int64_t head_stride_;
  std::int64_t element_stride_;
  std::uint32_t row_;  // Bytes of a row.
  std::uint32_t run_;
  std::uint32_t head_runs_;
  std::uint64_t all_;
};

// Loaders: how rows are read, and what is stored. kFromBytes bytes at a time
// become a Stored.

template <class Piece>
struct Copies {
  using Held = Piece;
  using Stored = Piece;
  static constexpr unsigned kFromBytes = sizeof(Piece);

  __device__ static Held Load(const std::byte* from) {
    return LoadPiece<Piece>(from);
  }
  __device__ static Stored Become(Held held) { return held; }
};

// Rounds f32, four at a time.
template <class Format>
struct RoundsFour {
  using Held = uint4;
  using T = typename Format::T;
  static constexpr bool kBytes = sizeof(T) == 1;
  using Stored = std::conditional_t<kBytes, std::uint32_t, uint2>;
  static constexpr unsigned kFromBytes = sizeof(Held);

  __device__ static Held Load(const std::byte* from) {
    return LoadPiece<uint4>(from);
  }
  __device__ static Stored Become(Held held) {
    const std::uint32_t x = Rounded(held.x);
    const std::uint32_t y = Rounded(held.y);
    const std::uint32_t z = Rounded(held.z);
    const std::uint32_t w = Rounded(held.w);
    if constexpr (kBytes) {
      return x | y << 8 | z << 16 | w << 24;
    } else {
      return make_uint2(x | y << 16, z | w << 16);
    }
  }
  __device__ static std::uint32_t Rounded(std::uint32_t bits) {
    return Format::Rounded(__uint_as_float(bits));
  }
};

// Reads an f32 from any address.
__device__ float LoadFloat(const std::byte* from) {
  if (reinterpret_cast<std::uintptr_t>(from) % sizeof(float) == 0) {
    return LoadPiece<float>(from);
  }
  float value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <class Format>
struct RoundsOne {
  using Held = float;
  using T = typename Format::T;
  using Stored = T;
  static constexpr unsigned kFromBytes = sizeof(float);

  __device__ static Held Load(const std::byte* from) { return LoadFloat(from); }
  __device__ static Stored Become(Held held) { return Format::Rounded(held); }
};

// Calls does(loader) with the widest loader that the alignments allow. `to` is
// the bitwise or of the destination's addresses and distances.
template <class Does>
cudaError_t WithLoader(DType from, const Source& source, DType dtype,
                       std::uint64_t to, const Does& does) {
  if (from == dtype) {
    return WithPiece(PieceBytes(source.all() | to), [&](auto piece) {
      return does(Copies<decltype(piece)>());
    });
  }
  const bool four = PieceBytes(source.all()) == sizeof(uint4) &&
                    PieceBytes(to) >= 4 * SizeOf(dtype);
  return WithNarrow(dtype, [&](auto format) {
    using Format = decltype(format);
    return four ? does(RoundsFour<Format>()) : does(RoundsOne<Format>());
  });
}

// Row from[i] becomes row to[i]; a null list stands for i.
struct RowLists {
  const int* from;
  const int* to;
};

template <class Loader>
__global__ void __launch_bounds__(kBlockThreads)
    StoreRows(Source from, RowLists lists, std::byte* to,
              std::int64_t row_bytes, Parts parts) {
  ForEachPart(parts, kTogether, [&](std::int64_t i, std::uint32_t first) {
    typename Loader::Held held[kTogether];
    const std::int64_t row = lists.from == nullptr ? i : lists.from[i];
    ForEachPiece(parts, first, [&](unsigned k, std::uint32_t piece) {
      held[k] = Loader::Load(from.At(row, piece * Loader::kFromBytes));
    });
    std::byte* const out =
        to + (lists.to == nullptr ? i : lists.to[i]) * row_bytes;
    ForEachPiece(parts, first, [&](unsigned k, std::size_t piece) {
      StorePiece(Loader::Become(held[k]),
                 out + piece * sizeof(typename Loader::Stored));
    });
  });
}

template <class Loader>
cudaError_t LaunchStoreRows(Loader, const Source& from, const RowLists& lists,
                            std::byte* to, std::int64_t row_bytes,
                            std::int64_t rows, cudaStream_t stream) {
  const std::uint32_t pieces = from.row_bytes() / Loader::kFromBytes;
  const Parts parts = PartsOf(rows, pieces, kTogether);
  return Launch(StoreRows<Loader>, BlocksFor(parts.threads()), kBlockThreads, 0,
                stream, from, lists, to, row_bytes, parts);
}

// Blocks ----------------------------------------------------------------------

template <bool kWide>
__device__ void LoadNumbers(const Source& from, std::int64_t row,
                            std::uint32_t element,
                            float (&numbers)[kTeamNumbers]) {
  constexpr unsigned kSize = sizeof(float);
  if constexpr (kWide) {
    const auto four = LoadPiece<float4>(from.At(row, element * kSize));
    numbers[0] = four.x;
    numbers[1] = four.y;
    numbers[2] = four.z;
    numbers[3] = four.w;
  } else {
    for (unsigned k = 0; k < kTeamNumbers; ++k) {
      numbers[k] = LoadFloat(from.At(row, (element + k) * kSize));
    }
  }
}

// Each team stores a block. kWide: four numbers can be read at once.
template <class Format, bool kWide>
__global__ void __launch_bounds__(kBlockThreads)
    StoreBlockRows(Source from, const int* cells, std::byte* to,
                   std::int64_t rows, std::uint32_t row_blocks) {
  const std::int64_t count = rows * row_blocks;
  const unsigned lane = threadIdx.x % kTeamLanes;
  const std::int64_t thread = GridThread();
  // All lanes of a warp stay together to the end.
  for (std::int64_t first = thread - thread % kWarpLanes;
       first < count * kTeamLanes; first += GridThreads()) {
    const std::int64_t i = (first + threadIdx.x % kWarpLanes) / kTeamLanes;
    const bool wanted = i < count;
    float numbers[kTeamNumbers] = {};
    std::byte* block = nullptr;
    if (wanted) {
      const std::int64_t row = i / row_blocks;
      const auto number = static_cast<std::uint32_t>(i - row * row_blocks);
      const std::uint32_t element =
          number * unsigned{kBlockElements} + lane * kTeamNumbers;
      LoadNumbers<kWide>(from, row, element, numbers);
      block = to +
              (cells[row] * std::int64_t{row_blocks} + number) * Format::kBytes;
    }
    StoreBlock<Format>(numbers, lane, wanted, block);
  }
}

template <class Format>
cudaError_t PutBlocks(Format, const Source& from, const int* cells,
                      const StoredRows& to, std::int64_t rows,
                      cudaStream_t stream) {
  const bool wide = PieceBytes(from.all()) == sizeof(float4);
  const auto row_blocks =
      static_cast<std::uint32_t>(RowBytes(to) / Format::kBytes);
  return Launch(
      wide ? StoreBlockRows<Format, true> : StoreBlockRows<Format, false>,
      BlocksFor(rows * row_blocks * kTeamLanes), kBlockThreads, 0, stream, from,
      cells, to.data, rows, row_blocks);
}

// Columns ---------------------------------------------------------------------

// Rows become columns, and back, by way of shared memory: a block stages up to
// kStagedBytes bytes of up to kStagedRows rows. So neighbouring threads have
// neighbouring elements of a row, and then neighbouring rows, which mostly go
// to neighbouring cells. Staged rows are padded by a word, so that the elements
// of a column lie in different banks.
constexpr unsigned kStagedRows = 64;
constexpr unsigned kStagedBytes = 256;
constexpr unsigned kStagedStride = kStagedBytes + 4;
constexpr unsigned kWarps = kBlockThreads / kWarpLanes;
constexpr unsigned kLaneRows = kStagedRows / kWarpLanes;

// The part that a block stages.
struct Staged {
  std::int64_t row;  // The first row.
  unsigned rows;
  std::uint32_t byte;  // The first byte, of each row.
  unsigned bytes;
};

struct Tiles {
  std::int64_t rows;
  std::uint32_t row_bytes;

  __host__ __device__ std::uint32_t parts() const {
    return (row_bytes - 1) / kStagedBytes + 1;
  }
  __host__ __device__ std::int64_t count() const {
    return ((rows - 1) / kStagedRows + 1) * parts();
  }
  __device__ Staged At(std::int64_t i) const {
    const std::int64_t row = i / parts() * kStagedRows;
    const auto byte = static_cast<std::uint32_t>(i % parts()) * kStagedBytes;
    const std::int64_t rest = rows - row;
    return {row, rest < kStagedRows ? static_cast<unsigned>(rest) : kStagedRows,
            byte,
            row_bytes - byte < kStagedBytes ? row_bytes - byte : kStagedBytes};
  }
};

// In shared memory pieces lie on word boundaries.
template <class Piece>
__device__ void StoreInWords(Piece piece, std::byte* to) {
  StorePiece(piece, to);
}
__device__ void StoreInWords(uint2 piece, std::byte* to) {
  StorePiece(piece.x, to);
  StorePiece(piece.y, to + 4);
}
__device__ void StoreInWords(uint4 piece, std::byte* to) {
  StoreInWords(make_uint2(piece.x, piece.y), to);
  StoreInWords(make_uint2(piece.z, piece.w), to + 8);
}

// Calls does(k, row, byte) for this thread's pieces of the staged part in one
// turn: piece k is in that row, from that byte on.
template <unsigned kBytes, class Does>
__device__ void ForEachStaged(const Staged& staged, unsigned turn,
                              const Does& does) {
  constexpr unsigned kRowPieces = kStagedBytes / kBytes;
  for (unsigned k = 0; k < kTogether; ++k) {
    const unsigned i = (turn * kTogether + k) * kBlockThreads + threadIdx.x;
    const unsigned row = i / kRowPieces;
    const unsigned byte = i % kRowPieces * kBytes;
    if (row < staged.rows && byte < staged.bytes) does(k, row, byte);
  }
}
template <unsigned kBytes>
constexpr unsigned kTurns =
    kStagedRows* kStagedBytes / kBytes / kBlockThreads / kTogether;

// T is the type of an element.
template <class Loader, class T>
__global__ void __launch_bounds__(kBlockThreads)
    StoreColumns(Source from, const int* cells, Columns to, Tiles tiles) {
  __shared__ std::uint32_t words[kStagedRows * kStagedStride / 4];
  auto* const shared = reinterpret_cast<std::byte*>(words);
  constexpr unsigned kBytes = sizeof(typename Loader::Stored);
  for (std::int64_t i = blockIdx.x; i < tiles.count(); i += gridDim.x) {
    const Staged staged = tiles.At(i);
    for (unsigned turn = 0; turn < kTurns<kBytes>; ++turn) {
      typename Loader::Held held[kTogether];
      ForEachStaged<kBytes>(
          staged, turn, [&](unsigned k, unsigned row, unsigned byte) {
            held[k] = Loader::Load(
                from.At(staged.row + row,
                        (staged.byte + byte) / kBytes * Loader::kFromBytes));
          });
      ForEachStaged<kBytes>(staged, turn,
                            [&](unsigned k, unsigned row, unsigned byte) {
                              StoreInWords(Loader::Become(held[k]),
                                           shared + row * kStagedStride + byte);
                            });
    }
    __syncthreads();

    const unsigned lane = threadIdx.x % kWarpLanes;
    const std::int64_t first = staged.byte / sizeof(T);
    std::byte* at[kLaneRows];
    for (unsigned k = 0; k < kLaneRows; ++k) {
      const unsigned row = lane + k * kWarpLanes;
      if (row >= staged.rows) break;
      at[k] = to.Cell(cells[staged.row + row]) + first * to.stride;
    }
    for (unsigned column = threadIdx.x / kWarpLanes;
         column < staged.bytes / sizeof(T); column += kWarps) {
      const std::byte* element = shared + column * sizeof(T);
      for (unsigned k = 0; k < kLaneRows; ++k) {
        const unsigned row = lane + k * kWarpLanes;
        if (row >= staged.rows) break;
        StorePiece(LoadPiece<T>(element + row * kStagedStride),
                   at[k] + column * to.stride);
      }
    }
    __syncthreads();
  }
}

template <class Piece, class T>
__global__ void __launch_bounds__(kBlockThreads)
    GatherColumns(Columns from, const int* cells, std::byte* out, Tiles tiles) {
  __shared__ std::uint32_t words[kStagedRows * kStagedStride / 4];
  auto* const shared = reinterpret_cast<std::byte*>(words);
  for (std::int64_t i = blockIdx.x; i < tiles.count(); i += gridDim.x) {
    const Staged staged = tiles.At(i);
    const unsigned lane = threadIdx.x % kWarpLanes;
    const std::int64_t first = staged.byte / sizeof(T);
    const unsigned columns = staged.bytes / sizeof(T);
    const std::byte* at[kLaneRows];
    for (unsigned k = 0; k < kLaneRows; ++k) {
      const unsigned row = lane + k * kWarpLanes;
      if (row >= staged.rows) break;
      at[k] = from.Cell(cells[staged.row + row]) + first * from.stride;
    }
    for (unsigned column = threadIdx.x / kWarpLanes; column < columns;
         column += kWarps * kTogether) {
      T held[kTogether][kLaneRows];
      for (unsigned c = 0; c < kTogether; ++c) {
        for (unsigned k = 0; k < kLaneRows; ++k) {
          if (column + c * kWarps >= columns) break;
          if (lane + k * kWarpLanes >= staged.rows) break;
          held[c][k] =
              LoadPiece<T>(at[k] + (column + c * kWarps) * from.stride);
        }
      }
      for (unsigned c = 0; c < kTogether; ++c) {
        for (unsigned k = 0; k < kLaneRows; ++k) {
          const unsigned row = lane + k * kWarpLanes;
          if (column + c * kWarps >= columns || row >= staged.rows) break;
          StorePiece(held[c][k], shared + row * kStagedStride +
                                     (column + c * kWarps) * sizeof(T));
        }
      }
    }
    __syncthreads();

    for (unsigned turn = 0; turn < kTurns<sizeof(Piece)>; ++turn) {
      ForEachStaged<sizeof(Piece)>(
          staged, turn, [&](unsigned, unsigned row, unsigned byte) {
            StorePiece(LoadPiece<Piece>(shared + row * kStagedStride + byte),
                       out +
                           (staged.row + row) * std::int64_t{tiles.row_bytes} +
                           staged.byte + byte);
          });
    }
    __syncthreads();
  }
}

// Calls does(element) with a type of that size.
template <class Does>
cudaError_t WithSize(std::size_t size, const Does& does) {
  if (size == 4) return does(std::uint32_t());
  return size == 2 ? does(std::uint16_t()) : does(std::uint8_t());
}

cudaError_t PutColumns(const TensorView& from, const Source& source,
                       const int* cells, const StoredRows& to,
                       cudaStream_t stream) {
  const auto row_bytes = static_cast<std::uint32_t>(RowBytes(to));
  const Tiles tiles = {from.shape[2], row_bytes};
  const auto blocks =
      static_cast<unsigned>(std::min(tiles.count(), kMaxBlocks));
  const auto put = [&](auto loader, auto element) {
    return Launch(StoreColumns<decltype(loader), decltype(element)>, blocks,
                  kBlockThreads, 0, stream, source, cells, ColumnsOf(to),
                  tiles);
  };
  return WithLoader(from.dtype, source, to.dtype, row_bytes, [&](auto loader) {
    if constexpr (requires { typename decltype(loader)::T; }) {
      return put(loader, typename decltype(loader)::T());
    } else {
      return WithSize(SizeOf(to.dtype),
                      [&](auto element) { return put(loader, element); });
    }
  });
}

}  // namespace

cudaError_t PutRows(const TensorView& from, const int* cells,
                    const StoredRows& to, cudaStream_t stream) {
  const std::int64_t rows = from.shape[2];
  if (rows == 0) return cudaSuccess;
  if (!Fits(to)) return cudaErrorInvalidValue;
  const Source source(from);
  if (to.layout != VLayout::kPlain) {
    return PutColumns(from, source, cells, to, stream);
  }
  if (IsBlockDType(to.dtype) && from.dtype != to.dtype) {
    return WithBlocks(to.dtype, [&](auto format) {
      return PutBlocks(format, source, cells, to, rows, stream);
    });
  }
  const std::int64_t row_bytes = RowBytes(to);
  const std::uint64_t all =
      Address(to.data) | static_cast<std::uint64_t>(row_bytes);
  return WithLoader(from.dtype, source, to.dtype, all, [&](auto loader) {
    return LaunchStoreRows(loader, source, {nullptr, cells}, to.data, row_bytes,
                           rows, stream);
  });
}

cudaError_t GatherRows(const StoredRows& from, const int* cells,
                       std::int64_t count, std::byte* out,
                       cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  if (!Fits(from)) return cudaErrorInvalidValue;
  const std::int64_t row_bytes = RowBytes(from);
  const std::uint64_t all =
      Address(out) | static_cast<std::uint64_t>(row_bytes);
  if (from.layout == VLayout::kPlain) {
    const Source source(from);
    return WithLoader(from.dtype, source, from.dtype, all, [&](auto loader) {
      return LaunchStoreRows(loader, source, {cells, nullptr}, out, row_bytes,
                             count, stream);
    });
  }
  const Tiles tiles = {count, static_cast<std::uint32_t>(row_bytes)};
  const auto blocks =
      static_cast<unsigned>(std::min(tiles.count(), kMaxBlocks));
  return WithSize(SizeOf(from.dtype), [&](auto element) {
    using T = decltype(element);
    return Launch(
        all % 4 == 0 ? GatherColumns<std::uint32_t, T> : GatherColumns<T, T>,
        blocks, kBlockThreads, 0, stream, ColumnsOf(from), cells, out, tiles);
  });
}

}  // namespace kvtwin::optimized::cuda
