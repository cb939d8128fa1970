// Rows in device memory, and the host's layer that they are compared with.

#ifndef KVTWIN_PROPS_CUDA_CUDA_ROWS_H_
#define KVTWIN_PROPS_CUDA_CUDA_ROWS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/index.h"
#include "core/names.h"
#include "core/shift_row.h"
#include "optimized/cuda/rows.h"
#include "optimized/storage.h"

namespace kvtwin::optimized::cuda {

using Bytes = std::vector<std::byte>;
using Floats = std::vector<float>;

// A buffer in device memory.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::span<const std::byte> bytes) : size_(bytes.size()) {
    void* data = nullptr;
    EXPECT_EQ(cudaMalloc(&data, size_ + 1), cudaSuccess);
    data_ = static_cast<std::byte*>(data);
    EXPECT_EQ(cudaMemcpy(data_, bytes.data(), size_, cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  explicit DeviceBytes(std::size_t zeros) : DeviceBytes(Bytes(zeros)) {}
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
  // Waits for all work on the default stream.
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

class Random {
 public:
  explicit Random(std::uint32_t seed) : random_(seed) {}

  int Pick(int end) {
    return std::uniform_int_distribution<int>(0, end - 1)(random_);
  }
  template <class T>
  T OneOf(std::initializer_list<T> values) {
    return values.begin()[Pick(Size(values))];
  }
  std::uint32_t Bits() { return static_cast<std::uint32_t>(random_()); }

  // A number of any kind: normal, subnormal, infinite, NaN with a payload, or
  // halfway between two numbers of a narrow dtype.
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
  // A number that most blocks can hold.
  float Tame() { return static_cast<float>(Pick(1 << 12) - (1 << 11)) / 64; }

  // Distinct cells: one run, sorted cells, or cells in any order.
  std::vector<int> Cells(int count, int cells) {
    std::vector<int> all(AsSize(cells));
    std::iota(all.begin(), all.end(), 0);
    const int kind = Pick(4);
    if (kind == 0) {
      const int first = Pick(cells - count + 1);
      return {all.begin() + first, all.begin() + first + count};
    }
    std::shuffle(all.begin(), all.end(), random_);
    all.resize(AsSize(count));
    if (kind > 1) std::sort(all.begin(), all.end());
    if (kind == 2) std::reverse(all.begin(), all.end());
    return all;
  }

  std::mt19937& engine() { return random_; }

 private:
  std::mt19937 random_;
};

// A tensor [head_dim, heads, tokens] at strides of all kinds. An f32 tensor
// holds numbers, any other one random bytes.
struct Source {
  Source(Random& random, DType dtype, const Shape& shape) {
    view.dtype = dtype;
    view.shape = shape;
    const bool blocks = IsBlockDType(dtype);
    const bool plain = random.Pick(3) == 0;
    std::int64_t next = static_cast<std::int64_t>(SizeOf(dtype));
    if (blocks) next = RunBytes(dtype, shape[0]);
    const bool tokens_first = !plain && random.Pick(3) == 0;
    using Dims = std::array<std::size_t, 3>;
    std::int64_t min = 0;
    std::int64_t max = next;
    for (const std::size_t dim : tokens_first ? Dims{0, 2, 1} : Dims{0, 1, 2}) {
      if (dim == 0 && blocks) continue;
      std::int64_t stride = next;
      if (!plain && random.Pick(2) == 0) {
        stride += random.OneOf<std::int64_t>({1, 2, 4, 4, 8, 16, 16, 48});
      }
      if (!plain && random.Pick(6) == 0) stride = -stride;
      if (!plain && random.Pick(8) == 0) stride = 0;
      view.stride[dim] = stride;
      const std::int64_t reach = stride * (shape[dim] - 1);
      (reach < 0 ? min : max) += reach;
      next = std::max(next, std::abs(stride) * shape[dim]);
    }
    offset = AsSize(-min);
    if (!plain) offset += random.OneOf<std::size_t>({0, 0, 0, 4, 16, 1, 2});
    bytes.resize(offset + AsSize(max));
    // Elements get numbers; if elements overlap, the last one written counts.
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
  TensorView view;  // In host memory.
};

// The rows of one tensor, copied to host memory.
struct Rows {
  StoredRows stored = {};  // `data` is in device memory, or null.
  Bytes bytes;

  std::size_t row_elements() const {
    return AsSize(stored.head_dim) * AsSize(stored.heads);
  }
  std::size_t row_bytes() const {
    return AsSize(RunBytes(stored.dtype, stored.head_dim) * stored.heads);
  }
  // The size in bytes of the smallest unit of a row: an element, or a byte of a
  // block.
  std::size_t part() const {
    return IsBlockDType(stored.dtype) ? 1 : SizeOf(stored.dtype);
  }
  std::size_t parts() const { return row_bytes() / part(); }
  std::size_t At(std::size_t cell, std::size_t i) const {
    constexpr std::size_t kTile = kTileCells;
    switch (stored.layout) {
      case VLayout::kPermuted:
        return (i * AsSize(stored.cells) + cell) * part();
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

inline DType DrawDType(Random& random) {
  return At(kRowDTypes, random.Pick(Size(kRowDTypes)));
}

inline int DrawHeadDim(Random& random, bool blocks) {
  return blocks ? random.OneOf({32, 64, 96, 160})
                : random.OneOf({1, 2, 3, 7, 8, 16, 20, 33, 64, 80, 128, 300});
}

// A layer on the host that holds some rows; the device starts with the same
// rows.
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
        layer_(dims_, {k_dtype_, v_dtype_, v_layout_, AsSize(cells_)}) {
    std::vector<int> all(AsSize(cells_));
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

  TensorView KeyView() const { return layer_.KeyView({0, AsSize(cells_)}); }
  TensorView ValueView() const { return layer_.ValueView({0, AsSize(cells_)}); }
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
           " cells, layout " + std::to_string(AsInt(v_layout_));
  }

 private:
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

inline StoredRows On(const DeviceBytes& device, const Rows& rows) {
  StoredRows stored = rows.stored;
  stored.data = device.data();
  return stored;
}

inline cudaError_t PutFrom(const Source& source, const std::vector<int>& cells,
                           const StoredRows& to) {
  const DeviceBytes bytes(source.bytes);
  const DeviceBytes list(cells);
  TensorView view = source.view;
  view.data = bytes.data() + source.offset;
  const cudaError_t error = PutRows(view, list.data<int>(), to, nullptr);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return error;
}

// Chains in device memory.
struct ChainsThere {
  explicit ChainsThere(const MoveChains& chains)
      : cells(chains.cells),
        begins(chains.begins),
        cycles(chains.cycles),
        there{cells.data<int>(), begins.data<int>(), cycles.data<int>(),
              Size(chains.cycles)} {}

  DeviceBytes cells;
  DeviceBytes begins;
  DeviceBytes cycles;
  DeviceChains there;
};

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
    const auto size = AsSize(dims);
    Floats tables(2 * size);
    for (std::size_t p = 0; p < size / 2; ++p) {
      const auto [cosine, sine] = RopeTurn(shift.rope, dims, AsInt(p), offset);
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

inline std::vector<int> Count(int count) {
  std::vector<int> all(AsSize(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace kvtwin::optimized::cuda

#endif  // KVTWIN_PROPS_CUDA_CUDA_ROWS_H_
