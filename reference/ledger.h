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
#include <variant>
#include <vector>

#include "core/dense_tensor.h"
#include "core/guarded_cache.h"

namespace kvtwin::reference {

// What a layer holds for one token, in the dtype of the cache, key =
// [k_head_dim, kv_heads] and value = [v_head_dim, kv_heads]; or for an encoder.
struct LedgerRows {
  DenseTensor key;
  DenseTensor value;
};

struct LedgerToken {
  std::int64_t id = 0;  // Counts tokens in order of birth.
  std::int32_t position = 0;
  std::set<int> sequences;         // Never empty.
  std::map<int, LedgerRows> rows;  // By layer; absent if never put.
  bool HeldBy(int seq) const { return sequences.contains(seq); }
};

// The causal family.
class CausalLedger {
 public:
  explicit CausalLedger(const CacheSpec& spec) : spec_(spec) {}

  // In order of birth.
  const std::vector<LedgerToken>& tokens() const { return tokens_; }
  std::int64_t cells() const { return cells_; }
  // Batch rows of the current pass; 0 without one.
  int rows() const { return static_cast<int>(asking_.size()); }

  // Whether batch row `row` of the current pass may attend to `token` (S16).
  bool Entitled(int row, const LedgerToken& token) const {
    const auto& [position, seq, id, excepted] =
        asking_[static_cast<std::size_t>(row)];
    const std::int64_t now = position;
    if (!token.HeldBy(seq)) return false;
    if (token.position > now && !excepted) return false;
    if (window_ && token.position < now - *window_) return false;
    const bool chunked = spec_.kind == Kind::kChunked;
    return !chunked || token.position >= now - now % spec_.chunk;
  }

  // S2 to S4. 64 bits: a window or memory that is absent is unbounded.
  Status Init(const CacheConfig& config, const InitArgs& args) {
    args_ = args;
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
    const std::size_t tokens = batch.positions.size();
    for (std::size_t i = 0; i < tokens; ++i) {
      asking_.push_back({batch.positions[i], batch.sequences[i], -1, false});
    }
    if (reserve) return {};
    if (memory_) Evict();
    if (std::ssize(tokens_) + std::ssize(asking_) > cells_) {
      EndPass();
      return {StatusCode::kCacheFull, "more tokens than cells"};
    }
    for (Asking& one : asking_) {
      one.token = born_++;
      tokens_.push_back({one.token, one.position, {one.sequence}, {}});
    }
    return {};
  }

  Status SetCausal(std::span<const int> except) {
    for (Asking& one : asking_) one.excepted = false;
    for (const int i : except) {
      asking_[static_cast<std::size_t>(i)].excepted = true;
    }
    return {};
  }

  void Put(int layer, const TensorView& key, const TensorView& value) {
    // The batch's tokens were born one after another.
    const std::int64_t first = asking_.empty() ? -1 : asking_[0].token;
    for (LedgerToken& token : tokens_) {
      const std::int64_t k = token.id - first;
      if (first < 0 || k < 0 || k >= std::ssize(asking_)) continue;
      token.rows[layer] = {CopyOf(Slice(key, 2, k), args_.dtype),
                           CopyOf(Slice(value, 2, k), args_.dtype)};
    }
  }

  Status CopyPrefix(int src, int dst, std::int32_t len) {
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
    std::vector<LedgerToken> after = tokens_;
    bool remains = false;
    for (LedgerToken& token : after) {
      const bool before_end = open || token.position < end;
      if (!token.HeldBy(seq)) continue;
      if (token.position >= begin && before_end) {
        token.sequences.erase(seq);
        continue;
      }
      remains = true;
      if (!before_end && token.sequences.size() > 1) {
        return {StatusCode::kSharedCells, "a later token is shared"};
      }
    }
    if (!open && remains && spec_.shift.kind == ShiftKind::kNone) {
      return {StatusCode::kNotSupported, "there is no shift function"};
    }
    for (LedgerToken& token : after) {
      if (open || !token.HeldBy(seq) || token.position < end) continue;
      token.position -= end - begin;
      for (auto& [layer, rows] : token.rows) {
        Status status = ShiftStored(spec_.shift, layer, begin - end, rows.key);
        if (!status.ok()) return status;
      }
    }
    tokens_ = std::move(after);
    DropUnheld();
    return {};
  }

  // The tokens of the pass leave, and the pass is over.
  void GiveBack() {
    for (const Asking& one : asking_) {
      std::erase_if(tokens_,
                    [&](auto& token) { return token.id == one.token; });
    }
    EndPass();
  }
  void EndPass() { asking_.clear(); }

  // Gives `seq` its own copy of every token that it shares. For backends that
  // copy where ours refuse with shared_cells.
  void Unshare(int seq) {
    std::vector<LedgerToken> copies;
    for (LedgerToken& token : tokens_) {
      if (!token.HeldBy(seq) || token.sequences.size() == 1) continue;
      token.sequences.erase(seq);
      copies.push_back(token);
      copies.back().id = born_++;
      copies.back().sequences = {seq};
    }
    tokens_.insert(tokens_.end(), copies.begin(), copies.end());
  }

 private:
  struct Asking {  // One batch token.
    std::int32_t position;
    int sequence;
    std::int64_t token;  // Its id; -1 in a reserving pass.
    bool excepted;
  };

  // S7.
  void Evict() {
    std::map<int, std::int64_t> low;  // By sequence.
    for (const LedgerToken& token : tokens_) {
      for (const int seq : token.sequences) {
        low[seq] = std::max(low[seq], std::int64_t{token.position} + 1);
      }
    }
    for (const Asking& one : asking_) low[one.sequence] = one.position;
    for (const Asking& one : asking_) {
      low[one.sequence] =
          std::min(low[one.sequence], std::int64_t{one.position});
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
  std::optional<std::int64_t> window_;
  std::optional<std::int64_t> memory_;
  std::int64_t cells_ = 0;
  std::int64_t born_ = 0;
  std::vector<LedgerToken> tokens_;
  std::vector<Asking> asking_;
};

// One slot a layer, of any shape.
class EncoderLedger {
 public:
  bool cached() const { return cached_; }
  // Null if nothing was put into the layer.
  const LedgerRows* rows(int layer) const {
    const auto at = rows_.find(layer);
    return at == rows_.end() ? nullptr : &at->second;
  }

  Status Init(const CacheConfig& config, const InitArgs& args) {
    permuted_v_ = config.permuted_v;
    if (args.max_sequences == 1 && config.cache_padding == 1) return {};
    return {StatusCode::kInvalidArgument, "one sequence and no padding only"};
  }
  Status StartForward(const Batch& batch, bool reserve) {
    reserve_ = reserve;
    before_ = next_;
    if (reserve || batch.multimodal.empty()) return {};
    next_ = batch.positions[static_cast<std::size_t>(batch.multimodal.back())];
    return {};
  }
  Status SetCausal(std::span<const int>) {
    return {StatusCode::kNotSupported, "an encoder has no mask"};
  }
  void Put(int layer, const TensorView& key, const TensorView& value) {
    const TensorView stored = permuted_v_ ? PermutedView(value) : value;
    if (reserve_) {
      rows_.try_emplace(
          layer, LedgerRows{FilledTensor(key.dtype, key.shape, 0),
                            FilledTensor(stored.dtype, stored.shape, 0)});
      return;
    }
    rows_[layer] = {CopyOf(key, key.dtype), CopyOf(stored, stored.dtype)};
    cached_ = true;
    position_ = next_;
  }
  Status CopyPrefix(int, int, std::int32_t) {
    return {StatusCode::kNotSupported, "an encoder cannot copy"};
  }
  bool CanResume(int, std::int32_t) const { return true; }
  Status Remove(int, std::int32_t begin, std::int32_t end) {
    const bool before_end = position_ < end || end == kOpenEnd;
    if (begin <= position_ && before_end) cached_ = false;
    return {};
  }
  void GiveBack() { next_ = before_; }
  void EndPass() {}
  void Unshare(int) {}

 private:
  bool permuted_v_ = false;
  bool reserve_ = false;
  bool cached_ = false;
  std::int32_t position_ = 0;  // Of what the slots hold.
  std::int32_t next_ = 0;      // Of the next Put.
  std::int32_t before_ = 0;    // Of the next Put, before the pass.
  std::map<int, LedgerRows> rows_;
};

// Any cache: one ledger, or those of a wrapper. The calls of Cache, with the
// layer as an argument.
class Ledger {
 public:
  explicit Ledger(const CacheSpec& spec) {
    const bool wrapper = spec.kind == Kind::kWrapper;
    for (const CacheSpec& part : wrapper ? spec.caches : std::vector{spec}) {
      if (part.kind == Kind::kEncoder) {
        parts_.emplace_back(EncoderLedger());
      } else {
        parts_.emplace_back(CausalLedger(part));
      }
    }
  }

  // The active ledger; one of the two is null.
  const CausalLedger* causal() const {
    return std::get_if<CausalLedger>(&parts_[active_]);
  }
  const EncoderLedger* encoder() const {
    return std::get_if<EncoderLedger>(&parts_[active_]);
  }
  void SetLayerType(int type) { active_ = static_cast<std::size_t>(type); }

  Status Init(const CacheConfig& config, const InitArgs& args) {
    return AllOrNone([&](auto& part) { return part.Init(config, args); });
  }
  Status StartForward(const Batch& batch, bool reserve) {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      Status status = std::visit(
          [&](auto& part) { return part.StartForward(batch, reserve); },
          parts_[i]);
      if (status.ok()) continue;
      for (std::size_t j = 0; j < parts_.size(); ++j) {
        std::visit(
            [&](auto& part) { j < i ? part.GiveBack() : part.EndPass(); },
            parts_[j]);
      }
      return status;
    }
    active_ = 0;
    return {};
  }
  Status SetCausal(std::span<const int> except) {
    return std::visit([&](auto& part) { return part.SetCausal(except); },
                      parts_[active_]);
  }
  void Put(int layer, const TensorView& key, const TensorView& value) {
    std::visit([&](auto& part) { part.Put(layer, key, value); },
               parts_[active_]);
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) {
    return AllOrNone(
        [&](auto& part) { return part.CopyPrefix(src, dst, len); });
  }
  bool CanResume(int seq, std::int32_t pos) const {
    return std::all_of(parts_.begin(), parts_.end(), [&](const auto& any) {
      return std::visit([&](auto& part) { return part.CanResume(seq, pos); },
                        any);
    });
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) {
    return AllOrNone([&](auto& part) { return part.Remove(seq, begin, end); });
  }
  void Unshare(int seq) {
    for (auto& any : parts_) {
      std::visit([&](auto& part) { part.Unshare(seq); }, any);
    }
  }

 private:
  // Makes the call to every ledger, or to none if one of them refuses.
  template <class Call>
  Status AllOrNone(const Call& call) {
    if (parts_.size() == 1) return std::visit(call, parts_[0]);
    auto after = parts_;
    for (auto& part : after) {
      if (Status status = std::visit(call, part); !status.ok()) return status;
    }
    parts_ = std::move(after);
    return {};
  }

  std::vector<std::variant<CausalLedger, EncoderLedger>> parts_;
  std::size_t active_ = 0;
};

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_LEDGER_H_
