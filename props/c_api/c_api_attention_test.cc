// Compares attention of the C interface with that of C++ in random cases. Tests
// what only C has: struct sizes, null pointers, numbers of entries.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "kvtwin/attention.h"
#include "props/c_api/c_api_adapters.h"
#include "props/c_api/small_cache.h"
#include "props/testing/test_cache.h"
#include "props/unit/attention/attention_case.h"

namespace kvtwin::props {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

struct DestroyAttention {
  void operator()(kvtwin_attention* attention) const {
    kvtwin_attention_destroy(attention);
  }
};
using AttentionHandle = std::unique_ptr<kvtwin_attention, DestroyAttention>;

AttentionHandle AttentionFromC(const char* twin) {
  kvtwin_attention* made = nullptr;
  EXPECT_EQ(kvtwin_attention_create(twin, &made), KVTWIN_OK);
  return AttentionHandle(made);
}

// The attention of the shared library as a C++ class.
class AttentionByC : public Attention {
 public:
  explicit AttentionByC(const std::string& twin)
      : attention_(AttentionFromC(twin.c_str())) {}

  Status Plan(const TensorView& mask, int rows, int first_row) override {
    const kvtwin_tensor to = CTensor(mask);
    return FromC(kvtwin_attention_plan(attention_.get(), &to, rows, first_row));
  }
  Status Plan(const AttentionTable& table) override {
    kvtwin_attention_table to{};
    Status status = FromC(kvtwin_attention_default_table(&to, sizeof(to)));
    if (!status.ok()) return status;
    to.blocks = table.blocks.data();
    to.lengths = table.lengths.data();
    to.query_rows = table.query_rows.data();
    to.sequences = AsInt(table.lengths.size());
    to.columns = table.columns;
    to.block_size = table.block_size;
    if (table.window != kOpenEnd) to.window = table.window;
    to.sees_all = table.sees_all ? 1 : 0;
    return FromC(kvtwin_attention_plan_table(attention_.get(), &to));
  }
  Status Attend(const TensorView& query, const KvView& view, VLayout v_layout,
                const AttentionOptions& options,
                const AttentionOut& out) override {
    kvtwin_view to{};
    to.size = sizeof(to);
    to.key = CTensor(view.key);
    to.value = CTensor(view.value);
    const kvtwin_tensor q = CTensor(query);
    const kvtwin_attention_options chosen = OptionsToC(options);
    const kvtwin_attention_out result = OutToC(
        query, view.value.shape[v_layout == VLayout::kPlain ? 0 : 1], out);
    return FromC(kvtwin_attention_attend(attention_.get(), &q, &to,
                                         static_cast<kvtwin_v_layout>(v_layout),
                                         &chosen, &result));
  }
  Status Attend(const TensorView& query, const PagedKv& blocks,
                PagedLayout layout, const AttentionOptions& options,
                const AttentionOut& out) override {
    const kvtwin_tensor q = CTensor(query);
    const kvtwin_tensor key = CTensor(blocks.key);
    const kvtwin_tensor value = CTensor(blocks.value);
    const kvtwin_attention_options chosen = OptionsToC(options);
    const kvtwin_attention_out result =
        OutToC(query, blocks.value.shape[0], out);
    return FromC(kvtwin_attention_attend_blocks(
        attention_.get(), &q, &key, &value,
        static_cast<kvtwin_paged_layout>(layout), &chosen, &result));
  }

 private:
  static kvtwin_attention_options OptionsToC(const AttentionOptions& options) {
    kvtwin_attention_options to{};
    EXPECT_EQ(kvtwin_attention_default_options(&to, sizeof(to)), KVTWIN_OK);
    to.scale = options.scale;
    to.soft_cap = options.soft_cap;
    to.sinks = options.sinks.data();
    to.sink_count = options.sinks.size();
    to.splits = options.splits;
    to.bf16_products = options.bf16_products ? 1 : 0;
    return to;
  }
  static kvtwin_attention_out OutToC(const TensorView& query,
                                     std::int64_t v_head_dim,
                                     const AttentionOut& out) {
    const auto results = AsSize(query.shape[1] * query.shape[2]);
    return {sizeof(kvtwin_attention_out), out.out, results * AsSize(v_head_dim),
            out.log_sum_exp, out.log_sum_exp == nullptr ? 0 : results};
  }

  AttentionHandle attention_;
};

class CAttention : public EachTwin {};
INSTANTIATE_TEST_SUITE_P(Twins, CAttention,
                         ::testing::Values("reference", "optimized"),
                         TwinTestName);

TEST_P(CAttention, IsThatOfCpp) {
  AttentionByC by_c(GetParam());
  auto by_cpp = *MakeAttention(GetParam());
  int tables = 0;
  int sinks = 0;
  for (std::uint64_t number = 0; number < 60; ++number) {
    attention::Case drawn = attention::DrawCase(SeededPick(2, number));
    drawn.options.bf16_products = number % 2 == 0;
    const attention::Results expected = attention::Attend(drawn, *by_cpp);
    const attention::Results actual = attention::Attend(drawn, by_c);
    ASSERT_FALSE(HasFailure()) << "case " << number;
    for (std::int64_t row = 0; row < drawn.rows; ++row) {
      if (!drawn.finite[AsSize(row)]) continue;
      const std::int64_t results = drawn.heads * drawn.v_head_dim;
      for (std::int64_t i = row * results; i < (row + 1) * results; ++i) {
        ASSERT_EQ(At(actual.out, i), At(expected.out, i)) << "case " << number;
      }
      for (std::int64_t i = row * drawn.heads; i < (row + 1) * drawn.heads;
           ++i) {
        ASSERT_EQ(At(actual.log_sum_exp, i), At(expected.log_sum_exp, i))
            << "case " << number;
      }
    }
    tables += drawn.paged ? 1 : 0;
    sinks += drawn.sinks.empty() ? 0 : 1;
  }
  EXPECT_GT(tables, 10);
  EXPECT_GT(sinks, 5);
}

// A cache of the C interface with three tokens, whose rows are 1, 2 and 3, and
// a query of 0 for two heads: every row of the result is the mean of the tokens
// that it sees.
struct Means {
  Means() {
    EXPECT_EQ(cache.Create(), KVTWIN_OK);
    EXPECT_EQ(cache.Fill(), KVTWIN_OK);
    view.size = sizeof(view);
    EXPECT_EQ(kvtwin_cache_get(cache.cache, 0, &view), KVTWIN_OK);
    EXPECT_EQ(kvtwin_attention_default_options(&options, sizeof(options)),
              KVTWIN_OK);
    EXPECT_EQ(kvtwin_attention_default_table(&table, sizeof(table)), KVTWIN_OK);
    table.blocks = blocks.data();
    table.lengths = &length;
    table.query_rows = &length;
    table.sequences = 1;
    table.columns = table.block_size = 2;
  }

  kvtwin_status Plan() {
    return kvtwin_attention_plan(attention.get(), &view.mask, 3, 0);
  }
  kvtwin_status Attend() {
    return kvtwin_attention_attend(attention.get(), &query, &view, v_layout,
                                   &options, &out);
  }
  kvtwin_status PlanTable() {
    return kvtwin_attention_plan_table(attention.get(), &table);
  }
  kvtwin_status AttendBlocks() {
    return kvtwin_attention_attend_blocks(attention.get(), &query, &block_rows,
                                          &block_rows, layout, &options, &out);
  }

  AttentionHandle attention = AttentionFromC(nullptr);
  SmallCache cache;
  kvtwin_view view{};
  std::array<float, 6> zeros = {};
  kvtwin_tensor query{zeros.data(), KVTWIN_F32, {1, 2, 3, 1}, {}};
  kvtwin_v_layout v_layout = KVTWIN_V_PLAIN;
  kvtwin_attention_options options{};
  std::array<float, 6> results = {7, 7, 7, 7, 7, 7};
  std::array<float, 6> sums = {7, 7, 7, 7, 7, 7};
  kvtwin_attention_out out{sizeof(out), results.data(), 6, sums.data(), 6};
  // The same tokens in the blocks 1 and 0.
  std::array<std::int32_t, 2> blocks = {1, 0};
  std::int32_t length = 3;
  kvtwin_attention_table table{};
  std::array<float, 4> stored = {3, attention::kNaN, 1, 2};
  kvtwin_tensor block_rows{stored.data(), KVTWIN_F32, {1, 1, 2, 2}, {}};
  kvtwin_paged_layout layout = KVTWIN_TOKEN_MAJOR;
};

constexpr std::array<float, 6> kMeans = {1, 1, 1.5, 1.5, 2, 2};

// Expects an error with this message, and that nothing was written.
void Refused(const Means& means, kvtwin_status status,
             std::string_view message) {
  EXPECT_EQ(status, KVTWIN_INVALID_ARGUMENT) << message;
  EXPECT_EQ(kvtwin_last_error(), message);
  EXPECT_THAT(means.results, Each(7)) << message;
  EXPECT_THAT(means.sums, Each(7)) << message;
}

TEST(CAttention, ReadsTheViewOfACache) {
  Means means;
  ASSERT_EQ(means.Plan(), KVTWIN_OK);
  // The plan does not need the mask after the call.
  means.view.mask = {};
  ASSERT_EQ(means.Attend(), KVTWIN_OK) << kvtwin_last_error();
  EXPECT_EQ(means.results, kMeans);
  EXPECT_FLOAT_EQ(means.sums[5], std::log(3.0F));
  means.results = {};
  means.out.log_sum_exp = nullptr;
  means.out.log_sum_exp_count = 0;
  ASSERT_EQ(means.Attend(), KVTWIN_OK);
  EXPECT_EQ(means.results, kMeans);
}

TEST(CAttention, ReadsTheBlocksOfATable) {
  Means means;
  ASSERT_EQ(means.PlanTable(), KVTWIN_OK);
  ASSERT_EQ(means.AttendBlocks(), KVTWIN_OK) << kvtwin_last_error();
  EXPECT_EQ(means.results, kMeans);
}

TEST(CAttention, ReadsTheBlocksOfAPool) {
  Means means;
  kvtwin_pool_params params{};
  ASSERT_EQ(kvtwin_pool_default_params(&params, sizeof(params)), KVTWIN_OK);
  params.block_size = 2;
  params.blocks = params.max_seq_len = 4;
  params.dtype = KVTWIN_F32;
  kvtwin_pool* made = nullptr;
  ASSERT_EQ(kvtwin_pool_create(&params, nullptr, &made), KVTWIN_OK);
  const std::unique_ptr<kvtwin_pool, DestroyC> pool(made);
  // Sequence 1 has the tokens, after a sequence that has block 0.
  constexpr std::array<float, 3> kRows = {1, 2, 3};
  for (std::int32_t sequence = 0; sequence < 2; ++sequence) {
    std::int32_t opened = -1;
    ASSERT_EQ(kvtwin_pool_open(made, nullptr, &opened), KVTWIN_OK);
    const std::int64_t tokens = sequence == 0 ? 1 : 3;
    const kvtwin_tensor rows{kRows.data(), KVTWIN_F32, {1, 1, tokens, 1}, {}};
    ASSERT_EQ(kvtwin_pool_append(made, opened, 0, &rows, &rows, nullptr,
                                 nullptr, 0, nullptr),
              KVTWIN_OK);
    ASSERT_EQ(kvtwin_pool_commit_unknown(made, opened,
                                         static_cast<std::int32_t>(tokens)),
              KVTWIN_OK);
  }
  const std::int32_t second = 1;
  std::size_t count = 0;
  ASSERT_EQ(kvtwin_pool_table(made, &second, 1, &means.table.columns,
                              means.blocks.data(), 2, &count, &means.length),
            KVTWIN_OK);
  EXPECT_EQ(means.blocks, (std::array<std::int32_t, 2>{1, 2}));
  ASSERT_EQ(means.PlanTable(), KVTWIN_OK);
  kvtwin_tensor value{};
  ASSERT_EQ(kvtwin_pool_blocks(made, 0, &means.block_rows, &value), KVTWIN_OK);
  EXPECT_EQ(value.shape[3], 4);
  ASSERT_EQ(means.AttendBlocks(), KVTWIN_OK) << kvtwin_last_error();
  EXPECT_EQ(means.results, kMeans);
  means.results.fill(7);
  means.sums.fill(7);
  Refused(means, kvtwin_pool_blocks(made, 0, nullptr, &value), "key is NULL");
  Refused(means, kvtwin_pool_blocks(made, 0, &value, nullptr), "value is NULL");
  Refused(means, kvtwin_pool_blocks(made, 1, &value, &value),
          "layer is 1, it must be 0 to 0");
  Refused(means, kvtwin_pool_blocks(nullptr, 0, &value, &value),
          "pool is NULL");
}

TEST(CAttention, MergesParts) {
  Means means;
  ASSERT_EQ(means.Plan(), KVTWIN_OK);
  ASSERT_EQ(means.Attend(), KVTWIN_OK);
  // The other part is one more token with a V of 5 for each row, and a K of 0.
  const std::array<float, 6> fives = {5, 5, 5, 5, 5, 5};
  const std::array<kvtwin_attention_part, 2> parts = {
      {{means.results.data(), means.sums.data()},
       {fives.data(), means.zeros.data()}}};
  ASSERT_EQ(kvtwin_attention_merge(parts.data(), 2, 1, 6, &means.out),
            KVTWIN_OK)
      << kvtwin_last_error();
  EXPECT_FLOAT_EQ(means.results[0], 3);
  EXPECT_FLOAT_EQ(means.results[5], 2.75);
  EXPECT_FLOAT_EQ(means.sums[5], std::log(4.0F));
}

// Expects that a call of attend after `change` is refused.
template <class Change>
void AttendRefuses(std::string_view message, const Change& change) {
  Means means;
  ASSERT_EQ(means.Plan(), KVTWIN_OK);
  change(means);
  Refused(means, means.Attend(), message);
}
template <class Change>
void TableRefuses(std::string_view message, const Change& change) {
  Means means;
  change(means);
  kvtwin_status status = means.PlanTable();
  if (status == KVTWIN_OK) status = means.AttendBlocks();
  Refused(means, status, message);
}

TEST(CAttention, RefusesOtherNumbersOfEntries) {
  AttendRefuses("out.out has 5 entries, a result of [1, 2, 3] has 6",
                [](Means& m) { m.out.out_count = 5; });
  AttendRefuses("out.out has 7 entries, a result of [1, 2, 3] has 6",
                [](Means& m) { m.out.out_count = 7; });
  AttendRefuses("out.log_sum_exp has 5 entries, a result of [2, 3, 1] has 6",
                [](Means& m) { m.out.log_sum_exp_count = 5; });
  AttendRefuses("options.sinks is NULL, it should have 2 entries",
                [](Means& m) { m.options.sink_count = 2; });
  AttendRefuses("sinks are 3, there are 2 heads", [](Means& m) {
    m.options.sinks = m.zeros.data();
    m.options.sink_count = 3;
  });
  AttendRefuses("query has shape [1, 2, 2], it must be [1, 2, 3]",
                [](Means& m) {
                  m.query.shape[2] = 2;
                  m.out.out_count = m.out.log_sum_exp_count = 4;
                });
  // No result is this large; the call is refused all the same.
  AttendRefuses(
      "query has shape [1, 9223372036854775807, 3], each dimension "
      "must be 1 to 2147483647",
      [](Means& m) { m.query.shape[1] = INT64_MAX; });
  TableRefuses("out.out has 5 entries, a result of [1, 2, 3] has 6",
               [](Means& m) { m.out.out_count = 5; });
  TableRefuses("table.lengths has -1 entries",
               [](Means& m) { m.table.sequences = -1; });
  TableRefuses("columns is -2, it must not be negative",
               [](Means& m) { m.table.columns = -2; });
  TableRefuses("columns is 0, it must be 1 to 2147483647",
               [](Means& m) { m.table.columns = 0; });
  TableRefuses("lengths[0] is 3, it must be 0 to 2",
               [](Means& m) { m.table.block_size = 1; });
  TableRefuses("window is -1, it must not be negative",
               [](Means& m) { m.table.window = -1; });
}

TEST(CAttention, RefusesNull) {
  AttendRefuses("query has no data", [](Means& m) { m.query.data = nullptr; });
  AttendRefuses("key has no data", [](Means& m) { m.view.key = {}; });
  AttendRefuses("out.out is NULL", [](Means& m) { m.out.out = nullptr; });
  AttendRefuses("out.log_sum_exp is NULL, it should have 6 entries",
                [](Means& m) { m.out.log_sum_exp = nullptr; });
  TableRefuses("table.lengths is NULL, it should have 1 entries",
               [](Means& m) { m.table.lengths = nullptr; });
  TableRefuses("table.query_rows is NULL, it should have 1 entries",
               [](Means& m) { m.table.query_rows = nullptr; });
  TableRefuses("table.blocks is NULL, it should have 2 entries",
               [](Means& m) { m.table.blocks = nullptr; });
  const Means means;
  auto* const a = means.attention.get();
  kvtwin_attention* const no = nullptr;
  const kvtwin_tensor* q = &means.query;
  const kvtwin_view* view = &means.view;
  const auto* options = &means.options;
  const auto* out = &means.out;
  const auto attend = [&] {
    return kvtwin_attention_attend(a, q, view, KVTWIN_V_PLAIN, options, out);
  };
  Refused(means, kvtwin_attention_create(nullptr, nullptr),
          "attention is NULL");
  Refused(means, kvtwin_attention_plan(no, q, 1, 0), "attention is NULL");
  Refused(means, kvtwin_attention_plan(a, nullptr, 1, 0), "mask is NULL");
  Refused(means, kvtwin_attention_plan_table(a, nullptr), "table is NULL");
  Refused(means, kvtwin_attention_default_table(nullptr, 99), "table is NULL");
  Refused(means, kvtwin_attention_default_options(nullptr, 99),
          "options is NULL");
  q = nullptr;
  Refused(means, attend(), "query is NULL");
  q = &means.query;
  view = nullptr;
  Refused(means, attend(), "view is NULL");
  view = &means.view;
  options = nullptr;
  Refused(means, attend(), "options is NULL");
  options = &means.options;
  out = nullptr;
  Refused(means, attend(), "out is NULL");
  for (const bool without_key : {true, false}) {
    const auto* const rows = &means.block_rows;
    Refused(
        means,
        kvtwin_attention_attend_blocks(a, q, without_key ? nullptr : rows,
                                       without_key ? rows : nullptr,
                                       KVTWIN_TOKEN_MAJOR, options, &means.out),
        without_key ? "key is NULL" : "value is NULL");
  }
  kvtwin_attention_destroy(nullptr);
}

TEST(CAttention, RefusesPartsThatAreNone) {
  const Means means;
  kvtwin_attention_part part{means.zeros.data(), means.zeros.data()};
  const auto merge = [&](const kvtwin_attention_part* parts, std::size_t count,
                         std::int64_t results = 6) {
    return kvtwin_attention_merge(parts, count, 1, results, &means.out);
  };
  Refused(means, merge(nullptr, 2), "parts is NULL, it should have 2 entries");
  Refused(means, merge(nullptr, 0), "parts: there are none");
  Refused(means, merge(&part, 1, 5),
          "out.out has 6 entries, a result of [1, 5, 1] has 5");
  Refused(means, merge(&part, 1, 0), "count is 0, it must be at least 1");
  part.out = nullptr;
  Refused(means, merge(&part, 1), "parts[0].out is null");
  part = {means.zeros.data(), nullptr};
  Refused(means, merge(&part, 1), "parts[0].log_sum_exp is null");
  Refused(means, kvtwin_attention_merge(&part, 1, 1, 6, nullptr),
          "out is NULL");
}

TEST(CAttention, RefusesNumbersThatNoEnumHas) {
  const auto write = [](auto& to, int number) {
    std::memcpy(&to, &number, sizeof(number));
  };
  AttendRefuses("v_layout is 3, it must be 0 to 2",
                [&](Means& m) { write(m.v_layout, 3); });
  AttendRefuses("query.dtype is 9, it must be 0 to 6",
                [&](Means& m) { write(m.query.dtype, 9); });
  AttendRefuses("view.key.dtype is -1, it must be 0 to 6",
                [&](Means& m) { write(m.view.key.dtype, -1); });
  // (In C++ a kvtwin_paged_layout cannot be 2: that is undefined behaviour.)
}

TEST(CAttention, NeedsAPlan) {
  Means means;
  EXPECT_EQ(means.Attend(), KVTWIN_FAILED_PRECONDITION);
  EXPECT_STREQ(kvtwin_last_error(), "no mask is planned");
  EXPECT_EQ(means.AttendBlocks(), KVTWIN_FAILED_PRECONDITION);
  EXPECT_STREQ(kvtwin_last_error(), "no table is planned");
  // An error keeps the plan before.
  ASSERT_EQ(means.Plan(), KVTWIN_OK);
  Refused(means,
          kvtwin_attention_plan(means.attention.get(), &means.view.mask, 4, 0),
          "rows is 4, it must be 1 to 3");
  EXPECT_EQ(means.Attend(), KVTWIN_OK);
  EXPECT_EQ(means.results, kMeans);
}

TEST(CAttention, RefusesOtherTwins) {
  kvtwin_attention* none = nullptr;
  EXPECT_EQ(kvtwin_attention_create("twin", &none), KVTWIN_INVALID_ARGUMENT);
  EXPECT_THAT(kvtwin_last_error(), HasSubstr("twin"));
  // The twin cuda has another interface, in libraries with CUDA as well.
  EXPECT_NE(kvtwin_attention_create("cuda", &none), KVTWIN_OK);
  EXPECT_THAT(kvtwin_last_error(), HasSubstr("cuda"));
  EXPECT_EQ(none, nullptr);
}

// A struct of a later version, with a field that this library does not know.
template <class T>
struct Longer {
  explicit Longer(const T& from) : known(from) { known.size = sizeof(*this); }
  T known;
  std::int64_t more = 0;
};

TEST(CAttention, SizesOfStructsAreChecked) {
  Means means;
  Longer<kvtwin_attention_options> options(means.options);
  Longer<kvtwin_attention_table> table(means.table);
  Longer<kvtwin_attention_out> out(means.out);
  ASSERT_EQ(kvtwin_attention_plan_table(means.attention.get(), &table.known),
            KVTWIN_OK);
  const auto attend = [&] {
    return kvtwin_attention_attend_blocks(
        means.attention.get(), &means.query, &means.block_rows,
        &means.block_rows, KVTWIN_TOKEN_MAJOR, &options.known, &out.known);
  };
  ASSERT_EQ(attend(), KVTWIN_OK) << kvtwin_last_error();
  EXPECT_EQ(means.results, kMeans);
  const auto refused = [](kvtwin_status status, std::string_view part) {
    EXPECT_EQ(status, KVTWIN_INVALID_ARGUMENT);
    EXPECT_THAT(kvtwin_last_error(), HasSubstr(part));
  };
  options.more = 1;
  refused(attend(), "knows nothing: its options has ");
  options.more = 0;
  out.more = 1;
  refused(attend(), "knows nothing: its out has ");
  table.more = 1;
  refused(kvtwin_attention_plan_table(means.attention.get(), &table.known),
          "knows nothing: its table has ");
  means.options.size -= 1;
  refused(means.AttendBlocks(), "options.size is ");
  means.table.size = 0;
  refused(means.PlanTable(), "table.size is 0");
  means.view.size = 8;
  refused(means.Attend(), "view.size is 8");
  refused(kvtwin_attention_default_options(&means.options, 8),
          "options.size is 8");
}

}  // namespace
}  // namespace kvtwin::props
