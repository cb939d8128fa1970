#include "props/search/explore_step.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/index.h"

namespace kvtwin::props {
namespace {

// Returns all batches of one token, and of two unless `reserve`: each mask row
// of a reserving pass depends on one token only.
std::vector<ExploreStep> Batches(const ExploreSize& size, bool reserve) {
  std::vector<ExploreStep> steps;
  for (std::int32_t p = 0; p < size.positions; ++p) {
    for (int s = 0; s < size.sequences; ++s) {
      steps.push_back({.positions = {p}, .sequences = {s}});
    }
  }
  const std::size_t singles = reserve ? 0 : steps.size();
  for (std::size_t i = 0; i < singles; ++i) {
    for (std::size_t j = 0; j < singles; ++j) {
      ExploreStep both = steps[i];
      both.positions.push_back(steps[j].positions[0]);
      both.sequences.push_back(steps[j].sequences[0]);
      steps.push_back(both);
    }
  }
  for (ExploreStep& step : steps) step.reserve = reserve;
  return steps;
}

// Returns the batches with drafts of one sequence, two siblings and a chain
// among them, of two sequences, and beside an ordinary token; and the commits.
std::vector<ExploreStep> DraftSteps(const ExploreSize& size) {
  std::vector<ExploreStep> steps;
  const auto add = [&](std::vector<int> sequences, std::vector<int> parents,
                       std::int32_t ordinary = 0) {
    ExploreStep& step = steps.emplace_back();
    for (const int parent : parents) {
      step.positions.push_back(parent == kNotADraft ? ordinary : 0);
    }
    step.sequences = std::move(sequences);
    step.parents = std::move(parents);
  };
  for (int s = 0; s < size.sequences; ++s) {
    for (const int parent : {kCommitted, 0}) {
      add({s}, {parent});
      steps.push_back(steps.back());
      steps.back().reserve = true;
      add({s, s}, {kCommitted, parent});
    }
    for (int t = 0; t < size.sequences; ++t) {
      if (s == t) continue;
      add({s, t}, {kCommitted, kCommitted});
      for (std::int32_t p = 0; p < size.positions; ++p) {
        add({s, t}, {kCommitted, kNotADraft}, p);
        add({t, s}, {kNotADraft, kCommitted}, p);
      }
    }
    for (const std::vector<int>& path :
         std::vector<std::vector<int>>{{}, {0}, {1}, {0, 0}}) {
      steps.push_back({.kind = OpKind::kCommit, .path = path, .seq = s});
    }
  }
  return steps;
}

// Whether the cache takes the drafts of the step.
bool MayDraft(const ExploreStep& step, const Abilities& can) {
  if (step.parents.empty() || can.Can(KVTWIN_CAN_DRAFT_TREES)) return true;
  // In a chain, each draft follows the draft before it.
  const bool siblings =
      std::ranges::count(step.sequences, step.sequences[0]) > 1 &&
      std::ranges::count(step.parents, kCommitted) > 1;
  return can.CanDraft() && !siblings;
}

bool MayDo(const ExploreStep& step, const Abilities& can) {
  const bool open = step.end == kOpenEnd;
  const bool in_range =
      step.begin <= can.LastEnd() && (open || step.end <= can.LastEnd());
  switch (step.kind) {
    case OpKind::kAsk:
      return can.can_resume && step.end <= can.LastPosition();
    case OpKind::kPut:
      if (!MayDraft(step, can)) return false;
      return (!step.reserve || can.Can(KVTWIN_CAN_RESERVE)) &&
             (std::ranges::count(step.sequences, step.sequences[0]) ==
                  std::ssize(step.sequences) ||
              can.Can(KVTWIN_CAN_MIX)) &&
             std::ranges::max(step.positions) <= can.LastPosition();
    case OpKind::kCommit:
      return can.CanDraft();
    case OpKind::kDrop:
      return in_range &&
             can.Can(open ? KVTWIN_CAN_REMOVE_TAIL : KVTWIN_CAN_REMOVE_MIDDLE);
    default:
      return in_range && can.Can(KVTWIN_CAN_COPY_PREFIX) &&
             can.Can(KVTWIN_CAN_SHARE) &&
             (step.seq != step.dst ||
              !can.Cannot(KVTWIN_CANNOT_COPY_TO_ITSELF));
  }
}

}  // namespace

std::vector<ExploreStep> AllSteps(const ExploreSize& size,
                                  const Abilities& abilities) {
  std::vector<ExploreStep> steps;
  for (int s = 0; s < size.sequences; ++s) {
    for (std::int32_t p = 0; p <= size.positions + 1; ++p) {
      steps.push_back({.kind = OpKind::kAsk, .seq = s, .end = p});
    }
  }
  for (const bool reserve : {true, false}) {
    for (ExploreStep& step : Batches(size, reserve))
      steps.push_back(std::move(step));
  }
  if (size.drafts) {
    for (ExploreStep& step : DraftSteps(size)) steps.push_back(std::move(step));
  }
  for (int s = 0; s < size.sequences; ++s) {
    for (std::int32_t begin = 0; begin <= size.positions; ++begin) {
      for (std::int32_t end = begin; end <= size.positions; ++end) {
        steps.push_back(
            {.kind = OpKind::kDrop, .seq = s, .begin = begin, .end = end});
      }
      steps.push_back(
          {.kind = OpKind::kDrop, .seq = s, .begin = begin, .end = kOpenEnd});
    }
    for (int dst = 0; dst < size.sequences; ++dst) {
      for (std::int32_t len = 0; len <= size.positions; ++len) {
        steps.push_back(
            {.kind = OpKind::kCopy, .seq = s, .dst = dst, .end = len});
      }
    }
  }
  std::erase_if(
      steps, [&](const ExploreStep& step) { return !MayDo(step, abilities); });
  return steps;
}

std::string ToText(const ExploreStep& step) {
  switch (step.kind) {
    case OpKind::kPut: {
      std::string text = fmt::format(
          "StartForward(positions [{}], sequences [{}]{}{})",
          fmt::join(step.positions, " "), fmt::join(step.sequences, " "),
          step.parents.empty()
              ? ""
              : fmt::format(", parents [{}]", fmt::join(step.parents, " ")),
          step.reserve ? ", reserve" : "");
      if (!step.except.empty()) {
        text += fmt::format(", SetCausal([{}])", fmt::join(step.except, " "));
      }
      return text;
    }
    case OpKind::kDrop:
      return fmt::format(
          "Remove({}, {}, {})", step.seq, step.begin,
          step.end == kOpenEnd ? "open" : fmt::to_string(step.end));
    case OpKind::kCommit:
      return fmt::format("Commit({}, [{}])", step.seq,
                         fmt::join(step.path, " "));
    case OpKind::kCopy:
      return fmt::format("CopyPrefix({}, {}, {})", step.seq, step.dst,
                         step.end);
    default:
      return fmt::format("CanResume({}, {})", step.seq, step.end);
  }
}

ExploreStep Renamed(ExploreStep step, const std::vector<int>& names) {
  for (int& sequence : step.sequences) sequence = At(names, sequence);
  step.seq = At(names, step.seq);
  step.dst = At(names, step.dst);
  return step;
}

Op ToOp(const ExploreStep& step, const CacheState& before,
        const std::vector<int>& names) {
  const auto name = [&](int s) { return At(names, s); };
  Op op;
  op.kind = step.kind;
  op.reserve = step.reserve;
  op.path = step.path;
  op.except = step.except;
  op.seq = name(step.seq);
  op.dst = name(step.dst);
  op.begin.offset = step.begin;
  op.end.offset = step.end;
  op.open = step.end == kOpenEnd;
  if (op.open) op.end.offset = 0;
  for (std::size_t i = 0; i < step.positions.size(); ++i) {
    if (!step.parents.empty() && step.parents[i] != kNotADraft) {
      op.segments.push_back({.seq = name(step.sequences[i]),
                             .count = 1,
                             .parents = {step.parents[i]}});
      continue;
    }
    int next = 0;
    const auto see = [&](const CacheState& part) {
      for (const CellEntry& entry : part.cells) {
        if (entry.sequence == step.sequences[i]) {
          next = std::max(next, entry.position + 1);
        }
      }
    };
    see(before);
    std::ranges::for_each(before.caches, see);
    op.segments.push_back({.seq = name(step.sequences[i]),
                           .count = 1,
                           .delta = step.positions[i] - next});
  }
  return op;
}

}  // namespace kvtwin::props
