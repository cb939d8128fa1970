// Attention with products of bf16, whose results are known exactly: of many
// queries and of few.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numbers>
#include <random>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "core/names.h"
#include "kvtwin/attention.h"
#include "kvtwin/tensor.h"
#include "optimized/aligned_buffer.h"
#include "optimized/amx_products.h"
#include "optimized/attention_bf16.h"
#include "props/unit/attention/amx_emulator.h"

namespace kvtwin::props {
namespace {

using Tiles = EmulatedTiles;

// Some cells of one KV head. The numbers of `value` are integers that all
// dtypes have; blocks of q8_0 have a scale of 1, as they have a 127.
struct KnownCells {
  DenseTensor key;
  DenseTensor value;
  std::int64_t head_dim;
  std::int64_t cells;

  float Value(std::int64_t i, std::int64_t cell) const {
    if (value.view().dtype == DType::kQ8 && i % 32 == 0) return 127;
    return static_cast<float>((i * 7 + cell * 13) % 15 - 8);
  }
};

KnownCells MakeCells(DType dtype, std::int64_t head_dim, std::int64_t cells) {
  const Shape shape = {head_dim, 1, cells, 1};
  KnownCells made = {.key = FilledTensor(dtype, shape, 1),
                     .value = FilledTensor(dtype, shape, 0),
                     .head_dim = head_dim,
                     .cells = cells};
  DenseTensor row = FilledTensor(DType::kF32, {head_dim, 1, 1, 1}, 0);
  for (std::int64_t cell = 0; cell < cells; ++cell) {
    for (std::int64_t i = 0; i < head_dim; ++i) {
      StoreElement(made.Value(i, cell),
                   const_cast<std::byte*>(row.view().at(i)), DType::kF32);
    }
    const TensorView& value = made.value.view();
    CopyRun(row.view(), 0, 0, 0, const_cast<std::byte*>(value.at(0, 0, cell)),
            value.stride[0], dtype);
  }
  return made;
}

// Attends to the cells with `heads` queries in each row; `query(i, head)` is
// element i. Row r sees `window` cells from cell r on, or all cells if that is
// 0. Returns `out` and then log_sum_exp.
template <class Query>
std::vector<float> AttendTo(const KnownCells& cells, int heads, int rows,
                            const Query& query, bool in_bf16 = true,
                            std::int64_t window = 0) {
  DenseTensor queries =
      FilledTensor(DType::kF32, {cells.head_dim, heads, rows, 1}, 0);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t head = 0; head < heads; ++head) {
      for (std::int64_t i = 0; i < cells.head_dim; ++i) {
        StoreElement(query(i, head),
                     const_cast<std::byte*>(queries.view().at(i, head, row)),
                     DType::kF32);
      }
    }
  }
  DenseTensor mask = HidingMask(DType::kF32, cells.cells, rows);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t cell = 0; cell < cells.cells; ++cell) {
      const bool in_window = cell >= row && cell < row + window;
      if (window == 0 || in_window) AllowInMask(mask, cell, row);
    }
  }
  auto attention = *MakeAttention();
  EXPECT_TRUE(attention->Plan(mask.view(), rows).ok());
  const std::int64_t count = std::int64_t{rows} * heads;
  std::vector<float> out(AsSize((cells.head_dim + 1) * count));
  EXPECT_TRUE(attention
                  ->Attend(queries.view(),
                           {.key = cells.key.view(),
                            .value = cells.value.view(),
                            .mask = {}},
                           VLayout::kPlain, {.bf16_products = in_bf16},
                           {.out = out.data(),
                            .log_sum_exp = out.data() + cells.head_dim * count})
                  .ok());
  return out;
}

// Rows that weigh all cells alike: the results are means of integers, which
// bf16 has.
void ExpectExactMeans(DType dtype, int cells, int head_dim, int heads,
                      int rows) {
  const KnownCells made = MakeCells(dtype, head_dim, cells);
  const std::vector<float> out =
      AttendTo(made, heads, rows, [](auto, auto) { return 0.0f; });
  for (std::int64_t i = 0; i < head_dim; ++i) {
    float sum = 0;
    for (std::int64_t cell = 0; cell < cells; ++cell) {
      sum += made.Value(i, cell);
    }
    const float mean = sum / static_cast<float>(cells);
    for (std::int64_t row = 0; row < std::int64_t{rows} * heads; ++row) {
      ASSERT_NEAR(out[AsSize(row * head_dim + i)], mean, 4e-5)
          << "row " << row << ", element " << i << ", " << cells << " cells, "
          << head_dim << " elements, " << rows << " rows, " << heads
          << " heads, " << DTypeName(dtype);
    }
  }
}

TEST(Bf16Products, OfAnyTileAreExact) {
  constexpr std::array kHeadDims = {1, 16, 31, 33, 128, 576};
  for (const optimized::MultiplyBf16 multiply :
       {optimized::MultiplyBf16{nullptr}, &optimized::MultiplyInRegisters,
        &optimized::MultiplyInTiles<Tiles>}) {
    optimized::ForceBf16Multiplier(multiply);
    for (int cells = 1; cells <= 140 && !HasFailure(); ++cells) {
      ExpectExactMeans(DType::kF32, cells,
                       kHeadDims.at(AsSize(cells) % kHeadDims.size()), 3,
                       2 + cells % 13);
    }
    optimized::ForceBf16Multiplier(nullptr);
  }
  EXPECT_EQ(Tiles::TakeFaults(), std::vector<std::string>());
}

// Products of f32 by AMX keep each bit of V: a row that sees one cell has its
// V, whatever the dtype.
TEST(Bf16Terms, KeepEachBitOfValues) {
  std::mt19937 random(1);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8,
                            DType::kQ8, DType::kQ4}) {
    constexpr std::int64_t kHeadDim = 96;
    KnownCells cells = MakeCells(dtype, kHeadDim, 1);
    DenseTensor row = FilledTensor(DType::kF32, {kHeadDim, 1, 1, 1}, 0);
    for (std::int64_t i = 0; i < kHeadDim; ++i) {
      StoreElement(static_cast<float>(random()) * 0x1p-28f - 8,
                   const_cast<std::byte*>(row.view().at(i)), DType::kF32);
    }
    CopyRun(row.view(), 0, 0, 0, cells.value.bytes.data(),
            cells.value.view().stride[0], dtype);
    optimized::ForceBf16Multiplier(&optimized::MultiplyInTiles<Tiles>);
    const std::size_t before = Tiles::Multiplications();
    // As many queries as AMX needs.
    const std::vector<float> out = AttendTo(
        cells, 4, 64, [](auto, auto) { return 0.5f; }, /*in_bf16=*/false);
    optimized::ForceBf16Multiplier(nullptr);
    if (optimized::Bf16Multiplier() != nullptr) {
      EXPECT_GT(Tiles::Multiplications(), before);
    }
    for (std::int64_t i = 0; i < kHeadDim * 4 * 64; ++i) {
      ASSERT_EQ(out[AsSize(i)], LoadFrom(cells.value.view(), i % kHeadDim))
          << i << ", " << DTypeName(dtype);
    }
  }
  EXPECT_EQ(Tiles::TakeFaults(), std::vector<std::string>());
}

// Rows with a window see some of the tiles that are computed together. They see
// nearly alone the cells whose key has its 1 in the last element, which lie
// elsewhere in each tile.
TEST(Bf16ManyQueries, SeeSomeOfTheTiles) {
  constexpr std::int64_t kHeadDim = 96;
  constexpr std::int64_t kCells = 700;
  // With a shorter one, few rows are computed together.
  constexpr std::int64_t kWindow = 300;
  constexpr std::int64_t kRows = kCells - kWindow;
  constexpr std::int64_t kHeads = 2;
  KnownCells cells = MakeCells(DType::kF32, kHeadDim, kCells);
  cells.key = FilledTensor(DType::kF32, {kHeadDim, 1, kCells, 1}, 0);
  for (std::int64_t cell = 0; cell < kCells; ++cell) {
    StoreElement(
        1,
        const_cast<std::byte*>(cells.key.view().at(cell % kHeadDim, 0, cell)),
        DType::kF32);
  }
  for (const optimized::MultiplyBf16 multiply :
       {optimized::MultiplyBf16{nullptr}, &optimized::MultiplyInRegisters,
        &optimized::MultiplyInTiles<Tiles>}) {
    optimized::ForceBf16Multiplier(multiply);
    for (const bool in_bf16 : {false, true}) {
      const std::vector<float> out = AttendTo(
          cells, kHeads, kRows,
          [](std::int64_t i, auto) { return i + 1 == kHeadDim ? 64.0f : 0; },
          in_bf16, kWindow);
      for (std::int64_t at = 0; at < kRows * kHeads * kHeadDim; ++at) {
        const std::int64_t row = at / kHeadDim / kHeads;
        float sum = 0;
        float count = 0;
        for (std::int64_t cell = row; cell < row + kWindow; ++cell) {
          if (cell % kHeadDim + 1 != kHeadDim) continue;
          sum += cells.Value(at % kHeadDim, cell);
          ++count;
        }
        ASSERT_NEAR(out[AsSize(at)], sum / count, 4e-5)
            << "row " << row << ", in bf16 " << in_bf16;
      }
    }
    optimized::ForceBf16Multiplier(nullptr);
  }
  EXPECT_EQ(Tiles::TakeFaults(), std::vector<std::string>());
  EXPECT_FALSE(Tiles::IsConfigured());  // The system has no state to save.
}

// A few queries, which AVX-512 BF16 multiplies where the processor has it, also
// if it has AMX, which would leave them to products of f32.
class Bf16FewQueries : public ::testing::Test {
 public:
  Bf16FewQueries() {
    optimized::ForceBf16Multiplier(optimized::MultiplyInRegisters);
  }
  ~Bf16FewQueries() override { optimized::ForceBf16Multiplier(nullptr); }
};

constexpr std::array kRowDTypes = {DType::kF32, DType::kF16, DType::kBF16,
                                   DType::kF8, DType::kQ8};

TEST_F(Bf16FewQueries, AreExact) {
  for (const DType dtype : kRowDTypes) {
    for (int cells = 1; cells <= 140 && !HasFailure(); ++cells) {
      const int head_dim =
          dtype == DType::kQ8 ? 32 * (1 + cells % 5) : 16 * (1 + cells % 9);
      ExpectExactMeans(dtype, cells, head_dim, 1 + cells % 8, 1);
    }
  }
}

// Scores are in units of log 2: a query with this number and zeros has one
// element of K as its score, exactly, which is log_sum_exp if there is one
// cell.
constexpr auto kOne = std::numbers::ln2_v<float>;

TEST_F(Bf16FewQueries, TakeEachElement) {
  constexpr std::int64_t kMost = 144;
  for (const DType dtype : kRowDTypes) {
    for (const std::int64_t head_dim : {16, 32, 64, 80, 128, 144}) {
      if (dtype == DType::kQ8 && head_dim % 32 != 0) continue;
      KnownCells cells = MakeCells(dtype, head_dim, 1);
      cells.key = MakeCells(dtype, head_dim, 1).value;
      for (std::int64_t first = 0; first < kMost; first += 8) {
        const auto query = [&](std::int64_t i, std::int64_t head) {
          return i == (first + head) % head_dim ? kOne : 0.0f;
        };
        const std::vector<float> out = AttendTo(cells, 8, 1, query);
        for (std::int64_t head = 0; head < 8; ++head) {
          const std::int64_t i = (first + head) % head_dim;
          ASSERT_NEAR(out[AsSize(8 * head_dim + head)],
                      cells.Value(i, 0) * kOne, 1e-4)
              << i << " of " << head_dim << ", " << DTypeName(dtype);
        }
      }
    }
  }
}

// Each query sees nearly one cell alone, another one than the other queries.
TEST_F(Bf16FewQueries, FindTheirCells) {
  constexpr std::int64_t kHeadDim = 160;
  for (const DType dtype : kRowDTypes) {
    for (const std::int64_t count : {8, 63, 64, 65, 127, 150}) {
      KnownCells cells = MakeCells(dtype, kHeadDim, count);
      for (std::int64_t cell = 0; cell < count; ++cell) {
        DenseTensor one = FilledTensor(DType::kF32, {kHeadDim, 1, 1, 1}, 0);
        StoreElement(1, const_cast<std::byte*>(one.view().at(cell)),
                     DType::kF32);
        const TensorView& key = cells.key.view();
        CopyRun(one.view(), 0, 0, 0, const_cast<std::byte*>(key.at(0, 0, cell)),
                key.stride[0], dtype);
      }
      const auto cell_of = [&](std::int64_t head, std::int64_t first) {
        return (first + head * 19) % count;
      };
      for (std::int64_t first = 0; first < count; ++first) {
        const std::vector<float> out =
            AttendTo(cells, 8, 1, [&](std::int64_t i, std::int64_t head) {
              return i == cell_of(head, first) ? 64 * kOne : 0.0f;
            });
        for (std::int64_t i = 0; i < 8 * kHeadDim; ++i) {
          const std::int64_t cell = cell_of(i / kHeadDim, first);
          ASSERT_NEAR(out[AsSize(i)], cells.Value(i % kHeadDim, cell), 1e-4)
              << "head " << i / kHeadDim << ", element " << i % kHeadDim << ", "
              << count << " cells, " << DTypeName(dtype);
        }
      }
    }
  }
}

// Every number of f8, subnormal or not, as an element of K and of V.
TEST_F(Bf16FewQueries, TakeEachNumberOfF8) {
  KnownCells cells = MakeCells(DType::kF8, 256, 1);
  for (std::size_t i = 0; i < 256; ++i) {
    const bool is_nan = i % 128 == 127;
    const auto byte = static_cast<std::byte>(is_nan ? 0 : i);
    cells.key.bytes[i] = cells.value.bytes[i] = byte;
  }
  for (std::int64_t first = 0; first < 256; first += 8) {
    const std::vector<float> out =
        AttendTo(cells, 8, 1, [&](std::int64_t i, std::int64_t head) {
          return i == first + head ? kOne : 0.0f;
        });
    for (std::int64_t i = 0; i < 256; ++i) {
      ASSERT_EQ(out[AsSize(i)],
                LoadElement(cells.value.view().at(i), DType::kF8))
          << i;
    }
    for (std::int64_t head = 0; head < 8; ++head) {
      const float number =
          kOne * LoadElement(cells.key.view().at(first + head), DType::kF8);
      ASSERT_NEAR(out[AsSize(std::int64_t{8} * 256 + head)], number,
                  1e-6f * std::abs(number))
          << first + head;
    }
  }
}

// Every number of q8_0 as an element of K and of V, with positive, negative and
// very small scales.
TEST_F(Bf16FewQueries, TakeEachNumberOfQ8) {
  constexpr std::array<std::uint16_t, 8> kScales = {
      0x3C00, 0xB800, 0x0001, 0x8400, 0x7BFF, 0x0000, 0x3555, 0xC123};
  KnownCells cells = MakeCells(DType::kQ8, 256, 1);
  for (std::size_t i = 0; i < 256; ++i) {
    const std::size_t at = i / 32 * 34;
    std::memcpy(&cells.key.bytes[at], &kScales.at(i / 32), 2);
    cells.key.bytes[at + 2 + i % 32] = static_cast<std::byte>(i);
  }
  cells.value.bytes = cells.key.bytes;
  for (std::int64_t first = 0; first < 256; first += 8) {
    const std::vector<float> out =
        AttendTo(cells, 8, 1, [&](std::int64_t i, std::int64_t head) {
          return i == first + head ? kOne : 0.0f;
        });
    for (std::int64_t i = 0; i < 256; ++i) {
      const float number = LoadFrom(cells.value.view(), i);
      ASSERT_NEAR(out[AsSize(i)], number, 1e-6f * std::abs(number)) << i;
    }
    for (std::int64_t head = 0; head < 8; ++head) {
      const float number = kOne * LoadFrom(cells.key.view(), first + head);
      ASSERT_NEAR(out[AsSize(std::int64_t{8} * 256 + head)], number,
                  1e-6f * std::abs(number))
          << first + head;
    }
  }
}

// Each block of each cell has a scale of its own.
TEST_F(Bf16FewQueries, TakeTheScalesOfEachCell) {
  constexpr std::int64_t kHeadDim = 64;
  for (const std::int64_t count : {16, 17, 33, 48, 64, 100}) {
    KnownCells cells = MakeCells(DType::kQ8, kHeadDim, count);
    DenseTensor row = FilledTensor(DType::kF32, {kHeadDim, 1, 1, 1}, 0);
    for (std::int64_t cell = 0; cell < count; ++cell) {
      for (DenseTensor* rows : {&cells.key, &cells.value}) {
        const std::int64_t factor = rows == &cells.key ? 29 : 17;
        for (std::int64_t block = 0; block < 2; ++block) {
          const std::int64_t number = (cell * factor + block * 11) % 31 + 1;
          StoreElement(static_cast<float>(number) / 8,
                       const_cast<std::byte*>(row.view().at(block * 32)),
                       DType::kF32);
        }
        const TensorView& to = rows->view();
        CopyRun(row.view(), 0, 0, 0, const_cast<std::byte*>(to.at(0, 0, cell)),
                to.stride[0], DType::kQ8);
      }
    }
    const std::vector<float> out =
        AttendTo(cells, 2, 1, [](std::int64_t i, std::int64_t head) {
          return i == head * 32 ? kOne : 0.0f;
        });
    for (std::int64_t head = 0; head < 2; ++head) {
      double sum = 0;
      std::array<double, 2> expected = {};
      for (std::int64_t cell = 0; cell < count; ++cell) {
        const double weight =
            std::exp2(LoadFrom(cells.key.view(), head * 32, 0, cell));
        sum += weight;
        for (std::int64_t block = 0; block < 2; ++block) {
          At(expected, block) +=
              weight * LoadFrom(cells.value.view(), block * 32, 0, cell);
        }
      }
      EXPECT_NEAR(out[AsSize(2 * kHeadDim + head)], std::log(sum), 1e-5)
          << count << " cells";
      for (std::int64_t block = 0; block < 2; ++block) {
        // Weights have 15 bits.
        EXPECT_NEAR(out[AsSize(head * kHeadDim + block * 32)],
                    At(expected, block) / sum, 1e-4)
            << count << " cells, block " << block;
      }
    }
  }
}

// Integers have no NaN: a scale or a query that is not finite is not lost.
TEST_F(Bf16FewQueries, KeepWhatIsNotFinite) {
  constexpr std::int64_t kHeadDim = 64;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const float number : {kInfinity, -kInfinity, kNan}) {
    // A scale of V: the outputs of its block alone.
    KnownCells cells = MakeCells(DType::kQ8, kHeadDim, 70);
    StoreElement(number,
                 const_cast<std::byte*>(cells.value.view().at(0, 0, 65)),
                 DType::kF16);
    std::vector<float> out =
        AttendTo(cells, 4, 1, [](auto, auto) { return 0.5f; });
    for (std::int64_t i = 0; i < 4 * kHeadDim; ++i) {
      ASSERT_EQ(std::isfinite(out[AsSize(i)]), i % kHeadDim >= 32) << i;
    }
    // A query: its outputs alone, which are NaN or, as scores of NaN are those
    // of hidden cells, 0.
    cells.value = FilledTensor(DType::kQ8, {kHeadDim, 1, 70, 1}, 1);
    out = AttendTo(cells, 4, 1, [&](std::int64_t i, std::int64_t head) {
      return i == 40 && head == 2 ? number : 0.5f;
    });
    for (std::int64_t i = 0; i < 4 * kHeadDim; ++i) {
      const float got = out[AsSize(i)];
      const bool is_number = std::isfinite(got) && got != 0;
      ASSERT_EQ(is_number, i / kHeadDim != 2) << i << ": " << got;
    }
  }
}

// An element of a query is a multiple of a part of the largest element.
TEST_F(Bf16FewQueries, RoundToPartsOfTheLargest) {
  // Without AVX-512 BF16, queries keep their f32: there is nothing to round.
  if (optimized::Bf16Multiplier() == nullptr) {
    GTEST_SKIP() << "this processor has no AVX-512 BF16";
  }
  KnownCells cells = MakeCells(DType::kQ8, 32, 1);
  DenseTensor one = FilledTensor(DType::kF32, {32, 1, 1, 1}, 0);
  StoreElement(1, const_cast<std::byte*>(one.view().at(1)), DType::kF32);
  CopyRun(one.view(), 0, 0, 0, cells.key.bytes.data(), 1, DType::kQ8);
  const float key = LoadFrom(cells.key.view(), 1);
  for (const float small : {0.4f, 0.6f, -3.4f, 127.4f, 128.6f, -129.4f}) {
    const std::vector<float> out =
        AttendTo(cells, 1, 1, [&](std::int64_t i, std::int64_t) {
          return kOne * (i == 0 ? 16383 : i == 1 ? small : 0);
        });
    EXPECT_NEAR(out[32], kOne * key * std::round(small), 1e-4) << small;
  }
}

// A weight of 2^-12 beside one of 1 keeps its digits: it is 8 units.
TEST_F(Bf16FewQueries, KeepSmallWeights) {
  KnownCells cells = MakeCells(DType::kQ8, 32, 2);
  DenseTensor row = FilledTensor(DType::kF32, {32, 1, 1, 1}, 0);
  const auto store = [&](const TensorView& to, std::int64_t cell, float first,
                         float second) {
    StoreElement(first, const_cast<std::byte*>(row.view().at(0)), DType::kF32);
    StoreElement(second, const_cast<std::byte*>(row.view().at(1)), DType::kF32);
    CopyRun(row.view(), 0, 0, 0, const_cast<std::byte*>(to.at(0, 0, cell)), 1,
            DType::kQ8);
  };
  store(cells.key.view(), 0, 127, 0);
  store(cells.key.view(), 1, 0, 127);
  store(cells.value.view(), 0, 127, 0);
  store(cells.value.view(), 1, 127, 100);
  const std::vector<float> out =
      AttendTo(cells, 1, 1, [&](std::int64_t i, std::int64_t) {
        return i == 0 ? 12 * kOne / 127 : 0.0f;
      });
  constexpr float kExpected = 100 * 0x1p-12f / (1 + 0x1p-12f);
  EXPECT_NEAR(out[1], kExpected, 1e-3f * kExpected);
}

// Heads of more than 32 blocks have products of f32.
TEST_F(Bf16FewQueries, TakeWideHeads) {
  for (const std::int64_t head_dim : {1024, 1056}) {
    KnownCells cells = MakeCells(DType::kQ8, head_dim, 1);
    cells.key = MakeCells(DType::kQ8, head_dim, 1).value;
    for (const std::int64_t at :
         {std::int64_t{1}, std::int64_t{1023}, head_dim - 1}) {
      const std::vector<float> out = AttendTo(
          cells, 1, 1,
          [&](std::int64_t i, std::int64_t) { return i == at ? kOne : 0.0f; });
      EXPECT_NEAR(out[AsSize(head_dim)], kOne * cells.Value(at, 0), 1e-4) << at;
      EXPECT_NEAR(out[AsSize(at)], cells.Value(at, 0), 1e-4) << at;
    }
  }
}

// A row takes no NaN and no infinity from the V of a cell that it does not see.
TEST_F(Avx512Bf16, TakesNothingFromHiddenCells) {
  std::array<std::array<float, 16>, 2> cells;
  cells[0].fill(1 + 0x1p-23f);
  cells[1].fill(std::numeric_limits<float>::infinity());
  cells[1][3] = std::numeric_limits<float>::quiet_NaN();
  optimized::TileRows rows = {.rows = {},
                              .dtype = DType::kF32,
                              .adjacent = true,
                              .head_dim = 16,
                              .head_stride = 0,
                              .stride = sizeof(float)};
  rows.rows.fill(reinterpret_cast<const std::byte*>(cells[1].data()));
  rows.rows[0] = reinterpret_cast<const std::byte*>(cells[0].data());
  const optimized::GroupTile seen = {
      .tile = {.cells = 2, .keys = rows, .values = rows, .next = nullptr},
      .visible = {1, 3}};
  for (const std::size_t terms : {std::size_t{1}, optimized::kMostTerms}) {
    const optimized::ManyTerms all = {terms, terms, terms};
    auto scratch = optimized::AlignedBuffer(
        optimized::ManyBf16Scratch(16, 16, all) * sizeof(float));
    alignas(64) std::array<float, std::size_t{2}* 16 * 3> queries = {};
    alignas(64) std::array<float, std::size_t{2}* 16> out = {};
    std::array<float, 2> largest;
    largest.fill(-std::numeric_limits<float>::infinity());
    std::array<float, 2> sum = {};
    optimized::AttendManyInBf16({&seen, 1},
                                {.kv_head = 0,
                                 .count = 2,
                                 .queries = queries.data(),
                                 .out = out.data(),
                                 .largest = largest.data(),
                                 .sum = sum.data()},
                                1, {.cap = 0}, all,
                                &optimized::MultiplyInTiles<Tiles>,
                                scratch.as<float>());
    for (std::size_t i = 0; i < 16; ++i) {
      EXPECT_EQ(out.at(i), terms == 1 ? 1 : cells[0].at(i)) << i;
    }
  }
}

// A tile with fewer cells than before takes nothing from what lay in memory.
TEST_F(Avx512Bf16, TakesNothingFromAbsentCells) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::array<float, 16> row;
  row.fill(3);
  optimized::TileRows rows = {.rows = {},
                              .dtype = DType::kF32,
                              .adjacent = true,
                              .head_dim = row.size(),
                              .head_stride = 0,
                              .stride = sizeof(float)};
  rows.rows.fill(reinterpret_cast<const std::byte*>(row.data()));
  const optimized::GroupTile seen = {
      .tile = {.cells = 1, .keys = rows, .values = rows, .next = nullptr},
      .visible = {1}};
  const std::size_t floats = optimized::ManyBf16Scratch(16, 16, {});
  auto scratch = optimized::AlignedBuffer(floats * sizeof(float));
  for (const optimized::MultiplyBf16 multiply :
       {&optimized::MultiplyInRegisters, optimized::Bf16Multiplier(),
        &optimized::MultiplyInTiles<Tiles>}) {
    std::fill_n(scratch.as<float>(), floats, nan);
    alignas(64) std::array<float, 16> query = {};
    alignas(64) std::array<float, 16> out = {};
    float largest = -std::numeric_limits<float>::infinity();
    float sum = 0;
    optimized::AttendManyInBf16({&seen, 1},
                                {.kv_head = 0,
                                 .count = 1,
                                 .queries = query.data(),
                                 .out = out.data(),
                                 .largest = &largest,
                                 .sum = &sum},
                                1, {.cap = 0}, {}, multiply,
                                scratch.as<float>());
    EXPECT_EQ(out, row);
    EXPECT_EQ(sum, 1);
  }
}

}  // namespace
}  // namespace kvtwin::props
