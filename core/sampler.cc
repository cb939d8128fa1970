#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/assert.h"
#include "core/index.h"
#include "kvtwin/serving.h"

namespace kvtwin {
namespace {

// Returns the first index at which the sum of the weights up to it exceeds
// `part`, or `likeliest` if rounding leaves no such index.
Eigen::Index IndexAt(const Eigen::ArrayXd& weights, double part,
                     Eigen::Index likeliest) {
  constexpr Eigen::Index kBlock = 256;  // Its sum is vectorized.
  for (Eigen::Index i = 0; i < weights.size(); i += kBlock) {
    const auto block = weights.segment(i, std::min(kBlock, weights.size() - i));
    if (const double sum = block.sum(); part >= sum) {
      part -= sum;
      continue;
    }
    for (Eigen::Index j = 0; j < block.size(); ++j) {
      if (part < block[j]) return i + j;
      part -= block[j];
    }
  }
  return likeliest;
}

}  // namespace

std::int32_t Sampler::operator()(std::span<const float> logits) {
  KVTWIN_ASSERT(!logits.empty());
  float largest = -std::numeric_limits<float>::infinity();
  for (const float logit : logits) largest = std::max(largest, logit);
  // `at` is the end if all logits are NaN.
  const auto at = std::ranges::find(logits, largest);
  const std::int64_t likeliest = at == logits.end() ? 0 : at - logits.begin();
  if (!(temperature_ > 0) || !std::isfinite(largest)) {
    return static_cast<std::int32_t>(likeliest);
  }
  // Eigen vectorizes each of these statements.
  const Eigen::Map<const Eigen::ArrayXf> all(logits.data(), std::ssize(logits));
  Eigen::ArrayXd weights =
      (all.cast<double>() - double{largest}) / temperature_;
  weights = weights.exp();
  // Eigen's exp never returns 0: tiny weights and NaN become 0.
  weights = (weights > 1e-300).select(weights, 0);
  const double most = top_p_ * weights.sum();
  for (;;) {
    const double part =
        std::uniform_real_distribution<double>(0, weights.sum())(random_);
    const Eigen::Index token = IndexAt(weights, part, likeliest);
    // A token is refused, with all less likely ones, if the likelier tokens
    // have the weight top_p.
    const double weight = weights[token];
    weights = (weights <= weight).select(0, weights);
    const double likelier = weights.sum();
    if (!(likelier >= most) || likelier == 0) {
      return static_cast<std::int32_t>(token);
    }
  }
}

}  // namespace kvtwin
