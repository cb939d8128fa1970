#include <fmt/format.h>

#include <array>
#include <cmath>

#include "core/guarded_paged.h"
#include "core/refusals.h"
#include "core/twin.h"
#include "kvtwin/cache.h"
#include "kvtwin/legacy.h"
#include "kvtwin/save.h"

namespace kvtwin {
namespace {

using MakeFn = std::unique_ptr<Cache> (*)(const CacheSpec&);
constexpr std::array<std::string_view, 2> kNames = {"reference", "optimized"};
constexpr std::array<MakeFn, 2> kMakers = {&reference::MakeCache,
                                           &optimized::MakeCache};

using MakePoolFn = std::unique_ptr<PagedPool> (*)(const PagedSpec&);
constexpr std::array<MakePoolFn, 2> kPoolMakers = {&reference::MakePagedPool,
                                                   &optimized::MakePagedPool};

// By the one of these, in the order of kNames, that is `twin`'s.
template <class Made, class Spec>
Result<Made> MakeBy(const std::array<Made (*)(const Spec&), 2>& makers,
                    std::string_view twin, const Spec& spec) {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == twin) return makers[i](spec);
  }
  return Invalid("twin is '{}', there are {}", twin, fmt::join(kNames, ", "));
}

Status CheckShift(const Shift& shift) {
  const Rope& rope = shift.rope;
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

Status CheckSpec(const CacheSpec& spec) {
  const bool windowed = spec.kind == Kind::kSwa || spec.kind == Kind::kSwaMem;
  if (windowed && spec.window.value_or(0) < 0) {
    return NotNegative("window", *spec.window);
  }
  if (spec.kind == Kind::kSwaMem && spec.memory.value_or(0) < 0) {
    return NotNegative("memory", *spec.memory);
  }
  if (spec.kind == Kind::kChunked && spec.chunk < 1) {
    return AtLeastOne("chunk", spec.chunk);
  }
  if (spec.kind != Kind::kWrapper) return CheckShift(spec.shift);
  if (spec.caches.empty()) return Invalid("caches: a wrapper needs some");
  for (const CacheSpec& inner : spec.caches) {
    if (inner.kind == Kind::kWrapper) {
      return Invalid("caches: a wrapper holds another wrapper");
    }
    if (Status status = CheckSpec(inner); !status.ok()) return status;
  }
  return {};
}

// A memory of at least the capacity is unbounded.
void NeverEvict(CacheSpec& spec) {
  if (spec.kind == Kind::kSwa) spec.kind = Kind::kSwaMem;
  spec.memory = kOpenEnd;
}

}  // namespace

Result<CacheState> Cache::Snapshot() const {
  CacheState state;
  Status status = SnapshotTo(state);
  if (!status.ok()) return status;
  return state;
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
  return SequenceOf(*state, sequence);
}

Status Cache::AddSequence(int, const CacheState&) {
  return {StatusCode::kNotSupported, "this cache has no snapshots"};
}

std::span<const std::string_view> TwinNames() { return kNames; }

Result<std::unique_ptr<Cache>> MakeCache(const CacheSpec& spec,
                                         std::string_view twin) {
  if (Status status = CheckSpec(spec); !status.ok()) return status;
  return MakeBy(kMakers, twin, spec);
}

Result<std::unique_ptr<PagedPool>> MakePagedPool(const PagedSpec& spec,
                                                 std::string_view twin) {
  if (Status status = CheckPagedSpec(spec); !status.ok()) return status;
  return MakeBy(kPoolMakers, twin, spec);
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
  return cache_->Init(dtype, /*max_sequences=*/1, capacity,
                      /*max_batch=*/capacity);
}

Status LegacyCache::StartForward(std::span<const std::int32_t> positions,
                                 std::span<const int> sequences) {
  return cache_->StartForward({.positions = positions, .sequences = sequences},
                              /*reserve=*/false);
}

}  // namespace kvtwin
