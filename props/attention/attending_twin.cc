#include "props/attention/attending_twin.h"

#include <cmath>
#include <vector>

#include "core/index.h"
#include "props/attention/attention_question.h"

namespace kvtwin::props {

Status AttendingTwin::Attend(const TensorView& query, std::span<float> out) {
  const Result<KvView> view = cache_->Get();
  if (!view.ok()) return view.status();
  Status status = attention_->Plan(view->mask, AsInt(query.shape[2]));
  if (!status.ok()) return status;
  const auto dim = static_cast<float>(query.shape[0]);
  const std::vector<float> sinks = SinksOf(has_sinks_ ? query.shape[1] : 0);
  return attention_->Attend(
      query, *view, v_layout_,
      {.scale = 1 / std::sqrt(dim), .soft_cap = soft_cap_, .sinks = sinks},
      {.out = out.data()});
}

}  // namespace kvtwin::props
