// Compares the row kernels of CUDA with the host's code, bit for bit: on a
// device, or on the emulator (emulator/emulator.h).

#include "props/cuda/cuda_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/names.h"
#include "optimized/cuda/copy.h"
#include "optimized/cuda/rows.h"

namespace kvtwin::optimized::cuda {
namespace {

TEST(CudaRows, PutAsTheHostDoes) {
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

void ExpectCopied(Random& random, DType dtype, const Shape& shape) {
  const Source source(random, dtype, shape);
  const DeviceBytes bytes(source.bytes);
  TensorView view = source.view;
  // Four dimensions, as in encoders; the last one repeats the others.
  if (random.Pick(3) == 0) view.shape[3] = 2;
  Bytes expected(DenseBytes(dtype, view.shape));
  optimized::CopyDense(view, expected.data());
  Bytes before(expected.size() + 16, std::byte{0xA5});
  const DeviceBytes out(before);
  view.data = bytes.data() + source.offset;
  ASSERT_EQ(CopyDense(view, out.data(), nullptr), cudaSuccess);
  std::copy(expected.begin(), expected.end(), before.begin());
  EXPECT_TRUE(out.Download() == before)
      << DTypeName(dtype) << " " << ShapeText(view.shape);
}

TEST(CudaRows, BecomeDenseAsOnTheHost) {
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    Random random(seed);
    const DType dtype = DrawDType(random);
    ExpectCopied(random, dtype,
                 {DrawHeadDim(random, IsBlockDType(dtype)), 1 + random.Pick(4),
                  1 + random.Pick(20), 1});
  }
  for (std::uint32_t seed = 0; seed < 3; ++seed) {  // More than one grid.
    Random random(seed);
    ExpectCopied(random, DType::kF16, {65, 8, 1100, 1});
  }
}

void ExpectGathered(Random& random, const Rows& rows, const TensorView& view) {
  const auto count = random.Pick(AsInt(rows.stored.cells) + 1);
  std::vector<int> cells;
  for (int i = 0; i < count; ++i) {  // Some cells come twice.
    cells.push_back(random.Pick(AsInt(rows.stored.cells)));
  }
  if (random.Pick(2) == 0) std::sort(cells.begin(), cells.end());
  Bytes expected;
  for (const int cell : cells) {
    const TensorView row = RowOf(view, rows.stored.layout, cell);
    const std::size_t at = expected.size();
    expected.resize(at + rows.row_bytes());
    WriteDense(row, row.dtype, &expected[at]);
  }
  const std::size_t offset = random.OneOf<std::size_t>({0, 0, 4, 8}) *
                             (rows.part() == 4 ? 1 : rows.part());
  Bytes before(offset + expected.size() + 16, std::byte{0xA5});
  const DeviceBytes out(before);
  const DeviceBytes bytes(rows.bytes);
  const DeviceBytes list(cells);
  ASSERT_EQ(GatherRows(On(bytes, rows), list.data<int>(), count,
                       out.data() + offset, nullptr),
            cudaSuccess);
  std::copy(expected.begin(), expected.end(), IteratorAt(before, offset));
  EXPECT_TRUE(out.Download() == before);
}

TEST(CudaRows, GatherStoredRows) {
  for (std::uint32_t seed = 0; seed < 300 && !HasFailure(); ++seed) {
    Random random(seed);
    Twin twin(random);
    SCOPED_TRACE(::testing::Message()
                 << "seed " << seed << ": " << twin.Text());
    ExpectGathered(random, twin.Keys(), twin.KeyView());
    ExpectGathered(random, twin.Values(), twin.ValueView());
  }
}

// Roundings -------------------------------------------------------------------

// Numbers near every number of the dtype, and near every midpoint of two.
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
  // All exponents, with the bits that decide between two neighbours.
  for (std::uint32_t high = 0; high < 1 << 16; high += 3) {
    for (const std::uint32_t low : {0U, 1U, 0x7FFFU, 0x8000U, 0xFFFFU}) {
      near.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  return near;
}

// Blocks of every magnitude, with ties of the largest number, and some with
// numbers that no block can hold.
Floats SomeBlocks() {
  Floats numbers;
  Random random(7);
  for (int i = 0; i < 3000; ++i) {
    const std::size_t first = numbers.size();
    const float size = std::ldexp(1.0F, i % 300 - 160);
    for (std::int64_t k = 0; k < kBlockElements; ++k) {
      // Multiples of an eighth of the largest, so that there are midpoints.
      const float eighths = static_cast<float>(random.Pick(256)) / 8 - 16;
      numbers.push_back((i % 3 == 0 ? eighths : random.Tame()) * size);
    }
    const auto odd = first + AsSize(random.Pick(32));
    if (i % 11 == 3) numbers[odd] = std::numeric_limits<float>::infinity();
    if (i % 11 == 5) numbers[odd] = std::bit_cast<float>(0xFFC00001U);
    if (i % 11 == 7) std::fill_n(&numbers[first], kBlockElements, -0.0F);
  }
  return numbers;
}

TEST(CudaRows, RoundAsTheDefinitionDoes) {
  for (const DType dtype : kRowDTypes) {
    if (dtype == DType::kF32) continue;
    Floats numbers = IsBlockDType(dtype) ? SomeBlocks() : NearAll(dtype);
    numbers.resize(numbers.size() / 32 * 32);
    const auto tokens = static_cast<std::int64_t>(numbers.size() / 32);
    // The kernel reads four numbers at a time, or one.
    for (const std::int64_t gap : {0, 1}) {
      Floats spread;
      for (const float number : numbers) {
        spread.push_back(number);
        if (gap > 0) spread.push_back(0);
      }
      TensorView view =
          DenseView(spread.data(), DType::kF32, {32, 1, tokens, 1});
      for (std::int64_t& stride : view.stride) stride *= 1 + gap;
      const DenseTensor expected = CopyOf(view, dtype);
      const DeviceBytes from(spread);
      const DeviceBytes to(Bytes(expected.bytes.size()));
      std::vector<int> cells(AsSize(tokens));
      std::iota(cells.begin(), cells.end(), 0);
      const DeviceBytes list(cells);
      view.data = from.data();
      const StoredRows rows = {to.data(), dtype, VLayout::kPlain,
                               32,        1,     tokens};
      ASSERT_EQ(PutRows(view, list.data<int>(), rows, nullptr), cudaSuccess);
      EXPECT_TRUE(to.Download() == expected.bytes) << DTypeName(dtype) << gap;
    }
  }
}

// Sizes -----------------------------------------------------------------------

// There are more elements than threads in a grid, so each thread continues with
// another element.
TEST(CudaRows, PutAndGatherMoreThanAGridHasThreads) {
  Random random(1);
  for (const auto& [layout, count] : {std::pair(VLayout::kPlain, 1'100'000),
                                      std::pair(VLayout::kPermuted, 270'016),
                                      std::pair(VLayout::kTiled, 270'016)}) {
    Bytes numbers(AsSize(count));
    for (std::byte& byte : numbers) {
      byte = static_cast<std::byte>(random.Bits());
    }
    const DeviceBytes from(numbers);
    const DeviceBytes to(numbers.size());
    const DeviceBytes list(Count(count));
    const StoredRows rows = {to.data(), DType::kF8, layout, 1, 1, count};
    ASSERT_EQ(PutRows(DenseView(from.data(), DType::kF8, {1, 1, count, 1}),
                      list.data<int>(), rows, nullptr),
              cudaSuccess);
    EXPECT_TRUE(to.Download() == numbers) << count;
    const DeviceBytes out(numbers.size());
    ASSERT_EQ(GatherRows(rows, list.data<int>(), count, out.data(), nullptr),
              cudaSuccess);
    EXPECT_TRUE(out.Download() == numbers) << count;
  }
}

TEST(CudaRows, PutMoreBlocksThanAGridHasTeams) {
  constexpr int kCount = 140'000;
  const Floats numbers(kBlockElements, 3);
  const DeviceBytes row(numbers);
  const DeviceBytes list(Count(kCount));
  const DeviceBytes to(Bytes(std::size_t{18} * kCount));
  TensorView view =
      DenseView(row.data(), DType::kF32, {kBlockElements, 1, kCount, 1});
  view.stride[2] = 0;
  const StoredRows rows = {to.data(),      DType::kQ4, VLayout::kPlain,
                           kBlockElements, 1,          kCount};
  ASSERT_EQ(PutRows(view, list.data<int>(), rows, nullptr), cudaSuccess);
  view.data = numbers.data();
  EXPECT_TRUE(to.Download() == CopyOf(view, DType::kQ4).bytes);
}

TEST(CudaRows, PutBlocksOfZerosOfEitherSign) {
  for (const std::size_t negative : {0U, 1U, 31U}) {
    Floats numbers(kBlockElements, 0);
    numbers[negative] = -0.0F;
    const DeviceBytes row(numbers);
    const DeviceBytes list(Count(1));
    const DeviceBytes to(Bytes(18));
    TensorView view =
        DenseView(row.data(), DType::kF32, {kBlockElements, 1, 1, 1});
    const StoredRows rows = {to.data(),      DType::kQ4, VLayout::kPlain,
                             kBlockElements, 1,          1};
    ASSERT_EQ(PutRows(view, list.data<int>(), rows, nullptr), cudaSuccess);
    view.data = numbers.data();
    EXPECT_TRUE(to.Download() == CopyOf(view, DType::kQ4).bytes);
  }
}

// Shifts the row of the first cell of `list`, in `far` and, `at` bytes from the
// begin, in `rows`.
void ExpectShifted(const StoredRows& far, const int* list, std::ptrdiff_t at,
                   int head_dim, Rows& rows) {
  Shift shift;
  shift.kind = ShiftKind::kRope;
  const ShiftThere there(shift, 3, head_dim);
  ASSERT_EQ(ShiftRows(far, list, 1, there.there, nullptr), cudaSuccess);
  DenseTensor key{far.dtype, {head_dim, 1, 1, 1}, {}};
  const auto row = static_cast<std::ptrdiff_t>(rows.row_bytes());
  key.bytes.assign(rows.bytes.begin() + at, rows.bytes.begin() + at + row);
  ASSERT_TRUE(ShiftStored(shift, 0, 3, key).ok());
  std::copy_n(key.bytes.begin(), row, rows.bytes.begin() + at);
}

// The offsets of these cells take more than 32 bits; only these cells have
// memory.
TEST(CudaRows, ReachTheLastOfTwoBillionCells) {
  constexpr std::int64_t kFirst = INT32_MAX - 95;  // 96 cells, tile-aligned.
  constexpr int kHeadDim = 64;
  for (const auto& [from, dtype, layout] :
       {std::tuple(DType::kF16, DType::kF16, VLayout::kPlain),
        std::tuple(DType::kF32, DType::kF8, VLayout::kTiled),
        std::tuple(DType::kF32, DType::kQ4, VLayout::kPlain),
        std::tuple(DType::kQ4, DType::kQ4, VLayout::kPlain)}) {
    Random random(1);
    Rows rows{{nullptr, dtype, layout, kHeadDim, 1, 96}, {}};
    rows.bytes.resize(96 * rows.row_bytes());
    const DeviceBytes bytes(rows.bytes);
    StoredRows far = On(bytes, rows);
    far.data -= kFirst * static_cast<std::int64_t>(rows.row_bytes());
    far.cells = INT32_MAX;
    std::vector<int> cells;
    for (const int cell : {5, 6, 7, 90, 3}) {
      cells.push_back(AsInt(kFirst + cell));
    }
    const DeviceBytes list(cells);
    const Source source(random, from, {kHeadDim, 1, 5, 1});
    ASSERT_EQ(PutFrom(source, cells, far), cudaSuccess);
    const Bytes put = bytes.Download();
    for (std::size_t i = 0; i < 5; ++i) {
      const auto token = static_cast<std::int64_t>(i);
      Bytes row(rows.row_bytes());
      WriteDense(Slice(source.view, 2, token), dtype, row.data());
      const auto cell = AsSize(cells[i] - kFirst);
      for (std::size_t k = 0; k < rows.parts(); ++k) {
        std::copy_n(&row[k * rows.part()], rows.part(),
                    &rows.bytes[rows.At(cell, k)]);
      }
    }
    EXPECT_TRUE(put == rows.bytes);

    const DeviceBytes out(Bytes(5 * rows.row_bytes()));
    ASSERT_EQ(GatherRows(far, list.data<int>(), 5, out.data(), nullptr),
              cudaSuccess);
    EXPECT_TRUE(out.Download() == CopyOf(source.view, dtype).bytes);

    const MoveChains chains = {{cells[1], cells[3]}, {0, 2}, {0}};
    const ChainsThere there(chains);
    const DeviceBytes tensors(std::vector{far});
    ASSERT_EQ(
        MoveRows(tensors.data<StoredRows>(), 1, there.there, 128, 64, nullptr),
        cudaSuccess);
    const Bytes before = rows.bytes;
    for (std::size_t k = 0; k < rows.parts(); ++k) {
      rows.CopyPart(before, rows.At(90, k), rows.At(6, k));
    }
    EXPECT_TRUE(bytes.Download() == rows.bytes);

    const DeviceBytes blocks(std::vector{
        StoredBlocks{far.data, static_cast<std::int64_t>(rows.row_bytes())}});
    const DeviceBytes pairs(std::vector{cells[0], cells[4]});
    ASSERT_EQ(CopyBlocks(blocks.data<StoredBlocks>(), 1, pairs.data<int>(), 1,
                         128, nullptr),
              cudaSuccess);
    const auto row = static_cast<std::ptrdiff_t>(rows.row_bytes());
    std::copy_n(rows.bytes.begin() + 5 * row, row,
                rows.bytes.begin() + 3 * row);
    EXPECT_TRUE(bytes.Download() == rows.bytes);

    if (layout != VLayout::kPlain) continue;
    ExpectShifted(far, list.data<int>(), 5 * row, kHeadDim, rows);
    EXPECT_TRUE(bytes.Download() == rows.bytes);
  }
}

TEST(CudaRows, RefuseRowsThatAreTooLarge) {
  const StoredRows wide = {nullptr, DType::kF16, VLayout::kPlain,
                           1 << 20, 1 << 10,     1};
  const TensorView from =
      DenseView(nullptr, DType::kF16, {1 << 20, 1 << 10, 1, 1});
  EXPECT_EQ(PutRows(from, nullptr, wide, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(GatherRows(wide, nullptr, 1, nullptr, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(ShiftRows(wide, nullptr, 1, {}, nullptr), cudaErrorInvalidValue);
  const DeviceChains chain = {nullptr, nullptr, nullptr, 1};
  EXPECT_EQ(MoveRows(nullptr, 1, chain, 2, std::int64_t{1} << 30, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(MoveRows(nullptr, 65536, chain, 2, 2, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(CopyBlocks(nullptr, 1, nullptr, 1, std::int64_t{1} << 32, nullptr),
            cudaErrorInvalidValue);
  // A head of blocks that is rotated by halves is copied to shared memory.
  const StoredRows head = {nullptr, DType::kQ8, VLayout::kPlain, 1 << 16, 1, 1};
  const DeviceShift halves = {.kind = DeviceShift::Kind::kTurnHalves,
                              .offset = 0,
                              .pairs = 1 << 15,
                              .cosines = nullptr,
                              .sines = nullptr};
  EXPECT_EQ(ShiftRows(head, nullptr, 1, halves, nullptr),
            cudaErrorInvalidValue);
}

}  // namespace
}  // namespace kvtwin::optimized::cuda
