// A pool that holds nothing: it checks for misuse, as every pool does, and
// returns the answers of a recording.

#ifndef KVTWIN_PROPS_ORACLE_RECORDED_POOL_H_
#define KVTWIN_PROPS_ORACLE_RECORDED_POOL_H_

#include <cstdint>
#include <span>

#include "core/guarded_paged.h"

namespace kvtwin::props {

struct RecordedAnswers {
  int made = 0;  // The new sequence.
  int len = 0;   // The length of its prefix.
  bool full = false;
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

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ORACLE_RECORDED_POOL_H_
