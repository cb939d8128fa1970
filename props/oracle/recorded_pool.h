// A pool that holds nothing: it checks for misuse, as every pool does, and
// returns the answers of a recording.

#ifndef KVTWIN_PROPS_ORACLE_RECORDED_POOL_H_
#define KVTWIN_PROPS_ORACLE_RECORDED_POOL_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "core/grouped_pool.h"
#include "core/guarded_paged.h"

namespace kvtwin::props {

struct RecordedAnswers {
  int made = 0;  // The new sequence.
  int len = 0;   // The length of its prefix.
  bool full = false;
  std::optional<int> kept = {};  // The length after a fork or truncate.

  int KeptOf(int len) const { return std::min(len, kept.value_or(len)); }
};

class RecordedPool final : public GuardedPaged {
 public:
  // Requires: `answers` outlive the pool.
  RecordedPool(const PagedSpec& spec, const RecordedAnswers* answers)
      : GuardedPaged(spec), answers_(answers) {}

  PagedUsage Usage() const override { return {}; }

 private:
  int NextSequence() const override { return answers_->made; }
  int DoOpen(int, std::span<const std::int32_t>, const PrefixKey&) override {
    return answers_->len;
  }
  int DoResumeBefore(int, int, int len) const override {
    return answers_->KeptOf(len);
  }
  void DoFork(int, int, int) override {}
  bool DoReserve(int, int, int) override { return !answers_->full; }
  void DoStore(int, int, int, const TensorView&, const TensorView&) override {}
  int DoFind(std::span<const std::int32_t>, const PrefixKey&) const override {
    return 0;
  }
  void DoAddMedia(int, const PrefixMedia&) override {}
  void DoCommit(int, int, int, std::span<const std::int32_t>) override {}
  void DoTruncate(int, int, int) override {}
  void DoFree(int) override {}
  std::span<const int> DoBlocks(int) const override { return {}; }
  PagedKv DoRows(int, std::int64_t, int) const override { return {}; }
  PagedKv DoAllRows(int) const override { return {}; }

  const RecordedAnswers* answers_;
};

// A recorded pool with groups.
class RecordedGroups final : public GroupedPool {
 public:
  // Requires: `answers` outlive the pool.
  RecordedGroups(const PagedSpec& spec, const RecordedAnswers* answers)
      : GroupedPool(spec, PoolsOf(spec, answers)), answers_(answers) {}

 private:
  static Groups PoolsOf(const PagedSpec& spec, const RecordedAnswers* answers) {
    Groups pools;
    for (const PagedSpec& group : Completed(spec).groups) {
      pools.push_back(std::make_unique<RecordedPool>(group, answers));
    }
    return pools;
  }
  int DoFind(std::span<const std::int32_t>, const PrefixKey&) const override {
    return answers_->len;
  }
  int DoResumeBefore(int, int len) const override {
    return answers_->KeptOf(len);
  }

  const RecordedAnswers* answers_;
};

inline std::unique_ptr<PagedPool> MakeRecordedPool(
    const PagedSpec& spec, const RecordedAnswers* answers) {
  if (!spec.groups.empty()) {
    return std::make_unique<RecordedGroups>(spec, answers);
  }
  return std::make_unique<RecordedPool>(spec, answers);
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ORACLE_RECORDED_POOL_H_
