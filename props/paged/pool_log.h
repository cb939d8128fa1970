// The calls that a pool and its groups get, as reports list them: each call
// that changes the pool, and the last call. A log reads no rows, so that a pool
// may return anything.

#ifndef KVTWIN_PROPS_PAGED_POOL_LOG_H_
#define KVTWIN_PROPS_PAGED_POOL_LOG_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/trace/paged_trace.h"
#include "props/base/forwarding_pool.h"
#include "props/base/optional_calls.h"
#include "props/compare/step.h"

namespace kvtwin::props {

class PoolCalls {
 public:
  // Gets the text of each call, with its index in the list, before the call is
  // made, and again with its answer.
  using Told = std::function<void(std::size_t index, const std::string& text)>;
  explicit PoolCalls(Told told = nullptr) : told_(std::move(told)) {}

  // Returns the list. A call that did not return has no answer in it.
  std::vector<Step> Steps() const;
  // Returns the last call as a recording has it, which has the length of a new
  // sequence as a part of `open`; returns nothing before the first call.
  std::optional<PagedTraceOpKind> LastCall() const;
  // Returns the last call that may change the pool, even if it was refused;
  // returns nothing before the first call.
  std::optional<PagedTraceOpKind> LastChange() const;

 private:
  friend class PoolLog;

  struct Change {
    PagedTraceOp op;
    std::optional<StatusCode> answer;
    bool has_len = false;  // SeqLen was asked for the length that it made.
  };
  struct Read {
    std::string_view name;
    PagedTraceOpKind kind;  // The line of a recording that has the answer.
    std::optional<int> sequence = {};
    std::optional<int> layer = {};
    std::optional<int> group = {};
    std::string more = {};  // The rest of the call's text.
    std::optional<StatusCode> answer = {};
  };

  static std::string TextOf(const Change& change);
  static std::string TextOf(const Read& read);
  void Begin(PagedTraceOp op);
  void End(const Status& status);
  void Begin(const Read& read);
  // Notes a call of SeqLen. Returns the change that made this length, if it is
  // asked for the first time; a recording has it as a part of that change.
  Change* BeginSeqLen(int sequence, bool has_groups);
  // Notes the answer of the last read.
  template <class T>
  Result<T> Said(Result<T> answer) {
    read_->answer = answer.status().code();
    if (told_ && !answer.ok()) told_(changes_.size(), TextOf(*read_));
    return answer;
  }
  Status Said(Status answer) {
    read_->answer = answer.code();
    if (told_ && !answer.ok()) told_(changes_.size(), TextOf(*read_));
    return answer;
  }
  void TellChange() const;

  Told told_;
  std::vector<Change> changes_;
  std::optional<Read> read_;  // If no change came after it.
};

// Notes the calls to a pool.
class PoolLog final : public ForwardingPool, public PoolAttending {
 public:
  // Clears `calls`, which must outlive the log.
  PoolLog(std::unique_ptr<PagedPool> pool, PoolCalls& calls);
  ~PoolLog() override;

  Result<int> Open(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) override;
  Result<int> Fork(int sequence, int len) override;
  Result<int> Find(std::span<const std::int32_t> prompt,
                   const PrefixKey& key) const override;
  Result<int> ResumeBefore(int sequence, int len) const override;
  Result<int> SeqLen(int sequence) const override;
  Result<PagedAppend> Append(int sequence, int layer, const TensorView& key,
                             const TensorView& value) override;
  Status Commit(int sequence, int new_tokens) override;
  Status Commit(int sequence, std::span<const std::int32_t> tokens) override;
  Result<std::vector<PagedView>> Views(int sequence, int layer) const override;
  Result<std::vector<PagedView>> ViewsPacked(int sequence,
                                             int layer) const override;
  Result<std::optional<PagedKv>> ContiguousKV(int sequence, int layer,
                                              int kv_len) const override;
  Status Truncate(int sequence, int len) override;
  Status Free(int sequence) override;
  Status AddMedia(int sequence, const PrefixMedia& media) override;
  PagedUsage Usage() const override;
  Result<PagedCsr> ExportCsr(std::span<const int> sequences) const override;
  Result<PagedTable> ExportTable(std::span<const int> sequences) const override;
  Result<PagedTable> ExportLayerTable(std::span<const int> sequences,
                                      int layer) const override;
  Result<std::vector<std::int64_t>> SlotMapping(int sequence, int begin,
                                                int end) const override;
  Result<PagedKv> Blocks(int layer) const override;
  // Errors: not_supported if the pool computes no attention.
  Status AttendLast(std::span<const int> sequences,
                    std::span<const int> query_rows, int layer,
                    const TensorView& query, const AttentionOptions& options,
                    std::span<float> out) override;
  const PagedPool* Group(int group) const override;

 private:
  class LoggedGroup;

  PoolCalls& calls_;
  std::vector<std::unique_ptr<LoggedGroup>> groups_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGED_POOL_LOG_H_
