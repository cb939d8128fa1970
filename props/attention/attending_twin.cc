#include "props/attention/attending_twin.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/guarded_paged.h"
#include "core/index.h"
#include "props/attention/attention_question.h"

namespace kvtwin::props {
namespace {

float ScaleOf(const TensorView& query) {
  return 1 / std::sqrt(static_cast<float>(query.shape[0]));
}

}  // namespace

Status AttendingTwin::Attend(const TensorView& query, std::span<float> out) {
  const Result<KvView> view = cache_->Get();
  if (!view.ok()) return view.status();
  const std::int64_t heads = query.shape[1];
  const std::int64_t rows = query.shape[2];
  const std::vector<float> sinks = SinksOf(has_sinks_ ? heads : 0);
  // The way follows from the shapes, so that a history that is shrunk keeps it.
  const auto turn = AsInt(rows + view->key.shape[2]);
  const int way = turn % 4;
  const int splits = way == 1 ? 1 + turn / 4 % 7 : 0;
  const std::int64_t size = std::ssize(out) / rows;
  // The rows are planned at once, or in two parts.
  const std::int64_t part = way == 0 ? (rows + 1) / 2 : rows;
  for (std::int64_t first = 0; first < rows; first += part) {
    const std::int64_t count = std::min(part, rows - first);
    Status status = attention_->Plan(view->mask, AsInt(count), AsInt(first));
    if (!status.ok()) return status;
    TensorView asked = query;
    asked.data =
        static_cast<const std::byte*>(query.data) + first * query.stride[2];
    asked.shape[2] = count;
    status = attention_->Attend(asked, *view, v_layout_,
                                {.scale = ScaleOf(query),
                                 .soft_cap = soft_cap_,
                                 .sinks = sinks,
                                 .splits = splits},
                                {.out = &out[AsSize(first * size)]});
    if (!status.ok()) return status;
  }
  return {};
}

Status AttendingPool::AttendLast(std::span<const int> sequences,
                                 std::span<const int> query_rows, int layer,
                                 const TensorView& query,
                                 const AttentionOptions& options,
                                 std::span<float> out) {
  const auto table = pool_->ExportLayerTable(sequences, layer);
  if (!table.ok()) return table.status();
  const PagedSpec& spec = SpecOfLayer(pool_->spec(), layer);
  AttentionTable plan = {.blocks = table->blocks,
                         .columns = table->columns,
                         .lengths = table->seq_lens,
                         .query_rows = query_rows,
                         .block_size = spec.block_size};
  if (spec.window) plan.window = *spec.window;
  // The way follows from the lengths, so that a history that is shrunk keeps
  // it.
  int turn = layer;
  for (const int len : table->seq_lens) turn += len;
  const int way = turn % 4;
  if (way == 0 && !spec.window) {
    return AttendInParts(*table, plan, layer, query, options, out);
  }
  Status status = attention_->Plan(plan);
  if (!status.ok()) return status;
  const auto blocks = pool_->Blocks(layer);
  if (!blocks.ok()) return blocks.status();
  AttentionOptions in_splits = options;
  if (way == 1) in_splits.splits = 1 + turn / 4 % 7;
  return attention_->Attend(query, *blocks, spec.layout, in_splits,
                            {.out = out.data()});
}

// The first part has half of the whole blocks before the query rows of each
// sequence, the second part has the others, and the sinks.
Status AttendingPool::AttendInParts(const PagedTable& table,
                                    AttentionTable rest, int layer,
                                    const TensorView& query,
                                    const AttentionOptions& options,
                                    std::span<float> out) {
  const PagedSpec& spec = SpecOfLayer(pool_->spec(), layer);
  std::vector<std::int32_t> first_lengths;
  std::vector<std::int32_t> lengths;
  std::vector<std::int32_t> blocks(table.blocks.size(), -1);
  for (std::int64_t i = 0; i < std::ssize(table.seq_lens); ++i) {
    const int len = At(table.seq_lens, i);
    const int whole = (len - At(rest.query_rows, i)) / spec.block_size;
    const int first = (whole + 1) / 2;
    first_lengths.push_back(first * spec.block_size);
    lengths.push_back(len - first_lengths.back());
    const auto row = IteratorAt(table.blocks, i * table.columns);
    std::copy(row + first, row + table.columns,
              IteratorAt(blocks, i * table.columns));
  }
  AttentionTable begin = rest;
  begin.lengths = first_lengths;
  begin.sees_all = true;
  rest.blocks = blocks;
  rest.lengths = lengths;
  Status status = begin_->Plan(begin);
  if (status.ok()) status = attention_->Plan(rest);
  if (!status.ok()) return status;
  const auto kv = pool_->Blocks(layer);
  if (!kv.ok()) return kv.status();
  const std::int64_t count = query.shape[1] * query.shape[2];
  std::vector<float> rest_out(out.size());
  std::vector<float> sums(AsSize(count));
  std::vector<float> rest_sums(AsSize(count));
  AttentionOptions without_sinks = options;
  without_sinks.sinks = {};
  status = begin_->Attend(query, *kv, spec.layout, without_sinks,
                          {.out = out.data(), .log_sum_exp = sums.data()});
  if (!status.ok()) return status;
  status = attention_->Attend(
      query, *kv, spec.layout, options,
      {.out = rest_out.data(), .log_sum_exp = rest_sums.data()});
  if (!status.ok()) return status;
  const AttentionPart parts[] = {{out.data(), sums.data()},
                                 {rest_out.data(), rest_sums.data()}};
  return MergeAttention(parts, spec.v_head_dim, count, {.out = out.data()});
}

}  // namespace kvtwin::props
