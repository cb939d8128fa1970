// A correct cache with one wrong answer.

#ifndef KVTWIN_PROPS_TESTING_TAMPERED_CACHE_H_
#define KVTWIN_PROPS_TESTING_TAMPERED_CACHE_H_

#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "props/base/forwarding_cache.h"

namespace kvtwin::props {

// A view whose tensors may be changed.
struct OwnedView {
  DenseTensor key;
  DenseTensor value;
  DenseTensor mask;
  KvView* view = nullptr;  // The answer, made of these tensors.
};

// The fault to inject into a cache. Members that are not set inject nothing.
struct Fault {
  std::string call = {};  // Answers `with` instead of ok.
  StatusCode with = StatusCode::kNotSupported;
  std::function<void(OwnedView&)> view = {};
  std::function<void(std::vector<CellEntry>&)> cells = {};
  std::function<void(std::vector<int>&)> batch = {};
  std::function<int(int)> count = {};
  std::function<bool(bool)> resume = {};
  std::function<bool(bool)> encoder_cached = {};
  std::function<void(CacheState&)> saved = {};     // Changes Snapshot's state.
  std::function<void(CacheState&)> restored = {};  // Changes Restore's state.
  bool in_place = false;  // `restored` applies to used caches only.
  std::function<void(CacheState&)> sequence = {};  // Changes SnapshotOf.
  std::function<Status(Cache&, int, const CacheState&)> add =
      {};  // Replaces AddSequence after Init.
  // Answers a batch that the cache refuses as misuse.
  std::function<Status(Cache&, Status)> misuse = {};
  bool no_underlying = false;
  bool throws = false;  // `call` throws; CopyPrefix, if that is not set.
  // If not negative, the fault shows in this layer or layer type only.
  int layer = -1;
  int type = -1;
};

class TamperedCache : public ForwardingCache {
 public:
  TamperedCache(std::unique_ptr<Cache> cache, Fault fault)
      : ForwardingCache(std::move(cache)), fault_(std::move(fault)) {}

  Status SetConfig(const CacheConfig& config) override {
    return Said("SetConfig", cache_->SetConfig(config));
  }
  Status Init(const InitArgs& args) override {
    begun_ = true;
    return Said("Init", cache_->Init(args));
  }
  Status SetLayer(int layer) override {
    layer_ = layer;
    return Said("SetLayer", cache_->SetLayer(layer));
  }
  Status SetLayerType(int type) override {
    type_ = type;
    return Said("SetLayerType", cache_->SetLayerType(type));
  }
  Status StartForward(const Batch& batch, bool reserve) override {
    used_ = true;
    Status status = cache_->StartForward(batch, reserve);
    if (status.ok()) type_ = 0;
    const bool misused = status.code() == StatusCode::kInvalidArgument;
    if (misused && fault_.misuse) return fault_.misuse(*cache_, status);
    return Said(restored_ ? "StartForward after Restore" : "StartForward",
                std::move(status));
  }
  Status SetCausal(std::span<const int> except) override {
    return Said("SetCausal", cache_->SetCausal(except));
  }
  Status Put(const TensorView& key, const TensorView& value) override {
    return Said("Put", cache_->Put(key, value));
  }
  Result<KvView> Get() override {
    Result<KvView> view = cache_->Get();
    if (!view.ok()) return view;
    if (Status said = Said("Get", Status()); !said.ok()) return said;
    if (!fault_.view || !Here()) return view;
    owned_.key = CopyOf(view->key, view->key.dtype);
    owned_.value = CopyOf(view->value, view->value.dtype);
    view->key = owned_.key.view();
    view->value = owned_.value.view();
    if (view->mask.data != nullptr) {
      owned_.mask = CopyOf(view->mask, view->mask.dtype);
      view->mask = owned_.mask.view();
    }
    owned_.view = &*view;
    fault_.view(owned_);
    return view;
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    if (fault_.throws && fault_.call.empty()) {
      throw std::runtime_error("no copy today");
    }
    return Said("CopyPrefix", cache_->CopyPrefix(src, dst, len));
  }
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    return Answered("CanResume", cache_->CanResume(seq, pos), fault_.resume);
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    return Said("Remove", cache_->Remove(seq, begin, end));
  }
  Status Commit(int seq, std::span<const int> path) override {
    return Said("Commit", cache_->Commit(seq, path));
  }
  Cache* UnderlyingCache() override {
    return fault_.no_underlying ? nullptr : cache_->UnderlyingCache();
  }
  Result<bool> EncoderCached() override {
    return Answered("EncoderCached", cache_->EncoderCached(),
                    fault_.encoder_cached);
  }
  Status SnapshotTo(CacheState& state) const override {
    Status status = Said(restored_ ? "Snapshot after Restore" : "Snapshot",
                         cache_->SnapshotTo(state));
    if (status.ok() && fault_.saved) fault_.saved(state);
    return status;
  }
  Status Restore(const CacheState& state) override {
    restored_ = begun_;
    CacheState changed = state;
    const bool here = used_ || !fault_.in_place;
    if (fault_.restored && begun_ && here) fault_.restored(changed);
    return Said("Restore", cache_->Restore(changed));
  }
  Result<CacheState> SnapshotOf(int sequence) const override {
    Result<CacheState> state = cache_->SnapshotOf(sequence);
    if (state.ok() && fault_.sequence) fault_.sequence(*state);
    if (Status said = Said("SnapshotOf", state.status()); !said.ok()) {
      return said;
    }
    return state;
  }
  Status AddSequence(int sequence, const CacheState& added) override {
    if (fault_.add && begun_) return fault_.add(*cache_, sequence, added);
    return Said("AddSequence", cache_->AddSequence(sequence, added));
  }
  int CellCount() const override {
    const int count = cache_->CellCount();
    return fault_.count ? fault_.count(count) : count;
  }
  std::span<const int> BatchCells() const override {
    const auto cells = cache_->BatchCells();
    if (!fault_.batch || !Here()) return cells;
    batch_.assign(cells.begin(), cells.end());
    fault_.batch(batch_);
    return batch_;
  }
  void ListCells(std::vector<CellEntry>& out) const override {
    cache_->ListCells(out);
    if (fault_.cells && Here()) fault_.cells(out);
  }

 private:
  bool Here() const {
    return (fault_.layer < 0 || fault_.layer == layer_) &&
           (fault_.type < 0 || fault_.type == type_);
  }
  Status Said(std::string_view call, Status status) const {
    if (!status.ok() || call != fault_.call || !Here()) return status;
    if (fault_.throws) throw std::runtime_error("it is over");
    return {fault_.with, "so it is"};
  }
  Result<bool> Answered(std::string_view call, Result<bool> answer,
                        const std::function<bool(bool)>& change) const {
    if (!answer.ok()) return answer;
    if (Status said = Said(call, Status()); !said.ok()) return said;
    return change && Here() ? change(*answer) : *answer;
  }

  const Fault fault_;
  bool begun_ = false;  // Init was called.
  bool used_ = false;
  bool restored_ = false;
  int layer_ = 0;
  int type_ = 0;
  OwnedView owned_;
  mutable std::vector<int> batch_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_TESTING_TAMPERED_CACHE_H_
