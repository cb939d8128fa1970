// The lines of a recording that have outputs of attention.

#include <fmt/format.h>

#include <span>
#include <utility>
#include <vector>

#include "props/attention/attention_question.h"
#include "props/oracle/oracle.h"

namespace kvtwin::props {
namespace {

// More query heads of an output would take long to judge.
constexpr std::int64_t kQueryHeadsMax = 1024;

}  // namespace

std::string Oracle::FindWrongShape(const TraceOp& op) const {
  if (ActiveSpec().kind == Kind::kEncoder) return "an encoder does not attend";
  const auto rows = std::ssize(positions_);
  if (rows == 0) return "no pass has started";
  const auto dims = dims_.find({active_, op.layer});
  if (dims == dims_.end()) return "nothing was put into this layer";
  const auto& [k_head_dim, kv_heads, v_head_dim] = dims->second;
  const std::int64_t heads = op.key.shape[1];
  if (heads < 1 || heads % kv_heads != 0 || heads > kQueryHeadsMax) {
    return fmt::format(
        "query has {} heads, which are not a multiple of {}, up to {}", heads,
        kv_heads, kQueryHeadsMax);
  }
  const std::vector<float>& sinks = header_.attend_sinks;
  if (!sinks.empty() && std::ssize(sinks) != heads) {
    return fmt::format("query has {} heads, attend.sinks has {} numbers", heads,
                       sinks.size());
  }
  const auto differs = [](std::string_view what, const Shape& actual,
                          const Shape& expected) -> std::string {
    if (actual == expected) return "";
    return fmt::format("the shape of {} is {}, expected {}", what,
                       ShapeText(actual), ShapeText(expected));
  };
  const std::string wrong =
      differs("query", op.key.shape, {k_head_dim, heads, rows, 1});
  if (!wrong.empty()) return wrong;
  return differs("out", op.value->shape, {v_head_dim, heads, rows, 1});
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
  const std::span<const float> out(
      reinterpret_cast<const float*>(op.value->bytes.data()),
      question.answer_size());
  auto wrong = question.FindWrong(out, {.dtype = header_.attend_dtype,
                                        .tolerance = header_.attend_tolerance});
  if (!wrong) return std::nullopt;
  return Failure{.text = LayerText(op.layer) + std::move(wrong->text),
                 .row = wrong->row};
}

}  // namespace kvtwin::props
