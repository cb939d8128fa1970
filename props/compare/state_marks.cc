// The coverage marks of recurrent caches and of hybrids.

#include <algorithm>
#include <set>

#include "props/compare/coverage_marks.h"

namespace kvtwin::props {
namespace {

using reference::CacheLedger;
using reference::LedgerToken;

// The lengths at which `seq` has a state, or the ends of its tokens.
std::set<std::int64_t> LengthsOf(const CacheLedger& ledger, int seq) {
  std::set<std::int64_t> lengths;
  for (const LedgerToken& token : ledger.tokens()) {
    if (token.HeldBy(seq)) lengths.insert(token.position + 1);
  }
  return lengths;
}

std::int64_t EndOf(const CacheLedger& ledger, int seq) {
  const std::set<std::int64_t> lengths = LengthsOf(ledger, seq);
  return lengths.empty() ? 0 : *lengths.rbegin();
}

// The greatest length up to `most` where the part can resume.
std::int64_t ResumesAt(const CacheLedger& ledger, int seq, std::int64_t most) {
  if (ledger.CanResume(seq, static_cast<std::int32_t>(most))) return most;
  const std::set<std::int64_t> lengths = LengthsOf(ledger, seq);
  std::int64_t best = 0;
  for (const std::int64_t at : lengths) {
    const bool can =
        at <= most && ledger.CanResume(seq, static_cast<std::int32_t>(at));
    if (can) best = at;
  }
  return best;
}

// Whether `seq` keeps the state at `length` only because it is pinned: it is
// neither one of its last checkpoints, nor one of its last two states.
bool IsKeptByItsPin(const CacheLedger& after, int seq, std::int64_t length,
                    std::int64_t before, std::int64_t end) {
  if (length == before || length == end || !after.IsPinned(seq, length)) {
    return false;
  }
  std::int64_t later = 0;  // Checkpoints.
  for (const std::int64_t other : LengthsOf(after, seq)) {
    later += other > length && after.IsCheckpoint(other) ? 1 : 0;
  }
  return !after.IsCheckpoint(length) || later >= after.kept();
}

}  // namespace

void Observer::SeeStates(const CacheLedger& before, const CacheLedger& after) {
  if (!after.recurrent()) return;
  const std::set<int> sequences(sequences_.begin(), sequences_.end());
  for (const int seq : sequences) {
    const std::set<std::int64_t> now = LengthsOf(after, seq);
    const std::int64_t read = read_[seq] = EndOf(before, seq);
    for (const LedgerToken& token : before.tokens()) {
      const std::int64_t length = token.position + 1;
      if (!token.HeldBy(seq) || now.contains(length)) continue;
      Hit(Mark("state_evicted"), before.IsCheckpoint(length));
      Hit(Mark("state_evicted_shared"), token.sequences.size() > 1);
      Hit(Mark("pin_evicted"), undone_.contains({seq, length}));
    }
    for (const std::int64_t length : now) {
      const std::int64_t end = *now.rbegin();
      Hit(Mark("state_inside"), length > read && length < end);
      Hit(Mark("pin_keeps"), IsKeptByItsPin(after, seq, length, read, end));
    }
    bool passed_over = false;
    for (std::size_t i = 0; i < positions_.size(); ++i) {
      const std::int64_t length = positions_[i] + 1;
      passed_over =
          passed_over || (sequences_[i] == seq && after.IsCheckpoint(length) &&
                          !now.contains(length) &&
                          reference::CountDrafts(after.tokens(), seq) == 0);
    }
    Hit(Mark("state_passed_over"), passed_over);
  }
  SeeDraftStates(before, after);
}

// A draft that its ledger shows another state than its parent's.
void Observer::SeeDraftStates(const CacheLedger& before,
                              const CacheLedger& after) {
  for (const LedgerToken& token : after.tokens()) {
    if (token.row < 0 || !token.IsDraft()) continue;
    const int seq = token.drafted_by;
    const int stored = reference::CountDrafts(before.tokens(), seq);
    Hit(Mark("draft_state_chain"), token.parent >= stored);
    Hit(Mark("draft_state_first"), EndOf(before, seq) == 0);
    bool reads = false;
    for (const LedgerToken& other : after.tokens()) {
      reads = reads || (other.IsDraft() && after.MaySee(token.row, other));
    }
    Hit(Mark("draft_state_read"), reads);
  }
}

void Observer::SeeRollback(int seq, std::int64_t begin,
                           const CacheLedger& before,
                           const CacheLedger& after) {
  if (!after.recurrent()) return;
  const std::set<std::int64_t> was = LengthsOf(before, seq);
  const std::int64_t end = EndOf(after, seq);
  if (was.empty() || end == *was.rbegin() || end == 0) return;
  bool in_batch = false;
  for (const LedgerToken& token : before.tokens()) {
    in_batch = in_batch || (token.HeldBy(seq) && token.row >= 0 && pass_ &&
                            token.position + 1 == *was.rbegin());
  }
  const std::int64_t read = read_[seq];
  Hit(Mark("state_taken_back"), in_batch && end == read);
  Hit(Mark("state_rollback"), in_batch && end < read);
  Hit(Mark("state_cut"), end < begin);
  for (const std::int64_t length : was) {
    Hit(Mark("pin_removed"), length > end && before.IsPinned(seq, length));
  }
}

void Observer::SeeFork(int src, int dst, std::int64_t len,
                       const CacheLedger& before, const CacheLedger& after) {
  if (!after.recurrent()) return;
  const std::int64_t end = EndOf(after, dst);
  if (end == 0) return;
  const std::int64_t was = EndOf(before, src);
  Hit(Mark("state_fork"), end < was);
  Hit(Mark("state_fork_cut"), end < std::min(len, was));
  for (const std::int64_t length : LengthsOf(after, dst)) {
    Hit(Mark("pin_forked"), length < end && after.IsPinned(dst, length));
  }
}

void Observer::SeeCommitted(int seq, const CacheLedger& before,
                            const CacheLedger& after) {
  if (!after.recurrent()) return;
  const std::set<std::int64_t> was = LengthsOf(before, seq);
  const std::set<std::int64_t> now = LengthsOf(after, seq);
  const std::int64_t read = was.empty() ? 0 : *was.rbegin();
  const std::int64_t end = now.empty() ? 0 : *now.rbegin();
  if (end == read) return;
  for (const std::int64_t length : was) {
    Hit(Mark("commit_state_evicts"), !now.contains(length));
  }
  for (const std::int64_t length : now) {
    Hit(Mark("commit_state_inside"), length > read && length < end);
    Hit(Mark("commit_state_pin"),
        IsKeptByItsPin(after, seq, length, read, end));
  }
}

void Observer::Checkpoint(int seq, const reference::Ledger& ledger) {
  for (std::size_t i = 0; i < before_.size(); ++i) {
    const CacheLedger& after = ledger.parts()[i];
    if (!after.recurrent()) continue;
    const std::int64_t end = EndOf(after, seq);
    Hit(Mark("pin_again"), end > 0 && before_[i].IsPinned(seq, end));
    for (const std::int64_t length : LengthsOf(before_[i], seq)) {
      const bool undone =
          before_[i].IsPinned(seq, length) && !after.IsPinned(seq, length);
      Hit(Mark("pin_undone"), undone);
      if (undone) undone_.insert({seq, length});
    }
  }
}

// `seq` is the sequence that is cut, or the source of a copy.
void Observer::SeeOneLength(int seq, std::int64_t asked, bool copied,
                            const reference::Ledger& ledger) {
  if (setup_.spec.kind != Kind::kHybrid) return;
  std::int64_t was = 0;
  std::int64_t alone = 0;  // The length that some part could have.
  for (const CacheLedger& before : before_) {
    was = std::max(was, EndOf(before, seq));
    alone = std::max(alone, ResumesAt(before, seq, asked));
  }
  if (asked >= was) return;
  std::set<std::int64_t> lengths = {asked};
  for (const CacheLedger& before : before_) {
    lengths.merge(LengthsOf(before, seq));
  }
  std::int64_t at = 0;  // The length that all parts have.
  for (const std::int64_t length : lengths) {
    const auto can = [&](const CacheLedger& before) {
      return before.CanResume(seq, static_cast<std::int32_t>(length));
    };
    if (length <= asked && std::ranges::all_of(before_, can)) at = length;
  }
  if (copied) {
    Hit(Mark("hybrid_fork_cut"), at > 0 && at < alone);
    return;
  }
  Hit(Mark("hybrid_cut"), at > 0 && at < alone);
  Hit(Mark("hybrid_emptied"),
      at == 0 && alone > 0 && EndOf(ledger.parts().front(), seq) == 0);
}

}  // namespace kvtwin::props
