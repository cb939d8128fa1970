// Attention of <kvtwin/kvtwin.h>.

#include "kvtwin/attention.h"

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "props/backend/c_conversions.h"
#include "props/c_api/c_api.h"

using namespace kvtwin;
using namespace kvtwin::props;

struct kvtwin_attention {
  std::unique_ptr<Attention> attention;
};

namespace {

// Calls `call` with the attention, if there is one.
template <class Call>
kvtwin_status OnAttention(kvtwin_attention* attention, const Call& call) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"attention", attention}});
    return status.ok() ? call(*attention->attention) : status;
  });
}

kvtwin_attention_options DefaultOptions() {
  kvtwin_attention_options options{};
  options.scale = AttentionOptions().scale;
  return options;
}

kvtwin_attention_table DefaultTable() {
  kvtwin_attention_table table{};
  table.window = AttentionTable().window;
  return table;
}

Result<AttentionOptions> OptionsFromC(const kvtwin_attention_options* from) {
  kvtwin_attention_options read = DefaultOptions();
  Status status = ReadStruct("options", from, read);
  if (!status.ok()) return status;
  const auto sinks = ListFromC("options.sinks", read.sinks, read.sink_count);
  if (!sinks.ok()) return sinks.status();
  return AttentionOptions{.scale = read.scale,
                          .soft_cap = read.soft_cap,
                          .sinks = *sinks,
                          .splits = read.splits,
                          .bf16_products = read.bf16_products != 0};
}

Result<AttentionTable> TableFromC(const kvtwin_attention_table* from) {
  kvtwin_attention_table read = DefaultTable();
  Status status = ReadStruct("table", from, read);
  if (!status.ok()) return status;
  const auto lengths = ListFromC("table.lengths", read.lengths, read.sequences);
  if (!lengths.ok()) return lengths.status();
  const auto rows =
      ListFromC("table.query_rows", read.query_rows, read.sequences);
  if (!rows.ok()) return rows.status();
  if (status = NotNegative("columns", read.columns); !status.ok()) {
    return status;
  }
  const auto blocks = ListFromC("table.blocks", read.blocks,
                                std::int64_t{read.sequences} * read.columns);
  if (!blocks.ok()) return blocks.status();
  return AttentionTable{.blocks = *blocks,
                        .columns = read.columns,
                        .lengths = *lengths,
                        .query_rows = *rows,
                        .block_size = read.block_size,
                        .window = read.window,
                        .sees_all = read.sees_all != 0};
}

// Errors: the list has another number of entries than a result of this shape.
// A shape that no result has is accepted here, and refused by the attention.
Status CheckCount(std::string_view name, std::size_t count,
                  const Shape& shape) {
  std::int64_t expected = 1;
  for (const std::int64_t extent : shape) {
    if (extent < 1 || __builtin_mul_overflow(expected, extent, &expected)) {
      return {};
    }
  }
  if (std::cmp_equal(count, expected)) return {};
  return Invalid("{} has {} entries, a result of {} has {}", name, count,
                 ShapeText(shape), expected);
}

// Returns the lists to write to, for `heads` * `rows` results.
Result<AttentionOut> OutFromC(const kvtwin_attention_out* from,
                              std::int64_t v_head_dim, std::int64_t heads,
                              std::int64_t rows) {
  kvtwin_attention_out read{};
  Status status = ReadStruct("out", from, read);
  if (status.ok()) status = NeedAll({{"out.out", read.out}});
  if (status.ok()) {
    status =
        CheckCount("out.out", read.out_count, {v_head_dim, heads, rows, 1});
  }
  if (!status.ok()) return status;
  const auto sums =
      ListFromC("out.log_sum_exp", read.log_sum_exp, read.log_sum_exp_count);
  if (!sums.ok()) return sums.status();
  if (read.log_sum_exp != nullptr) {
    status = CheckCount("out.log_sum_exp", read.log_sum_exp_count,
                        {heads, rows, 1, 1});
  }
  if (!status.ok()) return status;
  return AttentionOut{.out = read.out, .log_sum_exp = read.log_sum_exp};
}

// Calls `attend(query, options, out)` for a V of this head_dim.
template <class Attend>
Status AttendFromC(const kvtwin_tensor* query, std::int64_t v_head_dim,
                   const kvtwin_attention_options* options,
                   const kvtwin_attention_out* out, const Attend& attend) {
  if (Status status = NeedAll({{"query", query}}); !status.ok()) return status;
  const Result<TensorView> q = TensorFromC("query", query);
  if (!q.ok()) return q.status();
  const Result<AttentionOptions> chosen = OptionsFromC(options);
  if (!chosen.ok()) return chosen.status();
  const Result<AttentionOut> to =
      OutFromC(out, v_head_dim, q->shape[1], q->shape[2]);
  return to.ok() ? attend(*q, *chosen, *to) : to.status();
}

}  // namespace

kvtwin_status kvtwin_attention_create(const char* twin,
                                      kvtwin_attention** attention) {
  return Answer([&]() -> Status {
    Status status = NeedAll({{"attention", attention}});
    if (!status.ok()) return status;
    auto made = MakeAttention(TextOf(twin, "optimized"));
    if (made.ok()) *attention = new kvtwin_attention{std::move(*made)};
    return made.status();
  });
}

void kvtwin_attention_destroy(kvtwin_attention* attention) { delete attention; }

kvtwin_status kvtwin_attention_plan(kvtwin_attention* attention,
                                    const kvtwin_tensor* mask, int32_t rows,
                                    int32_t first_row) {
  return OnAttention(attention, [&](Attention& target) -> Status {
    if (Status status = NeedAll({{"mask", mask}}); !status.ok()) return status;
    const Result<TensorView> view = TensorFromC("mask", mask);
    return view.ok() ? target.Plan(*view, rows, first_row) : view.status();
  });
}

kvtwin_status kvtwin_attention_default_table(kvtwin_attention_table* table,
                                             size_t size) {
  return Answer(
      [&] { return WriteDefaults("table", DefaultTable(), table, size); });
}

kvtwin_status kvtwin_attention_plan_table(kvtwin_attention* attention,
                                          const kvtwin_attention_table* table) {
  return OnAttention(attention, [&](Attention& target) -> Status {
    const Result<AttentionTable> read = TableFromC(table);
    return read.ok() ? target.Plan(*read) : read.status();
  });
}

kvtwin_status kvtwin_attention_default_options(
    kvtwin_attention_options* options, size_t size) {
  return Answer([&] {
    return WriteDefaults("options", DefaultOptions(), options, size);
  });
}

kvtwin_status kvtwin_attention_attend(kvtwin_attention* attention,
                                      const kvtwin_tensor* query,
                                      const kvtwin_view* view,
                                      kvtwin_v_layout v_layout,
                                      const kvtwin_attention_options* options,
                                      const kvtwin_attention_out* out) {
  return OnAttention(attention, [&](Attention& target) -> Status {
    kvtwin_view read{};
    Status status = ReadStruct("view", view, read);
    if (!status.ok()) return status;
    const Result<TensorView> key = TensorFromC("view.key", &read.key);
    if (!key.ok()) return key.status();
    const Result<TensorView> value = TensorFromC("view.value", &read.value);
    if (!value.ok()) return value.status();
    const auto layout = static_cast<VLayout>(RawEnum(v_layout));
    status = CheckEnum("v_layout", layout, 3);
    if (!status.ok()) return status;
    return AttendFromC(
        query, value->shape[layout == VLayout::kPlain ? 0 : 1], options, out,
        [&](const TensorView& q, const AttentionOptions& chosen,
            const AttentionOut& to) {
          return target.Attend(q, KvView{*key, *value, {}}, layout, chosen, to);
        });
  });
}

kvtwin_status kvtwin_attention_attend_blocks(
    kvtwin_attention* attention, const kvtwin_tensor* query,
    const kvtwin_tensor* key, const kvtwin_tensor* value,
    kvtwin_paged_layout layout, const kvtwin_attention_options* options,
    const kvtwin_attention_out* out) {
  return OnAttention(attention, [&](Attention& target) -> Status {
    Status status = NeedAll({{"key", key}, {"value", value}});
    if (!status.ok()) return status;
    const Result<TensorView> k = TensorFromC("key", key);
    if (!k.ok()) return k.status();
    const Result<TensorView> v = TensorFromC("value", value);
    if (!v.ok()) return v.status();
    return AttendFromC(query, v->shape[0], options, out,
                       [&](const TensorView& q, const AttentionOptions& chosen,
                           const AttentionOut& to) {
                         return target.Attend(
                             q, PagedKv{*k, *v},
                             static_cast<PagedLayout>(RawEnum(layout)), chosen,
                             to);
                       });
  });
}

kvtwin_status kvtwin_attention_merge(const kvtwin_attention_part* parts,
                                     size_t part_count, int32_t v_head_dim,
                                     int64_t count,
                                     const kvtwin_attention_out* out) {
  return Answer([&]() -> Status {
    const auto list = ListFromC("parts", parts, part_count);
    if (!list.ok()) return list.status();
    const Result<AttentionOut> to = OutFromC(out, v_head_dim, count, 1);
    if (!to.ok()) return to.status();
    std::vector<AttentionPart> all;
    for (const kvtwin_attention_part& part : *list) {
      all.push_back({.out = part.out, .log_sum_exp = part.log_sum_exp});
    }
    return MergeAttention(all, v_head_dim, count, *to);
  });
}
