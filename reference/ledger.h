// The ledger: what a cache must do, said without cells.
//
// A list of tokens, each with its position, the sequences that hold it and the
// exact K and V rows it was put with. It answers one question: which tokens is
// this batch row entitled to, and what are their rows now? The reference twin
// is checked against it, so they share nothing but core/. The rules are those
// of docs/semantics.md, or what core/dialects/rules.h has instead. Calls are
// taken as legal: the gate of core/guarded_cache.h is not here.

#ifndef KVTWIN_REFERENCE_LEDGER_H_
#define KVTWIN_REFERENCE_LEDGER_H_

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "core/dense_tensor.h"
#include "core/dialects/rules.h"
#include "core/guarded_cache.h"

namespace kvtwin::reference {

struct LedgerToken {
  std::int64_t position = 0;
  std::set<int> sequences;     // Never empty.
  int row = -1;                // In the batch of the current pass.
  std::map<int, KvRows> rows;  // By layer, in the dtypes of the cache.
  std::set<int> spare;  // Of `sequences`: may have left. Eviction is lazy.
  bool HeldBy(int seq) const { return sequences.contains(seq); }
  bool SurelyHeldBy(int seq) const {
    return HeldBy(seq) && !spare.contains(seq);
  }
  void Leave(int seq) {
    sequences.erase(seq);
    spare.erase(seq);
  }
};

using enum StatusCode;

// Answers of the cache under test, which decide where the rules leave the
// answer open. By default: no token had left early.
struct Heard {
  Heard() = default;
  Heard(StatusCode answer) : known(true), code(answer) {}
  bool Is(StatusCode answer) const { return known && code == answer; }
  bool known = false;
  StatusCode code = kOk;
};

// Of one cache. An encoder has no tokens but one slot a layer, of any shape.
class CacheLedger {
 public:
  explicit CacheLedger(const CacheSpec& spec, const Rules& rules = {})
      : spec_(spec), rules_(rules) {}

  bool encoder() const { return spec_.kind == Kind::kEncoder; }
  // Whether StartForward refuses a batch for its positions.
  bool RefusesPositions() const {
    return rules_.positions != Rules::Positions::kAny;
  }
  // In order of birth.
  const std::vector<LedgerToken>& tokens() const { return tokens_; }
  std::int64_t cells() const { return cells_; }
  // No batch is refused for want of room from now on.
  void NeverFull() { cells_ = std::numeric_limits<std::int64_t>::max(); }
  // Batch rows of the current pass; 0 without one.
  int rows() const { return static_cast<int>(batch_.size()); }
  // Of an encoder: all that it holds.
  const CacheState& slots() const { return slots_; }

  // Whether batch row `row` of the current pass may attend to `token` (S16).
  bool Entitled(int row, const LedgerToken& token) const {
    const auto& [now, seq, excepted] = batch_[static_cast<std::size_t>(row)];
    if (!token.HeldBy(seq)) return false;
    if (token.position > now && !excepted) return false;
    if (window_ && BehindBy(token, now, seq) > *window_) return false;
    const bool chunked = spec_.kind == Kind::kChunked;
    return !chunked || token.position >= now - now % spec_.chunk;
  }
  // Whether it is right, too, if the row does not see a token it is entitled
  // to.
  bool MayMiss(int row, const LedgerToken& token) const {
    return token.spare.contains(batch_[static_cast<std::size_t>(row)].sequence);
  }

  // S2 to S4. A window or memory that is absent is unbounded.
  Status Init(const CacheConfig& config, const InitArgs& args) {
    args_ = args;
    permuted_v_ = config.v_layout == VLayout::kPermuted;
    v_dtype_ = config.v_dtype.value_or(args.dtype);
    if (encoder()) {
      if (args.max_sequences == 1 && config.cache_padding == 1) return {};
      return {kInvalidArgument, "one sequence and no padding only"};
    }
    if (spec_.kind == Kind::kSwa || spec_.kind == Kind::kSwaMem) {
      window_ = memory_ = spec_.window;
    }
    if (spec_.kind == Kind::kSwaMem && spec_.memory) memory_ = spec_.memory;
    if (window_ && rules_.window == Rules::Window::kWithQuery) {
      if (--*window_ < 0) return {kInvalidArgument, "no room for the query"};
      --*memory_;
    }
    if (window_ && rules_.first == Rules::First::kStay) {
      memory_ = window_;
      first_ = std::min<std::int64_t>(Rules::kFirst, *memory_);
    } else if (memory_ && args.max_sequences > 1) {  // Room for the stop token.
      memory_ = std::max(*memory_, window_.value_or(kOpenEnd) + 1);
    }
    if (memory_ && *memory_ >= args.capacity) memory_.reset();
    const bool too_short = memory_ && *memory_ < window_.value_or(kOpenEnd);
    if (too_short) return {kInvalidArgument, "memory is below the window"};
    cells_ = std::int64_t{args.max_sequences} * memory_.value_or(args.capacity);
    if (memory_) cells_ += args.max_batch;
    while (cells_ % config.cache_padding != 0) ++cells_;
    if (cells_ <= kOpenEnd) return {};
    return {kInvalidArgument, "more cells than can be counted"};
  }

  Status StartForward(const Batch& batch, bool reserve, Heard heard = {}) {
    EndPass();
    reserve_ = reserve;
    if (encoder()) {
      if (reserve || batch.multimodal.empty()) return {};
      const auto last = static_cast<std::size_t>(batch.multimodal.back());
      slots_.next_position = batch.positions[last];
      return {};
    }
    for (std::size_t i = 0; i < batch.positions.size(); ++i) {
      batch_.push_back({batch.positions[i], batch.sequences[i], false});
    }
    if (reserve) return {};
    if (RefusesPositions() && !GoesOn(heard)) {
      EndPass();
      return {kInvalidArgument, "the batch does not go on where it should"};
    }
    if (first_ > 0 || rules_.back == Rules::Back::kUntilFull) Begin();
    if (memory_ || first_ > 0) Evict();
    if (std::ssize(tokens_) + rows() > cells_) {
      EndPass();
      return {kCacheFull, "more tokens than cells"};
    }
    for (int row = 0; row < rows(); ++row) {
      const BatchToken& born = batch_[static_cast<std::size_t>(row)];
      tokens_.push_back({born.position, {born.sequence}, row, {}, {}});
    }
    return {};
  }

  Status SetCausal(std::span<const int> except) {
    if (encoder()) return {kNotSupported, "there is no mask"};
    for (BatchToken& token : batch_) token.excepted = false;
    for (const int i : except) {
      batch_[static_cast<std::size_t>(i)].excepted = true;
    }
    return {};
  }

  void Put(int layer, const TensorView& key, const TensorView& value) {
    if (encoder()) return PutSlot(layer, key, value);
    for (LedgerToken& token : tokens_) {
      if (token.row < 0) continue;
      token.rows[layer] = RowsAt(token.row, key, value);
    }
  }

  Status CopyPrefix(int src, int dst, std::int32_t len, Heard heard = {}) {
    if (encoder()) return {kNotSupported, "there is one sequence"};
    const bool may = MayBeFull(src) && len < Next(src);
    const bool must = IsFull(src) && len < Next(src, /*surely=*/true);
    if (Refuses(may, must, heard)) return {kNotSupported, kFullText};
    const bool adds = rules_.copy == Rules::Copy::kAdds;
    const bool is_empty = Next(dst) == 0;
    if (!adds || is_empty) began_[dst] = began_[src];
    if (!adds || is_empty) mixed_.erase(dst);
    if (mixed_.contains(src) || (adds && !is_empty)) mixed_.insert(dst);
    for (LedgerToken& token : tokens_) {
      const bool copied = token.HeldBy(src) && token.position < len;
      const bool spare = token.spare.contains(src);
      if (!adds) token.Leave(dst);
      if (!copied) continue;
      const bool is_new = token.sequences.insert(dst).second;
      if (!spare) token.spare.erase(dst);
      if (spare && is_new) token.spare.insert(dst);
    }
    DropUnheld();
    return {};
  }

  // Whether the answer may be yes; `surely`: whether it is, whatever has left.
  bool CanResume(int seq, std::int32_t pos, bool surely = false) const {
    if (surely ? MayBeFull(seq) && pos < Next(seq)
               : IsFull(seq) && pos < Next(seq, /*surely=*/true)) {
      return false;
    }
    if (!memory_) return true;
    std::set<std::int64_t> stored;
    for (const LedgerToken& token : tokens_) {
      const bool counts = surely ? token.SurelyHeldBy(seq) : token.HeldBy(seq);
      if (counts) stored.insert(token.position);
    }
    return !stored.empty() &&
           *stored.begin() <= std::max<std::int64_t>(0, pos - *window_) &&
           pos <= *stored.rbegin() + 1;
  }
  // Whether it cannot be known where the sequence ends.
  bool EndIsOpen(int seq) const {
    return rules_.positions != Rules::Positions::kAny &&
           Next(seq) != Next(seq, /*surely=*/true);
  }
  // CanResume said yes: what the sequence needs to go on is there, until
  // another batch lets it go.
  void Resumes(int seq, std::int32_t pos) {
    const bool lazy = rules_.eviction == Rules::Eviction::kLazy;
    if (!memory_ || !lazy) return;
    // The oldest of tokens out of order may be there while others are gone.
    const std::int64_t whole = mixed_.contains(seq) ? 1 : *window_;
    const std::int64_t ends = Next(seq) == pos ? 1 : 0;  // It is not empty.
    const std::int64_t from = pos - std::max(ends, whole);
    std::map<std::int64_t, int> held;  // Of two at a position, either.
    for (const LedgerToken& token : tokens_) {
      if (token.HeldBy(seq)) ++held[token.position];
    }
    for (LedgerToken& token : tokens_) {
      const bool alone = held[token.position] == 1;
      if (alone && IsIn(token.position, from, pos)) token.spare.erase(seq);
    }
  }

  // With `heard` ok, shared tokens are copied and moved, as backends do it that
  // copy where ours refuse with shared_cells.
  Status Remove(int seq, std::int32_t begin, std::int32_t end,
                Heard heard = {}) {
    const bool open = end == kOpenEnd;
    if (IsIn(slots_.position, begin, end)) slots_.cached = false;
    const Parts parts = PartsOf(seq, begin, end);
    const bool may = parts.leaves.may && (parts.remains.may || begin > 0);
    const bool must =
        parts.leaves.must && (parts.remains.must || begin > began_[seq]);
    if (Refuses(may && MayBeFull(seq), must && IsFull(seq), heard)) {
      return {kNotSupported, kFullText};
    }
    const bool ok = heard.Is(kOk);
    const bool none = rules_.middle == Rules::Middle::kRefused;
    // A token that no token follows may be taken for the end.
    const bool ends = none && ok && !parts.behind.must;
    const bool nothing_left = ok && !parts.remains.must && (none || !CanTurn());
    const bool middle = !open && parts.remains.may && !nothing_left && !ends;
    if (middle && none) {
      return {kNotSupported, "only the end of a sequence can go"};
    }
    const bool shifts = middle && rules_.middle == Rules::Middle::kShifts;
    std::vector<LedgerToken> moved;
    if (shifts) {
      // Where a copy would have to be turned, it can say that it cannot.
      const bool copies = ok || heard.Is(kNotSupported);
      Status status = Move(seq, end, kOpenEnd, begin - end, copies, moved);
      if (!status.ok()) return status;
    }
    const std::int64_t last = ends ? kOpenEnd : end;
    for (LedgerToken& token : tokens_) {
      if (IsIn(token.position, begin, last)) token.Leave(seq);
    }
    Replace(seq, end, shifts ? kOpenEnd : end, moved);
    if (Next(seq) == 0) mixed_.erase(seq);
    return {};
  }

  // Whether it cannot be known which tokens of others Shift would move.
  bool MoveIsOpen(int seq, std::int64_t begin, std::int64_t end) const {
    return std::ranges::any_of(tokens_, [&](const LedgerToken& token) {
      return token.spare.contains(seq) && token.sequences.size() > 1 &&
             IsIn(token.position, begin, end);
    });
  }
  // The same of a Remove up to `end`.
  bool RemoveIsOpen(int seq, std::int64_t end) const {
    return rules_.middle == Rules::Middle::kShifts && end != kOpenEnd &&
           MoveIsOpen(seq, end, kOpenEnd);
  }

  // Of a cache whose Remove leaves a gap: adds `delta` to the positions in
  // [begin, end) of `seq`, and K rows follow. What falls below 0 leaves.
  Status Shift(int seq, std::int32_t begin, std::int32_t end,
               std::int32_t delta) {
    if (rules_.middle != Rules::Middle::kLeavesGap || encoder()) {
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

  // Ends the pass; what it stored leaves.
  void GiveBack() {
    std::erase_if(tokens_, [](auto& token) { return token.row >= 0; });
    slots_.next_position = before_;
    EndPass();
  }
  void EndPass() {
    for (LedgerToken& token : tokens_) token.row = -1;
    before_ = slots_.next_position;
    batch_.clear();
  }

  void Restore(const CacheState& state) {
    EndPass();
    tokens_.clear();
    slots_ = encoder() ? state : CacheState();
    int last = -1;
    for (const auto& [cell, position, sequence] : state.cells) {
      if (cell != last) tokens_.push_back({position, {}, -1, {}, {}});
      tokens_.back().sequences.insert(sequence);
      last = cell;
    }
    for (const auto& [layer, rows] : state.layers) {
      std::int64_t i = 0;
      for (LedgerToken& token : tokens_) {
        token.rows[layer] = RowsAt(i++, rows.key.view(), rows.value.view());
      }
    }
  }

 private:
  KvRows RowsAt(std::int64_t i, const TensorView& key,
                const TensorView& value) const {
    return {CopyOf(Slice(key, 2, i), args_.dtype),
            CopyOf(Slice(value, 2, i), v_dtype_)};
  }

  void PutSlot(int layer, const TensorView& key, const TensorView& value) {
    const TensorView stored = permuted_v_ ? PermutedView(value) : value;
    if (reserve_) {
      const KvRows zeros = {ZerosLike(key), ZerosLike(stored)};
      slots_.layers.try_emplace(layer, zeros);
      return;
    }
    slots_.layers[layer] = {CopyOf(key, key.dtype),
                            CopyOf(stored, stored.dtype)};
    slots_.cached = true;
    slots_.position = slots_.next_position;
  }

  static bool IsIn(std::int64_t position, std::int64_t begin,
                   std::int64_t end) {
    return position >= begin && (position < end || end == kOpenEnd);
  }

  // The position after the last one; `surely`: that cannot have left.
  std::int64_t Next(int seq, bool surely = false) const {
    std::int64_t next = 0;
    for (const LedgerToken& token : tokens_) {
      const bool counts = surely ? token.SurelyHeldBy(seq) : token.HeldBy(seq);
      if (counts) next = std::max(next, token.position + 1);
    }
    return next;
  }

  // Whether a call is refused: it may be, or it must be.
  static bool Refuses(bool may, bool must, Heard heard) {
    return must || (may && !heard.Is(kOk));
  }

  // Whether something of it has left, or will, and so it cannot go back: by
  // the tokens that it ever had, and by the positions before the next one.
  bool IsFull(int seq) const {
    const auto first = began_.find(seq);
    const std::int64_t began = first == began_.end() ? 0 : first->second;
    return MayBeFull(seq) && Next(seq, /*surely=*/true) - began > *window_;
  }
  bool MayBeFull(int seq) const {
    return rules_.back == Rules::Back::kUntilFull && window_ &&
           Next(seq) > *window_;
  }

  // Whether a sequence has tokens in a range, in the rest, and behind it.
  struct Has {
    bool may = false;
    bool must = false;
  };
  struct Parts {
    Has leaves;
    Has remains;
    Has behind;
  };
  Parts PartsOf(int seq, std::int64_t begin, std::int64_t end) const {
    Parts parts;
    for (const LedgerToken& token : tokens_) {
      if (!token.HeldBy(seq)) continue;
      const auto note = [&](Has& has) {
        has.may = true;
        has.must = has.must || token.SurelyHeldBy(seq);
      };
      const bool leaves = IsIn(token.position, begin, end);
      note(leaves ? parts.leaves : parts.remains);
      if (!leaves && token.position >= end) note(parts.behind);
    }
    return parts;
  }

  // How far a token is from a row at `now`, against the window: in positions,
  // or, if first tokens stay, in tokens that the sequence has.
  std::int64_t BehindBy(const LedgerToken& token, std::int64_t now,
                        int seq) const {
    if (rules_.first == Rules::First::kLeave) return now - token.position;
    return std::count_if(tokens_.begin(), tokens_.end(), [&](auto& other) {
      return other.HeldBy(seq) && !other.spare.contains(seq) &&
             other.position > token.position && other.position <= now;
    });
  }

  // `moved` becomes the tokens of `seq` in [begin, end), moved by `delta`.
  Status Move(int seq, std::int64_t begin, std::int64_t end, std::int32_t delta,
              bool copies, std::vector<LedgerToken>& moved) const {
    for (const LedgerToken& token : tokens_) {
      if (!token.HeldBy(seq) || !IsIn(token.position, begin, end)) continue;
      LedgerToken& after = moved.emplace_back(token);
      after.position += delta;
      if (token.sequences.size() == 1 || MovesAll()) continue;
      if (!copies) return {kSharedCells, "a later token is shared"};
      after.sequences = {seq};
      after.row = -1;
    }
    if (!CanTurn()) return {kNotSupported, kNoTurn};
    for (LedgerToken& token : moved) {
      for (auto& [layer, rows] : token.rows) {
        Status status = ShiftStored(spec_.shift, layer, delta, rows.key);
        if (!status.ok()) return status;
      }
    }
    return {};
  }

  // `moved` takes the place of the tokens of `seq` in [begin, end).
  void Replace(int seq, std::int64_t begin, std::int64_t end,
               const std::vector<LedgerToken>& moved) {
    for (LedgerToken& token : tokens_) {
      if (!token.HeldBy(seq) || !IsIn(token.position, begin, end)) continue;
      token.Leave(seq);
      if (MovesAll()) token.sequences.clear();
    }
    DropUnheld();
    tokens_.insert(tokens_.end(), moved.begin(), moved.end());
  }
  bool MovesAll() const {
    return rules_.shared_shift == Rules::SharedShift::kMovesAll;
  }

  // Whether the batch goes on where its sequences end. What they cannot have
  // then is gone.
  bool GoesOn(Heard heard) {
    std::map<int, std::int64_t> first;
    std::map<int, std::int64_t> next;
    for (const auto& [position, seq, excepted] : batch_) {
      if (first.try_emplace(seq, position).second) next[seq] = position;
      if (position != next[seq]++) return false;
    }
    for (const auto& [seq, position] : first) {
      const Has begins = MayBegin(seq, position);
      // As if no token had left early.
      const bool plainly = rules_.positions == Rules::Positions::kOverwrite ||
                           position == Next(seq);
      const bool ok = begins.may && (heard.known ? heard.Is(kOk) : plainly);
      if (!begins.must && !ok) return false;
    }
    for (const auto& [seq, position] : first) SetBack(seq, position);
    DropUnheld();
    return true;
  }

  // Whether a batch at `position` goes on where `seq` ends, by the tokens that
  // it may have, and that it must have.
  Has MayBegin(int seq, std::int64_t position) const {
    const std::int64_t most = Next(seq);
    const std::int64_t least = Next(seq, /*surely=*/true);
    if (rules_.positions == Rules::Positions::kOverwrite) {
      return {position <= most, position <= least};
    }
    Has begins = {least == 0, true};
    for (const LedgerToken& token : tokens_) {
      if (!token.HeldBy(seq) || token.position + 1 < least) continue;
      const bool goes_on = token.position + 1 == position;
      begins.may = begins.may || goes_on;
      begins.must = begins.must && goes_on;
    }
    return begins;
  }

  // `seq` goes on at `position`.
  void SetBack(int seq, std::int64_t position) {
    const bool anywhere =
        rules_.positions == Rules::Positions::kContinue &&
        std::ranges::none_of(tokens_, [&](auto& token) {
          return token.HeldBy(seq) && token.position + 1 == position;
        });
    for (LedgerToken& token : tokens_) {
      if (anywhere || token.position >= position) token.Leave(seq);
    }
  }

  // Where sequences begin that have no tokens.
  void Begin() {
    std::map<int, std::int64_t> lowest;
    for (const auto& [position, seq, excepted] : batch_) {
      const auto [at, is_new] = lowest.try_emplace(seq, position);
      if (!is_new) at->second = std::min<std::int64_t>(at->second, position);
    }
    for (const auto& [seq, position] : lowest) {
      if (Next(seq) == 0) began_[seq] = position;
    }
  }

  // S7. Lazily, they leave when there is no room. Whether a sequence of which
  // nothing is left knows where it ended is its own affair.
  void Evict() {
    std::map<int, std::int64_t> low;  // By sequence.
    for (const LedgerToken& token : tokens_) {
      for (const int seq : token.sequences) {
        low[seq] = std::max(low[seq], token.position + 1);
      }
    }
    // First tokens stay, and others leave, however large the cache.
    const std::int64_t memory = memory_ ? *memory_ : *window_;
    const bool any = rules_.positions == Rules::Positions::kAny;
    const auto next = any ? std::map<int, std::int64_t>() : low;
    for (const BatchToken& one : batch_) low[one.sequence] = one.position;
    for (const auto& [position, seq, excepted] : batch_) {
      low[seq] = std::min<std::int64_t>(low[seq], position);
    }
    const bool leave = rules_.eviction == Rules::Eviction::kEager ||
                       std::ssize(tokens_) + rows() > cells_;
    for (LedgerToken& token : tokens_) {
      std::erase_if(token.sequences, [&](int seq) {
        const std::int64_t kept = low[seq] - memory + first_;
        const bool stays = first_ > 0 && token.position < began_[seq] + first_;
        if (stays || token.position >= kept) return false;
        const bool is_last = !any && token.position + 1 == next.at(seq);
        const bool leaves = leave && !is_last;
        leaves ? void(token.spare.erase(seq)) : void(token.spare.insert(seq));
        return leaves;
      });
    }
    DropUnheld();
  }

  void DropUnheld() {
    std::erase_if(tokens_, [](auto& token) { return token.sequences.empty(); });
  }

  bool CanTurn() const { return spec_.shift.kind != ShiftKind::kNone; }

  static constexpr auto kNoTurn = "there is no shift function";
  static constexpr auto kFullText = "the window is full, nothing goes back";

  CacheSpec spec_;
  Rules rules_;
  InitArgs args_;
  bool permuted_v_ = false;
  DType v_dtype_ = DType::kF32;
  std::optional<std::int64_t> window_;
  std::optional<std::int64_t> memory_;
  std::int64_t first_ = 0;             // So many tokens stay.
  std::map<int, std::int64_t> began_;  // By sequence: its first position.
  // Sequences whose tokens may not have come in the order of their positions.
  std::set<int> mixed_;
  std::int64_t cells_ = 0;
  std::vector<LedgerToken> tokens_;
  std::vector<BatchToken> batch_;  // Of the current pass.
  bool reserve_ = false;

  // Of an encoder.
  CacheState slots_;
  std::int32_t before_ = 0;  // slots_.next_position before the pass.
};

// Of any cache: one ledger, or those of a wrapper.
class Ledger {
 public:
  explicit Ledger(const CacheSpec& spec, const Rules& rules = {}) {
    for (const CacheSpec& part : spec.caches) parts_.emplace_back(part, rules);
    if (spec.kind != Kind::kWrapper) parts_ = {CacheLedger(spec, rules)};
  }

  // For SetCausal, Put, and to look.
  CacheLedger& active() { return parts_[active_]; }
  const CacheLedger& active() const { return parts_[active_]; }
  const std::vector<CacheLedger>& parts() const { return parts_; }
  void SetLayerType(int type) { active_ = static_cast<std::size_t>(type); }

  Status Init(const CacheConfig& config, const InitArgs& args) {
    return All([&](auto& part) { return part.Init(config, args); });
  }
  void NeverFull() {
    for (CacheLedger& part : parts_) part.NeverFull();
  }
  Status StartForward(const Batch& batch, bool reserve, Heard heard = {}) {
    for (CacheLedger& part : parts_) part.EndPass();
    std::vector<CacheLedger> before;
    if (parts_.size() > 1 && parts_[0].RefusesPositions()) before = parts_;
    for (CacheLedger& part : parts_) {
      Status status = part.StartForward(batch, reserve, heard);
      if (status.ok()) continue;
      if (!before.empty() && status.code() == kInvalidArgument) {
        parts_ = std::move(before);  // No cache changes (S47).
        return status;
      }
      for (CacheLedger& each : parts_) each.GiveBack();
      return status;
    }
    active_ = 0;
    return {};
  }
  Status CopyPrefix(int src, int dst, std::int32_t len, Heard heard = {}) {
    return All(
        [&](auto& part) { return part.CopyPrefix(src, dst, len, heard); });
  }
  bool CanResume(int seq, std::int32_t pos, bool surely = false) const {
    return std::all_of(parts_.begin(), parts_.end(), [&](auto& part) {
      return part.CanResume(seq, pos, surely);
    });
  }
  bool EndIsOpen(int seq) const {
    return std::any_of(parts_.begin(), parts_.end(),
                       [&](auto& part) { return part.EndIsOpen(seq); });
  }
  void Resumes(int seq, std::int32_t pos) {
    for (CacheLedger& part : parts_) part.Resumes(seq, pos);
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end,
                Heard heard = {}) {
    return All([&](auto& p) { return p.Remove(seq, begin, end, heard); });
  }
  bool MoveIsOpen(int seq, std::int64_t begin, std::int64_t end) const {
    return std::any_of(parts_.begin(), parts_.end(), [&](auto& part) {
      return part.MoveIsOpen(seq, begin, end);
    });
  }
  bool RemoveIsOpen(int seq, std::int64_t end) const {
    return std::any_of(parts_.begin(), parts_.end(),
                       [&](auto& part) { return part.RemoveIsOpen(seq, end); });
  }
  Status Shift(int seq, std::int32_t begin, std::int32_t end,
               std::int32_t delta) {
    return All([&](auto& part) { return part.Shift(seq, begin, end, delta); });
  }
  void Restore(const CacheState& state) {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      parts_[i].Restore(state.caches.empty() ? state : state.caches[i]);
    }
    active_ = 0;
  }

 private:
  // Makes the call to every ledger, or to none if one of them refuses.
  template <class Call>
  Status All(const Call& call) {
    if (parts_.size() == 1) return call(parts_[0]);
    std::vector<CacheLedger> after = parts_;
    for (CacheLedger& part : after) {
      if (Status status = call(part); !status.ok()) return status;
    }
    parts_ = std::move(after);
    return {};
  }

  std::vector<CacheLedger> parts_;
  std::size_t active_ = 0;
};

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_LEDGER_H_
