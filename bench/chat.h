// The calls that a chat server makes to its cache, without a model. Sessions
// share the prefixes of all slots and fill the batches. Requests are always
// waiting: a slot that becomes free gets the next request.

#ifndef KVTWIN_BENCH_CHAT_H_
#define KVTWIN_BENCH_CHAT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/twins.h"
#include "kvtwin/sessions.h"
#include "props/base/forwarding_cache.h"
#include "props/sessions/service_hour.h"

namespace kvtwin::bench {

using props::ServiceRequest;

// Times the calls, and knows the cell of each token.
class ChatCache : public props::ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;
  // A call that can be made again.
  using Call = std::function<Status(Cache&)>;

  Status StartForward(const Batch& batch, bool reserve) override;
  Status CopyPrefix(int src, int dst, std::int32_t len) override;
  Result<bool> CanResume(int seq, std::int32_t pos) override;
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override;

  // Fails if a row of the last pass's mask contradicts the cells that the
  // batches got. Checks the first and last row of the batch.
  void CheckMask(const std::string& name) const;

  // Adds the calls from now on to `calls`.
  void LogTo(std::vector<Call>& calls) { calls_ = &calls; }
  double time() const { return time_; }  // Nanoseconds in calls.

 private:
  void CheckRow(const std::string& name, const KvView& view,
                std::int64_t row) const;
  void Log(Call call);

  double time_ = 0;
  std::vector<Call>* calls_ = nullptr;
  std::vector<std::vector<int>> cells_;  // By sequence, then position.
  Tokens batch_;                         // The last one.
};

class Chat {
 public:
  static constexpr int kSlots = 16;
  static constexpr int kBatch = 512;

  // `requests` and `cache` must outlive this object. Requires: no request with
  // its answer needs more than `context` tokens.
  Chat(const std::vector<ServiceRequest>& requests, ChatCache& cache,
       int context);

  // The setup of a cache for this client; the longest request of the recorded
  // hour has 126,527 tokens.
  static CacheSetup Setup(DType mask_dtype, int context);

  // Gives free slots the next requests and makes one pass. Returns false if
  // nothing is left to do.
  bool Step();

  SessionGauges gauges() const { return sessions_->Gauges(); }
  double sessions_time() const { return time_; }  // With the calls they make.
  double mask_elements() const { return mask_elements_; }
  std::int64_t finished() const { return finished_; }
  // Prompt tokens that were in one of the slots, in the order that was played.
  std::int64_t reusable() const { return reusable_; }

 private:
  // A request whose prompt a slot holds, and how many of its tokens.
  struct Held {
    const ServiceRequest* request = nullptr;
    int length = 0;
  };

  void Submit();
  void CountReusable(int request, const RequestInfo& info);
  template <class Call>
  auto Timed(const Call& call);

  const std::vector<ServiceRequest>* requests_;
  ChatCache* cache_;
  std::unique_ptr<Sessions> sessions_;
  std::vector<Held> held_;
  int submitted_ = 0;
  std::vector<int> waiting_;
  std::int32_t next_answer_;
  std::int64_t finished_ = 0;
  std::int64_t reusable_ = 0;
  double time_ = 0;
  double mask_elements_ = 0;
};

}  // namespace kvtwin::bench

#endif  // KVTWIN_BENCH_CHAT_H_
