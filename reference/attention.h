// Textbook attention in double over the rows of a view. It decides whether two
// views are the same to a model.

#ifndef KVTWIN_REFERENCE_ATTENTION_H_
#define KVTWIN_REFERENCE_ATTENTION_H_

#include <Eigen/Core>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/mask_elements.h"
#include "kvtwin/cache.h"

namespace kvtwin::reference {

// Returns q.k * scale for every cell; -inf for a cell that the mask hides,
// whatever its K row holds. `query` is [k_head_dim].
inline Eigen::VectorXd Scores(const KvView& view, std::int64_t row,
                              std::int64_t kv_head,
                              const Eigen::VectorXd& query, double scale) {
  Eigen::VectorXd scores(view.key.shape[2]);
  for (std::int64_t cell = 0; cell < scores.size(); ++cell) {
    scores[cell] = -std::numeric_limits<double>::infinity();
    if (!MaskAllows(view.mask, cell, row)) continue;
    scores[cell] = 0;
    for (std::int64_t i = 0; i < query.size(); ++i) {
      scores[cell] += query[i] * LoadFrom(view.key, i, kv_head, cell) * scale;
    }
  }
  return scores;
}

// Returns the heads of batch row `row`: column h of the result, [v_head_dim,
// heads], is the sum over the cells of softmax(q.k * scale + mask) v, where q
// is column h of `queries`, [k_head_dim, heads]. Each KV head serves the same
// number of heads, in order. The result of a row that sees no cell is zeros.
inline Eigen::MatrixXd Attend(const KvView& view, VLayout v_layout,
                              std::int64_t row, const Eigen::MatrixXd& queries,
                              double scale) {
  const TensorView& values = view.value;
  const std::int64_t group = queries.cols() / view.key.shape[1];
  Eigen::MatrixXd out = Eigen::MatrixXd::Zero(
      RowOf(values, v_layout, 0).shape[0], queries.cols());
  for (std::int64_t head = 0; head < queries.cols(); ++head) {
    const std::int64_t kv_head = head / group;
    const Eigen::VectorXd scores =
        Scores(view, row, kv_head, queries.col(head), scale);
    double largest = -std::numeric_limits<double>::infinity();
    for (const double score : scores) largest = std::fmax(largest, score);
    double sum = 0;
    for (std::int64_t cell = 0; cell < scores.size(); ++cell) {
      // A hidden V row must not count, not even if it has a NaN.
      if (std::isinf(scores[cell]) && scores[cell] < 0) continue;
      const double weight = std::exp(scores[cell] - largest);
      sum += weight;
      const TensorView value = RowOf(values, v_layout, cell);
      for (std::int64_t i = 0; i < out.rows(); ++i) {
        out(i, head) += weight * LoadFrom(value, i, kv_head);
      }
    }
    if (sum != 0) out.col(head) /= sum;
  }
  return out;
}

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_ATTENTION_H_
