#include "optimized/wrapper.h"

#include "core/assert.h"

namespace kvtwin::optimized {

Status WrapperCache::StartForward(const Batch& batch, bool reserve) {
  for (std::size_t k = 0; k < caches().size(); ++k) {
    Status status = caches()[k]->StartForward(batch, reserve);
    if (status.ok()) continue;
    const bool misuse = status.code() == StatusCode::kInvalidArgument ||
                        status.code() == StatusCode::kFailedPrecondition;
    // Misuse changes nothing: the pass that there may be goes on.
    if (misuse && k == 0) return status;
    for (std::size_t i = 0; i < k; ++i) caches()[i]->GiveBack();
    for (std::size_t i = k; i < caches().size(); ++i) caches()[i]->EndPass();
    return status;
  }
  set_active(0);
  return {};
}

Status WrapperCache::CopyPrefix(int src, int dst, std::int32_t len) {
  for (const auto& cache : caches()) {
    Status status = cache->CheckCopyPrefix(src, dst, len);
    if (!status.ok()) return status;
  }
  for (const auto& cache : caches()) {
    const Status status = cache->CopyPrefix(src, dst, len);
    KVTWIN_ASSERT(status.ok());
  }
  return {};
}

Result<bool> WrapperCache::CanResume(int seq, std::int32_t pos) {
  bool all = true;
  for (const auto& cache : caches()) {
    const Result<bool> can = cache->CanResume(seq, pos);
    if (!can.ok()) return can.status();
    all = all && *can;
  }
  return all;
}

Status WrapperCache::Remove(int seq, std::int32_t begin, std::int32_t end) {
  for (const auto& cache : caches()) {
    Status status = cache->PrepareRemove(seq, begin, end);
    if (!status.ok()) return status;
  }
  for (const auto& cache : caches()) cache->CommitRemove();
  return {};
}

}  // namespace kvtwin::optimized
