#include "props/shrink.h"

#include <algorithm>
#include <functional>

namespace kvtwin::props {
namespace {

class Shrinker {
 public:
  Shrinker(const History& history, const Rerun& rerun)
      : best_(history), rerun_(rerun) {
    const std::optional<Difference> difference = rerun(history);
    check_ = difference->check;
    Cut(difference->step);
  }

  History Run() {
    bool smaller = true;
    while (smaller) {
      smaller = DropOps();
      smaller = MergePuts() || smaller;
      smaller = SimplifySetup() || smaller;
      smaller = SimplifyOps() || smaller;
    }
    return best_;
  }

 private:
  // Operations after the one that shows the failure are of no use.
  void Cut(std::size_t step) {
    if (step + 1 < best_.ops.size()) best_.ops.resize(step + 1);
  }

  bool Try(History candidate) {
    const std::optional<Difference> difference = rerun_(candidate);
    if (!difference || difference->check != check_) return false;
    best_ = std::move(candidate);
    Cut(difference->step);
    return true;
  }

  bool Try(const std::function<void(History&)>& change) {
    History candidate = best_;
    change(candidate);
    if (ToText(candidate) == ToText(best_)) return false;
    return Try(std::move(candidate));
  }

  // Leaves out runs of operations: halves, quarters, ..., single ones.
  bool DropOps() {
    const std::size_t before = best_.ops.size();
    for (std::size_t run = best_.ops.size(); run > 0; run /= 2) {
      for (std::size_t at = best_.ops.size(); at > 0;) {
        at = std::min(at, best_.ops.size());
        const std::size_t begin = at > run ? at - run : 0;
        History candidate = best_;
        const auto first = candidate.ops.begin();
        candidate.ops.erase(first + static_cast<std::ptrdiff_t>(begin),
                            first + static_cast<std::ptrdiff_t>(at));
        Try(std::move(candidate));
        at = begin;
      }
    }
    return best_.ops.size() < before;
  }

  // Two passes one after the other, as one.
  bool MergePuts() {
    bool smaller = false;
    for (std::size_t i = 0; i + 1 < best_.ops.size();) {
      const bool merged =
          best_.ops[i].kind == OpKind::kPut &&
          best_.ops[i + 1].kind == OpKind::kPut && Try([i](History& h) {
            const auto next =
                h.ops.begin() + static_cast<std::ptrdiff_t>(i) + 1;
            auto& segments = h.ops[i].segments;
            segments.insert(segments.end(), next->segments.begin(),
                            next->segments.end());
            h.ops.erase(next);
            h.setup.init.max_batch = std::max(h.setup.init.max_batch, 8);
          });
      smaller = smaller || merged;
      if (!merged) ++i;
    }
    return smaller;
  }

  bool SimplifySetup() {
    bool smaller = false;
    const auto change = [&](const std::function<void(Setup&)>& simplify) {
      smaller = Try([&](History& h) { simplify(h.setup); }) || smaller;
    };
    change([](Setup& s) { s.legal = false; });
    change([](Setup& s) { s.strided = false; });
    change([](Setup& s) { s.first_id = 0; });
    change([](Setup& s) { s.spec.shift.rope = Rope(); });
    change([](Setup& s) { s.layers = 1; });
    change([](Setup& s) { s.rows = Setup().rows; });
    change([](Setup& s) { s.init.dtype = DType::kF32; });
    change([](Setup& s) { s.config = CacheConfig(); });
    change([](Setup& s) { s.config.mask_dtype = DType::kF32; });
    change([](Setup& s) { s.config.permuted_v = false; });
    change([](Setup& s) { s.config.mask_batch_padding = 1; });
    change([](Setup& s) { s.config.cache_padding = 1; });
    change([](Setup& s) { s.spec.shift = Shift(); });
    change([](Setup& s) { s.spec.placement = Placement::kContiguous; });
    for (const int most : {1, 2, 3}) {
      change([&](Setup& s) {
        s.init.max_sequences = std::min(s.init.max_sequences, most);
      });
    }
    change([](Setup& s) { s.init.max_batch = std::min(s.init.max_batch, 8); });
    if (best_.setup.spec.kind == Kind::kWrapper) return Unwrap() || smaller;
    for (const Kind kind : {Kind::kCausal, Kind::kSwa}) {
      change([&](Setup& s) {
        // Only downwards, or this would never end.
        if (s.spec.kind == Kind::kEncoder || s.spec.kind <= kind) return;
        s.spec.kind = kind;
        s.spec.memory.reset();
        s.spec.chunk = 0;
        if (kind == Kind::kCausal) s.spec.window.reset();
      });
    }
    for (const int window : {0, 1, 2, 3}) {
      change([&](Setup& s) {
        auto& spec = s.spec;
        if (spec.window.value_or(0) > window) spec.window = window;
        if (spec.window && spec.memory) {
          spec.memory = std::max(*spec.memory, *spec.window);
        }
      });
    }
    for (const int capacity : {1, 2, 3, 4, 6, 8, 16}) {
      if (capacity >= best_.setup.init.capacity) break;
      change([&](Setup& s) { s.init.capacity = capacity; });
    }
    return smaller;
  }

  // To one of the wrapper's caches, or to fewer of them.
  bool Unwrap() {
    for (std::size_t i = 0; i < best_.setup.spec.caches.size(); ++i) {
      const bool single = Try([i](History& h) {
        const CacheSpec part = h.setup.spec.caches[i];
        h.setup.spec = part;
      });
      if (single) return true;
      const bool fewer = Try([i](History& h) {
        auto& caches = h.setup.spec.caches;
        caches.erase(caches.begin() + static_cast<std::ptrdiff_t>(i));
      });
      if (fewer) return true;
    }
    return false;
  }

  bool SimplifyOps() {
    bool smaller = false;
    for (std::size_t i = 0; i < best_.ops.size(); ++i) {
      const auto change = [&](const std::function<void(Op&)>& simplify) {
        if (i >= best_.ops.size()) return;
        smaller = Try([&](History& h) { simplify(h.ops[i]); }) || smaller;
      };
      change([](Op& op) { op.except.clear(); });
      change([](Op& op) { op.reserve = false; });
      change([](Op& op) { op.keep_rows = false; });
      change([](Op& op) { op.images.clear(); });
      change([](Op& op) { op.open = true; });
      change([](Op& op) { op.seq = 0; });
      change([](Op& op) { op.dst = 1; });
      for (const int offset : {0, 1, 2}) {
        const RelativePos plain{false, offset};
        change([&](Op& op) {
          if (op.begin.from_end || op.begin.offset > offset) op.begin = plain;
        });
        change([&](Op& op) {
          if (op.end.from_end || op.end.offset > offset) op.end = plain;
        });
      }
      SimplifySegments(change, i);
    }
    return smaller;
  }

  template <class Change>
  void SimplifySegments(const Change& change, std::size_t i) {
    for (std::size_t s = 0;
         i < best_.ops.size() && s < best_.ops[i].segments.size(); ++s) {
      change([&](Op& op) {
        if (op.segments.size() == 1) return;
        op.segments.erase(op.segments.begin() + static_cast<std::ptrdiff_t>(s));
      });
      const auto segment = [&](const std::function<void(Segment&)>& simplify) {
        change([&](Op& op) {
          if (s < op.segments.size()) simplify(op.segments[s]);
        });
      };
      segment([](Segment& one) { one.order = Segment::Order::kUp; });
      segment([](Segment& one) { one.delta = 0; });
      segment([](Segment& one) { one.seq = 0; });
      for (const int count : {1, 2, 3, 4}) {
        segment([&](Segment& one) { one.count = std::min(one.count, count); });
      }
    }
  }

  History best_;
  const Rerun& rerun_;
  std::string check_;
};

}  // namespace

History Shrink(const History& history, const Subject& subject) {
  return Shrink(history, [&](const History& candidate) {
    return RunHistory(candidate, subject).difference;
  });
}

History Shrink(const History& history, const Rerun& rerun) {
  return Shrinker(history, rerun).Run();
}

}  // namespace kvtwin::props
