// A twin's cache that answers with kvtwin's own attention over its views.

#ifndef KVTWIN_PROPS_ATTENTION_ATTENDING_TWIN_H_
#define KVTWIN_PROPS_ATTENTION_ATTENDING_TWIN_H_

#include <memory>
#include <span>

#include "kvtwin/attention.h"
#include "props/base/attending.h"
#include "props/base/forwarding_cache.h"

namespace kvtwin::props {

class AttendingTwin : public ForwardingCache, public Attending {
 public:
  // Requires: `attention` is not null.
  AttendingTwin(std::unique_ptr<Cache> cache, VLayout v_layout,
                std::unique_ptr<Attention> attention)
      : ForwardingCache(std::move(cache)),
        v_layout_(v_layout),
        attention_(std::move(attention)) {}

  Status Attend(const TensorView& query, std::span<float> out) override;

 private:
  const VLayout v_layout_;
  const std::unique_ptr<Attention> attention_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ATTENTION_ATTENDING_TWIN_H_
