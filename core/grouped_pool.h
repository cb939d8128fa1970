// A pool with groups of layers: each group is a pool of its own, and all groups
// have the same sequences with the same lengths. A twin decides which lengths
// all groups can serve.

#ifndef KVTWIN_CORE_GROUPED_POOL_H_
#define KVTWIN_CORE_GROUPED_POOL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/guarded_paged.h"

namespace kvtwin {

class GroupedPool : public PagedPool {
 public:
  using Groups = std::vector<std::unique_ptr<GuardedPaged>>;

  // Requires: `groups` are the pools of Completed(spec).groups.
  GroupedPool(const PagedSpec& spec, Groups groups);

  const PagedSpec& spec() const final { return spec_; }
  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) final;
  Result<int> Find(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) const final;
  Status AddMedia(int sequence, const PrefixMedia& media) final;
  Result<int> Fork(int sequence, int len) final;
  Result<int> SeqLen(int sequence) const final;
  Result<PagedAppend> Append(int sequence, int layer, const TensorView& key,
                             const TensorView& value) final;
  Status Commit(int sequence, int new_tokens) final;
  Status Commit(int sequence, std::span<const std::int32_t> tokens) final;
  Result<std::vector<PagedView>> Views(int sequence, int layer) const final;
  Result<std::vector<PagedView>> ViewsPacked(int sequence,
                                             int layer) const final;
  Result<std::optional<PagedKv>> ContiguousKV(int sequence, int layer,
                                              int kv_len) const final;
  Result<int> ResumeBefore(int sequence, int len) const final;
  Status Truncate(int sequence, int len) final;
  Status Free(int sequence) final;
  Result<Device> LayerDevice(int layer) const final;
  PagedUsage Usage() const final;
  const PagedPool* Group(int group) const final;
  Result<PagedCsr> ExportCsr(std::span<const int> sequences) const final;
  Result<PagedTable> ExportTable(std::span<const int> sequences) const final;
  Result<PagedTable> ExportLayerTable(std::span<const int> sequences,
                                      int layer) const final;
  Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                int end) const final;
  Result<PagedKv> Blocks(int layer) const final;

 protected:
  // Return the greatest length that all groups can serve (P15, P16). The
  // arguments are valid.
  virtual int DoFind(std::span<const std::int32_t> prompt,
                     const PrefixKey& key) const = 0;
  virtual int DoResumeBefore(int sequence, int len) const = 0;

  const Groups& groups() const { return groups_; }

 private:
  // A group, and the number of a layer there.
  struct Place {
    GuardedPaged* group = nullptr;
    int layer = 0;
  };
  Result<Place> Find(int layer) const;
  // The same for a layer of a sequence.
  Result<Place> Find(int sequence, int layer) const;
  Status CheckCommit(int sequence, std::int64_t new_tokens) const;

  PagedSpec spec_;
  Groups groups_;
};

}  // namespace kvtwin

#endif  // KVTWIN_CORE_GROUPED_POOL_H_
