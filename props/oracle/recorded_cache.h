// A cache that holds nothing: it checks for misuse, as every cache does, and
// returns the answers of a recording.

#ifndef KVTWIN_PROPS_ORACLE_RECORDED_CACHE_H_
#define KVTWIN_PROPS_ORACLE_RECORDED_CACHE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "core/guarded_cache.h"
#include "core/wrapper.h"

namespace kvtwin::props {

// The position of a sequence's last token; -1 if it has none.
using LastPosition = std::function<std::int64_t(int seq)>;

class RecordedCache final : public GuardedCache {
 public:
  // StartForward and Remove return `*answer` unless they are misused.
  RecordedCache(const CacheSpec& spec, const StatusCode* answer,
                LastPosition last)
      : kind_(spec.kind),
        has_pins_(spec.pins > 0),
        answer_(answer),
        last_(std::move(last)) {}

 private:
  bool IsEncoder() const override { return kind_ == Kind::kEncoder; }
  bool IsRecurrent() const override { return kind_ == Kind::kRecurrent; }
  bool HasPins() const override { return has_pins_; }
  std::int64_t DoLastPosition(int seq) const override { return last_(seq); }
  Result<std::int64_t> DoCheckInit(const InitArgs&) override { return 0; }
  void DoClose() override {}
  Status DoStartForward(const Batch&, bool) override {
    return {*answer_, "as recorded"};
  }
  void DoGiveBack() override {}
  Status DoPrepareRemove(int, std::int32_t, std::int32_t) override {
    return {*answer_, "as recorded"};
  }
  void DoPut(const TensorView&, const TensorView&) override {}
  KvView DoGet() override { return {}; }
  void DoCommitRemove(int, std::int32_t, std::int32_t) override {}

  Kind kind_;
  bool has_pins_;
  const StatusCode* answer_;
  LastPosition last_;
};

// Requires: a spec that MakeCache accepts; `answer` outlives the cache, and so
// does all that `last` needs.
inline std::unique_ptr<Cache> MakeRecordedCache(const CacheSpec& spec,
                                                const StatusCode* answer,
                                                const LastPosition& last) {
  return MakeWrapped(spec, [answer, last](const CacheSpec& inner) {
    return std::make_unique<RecordedCache>(inner, answer, last);
  });
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ORACLE_RECORDED_CACHE_H_
