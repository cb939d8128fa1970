// Textbook attention in double over the rows of a view: the formula of
// kvtwin/attention.h. It decides whether two views are the same to a model.

#ifndef KVTWIN_REFERENCE_ATTENTION_H_
#define KVTWIN_REFERENCE_ATTENTION_H_

#include <Eigen/Core>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "kvtwin/cache.h"

namespace kvtwin::reference {

// How scores become weights, as AttentionOptions says.
struct Weighing {
  double scale = 1;
  double soft_cap = 0;
  std::span<const float> sinks = {};
};

// The results of one row.
struct AttendedRow {
  Eigen::MatrixXd out;          // [v_head_dim, heads]
  Eigen::VectorXd log_sum_exp;  // [heads]
};

// Returns the score of every cell; -inf for a cell that the mask hides,
// whatever its K row holds. `query` is [k_head_dim].
inline Eigen::VectorXd Scores(const KvView& view, std::int64_t row,
                              std::int64_t kv_head,
                              const Eigen::VectorXd& query,
                              const Weighing& weighing) {
  Eigen::VectorXd scores(view.key.shape[2]);
  for (std::int64_t cell = 0; cell < scores.size(); ++cell) {
    scores[cell] = -std::numeric_limits<double>::infinity();
    if (!MaskAllows(view.mask, cell, row)) continue;
    scores[cell] = 0;
    for (std::int64_t i = 0; i < query.size(); ++i) {
      scores[cell] +=
          query[i] * LoadFrom(view.key, i, kv_head, cell) * weighing.scale;
    }
    if (weighing.soft_cap == 0) continue;
    scores[cell] =
        weighing.soft_cap * std::tanh(scores[cell] / weighing.soft_cap);
  }
  return scores;
}

// Returns the results of batch row `row`; column h of `queries`, [k_head_dim,
// heads], is the query of head h.
inline AttendedRow AttendRow(const KvView& view, VLayout v_layout,
                             std::int64_t row, const Eigen::MatrixXd& queries,
                             const Weighing& weighing) {
  const TensorView& values = view.value;
  const std::int64_t group = queries.cols() / view.key.shape[1];
  AttendedRow result;
  result.out = Eigen::MatrixXd::Zero(RowOf(values, v_layout, 0).shape[0],
                                     queries.cols());
  result.log_sum_exp = Eigen::VectorXd(queries.cols());
  for (std::int64_t head = 0; head < queries.cols(); ++head) {
    const std::int64_t kv_head = head / group;
    const Eigen::VectorXd scores =
        Scores(view, row, kv_head, queries.col(head), weighing);
    const double sink = weighing.sinks.empty()
                            ? -std::numeric_limits<double>::infinity()
                            : double{At(weighing.sinks, head)};
    double largest = sink;
    for (const double score : scores) largest = std::fmax(largest, score);
    double sum = std::isinf(sink) ? 0 : std::exp(sink - largest);
    for (std::int64_t cell = 0; cell < scores.size(); ++cell) {
      // A hidden V row must not count, not even if it has a NaN.
      if (std::isinf(scores[cell]) && scores[cell] < 0) continue;
      const double weight = std::exp(scores[cell] - largest);
      sum += weight;
      const TensorView value = RowOf(values, v_layout, cell);
      for (std::int64_t i = 0; i < result.out.rows(); ++i) {
        result.out(i, head) += weight * LoadFrom(value, i, kv_head);
      }
    }
    if (sum != 0) result.out.col(head) /= sum;
    result.log_sum_exp[head] = sum == 0 ? largest : largest + std::log(sum);
  }
  return result;
}

// The same without a soft cap and sinks, and only the first of the results.
inline Eigen::MatrixXd Attend(const KvView& view, VLayout v_layout,
                              std::int64_t row, const Eigen::MatrixXd& queries,
                              double scale) {
  return AttendRow(view, v_layout, row, queries, {.scale = scale}).out;
}

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_ATTENTION_H_
