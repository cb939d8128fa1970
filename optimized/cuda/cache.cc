// The twin "cuda": the caches of the optimized twin, with device memory. Here
// thrown errors become the results of calls.

#include <fmt/format.h>

#include <map>
#include <memory>
#include <utility>

#include "core/draft_book.h"
#include "core/twin.h"
#include "core/wrapper.h"
#include "kvtwin/cuda.h"
#include "optimized/causal.h"
#include "optimized/cuda/gpu.h"
#include "optimized/cuda/memory.h"
#include "optimized/cuda/session.h"
#include "optimized/encoder.h"

namespace kvtwin::optimized::cuda {
namespace {

std::unique_ptr<Cache> MakeOn(Gpu& gpu, const CacheSpec& spec) {
  return MakeWrapped(spec, [&](const CacheSpec& inner) {
    KVTWIN_ASSERT(inner.kind != Kind::kRecurrent);
    std::unique_ptr<GuardedCache> made;
    if (inner.kind == Kind::kEncoder) {
      made = std::make_unique<EncoderCache>(
          std::make_unique<DeviceSlotMemory>(gpu));
    } else {
      made = std::make_unique<CausalCache>(inner,
                                           std::make_unique<DeviceMemory>(gpu));
    }
    return made;
  });
}

// A cache on a device, or the active cache of a wrapper.
class DeviceCache final : public Cache {
 public:
  DeviceCache(std::shared_ptr<Session> session, std::shared_ptr<Cache> cache)
      : session_(std::move(session)), cache_(std::move(cache)) {}

  Status SetConfig(const CacheConfig& config) override {
    return cache_->SetConfig(config);
  }
  Status Init(const InitArgs& args) override {
    Status status = session_->Open();
    if (!status.ok()) return status;
    return cache_->Init(args);
  }
  void Close() override {
    session_->gpu().Hide();
    cache_->Close();
  }
  Status SetLayer(int layer) override { return cache_->SetLayer(layer); }
  Status StartForward(const Batch& batch, bool reserve) override {
    if (HasDrafts(batch)) return NoDrafts();
    return session_->Change(
        "StartForward", [&] { return cache_->StartForward(batch, reserve); });
  }
  Status SetCausal(std::span<const int> except) override {
    return session_->Change("SetCausal",
                            [&] { return cache_->SetCausal(except); });
  }
  Status Put(const TensorView& key, const TensorView& value) override {
    return session_->Try([&] { return cache_->Put(key, value); });
  }
  Result<KvView> Get() override {
    return session_->Try([&] { return cache_->Get(); });
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    return session_->Try([&] { return cache_->CopyPrefix(src, dst, len); });
  }
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    return session_->Try([&] { return cache_->CanResume(seq, pos); });
  }
  Result<std::int32_t> ResumeBefore(int seq, std::int32_t pos) override {
    return session_->Try([&] { return cache_->ResumeBefore(seq, pos); });
  }
  Result<std::string> WhyNotResume(int seq, std::int32_t pos) override {
    return session_->Try([&] { return cache_->WhyNotResume(seq, pos); });
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    return session_->Change("Remove",
                            [&] { return cache_->Remove(seq, begin, end); });
  }
  Status Commit(int, std::span<const int>) override { return NoDrafts(); }
  Status SetLayerType(int type) override { return cache_->SetLayerType(type); }
  Cache* UnderlyingCache() override {
    Cache* active = cache_->UnderlyingCache();
    if (active == cache_.get()) return this;
    std::unique_ptr<Cache>& inner = inner_[active];
    if (inner == nullptr) {
      inner = std::make_unique<DeviceCache>(
          session_, std::shared_ptr<Cache>(cache_, active));
    }
    return inner.get();
  }
  Result<bool> EncoderCached() override { return cache_->EncoderCached(); }
  Status SnapshotTo(CacheState& state) const override {
    return session_->Try([&] { return cache_->SnapshotTo(state); });
  }
  Status Restore(const CacheState& state) override {
    return session_->Change("Restore", [&] { return cache_->Restore(state); });
  }
  Result<CacheState> SnapshotOf(int sequence) const override {
    return session_->Try([&] { return cache_->SnapshotOf(sequence); });
  }
  Status AddSequence(int sequence, const CacheState& added) override {
    return session_->Change(
        "AddSequence", [&] { return cache_->AddSequence(sequence, added); });
  }
  int CellCount() const override { return cache_->CellCount(); }
  std::span<const int> BatchCells() const override {
    return cache_->BatchCells();
  }
  void ListCells(std::vector<CellEntry>& out) const override {
    cache_->ListCells(out);
  }

 private:
  static Status NoDrafts() {
    return {StatusCode::kNotSupported, "the twin cuda has no drafts"};
  }

  std::shared_ptr<Session> session_;
  std::shared_ptr<Cache> cache_;
  std::map<Cache*, std::unique_ptr<Cache>> inner_;  // The caches of a wrapper.
};

DeviceCache MakeDeviceCache(const std::shared_ptr<Session>& session,
                            const CacheSpec& spec) {
  return {session, MakeOn(session->gpu(), spec)};
}

class StreamedCache final : public CudaCache {
 public:
  StreamedCache(const CacheSpec& spec, int device)
      : session_(std::make_shared<Session>(device, /*host_views=*/false)),
        cache_(MakeDeviceCache(session_, spec)) {}

  Cache& On(CudaStream stream) override {
    session_->On(stream);
    return cache_;
  }

 private:
  std::shared_ptr<Session> session_;
  DeviceCache cache_;
};

}  // namespace

std::unique_ptr<Cache> MakeCache(const CacheSpec& spec) {
  return std::make_unique<DeviceCache>(MakeDeviceCache(
      std::make_shared<Session>(/*device=*/0, /*host_views=*/true), spec));
}

}  // namespace kvtwin::optimized::cuda

namespace kvtwin {

Result<std::unique_ptr<CudaCache>> CudaCache::Make(const CacheSpec& spec,
                                                   int device) {
  Status status = CheckSpec(spec);
  if (status.ok() && HasRecurrent(spec)) {
    status =
        Status(StatusCode::kNotSupported, "CudaCache has no recurrent caches");
  }
  if (!status.ok()) return status;
  return std::unique_ptr<CudaCache>(
      std::make_unique<optimized::cuda::StreamedCache>(spec, device));
}

}  // namespace kvtwin
