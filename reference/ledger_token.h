// The tokens of the ledger, and what it means that some of them are drafts (D1
// to D6 of docs/semantics.md).

#ifndef KVTWIN_REFERENCE_LEDGER_TOKEN_H_
#define KVTWIN_REFERENCE_LEDGER_TOKEN_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "core/draft_book.h"
#include "core/guarded_cache.h"
#include "kvtwin/cache.h"

namespace kvtwin::reference {

struct LedgerToken {
  std::int64_t position = 0;
  std::set<int> sequences;     // Empty for a draft: no sequence holds it yet.
  int row = -1;                // In the batch of the current pass.
  std::map<int, KvRows> rows;  // By layer, in the dtypes of the cache.
  std::int64_t number = 0;     // No other token of the ledger has it.
  // The sequence of a draft (else -1), its number there and its parent.
  int drafted_by = -1;
  int draft = -1;
  int parent = kNotADraft;

  bool HeldBy(int seq) const { return sequences.contains(seq); }
  bool IsDraft() const { return drafted_by >= 0; }
  // The sequences whose masks, views and reports may show it.
  std::set<int> owners() const {
    return IsDraft() ? std::set{drafted_by} : sequences;
  }
};

// Makes the new token of a batch token a draft.
inline void MakeDraft(const BatchToken& at, LedgerToken& token) {
  token.sequences.clear();
  token.drafted_by = at.sequence;
  token.draft = at.draft;
  token.parent = at.parent;
}

// Whether `token` is the draft of this batch token, or one that it follows
// (D2). The drafts of the sequence may be gone by now.
inline bool Follows(const std::vector<LedgerToken>& tokens,
                    const BatchToken& at, const LedgerToken& token) {
  if (token.drafted_by != at.sequence) return false;
  // A draft comes after its parent, in the ledger as in the batches.
  int number = at.draft;
  for (auto other = tokens.rbegin();
       other != tokens.rend() && number > token.draft; ++other) {
    const bool found =
        other->drafted_by == at.sequence && other->draft == number;
    if (found) number = other->parent;
  }
  return number == token.draft;
}

// The number of drafts of `seq`.
inline int CountDrafts(const std::vector<LedgerToken>& tokens, int seq) {
  return static_cast<int>(
      std::ranges::count(tokens, seq, &LedgerToken::drafted_by));
}

// Numbers the drafts of a batch, whose tokens are `at` (D1).
inline void NumberDrafts(const Batch& batch,
                         const std::vector<LedgerToken>& tokens,
                         std::vector<BatchToken>& at) {
  std::map<int, int> next;
  for (std::size_t i = 0; i < at.size(); ++i) {
    at[i].parent = ParentOf(batch, i);
    if (at[i].parent == kNotADraft) continue;
    const int seq = at[i].sequence;
    if (!next.contains(seq)) next[seq] = CountDrafts(tokens, seq);
    at[i].draft = next[seq]++;
  }
}

// Lowers the lowest position of each sequence to that of its drafts (D3).
inline void LowerToDrafts(const std::vector<LedgerToken>& tokens,
                          std::map<int, std::int64_t>& lows) {
  for (const LedgerToken& token : tokens) {
    if (!token.IsDraft()) continue;
    std::int64_t& low =
        lows.try_emplace(token.drafted_by, token.position).first->second;
    low = std::min(low, token.position);
  }
}

// Whether an ordinary token of the batch is of a sequence with drafts (D4).
template <class Part>
bool NeedsCommit(const std::vector<Part>& parts, const Batch& batch) {
  std::set<int> owners;
  for (const Part& part : parts) {
    // Most tokens have -1, as they are no drafts; it is the first in the set.
    for (auto& at : part.tokens()) owners.insert(owners.begin(), at.drafted_by);
  }
  for (std::size_t i = 0; i < batch.positions.size(); ++i) {
    const bool ordinary = ParentOf(batch, i) == kNotADraft;
    if (ordinary && owners.contains(batch.sequences[i])) return true;
  }
  return false;
}

// The drafts in `path` become tokens of `seq`; its others are gone (D5, D6).
inline void CommitDrafts(int seq, std::span<const int> path,
                         std::vector<LedgerToken>& tokens) {
  for (LedgerToken& token : tokens) {
    if (token.drafted_by != seq) continue;
    if (std::ranges::count(path, token.draft) == 0) continue;
    token.sequences = {seq};
    token.drafted_by = -1;
  }
  std::erase_if(tokens, [&](auto& token) { return token.drafted_by == seq; });
}

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_LEDGER_TOKEN_H_
