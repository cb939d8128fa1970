// A server that chats, without a model: which
// calls its cache gets. Several slots, each a sequence; a request takes over
// the longest prefix that any slot has (the policy for several users); batches
// go round the slots until they are full. There is always somebody waiting: a
// slot that becomes free gets the next request.

#ifndef KVTWIN_BENCH_CHAT_H_
#define KVTWIN_BENCH_CHAT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "bench/twins.h"

namespace kvtwin::bench {

struct Request {
  int input_length = 0;
  int output_length = 0;
  std::vector<int> blocks;  // Equal numbers are equal blocks of 512 tokens.
};

// One request a line, as in mooncake_conversation.jsonl; those that need at
// most `context` tokens with their answer. None if there is no such file.
std::vector<Request> ReadRequests(const std::string& path, int context);

class Chat {
 public:
  static constexpr int kSlots = 16;
  static constexpr int kBatch = 512;

  // `requests` must outlive this.
  explicit Chat(const std::vector<Request>& requests);

  // Of a cache for it. Requires: no request and its answer need more than
  // `context` tokens; the hour's longest has 126,527.
  static CacheSetup Setup(DType mask_dtype, int context);

  // Gives free slots the next requests and makes one pass. False if nothing is
  // left to do.
  bool Step(Cache& cache);

  // Fails if a row of the last pass's mask is not what this client knows of the
  // cells that it was given. Looks at the first and last row of the batch.
  void CheckMask(const std::string& name, Cache& cache) const;

  // So far.
  double cache_time() const { return cache_time_; }  // Nanoseconds in calls.
  std::int64_t passes() const { return passes_; }
  std::int64_t tokens() const { return tokens_; }
  double mask_elements() const { return mask_elements_; }
  std::size_t finished() const { return finished_; }

 private:
  struct Slot {
    const Request* request = nullptr;  // Whose tokens it holds, if any.
    int length = 0;                    // So many: the record.
    int to_come = 0;                   // Of the prompt.
    int to_say = 0;                    // Tokens of the answer.
    std::int64_t last_used = 0;
    std::vector<int> cells;  // By position.
    bool busy() const { return to_come > 0 || to_say > 0; }
  };

  static int CommonPrefix(const Slot& slot, const Request& request);
  bool Admit(Cache& cache);
  int ChooseSlot(Cache& cache, const Request& request, int& prefix);
  void AddFrom(int index);
  void Advance(Cache& cache);
  void CheckRow(const std::string& name, const KvView& view, std::size_t row,
                const Slot& slot, std::int32_t position) const;

  const std::vector<Request>* requests_;
  std::size_t next_request_ = 0;
  std::vector<Slot> slots_;
  int next_slot_ = 0;
  Tokens batch_;
  double cache_time_ = 0;
  std::int64_t passes_ = 0;
  std::int64_t tokens_ = 0;
  double mask_elements_ = 0;
  std::int64_t clock_ = 0;
  std::size_t finished_ = 0;
};

}  // namespace kvtwin::bench

#endif  // KVTWIN_BENCH_CHAT_H_
