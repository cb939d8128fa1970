// Several caches behind one interface; a layer type picks the active one. What
// changes sequences changes all of them or none.

#ifndef KVTWIN_OPTIMIZED_WRAPPER_H_
#define KVTWIN_OPTIMIZED_WRAPPER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/guarded_cache.h"

namespace kvtwin::optimized {

class WrapperCache final : public Cache {
 public:
  // Requires: at least one.
  explicit WrapperCache(std::vector<std::unique_ptr<GuardedCache>> caches)
      : caches_(std::move(caches)) {}

  Status SetConfig(const CacheConfig& config) override;
  Status Init(DType dtype, int max_sequences, int capacity,
              int max_batch) override;
  void Close() override;
  Status SetLayer(int layer) override;
  Status StartForward(const Batch& batch, bool reserve) override;
  Status SetCausal(std::span<const int> except) override;
  Status Put(const TensorView& key, const TensorView& value) override;
  Result<KvView> Get() override;
  Status CopyPrefix(int src, int dst, std::int32_t len) override;
  Result<bool> CanResume(int seq, std::int32_t pos) override;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override;
  Status SetLayerType(int type) override;
  Cache* UnderlyingCache() override { return &active(); }
  Result<bool> EncoderCached() override;
  int CellCount() const override;
  std::span<const int> BatchCells() const override;
  void ListCells(std::vector<CellEntry>& out) const override;

 private:
  enum class Life { kNew, kReady, kClosed };

  GuardedCache& active() { return *caches_[active_]; }
  const GuardedCache& active() const { return *caches_[active_]; }

  std::vector<std::unique_ptr<GuardedCache>> caches_;
  std::size_t active_ = 0;
  Life life_ = Life::kNew;
};

}  // namespace kvtwin::optimized

#endif  // KVTWIN_OPTIMIZED_WRAPPER_H_
