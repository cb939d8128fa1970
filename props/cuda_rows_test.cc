// What the CUDA kernels do with rows, against the host's twin, to the bit: on a
// device, or on the emulator (emulator/emulator.h).

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/names.h"
#include "optimized/cuda/rows.h"
#include "optimized/storage.h"

namespace kvtwin::optimized::cuda {
namespace {

using Bytes = std::vector<std::byte>;
using Floats = std::vector<float>;

// Memory of the device.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::span<const std::byte> bytes) : size_(bytes.size()) {
    void* data = nullptr;
    EXPECT_EQ(cudaMalloc(&data, size_ + 1), cudaSuccess);
    data_ = static_cast<std::byte*>(data);
    EXPECT_EQ(cudaMemcpy(data_, bytes.data(), size_, cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  template <class T>
  explicit DeviceBytes(const std::vector<T>& values)
      : DeviceBytes(std::as_bytes(std::span(values))) {}
  ~DeviceBytes() { EXPECT_EQ(cudaFree(data_), cudaSuccess); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  template <class T = std::byte>
  T* data() const {
    return reinterpret_cast<T*>(data_);
  }
  // After everything on the default stream.
  Bytes Download() const {
    Bytes bytes(size_);
    EXPECT_EQ(cudaMemcpy(bytes.data(), data_, size_, cudaMemcpyDeviceToHost),
              cudaSuccess);
    return bytes;
  }

 private:
  std::size_t size_;
  std::byte* data_ = nullptr;
};

class CudaRows : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
      GTEST_SKIP() << "no device: " << cudaGetErrorString(error);
    }
  }
};

class Random {
 public:
  explicit Random(std::uint32_t seed) : random_(seed) {}

  int Pick(int end) {
    return std::uniform_int_distribution<int>(0, end - 1)(random_);
  }
  template <class T>
  T OneOf(std::initializer_list<T> values) {
    return values.begin()[Pick(static_cast<int>(values.size()))];
  }
  std::uint32_t Bits() { return static_cast<std::uint32_t>(random_()); }

  // Of every kind: normal, subnormal, infinite, NaN with a payload; and such
  // as lie halfway between two numbers of a narrow dtype.
  float Number() {
    switch (Pick(9)) {
      case 0:
        return std::bit_cast<float>(Bits());
      case 1:
        return std::ldexp(1.0F, Pick(40) - 30);
      case 2:
        return Pick(4) > 0 ? 0.0F : std::bit_cast<float>(0x7F800001U | Bits());
      case 3:
        return Pick(8) > 0 ? -0.0F : std::numeric_limits<float>::infinity();
      case 4:
        return std::bit_cast<float>(Bits() & 0xFFFF8000U);
      default:
        return static_cast<float>(Pick(1 << 20) - (1 << 19)) / 4096;
    }
  }
  // Such that most blocks can hold them.
  float Tame() { return static_cast<float>(Pick(1 << 12) - (1 << 11)) / 64; }

  // Distinct cells: a run, runs, any.
  std::vector<int> Cells(int count, int cells) {
    std::vector<int> all(static_cast<std::size_t>(cells));
    std::iota(all.begin(), all.end(), 0);
    const int kind = Pick(4);
    if (kind == 0) {
      const int first = Pick(cells - count + 1);
      return {all.begin() + first, all.begin() + first + count};
    }
    std::shuffle(all.begin(), all.end(), random_);
    all.resize(static_cast<std::size_t>(count));
    if (kind > 1) std::sort(all.begin(), all.end());
    if (kind == 2) std::reverse(all.begin(), all.end());
    return all;
  }

  std::mt19937& engine() { return random_; }

 private:
  std::mt19937 random_;
};

// A tensor [head_dim, heads, tokens] at strides of all kinds, in memory that
// holds numbers, or anything if it is not f32.
struct Source {
  Source(Random& random, DType dtype, const Shape& shape) {
    view.dtype = dtype;
    view.shape = shape;
    const bool blocks = IsBlockDType(dtype);
    const bool plain = random.Pick(3) == 0;
    std::int64_t next = static_cast<std::int64_t>(SizeOf(dtype));
    if (blocks) next = RunBytes(dtype, shape[0]);
    const bool tokens_first = !plain && random.Pick(3) == 0;
    std::int64_t least = 0;
    std::int64_t most = next;
    for (const std::size_t dim :
         tokens_first ? std::array{0, 2, 1} : std::array{0, 1, 2}) {
      if (dim == 0 && blocks) continue;
      std::int64_t stride = next;
      if (!plain && random.Pick(2) == 0) {
        stride += random.OneOf<std::int64_t>({1, 2, 4, 4, 8, 16, 16, 48});
      }
      if (!plain && random.Pick(6) == 0) stride = -stride;
      if (!plain && random.Pick(8) == 0) stride = 0;
      view.stride[dim] = stride;
      const std::int64_t reach = stride * (shape[dim] - 1);
      (reach < 0 ? least : most) += reach;
      next = std::max(next, std::abs(stride) * shape[dim]);
    }
    offset = static_cast<std::size_t>(-least);
    if (!plain) offset += random.OneOf<std::size_t>({0, 0, 0, 4, 16, 1, 2});
    bytes.resize(offset + static_cast<std::size_t>(most));
    // Numbers where the elements lie, if they lie apart.
    const bool tame = random.Pick(2) == 0;
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.Bits());
    view.data = bytes.data() + offset;
    if (dtype != DType::kF32) return;
    for (std::int64_t k = 0; k < shape[2]; ++k) {
      for (std::int64_t j = 0; j < shape[1]; ++j) {
        for (std::int64_t i = 0; i < shape[0]; ++i) {
          const float number = tame ? random.Tame() : random.Number();
          std::memcpy(const_cast<std::byte*>(view.at(i, j, k)), &number,
                      sizeof(number));
        }
      }
    }
  }

  Bytes bytes;
  std::size_t offset = 0;
  TensorView view;  // Of the host's memory.
};

// The rows of one tensor, as they were: in the host's memory.
struct Rows {
  StoredRows stored = {};  // `data` is the device's, or null.
  Bytes bytes;

  std::size_t row_elements() const {
    return static_cast<std::size_t>(stored.head_dim) *
           static_cast<std::size_t>(stored.heads);
  }
  std::size_t row_bytes() const {
    return static_cast<std::size_t>(RunBytes(stored.dtype, stored.head_dim) *
                                    stored.heads);
  }
  // What can be copied of a row: elements, or bytes of blocks.
  std::size_t part() const {
    return IsBlockDType(stored.dtype) ? 1 : SizeOf(stored.dtype);
  }
  std::size_t parts() const { return row_bytes() / part(); }
  std::size_t At(std::size_t cell, std::size_t i) const {
    constexpr std::size_t kTile = kTileCells;
    switch (stored.layout) {
      case VLayout::kPermuted:
        return (i * static_cast<std::size_t>(stored.cells) + cell) * part();
      case VLayout::kTiled:
        return ((cell / kTile * row_elements() + i) * kTile + cell % kTile) *
               part();
      default:
        return cell * row_bytes() + i * part();
    }
  }
  void CopyPart(const Bytes& from, std::size_t from_at, std::size_t to_at) {
    std::copy_n(&from[from_at], part(), &bytes[to_at]);
  }
};

DType DrawDType(Random& random) {
  return kRowDTypes[static_cast<std::size_t>(
      random.Pick(static_cast<int>(kRowDTypes.size())))];
}

int DrawHeadDim(Random& random, bool blocks) {
  return blocks ? random.OneOf({32, 64, 96, 160})
                : random.OneOf({1, 2, 3, 7, 8, 16, 20, 33, 64, 80, 128, 300});
}

// A layer of the host's twin that holds some rows, and what the device is to
// begin with.
class Twin {
 public:
  explicit Twin(Random& random) : Twin(random, DrawDType(random)) {}
  Twin(Random& random, DType k_dtype)
      : k_dtype_(k_dtype),
        v_dtype_(DrawDType(random)),
        v_layout_(IsBlockDType(v_dtype_)
                      ? VLayout::kPlain
                      : random.OneOf({VLayout::kPlain, VLayout::kPermuted,
                                      VLayout::kTiled})),
        cells_(v_layout_ == VLayout::kTiled ? random.OneOf({32, 96, 160})
                                            : random.OneOf({1, 37, 128, 161})),
        dims_{DrawHeadDim(random, IsBlockDType(k_dtype_)), random.Pick(4) + 1,
              DrawHeadDim(random, IsBlockDType(v_dtype_))},
        layer_(dims_, k_dtype_, v_dtype_, v_layout_, Size(cells_)) {
    std::vector<int> all(Size(cells_));
    std::iota(all.begin(), all.end(), 0);
    const Source key = KeySource(random, k_dtype_, cells_);
    const Source value = ValueSource(random, v_dtype_, cells_);
    layer_.Put(key.view, value.view, all);
  }

  int cells() const { return cells_; }
  Layer& layer() { return layer_; }
  const RowDims& dims() const { return dims_; }

  Source KeySource(Random& random, DType dtype, int tokens) const {
    return Source(random, dtype, {dims_.k_head_dim, dims_.kv_heads, tokens, 1});
  }
  Source ValueSource(Random& random, DType dtype, int tokens) const {
    return Source(random, dtype, {dims_.v_head_dim, dims_.kv_heads, tokens, 1});
  }
  DType SourceDType(Random& random, DType stored) const {
    return random.Pick(3) > 0 ? DType::kF32 : stored;
  }
  DType k_dtype() const { return k_dtype_; }
  DType v_dtype() const { return v_dtype_; }

  TensorView KeyView() const { return layer_.KeyView({0, Size(cells_)}); }
  TensorView ValueView() const {
    return layer_.ValueView({0, Size(cells_)});
  }
  Rows Keys() const {
    return RowsOf(KeyView(), VLayout::kPlain, dims_.k_head_dim);
  }
  Rows Values() const {
    return RowsOf(ValueView(), v_layout_, dims_.v_head_dim);
  }
  VLayout v_layout() const { return v_layout_; }

  std::string Text() const {
    return std::string(DTypeName(k_dtype_)) + ' ' +
           std::string(DTypeName(v_dtype_)) + ' ' +
           std::to_string(dims_.k_head_dim) + ' ' +
           std::to_string(dims_.v_head_dim) + " x " +
           std::to_string(dims_.kv_heads) + ", " + std::to_string(cells_) +
           " cells, layout " + std::to_string(static_cast<int>(v_layout_));
  }

 private:
  static std::size_t Size(int count) { return static_cast<std::size_t>(count); }

  Rows RowsOf(const TensorView& view, VLayout layout, int head_dim) const {
    Rows rows{{nullptr, view.dtype, layout, head_dim, dims_.kv_heads, cells_},
              Bytes(DenseBytes(view.dtype, view.shape))};
    CopyDense(view, rows.bytes.data());
    return rows;
  }

  DType k_dtype_;
  DType v_dtype_;
  VLayout v_layout_;
  int cells_;
  RowDims dims_;
  Layer layer_;
};

StoredRows On(const DeviceBytes& device, const Rows& rows) {
  StoredRows stored = rows.stored;
  stored.data = device.data();
  return stored;
}

cudaError_t PutFrom(const Source& source, const std::vector<int>& cells,
                    const StoredRows& to) {
  const DeviceBytes bytes(source.bytes);
  const DeviceBytes list(cells);
  TensorView view = source.view;
  view.data = bytes.data() + source.offset;
  const cudaError_t error = PutRows(view, list.data<int>(), to, nullptr);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return error;
}

TEST_F(CudaRows, PutAsTheHostDoes) {
  for (std::uint32_t seed = 0; seed < 600; ++seed) {
    Random random(seed);
    Twin twin(random);
    const Rows keys = twin.Keys();
    const Rows values = twin.Values();
    const DeviceBytes key_bytes(keys.bytes);
    const DeviceBytes value_bytes(values.bytes);
    const int tokens = random.Pick(twin.cells() + 1);
    const std::vector<int> cells = random.Cells(tokens, twin.cells());
    const Source key = twin.KeySource(
        random, twin.SourceDType(random, twin.k_dtype()), tokens);
    const Source value = twin.ValueSource(
        random, twin.SourceDType(random, twin.v_dtype()), tokens);
    SCOPED_TRACE(::testing::Message() << "seed " << seed << ": " << twin.Text()
                                      << ", " << tokens << " tokens");
    twin.layer().Put(key.view, value.view, cells);
    ASSERT_EQ(PutFrom(key, cells, On(key_bytes, keys)), cudaSuccess);
    ASSERT_EQ(PutFrom(value, cells, On(value_bytes, values)), cudaSuccess);
    ASSERT_TRUE(key_bytes.Download() == twin.Keys().bytes) << "K";
    ASSERT_TRUE(value_bytes.Download() == twin.Values().bytes) << "V";
  }
}

void ExpectGathered(Random& random, const Rows& rows, const TensorView& view) {
  const auto count = random.Pick(static_cast<int>(rows.stored.cells) + 1);
  std::vector<int> cells;
  for (int i = 0; i < count; ++i) {  // Some of them twice.
    cells.push_back(random.Pick(static_cast<int>(rows.stored.cells)));
  }
  if (random.Pick(2) == 0) std::sort(cells.begin(), cells.end());
  Bytes due;
  for (const int cell : cells) {
    const TensorView row = RowOf(view, rows.stored.layout, cell);
    const std::size_t at = due.size();
    due.resize(at + rows.row_bytes());
    WriteDense(row, row.dtype, &due[at]);
  }
  const std::size_t offset = random.OneOf<std::size_t>({0, 0, 4, 8}) *
                             (rows.part() == 4 ? 1 : rows.part());
  Bytes before(offset + due.size() + 16, std::byte{0xA5});
  const DeviceBytes out(before);
  const DeviceBytes bytes(rows.bytes);
  const DeviceBytes list(cells);
  ASSERT_EQ(GatherRows(On(bytes, rows), list.data<int>(), count,
                       out.data() + offset, nullptr),
            cudaSuccess);
  std::copy(due.begin(), due.end(),
            before.begin() + static_cast<std::ptrdiff_t>(offset));
  EXPECT_TRUE(out.Download() == before);
}

TEST_F(CudaRows, GatherWhatIsStored) {
  for (std::uint32_t seed = 0; seed < 300 && !HasFailure(); ++seed) {
    Random random(seed);
    Twin twin(random);
    SCOPED_TRACE(::testing::Message()
                 << "seed " << seed << ": " << twin.Text());
    ExpectGathered(random, twin.Keys(), twin.KeyView());
    ExpectGathered(random, twin.Values(), twin.ValueView());
  }
}

// Moves --------------------------------------------------------------------

// Of one cell each to distinct ones; chains, cycles, cells that stay.
std::vector<CellMove> SomeMoves(Random& random, int cells) {
  const int count = random.Pick(cells + 1);
  const std::vector<int> from = random.Cells(count, cells);
  std::vector<int> to = random.Cells(count, cells);
  if (random.Pick(2) == 0) {  // Among the same ones.
    to = from;
    if (random.Pick(2) == 0) {
      std::shuffle(to.begin(), to.end(), random.engine());
    } else if (!to.empty()) {
      std::rotate(to.begin(), to.begin() + 1, to.end());
    }
  }
  std::vector<CellMove> moves;
  for (std::size_t i = 0; i < from.size(); ++i) {
    moves.push_back(
        {static_cast<std::size_t>(from[i]), static_cast<std::size_t>(to[i])});
  }
  return moves;
}

TEST(CudaMoves, OrderedAsChains) {
  for (std::uint32_t seed = 0; seed < 2000; ++seed) {
    Random random(seed);
    const int cells = random.Pick(20) + 1;
    const std::vector<CellMove> moves = SomeMoves(random, cells);
    std::vector<int> due(static_cast<std::size_t>(cells));
    std::iota(due.begin(), due.end(), 0);
    std::vector<int> found = due;
    for (const auto& [from, to] : moves) due[to] = static_cast<int>(from);
    MoveChains chains;
    chains.cells = {1, 2, 3};  // From another call.
    OrderMoves(moves, chains);
    std::vector<int> seen(static_cast<std::size_t>(cells));
    for (const int cell : chains.cells) {
      EXPECT_EQ(++seen[static_cast<std::size_t>(cell)], 1) << seed;
    }
    ASSERT_EQ(chains.begins.size(), chains.cycles.size() + 1);
    ASSERT_EQ(chains.begins.front(), 0);
    ASSERT_EQ(chains.begins.back(), std::ssize(chains.cells));
    for (std::size_t c = 0; c < chains.cycles.size(); ++c) {
      const auto chain =
          std::span(chains.cells)
              .subspan(static_cast<std::size_t>(chains.begins[c]),
                       static_cast<std::size_t>(chains.begins[c + 1] -
                                                chains.begins[c]));
      ASSERT_GE(chain.size(), 2U);
      const auto at = [&](std::size_t i) -> int& {
        return found[static_cast<std::size_t>(chain[i])];
      };
      const int first = at(0);
      for (std::size_t i = 1; i < chain.size(); ++i) at(i - 1) = at(i);
      if (chains.cycles[c] != 0) at(chain.size() - 1) = first;
    }
    EXPECT_EQ(found, due) << seed;
  }
}

// Chains in device memory.
struct ChainsThere {
  explicit ChainsThere(const MoveChains& chains)
      : cells(chains.cells),
        begins(chains.begins),
        cycles(chains.cycles),
        there{cells.data<int>(), begins.data<int>(), cycles.data<int>(),
              static_cast<int>(chains.cycles.size())} {}

  DeviceBytes cells;
  DeviceBytes begins;
  DeviceBytes cycles;
  DeviceChains there;
};

TEST_F(CudaRows, MoveInAllTensorsAtOnce) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    SCOPED_TRACE(seed);
    std::vector<Rows> all;
    int cells = INT32_MAX;
    for (int i = random.Pick(3); i >= 0; --i) {
      const Twin twin(random);
      cells = std::min(cells, twin.cells());
      all.push_back(twin.Keys());
      all.push_back(twin.Values());
    }
    const std::vector<CellMove> moves = SomeMoves(random, cells);
    MoveChains chains;
    OrderMoves(moves, chains);
    const ChainsThere there(chains);
    std::vector<std::unique_ptr<DeviceBytes>> memory;
    std::vector<StoredRows> tensors;
    std::size_t most_bytes = 0;
    std::size_t most_elements = 0;
    for (const Rows& rows : all) {
      memory.push_back(std::make_unique<DeviceBytes>(rows.bytes));
      tensors.push_back(On(*memory.back(), rows));
      most_bytes = std::max(most_bytes, rows.row_bytes());
      most_elements = std::max(most_elements, rows.row_elements());
    }
    const DeviceBytes list(tensors);
    ASSERT_EQ(
        MoveRows(list.data<StoredRows>(), static_cast<int>(tensors.size()),
                 there.there, static_cast<std::int64_t>(most_bytes),
                 static_cast<std::int64_t>(most_elements), nullptr),
        cudaSuccess);
    for (std::size_t t = 0; t < all.size(); ++t) {
      Rows& rows = all[t];
      const Bytes before = rows.bytes;
      for (const auto& [from, to] : moves) {
        for (std::size_t i = 0; i < rows.parts(); ++i) {
          rows.CopyPart(before, rows.At(from, i), rows.At(to, i));
        }
      }
      ASSERT_TRUE(memory[t]->Download() == rows.bytes)
          << t << ' ' << DTypeName(rows.stored.dtype) << " layout "
          << static_cast<int>(rows.stored.layout);
    }
  }
}

TEST_F(CudaRows, MoveAsTheHostDoes) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    Twin twin(random);
    SCOPED_TRACE(::testing::Message()
                 << "seed " << seed << ": " << twin.Text());
    // No cell in two moves.
    const std::vector<int> cells =
        random.Cells(random.Pick(twin.cells() / 2 + 1) * 2, twin.cells());
    std::vector<CellMove> moves;
    for (std::size_t i = 0; i < cells.size(); i += 2) {
      moves.push_back({static_cast<std::size_t>(cells[i]),
                       static_cast<std::size_t>(cells[i + 1])});
    }
    MoveChains chains;
    OrderMoves(moves, chains);
    const ChainsThere there(chains);
    const Rows keys = twin.Keys();
    const Rows values = twin.Values();
    const DeviceBytes key_bytes(keys.bytes);
    const DeviceBytes value_bytes(values.bytes);
    const DeviceBytes list(
        std::vector{On(key_bytes, keys), On(value_bytes, values)});
    ASSERT_EQ(MoveRows(list.data<StoredRows>(), 2, there.there, 1, 1, nullptr),
              cudaSuccess);
    twin.layer().Move(moves, Share{0, 1});
    ASSERT_TRUE(key_bytes.Download() == twin.Keys().bytes);
    ASSERT_TRUE(value_bytes.Download() == twin.Values().bytes);
  }
}

TEST_F(CudaRows, CopyBlocksOfAPool) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    SCOPED_TRACE(seed);
    constexpr int kBlocks = 40;
    const std::vector<int> from_to =
        random.Cells(random.Pick(kBlocks / 2 + 1) * 2, kBlocks);
    std::vector<Bytes> all;
    std::vector<std::unique_ptr<DeviceBytes>> memory;
    std::vector<StoredBlocks> tensors;
    std::int64_t most = 0;
    for (int t = random.Pick(4); t >= 0; --t) {
      const std::int64_t bytes =
          random.OneOf({1, 34, 136, 256, 1088, 2048, 3000});
      most = std::max(most, bytes);
      Bytes blocks(static_cast<std::size_t>(bytes * kBlocks));
      for (std::byte& byte : blocks) {
        byte = static_cast<std::byte>(random.Bits());
      }
      memory.push_back(std::make_unique<DeviceBytes>(blocks));
      tensors.push_back({memory.back()->data(), bytes});
      all.push_back(std::move(blocks));
    }
    const DeviceBytes list(tensors);
    const DeviceBytes pairs(from_to);
    ASSERT_EQ(
        CopyBlocks(list.data<StoredBlocks>(), static_cast<int>(tensors.size()),
                   pairs.data<int>(), std::ssize(from_to) / 2, most, nullptr),
        cudaSuccess);
    for (std::size_t t = 0; t < all.size(); ++t) {
      for (std::size_t i = 0; i < from_to.size(); i += 2) {
        const auto bytes = tensors[t].block_bytes;
        std::copy_n(all[t].begin() + from_to[i] * bytes, bytes,
                    all[t].begin() + from_to[i + 1] * bytes);
      }
      ASSERT_TRUE(memory[t]->Download() == all[t]);
    }
  }
}

// Shifts -------------------------------------------------------------------

// A shift in device memory, with its cosines and sines.
struct ShiftThere {
  ShiftThere(const Shift& shift, std::int32_t offset, int head_dim)
      : tables(TablesOf(shift, offset, head_dim)) {
    using Kind = DeviceShift::Kind;
    const bool rope = shift.kind == ShiftKind::kRope;
    const bool halves = shift.rope.pairing == Rope::Pairing::kHalves;
    const int dims = rope ? RopeDims(shift.rope, head_dim) : 0;
    there.kind =
        rope ? (halves ? Kind::kTurnHalves : Kind::kTurnAdjacent)
             : (shift.kind == ShiftKind::kAdd ? Kind::kAdd : Kind::kTagAdd);
    there.offset = static_cast<float>(offset);
    there.pairs = dims / 2;
    there.cosines = tables.data<float>();
    there.sines = there.cosines + dims;
  }

  static Floats TablesOf(const Shift& shift, std::int32_t offset,
                         int head_dim) {
    if (shift.kind != ShiftKind::kRope) return {};
    const int dims = RopeDims(shift.rope, head_dim);
    const bool halves = shift.rope.pairing == Rope::Pairing::kHalves;
    const auto size = static_cast<std::size_t>(dims);
    Floats tables(2 * size);
    for (std::size_t p = 0; p < size / 2; ++p) {
      const auto [cosine, sine] =
          RopeTurn(shift.rope, dims, static_cast<int>(p), offset);
      const std::size_t x = halves ? p : 2 * p;
      const std::size_t y = halves ? p + size / 2 : 2 * p + 1;
      tables[x] = tables[y] = cosine;
      tables[size + x] = -sine;
      tables[size + y] = sine;
    }
    return tables;
  }

  DeviceBytes tables;
  DeviceShift there = {};
};

std::vector<Shift> Shifts() {
  std::vector<Shift> shifts(7);
  shifts[0].kind = ShiftKind::kAdd;
  shifts[1].kind = ShiftKind::kTagAdd;
  for (std::size_t i = 2; i < shifts.size(); ++i) {
    shifts[i].kind = ShiftKind::kRope;
    shifts[i].rope.scale = 0.3;
    if (i % 2 == 1) shifts[i].rope.pairing = Rope::Pairing::kHalves;
  }
  shifts[4].rope.dims = 6;
  shifts[5].rope.dims = 32;
  // Some turns have no cosine.
  shifts[6].rope.scale = std::numeric_limits<double>::max();
  shifts[6].rope.base = 1e-300;
  return shifts;
}

Selection SelectionOf(const std::vector<int>& cells, int count) {
  Selection selection;
  selection.words.resize(static_cast<std::size_t>(count) / 64 + 1);
  selection.end = selection.words.size();
  selection.count = cells.size();
  for (const int cell : cells) {
    const auto at = static_cast<std::size_t>(cell);
    selection.words[at / 64] |= std::uint64_t{1} << at % 64;
  }
  return selection;
}

TEST_F(CudaRows, ShiftAsTheHostDoes) {
  const std::vector<Shift> shifts = Shifts();
  for (std::uint32_t seed = 0; seed < 800; ++seed) {
    Random random(seed);
    Twin twin(random);
    const Shift& shift = shifts[seed % shifts.size()];
    SCOPED_TRACE(::testing::Message()
                 << "seed " << seed << ": " << twin.Text());
    const int head_dim = twin.dims().k_head_dim;
    const std::int32_t offset = random.OneOf({-5, 1, 1000, -100000});
    const std::vector<int> cells =
        random.Cells(random.Pick(twin.cells() + 1), twin.cells());
    const Rows keys = twin.Keys();
    const DeviceBytes bytes(keys.bytes);
    const DeviceBytes list(cells);
    const ShiftThere there(shift, offset, head_dim);
    ASSERT_EQ(ShiftRows(On(bytes, keys), list.data<int>(), std::ssize(cells),
                        there.there, nullptr),
              cudaSuccess);
    RowShift host;
    host.Prepare(shift, offset, head_dim);
    twin.layer().Shift(SelectionOf(cells, twin.cells()), host, Share{0, 1});
    ASSERT_TRUE(bytes.Download() == twin.Keys().bytes);
  }
}

// Every number of 16 or 8 bits, as often as fills the rows; or blocks of any
// bytes.
DenseTensor AllOf(DType dtype, std::int64_t head_dim) {
  constexpr std::int64_t kElements = 1 << 16;
  DenseTensor rows{dtype, {head_dim, kElements / head_dim, 1, 1}, {}};
  rows.bytes.resize(DenseBytes(dtype, rows.shape));
  Random random(1);
  for (std::size_t i = 0; i < rows.bytes.size(); ++i) {
    const std::size_t number = i / 2;
    const std::size_t byte = IsBlockDType(dtype)  ? random.Bits()
                             : SizeOf(dtype) == 1 ? i
                             : i % 2 == 0         ? number
                                                  : number >> 8;
    rows.bytes[i] = static_cast<std::byte>(byte);
  }
  return rows;
}

TEST_F(CudaRows, ShiftEveryNarrowNumber) {
  for (const DType dtype : kRowDTypes) {
    if (dtype == DType::kF32) continue;
    for (const Shift& shift : Shifts()) {
      for (const int head_dim : {2, 64, 256, 1 << 14}) {
        if (IsBlockDType(dtype) && head_dim < kBlockElements) continue;
        DenseTensor due = AllOf(dtype, head_dim);
        const DeviceBytes bytes(due.bytes);
        const DeviceBytes cells(std::vector<int>{0});
        const ShiftThere there(shift, -5, head_dim);
        const StoredRows keys = {bytes.data(),
                                 dtype,
                                 VLayout::kPlain,
                                 head_dim,
                                 static_cast<int>(due.shape[1]),
                                 1};
        ASSERT_EQ(ShiftRows(keys, cells.data<int>(), 1, there.there, nullptr),
                  cudaSuccess);
        ASSERT_TRUE(ShiftStored(shift, 0, -5, due).ok());
        ASSERT_TRUE(bytes.Download() == due.bytes)
            << DTypeName(dtype) << ' ' << head_dim;
      }
    }
  }
}

// Roundings ----------------------------------------------------------------

// Near every number, and near every point halfway between two of them.
Floats NearAll(DType dtype) {
  Floats near;
  const std::size_t size = SizeOf(dtype);
  for (std::uint32_t code = 0; code < 1U << (8 * size); ++code) {
    const auto bits = std::bit_cast<std::uint32_t>(
        LoadElement(reinterpret_cast<const std::byte*>(&code), dtype));
    for (const std::uint32_t step : {0U, 1U, 0xFFFU, 0x1000U, 0x1001U, 0x7FFFFU,
                                     0x80000U, 0x80001U, ~0U}) {
      near.push_back(std::bit_cast<float>(bits + step));
    }
  }
  // All exponents, and what decides between two neighbours.
  for (std::uint32_t high = 0; high < 1 << 16; high += 3) {
    for (const std::uint32_t low : {0U, 1U, 0x7FFFU, 0x8000U, 0xFFFFU}) {
      near.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  return near;
}

// Of every size, with ties of the largest, and now and then with what no block
// can hold.
Floats SomeBlocks() {
  Floats numbers;
  Random random(7);
  for (int i = 0; i < 3000; ++i) {
    const std::size_t first = numbers.size();
    const float size = std::ldexp(1.0F, i % 300 - 160);
    for (std::int64_t k = 0; k < kBlockElements; ++k) {
      // Multiples of an eighth of the largest: halfway between two, too.
      const float eighths = static_cast<float>(random.Pick(256)) / 8 - 16;
      numbers.push_back((i % 3 == 0 ? eighths : random.Tame()) * size);
    }
    const auto odd = first + static_cast<std::size_t>(random.Pick(32));
    if (i % 11 == 3) numbers[odd] = std::numeric_limits<float>::infinity();
    if (i % 11 == 5) numbers[odd] = std::bit_cast<float>(0xFFC00001U);
    if (i % 11 == 7) std::fill_n(&numbers[first], kBlockElements, -0.0F);
  }
  return numbers;
}

TEST_F(CudaRows, RoundAsTheDefinitionDoes) {
  for (const DType dtype : kRowDTypes) {
    if (dtype == DType::kF32) continue;
    Floats numbers = IsBlockDType(dtype) ? SomeBlocks() : NearAll(dtype);
    numbers.resize(numbers.size() / 32 * 32);
    const auto tokens = static_cast<std::int64_t>(numbers.size() / 32);
    // By four and by one.
    for (const std::int64_t gap : {0, 1}) {
      Floats spread;
      for (const float number : numbers) {
        spread.push_back(number);
        if (gap > 0) spread.push_back(0);
      }
      TensorView view =
          DenseView(spread.data(), DType::kF32, {32, 1, tokens, 1});
      for (std::int64_t& stride : view.stride) stride *= 1 + gap;
      const DenseTensor due = CopyOf(view, dtype);
      const DeviceBytes from(spread);
      const DeviceBytes to(Bytes(due.bytes.size()));
      std::vector<int> cells(static_cast<std::size_t>(tokens));
      std::iota(cells.begin(), cells.end(), 0);
      const DeviceBytes list(cells);
      view.data = from.data();
      const StoredRows rows = {to.data(), dtype, VLayout::kPlain,
                               32,        1,     tokens};
      ASSERT_EQ(PutRows(view, list.data<int>(), rows, nullptr), cudaSuccess);
      EXPECT_TRUE(to.Download() == due.bytes) << DTypeName(dtype) << gap;
    }
  }
}

}  // namespace
}  // namespace kvtwin::optimized::cuda
