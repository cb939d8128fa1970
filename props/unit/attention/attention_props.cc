// Compares attention of both twins with the formula, within the derived bound,
// and checks its laws, for random cases.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "kvtwin/attention.h"
#include "props/base/pick.h"
#include "props/compare/attention_bound.h"
#include "props/history/generate.h"
#include "props/testing/each_target.h"
#include "reference/attention.h"

namespace kvtwin::props {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A tensor in memory, with gaps between its runs, at any address.
struct Stored {
  std::vector<std::byte> bytes;
  TensorView view;
};

// The results of Attend, for all rows.
struct Results {
  std::vector<float> out;          // [v_head_dim, heads, rows]
  std::vector<float> log_sum_exp;  // [heads, rows]
};

struct Case {
  std::int64_t heads = 1;
  std::int64_t kv_heads = 1;
  std::int64_t k_head_dim = 1;
  std::int64_t v_head_dim = 1;
  int rows = 1;
  int first_row = 0;
  std::int64_t columns = 1;
  AttentionOptions options;
  std::vector<float> sinks;
  Stored query;
  Stored key;
  Stored value;
  VLayout v_layout = VLayout::kPlain;
  // What the rows see, from first_row on. Of a table: column c is token c of
  // its sequences, one after another.
  DenseTensor mask;  // [columns, rows]
  // The K and V of each column, in f32, dense.
  DenseTensor exact_key;
  DenseTensor exact_value;
  std::vector<bool> finite;  // The rows that see no NaN and no infinity.
  // Of a table.
  bool paged = false;
  PagedLayout layout = PagedLayout::kTokenMajor;
  AttentionTable table;
  std::vector<std::int32_t> blocks;
  std::vector<std::int32_t> lengths;
  std::vector<std::int32_t> query_rows;

  KvView view() const {
    return {.key = key.view, .value = value.view, .mask = mask.view()};
  }
  KvView exact() const {
    return {.key = exact_key.view(),
            .value = exact_value.view(),
            .mask = mask.view()};
  }
};

// Draws 0 for half of the cases, else a number up to `most`.
int Sometimes(const Pick& pick, int most) {
  return Chance(pick, 50) ? 0 : pick(0, most);
}

// Makes a tensor of zeros, with gaps between its runs.
Stored Store(const Pick& pick, DType dtype, const Shape& shape) {
  Stored stored;
  TensorView& view = stored.view;
  view.dtype = dtype;
  view.shape = shape;
  view.stride[0] = static_cast<std::int64_t>(SizeOf(dtype));
  view.stride[1] = RunBytes(dtype, shape[0]) + Sometimes(pick, 9);
  for (int i = 2; i < 4; ++i) {
    view.stride[i] = view.stride[i - 1] * shape[i - 1] + Sometimes(pick, 9);
  }
  const int offset = Sometimes(pick, 7);
  stored.bytes.resize(AsSize(view.stride[3] * shape[3] + offset));
  view.data = stored.bytes.data() + offset;
  return stored;
}

// Stores one head's row at `row`, whose elements are `stride` bytes apart.
void StoreRow(const std::vector<float>& numbers, DType dtype,
              const std::byte* row, std::int64_t stride) {
  auto* to = const_cast<std::byte*>(row);
  if (IsBlockDType(dtype)) return StoreBlocks(numbers, dtype, to);
  for (const float number : numbers) {
    StoreElement(number, to, dtype);
    to += stride;
  }
}

// Where a cell's row of a head lies, and the distance of its elements.
struct Place {
  const std::byte* row;
  std::int64_t stride;
};

Place PlaceInView(const TensorView& view, VLayout layout, std::int64_t cell,
                  std::int64_t head) {
  const TensorView row = RowOf(view, layout, cell);
  return {row.at(0, head), row.stride[0]};
}

Place PlaceInBlocks(const TensorView& view, PagedLayout layout,
                    std::int64_t block, std::int64_t slot, std::int64_t head) {
  const bool head_major = layout == PagedLayout::kHeadMajor;
  return {head_major ? view.at(0, slot, head, block)
                     : view.at(0, head, slot, block),
          view.stride[0]};
}

std::vector<float> DrawNumbers(const Pick& pick, std::int64_t count,
                               int poison) {
  std::vector<float> numbers(AsSize(count));
  for (float& number : numbers) {
    number = static_cast<float>(pick(-1000, 1000)) / 500;
  }
  const auto at = AsSize(pick(0, AsInt(count) - 1));
  if (poison > 0) numbers[at] = poison == 1 ? kNaN : -kInfinity;
  return numbers;
}

// Draws the numbers of each cell that the rows see or not, and stores them.
// `place(tensor, cell, head)` says where.
template <class PlaceOf>
void FillRows(const Pick& pick, Case& drawn, const PlaceOf& place) {
  const auto fill = [&](const TensorView& tensor, std::int64_t head_dim,
                        DenseTensor& exact, bool is_key) {
    exact = FilledTensor(DType::kF32,
                         {head_dim, drawn.kv_heads, drawn.columns, 1}, 0);
    const bool poisoned = Chance(pick, 50);
    for (std::int64_t cell = 0; cell < drawn.columns; ++cell) {
      const int poison = poisoned && Chance(pick, 20) ? pick(1, 2) : 0;
      bool finite = true;
      for (std::int64_t head = 0; head < drawn.kv_heads; ++head) {
        const Place at = place(tensor, is_key, cell, head);
        StoreRow(DrawNumbers(pick, head_dim, poison), tensor.dtype, at.row,
                 at.stride);
        // What was stored, rounded to its dtype.
        TensorView row = DenseView(at.row, tensor.dtype, {head_dim, 1, 1, 1});
        row.stride[0] = at.stride;
        for (std::int64_t i = 0; i < head_dim; ++i) {
          const float number = LoadFrom(row, i);
          finite = finite && std::isfinite(number);
          StoreElement(number,
                       const_cast<std::byte*>(exact.view().at(i, head, cell)),
                       DType::kF32);
        }
      }
      for (int row = 0; row < drawn.rows && !finite; ++row) {
        if (MaskAllows(drawn.mask.view(), cell, drawn.first_row + row)) {
          drawn.finite[AsSize(row)] = false;
        }
      }
    }
  };
  fill(drawn.key.view, drawn.k_head_dim, drawn.exact_key, true);
  fill(drawn.value.view, drawn.v_head_dim, drawn.exact_value, false);
}

DType DrawDType(const Pick& pick) {
  return OneOf(pick, {DType::kF32, DType::kF16, DType::kBF16, DType::kF8,
                      DType::kQ8, DType::kQ4});
}

std::int64_t DrawHeadDim(const Pick& pick, DType dtype) {
  if (IsBlockDType(dtype)) return 32 * pick(1, 5);
  if (Chance(pick, 3)) return 576;
  return Chance(pick, 50) ? 16 * pick(1, 9) : pick(1, 150);
}

// Draws the mask of a view: rows of one sequence, of several, or anything.
void DrawMask(const Pick& pick, Case& drawn) {
  const DType dtype =
      OneOf(pick, {DType::kF32, DType::kF16, DType::kBF16, DType::kBits});
  const std::int64_t all_rows = drawn.first_row + drawn.rows + pick(0, 2);
  drawn.mask = HidingMask(dtype, drawn.columns, all_rows);
  const int way = pick(0, 4);
  const int sequences = pick(1, 5);
  const int window = pick(0, 200);
  for (std::int64_t row = 0; row < all_rows; ++row) {
    if (Chance(pick, 3)) continue;  // It sees nothing.
    const std::int64_t self = drawn.columns - all_rows + row;
    for (std::int64_t cell = 0; cell < drawn.columns; ++cell) {
      const bool past = cell <= self;
      const bool sees = way == 0   ? past
                        : way == 1 ? past && self - cell <= window
                        : way == 2 ? cell % sequences == row % sequences
                        : way == 3 ? Chance(pick, 30)
                                   : true;
      if (sees) AllowInMask(drawn.mask, cell, row);
    }
  }
}

void DrawView(const Pick& pick, Case& drawn, DType k_dtype, DType v_dtype) {
  drawn.first_row = Sometimes(pick, 5);
  drawn.rows = OneOf(pick, {1, 1, 1, 2, 3, 7, pick(1, 20)});
  drawn.columns = OneOf(pick, {pick(1, 20), pick(60, 70), pick(120, 300)});
  if (Chance(pick, 2)) drawn.rows = pick(60, 130);
  if (Chance(pick, 1)) drawn.columns = pick(4090, 4100);
  if (!IsBlockDType(v_dtype)) {
    drawn.v_layout =
        OneOf(pick, {VLayout::kPlain, VLayout::kPermuted, VLayout::kTiled});
  }
  if (drawn.v_layout == VLayout::kTiled) {
    drawn.columns = (drawn.columns + kTileCells - 1) / kTileCells * kTileCells;
  }
  DrawMask(pick, drawn);
  drawn.key = Store(pick, k_dtype,
                    {drawn.k_head_dim, drawn.kv_heads, drawn.columns, 1});
  Shape shape = {drawn.v_head_dim, drawn.kv_heads, drawn.columns, 1};
  if (drawn.v_layout == VLayout::kPermuted) {
    shape = {drawn.columns, drawn.v_head_dim, drawn.kv_heads, 1};
  }
  if (drawn.v_layout == VLayout::kTiled) {
    shape = {kTileCells, drawn.v_head_dim, drawn.kv_heads,
             drawn.columns / kTileCells};
  }
  drawn.value = Store(pick, v_dtype, shape);
  drawn.finite.assign(AsSize(drawn.rows), true);
  FillRows(pick, drawn,
           [&](const TensorView& tensor, bool is_key, std::int64_t cell,
               std::int64_t head) {
             return PlaceInView(
                 tensor, is_key ? VLayout::kPlain : drawn.v_layout, cell, head);
           });
}

// Draws the lengths of a table, and what its rows see.
void DrawSequences(const Pick& pick, Case& drawn) {
  const int sequences = pick(1, 5);
  drawn.rows = 0;
  drawn.columns = 0;
  for (int i = 0; i < sequences; ++i) {
    const int length = OneOf(pick, {0, 1, pick(1, 70), pick(1, 200)});
    const int most = std::min(length, Chance(pick, 90) ? 10 : 200);
    drawn.lengths.push_back(length);
    drawn.query_rows.push_back(OneOf(pick, {0, std::min(1, most), most}));
    drawn.rows += drawn.query_rows.back();
    drawn.columns += length;
  }
}

void DrawTable(const Pick& pick, Case& drawn, DType k_dtype, DType v_dtype) {
  drawn.paged = true;
  drawn.layout =
      OneOf(pick, {PagedLayout::kTokenMajor, PagedLayout::kHeadMajor});
  do {
    drawn.lengths.clear();
    drawn.query_rows.clear();
    DrawSequences(pick, drawn);
  } while (drawn.rows == 0);
  AttentionTable& table = drawn.table;
  table.block_size = OneOf(pick, {1, 2, 3, 16, 32, 64, 100});
  table.window = Chance(pick, 50) ? kOpenEnd : pick(0, 100);
  const int longest = *std::ranges::max_element(drawn.lengths);
  table.columns =
      std::max(1, (longest + table.block_size - 1) / table.block_size) +
      pick(0, 2);
  // The blocks in reverse order; the entries past a sequence's end are -1.
  const int all = table.columns * Size(drawn.lengths);
  drawn.mask = HidingMask(DType::kF32, drawn.columns, drawn.rows);
  std::int64_t row = 0;
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < drawn.lengths.size(); ++i) {
    const int length = drawn.lengths[i];
    for (int c = 0; c < table.columns; ++c) {
      const int number = AsInt(i) * table.columns + c;
      const bool used = c * table.block_size < length;
      drawn.blocks.push_back(used ? all - 1 - number : -1);
    }
    for (int j = 0; j < drawn.query_rows[i]; ++j, ++row) {
      const int self = length - drawn.query_rows[i] + j;
      for (int token = 0; token <= self; ++token) {
        if (self - token > table.window) continue;
        AllowInMask(drawn.mask, begin + token, row);
      }
    }
    begin += length;
  }
  const bool head_major = drawn.layout == PagedLayout::kHeadMajor;
  const auto store = [&](DType dtype, std::int64_t head_dim) {
    Shape shape = {head_dim, drawn.kv_heads, table.block_size, all};
    if (head_major) std::swap(shape[1], shape[2]);
    return Store(pick, dtype, shape);
  };
  drawn.key = store(k_dtype, drawn.k_head_dim);
  drawn.value = store(v_dtype, drawn.v_head_dim);
  drawn.finite.assign(AsSize(drawn.rows), true);
  FillRows(pick, drawn,
           [&](const TensorView& tensor, bool, std::int64_t cell,
               std::int64_t head) {
             std::size_t i = 0;
             while (cell >= drawn.lengths[i]) cell -= drawn.lengths[i++];
             const auto column = AsSize(cell / table.block_size);
             return PlaceInBlocks(
                 tensor, drawn.layout,
                 drawn.blocks[i * AsSize(table.columns) + column],
                 cell % table.block_size, head);
           });
}

Case DrawCase(const Pick& pick) {
  Case drawn;
  drawn.kv_heads = OneOf(pick, {1, 1, 2, 3});
  drawn.heads = drawn.kv_heads * OneOf(pick, {1, 2, 3, 4, 7, 8, 9, 16});
  const DType k_dtype = DrawDType(pick);
  const DType v_dtype = Chance(pick, 50) ? k_dtype : DrawDType(pick);
  drawn.k_head_dim = DrawHeadDim(pick, k_dtype);
  drawn.v_head_dim = DrawHeadDim(pick, v_dtype);
  drawn.options.scale = static_cast<float>(pick(-100, 100)) / 100 + 0.001f;
  if (Chance(pick, 20)) {
    drawn.options.soft_cap = static_cast<float>(pick(1, 100)) / 10;
  }
  if (Chance(pick, 20)) {
    for (std::int64_t h = 0; h < drawn.heads; ++h) {
      drawn.sinks.push_back(Chance(pick, 10)
                                ? -kInfinity
                                : static_cast<float>(pick(-50, 50)) / 10);
    }
  }
  drawn.options.splits = OneOf(pick, {0, 0, 1, 2, 5, 64});
  if (Chance(pick, 60)) {
    DrawView(pick, drawn, k_dtype, v_dtype);
  } else {
    DrawTable(pick, drawn, k_dtype, v_dtype);
  }
  drawn.query =
      Store(pick, OneOf(pick, {DType::kF32, DType::kF16, DType::kBF16}),
            {drawn.k_head_dim, drawn.heads, drawn.rows, 1});
  for (int row = 0; row < drawn.rows; ++row) {
    for (std::int64_t h = 0; h < drawn.heads; ++h) {
      const TensorView& view = drawn.query.view;
      StoreRow(DrawNumbers(pick, drawn.k_head_dim, 0), view.dtype,
               view.at(0, h, row), view.stride[0]);
    }
  }
  return drawn;
}

Results Attend(const Case& drawn, Attention& attention) {
  const auto results = AsSize(drawn.heads * drawn.rows);
  Results got = {
      .out = std::vector<float>(results * AsSize(drawn.v_head_dim), kNaN),
      .log_sum_exp = std::vector<float>(results, kNaN)};
  const AttentionOut out = {.out = got.out.data(),
                            .log_sum_exp = got.log_sum_exp.data()};
  AttentionOptions options = drawn.options;
  options.sinks = drawn.sinks;
  Status status;
  if (drawn.paged) {
    AttentionTable table = drawn.table;
    table.blocks = drawn.blocks;
    table.lengths = drawn.lengths;
    table.query_rows = drawn.query_rows;
    status = attention.Plan(table);
    EXPECT_TRUE(status.ok()) << status.message();
    status = attention.Attend(
        drawn.query.view, {.key = drawn.key.view, .value = drawn.value.view},
        drawn.layout, options, out);
  } else {
    status = attention.Plan(drawn.mask.view(), drawn.rows, drawn.first_row);
    EXPECT_TRUE(status.ok()) << status.message();
    status = attention.Attend(drawn.query.view, drawn.view(), drawn.v_layout,
                              options, out);
  }
  EXPECT_TRUE(status.ok()) << status.message();
  return got;
}

// Fails the test if a result differs from the exact result by more than the
// bound.
void ExpectExact(const Case& drawn, const Results& got) {
  const reference::Weighing weighing = {.scale = drawn.options.scale,
                                        .soft_cap = drawn.options.soft_cap,
                                        .sinks = drawn.sinks};
  const KvView view = drawn.exact();
  Eigen::MatrixXd queries(drawn.k_head_dim, drawn.heads);
  for (int row = 0; row < drawn.rows; ++row) {
    if (!drawn.finite[AsSize(row)]) continue;
    for (std::int64_t h = 0; h < drawn.heads; ++h) {
      for (std::int64_t i = 0; i < drawn.k_head_dim; ++i) {
        queries(i, h) = LoadFrom(drawn.query.view, i, h, row);
      }
    }
    const std::int64_t mask_row = drawn.first_row + row;
    const reference::AttendedRow exact = reference::AttendRow(
        view, VLayout::kPlain, mask_row, queries, weighing);
    const AttentionError bound = BoundOfErrors(view, VLayout::kPlain, mask_row,
                                               queries, weighing, exact);
    for (std::int64_t h = 0; h < drawn.heads; ++h) {
      const std::int64_t result = row * drawn.heads + h;
      const double lse = At(got.log_sum_exp, result);
      if (lse != exact.log_sum_exp[h]) {  // Both may be -infinity.
        ASSERT_LE(std::abs(lse - exact.log_sum_exp[h]), bound.log_sum_exp[h])
            << "log_sum_exp of row " << row << ", head " << h;
      }
      for (std::int64_t i = 0; i < drawn.v_head_dim; ++i) {
        const double out = At(got.out, result * drawn.v_head_dim + i);
        ASSERT_LE(std::abs(out - exact.out(i, h)), bound.out(i, h))
            << "row " << row << ", head " << h << ", element " << i << ": "
            << out << " instead of " << exact.out(i, h);
      }
    }
  }
}

// The number of random cases: KVTWIN_ATTENTION_CASES, or a few.
int CaseCount(int few) {
  const char* count = std::getenv("KVTWIN_ATTENTION_CASES");
  return count == nullptr ? few : std::atoi(count);
}

class AttentionOnEachTarget : public EachTarget {};

TEST_P(AttentionOnEachTarget, IsWithinTheBound) {
  auto attention = *MakeAttention("optimized");
  const int count = CaseCount(400);
  for (int number = 0; number < count; ++number) {
    const Case drawn = DrawCase(SeededPick(1, AsSize(number)));
    ExpectExact(drawn, Attend(drawn, *attention));
    ASSERT_FALSE(HasFailure()) << "case " << number;
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionOnEachTarget,
                         ::testing::ValuesIn(optimized::SupportedTargets()),
                         [](const auto& info) { return info.param; });

// The laws hold for both twins. They change a case in a way that must not
// change its exact results.
class AttentionLaws : public ::testing::TestWithParam<std::string> {
 protected:
  // Calls law(case) for random cases, as views of f32 without gaps.
  template <class Law>
  void ForEachCase(const Law& law) {
    for (int number = 0; number < CaseCount(60); ++number) {
      const Case drawn = DrawCase(SeededPick(3, AsSize(number)));
      law(drawn);
      ASSERT_FALSE(HasFailure()) << "case " << number;
    }
  }

  Results ResultsOf(const Case& drawn, const KvView& view,
                    const TensorView& query, int first_row) {
    Results got;
    const std::int64_t results = query.shape[1] * query.shape[2];
    got.out.resize(AsSize(results * view.value.shape[0]));
    got.log_sum_exp.resize(AsSize(results));
    AttentionOptions options = drawn.options;
    options.sinks = drawn.sinks;
    Status status =
        attention_->Plan(view.mask, AsInt(query.shape[2]), first_row);
    EXPECT_TRUE(status.ok()) << status.message();
    status = attention_->Attend(query, view, VLayout::kPlain, options,
                                {got.out.data(), got.log_sum_exp.data()});
    EXPECT_TRUE(status.ok()) << status.message();
    return got;
  }
  Results ResultsOf(const Case& drawn, const KvView& view) {
    return ResultsOf(drawn, view, drawn.query.view, drawn.first_row);
  }

  std::unique_ptr<Attention> attention_ = *MakeAttention(GetParam());
};

// Returns the tensor with its columns, of dimension `dim`, in another order.
TensorView Reversed(const TensorView& tensor, int dim) {
  TensorView reversed = tensor;
  const std::int64_t last = At(tensor.shape, dim) - 1;
  reversed.data = tensor.at(0) + last * At(tensor.stride, dim);
  At(reversed.stride, dim) *= -1;
  return reversed;
}

// Returns a mask of f32 without the columns that `keeps` does not keep.
template <class Keeps>
DenseTensor MaskOf(const Case& drawn, const Keeps& keeps) {
  DenseTensor mask =
      HidingMask(DType::kF32, drawn.columns, drawn.mask.shape[1]);
  for (std::int64_t row = 0; row < mask.shape[1]; ++row) {
    for (std::int64_t column = 0; column < drawn.columns; ++column) {
      if (keeps(column) && MaskAllows(drawn.mask.view(), column, row)) {
        AllowInMask(mask, column, row);
      }
    }
  }
  return mask;
}

TEST_P(AttentionLaws, TheOrderOfCellsDoesNotMatter) {
  ForEachCase([&](const Case& drawn) {
    KvView view = drawn.exact();
    view.key = Reversed(view.key, 2);
    view.value = Reversed(view.value, 2);
    DenseTensor mask =
        HidingMask(DType::kF16, drawn.columns, drawn.mask.shape[1]);
    for (std::int64_t row = 0; row < mask.shape[1]; ++row) {
      for (std::int64_t column = 0; column < drawn.columns; ++column) {
        if (MaskAllows(drawn.mask.view(), column, row)) {
          AllowInMask(mask, drawn.columns - 1 - column, row);
        }
      }
    }
    view.mask = mask.view();
    ExpectExact(drawn, ResultsOf(drawn, view));
  });
}

TEST_P(AttentionLaws, PartsCanBeMerged) {
  ForEachCase([&](const Case& drawn) {
    KvView view = drawn.exact();
    const DenseTensor even =
        MaskOf(drawn, [](std::int64_t c) { return c / 5 % 2 == 0; });
    const DenseTensor odd =
        MaskOf(drawn, [](std::int64_t c) { return c / 5 % 2 != 0; });
    view.mask = even.view();
    Results first = ResultsOf(drawn, view);
    view.mask = odd.view();
    Case without_sinks = drawn;
    without_sinks.sinks.clear();
    const Results second = ResultsOf(without_sinks, view);
    const std::array<AttentionPart, 2> parts = {
        AttentionPart{first.out.data(), first.log_sum_exp.data()},
        AttentionPart{second.out.data(), second.log_sum_exp.data()}};
    ASSERT_TRUE(MergeAttention(parts, AsInt(drawn.v_head_dim),
                               drawn.heads * drawn.rows,
                               {first.out.data(), first.log_sum_exp.data()})
                    .ok());
    ExpectExact(drawn, first);
  });
}

TEST_P(AttentionLaws, RowsCanBeComputedOneByOne) {
  ForEachCase([&](const Case& drawn) {
    Results all;
    for (int row = 0; row < drawn.rows; ++row) {
      TensorView query = drawn.query.view;
      query.data = query.at(0, 0, row);
      query.shape[2] = 1;
      const Results one =
          ResultsOf(drawn, drawn.exact(), query, drawn.first_row + row);
      all.out.insert(all.out.end(), one.out.begin(), one.out.end());
      all.log_sum_exp.insert(all.log_sum_exp.end(), one.log_sum_exp.begin(),
                             one.log_sum_exp.end());
    }
    ExpectExact(drawn, all);
  });
}

TEST_P(AttentionLaws, HiddenCellsCanBeAnything) {
  ForEachCase([&](const Case& drawn) {
    const KvView view = drawn.exact();
    const Results before = ResultsOf(drawn, view);
    Case poisoned = drawn;
    for (std::int64_t column = 0; column < drawn.columns; ++column) {
      bool seen = false;
      for (int row = 0; row < drawn.rows; ++row) {
        seen = seen || MaskAllows(view.mask, column, drawn.first_row + row);
      }
      for (DenseTensor* rows : {&poisoned.exact_key, &poisoned.exact_value}) {
        const std::byte* from = rows->view().at(0, 0, column);
        const std::int64_t count = rows->shape[0] * rows->shape[1];
        if (!seen) {
          StoreRow(std::vector<float>(AsSize(count), kNaN), DType::kF32, from,
                   sizeof(float));
        }
      }
    }
    const Results after = ResultsOf(drawn, poisoned.exact());
    for (std::size_t row = 0; row < drawn.finite.size(); ++row) {
      if (!drawn.finite[row]) continue;
      const std::size_t count = before.out.size() / drawn.finite.size();
      EXPECT_TRUE(std::equal(before.out.begin() + AsInt(row * count),
                             before.out.begin() + AsInt((row + 1) * count),
                             after.out.begin() + AsInt(row * count)));
    }
  });
}

// A view that lacks the columns that a row does not see.
TEST_P(AttentionLaws, AHiddenCellIsAnAbsentCell) {
  ForEachCase([&](const Case& drawn) {
    const int row = drawn.first_row;
    std::vector<std::int64_t> seen;
    for (std::int64_t column = 0; column < drawn.columns; ++column) {
      if (MaskAllows(drawn.mask.view(), column, row)) seen.push_back(column);
    }
    if (seen.empty() || !drawn.finite[0]) return;
    const auto kept = [&](const DenseTensor& rows) {
      DenseTensor some = FilledTensor(
          DType::kF32, {rows.shape[0], rows.shape[1], std::ssize(seen), 1}, 0);
      const std::int64_t bytes = rows.view().stride[2];
      for (std::size_t i = 0; i < seen.size(); ++i) {
        std::memcpy(some.bytes.data() + AsInt(i) * bytes,
                    rows.view().at(0, 0, seen[i]), AsSize(bytes));
      }
      return some;
    };
    const DenseTensor key = kept(drawn.exact_key);
    const DenseTensor value = kept(drawn.exact_value);
    const DenseTensor mask =
        FilledTensor(DType::kF32, {std::ssize(seen), 1, 1, 1}, 0);
    TensorView query = drawn.query.view;
    query.shape[2] = 1;
    const Results got = ResultsOf(
        drawn, {.key = key.view(), .value = value.view(), .mask = mask.view()},
        query, 0);
    Case first = drawn;
    first.rows = 1;
    ExpectExact(first, got);
  });
}

TEST_P(AttentionLaws, SharedHeadsAreRepeatedHeads) {
  ForEachCase([&](const Case& drawn) {
    const auto repeated = [&](const DenseTensor& rows) {
      DenseTensor all = FilledTensor(
          DType::kF32, {rows.shape[0], drawn.heads, drawn.columns, 1}, 0);
      for (std::int64_t column = 0; column < drawn.columns; ++column) {
        for (std::int64_t h = 0; h < drawn.heads; ++h) {
          std::memcpy(
              const_cast<std::byte*>(all.view().at(0, h, column)),
              rows.view().at(0, h * drawn.kv_heads / drawn.heads, column),
              AsSize(rows.view().stride[1]));
        }
      }
      return all;
    };
    const DenseTensor key = repeated(drawn.exact_key);
    const DenseTensor value = repeated(drawn.exact_value);
    const KvView view = {
        .key = key.view(), .value = value.view(), .mask = drawn.mask.view()};
    ExpectExact(drawn, ResultsOf(drawn, view));
  });
}

// Two cells with K = V = 1 and 2, a query of 3 and a scale of 0.5: the scores
// are 1.5 and 3.
TEST_P(AttentionLaws, FollowTheFormula) {
  const DenseTensor query = FilledTensor(DType::kF32, {1, 1, 1, 1}, 3);
  DenseTensor rows = FilledTensor(DType::kF32, {1, 1, 2, 1}, 1);
  StoreElement(2, rows.bytes.data() + sizeof(float), DType::kF32);
  const DenseTensor mask = FilledTensor(DType::kF32, {2, 1, 1, 1}, 0);
  const KvView view = {
      .key = rows.view(), .value = rows.view(), .mask = mask.view()};
  const auto expect = [&](const Case& drawn, double low, double high,
                          double sink) {
    const Results got = ResultsOf(drawn, view, query.view(), 0);
    const double sum = std::exp(low) + std::exp(high) + sink;
    EXPECT_NEAR(got.out[0], (std::exp(low) + 2 * std::exp(high)) / sum, 1e-6);
    EXPECT_NEAR(got.log_sum_exp[0], std::log(sum), 1e-6);
  };
  Case drawn;
  drawn.options.scale = 0.5;
  expect(drawn, 1.5, 3, 0);
  drawn.sinks = {2};
  expect(drawn, 1.5, 3, std::exp(2));
  drawn.sinks = {-kInfinity};
  expect(drawn, 1.5, 3, 0);
  drawn.options.soft_cap = 2;
  expect(drawn, 2 * std::tanh(1.5 / 2), 2 * std::tanh(3.0 / 2), 0);
}

// A row that sees nothing, without and with a sink.
TEST_P(AttentionLaws, ARowMaySeeNothing) {
  const DenseTensor ones = FilledTensor(DType::kF32, {1, 1, 1, 1}, 1);
  const DenseTensor mask = HidingMask(DType::kBits, 1, 1);
  const KvView view = {
      .key = ones.view(), .value = ones.view(), .mask = mask.view()};
  Case drawn;
  Results got = ResultsOf(drawn, view, ones.view(), 0);
  EXPECT_EQ(got.out[0], 0);
  EXPECT_EQ(got.log_sum_exp[0], -kInfinity);
  drawn.sinks = {2};
  got = ResultsOf(drawn, view, ones.view(), 0);
  EXPECT_EQ(got.out[0], 0);
  EXPECT_FLOAT_EQ(got.log_sum_exp[0], 2);
}

INSTANTIATE_TEST_SUITE_P(Twins, AttentionLaws,
                         ::testing::Values("reference", "optimized"),
                         [](const auto& info) { return info.param; });

TEST(Attention, OfTheReferenceIsWithinTheBound) {
  auto attention = *MakeAttention("reference");
  const int count = CaseCount(200);
  for (int number = 0; number < count; ++number) {
    const Case drawn = DrawCase(SeededPick(2, AsSize(number)));
    ExpectExact(drawn, Attend(drawn, *attention));
    ASSERT_FALSE(HasFailure()) << "case " << number;
  }
}

}  // namespace
}  // namespace kvtwin::props
