// The theorem of docs/serving.md: sessions are never refused for lack of room.
// Every history of small sessions is played, and the used cells are counted.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/index.h"
#include "kvtwin/sessions.h"
#include "props/base/forwarding_cache.h"

namespace kvtwin::props {
namespace {

// Remembers the most cells that a batch found in use, its own included.
class CellCounter : public ForwardingCache {
 public:
  using ForwardingCache::ForwardingCache;

  Status StartForward(const Batch& batch, bool reserve) override {
    Status status = ForwardingCache::StartForward(batch, reserve);
    std::vector<CellEntry> entries;
    ListCells(entries);
    std::set<int> cells;
    for (const CellEntry& entry : entries) cells.insert(entry.cell);
    most = std::max(most, Size(cells));
    return status;
  }
  int most = 0;
};

struct SmallSessions {
  SessionsSpec sessions;
  CacheSpec cache;
  int padding = 1;
  int cells = 0;  // The bound of the theorem.
};

std::string NameOf(const SmallSessions& setup) {
  const SessionsSpec& spec = setup.sessions;
  return fmt::format(
      "slots={} context={} batch={} own={} ahead={} window={} memory={} "
      "scatter={} shift={} padding={}",
      spec.slots, spec.context, spec.batch,
      spec.choice == SlotChoice::kOwnPrefix, spec.ahead,
      setup.cache.window.value_or(-1), setup.cache.memory.value_or(-1),
      setup.cache.placement == Placement::kScatter,
      setup.cache.shift.kind == ShiftKind::kIdentity, setup.padding);
}

// Does what a step says, if it can be done.
class SmallHistory {
 public:
  explicit SmallHistory(const SmallSessions& setup)
      : cache_(*MakeCache(setup.cache)), context_(setup.sessions.context) {
    EXPECT_TRUE(cache_.SetConfig({.cache_padding = setup.padding}).ok());
    EXPECT_TRUE(cache_.Init(InitOf(setup.sessions, DType::kF32)).ok());
    sessions_ = *MakeSessions(cache_, setup.sessions);
  }

  static constexpr int kSteps = 5;
  bool Do(int step) {
    switch (step) {
      case 0:
        return Submit({0});
      case 1:
        return Submit({0, 1, submitted_ + 2});
      case 2:
        return sessions_->NextBatch().ok();
      case 3:
        for (int i = 0; i < submitted_; ++i) {
          if (IsRunning(i)) sessions_->Sampled(i, i).ok();
        }
        return true;
      default:  // The oldest that runs leaves, with a stop string if it can.
        for (int i = 0; i < submitted_; ++i) {
          if (!IsRunning(i)) continue;
          return sessions_
              ->Finish(
                  i, std::min<std::int64_t>(sessions_->Request(i)->answered, 1))
              .ok();
        }
        return true;
    }
  }
  int most() const { return cache_.most; }

 private:
  bool Submit(std::vector<std::int32_t> tokens) {
    tokens.resize(AsSize(std::min(Size(tokens), context_)));
    std::vector<SessionInput> prompt;
    for (const std::int32_t token : tokens) prompt.push_back({.token = token});
    ++submitted_;
    return sessions_->Submit(prompt).ok();
  }
  bool IsRunning(int request) const {
    const auto info = sessions_->Request(request);
    return info.ok() && info->slot >= 0;
  }

  CellCounter cache_;
  int context_;
  int submitted_ = 0;
  std::unique_ptr<Sessions> sessions_;
};

// Plays all histories of `length` steps. Returns the most cells used.
int Explore(const SmallSessions& setup, int length) {
  int most = 0;
  std::vector<int> steps(AsSize(length), 0);
  for (bool more = true; more;) {
    SmallHistory history(setup);
    for (const int step : steps) {
      if (history.Do(step)) continue;
      ADD_FAILURE() << NameOf(setup) << " steps "
                    << testing::PrintToString(steps);
      return most;
    }
    most = std::max(most, history.most());
    more = false;
    for (int& step : steps) {
      step = (step + 1) % SmallHistory::kSteps;
      if (step != 0) {
        more = true;
        break;
      }
    }
  }
  return most;
}

std::vector<SmallSessions> AllSmallSessions() {
  std::vector<SmallSessions> setups;
  int number = 0;
  for (const int slots : {1, 2}) {
    for (const int context : {1, 2, 3}) {
      for (const int batch : {1, 2, 3}) {
        for (const int window : {-1, 0, 1}) {
          for (const int more : {0, 1}) {
            if (window < 0 && more > 0) continue;
            SmallSessions setup;
            setup.sessions = {.slots = slots,
                              .context = context,
                              .batch = batch,
                              .choice = static_cast<SlotChoice>(number % 2),
                              .ahead = number / 2 % 2 == 0};
            setup.padding = 1 + number / 4 % 2;
            setup.cache.placement = static_cast<Placement>(number / 8 % 2);
            setup.cache.shift.kind =
                number % 3 == 0 ? ShiftKind::kNone : ShiftKind::kIdentity;
            setup.cells = slots * context;
            if (window >= 0) {
              setup.cache.kind = Kind::kSwaMem;
              setup.cache.window = window;
              setup.cache.memory = window + more;
              const int memory =
                  std::max(window + more, slots > 1 ? window + 1 : 0);
              if (memory < context) setup.cells = slots * memory + batch;
            }
            setups.push_back(setup);
            number += 5;  // Spreads the choices over the sizes.
          }
        }
      }
    }
  }
  return setups;
}

TEST(NeverFull, EveryHistoryOfSmallSessions) {
  int reached = 0;
  for (const SmallSessions& setup : AllSmallSessions()) {
    const int most = Explore(setup, 6);
    EXPECT_LE(most, setup.cells) << NameOf(setup);
    reached += most == setup.cells ? 1 : 0;
    if (HasFailure()) return;
  }
  EXPECT_EQ(reached, 71);  // One cell less would not be enough there.
}

StatusCode Start(Cache& cache, const std::vector<std::int32_t>& positions) {
  const std::vector<int> sequences(positions.size(), 0);
  return cache.StartForward({positions, sequences}, false).code();
}

// The conditions of the theorem are needed.
TEST(NeverFull, ClientsThatBreakAConditionAreRefused) {
  // The token ahead is not removed.
  CacheSpec spec;
  spec.shift.kind = ShiftKind::kIdentity;
  auto cache = *MakeCache(spec);
  ASSERT_TRUE(cache->Init({DType::kF32, 1, 1, 1}).ok());
  EXPECT_EQ(Start(*cache, {0}), StatusCode::kOk);
  EXPECT_EQ(Start(*cache, {0}), StatusCode::kCacheFull);
  // A group larger than a batch.
  EXPECT_EQ(Start(*cache, {0, 1}), StatusCode::kInvalidArgument);
  // Half of what can be shifted is less than the group that follows.
  cache = *MakeCache(spec);
  ASSERT_TRUE(cache->Init({DType::kF32, 1, 4, 4}).ok());
  EXPECT_EQ(Start(*cache, {0, 1, 2, 3}), StatusCode::kOk);
  ASSERT_TRUE(cache->Remove(0, 2, 3).ok());
  EXPECT_EQ(Start(*cache, {3, 4}), StatusCode::kCacheFull);
}

}  // namespace
}  // namespace kvtwin::props
