// Compares decode attention on the device with the textbook's, over the same
// rows: views and block tables of every kind.

#include "props/cuda/cuda_attention.h"

#include <cuda_runtime.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "core/names.h"
#include "kvtwin/cuda.h"

namespace kvtwin::props {
namespace {

// Device memory of exactly the requested size.
class Memory {
 public:
  explicit Memory(std::size_t bytes) {
    EXPECT_EQ(cudaMalloc(&data_, std::max<std::size_t>(bytes, 1)), cudaSuccess);
  }
  template <class T>
  explicit Memory(const std::vector<T>& from)
      : Memory(from.size() * sizeof(T)) {
    Write(from);
  }
  ~Memory() { EXPECT_EQ(cudaFree(data_), cudaSuccess); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  template <class T = std::byte>
  T* data() const {
    return static_cast<T*>(data_);
  }
  template <class T>
  void Write(const std::vector<T>& from) {
    EXPECT_EQ(cudaMemcpy(data_, from.data(), from.size() * sizeof(T),
                         cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  std::vector<float> Floats(std::size_t count) const {
    std::vector<float> to(count);
    EXPECT_EQ(cudaMemcpy(to.data(), data_, count * sizeof(float),
                         cudaMemcpyDeviceToHost),
              cudaSuccess);
    return to;
  }

 private:
  void* data_ = nullptr;
};

class CudaAttention : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(cudaStreamCreate(&stream_), cudaSuccess); }
  void TearDown() override {
    if (stream_ != nullptr) {
      EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    }
  }

  cudaStream_t stream_ = nullptr;
};

// A pool of cells, some of which a view shows.
struct Pool {
  DenseTensor key;
  DenseTensor value;
  DenseTensor mask;
  KvView view;  // A part of the tensors above.

  // The same view of copies in device memory.
  KvView OnDevice(const Memory& d_key, const Memory& d_value,
                  const Memory& d_mask) const {
    KvView moved = view;
    const auto move = [](TensorView& tensor, const DenseTensor& from,
                         const Memory& to) {
      tensor.data = to.data() + (static_cast<const std::byte*>(tensor.data) -
                                 from.bytes.data());
    };
    move(moved.key, key, d_key);
    move(moved.value, value, d_value);
    move(moved.mask, mask, d_mask);
    return moved;
  }
};

Pool DrawPool(Draw& draw, const Question& q, DType mask_dtype) {
  const bool tiled = q.layout == VLayout::kTiled;
  const int cells =
      tiled ? kTileCells * draw.Between(1, 7) : draw.Between(1, 200);
  const int first = tiled || draw.Once(2) ? kTileCells * draw.Between(0, 1)
                                          : draw.Between(0, 9);
  int all = first + cells + draw.Between(0, 9);
  if (tiled || draw.Once(2))
    all = (all + kTileCells - 1) / kTileCells * kTileCells;
  Pool pool;
  pool.key = DrawTensor(draw, q.k_dtype, {q.k_head_dim, q.kv_heads, all, 1});
  pool.view.key = pool.key.view();
  pool.view.key.data = pool.view.key.at(0, 0, first);
  pool.view.key.shape[2] = cells;
  Shape shape = {q.v_head_dim, q.kv_heads, all, 1};
  if (q.layout == VLayout::kPermuted)
    shape = {all, q.v_head_dim, q.kv_heads, 1};
  if (tiled) shape = {kTileCells, q.v_head_dim, q.kv_heads, all / kTileCells};
  pool.value = DrawTensor(draw, q.v_dtype, shape);
  pool.view.value = pool.value.view();
  TensorView& value = pool.view.value;
  if (tiled) {
    value.data = value.at(0, 0, 0, first / kTileCells);
    value.shape[3] = cells / kTileCells;
  } else {
    const std::size_t dim = q.layout == VLayout::kPermuted ? 0 : 2;
    value.data = dim == 0 ? value.at(first) : value.at(0, 0, first);
    value.shape[dim] = cells;
  }
  // The rows of the mask have gaps between them.
  pool.mask = HidingMask(mask_dtype, cells + draw.Between(0, 70), q.rows + 1);
  pool.view.mask = pool.mask.view();
  pool.view.mask.shape[0] = cells;
  const int in = draw.Of<int>({1, 2, 20});
  std::vector<bool> seen(AsSize(cells));
  for (int row = 0; row < q.rows; ++row) {
    const int begin = draw.Between(0, cells);
    const int end = draw.Once(8) ? begin : draw.Between(begin, cells);
    for (int cell = begin; cell < end; ++cell) {
      if (!draw.Once(in)) continue;
      At(seen, cell) = true;
      AllowInMask(pool.mask, cell, row);
      if (mask_dtype == DType::kBits || cell % 3 != 0) continue;
      // -0 allows, too.
      const auto size = static_cast<std::int64_t>(SizeOf(mask_dtype));
      At(pool.mask.bytes, pool.mask.view().stride[1] * row + size * (cell + 1) -
                              1) = std::byte{0x80};
    }
  }
  for (int cell = 0; cell < cells; ++cell) {
    if (At(seen, cell)) continue;
    SpoilRow(RowOf(pool.view.key, VLayout::kPlain, cell));
    SpoilRow(RowOf(pool.view.value, q.layout, cell));
  }
  return pool;
}

TensorView QueryOf(const Question& q, const Memory& query) {
  return DenseView(query.data(), DType::kF32,
                   {q.k_head_dim, q.heads(), q.rows, 1});
}

AttentionOptions OptionsOf(const Question& q) {
  return {.scale = q.scale(), .splits = q.splits};
}

// Decodes a view on the device and returns the result.
std::vector<float> Decode(const Question& q, const std::vector<float>& query,
                          const KvView& view, cudaStream_t stream) {
  const std::size_t count = AsSize(q.v_head_dim * q.heads() * q.rows);
  const Memory d_query(query);
  const Memory out(count * sizeof(float));
  const TensorView shaped = QueryOf(q, d_query);
  const Memory scratch(DecodeScratchBytes(
      shaped.shape, q.kv_heads, q.v_head_dim, view.key.shape[2], q.splits));
  KvView on_device = view;
  on_device.device = Device::kCuda;
  const Status status =
      kvtwin::Decode(shaped, on_device, q.layout, OptionsOf(q),
                     {.out = out.data<float>()}, scratch.data(), stream);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  return out.Floats(count);
}

TEST_F(CudaAttention, AttentionOverAViewMatchesTheTextbook) {
  double max = 0;
  for (unsigned seed = 0; seed < 600; ++seed) {
    Draw draw(seed);
    const Question q = DrawQuestion(draw);
    const DType mask_dtype =
        draw.Of(std::vector<DType>(kMaskDTypes.begin(), kMaskDTypes.end()));
    const Pool pool = DrawPool(draw, q, mask_dtype);
    SCOPED_TRACE(fmt::format("seed {}: {}, {} cells, mask {}", seed, Text(q),
                             pool.view.key.shape[2], DTypeName(mask_dtype)));
    const std::vector<float> query = DrawQuery(draw, q);
    const Memory key(pool.key.bytes);
    const Memory value(pool.value.bytes);
    const Memory mask(pool.mask.bytes);
    const KvView view = pool.OnDevice(key, value, mask);
    const std::vector<float> out = Decode(q, query, view, stream_);
    Checker checker(q, query, out, IsByElement(q, view));
    for (int row = 0; row < q.rows; ++row) checker.Check(row, pool.view, row);
    if (HasFatalFailure()) return;
    max = std::max(max, checker.max());
  }
  RecordProperty("largest_share_of_a_bound", fmt::format("{:.3f}", max));
}

// A pool of blocks, and the block table and length of each row.
struct Blocks {
  DenseTensor key;
  DenseTensor value;
  std::vector<int> table;
  std::vector<int> lengths;
  int most_blocks;
  int block_size;
  bool head_major;

  TensorView RowOfToken(const DenseTensor& rows, int row, int token) const {
    const int block = At(table, row * most_blocks + token / block_size);
    const TensorView tensor = Slice(rows.view(), 3, block);
    TensorView token_row =
        Slice(tensor, head_major ? 1 : 2, token % block_size);
    if (head_major) {
      token_row.shape = {token_row.shape[0], token_row.shape[2], 1, 1};
      token_row.stride = {token_row.stride[0], token_row.stride[2], 0, 0};
    }
    return token_row;
  }
};

Blocks DrawBlocks(Draw& draw, const Question& q) {
  Blocks blocks;
  blocks.block_size = draw.Of<int>({1, 7, 16, 32, 48, 64});
  blocks.most_blocks = draw.Between(1, 1 + 150 / blocks.block_size);
  blocks.head_major = draw.Once(2);
  const int all = q.rows * blocks.most_blocks + 3;
  for (const bool of_key : {true, false}) {
    Shape shape = {of_key ? q.k_head_dim : q.v_head_dim, q.kv_heads,
                   blocks.block_size, all};
    if (blocks.head_major) std::swap(shape[1], shape[2]);
    (of_key ? blocks.key : blocks.value) =
        DrawTensor(draw, of_key ? q.k_dtype : q.v_dtype, shape);
  }
  // Table entries past a row's length are invalid: reading one would crash.
  constexpr int kNone = 0x7FFFFFFF;
  blocks.table.assign(AsSize(q.rows * blocks.most_blocks), kNone);
  int next = all - 1;
  for (int row = 0; row < q.rows; ++row) {
    const int max = blocks.most_blocks * blocks.block_size;
    const int length = draw.Once(8)   ? 0
                       : draw.Once(3) ? max
                                      : draw.Between(1, max);
    blocks.lengths.push_back(length);
    for (int i = 0; i * blocks.block_size < length; ++i) {
      At(blocks.table, row * blocks.most_blocks + i) = next--;
    }
    // The rest of the last block holds no tokens.
    for (int token = length; token % blocks.block_size != 0; ++token) {
      SpoilRow(blocks.RowOfToken(blocks.key, row, token));
      SpoilRow(blocks.RowOfToken(blocks.value, row, token));
    }
  }
  return blocks;
}

// The tokens that row `row` sees, in order, as a view of `dense`.
KvView ViewOfRow(const Blocks& blocks, const Question& q, int row,
                 std::vector<DenseTensor>& dense) {
  const int length = At(blocks.lengths, row);
  dense.clear();
  for (const DenseTensor* from : {&blocks.key, &blocks.value}) {
    const std::int64_t head_dim = from->shape[0];
    DenseTensor rows{from->dtype, {head_dim, q.kv_heads, length, 1}, {}};
    for (int token = 0; token < length; ++token) {
      const DenseTensor token_row =
          CopyOf(blocks.RowOfToken(*from, row, token), from->dtype);
      rows.bytes.insert(rows.bytes.end(), token_row.bytes.begin(),
                        token_row.bytes.end());
    }
    dense.push_back(rows);
  }
  dense.push_back(HidingMask(DType::kBits, length, 1));
  for (int i = 0; i < length; ++i) AllowInMask(dense.back(), i, 0);
  return {.key = dense[0].view(),
          .value = dense[1].view(),
          .mask = dense[2].view()};
}

TEST_F(CudaAttention, AttentionOverABlockTableMatchesTheTextbook) {
  double max = 0;
  for (unsigned seed = 0; seed < 300; ++seed) {
    Draw draw(seed);
    Question q = DrawQuestion(draw);
    q.layout = VLayout::kPlain;
    const Blocks blocks = DrawBlocks(draw, q);
    SCOPED_TRACE(fmt::format("seed {}: {}, {} blocks of {}{}", seed, Text(q),
                             blocks.most_blocks, blocks.block_size,
                             blocks.head_major ? ", head major" : ""));
    const std::vector<float> query = DrawQuery(draw, q);
    const Memory key(blocks.key.bytes);
    const Memory value(blocks.value.bytes);
    const Memory table(blocks.table);
    const Memory lengths(blocks.lengths);
    const Memory d_query(query);
    const std::size_t count = AsSize(q.v_head_dim * q.heads() * q.rows);
    const Memory d_out(count * sizeof(float));
    const TensorView shaped = QueryOf(q, d_query);
    const AttentionTable on_device = {
        .blocks = {table.data<int>(), blocks.table.size()},
        .columns = blocks.most_blocks,
        .lengths = {lengths.data<int>(), blocks.lengths.size()},
        .block_size = blocks.block_size};
    const PagedKv rows = {
        .key = DenseView(key.data(), q.k_dtype, blocks.key.shape),
        .value = DenseView(value.data(), q.v_dtype, blocks.value.shape)};
    const Memory scratch(
        DecodeScratchBytes(shaped.shape, q.kv_heads, q.v_head_dim,
                           blocks.most_blocks * blocks.block_size, q.splits));
    const Status status = kvtwin::Decode(
        shaped, rows,
        blocks.head_major ? PagedLayout::kHeadMajor : PagedLayout::kTokenMajor,
        on_device, OptionsOf(q), {.out = d_out.data<float>()}, scratch.data(),
        stream_);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    const std::vector<float> out = d_out.Floats(count);
    const KvView pools = {
        .key = blocks.key.view(), .value = blocks.value.view(), .mask = {}};
    Checker checker(q, query, out, IsByElement(q, pools));
    for (int row = 0; row < q.rows; ++row) {
      std::vector<DenseTensor> dense;
      checker.Check(row, ViewOfRow(blocks, q, row, dense), 0);
    }
    if (HasFatalFailure()) return;
    max = std::max(max, checker.max());
  }
  RecordProperty("largest_share_of_a_bound", fmt::format("{:.3f}", max));
}

// Rows lie so far apart that only one of them has memory.
TEST_F(CudaAttention, DoesNotReadHiddenCells) {
  for (const DType dtype : {DType::kF16, DType::kF8, DType::kF32}) {
    Draw draw(1);
    const Question q = {
        .kv_heads = 1, .rows = 1, .k_dtype = dtype, .v_dtype = dtype};
    constexpr std::int64_t kApart = std::int64_t{1} << 31;
    constexpr int kCells = 3 * kTileCells;
    constexpr int kSeen = kTileCells + 17;
    const DenseTensor key = DrawTensor(draw, dtype, {q.k_head_dim, 1, 1, 1});
    const DenseTensor value = DrawTensor(draw, dtype, {q.v_head_dim, 1, 1, 1});
    DenseTensor mask = HidingMask(DType::kF32, kCells, 1);
    AllowInMask(mask, kSeen, 0);
    const Memory d_key(key.bytes);
    const Memory d_value(value.bytes);
    const Memory d_mask(mask.bytes);
    KvView view = {
        .key = key.view(), .value = value.view(), .mask = mask.view()};
    const auto spread = [](TensorView& rows, const Memory& memory) {
      const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
      rows.data = reinterpret_cast<const void*>(at - kSeen * kApart);
      rows.shape[2] = kCells;
      rows.stride[2] = kApart;
    };
    spread(view.key, d_key);
    spread(view.value, d_value);
    view.mask.data = d_mask.data();
    const std::vector<float> out = Decode(q, DrawQuery(draw, q), view, stream_);
    // The result is the only V row that exists.
    for (std::size_t i = 0; i < out.size(); ++i) {
      const float expected =
          LoadFrom(value.view(), static_cast<std::int64_t>(i) % q.v_head_dim);
      EXPECT_NEAR(out[i], expected, std::abs(expected) * 0x1p-21F) << i;
    }
  }
}

TEST_F(CudaAttention, SeesEveryCellWithoutAMask) {
  Draw draw(2);
  const Question q = {.rows = 1, .layout = VLayout::kPermuted};
  Pool pool = DrawPool(draw, q, DType::kBits);
  const std::int64_t cells = pool.view.key.shape[2];
  pool.key = DrawTensor(draw, q.k_dtype, pool.key.shape);
  pool.value = DrawTensor(draw, q.v_dtype, pool.value.shape);
  pool.mask = HidingMask(DType::kBits, cells, 1);
  for (std::int64_t i = 0; i < cells; ++i) AllowInMask(pool.mask, i, 0);
  KvView seen = pool.view;
  seen.key.data = pool.key.bytes.data();
  seen.value.data = pool.value.bytes.data();
  seen.mask = pool.mask.view();
  const Memory key(pool.key.bytes);
  const Memory value(pool.value.bytes);
  KvView view = seen;
  view.key.data = key.data();
  view.value.data = value.data();
  view.mask = {};
  const std::vector<float> query = DrawQuery(draw, q);
  const std::vector<float> out = Decode(q, query, view, stream_);
  Checker(q, query, out, IsByElement(q, view)).Check(0, seen, 0);
}

// Small weights keep all their digits. To show it, the V elements of the cell
// with the largest weight are 0.
TEST_F(CudaAttention, IsAsExactForSmallWeights) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    Draw draw(4);
    Question q = {.k_head_dim = 16, .v_head_dim = 16, .kv_heads = 1};
    q.group = 1;
    q.rows = 1;
    q.k_dtype = q.v_dtype = dtype;
    DenseTensor key = FilledTensor(dtype, {16, 1, kTileCells, 1}, 0);
    DenseTensor value = DrawTensor(draw, dtype, {16, 1, kTileCells, 1});
    std::vector<float> query(16, 0.0F);
    query[3] = 1.0F / 3;
    for (int cell = 0; cell < kTileCells; ++cell) {
      const float number = cell == 0 ? 100.0F : -50.0F - draw.Number();
      StoreElement(number, const_cast<std::byte*>(key.view().at(3, 0, cell)),
                   dtype);
    }
    std::memset(value.bytes.data(), 0, 16 * SizeOf(dtype));
    DenseTensor mask = HidingMask(DType::kBits, kTileCells, 1);
    for (int cell = 0; cell < kTileCells; ++cell) AllowInMask(mask, cell, 0);
    const KvView view = {
        .key = key.view(), .value = value.view(), .mask = mask.view()};
    const Memory d_key(key.bytes);
    const Memory d_value(value.bytes);
    KvView moved = view;
    moved.key.data = d_key.data();
    moved.value.data = d_value.data();
    moved.mask = {};
    const std::vector<float> out = Decode(q, query, moved, stream_);
    SCOPED_TRACE(DTypeName(dtype));
    Checker(q, query, out, IsByElement(q, moved)).Check(0, view, 0);
  }
}

// The view is longer than the list of cells that a block builds at a time.
TEST_F(CudaAttention, FindsFewVisibleCellsAmongMany) {
  for (const DType mask_dtype : kMaskDTypes) {
    Draw draw(5);
    Question q = {.k_head_dim = 16, .v_head_dim = 16, .kv_heads = 1};
    q.group = 1;
    q.rows = 1;
    constexpr int kCells = 2 * 1024 * kTileCells + 5;
    const DenseTensor key = DrawTensor(draw, q.k_dtype, {16, 1, kCells, 1});
    const DenseTensor value = DrawTensor(draw, q.v_dtype, {16, 1, kCells, 1});
    DenseTensor mask = HidingMask(mask_dtype, kCells, 1);
    AllowInMask(mask, kCells - 1, 0);
    for (int i = 0; i < 30; ++i) {
      AllowInMask(mask, draw.Between(0, kCells - 1), 0);
    }
    const KvView view = {
        .key = key.view(), .value = value.view(), .mask = mask.view()};
    const Memory d_key(key.bytes);
    const Memory d_value(value.bytes);
    const Memory d_mask(mask.bytes);
    KvView moved = view;
    moved.key.data = d_key.data();
    moved.value.data = d_value.data();
    moved.mask.data = d_mask.data();
    const std::vector<float> query = DrawQuery(draw, q);
    const std::vector<float> out = Decode(q, query, moved, stream_);
    q.splits = 128;  // The kernel's choice: tiles / 16.
    SCOPED_TRACE(DTypeName(mask_dtype));
    Checker(q, query, out, IsByElement(q, moved)).Check(0, view, 0);
  }
}

TEST_F(CudaAttention, CanBeCapturedInAGraph) {
  Draw draw(3);
  const Question q = {.rows = 2};
  const Pool pool = DrawPool(draw, q, DType::kF16);
  const Memory key(pool.key.bytes);
  const Memory value(pool.value.bytes);
  const Memory mask(pool.mask.bytes);
  KvView view = pool.OnDevice(key, value, mask);
  view.device = Device::kCuda;
  std::vector<float> query = DrawQuery(draw, q);
  const std::size_t count = AsSize(q.v_head_dim * q.heads() * q.rows);
  Memory d_query(query);
  const Memory d_out(count * sizeof(float));
  const TensorView shaped = QueryOf(q, d_query);
  const Memory scratch(DecodeScratchBytes(shaped.shape, q.kv_heads,
                                          q.v_head_dim, view.key.shape[2]));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t run = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal),
            cudaSuccess);
  const Status status =
      kvtwin::Decode(shaped, view, q.layout, OptionsOf(q),
                     {.out = d_out.data<float>()}, scratch.data(), stream_);
  EXPECT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&run, graph, 0), cudaSuccess);
  for (int step = 0; step < 2; ++step) {
    query = DrawQuery(draw, q);
    d_query.Write(query);
    ASSERT_EQ(cudaGraphLaunch(run, stream_), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_EQ(d_out.Floats(count), Decode(q, query, view, stream_));
  }
  EXPECT_EQ(cudaGraphExecDestroy(run), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

}  // namespace
}  // namespace kvtwin::props
