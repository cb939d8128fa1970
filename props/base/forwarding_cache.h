// A cache that hands every call to another one; a derived class changes or
// records some of the calls.

#ifndef KVTWIN_PROPS_BASE_FORWARDING_CACHE_H_
#define KVTWIN_PROPS_BASE_FORWARDING_CACHE_H_

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvtwin/cache.h"

namespace kvtwin::props {

class ForwardingCache : public Cache {
 public:
  explicit ForwardingCache(std::unique_ptr<Cache> cache)
      : cache_(std::move(cache)) {}

  Status SetConfig(const CacheConfig& c) override {
    return cache_->SetConfig(c);
  }
  Status Init(const InitArgs& args) override { return cache_->Init(args); }
  void Close() override { cache_->Close(); }
  Status SetLayer(int layer) override { return cache_->SetLayer(layer); }
  Status StartForward(const Batch& batch, bool reserve) override {
    return cache_->StartForward(batch, reserve);
  }
  Status SetCausal(std::span<const int> except) override {
    return cache_->SetCausal(except);
  }
  Status Put(const TensorView& key, const TensorView& value) override {
    return cache_->Put(key, value);
  }
  Result<KvView> Get() override { return cache_->Get(); }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    return cache_->CopyPrefix(src, dst, len);
  }
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    return cache_->CanResume(seq, pos);
  }
  Result<std::string> WhyNotResume(int seq, std::int32_t pos) override {
    return cache_->WhyNotResume(seq, pos);
  }
  Result<std::int32_t> ResumeBefore(int seq, std::int32_t pos) override {
    return cache_->ResumeBefore(seq, pos);
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    return cache_->Remove(seq, begin, end);
  }
  Status Commit(int seq, std::span<const int> path) override {
    return cache_->Commit(seq, path);
  }
  Status Checkpoint(int seq) override { return cache_->Checkpoint(seq); }
  Status SetLayerType(int type) override { return cache_->SetLayerType(type); }
  Cache* UnderlyingCache() override { return cache_->UnderlyingCache(); }
  Result<bool> EncoderCached() override { return cache_->EncoderCached(); }
  Status SnapshotTo(CacheState& state) const override {
    return cache_->SnapshotTo(state);
  }
  Status Restore(const CacheState& state) override {
    return cache_->Restore(state);
  }
  Result<CacheState> SnapshotOf(int sequence) const override {
    return cache_->SnapshotOf(sequence);
  }
  Status AddSequence(int sequence, const CacheState& added) override {
    return cache_->AddSequence(sequence, added);
  }
  int CellCount() const override { return cache_->CellCount(); }
  std::span<const int> BatchCells() const override {
    return cache_->BatchCells();
  }
  void ListCells(std::vector<CellEntry>& out) const override {
    cache_->ListCells(out);
  }

 protected:
  std::unique_ptr<Cache> cache_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_FORWARDING_CACHE_H_
