// The reference twin's encoder and wrapper, and what makes any of its caches.

#include "core/twin.h"

#include <fmt/format.h>

#include <map>

#include "core/dense_tensor.h"
#include "core/wrapper_base.h"
#include "reference/causal.h"

namespace kvtwin::reference {
namespace {

class EncoderCache final : public GuardedCache {
 public:
  int CellCount() const override { return 0; }
  std::span<const int> BatchCells() const override { return {}; }
  void ListCells(std::vector<CellEntry>& out) const override { out.clear(); }

 private:
  struct Slot {
    DenseTensor key;
    DenseTensor value;
  };

  bool IsEncoder() const override { return true; }

  Status DoCheckInit(const InitArgs& args) const override {
    if (args.max_sequences == 1 && config().cache_padding == 1) return {};
    return {StatusCode::kInvalidArgument,
            fmt::format("max_sequences is {} and cache_padding {}, an encoder "
                        "cache takes 1 and 1",
                        args.max_sequences, config().cache_padding)};
  }

  void DoInit(const InitArgs&) override {}
  void DoClose() override { slots_.clear(); }

  Status DoStartForward(const Batch& batch, bool reserve) override {
    position_before_ = next_position_;
    if (!reserve && !batch.multimodal.empty()) {
      const auto last = static_cast<std::size_t>(batch.multimodal.back());
      next_position_ = batch.positions[last];
    }
    return {};
  }

  void DoGiveBack() override { next_position_ = position_before_; }
  void DoSetCausal(std::span<const int>) override {}

  void DoPut(const TensorView& key, const TensorView& value) override {
    const TensorView stored = config().permuted_v ? PermutedView(value) : value;
    if (pass().reserve) {
      slots_.try_emplace(layer(),
                         Slot{FilledTensor(key.dtype, key.shape, 0),
                              FilledTensor(stored.dtype, stored.shape, 0)});
      return;
    }
    slots_[layer()] = {CopyOf(key, key.dtype), CopyOf(stored, stored.dtype)};
    cached_ = true;
    position_ = next_position_;
  }

  std::optional<KvView> DoGet() override {
    const auto slot = slots_.find(layer());
    if (slot == slots_.end()) return std::nullopt;
    return KvView{slot->second.key.view(), slot->second.value.view(), {}, 0};
  }

  void DoCopyPrefix(int, int, std::int32_t) override {}
  bool DoCanResume(int, std::int32_t) const override { return true; }

  Status DoPrepareRemove(int, std::int32_t begin, std::int32_t end) override {
    const bool before_end = position_ < end || end == kOpenEnd;
    forgets_ = begin <= position_ && before_end;
    return {};
  }
  void DoCommitRemove() override { cached_ = cached_ && !forgets_; }
  bool DoEncoderCached() const override { return cached_; }

  std::map<int, Slot> slots_;  // By layer.
  bool cached_ = false;
  std::int32_t position_ = 0;         // Of what the slots hold.
  std::int32_t next_position_ = 0;    // Of the next Put.
  std::int32_t position_before_ = 0;  // next_position_ before the pass.
  bool forgets_ = false;              // Decided by DoPrepareRemove.
};

class WrapperCache final : public WrapperBase {
 public:
  using WrapperBase::WrapperBase;

  Status StartForward(const Batch& batch, bool reserve) override {
    for (std::size_t i = 0; i < caches().size(); ++i) {
      Status status = caches()[i]->StartForward(batch, reserve);
      if (status.ok()) continue;
      if (status.code() != StatusCode::kCacheFull) return status;
      for (std::size_t j = 0; j < i; ++j) caches()[j]->GiveBack();
      for (const auto& cache : caches()) cache->EndPass();
      return status;
    }
    set_active(0);
    return {};
  }

  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    for (const auto& cache : caches()) {
      Status status = cache->CheckCopyPrefix(src, dst, len);
      if (!status.ok()) return status;
    }
    Status status;
    for (const auto& cache : caches())
      status = cache->CopyPrefix(src, dst, len);
    return status;
  }

  Result<bool> CanResume(int seq, std::int32_t pos) override {
    bool all = true;
    for (const auto& cache : caches()) {
      const Result<bool> can = cache->CanResume(seq, pos);
      if (!can.ok()) return can.status();
      all = all && *can;
    }
    return all;
  }

  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    for (const auto& cache : caches()) {
      Status status = cache->PrepareRemove(seq, begin, end);
      if (!status.ok()) return status;
    }
    for (const auto& cache : caches()) cache->CommitRemove();
    return {};
  }
};

std::unique_ptr<GuardedCache> MakeOne(const CacheSpec& spec) {
  if (spec.kind == Kind::kEncoder) return std::make_unique<EncoderCache>();
  return MakeCausal(spec);
}

}  // namespace

std::unique_ptr<Cache> MakeCache(const CacheSpec& spec) {
  if (spec.kind != Kind::kWrapper) return MakeOne(spec);
  std::vector<std::unique_ptr<GuardedCache>> caches;
  for (const CacheSpec& inner : spec.caches) caches.push_back(MakeOne(inner));
  return std::make_unique<WrapperCache>(std::move(caches));
}

}  // namespace kvtwin::reference
