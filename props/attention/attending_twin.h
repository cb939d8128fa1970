// A twin's cache that answers with kvtwin's own attention over its views.

#ifndef KVTWIN_PROPS_ATTENTION_ATTENDING_TWIN_H_
#define KVTWIN_PROPS_ATTENTION_ATTENDING_TWIN_H_

#include <memory>
#include <span>

#include "kvtwin/attention.h"
#include "props/base/forwarding_cache.h"
#include "props/base/optional_calls.h"

namespace kvtwin::props {

class AttendingTwin : public ForwardingCache, public Attending {
 public:
  // `soft_cap`: 0 for none; `sinks`: each head has one (SinksOf). Requires:
  // `attention` is not null.
  AttendingTwin(std::unique_ptr<Cache> cache, VLayout v_layout, int soft_cap,
                bool sinks, std::unique_ptr<Attention> attention)
      : ForwardingCache(std::move(cache)),
        v_layout_(v_layout),
        soft_cap_(static_cast<float>(soft_cap)),
        has_sinks_(sinks),
        attention_(std::move(attention)) {}

  Status Attend(const TensorView& query, std::span<float> out) override;

 private:
  const VLayout v_layout_;
  const float soft_cap_;
  const bool has_sinks_;
  const std::unique_ptr<Attention> attention_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ATTENTION_ATTENDING_TWIN_H_
