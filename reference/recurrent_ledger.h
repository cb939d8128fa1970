// The ledger of recurrent caches.

#ifndef KVTWIN_REFERENCE_RECURRENT_LEDGER_H_
#define KVTWIN_REFERENCE_RECURRENT_LEDGER_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>

#include "core/index.h"
#include "reference/ledger.h"

namespace kvtwin::reference {

// A PlainLedger whose tokens are states if the cache is recurrent: the state at
// position p is of p + 1 tokens (R1).
class StateLedger : public PlainLedger {
 public:
  using PlainLedger::PlainLedger;
  bool recurrent() const { return spec_.kind == Kind::kRecurrent; }
  // Each sequence has room for the states of this many drafts (R2).
  int most_drafts() const { return spec_.drafts; }

  // The number of checkpoints that a sequence keeps.
  std::int64_t kept() const {
    return spec_.checkpoint_every > 0 ? spec_.checkpoints : 0;
  }
  // Whether a state after this many tokens is a checkpoint.
  bool IsCheckpoint(std::int64_t length) const {
    return kept() > 0 && length % spec_.checkpoint_every == 0;
  }
  bool IsPinned(int seq, std::int64_t length) const {
    const auto pins = pins_.find(seq);
    return pins != pins_.end() && pins->second.contains(length);
  }

  // The state that the whole batch of a sequence reads (R6), or that of a draft
  // of an earlier batch (R12).
  bool MaySee(int row, const LedgerToken& token) const override {
    if (!recurrent()) return PlainLedger::MaySee(row, token);
    const int seq = At(batch_, row).sequence;
    const int draft = DraftRead(At(batch_, row));
    if (draft >= 0) return token.drafted_by == seq && token.draft == draft;
    return token.HeldBy(seq) && token.position + 1 == read_.at(seq);
  }

  // Counts the cells (R2).
  Status Init(const CacheConfig& config, const InitArgs& args) override {
    if (!recurrent()) return PlainLedger::Init(config, args);
    InitArgs one = args;
    one.capacity = 1;
    Status status = PlainLedger::Init(config, one);
    if (!status.ok()) return status;
    cells_ = args.max_sequences *
             (kept() + 2 + std::int64_t{spec_.pins} + spec_.drafts);
    while (cells_ % config.cache_padding != 0) ++cells_;
    if (cells_ <= kOpenEnd) return {};
    return {kInvalidArgument, "more cells than can be counted"};
  }

  // Whether each sequence of the batch continues at its end (R3, R11).
  Status CheckBatch(const Batch& batch) const {
    if (!recurrent()) return {};
    std::map<int, std::int64_t> next;
    for (std::size_t i = 0; i < batch.positions.size(); ++i) {
      const int seq = batch.sequences[i];
      const int parent = ParentOf(batch, i);
      if (parent >= 0) continue;  // The draft's parent says its position.
      const auto at = next.try_emplace(seq, Next(seq)).first;
      if (batch.positions[i] == at->second) {
        at->second += parent == kNotADraft ? 1 : 0;
        continue;
      }
      return {kInvalidArgument, "the batch does not continue its sequence"};
    }
    return {};
  }

  // States of drafts need cells (R11).
  bool TakesDrafts() const override {
    return recurrent() ? spec_.drafts > 0 : PlainLedger::TakesDrafts();
  }

  // Stores some of the states of the batch, and drops others (R3 to R6, S18).
  Status StartForward(const Batch& batch, bool reserve) override {
    if (!recurrent()) return PlainLedger::StartForward(batch, reserve);
    EndPass();
    reserve_ = reserve;
    read_.clear();
    for (std::size_t i = 0; i < batch.positions.size(); ++i) {
      const int seq = batch.sequences[i];
      batch_.push_back({batch.positions[i], seq, false});
      read_.try_emplace(seq, Next(seq));
    }
    if (reserve) return {};
    NumberDrafts(batch, tokens_, batch_);
    std::vector<LedgerToken> added;
    for (const auto& [seq, length] : read_) Replace(seq, added);
    AddDrafts(added);
    DropUnheld();
    if (std::ssize(tokens_) + std::ssize(added) > cells_) {
      EndPass();
      return {kCacheFull, "more states than cells"};
    }
    tokens_.insert(tokens_.end(), added.begin(), added.end());
    return {};
  }

  // A state has no later positions (R10).
  Status SetCausal(std::span<const int> except) {
    if (!recurrent()) return PlainLedger::SetCausal(except);
    return {kNotSupported, "a state has no later positions"};
  }

  // The path is like an ordinary batch: some of its states stay, and some of
  // the earlier ones leave (R13).
  Status Commit(int seq, std::span<const int> path) {
    if (!recurrent()) return PlainLedger::Commit(seq, path);
    if (path.empty()) return PlainLedger::Commit(seq, path);
    const std::int64_t before = Next(seq);
    CommitDrafts(seq, path, tokens_);
    Keep(seq, LengthsToKeep(seq, before, Next(seq)));
    DropUnheld();
    return {};
  }

  // Pins the last state (R14).
  Status Checkpoint(int seq) {
    if (!recurrent() || spec_.pins == 0) {
      return {kNotSupported, "no state can be pinned"};
    }
    std::set<std::int64_t>& pins = pins_[seq];
    if (Next(seq) > 0) pins.insert(Next(seq));
    if (std::ssize(pins) > spec_.pins) pins.erase(pins.begin());
    return {};
  }
  void DropPins() { pins_.clear(); }

  // The copy has the pins of its states (R15).
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    Status status = PlainLedger::CopyPrefix(src, dst, len);
    if (!recurrent()) return status;
    std::set<std::int64_t> pins = pins_[src];
    pins.erase(pins.upper_bound(len), pins.end());
    pins_[dst] = pins;
    return status;
  }

  bool IsNeeded(std::int64_t position, std::int64_t length) const override {
    if (!recurrent()) return PlainLedger::IsNeeded(position, length);
    return position == length - 1;
  }
  bool Forgets() const override {
    return recurrent() || PlainLedger::Forgets();
  }

  // Whether there is a state of `pos` tokens (R8).
  bool CanResume(int seq, std::int32_t pos) const override {
    if (!recurrent()) return PlainLedger::CanResume(seq, pos);
    const auto is = [&](const LedgerToken& token) {
      return token.HeldBy(seq) && token.position + 1 == pos;
    };
    return pos == 0 || std::ranges::any_of(tokens_, is);
  }

  // A state cannot lose some of its tokens (R10).
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    if (!recurrent()) return PlainLedger::Remove(seq, begin, end);
    if (end != kOpenEnd && begin < Next(seq)) {
      return {kNotSupported, "a state is of all its tokens"};
    }
    std::set<std::int64_t>& pins = pins_[seq];
    pins.erase(pins.upper_bound(begin), pins.end());
    return PlainLedger::Remove(seq, begin, kOpenEnd);
  }

 private:
  // Drops the states of `seq` that the pass does not keep (R4), and adds those
  // of the batch that it keeps (R5).
  void Replace(int seq, std::vector<LedgerToken>& added) {
    std::int64_t last = read_.at(seq);
    std::set<std::int64_t> more;
    for (const BatchToken& at : batch_) {
      if (at.sequence != seq || at.draft >= 0) continue;
      last = std::int64_t{at.position} + 1;
      more.insert(last);
    }
    const auto lengths = LengthsToKeep(seq, read_.at(seq), last, more);
    Keep(seq, lengths);
    int row = 0;
    for (const BatchToken& at : batch_) {
      const std::int64_t length = std::int64_t{at.position} + 1;
      if (at.sequence == seq && at.draft < 0 && lengths.contains(length)) {
        added.push_back({at.position, {seq}, row, {}, births_++});
      }
      ++row;
    }
  }

  // Adds a state for each draft of the batch (R11).
  void AddDrafts(std::vector<LedgerToken>& added) {
    int row = 0;
    for (const BatchToken& at : batch_) {
      if (at.draft >= 0) {
        added.push_back({at.position, {at.sequence}, row, {}, births_++});
        MakeDraft(at, added.back());
      }
      ++row;
    }
  }

  // The states of `seq` at other lengths leave it.
  void Keep(int seq, const std::set<std::int64_t>& lengths) {
    for (LedgerToken& token : tokens_) {
      if (!lengths.contains(token.position + 1)) token.sequences.erase(seq);
    }
  }

  // Returns the lengths of `seq` whose states are kept, of those that it has
  // and of `lengths`: its last checkpoints, its pinned states, its length
  // before the batch and its length after it.
  std::set<std::int64_t> LengthsToKeep(
      int seq, std::int64_t before, std::int64_t after,
      std::set<std::int64_t> lengths = {}) const {
    for (const LedgerToken& token : tokens_) {
      if (token.HeldBy(seq)) lengths.insert(token.position + 1);
    }
    std::erase_if(lengths,
                  [&](std::int64_t length) { return !IsCheckpoint(length); });
    while (std::ssize(lengths) > kept()) lengths.erase(lengths.begin());
    lengths.insert({before, after});
    if (const auto at = pins_.find(seq); at != pins_.end()) {
      lengths.insert(at->second.begin(), at->second.end());
    }
    return lengths;
  }

  // Returns the draft whose state a batch token reads: the last one that it
  // follows of those in earlier batches, -1 if there is none (R12).
  int DraftRead(const BatchToken& at) const {
    int number = at.draft >= 0 ? at.parent : kCommitted;
    while (number >= 0) {
      const auto same = [&](const BatchToken& other) {
        return other.sequence == at.sequence && other.draft == number;
      };
      const auto found = std::ranges::find_if(batch_, same);
      if (found == batch_.end()) return number;
      number = found->parent;
    }
    return kCommitted;
  }

  // By sequence of the batch: its length before the batch.
  std::map<int, std::int64_t> read_;
  std::map<int, std::set<std::int64_t>> pins_;  // Lengths, by sequence.
};

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_RECURRENT_LEDGER_H_
