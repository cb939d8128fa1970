#include "props/sessions/hour_player.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <random>
#include <utility>

#include "core/assert.h"
#include "core/index.h"
#include "kvtwin/rows.h"
#include "props/base/forwarding_cache.h"
#include "props/base/gauge_totals.h"

namespace kvtwin::props {
namespace {

// A causal cache without cells.
class AcceptingCache : public ForwardingCache {
 public:
  AcceptingCache() : ForwardingCache(nullptr) {}
  Status StartForward(const Batch&, bool) override { return {}; }
  Status CopyPrefix(int, int, std::int32_t) override { return {}; }
  Result<bool> CanResume(int, std::int32_t) override { return true; }
  Status Remove(int, std::int32_t, std::int32_t) override { return {}; }
};

// A row of a token: K and V are the two halves of its number.
constexpr std::int32_t kTokenHalf = 1 << 16;

std::uint64_t MixOfToken(std::int32_t token) {
  std::uint64_t mixed = static_cast<std::uint32_t>(token);
  mixed = (mixed + 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9;
  return (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
}

std::int32_t TokenOf(const TensorView& key, const TensorView& value,
                     std::int64_t i) {
  const auto low = static_cast<std::int32_t>(ElementOf<float>(key, 0, 0, i));
  const auto high = static_cast<std::int32_t>(ElementOf<float>(value, 0, 0, i));
  return low + high * kTokenHalf;
}

Status PutTokens(Cache& cache, std::span<const SessionInput> inputs) {
  std::vector<float> key;
  std::vector<float> value;
  for (const SessionInput& input : inputs) {
    const std::int32_t token = std::max(input.token, 0);
    key.push_back(static_cast<float>(token % kTokenHalf));
    value.push_back(static_cast<float>(token / kTokenHalf));
  }
  const Shape shape = {1, 1, std::ssize(inputs), 1};
  return cache.Put(DenseView(key.data(), DType::kF32, shape),
                   DenseView(value.data(), DType::kF32, shape));
}

// Calls visit(cell) for each cell that a row of a mask of bits shows.
template <typename Visit>
void VisitCells(const TensorView& mask, std::int64_t row, const Visit& visit) {
  const auto* words =
      static_cast<const std::byte*>(mask.data) + mask.stride[1] * row;
  for (std::int64_t begin = 0; begin < mask.shape[0]; begin += 64) {
    std::uint64_t word = 0;
    std::memcpy(&word, words + begin / 8, sizeof(word));
    for (; word != 0; word &= word - 1) {
      const std::int64_t cell = begin + std::countr_zero(word);
      if (cell < mask.shape[0]) visit(cell);
    }
  }
}

// The tokens that a row shows, whatever their cells, are those of the record
// from `first` to `last`.
std::string CheckRow(const KvView& view, std::int64_t row,
                     std::span<const SessionInput> record, int first,
                     int last) {
  std::uint64_t expected = 0;
  for (int i = first; i <= last; ++i) {
    expected += MixOfToken(At(record, i).token);
  }
  std::uint64_t sum = 0;
  int seen = 0;
  VisitCells(view.mask, row, [&](std::int64_t cell) {
    sum += MixOfToken(TokenOf(view.key, view.value, cell));
    ++seen;
  });
  if (sum == expected && seen == last - first + 1) return "";
  return fmt::format("row {} sees {} tokens, not those of positions {} to {}",
                     row, seen, first, last);
}

bool AreSame(const TensorView& a, const TensorView& b) {
  if (a.shape != b.shape || a.dtype != b.dtype) return false;
  for (std::int64_t row = 0; row < a.shape[1]; ++row) {
    const auto bytes = AsSize(RunBytes(a.dtype, a.shape[0]));
    if (std::memcmp(a.at(0, row), b.at(0, row), bytes) != 0) return false;
  }
  return true;
}

PagedSpec PoolFor(const HourPlay& play) {
  PagedSpec spec;
  spec.block_size = play.block_size;
  spec.blocks = AsInt(BlocksFor(play.sessions, play.block_size));
  spec.max_seq_len = play.sessions.context;
  spec.dtype = DType::kF32;
  return spec;
}

std::unique_ptr<Cache> MakeCells(const HourPlay& play, std::string_view twin) {
  auto cache = *MakeCache(play.cache, twin);
  Status status = cache->SetConfig(play.config);
  if (status.ok()) status = cache->Init(InitOf(play.sessions, DType::kF32));
  KVTWIN_ASSERT(status.ok());
  return cache;
}

class HourPlayer {
 public:
  HourPlayer(const HourPlay& play, const std::vector<ServiceRequest>& requests,
             const HourOptions& options, HourCounts& counts)
      : play_(play),
        hour_(requests),
        options_(options),
        counts_(counts),
        random_(options.seed) {
    if (play.block_size > 0) {
      pool_ = *MakePagedPool(PoolFor(play));
      auto slots = *MakePoolSlots(*pool_, play.sessions);
      slots_ = slots.get();
      cache_ = std::move(slots);
    } else {
      cache_ = MakeCells(play, "optimized");
    }
    plain_cache_ = play.both_caches ? MakeCells(play, "reference")
                                    : std::make_unique<AcceptingCache>();
    sessions_ = *MakeSessions(*cache_, play.sessions);
    plain_ = *MakeSessions(*plain_cache_, play.sessions, "reference");
  }

  std::string Play() {
    while (wrong_.empty() && Step()) {
      if (options_.progress) options_.progress(submitted_);
      if (options_.batches > 0 && Batches() >= options_.batches) break;
    }
    for (const int request : sessions_->Requests()) Finish(request, 0);
    const SessionGauges gauges = sessions_->Gauges();
    if (gauges.running + gauges.waiting > 0) Wrong("requests are left");
    counts_.batches += gauges.batches;
    AddTotals(gauges, counts_.gauges);
    if (wrong_.empty()) return "";
    return fmt::format("{}, seed {}, batch {}: {}", play_.name, options_.seed,
                       Batches(), wrong_);
  }

 private:
  std::int64_t Batches() const { return sessions_->Gauges().batches; }

  void Wrong(const std::string& text) {
    if (wrong_.empty()) wrong_ = text;
  }
  // Reports a call that fails.
  void Need(std::string_view call, const Status& status) {
    if (!status.ok()) Wrong(fmt::format("{}: {}", call, status.ToString()));
  }

  int Pick(int lo, int hi) {
    const auto range = static_cast<std::uint64_t>(hi - lo) + 1;
    return lo + AsInt(random_() % range);
  }

  // Plans a batch and computes it. Returns false if nothing is left to do.
  bool Step() {
    const SessionGauges now = sessions_->Gauges();
    for (std::int64_t i = now.waiting + now.running;
         i < 2L * play_.sessions.slots && submitted_ < std::ssize(hour_); ++i) {
      Submit();
    }
    if (play_.restless && Pick(0, 99) == 0) GiveUp();
    const std::vector<int> earlier = std::exchange(unsampled_, {});
    ++counts_.calls;
    const Result<SessionBatch> batch = sessions_->NextBatch();
    const Result<SessionBatch> other = plain_->NextBatch();
    Need("NextBatch", batch.status());
    Need("NextBatch of the reference", other.status());
    if (!wrong_.empty()) return false;
    Compare(*batch, *other);
    for (const int output : batch->outputs) {
      unsampled_.push_back(At(batch->requests, output));
    }
    Sample(earlier);  // With `ahead`; else there are none.
    if (!batch->inputs.empty()) Compute(*batch);
    if (!play_.sessions.ahead) Sample(std::exchange(unsampled_, {}));
    return wrong_.empty() && !(batch->inputs.empty() && earlier.empty());
  }

  void Submit() {
    const ServiceRequest& request = At(hour_, submitted_++);
    RequestOptions options = {.limit = request.output_length};
    if (play_.restless) {
      options.keep = Pick(-1, play_.sessions.context / 4);
      options.shift = Pick(0, 3) > 0;
      options.truncate = true;
    }
    const std::vector<SessionInput> prompt = PromptOf(request, play_.divisor);
    ++counts_.calls;
    const Result<int> made = sessions_->Submit(prompt, options);
    const Result<int> other = plain_->Submit(prompt, options);
    Need("Submit", made.status());
    if (made.ok() != other.ok() || (made.ok() && *made != *other)) {
      Wrong("Submit differs");
    }
  }

  // A user leaves, or a stop string ends an answer.
  void GiveUp() {
    const std::vector<int> requests = sessions_->Requests();
    if (requests.empty()) return;
    const int request = At(requests, Pick(0, Size(requests) - 1));
    const std::int64_t answered = sessions_->Request(request)->answered;
    Finish(request, std::min<std::int64_t>(answered, Pick(0, 8)));
  }

  void Finish(int request, std::int64_t removed) {
    ++counts_.calls;
    Need("Finish", sessions_->Finish(request, removed));
    if (!plain_->Finish(request, removed).ok()) Wrong("Finish differs");
  }

  void Sample(const std::vector<int>& requests) {
    for (const int request : requests) {
      const Result<RequestInfo> info = sessions_->Request(request);
      if (!info.ok() || info->outputs == 0) continue;  // It was given up.
      const std::int32_t token = kFirstAnswer + answers_++ % kFirstAnswer;
      ++counts_.calls;
      const Result<Ending> ending = sessions_->Sampled(request, token);
      const Result<Ending> other = plain_->Sampled(request, token);
      Need("Sampled", ending.status());
      if (ending.ok() && (!other.ok() || *ending != *other)) {
        Wrong("Sampled differs");
      }
    }
  }

  bool IsChecked() const { return Batches() % options_.every == 0; }

  void Compare(const SessionBatch& batch, const SessionBatch& other) {
    if (!std::ranges::equal(batch.inputs, other.inputs) ||
        !std::ranges::equal(batch.positions, other.positions) ||
        !std::ranges::equal(batch.sequences, other.sequences) ||
        !std::ranges::equal(batch.requests, other.requests) ||
        !std::ranges::equal(batch.outputs, other.outputs)) {
      Wrong("the reference plans another batch");
    }
    for (int i = 0; i < play_.sessions.slots; ++i) {
      const SlotInfo slot = *sessions_->Slot(i);
      const SlotInfo plain = *plain_->Slot(i);
      if (slot.request != plain.request || slot.reusable != plain.reusable ||
          slot.record.size() != plain.record.size()) {
        Wrong(fmt::format("slot {} differs", i));
      } else if (IsChecked() &&
                 !std::ranges::equal(slot.record, plain.record)) {
        Wrong(fmt::format("the record of slot {} differs", i));
      }
    }
    if (sessions_->Gauges() != plain_->Gauges()) Wrong("the gauges differ");
    if (sessions_->Requests() != plain_->Requests()) Wrong("requests differ");
    if (!IsChecked()) return;
    for (const int request : sessions_->Requests()) {
      if (*sessions_->Request(request) != *plain_->Request(request)) {
        Wrong(fmt::format("request {} differs", request));
      }
    }
  }

  // Stores the rows of the batch, and checks what attention would read.
  void Compute(const SessionBatch& batch) {
    if (play_.both_caches && slots_ == nullptr &&
        !std::ranges::equal(cache_->BatchCells(), plain_cache_->BatchCells())) {
      Wrong("the reference places the batch in other cells");
    }
    const int types = std::max(Size(play_.cache.caches), 1);
    for (int type = 0; type < types && wrong_.empty(); ++type) {
      for (Cache* cache : {cache_.get(), plain_cache_.get()}) {
        if (cache == plain_cache_.get() && !play_.both_caches) continue;
        if (type > 0) Need("SetLayerType", cache->SetLayerType(type));
        Need("Put", PutTokens(*cache, batch.inputs));
      }
      if (wrong_.empty()) CheckLayer(batch, type);
    }
    if (!IsChecked() || !wrong_.empty()) return;
    ++counts_.checks;
    Need("CheckSessions", CheckSessions(*sessions_, *cache_));
  }

  void CheckLayer(const SessionBatch& batch, int type) {
    KvView view;
    if (slots_ == nullptr) {
      const Result<KvView> got = cache_->Get();
      Need("Get", got.status());
      if (!got.ok()) return;
      view = *got;
    }
    if (play_.both_caches && slots_ == nullptr && Batches() % 16 == 0) {
      const Result<KvView> plain = plain_cache_->Get();
      Need("Get of the reference", plain.status());
      if (plain.ok() && (view.first_cell != plain->first_cell ||
                         !AreSame(view.mask, plain->mask))) {
        Wrong("the mask of the reference differs");
      }
      ++counts_.masks;
    }
    const int size = Size(batch.inputs);
    const std::vector<int> some = {0, size - 1, Pick(0, size - 1)};
    for (int i = 0; i < (IsChecked() ? size : Size(some)); ++i) {
      CheckToken(batch, view, type, IsChecked() ? i : At(some, i));
    }
  }

  void CheckToken(const SessionBatch& batch, const KvView& view, int type,
                  int row) {
    const int slot = At(batch.sequences, row);
    const SlotInfo info = *sessions_->Slot(slot);
    const int last = At(batch.positions, row);
    // The last token may be of an answer that ended when it was planned.
    if (info.request != At(batch.requests, row) || last >= Size(info.record)) {
      return;
    }
    ++counts_.rows;
    if (slots_ != nullptr) return CheckInPool(slot, info.record, last);
    const CacheSpec& spec =
        play_.cache.caches.empty() ? play_.cache : At(play_.cache.caches, type);
    const int first =
        IsWindowed(spec.kind) ? std::max(last - *spec.window, 0) : 0;
    Wrong(CheckRow(view, row, info.record, first, last));
  }

  // The first rows of the sequence are those of the record, in its order.
  void CheckInPool(int slot, std::span<const SessionInput> record, int last) {
    const auto views = pool_->Views(*slots_->Sequence(slot), 0);
    Need("Views", views.status());
    if (!views.ok()) return;
    int next = 0;
    for (const PagedView& view : *views) {
      for (int i = 0; i < view.length && next <= last; ++i, ++next) {
        if (TokenOf(view.key, view.value, i) != At(record, next).token) {
          return Wrong(fmt::format("slot {} has another token at position {}",
                                   slot, next));
        }
      }
    }
    if (next <= last) Wrong(fmt::format("slot {} lacks rows", slot));
  }

  const HourPlay& play_;
  const std::vector<ServiceRequest>& hour_;
  const HourOptions& options_;
  HourCounts& counts_;
  std::mt19937_64 random_;
  std::unique_ptr<PagedPool> pool_;
  std::unique_ptr<Cache> cache_;
  PoolSlots* slots_ = nullptr;  // The same as cache_, over a pool.
  std::unique_ptr<Cache> plain_cache_;
  std::unique_ptr<Sessions> sessions_;
  std::unique_ptr<Sessions> plain_;
  std::int64_t submitted_ = 0;
  std::int32_t answers_ = 0;
  std::vector<int> unsampled_;  // Requests with an output of the last batch.
  std::string wrong_;
};

}  // namespace

HourPlay WholeHour() {
  HourPlay play = {.name = "whole hour",
                   .sessions = {.slots = 16, .context = 1 << 17, .batch = 512},
                   .both_caches = false,
                   .restless = false};
  play.cache.placement = Placement::kScatter;
  play.cache.shift.kind = ShiftKind::kIdentity;
  play.config.cache_padding = 256;
  play.config.mask_dtype = DType::kBits;
  return play;
}

std::vector<HourPlay> DividedHours() {
  HourPlay play = {.sessions = {.slots = 4, .context = 128, .batch = 32},
                   .divisor = 64};
  play.cache.shift.kind = ShiftKind::kIdentity;
  play.config.mask_dtype = DType::kBits;
  HourPlay ahead = play;
  ahead.name = "ahead";
  ahead.sessions.ahead = true;
  HourPlay layers = play;
  layers.name = "layers";
  layers.sessions.choice = SlotChoice::kOwnPrefix;
  layers.cache.kind = Kind::kWrapper;
  for (const Kind kind : {Kind::kSwaMem, Kind::kCausal}) {
    CacheSpec& inner = layers.cache.caches.emplace_back(play.cache);
    inner.kind = kind;
    if (IsWindowed(kind)) inner.window = 32;
    if (IsWindowed(kind)) inner.memory = 40;
    inner.placement = Placement::kScatter;
  }
  HourPlay pool = play;
  pool.name = "pool";
  pool.block_size = 16;
  pool.cache.shift.kind = ShiftKind::kNone;  // As pools.
  return {ahead, layers, pool};
}

std::string PlayHour(const HourPlay& play,
                     const std::vector<ServiceRequest>& requests,
                     const HourOptions& options, HourCounts& counts) {
  return HourPlayer(play, requests, options, counts).Play();
}

}  // namespace kvtwin::props
