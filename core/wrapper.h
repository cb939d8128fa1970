// Several caches behind one interface. The wrapper has no cells and decides
// nothing itself: calls go to the active cache, or to all caches or none.

#ifndef KVTWIN_CORE_WRAPPER_H_
#define KVTWIN_CORE_WRAPPER_H_

#include <functional>
#include <memory>
#include <vector>

#include "core/assert.h"
#include "core/guarded_cache.h"

namespace kvtwin {

// Makes a cache that is not a wrapper.
using MakeOne = std::function<std::unique_ptr<GuardedCache>(const CacheSpec&)>;

// Makes the cache of `spec`, a wrapper or not, from caches that `make_one`
// makes.
std::unique_ptr<Cache> MakeWrapped(const CacheSpec& spec,
                                   const MakeOne& make_one);

class WrapperCache final : public Cache {
 public:
  // Requires: at least one cache.
  // `one_length`: it is a hybrid (H1).
  explicit WrapperCache(std::vector<std::unique_ptr<GuardedCache>> caches,
                        bool one_length = false)
      : caches_(std::move(caches)), one_length_(one_length) {
    KVTWIN_ASSERT(!caches_.empty());
    for (const auto& cache : caches_) cache->BusyWith(*caches_[0]);
  }

  // These calls change all caches or none. But if one cache is full, evictions
  // and moves of StartForward are not undone.
  Status SetConfig(const CacheConfig& config) override;
  Status Init(const InitArgs& args) override;
  void Close() override;
  Status SetLayer(int layer) override;
  Status StartForward(const Batch& batch, bool reserve) override;
  Status CopyPrefix(int src, int dst, std::int32_t len) override;
  Result<bool> CanResume(int seq, std::int32_t pos) override;
  Result<std::string> WhyNotResume(int seq, std::int32_t pos) override;
  Result<std::int32_t> ResumeBefore(int seq, std::int32_t pos) override;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override;
  Status Commit(int seq, std::span<const int> path) override;
  Status Checkpoint(int seq) override;
  Status SnapshotTo(CacheState& state) const override;
  Status Restore(const CacheState& state) override;
  Result<CacheState> SnapshotOf(int sequence) const override;
  Status AddSequence(int sequence, const CacheState& added) override;

  Status SetLayerType(int type) override;

  // These calls go to the active cache.
  Status SetCausal(std::span<const int> except) override;
  Status Put(const TensorView& key, const TensorView& value) override;
  Result<KvView> Get() override { return active().Get(); }
  Cache* UnderlyingCache() override { return &active(); }
  Result<bool> EncoderCached() override { return active().EncoderCached(); }
  int CellCount() const override { return active().CellCount(); }
  std::span<const int> BatchCells() const override {
    return active().BatchCells();
  }
  void ListCells(std::vector<CellEntry>& out) const override {
    active().ListCells(out);
  }

 private:
  GuardedCache& active() const { return *caches_[active_]; }

  std::vector<std::unique_ptr<GuardedCache>> caches_;
  const bool one_length_;
  std::size_t active_ = 0;
};

}  // namespace kvtwin

#endif  // KVTWIN_CORE_WRAPPER_H_
