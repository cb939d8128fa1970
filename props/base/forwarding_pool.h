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

namespace kvtwin::props {

class ForwardingPool : public PagedPool {
 public:
  explicit ForwardingPool(std::unique_ptr<PagedPool> pool)
      : pool_(std::move(pool)) {}

  const PagedSpec& spec() const override { return pool_->spec(); }
  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override {
    return pool_->Open(prompt, key);
  }
  Result<int> Find(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) const override {
    return pool_->Find(prompt, key);
  }
  Status AddMedia(int sequence, const PrefixMedia& media) override {
    return pool_->AddMedia(sequence, media);
  }
  Result<int> Fork(int sequence, int len) override {
    return pool_->Fork(sequence, len);
  }
  Result<int> ResumeBefore(int sequence, int len) const override {
    return pool_->ResumeBefore(sequence, len);
  }
  Result<int> SeqLen(int sequence) const override {
    return pool_->SeqLen(sequence);
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
  Result<std::vector<PagedView>> Views(int sequence, int layer) const override {
    return pool_->Views(sequence, layer);
  }
  Result<std::vector<PagedView>> ViewsPacked(int sequence,
                                             int layer) const override {
    return pool_->ViewsPacked(sequence, layer);
  }
  Result<std::optional<PagedKv>> ContiguousKV(int sequence, int layer,
                                              int kv_len) const override {
    return pool_->ContiguousKV(sequence, layer, kv_len);
  }
  Status Truncate(int sequence, int len) override {
    return pool_->Truncate(sequence, len);
  }
  Status Free(int sequence) override { return pool_->Free(sequence); }
  Result<Device> LayerDevice(int layer) const override {
    return pool_->LayerDevice(layer);
  }
  PagedUsage Usage() const override { return pool_->Usage(); }
  // A pool without groups is its own group 0: its calls stay forwarded.
  const PagedPool* Group(int group) const override {
    return pool_->spec().groups.empty() ? PagedPool::Group(group)
                                        : pool_->Group(group);
  }
  Result<PagedCsr> ExportCsr(std::span<const int> sequences) const override {
    return pool_->ExportCsr(sequences);
  }
  Result<PagedTable> ExportTable(
      std::span<const int> sequences) const override {
    return pool_->ExportTable(sequences);
  }
  Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                int end) const override {
    return pool_->SlotMapping(sequence, begin, end);
  }
  Result<PagedKv> Blocks(int layer) const override {
    return pool_->Blocks(layer);
  }

 protected:
  std::unique_ptr<PagedPool> pool_;
};

// Forwards reading calls to a group of a pool with groups; a group changes only
// with its pool.
class ForwardingGroup : public PagedPool {
 public:
  // Requires: `group` outlives the ForwardingGroup.
  explicit ForwardingGroup(const PagedPool& group) : group_(group) {}

  const PagedSpec& spec() const override { return group_.spec(); }
  Result<int> Open(std::span<const std::int32_t>, const PrefixKey&) override {
    return Refused();
  }
  Result<int> Fork(int, int) override { return Refused(); }
  Result<int> SeqLen(int sequence) const override {
    return group_.SeqLen(sequence);
  }
  Result<PagedAppend> Append(int, int, const TensorView&,
                             const TensorView&) override {
    return Refused();
  }
  Status Commit(int, int) override { return Refused(); }
  Status Commit(int, std::span<const std::int32_t>) override {
    return Refused();
  }
  Result<std::vector<PagedView>> Views(int sequence, int layer) const override {
    return group_.Views(sequence, layer);
  }
  Result<std::vector<PagedView>> ViewsPacked(int sequence,
                                             int layer) const override {
    return group_.ViewsPacked(sequence, layer);
  }
  Result<std::optional<PagedKv>> ContiguousKV(int sequence, int layer,
                                              int kv_len) const override {
    return group_.ContiguousKV(sequence, layer, kv_len);
  }
  Status Truncate(int, int) override { return Refused(); }
  Status Free(int) override { return Refused(); }
  Result<Device> LayerDevice(int layer) const override {
    return group_.LayerDevice(layer);
  }
  PagedUsage Usage() const override { return group_.Usage(); }
  Result<PagedCsr> ExportCsr(std::span<const int> sequences) const override {
    return group_.ExportCsr(sequences);
  }
  Result<PagedTable> ExportTable(
      std::span<const int> sequences) const override {
    return group_.ExportTable(sequences);
  }
  Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                int end) const override {
    return group_.SlotMapping(sequence, begin, end);
  }
  Result<PagedKv> Blocks(int layer) const override {
    return group_.Blocks(layer);
  }

 protected:
  static Status Refused() {
    return {StatusCode::kNotSupported, "a group changes with its pool only"};
  }

  const PagedPool& group_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_FORWARDING_POOL_H_
