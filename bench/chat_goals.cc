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

// Reports how much the sessions reused of what they could reuse. The cache
// never refused.
void ReportReuse(const std::string& name, const Chat& chat) {
  const SessionGauges gauges = chat.gauges();
  const auto hits = static_cast<double>(gauges.hit_tokens);
  const auto reusable = static_cast<double>(chat.reusable());
  if (hits < 0.99 * reusable || hits > reusable || gauges.refusals > 0) {
    Wrong(name, fmt::format("{} of {} tokens are reused, {} batches refused",
                            hits, reusable, gauges.refusals));
  }
  fmt::print(
      stderr,
      "chat: {} of {} prompt tokens reused, {} were in a slot; {} forks, "
      "{} batches refused\n",
      gauges.hit_tokens, gauges.prompt_tokens, chat.reusable(), gauges.forks,
      gauges.refusals);
}

// Plays all requests, or the first passes in a quick run.
void PlayAll(Goals& goals, const std::vector<ServiceRequest>& requests,
             const std::string& name, const std::string& own) {
  constexpr std::int64_t kChecked = 997;
  constexpr std::int64_t kTold = 50000;  // Reports progress: it takes minutes.
  ChatCache cache(MakeChatCache(Context(goals), "optimized"));
  Chat chat(requests, cache, Context(goals));
  for (std::int64_t pass = 1; chat.Step(); ++pass) {
    if (pass % kChecked == 1) cache.CheckMask(name);
    if (goals.quick() && pass == 100) break;
    if (pass % kTold == 0) {
      fmt::print(stderr, "chat: {} of {} requests, {} so far\n",
                 chat.finished(), requests.size(), TimeText(cache.time()));
    }
  }
  if (!goals.quick() && chat.finished() != std::ssize(requests)) {
    Wrong(name, "requests are left");
  }
  const SessionGauges gauges = chat.gauges();
  if (!goals.options().json) {
    fmt::print("{} requests, {} passes, {} tokens, {:.3g} mask elements:\n",
               chat.finished(), gauges.batches, gauges.planned_tokens,
               chat.mask_elements());
  }
  ReportReuse(name, chat);
  goals.Add(name, 1, cache.time(), kHour);
  goals.Add(own, 0.1, chat.sessions_time() - cache.time(), cache.time());
}

// The calls of some passes from the middle of the hour, made by both twins.
class Stretch {
 public:
  Stretch(const std::vector<ServiceRequest>& requests, int context,
          std::int64_t from, std::int64_t passes) {
    ChatCache cache(MakeChatCache(context, "optimized"));
    Chat chat(requests, cache, context);
    for (std::int64_t i = 0; i < from && chat.Step(); ++i) {
    }
    state_ = Must(cache.Snapshot());
    state_.layers.clear();
    cache.LogTo(calls_);
    for (std::int64_t i = 0; i < passes; ++i) chat.Step();
    for (const char* twin : {"optimized", "reference"}) {
      caches_.push_back(MakeChatCache(context, twin));
    }
  }

  // Nanoseconds of the optimized twin.
  double Time() {
    Cache& cache = Begin(0);
    return bench::Time([&] {
      for (const ChatCache::Call& call : calls_) Must(call(cache));
    });
  }

  void Check(const std::string& name) {
    Cache& fast = Begin(0);
    Cache& slow = Begin(1);
    for (const ChatCache::Call& call : calls_) {
      Must(call(fast));
      reference_time_ += bench::Time([&] { Must(call(slow)); });
      if (!fast.BatchCells().empty()) CheckMasks(name, fast, slow);
    }
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

  CacheState state_;
  std::vector<ChatCache::Call> calls_;
  std::vector<std::unique_ptr<Cache>> caches_;
  double reference_time_ = 0;
};

}  // namespace

void ChatGoals(Goals& goals) {
  const std::string_view mask = DTypeName(kMask);
  const std::string hour =
      fmt::format("chat, whole hour, masks {} / an hour", mask);
  const std::int64_t passes = goals.quick() ? 2 : 3;
  const std::string stretch =
      fmt::format("chat, {} passes, masks {} / reference", passes, mask);
  const std::string own = "chat, whole hour, sessions / cache";
  if (!goals.Wanted(hour) && !goals.Wanted(stretch) && !goals.Wanted(own)) {
    return;
  }
  const std::vector<ServiceRequest> requests =
      Must(props::ReadServiceHour(goals.options().workload, Context(goals)));
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
  if (goals.Wanted(hour) || goals.Wanted(own)) {
    PlayAll(goals, requests, hour, own);
  }
}

}  // namespace kvtwin::bench
