// A pool that hands every call to another one; a derived class changes or
// records some of the calls.

#ifndef KVTWIN_PROPS_BASE_FORWARDING_POOL_H_
#define KVTWIN_PROPS_BASE_FORWARDING_POOL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvtwin/paged.h"
#include "props/base/optional_calls.h"

namespace kvtwin::props {

// Forwards the calls that change nothing.
class ForwardingReads : public PagedPool {
 public:
  // Requires: `pool` outlives the ForwardingReads.
  explicit ForwardingReads(const PagedPool& pool) : reads_(pool) {}

  const PagedSpec& spec() const override { return reads_.spec(); }
  Result<int> Find(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) const override {
    return reads_.Find(prompt, key);
  }
  Result<int> ResumeBefore(int sequence, int len) const override {
    return reads_.ResumeBefore(sequence, len);
  }
  Result<int> SeqLen(int sequence) const override {
    return reads_.SeqLen(sequence);
  }
  Result<std::vector<PagedView>> Views(int sequence, int layer) const override {
    return reads_.Views(sequence, layer);
  }
  Result<std::vector<PagedView>> ViewsPacked(int sequence,
                                             int layer) const override {
    return reads_.ViewsPacked(sequence, layer);
  }
  Result<std::optional<PagedKv>> ContiguousKV(int sequence, int layer,
                                              int kv_len) const override {
    return reads_.ContiguousKV(sequence, layer, kv_len);
  }
  Result<Device> LayerDevice(int layer) const override {
    return reads_.LayerDevice(layer);
  }
  PagedUsage Usage() const override { return reads_.Usage(); }
  // A pool without groups is its own group 0: its calls stay forwarded.
  const PagedPool* Group(int group) const override {
    return spec().groups.empty() ? PagedPool::Group(group)
                                 : reads_.Group(group);
  }
  Result<PagedCsr> ExportCsr(std::span<const int> sequences) const override {
    return reads_.ExportCsr(sequences);
  }
  Result<PagedTable> ExportTable(
      std::span<const int> sequences) const override {
    return reads_.ExportTable(sequences);
  }
  Result<PagedTable> ExportLayerTable(std::span<const int> sequences,
                                      int layer) const override {
    return reads_.ExportLayerTable(sequences, layer);
  }
  Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                int end) const override {
    return reads_.SlotMapping(sequence, begin, end);
  }
  Result<PagedKv> Blocks(int layer) const override {
    return reads_.Blocks(layer);
  }

 protected:
  const PagedPool& reads_;
};

class ForwardingPool : public ForwardingReads {
 public:
  explicit ForwardingPool(std::unique_ptr<PagedPool> pool)
      : ForwardingReads(*pool), pool_(std::move(pool)) {}

  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    return pool_->Open(prompt, key);
  }
  Status AddMedia(int sequence, const PrefixMedia& media) override {
    return pool_->AddMedia(sequence, media);
  }
  Result<int> Fork(int sequence, int len) override {
    return pool_->Fork(sequence, len);
  }
  Result<PagedAppend> Append(int sequence, int layer, const TensorView& key,
                             const TensorView& value) override {
    return pool_->Append(sequence, layer, key, value);
  }
  Status Commit(int sequence, int new_tokens) override {
    return pool_->Commit(sequence, new_tokens);
  }
  Status Commit(int sequence, std::span<const std::int32_t> tokens) override {
    return pool_->Commit(sequence, tokens);
  }
  Status Truncate(int sequence, int len) override {
    return pool_->Truncate(sequence, len);
  }
  Status Free(int sequence) override { return pool_->Free(sequence); }

 protected:
  std::unique_ptr<PagedPool> pool_;
};

// Calls AttendLast of a pool. Errors: not_supported if it computes no
// attention.
inline Status AttendBy(PagedPool& pool, std::span<const int> sequences,
                       std::span<const int> query_rows, int layer,
                       const TensorView& query, const AttentionOptions& options,
                       std::span<float> out) {
  auto* const attending = dynamic_cast<PoolAttending*>(&pool);
  if (attending == nullptr) {
    return {StatusCode::kNotSupported, "the pool computes no attention"};
  }
  return attending->AttendLast(sequences, query_rows, layer, query, options,
                               out);
}

// A group of a pool with groups changes only with its pool.
class ForwardingGroup : public ForwardingReads {
 public:
  using ForwardingReads::ForwardingReads;

  Result<int> Open(std::span<const std::int32_t>, const PrefixKey&) override {
    return Refused();
  }
  Result<int> Fork(int, int) override { return Refused(); }
  Result<PagedAppend> Append(int, int, const TensorView&,
                             const TensorView&) override {
    return Refused();
  }
  Status Commit(int, int) override { return Refused(); }
  Status Commit(int, std::span<const std::int32_t>) override {
    return Refused();
  }
  Status Truncate(int, int) override { return Refused(); }
  Status Free(int) override { return Refused(); }

 private:
  static Status Refused() {
    return {StatusCode::kNotSupported, "a group changes with its pool only"};
  }
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_FORWARDING_POOL_H_
