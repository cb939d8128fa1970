// A pool that records the calls it gets and its answers (docs/trace_format.md).

#ifndef KVTWIN_PROPS_PAGED_POOL_RECORDER_H_
#define KVTWIN_PROPS_PAGED_POOL_RECORDER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/trace/paged_trace.h"
#include "kvtwin/paged.h"
#include "props/base/forwarding_pool.h"

namespace kvtwin::props {

// Wraps a pool. It does not record refused misuse, because recordings have
// none, or ViewsPacked and ContiguousKV, whose rows are those of Views.
class PoolRecorder final : public ForwardingPool, public PoolAttending {
 public:
  // Gets each call after its answer. Its tensors are f32.
  using Take = std::function<void(PagedTraceOp op)>;
  PoolRecorder(std::unique_ptr<PagedPool> pool, Take take);

  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override;
  Result<int> Fork(int sequence, int len) override;
  Result<int> SeqLen(int sequence) const override;
  Result<PagedAppend> Append(int sequence, int layer, const TensorView& key,
                             const TensorView& value) override;
  Status Commit(int sequence, int new_tokens) override;
  Status Commit(int sequence, std::span<const std::int32_t> tokens) override;
  Result<std::vector<PagedView>> Views(int sequence, int layer) const override;
  Status Truncate(int sequence, int len) override;
  Status Free(int sequence) override;
  Status AddMedia(int sequence, const PrefixMedia& media) override;
  PagedUsage Usage() const override;
  Status AttendLast(std::span<const int> sequences,
                    std::span<const int> query_rows, int layer,
                    const TensorView& query, const AttentionOptions& options,
                    std::span<float> out) override;
  // Records the tables and slots of the group.
  const PagedPool* Group(int group) const override;
  Result<PagedCsr> ExportCsr(std::span<const int> sequences) const override;
  Result<PagedTable> ExportTable(std::span<const int> sequences) const override;
  Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                int end) const override;

 private:
  class RecordedGroup;
  Result<PagedCsr> Csr(const PagedPool& of, int group,
                       std::span<const int> sequences) const;
  Result<PagedTable> Table(const PagedPool& of, int group,
                           std::span<const int> sequences) const;
  Result<std::vector<std::int64_t>> Slots(const PagedPool& of, int group,
                                          int sequence, int begin,
                                          int end) const;
  // Returns the length of a sequence after a call that may decide it.
  Result<int> LengthAfter(const char* call, int sequence) const;
  bool has_groups() const { return !pool_->spec().groups.empty(); }

  Take take_;
  std::vector<std::unique_ptr<PagedPool>> groups_;
};

// Hashes what the pool answered to a call.
std::uint64_t HashAnswers(const PagedTraceOp& op, std::uint64_t digest);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGED_POOL_RECORDER_H_
