// Bounds the rounding errors of attention in f32, from the numbers of the case.
// docs/attention.md derives the bound.

#ifndef KVTWIN_PROPS_ATTENTION_ATTENTION_BOUND_H_
#define KVTWIN_PROPS_ATTENTION_ATTENTION_BOUND_H_

#include <Eigen/Core>
#include <cstdint>

#include "kvtwin/cache.h"
#include "reference/attention.h"

namespace kvtwin::props {

// The arithmetic of an attention.
struct AttentionArithmetic {
  // The relative error of a product whose factors were rounded before: 0 for
  // f32; 2^-8 if queries and weights are rounded to bf16, and K and V are bf16
  // already; 2^-7 if K and V are rounded, too.
  double input_error = 0;
  // The error of a rounded number that is too small for a relative error: 2^-25
  // for f16, whose subnormal numbers are multiples of 2^-24.
  double input_step = 0;
  // The error of an element of a query, as a part of its largest element.
  double query_step = 0;
  // The error of a result, as a part of the largest number in the same 32
  // elements of V of a cell that is seen.
  double value_step = 0;
};

// Bounds of the differences from the exact results of one row.
struct AttentionError {
  Eigen::MatrixXd out;          // [v_head_dim, heads]
  Eigen::VectorXd log_sum_exp;  // [heads]
};

// Returns the largest errors that sums in any order, in any number of tiles and
// parts, may have. `queries` is [k_head_dim, heads]; `exact` is what AttendRow
// returns. Infinite where nothing can be said: the row sees numbers that are
// not finite, or scores are so large that weights lose all their digits.
AttentionError BoundOfErrors(const KvView& view, VLayout v_layout,
                             std::int64_t row, const Eigen::MatrixXd& queries,
                             const reference::Weighing& weighing,
                             const reference::AttendedRow& exact,
                             const AttentionArithmetic& arithmetic = {});

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ATTENTION_ATTENTION_BOUND_H_
