#include "props/sessions/session_runner.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/index.h"
#include "optimized/fast_paths.h"
#include "props/base/hash.h"
#include "props/report/finding_filter.h"
#include "props/shrink/shrinker.h"
#include "props/shrink/timed_rerun.h"

namespace kvtwin::props {
namespace {

using SessionMove = std::function<void(SessionHistory&)>;

// Steps that make a list of draws shorter, or one of its numbers smaller.
// `list` finds it in a history, or returns null.
template <class List>
void AddDraws(const List& list, std::size_t count,
              std::vector<SessionMove>& moves) {
  const auto add = [&](const auto& change) {
    moves.emplace_back([=](SessionHistory& history) {
      if (std::vector<int>* draws = list(history)) change(*draws);
    });
  };
  for (const std::size_t left : {std::size_t{0}, count / 2, count - 1}) {
    if (count == 0) return;
    add([left](std::vector<int>& draws) {
      draws.resize(std::min(draws.size(), left));
    });
  }
  for (std::size_t i = 0; i < count; ++i) {
    add([i](std::vector<int>& draws) {
      if (i < draws.size()) draws.erase(IteratorAt(draws, i));
    });
    for (const int divisor : {1000, 10, 2}) {
      add([i, divisor](std::vector<int>& draws) {
        if (i < draws.size()) draws[i] /= divisor;
      });
    }
    add([i](std::vector<int>& draws) {
      if (i < draws.size() && draws[i] > 0) --draws[i];
    });
  }
}

// Histories of sessions, for Shrinker.
class SessionDomain {
 public:
  using History = SessionHistory;
  static constexpr std::int64_t kMostWork = 4'000'000'000;
  static constexpr std::int64_t kMostWorkLegal = kMostWork;
  static constexpr std::int64_t kRestartWork = 0;

  static bool IsLegal(const History&) { return true; }
  static bool Allows(const History&) { return true; }
  static bool IsSame(const Failure&) { return true; }

  static Cost CostOf(const History& history) {
    Cost cost = {.operations = history.ops.size()};
    const auto add = [&cost](const std::vector<int>& draws) {
      cost.special += std::ssize(draws);
      cost.numbers += std::accumulate(draws.begin(), draws.end(), 0);
    };
    add(history.setup);
    for (const SessionStep& step : history.ops) add(step.draws);
    return cost;
  }
  static Cost CostAtLeast(const History& history) { return CostOf(history); }
  static std::int64_t Work(const History&, std::size_t ops) {
    return 100'000 + 20'000 * static_cast<std::int64_t>(ops);
  }

  static void Prepare(Shrinker<SessionDomain>&) {}
  static std::vector<History> Shortcuts(const History&) { return {}; }
  static std::vector<History> Halved(const History&) { return {}; }
  static void TryMinimalCases(Shrinker<SessionDomain>&) {}

  static std::vector<SessionMove> Moves(const History& history, bool all) {
    std::vector<SessionMove> moves;
    for (std::size_t i = 0; i < history.ops.size(); ++i) {
      moves.emplace_back([i](History& h) {
        if (i < h.ops.size()) h.ops.erase(IteratorAt(h.ops, i));
      });
    }
    if (!all) return moves;
    AddDraws([](History& h) { return &h.setup; }, history.setup.size(), moves);
    for (std::size_t i = 0; i < history.ops.size(); ++i) {
      AddDraws(
          [i](History& h) {
            return i < h.ops.size() ? &h.ops[i].draws : nullptr;
          },
          history.ops[i].draws.size(), moves);
    }
    return moves;
  }
};

}  // namespace

RunResult RunSessions(const SessionHistory& history, const SessionsMaker& make,
                      const PlayOptions& play, PlayCounts* counts) {
  const optimized::SharesInTurn shares_in_turn;
  PlayCounts own;
  std::size_t steps = 0;
  PlayResult played = PlayHistory(history, make, play, own, steps);
  if (counts != nullptr) counts->Add(own);
  RunResult result = {.ran = true,
                      .operations = static_cast<std::int64_t>(steps),
                      .views = own.judged};
  for (const std::string& line : played.log) {
    result.digest = HashBytes(line.data(), line.size(), result.digest);
  }
  if (played.wrong.empty()) return result;
  Failure& failure = result.failure.emplace();
  failure.step = steps - std::min<std::size_t>(steps, 1);
  failure.check = kSessionsCheck;
  failure.text = std::move(played.wrong);
  failure.setup = played.log.front();
  for (std::size_t i = 1; i < played.log.size(); ++i) {
    failure.trace.emplace_back().call = std::move(played.log[i]);
  }
  return result;
}

RunResult RunHistory(const SessionHistory& history, const Subject& subject,
                     RunOptionsOf<PlayCounts> options) {
  return RunSessions(history, SessionsOf(subject.name),
                     {.cache_twin = subject.name}, options.counts);
}

SessionHistory ShrinkSessions(
    const SessionHistory& history,
    const std::function<std::optional<Failure>(const SessionHistory&)>& run) {
  const std::optional<Failure> failure = run(history);
  if (!failure) return history;
  SessionDomain domain;
  return Shrinker(domain, history, *failure, run).Shrink();
}

SessionHistory Shrink(const SessionHistory& history, const Subject& subject,
                      const RefusesSessions& refuses) {
  return ShrinkSessions(history, TimedRerun(subject, refuses));
}

}  // namespace kvtwin::props
