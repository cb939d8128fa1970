// A cache that holds nothing: it checks for misuse, as every cache does, and
// returns the answers of a recording.

#ifndef KVTWIN_PROPS_ORACLE_RECORDED_CACHE_H_
#define KVTWIN_PROPS_ORACLE_RECORDED_CACHE_H_

#include <memory>

#include "core/guarded_cache.h"
#include "core/wrapper.h"

namespace kvtwin::props {

class RecordedCache final : public GuardedCache {
 public:
  // StartForward returns `*answer` unless it is misused.
  RecordedCache(bool encoder, const StatusCode* answer)
      : encoder_(encoder), answer_(answer) {}

 private:
  bool IsEncoder() const override { return encoder_; }
  Result<std::int64_t> DoCheckInit(const InitArgs&) override { return 0; }
  void DoClose() override {}
  Status DoStartForward(const Batch&, bool) override {
    return {*answer_, "as recorded"};
  }
  void DoGiveBack() override {}
  void DoPut(const TensorView&, const TensorView&) override {}
  KvView DoGet() override { return {}; }
  void DoCommitRemove(int, std::int32_t, std::int32_t) override {}

  bool encoder_;
  const StatusCode* answer_;
};

// Requires: a spec that MakeCache accepts; `answer` outlives the cache.
inline std::unique_ptr<Cache> MakeRecordedCache(const CacheSpec& spec,
                                                const StatusCode* answer) {
  return MakeWrapped(spec, [answer](const CacheSpec& inner) {
    return std::make_unique<RecordedCache>(inner.kind == Kind::kEncoder,
                                           answer);
  });
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ORACLE_RECORDED_CACHE_H_
