// Slots: which request uses which sequence of the cache, and which tokens a
// batch has.
//
// A request takes over the longest stored prefix of its prompt: in the slot
// that has it if that slot is free, otherwise as a fork, whose cells are shared
// with the other slot. The rest of the prompt is computed in chunks, beside the
// single tokens of requests that are answered.

#ifndef SERVE_SLOTS_H_
#define SERVE_SLOTS_H_

#include <kvtwin/cache.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "park.h"
#include "tokenizer.h"

namespace serve {

struct SlotsSpec {
  int slots = 16;
  int context = 4096;  // Tokens of a slot, at most.
  int batch = 512;     // Tokens of a batch, at most.
  bool share = true;   // Take over prefixes.
};

// The tokens of a pass. Request outputs[i].request gets the token that follows
// token outputs[i].index.
struct SlotBatch {
  struct Output {
    int index = 0;
    int request = 0;
  };
  Tokens tokens;
  std::vector<std::int32_t> positions;
  std::vector<int> sequences;
  std::vector<Output> outputs;
};

class Slots {
 public:
  // Initializes the cache, with rows of `dtype`. `parked` may be null.
  static kvtwin::Result<std::unique_ptr<Slots>> Make(
      const kvtwin::CacheSpec& cache, kvtwin::DType dtype,
      const SlotsSpec& spec, ParkingLot* parked);

  // Adds a request. Requires: 1 to context - 1 tokens.
  void Submit(int request, Tokens prompt);

  // Gives free slots to requests, plans a batch and calls StartForward. The
  // batch is empty if there is nothing to compute.
  kvtwin::Result<SlotBatch> NextBatch();

  // Adds the token that a request got. Returns whether its slot has a place for
  // the token.
  bool Sampled(int request, std::int32_t token);

  // Ends a request, whether it waits or runs, and parks what it has computed.
  void Finish(int request);

  kvtwin::Cache& cache() { return *cache_; }
  // Tokens of the request's prompt that were not computed again.
  int Reused(int request) const;
  std::size_t waiting() const { return waiting_.size(); }
  int running() const;
  int used_cells() const;

 private:
  struct Slot {
    int request = -1;  // -1: free.
    Tokens tokens;     // The prompt and the answer.
    std::size_t stored = 0;  // Tokens that the cache has.
    std::size_t prompt = 0;
    int reused = 0;
    std::int64_t used = 0;  // When a request began or ended.
  };
  struct Request {
    int number = 0;
    Tokens prompt;
  };

  bool Assign(const Request& request);
  kvtwin::Status TakePrefix(int target, int source, std::size_t length);
  int FindSlot(int request) const;

  SlotsSpec spec_;
  ParkingLot* parked_ = nullptr;
  std::unique_ptr<kvtwin::Cache> cache_;
  std::vector<Slot> slots_;
  std::deque<Request> waiting_;
  std::int64_t time_ = 0;
};

}  // namespace serve

#endif  // SERVE_SLOTS_H_
