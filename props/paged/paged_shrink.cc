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
#include "props/compare/timed_rerun.h"
#include "props/paged/paged_runner.h"
#include "props/report/finding_filter.h"

namespace kvtwin::props {
namespace {

// Runs a history and returns its failure, if it fails.
using Rerun = std::function<std::optional<Failure>(const PagedHistory&)>;

constexpr std::size_t kPairsMax = 30;  // Longer histories try no pairs.
constexpr int kPlainRunsMax = 3000;
constexpr int kBlocksMax = 1000;  // Limit for blocks of one token each.

constexpr std::array kSizes = {&PagedSpec::block_size,  &PagedSpec::blocks,
                               &PagedSpec::max_seq_len, &PagedSpec::layers,
                               &PagedSpec::kv_heads,    &PagedSpec::k_head_dim,
                               &PagedSpec::v_head_dim};

// If `shorter` still fails, makes it the history and returns true.
bool Take(PagedHistory shorter, const Rerun& run, PagedHistory& history) {
  if (!CheckPagedSpec(shorter.spec).ok()) return false;
  if (!run(shorter)) return false;
  history = std::move(shorter);
  return true;
}

// Removes halves, quarters, ... of the history, and finally each operation
// alone. Returns whether anything was removed.
bool LeaveOut(const Rerun& run, PagedHistory& history) {
  bool any = false;
  for (std::size_t size = history.ops.size(); size > 0; size /= 2) {
    for (std::size_t at = 0; at < history.ops.size();) {
      PagedHistory shorter = history;
      const std::size_t end = std::min(at + size, shorter.ops.size());
      shorter.ops.erase(IteratorAt(shorter.ops, at),
                        IteratorAt(shorter.ops, end));
      const bool taken = Take(std::move(shorter), run, history);
      if (!taken) at += size;
      any = any || taken;
    }
  }
  return any;
}

// Removes all operations of one kind, and any two operations.
bool LeaveOutTogether(const Rerun& run, PagedHistory& history) {
  bool any = false;
  for (std::size_t i = 0; i < kPagedOpNames.size(); ++i) {
    PagedHistory shorter = history;
    const auto left_out = std::erase_if(shorter.ops, [&](const PagedOp& op) {
      return op.kind == static_cast<PagedOpKind>(i);
    });
    any = (left_out > 1 && Take(std::move(shorter), run, history)) || any;
  }
  if (history.ops.size() > kPairsMax) return any;
  for (std::size_t i = 0; i < history.ops.size(); ++i) {
    for (std::size_t j = i + 1; j < history.ops.size(); ++j) {
      PagedHistory shorter = history;
      shorter.ops.erase(IteratorAt(shorter.ops, j));
      shorter.ops.erase(IteratorAt(shorter.ops, i));
      if (!Take(std::move(shorter), run, history)) continue;
      any = true;
      j = i;
    }
  }
  return any;
}

// Removes an operation and decrements the numbers by which later operations
// name a list of tokens, or a sequence.
bool LeaveOutNumbered(const Rerun& run, PagedHistory& history) {
  bool any = false;
  for (const bool lists : {true, false}) {
    for (std::size_t i = 0; i < history.ops.size();) {
      PagedHistory shorter = history;
      shorter.ops.erase(IteratorAt(shorter.ops, i));
      for (std::size_t j = i; j < shorter.ops.size(); ++j) {
        PagedOp& op = shorter.ops[j];
        if (op.a > 0 && (op.kind == PagedOpKind::kOpen) == lists) --op.a;
      }
      const bool taken = Take(std::move(shorter), run, history);
      if (!taken) ++i;
      any = any || taken;
    }
  }
  return any;
}

// Rewrites operations as an `open` without a key: without any sequence, every
// operation is one.
bool CallThemOpen(const Rerun& run, PagedHistory& history) {
  bool any = false;
  for (std::size_t i = 0; i < history.ops.size(); ++i) {
    if (history.ops[i].kind == PagedOpKind::kOpen) continue;
    PagedHistory plainer = history;
    plainer.ops[i].kind = PagedOpKind::kOpen;
    plainer.ops[i].c = 0;
    any = Take(std::move(plainer), run, history) || any;
  }
  return any;
}

// Makes a number smaller; number(history) is a reference to it.
template <class Number>
bool Lower(const Number& number, int least, const Rerun& run,
           PagedHistory& history) {
  const int now = number(history);
  for (const int less : {least, least + 1, least + 2, now / 2, now - 1}) {
    if (less < least || less >= now) continue;
    PagedHistory lower = history;
    number(lower) = less;
    if (Take(std::move(lower), run, history)) return true;
  }
  return false;
}

bool Simplify(const Rerun& run, PagedHistory& history) {
  bool any = false;
  const auto plain = [&](const auto& change) {
    PagedHistory plainer = history;
    change(plainer.spec);
    if (ToText(plainer) == ToText(history)) return;
    any = Take(std::move(plainer), run, history) || any;
  };
  plain([](PagedSpec& spec) { spec.v_dtype.reset(); });
  plain([](PagedSpec& spec) { spec.dtype = DType::kF32; });
  plain([](PagedSpec& spec) { spec.layout = PagedLayout::kTokenMajor; });
  plain([](PagedSpec& spec) {
    if (spec.blocks > kBlocksMax / spec.block_size) return;
    spec.blocks *= std::exchange(spec.block_size, 1);
  });
  for (int PagedSpec::*size : kSizes) {
    const auto number = [&](PagedHistory& of) -> int& { return of.spec.*size; };
    any = Lower(number, 1, run, history) || any;
  }
  for (std::size_t i = 0; i < history.ops.size(); ++i) {
    for (int PagedOp::*field : {&PagedOp::a, &PagedOp::b, &PagedOp::c}) {
      const auto number = [&](PagedHistory& of) -> int& {
        return of.ops[i].*field;
      };
      any = Lower(number, 0, run, history) || any;
    }
  }
  return any;
}

// Tries plain histories of the kinds of operations that a failing one has, the
// shortest first, so that the same history is found from every seed.
class PlainHistories {
 public:
  PlainHistories(const PagedHistory& model, const Rerun& run)
      : model_(model), run_(run) {
    if (const auto failure = run(model)) signature_ = SignatureOf("", *failure);
    Add({PagedOpKind::kOpen, 0, 0, 0});
    for (const PagedOp& op : model.ops) Add(op);
    for (const PagedOp& op :
         {PagedOp{PagedOpKind::kAppend, 0, 0, 0}, {PagedOpKind::kCommit}}) {
      Add(op);
    }
  }

  // Returns the first history that is at most as long as the model and fails
  // with the same signature.
  std::optional<PagedHistory> Search() {
    if (signature_.empty()) return std::nullopt;
    for (std::size_t size = 1; size <= model_.ops.size(); ++size) {
      for (const auto& [block, blocks, most] :
           {std::array{1, 2, 2}, {2, 3, 5}}) {
        PagedHistory history = {model_.spec, {{PagedOpKind::kOpen, 0, 0, 0}}};
        history.spec.block_size = block;
        history.spec.blocks = blocks;
        history.spec.max_seq_len = most;
        if (Extend(size, {}, history)) return history;
        if (runs_ > kPlainRunsMax) return std::nullopt;
      }
    }
    return std::nullopt;
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
          AddOne({kind, a, 0, op.c});
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

  bool IsWrong(const PagedHistory& history) {
    if (++runs_ > kPlainRunsMax || !CheckPagedSpec(history.spec).ok()) {
      return false;
    }
    const std::optional<Failure> failure = run_(history);
    return failure && SignatureOf("", *failure) == signature_;
  }

  // Looks for a failing history of `size` operations that begins with
  // `history`; if there is one, makes it `history` and returns true.
  bool Extend(std::size_t size, const State& state, PagedHistory& history) {
    if (history.ops.size() == size) return IsWrong(history);
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
  const Rerun& run_;
  std::string signature_;
  std::vector<PagedOp> plain_;
  int runs_ = 0;
};

PagedHistory Shortest(PagedHistory history, const Rerun& run) {
  for (bool goes_on = true; goes_on;) {
    goes_on = LeaveOut(run, history);
    goes_on = LeaveOutTogether(run, history) || goes_on;
    goes_on = LeaveOutNumbered(run, history) || goes_on;
    goes_on = Simplify(run, history) || goes_on;
    goes_on = CallThemOpen(run, history) || goes_on;
  }
  return history;
}

}  // namespace

PagedHistory Shrink(const PagedHistory& history, const PagedSubject& subject,
                    const RefusesPaged& refuses) {
  const Rerun run = TimedRerun(subject, refuses);
  PagedHistory shrunk = Shortest(history, run);
  auto plain = PlainHistories(shrunk, run).Search();
  return plain ? Shortest(*std::move(plain), run) : shrunk;
}

}  // namespace kvtwin::props
