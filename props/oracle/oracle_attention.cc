// The lines of a recording that have outputs of attention.

#include <fmt/format.h>

#include <set>
#include <span>
#include <utility>
#include <vector>

#include "core/guarded_paged.h"
#include "core/index.h"
#include "props/attention/attention_question.h"
#include "props/oracle/oracle.h"
#include "props/oracle/paged_oracle.h"

namespace kvtwin::props {
namespace {

// More query heads of an output would take long to judge.
constexpr std::int64_t kQueryHeadsMax = 1024;

// Returns why the shape of the query or of the output is wrong for these rows,
// or the number of sinks; or "".
std::string WrongShape(const TensorView& query, const TensorView& out,
                       std::span<const float> sinks, const RowDims& dims,
                       std::int64_t rows) {
  const auto& [k_head_dim, kv_heads, v_head_dim] = dims;
  const std::int64_t heads = query.shape[1];
  if (heads < 1 || heads % kv_heads != 0 || heads > kQueryHeadsMax) {
    return fmt::format(
        "query has {} heads, which are not a multiple of {}, up to {}", heads,
        kv_heads, kQueryHeadsMax);
  }
  const auto differs = [](std::string_view what, const Shape& actual,
                          const Shape& expected) -> std::string {
    if (actual == expected) return "";
    return fmt::format("the shape of {} is {}, expected {}", what,
                       ShapeText(actual), ShapeText(expected));
  };
  const std::string wrong =
      differs("query", query.shape, {k_head_dim, heads, rows, 1});
  if (!wrong.empty()) return wrong;
  if (!sinks.empty() && std::ssize(sinks) != heads) {
    return fmt::format("query has {} heads, sinks has {} numbers", heads,
                       sinks.size());
  }
  return differs("out", out.shape, {v_head_dim, heads, rows, 1});
}

std::span<const float> FloatsOf(const DenseTensor& tensor) {
  return {reinterpret_cast<const float*>(tensor.bytes.data()),
          tensor.bytes.size() / sizeof(float)};
}

}  // namespace

std::string Oracle::FindWrongShape(const TraceOp& op) const {
  if (ActiveSpec().kind == Kind::kEncoder) return "an encoder does not attend";
  const auto rows = std::ssize(positions_);
  if (rows == 0) return "no pass has started";
  const auto dims = dims_.find({active_, op.layer});
  if (dims == dims_.end()) return "nothing was put into this layer";
  return WrongShape(op.key.view(), op.value->view(), header_.attend_sinks,
                    dims->second, rows);
}

std::optional<Failure> Oracle::CheckOutput(const TraceOp& op) {
  output_rows_judged_ = 0;
  if (!fresh_[active_]) return std::nullopt;
  const AttentionQuestion question({.ledger = ledger_->active(),
                                    .layer = op.layer,
                                    .dims = dims_.at({active_, op.layer}),
                                    .positions = positions_,
                                    .sequences = sequences_,
                                    .soft_cap = header_.attend_soft_cap,
                                    .sinks = header_.attend_sinks},
                                   op.key, static_cast<std::uint64_t>(op.line));
  output_rows_judged_ = question.CountJudged();
  auto wrong = question.FindWrong(
      FloatsOf(*op.value),
      {.dtype = header_.attend_dtype, .tolerance = header_.attend_tolerance});
  if (!wrong) return std::nullopt;
  return Failure{.text = LayerText(op.layer) + std::move(wrong->text),
                 .row = wrong->row};
}

std::string PagedOracle::FindWrongQuery(const PagedTraceOp& op) const {
  const PagedSpec& spec = SpecOfLayer(header_.spec, op.layer);
  if (spec.states) {
    return fmt::format("layer {} has states, to which no token attends",
                       op.layer);
  }
  std::int64_t rows = 0;
  std::set<int> asked;
  for (std::size_t i = 0; i < op.sequences.size(); ++i) {
    const int count = op.query_rows[i];
    const int sequence = op.sequences[i];
    if (!asked.insert(sequence).second) {
      return fmt::format("sequence {} is listed twice", sequence);
    }
    if (count < 1) {
      return fmt::format("rows[{}] is {}, it must be at least 1", i, count);
    }
    // After a wrong line, the ledger no longer follows.
    const int most =
        ledger_holds_ ? ledger_->RowCount(sequence, op.layer) : count;
    if (count > most) {
      return fmt::format(
          "rows[{}] is {}, but sequence {} has {} rows in layer {}", i, count,
          sequence, most, op.layer);
    }
    rows += count;
  }
  if (rows == 0) return "seqs is empty";
  return WrongShape(op.key->view(), op.value->view(), op.sinks, DimsOf(spec),
                    rows);
}

std::optional<Failure> PagedOracle::CheckOutput(const PagedTraceOp& op) {
  const AttentionQuestion question({.ledger = *ledger_,
                                    .spec = header_.spec,
                                    .layer = op.layer,
                                    .sequences = op.sequences,
                                    .query_rows = op.query_rows,
                                    .soft_cap = op.soft_cap,
                                    .sinks = op.sinks},
                                   *op.key,
                                   static_cast<std::uint64_t>(op.line));
  output_rows_judged_ = question.CountJudged();
  const TraceAttention attention = *header_.attention;
  auto wrong = question.FindWrong(
      FloatsOf(*op.value),
      {.dtype = attention.dtype, .tolerance = attention.tolerance});
  if (!wrong) return std::nullopt;
  return Failure{
      .text = fmt::format("layer {}: {}", op.layer, std::move(wrong->text)),
      .row = wrong->row};
}

}  // namespace kvtwin::props
