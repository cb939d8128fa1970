// Random cases of attention: the tensors of a view, or of the blocks of a pool,
// what their rows see, and the exact results.

#ifndef KVTWIN_PROPS_UNIT_ATTENTION_ATTENTION_CASE_H_
#define KVTWIN_PROPS_UNIT_ATTENTION_ATTENTION_CASE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "kvtwin/attention.h"
#include "props/attention/attention_bound.h"
#include "props/base/pick.h"
#include "props/history/generate.h"
#include "props/testing/each_target.h"
#include "reference/attention.h"

namespace kvtwin::props::attention {

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A tensor in memory, with gaps between its runs, at any address.
struct StoredRows {
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
  StoredRows query;
  StoredRows key;
  StoredRows value;
  VLayout v_layout = VLayout::kPlain;
  // The mask of the view, [columns, rows]; the rows from first_row on are
  // planned. A case with a table has an equivalent mask: its columns are the
  // tokens of all sequences, one sequence after another.
  DenseTensor mask;
  bool sees_all = false;  // Every row of the mask sees every column.
  // The K and V of each column, in f32, dense.
  DenseTensor exact_key;
  DenseTensor exact_value;
  std::vector<bool> finite;  // The rows that see no NaN and no infinity.
  // Whether the case has a table, and the table.
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
inline int Sometimes(const Pick& pick, int most) {
  return Chance(pick, 50) ? 0 : pick(0, most);
}

// Makes a tensor of zeros, with gaps between its runs.
inline StoredRows Store(const Pick& pick, DType dtype, const Shape& shape) {
  StoredRows stored;
  TensorView& view = stored.view;
  view.dtype = dtype;
  view.shape = shape;
  view.stride[0] = static_cast<std::int64_t>(SizeOf(dtype));
  view.stride[1] = RunBytes(dtype, shape[0]) + Sometimes(pick, 9);
  for (std::size_t i = 2; i < 4; ++i) {
    view.stride[i] = view.stride[i - 1] * shape[i - 1] + Sometimes(pick, 9);
  }
  const int offset = Sometimes(pick, 7);
  stored.bytes.resize(AsSize(view.stride[3] * shape[3] + offset));
  view.data = stored.bytes.data() + offset;
  return stored;
}

// Stores one head's row at `row`, whose elements are `stride` bytes apart.
inline void StoreRow(const std::vector<float>& numbers, DType dtype,
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

inline Place PlaceInView(const TensorView& view, VLayout layout,
                         std::int64_t cell, std::int64_t head) {
  const TensorView row = RowOf(view, layout, cell);
  return {row.at(0, head), row.stride[0]};
}

inline Place PlaceInBlocks(const TensorView& view, PagedLayout layout,
                           std::int64_t block, std::int64_t slot,
                           std::int64_t head) {
  const bool head_major = layout == PagedLayout::kHeadMajor;
  return {head_major ? view.at(0, slot, head, block)
                     : view.at(0, head, slot, block),
          view.stride[0]};
}

// Draws numbers from -2 to 2, many for each call of `pick`.
inline std::vector<float> DrawNumbers(const Pick& pick, std::int64_t count,
                                      int poison) {
  std::vector<float> numbers(AsSize(count));
  std::minstd_rand random(static_cast<unsigned>(pick(1, 1 << 30)));
  for (float& number : numbers) {
    number = static_cast<float>(random()) * 0x1p-29f - 2;
  }
  const auto at = AsSize(pick(0, AsInt(count) - 1));
  if (poison > 0) numbers[at] = poison == 1 ? kNaN : -kInfinity;
  return numbers;
}

// Draws the numbers of each cell that the rows see or not, and stores them.
// `place(tensor, cell, head)` says where.
template <class PlaceOf>
inline void FillRows(const Pick& pick, Case& drawn, const PlaceOf& place) {
  const auto fill = [&](const TensorView& tensor, std::int64_t head_dim,
                        DenseTensor& exact, bool is_key) {
    exact = FilledTensor(DType::kF32,
                         {head_dim, drawn.kv_heads, drawn.columns, 1}, 0);
    const int poisoned = OneOf(pick, {0, 0, 0, 1, 20});  // Percent.
    for (std::int64_t cell = 0; cell < drawn.columns; ++cell) {
      const int poison = Chance(pick, poisoned) ? pick(1, 2) : 0;
      bool finite = true;
      for (std::int64_t head = 0; head < drawn.kv_heads; ++head) {
        const Place at = place(tensor, is_key, cell, head);
        StoreRow(DrawNumbers(pick, head_dim, poison), tensor.dtype, at.row,
                 at.stride);
        // The stored numbers, which are rounded to their dtype.
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

inline DType DrawDType(const Pick& pick) {
  return OneOf(pick, {DType::kF32, DType::kF16, DType::kBF16, DType::kF8,
                      DType::kQ8, DType::kQ4});
}

inline std::int64_t DrawHeadDim(const Pick& pick, DType dtype) {
  if (IsBlockDType(dtype)) return std::int64_t{32} * pick(1, 5);
  if (Chance(pick, 3)) return 576;
  return Chance(pick, 50) ? 16 * pick(1, 9) : pick(1, 150);
}

// Draws the mask of a view: rows of one sequence, of several, or anything.
inline void DrawMask(const Pick& pick, Case& drawn) {
  const DType dtype =
      OneOf(pick, {DType::kF32, DType::kF16, DType::kBF16, DType::kBits});
  const std::int64_t all_rows = drawn.first_row + drawn.rows + pick(0, 2);
  drawn.mask = HidingMask(dtype, drawn.columns, all_rows);
  const int way = drawn.sees_all ? 4 : pick(0, 4);
  const int sequences = pick(1, 5);
  const int window = pick(0, 200);
  for (std::int64_t row = 0; row < all_rows; ++row) {
    if (!drawn.sees_all && Chance(pick, 3)) continue;  // It sees nothing.
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

// Draws the rows and columns of a view.
inline void DrawViewShape(const Pick& pick, Case& drawn) {
  drawn.rows = OneOf(pick, {1, 1, 1, 2, 3, 7, pick(1, 20)});
  drawn.columns = OneOf(pick, {pick(1, 20), pick(60, 70), pick(120, 300)});
  if (Chance(pick, 1)) drawn.rows = pick(60, 130);
  if (Chance(pick, 5)) drawn.columns = pick(500, 1100);
  if (Chance(pick, 1)) drawn.columns = pick(4090, 4100);
}

inline void DrawView(const Pick& pick, Case& drawn, DType k_dtype,
                     DType v_dtype) {
  drawn.first_row = Sometimes(pick, 5);
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

// Draws the lengths of a table's sequences, and their rows.
inline void DrawSequences(const Pick& pick, Case& drawn) {
  const int sequences = pick(1, 5);
  const int longest = Chance(pick, 5) ? 1100 : 200;
  drawn.rows = 0;
  drawn.columns = 0;
  drawn.lengths.clear();
  drawn.query_rows.clear();
  drawn.table.sees_all = Chance(pick, 25);
  for (int i = 0; i < sequences; ++i) {
    const int length = OneOf(pick, {0, 1, pick(1, 70), pick(1, longest)});
    int most = Chance(pick, 90) ? 10 : 200;
    if (!drawn.table.sees_all) most = std::min(length, most);
    drawn.lengths.push_back(length);
    drawn.query_rows.push_back(OneOf(pick, {0, std::min(1, most), most}));
    drawn.rows += drawn.query_rows.back();
    drawn.columns += length;
  }
}

inline void DrawTable(const Pick& pick, Case& drawn, DType k_dtype,
                      DType v_dtype) {
  drawn.layout =
      OneOf(pick, {PagedLayout::kTokenMajor, PagedLayout::kHeadMajor});
  AttentionTable& table = drawn.table;
  table.block_size = OneOf(pick, {1, 2, 3, 16, 32, 64, 100});
  table.window = table.sees_all || Chance(pick, 50) ? kOpenEnd : pick(0, 100);
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
      for (int token = 0; token < length; ++token) {
        const bool sees = token <= self && self - token <= table.window;
        if (!sees && !table.sees_all) continue;
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

// Draws the sizes of a case. Most cases are small, so that there can be many:
// heads are drawn again while they take more products of queries, K and V than
// a limit, which grows until some do not.
inline void DrawShape(const Pick& pick, Case& drawn, DType k_dtype,
                      DType v_dtype) {
  drawn.paged = !Chance(pick, 60);
  do {
    if (drawn.paged) {
      DrawSequences(pick, drawn);
    } else {
      DrawViewShape(pick, drawn);
    }
  } while (drawn.rows == 0);
  const std::int64_t pairs = drawn.rows * drawn.columns;
  std::int64_t most = std::int64_t{1} << pick(12, 19);
  do {
    drawn.kv_heads = OneOf(pick, {1, 1, 2, 3});
    drawn.heads = drawn.kv_heads * OneOf(pick, {1, 2, 3, 4, 7, 8, 9, 16});
    drawn.k_head_dim = DrawHeadDim(pick, k_dtype);
    drawn.v_head_dim = DrawHeadDim(pick, v_dtype);
    most += most / 8;
  } while (pairs * drawn.heads * (drawn.k_head_dim + drawn.v_head_dim) > most);
}

inline void DrawOptions(const Pick& pick, Case& drawn) {
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
  drawn.options.splits = OneOf(pick, {0, 0, 1, 2, 5, 64, 65536});
}

// Draws the tensors of a case whose sizes are known.
inline void DrawTensors(const Pick& pick, Case& drawn, DType k_dtype,
                        DType v_dtype) {
  if (drawn.paged) {
    DrawTable(pick, drawn, k_dtype, v_dtype);
  } else {
    DrawView(pick, drawn, k_dtype, v_dtype);
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
}

inline Case DrawCase(const Pick& pick) {
  Case drawn;
  const DType k_dtype = DrawDType(pick);
  const DType v_dtype = Chance(pick, 50) ? k_dtype : DrawDType(pick);
  DrawShape(pick, drawn, k_dtype, v_dtype);
  DrawOptions(pick, drawn);
  DrawTensors(pick, drawn, k_dtype, v_dtype);
  return drawn;
}

// Returns the case with products of bf16. Its scores are smaller, as the bound
// grows with them faster than the weights do.
inline Case InBf16(Case drawn) {
  drawn.options.bf16_products = true;
  drawn.options.scale *= 2 / static_cast<float>(drawn.k_head_dim);
  return drawn;
}

inline Results Attend(const Case& drawn, Attention& attention) {
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

// The arithmetic that the options of a case allow.
inline AttentionArithmetic ArithmeticOf(const Case& drawn) {
  if (!drawn.options.bf16_products) return {};
  const auto is_exact = [](const StoredRows& rows) {
    return rows.view.dtype == DType::kBF16 || rows.view.dtype == DType::kF8;
  };
  AttentionArithmetic arithmetic = {
      .input_error =
          is_exact(drawn.key) && is_exact(drawn.value) ? 0x1p-8 : 0x1p-7};
  // Integers of 15 and of 16 bits, docs/attention.md.
  if (drawn.key.view.dtype == DType::kQ8) arithmetic.query_step = 1.0 / 32700;
  if (drawn.value.view.dtype == DType::kQ8) arithmetic.value_step = 1.0 / 1000;
  return arithmetic;
}

// The exact results of a row that sees no NaN and no infinity, and the bounds
// of their errors.
struct ExactRow {
  int row;
  reference::AttendedRow results;
  AttentionError bound;
};

inline std::vector<ExactRow> ExactRows(const Case& drawn) {
  const reference::Weighing weighing = {.scale = drawn.options.scale,
                                        .soft_cap = drawn.options.soft_cap,
                                        .sinks = drawn.sinks};
  const KvView view = drawn.exact();
  Eigen::MatrixXd queries(drawn.k_head_dim, drawn.heads);
  std::vector<ExactRow> rows;
  for (int row = 0; row < drawn.rows; ++row) {
    if (!drawn.finite[AsSize(row)]) continue;
    for (std::int64_t h = 0; h < drawn.heads; ++h) {
      for (std::int64_t i = 0; i < drawn.k_head_dim; ++i) {
        queries(i, h) = LoadFrom(drawn.query.view, i, h, row);
      }
    }
    const std::int64_t mask_row = drawn.first_row + row;
    ExactRow exact = {.row = row,
                      .results = reference::AttendRow(
                          view, VLayout::kPlain, mask_row, queries, weighing),
                      .bound = {}};
    exact.bound = BoundOfErrors(view, VLayout::kPlain, mask_row, queries,
                                weighing, exact.results, ArithmeticOf(drawn));
    rows.push_back(std::move(exact));
  }
  return rows;
}

// Fails the test if a result differs from the exact result by more than the
// bound. Returns the largest difference, in bounds.
inline double LargestError(const Case& drawn, const std::vector<ExactRow>& rows,
                           const Results& got) {
  double largest = 0;
  for (const ExactRow& exact : rows) {
    const auto is_within = [&](double value, double right, double bound) {
      if (value == right) return true;  // Both may be -infinity.
      const double error = std::abs(value - right);
      if (!std::isinf(bound)) largest = std::max(largest, error / bound);
      return error <= bound;
    };
    for (std::int64_t h = 0; h < drawn.heads; ++h) {
      const std::int64_t result = exact.row * drawn.heads + h;
      const float lse = At(got.log_sum_exp, result);
      if (!is_within(lse, exact.results.log_sum_exp[h],
                     exact.bound.log_sum_exp[h])) {
        ADD_FAILURE() << "log_sum_exp of row " << exact.row << ", head " << h
                      << ": " << lse << " instead of "
                      << exact.results.log_sum_exp[h];
        return largest;
      }
      for (std::int64_t i = 0; i < drawn.v_head_dim; ++i) {
        const float out = At(got.out, result * drawn.v_head_dim + i);
        if (is_within(out, exact.results.out(i, h), exact.bound.out(i, h))) {
          continue;
        }
        ADD_FAILURE() << "row " << exact.row << ", head " << h << ", element "
                      << i << ": " << out << " instead of "
                      << exact.results.out(i, h);
        return largest;
      }
    }
  }
  return largest;
}

inline void ExpectExact(const Case& drawn, const Results& got) {
  (void)LargestError(drawn, ExactRows(drawn), got);
}

// The number of random cases: KVTWIN_ATTENTION_CASES, or a few.
inline int CaseCount(int few) {
  const char* count = std::getenv("KVTWIN_ATTENTION_CASES");
  return count == nullptr ? few : AsInt(std::strtol(count, nullptr, 10));
}

}  // namespace kvtwin::props::attention

#endif  // KVTWIN_PROPS_UNIT_ATTENTION_ATTENTION_CASE_H_
