// Misuse of attention is refused by name, and changes nothing.

#include "core/guarded_attention.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "core/mask_elements.h"

namespace kvtwin::props {
namespace {

using ::testing::HasSubstr;

using Limits = std::numeric_limits<float>;

// A view of 4 cells, 2 KV heads of 3 elements of K and 5 of V, and 2 rows of 4
// query heads.
struct AttentionFixture {
  DenseTensor query = FilledTensor(DType::kF32, {3, 4, 2, 1}, 1);
  DenseTensor key = FilledTensor(DType::kF16, {3, 2, 4, 1}, 1);
  DenseTensor value = FilledTensor(DType::kF16, {5, 2, 4, 1}, 1);
  DenseTensor mask = FilledTensor(DType::kF32, {4, 3, 1, 1}, 0);
  std::vector<float> out = std::vector<float>(5 * 4 * 2, 7);
  std::vector<float> sinks = std::vector<float>(4, 0);
  TensorView query_view = query.view();
  KvView view = {.key = key.view(), .value = value.view(), .mask = mask.view()};
  VLayout v_layout = VLayout::kPlain;
  AttentionOptions options;
  AttentionOut result = {.out = out.data()};

  std::vector<std::int32_t> blocks = {1, 0, 2, -1};
  std::vector<std::int32_t> lengths = {4, 1};
  std::vector<std::int32_t> query_rows = {1, 1};
  AttentionTable table = {.columns = 2, .block_size = 2};
  PagedLayout layout = PagedLayout::kTokenMajor;
  DenseTensor block_key = FilledTensor(DType::kF16, {3, 2, 2, 3}, 1);
  DenseTensor block_value = FilledTensor(DType::kF16, {5, 2, 2, 3}, 1);
  PagedKv kv = {.key = block_key.view(), .value = block_value.view()};

  AttentionTable Table() const {
    AttentionTable whole = table;
    whole.blocks = blocks;
    whole.lengths = lengths;
    whole.query_rows = query_rows;
    return whole;
  }
};

class GuardedAttentionOf : public ::testing::TestWithParam<std::string> {
 protected:
  // Expects that Attend refuses what `change` does, with `message`, and writes
  // nothing.
  template <class Change>
  void Refuses(const std::string& message, const Change& change) {
    AttentionFixture f;
    auto attention = *MakeAttention(GetParam());
    ASSERT_TRUE(attention->Plan(f.view.mask, 2, 1).ok());
    change(f);
    const Status status = attention->Attend(f.query_view, f.view, f.v_layout,
                                            f.options, f.result);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), message);
    EXPECT_EQ(f.out, std::vector<float>(5 * 4 * 2, 7));
  }
  template <class Change>
  void RefusesTable(const std::string& message, const Change& change) {
    AttentionFixture f;
    auto attention = *MakeAttention(GetParam());
    change(f);
    Status status = attention->Plan(f.Table());
    if (status.ok()) {
      status =
          attention->Attend(f.query_view, f.kv, f.layout, f.options, f.result);
    }
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), message);
    EXPECT_EQ(f.out, std::vector<float>(5 * 4 * 2, 7));
  }
};

TEST_P(GuardedAttentionOf, AcceptsWhatItShould) {
  AttentionFixture f;
  auto attention = *MakeAttention(GetParam());
  ASSERT_TRUE(attention->Plan(f.view.mask, 2, 1).ok());
  EXPECT_TRUE(
      attention->Attend(f.query_view, f.view, f.v_layout, f.options, f.result)
          .ok());
  EXPECT_EQ(f.out, std::vector<float>(5 * 4 * 2, 1));
  f.out.assign(f.out.size(), 7);
  ASSERT_TRUE(attention->Plan(f.Table()).ok());
  EXPECT_TRUE(
      attention->Attend(f.query_view, f.kv, f.layout, f.options, f.result)
          .ok());
  EXPECT_EQ(f.out, std::vector<float>(5 * 4 * 2, 1));
}

TEST_P(GuardedAttentionOf, TakesTheLargestNumbers) {
  AttentionFixture f;
  auto attention = *MakeAttention(GetParam());
  f.options.splits = 65536;
  f.table.window = std::numeric_limits<std::int32_t>::max();
  f.lengths = {4, 2};
  f.blocks = {1, 0, 2, 2};
  ASSERT_TRUE(attention->Plan(f.Table()).ok());
  EXPECT_TRUE(
      attention->Attend(f.query_view, f.kv, f.layout, f.options, f.result)
          .ok());
  EXPECT_EQ(f.out, std::vector<float>(5 * 4 * 2, 1));
  ASSERT_TRUE(attention->Plan(f.view.mask, 2, 1).ok());
  f.view.key.shape[0] = (std::int64_t{1} << 31) - 1;  // Fits to no query.
  EXPECT_THAT(
      attention->Attend(f.query_view, f.view, f.v_layout, f.options, f.result)
          .message(),
      "query has shape [3, 4, 2], it must be [2147483647, 4, 2]");
  ++f.view.key.shape[0];
  EXPECT_THAT(
      attention->Attend(f.query_view, f.view, f.v_layout, f.options, f.result)
          .message(),
      HasSubstr("each dimension must be 1 to 2147483647"));
}

TEST_P(GuardedAttentionOf, NeedsAPlan) {
  AttentionFixture f;
  auto attention = *MakeAttention(GetParam());
  const auto of_view = [&] {
    return attention->Attend(f.query_view, f.view, f.v_layout, f.options,
                             f.result);
  };
  const auto of_table = [&] {
    return attention->Attend(f.query_view, f.kv, f.layout, f.options, f.result);
  };
  EXPECT_EQ(of_view().message(), "no mask is planned");
  EXPECT_EQ(of_table().message(), "no table is planned");
  ASSERT_TRUE(attention->Plan(f.view.mask, 2, 1).ok());
  EXPECT_EQ(of_table().code(), StatusCode::kFailedPrecondition);
  ASSERT_TRUE(attention->Plan(f.Table()).ok());
  EXPECT_EQ(of_view().code(), StatusCode::kFailedPrecondition);
  // A refused plan leaves the plan before.
  EXPECT_FALSE(attention->Plan(f.view.mask, 9, 1).ok());
  EXPECT_TRUE(of_table().ok());
}

TEST_P(GuardedAttentionOf, RefusesMasks) {
  const auto refuses = [](const std::string& message, auto change) {
    AttentionFixture f;
    int rows = 2;
    int first_row = 1;
    change(f.view.mask, rows, first_row);
    auto attention = *MakeAttention(GetParam());
    EXPECT_EQ(attention->Plan(f.view.mask, rows, first_row).message(), message);
  };
  refuses("mask has no data",
          [](TensorView& mask, int&, int&) { mask.data = nullptr; });
  refuses("mask is q8_0, masks are f32, f16, bf16 or bits",
          [](TensorView& mask, int&, int&) { mask.dtype = DType::kQ8; });
  refuses("the dtype of the mask is 77, it must be 0 to 6",
          [](TensorView& mask, int&, int&) {
            mask.dtype = static_cast<DType>(77);
          });
  refuses("mask has shape [4, 3, 2], it must be [columns, rows]",
          [](TensorView& mask, int&, int&) { mask.shape[2] = 2; });
  refuses("mask has shape [-1, 3, 1], each dimension must be 1 to 2147483647",
          [](TensorView& mask, int&, int&) { mask.shape[0] = -1; });
  refuses("mask has a stride[0] of 8, f32 needs 4",
          [](TensorView& mask, int&, int&) { mask.stride[0] = 8; });
  refuses("mask has a stride[0] of 0, f32 needs 4",
          [](TensorView& mask, int&, int&) { mask.stride[0] = 0; });
  const std::string words =
      "mask is bits, its rows must be on 8-byte boundaries";
  refuses(words, [](TensorView& mask, int&, int&) {
    mask.dtype = DType::kBits;
    mask.stride[1] = 12;
  });
  refuses(words, [](TensorView& mask, int&, int&) {
    mask.dtype = DType::kBits;
    mask.stride[1] = 8;
    mask.data = mask.at(1);
  });
  refuses("rows is 0, it must be 1 to 3",
          [](TensorView&, int& rows, int&) { rows = 0; });
  refuses("rows is 4, it must be 1 to 3",
          [](TensorView&, int& rows, int&) { rows = 4; });
  refuses("rows is 16777217, it must be 1 to 16777216",
          [](TensorView& mask, int& rows, int&) {
            rows = 16777217;
            mask.shape[1] = std::numeric_limits<std::int32_t>::max();
            mask.stride[1] = 0;
          });
  refuses("first_row is 2, it must be 0 to 1",
          [](TensorView&, int&, int& first_row) { first_row = 2; });
  refuses("first_row is -1, it must be 0 to 1",
          [](TensorView&, int&, int& first_row) { first_row = -1; });
}

TEST_P(GuardedAttentionOf, RefusesElementsOfMasks) {
  const auto plans = [](const TensorView& mask, int first_row) {
    auto attention = *MakeAttention(GetParam());
    return attention->Plan(mask, /*rows=*/2, first_row).message();
  };
  // Only the planned rows are read, and all of their columns.
  std::vector<float> numbers(64 * 3, 0.0F);
  const TensorView mask = DenseView(numbers.data(), DType::kF32, {64, 3, 1, 1});
  for (const int column : {0, 63}) {
    float& element = At(numbers, 64 * 2 + column);
    element = -0.5F;
    EXPECT_EQ(plans(mask, 1),
              fmt::format("mask is -0.5 in column {} of row 2, it must be 0 or "
                          "-inf",
                          column));
    EXPECT_EQ(plans(mask, 0), "");
    element = -0.0F;
  }
  EXPECT_EQ(plans(mask, 1), "");
  for (const auto& [dtype, bits, text] :
       {std::tuple(DType::kF16, std::uint16_t{0x7E00}, "nan"),
        {DType::kBF16, std::uint16_t{0x7F80}, "inf"}}) {
    const std::vector<std::uint16_t> halves(64 * 3, bits);
    EXPECT_EQ(
        plans(DenseView(halves.data(), dtype, {64, 3, 1, 1}), 1),
        fmt::format("mask is {} in column 0 of row 1, it must be 0 or -inf",
                    text));
  }
}

TEST_P(GuardedAttentionOf, RefusesTensors) {
  Refuses("query has no data",
          [](AttentionFixture& f) { f.query_view.data = nullptr; });
  Refuses("query is f8_e4m3, it must be f32, f16 or bf16",
          [](AttentionFixture& f) { f.query_view.dtype = DType::kF8; });
  Refuses("query has shape [3, 4, 1], it must be [3, 4, 2]",
          [](AttentionFixture& f) { f.query_view.shape[2] = 1; });
  Refuses("query has shape [2, 4, 2], it must be [3, 4, 2]",
          [](AttentionFixture& f) { f.query_view.shape[0] = 2; });
  Refuses("query has 3 heads, which 2 KV heads cannot share",
          [](AttentionFixture& f) { f.query_view.shape[1] = 3; });
  Refuses("query has no strides: DenseView sets them",
          [](AttentionFixture& f) { f.query_view.stride = {}; });
  Refuses("key has no data",
          [](AttentionFixture& f) { f.view.key.data = nullptr; });
  Refuses("key is bits, rows are of numbers",
          [](AttentionFixture& f) { f.view.key.dtype = DType::kBits; });
  Refuses("key has shape [3, 2, 5], it must be [3, 2, 4]",
          [](AttentionFixture& f) { f.view.key.shape[2] = 5; });
  Refuses("key has a stride[0] of 4, f16 needs 2",
          [](AttentionFixture& f) { f.view.key.stride[0] = 4; });
  Refuses("key has a head_dim of 3, q8_0 is in blocks of 32",
          [](AttentionFixture& f) {
            f.view.key.dtype = DType::kQ8;
            f.view.key.stride[0] = 0;
          });
  Refuses("value has shape [5, 1, 4], it must be [5, 2, 4]",
          [](AttentionFixture& f) { f.view.value.shape[1] = 1; });
  Refuses("value has shape [5, 2, 4], it must be [4, 2, 2]",
          [](AttentionFixture& f) { f.v_layout = VLayout::kPermuted; });
  Refuses("value is q4_0, which only plain V can be", [](AttentionFixture& f) {
    f.v_layout = VLayout::kPermuted;
    f.view.value.dtype = DType::kQ4;
    f.view.value.shape = {4, 5, 2, 1};
    f.view.value.stride[0] = 0;
  });
  Refuses("value is in tiles of 32 columns, the mask has 4",
          [](AttentionFixture& f) { f.v_layout = VLayout::kTiled; });
  Refuses("v_layout is 3, it must be 0 to 2",
          [](AttentionFixture& f) { f.v_layout = static_cast<VLayout>(3); });
  Refuses("view is on device 1, it must be in host memory",
          [](AttentionFixture& f) { f.view.device = Device::kCuda; });
  Refuses("out is null", [](AttentionFixture& f) { f.result.out = nullptr; });
}

TEST_P(GuardedAttentionOf, RefusesOptions) {
  constexpr float kTooLarge = 0x1.000002p50F;
  constexpr float kTooSmall = 0x1.fffffep-51F;
  for (const float scale : {0.F, kTooSmall, -kTooSmall, kTooLarge, -kTooLarge,
                            Limits::infinity(), Limits::quiet_NaN()}) {
    Refuses(fmt::format("scale is {}, its magnitude must be from 2^-50 to 2^50",
                        scale),
            [&](AttentionFixture& f) { f.options.scale = scale; });
  }
  for (const float cap : {-1.F, kTooSmall, kTooLarge, Limits::max(),
                          Limits::infinity(), Limits::quiet_NaN()}) {
    Refuses(
        fmt::format(
            "soft_cap is {}, it must be 0 (none), or from 2^-50 to 2^50", cap),
        [&](AttentionFixture& f) { f.options.soft_cap = cap; });
  }
  Refuses("sinks are 3, there are 4 heads", [](AttentionFixture& f) {
    f.options.sinks = std::span<const float>(f.sinks).first(3);
  });
  for (const float sink :
       {kTooLarge, -kTooLarge, Limits::infinity(), Limits::quiet_NaN()}) {
    Refuses(fmt::format("a sink is {}, it must be from -2^50 to 2^50, or -inf",
                        sink),
            [&](AttentionFixture& f) {
              f.sinks[2] = sink;
              f.options.sinks = f.sinks;
            });
  }
  Refuses("splits is -1, it must be 0 to 65536",
          [](AttentionFixture& f) { f.options.splits = -1; });
  Refuses("splits is 65537, it must be 0 to 65536",
          [](AttentionFixture& f) { f.options.splits = 65537; });
}

TEST_P(GuardedAttentionOf, RefusesTables) {
  RefusesTable("sequences is 0, it must be 1 to 2147483647",
               [](AttentionFixture& f) { f.lengths.clear(); });
  RefusesTable("block_size is 0, it must be 1 to 2147483647",
               [](AttentionFixture& f) { f.table.block_size = 0; });
  RefusesTable("columns is -1, it must be 1 to 2147483647",
               [](AttentionFixture& f) { f.table.columns = -1; });
  RefusesTable("query_rows has 1 entries, lengths has 2",
               [](AttentionFixture& f) { f.query_rows.pop_back(); });
  RefusesTable("blocks has 3 entries, 2 columns of 2 sequences are 4",
               [](AttentionFixture& f) { f.blocks.pop_back(); });
  RefusesTable("window is -1, it must not be negative",
               [](AttentionFixture& f) { f.table.window = -1; });
  RefusesTable("lengths[0] is 5, it must be 0 to 4",
               [](AttentionFixture& f) { f.lengths[0] = 5; });
  RefusesTable("query_rows[1] is 2, it must be 0 to 1",
               [](AttentionFixture& f) { f.query_rows[1] = 2; });
  RefusesTable("blocks[2] is -1, a row of sequence 1 sees it",
               [](AttentionFixture& f) { f.blocks[2] = -1; });
  RefusesTable("the sum of query_rows is 0, it must be 1 to 16777216",
               [](AttentionFixture& f) {
                 f.query_rows = {0, 0};
               });
  RefusesTable("the sum of query_rows is 16777217, it must be 1 to 16777216",
               [](AttentionFixture& f) {
                 f.table.block_size = 16777216;
                 f.lengths[0] = f.query_rows[0] = 16777216;
               });
  RefusesTable("window is 1, rows that see all have none",
               [](AttentionFixture& f) {
                 f.table.window = 1;
                 f.table.sees_all = true;
               });
  RefusesTable("query_rows[1] is 16777217, it must be 0 to 16777216",
               [](AttentionFixture& f) {
                 f.table.sees_all = true;
                 f.query_rows[1] = 16777217;
               });
  RefusesTable("blocks[0] is -1, a row of sequence 0 sees it",
               [](AttentionFixture& f) {
                 f.table.sees_all = true;
                 f.blocks[0] = -1;
               });
  RefusesTable("key has 3 blocks, the table uses block 3",
               [](AttentionFixture& f) { f.blocks[1] = 3; });
  RefusesTable("layout is 2, it must be 0 to 1", [](AttentionFixture& f) {
    f.layout = static_cast<PagedLayout>(2);
  });
  RefusesTable("key has shape [3, 2, 2, 3], it must be [3, 2, 1, 3]",
               [](AttentionFixture& f) {
                 f.table.block_size = 1;
                 f.lengths = {2, 1};
               });
}

// Blocks that no row sees may be missing.
TEST_P(GuardedAttentionOf, NeedsOnlyTheBlocksOfItsWindow) {
  AttentionFixture f;
  auto attention = *MakeAttention(GetParam());
  f.blocks[0] = -1;
  EXPECT_FALSE(attention->Plan(f.Table()).ok());
  f.table.window = 1;
  EXPECT_TRUE(attention->Plan(f.Table()).ok());
  EXPECT_TRUE(
      attention->Attend(f.query_view, f.kv, f.layout, f.options, f.result)
          .ok());
  EXPECT_EQ(f.out, std::vector<float>(5 * 4 * 2, 1));
}

INSTANTIATE_TEST_SUITE_P(Twins, GuardedAttentionOf,
                         ::testing::Values("reference", "optimized"),
                         [](const auto& info) { return info.param; });

TEST(MakeAttention, RefusesAnUnknownTwin) {
  EXPECT_THAT(MakeAttention("third").status().message(),
              HasSubstr("twin is 'third', there are"));
}

// Two parts, of which the first has e^1 and the second e^2 of the sum; a third
// saw nothing.
TEST(MergeAttention, WeighsThePartsByTheirSums) {
  const std::array<float, 2> first = {1, 2};
  const std::array<float, 2> second = {3, 5};
  const std::array<float, 2> nothing = {Limits::quiet_NaN(),
                                        Limits::quiet_NaN()};
  const float one = 1;
  const float two = 2;
  const float none = -Limits::infinity();
  std::array<float, 2> out = {};
  float log_sum_exp = 0;
  const std::array<AttentionPart, 3> parts = {
      AttentionPart{first.data(), &one}, AttentionPart{second.data(), &two},
      AttentionPart{nothing.data(), &none}};
  ASSERT_TRUE(MergeAttention(parts, 2, 1, {out.data(), &log_sum_exp}).ok());
  const double share = std::exp(1) / (std::exp(1) + std::exp(2));
  EXPECT_FLOAT_EQ(out[0], static_cast<float>(share * 1 + (1 - share) * 3));
  EXPECT_FLOAT_EQ(out[1], static_cast<float>(share * 2 + (1 - share) * 5));
  EXPECT_FLOAT_EQ(log_sum_exp,
                  static_cast<float>(std::log(std::exp(1) + std::exp(2))));
  // Parts that all saw nothing: zeros.
  const std::array<AttentionPart, 1> last = {parts[2]};
  ASSERT_TRUE(MergeAttention(last, 2, 1, {out.data(), &log_sum_exp}).ok());
  EXPECT_EQ(out, (std::array<float, 2>{0, 0}));
  EXPECT_EQ(log_sum_exp, -Limits::infinity());
}

TEST(MergeAttention, RefusesMisuse) {
  const float number = 1;
  float out = 7;
  const std::array<AttentionPart, 1> part = {AttentionPart{&number, &number}};
  const std::array<AttentionPart, 1> no_out = {AttentionPart{nullptr, &number}};
  const std::array<AttentionPart, 1> no_sum = {AttentionPart{&number, nullptr}};
  const auto says = [&](std::span<const AttentionPart> parts, int v_head_dim,
                        std::int64_t count, float* to) {
    return MergeAttention(parts, v_head_dim, count, {.out = to}).message();
  };
  EXPECT_EQ(says({}, 1, 1, &out), "parts: there are none");
  EXPECT_EQ(says(no_out, 1, 1, &out), "parts[0].out is null");
  EXPECT_EQ(says(no_sum, 1, 1, &out), "parts[0].log_sum_exp is null");
  EXPECT_EQ(says(part, 0, 1, &out), "v_head_dim is 0, it must be at least 1");
  EXPECT_EQ(says(part, 1, -1, &out), "count is -1, it must be at least 1");
  EXPECT_EQ(says(part, 2, std::int64_t{1} << 62, &out),
            "4611686018427387904 results of 2 elements are too large");
  EXPECT_EQ(says(part, 1, 1, nullptr), "out is null");
  EXPECT_EQ(out, 7);
}

}  // namespace
}  // namespace kvtwin::props
