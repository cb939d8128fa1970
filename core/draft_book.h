// The drafts of a cache's sequences, as the checks of calls need them: their
// positions and parents, without cells (D1 to D5 of docs/semantics.md).

#ifndef KVTWIN_CORE_DRAFT_BOOK_H_
#define KVTWIN_CORE_DRAFT_BOOK_H_

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "core/index.h"
#include "kvtwin/cache.h"

namespace kvtwin {

struct BatchToken;

// Returns the parent of a batch token; kNotADraft for an ordinary token.
inline int ParentOf(const Batch& batch, std::size_t token) {
  return batch.parents.empty() ? kNotADraft : batch.parents[token];
}

// Whether some token of the batch is a draft.
bool HasDrafts(const Batch& batch);

class DraftBook {
 public:
  bool empty() const { return by_sequence_.empty(); }
  bool Has(int seq) const { return by_sequence_.contains(seq); }
  // Requires: not empty().
  int AnySequence() const { return by_sequence_.begin()->first; }
  // Whether a stored token of `seq` at this position is a draft: drafts come
  // after all committed tokens.
  bool IsDraft(int seq, std::int32_t position) const;

  // Returns what is wrong with the parents and positions of a batch, whose
  // lists are otherwise valid. `last_position` says where the committed tokens
  // of a sequence end, -1 if there are none.
  Status CheckBatch(
      const Batch& batch,
      const std::function<std::int64_t(int)>& last_position) const;
  // Returns what is wrong with the path of a Commit (D5).
  Status CheckPath(int seq, std::span<const int> path) const;

  // Adds the drafts of a checked batch, and numbers its `tokens`.
  void Add(const Batch& batch, std::vector<BatchToken>& tokens);
  // Removes the drafts of the last batch again.
  void TakeBack(const std::vector<BatchToken>& tokens);
  void Drop(int seq) { by_sequence_.erase(seq); }

 private:
  struct Draft {
    std::int32_t position = 0;
    int parent = kCommitted;
  };

  std::map<int, std::vector<Draft>> by_sequence_;  // No list is empty.
};

}  // namespace kvtwin

#endif  // KVTWIN_CORE_DRAFT_BOOK_H_
