// Replays an hour of a real chat service through one cache of 16 slots of 128k
// tokens: placement, views and masks, without rows. The service had many
// machines; here one server handles one request after the other, as fast as it
// can.

#include <fmt/format.h>

#include <memory>

#include "bench/chat.h"
#include "bench/goals.h"
#include "bench/limits.h"
#include "bench/twins.h"
#include "core/index.h"

namespace kvtwin::bench {
namespace {

constexpr double kHour = 3600e9;

// Masks of numbers would take at least ten times as many bytes.
constexpr DType kMask = DType::kBits;

// Tokens of a slot.
int Context(const Goals& goals) { return (goals.quick() ? 4 : 128) * 1024; }

std::unique_ptr<Cache> MakeChatCache(int context, std::string_view twin) {
  auto cache = Make(Chat::Setup(kMask, context), twin);
  AddTinyLayer(*cache);
  return cache;
}

// Plays all requests, or the first passes in a quick run.
void PlayAll(Goals& goals, const std::vector<Request>& requests,
             const std::string& name) {
  constexpr std::int64_t kChecked = 997;
  constexpr std::int64_t kTold = 50000;  // Reports progress: it takes minutes.
  const auto cache = MakeChatCache(Context(goals), "optimized");
  Chat chat(requests);
  while (chat.Step(*cache)) {
    if (chat.passes() % kChecked == 1) chat.CheckMask(name, *cache);
    if (goals.quick() && chat.passes() == 100) break;
    if (chat.passes() % kTold == 0) {
      fmt::print(stderr, "chat: {} of {} requests, {} so far\n",
                 chat.finished(), requests.size(), TimeText(chat.cache_time()));
    }
  }
  if (!goals.quick() && chat.finished() != requests.size()) {
    Wrong(name, "requests are left");
  }
  if (!goals.options().json) {
    fmt::print("{} requests, {} passes, {} tokens, {:.3g} mask elements:\n",
               chat.finished(), chat.passes(), chat.tokens(),
               chat.mask_elements());
  }
  goals.Add(name, 1, chat.cache_time(), kHour);
}

// Some passes from the middle of the hour, by both twins.
class Stretch {
 public:
  Stretch(const std::vector<Request>& requests, int context, std::int64_t from,
          std::int64_t passes)
      : start_(requests), passes_(passes) {
    const auto cache = MakeChatCache(context, "optimized");
    while (start_.passes() < from && start_.Step(*cache)) {
    }
    state_ = Must(cache->Snapshot());
    state_.layers.clear();
    for (const char* twin : {"optimized", "reference"}) {
      caches_.push_back(MakeChatCache(context, twin));
    }
  }

  // Nanoseconds of the optimized twin.
  double Time() {
    Cache& cache = Begin(0);
    Chat chat = start_;
    for (std::int64_t i = 0; i < passes_; ++i) chat.Step(cache);
    return chat.cache_time() - start_.cache_time();
  }

  void Check(const std::string& name) {
    Cache& fast = Begin(0);
    Cache& slow = Begin(1);
    Chat chat = start_;
    Chat other = start_;
    for (std::int64_t i = 0; i < passes_; ++i) {
      chat.Step(fast);
      other.Step(slow);
      CheckMasks(name, fast, slow);
      chat.CheckMask(name, fast);
    }
    reference_time_ = other.cache_time() - start_.cache_time();
  }
  // The time of the reference twin in Check, which is slow enough as it is.
  double reference_time() const { return reference_time_; }

 private:
  Cache& Begin(int twin) {
    Cache& cache = *At(caches_, twin);
    Must(cache.Restore(state_));
    AddTinyLayer(cache);
    return cache;
  }

  Chat start_;
  std::int64_t passes_;
  CacheState state_;
  std::vector<std::unique_ptr<Cache>> caches_;
  double reference_time_ = 0;
};

}  // namespace

void ChatGoals(Goals& goals) {
  const std::string_view mask = DTypeName(kMask);
  const std::string hour =
      fmt::format("chat, whole hour, masks {} / an hour", mask);
  const std::int64_t passes = goals.quick() ? 2 : 12;
  const std::string stretch =
      fmt::format("chat, {} passes, masks {} / reference", passes, mask);
  if (!goals.Wanted(hour) && !goals.Wanted(stretch)) return;
  const std::vector<Request> requests =
      ReadRequests(goals.options().workload, Context(goals));
  if (requests.empty()) {
    const std::string& path = goals.options().workload;
    fmt::print(stderr,
               "kvtwin-bench: the chat is left out: {}; docs/performance.md "
               "says which file --workload or KVTWIN_BENCH_WORKLOAD names\n",
               path.empty() ? "no workload is given"
                            : fmt::format("{} has no requests", path));
    return;
  }
  // Threads share the work of one mask at a time and wait for each other after
  // each mask: on a busy machine that takes most of the time.
  UseThreads(1);
  if (goals.Wanted(stretch)) {
    Stretch both(requests, Context(goals), goals.quick() ? 200 : 20000, passes);
    both.Check(stretch);
    goals.Judge(
        stretch, 0.01, [&] { return both.Time(); },
        {[&] { return both.reference_time(); }}, 3);
  }
  if (goals.Wanted(hour)) PlayAll(goals, requests, hour);
}

}  // namespace kvtwin::bench
