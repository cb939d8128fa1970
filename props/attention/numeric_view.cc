#include "props/attention/numeric_view.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "props/attention/explanation.h"
#include "reference/attention.h"

namespace kvtwin::props {
namespace {

// The queries of numeric views: fixed numbers from -1 to 1.
float QueryAt(std::int64_t row, std::int64_t head, std::int64_t element) {
  return static_cast<float>((row * 7 + head * 5 + element * 3) % 11 - 5) / 5;
}

DenseTensor Queries(const RowDims& dims, std::int64_t rows) {
  DenseTensor queries =
      FilledTensor(DType::kF32, {dims.k_head_dim, dims.kv_heads, rows, 1}, 0);
  auto* to = reinterpret_cast<float*>(queries.bytes.data());
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t head = 0; head < dims.kv_heads; ++head) {
      for (std::int64_t i = 0; i < dims.k_head_dim; ++i) {
        *to++ = QueryAt(row, head, i);
      }
    }
  }
  return queries;
}

Eigen::MatrixXd QueriesOf(const RowDims& dims, const DenseTensor& queries,
                          std::int64_t row) {
  const auto* all = reinterpret_cast<const float*>(queries.bytes.data());
  const std::int64_t size = std::int64_t{dims.k_head_dim} * dims.kv_heads;
  return Eigen::Map<const Eigen::MatrixXf>(all + row * size, dims.k_head_dim,
                                           dims.kv_heads)
      .cast<double>();
}

// Returns K of the one state that a row sees, [k_head_dim, kv_heads]; nothing
// if it does not see one.
std::optional<Eigen::MatrixXd> StateOf(const KvView& view, std::int64_t row) {
  std::optional<std::int64_t> seen;
  for (std::int64_t column = 0; column < view.mask.shape[0]; ++column) {
    if (!MaskAllows(view.mask, column, row)) continue;
    if (seen) return std::nullopt;
    seen = column;
  }
  if (!seen) return std::nullopt;
  Eigen::MatrixXd state(view.key.shape[0], view.key.shape[1]);
  for (std::int64_t head = 0; head < state.cols(); ++head) {
    for (std::int64_t i = 0; i < state.rows(); ++i) {
      state(i, head) = LoadFrom(view.key, i, head, *seen);
    }
  }
  return state;
}

// Returns where two results are furthest from each other, if that is further
// than `tolerance`: "0.2 at element 3 of head 0, expected 0.5, ...".
std::string DifferenceText(const Eigen::MatrixXd& actual,
                           const Eigen::MatrixXd& expected, double tolerance) {
  std::int64_t i = 0;
  std::int64_t h = 0;
  const double error =
      (actual - expected).cwiseAbs().maxCoeff<Eigen::PropagateNaN>(&i, &h);
  if (error <= tolerance) return "";  // S54. A NaN does not pass.
  return fmt::format(
      "{:.6g} at element {} of head {}, expected {:.6g}, allowed is a "
      "difference of {:.2g}",
      actual(i, h), i, h, expected(i, h), tolerance);
}

}  // namespace

std::optional<WrongOutput> FindWrongNumbers(const AttentionQuestion::Pass& pass,
                                            const KvView& expected,
                                            const KvView& actual,
                                            VLayout v_layout,
                                            double tolerance) {
  const RowDims& dims = pass.dims;
  const auto rows = std::ssize(pass.positions);
  const DenseTensor queries = Queries(dims, rows);
  const double scale = 1 / std::sqrt(dims.k_head_dim);
  const auto wrong = [&](std::int64_t row, std::string_view what,
                         const std::string& difference) {
    return WrongOutput{
        .row = AsInt(row),
        .text = fmt::format("{} row {} (sequence {}, position {}) is {}", what,
                            row, At(pass.sequences, row),
                            At(pass.positions, row), difference)};
  };
  for (std::int64_t row = 0; row < rows; ++row) {
    const Eigen::MatrixXd of_row = QueriesOf(dims, queries, row);
    const Eigen::MatrixXd right =
        reference::Attend(expected, VLayout::kPlain, row, of_row, scale);
    // A shift may make a K row infinite; attention over it has no right output.
    if (!right.allFinite()) continue;
    const Eigen::MatrixXd out =
        reference::Attend(actual, v_layout, row, of_row, scale);
    std::string difference = DifferenceText(out, right, tolerance);
    const bool states = pass.ledger.recurrent();
    if (!difference.empty() && !states) {
      const AttentionQuestion question(pass, queries, /*turn=*/0);
      if (question.row(row).judged) {
        const Eigen::MatrixXd allowed =
            Eigen::MatrixXd::Constant(out.rows(), out.cols(), tolerance);
        difference += "; " + ExplainOutput(question, row, out, allowed);
      }
    }
    if (!difference.empty()) {
      return wrong(row, states ? "V of the state of" : "the attention of",
                   difference);
    }
    if (!states) continue;
    const auto state = StateOf(actual, row);
    const auto right_state = StateOf(expected, row);
    if (!state || !right_state) continue;
    difference = DifferenceText(*state, *right_state, tolerance);
    if (!difference.empty()) return wrong(row, "K of the state of", difference);
  }
  return std::nullopt;
}

}  // namespace kvtwin::props
