// Makes caches, pools, attention and sessions by the name of their twin, and
// defines the snapshot functions of caches that have no snapshots. This is the
// only file of core/ that calls the twins, which include core/; core/twin.h
// declares their functions.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <set>

#include "core/guarded_paged.h"
#include "core/guarded_sessions.h"
#include "core/names.h"
#include "core/refusals.h"
#include "core/state_checks.h"
#include "core/twin.h"
#include "kvtwin/attention.h"
#include "kvtwin/cache.h"
#include "kvtwin/legacy.h"
#include "kvtwin/save.h"

namespace kvtwin {
namespace {

// The functions that make a twin's caches and pools.
struct Makers {
  std::string_view name;
  std::unique_ptr<Cache> (*make_cache)(const CacheSpec&);
  Result<std::unique_ptr<PagedPool>> (*make_pool)(const PagedSpec&);
  std::unique_ptr<Attention> (*make_attention)();  // Null: it has none.
  std::unique_ptr<Sessions> (*make_sessions)(Cache&, const SessionsSpec&);
  bool has_states;  // It has recurrent caches.
};
constexpr std::array kMakers = {
    Makers{"reference", &reference::MakeCache, &reference::MakePagedPool,
           &reference::MakeAttention, &reference::MakeSessions, true},
    Makers{"optimized", &optimized::MakeCache, &optimized::MakePagedPool,
           &optimized::MakeAttention, &optimized::MakeSessions, true},
#ifdef KVTWIN_CUDA
    Makers{"cuda", &optimized::cuda::MakeCache, &optimized::cuda::MakePagedPool,
           nullptr, &optimized::MakeSessions, false},
#endif
};

constexpr auto kNames = [] {
  std::array<std::string_view, kMakers.size()> names;
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = kMakers[i].name;
  return names;
}();

Result<const Makers*> Find(std::string_view twin) {
  for (const Makers& makers : kMakers) {
    if (makers.name == twin) return &makers;
  }
  return Invalid("twin is '{}', there are {}", twin, fmt::join(kNames, ", "));
}

Status CheckShift(const Shift& shift) {
  const Rope& rope = shift.rope;
  Status status = CheckEnum("shift", shift.kind, kShiftNames.size() + 1);
  if (status.ok()) status = CheckEnum("rope pairing", rope.pairing, 2);
  if (!status.ok()) return status;
  if (shift.kind == ShiftKind::kCustom && !shift.fn) {
    return Invalid("shift is custom, but there is no function");
  }
  if (shift.kind != ShiftKind::kRope) return {};
  if (!std::isfinite(rope.base) || rope.base <= 0) {
    return Invalid("rope base is {}", rope.base);
  }
  if (!std::isfinite(rope.scale)) {
    return Invalid("rope scale is {}", rope.scale);
  }
  if (rope.dims < 0 || rope.dims % 2 != 0) {
    return Invalid("rope dims is {}, it must be even and not negative",
                   rope.dims);
  }
  return {};
}

// Refuses more states of a sequence than can be counted (R2).
Status CheckStates(const CacheSpec& spec) {
  const std::int64_t checkpoints =
      spec.checkpoint_every > 0 ? spec.checkpoints : 0;
  const std::int64_t states = checkpoints + 2 + spec.pins + spec.drafts;
  constexpr int kMax = std::numeric_limits<std::int32_t>::max();
  if (states <= kMax) return {};
  return Invalid("a sequence would have {} states, there can be {}", states,
                 kMax);
}

// Makes the memory unbounded: it is if it is at least the capacity (S3).
void NeverEvict(CacheSpec& spec) {
  if (spec.kind == Kind::kSwa) spec.kind = Kind::kSwaMem;
  spec.memory = kOpenEnd;
}

}  // namespace

Status CheckSpec(const CacheSpec& spec) {
  Status known = CheckEnum("kind", spec.kind, kKindNames.size());
  if (known.ok()) known = CheckEnum("placement", spec.placement, 2);
  if (!known.ok()) return known;
  const bool windowed = IsWindowed(spec.kind);
  if (windowed && spec.window.value_or(0) < 0) {
    return NotNegative("window", *spec.window);
  }
  if (spec.kind == Kind::kSwaMem && spec.memory.value_or(0) < 0) {
    return NotNegative("memory", *spec.memory);
  }
  if (spec.kind == Kind::kChunked && spec.chunk < 1) {
    return AtLeastOne("chunk", spec.chunk);
  }
  if (spec.kind == Kind::kRecurrent) {
    Status status = NotNegative("checkpoint_every", spec.checkpoint_every);
    if (status.ok()) status = NotNegative("checkpoints", spec.checkpoints);
    if (status.ok()) status = NotNegative("pins", spec.pins);
    if (status.ok()) status = NotNegative("drafts", spec.drafts);
    if (status.ok()) status = CheckStates(spec);
    if (!status.ok()) return status;
  }
  if (!IsWrapper(spec.kind)) return CheckShift(spec.shift);
  if (spec.caches.empty()) return Invalid("caches: a wrapper needs some");
  for (const CacheSpec& inner : spec.caches) {
    if (IsWrapper(inner.kind)) {
      return Invalid("caches: a wrapper holds another wrapper");
    }
    if (Status status = CheckSpec(inner); !status.ok()) return status;
  }
  return {};
}

Result<CacheState> Cache::Snapshot() const {
  CacheState state;
  Status status = SnapshotTo(state);
  if (!status.ok()) return status;
  return state;
}

Result<std::string> Cache::WhyNotResume(int seq, std::int32_t pos) {
  const Result<bool> can = CanResume(seq, pos);
  if (!can.ok()) return can.status();
  return *can ? std::string() : fmt::format("it cannot resume at {}", pos);
}

// Looks at the ends of all tokens: a sequence resumes after a token, or at 0.
Result<std::int32_t> Cache::ResumeBefore(int seq, std::int32_t pos) {
  Result<bool> can = CanResume(seq, pos);
  if (!can.ok()) return can.status();
  if (*can) return pos;
  std::vector<CellEntry> entries;
  ListCells(entries);
  std::set<std::int32_t, std::greater<>> ends;
  for (const CellEntry& entry : entries) {
    const bool before = entry.sequence == seq && entry.position < pos;
    if (before) ends.insert(entry.position + 1);
  }
  for (const std::int32_t end : ends) {
    can = CanResume(seq, end);
    if (!can.ok()) return can.status();
    if (*can) return end;
  }
  return 0;
}

Status Cache::SnapshotTo(CacheState&) const {
  return {StatusCode::kNotSupported, "this cache has no snapshots"};
}

Status Cache::Restore(const CacheState&) {
  return {StatusCode::kNotSupported, "this cache has no snapshots"};
}

Result<CacheState> Cache::SnapshotOf(int sequence) const {
  Status status = NotNegative("sequence", sequence);
  if (!status.ok()) return status;
  const Result<CacheState> state = Snapshot();
  if (!state.ok()) return state;
  CacheState taken = SequenceOf(*state, sequence);
  if (!taken.cells.empty() || !taken.caches.empty()) return taken;
  status = CheckState(*state);
  if (status.ok()) return taken;
  return Status(
      status.code(),
      "Snapshot returned a state that no cache can have: " + status.message());
}

Status Cache::Commit(int, std::span<const int>) {
  return {StatusCode::kNotSupported, "this cache has no drafts"};
}

Status Cache::Checkpoint(int) {
  return {StatusCode::kNotSupported, "this cache pins no states"};
}

Status Cache::AddSequence(int, const CacheState&) {
  return {StatusCode::kNotSupported, "this cache has no snapshots"};
}

std::span<const std::string_view> TwinNames() { return kNames; }

bool HasRecurrent(const CacheSpec& spec) {
  return spec.kind == Kind::kRecurrent ||
         std::ranges::any_of(spec.caches, HasRecurrent);
}

Result<std::unique_ptr<Cache>> MakeCache(const CacheSpec& spec,
                                         std::string_view twin) {
  if (Status status = CheckSpec(spec); !status.ok()) return status;
  const Result<const Makers*> makers = Find(twin);
  if (!makers.ok()) return makers.status();
  if (!(*makers)->has_states && HasRecurrent(spec)) {
    return Status(StatusCode::kNotSupported,
                  "the twin cuda has no recurrent caches");
  }
  return (*makers)->make_cache(spec);
}

Result<std::unique_ptr<PagedPool>> MakePagedPool(const PagedSpec& spec,
                                                 std::string_view twin) {
  if (Status status = CheckPagedSpec(spec); !status.ok()) return status;
  const Result<const Makers*> makers = Find(twin);
  if (!makers.ok()) return makers.status();
  if (!(*makers)->has_states &&
      (spec.window || spec.states || !spec.groups.empty())) {
    return Status(StatusCode::kNotSupported,
                  "the twin cuda has no pools with windows, states or groups");
  }
  return (*makers)->make_pool(spec);
}

Result<std::unique_ptr<Attention>> MakeAttention(std::string_view twin) {
  const Result<const Makers*> makers = Find(twin);
  if (!makers.ok()) return makers.status();
  if ((*makers)->make_attention == nullptr) {
    return Status(StatusCode::kNotSupported,
                  "the twin cuda has no Attention; use Decode (kvtwin/cuda.h)");
  }
  return (*makers)->make_attention();
}

Result<std::unique_ptr<Sessions>> MakeSessions(Cache& cache,
                                               const SessionsSpec& spec,
                                               std::string_view twin) {
  if (Status status = CheckSessionsSpec(spec); !status.ok()) return status;
  const Result<const Makers*> makers = Find(twin);
  if (!makers.ok()) return makers.status();
  return (*makers)->make_sessions(cache, spec);
}

int PagedSequence::SeqLen() const {
  const Result<int> len = pool_->SeqLen(sequence_);
  return len.ok() ? *len : 0;
}

Result<LegacyCache> LegacyCache::Make(CacheSpec spec, std::string_view twin) {
  NeverEvict(spec);
  for (CacheSpec& inner : spec.caches) NeverEvict(inner);
  auto cache = MakeCache(spec, twin);
  if (!cache.ok()) return cache.status();
  return LegacyCache(std::move(*cache));
}

Status LegacyCache::Init(DType dtype, std::int32_t capacity) {
  return cache_->Init({.dtype = dtype,
                       .max_sequences = 1,
                       .capacity = capacity,
                       .max_batch = capacity});
}

Status LegacyCache::StartForward(std::span<const std::int32_t> positions,
                                 std::span<const int> sequences) {
  return cache_->StartForward({.positions = positions, .sequences = sequences},
                              /*reserve=*/false);
}

}  // namespace kvtwin
