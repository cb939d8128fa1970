// The optimized twin of every cache that keeps tokens by position: causal,
// sliding window, chunked.

#ifndef KVTWIN_OPTIMIZED_CAUSAL_H_
#define KVTWIN_OPTIMIZED_CAUSAL_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "core/guarded_cache.h"
#include "optimized/cache_memory.h"
#include "optimized/cell_table.h"
#include "optimized/mask.h"

namespace kvtwin::optimized {

class CausalCache : public GuardedCache {
 public:
  CausalCache(const CacheSpec& spec, std::unique_ptr<CacheMemory> memory);

  void ListCells(std::vector<CellEntry>& out) const override;

 protected:
  // INT32_MAX means unbounded.
  struct Reach {
    std::int64_t window = 0;
    std::int64_t memory = 0;
  };

  static std::int64_t RoundUp(std::int64_t value, std::int64_t step) {
    return (value + step - 1) / step * step;
  }

  // Its cell is used, and no sequence holds it.
  struct Draft {
    std::int32_t cell = 0;
    int parent = kCommitted;
  };

  // The changes that a prepared Remove is going to make.
  struct Removal {
    int seq = 0;
    std::int32_t begin = 0;
    std::int32_t end = 0;
    Selection leaving;
    Selection later;  // Cells that move down; none if `end` is open.
  };

  Result<std::int64_t> DoCheckInit(const InitArgs& args) override;
  void DoInit() override;
  void DoClose() override;
  Status DoStartForward(const Batch& batch, bool reserve) override;
  void DoGiveBack() override;
  void DoBuildMask() override;
  void DoPut(const TensorView& key, const TensorView& value) override;
  void DoStoreRows(int layer, std::span<const int> cells, const TensorView& key,
                   const TensorView& value) override;
  KvView DoAllRows(int layer) const override;
  void DoAddEntry(const CellEntry& entry) override;
  KvView DoGet() override;
  void DoCopyPrefix(int src, int dst, std::int32_t len) override;
  bool DoCanResume(int seq, std::int32_t pos) const override;
  std::int32_t DoResumeBefore(int seq, std::int32_t pos) const override;
  std::int64_t DoWindow() const override { return reach_.window; }
  std::int64_t DoLastPosition(int seq) const override;
  void DoCommit(int seq, std::span<const int> path) override;
  Status DoPrepareRemove(int seq, std::int32_t begin,
                         std::int32_t end) override;
  void DoCommitRemove(int seq, std::int32_t begin, std::int32_t end) override;

  Reach ReachOf(const InitArgs& args) const;
  bool bounded_memory() const;

  void NeedLayer(int layer, const TensorView& key, const TensorView& value);
  // The number of cells of a sequence that are kept in order, 0 if none are.
  virtual std::size_t MaxOrdered() const;
  void MarkBatch();
  void Evict();
  // Adds `count` free cells to `out`; false if there are not enough.
  bool FindCells(std::size_t count, std::vector<int>& out);
  bool FindScatteredCells(std::size_t count, std::vector<int>& out);
  Status BuildMask(std::span<const int> cells);
  void Defrag();
  CellSpan FindView() const;
  PosRange VisibleTo(const BatchToken& token) const;

  const std::vector<Draft>* DraftsOf(int seq) const;
  std::int32_t LowOf(const BatchToken& token) const;
  void StoreDraft(const BatchToken& token, std::size_t cell);
  void GiveBackDraft(const BatchToken& token);
  void ShowDrafts();
  void MoveDrafts();

  Status CheckLater(const Sequence& sequence) const;
  Status ShiftCustomRows();
  void ShiftKeys();
  void DropAll(Sequence& sequence);

  const CacheSpec spec_;
  std::unique_ptr<CacheMemory> memory_;
  Reach reach_;
  std::unique_ptr<CellTable> table_;          // Exists from Init to Close.
  std::map<int, std::vector<Draft>> drafts_;  // By sequence; none is empty.

  // The current pass.
  CellSpan view_;
  std::uint64_t batch_number_ = 0;
  std::vector<Sequence*> batch_sequences_;  // Stored sequences, each once.

  Removal removal_;
  std::vector<std::vector<float>> custom_rows_;  // By layer, then later cell.

  // Scratch.
  Selection selection_;
  std::vector<CellMove> moves_;
  std::vector<RowRule> rules_;
  std::vector<std::int32_t> ancestors_;  // RowRule::more of all rows.
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_CAUSAL_H_
