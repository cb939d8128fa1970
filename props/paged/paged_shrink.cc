// Shrinks a failing history of a pool to one that is as short and as plain as
// possible.

#include <algorithm>
#include <array>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/guarded_paged.h"
#include "core/index.h"
#include "props/paged/paged_client.h"
#include "props/paged/paged_runner.h"
#include "props/report/finding_filter.h"
#include "props/shrink/shrinker.h"
#include "props/shrink/timed_rerun.h"

namespace kvtwin::props {
namespace {

constexpr int kPlainRunsMax = 3000;
constexpr int kBlocksMax = 1000;  // Limit for blocks of one token each.

constexpr std::array kSizes = {&PagedSpec::block_size,  &PagedSpec::blocks,
                               &PagedSpec::max_seq_len, &PagedSpec::layers,
                               &PagedSpec::kv_heads,    &PagedSpec::k_head_dim,
                               &PagedSpec::v_head_dim};

using Move = std::function<void(PagedHistory&)>;

// Whether the operations from `i` on are an append to a sequence, a commit and
// another append.
bool AreAppends(const PagedHistory& h, std::size_t i) {
  if (i + 2 >= h.ops.size()) return false;
  const int sequence = h.ops[i].a;
  const auto is = [&](std::size_t at, PagedOpKind kind) {
    return h.ops[at].kind == kind && h.ops[at].a == sequence;
  };
  return is(i, PagedOpKind::kAppend) && is(i + 1, PagedOpKind::kCommit) &&
         is(i + 2, PagedOpKind::kAppend);
}

// Makes one append of these. Requires: AreAppends.
void JoinAppends(PagedHistory& h, std::size_t i) {
  const PagedSpec all = Completed(h.spec);
  PagedOp& first = h.ops[i];
  first.b = kLongAppend - 1 + AppendedTokens(first, all) +
            AppendedTokens(h.ops[i + 2], all);
  h.ops.erase(IteratorAt(h.ops, i + 1), IteratorAt(h.ops, i + 3));
}

// Lowers the numbers by which the operations from `begin` on name a list of
// tokens, or a sequence.
void LowerNames(PagedHistory& h, std::size_t begin, bool lists) {
  for (std::size_t j = begin; j < h.ops.size(); ++j) {
    PagedOp& op = h.ops[j];
    if (op.a > 0 && (op.kind == PagedOpKind::kOpen) == lists) --op.a;
  }
}

// Steps that leave operations out.
void AddLeavingOut(const PagedHistory& history, std::vector<Move>& moves) {
  const auto erase = [](PagedHistory& h, std::size_t i) {
    if (i >= h.ops.size()) return false;
    h.ops.erase(IteratorAt(h.ops, i));
    return true;
  };
  for (std::size_t i = 0; i < history.ops.size(); ++i) {
    moves.emplace_back([=](PagedHistory& h) { erase(h, i); });
    // Later operations name a list of tokens, or a sequence, by its number.
    for (const bool lists : {true, false}) {
      moves.emplace_back([=](PagedHistory& h) {
        if (erase(h, i)) LowerNames(h, i, lists);
      });
    }
  }
  for (std::size_t i = 0; i < history.ops.size(); ++i) {
    if (!AreAppends(history, i)) continue;
    for (const bool lowers : {false, true}) {  // There is a list less.
      moves.emplace_back([=](PagedHistory& h) {
        if (!AreAppends(h, i)) return;
        JoinAppends(h, i);
        if (lowers) LowerNames(h, i, /*lists=*/true);
      });
    }
  }
  for (std::size_t i = 0; i < kPagedOpNames.size(); ++i) {
    const auto kind = static_cast<PagedOpKind>(i);
    if (std::ranges::count(history.ops, kind, &PagedOp::kind) < 2) continue;
    moves.emplace_back([kind](PagedHistory& h) {
      std::erase_if(h.ops,
                    [kind](const PagedOp& op) { return op.kind == kind; });
    });
  }
}

// Steps that lower a number; number(history) is a pointer to it, or null.
template <class Number>
void AddLower(const Number& number, int least, std::vector<Move>& moves) {
  const auto add = [&](auto lower) {
    moves.emplace_back([number, least, lower](PagedHistory& h) {
      int* const value = number(h);
      if (value != nullptr) *value = std::max(least, lower(*value));
    });
  };
  for (int value = least; value < least + 3; ++value) {
    add([value](int now) { return std::min(now, value); });
  }
  add([](int now) { return now / 2; });
  // Near a large limit, steps of one would take as many runs as the limit is
  // high; below eight, the parts are zero.
  for (const int part : {8, 64}) {
    add([part](int now) { return now - now / part; });
  }
  add([](int now) { return now - 1; });
}

void AddSpec(std::vector<Move>& moves) {
  for (const int cap : {0, 4}) {
    moves.emplace_back(
        [cap](PagedHistory& h) { h.soft_cap = std::min(h.soft_cap, cap); });
  }
  moves.emplace_back([](PagedHistory& h) { h.sinks = false; });
  const auto add = [&](auto change) {
    moves.emplace_back([change](PagedHistory& h) { change(h.spec); });
  };
  add([](PagedSpec& spec) { spec.v_dtype.reset(); });
  add([](PagedSpec& spec) { spec.dtype = DType::kF32; });
  add([](PagedSpec& spec) { spec.layout = PagedLayout::kTokenMajor; });
  add([](PagedSpec& spec) {
    if (spec.blocks > kBlocksMax / spec.block_size) return;
    spec.blocks *= std::exchange(spec.block_size, 1);
  });
  for (int PagedSpec::*size : kSizes) {
    AddLower([size](PagedHistory& h) { return &(h.spec.*size); }, 1, moves);
  }
}

// Steps that make a group plainer, or leave it out.
void AddGroup(std::size_t group, std::vector<Move>& moves) {
  const auto add = [&](auto change) {
    moves.emplace_back([group, change](PagedHistory& h) {
      if (group < h.spec.groups.size()) change(h.spec.groups[group]);
    });
  };
  moves.emplace_back([group](PagedHistory& h) {
    if (h.spec.groups.size() < 2 || group >= h.spec.groups.size()) return;
    h.spec.groups.erase(IteratorAt(h.spec.groups, group));
  });
  add([](PagedSpec& spec) { spec.v_dtype.reset(); });
  add([](PagedSpec& spec) { spec.dtype = DType::kF32; });
  add([](PagedSpec& spec) { spec.layout = PagedLayout::kTokenMajor; });
  add([](PagedSpec& spec) { spec.window.reset(); });
  add([](PagedSpec& spec) { spec.states = false; });
  for (int PagedSpec::*size : kSizes) {
    AddLower(
        [size, group](PagedHistory& h) {
          const bool exists = group < h.spec.groups.size();
          return exists ? &(h.spec.groups[group].*size) : nullptr;
        },
        1, moves);
  }
  AddLower(
      [group](PagedHistory& h) -> int* {
        const bool exists =
            group < h.spec.groups.size() && h.spec.groups[group].window;
        return exists ? &*h.spec.groups[group].window : nullptr;
      },
      1, moves);
}

// A pool without groups, if the others are left out.
void AddNoGroups(std::vector<Move>& moves) {
  moves.emplace_back([](PagedHistory& h) {
    if (h.spec.groups.size() != 1) return;
    const int most = h.spec.max_seq_len;
    h.spec = PagedSpec(h.spec.groups[0]);
    h.spec.max_seq_len = most;
    h.spec.window.reset();
    h.spec.states = false;
  });
}

void AddOp(std::size_t i, std::vector<Move>& moves) {
  for (int PagedOp::*field : {&PagedOp::a, &PagedOp::b, &PagedOp::c}) {
    const auto number = [i, field](PagedHistory& h) {
      return i < h.ops.size() ? &(h.ops[i].*field) : nullptr;
    };
    AddLower(number, 0, moves);
  }
  // A number is taken modulo the lists or sequences that there are. The own
  // number of a list still means this list when a later step leaves others out.
  for (int item = 3; item < kSeenClientsMost; ++item) {
    moves.emplace_back([i, item](PagedHistory& h) {
      if (i >= h.ops.size()) return;
      const bool lists = h.ops[i].kind == PagedOpKind::kOpen;
      if (lists || item < kOpenClientsMost)
        h.ops[i].a = std::min(h.ops[i].a, item);
    });
  }
  // Without a sequence, every operation opens one.
  moves.emplace_back([i](PagedHistory& h) {
    if (i >= h.ops.size()) return;
    h.ops[i].kind = PagedOpKind::kOpen;
    h.ops[i].c = 0;
  });
  // Together with another move, which leaves out what made it sequence 0.
  moves.emplace_back([i](PagedHistory& h) {
    if (i < h.ops.size() && h.ops[i].a == 0) h.ops[i].a = 1;
  });
  moves.emplace_back([i](PagedHistory& h) {
    if (i >= h.ops.size()) return;
    PagedOpKind& kind = h.ops[i].kind;
    if (kind == PagedOpKind::kCommitUnknown) kind = PagedOpKind::kCommit;
  });
}

// Tries plain histories of the kinds of operations that a failing one has, the
// shortest first, so that the same history is found from every seed.
class PlainHistories {
 public:
  using Try = std::function<bool(const PagedHistory&)>;

  PlainHistories(const PagedHistory& model, const Try& attempt)
      : model_(model), try_(attempt) {
    Add({PagedOpKind::kOpen, 0, 0, 0});
    for (const PagedOp& op : model.ops) Add(op);
    for (const PagedOp& op :
         {PagedOp{PagedOpKind::kAppend, 0, 0, 0}, {PagedOpKind::kCommit}}) {
      Add(op);
    }
  }

  // Stops at the first history that fails; it is at most as long as the model.
  void Search() {
    for (std::size_t size = 1; size <= model_.ops.size(); ++size) {
      for (const auto& [block, blocks, most] :
           {std::array{1, 2, 2}, {2, 3, 5}}) {
        PagedHistory history = model_;
        history.ops = {{PagedOpKind::kOpen, 0, 0, 0}};
        history.spec.block_size = block;
        history.spec.blocks = blocks;
        history.spec.max_seq_len = most;
        if (Extend(size, {}, history) || runs_ > kPlainRunsMax) return;
      }
    }
  }

 private:
  void AddOne(const PagedOp& op) {
    const auto is_same = [&](const PagedOp& other) {
      return other.kind == op.kind && other.a == op.a && other.b == op.b &&
             other.c == op.c;
    };
    if (std::ranges::none_of(plain_, is_same)) plain_.push_back(op);
  }

  // Adds plain operations of the kind of `op`.
  void Add(const PagedOp& op) {
    const PagedOpKind kind = op.kind;
    for (const int a : {0, 1}) {
      switch (kind) {
        case PagedOpKind::kOpen:
          for (const int b : {0, 1, 2}) AddOne({kind, a, b, op.c});
          AddOne({kind, a, 1, 0});
          break;
        case PagedOpKind::kAppend:
          for (const int b : {0, 1}) AddOne({kind, a, b, op.c / 256 * 256});
          AddOne({kind, a, 0, op.c / 256 * 256 + 1});
          break;
        case PagedOpKind::kCommit:
        case PagedOpKind::kCommitUnknown:
          AddOne({kind, a, 1, 0});
          break;
        case PagedOpKind::kFork:
        case PagedOpKind::kTruncate:
          for (const int b : {0, 1}) AddOne({kind, a, b, 0});
          break;
        case PagedOpKind::kFree:
          AddOne({kind, a, 0, 0});
          break;
        case PagedOpKind::kMisuse:
        case PagedOpKind::kMedia:
          AddOne({kind, a, 0, op.c});
          break;
        case PagedOpKind::kLayers:
          AddOne({kind, a, 0, 0});
          break;
      }
    }
  }

  // Counts of the sequences and lists of tokens after a history's operations.
  struct State {
    int sequences = 1;
    int commits = 0;
    bool appended = false;  // Since the last commit.

    // Returns whether the sequence or list that the operation names exists.
    bool Fits(const PagedOp& op) const {
      if (op.kind == PagedOpKind::kOpen) return op.a < std::max(1, commits);
      if (op.a >= sequences) return false;
      return appended || (op.kind != PagedOpKind::kCommit &&
                          op.kind != PagedOpKind::kCommitUnknown);
    }
    State After(PagedOpKind kind) const {
      State after = *this;
      if (kind == PagedOpKind::kOpen || kind == PagedOpKind::kFork) {
        ++after.sequences;
      }
      if (kind == PagedOpKind::kFree) --after.sequences;
      if (kind == PagedOpKind::kAppend) after.appended = true;
      if (kind == PagedOpKind::kCommit || kind == PagedOpKind::kCommitUnknown) {
        ++after.commits;
        after.appended = false;
      }
      return after;
    }
  };

  bool Fails(const PagedHistory& history) {
    return ++runs_ <= kPlainRunsMax && try_(history);
  }

  // Whether a history of `size` operations that begins with `history` fails.
  bool Extend(std::size_t size, const State& state, PagedHistory& history) {
    if (history.ops.size() == size) return Fails(history);
    for (const PagedOp& op : plain_) {
      if (runs_ > kPlainRunsMax) return false;
      if (!state.Fits(op)) continue;
      history.ops.push_back(op);
      if (Extend(size, state.After(op.kind), history)) return true;
      history.ops.pop_back();
    }
    return false;
  }

  const PagedHistory& model_;
  const Try& try_;
  std::vector<PagedOp> plain_;
  int runs_ = 0;
};

// Histories of pools, for Shrinker.
class PoolDomain {
 public:
  using History = PagedHistory;
  static constexpr std::int64_t kMostWork = 400'000'000;
  static constexpr std::int64_t kMostWorkLegal = kMostWork;
  static constexpr std::int64_t kRestartWork = 16'000'000;

  explicit PoolDomain(const Failure& failure)
      : blamed_(failure.party()), best_(SentenceOf(failure)) {}

  static bool IsLegal(const History&) { return true; }
  static bool Allows(const History& history) {
    return CheckPagedSpec(history.spec).ok();
  }
  bool IsSame(const Failure& failure) {
    if (failure.party() != blamed_) return false;
    std::string sentence = SentenceOf(failure);
    if (!only_.empty()) return sentence == only_;
    best_ = std::move(sentence);
    return true;
  }

  static Cost CostOf(const History& history) {
    Cost cost = {.operations = history.ops.size()};
    AddCost(history.spec, cost);
    cost.special += (history.soft_cap > 0 ? 1 : 0) + (history.sinks ? 1 : 0);
    cost.numbers += history.soft_cap;
    for (const PagedSpec& group : history.spec.groups) {
      cost.special += 4;
      AddCost(group, cost);
    }
    for (const PagedOp& op : history.ops) {
      cost.special += op.kind == PagedOpKind::kOpen ? 0 : 1;
      cost.special += op.kind == PagedOpKind::kCommitUnknown ? 1 : 0;
      cost.numbers += std::int64_t{op.a} + op.b + op.c;
    }
    return cost;
  }
  static void AddCost(const PagedSpec& spec, Cost& cost) {
    cost.special += (spec.v_dtype ? 1 : 0) + (spec.dtype != DType::kF32) +
                    (spec.layout != PagedLayout::kTokenMajor) +
                    (spec.block_size != 1) + (spec.window ? 1 : 0) +
                    (spec.states ? 1 : 0);
    for (int PagedSpec::*size : kSizes) cost.numbers += spec.*size;
    cost.numbers += spec.window.value_or(0);
  }
  static Cost CostAtLeast(const History& history) { return CostOf(history); }
  static std::int64_t Work(const History&, std::size_t ops) {
    return 20'000 + 5'000 * static_cast<std::int64_t>(ops);
  }

  static void Prepare(Shrinker<PoolDomain>&) {}
  static std::vector<History> Shortcuts(const History&) { return {}; }
  static std::vector<History> Halved(const History&) { return {}; }

  static std::vector<Move> Moves(const History& history, bool all) {
    std::vector<Move> moves;
    AddLeavingOut(history, moves);
    if (!all) return moves;
    AddSpec(moves);
    AddNoGroups(moves);
    for (std::size_t i = 0; i < history.spec.groups.size(); ++i) {
      AddGroup(i, moves);
    }
    for (std::size_t i = 0; i < history.ops.size(); ++i) AddOp(i, moves);
    return moves;
  }

  // The minimal cases must fail as the best history does: a plain history may
  // well show another bug.
  void TryMinimalCases(Shrinker<PoolDomain>& shrinker) {
    only_ = best_;
    const History model = shrinker.best();
    const PlainHistories::Try attempt = [&](const History& history) {
      return !shrinker.IsOutOfTime() && shrinker.Try(history);
    };
    PlainHistories(model, attempt).Search();
    only_.clear();
  }

 private:
  const Party blamed_;
  std::string best_;  // The sentence of the best history's failure.
  std::string only_;  // If set, the only sentence that counts.
};

}  // namespace

PagedHistory Shrink(const PagedHistory& history, const Subject& subject,
                    const RefusesPaged& refuses) {
  const Shrinker<PoolDomain>::Run run = TimedRerun(subject, refuses);
  const std::optional<Failure> failure = run(history);
  if (!failure) return history;
  PoolDomain domain(*failure);
  return Shrinker(domain, history, *failure, run).Shrink();
}

}  // namespace kvtwin::props
