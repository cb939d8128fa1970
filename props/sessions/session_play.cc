#include "props/sessions/session_play.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "core/index.h"
#include "core/names.h"
#include "props/base/forwarding_cache.h"
#include "props/base/gauge_totals.h"
#include "props/sessions/session_judge.h"
#include "props/sessions/stand_in_model.h"

namespace kvtwin::props {
namespace {

using Inputs = std::vector<SessionInput>;

constexpr int kVocabulary = 3;  // Few tokens, so that prompts share prefixes.

struct Setup {
  SessionsSpec sessions;
  CacheSpec cache;
  CacheConfig config;
  int block_size = 0;  // 0: over cells; else the subject is over a pool.
  // The cache refuses each of so many copies and removals of a part; 0: none.
  int refuses_every = 0;
};

void DrawWindow(const Pick& pick, CacheSpec& spec) {
  if (IsWindowed(spec.kind)) spec.window = pick(0, 8);
  if (spec.kind == Kind::kSwaMem) spec.memory = *spec.window + pick(0, 4);
  if (spec.kind == Kind::kChunked) spec.chunk = pick(1, 8);
}

Setup DrawSetup(const Pick& pick) {
  Setup setup;
  setup.sessions.slots = pick(1, 4);
  setup.sessions.context = Chance(pick, 20) ? pick(1, 4) : pick(4, 24);
  setup.sessions.batch = pick(1, 12);
  setup.sessions.choice =
      Chance(pick, 70) ? SlotChoice::kAnyPrefix : SlotChoice::kOwnPrefix;
  setup.sessions.ahead = Chance(pick, 50);
  CacheSpec& spec = setup.cache;
  spec.kind = OneOf(pick, {Kind::kCausal, Kind::kCausal, Kind::kSwa,
                           Kind::kSwaMem, Kind::kChunked, Kind::kWrapper});
  spec.placement = OneOf(pick, {Placement::kContiguous, Placement::kScatter});
  spec.shift.kind = Chance(pick, 75) ? ShiftKind::kTagAdd : ShiftKind::kNone;
  if (spec.kind == Kind::kWrapper) {
    for (const Kind kind : {Kind::kSwaMem, Kind::kCausal}) {
      CacheSpec& inner = spec.caches.emplace_back();
      inner.kind = kind;
      inner.placement = spec.placement;
      inner.shift = spec.shift;
      DrawWindow(pick, inner);
    }
  }
  DrawWindow(pick, spec);
  if (spec.kind == Kind::kCausal && Chance(pick, 30)) {
    setup.block_size = pick(1, 4);
    spec.shift.kind = ShiftKind::kNone;  // Pools have none.
  }
  setup.config.cache_padding = OneOf(pick, {1, 1, 4, 8});
  // Histories that are cut short draw the least or the largest number.
  const int drawn = pick(0, 9);
  if (setup.block_size == 0 && drawn > 3 && drawn < 7) {
    setup.refuses_every = drawn - 2;
  }
  return setup;
}

std::string Text(const Setup& setup) {
  const SessionsSpec& spec = setup.sessions;
  const CacheSpec& cache = setup.cache;
  std::string text = fmt::format(
      "slots={} context={} batch={} choice={} ahead={} kind={} placement={} "
      "shift={} padding={}",
      spec.slots, spec.context, spec.batch,
      spec.choice == SlotChoice::kAnyPrefix ? "any" : "own", spec.ahead,
      At(kKindNames, cache.kind),
      cache.placement == Placement::kScatter ? "scatter" : "contiguous",
      cache.shift.kind == ShiftKind::kNone ? "none" : "tag_add",
      setup.config.cache_padding);
  const CacheSpec& windowed = cache.caches.empty() ? cache : cache.caches[0];
  if (windowed.window) text += fmt::format(" window={}", *windowed.window);
  if (windowed.memory) text += fmt::format(" memory={}", *windowed.memory);
  if (setup.block_size > 0) {
    text += fmt::format(" block_size={}", setup.block_size);
  }
  if (cache.chunk > 0) text += fmt::format(" chunk={}", cache.chunk);
  if (setup.refuses_every > 0) {
    text += fmt::format(" refuses_every={}", setup.refuses_every);
  }
  return text;
}

std::string Text(std::span<const SessionInput> inputs) {
  std::string text;
  for (const SessionInput& input : inputs) {
    text += fmt::format(" {}", input.token);
    if (input.multimodal != 0) text += fmt::format("m{}", input.multimodal);
    if (input.same_batch != 0) text += fmt::format("g{}", input.same_batch);
  }
  return text;
}

std::unique_ptr<Cache> MakeOf(const Setup& setup, std::string_view twin,
                              int slots) {
  auto cache = *MakeCache(setup.cache, twin);
  SessionsSpec spec = setup.sessions;
  spec.slots = slots;
  Status status = cache->SetConfig(setup.config);
  if (status.ok()) status = cache->Init(InitOf(spec, DType::kF32));
  return status.ok() ? std::move(cache) : nullptr;
}

// Records which tokens of the last batch have media: without an encoder, no
// result depends on them. Refuses some copies, and some removals of a part of a
// sequence, as a cache may (Q7, Q10).
class PlayedCache : public ForwardingCache {
 public:
  PlayedCache(std::unique_ptr<Cache> cache, int refuses_every)
      : ForwardingCache(std::move(cache)), refuses_every_(refuses_every) {}
  Status StartForward(const Batch& batch, bool reserve) override {
    media_.assign(batch.multimodal.begin(), batch.multimodal.end());
    return ForwardingCache::StartForward(batch, reserve);
  }
  // A cache without layer types is its own (stand_in_model.cc).
  Cache* UnderlyingCache() override {
    Cache* const underlying = cache_->UnderlyingCache();
    return underlying == cache_.get() ? this : underlying;
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    if (Refuses()) return Refusal();
    return ForwardingCache::CopyPrefix(src, dst, len);
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    if (begin > 0 && Refuses()) return Refusal();
    return ForwardingCache::Remove(seq, begin, end);
  }
  const std::vector<int>& media() const { return media_; }

 private:
  bool Refuses() {
    return refuses_every_ > 0 && ++calls_ % refuses_every_ == 0;
  }
  static Status Refusal() {
    return {StatusCode::kNotSupported, "this call is refused"};
  }

  const int refuses_every_;
  int calls_ = 0;
  std::vector<int> media_;
};

class Player {
 public:
  Player(const Pick& pick, const SessionsMaker& make,
         const PlayOptions& options, PlayCounts& counts)
      : pick_(pick),
        options_(options),
        counts_(&counts),
        setup_(DrawSetup(pick)),
        sights_(SightsOf(setup_.cache)),
        pool_(*MakePagedPool(
            PoolOf(setup_.sessions, std::max(setup_.block_size, 1)),
            options.cache_twin)),
        slots_(*MakePoolSlots(*pool_, setup_.sessions)),
        cells_(MakeOf(setup_, options.cache_twin, setup_.sessions.slots),
               setup_.refuses_every),
        cache_(setup_.block_size > 0 ? static_cast<Cache*>(slots_.get())
                                     : &cells_),
        plain_cache_(MakeOf(setup_, "reference", setup_.sessions.slots),
                     setup_.refuses_every),
        sessions_(make(*cache_, setup_.sessions)),
        plain_(SessionsOf("reference")(plain_cache_, setup_.sessions)),
        judge_(setup_.sessions, sights_, KeepsAll(setup_)) {
    Log(Text(setup_));
  }

  PlayResult Play() {
    for (int i = 0; wrong_.empty(); ++i) {
      const bool goes_on =
          options_.begin_step ? options_.begin_step() : i < options_.steps;
      if (!goes_on) break;
      Step();
    }
    if (wrong_.empty()) AddGauges();
    return {std::move(log_), std::move(wrong_)};
  }

 private:
  static bool KeepsAll(const Setup& setup) {
    const Kind kind = setup.cache.kind;
    return setup.refuses_every == 0 &&
           (kind == Kind::kCausal || kind == Kind::kChunked);
  }

  void Wrong(const std::string& text) {
    if (wrong_.empty()) wrong_ = text;
  }
  void Log(std::string text) { log_.push_back(std::move(text)); }

  void Step() {
    if (Chance(pick_, 35)) Submit();
    if (Chance(pick_, 6)) Cancel();
    if (!batch_.inputs.empty()) {
      Resolve();
      Compute();
    }
    for (const int request : judge_.Unsampled()) {
      if (Chance(pick_, 70)) Sample(request);
    }
    if (Chance(pick_, 8)) Adopt();
    if (wrong_.empty()) Next();
  }

  // Takes out the group that is not whole at the end.
  static void DropCutGroup(Inputs& inputs) {
    for (int i = 0; i < Size(inputs); ++i) {
      if (i + At(inputs, i).same_batch >= Size(inputs)) {
        inputs.resize(AsSize(i));
      }
    }
  }

  Inputs DrawPrompt() {
    Inputs prompt;
    if (!known_.empty() && Chance(pick_, 75)) {
      prompt = At(known_, pick_(0, Size(known_) - 1));
      prompt.resize(AsSize(pick_(0, Size(prompt))));
      DropCutGroup(prompt);
    }
    const int context = setup_.sessions.context;
    for (int more = pick_(prompt.empty() ? 1 : 0, context / 2 + 1); more > 0;) {
      const int largest = std::min({more, 4, setup_.sessions.batch, context});
      const int group = Chance(pick_, 8) ? pick_(1, largest) : 1;
      for (int i = 0; i < group; ++i, --more) {
        SessionInput input = {.token = pick_(0, kVocabulary - 1)};
        if (Chance(pick_, 5)) input.multimodal = AsSize(pick_(1, 2));
        if (i == 0) input.same_batch = group - 1;
        prompt.push_back(input);
      }
    }
    return prompt;
  }

  void Submit() {
    Inputs prompt = DrawPrompt();
    RequestOptions request_options = {
        .keep = Chance(pick_, 25) ? -1 : pick_(0, setup_.sessions.context + 1),
        .limit = Chance(pick_, 30) ? pick_(1, 6) : 0,
        .reuse = !Chance(pick_, 8),
        .shift = !Chance(pick_, 20)};
    const int context = setup_.sessions.context;
    if (Size(prompt) > context) {
      for (SessionInput& input : prompt) input.same_batch = 0;
      request_options.truncate = true;
    }
    Log(fmt::format("submit keep={} limit={} reuse={} shift={}:{}",
                    request_options.keep, request_options.limit,
                    request_options.reuse, request_options.shift,
                    Text(prompt)));
    const Result<int> request = sessions_->Submit(prompt, request_options);
    if (!request.ok()) return Wrong(request.status().ToString());
    if (!options_.alone) {
      const Result<int> other = plain_->Submit(prompt, request_options);
      if (!other.ok() || *other != *request) return Wrong("Submit differs");
    }
    ++counts_->requests;
    judge_.Submit(*request,
                  Truncated(std::move(prompt), request_options.keep, context),
                  request_options);
  }

  std::vector<int> Alive() const {
    std::vector<int> alive;
    for (const auto& [request, told] : judge_.requests()) {
      if (told.removed < 0) alive.push_back(request);
    }
    return alive;
  }

  void Cancel() {
    const std::vector<int> alive = Alive();
    if (alive.empty()) return;
    Finish(At(alive, pick_(0, Size(alive) - 1)), 0);
  }

  void Finish(int request, std::int64_t removed) {
    Log(fmt::format("finish {} removed={}", request, removed));
    const Status status = sessions_->Finish(request, removed);
    if (!status.ok()) return Wrong(status.ToString());
    if (!options_.alone && !plain_->Finish(request, removed).ok()) {
      return Wrong("Finish differs");
    }
    Remember(request);
    judge_.Finish(request, removed);
  }

  // A free slot gets tokens that another has, as if they came from a file.
  void Adopt() {
    std::vector<int> free;
    for (int i = 0; i < setup_.sessions.slots; ++i) {
      if (sessions_->Slot(i)->request < 0) free.push_back(i);
    }
    if (Size(free) < 2 || !wrong_.empty()) return;
    const int source = At(free, pick_(0, Size(free) - 1));
    const int slot = At(free, pick_(0, Size(free) - 1));
    if (slot == source) return;
    Inputs record = judge_.ExactOf(source);
    record.resize(AsSize(pick_(0, Size(record))));
    DropCutGroup(record);
    Log(fmt::format("adopt {}, from {}:{}", slot, source, Text(record)));
    Status status = Give(*cache_, source, slot, Size(record));
    if (status.ok()) status = sessions_->Adopt(slot, record);
    if (!options_.alone) {
      if (status.ok()) {
        status = Give(plain_cache_, source, slot, Size(record));
      }
      if (status.ok()) status = plain_->Adopt(slot, record);
    }
    if (!status.ok()) return Wrong("adopt: " + status.ToString());
    judge_.Adopt(slot, std::move(record));
    ++counts_->adopted;
  }

  // Makes `slot` hold the first tokens of `source`, and no others. A copy that
  // is refused is made again: no two calls in a row are refused.
  static Status Give(Cache& cache, int source, int slot, int tokens) {
    Status status = cache.Remove(slot, 0, kOpenEnd);
    if (status.ok()) status = cache.CopyPrefix(source, slot, tokens);
    if (status.code() == StatusCode::kNotSupported) {
      status = cache.CopyPrefix(source, slot, tokens);
    }
    return status;
  }

  // Later prompts may begin like this request.
  void Remember(int request) {
    const SessionJudge::Told& told = judge_.requests().at(request);
    Inputs inputs = told.story.inputs();
    if (Chance(pick_, 20) && told.exact == told.story.size() &&
        told.story.size() > 0) {
      Replay(inputs);
    }
    if (inputs.empty()) inputs = told.prompt;
    if (Size(known_) < 6) {
      known_.push_back(std::move(inputs));
    } else {
      At(known_, pick_(0, 5)) = std::move(inputs);
    }
  }

  // A fresh cache that is fed the record computes the same.
  void Replay(const Inputs& inputs) {
    const auto fresh = MakeOf(setup_, "reference", 1);
    Story story(sights_);
    States expected;
    States found;
    for (int begin = 0; begin < Size(inputs);) {
      const int end =
          std::min(begin + pick_(1, setup_.sessions.batch), Size(inputs));
      std::vector<std::int32_t> positions;
      for (int i = begin; i < end; ++i) {
        positions.push_back(i);
        expected = story.Add(At(inputs, i));
      }
      const std::vector<int> sequences(positions.size(), 0);
      const Status status = fresh->StartForward({positions, sequences}, false);
      if (!status.ok()) return Wrong("replay: " + status.ToString());
      const SessionBatch batch = {
          std::span(inputs).subspan(AsSize(begin), AsSize(end - begin)),
          positions,
          sequences,
          sequences,
          {}};
      const Computed computed = ComputeIn(*fresh, batch);
      if (!computed.wrong.empty()) return Wrong("replay: " + computed.wrong);
      found = computed.states.back();
      begin = end;
    }
    ++counts_->replayed;
    if (found != expected) Wrong("replay: a fresh cache answers otherwise");
  }

  Computed ComputeIn(Cache& cache, const SessionBatch& batch) const {
    return props::Compute(cache, sights_, batch);
  }

  // Samples the tokens that the planned batch needs.
  void Resolve() {
    for (const int request : Alive()) {
      if (judge_.Needs(request)) Sample(request);
    }
  }

  void Sample(int request) {
    if (!wrong_.empty()) return;
    const std::uint64_t output = judge_.NextOutput(request);
    const std::int64_t answered = judge_.requests().at(request).answered;
    if (Chance(pick_, 8)) return Finish(request, 0);
    if (Chance(pick_, 6)) {
      return Finish(request,
                    pick_(0, AsInt(std::min<std::int64_t>(answered, 4))));
    }
    const auto token = static_cast<std::int32_t>(output % kVocabulary);
    Log(fmt::format("sampled {} {}", request, token));
    const Result<Ending> ending = sessions_->Sampled(request, token);
    if (!ending.ok()) return Wrong(ending.status().ToString());
    if (!options_.alone) {
      const Result<Ending> other = plain_->Sampled(request, token);
      if (!other.ok() || *other != *ending) return Wrong("Sampled differs");
    }
    const bool ends = *ending != Ending::kNone;
    if (ends) Remember(request);
    if (judge_.Sampled(request, token) != *ending) Wrong("it ends otherwise");
  }

  void Compute() {
    if (!wrong_.empty()) return;
    const Computed computed = setup_.block_size > 0
                                  ? props::Compute(*pool_, *slots_, batch_)
                                  : ComputeIn(*cache_, batch_);
    if (!computed.wrong.empty()) return Wrong(computed.wrong);
    const Status status = CheckSessions(*sessions_, *cache_);
    if (!status.ok()) return Wrong(status.ToString());
    Wrong(judge_.Compute(batch_, computed.states));
    counts_->judged += std::ssize(computed.states);
    batch_ = {};
  }

  void Next() {
    const Result<SessionBatch> batch = sessions_->NextBatch();
    if (!batch.ok()) return Wrong("next: " + batch.status().ToString());
    batch_ = *batch;
    Log(fmt::format("next: positions {} sequences {} requests {} outputs {}:{}",
                    batch_.positions, batch_.sequences, batch_.requests,
                    batch_.outputs, Text(batch_.inputs)));
    if (!options_.alone) CompareNext();
    if (wrong_.empty()) Wrong(judge_.Plan(*sessions_, batch_));
    if (wrong_.empty()) CompareMedia();
  }

  // The cache is told which tokens have media; slots of a pool ignore them.
  void CompareMedia() {
    if (setup_.block_size > 0 || batch_.inputs.empty()) return;
    std::vector<int> expected;
    for (int i = 0; i < Size(batch_.inputs); ++i) {
      if (At(batch_.inputs, i).multimodal != 0) expected.push_back(i);
    }
    if (cells_.media() == expected) return;
    Wrong(fmt::format("StartForward has media {}, the batch has them at {}",
                      cells_.media(), expected));
  }

  void CompareNext() {
    const Result<SessionBatch> batch = plain_->NextBatch();
    if (!batch.ok()) return Wrong("reference: " + batch.status().ToString());
    if (!std::ranges::equal(batch_.inputs, batch->inputs) ||
        !std::ranges::equal(batch_.positions, batch->positions) ||
        !std::ranges::equal(batch_.sequences, batch->sequences) ||
        !std::ranges::equal(batch_.requests, batch->requests) ||
        !std::ranges::equal(batch_.outputs, batch->outputs)) {
      return Wrong(fmt::format(
          "the reference plans: positions {} sequences {} requests {} outputs "
          "{}:{}",
          batch->positions, batch->sequences, batch->requests, batch->outputs,
          Text(batch->inputs)));
    }
    for (int i = 0; i < setup_.sessions.slots; ++i) {
      const SlotInfo slot = *sessions_->Slot(i);
      const SlotInfo other = *plain_->Slot(i);
      if (slot.request != other.request || slot.reusable != other.reusable ||
          !std::ranges::equal(slot.record, other.record)) {
        return Wrong(fmt::format("slot {} differs", i));
      }
    }
    for (const int request : Alive()) {
      if (*sessions_->Request(request) != *plain_->Request(request)) {
        return Wrong(fmt::format("request {} differs", request));
      }
    }
    if (sessions_->Gauges() != plain_->Gauges()) Wrong("the gauges differ");
    if (sessions_->Requests() != plain_->Requests()) Wrong("requests differ");
  }

  void AddGauges() { AddTotals(sessions_->Gauges(), counts_->gauges); }

  const Pick& pick_;
  PlayOptions options_;
  PlayCounts* counts_;
  Setup setup_;
  std::vector<Sight> sights_;
  std::unique_ptr<PagedPool> pool_;
  std::unique_ptr<PoolSlots> slots_;
  PlayedCache cells_;
  Cache* cache_;  // The slots of the pool, or the cells.
  PlayedCache plain_cache_;
  std::unique_ptr<Sessions> sessions_;
  std::unique_ptr<Sessions> plain_;
  SessionJudge judge_;
  SessionBatch batch_;  // Planned, and not computed.
  std::vector<Inputs> known_;
  std::vector<std::string> log_;
  std::string wrong_;
};

}  // namespace

void PlayCounts::Add(const PlayCounts& other) {
  AddTotals(other.gauges, gauges);
  requests += other.requests;
  judged += other.judged;
  replayed += other.replayed;
  adopted += other.adopted;
}

SessionsMaker SessionsOf(std::string_view twin) {
  return [twin](Cache& cache, const SessionsSpec& spec) {
    return *MakeSessions(cache, spec, twin);
  };
}

PlayResult RunPlay(const Pick& pick, const SessionsMaker& make,
                   const PlayOptions& options, PlayCounts& counts) {
  return Player(pick, make, options, counts).Play();
}

std::string PlaySessions(const Pick& pick, const SessionsMaker& make,
                         const PlayOptions& options, PlayCounts& counts) {
  const PlayResult result = RunPlay(pick, make, options, counts);
  if (result.wrong.empty()) return "";
  return fmt::format("{}\nwrong: {}\n", fmt::join(result.log, "\n"),
                     result.wrong);
}

std::string PlaySessions(std::uint64_t seed, const SessionsMaker& make,
                         const PlayOptions& options, PlayCounts& counts) {
  std::mt19937_64 random(seed);
  const Pick pick = [&random](int lo, int hi) {
    const auto range = static_cast<std::uint64_t>(hi - lo) + 1;
    return lo + static_cast<int>(random() % range);
  };
  const std::string wrong = PlaySessions(pick, make, options, counts);
  return wrong.empty() ? wrong : fmt::format("seed {}: {}", seed, wrong);
}

}  // namespace kvtwin::props
