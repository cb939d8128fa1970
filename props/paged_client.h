// What the client of a paged pool knows of a sequence, and what it asks for: an
// operation's numbers mean what the state makes of them.

#ifndef KVTWIN_PROPS_PAGED_CLIENT_H_
#define KVTWIN_PROPS_PAGED_CLIENT_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/dense_tensor.h"
#include "kvtwin/paged.h"
#include "props/paged_trio.h"

namespace kvtwin::props {

// As a place in a list of that size.
inline int Mod(int number, int size) { return ((number % size) + size) % size; }

// A prompt: tokens of a sequence that was seen, if there is one, and more.
PagedClient DrawPrompt(const PagedOp& op,
                       const std::vector<std::vector<std::int32_t>>& seen);

// What an append brings.
std::vector<std::int32_t> DrawTokens(const PagedOp& op, const PagedSpec& spec);

struct PagedRows {
  DenseTensor key;
  DenseTensor value;
};
// Of the client's pending tokens, in a layer: of f32, and each says which
// tokens it is of.
PagedRows PendingRows(const PagedClient& client, const PagedSpec& spec,
                      int layer);
// The same as they are stored.
PagedRows AsStored(const PagedRows& rows, const PagedSpec& spec);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGED_CLIENT_H_
