// Sessions of a server: requests that share a cache, and each reuse what the
// cache still holds of their prompt.
//
// A cache has slots, one for each sequence 0 .. slots - 1. A request waits for
// a slot, takes over the longest prefix of its prompt that is stored, computes
// the rest of the prompt in chunks, and then one token after another:
//
//   Submit(prompt)            -> request
//   loop: NextBatch()            plans a batch and calls StartForward
//         for each layer: SetLayer, Put, Get, attention (the caller's)
//         Sampled(request, token) for each output of the batch; or
//         Finish(request)         if that token ended the answer
//
// With `ahead` the caller may plan the next batch before it has sampled the
// last one. The tokens of the next batch that are not known yet are then
// kUnknownToken, until Sampled fills them in; only then are they computed.
//
// A planned batch is always computed, also the tokens of requests that have
// ended since: their records count them. The exception is a token that is still
// kUnknownToken; its row may hold anything.
//
// Sessions own no rows and compute nothing. They call CopyPrefix, CanResume,
// Remove and StartForward of the cache, which must outlive them; no other
// caller may change these sequences. docs/semantics.md defines each call (Q1 to
// Q13). If the cache was initialized with InitOf, a
// batch is never refused for lack of cells: docs/serving.md has the proof.
//
// Misuse returns invalid_argument or failed_precondition and changes nothing.
// Equal calls give equal answers. If memory runs out, std::bad_alloc passes
// through.
//
// Not thread-safe: one call at a time on one object. Only NextBatch changes the
// cache: until the next one, other threads may read the views of a batch, and
// compute attention, while one thread makes other calls (CheckSessions and
// DumpSessions too, which read the cache).

#ifndef KVTWIN_SESSIONS_H_
#define KVTWIN_SESSIONS_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvtwin/cache.h"
#include "kvtwin/paged.h"
#include "kvtwin/status.h"

namespace kvtwin {

// A token of a batch that is not sampled yet.
inline constexpr std::int32_t kUnknownToken = -1;

// An input of the model. Two inputs are equal if all three members are equal.
struct SessionInput {
  std::int32_t token = 0;        // >= 0
  std::uint64_t multimodal = 0;  // The hash of an image or sound; 0: text.
  int same_batch = 0;  // The next inputs, this many, must be in the same batch.
  bool operator==(const SessionInput&) const = default;
};

// The slots in which a request may find its prefix.
enum class SlotChoice {
  kOwnPrefix,  // In a free slot, which it then continues.
  kAnyPrefix,  // In any slot. The prefix of a slot that is in use, or that
               // holds more, is shared with another one (CopyPrefix).
};

// The sizes of the sessions, and where a request looks for its prefix.
struct SessionsSpec {
  int slots = 1;    // Requests that run at once, at most.
  int context = 1;  // Tokens of a slot, at most.
  int batch = 1;    // Tokens of a batch, at most.
  // Where a prefix is looked for.
  SlotChoice choice = SlotChoice::kAnyPrefix;
  // Whether a batch may be planned before the tokens of the last one are
  // sampled.
  bool ahead = false;
};

// The size of a cache that never refuses a batch of these sessions.
constexpr InitArgs InitOf(const SessionsSpec& spec, DType dtype) {
  return {.dtype = dtype,
          .max_sequences = spec.slots,
          .capacity = spec.context,
          .max_batch = spec.batch};
}

// How a request is answered.
struct RequestOptions {
  // A context shift keeps this many of the first tokens; -1: all of the prompt.
  // At most context - 1 are kept.
  int keep = 0;
  std::int64_t limit = 0;  // Tokens of the answer, at most; 0: no limit.
  bool reuse = true;       // Look for a stored prefix of the prompt.
  bool shift = true;      // When the slot is full, drop the older half. Without
                          // shift the answer ends there.
  bool truncate = false;  // Cut the middle out of a prompt that is too long.
};

// Why a request has ended, if it has.
enum class Ending {
  kNone,     // It has not ended.
  kLimit,    // Its answer has `limit` tokens.
  kContext,  // Its slot is full, and it does not shift.
};

// The tokens of one forward pass; entry i of each list is for token i. Valid
// until the next NextBatch.
struct SessionBatch {
  // The inputs of the model, their positions, their sequences in the cache, and
  // the requests that they belong to.
  std::span<const SessionInput> inputs = {};
  std::span<const std::int32_t> positions = {};
  std::span<const int> sequences = {};
  std::span<const int> requests = {};
  // Indices of the tokens after which a token is to be sampled.
  std::span<const int> outputs = {};
};

// A request, as far as it is answered.
struct RequestInfo {
  int slot = -1;    // -1: it waits.
  int source = -1;  // The slot whose prefix it took over; -1: none.
  int reused = 0;   // Tokens of the prompt that were not computed again.
  int prompt = 0;   // Tokens of the prompt, after truncation.
  std::int64_t answered = 0;  // Tokens sampled so far.
  int outputs = 0;            // Planned outputs that are not sampled yet.
  // A text for people, if a slot with a longer prefix, or a lower slot with the
  // same, could not resume there: the slot, and why (Cache::WhyNotResume).
  std::string missed = {};
  bool operator==(const RequestInfo&) const = default;
};

// A slot, and the inputs that its sequence holds.
struct SlotInfo {
  int request = -1;  // -1: free.
  // The inputs that the sequence is known to hold, by position. The last may
  // be kUnknownToken.
  std::span<const SessionInput> record = {};
  // A prompt may reuse this many of the inputs: inputs after a context shift
  // have seen tokens that are gone.
  int reusable = 0;
};

// Totals since the sessions were made, except for the first three.
struct SessionGauges {
  std::int64_t waiting = 0;  // Requests.
  std::int64_t running = 0;  // Requests.
  std::int64_t bytes = 0;  // The records and the inputs still to compute. K and
                           // V rows are the cache's.
  std::int64_t prompt_tokens = 0;   // Counted when the request gets a slot.
  std::int64_t hit_tokens = 0;      // The reused part of them.
  std::int64_t planned_tokens = 0;  // Tokens of all batches.
  std::int64_t batches = 0;         // Batches that were planned.
  std::int64_t forks = 0;           // Prefixes copied from another slot.
  std::int64_t evicted_tokens = 0;  // Tokens that another request replaced.
  std::int64_t shifts = 0;          // Context shifts.
  std::int64_t reprocessed = 0;     // Shifts that had to compute a slot again.
  std::int64_t missed = 0;    // Requests with a prefix that could not resume.
  std::int64_t refusals = 0;  // Batches that the cache refused.
  bool operator==(const SessionGauges&) const = default;
};

// The sessions of a server, as the top of the header says.
class Sessions {
 public:
  virtual ~Sessions() = default;

  // The sizes with which the sessions were made.
  virtual const SessionsSpec& spec() const = 0;

  // Adds a request to the queue and returns its number: 0, 1, 2, ... Errors: an
  // empty prompt; a negative token; a group of inputs that continues after the
  // prompt, or is larger than a batch or the context; a keep < -1; a negative
  // limit; a prompt longer than the context, unless it is truncated; 2^31 - 1
  // requests were submitted before.
  virtual Result<int> Submit(std::span<const SessionInput> prompt,
                             const RequestOptions& options = {}) = 0;

  // Gives free slots to the waiting requests, plans a batch and calls
  // StartForward. Without anything to compute, the batch is empty and there is
  // no such call. Errors: those of the cache; then nothing of the batch is
  // planned, and the next call tries again.
  virtual Result<SessionBatch> NextBatch() = 0;

  // Feeds the token that was sampled from the request's oldest output. Errors:
  // a request that does not run, or has no output; a negative token.
  virtual Result<Ending> Sampled(int request, std::int32_t token) = 0;

  // Ends a request, whether it waits or runs; what it has computed can be
  // reused. The last `removed` sampled tokens are taken out of its record, such
  // as those of a stop string. The token that ended the answer, such as the end
  // of text, needs no Sampled. Errors: a request that has ended; a `removed`
  // outside of [0, answered].
  virtual Status Finish(int request, std::int64_t removed = 0) = 0;

  // The same for a request that is given up.
  Status Cancel(int request) { return Finish(request); }

  // Says that the caller has replaced the tokens of a slot's sequence, as by
  // AddSequence of a saved one: it now holds exactly these inputs, which a
  // prompt may reuse. Errors: a slot that is in use; a negative token; more
  // inputs than the context has; groups as in Submit.
  //
  // If the model fails in a pass, the records of its slots have tokens without
  // rows. Cancel the requests of the pass. Then for each slot of the batch,
  // with its first position p there: Remove(slot, p, kOpenEnd) from the cache,
  // and Adopt(slot, the first p inputs of its record). Over a pool, the first
  // Remove drops the whole pass and returns failed_precondition: call it again.
  // A cache of states may have kept less: ResumeBefore(slot, p) says how much.
  virtual Status Adopt(int slot, std::span<const SessionInput> record) = 0;

  // Errors: a request that has ended, or never was.
  virtual Result<RequestInfo> Request(int request) const = 0;
  // Requests that have not ended, by number.
  virtual std::vector<int> Requests() const = 0;
  // The spans are valid until the next call that is not const.
  virtual Result<SlotInfo> Slot(int slot) const = 0;
  virtual SessionGauges Gauges() const = 0;
};

// Errors: an unknown twin; a number < 1; an unknown choice.
Result<std::unique_ptr<Sessions>> MakeSessions(
    Cache& cache, const SessionsSpec& spec,
    std::string_view twin = "optimized");

// The slots of sessions in a pool: a cache that MakeSessions takes, and whose
// Put appends to the pool. A forward pass is StartForward (by NextBatch), then
// for each layer SetLayer, Put and attention over the pool's Views; the rows
// are committed by the next call of StartForward, CopyPrefix or Remove. If a
// layer lacks its rows then, as after an error of the model, that call drops
// the tokens of the pass and is a failed_precondition; the next call works (see
// Adopt). CanResume is true up to the end of a slot. Shifts are refused, and
// the tokens that stay are computed again. Drafts, reserving passes, Get and
// SetCausal are not_supported.
class PoolSlots : public Cache {
 public:
  // The pool's sequence of a slot. Errors: a slot that does not exist.
  virtual Result<int> Sequence(int slot) const = 0;
};

// The pool must outlive the slots, and have no other sequences. Errors: those
// of MakeSessions for a bad spec; the pool is smaller than BlocksFor; its
// max_seq_len is less than the context.
Result<std::unique_ptr<PoolSlots>> MakePoolSlots(PagedPool& pool,
                                                 const SessionsSpec& spec);

// With this many blocks no batch is refused. Requires: block_size >= 1.
constexpr std::int64_t BlocksFor(const SessionsSpec& spec, int block_size) {
  const std::int64_t context = spec.context;
  return spec.slots * ((context + block_size - 1) / block_size);
}

// Numbers of cells. A wrapper is counted by its active cache.
struct CellGauges {
  int cells = 0;                 // All cells of the cache.
  int used = 0;                  // Cells that hold a token.
  int shared = 0;                // Cells of several sequences.
  std::int64_t memberships = 0;  // Pairs of a cell and a sequence.
  bool operator==(const CellGauges&) const = default;
};
// Returns these counts of a cache.
CellGauges CountCells(const Cache& cache);

// Checks that the cache holds what the records say, and nothing else: for use
// in production, between passes. Its time grows with the number of stored
// tokens (docs/serving.md has figures). The message names the slot. Not for
// recurrent caches, nor for wrappers whose active cache is recurrent: they hold
// states, and the tokens between these would count as lacking.
Status CheckSessions(const Sessions& sessions, const Cache& cache);

// A text for people: the slots, the requests that wait, and the gauges.
std::string DumpSessions(const Sessions& sessions, const Cache& cache);

}  // namespace kvtwin

#endif  // KVTWIN_SESSIONS_H_
