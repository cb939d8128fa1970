#include "props/shrink/shrink.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "core/index.h"
#include "props/compare/timed_rerun.h"
#include "props/history/misuse.h"
#include "props/shrink/cost.h"
#include "props/shrink/minimal_cases.h"
#include "props/shrink/rebuild.h"

namespace kvtwin::props {
namespace {

using Move = std::function<void(History&)>;

// Renames sequences in the order of their first use, from 0; `names` has names
// that are already chosen.
void RenameSequences(History& history, std::map<int, int> names = {}) {
  const auto rename = [&](int& seq) {
    seq = names.try_emplace(seq, Size(names)).first->second;
  };
  for (Op& op : history.ops) {
    for (Segment& segment : op.segments) rename(segment.seq);
    const bool one = op.kind == OpKind::kDrop || op.kind == OpKind::kAsk ||
                     op.kind == OpKind::kShift || op.kind == OpKind::kSnapshot;
    const bool two = op.kind == OpKind::kCopy || op.kind == OpKind::kAdd;
    if (one || two) rename(op.seq);
    if (two) rename(op.dst);
  }
}

// Steps that may make a history plainer. Each step may also do nothing.
class Moves {
 public:
  // With `all`, makes all steps; without, operations are only dropped or
  // joined.
  Moves(const History& history, bool all) : all_(all) {
    moves_.emplace_back([](History& h) { RenameSequences(h); });
    AddSetup();
    for (std::size_t i = 0; i < history.setup.spec.caches.size(); ++i) {
      AddPart(i);
    }
    if (!history.setup.spec.caches.empty()) AddParts();
    AddNames(history);
    for (std::size_t i = 0; i < history.ops.size(); ++i) {
      AddOp(i, history.ops[i]);
    }
  }
  std::vector<Move> Take() { return std::move(moves_); }

  // The caches and operations that most failures need, in their plainest form.
  static const std::vector<CacheSpec>& PlainSpecs() {
    static const std::vector<CacheSpec> specs = [] {
      std::vector<CacheSpec> all(1);
      for (const int reach : {0, 1, 2}) {
        CacheSpec& windowed = all.emplace_back();
        windowed.kind = Kind::kSwa;
        windowed.window = reach;
        CacheSpec& chunked = all.emplace_back();
        chunked.kind = Kind::kChunked;
        chunked.chunk = reach + 1;
      }
      return all;
    }();
    return specs;
  }
  static const std::vector<Op>& PlainOps() {
    static const std::vector<Op> ops =
        ParseHistory(
            "kvt1 | put 0*1 | put 0*2 | put 0*3 | put 1*1 | put 0*free+0 | "
            "drop 0:0- | drop 0:1- | drop 0:0-0 | drop 0:0-1 | drop 0:0-2 | "
            "drop 0:1-1 | drop 0:1-2 | drop 0:1-3 | copy 0>0:0 | copy 0>0:1 | "
            "copy 0>0:2 | copy 0>1:0 | copy 0>1:1 | copy 0>1:2 | copy 1>0:0 | "
            "ask 0@0 | ask 0@1 | ask 0@2 | causal 0 | get | reput | reload")
            ->ops;
    return ops;
  }
  // Makes `spec` a plain cache. Its placement and shift stay.
  static void Become(const CacheSpec& plain, CacheSpec& spec) {
    spec.kind = plain.kind;
    spec.window = plain.window;
    spec.memory = plain.memory;
    spec.chunk = plain.chunk;
  }

 private:
  template <class Change>
  void Setups(const Change& change) {
    moves_.emplace_back([change](History& h) {
      change(h.setup);
      FitStorage(h.setup);
    });
  }

  // Adds steps for the cache, or for a part of a wrapper.
  template <class Find>
  void AddSpec(const Find& find) {
    const auto add = [&](auto change) {
      moves_.emplace_back([find, change](History& h) {
        if (CacheSpec* spec = find(h)) change(*spec);
      });
    };
    for (const CacheSpec& plain : PlainSpecs()) {
      add([plain](CacheSpec& spec) { Become(plain, spec); });
    }
    for (const int reach : {0, 1, 2, 3}) {
      add([=](CacheSpec& spec) {
        if (spec.window) spec.window = reach;
        if (spec.memory) spec.memory = std::max(*spec.memory, reach);
      });
      add([=](CacheSpec& spec) {
        if (spec.memory) spec.memory = spec.window.value_or(0) + reach;
      });
    }
    for (const ShiftKind kind : {ShiftKind::kNone, ShiftKind::kIdentity,
                                 ShiftKind::kAdd, ShiftKind::kRope}) {
      add([kind](CacheSpec& spec) {
        spec.shift = Shift();
        spec.shift.kind = kind;
      });
    }
  }

  void AddSetup() {
    AddSpec([](History& h) {
      return h.setup.spec.caches.empty() ? &h.setup.spec : nullptr;
    });
    Setups([](Setup& s) { s.spec.placement = Placement::kContiguous; });
    Setups([](Setup& s) { s.legal = false; });
    Setups([](Setup& s) { s.strided = false; });
    Setups([](Setup& s) { s.first_id = 0; });
    Setups([](Setup& s) { s.layers = 1; });
    Setups([](Setup& s) { s.layers = 2; });
    Setups([](Setup& s) { s.rows = Setup().rows; });
    for (const int v_head_dim : {1, 2, 3}) {
      for (const int kv_heads : {1, 2}) {
        for (const int k_head_dim : {1, 2, 3, 4}) {
          Setups([=](Setup& s) {
            s.rows = {k_head_dim, kv_heads, v_head_dim};
          });
        }
      }
    }
    Setups([](Setup& s) { s.init.dtype = DType::kF32; });
    Setups([](Setup& s) { s.config = CacheConfig(); });
    Setups([](Setup& s) { s.config.mask_dtype = DType::kF32; });
    Setups([](Setup& s) { s.config.v_dtype.reset(); });
    Setups([](Setup& s) { s.config.v_layout = VLayout::kPlain; });
    for (const int padding : {1, 2, 3}) {
      Setups([=](Setup& s) { s.config.mask_batch_padding = padding; });
      Setups([=](Setup& s) { s.config.cache_padding = padding; });
    }
    Setups([](Setup& s) { SetCells(s.init.capacity, s); });
    Setups([](Setup& s) { SetCells((s.init.capacity + 1) / 2, s); });
    for (const int less : {32, 8, 1}) {
      Setups([=](Setup& s) {
        if (s.init.capacity > less) SetCells(s.init.capacity - less, s);
      });
    }
    for (const int size : {1, 2, 3, 4, 5, 6, 8}) {
      Setups([=](Setup& s) { SetCells(size, s); });
      Setups([=](Setup& s) { s.init.capacity = size; });
      Setups([=](Setup& s) { s.init.max_batch = size; });
    }
    for (const int sequences : {1, 2, 3}) {
      Setups([=](Setup& s) { s.init.max_sequences = sequences; });
    }
  }

  void AddPart(std::size_t i) {
    const auto find = [i](History& h) {
      auto& caches = h.setup.spec.caches;
      return i < caches.size() ? &caches[i] : nullptr;
    };
    AddSpec(find);
    moves_.emplace_back([find](History& h) {
      if (const CacheSpec* part = find(h)) h.setup.spec = CacheSpec(*part);
    });
    moves_.emplace_back([find](History& h) {
      if (find(h) == nullptr || h.setup.spec.caches.size() == 1) return;
      auto& caches = h.setup.spec.caches;
      caches.erase(caches.begin() + (find(h) - caches.data()));
    });
    moves_.emplace_back([find](History& h) {
      CacheSpec* part = find(h);
      if (part == nullptr) return;
      part->placement = h.setup.spec.placement;
      part->shift = h.setup.spec.shift;
    });
  }

  // Adds steps that change all caches of a wrapper at once.
  void AddParts() {
    moves_.emplace_back([](History& h) {
      auto& caches = h.setup.spec.caches;
      if (caches.empty()) return;
      std::rotate(caches.begin(), caches.begin() + 1, caches.end());
    });
    Setups([](Setup& s) {
      s.spec.placement = Placement::kContiguous;
      for (CacheSpec& part : s.spec.caches) part.placement = s.spec.placement;
    });
    for (const ShiftKind kind :
         {ShiftKind::kNone, ShiftKind::kIdentity, ShiftKind::kAdd}) {
      Setups([kind](Setup& s) {
        s.spec.shift = Shift();
        s.spec.shift.kind = kind;
      });
    }
    for (const ShiftKind kind : {ShiftKind::kNone, ShiftKind::kIdentity}) {
      Setups([kind](Setup& s) {
        s.spec.shift = Shift();
        s.spec.shift.kind = kind;
        s.spec.placement = Placement::kContiguous;
        for (CacheSpec& part : s.spec.caches) {
          part.shift = s.spec.shift;
          part.placement = s.spec.placement;
        }
      });
    }
  }

  // Adds steps for failures that depend on the numbers of two sequences.
  void AddNames(const History& history) {
    std::set<int> names;
    for (const Op& op : history.ops) {
      for (const Segment& segment : op.segments) names.insert(segment.seq);
      if (op.kind == OpKind::kDrop || op.kind == OpKind::kCopy ||
          op.kind == OpKind::kShift) {
        names.insert(op.seq);
      }
      if (op.kind == OpKind::kCopy) names.insert(op.dst);
    }
    if (names.contains(0) && names.contains(1)) {
      moves_.emplace_back([](History& h) {
        RenameSequences(h, {{0, 1}, {1, 0}});
      });
    }
    const auto largest = names.empty() ? 0 : *names.rbegin();
    if (names.size() != 2 || largest < 3) return;
    for (int name = 1; name <= 40; ++name) {
      for (const int first : {0, name}) {
        moves_.emplace_back(
            [first, name, one = *names.begin(), other = largest](History& h) {
              h.setup.first_id = 0;
              RenameSequences(h, {{one, first}, {other, name - first}});
            });
      }
    }
  }

  // Adds a step that changes operation `i`, if it still exists.
  template <class Change>
  void Ops(std::size_t i, const Change& change) {
    moves_.emplace_back([i, change](History& h) {
      if (i < h.ops.size()) change(h.ops[i]);
    });
  }

  void AddOp(std::size_t i, const Op& op) {
    moves_.emplace_back([i](History& h) {
      if (i < h.ops.size()) {
        h.ops.erase(IteratorAt(h.ops, i));
      }
    });
    moves_.emplace_back([i](History& h) { Join(h, i); });
    if (!all_) return;
    moves_.emplace_back([i](History& h) {
      if (i + 1 < h.ops.size()) std::swap(h.ops[i], h.ops[i + 1]);
    });
    for (const Op& plain : PlainOps()) {
      Ops(i, [plain](Op& o) { o = plain; });
    }
    switch (op.kind) {
      case OpKind::kPut:
        return AddPut(i, op);
      case OpKind::kMisuse:
        for (int which = 0; which < op.misuse % MisuseCount(); ++which) {
          Ops(i, [which](Op& o) { o.misuse = which; });
        }
        return Ops(i, [](Op& o) { o.misuse %= MisuseCount(); });
      default:
        return AddArguments(i, op);
    }
  }

  // Joins two consecutive passes into one.
  static void Join(History& h, std::size_t i) {
    if (i + 1 >= h.ops.size()) return;
    const auto next = IteratorAt(h.ops, i) + 1;
    if (h.ops[i].kind != OpKind::kPut || next->kind != OpKind::kPut) return;
    auto& segments = h.ops[i].segments;
    std::map<int, int> tokens;  // By sequence, before the next pass.
    for (const Segment& one : segments) tokens[one.seq] += one.count;
    for (Segment& one : next->segments) {
      const auto before = tokens.find(one.seq);
      if (before != tokens.end()) one.delta += before->second;
    }
    segments.insert(segments.end(), next->segments.begin(),
                    next->segments.end());
    h.ops.erase(next);
    h.setup.init.max_batch = std::max(h.setup.init.max_batch, 8);
  }

  void AddArguments(std::size_t i, const Op& op) {
    Ops(i, [](Op& o) { o.open = true; });
    Ops(i, [](Op& o) { o.except = {0}; });
    Ops(i, [](Op& o) { o.except.clear(); });
    Ops(i, [](Op& o) { o.single = false; });
    for (int number = 0; number < std::min(op.number, 3); ++number) {
      Ops(i, [number](Op& o) { o.number = number; });
    }
    if (op.more > 0) AddMore(i, [](Op& o) { return &o.more; });
    AddExcept(i, op);
    for (const int delta : {1, -1}) {
      Ops(i, [delta](Op& o) { o.delta = delta; });
    }
    for (const int seq : {0, 1, 2}) {
      Ops(i, [seq](Op& o) { o.seq = seq; });
      Ops(i, [seq](Op& o) { o.dst = seq; });
    }
    for (const int offset : {0, 1, 2, 3}) {
      const RelativePos pos{false, offset};
      Ops(i, [pos](Op& o) { o.begin = pos; });
      Ops(i, [pos](Op& o) { o.end = pos; });
    }
  }

  // Adds steps that shorten a range of sequences.
  template <class Find>
  void AddMore(std::size_t i, const Find& find) {
    for (const int less : {-1, 32, 8, 1}) {  // -1 halves it.
      Ops(i, [find, less](Op& o) {
        int* more = find(o);
        if (more == nullptr) return;
        *more = less < 0 ? *more / 2 : std::max(*more - less, 0);
      });
    }
  }

  // Adds steps to lower indices.
  void AddExcept(std::size_t i, const Op& op) {
    if (std::ranges::all_of(op.except, [](int at) { return at < 2; })) return;
    for (const int less : {-1, 32, 8, 1}) {
      Ops(i, [less](Op& o) {
        for (int& index : o.except) {
          index = less < 0 ? index / 2 : std::max(index - less, 0);
        }
      });
    }
  }

  void AddPut(std::size_t i, const Op& op) {
    Ops(i, [](Op& o) { o.single = false; });
    AddExcept(i, op);
    Ops(i, [](Op& o) { o.reserve = false; });
    Ops(i, [](Op& o) { o.keep_rows = false; });
    for (const auto indices : {&Op::images, &Op::except}) {
      Ops(i, [indices](Op& o) { (o.*indices).clear(); });
      Ops(i, [indices](Op& o) { o.*indices = {0}; });
      Ops(i, [indices](Op& o) { o.*indices = {1}; });
    }
    for (std::size_t s = 0; s < op.segments.size(); ++s) {
      AddSegment(i, s, op.segments[s].more > 0);
    }
  }

  void AddSegment(std::size_t i, std::size_t s, bool range) {
    const auto at = static_cast<std::ptrdiff_t>(s);
    Ops(i, [at](Op& o) {
      if (std::ssize(o.segments) < at + 1 || o.segments.size() == 1) return;
      o.segments.erase(o.segments.begin() + at);
    });
    Ops(i, [s](Op& o) {
      if (s + 1 >= o.segments.size()) return;
      std::swap(o.segments[s], o.segments[s + 1]);
    });
    // Joins two consecutive segments of one sequence.
    Ops(i, [s](Op& o) {
      if (s + 1 >= o.segments.size()) return;
      if (o.segments[s].seq != o.segments[s + 1].seq) return;
      int& count = o.segments[s].count;
      count = std::min(count + o.segments[s + 1].count, Segment::kMost);
      o.segments.erase(IteratorAt(o.segments, s) + 1);
    });
    const auto add = [&](auto change) {
      Ops(i, [s, change](Op& o) {
        if (s < o.segments.size()) change(o.segments[s]);
      });
    };
    add([](Segment& one) { one.order = Segment::Order::kUp; });
    for (const int delta : {0, 1, -1, 1 << 30}) {
      add([delta](Segment& one) { one.delta = delta; });
    }
    for (const int seq : {0, 1}) {
      add([seq](Segment& one) { one.seq = seq; });
    }
    for (const int count : {1, 2, 3, 4, 5}) {
      add([count](Segment& one) { one.count = count; });
    }
    if (range) {
      AddMore(i, [s](Op& o) {
        return s < o.segments.size() ? &o.segments[s].more : nullptr;
      });
    }
    add([](Segment& one) { one.count = (one.count + 1) / 2; });
    for (const int less : {32, 8, 1}) {
      add([less](Segment& one) {
        if (one.count > less) one.count -= less;
      });
    }
    // Makes the segment as long as the cache's capacity.
    moves_.emplace_back([i, s](History& h) {
      if (i < h.ops.size() && s < h.ops[i].segments.size()) {
        h.ops[i].segments[s].count = h.setup.init.capacity;
      }
    });
  }

  const bool all_;
  std::vector<Move> moves_;
};

class Shrinker {
 public:
  Shrinker(const History& history, const Failure& difference,
           const Rerun& rerun, Bounds bounds = {},
           std::int64_t start_work = 2'500)
      : best_(history),
        start_work_(start_work),
        rerun_(rerun),
        bounds_(std::move(bounds)),
        blamed_(difference.party()) {
    Cut(difference.step);
  }

  History Run() {
    if (best_.setup.legal) Try(ExpandImplicit(best_));
    PlainSetup();
    Rebuild(/*most_kept=*/2);  // In a long history, each takes long.
    DropOps();
    cost_ = CostOf(best_);
    do {
      Rebuild();
      do {
        Halve();
      } while (Step());
    } while (Rebuild());
    Cost before;
    do {
      LookUp();
      before = cost_;
      while (Step() || PairStep()) {
      }
      // The kinds of operations have changed, and so has the catalog.
    } while (cost_ != before && best_.ops.size() < 3);
    return best_;
  }

 private:
  // Drops the operations after the failing one, which are not needed.
  void Cut(std::size_t step) {
    if (step + 1 < best_.ops.size()) best_.ops.resize(step + 1);
    fails_in_last_ = step + 1 == best_.ops.size();
  }

  bool Try(const History& candidate) {
    if (!bounds_.Allow(candidate.setup)) return false;
    const std::optional<Failure> difference = rerun_(candidate);
    CountWork(candidate, difference ? difference->step : candidate.ops.size());
    if (!difference || difference->party() != blamed_) return false;
    best_ = candidate;
    Cut(difference->step);
    return true;
  }

  // Adds the approximate duration of a run of this many operations. It is
  // computed, because a measured time would depend on the machine. A history of
  // a thousand operations in a cache of hundreds of cells uses up the limit
  // before the catalog is searched; for legal clients the limit is higher.
  void CountWork(const History& history, std::size_t ops) {
    if (TooMuchWork()) return;
    const InitArgs& init = history.setup.init;
    const auto cells =
        std::min(std::int64_t{init.capacity} * init.max_sequences,
                 std::int64_t{1} << 20);
    work_ += start_work_ + static_cast<std::int64_t>(ops) * (600 + 30 * cells);
  }
  bool TooMuchWork() const {
    return work_ > (best_.setup.legal ? 2 : 1) * kMostWork;
  }

  // Tries a candidate that is plainer than the best history and was not tried
  // yet.
  bool TryPlainer(const History& candidate) {
    if (CostWithoutSizes(candidate) > cost_) return false;
    const Cost cost = CostOf(candidate);
    if (cost > cost_) return false;
    std::string text = ToText(candidate);
    if (cost == cost_ && text >= ToText(best_)) return false;
    if (!tried_.insert(std::move(text)).second) return false;
    if (!Try(candidate)) return false;
    cost_ = CostOf(best_);
    return true;
  }

  // Leaves out runs of operations: halves, quarters, ..., single ones. If the
  // last operation fails, it stays: without it, no other operation fails.
  void DropOps() {
    for (std::size_t run = best_.ops.size(); run > 0; run /= 2) {
      for (std::size_t at = best_.ops.size(); at > 0;) {
        at = std::min(at, best_.ops.size());
        const std::size_t begin = at > run ? at - run : 0;
        if (at < best_.ops.size() || !fails_in_last_) {
          History candidate = best_;
          const auto first = candidate.ops.begin();
          candidate.ops.erase(first + static_cast<std::ptrdiff_t>(begin),
                              first + static_cast<std::ptrdiff_t>(at));
          Try(candidate);
        }
        at = begin;
      }
    }
  }

  // Plain caches and rows come first: every try takes time for each cache, and
  // for the number and width of the rows.
  void PlainSetup() {
    const auto attempt = [&](const auto& change) {
      History candidate = best_;
      change(candidate.setup);
      FitStorage(candidate.setup);
      return Try(candidate);
    };
    const auto rows = [](Setup& setup) {
      setup.rows = Setup().rows;
      setup.layers = 1;
    };
    const auto layout = [](Setup& setup) {
      setup.config = CacheConfig();
      setup.init.dtype = DType::kF32;
      setup.strided = false;
      setup.first_id = 0;
    };
    if (!attempt([&](Setup& setup) { rows(setup), layout(setup); })) {
      attempt(rows);
      attempt(layout);
    }
    // Tries each cache of a wrapper alone.
    for (const CacheSpec& part : std::vector(best_.setup.spec.caches)) {
      if (attempt([&](Setup& setup) { setup.spec = part; })) break;
    }
    cost_ = CostOf(best_);
  }

  // Halves the cells, and the tokens or batches, as long as the failure stays.
  // Many tries follow, and each takes longer in a larger cache.
  void Halve() {
    while (TryPlainer(Halved(/*batches=*/false)) ||
           TryPlainer(Halved(/*batches=*/true))) {
    }
  }
  History Halved(bool batches) const {
    History half = best_;
    Setup& setup = half.setup;
    const bool of_cells = WhyNotOfCells(setup).empty();
    setup.init.capacity = (setup.init.capacity + 1) / 2;
    if (of_cells) SetCells(setup.init.capacity, setup);
    bool leave_out = false;
    std::erase_if(half.ops, [&](const Op& op) {
      leave_out = batches && op.kind == OpKind::kPut && !leave_out;
      return leave_out;
    });
    for (Op& op : half.ops) {
      for (Segment& segment : op.segments) {
        if (batches) continue;
        segment.more /= 2;
        const bool free = segment.count >= Segment::kFree / 2;
        if (!free) segment.count = (segment.count + 1) / 2;
      }
      if (!batches) op.more /= 2;
      op.begin.offset /= 2;
      op.end.offset = (op.end.offset + 1) / 2;
    }
    return half;
  }

  // Tries each step alone once. Returns whether a step made the history
  // plainer.
  bool Step() {
    // Most of many operations will go, so their details are not tried yet.
    constexpr std::size_t kMany = 12;
    const std::size_t before = best_.ops.size();
    if (before > kMany) Step(Moves(best_, /*all=*/false));
    return best_.ops.size() < before || Step(Moves(best_, /*all=*/true));
  }
  bool Step(Moves moves) {
    bool plainer = false;
    for (const Move& move : moves.Take()) {
      History candidate = best_;
      move(candidate);
      plainer = TryPlainer(candidate) || plainer;
    }
    return plainer;
  }

  // Replaces all but the last operations by a short way to the same state.
  bool Rebuild(std::size_t most_kept = 4) {
    for (std::size_t kept = 1; kept <= most_kept; ++kept) {
      const std::optional<History> rebuilt = Rebuilt(best_, kept);
      if (rebuilt && TryPlainer(*rebuilt)) return true;
    }
    const std::optional<History> one = PutAtOnce(best_);
    return one && TryPlainer(*one);
  }

  // Searches the catalog for a plainer history that no step leads to.
  void LookUp() {
    PlainestThatFails(
        best_, [&](const History& one) { return !TooMuchWork() && Try(one); },
        bounds_);
    cost_ = CostOf(best_);
  }

  // Tries pairs of steps, for when no single step makes the history plainer.
  bool PairStep() {
    // The number of pairs grows with the square of the number of operations.
    constexpr std::size_t kMostTries = 12000;
    const std::size_t enough =
        tried_.size() + kMostTries / std::max<std::size_t>(best_.ops.size(), 1);
    std::vector<Move> moves = Moves(best_, /*all=*/true).Take();
    const std::string text = ToText(best_);
    std::erase_if(moves, [&](const Move& move) {  // Without effect.
      History changed = best_;
      move(changed);
      return ToText(changed) == text;
    });
    for (std::size_t i = 0; i < moves.size(); ++i) {
      History changed = best_;
      moves[i](changed);
      History candidate;
      for (std::size_t j = i + 1; j < moves.size(); ++j) {
        candidate = changed;
        moves[j](candidate);
        if (TryPlainer(candidate)) return true;
        if (tried_.size() == enough || TooMuchWork()) return false;
      }
    }
    return false;
  }

  static constexpr std::int64_t kMostWork = 125'000'000;  // Nanoseconds.

  History best_;
  const std::int64_t start_work_;  // The time of a run without operations.
  std::int64_t work_ = 0;
  bool fails_in_last_ = false;  // The failure is not in the set-up or the end.
  Cost cost_;                   // The cost of `best_`.
  const Rerun& rerun_;
  const Bounds bounds_;
  const Party blamed_;  // Which of the party's checks fails first is chance.
  std::set<std::string> tried_;
};

}  // namespace

History Shrink(const History& history, const Subject& subject,
               std::optional<Kind> kind, const RefusesHistory& refuses) {
  const std::optional<Failure> difference =
      RunHistory(history, subject).failure;
  if (!difference) return history;
  Subject quick = subject;
  quick.tried_outside_of_life = difference->party() == Party::kEither;
  const Rerun rerun = TimedRerun(quick, refuses);
  Bounds bounds = {.abilities = subject.abilities, .kind = kind};
  if (subject.is_twin()) bounds.abilities.reset();
  return Shrinker(history, *difference, rerun, bounds, subject.start_work)
      .Run();
}

History Shrink(const History& history, const Rerun& rerun) {
  const std::optional<Failure> difference = rerun(history);
  if (!difference) return history;
  return Shrinker(history, *difference, rerun).Run();
}

}  // namespace kvtwin::props
