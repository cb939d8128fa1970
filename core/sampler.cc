#include <algorithm>
#include <cmath>

#include "core/assert.h"
#include "core/index.h"
#include "kvtwin/serving.h"

namespace kvtwin {

std::int32_t Sampler::operator()(std::span<const float> logits) {
  KVTWIN_ASSERT(!logits.empty());
  const auto less = [](float left, float right) {
    return std::isnan(left) ? !std::isnan(right) : left < right;
  };
  const auto likeliest = std::ranges::max_element(logits, less);
  const auto first = static_cast<std::int32_t>(likeliest - logits.begin());
  if (!(temperature_ > 0) || !std::isfinite(*likeliest)) return first;
  std::vector<double> weights;
  double sum = 0;
  for (const float logit : logits) {
    const double weight =
        std::exp((double{logit} - double{*likeliest}) / temperature_);
    weights.push_back(std::isnan(weight) ? 0 : weight);
    sum += weights.back();
  }
  const double most = top_p_ * sum;
  for (;;) {
    const std::int32_t token = std::discrete_distribution<std::int32_t>(
        weights.begin(), weights.end())(random_);
    // A token is refused, with all less likely ones, if the likelier tokens
    // have the weight top_p.
    const double weight = At(weights, token);
    double likelier = 0;
    for (double& other : weights) {
      if (other <= weight) other = 0;
      likelier += other;
    }
    if (!(likelier >= most) || likelier == 0) return token;
  }
}

}  // namespace kvtwin
