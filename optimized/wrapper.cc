#include "optimized/wrapper.h"

#include <fmt/format.h>

#include "core/assert.h"

namespace kvtwin::optimized {

Status WrapperCache::SetConfig(const CacheConfig& config) {
  for (const auto& cache : caches_) {
    if (Status status = cache->CheckConfig(config); !status.ok()) return status;
  }
  for (const auto& cache : caches_) {
    const Status status = cache->SetConfig(config);
    KVTWIN_ASSERT(status.ok());
  }
  return {};
}

Status WrapperCache::Init(DType dtype, int max_sequences, int capacity,
                          int max_batch) {
  const InitArgs args{dtype, max_sequences, capacity, max_batch};
  for (const auto& cache : caches_) {
    if (Status status = cache->CheckInit(args); !status.ok()) return status;
  }
  for (const auto& cache : caches_) {
    const Status status =
        cache->Init(dtype, max_sequences, capacity, max_batch);
    KVTWIN_ASSERT(status.ok());
  }
  life_ = Life::kReady;
  return {};
}

void WrapperCache::Close() {
  for (const auto& cache : caches_) cache->Close();
  life_ = Life::kClosed;
}

Status WrapperCache::SetLayer(int layer) {
  // All or none: whether it is allowed does not depend on the cache.
  for (const auto& cache : caches_) {
    if (Status status = cache->SetLayer(layer); !status.ok()) return status;
  }
  return {};
}

Status WrapperCache::StartForward(const Batch& batch, bool reserve) {
  for (std::size_t k = 0; k < caches_.size(); ++k) {
    Status status = caches_[k]->StartForward(batch, reserve);
    if (status.ok()) continue;
    const bool misuse = status.code() == StatusCode::kInvalidArgument ||
                        status.code() == StatusCode::kFailedPrecondition;
    // Misuse changes nothing: the pass that there may be goes on.
    if (misuse && k == 0) return status;
    for (std::size_t i = 0; i < k; ++i) caches_[i]->GiveBack();
    for (std::size_t i = k; i < caches_.size(); ++i) caches_[i]->EndPass();
    return status;
  }
  active_ = 0;
  return {};
}

Status WrapperCache::SetCausal(std::span<const int> except) {
  return active().SetCausal(except);
}

Status WrapperCache::Put(const TensorView& key, const TensorView& value) {
  return active().Put(key, value);
}

Result<KvView> WrapperCache::Get() { return active().Get(); }

Status WrapperCache::CopyPrefix(int src, int dst, std::int32_t len) {
  for (const auto& cache : caches_) {
    Status status = cache->CheckCopyPrefix(src, dst, len);
    if (!status.ok()) return status;
  }
  for (const auto& cache : caches_) {
    const Status status = cache->CopyPrefix(src, dst, len);
    KVTWIN_ASSERT(status.ok());
  }
  return {};
}

Result<bool> WrapperCache::CanResume(int seq, std::int32_t pos) {
  bool all = true;
  for (const auto& cache : caches_) {
    const Result<bool> can = cache->CanResume(seq, pos);
    if (!can.ok()) return can;
    all = all && *can;
  }
  return all;
}

Status WrapperCache::Remove(int seq, std::int32_t begin, std::int32_t end) {
  for (const auto& cache : caches_) {
    Status status = cache->PrepareRemove(seq, begin, end);
    if (!status.ok()) return status;
  }
  for (const auto& cache : caches_) cache->CommitRemove();
  return {};
}

Status WrapperCache::SetLayerType(int type) {
  if (life_ == Life::kNew) {
    return {StatusCode::kFailedPrecondition, "the cache is used before Init"};
  }
  if (life_ == Life::kClosed) {
    return {StatusCode::kFailedPrecondition, "the cache is used after Close"};
  }
  if (type < 0 || static_cast<std::size_t>(type) >= caches_.size()) {
    return {StatusCode::kInvalidArgument,
            fmt::format("layer type is {}, there are {} caches", type,
                        caches_.size())};
  }
  active_ = static_cast<std::size_t>(type);
  return {};
}

Result<bool> WrapperCache::EncoderCached() { return active().EncoderCached(); }

int WrapperCache::CellCount() const { return active().CellCount(); }

std::span<const int> WrapperCache::BatchCells() const {
  return active().BatchCells();
}

void WrapperCache::ListCells(std::vector<CellEntry>& out) const {
  active().ListCells(out);
}

}  // namespace kvtwin::optimized
