// The ledger of any cache, wrappers included, for any rules, with the prompts
// of its sequences (F1 to F5 of docs/semantics.md).

#ifndef KVTWIN_REFERENCE_DIALECTS_H_
#define KVTWIN_REFERENCE_DIALECTS_H_

#include <algorithm>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/dialects/rules.h"
#include "core/index.h"
#include "reference/cache_ledger.h"
#include "reference/prefix_book.h"
#include "reference/wrapper_ledger.h"

namespace kvtwin::reference {

// `heard` is the answer of the cache under test.
class Ledger final : public WrapperLedger<CacheLedger> {
 public:
  explicit Ledger(const CacheSpec& spec, const Rules& rules = {})
      : WrapperLedger(spec, rules) {}

  void IgnoreCapacity() {
    for (CacheLedger& part : parts_) part.IgnoreCapacity();
  }
  Status StartForward(const Batch& batch, bool reserve, Heard heard = {}) {
    Hear(heard);
    std::vector<CacheLedger> before;
    if (parts_.size() > 1 && parts_[0].RefusesPositions()) before = parts_;
    Status status = WrapperLedger::StartForward(batch, reserve);
    if (!before.empty() && status.code() == kInvalidArgument) {
      for (CacheLedger& part : before) part.EndPass();
      parts_ = std::move(before);  // No cache changes (S47).
    }
    // The ids of drafts are unknown (F2).
    for (std::size_t i = 0; status.ok() && i < batch.parents.size(); ++i) {
      if (batch.parents[i] == kNotADraft) continue;
      prefixes_.Cut(batch.sequences[i], batch.positions[i]);
    }
    return status;
  }
  // Stores the rows of the batch in the active cache, and notes what is
  // computed of prompts (F3).
  void Put(int layer, const TensorView& key, const TensorView& value) {
    active().Put(layer, key, value);
    if (prefixes_.empty() || active().encoder() || active().reserves()) return;
    std::int64_t row = 0;
    for (const BatchToken& at : active().batch()) {
      const int prefix = prefixes_.PrefixAt(at.sequence, at.position);
      if (prefix != 0 && at.draft < 0) {
        prefixes_.Put(ActiveIndex(), layer, prefix,
                      active().RowsAt(row, key, value));
      }
      ++row;
    }
  }
  void Refused(const Batch& batch) {
    for (CacheLedger& part : parts_) part.Refused(batch);
  }
  void ContinuesAt(int seq, std::int64_t position) {
    for (CacheLedger& part : parts_) part.ContinuesAt(seq, position);
  }
  Status CopyPrefix(int src, int dst, std::int32_t len, Heard heard = {}) {
    const std::int32_t reach = hybrid_ ? ResumeBefore(src, len) : len;  // (H3)
    const std::int64_t copied = std::min<std::int64_t>(reach, Next(src));
    const bool adds = parts_[0].CopyAdds() && Next(dst) > 0;
    const bool mixes =
        mixed_.contains(src) || (adds && (HasIds(src) || HasIds(dst)));
    Hear(heard);
    const std::int32_t surely = SurelyBefore(src, len);
    Status status = WrapperLedger::CopyPrefix(src, dst, len);
    if (status.ok() && surely < len) MayEndAt(dst, surely);
    // A copy to itself is as a Remove with the open end (S27).
    if (status.ok() && (src != dst || len == 0)) {
      prefixes_.Copy(src, dst, copied);
      if (mixes) mixed_.insert(dst);
      if (!mixes && !adds) mixed_.erase(dst);
    }
    return status;
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end,
                Heard heard = {}) {
    if (heard.Is(kSharedCells) && MovesPrompt(seq, end)) {
      return {kSharedCells, "a later token of the prompt may be shared"};
    }
    const bool moves = begin < end && end < Next(seq);
    Hear(heard);
    const std::int32_t surely = SurelyBefore(seq, begin);
    Status status = WrapperLedger::Remove(seq, begin, end);
    if (!status.ok()) return status;
    if (end == kOpenEnd && surely < begin) MayEndAt(seq, surely);
    const bool clears = begin == 0 && end == kOpenEnd;
    if (moves || clears) prefixes_.Cut(seq, begin);
    if (Next(seq) == 0) mixed_.erase(seq);
    return status;
  }

  const PrefixBook& prefixes() const { return prefixes_; }
  // Declares the layers of a cache: no prefix is computed without their rows.
  void NeedLayers(std::size_t cache, int layers) {
    prefixes_.Need(cache, AsSize(layers));
  }
  // Gives `seq` a prompt, and its first `length` tokens. Errors: `length` is
  // wrong, or a token that it needs was never computed (F3). Requires: `seq` is
  // empty.
  Status FindPrefix(int seq, std::span<const std::int32_t> ids,
                    std::int32_t length) {
    prefixes_.Begin(seq, ids);
    mixed_.erase(seq);
    if (length < 0 || length >= std::ssize(ids)) {
      return {kInvalidArgument,
              "it may be 0 to " + std::to_string(std::ssize(ids) - 1)};
    }
    using Rows = std::map<int, KvRows>;
    std::vector<std::tuple<std::size_t, std::int32_t, const Rows*>> needed;
    for (std::size_t cache = 0; cache < parts_.size(); ++cache) {
      for (std::int32_t position = 0; position < length; ++position) {
        if (!parts_[cache].IsNeeded(position, length)) continue;
        const int prefix = prefixes_.PrefixAt(seq, position);
        const Rows* rows = prefixes_.Computed(cache, prefix);
        if (rows == nullptr) {
          const std::string at = std::to_string(position);
          bool begun = false;
          for (std::size_t other = 0; other < parts_.size(); ++other) {
            begun = begun || prefixes_.IsBegun(other, prefix);
          }
          return {kInvalidArgument,
                  begun ? "the token at position " + at +
                              " was never computed in all layers"
                        : "the tokens up to position " + at +
                              " were never computed as one prompt"};
        }
        needed.emplace_back(cache, position, rows);
      }
    }
    for (const auto& [cache, position, rows] : needed) {
      parts_[cache].Take(seq, position, *rows);
    }
    prefixes_.Found(seq, length);
    return {};
  }
  bool HasStates() const {
    return std::ranges::any_of(parts_,
                               [](auto& part) { return part.recurrent(); });
  }
  // Whether the tokens of `seq` before `pos` may be missing: its prompt was
  // found beyond `pos`, and some cache needs only a part of the found tokens
  // (F4).
  bool IsOpenBefore(int seq, std::int32_t pos) const {
    return pos < prefixes_.FoundLength(seq) &&
           std::ranges::any_of(parts_,
                               [](auto& part) { return part.Forgets(); });
  }

  Status Shift(int seq, std::int32_t begin, std::int32_t end,
               std::int32_t delta) {
    prefixes_.Cut(seq, begin);
    return All([&](auto& part) { return part.Shift(seq, begin, end, delta); });
  }
  // Restore does this (D6, R15).
  void DropPins() {
    for (CacheLedger& part : parts_) part.DropPins();
  }
  // Restore and AddSequence do this (D6).
  void DropAllDrafts() {
    for (CacheLedger& part : parts_) {
      const auto is_draft = [](auto& token) { return token.IsDraft(); };
      while (std::ranges::any_of(part.tokens(), is_draft)) {
        const auto at = std::ranges::find_if(part.tokens(), is_draft);
        (void)part.Commit(at->drafted_by, {});
      }
    }
  }
  void Resumes(int seq, std::int32_t pos) {
    for (CacheLedger& part : parts_) part.Resumes(seq, pos);
  }

  using WrapperLedger::CanResume;
  bool CanResume(int seq, std::int32_t pos, bool surely) const {
    return std::ranges::all_of(
        parts_, [&](auto& part) { return part.CanResume(seq, pos, surely); });
  }
  // Whether it must answer yes: a sequence with states ends at `pos` (R8).
  bool MustResume(int seq, std::int32_t pos) const {
    return HasStates() && pos > 0 && pos == Next(seq) &&
           CanResume(seq, pos, /*surely=*/true);
  }
  bool MayResume(int seq, std::int32_t pos) const {
    return std::ranges::all_of(
        parts_, [&](auto& part) { return part.MayResume(seq, pos); });
  }
  bool EndIsOpen(int seq) const {
    return std::ranges::any_of(parts_,
                               [&](auto& part) { return part.EndIsOpen(seq); });
  }
  bool NextIsOpen(int seq) const {
    return std::ranges::any_of(
        parts_, [&](auto& part) { return part.NextIsOpen(seq); });
  }
  bool MoveIsOpen(int seq, std::int64_t begin, std::int64_t end) const {
    return std::ranges::any_of(parts_, [&](auto& part) {
      return part.MoveIsOpen(seq, begin, end) ||
             HasPrompt(part, seq, begin, end);
    });
  }
  // Whether it is open which tokens are stored, or shared, after a Remove from
  // the middle. Whether its answer is shared_cells is heard.
  bool RemoveIsOpen(int seq, std::int32_t begin, std::int32_t end) const {
    if (end == kOpenEnd) return false;
    return IsOpenBefore(seq, begin) ||
           std::ranges::any_of(parts_, [&](auto& part) {
             return part.RemoveIsOpen(seq, end) ||
                    (part.RemoveKeepsShared() &&
                     HasPrompt(part, seq, end, kOpenEnd));
           });
  }

 private:
  // The length to which a hybrid goes back at least (H3), whatever a refused
  // batch evicted.
  std::int32_t SurelyBefore(int seq, std::int32_t pos) const {
    const bool open = std::ranges::any_of(
        parts_, [](auto& part) { return part.HasEvictable(); });
    if (!hybrid_ || !open) return pos;
    Ledger surely = *this;
    for (CacheLedger& part : surely.parts_) part.DropEvictable(seq);
    return surely.ResumeBefore(seq, pos);
  }
  void MayEndAt(int seq, std::int64_t position) {
    for (CacheLedger& part : parts_) part.MayEndAt(seq, position);
  }
  bool HasIds(int seq) const { return prefixes_.PrefixAt(seq, 0) != 0; }
  // Whether some token in [begin, end) of `seq` belongs to its prompt: it is
  // open whether other sequences share this token (F4).
  bool HasPrompt(const CacheLedger& part, int seq, std::int64_t begin,
                 std::int64_t end) const {
    return std::ranges::any_of(part.tokens(), [&](auto& token) {
      return token.HeldBy(seq) && begin <= token.position &&
             token.position < end &&
             (mixed_.contains(seq) ||
              prefixes_.PrefixAt(seq, token.position) != 0);
    });
  }
  // Whether a Remove up to `end` moves tokens of the prompt.
  bool MovesPrompt(int seq, std::int64_t end) const {
    return std::ranges::any_of(parts_, [&](auto& part) {
      return part.RemoveMoves(end) && HasPrompt(part, seq, end, kOpenEnd);
    });
  }
  void Hear(Heard heard) {
    for (CacheLedger& part : parts_) part.Hear(heard);
  }

  PrefixBook prefixes_;
  // Sequences that got tokens of another sequence beside their own: some of
  // these are of a prompt.
  std::set<int> mixed_;
};

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_DIALECTS_H_
