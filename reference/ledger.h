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
  std::map<int, KvRows> rows;  // By layer, in the dtype of the cache.
  bool HeldBy(int seq) const { return sequences.contains(seq); }
};

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
  // Of an encoder.
  bool cached() const { return cached_; }
  // Of an encoder. Null if nothing was put into the layer.
  const KvRows* slot(int layer) const {
    const auto at = slots_.find(layer);
    return at == slots_.end() ? nullptr : &at->second;
  }

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
    permuted_v_ = config.permuted_v;
    if (encoder()) {
      if (args.max_sequences == 1 && config.cache_padding == 1) return {};
      return {StatusCode::kInvalidArgument, "one sequence and no padding only"};
    }
    if (spec_.kind == Kind::kSwa || spec_.kind == Kind::kSwaMem) {
      window_ = memory_ = spec_.window;
    }
    if (spec_.kind == Kind::kSwaMem && spec_.memory) memory_ = spec_.memory;
    if (memory_ && args.max_sequences > 1) {  // Room for the stop token.
      memory_ = std::max(*memory_, window_.value_or(kOpenEnd) + 1);
    }
    if (memory_ && *memory_ >= args.capacity) memory_.reset();
    if (memory_ && *memory_ < window_.value_or(kOpenEnd)) {
      return {StatusCode::kInvalidArgument, "memory is less than the window"};
    }
    cells_ = std::int64_t{args.max_sequences} * memory_.value_or(args.capacity);
    if (memory_) cells_ += args.max_batch;
    while (cells_ % config.cache_padding != 0) ++cells_;
    if (cells_ <= kOpenEnd) return {};
    return {StatusCode::kInvalidArgument, "more cells than can be counted"};
  }

  Status StartForward(const Batch& batch, bool reserve) {
    EndPass();
    reserve_ = reserve;
    if (encoder()) {
      if (reserve || batch.multimodal.empty()) return {};
      const auto last = static_cast<std::size_t>(batch.multimodal.back());
      next_ = batch.positions[last];
      return {};
    }
    for (std::size_t i = 0; i < batch.positions.size(); ++i) {
      batch_.push_back({batch.positions[i], batch.sequences[i], false});
    }
    if (reserve) return {};
    if (memory_) Evict();
    if (std::ssize(tokens_) + rows() > cells_) {
      EndPass();
      return {StatusCode::kCacheFull, "more tokens than cells"};
    }
    for (int row = 0; row < rows(); ++row) {
      const BatchToken& born = batch_[static_cast<std::size_t>(row)];
      tokens_.push_back({born.position, {born.sequence}, row, {}});
    }
    return {};
  }

  Status SetCausal(std::span<const int> except) {
    if (encoder()) return {StatusCode::kNotSupported, "there is no mask"};
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
    if (encoder()) return {StatusCode::kNotSupported, "there is one sequence"};
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

  Status Remove(int seq, std::int32_t begin, std::int32_t end) {
    const bool open = end == kOpenEnd;
    if (begin <= position_ && (position_ < end || open)) cached_ = false;
    bool remains = false;
    std::vector<LedgerToken> moved;
    for (const LedgerToken& token : tokens_) {
      if (!token.HeldBy(seq)) continue;
      const bool later = token.position >= end && !open;
      remains = remains || token.position < begin || later;
      if (later && token.sequences.size() > 1) {
        return {StatusCode::kSharedCells, "a later token is shared"};
      }
      if (later) moved.push_back(token);
    }
    if (!open && remains && spec_.shift.kind == ShiftKind::kNone) {
      return {StatusCode::kNotSupported, "there is no shift function"};
    }
    for (LedgerToken& token : moved) {
      token.position -= end - begin;
      for (auto& [layer, rows] : token.rows) {
        Status status = ShiftStored(spec_.shift, layer, begin - end, rows.key);
        if (!status.ok()) return status;
      }
    }
    auto next = moved.begin();
    for (LedgerToken& token : tokens_) {
      if (!token.HeldBy(seq) || token.position < begin) continue;
      if (token.position < end || open)
        token.sequences.erase(seq);
      else
        token = std::move(*next++);
    }
    DropUnheld();
    return {};
  }

  // Ends the pass; what it stored leaves.
  void GiveBack() {
    std::erase_if(tokens_, [](auto& token) { return token.row >= 0; });
    next_ = before_;
    EndPass();
  }
  void EndPass() {
    for (LedgerToken& token : tokens_) token.row = -1;
    before_ = next_;
    batch_.clear();
  }

  void Restore(const CacheState& state) {
    EndPass();
    tokens_.clear();
    slots_ = encoder() ? state.layers : std::map<int, KvRows>();
    cached_ = state.cached;
    position_ = state.position;
    next_ = state.next_position;
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

  // Gives `seq` its own copy of every token that it shares. For backends that
  // copy where ours refuse with shared_cells.
  void Unshare(int seq) {
    for (std::size_t i = tokens_.size(); i-- > 0;) {
      LedgerToken copy = tokens_[i];
      if (!copy.HeldBy(seq) || copy.sequences.size() == 1) continue;
      tokens_[i].sequences.erase(seq);
      copy.sequences = {seq};
      copy.row = -1;
      tokens_.push_back(std::move(copy));
    }
  }

 private:
  KvRows RowsAt(std::int64_t i, const TensorView& key,
                const TensorView& value) const {
    return {CopyOf(Slice(key, 2, i), args_.dtype),
            CopyOf(Slice(value, 2, i), args_.dtype)};
  }

  void PutSlot(int layer, const TensorView& key, const TensorView& value) {
    const TensorView stored = permuted_v_ ? PermutedView(value) : value;
    if (reserve_) {
      slots_.try_emplace(layer, KvRows{ZerosLike(key), ZerosLike(stored)});
      return;
    }
    slots_[layer] = {CopyOf(key, key.dtype), CopyOf(stored, stored.dtype)};
    cached_ = true;
    position_ = next_;
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
    for (const BatchToken& one : batch_) {
      std::int64_t& lowest = low[one.sequence];
      lowest = std::min<std::int64_t>(lowest, one.position);
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
  std::optional<std::int64_t> window_;
  std::optional<std::int64_t> memory_;
  std::int64_t cells_ = 0;
  std::vector<LedgerToken> tokens_;
  std::vector<BatchToken> batch_;  // Of the current pass.
  bool reserve_ = false;

  // Of an encoder.
  std::map<int, KvRows> slots_;  // By layer.
  bool cached_ = false;
  std::int32_t position_ = 0;  // Of what the slots hold.
  std::int32_t next_ = 0;      // Of the next Put.
  std::int32_t before_ = 0;    // Of the next Put, before the pass.
};

// Of any cache: one ledger, or those of a wrapper. The calls of Cache, with the
// layer as an argument.
class Ledger {
 public:
  explicit Ledger(const CacheSpec& spec) {
    for (const CacheSpec& part : spec.caches) parts_.emplace_back(part);
    if (spec.kind != Kind::kWrapper) parts_ = {CacheLedger(spec)};
  }

  const CacheLedger& active() const { return parts_[active_]; }
  const std::vector<CacheLedger>& parts() const { return parts_; }
  void SetLayerType(int type) { active_ = static_cast<std::size_t>(type); }

  Status Init(const CacheConfig& config, const InitArgs& args) {
    return AllOrNone([&](auto& part) { return part.Init(config, args); });
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
  Status SetCausal(std::span<const int> except) {
    return parts_[active_].SetCausal(except);
  }
  void Put(int layer, const TensorView& key, const TensorView& value) {
    parts_[active_].Put(layer, key, value);
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) {
    return AllOrNone(
        [&](auto& part) { return part.CopyPrefix(src, dst, len); });
  }
  bool CanResume(int seq, std::int32_t pos) const {
    return std::all_of(parts_.begin(), parts_.end(),
                       [&](auto& part) { return part.CanResume(seq, pos); });
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) {
    return AllOrNone([&](auto& part) { return part.Remove(seq, begin, end); });
  }
  void Unshare(int seq) {
    for (CacheLedger& part : parts_) part.Unshare(seq);
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
  Status AllOrNone(const Call& call) {
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
