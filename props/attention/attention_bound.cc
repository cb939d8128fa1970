#include "props/attention/attention_bound.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/index.h"
#include "core/mask_elements.h"

namespace kvtwin::props {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kUnit = 0x1p-24;          // The unit roundoff of f32.
constexpr double kExpError = 4 * kUnit;    // Of 2^x, relative.
constexpr double kTanhError = 16 * kUnit;  // Of tanh, relative.
// The smallest normal f32: smaller weights, factors, products and sums may
// become 0, or be wrong by it, as many engines flush them.
constexpr double kSmallest = 0x1p-126;
// Products with V, and their sums, may become 0 below this: kernels may read f8
// as numbers that are 2^8 times too small, and multiply the results by 2^8.
constexpr double kSmallestProduct = 0x1p8 * kSmallest;

// The relative error of `count` roundings.
double Roundings(double count) {
  return count * kUnit < 0.5 ? count * kUnit / (1 - count * kUnit) : kInfinity;
}

// The relative error of two factors with relative errors a and b.
double Compound(double a, double b) { return a + b + a * b; }

// One query head of one row.
class Head {
 public:
  Head(const KvView& view, std::int64_t row, std::int64_t kv_head,
       const Eigen::VectorXd& query, const reference::Weighing& weighing,
       const AttentionArithmetic& arithmetic)
      : view_(view),
        kv_head_(kv_head),
        query_(query),
        weighing_(weighing),
        arithmetic_(arithmetic),
        scores_(reference::Scores(view, row, kv_head, query, weighing)) {
    for (std::int64_t cell = 0; cell < scores_.size(); ++cell) {
      if (!MaskAllows(view.mask, cell, row)) scores_[cell] = -kInfinity;
    }
  }

  const Eigen::VectorXd& scores() const { return scores_; }

  // The error of a score, in units of log 2.
  double ScoreError(std::int64_t cell) const {
    double products = 0;
    double underflow = 0;  // In units of kSmallest.
    double keys = 0;
    for (std::int64_t i = 0; i < query_.size(); ++i) {
      const double query = std::abs(query_[i]);
      const double key = std::abs(LoadFrom(view_.key, i, kv_head_, cell));
      const double scaled = query * std::abs(weighing_.scale);
      products += scaled * key;
      underflow += 12 + 2 * (key * (1 + query) + scaled);
      keys += key;
    }
    const auto n = static_cast<double>(query_.size());
    const double relative = Compound(Roundings(n + 8), arithmetic_.input_error);
    const double step = arithmetic_.query_step * std::abs(weighing_.scale) *
                        query_.cwiseAbs().maxCoeff();
    double error = products * relative + keys * step * (1 + relative) +
                   underflow * kSmallest * std::max(1.0, weighing_.soft_cap);
    if (arithmetic_.input_step > 0) {  // Factors and score are rounded.
      const double factor = std::max(1.0, std::abs(weighing_.scale));
      error += arithmetic_.input_step *
               (1 + factor * (keys + query_.cwiseAbs().sum()));
    }
    if (weighing_.soft_cap != 0) {
      error += std::abs(scores_[cell]) * (kTanhError + 4 * kUnit);
    }
    return error * std::numbers::log2e;
  }

  // The relative error of the weight of a cell whose score is exact to
  // `score_error`. `largest` is the largest score of the row, and every cell
  // may change the largest score so far.
  double WeightError(double score, double score_error, double largest) const {
    const double distance = (largest - score) * std::numbers::log2e;
    const double rounding =
        kUnit * (distance + 4 * (std::abs(largest) + std::abs(score)));
    return Compound(std::expm1(std::numbers::ln2 * (score_error + rounding)),
                    Compound(kExpError, arithmetic_.input_error));
  }

 private:
  const KvView& view_;
  std::int64_t kv_head_;
  const Eigen::VectorXd& query_;
  const reference::Weighing& weighing_;
  const AttentionArithmetic& arithmetic_;
  Eigen::VectorXd scores_;
};

// Reads the magnitudes of the numbers of a head.
void ReadMagnitudes(const TensorView& row, std::int64_t head,
                    Eigen::ArrayXd& numbers) {
  for (std::int64_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = std::abs(LoadFrom(row, i, head));
  }
}

// Adds `step` times the largest number in the same block to each error.
void AddStepsOfValues(const Eigen::VectorXd& largest, double step,
                      Eigen::VectorXd& errors) {
  constexpr std::int64_t kBlock = kBlockElements;
  for (std::int64_t i = 0; i < errors.size(); ++i) {
    const std::int64_t first = i - i % kBlock;
    const std::int64_t count = std::min(kBlock, errors.size() - first);
    errors[i] += step * largest.segment(first, count).maxCoeff();
  }
}

// Adds the error `step` of `count` weights, which are rounded before or after
// they are divided by their sum, and of V. `values` has the sums of the numbers
// of V.
void AddStepsOfWeights(double step, double count, const Eigen::VectorXd& values,
                       Eigen::VectorXd& out_error, double& sum_error) {
  if (step == 0) return;
  out_error.array() += step * (values.array() + 1);
  sum_error += step * count;
}

}  // namespace

AttentionError BoundOfErrors(const KvView& view, VLayout v_layout,
                             std::int64_t row, const Eigen::MatrixXd& queries,
                             const reference::Weighing& weighing,
                             const reference::AttendedRow& exact,
                             const AttentionArithmetic& arithmetic) {
  AttentionError bound;
  bound.out = Eigen::MatrixXd::Zero(exact.out.rows(), exact.out.cols());
  bound.log_sum_exp = Eigen::VectorXd::Zero(exact.out.cols());
  const std::int64_t group = queries.cols() / view.key.shape[1];
  Eigen::ArrayXd value(exact.out.rows());  // The magnitudes in a row of V.
  for (std::int64_t h = 0; h < queries.cols(); ++h) {
    const Eigen::VectorXd query = queries.col(h);
    const Head head(view, row, h / group, query, weighing, arithmetic);
    const Eigen::VectorXd& scores = head.scores();
    const bool has_sink =
        !weighing.sinks.empty() && !std::isinf(At(weighing.sinks, h));
    const double sink = has_sink ? double{At(weighing.sinks, h)} : -kInfinity;
    const double largest =
        std::max(sink, scores.size() == 0 ? -kInfinity : scores.maxCoeff());
    if (std::isinf(largest) && largest < 0) continue;  // It sees nothing.
    const auto count =
        static_cast<double>((scores.array() > -kInfinity).count());
    // Each cell is one term of the sums, and may be the first of its tile or
    // part, whose sums are then scaled.
    const double summing = Roundings(8 * count + 8);
    double sum = has_sink ? std::exp(sink - largest) : 0;
    double sum_error =
        has_sink
            ? sum * head.WeightError(sink, 4 * kUnit * std::abs(sink), largest)
            : 0;
    Eigen::VectorXd out_error = Eigen::VectorXd::Zero(exact.out.rows());
    Eigen::VectorXd largest_value = Eigen::VectorXd::Zero(exact.out.rows());
    Eigen::VectorXd values = Eigen::VectorXd::Zero(exact.out.rows());
    for (std::int64_t cell = 0; cell < scores.size(); ++cell) {
      if (scores[cell] == -kInfinity) continue;
      const double weight = std::exp(scores[cell] - largest);
      const double error =
          weight * Compound(head.WeightError(scores[cell],
                                             head.ScoreError(cell), largest),
                            summing) +
          kSmallest;
      sum += weight;
      sum_error += error;
      ReadMagnitudes(RowOf(view.value, v_layout, cell), h / group, value);
      out_error.array() += error * value + 13 * kSmallestProduct;
      largest_value = largest_value.array().max(value);
      values.array() += value;
    }
    AddStepsOfValues(largest_value, arithmetic.value_step * sum, out_error);
    AddStepsOfWeights(arithmetic.input_step * std::max(1.0, sum), count, values,
                      out_error, sum_error);
    sum_error += sum * summing;
    const double relative = sum_error / sum;
    const bool known = relative < 0.5;  // NaN: not known.
    for (std::int64_t i = 0; i < out_error.size(); ++i) {
      const double size = std::abs(exact.out(i, h));
      bound.out(i, h) =
          known ? (out_error[i] / sum + size * relative) / (1 - relative) +
                      8 * kUnit * size + kSmallest
                : kInfinity;
      if (std::isnan(bound.out(i, h))) bound.out(i, h) = kInfinity;
    }
    bound.log_sum_exp[h] =
        known ? -std::log1p(-relative) +
                    8 * kUnit *
                        (std::abs(largest) + std::abs(exact.log_sum_exp[h]))
              : kInfinity;
  }
  return bound;
}

}  // namespace kvtwin::props
