#include "core/wrapper_base.h"

#include <fmt/format.h>

namespace kvtwin {

Status WrapperBase::SetConfig(const CacheConfig& config) {
  for (const auto& cache : caches_) {
    Status status = cache->CheckConfig(config);
    if (!status.ok()) return status;
  }
  for (const auto& cache : caches_) {
    Status status = cache->SetConfig(config);
    if (!status.ok()) return status;
  }
  return {};
}

Status WrapperBase::Init(DType dtype, int max_sequences, int capacity,
                         int max_batch) {
  for (const auto& cache : caches_) {
    Status status =
        cache->CheckInit({dtype, max_sequences, capacity, max_batch});
    if (!status.ok()) return status;
  }
  for (const auto& cache : caches_) {
    Status status = cache->Init(dtype, max_sequences, capacity, max_batch);
    if (!status.ok()) return status;
  }
  return {};
}

void WrapperBase::Close() {
  for (const auto& cache : caches_) cache->Close();
}

Status WrapperBase::SetLayer(int layer) {
  Status status;  // All caches answer alike.
  for (const auto& cache : caches_) status = cache->SetLayer(layer);
  return status;
}

Status WrapperBase::SetLayerType(int type) {
  if (Status status = active().CheckReady(); !status.ok()) return status;
  if (type < 0 || static_cast<std::size_t>(type) >= caches_.size()) {
    return {StatusCode::kInvalidArgument,
            fmt::format("layer type is {}, the wrapper has {} caches", type,
                        caches_.size())};
  }
  active_ = static_cast<std::size_t>(type);
  return {};
}

Status WrapperBase::SetCausal(std::span<const int> except) {
  return active().SetCausal(except);
}

Status WrapperBase::Put(const TensorView& key, const TensorView& value) {
  return active().Put(key, value);
}

Result<KvView> WrapperBase::Get() { return active().Get(); }

std::span<const int> WrapperBase::BatchCells() const {
  return active().BatchCells();
}

void WrapperBase::ListCells(std::vector<CellEntry>& out) const {
  active().ListCells(out);
}

}  // namespace kvtwin
