#include "props/attention/attending_twin.h"

#include <cmath>

#include "core/index.h"

namespace kvtwin::props {

Status AttendingTwin::Attend(const TensorView& query, std::span<float> out) {
  const Result<KvView> view = cache_->Get();
  if (!view.ok()) return view.status();
  Status status = attention_->Plan(view->mask, AsInt(query.shape[2]));
  if (!status.ok()) return status;
  const auto dim = static_cast<float>(query.shape[0]);
  return attention_->Attend(query, *view, v_layout_,
                            {.scale = 1 / std::sqrt(dim)}, {.out = out.data()});
}

}  // namespace kvtwin::props
