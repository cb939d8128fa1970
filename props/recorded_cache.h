// A cache that holds nothing: it knows misuse, as every cache does, and gives
// the answers that a recording has.

#ifndef KVTWIN_PROPS_RECORDED_CACHE_H_
#define KVTWIN_PROPS_RECORDED_CACHE_H_

#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "core/guarded_cache.h"
#include "core/wrapper_base.h"

namespace kvtwin::props {

class RecordedCache final : public GuardedCache {
 public:
  // `answer` is what StartForward answers, where it is not misused.
  RecordedCache(bool encoder, const StatusCode* answer)
      : encoder_(encoder), answer_(answer) {}

  int CellCount() const override { return 0; }
  std::span<const int> BatchCells() const override { return {}; }
  void ListCells(std::vector<CellEntry>& out) const override { out.clear(); }

 private:
  bool IsEncoder() const override { return encoder_; }
  Status DoCheckInit(const InitArgs&) const override { return {}; }
  void DoInit(const InitArgs&) override {}
  void DoClose() override {}
  Status DoStartForward(const Batch&, bool) override {
    return {*answer_, "as recorded"};
  }
  void DoGiveBack() override {}
  void DoSetCausal(std::span<const int>) override {}
  void DoPut(const TensorView&, const TensorView&) override {
    layers_.insert(layer());
  }
  std::optional<KvView> DoGet() override {
    if (!layers_.contains(layer())) return std::nullopt;
    return KvView();
  }
  void DoCopyPrefix(int, int, std::int32_t) override {}
  bool DoCanResume(int, std::int32_t) const override { return true; }
  Status DoPrepareRemove(int, std::int32_t, std::int32_t) override {
    return {};
  }
  void DoCommitRemove() override {}

  bool encoder_;
  const StatusCode* answer_;
  std::set<int> layers_;  // That something was put into.
};

class RecordedWrapper final : public WrapperBase {
 public:
  using WrapperBase::WrapperBase;

  Status StartForward(const Batch& batch, bool reserve) override {
    Status status = OfAll([&](GuardedCache& cache) {
      return cache.StartForward(batch, reserve);
    });
    if (status.ok()) set_active(0);
    return status;
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    return OfAll(
        [&](GuardedCache& cache) { return cache.CopyPrefix(src, dst, len); });
  }
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    return caches().front()->CanResume(seq, pos);
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    return caches().front()->Remove(seq, begin, end);
  }

 private:
  // Asks all caches. The first answer that is not ok, or the last.
  template <class Call>
  Status OfAll(const Call& call) {
    Status all;
    for (const auto& cache : caches()) {
      Status status = call(*cache);
      if (all.ok()) all = std::move(status);
    }
    return all;
  }
};

// Requires: a spec that MakeCache accepts; `answer` outlives the cache.
inline std::unique_ptr<Cache> MakeRecordedCache(const CacheSpec& spec,
                                                const StatusCode* answer) {
  std::vector<std::unique_ptr<GuardedCache>> caches;
  for (const CacheSpec& one :
       spec.kind == Kind::kWrapper ? spec.caches : std::vector{spec}) {
    caches.push_back(
        std::make_unique<RecordedCache>(one.kind == Kind::kEncoder, answer));
  }
  if (spec.kind != Kind::kWrapper) return std::move(caches.front());
  return std::make_unique<RecordedWrapper>(std::move(caches));
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_RECORDED_CACHE_H_
