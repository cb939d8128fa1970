// The laws of attention, for both twins and random cases.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "kvtwin/attention.h"
#include "props/history/generate.h"
#include "props/unit/attention/attention_case.h"

namespace kvtwin::props::attention {
namespace {

// The laws hold for both twins, and for products of bf16. They change a case in
// a way that must not change its exact results.
class AttentionLaws : public ::testing::TestWithParam<std::string> {
 protected:
  // Calls law(case) for random cases, as views of f32 without gaps.
  template <class Law>
  void ForEachCase(const Law& law) {
    for (int number = 0; number < CaseCount(60); ++number) {
      const Case drawn = DrawCase(SeededPick(3, AsSize(number)));
      law(in_bf16_ ? InBf16(drawn) : drawn);
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

  bool in_bf16_ = GetParam() == "optimized_in_bf16";
  std::unique_ptr<Attention> attention_ =
      *MakeAttention(in_bf16_ ? "optimized" : GetParam());
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

// 65 cells, of which the last has a score of 0, and the others, with a V of
// 1e36, one of -distance: their weights become subnormal, and then 0.
TEST_P(AttentionLaws, ScoresFarApart) {
  DenseTensor key = FilledTensor(DType::kF32, {1, 1, 65, 1}, -1);
  DenseTensor value = FilledTensor(DType::kF32, {1, 1, 65, 1}, 1e36f);
  const DenseTensor mask = FilledTensor(DType::kF32, {65, 1, 1, 1}, 0);
  for (DenseTensor* rows : {&key, &value}) {
    StoreElement(0, rows->bytes.data() + 64 * sizeof(float), DType::kF32);
  }
  const KvView view = {
      .key = key.view(), .value = value.view(), .mask = mask.view()};
  for (const std::int64_t heads : {1, 9}) {
    for (float distance = 60; distance < 3e38f / 1.25f;
         distance *= distance < 120 ? 1.001f : 1.25f) {
      const DenseTensor query =
          FilledTensor(DType::kF32, {1, heads, 1, 1}, distance);
      const float got = ResultsOf(Case(), view, query.view(), 0).out[0];
      const double exact = 64e36 * std::exp(-double{distance});
      ASSERT_NEAR(got, exact, 1e-4 * exact + 64e36 * 0x1p-126) << distance;
    }
  }
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

// A mask of 10 columns whose word has all 64 bits, and rows behind the view.
TEST_P(AttentionLaws, BitsPastTheColumnsDoNotCount) {
  const DenseTensor ones = FilledTensor(DType::kF32, {1, 1, 1, 1}, 1);
  DenseTensor rows = FilledTensor(DType::kF32, {1, 1, 64, 1}, 1000);
  std::memcpy(rows.bytes.data(),
              FilledTensor(DType::kF32, {10, 1, 1, 1}, 1).bytes.data(),
              10 * sizeof(float));
  DenseTensor mask = HidingMask(DType::kBits, 10, 1);
  std::ranges::fill(mask.bytes, std::byte{0xff});
  TensorView seen = rows.view();
  seen.shape[2] = 10;
  const KvView view = {.key = seen, .value = seen, .mask = mask.view()};
  EXPECT_EQ(ResultsOf(Case(), view, ones.view(), 0).out[0], 1);
}

INSTANTIATE_TEST_SUITE_P(Twins, AttentionLaws,
                         ::testing::Values("reference", "optimized",
                                           "optimized_in_bf16"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace kvtwin::props::attention
