#include "props/shrink.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "props/misuse.h"

namespace kvtwin::props {
namespace {

using Move = std::function<void(History&)>;

// How far a history is from the plainest one: first by operations (a legal
// client counts as two, for those that it adds unseen), then by what is special
// about it, then by the sizes of its numbers.
struct Cost {
  std::size_t operations = 0;
  std::int64_t special = 0;
  std::int64_t numbers = 0;
  // NOLINTNEXTLINE(modernize-use-nullptr): there is no pointer here.
  auto operator<=>(const Cost&) const = default;
};

void AddCost(const CacheSpec& spec, Cost& cost) {
  constexpr std::array kSpecial = {0, 2, 4, 2, 4, 8};  // By kind.
  cost.special += kSpecial.at(static_cast<std::size_t>(spec.kind));
  cost.special += spec.placement == Placement::kScatter ? 1 : 0;
  cost.special += static_cast<int>(spec.shift.kind);
  const Rope& rope = spec.shift.rope;
  const Rope plain;
  if (spec.shift.kind == ShiftKind::kRope) {
    cost.special += (rope.pairing != plain.pairing ? 1 : 0) +
                    (rope.base != plain.base ? 1 : 0) +
                    (rope.scale != plain.scale ? 1 : 0) +
                    (rope.dims != plain.dims ? 1 : 0);
  }
  cost.special += spec.memory.has_value() ? 1 : 0;
  cost.numbers +=
      spec.window.value_or(0) + spec.memory.value_or(0) + spec.chunk;
  for (const CacheSpec& part : spec.caches) AddCost(part, cost);
}

void AddCost(const Setup& setup, Cost& cost) {
  AddCost(setup.spec, cost);
  const CacheConfig& config = setup.config;
  const Setup plain;
  const auto special = [&](bool is) { cost.special += is ? 1 : 0; };
  special(config.permuted_v);
  special(config.mask_dtype != DType::kF32);
  special(config.cache_padding != 1);
  special(config.mask_batch_padding != 1);
  special(setup.init.dtype != DType::kF32);
  special(setup.rows != plain.rows);
  special(setup.layers != 1);
  special(setup.strided);
  special(setup.first_id != 0);
  const RowDims& rows = setup.rows;
  cost.numbers += setup.layers + config.cache_padding +
                  config.mask_batch_padding + rows.k_head_dim + rows.kv_heads +
                  rows.v_head_dim;
}

void AddSizesCost(const Setup& setup, Cost& cost) {
  const InitArgs& init = setup.init;
  const InitArgs plain = Setup().init;
  Setup sized = setup;
  SetCells(init.capacity, sized);
  const bool of_cells = WhyNotOfCells(setup).empty();
  const auto special = [&](bool is) { cost.special += is ? 1 : 0; };
  special(!of_cells);
  special(!of_cells && init.max_sequences != plain.max_sequences);
  special(init.max_batch !=
          (of_cells ? sized.init.max_batch : plain.max_batch));
  cost.numbers += init.max_sequences + init.capacity + init.max_batch;
}

void AddCost(const Segment& segment, Cost& cost) {
  cost.special += 2;
  cost.special += segment.order != Segment::Order::kUp ? 1 : 0;
  cost.special += segment.delta != 0 ? 1 : 0;
  const bool free = segment.count >= Segment::kFree / 2;
  cost.special += free ? 1 : 0;
  cost.numbers +=
      segment.seq + std::abs(std::int64_t{segment.delta}) +
      (free ? 2 + std::abs(segment.count - Segment::kFree) : segment.count);
}

// But for the sizes of Init, which take longer.
Cost CostWithoutSizes(const History& history) {
  Cost cost;
  cost.operations = history.ops.size() + (history.setup.legal ? 2 : 0);
  AddCost(history.setup, cost);
  // By OpKind: put, drop, copy, ask, causal, get, reput, misuse, poison,
  // reload.
  constexpr std::array kSpecial = {0, 2, 3, 2, 3, 2, 3, 5, 4, 5};
  const auto add = [&](const RelativePos& pos) {
    cost.special += pos.from_end ? 1 : 0;
    cost.numbers += std::abs(std::int64_t{pos.offset});
  };
  for (const Op& op : history.ops) {
    cost.special += kSpecial.at(static_cast<std::size_t>(op.kind));
    for (const Segment& segment : op.segments) AddCost(segment, cost);
    cost.special += (op.reserve ? 1 : 0) + (op.keep_rows ? 1 : 0);
    for (const auto* indices : {&op.images, &op.except}) {
      cost.special += std::ssize(*indices);
      for (const int index : *indices) cost.numbers += index;
    }
    if (op.kind == OpKind::kMisuse) cost.numbers += op.misuse;
    if (op.kind != OpKind::kDrop && op.kind != OpKind::kCopy &&
        op.kind != OpKind::kAsk) {
      continue;
    }
    cost.numbers += op.seq;
    if (op.kind == OpKind::kCopy) cost.numbers += op.dst;
    if (op.kind == OpKind::kDrop) add(op.begin);
    if (op.kind != OpKind::kDrop || !op.open) {
      cost.special += op.kind == OpKind::kDrop ? 1 : 0;
      add(op.end);
    }
  }
  return cost;
}

Cost CostOf(const History& history) {
  Cost cost = CostWithoutSizes(history);
  AddSizesCost(history.setup, cost);
  return cost;
}

// Sequences in the order of their first use, from 0.
void RenameSequences(History& history) {
  std::map<int, int> names;
  const auto rename = [&](int& seq) {
    seq = names.try_emplace(seq, static_cast<int>(names.size())).first->second;
  };
  for (Op& op : history.ops) {
    for (Segment& segment : op.segments) rename(segment.seq);
    const bool one = op.kind == OpKind::kDrop || op.kind == OpKind::kAsk;
    if (one || op.kind == OpKind::kCopy) rename(op.seq);
    if (op.kind == OpKind::kCopy) rename(op.dst);
  }
}

// Steps that may make a history plainer, each of which may also do nothing.
class Moves {
 public:
  explicit Moves(const History& history) {
    moves_.emplace_back(RenameSequences);
    AddSetup();
    for (std::size_t i = 0; i < history.setup.spec.caches.size(); ++i) {
      AddPart(i);
    }
    if (history.setup.spec.caches.size() > 1) AddParts();
    for (std::size_t i = 0; i < history.ops.size(); ++i) {
      AddOp(i, history.ops[i]);
    }
    if (history.setup.legal) AddWhatClientsDo(history.ops.size());
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
    moves_.emplace_back([change](History& h) { change(h.setup); });
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
    Setups([](Setup& s) { s.config.permuted_v = false; });
    for (const int padding : {1, 2, 3}) {
      Setups([=](Setup& s) { s.config.mask_batch_padding = padding; });
      Setups([=](Setup& s) { s.config.cache_padding = padding; });
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

  // A legal client removes and asks unseen: here in the open.
  void AddWhatClientsDo(std::size_t ops) {
    for (std::size_t i = 0; i <= ops; ++i) {
      for (const Op& plain : PlainOps()) {
        moves_.emplace_back([i, plain](History& h) {
          if (i > h.ops.size()) return;
          h.setup.legal = false;
          h.ops.insert(h.ops.begin() + static_cast<std::ptrdiff_t>(i), plain);
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
        return AddArguments(i);
    }
  }

  // Two passes one after the other, as one.
  static void Join(History& h, std::size_t i) {
    if (i + 1 >= h.ops.size()) return;
    const auto next = h.ops.begin() + static_cast<std::ptrdiff_t>(i) + 1;
    if (h.ops[i].kind != OpKind::kPut || next->kind != OpKind::kPut) return;
    auto& segments = h.ops[i].segments;
    segments.insert(segments.end(), next->segments.begin(),
                    next->segments.end());
    h.ops.erase(next);
    h.setup.init.max_batch = std::max(h.setup.init.max_batch, 8);
  }

  void AddArguments(std::size_t i) {
    Ops(i, [](Op& o) { o.open = true; });
    Ops(i, [](Op& o) { o.except = {0}; });
    Ops(i, [](Op& o) { o.except.clear(); });
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

  void AddPut(std::size_t i, const Op& op) {
    Ops(i, [](Op& o) { o.reserve = false; });
    Ops(i, [](Op& o) { o.keep_rows = false; });
    for (const auto indices : {&Op::images, &Op::except}) {
      Ops(i, [indices](Op& o) { (o.*indices).clear(); });
      Ops(i, [indices](Op& o) { o.*indices = {0}; });
      Ops(i, [indices](Op& o) { o.*indices = {1}; });
    }
    for (std::size_t s = 0; s < op.segments.size(); ++s) AddSegment(i, s);
  }

  void AddSegment(std::size_t i, std::size_t s) {
    const auto at = static_cast<std::ptrdiff_t>(s);
    Ops(i, [at](Op& o) {
      if (std::ssize(o.segments) < at + 1 || o.segments.size() == 1) return;
      o.segments.erase(o.segments.begin() + at);
    });
    // Those of one sequence, as one.
    Ops(i, [s](Op& o) {
      if (s + 1 >= o.segments.size()) return;
      if (o.segments[s].seq != o.segments[s + 1].seq) return;
      o.segments[s].count += o.segments[s + 1].count;
      o.segments.erase(o.segments.begin() + static_cast<std::ptrdiff_t>(s) + 1);
    });
    const auto add = [&](auto change) {
      Ops(i, [s, change](Op& o) {
        if (s < o.segments.size()) change(o.segments[s]);
      });
    };
    add([](Segment& one) { one.order = Segment::Order::kUp; });
    for (const int delta : {0, 1, -1}) {
      add([delta](Segment& one) { one.delta = delta; });
    }
    for (const int seq : {0, 1}) {
      add([seq](Segment& one) { one.seq = seq; });
    }
    for (const int count : {1, 2, 3, 4, 5}) {
      add([count](Segment& one) { one.count = count; });
    }
  }

  std::vector<Move> moves_;
};

class Shrinker {
 public:
  Shrinker(const History& history, const Rerun& rerun)
      : best_(history), rerun_(rerun) {
    const std::optional<Difference> difference = rerun(history);
    blamed_ = BlamedBy(difference->check);
    Cut(difference->step);
  }

  History Run() {
    DropOps();
    cost_ = CostOf(best_);
    while (Step() || PlainStep() || PairStep()) {
    }
    return best_;
  }

 private:
  // "subject" of "subject: cells". Which of them sees a bug first is chance.
  static std::string BlamedBy(const std::string& check) {
    return check.substr(0, check.find(':'));
  }

  // Operations after the one that shows the failure are of no use.
  void Cut(std::size_t step) {
    if (step + 1 < best_.ops.size()) best_.ops.resize(step + 1);
  }

  bool Try(const History& candidate) {
    const std::optional<Difference> difference = rerun_(candidate);
    if (!difference || BlamedBy(difference->check) != blamed_) return false;
    best_ = candidate;
    Cut(difference->step);
    return true;
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

  // Leaves out runs of operations: halves, quarters, ..., single ones.
  void DropOps() {
    for (std::size_t run = best_.ops.size(); run > 0; run /= 2) {
      for (std::size_t at = best_.ops.size(); at > 0;) {
        at = std::min(at, best_.ops.size());
        const std::size_t begin = at > run ? at - run : 0;
        History candidate = best_;
        const auto first = candidate.ops.begin();
        candidate.ops.erase(first + static_cast<std::ptrdiff_t>(begin),
                            first + static_cast<std::ptrdiff_t>(at));
        Try(candidate);
        at = begin;
      }
    }
  }

  // One round of single moves; whether one of them led on.
  bool Step() {
    bool plainer = false;
    for (const Move& move : Moves(best_).Take()) {
      History candidate = best_;
      move(candidate);
      plainer = TryPlainer(candidate) || plainer;
    }
    return plainer;
  }

  // Short histories of plain operations, where no step leads to one. They start
  // with a put: before, there is little to go wrong.
  bool PlainStep() {
    if (!best_.setup.spec.caches.empty()) return false;
    History candidate = best_;
    candidate.setup.legal = false;
    for (const CacheSpec& spec : Moves::PlainSpecs()) {
      Moves::Become(spec, candidate.setup.spec);
      for (const int cells : {1, 2, 3, 4}) {
        SetCells(cells, candidate.setup);
        for (const Op& first : Moves::PlainOps()) {
          if (first.kind != OpKind::kPut) break;
          candidate.ops = {first};
          if (TryPlainer(candidate)) return true;
          if (cost_.operations < 2) continue;
          for (const Op& second : Moves::PlainOps()) {
            candidate.ops = {first, second};
            if (TryPlainer(candidate)) return true;
          }
        }
      }
    }
    return false;
  }

  // Two moves at once, where none leads on alone.
  bool PairStep() {
    constexpr std::size_t kMostOps = 6;  // Their number grows with its square.
    if (best_.ops.size() > kMostOps) return false;
    std::vector<Move> moves = Moves(best_).Take();
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
      }
    }
    return false;
  }

  History best_;
  Cost cost_;  // Of `best_`.
  const Rerun& rerun_;
  std::string blamed_;
  std::set<std::string> tried_;
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
