// Masks of every dtype: the values of their elements, and that the optimized
// twin's kernels write what a plain loop writes, wherever a row begins and
// ends.

#include "optimized/mask.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "core/names.h"
#include "hwy/cache_control.h"
#include "optimized/cell_table.h"
#include "optimized/mask_kernels.h"
#include "optimized/targets.h"
#include "props/base/forwarding_cache.h"
#include "props/search/fuzz.h"
#include "props/testing/each_target.h"
#include "props/testing/test_cache.h"

namespace kvtwin::props {
namespace {

using optimized::MaskRow;
using optimized::MaskRowBytes;
using optimized::PosRange;

using Sizes = std::vector<std::size_t>;

constexpr std::array kDTypes = {DType::kF32, DType::kF16, DType::kBF16,
                                DType::kBits};

TEST(MaskElements, AreExactlyZeroOrMinusInfinity) {
  const auto of = [](DType dtype, std::uint32_t element) {
    const TensorView mask = DenseView(&element, dtype, {1, 1, 1, 1});
    return MaskElementAt(mask, 0, 0);
  };
  EXPECT_EQ(of(DType::kF32, 0), MaskElement::kAllows);
  EXPECT_EQ(of(DType::kF32, 0xFF800000), MaskElement::kHides);
  EXPECT_EQ(of(DType::kF16, 0xFC00), MaskElement::kHides);
  EXPECT_EQ(of(DType::kBF16, 0xFF80), MaskElement::kHides);
  // Only two bytes of the element are read.
  EXPECT_EQ(of(DType::kF16, 0xFFFF0000), MaskElement::kAllows);
  EXPECT_EQ(of(DType::kBF16, 0xFFFF0000), MaskElement::kAllows);
  // -0 allows, too: it adds nothing to a score.
  EXPECT_EQ(of(DType::kF32, 0x80000000), MaskElement::kAllows);
  EXPECT_EQ(of(DType::kF16, 0x8000), MaskElement::kAllows);
  EXPECT_EQ(of(DType::kBF16, 0x8000), MaskElement::kAllows);
  // Another dtype's -0 and -inf, +inf, a NaN.
  EXPECT_EQ(of(DType::kF32, 0x8000), MaskElement::kNeither);
  EXPECT_EQ(of(DType::kF16, 0xFF80), MaskElement::kNeither);
  EXPECT_EQ(of(DType::kBF16, 0xFC00), MaskElement::kNeither);
  EXPECT_EQ(of(DType::kBF16, 0x7F80), MaskElement::kNeither);
  EXPECT_EQ(of(DType::kF32, 0xFF800001), MaskElement::kNeither);
}

// The bits are set by hand, as a kernel outside of this project would do it.
TEST(MaskElements, BitsBeginAtTheLowestOfEachByte) {
  DenseTensor mask = HidingMask(DType::kBits, 70, 2);
  ASSERT_EQ(mask.bytes.size(), 32);
  EXPECT_EQ(mask.view().stride, (Shape{0, 16, 32, 32}));
  for (const int column : {0, 9, 63, 69}) AllowInMask(mask, column, 1);
  std::array<std::uint64_t, 4> words;
  std::memcpy(words.data(), mask.bytes.data(), sizeof(words));
  EXPECT_EQ(words, (std::array<std::uint64_t, 4>{
                       0, 0, std::uint64_t{1} << 63 | 1 << 9 | 1, 1 << 5}));
  EXPECT_EQ(mask.bytes[17], std::byte{2});
  for (int column = 0; column < 70; ++column) {
    const bool set = column == 0 || column == 9 || column == 63 || column == 69;
    EXPECT_EQ(MaskAllows(mask.view(), column, 1), set) << column;
    EXPECT_FALSE(MaskAllows(mask.view(), column, 0)) << column;
  }
  EXPECT_EQ(CopyOf(mask.view(), DType::kBits), mask);
}

TEST(MaskElements, CanBeAllowedOneByOne) {
  for (const DType dtype : kDTypes) {
    DenseTensor mask = HidingMask(dtype, 67, 3);
    EXPECT_EQ(mask.bytes.size(), DenseBytes(dtype, {67, 3, 1, 1}));
    AllowInMask(mask, 65, 1);
    for (int row = 0; row < 3; ++row) {
      for (int column = 0; column < 67; ++column) {
        const bool allowed = column == 65 && row == 1;
        EXPECT_EQ(MaskElementAt(mask.view(), column, row),
                  allowed ? MaskElement::kAllows : MaskElement::kHides)
            << DTypeName(dtype) << " " << column << " " << row;
      }
    }
  }
}

TEST(MaskDTypes, DifferFromRowDTypes) {
  for (const DType dtype : {DType::kBF16, DType::kBits}) {
    const std::string name(DTypeName(dtype));
    EXPECT_EQ(DTypeFromName(name), dtype);
    for (const char* twin : {"reference", "optimized"}) {
      const auto cache = *MakeCache({}, twin);
      EXPECT_TRUE(
          cache->SetConfig({.cache_padding = 1, .mask_dtype = dtype}).ok());
      const bool bits = dtype == DType::kBits;
      if (bits) {
        const Status init = cache->Init({dtype, 1, 4, 2});
        EXPECT_EQ(init.code(), StatusCode::kInvalidArgument);
        EXPECT_EQ(init.message(), "dtype is bits, rows are of numbers");
      }
      EXPECT_TRUE(cache->Init({DType::kF16, 1, 4, 2}).ok());
      const std::vector<std::int32_t> positions = {0};
      const std::vector<int> sequences = {0};
      ASSERT_TRUE(cache->StartForward({positions, sequences}, false).ok());
      const std::uint64_t element = 0;
      const TensorView right = DenseView(&element, DType::kF16, {1, 1, 1, 1});
      const TensorView wrong = DenseView(&element, dtype, {1, 1, 1, 1});
      EXPECT_EQ(cache->Put(wrong, right).message(),
                "key is " + name +
                    (bits ? ", rows are of numbers"
                          : ", the cache takes f32 or f16"));
      EXPECT_EQ(cache->Put(right, wrong).message(),
                "value is " + name +
                    (bits ? ", rows are of numbers"
                          : ", the cache takes f32 or f16"));
      ASSERT_TRUE(cache->Put(right, right).ok());
      const Result<KvView> view = cache->Get();
      ASSERT_TRUE(view.ok());
      EXPECT_EQ(view->mask.dtype, dtype);
      EXPECT_TRUE(MaskAllows(view->mask, 0, 0));
      if (dtype == DType::kBits) {
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view->mask.data) % 8, 0);
        EXPECT_EQ(view->mask.stride[1], 8);
      }
    }
  }
}

// Changes each bits mask.
class OtherBits : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  Result<KvView> Get() override {
    Result<KvView> view = ForwardingCache::Get();
    if (!view.ok() || view->mask.data == nullptr) return view;
    mask_ = CopyOf(view->mask, view->mask.dtype);
    if (mask_.dtype == DType::kBits) Change(mask_);
    view->mask = mask_.view();
    return view;
  }

 private:
  virtual void Change(DenseTensor& mask) = 0;
  DenseTensor mask_;
};

class SetsUnusedBits final : public OtherBits {
 public:
  using OtherBits::OtherBits;

 private:
  void Change(DenseTensor& mask) override {
    if (mask.shape[0] % 64 != 0) AllowInMask(mask, mask.shape[0], 0);
  }
};

class TurnsBytesAround final : public OtherBits {
 public:
  using OtherBits::OtherBits;

 private:
  void Change(DenseTensor& mask) override {
    const DenseTensor before = mask;
    mask = HidingMask(DType::kBits, mask.shape[0], mask.shape[1]);
    const std::int64_t bits = std::ssize(mask.bytes) * 8;
    const TensorView tensor =
        DenseView(before.bytes.data(), DType::kBits, {bits, 1, 1, 1});
    for (std::int64_t i = 0; i < bits; ++i) {
      if (MaskAllows(tensor, i, 0)) AllowInMask(mask, i ^ 7, 0);
    }
  }
};

template <class Backend>
std::string WhatIsWrongWith() {
  FuzzOptions options;
  options.operations = 20000;
  const FuzzResult result =
      Fuzz(options, {.name = "faulty", .make = [](const CacheSpec& spec) {
                       auto cache = *MakeCache(spec, "reference");
                       return Result<std::unique_ptr<Cache>>(
                           std::make_unique<Backend>(std::move(cache)));
                     }});
  if (!result.failure) return "";
  EXPECT_EQ(result.shrunk.setup.config.mask_dtype, DType::kBits);
  return result.failure->check + ": " + result.failure->text;
}

TEST(MaskDTypes, BitsPastARowAreFound) {
  EXPECT_THAT(WhatIsWrongWith<SetsUnusedBits>(),
              ::testing::StartsWith(
                  "subject: mask bytes: row 0 of the mask has bits past its"));
}

TEST(MaskDTypes, BitsInAnotherOrderAreFound) {
  EXPECT_THAT(WhatIsWrongWith<TurnsBytesAround>(),
              ::testing::StartsWith("subject: mask bytes: row 0 of the mask "
                                    "(# visible, . hidden) differs"));
}

class MaskKernels : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(optimized::SelectTarget(GetParam())); }
  void TearDown() override {
    EXPECT_TRUE(optimized::SelectTarget(optimized::SupportedTargets().front()));
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, MaskKernels,
                         ::testing::ValuesIn(optimized::SupportedTargets()),
                         [](const auto& target) { return target.param; });

// Words with all kinds of members and positions.
struct Cells {
  explicit Cells(std::size_t word_count)
      : positions(word_count * 64), members(word_count), ranges(word_count) {
    std::uint64_t random = 1;
    const auto next = [&random] {
      random = random * 6364136223846793005 + 1442695040888963407;
      return random >> 33;
    };
    for (std::size_t w = 0; w < word_count; ++w) {
      const std::uint64_t bits = next() << 33 ^ next() << 16 ^ next();
      members[w] = w % 4 == 0 ? ~std::uint64_t{0} : w % 4 == 1 ? 0 : bits;
      PosRange& range = ranges[w];
      range = {INT32_MAX, -1};
      for (std::size_t i = w * 64; i < w * 64 + 64; ++i) {
        // Positions mostly grow, as in a cache; those of other cells are
        // arbitrary.
        positions[i] = static_cast<std::int32_t>(i + next() % 32);
        if ((members[w] >> i % 64 & 1) == 0) {
          positions[i] = next() % 2 == 0 ? INT32_MAX : 0;
          continue;
        }
        range.first = std::min(range.first, positions[i]);
        range.last = std::max(range.last, positions[i]);
      }
      // A range may be wider than its positions.
      if (w % 8 == 6) range = {0, INT32_MAX};
    }
    positions[0] = 0;
    positions.back() = INT32_MAX;
    ranges.front().first = 0;
    ranges.back() = {0, INT32_MAX};
  }

  std::vector<std::int32_t> positions;
  std::vector<std::uint64_t> members;
  std::vector<PosRange> ranges;
};

// The row as a plain loop writes it.
DenseTensor PlainRow(const MaskRow& row, DType dtype) {
  DenseTensor plain =
      HidingMask(dtype, static_cast<std::int64_t>(row.end - row.first), 1);
  for (std::size_t cell = row.first; cell < row.end; ++cell) {
    if (row.members == nullptr) continue;
    const std::int32_t position = row.positions[cell];
    if ((row.members[cell / 64] >> cell % 64 & 1) != 0 &&
        position >= row.range.first && position <= row.range.last) {
      AllowInMask(plain, static_cast<std::int64_t>(cell - row.first), 0);
    }
  }
  return plain;
}

// Expects the plain row, and unchanged bytes around it. `skew` elements lie
// before the row in its cache line.
void ExpectAsPlain(const MaskRow& row, DType dtype, std::size_t skew) {
  constexpr std::size_t kMargin = 128;
  constexpr auto kUntouched = std::byte{0x5A};
  const std::size_t bytes = MaskRowBytes(dtype, row.end - row.first);
  std::vector<std::byte> memory(bytes + 2 * kMargin + 64, kUntouched);
  const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
  const std::size_t element = dtype == DType::kBits ? 8 : SizeOf(dtype);
  const std::size_t begin = kMargin - at % 64 + skew * element;
  optimized::WriteMaskRow(row, dtype, &memory[begin]);
  if (row.stream) hwy::FlushStream();
  const DenseTensor plain = PlainRow(row, dtype);
  ASSERT_EQ(plain.bytes.size(), bytes);
  ASSERT_EQ(std::memcmp(&memory[begin], plain.bytes.data(), bytes), 0)
      << DTypeName(dtype) << ", cells " << row.first << " to " << row.end
      << ", positions " << row.range.first << " to " << row.range.last
      << ", stream " << row.stream << ", skew " << skew;
  for (std::size_t i = 0; i < memory.size(); ++i) {
    if (i < begin || i >= begin + bytes) {
      ASSERT_EQ(memory[i], kUntouched) << i - begin;
    }
  }
}

void ExpectAllAsPlain(const Cells& cells, std::size_t first, std::size_t end,
                      PosRange range) {
  for (const DType dtype : kDTypes) {
    for (const bool stream : {false, true}) {
      const MaskRow row = {.positions = cells.positions.data(),
                           .members = cells.members.data(),
                           .range = range,
                           .first = first,
                           .end = end,
                           .ranges = cells.ranges.data(),
                           .stream = stream};
      for (const std::size_t skew : Sizes{0, 1, 15}) {
        ASSERT_NO_FATAL_FAILURE(ExpectAsPlain(row, dtype, skew));
      }
    }
  }
}

TEST_P(MaskKernels, AgreeWithASimpleLoop) {
  const Cells cells(11);
  for (const std::size_t first : Sizes{0, 1, 8, 37, 63, 64, 100}) {
    for (const std::size_t size :
         Sizes{1, 7, 63, 64, 65, 127, 128, 200, 600, 604}) {
      const std::size_t end = first + size;
      if (end > cells.positions.size()) continue;
      for (const PosRange range : {PosRange{0, INT32_MAX},
                                   {0, -1},
                                   {0, 0},
                                   {100, 300},
                                   {64, 575},
                                   {300, 100}}) {
        ASSERT_NO_FATAL_FAILURE(ExpectAllAsPlain(cells, first, end, range));
      }
    }
  }
}

// The first and the last position of a word, and one less.
TEST_P(MaskKernels, MeetTheEndsOfARange) {
  const Cells cells(24);
  for (std::size_t w = 0; w < cells.ranges.size(); ++w) {
    const auto& [low, high] = cells.ranges[w];
    if (low > high || high == INT32_MAX) continue;
    for (const PosRange range : {PosRange{low, high},
                                 {low + 1, high},
                                 {low, high - 1},
                                 {high, INT32_MAX},
                                 {high + 1, INT32_MAX},
                                 {0, low},
                                 {0, low - 1}}) {
      ASSERT_NO_FATAL_FAILURE(
          ExpectAllAsPlain(cells, 0, cells.positions.size(), range));
    }
  }
}

// The rows are longer than what is computed at a time.
TEST_P(MaskKernels, WriteLongRows) {
  const Cells cells(400);
  for (const std::size_t first : Sizes{0, 13, 64}) {
    for (const std::size_t end : Sizes{8192, 8193, 16384 + 77, 25600}) {
      ASSERT_NO_FATAL_FAILURE(
          ExpectAllAsPlain(cells, first, end, {5000, 20000}));
    }
  }
}

// A row that is written in pieces is the same.
TEST_P(MaskKernels, WriteRowsInPieces) {
  const Cells cells(20);
  for (const DType dtype : kDTypes) {
    for (const std::size_t first : Sizes{0, 5}) {
      MaskRow row = {.positions = cells.positions.data(),
                     .members = cells.members.data(),
                     .range = {100, 900},
                     .first = first,
                     .end = 1200,
                     .ranges = cells.ranges.data()};
      const DenseTensor plain = PlainRow(row, dtype);
      DenseTensor pieces =
          HidingMask(dtype, static_cast<std::int64_t>(row.end - row.first), 1);
      for (std::size_t column = 0; column < 1200 - first; column += 128) {
        row.first = first + column;
        row.end = std::min<std::size_t>(1200, row.first + 128);
        optimized::WriteMaskRow(row, dtype,
                                &pieces.bytes[MaskRowBytes(dtype, column)]);
      }
      EXPECT_EQ(pieces, plain) << DTypeName(dtype);
    }
  }
}

TEST_P(MaskKernels, WriteRowsWithoutASequence) {
  for (const std::size_t first : Sizes{0, 3}) {
    for (const DType dtype : kDTypes) {
      for (const bool stream : {false, true}) {
        ASSERT_NO_FATAL_FAILURE(ExpectAsPlain({.positions = nullptr,
                                               .members = nullptr,
                                               .range = {0, INT32_MAX},
                                               .first = first,
                                               .end = 300,
                                               .ranges = nullptr,
                                               .stream = stream},
                                              dtype, 1));
      }
    }
  }
}

TEST(HostMask, ThrowsWhenThereIsNoMemory) {
  const optimized::CellTable table(64, 1, 0);
  optimized::HostMask mask;
  EXPECT_THROW(mask.Build(table, {}, SIZE_MAX / 64, {.first = 0, .end = 64},
                          DType::kF32),
               std::bad_alloc);
}

// Two sequences alternate, with three cells and one. The cells at which the
// rows end are far apart.
void ExpectMasksOf(std::size_t columns, std::size_t rows) {
  constexpr std::size_t kFirst = 100;
  const std::size_t cells = kFirst + columns;
  optimized::CellTable table(cells, 2, 0);
  for (std::size_t cell = 0; cell < cells; ++cell) {
    table.Add(cell % 4 == 3, cell, static_cast<std::int32_t>(cell));
  }
  std::vector<optimized::RowRule> rules;
  const auto last = static_cast<std::int32_t>(cells) - 1;
  for (std::size_t i = 0; i + 1 < rows; ++i) {
    const auto less = static_cast<std::int32_t>(i);
    const std::int32_t low = 150 + less * 7;
    rules.push_back({table.Find(i % 3 == 2),
                     {low, std::max(low, last - less * 1031 % last)}});
  }
  for (const DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kBits}) {
    optimized::HostMask mask;
    mask.Build(table, rules, rows, {.first = kFirst, .end = cells}, dtype);
    DenseTensor expected = HidingMask(dtype, static_cast<std::int64_t>(columns),
                                      static_cast<std::int64_t>(rows));
    for (std::size_t row = 0; row < rules.size(); ++row) {
      for (int cell = rules[row].range.first; cell <= rules[row].range.last;
           ++cell) {
        if (cell < AsInt(kFirst)) continue;
        if ((cell % 4 == 3) != (row % 3 == 2)) continue;
        AllowInMask(expected, cell - AsInt(kFirst),
                    static_cast<std::int64_t>(row));
      }
    }
    const TensorView view = mask.view();
    ASSERT_EQ(view.shape, expected.shape);
    const auto bytes = AsSize(expected.view().stride[1]);
    for (std::size_t row = 0; row < rows; ++row) {
      const auto at = static_cast<std::int64_t>(row);
      ASSERT_EQ(0,
                std::memcmp(view.at(0, at), expected.view().at(0, at), bytes))
          << DTypeName(dtype) << ", row " << row << " of " << columns;
    }
  }
}

class HostMaskWith : public EachPath {};
INSTANTIATE_TEST_SUITE_P(Paths, HostMaskWith, ::testing::ValuesIn(kEachPath),
                         EachPath::Name);

TEST_P(HostMaskWith, ColumnsOfAMask) {
  for (const int n : {1024, 8192, 32768, 65536, 131072}) {
    for (const int columns : {n - 1, n, n + 1}) {
      ExpectMasksOf(AsSize(columns), 3);
    }
  }
}

TEST_P(HostMaskWith, RowsOfAMask) {
  for (const std::size_t rows : {7U, 8U, 9U, 10U, 65U, 257U}) {
    ExpectMasksOf(2100, rows);
  }
  // 16 MiB of f32.
  for (const std::size_t rows : {63U, 64U, 65U}) ExpectMasksOf(65536, rows);
}

}  // namespace
}  // namespace kvtwin::props
