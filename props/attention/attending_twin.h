// A twin's cache and pool that answer with kvtwin's own attention.

#ifndef KVTWIN_PROPS_ATTENTION_ATTENDING_TWIN_H_
#define KVTWIN_PROPS_ATTENTION_ATTENDING_TWIN_H_

#include <memory>
#include <span>

#include "kvtwin/attention.h"
#include "props/base/forwarding_cache.h"
#include "props/base/forwarding_pool.h"
#include "props/base/optional_calls.h"

namespace kvtwin::props {

// Attends over the views of the cache, to all rows at once or in two parts, and
// in several numbers of splits.
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

// Attends over the blocks of the pool, in one of several ways that give the
// same result: at once, in splits, or in two parts that are merged.
class AttendingPool : public ForwardingPool, public PoolAttending {
 public:
  // Requires: neither attention is null. `begin` attends over the first blocks,
  // where there are two parts.
  AttendingPool(std::unique_ptr<PagedPool> pool,
                std::unique_ptr<Attention> attention,
                std::unique_ptr<Attention> begin)
      : ForwardingPool(std::move(pool)),
        attention_(std::move(attention)),
        begin_(std::move(begin)) {}

  Status AttendLast(std::span<const int> sequences,
                    std::span<const int> query_rows, int layer,
                    const TensorView& query, const AttentionOptions& options,
                    std::span<float> out) override;

 private:
  Status AttendInParts(const PagedTable& table, AttentionTable rest, int layer,
                       const TensorView& query, const AttentionOptions& options,
                       std::span<float> out);

  const std::unique_ptr<Attention> attention_;
  const std::unique_ptr<Attention> begin_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ATTENTION_ATTENDING_TWIN_H_
