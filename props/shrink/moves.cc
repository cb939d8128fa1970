#include "props/shrink/moves.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "core/index.h"
#include "props/history/knobs.h"
#include "props/history/misuse.h"

namespace kvtwin::props {
namespace {

// Calls change(sequence) for each sequence that an operation names.
void ChangeSequences(History& history,
                     const std::function<void(int&)>& change) {
  for (Op& op : history.ops) {
    for (Segment& segment : op.segments) change(segment.seq);
    const bool one = op.kind == OpKind::kDrop || op.kind == OpKind::kAsk ||
                     op.kind == OpKind::kShift ||
                     op.kind == OpKind::kSnapshot ||
                     op.kind == OpKind::kCommit || op.kind == OpKind::kPin ||
                     op.kind == OpKind::kFind;
    const bool two = op.kind == OpKind::kCopy || op.kind == OpKind::kAdd;
    if (one || two) change(op.seq);
    if (two) change(op.dst);
  }
}

// Renames sequences in the order of their first use, from 0; `names` has names
// that are already chosen.
void RenameSequences(History& history, std::map<int, int> names = {}) {
  ChangeSequences(history, [&](int& seq) {
    seq = names.try_emplace(seq, Size(names)).first->second;
  });
}

// Gives the tokens of prompts the ids 0, 1, 2, ... in the order of the prompts.
void RenameTokens(History& history) {
  std::map<int, int> names;
  for (Op& op : history.ops) {
    for (int& id : op.ids) {
      id = names.try_emplace(id, Size(names)).first->second;
    }
  }
}

// Names sequences as a client does whose ids are below max_sequences.
void WrapSequences(History& history) {
  const int sequences = history.setup.init.max_sequences;
  if (sequences < 1) return;
  ChangeSequences(history, [=](int& seq) { seq %= sequences; });
}

// The steps to a smaller number: to its half, or down by one of the others.
constexpr int kHalf = -1;
constexpr std::array kLess = {kHalf, 32, 8, 1};
int Smaller(int number, int less) {
  return less == kHalf ? number / 2 : std::max(number - less, 0);
}

// Steps that may make a history plainer. Each step may also do nothing.
class MoveList {
 public:
  // With `all`, makes all steps; without, operations are only dropped or
  // joined.
  MoveList(const History& history, bool all) : all_(all) {
    moves_.emplace_back([](History& h) { RenameSequences(h); });
    moves_.emplace_back([](History& h) { WrapSequences(h); });
    const auto has_ids = [](const Op& op) { return !op.ids.empty(); };
    if (std::ranges::any_of(history.ops, has_ids)) {
      moves_.emplace_back([](History& h) { RenameTokens(h); });
    }
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
    spec.checkpoint_every = plain.checkpoint_every;
    spec.checkpoints = plain.checkpoints;
    spec.pins = plain.pins;
    spec.drafts = plain.drafts;
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
    for (const int less : kLess) {
      add([=](CacheSpec& spec) {
        const int before = spec.window.value_or(0);
        if (spec.window) spec.window = Smaller(before, less);
        const int less_window = before - spec.window.value_or(0);
        if (spec.memory) spec.memory = std::max(*spec.memory - less_window, 0);
      });
      add([=](CacheSpec& spec) {
        if (spec.memory) spec.memory = Smaller(*spec.memory, less);
      });
      add([=](CacheSpec& spec) {
        if (spec.chunk > 0) spec.chunk = std::max(Smaller(spec.chunk, less), 1);
      });
    }
    for (const int number : {0, 1, 2, 3}) {
      add([=](CacheSpec& spec) {
        if (spec.checkpoint_every > 0) spec.checkpoint_every = number;
        if (spec.checkpoint_every == 0) spec.checkpoints = 0;
      });
      add([=](CacheSpec& spec) {
        if (spec.checkpoints > 0) spec.checkpoints = number;
      });
      add([=](CacheSpec& spec) { spec.pins = std::min(spec.pins, number); });
      add([=](CacheSpec& spec) {
        spec.drafts = std::min(spec.drafts, number);
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
    Setups([](Setup& s) { s.config = CacheConfig(); });
    for (const Knob& knob : Knobs()) {
      for (const auto& plain : knob.plainer) Setups(plain);
    }
    Setups([](Setup& s) { SetCells(s.init.capacity, s); });
    Setups([](Setup& s) { SetCells((s.init.capacity + 1) / 2, s); });
    for (const int less : {32, 8, 1}) {
      Setups([=](Setup& s) {
        if (s.init.capacity > less) SetCells(s.init.capacity - less, s);
      });
    }
    for (const int less : kLess) {
      Setups(
          [=](Setup& s) { s.layers = std::max(Smaller(s.layers, less), 1); });
    }
    for (const int size : {1, 2, 3, 4, 5, 6, 8}) {
      Setups([=](Setup& s) { SetCells(size, s); });
      Setups([=](Setup& s) { s.init.capacity = size; });
      Setups([=](Setup& s) { s.init.max_batch = size; });
    }
    for (const int sequences : {1, 2, 3}) {
      Setups([=](Setup& s) { s.init.max_sequences = sequences; });
    }
    for (const int less : {kHalf, 1}) {
      Setups([=](Setup& s) {
        int& sequences = s.init.max_sequences;
        if (sequences > 3) sequences = Smaller(sequences, less);
      });
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
              h.setup.id_step = 1;
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
    moves_.emplace_back([i](History& h) { LeaveOutTokens(h, i); });
    if (!all_) return;
    moves_.emplace_back([i](History& h) {
      if (i + 1 < h.ops.size()) std::swap(h.ops[i], h.ops[i + 1]);
    });
    for (const Op& plain : PlainOps()) {
      Ops(i, [plain](Op& o) { o = plain; });
    }
    AddDrafts(i, op);
    if (op.kind == OpKind::kFind) AddPrompt(i, op);
    switch (op.kind) {
      case OpKind::kPut:
        return AddPut(i, op);
      case OpKind::kMisuse:
        if (op.misuse >= kDraftMisuse) return;
        for (int which = 0; which < op.misuse % MisuseCount(); ++which) {
          Ops(i, [which](Op& o) { o.misuse = which; });
        }
        return Ops(i, [](Op& o) { o.misuse %= MisuseCount(); });
      default:
        return AddArguments(i, op);
    }
  }

  // Adds steps to a shorter and plainer prompt.
  void AddPrompt(std::size_t i, const Op& op) {
    for (const std::size_t less : {32U, 8U, 1U}) {
      Ops(i, [less](Op& o) {
        if (o.ids.size() > less) o.ids.resize(o.ids.size() - less);
      });
    }
    Ops(i, [](Op& o) { std::ranges::fill(o.ids, 0); });
    for (std::size_t at = 0; at < op.ids.size(); ++at) {
      for (const int id : {0, 1}) {
        Ops(i, [=](Op& o) {
          if (at < o.ids.size()) o.ids[at] = id;
        });
      }
    }
  }

  // Adds steps to fewer and plainer drafts.
  void AddDrafts(std::size_t i, const Op& op) {
    if (op.kind == OpKind::kCommit) {
      Ops(i, [](Op& o) { o.path.clear(); });
      Ops(i, [](Op& o) {
        if (!o.path.empty()) o.path.pop_back();
      });
      Ops(i, [](Op& o) { std::ranges::fill(o.path, 0); });
    }
    for (std::size_t s = 0; s < op.segments.size(); ++s) {
      if (op.segments[s].parents.empty()) continue;
      const auto parents = [&](auto change) {
        Ops(i, [s, change](Op& o) {
          if (s < o.segments.size()) change(o.segments[s].parents);
        });
      };
      parents([](auto& list) { list.clear(); });
      parents([](auto& list) { list = {kCommitted}; });
      parents([](auto& list) {
        if (list.size() > 1) list.pop_back();
      });
      if (op.segments.size() == 1) AddWithoutDrafts(i);
      // The last draft goes, and commits choose the draft before it.
      moves_.emplace_back([i, s](History& h) {
        if (i >= h.ops.size() || s >= h.ops[i].segments.size()) return;
        auto& list = h.ops[i].segments[s].parents;
        if (list.size() < 2) return;
        list.pop_back();
        const int seq = h.ops[i].segments[s].seq;
        for (Op& commit : std::span(h.ops).subspan(i + 1)) {
          if (commit.seq != seq) continue;
          for (int& draft : commit.path) {
            draft = std::min(draft, Size(list) - 1);
          }
        }
      });
      for (std::size_t at = 0; at < op.segments[s].parents.size(); ++at) {
        for (const int parent : {kCommitted, 0, 1}) {
          parents([=](auto& list) {
            if (at < list.size()) list[at] = parent;
          });
        }
      }
    }
  }

  // Adds a step to a history without a pass of drafts, whose commits choose a
  // sibling before.
  void AddWithoutDrafts(std::size_t i) {
    moves_.emplace_back([i](History& h) {
      if (i >= h.ops.size() || h.ops[i].segments.empty()) return;
      const int seq = h.ops[i].segments[0].seq;
      h.ops.erase(IteratorAt(h.ops, i));
      for (Op& commit : std::span(h.ops).subspan(i)) {
        if (commit.seq != seq) continue;
        for (int& draft : commit.path) draft = std::max(draft - 1, 0);
      }
    });
  }

  // Leaves out a pass of one sequence, and lowers the positions of the sequence
  // that later operations name. Does nothing if no position is lowered.
  static void LeaveOutTokens(History& h, std::size_t i) {
    if (i >= h.ops.size() || h.ops[i].kind != OpKind::kPut) return;
    const auto& segments = h.ops[i].segments;
    if (segments.size() != 1 || segments[0].more > 0) return;
    const Segment pass = segments[0];
    bool lowers = false;
    for (std::size_t j = i + 1; j < h.ops.size(); ++j) {
      Op& op = h.ops[j];
      const bool names = op.kind == OpKind::kDrop || op.kind == OpKind::kAsk ||
                         op.kind == OpKind::kCopy || op.kind == OpKind::kShift;
      if (!names || op.seq != pass.seq) continue;
      for (RelativePos* pos : {&op.begin, &op.end}) {
        if (pos->from_end || pos->offset < pass.count) continue;
        pos->offset -= pass.count;
        lowers = true;
      }
    }
    if (lowers) h.ops.erase(IteratorAt(h.ops, i));
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
    for (const int less : kLess) {
      Ops(i, [find, less](Op& o) {
        if (int* more = find(o)) *more = Smaller(*more, less);
      });
    }
  }

  // Adds steps to lower indices.
  void AddExcept(std::size_t i, const Op& op) {
    if (std::ranges::all_of(op.except, [](int at) { return at < 2; })) return;
    for (const int less : kLess) {
      Ops(i, [less](Op& o) {
        for (int& index : o.except) index = Smaller(index, less);
      });
    }
  }

  void AddPut(std::size_t i, const Op& op) {
    Ops(i, [](Op& o) { o.single = false; });
    AddExcept(i, op);
    Ops(i, [](Op& o) { o.reserve = false; });
    Ops(i, [](Op& o) { o.keep_rows = false; });
    Ops(i, [](Op& o) { o.overfull = false; });
    Ops(i, [](Op& o) { o.stop = -1; });
    Ops(i, [](Op& o) { o.stop = std::min(o.stop, 0); });
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
    // A count above kMost means the number of free cells: it is not halved.
    add([](Segment& one) {
      if (one.count <= Segment::kMost) one.count = (one.count + 1) / 2;
    });
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

}  // namespace

std::vector<Move> MovesOf(const History& history, bool all) {
  return MoveList(history, all).Take();
}

}  // namespace kvtwin::props
