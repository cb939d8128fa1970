// Compares the loops over rows, on each instruction set, with simple loops; and
// puts rows of many shapes through a cache with each fast path forced.

#include "optimized/row_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/names.h"
#include "optimized/fast_paths.h"
#include "optimized/move_rows.h"
#include "optimized/parallel.h"
#include "optimized/put_rows.h"
#include "optimized/row_shift.h"
#include "optimized/targets.h"

namespace kvtwin::optimized {
namespace {

using Bytes = std::vector<std::byte>;
using Floats = std::vector<float>;
using Halves = std::vector<std::uint16_t>;

// The content of memory that was not written.
constexpr auto kUntouched = std::byte{0xA5};
constexpr std::size_t kLine = 64;

// Bytes that begin `offset` after a cache line, and a line after them.
class Memory {
 public:
  Memory(std::size_t bytes, std::size_t offset)
      : offset_(offset),
        size_(offset + bytes + kLine),
        bytes_(size_ + kLine, kUntouched) {}

  template <class T = std::byte>
  T* data() {
    return reinterpret_cast<T*>(&bytes_[line()] + offset_);
  }

  // Also compares the bytes around.
  bool operator==(const Memory& other) const {
    return size_ == other.size_ &&
           std::memcmp(&bytes_[line()], &other.bytes_[other.line()], size_) ==
               0;
  }

 private:
  std::size_t line() const {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    return (kLine - address % kLine) % kLine;
  }

  std::size_t offset_;
  std::size_t size_;
  Bytes bytes_;
};

// Numbers of every kind: normal, subnormal, infinite, NaN with a payload.
Floats SomeFloats(std::size_t count) {
  Floats floats(count);
  std::uint32_t state = 12345;
  for (std::size_t i = 0; i < count; ++i) {
    state = state * 1664525U + 1013904223U;
    switch (i % 7) {
      case 0:
        floats[i] = std::bit_cast<float>(state);
        break;
      case 1:
        floats[i] = std::ldexp(1.0F, -10 - AsInt(state % 16));
        break;
      case 2:
        floats[i] = std::bit_cast<float>(0x7F800001U | state);
        break;
      default:
        floats[i] = std::sin(static_cast<float>(state)) * 100;
    }
  }
  floats[count / 2] = std::numeric_limits<float>::infinity();
  return floats;
}

constexpr DType kNarrowTypes[] = {DType::kF16, DType::kBF16, DType::kF8};

template <class T>
Bytes BitsOf(const std::vector<T>& values) {
  Bytes bits(values.size() * sizeof(T));
  std::memcpy(bits.data(), values.data(), bits.size());
  return bits;
}

class RowKernels : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(SelectTarget(GetParam())); }
  void TearDown() override {
    ForceFastPaths(FastPaths::kAuto);
    SelectTarget(SupportedTargets().front());
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, RowKernels,
                         ::testing::ValuesIn(SupportedTargets()),
                         [](const auto& info) { return info.param; });

void ExpectRounded(DType dtype) {
  const Floats from = SomeFloats(200);
  const std::size_t size = SizeOf(dtype);
  for (std::size_t count = 0; count <= 130; ++count) {
    const std::size_t offset = size * (count * 7 % 32);
    const std::size_t first = count % 5;
    Memory expected(size * count, offset);
    for (std::size_t i = 0; i < count; ++i) {
      StoreElement(from[first + i], expected.data() + i * size, dtype);
    }
    Memory kept(size * count, offset);
    RoundF32(dtype, &from[first], kept.data(), count);
    EXPECT_TRUE(kept == expected) << count;
    Memory streamed(size * count, offset);
    StreamRoundedF32(dtype, &from[first], streamed.data(), count);
    FenceStreams();
    EXPECT_TRUE(streamed == expected) << count;
  }
}

TEST_P(RowKernels, RoundsAnyNumberOfFloatsAnywhere) {
  for (const DType dtype : kNarrowTypes) ExpectRounded(dtype);
}

TEST_P(RowKernels, CopiesAnyNumberOfBytesAnywhere) {
  const Bytes from = BitsOf(SomeFloats(200));
  for (std::size_t count = 0; count <= 300; ++count) {
    const std::size_t offset = count * 11 % kLine;
    const std::byte* first = &from[count % 9];
    Memory expected(count, offset);
    std::memcpy(expected.data(), first, count);
    Memory streamed(count, offset);
    StreamBytes(first, streamed.data(), count);
    FenceStreams();
    EXPECT_TRUE(streamed == expected) << count;
  }
}

TEST_P(RowKernels, CopiesFourRowsAnywhere) {
  const Bytes from = BitsOf(SomeFloats(200));
  for (std::size_t count = 0; count <= 300; ++count) {
    std::vector<Memory> expected;
    std::vector<Memory> streamed;
    RowCopies rows;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const std::size_t offset = (count * 11 + r * 19) % kLine;
      rows[r].from = &from[(count + r * 31) % 99];
      std::memcpy(expected.emplace_back(count, offset).data(), rows[r].from,
                  count);
      rows[r].to = streamed.emplace_back(count, offset).data();
    }
    StreamRows(rows, rows, count);
    FenceStreams();
    for (std::size_t r = 0; r < rows.size(); ++r) {
      EXPECT_TRUE(streamed[r] == expected[r]) << count;
    }
  }
}

// Checks numbers near every number of the dtype, and near every midpoint.
void ExpectRoundedAsDefined(DType dtype) {
  const std::size_t size = SizeOf(dtype);
  Floats from;
  for (std::uint32_t code = 0; code < 1U << (8 * size); ++code) {
    const auto bits = std::bit_cast<std::uint32_t>(
        LoadElement(reinterpret_cast<const std::byte*>(&code), dtype));
    for (const std::uint32_t step : {0U, 1U, 0xFFFU, 0x1000U, 0x1001U, 0x7FFFFU,
                                     0x80000U, 0x80001U, ~0U}) {
      from.push_back(std::bit_cast<float>(bits + step));
    }
  }
  // All exponents, with the bits that decide between two neighbours.
  for (std::uint32_t high = 0; high < 1 << 16; high += 3) {
    for (const std::uint32_t low : {0U, 1U, 0x7FFFU, 0x8000U, 0xFFFFU}) {
      from.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  Bytes expected(from.size() * size);
  for (std::size_t i = 0; i < from.size(); ++i) {
    StoreElement(from[i], &expected[i * size], dtype);
  }
  Bytes actual(expected.size());
  RoundF32(dtype, from.data(), actual.data(), from.size());
  EXPECT_TRUE(actual == expected);
  std::fill(actual.begin(), actual.end(), std::byte{0xA5});
  StreamRoundedF32(dtype, from.data(), actual.data(), from.size());
  FenceStreams();
  EXPECT_TRUE(actual == expected);
}

TEST_P(RowKernels, RoundsAsTheDefinitionDoes) {
  for (const DType dtype : kNarrowTypes) ExpectRoundedAsDefined(dtype);
}

template <class T>
void ExpectTransposed(std::size_t count, std::size_t stride) {
  std::vector<T> rows(kTileRows * stride);
  std::iota(rows.begin(), rows.end(), T{1});
  Memory tile(sizeof(T) * kTileRows * kTileColumns, 0);
  Transpose(rows.data(), stride, count, tile.data<T>());
  for (std::size_t c = 0; c < kTileColumns; ++c) {
    for (std::size_t r = 0; r < count; ++r) {
      ASSERT_EQ(tile.data<T>()[c * kTileRows + r], rows[r * stride + c])
          << c << " of row " << r << " of " << count;
    }
  }
  if constexpr (sizeof(T) > 1) {
    if (count < kTileRows) return;
    const std::size_t bytes = sizeof(T) * kTileRows + kLine;
    Memory columns(kTileColumns * bytes, 0);
    Memory expected(kTileColumns * bytes, 0);
    StreamTransposed(rows.data(), stride, columns.data(), bytes);
    FenceStreams();
    for (std::size_t c = 0; c < kTileColumns; ++c) {
      for (std::size_t r = 0; r < count; ++r) {
        expected.data<T>()[c * bytes / sizeof(T) + r] = rows[r * stride + c];
      }
    }
    EXPECT_TRUE(columns == expected);
  }
}

TEST_P(RowKernels, TransposesTiles) {
  for (std::size_t count = 1; count <= kTileRows; ++count) {
    for (const std::size_t stride : {16U, 17U, 48U}) {
      ExpectTransposed<float>(count, stride);
      ExpectTransposed<std::uint16_t>(count, stride);
      if (stride % 2 == 0) ExpectTransposed<std::uint8_t>(count, stride);
    }
  }
}

std::vector<Shift> Shifts() {
  std::vector<Shift> shifts(5);
  shifts[0].kind = ShiftKind::kAdd;
  shifts[1].kind = ShiftKind::kTagAdd;
  for (std::size_t i = 2; i < shifts.size(); ++i) {
    shifts[i].kind = ShiftKind::kRope;
    shifts[i].rope.scale = 0.3;
  }
  shifts[3].rope.pairing = Rope::Pairing::kHalves;
  shifts[4].rope.dims = 6;
  return shifts;
}

TEST_P(RowKernels, ShiftsEveryKindOfNumber) {
  const Floats numbers = SomeFloats(450);
  for (const Shift& shift : Shifts()) {
    for (int head_dim = 2; head_dim < 150; ++head_dim) {
      RowShift fast;
      fast.Prepare(shift, -5, head_dim);
      const auto end =
          numbers.begin() + std::ptrdiff_t{3} * std::ptrdiff_t{head_dim};
      Floats expected(numbers.begin(), end);
      Floats actual = expected;
      fast.Apply(DType::kF32, std::as_writable_bytes(std::span(actual)));
      ASSERT_TRUE(ShiftRow(shift, 0, -5, head_dim, 3, expected).ok());
      EXPECT_EQ(BitsOf(actual), BitsOf(expected)) << head_dim;
    }
  }
}

// Every 16-bit or 8-bit number, repeated until the rows are full; or blocks of
// random bytes.
DenseTensor AllOf(DType dtype, std::int64_t head_dim) {
  constexpr std::int64_t kElements = 1 << 16;
  DenseTensor rows{dtype, {head_dim, kElements / head_dim, 1, 1}, {}};
  rows.bytes.resize(DenseBytes(dtype, rows.shape));
  std::uint32_t state = 1;
  for (std::size_t i = 0; i < rows.bytes.size(); ++i) {
    state = state * 1664525U + 1013904223U;
    const auto number = static_cast<std::uint32_t>(i / SizeOf(DType::kF16));
    const auto byte = IsBlockDType(dtype)  ? state >> 24
                      : SizeOf(dtype) == 1 ? static_cast<std::uint32_t>(i)
                      : i % 2 == 0         ? number
                                           : number >> 8;
    rows.bytes[i] = static_cast<std::byte>(byte);
  }
  return rows;
}

void ExpectShifted(DType dtype, const Shift& shift, int head_dim) {
  RowShift fast;
  fast.Prepare(shift, -5, head_dim);
  DenseTensor expected = AllOf(dtype, head_dim);
  DenseTensor actual = expected;
  ASSERT_TRUE(ShiftStored(shift, 0, -5, expected).ok());
  std::vector<float> scratch(fast.ScratchSize(dtype));
  fast.Apply(dtype, actual.bytes, scratch);
  EXPECT_TRUE(actual == expected) << DTypeName(dtype) << ' ' << head_dim;
}

TEST_P(RowKernels, ShiftsRowsOfEveryNarrowNumber) {
  std::vector<Shift> shifts = Shifts();
  shifts.emplace_back();  // Some angles are not finite.
  shifts.back().kind = ShiftKind::kRope;
  shifts.back().rope.scale = std::numeric_limits<double>::max();
  shifts.back().rope.base = 1e-300;
  for (const DType dtype : kRowDTypes) {
    if (dtype == DType::kF32) continue;
    for (const Shift& shift : shifts) {
      for (const int head_dim : {2, 64, 1 << 16}) {
        if (IsBlockDType(dtype) && head_dim < kBlockElements) continue;
        ExpectShifted(dtype, shift, head_dim);
      }
    }
  }
}

// Blocks
// -----------------------------------------------------------------------------

using Block = std::array<float, kBlockElements>;

// A block of any magnitude, with ties of the largest number, and sometimes with
// a number that no block can hold.
Block SomeBlock(int number) {
  Block block;
  std::uint32_t state = static_cast<std::uint32_t>(number) * 747796405U + 1;
  for (float& value : block) {
    state = state * 1664525U + 1013904223U;
    const float size = std::ldexp(1.0F, number % 300 - 160);
    // Multiples of an eighth of the largest, so that there are midpoints.
    const auto eighths = static_cast<float>(state >> 24) / 8 - 16;
    value = (number % 3 == 0 ? eighths : std::sin(static_cast<float>(state))) *
            size;
  }
  const std::size_t odd = state >> 27;
  if (number % 11 == 3) block[odd] = std::numeric_limits<float>::infinity();
  if (number % 11 == 5) block[odd] = std::bit_cast<float>(0xFFC00001U);
  if (number % 11 == 7) block = {number % 2 == 0 ? 0.0F : -0.0F};
  if (number % 11 == 9) block = {0, -0.0F, 1, -1, 1};
  return block;
}

TEST_P(RowKernels, StoresAndLoadsBlocksAsTheDefinitionDoes) {
  constexpr int kBlocks = 3000;
  std::vector<float> from;
  for (int i = 0; i < kBlocks; ++i) {
    const Block block = SomeBlock(i);
    from.insert(from.end(), block.begin(), block.end());
  }
  const Shape shape = {std::ssize(from), 1, 1, 1};
  for (const DType dtype : {DType::kQ8, DType::kQ4}) {
    const DenseTensor expected =
        CopyOf(DenseView(from.data(), DType::kF32, shape), dtype);
    Bytes actual(expected.bytes.size());
    RoundF32(dtype, from.data(), actual.data(), from.size());
    EXPECT_TRUE(actual == expected.bytes) << DTypeName(dtype);
    for (const DenseTensor& stored : {expected, AllOf(dtype, 1 << 16)}) {
      const DenseTensor numbers = CopyOf(stored.view(), DType::kF32);
      Floats loaded(numbers.bytes.size() / sizeof(float));
      WidenToF32(dtype, stored.bytes.data(), loaded.data(), loaded.size());
      EXPECT_TRUE(BitsOf(loaded) == numbers.bytes) << DTypeName(dtype);
    }
  }
}

// Rows on their way into storage ----------------------------------------------

// Tokens of [head_dim, heads] at strides that leave gaps, or do not.
struct Source {
  Source(DType dtype, std::int64_t head_dim, std::int64_t heads,
         std::int64_t tokens, const Shape& gaps) {
    const auto size = static_cast<std::int64_t>(SizeOf(dtype));
    view.dtype = dtype;
    view.shape = {head_dim, heads, tokens, 1};
    view.stride[0] = size == 0 ? 0 : size + gaps[0];
    view.stride[1] = size == 0 ? RunBytes(dtype, head_dim) + gaps[1]
                               : view.stride[0] * head_dim + gaps[1];
    view.stride[2] = view.stride[1] * heads + gaps[2];
    const auto length = AsSize(view.stride[2] * tokens);
    const auto misaligned = AsSize(gaps[3]);
    bytes.resize(length + misaligned);
    const Floats numbers = SomeFloats(bytes.size() / sizeof(float) + 1);
    std::memcpy(bytes.data(), numbers.data(), bytes.size());
    view.data = &bytes[misaligned];
  }

  Bytes bytes;
  TensorView view;
};

// One cell, one run, several runs; at the beginning of cache lines and not.
std::vector<std::vector<int>> SomeCells() {
  std::vector<std::vector<int>> lists = {{0}, {37}};
  for (const int first : {0, 3, 32}) {
    for (const int count : {2, 31, 32, 33, 70}) {
      lists.emplace_back(count);
      std::iota(lists.back().begin(), lists.back().end(), first);
    }
  }
  for (const int skip : {2, 5}) {
    std::vector<int> cells;
    for (int cell = 0; cell < 100; ++cell) {
      if (cell % skip != 0 || cell > 70) cells.push_back(cell);
    }
    lists.push_back(cells);
    std::reverse(cells.begin(), cells.end());
    lists.push_back(cells);
  }
  return lists;
}

constexpr std::size_t kCells = 128;

void ExpectRows(const Source& source, const std::vector<int>& cells,
                DType dtype, bool stream) {
  const TensorView& view = source.view;
  const auto head = AsSize(RunBytes(dtype, view.shape[0]));
  const auto row = head * AsSize(view.shape[1]);
  const std::size_t begin = cells.size() > 3 ? 1 : 0;
  Memory expected(kCells * row, 0);
  Memory actual(kCells * row, 0);
  for (std::size_t i = begin; i < cells.size(); ++i) {
    const auto cell = AsSize(cells[i]);
    WriteDense(Slice(view, 2, static_cast<std::int64_t>(i)), dtype,
               expected.data() + cell * row);
  }
  PutRows(view, cells, begin, cells.size(),
          {actual.data(), dtype, row, stream});
  FenceStreams();
  EXPECT_TRUE(actual == expected);
}

void ExpectColumns(const Source& source, const std::vector<int>& cells,
                   DType dtype, bool stream, bool tiled, std::size_t gap) {
  const TensorView& view = source.view;
  const std::size_t size = SizeOf(dtype);
  const std::size_t row = AsSize(view.shape[0] * view.shape[1]);
  StoredColumns to{nullptr, dtype, kCells * size + gap, kTileCells * size,
                   stream};
  std::size_t bytes = row * to.stride;
  if (tiled) {
    to.stride = kTileCells * size;
    to.tile_stride = row * to.stride + gap;
    bytes = (kCells / kTileCells + 1) * to.tile_stride;
  }
  const std::size_t begin = row > 40 ? 16 : 0;
  Memory expected(bytes, 0);
  Memory actual(bytes, 0);
  for (std::size_t i = 0; i < cells.size(); ++i) {
    for (std::size_t e = begin; e < row; ++e) {
      const auto element = static_cast<std::int64_t>(e);
      const auto cell = AsSize(cells[i]);
      TensorView tensor = view;
      tensor.data = view.at(element % view.shape[0], element / view.shape[0],
                            static_cast<std::int64_t>(i));
      tensor.shape = {1, 1, 1, 1};
      const std::size_t at =
          tiled ? cell / kTileCells * to.tile_stride + cell % kTileCells * size
                : cell * size;
      WriteDense(tensor, dtype, expected.data() + e * to.stride + at);
    }
  }
  to.data = actual.data();
  PutColumns(view, cells, begin, row, to);
  FenceStreams();
  EXPECT_TRUE(actual == expected);
}

TEST_P(RowKernels, PutsRowsOfAnyShape) {
  const std::vector<Shape> gaps = {
      {0, 0, 0, 0}, {0, 0, 8, 0}, {0, 4, 0, 0}, {4, 0, 0, 0}, {2, 0, 0, 0},
      {0, 0, 1, 0}, {0, 0, 0, 3}, {0, 0, 0, 4}, {0, 2, 0, 0}, {0, 3, 3, 1}};
  const std::vector<std::array<std::int64_t, 2>> dims = {
      {1, 1}, {3, 2}, {1, 20}, {16, 3}, {40, 7}, {64, 5}, {300, 1}, {320, 1}};
  const std::vector<std::vector<int>> lists = SomeCells();
  int count = 0;
  for (const auto& [head_dim, heads] : dims) {
    for (const Shape& gap : gaps) {
      for (const auto& [from, to] : {std::pair(DType::kF32, DType::kF32),
                                     std::pair(DType::kF32, DType::kF16),
                                     std::pair(DType::kF32, DType::kBF16),
                                     std::pair(DType::kF32, DType::kF8),
                                     std::pair(DType::kF32, DType::kQ8),
                                     std::pair(DType::kF32, DType::kQ4),
                                     std::pair(DType::kF16, DType::kF16),
                                     std::pair(DType::kF8, DType::kF8),
                                     std::pair(DType::kQ8, DType::kQ8),
                                     std::pair(DType::kQ4, DType::kQ4)}) {
        const bool blocks = IsBlockDType(to);
        if (blocks && head_dim % kBlockElements != 0) continue;
        if (++count % 3 != 0) continue;  // Each shape with some dtypes.
        const Source source(from, head_dim, heads, 100, gap);
        for (const std::vector<int>& cells : lists) {
          SCOPED_TRACE(::testing::Message()
                       << head_dim << " x " << heads << ", gaps " << gap[0]
                       << " " << gap[1] << " " << gap[2] << " " << gap[3]
                       << ", " << cells.size() << " tokens from cell "
                       << cells[0] << ", " << DTypeName(from) << " to "
                       << DTypeName(to));
          for (const bool stream : {false, true}) {
            ExpectRows(source, cells, to, stream);
            if (blocks) continue;
            for (const bool tiled : {false, true}) {
              ExpectColumns(source, cells, to, stream, tiled, kLine);
              ExpectColumns(source, cells, to, stream, tiled, 4);
            }
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Moves
// ------------------------------------------------------------------------

TEST_P(RowKernels, MovesRowsAndColumns) {
  const std::vector<CellMove> moves = {{.from = 9, .to = 0},
                                       {.from = 8, .to = 1},
                                       {.from = 5, .to = 3},
                                       {.from = 7, .to = 2}};
  constexpr std::size_t kRows = 10;
  for (const FastPaths use : {FastPaths::kOn, FastPaths::kOff}) {
    ForceFastPaths(use);
    for (const std::size_t row_bytes : {2U, 60U, 64U, 200U}) {
      Bytes expected = BitsOf(SomeFloats(kRows * row_bytes));
      Bytes actual = expected;
      for (const auto& [from, to] : moves) {
        std::copy_n(&expected[from * row_bytes], row_bytes,
                    &expected[to * row_bytes]);
      }
      MoveRows(moves, actual.data(), row_bytes);
      EXPECT_EQ(actual, expected) << row_bytes;
    }
    for (const DType dtype :
         {DType::kF32, DType::kF16, DType::kBF16, DType::kF8}) {
      for (std::size_t columns = 0; columns < 20; ++columns) {
        const std::size_t size = SizeOf(dtype);
        const std::size_t stride = (kRows + 3) * size;
        const Bytes before = BitsOf(SomeFloats(200 * stride));
        Bytes expected = before;
        for (std::size_t c = 0; c < columns; ++c) {
          for (const auto& [from, to] : moves) {
            std::copy_n(&expected[c * stride + from * size], size,
                        &expected[c * stride + to * size]);
          }
        }
        Bytes actual = before;
        MoveInColumns(moves,
                      {actual.data(), dtype, stride, kTileCells * size, false},
                      columns);
        EXPECT_EQ(actual, expected) << columns;
        // The moves go from the second tile to the first.
        const std::size_t tile = 20 * kTileCells * size;
        const std::vector<CellMove> far = {{.from = 33, .to = 30},
                                           {.from = 40, .to = 31}};
        expected = before;
        for (std::size_t c = 0; c < columns; ++c) {
          const std::size_t column = c * kTileCells * size;
          std::copy_n(&expected[column + tile + 1 * size], size,
                      &expected[column + 30 * size]);
          std::copy_n(&expected[column + tile + 8 * size], size,
                      &expected[column + 31 * size]);
        }
        actual = before;
        MoveInColumns(far,
                      {actual.data(), dtype, kTileCells * size, tile, false},
                      columns);
        EXPECT_EQ(actual, expected) << columns;
      }
    }
  }
}

// Shares ----------------------------------------------------------------------

TEST(Shares, CoverEverythingOnce) {
  for (const FastPaths use : {FastPaths::kOn, FastPaths::kOff}) {
    ForceFastPaths(use);
    for (const std::size_t n : {0U, 1U, 5U, 64U}) {
      std::array<std::array<std::atomic<int>, 64>, 3> seen = {};
      ParallelShares(seen.size(), 0, [&](std::size_t i, Share share) {
        for (std::size_t k = share.Begin(n); k < share.End(n); ++k) {
          ++seen[i][k];
        }
      });
      for (const auto& counts : seen) {
        for (std::size_t k = 0; k < counts.size(); ++k) {
          EXPECT_EQ(counts[k], k < n ? 1 : 0);
        }
      }
    }
  }
  ForceFastPaths(FastPaths::kAuto);
}

}  // namespace
}  // namespace kvtwin::optimized
