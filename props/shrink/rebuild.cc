#include "props/shrink/rebuild.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "core/index.h"
#include "props/compare/runner.h"
#include "props/compare/step.h"

namespace kvtwin::props {
namespace {

// Returns the next number; the largest number stays.
int After(std::int64_t number) {
  return AsInt(std::min<std::int64_t>(number + 1, kOpenEnd));
}

// Adds a token to the segment if its position continues the segment. Returns
// whether it does.
bool Extend(Segment& segment, int seq, std::int64_t position) {
  using Order = Segment::Order;
  if (segment.seq != seq) return false;
  const auto is = [&](Order order, std::int64_t next) {
    if (segment.count > 1 && segment.order != order) return false;
    if (position != next) return false;
    segment.order = order;
    return true;
  };
  const std::int64_t delta = segment.delta;
  if (is(Order::kDown, delta - 1)) {
    --segment.delta;
  } else if (!is(Order::kUp, delta + segment.count) &&
             !is(Order::kSame, delta)) {
    return false;
  }
  ++segment.count;
  return true;
}

class Builder {
 public:
  Builder(const Setup& setup, int unused) : setup_(setup), unused_(unused) {}

  void Add(const Held& held) {
    while (next_ < held.cell) Token(unused_, next_ - first_free_);
    AddAnywhere(held);
    first_free_ = next_;
  }

  // Adds the token in the next cell, not in its own. Its sequence continues at
  // position `after`.
  void AddAnywhere(const Held& held, std::int64_t after = 0) {
    const int seq = setup_.NameOf(held.sequences.front());
    Token(seq, AsInt(held.position - after));
    for (const int id : held.sequences) {
      const int name = setup_.NameOf(id);
      if (name == seq) continue;
      int& end = copies_[{seq, name}];
      end = std::max(end, After(held.position));
    }
  }

  std::vector<Op> Ops() const {
    Op put;
    put.segments = segments_;
    std::vector<Op> ops = {put};
    for (const auto& [pair, end] : copies_) {
      Op& copy = ops.emplace_back();
      copy.kind = OpKind::kCopy;
      copy.seq = pair.first;
      copy.dst = pair.second;
      copy.end.offset = end;
    }
    const bool holes = std::any_of(
        segments_.begin(), segments_.end(),
        [&](const Segment& segment) { return segment.seq == unused_; });
    if (holes) {
      Op& drop = ops.emplace_back();
      drop.kind = OpKind::kDrop;
      drop.seq = unused_;
      drop.open = true;
    }
    return ops;
  }
  int tokens() const { return next_; }

 private:
  void Token(int seq, int position) {
    ++next_;
    if (!segments_.empty() && Extend(segments_.back(), seq, position)) return;
    segments_.push_back({.seq = seq, .count = 1, .delta = position});
  }

  const Setup& setup_;
  int unused_;
  int next_ = 0;        // The first cell that is not filled yet.
  int first_free_ = 0;  // The cell after the last token.
  std::vector<Segment> segments_;
  std::map<std::pair<int, int>, int> copies_;
};

// Returns one batch that fills the cells as they are, and copies.
std::vector<Op> InTheirCells(const std::vector<Held>& cells, Builder builder) {
  for (const Held& held : cells) builder.Add(held);
  return builder.Ops();
}

// For a state in which these copies would overwrite other tokens of a sequence:
// puts the shared tokens, copies them, and then puts the other tokens.
std::vector<Op> SharedFirst(const std::vector<Held>& cells,
                            const Builder& builder) {
  Builder shared = builder;
  Builder own = builder;
  std::map<int, std::int64_t> ends;
  for (const Held& held : cells) {
    if (held.sequences.size() == 1) continue;
    shared.AddAnywhere(held);
    for (const int id : held.sequences) {
      ends[id] = std::max(ends[id], std::int64_t{held.position} + 1);
    }
  }
  for (const Held& held : cells) {
    if (held.sequences.size() > 1) continue;
    own.AddAnywhere(held, ends[held.sequences.front()]);
  }
  std::vector<Op> ops = shared.Ops();
  if (own.tokens() > 0) ops.push_back(own.Ops().front());
  return ops;
}

// Whether a sequence that gets shared tokens by a copy has other tokens, too.
bool CopiesHideTokens(const std::vector<Held>& cells) {
  std::set<int> copies;
  for (const Held& held : cells) {
    const auto& all = held.sequences;
    if (!all.empty()) copies.insert(all.begin() + 1, all.end());
  }
  return std::any_of(cells.begin(), cells.end(), [&](const Held& held) {
    return copies.contains(held.sequences.front());
  });
}

// Returns the tokens of these operations' batches; very many if a segment fills
// what is free.
std::int64_t TokensOf(std::span<const Op> ops) {
  std::int64_t tokens = 0;
  for (const Op& op : ops) {
    for (const Segment& segment : op.segments) tokens += segment.count;
  }
  return tokens;
}

constexpr std::int64_t kMostTokens = 4096;

}  // namespace

std::vector<History> Rebuilt(const History& history, std::size_t kept) {
  if (IsWrapper(history.setup.spec.kind) ||
      history.setup.spec.kind == Kind::kRecurrent ||
      history.ops.size() <= kept + 1) {
    return {};
  }
  History before = history;
  before.ops.resize(history.ops.size() - kept);
  const std::unique_ptr<Cache> cache = ReferenceAfter(before);
  if (cache == nullptr) return {};
  const std::vector<Held> cells = HeldCells(*cache);
  if (cells.empty()) return {};
  int unused = 0;
  for (const Held& held : cells) {
    for (const int id : held.sequences) {
      unused = std::max(unused, After(history.setup.NameOf(id)));
    }
  }
  const Builder builder(history.setup, unused);
  History rebuilt{.setup = history.setup,
                  .ops = CopiesHideTokens(cells)
                             ? SharedFirst(cells, builder)
                             : InTheirCells(cells, builder)};
  rebuilt.setup.legal = false;
  SetCells(cache->CellCount(), rebuilt.setup);
  int& batch = rebuilt.setup.init.max_batch;
  batch = std::max(batch, cache->CellCount());
  const auto last = std::span(history.ops).last(kept);
  rebuilt.ops.insert(rebuilt.ops.end(), last.begin(), last.end());
  std::vector<History> ways = {std::move(rebuilt)};

  const std::int64_t all = std::ssize(cells) + TokensOf(last);
  if (all > kMostTokens) return ways;
  History& filled = ways.emplace_back();
  filled.setup = history.setup;
  SetCells(AsInt(all), filled.setup);
  filled.ops.emplace_back().segments.emplace_back().count = Size(cells);
  filled.ops.insert(filled.ops.end(), last.begin(), last.end());
  return ways;
}

std::optional<History> PutAtOnce(const History& history) {
  const std::int64_t tokens = TokensOf(history.ops);
  if (tokens < 1 || tokens > kMostTokens) return std::nullopt;
  Op put;
  put.segments.emplace_back().count = AsInt(tokens);
  History rebuilt{.setup = history.setup, .ops = {put}};
  SetCells(AsInt(tokens), rebuilt.setup);
  return rebuilt;
}

}  // namespace kvtwin::props
