#include "props/catalog.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "props/cost.h"

namespace kvtwin::props {
namespace {

constexpr std::size_t kMostOps = 4;
constexpr std::array<std::int64_t, kMostOps + 1> kMostSpecial = {0, 5, 9, 12, 16};
// Tries by the number of operations.
constexpr std::array<std::size_t, kMostOps + 1> kTries = {0, 800, 5000, 6000,
                                                          3000};

CacheSpec Windowed(Kind kind, int window, std::optional<int> memory = {}) {
  CacheSpec spec;
  spec.kind = kind;
  spec.window = window;
  spec.memory = memory;
  return spec;
}

CacheSpec Wrapped(std::vector<CacheSpec> caches) {
  CacheSpec spec;
  spec.kind = Kind::kWrapper;
  spec.caches = std::move(caches);
  return spec;
}

std::vector<CacheSpec> SpecsLike(const CacheSpec& model) {
  const CacheSpec causal;
  const CacheSpec windowed = Windowed(Kind::kSwa, 0);
  CacheSpec encoder;
  encoder.kind = Kind::kEncoder;
  if (model.kind == Kind::kWrapper) {
    return {Wrapped({causal, causal}),   Wrapped({causal, windowed}),
            Wrapped({windowed, causal}), Wrapped({causal, encoder}),
            Wrapped({encoder, causal}),  model};
  }
  std::vector<CacheSpec> specs = {causal, windowed, Windowed(Kind::kSwa, 1),
                                  Windowed(Kind::kSwa, 2)};
  if (model.kind == Kind::kSwaMem) {
    for (const auto& [window, memory] : {std::pair(0, 0), {0, 1}, {1, 2}}) {
      specs.push_back(Windowed(Kind::kSwaMem, window, memory));
    }
  }
  if (model.kind == Kind::kEncoder) specs = {encoder};
  if (model.kind == Kind::kChunked) {
    for (const int chunk : {1, 2}) {
      specs.emplace_back().kind = Kind::kChunked;
      specs.back().chunk = chunk;
    }
  }
  specs.push_back(model);
  return specs;
}

// `setup` with another cache and shift function.
Setup WithCache(Setup setup, const CacheSpec& spec, const Shift& shift) {
  setup.spec = spec;
  setup.spec.placement = Placement::kContiguous;
  setup.spec.shift = shift;
  for (CacheSpec& part : setup.spec.caches) {
    part.placement = Placement::kContiguous;
    part.shift = shift;
  }
  return setup;
}

// Plain setups, each with at most one thing that is special about `model`, and
// one with all of them.
std::vector<Setup> LayoutsLike(const Setup& model) {
  std::vector<Setup> layouts(1);
  const auto with = [&](bool is, auto change) {
    if (is) change(layouts.emplace_back());
  };
  const CacheConfig& config = model.config;
  for (const int padding : {2, 3}) {
    with(config.cache_padding > 1,
         [&](Setup& s) { s.config.cache_padding = padding; });
  }
  with(config.mask_batch_padding > 1,
       [&](Setup& s) { s.config.mask_batch_padding = 2; });
  with(config.permuted_v, [&](Setup& s) { s.config.permuted_v = true; });
  with(config.mask_dtype != DType::kF32,
       [&](Setup& s) { s.config.mask_dtype = config.mask_dtype; });
  with(model.init.dtype != DType::kF32,
       [&](Setup& s) { s.init.dtype = model.init.dtype; });
  with(model.strided, [&](Setup& s) { s.strided = true; });
  with(model.layers > 1, [&](Setup& s) { s.layers = 2; });
  if (layouts.size() > 2) {
    layouts.push_back(model);
    layouts.back().legal = false;
  }
  return layouts;
}

Segment SegmentOf(int seq, int count, int delta = 0,
                  Segment::Order order = Segment::Order::kUp) {
  return {.seq = seq, .count = count, .delta = delta, .order = order};
}

class Catalog {
 public:
  Catalog(const History& model, const std::vector<Setup>& setups)
      : below_(CostOf(model)) {
    for (const Setup& setup : setups) AddBase(setup);
    AddChoices(model);
  }

  std::optional<History> Search(
      const std::function<bool(const History&)>& fails) {
    const std::size_t most = std::min(below_.operations, kMostOps);
    for (std::size_t ops = 1; ops <= most; ++ops) {
      std::size_t tries = kTries.at(ops);
      const bool last = ops == below_.operations;
      const std::int64_t limit = std::min<std::int64_t>(kMostSpecial.at(ops), last ? below_.special : 100);
      for (std::int64_t special = 0; special <= limit && tries > 0; ++special) {
        auto level = Level(ops, special);
        if (getenv("KV")) fprintf(stderr, "ops %zu special %ld: %zu, left %zu\n", ops, special, level.size(), tries);
        for (const Draft& draft : level) {
          if (tries-- == 0) break;
          History history = HistoryOf(draft);
          if (last && CostOf(history) >= below_) break;
          if (fails(history)) return history;
        }
        if (tries > kTries.at(ops)) break;
      }
    }
    return std::nullopt;
  }

 private:
  struct Base {
    Setup setup;
    Cost cost;
  };
  struct Choice {
    Op op;
    Cost cost;
    int tokens = 0;
    unsigned reads = 0;   // Sequences, as bits.
    unsigned writes = 0;
  };
  struct Draft {
    std::int64_t numbers = 0;
    const Base* base = nullptr;
    std::array<const Choice*, kMostOps> ops = {};
    std::size_t count = 0;
    int tokens = 0;
    int largest = 0;    // Of the batches but the last operation's.
    int held = 0;       // Tokens before the first drop.
    bool dropped = false;
    unsigned live = 0;  // Sequences that may hold tokens.
  };

  void AddBase(const Setup& setup);
  void AddChoices(const History& model);
  // Whether an operation of that kind may be number `at` of `ops`.
  bool Fits(OpKind kind, std::size_t at, std::size_t ops) const {
    if (at == 0) return kind == OpKind::kPut;
    if (at + 1 == ops) return ops < 3 || last_.contains(kind);
    return kind == OpKind::kPut || middle_.contains(kind);
  }
  void AddPuts(const History& model);
  void AddPut(std::vector<Segment> segments) {
    Op op;
    op.segments = std::move(segments);
    Add(op);
  }
  void AddRanges();
  void Add(const Op& op);

  std::vector<Draft> Level(std::size_t ops, std::int64_t special) const;
  void Extend(Draft& draft, std::size_t ops, std::int64_t special,
              std::vector<Draft>& level) const;
  void Base_(Draft& draft, std::int64_t special,
             std::vector<Draft>& level) const;

  static History HistoryOf(const Draft& draft) {
    History history{.setup = draft.base->setup, .ops = {}};
    for (std::size_t i = 0; i < draft.count; ++i) {
      history.ops.push_back(draft.ops[i]->op);
    }
    return history;
  }

  const Cost below_;
  std::map<std::int64_t, std::vector<Base>> bases_;  // By what is special.
  std::set<std::string> setups_;
  std::vector<Choice> choices_;
  std::set<OpKind> kinds_;
  std::set<OpKind> middle_ = {OpKind::kPut, OpKind::kDrop};
  std::set<OpKind> last_;
};

void Catalog::AddBase(const Setup& setup) {
  for (const int cells : {1, 2, 3, 4, 5, 6, 8}) {
    Setup sized = setup;
    SetCells(cells, sized);
    const bool encoder = setup.spec.kind == Kind::kEncoder;
    if (!encoder && !WhyNotOfCells(sized).empty()) continue;
    if (!setups_.insert(ToText(sized)).second) continue;
    const Cost cost = CostOf({.setup = sized, .ops = {}});
    bases_[cost.special].push_back({sized, cost});
  }
}

void Catalog::Add(const Op& op) {
  Choice choice{.op = op, .cost = CostOf(op)};
  const auto bit = [](int seq) { return 1U << std::min(seq, 31); };
  for (const Segment& segment : op.segments) {
    choice.tokens += segment.count;
    choice.writes |= bit(segment.seq);
  }
  if (op.kind == OpKind::kDrop || op.kind == OpKind::kCopy) {
    choice.reads = bit(op.seq);
  }
  if (op.kind == OpKind::kCopy) choice.writes = bit(op.dst);
  choices_.push_back(std::move(choice));
}

void Catalog::AddPuts(const History& model) {
  constexpr auto kDown = Segment::Order::kDown;
  constexpr auto kSame = Segment::Order::kSame;
  std::vector<Segment> short_ones;
  for (const int seq : {0, 1}) {
    for (const int count : {1, 2, 3, 4}) {
      AddPut({SegmentOf(seq, count)});
      AddPut({SegmentOf(seq, count, 1)});
      AddPut({SegmentOf(seq, count, -1)});
      if (count > 1) AddPut({SegmentOf(seq, count, 0, kDown)});
      if (count > 1) AddPut({SegmentOf(seq, count, 0, kSame)});
      if (count < 4) short_ones.push_back(SegmentOf(seq, count));
    }
  }
  for (const Segment& first : short_ones) {
    for (Segment second : short_ones) {
      AddPut({first, second});
      second.delta = 1;
      AddPut({first, second});
      AddPut({second, first});
      second.delta = 0;
      for (const Segment& third : short_ones) {
        if (std::max({first.count, second.count, third.count}) < 3) {
          AddPut({first, second, third});
        }
      }
    }
  }
  Op op;
  for (const int count : {1, 2, 3}) {
    op.segments = {SegmentOf(0, count)};
    op.reserve = true;
    Add(op);
    op.reserve = false;
    const auto used = [&](auto member) {
      return std::any_of(
          model.ops.begin(), model.ops.end(),
          [&](const Op& one) { return (one.*member) != Op().*member; });
    };
    for (const auto indices : {&Op::images, &Op::except}) {
      if (!used(indices)) continue;
      op.*indices = {0};
      Add(op);
      (op.*indices).clear();
    }
    op.keep_rows = true;
    if (used(&Op::keep_rows)) Add(op);
    op.keep_rows = false;
  }
}

void Catalog::AddRanges() {
  Op op;
  for (const int seq : {0, 1}) {
    op.seq = seq;
    op.kind = OpKind::kDrop;
    for (const int begin : {0, 1, 2}) {
      if (!kinds_.contains(OpKind::kDrop)) break;
      op.begin.offset = begin;
      op.open = true;
      Add(op);
      op.open = false;
      for (op.end.offset = begin; op.end.offset <= 3; ++op.end.offset) {
        if (op.end.offset < begin + 3) Add(op);
      }
    }
    op.begin.offset = 0;
    for (op.end.offset = 0; op.end.offset <= 3; ++op.end.offset) {
      op.kind = OpKind::kAsk;
      if (kinds_.contains(op.kind)) Add(op);
      op.kind = OpKind::kCopy;
      for (op.dst = 0; op.dst <= 1 && kinds_.contains(op.kind); ++op.dst) {
        Add(op);
      }
      op.dst = 0;
    }
  }
}

void Catalog::AddChoices(const History& model) {
  for (const Op& op : model.ops) {
    kinds_.insert(op.kind);
    if (&op != &model.ops.back()) middle_.insert(op.kind);
  }
  last_.insert(model.ops.back().kind);
  kinds_.insert(OpKind::kDrop);
  if (model.setup.legal) {
    kinds_.insert({OpKind::kAsk, OpKind::kGet});
    last_.insert({OpKind::kDrop, OpKind::kAsk, OpKind::kGet});
  }
  AddPuts(model);
  AddRanges();
  for (const OpKind kind : {OpKind::kCausal, OpKind::kGet, OpKind::kReput,
                            OpKind::kPoison, OpKind::kReload}) {
    Op op;
    op.kind = kind;
    if (kinds_.contains(kind)) Add(op);
  }
  for (const Op& op : model.ops) {
    if (op.kind == OpKind::kMisuse) Add(op);
  }
  std::stable_sort(choices_.begin(), choices_.end(),
                   [](const Choice& a, const Choice& b) {
                     return a.cost.special < b.cost.special;
                   });
}

std::vector<Catalog::Draft> Catalog::Level(std::size_t ops,
                                           std::int64_t special) const {
  std::vector<Draft> level;
  Draft draft;
  Extend(draft, ops, special, level);
  std::stable_sort(
      level.begin(), level.end(),
      [](const Draft& a, const Draft& b) { return a.numbers < b.numbers; });
  return level;
}

void Catalog::Extend(Draft& draft, std::size_t ops, std::int64_t special,
                     std::vector<Draft>& level) const {
  if (draft.count == ops) return Base_(draft, special, level);
  const bool last = draft.count + 1 == ops;
  for (const Choice& choice : choices_) {
    if (choice.cost.special > special) break;
    if (ops > 1 && !Fits(choice.op.kind, draft.count, ops)) continue;
    // Nothing comes of a sequence that holds nothing.
    if (!last && (choice.reads & ~draft.live) != 0) continue;
    if (draft.count == 0 && ops > 1 && (choice.writes & 1) == 0) continue;
    Draft longer = draft;
    longer.ops[longer.count++] = &choice;
    longer.numbers += choice.cost.numbers;
    longer.tokens += choice.tokens;
    if (!last) {
      longer.largest = std::max(longer.largest, choice.tokens);
      longer.dropped = longer.dropped || choice.op.kind == OpKind::kDrop;
      if (!longer.dropped) longer.held += choice.tokens;
    }
    longer.live |= choice.writes;
    Extend(longer, ops, special - choice.cost.special, level);
  }
}

void Catalog::Base_(Draft& draft, std::int64_t special,
                    std::vector<Draft>& level) const {
  const auto bases = bases_.find(special);
  if (bases == bases_.end()) return;
  for (const Base& base : bases->second) {
    const InitArgs& init = base.setup.init;
    const int pad = base.setup.config.cache_padding;
    // There is one cell that is never used, at most.
    if (init.capacity >= draft.tokens + 1 + pad) continue;
    if (init.max_batch < draft.largest) continue;
    if (!base.setup.spec.window && base.setup.spec.caches.empty() &&
        init.capacity < draft.held) {
      continue;
    }
    Draft& whole = level.emplace_back(draft);
    whole.base = &base;
    whole.numbers += base.cost.numbers;
  }
}

}  // namespace

std::optional<History> PlainestThatFails(
    const History& model, const std::function<bool(const History&)>& fails) {
  if (model.ops.empty()) return std::nullopt;
  const Setup& setup = model.setup;
  const std::vector<CacheSpec> specs = SpecsLike(setup.spec);
  std::vector<Setup> plain;
  for (const CacheSpec& spec : specs) {
    plain.push_back(WithCache(Setup(), spec, Shift()));
  }
  if (auto found = Catalog(model, plain).Search(fails)) return found;

  std::vector<Shift> shifts(1);
  if (setup.spec.shift.kind != ShiftKind::kNone) {
    shifts.emplace_back().kind = ShiftKind::kIdentity;
    shifts.push_back(setup.spec.shift);
  }
  if (setup.spec.shift.kind > ShiftKind::kAdd) {
    shifts.emplace_back().kind = ShiftKind::kAdd;
  }
  std::vector<Setup> special;
  for (const CacheSpec& spec : specs) {
    for (const Shift& shift : shifts) {
      for (const Setup& layout : LayoutsLike(setup)) {
        special.push_back(WithCache(layout, spec, shift));
      }
    }
  }
  special.erase(special.begin());
  return special.empty() ? std::nullopt : Catalog(model, special).Search(fails);
}

}  // namespace kvtwin::props
