// What every wrapper does alike: hand a call to its active cache, or set all
// of them up. The calls where several caches must agree are the twins'.

#ifndef KVTWIN_CORE_WRAPPER_BASE_H_
#define KVTWIN_CORE_WRAPPER_BASE_H_

#include <memory>
#include <vector>

#include "core/guarded_cache.h"

namespace kvtwin {

class WrapperBase : public Cache {
 public:
  // Requires: at least one cache.
  explicit WrapperBase(std::vector<std::unique_ptr<GuardedCache>> caches)
      : caches_(std::move(caches)) {}

  Status SetConfig(const CacheConfig& config) final;
  Status Init(DType dtype, int max_sequences, int capacity,
              int max_batch) final;
  void Close() final;
  Status SetLayer(int layer) final;
  Status SetLayerType(int type) final;

  // The active cache's.
  Status SetCausal(std::span<const int> except) final;
  Status Put(const TensorView& key, const TensorView& value) final;
  Result<KvView> Get() final;
  Cache* UnderlyingCache() final { return &active(); }
  Result<bool> EncoderCached() final { return active().EncoderCached(); }
  int CellCount() const final { return active().CellCount(); }
  std::span<const int> BatchCells() const final;
  void ListCells(std::vector<CellEntry>& out) const final;

 protected:
  const std::vector<std::unique_ptr<GuardedCache>>& caches() const {
    return caches_;
  }
  GuardedCache& active() const { return *caches_[active_]; }
  void set_active(std::size_t type) { active_ = type; }

 private:
  std::vector<std::unique_ptr<GuardedCache>> caches_;
  std::size_t active_ = 0;
};

}  // namespace kvtwin

#endif  // KVTWIN_CORE_WRAPPER_BASE_H_
