// What the client of a paged pool knows of a sequence, and what it asks for: an
// operation's numbers mean what the state makes of them.

#ifndef KVTWIN_PROPS_PAGED_PAGED_CLIENT_H_
#define KVTWIN_PROPS_PAGED_PAGED_CLIENT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/dense_tensor.h"
#include "kvtwin/paged.h"
#include "props/paged/paged_trio.h"

namespace kvtwin::props {

// As a place in a list of that size.
inline int Mod(int number, int size) { return ((number % size) + size) % size; }

// Of a map by sequence, that is not empty.
template <class Sequences>
int PickOf(const Sequences& sequences, int number) {
  const int at = Mod(number, static_cast<int>(sequences.size()));
  return std::next(sequences.begin(), at)->first;
}

// The failure of a pool: a sentence that begins with the call, "Open: ...".
Failure PoolFailure(std::string text);

// Throws the failure unless `holds`. `text` is a sentence, or a function that
// makes it.
template <class Text>
void Expect(bool holds, const Text& text) {
  if (!holds) throw PoolFailure(Made(text));
}

// Throws a failure unless the call succeeded.
void Need(const Status& status, std::string_view call);
template <class T>
T Need(Result<T> answer, std::string_view call) {
  Need(answer.status(), call);
  return std::move(*answer);
}

// Has `actor` do what the operation is; where there is no sequence, any opens
// one.
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
  }
}

// Prefix keys by number, modulo their count. Those whose numbers are the same
// divided by 4 are easily taken for one another; 0 is no key.
int PagedKeyCount();
const PrefixKey& PagedKey(int number);

// Kinds of tokens that an append may bring.
inline constexpr int kPagedAlphabets = 6;

// A prompt: tokens of a sequence that was seen, if there is one, and more.
PagedClient DrawPrompt(const PagedOp& op,
                       const std::vector<std::vector<std::int32_t>>& seen);

// From this number on, an append brings up to all that a sequence can hold, and
// one token more; below it, up to two blocks.
inline constexpr int kLongAppend = 64;
// The tokens that a sequence can hold.
inline int TokensOf(const PagedSpec& spec) {
  return std::min(spec.max_seq_len, spec.blocks * spec.block_size);
}

// What an append brings.
std::vector<std::int32_t> DrawTokens(const PagedOp& op, const PagedSpec& spec);

struct PagedRows {
  DenseTensor key;
  DenseTensor value;
};
// Of the client's pending tokens, in a layer: of f32, and each says which
// tokens it is of. Another `salt` makes others of the same tokens.
PagedRows PendingRows(const PagedClient& client, const PagedSpec& spec,
                      int layer, std::uint64_t salt = 0);
// The same as they are stored.
PagedRows AsStored(const PagedRows& rows, const PagedSpec& spec);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGED_PAGED_CLIENT_H_
