// The gate that checks every call before a twin gets it: arguments, order of
// calls, shapes. The twins define what the calls do; the gate makes sure that
// they get valid calls only, and that all twins return the same errors.

#ifndef KVTWIN_CORE_GUARDED_CACHE_H_
#define KVTWIN_CORE_GUARDED_CACHE_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/draft_book.h"
#include "kvtwin/cache.h"

namespace kvtwin {

// The dimensions of a layer's rows, fixed by its first Put.
struct RowDims {
  int k_head_dim = 0;
  int kv_heads = 0;
  int v_head_dim = 0;
  bool operator==(const RowDims&) const = default;
};

struct BatchToken {
  std::int32_t position = 0;
  int sequence = 0;
  bool excepted = false;  // By SetCausal: sees later positions too.
  // Its number among the drafts of its sequence, and its parent; -1 and
  // kNotADraft for an ordinary token, and in a reserving pass.
  int draft = -1;
  int parent = kNotADraft;
};

// The base of every cache except wrappers.
class GuardedCache : public Cache {
 public:
  Status SetConfig(const CacheConfig& config) final;
  Status Init(const InitArgs& args) final;
  void Close() final;
  Status SetLayer(int layer) final;
  Status StartForward(const Batch& batch, bool reserve) final;
  Status SetCausal(std::span<const int> except) final;
  Status Put(const TensorView& key, const TensorView& value) final;
  Result<KvView> Get() final;
  Status CopyPrefix(int src, int dst, std::int32_t len) final;
  Result<bool> CanResume(int seq, std::int32_t pos) final;
  Result<std::string> WhyNotResume(int seq, std::int32_t pos) final;
  Result<std::int32_t> ResumeBefore(int seq, std::int32_t pos) final;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) final;
  Status Commit(int seq, std::span<const int> path) final;
  Status Checkpoint(int seq) final;
  Status SetLayerType(int type) final;
  Cache* UnderlyingCache() final { return this; }
  Result<bool> EncoderCached() final;
  Status SnapshotTo(CacheState& state) const final;
  Status Restore(const CacheState& state) final;
  Result<CacheState> SnapshotOf(int sequence) const final;
  Status AddSequence(int sequence, const CacheState& added) final;
  int CellCount() const final;
  std::span<const int> BatchCells() const final;
  void ListCells(std::vector<CellEntry>& out) const override { out.clear(); }

  // For wrappers, which change all of their caches or none.
  //
  // Errors: failed_precondition before Init and after Close.
  Status CheckReady() const;
  // Makes each of the two caches refuse calls while the other one removes.
  void BusyWith(const GuardedCache& other) { busy_ = other.busy_; }
  // These return what the call without "Check" would, and change nothing.
  Status CheckInit(const InitArgs& args);
  Status CheckBatch(const Batch& batch, bool reserve) const;
  Status CheckTakesDrafts() const;
  Status CheckCopyPrefix(int src, int dst, std::int32_t len) const;
  Status CheckCommit(int seq, std::span<const int> path) const;
  Status CheckRestore(const CacheState& state) const;
  Status CheckAddSequence(int sequence, const CacheState& added) const;
  // The rest of StartForward after CheckBatch, EndPass and, for a batch with
  // drafts, CheckTakesDrafts.
  Status StartChecked(const Batch& batch, bool reserve);
  // Remove in two steps: PrepareRemove returns the status and changes nothing;
  // if it is ok, CommitRemove with the same arguments removes.
  Status PrepareRemove(int seq, std::int32_t begin, std::int32_t end);
  void CommitRemove(int seq, std::int32_t begin, std::int32_t end);
  // Ends the pass, if there is one, and removes the tokens that its
  // StartForward stored. Evictions and moves that made room are not undone.
  void GiveBack();
  void EndPass() { active_ = false; }

 protected:
  // The twin's part. Called after Init and with valid arguments only. The gate
  // never calls an encoder for what it does not support.
  //
  // Checks `args` and returns the number of cells that DoInit will make. Has no
  // visible effect.
  virtual Result<std::int64_t> DoCheckInit(const InitArgs& args) = 0;
  // Makes CellCount() free cells and no layers. Restore calls it again.
  virtual void DoInit() {}
  virtual void DoClose() = 0;
  // Refuses a valid batch because of its positions (R3). Not called for a batch
  // that only reserves.
  virtual Status DoCheckBatch(const Batch&) const { return {}; }
  virtual Status DoStartForward(const Batch& batch, bool reserve) = 0;
  virtual void DoGiveBack() = 0;
  // Builds the mask again, after SetCausal changed the excepted tokens.
  virtual void DoBuildMask() {}
  // Stores the batch's rows in the current layer.
  virtual void DoPut(const TensorView& key, const TensorView& value);
  // Returns the views of the current layer, which has had a Put.
  virtual KvView DoGet() = 0;
  virtual void DoCopyPrefix(int, int, std::int32_t) {}
  virtual bool DoCanResume(int, std::int32_t) const { return true; }
  // Called if DoCanResume is false. The default tries the end of the tokens
  // before `pos`.
  virtual std::int32_t DoResumeBefore(int seq, std::int32_t pos) const;
  // The window of a cache that can refuse to resume.
  virtual std::int64_t DoWindow() const { return 0; }
  virtual Status DoPrepareRemove(int, std::int32_t, std::int32_t) { return {}; }
  virtual void DoCommitRemove(int seq, std::int32_t begin,
                              std::int32_t end) = 0;

  // The next five are called for caches with cells only.
  //
  // Stores row i of the tensors in cells[i] of the layer, which is made if it
  // does not exist, even if `cells` is empty.
  virtual void DoStoreRows(int, std::span<const int>, const TensorView&,
                           const TensorView&) {}
  // Returns K and V of all cells of a layer that exists.
  virtual KvView DoAllRows(int) const { return {}; }
  // Adds one membership. If the cell is in use, the position is the same.
  virtual void DoAddEntry(const CellEntry&) {}
  // The highest position of the sequence's tokens, without drafts; -1 if there
  // are none.
  virtual std::int64_t DoLastPosition(int) const { return -1; }
  // The drafts in `path` become tokens of the sequence, its others are gone.
  virtual void DoCommit(int, std::span<const int>) {}
  // Pins the last state of a sequence, if it has one.
  virtual void DoCheckpoint(int) {}

  // Whether each cell holds a state: there is no SetCausal, and a sequence has
  // one cell at most for a position.
  virtual bool IsRecurrent() const { return false; }

  // Whether tokens of a batch may be drafts (D8, R11).
  virtual bool TakesDrafts() const { return !IsEncoder(); }
  // Whether states can be pinned (R14).
  virtual bool HasPins() const { return false; }

  // The next four are called for encoders only: caches of rows without
  // positions, in slots of any shape, without cells and mask. DoLoadSlots
  // replaces everything that the encoder holds.
  virtual bool IsEncoder() const { return false; }
  virtual bool DoEncoderCached() const { return false; }
  virtual void DoSaveSlots(CacheState&) const {}
  virtual void DoLoadSlots(const CacheState&) {}

  const CacheConfig& config() const { return config_; }
  // The tokens of the current pass, the cells that DoStartForward found for
  // them, and whether the pass only reserves.
  const std::vector<BatchToken>& batch() const { return batch_; }
  std::vector<int>& batch_cells() { return batch_cells_; }
  bool reserving() const { return reserving_; }
  int layer() const { return layer_; }
  const InitArgs& init_args() const { return init_; }
  // The dimensions of each layer that had a Put. For an encoder, only the layer
  // numbers have a meaning.
  const std::map<int, RowDims>& layer_dims() const { return rows_; }
  DType k_dtype() const { return init_.dtype; }
  DType v_dtype() const { return config_.v_dtype.value_or(init_.dtype); }

 private:
  enum class Life { kNew, kReady, kClosed };

  Status CheckConfig(const CacheConfig& config) const;
  Status CheckPass() const;
  Status CheckDrafts(const Batch& batch) const;
  // The drafts in `path` become tokens, the other drafts are dropped (D5, D6).
  void KeepDrafts(int seq, std::span<const int> path);
  void DropAllDrafts();
  void ListCommitted(std::vector<CellEntry>& out) const;
  Status CheckRows(const TensorView& key, const TensorView& value) const;
  Status CheckDims(int layer, const RowDims& dims) const;
  Status CheckEncoderRows(const TensorView& value) const;
  void SaveLayers(CacheState& state) const;
  Status CheckLayer(int layer, const KvRows& rows, std::int64_t held) const;
  Status CheckDTypes(const TensorView& key, const TensorView& value) const;
  std::string WhyNoState(int seq, std::int32_t pos) const;

  Life life_ = Life::kNew;
  // True while the caller's shift function may run.
  std::shared_ptr<bool> busy_ = std::make_shared<bool>(false);
  bool configured_ = false;
  CacheConfig config_;
  InitArgs init_;
  std::int64_t cells_ = 0;
  int layer_ = 0;
  bool active_ = false;  // There is a pass.
  bool reserving_ = false;
  std::vector<BatchToken> batch_;
  std::vector<int> batch_cells_;
  std::map<int, RowDims> rows_;
  DraftBook drafts_;
};

}  // namespace kvtwin

#endif  // KVTWIN_CORE_GUARDED_CACHE_H_
