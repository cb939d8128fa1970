#include "props/history/rarities.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/index.h"
#include "props/history/generate.h"
#include "props/history/misuse.h"

namespace kvtwin::props {
namespace {

// Draws a number near a power of two, from 2^least to 2^most.
int NearPower(const Pick& pick, int least, int most) {
  const int power = 1 << pick(least, most);
  return power + pick(-1, 2);
}

// Returns the cache, and those of a wrapper.
std::vector<CacheSpec*> SpecsOf(Setup& setup) {
  std::vector<CacheSpec*> specs = {&setup.spec};
  for (CacheSpec& part : setup.spec.caches) specs.push_back(&part);
  return specs;
}

// Draws histories that are large in one dimension, one function for each
// dimension. The rest of the setup is ordinary.
class LargeHistory {
 public:
  LargeHistory(const Pick& pick, std::optional<Kind> kind, int cells_max)
      : pick_(pick), cells_max_(cells_max) {
    history_.setup = DrawSetup(pick, kind, cells_max);
    Setup& setup = history_.setup;
    setup.legal = false;
    setup.layers = std::min(setup.layers, 2);
    InitArgs& init = setup.init;
    // A history whose Init is refused is useless here.
    for (int* size : {&init.max_sequences, &init.capacity, &init.max_batch}) {
      *size = std::max(*size, 1);
    }
  }

  History Draw() {
    const int which = pick_(0, 99);
    if (which < 14) {
      Owners();
    } else if (which < 26) {
      Layers();
    } else if (which < 34) {
      Paddings();
    } else if (which < 47) {
      Rows();
    } else if (cells_max_ > 0 || which < 53) {
      ReservedBatch();
    } else if (which < 66) {
      Sequences();
    } else if (which < 88) {
      FullBatches();
    } else {
      Columns(/*huge=*/which > 98 && Chance(pick_, 4));
    }
    return std::move(history_);
  }

 private:
  Setup& setup() { return history_.setup; }

  // Gives the cache `cells` cells or more, all for one sequence. In half of the
  // cases, windows have `window` positions, so that few tokens leave them.
  void NeedCells(int cells, int window) {
    InitArgs& init = setup().init;
    init.max_sequences = 1;
    init.capacity = cells;
    for (CacheSpec* spec : SpecsOf(setup())) {
      if (spec->kind == Kind::kRecurrent) {  // It has a cell for each token.
        spec->checkpoint_every = 1;
        spec->checkpoints = cells;
      }
      if (!IsWindowed(spec->kind)) continue;
      // Tokens that leave the window leave their cells, too.
      if (!Chance(pick_, 50)) continue;
      spec->window = window;
      if (spec->kind == Kind::kSwaMem) spec->memory = window;
    }
  }
  // Gives the cache this many sequences of few tokens. A client whose ids are
  // below max_sequences can use all of them.
  void NeedSequences(int sequences) {
    setup().init.max_sequences = sequences;
    setup().init.capacity = pick_(1, 8);
  }
  // An encoder has neither cells nor prefixes: makes it a causal cache.
  void NeedNoEncoder() {
    for (CacheSpec* spec : SpecsOf(setup())) {
      if (spec->kind == Kind::kEncoder) spec->kind = Kind::kCausal;
    }
  }

  void Add(Op op) { history_.ops.push_back(std::move(op)); }
  // Adds operations on the sequences of `live`.
  void AddOps(int count, const std::vector<int>& live) {
    const Weights weights = {120, 48, 40, 24, 40, 8, 8, 8, 8, 6};
    for (int i = 0; i < count; ++i) {
      Op op = DrawOp(pick_, setup(), weights, live);
      for (Segment& segment : op.segments) {
        segment.seq = OneLive(live);
        segment.count = std::min(segment.count, 4);
      }
      if (op.kind == OpKind::kCopy) op.dst = OneLive(live) + pick_(0, 1);
      if (tokens_ >= 32 && Chance(pick_, 40)) {
        op.begin = NearBlock();
        op.end = NearBlock();
      }
      Add(std::move(op));
    }
  }
  // Draws a position next to a boundary of blocks of 16 or 64 tokens.
  RelativePos NearBlock() {
    const int block = tokens_ >= 128 ? OneOf(pick_, {16, 64}) : 16;
    const int boundary = block * pick_(1, tokens_ / block);
    return {.offset = boundary + pick_(-1, 1)};
  }
  int OneLive(const std::vector<int>& live) const {
    return At(live, pick_(0, Size(live) - 1));
  }
  // Returns the first, the last, and the sequences around multiples of 32.
  std::vector<int> Some(int sequences) const {
    std::vector<int> some = {0, 1, sequences - 1};
    for (int i = 31; i < sequences; i += 32) {
      for (const int near : {i, i + 1, i + 2}) {
        if (near < sequences) some.push_back(near);
      }
    }
    return some;
  }

  // Many sequences share the tokens of one sequence.
  void Owners() {
    NeedNoEncoder();
    InitArgs& init = setup().init;
    const int sequences = NearPower(pick_, 6, 8);
    const int tokens = pick_(1, 3);
    init.max_batch = std::max(init.max_batch, tokens);
    if (cells_max_ == 0 && Chance(pick_, 60)) NeedSequences(sequences);
    Add(PutOf(0, 0, tokens));
    Op copy;
    copy.kind = OpKind::kCopy;
    copy.dst = 1;
    copy.more = sequences - 2;
    copy.end.offset = pick_(1, tokens);
    Add(copy);
    AddOps(pick_(4, 14), Some(sequences));
  }

  void Layers() {
    setup().layers = OneOf(pick_, {8, 9, 16, 17, 32, 33, 33, 64, 65, 65});
    setup().rows = {pick_(1, 4), 1, pick_(1, 3)};
    FitStorage(setup());
    Add(PutOf(0, 0, 2));
    AddOps(pick_(3, 8), {0, 1});
  }

  void Paddings() {
    const bool rows = cells_max_ > 0 || Chance(pick_, 60);
    if (rows) {
      setup().config.mask_batch_padding = NearPower(pick_, 5, 8);
    } else {
      setup().config.cache_padding = NearPower(pick_, 5, 8);
    }
    FitStorage(setup());
    Add(PutOf(0, 0, 2));
    AddOps(pick_(4, 12), {0, 1, 2});
  }

  void Rows() {
    RowDims& rows = setup().rows;
    const int elements = NearPower(pick_, 6, Chance(pick_, 10) ? 11 : 9);
    rows.kv_heads = OneOf(pick_, {1, 1, 2, 3, 8});
    rows.k_head_dim = std::max(elements / rows.kv_heads, 1);
    rows.v_head_dim = Chance(pick_, 50) ? rows.k_head_dim : pick_(1, 4);
    if (Chance(pick_, 50)) {  // A part of the head is rotated.
      const int pairs = pick_(1, std::max(rows.k_head_dim / 2, 1));
      for (CacheSpec* spec : SpecsOf(setup()))
        spec->shift.rope.dims = 2 * pairs;
    }
    FitStorage(setup());
    setup().init.max_batch = std::min(setup().init.max_batch, 8);
    Add(PutOf(0, 0, pick_(1, 5)));
    AddOps(pick_(3, 7), {0, 1});
  }

  // The batch may have more tokens than there are cells: a reserved batch takes
  // no cells.
  void ReservedBatch() {
    const int batch = NearPower(pick_, 7, 9);
    const int before = setup().init.max_batch;
    Add(PutOf(0, 1, std::max(1, before / 2)));
    if (!Bounded()) setup().init.max_batch = batch + pick_(0, 2);
    // Two draws in one call would come in an order that the compiler chooses.
    const int count = batch / 2 + pick_(0, 1);
    Op reserve = PutOf(0, /*more=*/pick_(0, 1), count);
    reserve.segments.push_back({.seq = 0, .count = batch});
    reserve.reserve = true;
    for (int i = 0; i < 3; ++i) {
      reserve.except.push_back(pick_(0, batch));
      Add(reserve);
      AddOps(1, {0, 1});
    }
  }
  // Whether the number of cells is limited and grows with max_batch.
  bool Bounded() {
    return cells_max_ > 0 &&
           std::ranges::any_of(SpecsOf(setup()), [](auto* spec) {
             return IsWindowed(spec->kind);
           });
  }

  // Many sequences hold one token each.
  void Sequences() {
    NeedNoEncoder();
    const int sequences = NearPower(pick_, 6, 8);
    if (Chance(pick_, 70)) {
      NeedSequences(sequences);
    } else {
      const int cells = sequences + pick_(0, 40);
      NeedCells(cells, cells);
    }
    setup().init.max_batch = sequences + pick_(0, 3);
    Op put = PutOf(0, sequences - 1, 1);
    if (Chance(pick_, 50)) put.except.push_back(pick_(0, sequences - 1));
    Add(put);
    AddOps(pick_(3, 10), Some(sequences));
  }

  // A batch of many tokens; in half of the cases, there is room for a second
  // one, as for a long prompt.
  void FullBatches() {
    NeedNoEncoder();
    const int batch = NearPower(pick_, 6, Chance(pick_, 40) ? 9 : 8);
    const bool second = Chance(pick_, 50);
    const int cells = (second ? 2 : 1) * batch + pick_(0, 20);
    NeedCells(cells, Chance(pick_, 50) ? cells : pick_(cells / 2, cells));
    setup().init.max_batch = batch;
    Op put = PutOf(0, 0, batch - pick_(0, 9));
    put.segments.push_back({.seq = 1, .count = 9});
    for (int i = pick_(0, 3); i > 0; --i) {
      put.except.push_back(pick_(0, batch - 1));
    }
    Add(put);
    tokens_ = batch;
    AddOps(pick_(2, 6), {0, 0, 1});
    if (!second) return;
    Add(PutOf(0, 0, batch - pick_(0, 9)));
    AddOps(pick_(2, 4), {0, 0, 1});
  }

  void Columns(bool huge) {
    NeedNoEncoder();
    const int columns = huge ? (1 << 16) + pick_(-1, 70)
                             : NearPower(pick_, 8, Chance(pick_, 8) ? 12 : 11);
    const int cells = columns + pick_(0, 8);
    NeedCells(cells, cells);
    setup().rows = {pick_(1, 2), 1, 1};
    FitStorage(setup());
    const int batch = huge ? 8 : 64;
    setup().init.max_batch = batch;
    for (int i = 0; i < (huge ? 2 : columns); i += batch) {
      Op put = PutOf(i / batch % 2, 0, batch);
      put.single = i > 0;  // Comparing this many masks takes long.
      Add(put);
    }
    Op reserve = PutOf(0, 1, 2);
    reserve.reserve = true;
    Add(reserve);
    tokens_ = huge ? batch : columns / 2;  // Of each of two sequences.
    AddOps(pick_(2, 5), {0, 1});
  }

  const Pick& pick_;
  const int cells_max_;
  History history_;
  int tokens_ = 0;  // Of the longest sequence, if it has many.
};

// Writes a pass as single calls.
class Pass {
 public:
  Pass(const Pick& pick, const Setup& setup, std::vector<Op>& ops)
      : pick_(pick),
        setup_(setup),
        types_(Size(setup.spec.caches)),
        ops_(ops) {}

  void Add(Op put) {
    put.single = true;
    for (const Segment& segment : put.segments) {
      sequences_.push_back(segment.seq);
    }
    ops_.push_back(std::move(put));
    for (const int layer : Order()) {
      Interrupt(12);
      GoTo(layer);
      Interrupt(8);
      if (Chance(pick_, 90)) Call(OpKind::kReput);
      if (Chance(pick_, 50)) Call(OpKind::kGet);
    }
    for (int i = pick_(0, 2); i > 0; --i) {
      GoTo(pick_(0, setup_.layers - 1));
      Call(OpKind::kGet);
      Interrupt(10);
    }
  }

 private:
  // Returns most layers, some of them twice, in any order.
  std::vector<int> Order() const {
    std::vector<int> order;
    for (int layer = 0; layer < setup_.layers; ++layer) {
      if (Chance(pick_, 85)) order.push_back(layer);
      if (Chance(pick_, 10)) order.push_back(layer);
    }
    if (Chance(pick_, 30)) {
      std::ranges::reverse(order);
    } else if (Chance(pick_, 60)) {
      for (int i = Size(order) - 1; i > 0; --i) {
        std::swap(At(order, i), At(order, pick_(0, i)));
      }
    }
    return order;
  }

  Op& Call(OpKind kind) {
    Op& op = ops_.emplace_back();
    op.kind = kind;
    op.single = kind == OpKind::kReput || kind == OpKind::kGet ||
                kind == OpKind::kCausal;
    return op;
  }

  void GoTo(int layer) {
    const auto set_layer = [&] { Call(OpKind::kLayer).number = layer; };
    const auto set_type = [&] {
      const int type = Chance(pick_, 90) ? layer : pick_(0, types_ - 1);
      Call(OpKind::kType).number = type % types_;
    };
    if (types_ == 0) return set_layer();
    const bool layer_first = Chance(pick_, 50);
    if (layer_first) set_layer();
    if (Chance(pick_, 90)) set_type();
    if (!layer_first) set_layer();
  }

  // Makes a call that is legal at any time, with this probability.
  void Interrupt(int percent) {
    if (!Chance(pick_, percent)) return;
    const int way = pick_(0, 9);
    if (way < 4) {
      const Weights any = {0, 20, 20, 10, 0, 4, 2, 14, 2, 1};
      ops_.push_back(DrawOp(pick_, setup_, any, sequences_));
    } else if (way < 6) {
      Op& op = Call(OpKind::kCausal);
      if (Chance(pick_, 80)) op.except.push_back(pick_(0, 7));
    } else if (way < 7) {
      Call(OpKind::kCached);
    } else if (way < 9) {
      Call(OpKind::kSnapshot).seq = OneSequence();
    } else {
      Op& op = Call(OpKind::kAdd);
      op.seq = OneSequence();
      op.dst = pick_(0, 4);
    }
  }
  int OneSequence() const {
    return At(sequences_, pick_(0, Size(sequences_) - 1));
  }

  const Pick& pick_;
  const Setup& setup_;
  const int types_;
  std::vector<Op>& ops_;
  std::vector<int> sequences_;
};

// Puts a few tokens, goes back to the first of them, or next to it, and
// continues there. After several pins, it may go back further, to one of them.
void RollBack(const Pick& pick, int seq, int pins, std::vector<Op>& ops) {
  const int tokens = pick(1, 4);
  ops.push_back(PutOf(seq, 0, tokens));
  GoBack(seq, pick(1 - 2 * pins, 1) - tokens, ops);
}

}  // namespace

History DrawLarge(const Pick& pick, std::optional<Kind> kind, int cells_max) {
  return LargeHistory(pick, kind, cells_max).Draw();
}

void AddDefrag(History& history) {
  constexpr int kTokens = 40;  // Of each sequence that the cache keeps.
  constexpr int kSequences = 3;
  constexpr int kEach = 8;           // Tokens of a sequence in a batch.
  constexpr std::size_t kMore = 12;  // Operations after the defrag.
  CacheSpec& whole = history.setup.spec;
  const auto is_encoder = [](const CacheSpec& spec) {
    return spec.kind == Kind::kEncoder;
  };
  bool has_memory = false;
  const auto enlarge = [&](CacheSpec& spec) {
    has_memory = has_memory || spec.memory;
    if (spec.memory) spec.memory = std::max(*spec.memory, +kTokens);
  };
  // An encoder has one sequence. Hybrids have the same windows as wrappers.
  if (whole.kind == Kind::kHybrid ||
      std::ranges::any_of(whole.caches, is_encoder)) {
    return;
  }
  enlarge(whole);
  std::ranges::for_each(whole.caches, enlarge);
  if (!has_memory) return;
  InitArgs& init = history.setup.init;
  init.max_sequences = kSequences;
  init.capacity = std::max(init.capacity, 2 * kTokens);
  init.max_batch = kSequences * kEach;
  Op fill;
  fill.single = true;  // Comparing this many masks takes long.
  for (int i = 0; i < init.max_batch; ++i) {
    fill.segments.push_back(
        {.seq = i % kSequences, .count = 1, .delta = i / kSequences});
  }
  std::vector<Op> ops(kTokens / kEach, fill);
  Op& drop = ops.emplace_back();
  drop.kind = OpKind::kDrop;
  drop.seq = 1;
  drop.open = true;
  ops.push_back(PutOf(0, 0, init.max_batch));  // In the last cells.
  ops.push_back(PutOf(0, 0, 4));               // In no hole.
  history.ops.resize(std::min(history.ops.size(), kMore));
  history.ops.insert(history.ops.begin(), ops.begin(), ops.end());
}

void TakeApart(const Pick& pick, History& history) {
  std::vector<Op> ops;
  for (Op& op : history.ops) {
    if (op.kind == OpKind::kPut && Chance(pick, 50)) {
      Pass(pick, history.setup, ops).Add(std::move(op));
    } else {
      ops.push_back(std::move(op));
    }
  }
  history.ops = std::move(ops);
}

void AddLongBatch(const Pick& pick, History& history) {
  InitArgs& init = history.setup.init;
  const int tokens = NearPower(pick, 6, 7);
  init.max_batch = std::max(init.max_batch, tokens);
  init.capacity = std::max(init.capacity, 0) + 2 * tokens;
  const int seq = pick(0, std::max(init.max_sequences - 1, 0));
  const auto at = IteratorAt(history.ops, pick(0, Size(history.ops)));
  history.ops.insert(at, {PutOf(seq, 0, tokens), PutOf(seq, 0, pick(1, 4))});
}

void AddLongSequence(const Pick& pick, History& history) {
  constexpr std::size_t kMore = 6;  // Operations after it: masks are large.
  Setup& setup = history.setup;
  if (setup.spec.kind == Kind::kEncoder) return;
  const int least = Chance(pick, 15) ? 1 << pick(9, 10) : 1 << pick(7, 8);
  const int tokens = least + pick(1, 9);
  InitArgs& init = setup.init;
  init.max_sequences = std::clamp(init.max_sequences, 1, 3);
  init.capacity = tokens + 20;
  init.max_batch = tokens;
  setup.rows = {pick(1, 4), 1, pick(1, 3)};
  const bool many = tokens < 300 && Chance(pick, 30);
  setup.layers = many ? OneOf(pick, {9, 17, 34}) : pick(1, 3);
  for (CacheSpec* spec : SpecsOf(setup)) {
    if (!Chance(pick, 60)) continue;
    const int window = tokens - pick(1, 9);
    if (spec->kind == Kind::kChunked) spec->chunk = window;
    if (IsWindowed(spec->kind)) spec->window = window;
    if (spec->memory) spec->memory = window;
  }
  FitStorage(setup);
  std::vector<Op> ops = {PutOf(0, 0, tokens)};
  if (Chance(pick, 20)) ops[0].except.push_back(tokens - pick(1, 9));
  if (Chance(pick, 30)) {
    ops.push_back(PutOf(0, 0, 1));
    ops.back().segments[0].delta = OneOf(pick, {130, 300, 2049, 70000});
  }
  Op& drop = ops.emplace_back();
  drop.kind = OpKind::kDrop;
  drop.begin.offset = pick(0, 2);
  const int dropped = OneOf(pick, {1, 1, 3, 64, 129, 300, 2049, 70000});
  drop.end.offset = drop.begin.offset + dropped;
  ops.push_back(PutOf(0, 0, pick(1, 3)));
  history.ops.resize(std::min(history.ops.size(), kMore));
  history.ops.insert(history.ops.begin(), ops.begin(), ops.end());
}

void SpreadIds(const Pick& pick, Setup& setup) {
  setup.first_id = OneOf(pick, {0, 0, 7});
  setup.id_step = 1 << OneOf(pick, {6, 8, 8, 10, 16, 16, 20, 24});
}

void AddReturns(const Pick& pick, History& history) {
  if (!HasWindow(history.setup.spec) || Chance(pick, 70)) return;
  const int most = history.setup.init.max_batch;
  std::vector<Op> ops;
  for (Op& op : history.ops) {
    const bool put = op.kind == OpKind::kPut && !op.segments.empty();
    const int seq = put ? op.segments.front().seq : 0;
    ops.push_back(std::move(op));
    if (!put || !Chance(pick, 20)) continue;
    for (int more = pick(0, 3); more > 0; --more) {
      ops.push_back(PutOf(seq, 0, pick(1, most)));
    }
    GoBack(seq, pick(-2, 1) - most, ops);
  }
  history.ops = std::move(ops);
}

void AddStops(const Pick& pick, History& history) {
  int& layers = history.setup.layers;
  layers = std::max(layers, pick(1, 3));
  for (Op& op : history.ops) {
    const bool whole = op.kind == OpKind::kPut && !op.reserve && !op.single;
    if (whole && Chance(pick, 20)) op.stop = pick(0, layers - 1);
  }
}

void AddWarmUps(const Pick& pick, History& history) {
  const InitArgs& init = history.setup.init;
  std::vector<Op> ops;
  for (Op& op : history.ops) {
    ops.push_back(std::move(op));
    if (!Chance(pick, 20)) continue;
    const int seq = pick(0, std::max(init.max_sequences - 1, 0));
    Op& warm_up =
        ops.emplace_back(PutOf(seq, 0, pick(1, std::max(init.max_batch, 1))));
    warm_up.reserve = true;
    warm_up.segments[0].delta = Chance(pick, 60) ? -init.capacity : -pick(0, 4);
  }
  history.ops = std::move(ops);
}

void AddOverfull(const Pick& pick, History& history) {
  for (Op& op : history.ops) {
    const bool plain =
        op.kind == OpKind::kPut && !op.reserve && !op.single && op.stop < 0;
    if (plain && Chance(pick, 25)) op.overfull = true;
  }
}

void AddPins(const Pick& pick, int cells_max, History& history) {
  std::vector<CacheSpec*> recurrent = SpecsOf(history.setup);
  std::erase_if(recurrent, [](const CacheSpec* spec) {
    return spec->kind != Kind::kRecurrent;
  });
  if (recurrent.empty() || Chance(pick, 50)) return;
  for (CacheSpec* spec : recurrent) {
    spec->pins = OneOf(pick, {0, 1, 1, 2, 2, 3, 3});
  }
  if (cells_max > 0) LimitCells(cells_max, history.setup);
  std::vector<Op> ops;
  int seq = 0;  // The last sequence that got tokens.
  for (Op& op : history.ops) {
    if (op.kind == OpKind::kPut) seq = op.segments.front().seq;
    ops.push_back(std::move(op));
    if (!Chance(pick, 20)) continue;
    Op pin;
    pin.kind = OpKind::kPin;
    pin.seq =
        Chance(pick, 80) ? seq : pick(0, history.setup.init.max_sequences);
    const int pins =
        Chance(pick, 45) ? std::max(recurrent.front()->pins, 1) : 1;
    for (int i = 0; i < pins; ++i) {
      if (i > 0) ops.push_back(PutOf(pin.seq, 0, pick(1, 2)));
      ops.push_back(pin);
    }
    int back = pin.seq;
    if (Chance(pick, 30)) {  // A fork has the pins of its states.
      Op copy;
      copy.kind = OpKind::kCopy;
      copy.seq = pin.seq;
      copy.dst = back = pick(0, history.setup.init.max_sequences);
      copy.end = {.from_end = true};
      ops.push_back(copy);
    }
    for (int i = 0; i < pins && Chance(pick, 50); ++i) {
      RollBack(pick, back, pins, ops);
    }
  }
  history.ops = std::move(ops);
}

}  // namespace kvtwin::props
