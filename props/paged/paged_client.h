// The client's side of a paged pool: what the client knows about a sequence,
// and how the numbers of an operation become a call that fits the pool's state.

#ifndef KVTWIN_PROPS_PAGED_PAGED_CLIENT_H_
#define KVTWIN_PROPS_PAGED_PAGED_CLIENT_H_

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/index.h"
#include "core/trace/paged_trace.h"
#include "kvtwin/paged.h"
#include "props/attention/pool_asker.h"
#include "props/paged/paged_driver.h"

namespace kvtwin::props {

// Returns `number` as an index into a list of `size` elements.
inline int Mod(int number, int size) { return ((number % size) + size) % size; }

// Returns a key of `sequences`, a map by sequence. Requires: it is not empty.
template <class Sequences>
int PickOf(const Sequences& sequences, int number) {
  const int at = Mod(number, Size(sequences));
  return std::next(sequences.begin(), at)->first;
}

// Returns the failure of a pool. `text` begins with the call: "Open: ...".
// `call` is as in Failure; without it, RunPaged sets the last call.
Failure PoolFailure(std::string text,
                    std::optional<PagedTraceOpKind> call = {});

// Returns the sequences of two batches, as a server may have them: all, the
// last one first, and every second sequence.
inline std::vector<std::vector<int>> BatchesOf(std::vector<int> sequences) {
  std::vector<std::vector<int>> batches = {
      {sequences.rbegin(), sequences.rend()}};
  if (sequences.size() < 2) return batches;
  std::vector<int>& part = batches.emplace_back();
  for (std::size_t i = 0; i < sequences.size(); i += 2) {
    part.push_back(sequences[i]);
  }
  return batches;
}

// Throws the failure unless `holds`. `text` is a sentence, or a function that
// makes it.
template <class Text>
void Expect(bool holds, const Text& text,
            std::optional<PagedTraceOpKind> call = {}) {
  if (!holds) throw PoolFailure(Made(text), call);
}

// Throws a failure unless the twins give the same answer to `call`.
template <class Answer>
void ExpectEqual(std::string_view call, const Answer& reference,
                 const Answer& tested,
                 std::optional<PagedTraceOpKind> pool_call = {}) {
  Expect(
      reference == tested,
      [&] {
        return fmt::format(
            "{} differs: {} by the reference, {} by the pool under test", call,
            reference, tested);
      },
      pool_call);
}

// Throws a failure unless the call succeeded.
void Need(const Status& status, std::string_view call);
template <class T>
T Need(Result<T> answer, std::string_view call) {
  Need(answer.status(), call);
  return std::move(*answer);
}

// Calls ask(layer, batch) for each layer with rows, with one of the batches of
// the sequences that have uncommitted rows in it.
template <class Ask>
void ForEachAsked(const PoolAsker& asker, const reference::PagedLedger& ledger,
                  const Ask& ask) {
  for (const int layer : asker.Layers()) {
    const std::vector<int> appended = PoolAsker::Appended(ledger, layer);
    if (appended.empty()) continue;
    int turn = layer;
    for (const int sequence : appended) {
      turn += ledger.RowCount(sequence, layer);
    }
    const auto batches = BatchesOf(appended);
    ask(layer, At(batches, turn % Size(batches)));
  }
}

// Asks for outputs, and compares them with the rows of the ledger (P19); throws
// a failure if the pool refuses, or an output is wrong. Returns the number of
// rows that were compared.
inline std::int64_t AskOutputs(PoolAsker& asker,
                               const reference::PagedLedger& ledger, int layer,
                               const std::vector<int>& sequences,
                               PagedPool& pool) {
  Need(asker.Ask(ledger, layer, sequences, pool), "Attend");
  const auto wrong = asker.FindWrong();
  Expect(!wrong, [&] {
    return fmt::format("attend: layer {}: {}", layer, wrong->text);
  });
  return asker.CountJudged();
}

// Returns whether the views have the same block and equal rows.
bool SameViews(const PagedView& a, const PagedView& b);

inline constexpr std::string_view kSlots = "SlotMapping of the reference";

// Has `actor` execute the operation; without any sequence, every operation
// opens one.
template <class Actor>
void Act(Actor& actor, bool any_sequence, const PagedOp& op) {
  if (!any_sequence) return actor.Open(op);
  switch (op.kind) {
    case PagedOpKind::kOpen:
      return actor.Open(op);
    case PagedOpKind::kFork:
      return actor.Fork(op);
    case PagedOpKind::kAppend:
      return actor.Append(op);
    case PagedOpKind::kCommit:
      return actor.Commit(op, /*known=*/true);
    case PagedOpKind::kCommitUnknown:
      return actor.Commit(op, /*known=*/false);
    case PagedOpKind::kTruncate:
      return actor.Truncate(op);
    case PagedOpKind::kFree:
      return actor.Free(actor.Pick(op.a));
    case PagedOpKind::kMisuse:
      return actor.Misuse(op);
    case PagedOpKind::kLayers:
      return actor.AppendLayers(op);
    case PagedOpKind::kMedia:
      return actor.AddMedia(op);
  }
}

// Prefix keys by number, modulo their count. Keys whose numbers are equal after
// division by 4 are easily confused; number 0 is the empty key.
int PagedKeyCount();
const PrefixKey& PagedKey(int number);

// Kinds of tokens that an append may have.
inline constexpr int kPagedAlphabets = 6;

// Draws a prompt: the tokens of one of the `seen` sequences, if there are any,
// and up to three more. The key is that of `c`; from kSeenMedia on, it is
// that of this sequence, perhaps with other media, or those that it dropped.
inline constexpr int kSeenMedia = 1024;
// From this `c` on, `a` is the prompt: its binary digits after the first one.
// If `b` is above 0, it has an image at position b - 1.
inline constexpr int kOwnPrompt = 5 * kSeenMedia;
// `freed`, the media of the sequence that was freed last, count as dropped by a
// prompt without media: the pool may reuse the place of that sequence.
PagedClient DrawPrompt(const PagedOp& op, const std::vector<PagedClient>& seen,
                       const std::vector<PrefixMedia>& freed = {});

// An append whose `b` is below this number has up to two blocks of tokens;
// otherwise, up to one token more than a sequence can hold.
inline constexpr int kLongAppend = 64;
// Returns how many tokens a sequence can hold.
inline int TokensOf(const PagedSpec& spec) {
  return std::min(spec.max_seq_len, spec.blocks * spec.block_size);
}

// Returns the number of tokens of an append.
inline int AppendedTokens(const PagedOp& op, const PagedSpec& spec) {
  if (op.b < kLongAppend) return 1 + Mod(op.b, 2 * spec.block_size);
  return 1 + (op.b - kLongAppend) % (TokensOf(spec) + 1);
}

// The hash of some media.
std::string MediaHash(int number);

// Draws the tokens of an append.
std::vector<std::int32_t> DrawTokens(const PagedOp& op, const PagedSpec& spec);

// The layer that an append to `layers` layers stores `number`th: in one of four
// appends the last layer is the first one, as P3 allows any order. Then the
// first FirstLayers layers have the rows.
constexpr bool BeginsWithTheLastLayer(const PagedOp& op) {
  return op.a / 8 % 4 == 3;
}
inline int LayerOf(const PagedOp& op, int number, int layers) {
  return BeginsWithTheLastLayer(op) ? layers - 1 - number : number;
}
inline int FirstLayers(const PagedOp& op, int number, int layers) {
  const bool all = number + 1 == layers;
  return BeginsWithTheLastLayer(op) && !all ? 0 : number + 1;
}

// Replaces the pending tokens by the next tokens of the prompt's rest, if any.
inline void UseRest(PagedClient& client) {
  if (client.rest.empty()) return;
  const int most = std::min(Size(client.rest), Size(client.pending));
  client.pending.assign(client.rest.begin(), client.rest.begin() + most);
}

// The most sequences that are open, and the most clients that Remember keeps.
inline constexpr int kOpenClientsMost = 6;
inline constexpr int kSeenClientsMost = 20;
// Returns a number that names the last item of any list of up to `most` items,
// since numbers are taken modulo the items.
constexpr int LastOf(int most) {
  int multiple = 1;
  for (int count = 2; count <= most; ++count) {
    multiple = std::lcm(multiple, count);
  }
  return multiple - 1;
}
inline constexpr int kLastItem = LastOf(kSeenClientsMost);
// An open or a fork with a `b` of at least kManyOpen may add sequences beyond
// kOpenClientsMost, up to kManyClientsMost.
inline constexpr int kManyOpen = 64;
inline constexpr int kManyClientsMost = 72;
// Whether an open or a fork may add a sequence to `count` sequences of a pool
// that may have `most`.
inline bool MayAddClient(const PagedOp& op, std::size_t count,
                         int most = kManyClientsMost) {
  const int drawn = op.b < kManyOpen ? kOpenClientsMost : kManyClientsMost;
  return count < AsSize(std::min(drawn, most));
}
// Adds a client to the last clients whose tokens later prompts are drawn from,
// with more tokens; and the tokens as a pool would have them that takes unknown
// tokens for 0.
void Remember(const PagedClient& client, std::span<const std::int32_t> more,
              std::vector<PagedClient>& seen);

// Draws media at a position after the appended tokens, whose rows do not depend
// on it.
inline PrefixMedia DrawMedia(const PagedOp& op, const PagedClient& client,
                             const PagedSpec& spec) {
  const int position = Size(client.tokens) + Size(client.pending) +
                       Mod(op.b, 2 * spec.block_size);
  return {position, MediaHash(Mod(op.c, 3))};
}

struct PagedRows {
  DenseTensor key;
  DenseTensor value;
};
// Returns the f32 rows of the client's pending tokens in a layer. A pool of f32
// holds their numbers exactly; the other dtypes round. With an `asker`, f16,
// bf16 and the dtype to which the pool rounds in its attention hold them
// exactly. A row follows from the tokens up to its own; another `salt` gives
// the same tokens other rows.
PagedRows PendingRows(const PagedClient& client, const PagedSpec& spec,
                      int layer, const std::optional<PoolAsker>& asker = {},
                      std::uint64_t salt = 0);
// Returns the rows converted to the dtypes in which the pool stores them.
PagedRows AsStored(const PagedRows& rows, const PagedSpec& spec);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGED_PAGED_CLIENT_H_
