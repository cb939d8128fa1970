// Replays the calls that a chat server makes to its cache, without a model.
// There are several slots, each a sequence. A request takes over the longest
// prefix that any slot has (the policy for several users); batches are filled
// from the slots in turn. Requests are always waiting: a slot that becomes free
// gets the next request.

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

// Reads one request per line, as in mooncake_conversation.jsonl; keeps those
// that need at most `context` tokens with their answer. Returns an empty list
// if the file does not exist.
std::vector<Request> ReadRequests(const std::string& path, int context);

class Chat {
 public:
  static constexpr int kSlots = 16;
  static constexpr int kBatch = 512;

  // `requests` must outlive this object.
  explicit Chat(const std::vector<Request>& requests);

  // The setup of a cache for this client. Requires: no request with its answer
  // needs more than `context` tokens; the longest of the recorded hour has
  // 126,527.
  static CacheSetup Setup(DType mask_dtype, int context);

  // Gives free slots the next requests and makes one pass. Returns false if
  // nothing is left to do.
  bool Step(Cache& cache);

  // Fails if a row of the last pass's mask contradicts what this client knows
  // of its cells. Checks the first and last row of the batch.
  void CheckMask(const std::string& name, Cache& cache) const;

  // Totals so far.
  double cache_time() const { return cache_time_; }  // Nanoseconds in calls.
  std::int64_t passes() const { return passes_; }
  std::int64_t tokens() const { return tokens_; }
  double mask_elements() const { return mask_elements_; }
  std::size_t finished() const { return finished_; }

 private:
  struct Slot {
    const Request* request = nullptr;  // Whose tokens it holds, if any.
    int length = 0;                    // Tokens that it is known to hold.
    int to_come = 0;                   // Tokens of the prompt still to compute.
    int to_say = 0;                    // Tokens of the answer still to compute.
    std::int64_t last_used = 0;
    std::vector<int> cells;  // Indexed by position.
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
