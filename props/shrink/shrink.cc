#include "props/shrink/shrink.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "props/base/clock.h"
#include "props/base/interrupt.h"
#include "props/history/misuse.h"
#include "props/shrink/catalog.h"
#include "props/shrink/cost.h"
#include "props/shrink/rebuild.h"

namespace kvtwin::props {
namespace {

using Move = std::function<void(History&)>;

// Sequences in the order of their first use, from 0.
void RenameSequences(History& history, std::map<int, int> names = {}) {
  const auto rename = [&](int& seq) {
    seq = names.try_emplace(seq, static_cast<int>(names.size())).first->second;
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

// Steps that may make a history plainer, each of which may also do nothing.
class Moves {
 public:
  // All of them, or those that make it shorter.
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

  // What most failures need, in their plainest form: caches and operations.
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
  // Placement and shift stay.
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

  // Of a cache, or of a part of a wrapper.
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

  // Of all of a wrapper's caches at once.
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

  // Where two sequences take part, and which they are matters.
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

  // Of operation `i`, if it is still there.
  template <class Change>
  void Ops(std::size_t i, const Change& change) {
    moves_.emplace_back([i, change](History& h) {
      if (i < h.ops.size()) change(h.ops[i]);
    });
  }

  void AddOp(std::size_t i, const Op& op) {
    moves_.emplace_back([i](History& h) {
      if (i < h.ops.size()) {
        h.ops.erase(h.ops.begin() + static_cast<std::ptrdiff_t>(i));
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

  // Two passes one after the other, as one.
  static void Join(History& h, std::size_t i) {
    if (i + 1 >= h.ops.size()) return;
    const auto next = h.ops.begin() + static_cast<std::ptrdiff_t>(i) + 1;
    if (h.ops[i].kind != OpKind::kPut || next->kind != OpKind::kPut) return;
    auto& segments = h.ops[i].segments;
    std::map<int, int> tokens;  // By sequence: positions go on after them.
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

  // Fewer sequences of a range.
  template <class Find>
  void AddMore(std::size_t i, const Find& find) {
    for (const int less : {-1, 32, 8, 1}) {  // -1: half of them.
      Ops(i, [find, less](Op& o) {
        int* more = find(o);
        if (more == nullptr) return;
        *more = less < 0 ? *more / 2 : std::max(*more - less, 0);
      });
    }
  }

  // Lower indices.
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
    // Those of one sequence, as one.
    Ops(i, [s](Op& o) {
      if (s + 1 >= o.segments.size()) return;
      if (o.segments[s].seq != o.segments[s + 1].seq) return;
      int& count = o.segments[s].count;
      count = std::min(count + o.segments[s + 1].count, Segment::kMost);
      o.segments.erase(o.segments.begin() + static_cast<std::ptrdiff_t>(s) + 1);
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
    // As many as there are cells.
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
    if (best_.setup.legal) Try(InTheOpen(best_));
    PlainSetup();
    Rebuild(/*most_kept=*/2);  // Of a long history each takes long.
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
      // Of other kinds of operations, there is another catalog.
    } while (cost_ != before && best_.ops.size() < 3);
    return best_;
  }

 private:
  // Operations after the one that shows the failure are of no use.
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

  // About how long a run of so many operations took. Of a history of a thousand
  // in a cache of hundreds of cells, shrinking takes long before anything is
  // looked up; of legal clients more is. Time would depend on the machine.
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

  // If it is plainer than the best one, and was not tried yet.
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

  // Leaves out runs of operations: halves, quarters, ..., single ones. Without
  // the last one, nothing fails that did not before.
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

  // Every try takes as long as there are caches, rows, and rows are wide.
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
    // Of a wrapper, one of its caches.
    for (const CacheSpec& part : std::vector(best_.setup.spec.caches)) {
      if (attempt([&](Setup& setup) { setup.spec = part; })) break;
    }
    cost_ = CostOf(best_);
  }

  // Half the cells, and half the tokens or batches, for as long as that leads
  // on: many tries follow, each as long as the cache is large.
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

  // One round of single moves; whether one of them led on.
  bool Step() {
    // Of many operations, most of which will go, not every detail.
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

  // The last operations, after a state that is reached at once.
  bool Rebuild(std::size_t most_kept = 4) {
    for (std::size_t kept = 1; kept <= most_kept; ++kept) {
      const std::optional<History> rebuilt = Rebuilt(best_, kept);
      if (rebuilt && TryPlainer(*rebuilt)) return true;
    }
    const std::optional<History> one = PutAtOnce(best_);
    return one && TryPlainer(*one);
  }

  // What no step leads to may still be known.
  void LookUp() {
    PlainestThatFails(
        best_, [&](const History& one) { return !TooMuchWork() && Try(one); },
        bounds_);
    cost_ = CostOf(best_);
  }

  // Two moves at once, where none leads on alone.
  bool PairStep() {
    // Their number grows with the square of that of the operations.
    constexpr std::size_t kMostTries = 12000;
    const std::size_t enough =
        tried_.size() + kMostTries / std::max<std::size_t>(best_.ops.size(), 1);
    std::vector<Move> moves = Moves(best_, /*all=*/true).Take();
    const std::string text = ToText(best_);
    std::erase_if(moves, [&](const Move& move) {  // What changes nothing.
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
  const std::int64_t start_work_;  // Of a run of no operations.
  std::int64_t work_ = 0;
  bool fails_in_last_ = false;  // Not at the end of it all, nor before.
  Cost cost_;                   // Of `best_`.
  const Rerun& rerun_;
  const Bounds bounds_;
  const Party blamed_;  // Which of its checks sees a bug first is chance.
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
  const double end = Now() + subject.shrink_seconds;
  const Rerun rerun = [&](const History& candidate) -> std::optional<Failure> {
    const bool over = subject.shrink_seconds > 0 && Now() > end;
    if (over || Interrupted()) return std::nullopt;
    std::optional<Failure> found = RunHistory(candidate, quick).failure;
    if (found && refuses && refuses(candidate, *found)) found.reset();
    return found;
  };
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
