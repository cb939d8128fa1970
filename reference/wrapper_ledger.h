// The ledger of any cache: of one part, or of a wrapper or a hybrid of several.

#ifndef KVTWIN_REFERENCE_WRAPPER_LEDGER_H_
#define KVTWIN_REFERENCE_WRAPPER_LEDGER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/index.h"
#include "reference/ledger.h"

namespace kvtwin::reference {

// The ledger of any cache: one `Part`, or one for each cache of a wrapper.
template <class Part>
class LedgerOf {
 public:
  // `more` are the arguments of a Part after its spec.
  template <class... More>
  explicit LedgerOf(const CacheSpec& spec, const More&... more) {
    for (const auto& inner : spec.caches) parts_.emplace_back(inner, more...);
    if (!IsWrapper(spec.kind)) parts_ = {Part(spec, more...)};
  }

  // Call SetCausal, Put and the accessors on the active part (S41, S42).
  Part& active() { return parts_[active_]; }
  const Part& active() const { return parts_[active_]; }
  const std::vector<Part>& parts() const { return parts_; }
  std::size_t ActiveIndex() const { return active_; }
  void SetLayerType(int type) { active_ = AsSize(type); }

  // The same over all parts: one may have evicted what another has.
  std::int64_t Next(int seq) const {
    std::int64_t next = 0;
    for (const Part& part : parts_) next = std::max(next, part.Next(seq));
    return next;
  }

  Status Init(const CacheConfig& config, const InitArgs& args) {
    return All([&](Part& part) { return part.Init(config, args); });
  }

  // All parts take the batch, or give it back (S41 to S43).
  Status StartForward(const Batch& batch, bool reserve) {
    if (NeedsCommit(parts_, batch)) return {kFailedPrecondition, "has drafts"};
    for (Part& part : parts_) part.EndPass();
    for (Part& part : parts_) {
      Status status = part.StartForward(batch, reserve);
      if (status.ok()) continue;
      for (Part& each : parts_) each.GiveBack();
      return status;
    }
    active_ = 0;
    return {};
  }

  // All parts change, or none (S45). A sequence that changes drops its drafts
  // (D6).
  Status CopyPrefix(int src, int dst, std::int32_t len) {
    return All([&](Part& part) {
      Status status = part.CopyPrefix(src, dst, len);
      if (status.ok()) part.DropDrafts(dst);
      return status;
    });
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) {
    return All([&](Part& part) {
      Status status = part.Remove(seq, begin, end);
      if (status.ok()) part.DropDrafts(seq);
      return status;
    });
  }
  Status Commit(int seq, std::span<const int> path) {
    return All([&](Part& part) { return part.Commit(seq, path); });
  }

  // Calls the parts that have pins (R14).
  Status Checkpoint(int seq) {
    bool any = false;
    for (Part& part : parts_) any = part.Checkpoint(seq).ok() || any;
    return any ? Status() : Status{kNotSupported, "no state can be pinned"};
  }

  // Whether all parts can resume (S44).
  bool CanResume(int seq, std::int32_t pos) const {
    return std::ranges::all_of(
        parts_, [&](const Part& part) { return part.CanResume(seq, pos); });
  }

  // Restores each part (S55).
  void Restore(const CacheState& state) {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      parts_[i].Restore(state.caches.empty() ? state : state.caches[i]);
    }
    active_ = 0;
  }

 protected:
  // Makes the call to every part, or to none if one of them refuses (S45).
  template <class Call>
  Status All(const Call& call) {
    if (parts_.size() == 1) return call(parts_[0]);
    std::vector<Part> after = parts_;
    for (Part& part : after) {
      if (Status status = call(part); !status.ok()) return status;
    }
    parts_ = std::move(after);
    return {};
  }

  std::vector<Part> parts_;

 private:
  std::size_t active_ = 0;
};

// The ledger of any cache, hybrids included.
template <class Part>
class HybridLedgerOf : public LedgerOf<Part> {
 public:
  template <class... More>
  explicit HybridLedgerOf(const CacheSpec& spec, const More&... more)
      : LedgerOf<Part>(spec, more...),
        one_length_(spec.kind == Kind::kHybrid) {}

  // Whether no cache refuses the batch because of its positions (R3, H2).
  Status CheckBatch(const Batch& batch, bool reserve) const {
    for (const Part& part : this->parts()) {
      Status status = reserve ? Status() : part.CheckBatch(batch);
      if (!status.ok()) return status;
    }
    return {};
  }

  // The greatest position up to `pos` where all parts can resume: `pos` itself,
  // or the position after a token of some part (R9).
  std::int32_t ResumeBefore(int seq, std::int32_t pos) const {
    if (this->CanResume(seq, pos)) return pos;
    std::int32_t best = 0;
    for (const Part& part : this->parts()) {
      for (const LedgerToken& token : part.tokens()) {
        if (!token.HeldBy(seq) || token.position >= pos) continue;
        const auto end = static_cast<std::int32_t>(token.position + 1);
        if (end > best && this->CanResume(seq, end)) best = end;
      }
    }
    return best;
  }

  // A hybrid moves to a length that all of its caches have (H3). Any other
  // Remove changes all or none (H4).
  Status CopyPrefix(int src, int dst, std::int32_t len) {
    if (one_length_) len = ResumeBefore(src, len);
    return LedgerOf<Part>::CopyPrefix(src, dst, len);
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) {
    if (one_length_ && end == kOpenEnd) begin = ResumeBefore(seq, begin);
    return LedgerOf<Part>::Remove(seq, begin, end);
  }

 private:
  bool one_length_;
};

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_WRAPPER_LEDGER_H_
