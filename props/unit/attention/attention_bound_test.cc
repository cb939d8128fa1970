// Shows how far outside of the bound the attention of a faulty cache is.

#include "props/attention/attention_bound.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "kvtwin/attention.h"

namespace kvtwin::props {
namespace {

constexpr std::int64_t kHeadDim = 64;

// One row that sees all cells of one KV head.
struct Rows {
  DenseTensor key;
  DenseTensor value;
  DenseTensor mask;

  explicit Rows(std::int64_t cells)
      : key(FilledTensor(DType::kF32, {kHeadDim, 1, cells, 1}, 0)),
        value(key),
        mask(FilledTensor(DType::kF32, {cells, 1, 1, 1}, 0)) {
    std::mt19937 random(1);
    for (DenseTensor* rows : {&key, &value}) {
      for (std::int64_t i = 0; i < cells * kHeadDim; ++i) {
        const auto bits = static_cast<double>(random() >> 8);
        At(*rows, i) = static_cast<float>(bits * 0x1p-23 - 1);
      }
    }
  }

  static float& At(DenseTensor& rows, std::int64_t i) {
    return reinterpret_cast<float*>(rows.bytes.data())[i];
  }
  // Gives cell `to` the K and V of cell `from`.
  void Copy(const Rows& rows, std::int64_t from, std::int64_t to) {
    const auto bytes = static_cast<std::ptrdiff_t>(kHeadDim * sizeof(float));
    std::copy_n(rows.key.bytes.data() + from * bytes, bytes,
                key.bytes.data() + to * bytes);
    std::copy_n(rows.value.bytes.data() + from * bytes, bytes,
                value.bytes.data() + to * bytes);
  }
  // A query whose score with `cell` is `score`: a larger score makes the
  // attention depend more on the cell.
  Eigen::MatrixXd QueryFor(std::int64_t cell, double score) const {
    Eigen::MatrixXd query(kHeadDim, 1);
    for (std::int64_t i = 0; i < kHeadDim; ++i) {
      query(i, 0) = LoadFrom(key.view(), i, 0, cell);
    }
    return query * (score / query.squaredNorm());
  }
  KvView view() const {
    return {.key = key.view(), .value = value.view(), .mask = mask.view()};
  }
  reference::AttendedRow Attend(const Eigen::MatrixXd& query) const {
    return reference::AttendRow(view(), VLayout::kPlain, 0, query, {});
  }
  AttentionError Bound(const Eigen::MatrixXd& query) const {
    return BoundOfErrors(view(), VLayout::kPlain, 0, query, {}, Attend(query));
  }
  // The largest difference from the results of `faulty`, in bounds.
  double Margin(const Rows& faulty, const Eigen::MatrixXd& query) const {
    return ((faulty.Attend(query).out - Attend(query).out).array().abs() /
            Bound(query).out.array())
        .maxCoeff();
  }
};

TEST(AttentionBound, FaultsOfOneTokenAreFarOutsideOfIt) {
  const Rows rows(1000);
  const Eigen::MatrixXd query = rows.QueryFor(400, 8);
  EXPECT_EQ(rows.Margin(rows, query), 0);
  Rows missing = rows;
  StoreElement(-std::numeric_limits<float>::infinity(),
               missing.mask.bytes.data() + 400 * sizeof(float), DType::kF32);
  EXPECT_FALSE(MaskAllows(missing.mask.view(), 400, 0));
  EXPECT_GT(rows.Margin(missing, query), 100);
  Rows doubled = rows;
  doubled.Copy(rows, 400, 401);
  EXPECT_GT(rows.Margin(doubled, query), 100);
  Rows wrong = rows;
  wrong.Copy(rows, 7, 400);
  EXPECT_GT(rows.Margin(wrong, query), 100);
  Rows shifted = rows;  // The V of its neighbour.
  shifted.Copy(rows, 401, 400);
  shifted.key = rows.key;
  EXPECT_GT(rows.Margin(shifted, query), 100);
}

TEST(AttentionBound, OneElementOf32768RowsIsFound) {
  const Rows rows(32768);
  const Eigen::MatrixXd query = rows.QueryFor(20000, 16);
  Rows faulty = rows;
  Rows::At(faulty.value, 20000 * kHeadDim + 13) += 1;
  EXPECT_GT(rows.Margin(faulty, query), 10);
  // Without a query for that cell its weight is too small.
  const Eigen::MatrixXd other = rows.QueryFor(20001, 0.01);
  EXPECT_LT(rows.Margin(faulty, other), 1);
}

// The rounding of a query near the smallest f32 is multiplied by large keys.
TEST(AttentionBound, CoversQueriesThatUnderflow) {
  constexpr std::int64_t kDims = 576;
  DenseTensor key = FilledTensor(DType::kF32, {kDims, 1, 2, 1}, 3e38f);
  for (std::int64_t i = kDims; i < 2 * kDims; ++i) Rows::At(key, i) *= -1;
  DenseTensor value = FilledTensor(DType::kF32, {1, 1, 2, 1}, 1);
  Rows::At(value, 1) = -1;
  const DenseTensor mask = FilledTensor(DType::kF32, {2, 1, 1, 1}, 0);
  const KvView view = {
      .key = key.view(), .value = value.view(), .mask = mask.view()};
  const DenseTensor query = FilledTensor(DType::kF32, {kDims, 1, 1, 1}, 1e-44f);
  const Eigen::MatrixXd queries =
      Eigen::MatrixXd::Constant(kDims, 1, double{1e-44f});
  const reference::AttendedRow exact =
      reference::AttendRow(view, VLayout::kPlain, 0, queries, {});
  std::array<float, 1> out = {};
  auto attention = *MakeAttention();
  ASSERT_TRUE(attention->Plan(mask.view(), 1).ok());
  ASSERT_TRUE(
      attention
          ->Attend(query.view(), view, VLayout::kPlain, {}, {.out = out.data()})
          .ok());
  EXPECT_LE(
      std::abs(out[0] - exact.out(0, 0)),
      BoundOfErrors(view, VLayout::kPlain, 0, queries, {}, exact).out(0, 0));
}

// Coarser arithmetic has a wider bound.
TEST(AttentionBound, GrowsWithTheErrorOfTheInputs) {
  const Rows rows(100);
  const Eigen::MatrixXd query = rows.QueryFor(40, 4);
  const AttentionError coarse =
      BoundOfErrors(rows.view(), VLayout::kPlain, 0, query, {},
                    rows.Attend(query), {.input_error = 0x1p-8});
  EXPECT_GT(coarse.out.sum(), 100 * rows.Bound(query).out.sum());
}

}  // namespace
}  // namespace kvtwin::props
