// See attention.h. The visible tiles of each row are listed first, so that the
// cells are split evenly and hidden tiles are not read; the splits are combined
// last.

#include <algorithm>
#include <array>

#include "core/assert.h"
#include "optimized/cuda/attention.h"
#include "optimized/cuda/attention_kernel.h"

namespace kvtwin::optimized::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kListThreads = 1024;
constexpr int kCombineThreads = 128;

// Target number of blocks, if there is enough work: some 16 for each block that
// an H200 runs at a time, so that few blocks end late. The number is the same
// for all devices, because the split decides the order of summation.
constexpr std::int64_t kBlocks = 8192;
// A split has at least this many tiles, since starting and ending it takes
// time.
constexpr std::int64_t kSplitTiles = 16;

struct MaskAt {
  const std::byte* data;  // Null: all cells are visible.
  DType dtype;
  std::int64_t row_stride;
};

// A bit for each cell of this lane's tile; the lanes of a warp have consecutive
// tiles.
__device__ unsigned WordOfTile(const MaskAt& mask, const std::byte* row,
                               int tile, int cells) {
  if (mask.data == nullptr || mask.dtype == DType::kBits) {
    const std::int64_t rest = cells - std::int64_t{tile} * kTile;
    if (rest <= 0) return 0;
    if (mask.data != nullptr) {
      return reinterpret_cast<const unsigned*>(row)[tile];
    }
    return rest < kTile ? (1U << rest) - 1 : ~0U;
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  unsigned word = 0;
  KVTWIN_UNROLL
  for (int i = 0; i < kWarp; ++i) {
    const std::int64_t cell = std::int64_t{tile - lane + i} * kTile + lane;
    bool allows = false;
    if (cell < cells) {
      allows = mask.dtype == DType::kF32
                   ? reinterpret_cast<const unsigned*>(row)[cell] << 1 == 0
                   : (reinterpret_cast<const std::uint16_t*>(row)[cell] &
                      0x7FFF) == 0;
    }
    const unsigned bits = __ballot_sync(kAllLanes, allows);
    if (lane == i) word = bits;
  }
  return word;
}

// Each block lists the visible tiles of one row.
__global__ void __launch_bounds__(kListThreads)
    ListTiles(const MaskAt mask, int cells, int2* tiles, int* counts) {
  __shared__ int listed_by[kListThreads / kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int row = static_cast<int>(blockIdx.x);
  const std::byte* at = mask.data + mask.row_stride * row;
  const int all = (cells + kTile - 1) / kTile;
  int2* to = tiles + std::int64_t{row} * all;
  int listed = 0;
  for (int first = 0; first < all; first += static_cast<int>(blockDim.x)) {
    const int tile = first + static_cast<int>(threadIdx.x);
    const unsigned word = WordOfTile(mask, at, tile, cells);
    const unsigned seen = __ballot_sync(kAllLanes, word != 0);
    if (lane == 0) listed_by[warp] = __popc(seen);
    __syncthreads();
    int before = listed + __popc(seen & ((1U << lane) - 1));
    for (int i = 0; i < static_cast<int>(blockDim.x) / kWarp; ++i) {
      if (i < warp) before += listed_by[i];
      listed += listed_by[i];
    }
    if (word != 0) to[before] = make_int2(tile, static_cast<int>(word));
    __syncthreads();
  }
  if (threadIdx.x == 0) counts[row] = listed;
}

// Each block combines the splits of one head of one row.
__global__ void __launch_bounds__(kCombineThreads)
    CombineSplits(const float* sums, const float2* totals, int splits,
                  int head_dim, float* out) {
  const float none = -__uint_as_float(0x7F800000);
  const std::int64_t head = blockIdx.x;
  totals += head * splits;
  sums += head * splits * head_dim;
  float base = none;
  for (int i = 0; i < splits; ++i) base = fmaxf(base, totals[i].x);
  if (base == none) base = 0;
  float total = 0;
  for (int i = 0; i < splits; ++i) {
    total += totals[i].y * exp2f(totals[i].x - base);
  }
  for (int dim = static_cast<int>(threadIdx.x); dim < head_dim;
       dim += kCombineThreads) {
    float sum = 0;
    for (int i = 0; i < splits; ++i) {
      sum += sums[i * head_dim + dim] * exp2f(totals[i].x - base);
    }
    out[head * head_dim + dim] = total == 0 ? 0 : sum / total;
  }
}

std::int64_t Parts(std::int64_t count, std::int64_t size) {
  return (count + size - 1) / size;
}

// The layout of a call's scratch memory.
struct Scratch {
  int splits;
  std::size_t totals;  // Offset of the totals, after the sums; the rest alike.
  std::size_t counts;
  std::size_t tiles;
  std::size_t bytes;
};

Scratch ScratchOf(const DecodeQuery& query, int kv_heads, int v_head_dim,
                  std::int64_t cells) {
  const std::int64_t tiles = Parts(cells, kTile);
  const std::int64_t shares = query.rows * std::int64_t{kv_heads} *
                              Parts(query.heads / kv_heads, kGroup) *
                              Parts(v_head_dim, kPieceDims);
  Scratch scratch = {};
  scratch.splits = query.splits;
  if (scratch.splits == 0) {
    scratch.splits = static_cast<int>(std::clamp<std::int64_t>(
        Parts(kBlocks, shares), 1,
        std::max<std::int64_t>(tiles / kSplitTiles, 1)));
  }
  const auto rows = static_cast<std::size_t>(query.rows);
  const std::size_t parts = rows * static_cast<std::size_t>(query.heads) *
                            static_cast<std::size_t>(scratch.splits);
  const auto add = [&](std::size_t bytes) {
    scratch.bytes += (bytes + 255) / 256 * 256;
    return scratch.bytes;
  };
  scratch.totals =
      add(parts * static_cast<std::size_t>(v_head_dim) * sizeof(float));
  scratch.counts = add(parts * sizeof(float2));
  scratch.tiles = add(rows * sizeof(int));
  add(rows * static_cast<std::size_t>(tiles) * sizeof(int2));
  return scratch;
}

template <class T>
T* At(void* scratch, std::size_t offset) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(scratch) + offset);
}

// Whether all runs begin and end on 16-byte boundaries and are whole steps.
bool IsWhole(const RowsAt& rows) {
  const auto begin = reinterpret_cast<std::uintptr_t>(rows.data);
  const auto strides = rows.head_stride | rows.row_stride | rows.tile_stride |
                       rows.element_stride;
  return begin % kGranule == 0 && strides % kGranule == 0 &&
         rows.head_dim % kStep == 0;
}

Form FormOf(const RowsAt& key, const RowsAt& value) {
  if (!IsWhole(key) || !IsWhole(value)) return Form::kAny;
  if (key.dtype != value.dtype) return Form::kAny;
  if (key.dtype == DType::kF16) return Form::kF16;
  if (key.dtype == DType::kBF16) return Form::kBF16;
  if (key.dtype == DType::kF8) return Form::kF8;
  return Form::kAny;
}

// The pitch of runs of at most this many bytes: an odd number of granules, so
// that the same place in 8 neighbouring runs is in different banks.
int PitchOf(std::int64_t bytes, Form form) {
  const int before = form == Form::kAny ? kGranule - 1 : 0;
  return static_cast<int>(Parts(bytes + before, kGranule) | 1) * kGranule;
}

template <Form kForm, bool kColumns>
cudaError_t LaunchTiles(DecodeJob job, unsigned blocks, cudaStream_t stream) {
  for (RowsAt* rows : {&job.key, &job.value}) {
    rows->row_bytes = static_cast<int>(RunBytes(rows->dtype, rows->head_dim));
    rows->piece_bytes = static_cast<int>(RunBytes(rows->dtype, kPieceDims));
    rows->pitch = PitchOf(std::min(rows->row_bytes, rows->piece_bytes), kForm);
  }
  if (kColumns) {
    job.value.pitch = PitchOf(RunBytes(job.value.dtype, kTile), kForm);
  }
  const int runs = kColumns ? std::min(job.value.head_dim, kPieceDims) : kTile;
  job.slot_bytes = Feeder<kForm, kColumns>::kShiftBytes +
                   std::max(job.key.pitch * kTile, job.value.pitch * runs);
  const auto steps = static_cast<std::size_t>(Parts(job.key.head_dim, kStep));
  const std::size_t shared = steps * kWarp * sizeof(Left<kForm>) +
                             static_cast<std::size_t>(job.slot_bytes) * kRing;
  const auto kernel = AttendTiles<kForm, kColumns>;
  const auto* function = reinterpret_cast<const void*>(kernel);
  cudaError_t error = cudaFuncSetAttribute(
      function, cudaFuncAttributeMaxDynamicSharedMemorySize,
      static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  // Lets as many blocks fit as possible: the first-level cache is not used.
  error = cudaFuncSetAttribute(
      function, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
  if (error != cudaSuccess) return error;
  return Launch(kernel, blocks, kWarp, shared, stream, job);
}

// `job` has all but the fields that are the same for views and tables.
cudaError_t Attend(DecodeJob job, const DecodeQuery& query,
                   const Scratch& layout, bool columns, void* scratch,
                   cudaStream_t stream) {
  job.query = query.query;
  job.scale = query.scale;
  job.group = query.heads / job.kv_heads;
  job.groups = static_cast<int>(Parts(job.group, kGroup));
  job.value_parts = static_cast<int>(Parts(job.value.head_dim, kPieceDims));
  job.splits = layout.splits;
  job.sums = At<float>(scratch, 0);
  job.totals = At<float2>(scratch, layout.totals);
  const auto blocks =
      static_cast<unsigned>(std::int64_t{query.rows} * job.splits *
                            job.kv_heads * job.groups * job.value_parts);
  using Launcher = cudaError_t (*)(DecodeJob, unsigned, cudaStream_t);
  static constexpr std::array<std::array<Launcher, 2>, 4> kLaunchers = {{
      {LaunchTiles<Form::kF16, false>, LaunchTiles<Form::kF16, true>},
      {LaunchTiles<Form::kBF16, false>, LaunchTiles<Form::kBF16, true>},
      {LaunchTiles<Form::kF8, false>, LaunchTiles<Form::kF8, true>},
      {LaunchTiles<Form::kAny, false>, LaunchTiles<Form::kAny, true>},
  }};
  const auto form = static_cast<std::size_t>(FormOf(job.key, job.value));
  const cudaError_t error =
      kLaunchers[form][columns ? 1 : 0](job, blocks, stream);
  if (error != cudaSuccess) return error;
  const auto heads = static_cast<unsigned>(query.rows * query.heads);
  return Launch(CombineSplits, heads, kCombineThreads, 0, stream, job.sums,
                job.totals, job.splits, job.value.head_dim, query.out);
}

// Rows that lie one after another in a view.
RowsAt PlainRows(const TensorView& view) {
  return {.data = static_cast<const std::byte*>(view.data),
          .dtype = view.dtype,
          .head_dim = static_cast<int>(view.shape[0]),
          .head_stride = view.stride[1],
          .row_stride = static_cast<unsigned>(view.stride[2]),
          .tile_stride = 0,
          .element_stride = 0,
          .row_bytes = 0,
          .piece_bytes = 0,
          .pitch = 0};
}

RowsAt ValueRows(const TensorView& view, VLayout layout) {
  if (layout == VLayout::kPlain) return PlainRows(view);
  const bool tiled = layout == VLayout::kTiled;
  return {.data = static_cast<const std::byte*>(view.data),
          .dtype = view.dtype,
          .head_dim = static_cast<int>(view.shape[1]),
          .head_stride = view.stride[2],
          .row_stride = 0,
          .tile_stride = tiled ? view.stride[3] : view.stride[0] * kTile,
          .element_stride = view.stride[1],
          .row_bytes = 0,
          .piece_bytes = 0,
          .pitch = 0};
}

RowsAt BlockRows(const PagedRows& rows, const std::byte* data, DType dtype,
                 int head_dim) {
  const std::int64_t bytes = RunBytes(dtype, head_dim);
  return {.data = data,
          .dtype = dtype,
          .head_dim = head_dim,
          .head_stride = rows.head_major ? bytes * rows.block_size : bytes,
          .row_stride = static_cast<unsigned>(
              rows.head_major ? bytes : bytes * rows.kv_heads),
          .tile_stride = 0,
          .element_stride = 0,
          .row_bytes = 0,
          .piece_bytes = 0,
          .pitch = 0};
}

}  // namespace

cudaError_t DecodeView(const DecodeQuery& query, const KvView& view,
                       VLayout v_layout, void* scratch, cudaStream_t stream) {
  KVTWIN_ASSERT(query.rows >= 1 && view.key.shape[2] >= 1);
  KVTWIN_ASSERT(view.key.stride[2] <= UINT32_MAX);
  KVTWIN_ASSERT(v_layout != VLayout::kPlain ||
                view.value.stride[2] <= UINT32_MAX);
  DecodeJob job = {};
  job.key = PlainRows(view.key);
  job.value = ValueRows(view.value, v_layout);
  job.kv_heads = static_cast<int>(view.key.shape[1]);
  job.cells = static_cast<int>(view.key.shape[2]);
  const Scratch layout =
      ScratchOf(query, job.kv_heads, job.value.head_dim, job.cells);
  job.list = {.tiles = At<int2>(scratch, layout.tiles),
              .counts = At<int>(scratch, layout.counts),
              .stride = Parts(job.cells, kTile)};
  const MaskAt mask = {.data = static_cast<const std::byte*>(view.mask.data),
                       .dtype = view.mask.dtype,
                       .row_stride = view.mask.stride[1]};
  const auto threads = static_cast<unsigned>(std::min<std::int64_t>(
      Parts(job.list.stride, kWarp) * kWarp, kListThreads));
  const cudaError_t error =
      Launch(ListTiles, static_cast<unsigned>(query.rows), threads, 0, stream,
             mask, job.cells, At<int2>(scratch, layout.tiles),
             At<int>(scratch, layout.counts));
  if (error != cudaSuccess) return error;
  return Attend(job, query, layout, v_layout != VLayout::kPlain, scratch,
                stream);
}

cudaError_t DecodePaged(const DecodeQuery& query, const PagedRows& rows,
                        void* scratch, cudaStream_t stream) {
  KVTWIN_ASSERT(query.rows >= 1 && rows.most_blocks >= 1);
  DecodeJob job = {};
  job.key = BlockRows(rows, rows.key, rows.k_dtype, rows.k_head_dim);
  job.value = BlockRows(rows, rows.value, rows.v_dtype, rows.v_head_dim);
  job.kv_heads = rows.kv_heads;
  job.table = {
      .blocks = rows.table,
      .lengths = rows.lengths,
      .most_blocks = rows.most_blocks,
      .block_size = static_cast<unsigned>(rows.block_size),
      .block_places = static_cast<unsigned>(
          rows.head_major ? rows.block_size * rows.kv_heads : rows.block_size)};
  const Scratch layout =
      ScratchOf(query, rows.kv_heads, rows.v_head_dim,
                std::int64_t{rows.most_blocks} * rows.block_size);
  return Attend(job, query, layout, false, scratch, stream);
}

std::size_t DecodeScratchBytes(const DecodeQuery& query, int kv_heads,
                               int v_head_dim, std::int64_t cells) {
  return ScratchOf(query, kv_heads, v_head_dim, cells).bytes;
}

}  // namespace kvtwin::optimized::cuda
