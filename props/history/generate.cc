#include "props/history/generate.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "core/index.h"
#include "props/history/abilities.h"
#include "props/history/knobs.h"
#include "props/history/misuse.h"
#include "props/history/rarities.h"
#include "reference/dialects.h"

namespace kvtwin::props {
namespace {

CacheSpec DrawPart(const Pick& pick, Kind kind) {
  CacheSpec spec;
  spec.kind = kind;
  if (kind == Kind::kSwa || kind == Kind::kSwaMem) {
    if (!Chance(pick, 5)) spec.window = OneOf(pick, {0, 1, 1, 2, 3, 5});
  }
  if (kind == Kind::kSwaMem && !Chance(pick, 5)) {
    spec.memory = spec.window.value_or(2) + OneOf(pick, {0, 0, 1, 2, 4});
    // In rare cases the memory is less than the window, which Init refuses.
    if (Chance(pick, 2)) spec.memory = 0;
  }
  if (kind == Kind::kChunked) spec.chunk = OneOf(pick, {1, 2, 3, 4, 7});
  if (kind == Kind::kRecurrent && !Chance(pick, 15)) {
    spec.checkpoint_every = OneOf(pick, {1, 2, 2, 3, 4, 7});
    spec.checkpoints = OneOf(pick, {0, 1, 1, 2, 3, 5});
  }
  return spec;
}

// Draws the kind of a cache of a wrapper or a hybrid; `rare` is one more kind.
Kind DrawKind(const Pick& pick, Kind rare) {
  return OneOf(
      pick, {Kind::kCausal, Kind::kSwa, Kind::kSwaMem, Kind::kChunked, rare});
}

Shift DrawShift(const Pick& pick) {
  Shift shift;
  shift.kind =
      OneOf(pick, {ShiftKind::kNone, ShiftKind::kIdentity, ShiftKind::kAdd,
                   ShiftKind::kTagAdd, ShiftKind::kTagAdd, ShiftKind::kRope});
  if (shift.kind != ShiftKind::kRope) return shift;
  if (Chance(pick, 50)) shift.rope.pairing = Rope::Pairing::kHalves;
  if (Chance(pick, 30)) shift.rope.base = pick(1, 500);
  if (Chance(pick, 20)) shift.rope.scale = pick(0, 3);
  if (Chance(pick, 30)) shift.rope.dims = 2 * pick(1, 3);
  return shift;
}

void DrawSizes(const Pick& pick, Setup& setup) {
  InitArgs& init = setup.init;
  const int size = pick(0, 99);
  // A few caches have more sequences than a backend may count in a few bits.
  const bool many_sequences = size >= 76 && size < 80;
  init.max_sequences = many_sequences ? OneOf(pick, {5, 7, 8, 9, 16, 17, 17})
                                      : OneOf(pick, {1, 1, 2, 2, 2, 3, 4});
  // Small caches are often full, and wrap around often; a few caches are larger
  // than the 64 cells of a word.
  init.capacity = size < 80   ? pick(1, 8)
                  : size < 95 ? pick(9, 64)
                              : pick(65, 100);
  init.max_batch = Chance(pick, 80) ? pick(1, 6) : pick(1, 20);
  if (size >= 95) init.max_batch = pick(1, 100);
  DrawKnobs(pick, KnobGroup::kSizes, setup);
}

// Makes windows and chunks wider than DrawPart does, and the cache so large
// that tokens leave them; LimitCells may make it smaller again.
void Widen(const Pick& pick, Setup& setup) {
  const int width = pick(4, kWidest);
  bool any = false;
  const auto widen = [&](CacheSpec& spec) {
    if (spec.memory) {
      *spec.memory =
          std::max(0, *spec.memory + width - spec.window.value_or(width));
    }
    if (spec.window) spec.window = width;
    if (spec.kind == Kind::kChunked) spec.chunk = width;
    any = any || spec.window || spec.chunk > 0;
  };
  widen(setup.spec);
  std::ranges::for_each(setup.spec.caches, widen);
  if (!any) return;
  int& capacity = setup.init.capacity;
  capacity = std::max(capacity, width + pick(2, 2 * width));
}

int DrawCount(const Pick& pick, const Setup& setup) {
  const int way = pick(0, 9);
  if (way < 5) return pick(1, 3);
  if (way < 7) return pick(1, setup.init.max_batch);
  // Counts near the boundaries: max_batch, the capacity, the free cells.
  if (way == 7) return std::max(1, setup.init.max_batch - pick(0, 1));
  if (way == 8) return std::max(1, setup.init.capacity + pick(-1, 1));
  return Segment::kFree + pick(-1, 1);
}

Segment DrawSegment(const Pick& pick, const Setup& setup) {
  Segment segment;
  segment.seq = Chance(pick, 95) ? pick(0, setup.init.max_sequences - 1)
                                 : pick(0, setup.init.max_sequences + 1);
  segment.count = DrawCount(pick, setup);
  if (Chance(pick, 15)) segment.delta = pick(-4, 4);
  // A few segments end near the largest position.
  if (Chance(pick, 1) && Chance(pick, 30)) {
    segment.delta = OneOf(pick, {1 << 30, 0x7FFFFFF0});
  }
  if (Chance(pick, 10)) {
    segment.order = OneOf(pick, {Segment::Order::kDown, Segment::Order::kSame});
  }
  return segment;
}

// Draws an index into a batch: mostly one of the first few, otherwise any.
int DrawIndex(const Pick& pick, const Setup& setup) {
  const int last = setup.init.max_batch - 1;
  return Chance(pick, 60) ? pick(0, 7) : pick(0, std::max(last, 7));
}

void DrawPut(const Pick& pick, const Setup& setup, Op& op) {
  const int segments = OneOf(pick, {1, 1, 1, 2, 2, 3});
  for (int i = 0; i < segments; ++i) {
    op.segments.push_back(DrawSegment(pick, setup));
  }
  op.reserve = Chance(pick, 5);
  op.keep_rows = Chance(pick, 3);
  if (Chance(pick, 22)) {
    op.images.push_back(pick(0, 7));
    if (Chance(pick, 30)) op.images.push_back(pick(0, 7));
  }
  if (Chance(pick, 15)) op.except.push_back(DrawIndex(pick, setup));
  if (Chance(pick, 5)) op.except.push_back(DrawIndex(pick, setup));
}

// Returns the window, or the memory, of the first cache.
int DrawEdge(const Pick& pick, const CacheSpec& spec) {
  const CacheSpec& part = spec.caches.empty() ? spec : spec.caches.front();
  const bool memory = part.memory && Chance(pick, 50);
  return memory ? *part.memory : part.window.value_or(4);
}

// Draws one of a few positions: either end, the edge of the window, or one next
// to these.
RelativePos DrawPos(const Pick& pick, const Setup& setup) {
  if (Chance(pick, 45)) return {false, OneOf(pick, {0, 0, 1, 1, 2, 3, 5})};
  if (Chance(pick, 20)) {
    const int off = pick(-1, 1);
    return {true, off - DrawEdge(pick, setup.spec)};
  }
  return {true, OneOf(pick, {1, 0, 0, -1, -1, -2, -3, -5})};
}

// Makes a fragmented cache: fills it with interleaved sequences, then drops
// one.
void DrawFragments(const Pick& pick, History& history) {
  Op put;
  for (int i = 0; i < 3; ++i) put.segments.push_back({.seq = i, .count = 1});
  const int fills = std::min(40, history.setup.init.capacity);
  for (int i = 0; i < fills; ++i) history.ops.push_back(put);
  Op drop;
  drop.kind = OpKind::kDrop;
  drop.seq = pick(0, 1);
  drop.open = true;
  history.ops.push_back(drop);
}

// Gives every sequence the tokens of sequence 0, and then a token more.
void DrawBranches(const Pick& pick, History& history) {
  const int sequences = history.setup.init.max_sequences;
  const int tokens = pick(1, 3);
  history.ops.push_back(PutOf(0, 0, tokens));
  Op copy;
  copy.kind = OpKind::kCopy;
  copy.dst = 1;
  copy.more = sequences - 2;
  copy.end.offset = tokens;
  history.ops.push_back(copy);
  const int batch = std::max(history.setup.init.max_batch, 1);
  for (int first = 0; first < sequences; first += batch) {
    Op put;
    for (int seq = first; seq < std::min(first + batch, sequences); ++seq) {
      put.segments.push_back({.seq = seq, .count = 1});
    }
    history.ops.push_back(put);
  }
}

// Updates `live`, the sequences that are likely to hold tokens, after `op`.
void Follow(const Op& op, std::vector<int>& live) {
  const auto at = [&](int seq) {
    return std::find(live.begin(), live.end(), seq);
  };
  const auto add = [&](int seq) {
    if (at(seq) == live.end()) live.push_back(seq);
  };
  if (op.kind == OpKind::kPut && !op.reserve) {
    for (const Segment& segment : op.segments) add(segment.seq);
  }
  if (op.kind == OpKind::kCopy && at(op.seq) != live.end()) {
    for (int dst = op.dst; dst <= op.dst + op.more; ++dst) add(dst);
  }
  if (op.kind == OpKind::kDrop && op.open && op.begin == RelativePos()) {
    std::erase(live, op.seq);
  }
}

void DrawOps(const Pick& pick, int ops, History& history) {
  const Weights weights = DrawWeights(pick);
  history.ops.reserve(AsSize(ops) * 3 / 2);
  std::vector<int> live;
  if (Chance(pick, 30)) DrawFragments(pick, history);
  if (history.setup.init.max_sequences > 2 && Chance(pick, 40)) {
    DrawBranches(pick, history);
  }
  for (const Op& op : history.ops) Follow(op, live);
  const auto draw = [&](const Weights& by) {
    history.ops.push_back(DrawOp(pick, history.setup, by, live));
    Follow(history.ops.back(), live);
    return history.ops.back().kind;
  };
  for (int i = 0; i < ops; ++i) {
    const OpKind last = draw(weights);
    // A second maintenance operation follows more often than by chance.
    if ((last == OpKind::kDrop || last == OpKind::kCopy) && Chance(pick, 30)) {
      draw({0, 12, 8, 4, 0, 0, 0, 0, 0, 1});
    }
  }
}

// Draws the calls of a model server: requests that continue the tokens of a
// slot, or fork them, or start anew; batches of several requests; context
// shifts; the token that is computed after the last one of a request.
//
// The server keeps its own record of the tokens in each slot. If the record
// becomes wrong (a shift is refused, a window is gone), the runner clears the
// sequence, and the calls after it are still legal.
class ModelServer {
 public:
  ModelServer(const Pick& pick, History& history)
      : pick_(pick),
        setup_(history.setup),
        ops_(history.ops),
        multi_user_(Chance(pick, 50)),
        slots_(AsSize(setup_.init.max_sequences)) {}

  void Serve(std::size_t ops) {
    Reserve(setup_.init.max_batch);
    Reserve(1);
    while (ops_.size() < ops) {
      const bool idle = std::none_of(slots_.begin(), slots_.end(),
                                     [](auto& slot) { return slot.busy; });
      if (idle || Chance(pick_, 15)) Accept();
      Forward();
      if (Chance(pick_, 3)) Cancel();
      if (slots_.size() > 2 && Chance(pick_, 10)) Branch();
    }
  }

 private:
  using Tokens = std::vector<int>;
  struct Slot {
    Tokens record;  // Tokens in the cache, except over-run ones.
    Tokens queue;   // Tokens that are not computed yet.
    bool busy = false;
    int keep = 0;  // Tokens that a context shift keeps.
    int left = 0;  // Tokens to generate.
    std::size_t used = 0;
  };

  int context() const { return setup_.init.capacity; }

  void Reserve(int count) {
    Op put = PutOf(0, 0, count);
    put.reserve = true;
    ops_.push_back(put);
  }

  static std::size_t CommonPrefix(const Tokens& a, const Tokens& b) {
    const auto end = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    return AsSize(end.first - a.begin());
  }

  Tokens DrawTokens(int count) {
    Tokens tokens;
    for (int i = 0; i < count; ++i) tokens.push_back(pick_(0, 2));
    return tokens;
  }

  // Draws a new prompt, or the tokens of some slot: all of them or a prefix,
  // with a few tokens more.
  Tokens DrawPrompt() {
    Tokens prompt;
    if (!Chance(pick_, 25)) {
      prompt = slots_[AnySlot()].record;
      const int length = Size(prompt);
      if (Chance(pick_, 50)) {
        prompt.resize(AsSize(pick_(0, length)));
      }
    }
    const Tokens more = DrawTokens(pick_(0, std::min(context(), 5)));
    prompt.insert(prompt.end(), more.begin(), more.end());
    if (prompt.empty()) prompt = DrawTokens(1);
    return prompt;
  }

  std::size_t AnySlot() { return AsSize(pick_(0, Size(slots_) - 1)); }

  // Returns the slots whose records share the longest prefix with `prompt`:
  // among the free slots, and among all slots.
  std::pair<std::size_t, std::size_t> Longest(const Tokens& prompt) const {
    std::size_t free = slots_.size();
    std::size_t best = 0;
    const auto prefix = [&](std::size_t i) {
      return CommonPrefix(slots_[i].record, prompt);
    };
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (prefix(i) > prefix(best)) best = i;
      if (slots_[i].busy) continue;
      if (free == slots_.size() || prefix(i) > prefix(free)) free = i;
    }
    return {free, best};
  }

  std::size_t Oldest() const {
    std::size_t oldest = slots_.size();
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].busy) continue;
      if (oldest == slots_.size() || slots_[i].used < slots_[oldest].used) {
        oldest = i;
      }
    }
    return oldest;
  }

  // Gives a request a slot, perhaps as a fork of another slot.
  void Accept() {
    Tokens prompt = DrawPrompt();
    const int keep =
        std::min(OneOf(pick_, {0, 0, 1, 2, context()}), context() - 1);
    const auto over = std::ssize(prompt) - context();
    if (over > 0) {
      prompt.erase(prompt.begin() + keep, prompt.begin() + keep + over);
    }
    auto [chosen, best] = Longest(prompt);
    if (chosen == slots_.size()) return;  // All are busy.
    const std::size_t prefix = CommonPrefix(slots_[best].record, prompt);
    const bool whole = prefix == slots_[best].record.size();
    if (multi_user_ && !(whole && !slots_[best].busy)) {
      chosen = Oldest();
      if (prefix > 0 && chosen != best) {
        Copy(best, chosen, prefix);
        slots_[chosen].record = prompt;
        slots_[chosen].record.resize(prefix);
      }
    }
    Slot& slot = slots_[chosen];
    std::size_t past = CommonPrefix(slot.record, prompt);
    if (past == prompt.size()) --past;  // At least one token must be computed.
    Drop(chosen, AsInt(past), kOpenEnd);
    slot = {.record = {},
            .queue = {},
            .busy = true,
            .keep = keep,
            .left = pick_(0, context()),
            .used = ops_.size()};
    const auto at = IteratorAt(prompt, past);
    slot.record.assign(prompt.begin(), at);
    slot.queue.assign(at, prompt.end());
  }

  // Runs one batch: each busy slot in turn adds as many tokens as fit.
  void Forward() {
    Op put;
    int room = setup_.init.max_batch;
    const std::size_t first = AnySlot();
    for (std::size_t i = 0; i < slots_.size() && room > 0; ++i) {
      const std::size_t at = (first + i) % slots_.size();
      Slot& slot = slots_[at];
      if (!slot.busy) continue;
      if (std::ssize(slot.record) == context()) Shift(at);
      const int count =
          AsInt(std::min({std::ssize(slot.queue), std::ptrdiff_t{room},
                          context() - std::ssize(slot.record)}));
      put.segments.push_back({.seq = AsInt(at), .count = count});
      room -= count;
      const auto end = slot.queue.begin() + count;
      slot.record.insert(slot.record.end(), slot.queue.begin(), end);
      slot.queue.erase(slot.queue.begin(), end);
      if (slot.queue.empty()) Sample(slot);
    }
    if (put.segments.empty()) return;
    if (Chance(pick_, 15)) {
      put.images.push_back(pick_(0, 7));
      put.except = put.images;
    }
    ops_.push_back(put);
    if (!put.except.empty()) {
      Op reset;
      reset.kind = OpKind::kCausal;
      ops_.push_back(reset);
    }
  }

  void Sample(Slot& slot) {
    if (slot.left-- > 0) {
      slot.queue = {pick_(0, 2)};
      return;
    }
    // The request ends. The end-of-sequence token is seen only when one token
    // more is in the cache; a stop string is removed from the record as well.
    slot.busy = false;
    const auto cut =
        std::min<std::ptrdiff_t>(pick_(0, 3), std::ssize(slot.record));
    slot.record.resize(slot.record.size() - AsSize(cut));
  }

  // Makes room in a full slot, after the tokens to keep.
  void Shift(std::size_t at) {
    Slot& slot = slots_[at];
    const int discard = std::max((context() - slot.keep) / 2, 1);
    Drop(at, slot.keep, slot.keep + discard);
    const auto begin = slot.record.begin() + slot.keep;
    slot.record.erase(begin, begin + discard);
  }

  void Cancel() {
    Slot& slot = slots_[AnySlot()];
    slot.busy = false;
    slot.queue.clear();
  }

  // Starts a completion of one slot's tokens in every other slot.
  void Branch() {
    const std::size_t from = AnySlot();
    const Tokens record = slots_[from].record;
    if (record.empty()) return;
    for (std::size_t to = 0; to < slots_.size(); ++to) {
      if (to == from) continue;
      Copy(from, to, record.size());
      slots_[to] = {.record = record,
                    .queue = {pick_(0, 2)},
                    .busy = true,
                    .left = pick_(0, context()),
                    .used = ops_.size()};
    }
  }

  void Copy(std::size_t from, std::size_t to, std::size_t count) {
    Op copy;
    copy.kind = OpKind::kCopy;
    copy.seq = AsInt(from);
    copy.dst = AsInt(to);
    copy.end.offset = AsInt(count);
    ops_.push_back(copy);
  }

  void Drop(std::size_t at, int begin, int end) {
    Op drop;
    drop.kind = OpKind::kDrop;
    drop.seq = AsInt(at);
    drop.begin.offset = begin;
    drop.open = end == kOpenEnd;
    if (!drop.open) drop.end.offset = end;
    ops_.push_back(drop);
  }

  const Pick& pick_;
  const Setup& setup_;
  std::vector<Op>& ops_;
  const bool multi_user_;
  std::vector<Slot> slots_;
};

}  // namespace

Setup DrawSetup(const Pick& pick, std::optional<Kind> kind, int cells_max) {
  Setup setup;
  const Kind drawn =
      kind ? *kind
           : OneOf(pick, {Kind::kCausal, Kind::kCausal, Kind::kSwa,
                          Kind::kSwaMem, Kind::kSwaMem, Kind::kChunked,
                          Kind::kWrapper, Kind::kWrapper, Kind::kEncoder});
  DrawSizes(pick, setup);
  setup.spec = DrawPart(pick, drawn);
  DrawKnobs(pick, KnobGroup::kClient, setup);
  setup.spec.shift = DrawShift(pick);
  setup.spec.placement =
      OneOf(pick, {Placement::kContiguous, Placement::kScatter});
  DrawKnobs(pick, KnobGroup::kStorage, setup);
  bool encoder = drawn == Kind::kEncoder;
  if (IsWrapper(drawn)) {
    // Most hybrids have a recurrent cache at any place among the others. Only
    // those without states can remove from the middle (R10).
    const bool hybrid = drawn == Kind::kHybrid;
    const bool states = hybrid && !Chance(pick, 20);
    const int parts = Chance(pick, 10) ? pick(4, 6) : pick(1, 3);
    const int recurrent = states ? pick(0, parts) : -1;
    // Some have several, whose states are rarely at the same lengths: the
    // length of a fork is found in several rounds (R9).
    const bool many_states = states && Chance(pick, 12);
    for (int i = 0; i < parts + (hybrid ? 1 : 0); ++i) {
      const Kind rare = states   ? Kind::kRecurrent
                        : hybrid ? Kind::kSwa
                                 : Kind::kEncoder;
      const Kind part = i == recurrent || (many_states && Chance(pick, 70))
                            ? Kind::kRecurrent
                            : DrawKind(pick, rare);
      encoder = encoder || part == Kind::kEncoder;
      setup.spec.caches.push_back(DrawPart(pick, part));
      CacheSpec& inner = setup.spec.caches.back();
      inner.placement = setup.spec.placement;
      inner.shift = setup.spec.shift;
      if (many_states && part == Kind::kRecurrent) {
        inner.checkpoint_every = OneOf(pick, {2, 3, 5, 7});
        inner.checkpoints = pick(2, 6);
      }
      if (Chance(pick, 10)) {
        inner.placement = inner.placement == Placement::kScatter
                              ? Placement::kContiguous
                              : Placement::kScatter;
      }
      if (Chance(pick, 10)) {
        inner.shift.kind = OneOf(pick, {ShiftKind::kNone, ShiftKind::kAdd});
      }
    }
    setup.layers = std::max(setup.layers, Size(setup.spec.caches));
  }
  if (Chance(pick, 15)) Widen(pick, setup);
  // The setup becomes one that an encoder supports; in rare cases it does not,
  // and Init refuses it.
  if (encoder && !Chance(pick, 2)) {
    setup.init.max_sequences = 1;
    setup.config.cache_padding = 1;
    if (setup.config.v_layout == VLayout::kTiled) {
      setup.config.v_layout = VLayout::kPlain;
    }
  }
  FitStorage(setup);
  if (cells_max > 0) LimitCells(cells_max, setup);
  return setup;
}

void GoBack(int seq, int offset, std::vector<Op>& ops) {
  Op& drop = ops.emplace_back();
  drop.kind = OpKind::kDrop;
  drop.seq = seq;
  drop.begin = {.from_end = true, .offset = offset};
  drop.open = true;
  ops.push_back(PutOf(seq, 0, 1));
}

Op PutOf(int first, int more, int count) {
  Op op;
  op.segments.push_back({.seq = first, .count = count, .more = more});
  return op;
}

Weights DrawWeights(const Pick& pick) {
  // Weights by OpKind: put, drop, copy, ask, causal, get, reput, misuse,
  // poison, reload.
  Weights weights = {160, 64, 40, 32, 16, 4, 8, 12, 8, 2};
  if (Chance(pick, 50)) return weights;
  for (int& weight : weights) {
    weight = Chance(pick, 30) ? 0 : weight * pick(1, 8);
  }
  At(weights, OpKind::kPut) += 40;
  return weights;
}

Op DrawOp(const Pick& pick, const Setup& setup, const Weights& weights,
          const std::vector<int>& live) {
  int at = pick(0, std::accumulate(weights.begin(), weights.end(), -1));
  std::size_t kind = 0;
  while (at >= weights[kind]) at -= weights[kind++];
  Op op;
  op.kind = static_cast<OpKind>(kind);
  if (op.kind == OpKind::kPut) {
    DrawPut(pick, setup, op);
    return op;
  }
  const int any = setup.init.max_sequences;
  // Mostly a sequence that holds tokens; in rare cases one of many others,
  // since max_sequences does not bound the ids.
  op.seq = !live.empty() && Chance(pick, 90)
               ? At(live, pick(0, Size(live) - 1))
               : pick(0, Chance(pick, 30) ? 40 : any);
  op.dst = pick(0, Chance(pick, 6) ? 40 : any);
  op.begin = DrawPos(pick, setup);
  op.end = DrawPos(pick, setup);
  // A state is removed to the open end only.
  op.open = Chance(pick, HasStates(setup.spec) ? 85 : 40);
  if (op.kind == OpKind::kCausal && Chance(pick, 80)) {
    op.except.push_back(DrawIndex(pick, setup));
  }
  op.misuse = pick(0, MisuseCount() - 1);
  return op;
}

History DrawHistory(const Pick& pick, std::optional<Kind> kind, int ops,
                    int cells_max, bool rarities) {
  if (rarities && Chance(pick, 5)) return DrawLarge(pick, kind, cells_max);
  History history;
  history.setup = DrawSetup(pick, kind, cells_max);
  if (history.setup.legal && Chance(pick, 60)) {
    ModelServer(pick, history).Serve(AsSize(ops));
  } else {
    DrawOps(pick, ops, history);
  }
  if (rarities && Chance(pick, 15)) TakeApart(pick, history);
  AddReturns(pick, history);
  AddPins(pick, cells_max, history);
  return history;
}

Pick SeededPick(std::uint64_t seed, std::uint64_t number) {
  // SplitMix64: small, and the same on every platform (standard distributions
  // are not). Copies of the function share one state.
  const auto state =
      std::make_shared<std::uint64_t>(seed * 0x9E3779B97F4A7C15U + number);
  const auto next = [state] {
    std::uint64_t z = (*state += 0x9E3779B97F4A7C15U);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  };
  *state = next() ^ number * 0xD1342543DE82EF95U;
  return [next](int lo, int hi) {
    const auto span = static_cast<std::uint64_t>(hi - lo) + 1;
    return lo + AsInt((next() >> 32) * span >> 32);
  };
}

History MakeHistory(std::uint64_t seed, std::uint64_t number,
                    std::optional<Kind> kind, int ops, int cells_max,
                    bool rarities) {
  return DrawHistory(SeededPick(seed, number), kind, ops, cells_max, rarities);
}

void AddShifts(History& history, std::size_t first, std::size_t step) {
  for (std::size_t i = first; i < history.ops.size(); i += step) {
    Op move;
    move.kind = OpKind::kShift;
    move.seq = AsInt(i % 2);
    move.begin = {.from_end = true, .offset = -AsInt(i % 4)};
    move.open = true;
    move.delta = AsInt(i % 5) - 2;
    history.ops[i] = move;
  }
}

}  // namespace kvtwin::props
