// The optimized twin of recurrent state (R1 to R15): a CausalCache whose cells
// hold states. A pass looks only at the states of its own sequences.

#ifndef KVTWIN_OPTIMIZED_RECURRENT_H_
#define KVTWIN_OPTIMIZED_RECURRENT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "optimized/causal.h"

namespace kvtwin::optimized {

class RecurrentCache final : public CausalCache {
 public:
  using CausalCache::CausalCache;

 private:
  // The batch tokens of one sequence: ordinary ones at positions first .. end -
  // 1, or drafts (first == end) from number first_draft on.
  struct Run {
    int sequence = 0;
    std::int64_t first = 0;
    std::int64_t end = 0;
    int first_draft = -1;
  };

  bool IsRecurrent() const override { return true; }
  bool TakesDrafts() const override { return spec_.drafts > 0; }
  bool HasPins() const override { return spec_.pins > 0; }
  Result<std::int64_t> DoCheckInit(const InitArgs& args) override;
  void DoInit() override;
  std::size_t MaxOrdered() const override {
    return AsSize(kept_ + 2 + spec_.pins);
  }
  Status DoCheckBatch(const Batch& batch) const override;
  Status DoStartForward(const Batch& batch, bool reserve) override;
  void DoGiveBack() override;
  void DoPut(const TensorView& key, const TensorView& value) override;
  bool DoCanResume(int seq, std::int32_t pos) const override;
  std::int32_t DoResumeBefore(int seq, std::int32_t pos) const override;
  Status DoPrepareRemove(int seq, std::int32_t begin,
                         std::int32_t end) override;
  void DoCommitRemove(int seq, std::int32_t begin, std::int32_t end) override;
  void DoCopyPrefix(int src, int dst, std::int32_t len) override;
  void DoCommit(int seq, std::span<const int> path) override;
  void DoCheckpoint(int seq) override;

  // The number of checkpoints of a sequence of `length` tokens, wherever they
  // are.
  std::int64_t Checkpoints(std::int64_t length) const {
    return kept_ == 0 ? 0 : length / spec_.checkpoint_every;
  }
  std::int64_t Length(int seq) const;
  void FindRuns();
  const Run& RunOf(std::size_t row) const { return At(runs_, run_of_[row]); }
  void Evict(const Run& run);
  bool IsKept(std::int64_t length, std::int64_t end) const;
  bool IsStored(std::size_t row) const;
  RowRule ReadBy(std::size_t row) const;
  void CutPins(int seq, std::int64_t len);
  bool IsPinned(int seq, std::int64_t length) const;
  CellSpan FindView() const;
  void DoBuildMask() override;

  std::int64_t kept_ = 0;  // Checkpoints of a sequence.

  // The current pass.
  std::vector<Run> runs_;    // Sorted by sequence.
  std::vector<int> run_of_;  // For each batch token, its run.
  std::vector<int> rows_;    // The batch tokens whose states are stored,
  std::vector<int> cells_;   // and their cells.

  // By sequence, the lengths of its pinned states, in order.
  std::map<int, std::vector<std::int64_t>> pins_;

  // Scratch.
  mutable std::vector<std::pair<int, int>> order_;  // Sequence, batch index.
  std::vector<std::int32_t> leaving_;
  std::vector<int> path_;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_RECURRENT_H_
