#include "props/shrink/minimal_cases.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "core/index.h"
#include "props/shrink/cost.h"

namespace kvtwin::props {
namespace {

constexpr std::size_t kMostOps = 4;
constexpr unsigned kKinds = static_cast<unsigned>(OpKind::kFind) + 1;
// How much a history may add to `special` of the plainest cache, by the number
// of operations.
constexpr std::array<std::int64_t, kMostOps + 1> kMostSpecial = {0, 5, 10, 12,
                                                                 16};
// The number of tries, by the number of operations. In the museum, nearly all
// bugs that the catalog finds are found within these tries.
using Tries = std::array<std::size_t, kMostOps + 1>;
constexpr Tries kOnlyPlain = {0, 600, 7000, 5500, 1000};
constexpr Tries kOnlyPlainOfLegal = {0, 600, 7000, 28000, 1000};
constexpr Tries kPlainFirst = {0, 500, 2400, 1400, 300};
constexpr Tries kSpecial = {0, 250, 5600, 4600, 4400};
constexpr Tries kSpecialOfLegal = {0, 250, 5600, 22000, 2000};

CacheSpec Windowed(Kind kind, int window, std::optional<int> memory = {}) {
  CacheSpec spec;
  spec.kind = kind;
  spec.window = window;
  spec.memory = memory;
  return spec;
}

CacheSpec WrapperSpec(std::vector<CacheSpec> caches,
                      Kind kind = Kind::kWrapper) {
  CacheSpec spec;
  spec.kind = kind;
  spec.caches = std::move(caches);
  return spec;
}

CacheSpec Recurrent(int every, int checkpoints) {
  CacheSpec spec;
  spec.kind = Kind::kRecurrent;
  spec.checkpoint_every = every;
  spec.checkpoints = checkpoints;
  return spec;
}

// Returns plain caches, and the model's cache.
std::vector<CacheSpec> SpecsLike(const CacheSpec& model) {
  const CacheSpec causal;
  const CacheSpec windowed = Windowed(Kind::kSwa, 0);
  CacheSpec encoder;
  encoder.kind = Kind::kEncoder;
  if (model.kind == Kind::kWrapper) {
    return {WrapperSpec({causal, causal}),
            WrapperSpec({causal, windowed}),
            WrapperSpec({windowed, causal}),
            WrapperSpec({causal, encoder}),
            WrapperSpec({encoder, causal}),
            WrapperSpec({causal}),
            model};
  }
  if (model.kind == Kind::kHybrid) {
    return {WrapperSpec({causal, Recurrent(0, 0)}, Kind::kHybrid),
            WrapperSpec({causal, Recurrent(2, 1)}, Kind::kHybrid),
            WrapperSpec({Recurrent(2, 1)}, Kind::kHybrid), model};
  }
  if (model.kind == Kind::kRecurrent) {
    return {Recurrent(0, 0), Recurrent(1, 1), Recurrent(2, 1), Recurrent(2, 2),
            model};
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

// Returns `setup` with another cache and shift function.
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

// Returns a setup with what is special about `model`, and similar setups.
std::vector<Setup> LayoutsLike(const Setup& model) {
  std::vector<Setup> layouts(1, model);
  if (model.config.cache_padding == 1) return layouts;
  for (const int padding : {2, 3}) {
    layouts.push_back(layouts[0]);
    layouts.back().config.cache_padding = padding;
  }
  return layouts;
}

Segment SegmentOf(int seq, int count, int delta = 0,
                  Segment::Order order = Segment::Order::kUp) {
  return {.seq = seq, .count = count, .delta = delta, .order = order};
}

// Whether the operation is a single call, a get, or a pass of one or two
// tokens.
bool IsCallOrPass(const Op& op) {
  if (op.kind != OpKind::kPut) return IsCall(op) || op.kind == OpKind::kGet;
  const Segment& first = op.segments.front();
  return op.segments.size() == 1 && first.count < 3 && first.delta == 0 &&
         first.order == Segment::Order::kUp;
}

// All short histories on some caches, in the order of their cost. Histories
// that are unlikely to show a failure are left out.
class Catalog {
 public:
  Catalog(const History& model, const std::vector<Setup>& setups,
          const Tries& tries, const Bounds& bounds)
      : below_(CostOf(model)),
        below_text_(ToText(model)),
        tries_(tries),
        bounds_(bounds),
        legal_(model.setup.legal),
        calls_(std::ranges::any_of(model.ops, IsCall)) {
    for (const Setup& setup : setups) AddBase(setup);
    AddKinds(model);
    AddChoices(model);
  }

  std::optional<History> Search(
      const std::function<bool(const History&)>& fails) {
    if (bases_.empty()) return std::nullopt;
    const std::size_t most = std::min(below_.operations, kMostOps);
    for (std::size_t ops = 1; ops <= most; ++ops) {
      std::size_t tries = tries_.at(ops);
      const bool last = ops == below_.operations;
      std::int64_t end = bases_.begin()->first + kMostSpecial.at(ops);
      if (last) end = std::min(end, below_.special);
      for (std::int64_t special = 0; special <= end; ++special) {
        for (const Draft& draft : Level(ops, special, tries)) {
          if (tries == 0) break;
          --tries;
          const bool least = last && special == below_.special;
          if (least && draft.numbers > below_.numbers) return std::nullopt;
          History history = HistoryOf(draft);
          if (least && draft.numbers == below_.numbers &&
              ToText(history) >= below_text_) {
            continue;
          }
          if (fails(history)) return history;
        }
      }
    }
    return std::nullopt;
  }

 private:
  // The parts that histories are made of: setups and operations.
  struct Base {
    Setup setup;
    Cost cost;
    std::string text;
  };
  struct Choice {
    Op op;
    Cost cost;
    std::string text;
    int tokens = 0;
    unsigned reads = 0;  // The sequences, as bits.
    unsigned writes = 0;
    bool first_only = false;
  };
  using Kinds = std::vector<OpKind>;
  // Returns the number of a row of kinds with one more kind at its end.
  static unsigned WithKind(unsigned row, OpKind kind) {
    return row * (kKinds + 1) + static_cast<unsigned>(kind) + 1;
  }
  // A history, or its first operations.
  struct Draft {
    std::int64_t numbers = 0;
    const Base* base = nullptr;
    std::array<const Choice*, kMostOps> ops = {};
    std::size_t count = 0;
    int tokens = 0;
    int largest = 0;  // The largest batch before the last operation.
    int held = 0;     // Tokens before the first drop and the last operation.
    bool dropped = false;
    unsigned live = 0;  // Sequences that may hold tokens.
    // For legal clients: the position after the last one that each sequence may
    // hold, and the largest of these so far.
    std::array<int, 2> ends = {};
    int longest = 0;
    bool names_1 = false;  // An operation names sequence 1.
    unsigned row = 0;      // The kinds of the operations, as a number.
  };
  struct Request {
    std::size_t ops;
    std::size_t visits;  // Steps left to the search: a level may be huge.
    std::vector<Draft> drafts;
  };

  void AddBase(const Setup& setup);
  void AddSized(const Setup& sized);
  void AddKinds(const History& model);
  void AddSubsequences(const Kinds& all);
  void AddChoices(const History& model);
  void AddPuts(const History& model);
  void AddMarkedPuts(const History& model);
  void AddPut(std::vector<Segment> segments, bool first_only = false) {
    Op op;
    op.segments = std::move(segments);
    Add(op, first_only);
  }
  void AddRanges();
  void AddCalls();
  void Add(const Op& op, bool first_only = false);

  // Returns the drafts of this cost, sorted. `tries` limits the search for
  // them.
  std::vector<Draft> Level(std::size_t ops, std::int64_t special,
                           std::size_t tries) const;
  void Extend(const Draft& draft, std::int64_t special, Request& request) const;
  void PutOnBases(const Draft& draft, std::int64_t special,
                  Request& request) const;
  static bool ComesBefore(const Draft& a, const Draft& b);
  std::array<bool, kKinds> KindsAfter(const Draft& draft,
                                      std::size_t ops) const;
  bool MayFollow(const Draft& draft, const Choice& next, std::size_t ops) const;
  bool IsWorthIt(const Draft& draft, const Op& op, std::size_t ops) const;
  static bool SameAsAnother(const Draft& draft, const Setup& setup);
  static bool AreCalls(const Draft& draft, const Op& next);
  static void FollowEnds(const Op& op, Draft& draft);
  Draft Longer(const Draft& draft, const Choice& next, std::size_t ops) const;

  static History HistoryOf(const Draft& draft) {
    History history{.setup = draft.base->setup, .ops = {}};
    for (std::size_t i = 0; i < draft.count; ++i) {
      history.ops.push_back(draft.ops[i]->op);
    }
    return history;
  }

  const Cost below_;
  const std::string below_text_;
  const Tries& tries_;
  const Bounds& bounds_;
  const bool legal_;  // All clients are legal.
  const bool calls_;  // The model has single calls.
  std::map<std::int64_t, std::vector<Base>> bases_;  // By Cost::special.
  std::set<std::string> setups_;
  std::vector<Choice> choices_;
  std::set<OpKind> kinds_;
  // The rows of kinds, and the beginnings of rows, that histories of more than
  // two operations may have, by the number of operations.
  std::array<std::set<unsigned>, kMostOps + 1> rows_;
};

void Catalog::AddBase(const Setup& setup) {
  for (const int cells : {1, 2, 3, 4, 5, 6, 8}) {
    Setup sized = setup;
    if (legal_) {  // A legal client uses at most max_sequences sequences.
      sized.init.capacity = cells;
      AddSized(sized);
    }
    SetCells(cells, sized);
    const bool encoder = setup.spec.kind == Kind::kEncoder;
    if (encoder || WhyNotOfCells(sized).empty()) AddSized(sized);
  }
}

void Catalog::AddSized(const Setup& sized) {
  if (!bounds_.Allow(sized) || !setups_.insert(ToText(sized)).second) return;
  const Cost cost = CostOf({.setup = sized, .ops = {}});
  bases_[cost.special].push_back({sized, cost, ToText(sized)});
}

void Catalog::Add(const Op& op, bool first_only) {
  if (!bounds_.Allow(op, legal_)) return;
  Choice choice{.op = op,
                .cost = CostOf(op),
                .text = ToText(op),
                .first_only = first_only};
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
      AddPut({first, second}, /*first_only=*/true);
      AddPut({second, first}, /*first_only=*/true);
      second.delta = 0;
      for (const Segment& third : short_ones) {
        if (std::max({first.count, second.count, third.count}) < 3) {
          AddPut({first, second, third}, /*first_only=*/true);
        }
      }
    }
  }
  AddMarkedPuts(model);
}

// Adds batches that only reserve, and, if the model has such batches, batches
// with images or exceptions, or without new rows.
void Catalog::AddMarkedPuts(const History& model) {
  const auto used = [&](auto member) {
    return std::any_of(model.ops.begin(), model.ops.end(), [&](const Op& op) {
      return (op.*member) != Op().*member;
    });
  };
  for (const int count : {1, 2, 3}) {
    Op plain;
    plain.segments = {SegmentOf(0, count)};
    Op op = plain;
    op.reserve = true;
    Add(op);
    for (const auto indices : {&Op::images, &Op::except}) {
      op = plain;
      op.*indices = {0};
      if (used(indices)) Add(op);
    }
    op = plain;
    op.keep_rows = true;
    if (used(&Op::keep_rows)) Add(op);
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

// Adds the rows of kinds that remain of the model's if some kinds are left out.
// In a second version of each row, drops replace the batches in the middle,
// because a drop removes tokens just as an eviction does.
void Catalog::AddSubsequences(const Kinds& all) {
  constexpr std::size_t kMostKinds = 8;
  const Kinds kinds(
      all.end() - static_cast<std::ptrdiff_t>(std::min(all.size(), kMostKinds)),
      all.end());
  const std::size_t before_last = kinds.size() - 1;
  for (unsigned chosen = 0; chosen < 1U << before_last; ++chosen) {
    Kinds row = {OpKind::kPut};
    for (std::size_t i = 0; i < before_last; ++i) {
      if ((chosen >> i & 1) != 0) row.push_back(kinds[i]);
    }
    row.push_back(kinds.back());
    if (row.size() > kMostOps) continue;
    auto& rows = rows_.at(row.size());
    for (const bool drops : {false, true}) {
      for (std::size_t i = 1; i + 1 < row.size() && drops; ++i) {
        if (row[i] == OpKind::kPut) row[i] = OpKind::kDrop;
      }
      unsigned number = 0;
      for (const OpKind kind : row) {
        number = WithKind(number, kind);
        rows.insert(number);
      }
    }
  }
}

void Catalog::AddKinds(const History& model) {
  Kinds kinds;
  for (const Op& op : model.ops) kinds.push_back(op.kind);
  AddSubsequences(kinds);
  kinds_.insert(kinds.begin(), kinds.end());
  kinds_.insert({OpKind::kDrop, OpKind::kGet, OpKind::kReput, OpKind::kReload});
  if (legal_) kinds_.insert({OpKind::kCopy, OpKind::kAsk});
}

void Catalog::AddCalls() {
  const auto add = [&](OpKind kind, bool single, int number = 0) {
    Op op;
    op.kind = kind;
    op.single = single;
    op.number = number;
    if (kind == OpKind::kPut) op.segments = {SegmentOf(0, number)};
    if (kind == OpKind::kCausal) op.except = {0};
    if (kind == OpKind::kAdd) op.dst = 1;
    Add(op);
  };
  for (const int number : {0, 1}) {
    add(OpKind::kPut, true, number + 1);
    add(OpKind::kLayer, false, number);
    add(OpKind::kType, false, number);
  }
  for (const OpKind kind : {OpKind::kGet, OpKind::kReput, OpKind::kCausal}) {
    add(kind, true);
  }
  for (const OpKind kind : {OpKind::kCached, OpKind::kSnapshot, OpKind::kAdd}) {
    add(kind, false);
  }
}

void Catalog::AddChoices(const History& model) {
  AddPuts(model);
  AddRanges();
  if (calls_) AddCalls();
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
                                           std::int64_t special,
                                           std::size_t tries) const {
  Request request{.ops = ops, .visits = 30 * tries, .drafts = {}};
  Extend(Draft(), special, request);
  std::ranges::sort(request.drafts, ComesBefore);
  return std::move(request.drafts);
}

// Orders drafts by cost, then by text.
bool Catalog::ComesBefore(const Draft& a, const Draft& b) {
  if (a.numbers != b.numbers) return a.numbers < b.numbers;
  if (a.base != b.base) return a.base->text < b.base->text;
  for (std::size_t i = 0; i < a.count; ++i) {
    if (a.ops[i] != b.ops[i]) return a.ops[i]->text < b.ops[i]->text;
  }
  return false;
}

// Returns, by OpKind, whether an operation of this kind may be next.
std::array<bool, kKinds> Catalog::KindsAfter(const Draft& draft,
                                             std::size_t ops) const {
  std::array<bool, kKinds> kinds = {};
  for (std::size_t kind = 0; kind < kinds.size(); ++kind) {
    const auto one = static_cast<OpKind>(kind);
    const bool put = one == OpKind::kPut;
    const bool last = draft.count + 1 == ops;
    const bool moves =
        one == OpKind::kDrop || one == (last ? OpKind::kAsk : OpKind::kCopy);
    // Legal clients make few different histories of three operations.
    const bool all =
        ops == 2 || (ops == 3 && (calls_ || (legal_ && (put || moves))));
    kinds.at(kind) = ops == 1 || (draft.count == 0 ? put : all) ||
                     rows_.at(ops).contains(WithKind(draft.row, one));
  }
  return kinds;
}

// Whether an operation of a legal client adds something: the sequences of a
// batch come in order, a range holds positions, and an operation between two
// others changes the cache.
bool Catalog::IsWorthIt(const Draft& draft, const Op& op,
                        std::size_t ops) const {
  const bool last = draft.count + 1 == ops;
  const auto end_of = [&](int seq) { return draft.ends.at(AsSize(seq)); };
  switch (op.kind) {
    case OpKind::kPut:
      return std::ranges::is_sorted(op.segments, {}, &Segment::seq);
    case OpKind::kDrop: {
      const int end = op.open ? end_of(op.seq) : op.end.offset;
      // A last drop to the open end is never refused, and nothing is read after
      // it.
      const bool mute = last && op.open &&
                        !rows_.at(ops).contains(WithKind(draft.row, op.kind));
      return !mute && end <= end_of(op.seq) && (last || op.begin.offset < end);
    }
    case OpKind::kCopy:
      return op.end.offset <= end_of(op.seq) &&
             (op.end.offset > 0 || end_of(op.dst) > 0);
    case OpKind::kAsk:
      return op.end.offset <= end_of(op.seq);
    default:
      return true;
  }
}

void Catalog::FollowEnds(const Op& op, Draft& draft) {
  const auto end_of = [&](int seq) -> int& {
    return draft.ends.at(AsSize(seq));
  };
  for (const Segment& segment : op.segments) {
    end_of(segment.seq) += segment.count;
  }
  if (op.kind == OpKind::kDrop && op.begin.offset < end_of(op.seq)) {
    int& end = end_of(op.seq);
    end = op.open ? op.begin.offset
                  : end - std::min(op.end.offset, end) + op.begin.offset;
  }
  if (op.kind == OpKind::kCopy) {
    end_of(op.dst) = std::min(op.end.offset, end_of(op.seq));
  }
  draft.longest = std::max({draft.longest, draft.ends[0], draft.ends[1]});
}

// Whether all operations are single calls or short passes, and, of three or
// more operations, at least one is a call.
bool Catalog::AreCalls(const Draft& draft, const Op& next) {
  const auto each = std::span(draft.ops).first(draft.count);
  const auto op_of = [](const Choice* one) { return one->op; };
  return IsCallOrPass(next) && std::ranges::all_of(each, IsCallOrPass, op_of) &&
         (draft.count < 2 || IsCall(next) ||
          std::ranges::any_of(each, IsCall, op_of));
}

bool Catalog::MayFollow(const Draft& draft, const Choice& next,
                        std::size_t ops) const {
  if (legal_ && ops > 2 && !IsWorthIt(draft, next.op, ops)) return false;
  // The first of several operations writes sequence 0.
  if (draft.count == 0) return ops == 1 || (next.writes & 1) != 0;
  if (next.first_only) return false;
  if (calls_ && ops == 3) return AreCalls(draft, next.op);
  // An operation on an empty sequence shows little.
  return ops < 3 || (next.reads & ~draft.live) == 0;
}

Catalog::Draft Catalog::Longer(const Draft& draft, const Choice& next,
                               std::size_t ops) const {
  Draft longer = draft;
  longer.ops[longer.count++] = &next;
  longer.numbers += next.cost.numbers;
  longer.tokens += next.tokens;
  longer.names_1 = longer.names_1 || next.op.seq == 1 || (next.writes & 2) != 0;
  const bool clears = next.op.open && next.op.begin == RelativePos();
  if (clears) longer.live &= ~next.reads;
  longer.live |= next.writes;
  if (legal_) FollowEnds(next.op, longer);
  longer.row = WithKind(draft.row, next.op.kind);
  if (longer.count < ops) {
    longer.largest = std::max(longer.largest, next.tokens);
    longer.dropped = longer.dropped || next.op.kind == OpKind::kDrop;
    if (!longer.dropped) longer.held += next.tokens;
  }
  return longer;
}

void Catalog::Extend(const Draft& draft, std::int64_t special,
                     Request& request) const {
  if (draft.count == request.ops) return PutOnBases(draft, special, request);
  // The least `special` of the remaining operations and the cache.
  const auto after = static_cast<std::int64_t>(request.ops - draft.count - 1);
  const std::int64_t least =
      after * choices_.front().cost.special + bases_.begin()->first;
  const std::array<bool, kKinds> kinds = KindsAfter(draft, request.ops);
  for (const Choice& choice : choices_) {
    const std::int64_t left = special - choice.cost.special;
    if (left < least || request.visits == 0) break;
    if (!kinds.at(AsSize(choice.op.kind))) continue;
    if (!MayFollow(draft, choice, request.ops)) continue;
    --request.visits;
    Extend(Longer(draft, choice, request.ops), left, request);
  }
}

// Whether a legal client does the same in a plainer history. With one sequence,
// 1 is another name for 0; batches are cut to the room that is left; and if
// nothing is evicted, a second sequence that is never named is idle.
bool Catalog::SameAsAnother(const Draft& draft, const Setup& setup) {
  const InitArgs& init = setup.init;
  if (init.max_sequences == 1 && draft.names_1) return true;
  // If nothing is evicted, every position can be resumed.
  const bool asks = draft.ops[draft.count - 1]->op.kind == OpKind::kAsk;
  if (asks && draft.count > 2 && !setup.spec.window) return true;
  const bool idle = init.max_sequences > 1 && !draft.names_1;
  if (idle && draft.count > 2 && !setup.spec.window) return true;
  for (std::size_t i = 0; i < draft.count; ++i) {
    for (const Segment& segment : draft.ops[i]->op.segments) {
      if (segment.count > init.capacity) return true;
    }
    if (draft.ops[i]->tokens > init.max_batch) return true;
  }
  return false;
}

void Catalog::PutOnBases(const Draft& draft, std::int64_t special,
                         Request& request) const {
  const auto bases = bases_.find(special);
  if (bases == bases_.end()) return;
  for (const Base& base : bases->second) {
    const Setup& setup = base.setup;
    const InitArgs& init = setup.init;
    // At most one cell, or one padding of cells, stays unused.
    const int tokens = legal_ ? draft.longest : draft.tokens;
    if (init.capacity > tokens + setup.config.cache_padding) continue;
    if (legal_ && SameAsAnother(draft, setup)) continue;
    // A history is useless if it is refused before its last operation.
    if (init.max_batch < draft.largest) continue;
    const bool keeps =
        !legal_ && !setup.spec.window && setup.spec.caches.empty();
    if (keeps && init.capacity < draft.held) continue;
    Draft& whole = request.drafts.emplace_back(draft);
    whole.base = &base;
    whole.numbers += base.cost.numbers;
  }
}

}  // namespace

std::optional<History> PlainestThatFails(
    const History& model, const std::function<bool(const History&)>& fails,
    const Bounds& bounds) {
  if (model.ops.empty()) return std::nullopt;
  const Setup& setup = model.setup;
  Setup plainest;
  plainest.legal = setup.legal;
  std::vector<Setup> plain;
  std::vector<Setup> special;
  for (const CacheSpec& spec : SpecsLike(setup.spec)) {
    plain.push_back(WithCache(plainest, spec, Shift()));
    for (const Setup& layout : LayoutsLike(setup)) {
      special.push_back(WithCache(layout, spec, setup.spec.shift));
    }
  }
  const std::int64_t least =
      CostWithoutSizes({.setup = plain.front(), .ops = {}}).special;
  const bool is_plain =
      CostWithoutSizes({.setup = special.front(), .ops = {}}).special == least;
  // Most special features of the model are needed for the failure.
  const Tries& only_plain = setup.legal ? kOnlyPlainOfLegal : kOnlyPlain;
  auto found =
      Catalog(model, plain, is_plain ? only_plain : kPlainFirst, bounds)
          .Search(fails);
  if (found || is_plain) return found;
  return Catalog(model, special, setup.legal ? kSpecialOfLegal : kSpecial,
                 bounds)
      .Search(fails);
}

}  // namespace kvtwin::props
