#include "props/shrink/shrink.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <utility>
#include <vector>

#include "core/index.h"
#include "props/history/knobs.h"
#include "props/shrink/cost.h"
#include "props/shrink/minimal_cases.h"
#include "props/shrink/moves.h"
#include "props/shrink/rebuild.h"
#include "props/shrink/shrinker.h"
#include "props/shrink/timed_rerun.h"

namespace kvtwin::props {
namespace {

// Histories of caches, for Shrinker.
class CacheDomain {
 public:
  using History = props::History;
  // A history of a thousand operations in a cache of hundreds of cells uses up
  // the limit before the minimal cases are searched.
  static constexpr std::int64_t kMostWork = 125'000'000;
  static constexpr std::int64_t kMostWorkLegal = 2 * kMostWork;
  static constexpr std::int64_t kRestartWork = 0;

  CacheDomain(Party blamed, Bounds bounds, std::int64_t start_work)
      : blamed_(blamed), bounds_(std::move(bounds)), start_work_(start_work) {}

  static bool IsLegal(const History& history) { return history.setup.legal; }
  bool Allows(const History& history) const {
    return bounds_.Allow(history.setup);
  }
  // Which of the party's checks fails first is chance.
  bool IsSame(const Failure& failure) const {
    return failure.party() == blamed_;
  }
  static Cost CostOf(const History& history) { return props::CostOf(history); }
  static Cost CostAtLeast(const History& history) {
    return CostWithoutSizes(history);
  }
  std::int64_t Work(const History& history, std::size_t ops) const {
    const InitArgs& init = history.setup.init;
    const auto cells =
        std::min(std::int64_t{init.capacity} * init.max_sequences,
                 std::int64_t{1} << 20);
    return start_work_ + static_cast<std::int64_t>(ops) * (600 + 30 * cells);
  }

  void Prepare(Shrinker<CacheDomain>& shrinker) const {
    if (IsLegal(shrinker.best())) shrinker.Try(ExpandImplicit(shrinker.best()));
    PlainSetup(shrinker);
    // In a long history, each of these takes long.
    shrinker.AnyPlainer(ShortWays(shrinker.best(), /*most_kept=*/2));
  }

  static std::vector<History> Shortcuts(const History& history) {
    return ShortWays(history, /*most_kept=*/4);
  }

  // Halves the cells, and the tokens or batches. Many tries follow, and each
  // takes longer in a larger cache.
  static std::vector<History> Halved(const History& history) {
    return {Half(history, /*batches=*/false), Half(history, /*batches=*/true)};
  }

  static std::vector<Move> Moves(const History& history, bool all) {
    return MovesOf(history, all);
  }

  // Searches for a plainer history that no step leads to.
  void TryMinimalCases(Shrinker<CacheDomain>& shrinker) const {
    PlainestThatFails(
        History(shrinker.best()),
        [&](const History& candidate) {
          return !shrinker.IsOutOfTime() && shrinker.Try(candidate);
        },
        bounds_);
  }

 private:
  // Plain caches and rows come first: every try takes time for each cache, and
  // for the number and width of the rows.
  static void PlainSetup(Shrinker<CacheDomain>& shrinker) {
    const auto attempt = [&](const auto& change) {
      History candidate = shrinker.best();
      change(candidate.setup);
      FitStorage(candidate.setup);
      return shrinker.Try(candidate);
    };
    const auto sizes = [](Setup& setup) {
      for (const Knob& knob : Knobs()) {
        if (knob.group == KnobGroup::kSizes) knob.Reset(setup);
      }
    };
    const auto others = [legal = shrinker.best().setup.legal](Setup& setup) {
      for (const Knob& knob : Knobs()) {
        if (knob.group != KnobGroup::kSizes) knob.Reset(setup);
      }
      setup.legal = legal;
    };
    if (!attempt([&](Setup& setup) { sizes(setup), others(setup); })) {
      attempt(sizes);
      attempt(others);
    }
    // Tries each cache of a wrapper alone.
    for (const CacheSpec& part :
         std::vector(shrinker.best().setup.spec.caches)) {
      if (attempt([&](Setup& setup) { setup.spec = part; })) break;
    }
    shrinker.UpdateCost();
  }

  static History Half(const History& history, bool batches) {
    History half = history;
    Setup& setup = half.setup;
    const bool of_cells = WhyNotOfCells(setup).empty();
    setup.init.capacity = (setup.init.capacity + 1) / 2;
    if (of_cells) SetCells(setup.init.capacity, setup);
    bool leave_out = false;
    std::erase_if(half.ops, [&](const Op& op) {
      leave_out = batches && op.kind == OpKind::kPut && !leave_out;
      return leave_out;
    });
    for (Op& op : half.ops) {
      for (Segment& segment : op.segments) {
        if (batches) continue;
        segment.more /= 2;
        const bool free = segment.count >= Segment::kFree / 2;
        if (!free) segment.count = (segment.count + 1) / 2;
      }
      if (!batches) op.more /= 2;
      op.begin.offset /= 2;
      op.end.offset = (op.end.offset + 1) / 2;
    }
    return half;
  }

  // Replaces all but the last operations by a short way to the same state.
  static std::vector<History> ShortWays(const History& history,
                                        std::size_t most_kept) {
    std::vector<History> ways;
    for (std::size_t kept = 1; kept <= most_kept; ++kept) {
      std::ranges::move(Rebuilt(history, kept), std::back_inserter(ways));
    }
    if (auto way = PutAtOnce(history)) ways.push_back(*std::move(way));
    return ways;
  }

  const Party blamed_;
  const Bounds bounds_;
  const std::int64_t start_work_;  // The time of a run without operations.
};

}  // namespace

History Shrink(const History& history, const Subject& subject,
               std::optional<Kind> kind, const RefusesHistory& refuses) {
  const std::optional<Failure> failure = RunHistory(history, subject).failure;
  if (!failure) return history;
  Subject quick = subject;
  quick.tried_outside_of_life = failure->party() == Party::kEither;
  const Rerun rerun = TimedRerun(quick, refuses);
  Bounds bounds = {.abilities = subject.abilities, .kind = kind};
  if (subject.is_twin()) bounds.abilities.reset();
  CacheDomain domain(failure->party(), bounds, subject.start_work);
  return Shrinker(domain, history, *failure, rerun).Shrink();
}

History Shrink(const History& history, const Rerun& rerun) {
  const std::optional<Failure> failure = rerun(history);
  if (!failure) return history;
  CacheDomain domain(failure->party(), {}, Subject().start_work);
  return Shrinker(domain, history, *failure, rerun).Shrink();
}

}  // namespace kvtwin::props
