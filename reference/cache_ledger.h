// The ledger of one cache that is not a wrapper, for any rules: kvtwin's, or
// those of another system (core/dialects/rules.h; docs/profiles.md says which
// system has which rules).
//
// If the rules are kvtwin's, each function calls that of reference/ledger.h.
// Other rules may leave an answer open, for example whether a token that can be
// evicted at any time is still stored. Then the answer of the cache under test
// decides: the ledger is told the answer before the call, and follows it.

#ifndef KVTWIN_REFERENCE_CACHE_LEDGER_H_
#define KVTWIN_REFERENCE_CACHE_LEDGER_H_

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "core/dialects/rules.h"
#include "core/index.h"
#include "reference/recurrent_ledger.h"

namespace kvtwin::reference {

// The answer of the cache under test to one call. If it is not known, the
// ledger assumes that no token was evicted early.
struct Heard {
  Heard() = default;
  Heard(StatusCode answer) : known(true), code(answer) {}  // NOLINT
  bool Is(StatusCode answer) const { return known && code == answer; }
  bool known = false;
  StatusCode code = kOk;
};

// The ledger of one cache that is not a wrapper, for any rules.
class CacheLedger final : public StateLedger {
 public:
  explicit CacheLedger(const CacheSpec& spec, const Rules& rules = {})
      : StateLedger(spec), rules_(rules), ours_(AreOurs(rules)) {}

  // Removes the limit on cells: no batch is refused because the cache is full.
  void IgnoreCapacity() { cells_ = std::numeric_limits<std::int64_t>::max(); }
  // Sets the answer of the cache under test for the next calls.
  void Hear(Heard heard) { heard_ = heard; }

  // Whether a copy leaves the tokens of its target there.
  bool CopyAdds() const { return rules_.copy == Rules::Copy::kAdds; }
  // Whether StartForward refuses some batches because of their positions.
  bool RefusesPositions() const {
    return rules_.positions != Rules::Positions::kAny;
  }

  // If first tokens stay, the window counts tokens, not positions.
  bool MaySee(int row, const LedgerToken& token) const override {
    if (!window_ || rules_.first == Rules::First::kLeave) {
      return StateLedger::MaySee(row, token);
    }
    const BatchToken& at = At(batch_, row);
    const std::int64_t now = at.position;
    const int seq = at.sequence;
    if (!token.HeldBy(seq) && !Follows(tokens_, at, token)) return false;
    if (token.position > now && !at.excepted) return false;
    return CountAfter(token, now, seq) <= *window_;
  }
  // Whether the cache is also correct if the row does not see `token`, which it
  // may see: the token is evictable.
  bool MayMiss(int row, const LedgerToken& token) const {
    return IsEvictable(token, At(batch_, row).sequence);
  }
  // Whether a copy gave tokens to a sequence of the batch, so that a mask that
  // SetCausal rebuilds is open: the view may lack the cells of these tokens
  // (S19).
  bool narrow() const {
    return std::ranges::any_of(batch_, [&](const BatchToken& token) {
      return given_.contains(token.sequence);
    });
  }

  Status Init(const CacheConfig& config, const InitArgs& args) override {
    const bool windowed = IsWindowed(spec_.kind);
    if (windowed && WindowCountsQuery() && spec_.window == 0) {
      return {kInvalidArgument, "no room for the query"};
    }
    return StateLedger::Init(config, args);
  }

  Status StartForward(const Batch& batch, bool reserve) override {
    given_.clear();
    if (ours_ || reserve || encoder() || recurrent()) {
      return StateLedger::StartForward(batch, reserve);
    }
    if (RefusesPositions() && !Continues(batch)) {
      EndPass();
      return {kInvalidArgument, "the batch does not continue its sequence"};
    }
    Begin(batch);
    return StateLedger::StartForward(batch, reserve);
  }

  // Records that the cache under test refused the batch for lack of cells. It
  // may have evicted tokens before (S12).
  void Refused(const Batch& batch) {
    EndPass();
    if (!memory_ || encoder()) return;
    for (std::size_t i = 0; i < batch.positions.size(); ++i) {
      batch_.push_back({batch.positions[i], batch.sequences[i], false});
    }
    MayEvict();
    EndPass();
  }
  // Records that `seq` continues with a draft at `position` (D1): evictable
  // tokens that contradict this have been evicted.
  void ContinuesAt(int seq, std::int64_t position) {
    if (evictable_.empty() || position == Next(seq) ||
        !MayBegin(seq, position).may)
      return;
    SetBack(seq, position);
    DropUnheld();
  }

  bool HasEvictable() const { return !evictable_.empty(); }
  // Lets the evictable tokens leave the sequence.
  void DropEvictable(int seq) {
    for (LedgerToken& token : tokens_) {
      if (IsEvictable(token, seq)) token.sequences.erase(seq);
    }
    DropUnheld();
  }
  // Records that the tokens of `seq` may end at `position`: they do in a hybrid
  // that went back (H3) when another part had evicted tokens.
  void MayEndAt(int seq, std::int64_t position) {
    for (const LedgerToken& token : tokens_) {
      if (!token.HeldBy(seq) || token.position < position) continue;
      evictable_.insert({token.number, seq});
    }
  }

  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    const bool gives = std::ranges::any_of(tokens_, [&](auto& token) {
      return token.HeldBy(src) && token.position < len;
    });
    if (gives && src != dst) given_.insert(dst);
    if ((ours_ && evictable_.empty()) || encoder() || recurrent()) {
      return StateLedger::CopyPrefix(src, dst, len);
    }
    const bool may = MayBeFull(src) && len < Next(src);
    const bool must = IsFull(src) && len < SureNext(src);
    if (Refuses(may, must)) return {kNotSupported, kFullText};
    const bool adds = CopyAdds();
    const bool is_empty = Next(dst) == 0;
    if (!adds || is_empty) began_[dst] = began_[src];
    if (!adds || is_empty) mixed_.erase(dst);
    if (mixed_.contains(src) || (adds && !is_empty)) mixed_.insert(dst);
    for (LedgerToken& token : tokens_) {
      const bool copied = token.HeldBy(src) && token.position < len;
      const bool evictable = IsEvictable(token, src);
      if (!adds) token.sequences.erase(dst);
      if (!copied) continue;
      const bool is_new = token.sequences.insert(dst).second;
      if (!evictable) evictable_.erase({token.number, dst});
      if (evictable && is_new) evictable_.insert({token.number, dst});
    }
    DropUnheld();
    return {};
  }

  // First tokens that stay are needed, too.
  bool IsNeeded(std::int64_t position, std::int64_t length) const override {
    if (first_ == 0) return StateLedger::IsNeeded(position, length);
    return position < first_ || position == length - 1 ||
           position >= length - *window_ + first_;
  }
  void Take(int seq, std::int64_t position,
            const std::map<int, KvRows>& rows) override {
    began_[seq] = 0;
    mixed_.erase(seq);
    given_.insert(seq);
    StateLedger::Take(seq, position, rows);
  }

  // Whether CanResume of the cache under test may answer yes.
  bool CanResume(int seq, std::int32_t pos) const override {
    return CanResume(seq, pos, /*surely=*/false);
  }
  // With `surely`: whether it must answer yes, whatever was evicted.
  bool CanResume(int seq, std::int32_t pos, bool surely) const {
    if (!surely && (ours_ || recurrent())) {
      return StateLedger::CanResume(seq, pos);
    }
    if (recurrent()) {
      return pos == 0 || std::ranges::any_of(tokens_, [&](auto& token) {
               return Holds(seq, token, surely) && token.position + 1 == pos;
             });
    }
    if (surely ? MayBeFull(seq) && pos < Next(seq)
               : IsFull(seq) && pos < SureNext(seq)) {
      return false;
    }
    if (!memory_) return true;
    std::set<std::int64_t> stored;
    for (const LedgerToken& token : tokens_) {
      if (Holds(seq, token, surely)) stored.insert(token.position);
    }
    return CanResumeWith(stored, pos);
  }
  // Whether a yes of CanResume is right: S28 says yes, or a row at `pos` sees
  // no token before it, at the first position or with a window of 0.
  bool MayResume(int seq, std::int32_t pos) const {
    if (CanResume(seq, pos)) return true;
    if (recurrent() || (IsFull(seq) && pos < SureNext(seq))) return false;
    return pos == 0 || (*window_ == 0 && pos <= Next(seq));
  }
  // Whether a batch without `seq` evicts a token of `seq` at `position` (S7).
  bool IsBeyondMemory(int seq, std::int64_t position) const {
    return memory_ && position < Next(seq) - *memory_;
  }
  // Whether evictions decide where the sequence ends, in a cache whose batches
  // must begin there (R3).
  bool EndIsOpen(int seq) const {
    return (RefusesPositions() || recurrent()) && NextIsOpen(seq);
  }
  // Whether evictions decide which position comes next, where drafts begin
  // (D1).
  bool NextIsOpen(int seq) const { return Next(seq) != SureNext(seq); }
  // Records that CanResume of the cache under test answered yes: the tokens
  // that the sequence needs to continue at `pos` stay until the next batch
  // evicts.
  void Resumes(int seq, std::int32_t pos) {
    if (recurrent()) {
      for (const LedgerToken& token : tokens_) {
        if (token.position < pos) evictable_.erase({token.number, seq});
      }
    }
    if (!memory_ || rules_.eviction == Rules::Eviction::kEager) return;
    // If tokens came out of order, a stored old token does not prove that the
    // later ones are stored.
    const std::int64_t whole = mixed_.contains(seq) ? 1 : *window_;
    const std::int64_t ends = Next(seq) == pos ? 1 : 0;  // It is not empty.
    const std::int64_t from = pos - std::max(ends, whole);
    std::map<std::int64_t, int> held;  // Tokens at each position.
    for (const LedgerToken& token : tokens_) {
      if (token.HeldBy(seq)) ++held[token.position];
    }
    for (const LedgerToken& token : tokens_) {
      // If two tokens have this position, either of them may have been evicted.
      const bool stays =
          held[token.position] == 1 && IsIn(token.position, from, pos);
      if (stays) evictable_.erase({token.number, seq});
    }
  }

  // A cache that copies rows may move its copies of shared tokens, where
  // kvtwin's caches answer shared_cells. A cache without a shift function may
  // remove a range with no tokens after it, where they answer not_supported.
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    if (ours_ || encoder() || recurrent()) {
      Status status = StateLedger::Remove(seq, begin, end);
      const bool copied = status.code() == kSharedCells && Copies();
      const bool ends =
          status.code() == kNotSupported && heard_.Is(kOk) && !recurrent();
      if (!copied && !ends) return AfterEviction(seq, begin, end, status);
    }
    const Parts parts = PartsOf(seq, begin, end);
    const bool may = parts.leaves.may && (parts.remains.may || begin > 0);
    const bool must =
        parts.leaves.must && (parts.remains.must || begin > began_[seq]);
    if (Refuses(may && MayBeFull(seq), must && IsFull(seq))) {
      return {kNotSupported, kFullText};
    }
    const bool none = rules_.middle == Rules::Middle::kRefused;
    const bool never = rules_.middle == Rules::Middle::kShifts && !CanShift();
    const bool empty = begin == end && end != kOpenEnd;
    if (empty && (none || never) && heard_.Is(kOk)) return {};
    // A range with no tokens after it may count as the sequence's end if no
    // token can move.
    const bool ends = (none || never) && heard_.Is(kOk) && !parts.after.must;
    const bool middle = end != kOpenEnd && parts.remains.may && !ends;
    if (middle && none) {
      return {kNotSupported, "only the end of a sequence can go"};
    }
    const bool shifts = middle && rules_.middle == Rules::Middle::kShifts;
    std::vector<LedgerToken> moved;
    if (shifts) {
      Status status = Move(seq, end, kOpenEnd, begin - end, Copies(), moved);
      if (!status.ok()) return status;
    }
    const std::int64_t last = ends ? kOpenEnd : end;
    for (LedgerToken& token : tokens_) {
      if (IsIn(token.position, begin, last)) token.sequences.erase(seq);
    }
    Replace(seq, end, shifts ? kOpenEnd : end, moved);
    if (Next(seq) == 0) mixed_.erase(seq);
    return {};
  }

  // The same; `heard` is the answer of the cache under test.
  Status Remove(int seq, std::int32_t begin, std::int32_t end, Heard heard) {
    Hear(heard);
    Status status = Remove(seq, begin, end);
    Hear({});
    return status;
  }

  // Whether it depends on evictions which tokens of other sequences a Shift of
  // this range would move.
  bool MoveIsOpen(int seq, std::int64_t begin, std::int64_t end) const {
    return std::ranges::any_of(tokens_, [&](const LedgerToken& token) {
      return IsEvictable(token, seq) && token.sequences.size() > 1 &&
             IsIn(token.position, begin, end);
    });
  }
  // The same for a Remove up to `end`.
  bool RemoveIsOpen(int seq, std::int64_t end) const {
    return RemoveMoves(end) && MoveIsOpen(seq, end, kOpenEnd);
  }
  // Whether a Remove up to `end` moves the tokens after it.
  bool RemoveMoves(std::int64_t end) const {
    return rules_.middle == Rules::Middle::kShifts && end != kOpenEnd &&
           !encoder() && !recurrent();
  }
  // Whether later tokens that are shared remain so after a Remove from the
  // middle: they stay where they are, or move for all of their sequences.
  bool RemoveKeepsShared() const {
    return rules_.middle == Rules::Middle::kLeavesGap || MovesAll();
  }

  // Adds `delta` to the positions in [begin, end) of `seq`, and shifts the K
  // rows. Tokens whose position would be negative leave. Only caches whose
  // Remove leaves a gap have this call.
  Status Shift(int seq, std::int32_t begin, std::int32_t end,
               std::int32_t delta) {
    if (rules_.middle != Rules::Middle::kLeavesGap || encoder() ||
        recurrent()) {
      return {kNotSupported, "tokens move with Remove, or not at all"};
    }
    std::vector<LedgerToken> moved;
    Status status = Move(seq, begin, end, delta, /*copies=*/false, moved);
    if (!status.ok()) return status;
    std::erase_if(moved, [](auto& token) { return token.position < 0; });
    for (const LedgerToken& token : moved) {
      mixed_.insert(token.sequences.begin(), token.sequences.end());
    }
    Replace(seq, begin, end, moved);
    return {};
  }

 protected:
  void SetReach() override {
    StateLedger::SetReach();
    if (!window_) return;
    if (WindowCountsQuery()) {
      --*window_;
      --*memory_;
    }
    if (rules_.first == Rules::First::kStay) {
      memory_ = window_;
      first_ = std::min<std::int64_t>(Rules::kFirst, *memory_);
    }
  }

  // With lazy eviction, tokens leave only if there are not enough free cells.
  // A sequence's last token stays if positions are checked, because it is open
  // whether a sequence that lost all its tokens remembers its end. If first
  // tokens stay, the others leave however large the cache is.
  void Evict() override {
    if (ours_ && memory_ && !evictable_.empty()) return EvictSurely();
    if (ours_ || (!memory_ && first_ == 0)) return StateLedger::Evict();
    const std::int64_t memory = memory_ ? *memory_ : *window_;
    std::map<int, std::int64_t> low = Lows();
    std::map<int, std::int64_t> next = low;
    for (auto& [seq, position] : next) position = Next(seq);
    const bool leave = rules_.eviction == Rules::Eviction::kEager ||
                       std::ssize(tokens_) + rows() > cells_;
    for (LedgerToken& token : tokens_) {
      std::erase_if(token.sequences, [&](int seq) {
        const std::int64_t kept = low[seq] - memory + first_;
        const bool stays = first_ > 0 && token.position < began_[seq] + first_;
        if (stays || token.position >= kept) return false;
        const bool is_last =
            RefusesPositions() && token.position + 1 == next[seq];
        const bool leaves = leave && !is_last;
        if (!leaves) evictable_.insert({token.number, seq});
        return leaves;
      });
    }
    DropUnheld();
  }

 private:
  bool WindowCountsQuery() const {
    return rules_.window == Rules::Window::kWithQuery;
  }
  bool MovesAll() const {
    return rules_.shared_shift == Rules::SharedShift::kMovesAll;
  }
  // Whether the cache under test may have copied tokens that it should share:
  // it shifted its copies, or answered that it cannot shift them.
  bool Copies() const { return heard_.Is(kOk) || heard_.Is(kNotSupported); }

  // Whether `seq` holds the token here, but lazy eviction may have removed it
  // in the cache under test.
  bool IsEvictable(const LedgerToken& token, int seq) const {
    return token.HeldBy(seq) && evictable_.contains({token.number, seq});
  }
  // With `surely`: whether the cache under test cannot have evicted it.
  bool Holds(int seq, const LedgerToken& token, bool surely) const {
    return token.HeldBy(seq) && !(surely && IsEvictable(token, seq));
  }

  // Makes the tokens evictable that the current batch may evict (S7).
  void MayEvict() {
    std::map<int, std::int64_t> low = Lows();
    for (const LedgerToken& token : tokens_) {
      for (const int seq : token.sequences) {
        if (token.position >= low[seq] - *memory_) continue;
        evictable_.insert({token.number, seq});
      }
    }
  }
  // Evicts what the current batch evicts in any case: where the evictable
  // tokens of a sequence that is not in the batch are gone, it ends earlier.
  void EvictSurely() {
    MayEvict();
    std::map<int, std::int64_t> low = Lows();
    std::map<int, std::int64_t> surely;
    for (const LedgerToken& token : tokens_) {
      for (const int seq : token.sequences) {
        if (IsEvictable(token, seq)) continue;
        surely[seq] = std::max(surely[seq], token.position + 1);
      }
    }
    for (const BatchToken& at : batch_) surely[at.sequence] = low[at.sequence];
    std::set<std::pair<std::int64_t, int>> still;
    for (LedgerToken& token : tokens_) {
      std::erase_if(token.sequences, [&](int seq) {
        return token.position < std::min(low[seq], surely[seq]) - *memory_;
      });
      for (const int seq : token.sequences) {
        if (IsEvictable(token, seq)) still.insert({token.number, seq});
      }
    }
    evictable_ = std::move(still);
    DropUnheld();
  }

  // Next, counting only tokens that cannot have been evicted.
  std::int64_t SureNext(int seq) const {
    std::int64_t next = 0;
    for (const LedgerToken& token : tokens_) {
      if (Holds(seq, token, true)) next = std::max(next, token.position + 1);
    }
    return next;
  }

  // The number of tokens that `seq` has after `token`, up to position `now`.
  std::int64_t CountAfter(const LedgerToken& token, std::int64_t now,
                          int seq) const {
    return std::ranges::count_if(tokens_, [&](const LedgerToken& other) {
      return Holds(seq, other, /*surely=*/true) &&
             other.position > token.position && other.position <= now;
    });
  }

  // Whether the ledger refuses a call that may or must be refused.
  bool Refuses(bool may, bool must) const {
    return must || (may && !heard_.Is(kOk));
  }

  // Returns the answer to a Remove, `status` if no token of `seq` was evicted.
  // If it is a refusal that was not heard, and evictable tokens are its reason,
  // they are gone, and the range is removed.
  Status AfterEviction(int seq, std::int32_t begin, std::int32_t end,
                       const Status& status) {
    const bool heard = !heard_.known || heard_.Is(status.code());
    if (status.ok() || heard || evictable_.empty()) return status;
    CacheLedger surely = *this;
    surely.DropEvictable(seq);
    if (!surely.StateLedger::Remove(seq, begin, end).ok()) return status;
    *this = std::move(surely);
    return {};
  }

  // Whether the sequence is longer than its window, and so cannot go back.
  // IsFull: certainly, counted from its first position. MayBeFull: perhaps,
  // counted from position 0.
  bool IsFull(int seq) const {
    const auto first = began_.find(seq);
    const std::int64_t began = first == began_.end() ? 0 : first->second;
    return MayBeFull(seq) && SureNext(seq) - began > *window_;
  }
  bool MayBeFull(int seq) const {
    return rules_.back == Rules::Back::kUntilFull && window_ &&
           Next(seq) > *window_;
  }

  // Whether a sequence has tokens in a range, outside of it, and after it:
  // `may` counts evictable tokens, `must` does not.
  struct Has {
    bool may = false;
    bool must = false;
  };
  struct Parts {
    Has leaves;
    Has remains;
    Has after;
  };
  Parts PartsOf(int seq, std::int64_t begin, std::int64_t end) const {
    Parts parts;
    for (const LedgerToken& token : tokens_) {
      if (!token.HeldBy(seq)) continue;
      const auto note = [&](Has& has) {
        has.may = true;
        has.must = has.must || !IsEvictable(token, seq);
      };
      const bool leaves = IsIn(token.position, begin, end);
      note(leaves ? parts.leaves : parts.remains);
      if (!leaves && token.position >= end) note(parts.after);
    }
    return parts;
  }

  // Sets `moved` to the tokens of `seq` in [begin, end), moved by `delta`. With
  // `copies`, a shared token stays, and a copy of it moves.
  Status Move(int seq, std::int64_t begin, std::int64_t end, std::int32_t delta,
              bool copies, std::vector<LedgerToken>& moved) {
    for (const LedgerToken& token : tokens_) {
      if (!token.HeldBy(seq) || !IsIn(token.position, begin, end)) continue;
      LedgerToken& after = moved.emplace_back(token);
      if (token.sequences.size() == 1 || MovesAll()) continue;
      if (!copies) return {kSharedCells, "a later token is shared"};
      after.sequences = {seq};
      after.row = -1;
      after.number = births_++;
      if (IsEvictable(token, seq)) evictable_.insert({after.number, seq});
    }
    return Shifted(delta, moved);
  }

  // Replaces the tokens of `seq` in [begin, end) by `moved`.
  void Replace(int seq, std::int64_t begin, std::int64_t end,
               const std::vector<LedgerToken>& moved) {
    for (LedgerToken& token : tokens_) {
      if (!token.HeldBy(seq) || !IsIn(token.position, begin, end)) continue;
      token.sequences.erase(seq);
      if (MovesAll()) token.sequences.clear();
    }
    DropUnheld();
    tokens_.insert(tokens_.end(), moved.begin(), moved.end());
  }

  // Whether the batch continues its sequences at their ends. If so, removes the
  // evictable tokens that contradict this: they must have been evicted. The
  // position of a draft follows from its parent; siblings have the same (D1).
  bool Continues(const Batch& batch) {
    std::map<int, std::int64_t> first;
    std::map<int, std::int64_t> next;
    for (std::size_t i = 0; i < batch.positions.size(); ++i) {
      const std::int64_t position = batch.positions[i];
      const int seq = batch.sequences[i];
      const int parent = ParentOf(batch, i);
      if (parent >= 0) continue;
      if (first.try_emplace(seq, position).second) next[seq] = position;
      if (position != next[seq]) return false;
      next[seq] += parent == kNotADraft ? 1 : 0;
    }
    for (const auto& [seq, position] : first) {
      const Has begins = MayBegin(seq, position);
      // Whether it continues at the end if no token was evicted early.
      const bool plainly = rules_.positions == Rules::Positions::kOverwrite ||
                           position == Next(seq);
      const bool ok = begins.may && (heard_.known ? heard_.Is(kOk) : plainly);
      if (!begins.must && !ok) return false;
    }
    for (const auto& [seq, position] : first) SetBack(seq, position);
    DropUnheld();
    return true;
  }

  // Whether a batch at `position` may, and must, be accepted as continuing
  // `seq`, depending on which evictable tokens it still has.
  Has MayBegin(int seq, std::int64_t position) const {
    const std::int64_t max = Next(seq);
    const std::int64_t min = SureNext(seq);
    if (rules_.positions == Rules::Positions::kOverwrite) {
      return {position <= max, position <= min};
    }
    Has begins = {min == 0, true};
    for (const LedgerToken& token : tokens_) {
      if (!token.HeldBy(seq) || token.position + 1 < min) continue;
      const bool continues = token.position + 1 == position;
      begins.may = begins.may || continues;
      begins.must = begins.must && continues;
    }
    return begins;
  }

  // Removes the tokens that `seq` cannot have if it continues at `position`.
  void SetBack(int seq, std::int64_t position) {
    const bool anywhere =
        rules_.positions != Rules::Positions::kOverwrite &&
        std::ranges::none_of(tokens_, [&](const LedgerToken& token) {
          return token.HeldBy(seq) && token.position + 1 == position;
        });
    for (LedgerToken& token : tokens_) {
      if (anywhere || token.position >= position) token.sequences.erase(seq);
    }
  }

  // Records the first positions of sequences that have no tokens yet.
  void Begin(const Batch& batch) {
    std::map<int, std::int64_t> lowest;
    for (std::size_t i = 0; i < batch.positions.size(); ++i) {
      const auto at =
          lowest.try_emplace(batch.sequences[i], batch.positions[i]).first;
      at->second = std::min<std::int64_t>(at->second, batch.positions[i]);
    }
    for (const auto& [seq, position] : lowest) {
      if (Next(seq) == 0) began_[seq] = position;
    }
  }

  static constexpr auto kFullText = "the window is full, nothing goes back";

  Rules rules_;
  bool ours_ = true;
  Heard heard_;
  std::int64_t first_ = 0;             // How many first tokens stay.
  std::map<int, std::int64_t> began_;  // By sequence: its first position.
  // Sequences whose tokens may not have come in the order of their positions.
  std::set<int> mixed_;
  // Sequences that got tokens from a copy, or a prompt, in this pass.
  std::set<int> given_;
  // Pairs (number of a token, sequence): lazy eviction, or the eviction before
  // a refused batch, may have removed the token from the sequence. Ignored if
  // the sequence does not hold the token.
  std::set<std::pair<std::int64_t, int>> evictable_;
};

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_CACHE_LEDGER_H_
