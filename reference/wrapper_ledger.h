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

// The ledger of any cache: one `Part`, or one for each cache of a wrapper or a
// hybrid.
template <class Part>
class WrapperLedger {
 public:
  // `more` are the arguments of a Part after its spec.
  template <class... More>
  explicit WrapperLedger(const CacheSpec& spec, const More&... more)
      : hybrid_(spec.kind == Kind::kHybrid) {
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

  // All parts take the batch, or give it back (S41 to S43, D4, D8, H2).
  Status StartForward(const Batch& batch, bool reserve) {
    if (NeedsCommit(parts_, batch)) return {kFailedPrecondition, "has drafts"};
    for (const Part& part : parts_) {
      Status status = reserve ? Status() : part.CheckBatch(batch);
      if (!status.ok()) return status;
    }
    for (Part& part : parts_) part.EndPass();
    if (HasDrafts(batch) && !AllTakeDrafts()) return NoDrafts();
    for (Part& part : parts_) {
      Status status = part.StartForward(batch, reserve);
      if (status.ok()) continue;
      for (Part& each : parts_) each.GiveBack();
      return status;
    }
    active_ = 0;
    return {};
  }

  // All parts change, or none (S45, H4). A hybrid moves to a length that all of
  // its caches have (H3). A sequence that changes drops its drafts (D6).
  Status CopyPrefix(int src, int dst, std::int32_t len) {
    if (hybrid_) len = ResumeBefore(src, len);
    return All([&](Part& part) {
      Status status = part.CopyPrefix(src, dst, len);
      if (status.ok()) part.DropDrafts(dst);
      return status;
    });
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) {
    if (hybrid_ && end == kOpenEnd) begin = ResumeBefore(seq, begin);
    return All([&](Part& part) {
      Status status = part.Remove(seq, begin, end);
      if (status.ok()) part.DropDrafts(seq);
      return status;
    });
  }
  Status Commit(int seq, std::span<const int> path) {
    if (!AllTakeDrafts()) return NoDrafts();
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

  // The greatest position up to `pos` where all parts can resume: `pos` itself,
  // or the position after a token of some part (R9).
  std::int32_t ResumeBefore(int seq, std::int32_t pos) const {
    if (CanResume(seq, pos)) return pos;
    std::int32_t best = 0;
    for (const Part& part : parts_) {
      for (const LedgerToken& token : part.tokens()) {
        if (!token.HeldBy(seq) || token.position >= pos) continue;
        const auto end = static_cast<std::int32_t>(token.position + 1);
        if (end > best && CanResume(seq, end)) best = end;
      }
    }
    return best;
  }

  // Restores each part (S55).
  void Restore(const CacheState& state) {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      parts_[i].Restore(state.caches.empty() ? state : state.caches[i]);
    }
    active_ = 0;
  }

 protected:
  // Whether all parts take drafts (D8).
  bool AllTakeDrafts() const {
    return std::ranges::all_of(
        parts_, [](const Part& part) { return part.TakesDrafts(); });
  }
  static Status NoDrafts() { return {kNotSupported, "there are no drafts"}; }

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
  bool hybrid_;

 private:
  std::size_t active_ = 0;
};

}  // namespace kvtwin::reference

#endif  // KVTWIN_REFERENCE_WRAPPER_LEDGER_H_
