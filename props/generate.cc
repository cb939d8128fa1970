#include "props/generate.h"

#include <algorithm>
#include <initializer_list>

#include "props/misuse.h"

namespace kvtwin::props {
namespace {

template <class T>
T OneOf(const Pick& pick, std::initializer_list<T> values) {
  return values.begin()[pick(0, static_cast<int>(values.size()) - 1)];
}

bool Chance(const Pick& pick, int percent) { return pick(0, 99) < percent; }

CacheSpec DrawPart(const Pick& pick, Kind kind) {
  CacheSpec spec;
  spec.kind = kind;
  if (kind == Kind::kSwa || kind == Kind::kSwaMem) {
    if (!Chance(pick, 5)) spec.window = OneOf(pick, {0, 1, 1, 2, 3, 5});
  }
  if (kind == Kind::kSwaMem && !Chance(pick, 5)) {
    spec.memory = spec.window.value_or(2) + OneOf(pick, {0, 0, 1, 2, 4});
    // Rarely less than the window, which Init refuses.
    if (Chance(pick, 2)) spec.memory = 0;
  }
  if (kind == Kind::kChunked) spec.chunk = OneOf(pick, {1, 2, 3, 4, 7});
  return spec;
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
  // Small caches are full, and wrap around, all the time; a few are larger
  // than the 64 cells of a word.
  const int size = pick(0, 99);
  init.max_sequences = OneOf(pick, {1, 1, 2, 2, 2, 3, 4});
  init.capacity = size < 80   ? pick(1, 8)
                  : size < 96 ? pick(4, 24)
                              : pick(30, 90);
  init.max_batch = Chance(pick, 80) ? pick(1, 6) : pick(1, 20);
  if (size >= 96) init.max_batch = pick(1, 100);
  setup.config.cache_padding = OneOf(pick, {1, 1, 1, 2, 3, 4, 8});
  setup.config.mask_batch_padding = OneOf(pick, {1, 1, 1, 2, 4});
  // Mostly tiny; now and then wider than a vector.
  if (Chance(pick, 95)) {
    setup.rows = {pick(1, 4), pick(1, 2), pick(1, 3)};
  } else {
    setup.rows = {pick(1, 40), pick(1, 3), pick(1, 40)};
  }
  setup.layers = OneOf(pick, {1, 1, 1, 1, 2, 2, 3});
}

int DrawCount(const Pick& pick, const Setup& setup) {
  const int way = pick(0, 9);
  if (way < 5) return pick(1, 3);
  if (way < 7) return pick(1, setup.init.max_batch);
  // Around the boundaries: the batch, the capacity, what is free.
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
  // To the end of the positions that there are.
  if (Chance(pick, 1) && Chance(pick, 20)) segment.delta = 1 << 30;
  if (Chance(pick, 10)) {
    segment.order = OneOf(pick, {Segment::Order::kDown, Segment::Order::kSame});
  }
  return segment;
}

void DrawPut(const Pick& pick, const Setup& setup, Op& op) {
  const int segments = OneOf(pick, {1, 1, 1, 2, 2, 3});
  for (int i = 0; i < segments; ++i) {
    op.segments.push_back(DrawSegment(pick, setup));
  }
  op.reserve = Chance(pick, 5);
  op.keep_rows = Chance(pick, 3);
  if (Chance(pick, 20)) op.images.push_back(pick(0, 7));
  if (Chance(pick, 5)) op.images.push_back(pick(0, 7));
  if (Chance(pick, 15)) op.except.push_back(pick(0, 7));
  if (Chance(pick, 5)) op.except.push_back(pick(0, 7));
}

// Few values: the ends, and next to them.
RelativePos DrawPos(const Pick& pick) {
  if (Chance(pick, 50)) return {false, OneOf(pick, {0, 0, 1, 1, 2, 3, 5})};
  return {true, OneOf(pick, {1, 0, 0, -1, -1, -2, -3, -5})};
}

}  // namespace

Setup DrawSetup(const Pick& pick, std::optional<Kind> kind) {
  Setup setup;
  const Kind drawn =
      kind ? *kind
           : OneOf(pick, {Kind::kCausal, Kind::kCausal, Kind::kSwa,
                          Kind::kSwaMem, Kind::kSwaMem, Kind::kChunked,
                          Kind::kWrapper, Kind::kWrapper, Kind::kEncoder});
  DrawSizes(pick, setup);
  setup.spec = DrawPart(pick, drawn);
  setup.legal = Chance(pick, 35);
  setup.strided = Chance(pick, 15);
  // Up to the largest id that there is.
  if (Chance(pick, 10)) setup.first_id = OneOf(pick, {1000, 0x7FFFFFFF - 40});
  setup.spec.shift = DrawShift(pick);
  setup.spec.placement =
      OneOf(pick, {Placement::kContiguous, Placement::kScatter});
  setup.config.permuted_v = Chance(pick, 40);
  setup.config.mask_dtype =
      OneOf(pick, {DType::kF32, DType::kF32, DType::kF16});
  setup.init.dtype = OneOf(pick, {DType::kF32, DType::kF32, DType::kF16});
  bool encoder = drawn == Kind::kEncoder;
  if (drawn == Kind::kWrapper) {
    const int parts = pick(1, 3);
    for (int i = 0; i < parts; ++i) {
      const Kind part = OneOf(pick, {Kind::kCausal, Kind::kSwa, Kind::kSwaMem,
                                     Kind::kChunked, Kind::kEncoder});
      encoder = encoder || part == Kind::kEncoder;
      setup.spec.caches.push_back(DrawPart(pick, part));
      CacheSpec& inner = setup.spec.caches.back();
      inner.placement = setup.spec.placement;
      inner.shift = setup.spec.shift;
      if (Chance(pick, 10)) {
        inner.placement = inner.placement == Placement::kScatter
                              ? Placement::kContiguous
                              : Placement::kScatter;
      }
      if (Chance(pick, 10)) {
        inner.shift.kind = OneOf(pick, {ShiftKind::kNone, ShiftKind::kAdd});
      }
    }
    setup.layers = std::max(setup.layers, parts);
  }
  // What an encoder takes; rarely not, which Init refuses.
  if (encoder && !Chance(pick, 2)) {
    setup.init.max_sequences = 1;
    setup.config.cache_padding = 1;
  }
  return setup;
}

Weights DrawWeights(const Pick& pick) {
  // By OpKind: put, drop, copy, ask, causal, get, reput, misuse, poison,
  // reload.
  Weights weights = {40, 16, 10, 8, 4, 1, 2, 3, 2, 1};
  if (Chance(pick, 50)) return weights;
  for (int& weight : weights) {
    weight = Chance(pick, 30) ? 0 : weight * pick(1, 8);
  }
  weights[static_cast<std::size_t>(OpKind::kPut)] += 10;
  return weights;
}

Op DrawOp(const Pick& pick, const Setup& setup, const Weights& weights) {
  int total = 0;
  for (const int weight : weights) total += weight;
  int at = pick(0, total - 1);
  std::size_t kind = 0;
  while (at >= weights[kind]) at -= weights[kind++];
  Op op;
  op.kind = static_cast<OpKind>(kind);
  if (op.kind == OpKind::kPut) {
    DrawPut(pick, setup, op);
    return op;
  }
  // Rarely one of many others: max_sequences is no bound on ids.
  const auto sequence = [&](int most) {
    return pick(0, Chance(pick, 6) ? 40 : most);
  };
  op.seq = sequence(setup.init.max_sequences - 1);
  op.dst = sequence(setup.init.max_sequences);
  op.begin = DrawPos(pick);
  op.end = DrawPos(pick);
  op.open = Chance(pick, 40);
  if (op.kind == OpKind::kCausal && Chance(pick, 80)) {
    op.except.push_back(pick(0, 7));
  }
  op.misuse = pick(0, MisuseCount() - 1);
  return op;
}

History DrawHistory(const Pick& pick, std::optional<Kind> kind, int ops) {
  History history;
  history.setup = DrawSetup(pick, kind);
  const Weights weights = DrawWeights(pick);
  if (Chance(pick, 30)) {
    // A fragmented start: full of interleaved sequences, then one goes.
    Op put;
    for (int i = 0; i < 3; ++i) {
      put.segments.push_back({.seq = i, .count = 1});
    }
    const int fills = std::min(40, history.setup.init.capacity);
    for (int i = 0; i < fills; ++i) history.ops.push_back(put);
    Op drop;
    drop.kind = OpKind::kDrop;
    drop.seq = pick(0, 1);
    drop.open = true;
    history.ops.push_back(drop);
  }
  for (int i = 0; i < ops; ++i) {
    history.ops.push_back(DrawOp(pick, history.setup, weights));
    // Two maintenance operations back to back, more often than by chance.
    const OpKind last = history.ops.back().kind;
    if ((last == OpKind::kDrop || last == OpKind::kCopy) && Chance(pick, 30)) {
      history.ops.push_back(
          DrawOp(pick, history.setup, {0, 3, 2, 1, 0, 0, 0, 0, 0, 1}));
    }
  }
  return history;
}

History MakeHistory(std::uint64_t seed, std::uint64_t number,
                    std::optional<Kind> kind, int ops) {
  // SplitMix64: tiny, and the same everywhere (standard distributions are
  // not).
  std::uint64_t state = seed * 0x9E3779B97F4A7C15U + number;
  const auto next = [&state] {
    std::uint64_t z = (state += 0x9E3779B97F4A7C15U);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  };
  state = next() ^ number * 0xD1342543DE82EF95U;
  const Pick pick = [&next](int lo, int hi) {
    const auto span = static_cast<std::uint64_t>(hi - lo) + 1;
    return lo + static_cast<int>((next() >> 32) * span >> 32);
  };
  return DrawHistory(pick, kind, ops);
}

}  // namespace kvtwin::props
