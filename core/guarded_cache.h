// The gate that every call passes before a twin sees it: arguments, order of
// calls, shapes. What the calls mean is the twins' business; this only makes
// sure that they are never asked nonsense, and says so in one voice.

#ifndef KVTWIN_CORE_GUARDED_CACHE_H_
#define KVTWIN_CORE_GUARDED_CACHE_H_

#include <map>
#include <memory>
#include <vector>

#include "kvtwin/cache.h"

namespace kvtwin {

struct InitArgs {
  DType dtype = DType::kF32;
  int max_sequences = 0;
  int capacity = 0;
  int max_batch = 0;
};

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
  bool excepted = false;  // By SetCausal: sees tokens after it.
};

// The base of every cache but wrappers.
class GuardedCache : public Cache {
 public:
  Status SetConfig(const CacheConfig& config) final;
  Status Init(DType dtype, int max_sequences, int capacity,
              int max_batch) final;
  void Close() final;
  Status SetLayer(int layer) final;
  Status StartForward(const Batch& batch, bool reserve) final;
  Status SetCausal(std::span<const int> except) final;
  Status Put(const TensorView& key, const TensorView& value) final;
  Result<KvView> Get() final;
  Status CopyPrefix(int src, int dst, std::int32_t len) final;
  Result<bool> CanResume(int seq, std::int32_t pos) final;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) final;
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
  // failed_precondition before Init and after Close.
  Status CheckReady() const;
  // While one of the two removes, calls to both are refused.
  void BusyWith(const GuardedCache& other) { busy_ = other.busy_; }
  // What these would answer, without doing it.
  Status CheckConfig(const CacheConfig& config) const;
  Status CheckInit(const InitArgs& args);
  Status CheckBatch(const Batch& batch) const;
  Status CheckCopyPrefix(int src, int dst, std::int32_t len) const;
  Status CheckRestore(const CacheState& state) const;
  Status CheckAddSequence(int sequence, const CacheState& added) const;
  // Remove in two steps: PrepareRemove answers and changes nothing, and if it
  // says ok, CommitRemove with the same arguments does it.
  Status PrepareRemove(int seq, std::int32_t begin, std::int32_t end);
  void CommitRemove(int seq, std::int32_t begin, std::int32_t end) {
    DoCommitRemove(seq, begin, end);
  }
  // Ends the pass, if there is one, and takes back what its StartForward
  // stored. What was evicted or moved to make room stays so.
  void GiveBack();
  void EndPass() { active_ = false; }

 protected:
  // The twin's part. Called after Init, outside of any misuse. An encoder is
  // never asked for what it does not support.
  //
  // Works out what DoInit will make, of which nothing shows yet: how many
  // cells.
  virtual Result<std::int64_t> DoCheckInit(const InitArgs& args) = 0;
  // CellCount() free cells, and no layers. Restore calls it again.
  virtual void DoInit() {}
  virtual void DoClose() = 0;
  virtual Status DoStartForward(const Batch& batch, bool reserve) = 0;
  virtual void DoGiveBack() = 0;
  // The batch's excepted tokens are others now.
  virtual void DoBuildMask() {}
  // Of the current layer.
  virtual void DoPut(const TensorView& key, const TensorView& value);
  // Of the current layer, into which something was put.
  virtual KvView DoGet() = 0;
  virtual void DoCopyPrefix(int, int, std::int32_t) {}
  virtual bool DoCanResume(int, std::int32_t) const { return true; }
  virtual Status DoPrepareRemove(int, std::int32_t, std::int32_t) { return {}; }
  virtual void DoCommitRemove(int seq, std::int32_t begin,
                              std::int32_t end) = 0;

  // Of caches with cells only.
  //
  // Row i of the tensors goes to cells[i] of the layer, which is made if there
  // is none, even if there are no cells.
  virtual void DoStoreRows(int, std::span<const int>, const TensorView&,
                           const TensorView&) {}
  // K and V of all cells, of a layer that was made.
  virtual KvView DoAllRows(int) const { return {}; }
  // One membership more; a cell that is held already is held at its position.
  virtual void DoHold(const CellEntry&) {}

  // Of an encoder only: a cache of rows without positions, in slots of any
  // shape. It has no cells and no mask. DoLoadSlots replaces all that it holds.
  virtual bool IsEncoder() const { return false; }
  virtual bool DoEncoderCached() const { return false; }
  virtual void DoSaveSlots(CacheState&) const {}
  virtual void DoLoadSlots(const CacheState&) {}

  const CacheConfig& config() const { return config_; }
  // Of the current pass: its tokens, the cells that DoStartForward found for
  // them, and whether it only reserves.
  const std::vector<BatchToken>& batch() const { return batch_; }
  std::vector<int>& batch_cells() { return batch_cells_; }
  bool reserving() const { return reserving_; }
  int layer() const { return layer_; }
  const InitArgs& init_args() const { return init_; }
  // By layer, if anything was ever put there. An encoder's mean nothing.
  const std::map<int, RowDims>& layer_dims() const { return rows_; }
  DType k_dtype() const { return init_.dtype; }
  DType v_dtype() const { return config_.v_dtype.value_or(init_.dtype); }

 private:
  enum class Life { kNew, kReady, kClosed };

  Status CheckPass() const;
  Status CheckRows(const TensorView& key, const TensorView& value) const;
  Status CheckDims(int layer, const RowDims& dims) const;
  Status CheckEncoderRows(const TensorView& value) const;
  void SaveLayers(CacheState& state) const;
  Status CheckLayer(int layer, const KvRows& rows, std::int64_t held) const;
  Status CheckDTypes(const TensorView& key, const TensorView& value) const;

  Life life_ = Life::kNew;
  // A shift function of the caller's may run.
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
};

}  // namespace kvtwin

#endif  // KVTWIN_CORE_GUARDED_CACHE_H_
