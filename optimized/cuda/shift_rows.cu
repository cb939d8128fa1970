// Shifts K rows in place. Results are those of RowShift
// (optimized/row_shift.h), to the bit: -fmad=false keeps products and sums
// apart.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>

#include "core/assert.h"
#include "optimized/cuda/elements.h"
#include "optimized/cuda/pieces.h"
#include "optimized/cuda/rows.h"

namespace kvtwin::optimized::cuda {
namespace {

using Kind = DeviceShift::Kind;

// By element ------------------------------------------------------------------

// A unit is what a thread shifts of a row at a time: kCount elements, and, if
// the elements of pairs lie apart, as many others. A thread shifts it in
// kTogether rows, with cosines and sines that it reads once.
struct Units {
  std::uint32_t of_head;
  std::uint32_t step;   // In elements, from one unit to the next.
  std::uint32_t apart;  // From elements to their partners; 0 if none.
};

template <unsigned kCount>
Units UnitsOf(const StoredRows& keys, const DeviceShift& shift) {
  const auto head_dim = static_cast<std::uint32_t>(keys.head_dim);
  const auto pairs = static_cast<std::uint32_t>(shift.pairs);
  if (shift.kind == Kind::kTurnHalves) return {pairs / kCount, kCount, pairs};
  if (shift.kind != Kind::kTurnAdjacent) return {head_dim / kCount, kCount, 0};
  if (kCount == 1) return {pairs, 2, 1};
  return {2 * pairs / kCount, kCount, 0};
}

// This many elements are read at once, if alignment allows.
constexpr int kWide = 4;

bool IsWide(const StoredRows& keys, const DeviceShift& shift) {
  const auto all = reinterpret_cast<std::uintptr_t>(keys.data) |
                   reinterpret_cast<std::uintptr_t>(shift.cosines) |
                   reinterpret_cast<std::uintptr_t>(shift.sines);
  const int turned = shift.kind == Kind::kTurnAdjacent ? 2 * shift.pairs
                     : shift.kind == Kind::kTurnHalves ? shift.pairs
                                                       : 0;
  return all % (kWide * sizeof(float)) == 0 && keys.head_dim % kWide == 0 &&
         turned % kWide == 0;
}

// An unrolled loop, so that arrays indexed by it stay in registers.
template <unsigned kCount, class Does>
__device__ void Unrolled(const Does& does) {
  const auto all = [&]<unsigned... kIndex>(
      std::integer_sequence<unsigned, kIndex...>) {
    (does(kIndex), ...);
  };
  all(std::make_integer_sequence<unsigned, kCount>());
}

template <class T, unsigned kCount>
struct Elements {
  T at[kCount];
};

template <class T, unsigned kCount>
__device__ void LoadElements(const void* from, Elements<T, kCount>& to) {
  using Piece = PieceOf<sizeof(T) * kCount>;
  to = std::bit_cast<Elements<T, kCount>>(*static_cast<const Piece*>(from));
}
template <class T, unsigned kCount>
__device__ void StoreElements(const Elements<T, kCount>& from, std::byte* to) {
  StorePiece(std::bit_cast<PieceOf<sizeof(T) * kCount>>(from), to);
}

// The cosines and sines of a unit.
template <unsigned kCount>
struct Table {
  Elements<float, kCount> cosines;
  Elements<float, kCount> sines;
};

// Turns adjacent pairs.
template <class Format, unsigned kCount>
__device__ void TurnAdjacent(const Table<kCount>& table,
                             Elements<typename Format::T, kCount>& x) {
  const auto before = x;
  Unrolled<kCount>([&](unsigned i) {
    const float own = Format::Float(before.at[i]);
    const float other = Format::Float(before.at[i ^ 1]);
    x.at[i] = Turned<Format>(
        before.at[i], own * table.cosines.at[i] + other * table.sines.at[i]);
  });
}

// Turns pairs that lie apart. Both elements have the same cosine, and the same
// sine up to its sign.
template <class Format, unsigned kCount>
__device__ void TurnApart(const Table<kCount>& table,
                          Elements<typename Format::T, kCount>& x,
                          Elements<typename Format::T, kCount>& y) {
  Unrolled<kCount>([&](unsigned i) {
    const float own = Format::Float(x.at[i]);
    const float other = Format::Float(y.at[i]);
    const float cosine = table.cosines.at[i];
    const float sine = table.sines.at[i];
    x.at[i] = Turned<Format>(x.at[i], own * cosine + other * sine);
    y.at[i] = Turned<Format>(y.at[i], other * cosine + own * -sine);
  });
}

template <class Format, unsigned kCount>
__global__ void __launch_bounds__(kBlockThreads)
    ShiftElements(StoredRows keys, const int* cells, std::int64_t count,
                  DeviceShift shift, Units units, Parts parts) {
  using T = typename Format::T;
  using Some = Elements<T, kCount>;
  const std::int64_t row_bytes = RowBytes(keys);
  ForEachPart(parts, 1, [&](std::int64_t group, std::uint32_t unit) {
    if (unit >= parts.pieces) return;
    const std::uint32_t head = unit / units.of_head;
    // The unit's first element in the head.
    const std::uint32_t first = (unit - head * units.of_head) * units.step;
    const std::size_t at =
        (std::size_t{head} * static_cast<unsigned>(keys.head_dim) + first) *
        sizeof(T);
    const std::size_t apart = units.apart * sizeof(T);
    const std::int64_t rest = count - group * kTogether;

    std::byte* some[kTogether];
    Some x[kTogether];
    Some y[kTogether];
    Unrolled<kTogether>([&](unsigned k) {
      if (k >= rest) return;
      some[k] = keys.data + cells[group * kTogether + k] * row_bytes + at;
      LoadElements(some[k], x[k]);
      if (apart != 0) LoadElements(some[k] + apart, y[k]);
    });
    if (shift.kind == Kind::kAdd || shift.kind == Kind::kTagAdd) {
      const bool tagged = shift.kind == Kind::kTagAdd && first == 0;
      Unrolled<kTogether>([&](unsigned k) {
        if (k >= rest) return;
        const T tag = x[k].at[0];
        Unrolled<kCount>([&](unsigned i) {
          x[k].at[i] = Added<Format>(x[k].at[i], shift.offset);
        });
        if (tagged) x[k].at[0] = tag;
        StoreElements(x[k], some[k]);
      });
      return;
    }
    Table<kCount> table;
    LoadElements(shift.cosines + first, table.cosines);
    LoadElements(shift.sines + first, table.sines);
    Unrolled<kTogether>([&](unsigned k) {
      if (k >= rest) return;
      if (apart != 0) {
        TurnApart<Format>(table, x[k], y[k]);
        StoreElements(y[k], some[k] + apart);
      } else if constexpr (kCount > 1) {
        TurnAdjacent<Format>(table, x[k]);
      }
      StoreElements(x[k], some[k]);
    });
  });
}

template <class Format, unsigned kCount>
cudaError_t LaunchElements(const StoredRows& keys, const int* cells,
                           std::int64_t count, const DeviceShift& shift,
                           cudaStream_t stream) {
  const Units units = UnitsOf<kCount>(keys, shift);
  const std::int64_t groups = (count - 1) / kTogether + 1;
  const Parts parts = PartsOf(
      groups, units.of_head * static_cast<std::uint32_t>(keys.heads), 1);
  return Launch(ShiftElements<Format, kCount>, BlocksFor(parts.threads()),
                kBlockThreads, 0, stream, keys, cells, count, shift, units,
                parts);
}

// Blocks ----------------------------------------------------------------------

// A thread block copies a chunk of a row to shared memory, as stored, and
// shifts it from there: so the old value of a pair's other element can still be
// read after its block was written.
struct Chunks {
  std::uint32_t blocks;  // Blocks of a chunk; whole heads if turned by halves.
  std::uint32_t of_row;
  std::uint32_t row_blocks;
};

// The dynamic shared memory that a kernel may use without asking for more.
constexpr std::uint32_t kSharedBytes = 48 << 10;
// Each team has several blocks, so that barriers cost little.
constexpr std::uint32_t kChunkBlocks = 4 * kBlockThreads / kTeamLanes;

template <class Format>
Chunks ChunksOf(const StoredRows& keys, const DeviceShift& shift) {
  const auto head_blocks =
      static_cast<std::uint32_t>(keys.head_dim / kBlockElements);
  const std::uint32_t row_blocks =
      head_blocks * static_cast<std::uint32_t>(keys.heads);
  const std::uint32_t unit = shift.kind == Kind::kTurnHalves ? head_blocks : 1;
  const std::uint32_t blocks =
      std::min(std::max(kChunkBlocks / unit, 1U) * unit, row_blocks);
  return {blocks, (row_blocks - 1) / blocks + 1, row_blocks};
}

// Element i of contiguous blocks.
template <class Format>
__device__ float NumberAt(const std::byte* blocks, std::uint32_t i) {
  constexpr auto kBlock = static_cast<std::uint32_t>(kBlockElements);
  return Format::Number(blocks + i / kBlock * Format::kBytes, i % kBlock);
}

// The shifted value of element i of a head. Requires: it is not a NaN.
template <class Format>
__device__ float ShiftedNumber(const std::byte* head, std::uint32_t i,
                               float before, const DeviceShift& shift) {
  KVTWIN_DCHECK(before == before);
  if (shift.kind == Kind::kAdd || shift.kind == Kind::kTagAdd) {
    const bool stays = shift.kind == Kind::kTagAdd && i == 0;
    return stays ? before : before + shift.offset;
  }
  const auto pairs = static_cast<std::uint32_t>(shift.pairs);
  if (i >= 2 * pairs) return before;
  const std::uint32_t other = shift.kind == Kind::kTurnAdjacent ? i ^ 1
                              : i < pairs                       ? i + pairs
                                                                : i - pairs;
  return before * shift.cosines[i] +
         NumberAt<Format>(head, other) * shift.sines[i];
}

template <class Format>
__global__ void __launch_bounds__(kBlockThreads)
    ShiftBlocks(StoredRows keys, const int* cells, std::int64_t count,
                DeviceShift shift, Chunks chunks) {
  std::byte* const shared = DynamicShared();
  constexpr auto kBlock = static_cast<std::uint32_t>(kBlockElements);
  const auto head_dim = static_cast<std::uint32_t>(keys.head_dim);
  const unsigned lane = threadIdx.x % kTeamLanes;
  const unsigned warp_first = threadIdx.x - threadIdx.x % kWarpLanes;
  for (std::int64_t i = blockIdx.x; i < count * chunks.of_row; i += gridDim.x) {
    const std::int64_t row = i / chunks.of_row;
    const std::uint32_t first =
        static_cast<std::uint32_t>(i - row * chunks.of_row) * chunks.blocks;
    const std::uint32_t rest = chunks.row_blocks - first;
    const std::uint32_t blocks = rest < chunks.blocks ? rest : chunks.blocks;
    std::byte* const data =
        keys.data +
        (cells[row] * std::int64_t{chunks.row_blocks} + first) * Format::kBytes;
    for (std::uint32_t at = threadIdx.x * 2; at < blocks * Format::kBytes;
         at += kBlockThreads * 2) {
      StorePiece(LoadPiece<std::uint16_t>(data + at), shared + at);
    }
    __syncthreads();

    // All lanes of a warp stay together to the end.
    for (std::uint32_t warp = warp_first; warp < blocks * kTeamLanes;
         warp += kBlockThreads) {
      const std::uint32_t block =
          (warp + threadIdx.x % kWarpLanes) / kTeamLanes;
      const bool inside = block < blocks;
      const std::uint32_t begin = inside ? block * kBlock : 0;
      const std::uint32_t in_head = (first * kBlock + begin) % head_dim;
      // The address of the head's element 0, which may lie before the chunk:
      // only elements in the chunk are read.
      const std::byte* const head =
          shared + (std::int64_t{begin} - in_head) / kBlock * Format::kBytes;
      float numbers[kTeamNumbers];
      bool changed = false;
      for (unsigned k = 0; k < kTeamNumbers; ++k) {
        const std::uint32_t element = in_head + lane * kTeamNumbers + k;
        const float before = NumberAt<Format>(head, element);
        numbers[k] = before;
        if (before != before) continue;
        numbers[k] = ShiftedNumber<Format>(head, element, before, shift);
        changed |= __float_as_uint(numbers[k]) != __float_as_uint(before);
      }
      const unsigned team = (threadIdx.x % kWarpLanes) / kTeamLanes;
      const unsigned team_lanes = ((1U << kTeamLanes) - 1)
                                  << (team * kTeamLanes);
      const bool any = (__ballot_sync(kAllLanes, changed) & team_lanes) != 0;
      StoreBlock<Format>(numbers, lane, inside && any,
                         data + begin / kBlock * Format::kBytes);
    }
    __syncthreads();
  }
}

template <class Format>
cudaError_t LaunchBlocks(const StoredRows& keys, const int* cells,
                         std::int64_t count, const DeviceShift& shift,
                         cudaStream_t stream) {
  const Chunks chunks = ChunksOf<Format>(keys, shift);
  const std::uint64_t bytes = std::uint64_t{chunks.blocks} * Format::kBytes;
  if (bytes > kSharedBytes) return cudaErrorInvalidValue;
  const auto blocks = static_cast<unsigned>(
      std::min<std::int64_t>(count * chunks.of_row, kMaxBlocks));
  return Launch(ShiftBlocks<Format>, blocks, kBlockThreads, bytes, stream, keys,
                cells, count, shift, chunks);
}

}  // namespace

cudaError_t ShiftRows(const StoredRows& keys, const int* cells,
                      std::int64_t count, const DeviceShift& shift,
                      cudaStream_t stream) {
  const bool turns =
      shift.kind == Kind::kTurnAdjacent || shift.kind == Kind::kTurnHalves;
  if (count == 0 || (turns && shift.pairs == 0)) return cudaSuccess;
  if (!Fits(keys)) return cudaErrorInvalidValue;
  if (IsBlockDType(keys.dtype)) {
    return WithBlocks(keys.dtype, [&](auto format) {
      return LaunchBlocks<decltype(format)>(keys, cells, count, shift, stream);
    });
  }
  return WithElements(keys.dtype, [&](auto format) {
    using Format = decltype(format);
    return IsWide(keys, shift)
               ? LaunchElements<Format, kWide>(keys, cells, count, shift,
                                               stream)
               : LaunchElements<Format, 1>(keys, cells, count, shift, stream);
  });
}

}  // namespace kvtwin::optimized::cuda
