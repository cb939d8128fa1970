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

  // The state that the whole batch of a sequence reads (R6).
  bool MaySee(int row, const LedgerToken& token) const override {
    if (!recurrent()) return PlainLedger::MaySee(row, token);
    const int seq = At(batch_, row).sequence;
    return token.HeldBy(seq) && token.position + 1 == read_.at(seq);
  }

  // Counts the cells (R2).
  Status Init(const CacheConfig& config, const InitArgs& args) override {
    if (!recurrent()) return PlainLedger::Init(config, args);
    InitArgs one = args;
    one.capacity = 1;
    Status status = PlainLedger::Init(config, one);
    if (!status.ok()) return status;
    cells_ = args.max_sequences * (kept() + 2);
    while (cells_ % config.cache_padding != 0) ++cells_;
    if (cells_ <= kOpenEnd) return {};
    return {kInvalidArgument, "more cells than can be counted"};
  }

  // Whether each sequence of the batch continues at its end (R3).
  Status CheckBatch(const Batch& batch) const {
    if (!recurrent()) return {};
    std::map<int, std::int64_t> next;
    for (std::size_t i = 0; i < batch.positions.size(); ++i) {
      const int seq = batch.sequences[i];
      const auto at = next.try_emplace(seq, Length(seq)).first;
      if (batch.positions[i] == at->second++) continue;
      return {kInvalidArgument, "the batch does not continue its sequence"};
    }
    return {};
  }

  // Stores some of the states of the batch, and drops others (R3 to R6, S18).
  Status StartForward(const Batch& batch, bool reserve) override {
    if (!recurrent()) return PlainLedger::StartForward(batch, reserve);
    EndPass();
    if (HasDrafts(batch)) return {kNotSupported, "no drafts"};  // (D8)
    reserve_ = reserve;
    read_.clear();
    for (std::size_t i = 0; i < batch.positions.size(); ++i) {
      const int seq = batch.sequences[i];
      batch_.push_back({batch.positions[i], seq, false});
      read_.try_emplace(seq, Length(seq));
    }
    if (reserve) return {};
    std::vector<LedgerToken> added;
    for (const auto& [seq, length] : read_) Replace(seq, added);
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

  // A state has no drafts (D8).
  Status Commit(int seq, std::span<const int> path) {
    if (!recurrent()) return PlainLedger::Commit(seq, path);
    return {kNotSupported, "there are no drafts"};
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
    if (end != kOpenEnd && begin < Length(seq)) {
      return {kNotSupported, "a state is of all its tokens"};
    }
    return PlainLedger::Remove(seq, begin, kOpenEnd);
  }

 private:
  // The number of checkpoints that a sequence keeps.
  std::int64_t kept() const {
    return spec_.checkpoint_every > 0 ? spec_.checkpoints : 0;
  }

  // The number of tokens of the sequence's last state (R1).
  std::int64_t Length(int seq) const {
    std::int64_t length = 0;
    for (const LedgerToken& token : tokens_) {
      if (token.HeldBy(seq)) length = std::max(length, token.position + 1);
    }
    return length;
  }

  // Drops the states of `seq` that the pass does not keep (R4), and adds those
  // of the batch that it keeps (R5).
  void Replace(int seq, std::vector<LedgerToken>& added) {
    const std::set<std::int64_t> lengths = LengthsToKeep(seq);
    for (LedgerToken& token : tokens_) {
      if (!lengths.contains(token.position + 1)) token.sequences.erase(seq);
    }
    int row = 0;
    for (const BatchToken& at : batch_) {
      const std::int64_t length = std::int64_t{at.position} + 1;
      if (at.sequence == seq && lengths.contains(length)) {
        added.push_back({at.position, {seq}, row, {}, births_++});
      }
      ++row;
    }
  }

  // Returns the lengths of `seq` whose states are there after this batch: its
  // last checkpoints, its length before the batch and its length after it.
  std::set<std::int64_t> LengthsToKeep(int seq) const {
    std::set<std::int64_t> lengths;
    for (const LedgerToken& token : tokens_) {
      if (token.HeldBy(seq)) lengths.insert(token.position + 1);
    }
    std::int64_t last = 0;
    for (const BatchToken& at : batch_) {
      if (at.sequence != seq) continue;
      last = std::int64_t{at.position} + 1;
      lengths.insert(last);
    }
    std::erase_if(lengths, [&](std::int64_t length) {
      return kept() == 0 || length % spec_.checkpoint_every != 0;
    });
    while (std::ssize(lengths) > kept()) lengths.erase(lengths.begin());
    lengths.insert({read_.at(seq), last});
    return lengths;
  }

  // By sequence of the batch: its length before the batch.
  std::map<int, std::int64_t> read_;
};

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_RECURRENT_LEDGER_H_
