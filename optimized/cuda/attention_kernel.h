// The kernels of attention.cu.
//
// A block is one warp. Its share is one KV head, up to 8 of the heads that
// share it, up to 128 elements of V and a range of the visible tiles (of 32
// cells) of a row. Warps do not wait for each other: each has a ring of pieces
// (a tile's K or V, or 128 elements of them), in which 3 pieces are being
// copied while one is worked on. With f16 rows of 128 elements a piece is 8
// KiB, and an H200 runs 5 warps at a time on a multiprocessor.

#ifndef KVTWIN_OPTIMIZED_CUDA_ATTENTION_KERNEL_H_
#define KVTWIN_OPTIMIZED_CUDA_ATTENTION_KERNEL_H_

#include <cstddef>
#include <cstdint>

#include "core/assert.h"
#include "optimized/cuda/attention_rows.h"

namespace kvtwin::optimized::cuda {

inline constexpr int kLogWarp = 5;
inline constexpr int kRing = 4;             // Pieces in the ring.
inline constexpr int kShifts = kPieceDims;  // Bytes for shifts.
static_assert(kPieceDims >= kTile);

// Where K or V rows lie. Strides are in bytes. Row layout: the row of head h in
// place i begins head_stride * h + row_stride * i after `data`. Column layout:
// neighbouring cells are contiguous, and element e of tile t begins head_stride
// * h + tile_stride * t + element_stride * e after `data`.
struct RowsAt {
  const std::byte* data;
  DType dtype;
  int head_dim;
  std::int64_t head_stride;
  unsigned row_stride;
  std::int64_t tile_stride;
  std::int64_t element_stride;
  int row_bytes;
  int piece_bytes;  // kPieceDims elements of a row.
  int pitch;        // From run to run in shared memory.
};

// The visible tiles of each row: their index, and a bit for each cell.
struct TileList {
  const int2* tiles;  // [stride, rows]
  const int* counts;  // [rows]
  std::int64_t stride;
};

struct BlockTable {
  const int* blocks;  // [most_blocks, rows]; null: use the list.
  const int* lengths;
  int most_blocks;
  unsigned block_size;
  unsigned block_places;  // Places from one block to the next.
};

struct DecodeJob {
  const float* query;  // [k_head_dim, heads, rows]
  float scale;
  int kv_heads;
  int group;        // Heads that share a KV head.
  int groups;       // Parts of at most kGroup heads of a group.
  int value_parts;  // Parts of kPieceDims elements of V.
  int splits;
  RowsAt key;
  RowsAt value;
  int cells;  // Cells of a view.
  TileList list;
  BlockTable table;
  int slot_bytes;
  // For each split of each head of a row: the weighted sum of V, [v_head_dim,
  // splits, heads, rows]; and, in totals, the logarithm of the factor that
  // weights are divided by, and the sum of weights.
  float* sums;
  float2* totals;
};

// The work of one block. Neighbouring blocks share cells, so that cells that
// are read twice come from the second-level cache.
struct Share {
  int row;
  int split;
  int kv_head;
  int first_head;  // Counted over all heads.
  int heads;
  int value_part;

  __device__ explicit Share(const DecodeJob& job) {
    unsigned rest = blockIdx.x;
    const auto next = [&](int count) {
      const unsigned i = rest % static_cast<unsigned>(count);
      rest /= static_cast<unsigned>(count);
      return static_cast<int>(i);
    };
    value_part = next(job.value_parts);
    const int first = next(job.groups) * kGroup;
    kv_head = next(job.kv_heads);
    split = next(job.splits);
    row = static_cast<int>(rest);
    first_head = kv_head * job.group + first;
    heads = min(kGroup, job.group - first);
  }
};

// A tile as one lane sees it.
struct Tile {
  unsigned word;   // A bit for each visible cell.
  int index;       // Number of the tile in a view.
  unsigned place;  // Place of the lane's cell; kNowhere if hidden.
};
inline constexpr unsigned kNowhere = ~0U;

// Copies the pieces of a share's tiles to the ring, in order.
template <Form kForm, bool kColumns>
class Feeder {
 public:
  // The bytes of a slot before its runs.
  static constexpr int kShiftBytes = kForm == Form::kAny ? kShifts : 0;

  __device__ Feeder(const DecodeJob& job, const Share& share, int lane,
                    std::byte* ring)
      : job_(job), share_(share), lane_(lane), ring_(ring) {
    const bool listed = job.table.blocks == nullptr;
    length_ = listed ? 0 : job.table.lengths[share.row];
    const std::int64_t tiles =
        listed ? job.list.counts[share.row]
               : (length_ + std::int64_t{kTile - 1}) / kTile;
    at_ = static_cast<int>(tiles * share.split / job.splits);
    end_ = static_cast<int>(tiles * (share.split + 1) / job.splits);
    Look();
    key_pieces_ = (job.key.head_dim + kPieceDims - 1) / kPieceDims;
  }

  __device__ int key_pieces() const { return key_pieces_; }

  // Starts to copy the next piece; does nothing after the last one. Commits one
  // group of copies in either case.
  __device__ __forceinline__ void Feed() {
    if (piece_ == 0) Take();
    if (lane_ == slot_) words_ = tile_.word;
    if (tile_.word != 0) {
      const bool of_key = piece_ < key_pieces_;
      if (kColumns && !of_key) {
        CopyColumns();
      } else {
        CopyRows(of_key ? job_.key : job_.value,
                 of_key ? piece_ : share_.value_part);
      }
      piece_ = of_key ? piece_ + 1 : 0;
    }
    CopyAsyncCommit();
    slot_ = (slot_ + 1) % kRing;
  }

  // The visible cells of the tile whose piece is in a slot; 0 after the last
  // tile.
  __device__ __forceinline__ unsigned WordOf(int slot) const {
    return __shfl_sync(kAllLanes, words_, slot);
  }

 private:
  // Starts to read the place of tile `at_`, and does not wait for it.
  __device__ __forceinline__ void Look() {
    const BlockTable& table = job_.table;
    if (table.blocks == nullptr) {
      if (at_ < end_) {
        listed_ = job_.list.tiles[share_.row * job_.list.stride + at_];
      }
      return;
    }
    // Lanes past the last token read that token again.
    const int token = min(at_ * kTile + lane_, length_ - 1);
    if (at_ < end_) {
      const unsigned block = static_cast<unsigned>(token) / table.block_size;
      const std::int64_t row = std::int64_t{share_.row} * table.most_blocks;
      block_ = static_cast<unsigned>(table.blocks[row + block]);
      offset_ = static_cast<unsigned>(token) - block * table.block_size;
    }
  }

  // Makes tile `at_` the tile that is copied, and looks up the next one.
  __device__ __forceinline__ void Take() {
    tile_.word = 0;
    if (at_ >= end_) return;
    if (job_.table.blocks == nullptr) {
      tile_.word = static_cast<unsigned>(listed_.y);
      tile_.index = listed_.x;
      tile_.place = static_cast<unsigned>(listed_.x * kTile + lane_);
    } else {
      const int count = min(kTile, length_ - at_ * kTile);
      tile_.word = ~0U >> (kTile - count);
      tile_.place = block_ * job_.table.block_places + offset_;
    }
    if ((tile_.word >> lane_ & 1) == 0) tile_.place = kNowhere;
    ++at_;
    Look();
  }

  // Copies part `part` of the rows of the tile's visible cells.
  __device__ __forceinline__ void CopyRows(const RowsAt& rows, int part) {
    const int before = part * rows.piece_bytes;
    const std::byte* data =
        rows.data + share_.kv_head * rows.head_stride + before;
    const unsigned stride = rows.row_stride;
    CopyRuns<false>(kTile, min(rows.piece_bytes, rows.row_bytes - before),
                    rows.pitch, data, [&](int run, std::uint64_t& offset) {
                      const unsigned place =
                          __shfl_sync(kAllLanes, tile_.place, run);
                      offset = std::uint64_t{place} * stride;
                      return place != kNowhere;
                    });
  }

  __device__ __forceinline__ void CopyColumns() {
    const RowsAt& rows = job_.value;
    const int first = share_.value_part * kPieceDims;
    const int cells = min(kTile, job_.cells - tile_.index * kTile);
    const std::byte* data = rows.data + share_.kv_head * rows.head_stride +
                            tile_.index * rows.tile_stride +
                            first * rows.element_stride;
    const int runs = min(kPieceDims, rows.head_dim - first);
    const auto stride = static_cast<std::uint64_t>(rows.element_stride);
    CopyRuns<true>(runs, static_cast<int>(RunBytes(rows.dtype, cells)),
                   rows.pitch, data, [&](int run, std::uint64_t& offset) {
                     offset = static_cast<unsigned>(run) * stride;
                     return run < runs;
                   });
  }

  // Copies `count` runs of `bytes` bytes. offset_of(i, offset) returns whether
  // run i is wanted, and sets its offset after `data`; lanes call it together,
  // for runs up to the next multiple of 32. Nothing after the runs is read;
  // before them, only up to a 16-byte boundary. `kClip`: runs of other forms
  // than kAny may also end off a 16-byte boundary.
  template <bool kClip, class OffsetOf>
  __device__ __forceinline__ void CopyRuns(int count, int bytes, int pitch,
                                           const std::byte* data,
                                           const OffsetOf& offset_of) {
    constexpr bool kAny = kForm == Form::kAny;
    constexpr int kMaxBefore = kAny ? kGranule - 1 : 0;
    const int granules = (bytes + kMaxBefore + kGranule - 1) / kGranule;
    // A power of two of neighbouring lanes copies a run, so that each lane has
    // the same part of all its runs; only runs of kAny may take all lanes
    // twice.
    const int log = min(32 - __clz(granules - 1), kLogWarp);
    const int lanes = 1 << log;
    const int first = lane_ & (lanes - 1);
    int run = lane_ >> log;
    std::byte* slot = ring_ + slot_ * job_.slot_bytes;
    std::byte* to = slot + kShiftBytes + run * pitch + first * kGranule;
    if constexpr (!kAny) data += first * kGranule;
    const int step = kTile >> log;
    const int steps = ((count << log) + kTile - 1) / kTile;
    KVTWIN_UNROLL_4
    for (int i = 0; i < steps; ++i) {
      std::uint64_t offset = 0;
      const bool wanted = offset_of(run, offset) && first < granules;
      const std::byte* from = data + offset;
      if constexpr (kAny) {
        const int before =
            wanted ? static_cast<int>(reinterpret_cast<std::uintptr_t>(from) %
                                      kGranule)
                   : 0;
        // Also for runs that are not wanted: a shift must leave reads aligned
        // to an element.
        if (first == 0) slot[run] = static_cast<std::byte>(before);
        if (wanted) CopyShifted(before, bytes, first, lanes, from, to);
      } else if constexpr (kClip) {
        const int rest = min(bytes - first * kGranule, kGranule);
        if (wanted) CopyAsync16Zero(to, from, rest);
      } else {
        CopyAsync16If(wanted, to, from);
      }
      run += step;
      to += step * pitch;
    }
  }

  // Copies granules `granule`, granule + lanes, ... of a run that begins
  // `before` bytes after a boundary.
  __device__ __forceinline__ static void CopyShifted(int before, int bytes,
                                                     int granule, int lanes,
                                                     const std::byte* from,
                                                     std::byte* to) {
    const int end = before + bytes;
    from += granule * kGranule - before;
    for (int at = granule * kGranule; at < end; at += lanes * kGranule) {
      CopyAsync16Zero(to, from, min(end - at, kGranule));
      from += lanes * kGranule;
      to += lanes * kGranule;
    }
  }

  const DecodeJob& job_;
  const Share& share_;
  const int lane_;
  std::byte* const ring_;
  int length_;  // Tokens of the sequence in a table.
  int at_;      // The next tile, before end_.
  int end_;
  int2 listed_ = {};    // Tile at_ in a list.
  unsigned block_ = 0;  // Block of the lane's token of tile at_, in a table.
  unsigned offset_ = 0;
  int key_pieces_;
  Tile tile_ = {};
  int piece_ = 0;
  int slot_ = 0;
  unsigned words_ = 0;  // The word of the slot with this lane's number.
};

// Queries are multiplied by a power of two that brings the largest of a head to
// 2^14 or just above, weights to at most 2^15: so that what remains after
// rounding is not a subnormal f16.
inline constexpr int kQueryExponent = 14;
inline constexpr float kWeightExponent = 15;
inline constexpr float kLog2E = 1.44269504088896341F;

// 2^exponent. Requires: that is a normal f32.
__device__ __forceinline__ float PowerOfTwo(int exponent) {
  KVTWIN_DCHECK(-126 <= exponent && exponent <= 127);
  return __uint_as_float(static_cast<unsigned>(exponent + 127) << 23);
}

template <Form kForm>
__device__ __forceinline__ Left<kForm>* QueriesOf(int step, int lane) {
  return reinterpret_cast<Left<kForm>*>(DynamicShared()) + step * 32 + lane;
}

// Puts the queries of a share in shared memory, this lane's part for all steps.
// Returns the factor that turns its head's products into logarithms, to base 2,
// of weights.
template <Form kForm>
__device__ __forceinline__ float PutQueries(const DecodeJob& job,
                                            const Share& share, int lane) {
  const int head_dim = job.key.head_dim;
  const int heads = job.kv_heads * job.group;
  const int head = lane / 4;
  const float* query =
      job.query +
      (std::int64_t{share.row} * heads + share.first_head + head) * head_dim;
  const auto at = [&](int i) {
    return head < share.heads && i < head_dim ? query[i] : 0.0F;
  };
  const int steps = (head_dim + kStep - 1) / kStep;
  float largest = 0;
  for (int i = lane % 4; i < head_dim; i += 4) {
    largest = fmaxf(largest, fabsf(at(i)));
  }
  largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
  // Tinier queries stay tiny: their power would be too large.
  const int exponent =
      max(static_cast<int>(__float_as_uint(largest) >> 23) - 127, -100);
  const float power = PowerOfTwo(kQueryExponent - exponent);
  for (int step = 0; step < steps; ++step) {
    const int near = kStep * step + KeyDim<kForm>(lane, false);
    const int far = kStep * step + KeyDim<kForm>(lane, true);
    *QueriesOf<kForm>(step, lane) =
        LeftOf<kForm>({at(near) * power, at(near + 1) * power},
                      {at(far) * power, at(far + 1) * power});
  }
  return job.scale * kLog2E * PowerOfTwo(exponent - kQueryExponent);
}

// The softmax state of a lane's head, for the tiles so far.
struct Softmax {
  // Weights are 2^(score - base). The base is the largest score so far, less
  // kWeightExponent.
  float base;
  float total;  // Sum of weights of this lane's cells.
};

// Turns the products of a tile into weights, 0 for hidden cells: weights[i] are
// of cells 8i + 2t and the next one, in the order of CellAt. Returns the factor
// by which the sums of earlier tiles must be multiplied.
__device__ __forceinline__ float Weigh(const float (&products)[kTile / 8][4],
                                       const unsigned (&visible)[kTile / 8],
                                       float factor, Softmax& softmax,
                                       float2 (&weights)[kTile / 8]) {
  const float none = -__uint_as_float(0x7F800000);
  float largest = none;
  KVTWIN_UNROLL
  for (int i = 0; i < kTile / 8; ++i) {
    // Adds the products of the rounded queries and of the remainders.
    const float x = (products[i][0] + products[i][2]) * factor;
    const float y = (products[i][1] + products[i][3]) * factor;
    weights[i].x = (visible[i] & 0xFFFF) != 0 ? x : none;
    weights[i].y = visible[i] >> 16 != 0 ? y : none;
    largest = fmaxf(largest, fmaxf(weights[i].x, weights[i].y));
  }
  largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
  const float base = fmaxf(softmax.base, largest - kWeightExponent);
  const float shrink = exp2f(softmax.base - base);
  softmax.base = base;
  softmax.total *= shrink;
  KVTWIN_UNROLL
  for (int i = 0; i < kTile / 8; ++i) {
    weights[i].x = exp2f(weights[i].x - base);
    weights[i].y = exp2f(weights[i].y - base);
    softmax.total += weights[i].x + weights[i].y;
  }
  return shrink;
}

// Adds the products of the queries and a piece of K to those of a tile's cells.
// `first_step`: the step of the piece's first element.
template <Form kForm, bool kColumns>
__device__ __forceinline__ void AddProducts(const Piece& piece, int lane,
                                            int first_step,
                                            float (&products)[kTile / 8][4]) {
  KVTWIN_UNROLL_4
  for (int step = 0; step < (piece.dims + kStep - 1) / kStep; ++step) {
    Right<kForm> keys[kTile / 8];
    LoadKeys<kForm, kColumns>(piece, lane, step, keys);
    const Left<kForm> queries = *QueriesOf<kForm>(first_step + step, lane);
    KVTWIN_UNROLL
    for (int i = 0; i < kTile / 8; ++i) {
      AddProduct<kForm>(queries, keys[i], products[i]);
    }
  }
}

// Weighted sums of V: for each 16 elements, two halves; see ValueDim.
using Sums = float[kPieceDims / 16][2][4];

__device__ __forceinline__ void Multiply(float by, Sums& sums) {
  KVTWIN_UNROLL
  for (int i = 0; i < kPieceDims / 16; ++i) {
    KVTWIN_UNROLL
    for (int k = 0; k < 8; ++k) sums[i][k / 4][k % 4] *= by;
  }
}

template <Form kForm, bool kColumns>
__device__ __forceinline__ void AddValues(const Piece& piece, int lane,
                                          const unsigned (&visible)[kTile / 8],
                                          const float2 (&weights)[kTile / 8],
                                          Sums& sums) {
  const Left<kForm> left[2] = {LeftOf<kForm>(weights[0], weights[1]),
                               LeftOf<kForm>(weights[2], weights[3])};
  KVTWIN_UNROLL
  for (int i = 0; i < kPieceDims / 16; ++i) {
    if (16 * i >= piece.dims) continue;
    Right<kForm> values[2][2];
    LoadValues<kForm, kColumns>(piece, lane, i, visible, values);
    KVTWIN_UNROLL
    for (int half = 0; half < 2; ++half) {
      AddProduct<kForm>(left[0], values[0][half], sums[i][half]);
      AddProduct<kForm>(left[1], values[1][half], sums[i][half]);
    }
  }
}

// Writes the results of a share.
template <Form kForm, bool kColumns>
__device__ __forceinline__ void Store(const DecodeJob& job, const Share& share,
                                      int lane, const Softmax& softmax,
                                      const Sums& sums) {
  float total = softmax.total;
  total += __shfl_xor_sync(kAllLanes, total, 1);
  total += __shfl_xor_sync(kAllLanes, total, 2);
  const int head = lane / 4;
  if (head >= share.heads) return;
  const std::int64_t heads = std::int64_t{job.kv_heads} * job.group;
  const std::int64_t part =
      (share.row * heads + share.first_head + head) * job.splits + share.split;
  if (lane % 4 == 0 && share.value_part == 0) {
    job.totals[part] = {softmax.base, total};
  }
  const int first = share.value_part * kPieceDims;
  const int dims = min(kPieceDims, job.value.head_dim - first);
  float* out = job.sums + part * job.value.head_dim + first;
  KVTWIN_UNROLL
  for (int i = 0; i < kPieceDims / 16; ++i) {
    KVTWIN_UNROLL
    for (int k = 0; k < 4; ++k) {
      const int column = lane % 4 * 2 + k % 2;
      const int dim = 16 * i + ValueDim<kForm, kColumns>(k / 2, column);
      // Adds the sums of the rounded weights and of the remainders.
      const float sum = sums[i][k / 2][k % 2] + sums[i][k / 2][k % 2 + 2];
      if (dim < dims) out[dim] = sum;
    }
  }
}

template <Form kForm, bool kColumns>
__global__ void __launch_bounds__(32) AttendTiles(const DecodeJob job) {
  const int lane = static_cast<int>(threadIdx.x);
  const Share share(job);
  const float factor = PutQueries<kForm>(job, share, lane);
  const int steps = (job.key.head_dim + kStep - 1) / kStep;
  auto* ring = reinterpret_cast<std::byte*>(QueriesOf<kForm>(steps, 0));
  Feeder<kForm, kColumns> feeder(job, share, lane, ring);
  for (int i = 0; i < kRing - 1; ++i) feeder.Feed();

  Softmax softmax = {-__uint_as_float(0x7F800000), 0};
  Sums sums = {};
  float products[kTile / 8][4];
  int part = 0;  // Part of a tile: a piece of K, or V.
  for (int slot = 0;; slot = (slot + 1) % kRing) {
    const unsigned word = feeder.WordOf(slot);
    if (word == 0) break;
    // The piece has arrived for all lanes, and all lanes are done with the
    // piece before it, whose slot is filled next.
    CopyAsyncWait<kRing - 2>();
    __syncwarp();
    feeder.Feed();
    const bool of_key = part < feeder.key_pieces();
    const RowsAt& rows = of_key ? job.key : job.value;
    const int first = kPieceDims * (of_key ? part : share.value_part);
    const std::byte* at = ring + slot * job.slot_bytes;
    const Piece piece = {at + feeder.kShiftBytes, rows.pitch,
                         reinterpret_cast<const std::uint8_t*>(at), rows.dtype,
                         min(kPieceDims, rows.head_dim - first)};
    if (of_key) {
      KVTWIN_UNROLL
      for (int i = 0; i < kTile / 2; ++i) {
        if (part == 0) products[i / 4][i % 4] = 0;
      }
      AddProducts<kForm, kColumns>(piece, lane, first / kStep, products);
      ++part;
      continue;
    }
    part = 0;
    unsigned visible[kTile / 8];
    SpreadWord<kForm, kColumns>(word, lane, visible);
    float2 weights[kTile / 8];
    const float shrink = Weigh(products, visible, factor, softmax, weights);
    if (__any_sync(kAllLanes, shrink != 1)) Multiply(shrink, sums);
    AddValues<kForm, kColumns>(piece, lane, visible, weights, sums);
  }
  Store<kForm, kColumns>(job, share, lane, softmax, sums);
}

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_OPTIMIZED_CUDA_ATTENTION_KERNEL_H_
