#include "core/wrapper.h"

#include <fmt/format.h>

#include "core/assert.h"
#include "core/index.h"
#include "core/state_checks.h"
#include "core/twin.h"

namespace kvtwin {

Status WrapperCache::SetConfig(const CacheConfig& config) {
  Status status;  // All caches return the same.
  for (const auto& cache : caches_) status = cache->SetConfig(config);
  return status;
}

Status WrapperCache::Init(const InitArgs& args) {
  for (const auto& cache : caches_) {
    if (Status status = cache->CheckInit(args); !status.ok()) return status;
  }
  Status status;  // All of them will say ok.
  for (const auto& cache : caches_) status = cache->Init(args);
  return status;
}

void WrapperCache::Close() {
  for (const auto& cache : caches_) cache->Close();
}

Status WrapperCache::SetLayer(int layer) {
  Status status;  // All caches return the same.
  for (const auto& cache : caches_) status = cache->SetLayer(layer);
  return status;
}

Status WrapperCache::SetLayerType(int type) {
  if (Status status = active().CheckReady(); !status.ok()) return status;
  if (type < 0 || AsSize(type) >= caches_.size()) {
    return {StatusCode::kInvalidArgument,
            fmt::format("layer type is {}, the wrapper has {} caches", type,
                        caches_.size())};
  }
  active_ = AsSize(type);
  return {};
}

Status WrapperCache::SetCausal(std::span<const int> except) {
  return active().SetCausal(except);
}

Status WrapperCache::Put(const TensorView& key, const TensorView& value) {
  return active().Put(key, value);
}

Status WrapperCache::StartForward(const Batch& batch, bool reserve) {
  // Misuse changes nothing. One cache may refuse what others accept: positions
  // (R3), drafts whose tokens it has evicted, and all drafts (D8).
  for (const auto& cache : caches_) {
    Status status = cache->CheckBatch(batch, reserve);
    if (!status.ok()) return status;
  }
  for (const auto& cache : caches_) cache->EndPass();
  if (HasDrafts(batch)) {
    for (const auto& cache : caches_) {
      Status status = cache->CheckTakesDrafts();
      if (!status.ok()) return status;
    }
  }
  for (const auto& cache : caches_) {
    Status status = cache->StartChecked(batch, reserve);
    if (status.ok()) continue;
    for (const auto& each : caches_) each->GiveBack();
    return status;
  }
  active_ = 0;
  return {};
}

Status WrapperCache::CopyPrefix(int src, int dst, std::int32_t len) {
  if (one_length_) {  // (H3)
    const Result<std::int32_t> at = ResumeBefore(src, len);
    if (at.ok()) len = *at;  // Otherwise the caches refuse the arguments.
  }
  for (const auto& cache : caches_) {
    Status status = cache->CheckCopyPrefix(src, dst, len);
    if (!status.ok()) return status;
  }
  Status status;  // All of them will say ok.
  for (const auto& cache : caches_) status = cache->CopyPrefix(src, dst, len);
  return status;
}

Result<bool> WrapperCache::CanResume(int seq, std::int32_t pos) {
  bool all = true;
  for (const auto& cache : caches_) {
    const Result<bool> can = cache->CanResume(seq, pos);
    if (!can.ok()) return can.status();
    all = all && *can;
  }
  return all;
}

// The reason of the first cache that cannot.
Result<std::string> WrapperCache::WhyNotResume(int seq, std::int32_t pos) {
  for (int i = 0; i < Size(caches_); ++i) {
    const Result<std::string> why = At(caches_, i)->WhyNotResume(seq, pos);
    if (!why.ok()) return why.status();
    if (!why->empty()) return fmt::format("caches[{}]: {}", i, *why);
  }
  return std::string();
}

// Steps down until no cache steps further: each step lands where one of them
// can resume (R9).
Result<std::int32_t> WrapperCache::ResumeBefore(int seq, std::int32_t pos) {
  for (std::size_t agree = 0; agree < caches_.size();) {
    agree = 0;
    for (const auto& cache : caches_) {
      const Result<std::int32_t> at = cache->ResumeBefore(seq, pos);
      if (!at.ok() || *at == 0) return at;
      agree += *at == pos ? 1U : 0U;
      pos = *at;
    }
  }
  return pos;
}

Status WrapperCache::Remove(int seq, std::int32_t begin, std::int32_t end) {
  if (one_length_ && end == kOpenEnd) {  // (H3)
    const Result<std::int32_t> at = ResumeBefore(seq, begin);
    if (!at.ok()) return at.status();
    begin = *at;
  }
  for (const auto& cache : caches_) {
    Status status = cache->PrepareRemove(seq, begin, end);
    if (!status.ok()) return status;
  }
  for (const auto& cache : caches_) cache->CommitRemove(seq, begin, end);
  return {};
}

Status WrapperCache::Commit(int seq, std::span<const int> path) {
  for (const auto& cache : caches_) {
    Status status = cache->CheckCommit(seq, path);
    if (!status.ok()) return status;
  }
  Status status;  // All of them will say ok.
  for (const auto& cache : caches_) status = cache->Commit(seq, path);
  return status;
}

// Calls the caches that have pins (R14). Misuse is refused by each of them.
Status WrapperCache::Checkpoint(int seq) {
  Status answer;
  bool any = false;
  for (const auto& cache : caches_) {
    Status status = cache->Checkpoint(seq);
    any = any || status.ok();
    if (!status.ok()) answer = status;
  }
  return any ? Status() : answer;
}

Status WrapperCache::SnapshotTo(CacheState& state) const {
  if (Status status = active().CheckReady(); !status.ok()) return status;
  state = CacheState();
  state.caches.resize(caches_.size());
  Status status;  // All of them will say ok.
  for (std::size_t i = 0; i < caches_.size(); ++i) {
    status = caches_[i]->SnapshotTo(state.caches[i]);
  }
  return status;
}

Status WrapperCache::Restore(const CacheState& state) {
  if (Status status = active().CheckReady(); !status.ok()) return status;
  const std::size_t caches = state.caches.size();
  if (caches != caches_.size() || !IsBare(state)) {
    return {StatusCode::kInvalidArgument,
            fmt::format("the state is not of a wrapper of {} caches",
                        caches_.size())};
  }
  for (std::size_t i = 0; i < caches; ++i) {
    Status status = caches_[i]->CheckRestore(state.caches[i]);
    if (!status.ok()) return status;
  }
  Status status;  // All of them will say ok.
  for (std::size_t i = 0; i < caches; ++i) {
    status = caches_[i]->Restore(state.caches[i]);
  }
  active_ = 0;
  return status;
}

Result<CacheState> WrapperCache::SnapshotOf(int sequence) const {
  CacheState state;
  for (const auto& cache : caches_) {
    Result<CacheState> part = cache->SnapshotOf(sequence);
    if (!part.ok()) return part;
    state.caches.push_back(std::move(*part));
  }
  return state;
}

Status WrapperCache::AddSequence(int sequence, const CacheState& added) {
  Status status = active().CheckReady();
  if (status.ok()) status = CheckAdded(sequence, added);
  if (!status.ok()) return status;
  if (added.caches.size() != caches_.size()) {
    return {StatusCode::kInvalidArgument,
            fmt::format("the sequence is of {} caches, the wrapper has {}",
                        added.caches.size(), caches_.size())};
  }
  for (std::size_t i = 0; i < caches_.size(); ++i) {
    status = caches_[i]->CheckAddSequence(sequence, added.caches[i]);
    if (!status.ok()) return status;
  }
  for (std::size_t i = 0; i < caches_.size(); ++i) {  // All will say ok.
    status = caches_[i]->AddSequence(sequence, added.caches[i]);
  }
  active_ = 0;
  return status;
}

std::unique_ptr<Cache> MakeWrapped(const CacheSpec& spec,
                                   const MakeOne& make_one) {
  KVTWIN_ASSERT(CheckSpec(spec).ok());
  if (!IsWrapper(spec.kind)) return make_one(spec);
  std::vector<std::unique_ptr<GuardedCache>> caches;
  for (const CacheSpec& inner : spec.caches) caches.push_back(make_one(inner));
  return std::make_unique<WrapperCache>(std::move(caches),
                                        spec.kind == Kind::kHybrid);
}

}  // namespace kvtwin
