// The ledger: what a cache must do, said without cells.
//
// A list of tokens, each with its position, the sequences that hold it and the
// exact K and V rows it was put with. It answers one question: which tokens is
// this batch row entitled to, and what are their rows now? The reference twin
// is checked against it, so they share nothing but core/. The rules are those
// of docs/semantics.md. Calls are taken as legal: the gate of
// core/guarded_cache.h is not here.

#ifndef KVTWIN_REFERENCE_LEDGER_H_
#define KVTWIN_REFERENCE_LEDGER_H_

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "core/dense_tensor.h"
#include "core/guarded_cache.h"

namespace kvtwin::reference {

struct LedgerToken {
  std::int64_t position = 0;
  std::set<int> sequences;     // Never empty.
  int row = -1;                // In the batch of the current pass.
  std::map<int, KvRows> rows;  // By layer, in the dtypes of the cache.
  bool HeldBy(int seq) const { return sequences.contains(seq); }
};

using enum StatusCode;

// Of one cache. An encoder has no tokens but one slot a layer, of any shape.
class CacheLedger {
 public:
  explicit CacheLedger(const CacheSpec& spec) : spec_(spec) {}

  bool encoder() const { return spec_.kind == Kind::kEncoder; }
  // In order of birth.
  const std::vector<LedgerToken>& tokens() const { return tokens_; }
  std::int64_t cells() const { return cells_; }
  // Batch rows of the current pass; 0 without one.
  int rows() const { return static_cast<int>(batch_.size()); }
  // Of an encoder: all that it holds.
  const CacheState& slots() const { return slots_; }

  // Whether batch row `row` of the current pass may attend to `token` (S16).
  bool Entitled(int row, const LedgerToken& token) const {
    const auto& [now, seq, excepted] = batch_[static_cast<std::size_t>(row)];
    if (!token.HeldBy(seq)) return false;
    if (token.position > now && !excepted) return false;
    if (window_ && token.position < now - *window_) return false;
    const bool chunked = spec_.kind == Kind::kChunked;
    return !chunked || token.position >= now - now % spec_.chunk;
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
    if (memory_ && args.max_sequences > 1) {  // Room for the stop token.
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

  Status StartForward(const Batch& batch, bool reserve) {
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
    if (memory_) Evict();
    if (std::ssize(tokens_) + rows() > cells_) {
      EndPass();
      return {kCacheFull, "more tokens than cells"};
    }
    for (int row = 0; row < rows(); ++row) {
      const BatchToken& born = batch_[static_cast<std::size_t>(row)];
      tokens_.push_back({born.position, {born.sequence}, row, {}});
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

  Status CopyPrefix(int src, int dst, std::int32_t len) {
    if (encoder()) return {kNotSupported, "there is one sequence"};
    for (LedgerToken& token : tokens_) {
      const bool copied = token.HeldBy(src) && token.position < len;
      token.sequences.erase(dst);
      if (copied) token.sequences.insert(dst);
    }
    DropUnheld();
    return {};
  }

  bool CanResume(int seq, std::int32_t pos) const {
    if (!memory_) return true;
    std::set<std::int64_t> stored;
    for (const LedgerToken& token : tokens_) {
      if (token.HeldBy(seq)) stored.insert(token.position);
    }
    return !stored.empty() &&
           *stored.begin() <= std::max<std::int64_t>(0, pos - *window_) &&
           pos <= *stored.rbegin() + 1;
  }

  // With `copies`, as backends do it that copy where ours refuse with
  // shared_cells.
  Status Remove(int seq, std::int32_t begin, std::int32_t end,
                bool copies = false) {
    const bool open = end == kOpenEnd;
    const bool before_end = slots_.position < end || open;
    if (begin <= slots_.position && before_end) slots_.cached = false;
    bool remains = false;
    std::vector<LedgerToken> moved;
    for (const LedgerToken& token : tokens_) {
      if (!token.HeldBy(seq)) continue;
      const bool later = token.position >= end && !open;
      remains = remains || token.position < begin || later;
      if (!later) continue;
      const bool shared = token.sequences.size() > 1;
      if (shared && !copies) return {kSharedCells, "a later token is shared"};
      const std::int64_t position = token.position - (end - begin);
      moved.push_back({position, {seq}, shared ? -1 : token.row, token.rows});
    }
    if (!open && remains && spec_.shift.kind == ShiftKind::kNone) {
      return {kNotSupported, "there is no shift function"};
    }
    for (LedgerToken& token : moved) {
      for (auto& [layer, rows] : token.rows) {
        Status status = ShiftStored(spec_.shift, layer, begin - end, rows.key);
        if (!status.ok()) return status;
      }
    }
    for (LedgerToken& token : tokens_) {
      if (token.position >= begin) token.sequences.erase(seq);
    }
    DropUnheld();
    tokens_.insert(tokens_.end(), moved.begin(), moved.end());
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
      if (cell != last) tokens_.push_back({position, {}, -1, {}});
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

  // S7.
  void Evict() {
    std::map<int, std::int64_t> low;  // By sequence.
    for (const LedgerToken& token : tokens_) {
      for (const int seq : token.sequences) {
        low[seq] = std::max(low[seq], token.position + 1);
      }
    }
    for (const BatchToken& one : batch_) low[one.sequence] = one.position;
    for (const auto& [position, seq, excepted] : batch_) {
      low[seq] = std::min<std::int64_t>(low[seq], position);
    }
    for (LedgerToken& token : tokens_) {
      std::erase_if(token.sequences, [&](int seq) {
        return token.position < low[seq] - *memory_;
      });
    }
    DropUnheld();
  }

  void DropUnheld() {
    std::erase_if(tokens_, [](auto& token) { return token.sequences.empty(); });
  }

  CacheSpec spec_;
  InitArgs args_;
  bool permuted_v_ = false;
  DType v_dtype_ = DType::kF32;
  std::optional<std::int64_t> window_;
  std::optional<std::int64_t> memory_;
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
  explicit Ledger(const CacheSpec& spec) {
    for (const CacheSpec& part : spec.caches) parts_.emplace_back(part);
    if (spec.kind != Kind::kWrapper) parts_ = {CacheLedger(spec)};
  }

  // For SetCausal, Put, and to look.
  CacheLedger& active() { return parts_[active_]; }
  const CacheLedger& active() const { return parts_[active_]; }
  const std::vector<CacheLedger>& parts() const { return parts_; }
  void SetLayerType(int type) { active_ = static_cast<std::size_t>(type); }

  Status Init(const CacheConfig& config, const InitArgs& args) {
    return All([&](auto& part) { return part.Init(config, args); });
  }
  Status StartForward(const Batch& batch, bool reserve) {
    for (CacheLedger& part : parts_) part.EndPass();
    for (CacheLedger& part : parts_) {
      Status status = part.StartForward(batch, reserve);
      if (status.ok()) continue;
      for (CacheLedger& each : parts_) each.GiveBack();
      return status;
    }
    active_ = 0;
    return {};
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) {
    return All([&](auto& part) { return part.CopyPrefix(src, dst, len); });
  }
  bool CanResume(int seq, std::int32_t pos) const {
    return std::all_of(parts_.begin(), parts_.end(),
                       [&](auto& part) { return part.CanResume(seq, pos); });
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end,
                bool copies = false) {
    return All([&](auto& p) { return p.Remove(seq, begin, end, copies); });
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
