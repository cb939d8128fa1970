// The ledger: a model of a cache without cells.
//
// It is a list of tokens, each with its position, the sequences that hold it
// and the exact K and V rows of its Put. It answers one question: which tokens
// may this batch row see, and what are their rows now? The reference twin is
// checked against it, so they share only core/. Each function names its rules
// in docs/semantics.md: (S7). Calls must be valid: the ledger does not have the
// checks of core/guarded_cache.h.
//
// The harness uses the ledgers of reference/dialects.h, which derive from these
// and override the rules in which other systems differ.

#ifndef KVTWIN_REFERENCE_LEDGER_H_
#define KVTWIN_REFERENCE_LEDGER_H_

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "core/dense_tensor.h"
#include "core/guarded_cache.h"
#include "core/index.h"
#include "core/refusals.h"
#include "reference/ledger_token.h"

namespace kvtwin::reference {

using enum StatusCode;

// The ledger of one cache that is not a wrapper. An encoder has no tokens, but
// one slot of any shape for each layer.
class PlainLedger {
 public:
  explicit PlainLedger(const CacheSpec& spec) : spec_(spec) {}
  virtual ~PlainLedger() = default;
  bool encoder() const { return spec_.kind == Kind::kEncoder; }
  const Shift& shift() const { return spec_.shift; }
  // In the order in which they were made; a token that moves becomes the last.
  const std::vector<LedgerToken>& tokens() const { return tokens_; }
  std::int64_t cells() const { return cells_; }
  // The number of batch rows of the current pass; 0 without a pass.
  int rows() const { return Size(batch_); }
  const std::vector<BatchToken>& batch() const { return batch_; }
  bool reserves() const { return reserve_; }  // The current pass.
  // The slots of an encoder, and their positions.
  const CacheState& slots() const { return slots_; }

  // The position after the sequence's last token; 0 if it has none.
  std::int64_t Next(int seq) const {
    std::int64_t next = 0;
    for (const LedgerToken& token : tokens_) {
      if (token.HeldBy(seq)) next = std::max(next, token.position + 1);
    }
    return next;
  }

  // Whether row `row` of the current batch may see `token` (S16, S17, D2).
  virtual bool MaySee(int row, const LedgerToken& token) const {
    const BatchToken& at = At(batch_, row);
    const std::int64_t now = at.position;
    if (!token.HeldBy(at.sequence) && !Follows(tokens_, at, token)) {
      return false;
    }
    if (token.position > now && !at.excepted) return false;
    if (window_ && now - token.position > *window_) return false;
    const bool chunked = spec_.kind == Kind::kChunked;
    return !chunked || token.position >= now - now % spec_.chunk;
  }

  // Sets the window and the memory, and counts the cells (S2 to S4, S38).
  virtual Status Init(const CacheConfig& config, const InitArgs& args) {
    args_ = args;
    permuted_v_ = config.v_layout == VLayout::kPermuted;
    v_dtype_ = config.v_dtype.value_or(args.dtype);
    if (encoder()) {
      if (args.max_sequences == 1 && config.cache_padding == 1) return {};
      return {kInvalidArgument, "one sequence and no padding only"};
    }
    SetReach();
    if (memory_ && *memory_ >= args.capacity) memory_.reset();
    if (memory_ && *memory_ < window_.value_or(kOpenEnd)) {
      return Invalid("memory is {}, less than the window, which is {}",
                     *memory_, window_.value_or(kOpenEnd));
    }
    cells_ = args.max_sequences * memory_.value_or(args.capacity);
    if (memory_) cells_ += args.max_batch;
    while (cells_ % config.cache_padding != 0) ++cells_;
    if (cells_ <= kOpenEnd) return {};
    return {kInvalidArgument, "more cells than can be counted"};
  }

  // Whether tokens of a batch may be drafts (D8).
  virtual bool TakesDrafts() const { return !encoder(); }

  // Evicts, and stores the tokens (S5, S6, S12, S13, S18, S39, D1).
  // The number of free cells decides: defrag makes one run of all of them (S9).
  virtual Status StartForward(const Batch& batch, bool reserve) {
    EndPass();
    reserve_ = reserve;
    if (encoder()) {
      if (reserve || batch.multimodal.empty()) return {};
      const auto last = AsSize(batch.multimodal.back());
      slots_.next_position = batch.positions[last];
      return {};
    }
    for (std::size_t i = 0; i < batch.positions.size(); ++i) {
      batch_.push_back({batch.positions[i], batch.sequences[i], false});
    }
    if (reserve) return {};
    NumberDrafts(batch, tokens_, batch_);
    Evict();
    if (std::ssize(tokens_) + rows() > cells_) {
      EndPass();
      return {kCacheFull, "more tokens than cells"};
    }
    int row = 0;
    for (const BatchToken& at : batch_) {
      tokens_.push_back({at.position, {at.sequence}, row++, {}, births_++});
      if (at.draft >= 0) MakeDraft(at, tokens_.back());
    }
    return {};
  }

  // Commits drafts (D5).
  Status Commit(int seq, std::span<const int> path) {
    CommitDrafts(seq, path, tokens_);
    return {};
  }
  void DropDrafts(int seq) { CommitDrafts(seq, {}, tokens_); }  // (D6)

  // Excepts tokens of the batch from causality (S19, S38).
  Status SetCausal(std::span<const int> except) {
    if (encoder()) return {kNotSupported, "there is no mask"};
    for (BatchToken& token : batch_) token.excepted = false;
    for (const int i : except) {
      At(batch_, i).excepted = true;
    }
    return {};
  }

  // Stores the rows of the batch (S20 to S22), or a slot (S37, S39, S40).
  void Put(int layer, const TensorView& key, const TensorView& value) {
    if (encoder()) return PutSlot(layer, key, value);
    for (LedgerToken& token : tokens_) {
      if (token.row >= 0) token.rows[layer] = RowsAt(token.row, key, value);
    }
  }

  // Shares a prefix, or truncates (S26, S27, S38).
  virtual Status CopyPrefix(int src, int dst, std::int32_t len) {
    if (encoder()) return {kNotSupported, "there is one sequence"};
    for (LedgerToken& token : tokens_) {
      const bool copied = token.HeldBy(src) && token.position < len;
      token.sequences.erase(dst);
      if (copied) token.sequences.insert(dst);
    }
    DropUnheld();
    return {};
  }

  // Whether a sequence that begins with `length` tokens of its prompt needs the
  // token at `position`: the next token sees it, or it is the last token (F3).
  virtual bool IsNeeded(std::int64_t position, std::int64_t length) const {
    if (position == length - 1) return true;
    if (window_ && position < length - *window_) return false;
    if (spec_.kind != Kind::kChunked) return true;
    return position >= length - length % spec_.chunk;
  }
  // Gives `seq` a token that was computed before (F4).
  virtual void Take(int seq, std::int64_t position,
                    const std::map<int, KvRows>& rows) {
    tokens_.push_back({position, {seq}, -1, rows, births_++});
  }
  // Whether earlier tokens of a sequence may be of no use to the next one.
  virtual bool Forgets() const {
    return window_.has_value() || spec_.kind == Kind::kChunked;
  }

  // Returns row `i` of a Put, rounded to the dtypes of the cache (S22).
  KvRows RowsAt(std::int64_t i, const TensorView& key,
                const TensorView& value) const {
    return {CopyOf(Slice(key, 2, i), args_.dtype),
            CopyOf(Slice(value, 2, i), v_dtype_)};
  }

  // Whether `seq` can continue at `pos` (S28, S38).
  virtual bool CanResume(int seq, std::int32_t pos) const {
    if (!memory_) return true;
    std::set<std::int64_t> stored;
    for (const LedgerToken& token : tokens_) {
      if (token.HeldBy(seq)) stored.insert(token.position);
    }
    return CanResumeWith(stored, pos);
  }

  // Removes a range, and moves later tokens down (S29 to S33, S40).
  virtual Status Remove(int seq, std::int32_t begin, std::int32_t end) {
    if (IsIn(slots_.position, begin, end)) slots_.cached = false;
    std::vector<LedgerToken> moved;
    if (end != kOpenEnd) {
      Status status = MoveDown(seq, begin, end, moved);
      if (!status.ok()) return status;
    }
    for (LedgerToken& token : tokens_) {
      if (token.position >= begin) token.sequences.erase(seq);
    }
    DropUnheld();
    tokens_.insert(tokens_.end(), moved.begin(), moved.end());
    return {};
  }

  // Ends the pass, and removes the tokens that it stored (S43).
  void GiveBack() {
    std::erase_if(tokens_, [](auto& token) { return token.row >= 0; });
    slots_.next_position = before_;
    EndPass();
  }
  // Ends the pass (S5).
  void EndPass() {
    for (LedgerToken& token : tokens_) token.row = -1;
    before_ = slots_.next_position;
    batch_.clear();
  }

  // Makes the ledger hold exactly `state` (S55).
  void Restore(const CacheState& state) {
    EndPass();
    tokens_.clear();
    slots_ = encoder() ? state : CacheState();
    int last = -1;
    for (const auto& [cell, position, sequence] : state.cells) {
      if (cell != last) tokens_.push_back({position, {}, -1, {}, births_++});
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

 protected:
  // Sets the window and the memory (S2, and S3 except for the capacity).
  virtual void SetReach() {
    if (IsWindowed(spec_.kind)) window_ = memory_ = spec_.window;
    if (spec_.kind == Kind::kSwaMem && spec_.memory) memory_ = spec_.memory;
    if (memory_ && args_.max_sequences > 1) {  // Room for the stop token.
      memory_ = std::max(*memory_, window_.value_or(kOpenEnd) + 1);
    }
  }

  // Lets old tokens leave their sequences (S7).
  virtual void Evict() {
    if (!memory_) return;
    std::map<int, std::int64_t> low = Lows();
    for (LedgerToken& token : tokens_) {
      std::erase_if(token.sequences, [&](int seq) {
        return token.position < low[seq] - *memory_;
      });
    }
    DropUnheld();
  }

  // Returns for each sequence its lowest position in the batch; if it is not in
  // the batch, its highest stored position + 1 (S7). Drafts count as tokens of
  // the batch (D3).
  std::map<int, std::int64_t> Lows() const {
    std::map<int, std::int64_t> lows;
    for (const LedgerToken& token : tokens_) {
      for (const int seq : token.sequences) {
        lows[seq] = std::max(lows[seq], token.position + 1);
      }
    }
    for (const auto& token : batch_) lows[token.sequence] = token.position;
    for (const auto& token : batch_) {
      std::int64_t& low = lows[token.sequence];
      low = std::min<std::int64_t>(low, token.position);
    }
    LowerToDrafts(tokens_, lows);
    return lows;
  }

  // Drops the tokens that no sequence holds (S8).
  void DropUnheld() {
    std::erase_if(tokens_, [](auto& token) { return token.owners().empty(); });
  }

  // S28, given the positions of a sequence. Requires: memory is bounded.
  bool CanResumeWith(const std::set<std::int64_t>& stored,
                     std::int32_t pos) const {
    KVTWIN_ASSERT(memory_.has_value());
    return !stored.empty() &&
           *stored.begin() <= std::max<std::int64_t>(0, pos - *window_) &&
           pos <= *stored.rbegin() + 1;
  }

  // Fills `moved` with the later tokens of `seq`, moved down (S31, S32).
  Status MoveDown(int seq, std::int32_t begin, std::int32_t end,
                  std::vector<LedgerToken>& moved) const {
    bool keeps_any = false;
    for (const LedgerToken& token : tokens_) {
      if (!token.HeldBy(seq) || IsIn(token.position, begin, end)) continue;
      keeps_any = true;
      if (token.position < end) continue;
      if (token.sequences.size() > 1) {
        return {kSharedCells, "a later token is shared"};
      }
      moved.push_back(token);
    }
    return keeps_any ? Shifted(begin - end, moved) : Status();
  }

  // Adds `delta` to the positions, and shifts the K rows (S34 to S36).
  Status Shifted(std::int32_t delta, std::vector<LedgerToken>& tokens) const {
    if (!CanShift()) return {kNotSupported, "there is no shift function"};
    for (LedgerToken& token : tokens) {
      token.position += delta;
      for (auto& [layer, rows] : token.rows) {
        Status status = ShiftStored(spec_.shift, layer, delta, rows.key);
        if (!status.ok()) return status;
      }
    }
    return {};
  }
  bool CanShift() const { return spec_.shift.kind != ShiftKind::kNone; }

  static bool IsIn(std::int64_t at, std::int64_t begin, std::int64_t end) {
    return at >= begin && (at < end || end == kOpenEnd);
  }

  // Stores an encoder's slot (S20, S37, S39, S40).
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

  CacheSpec spec_;
  InitArgs args_;
  std::optional<std::int64_t> window_;  // No value: unbounded.
  std::optional<std::int64_t> memory_;  // No value: unbounded.
  std::int64_t cells_ = 0;
  std::vector<LedgerToken> tokens_;
  std::int64_t births_ = 0;
  std::vector<BatchToken> batch_;  // The current pass.
  bool reserve_ = false;
  bool permuted_v_ = false;
  DType v_dtype_ = DType::kF32;
  CacheState slots_;         // Used by encoders only.
  std::int32_t before_ = 0;  // slots_.next_position before the pass.
};

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_LEDGER_H_
