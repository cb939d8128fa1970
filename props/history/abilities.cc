#include "props/history/abilities.h"

#include <algorithm>
#include <bit>

#include "core/index.h"

namespace kvtwin::props {
namespace {

template <class Enum>
bool Has(std::uint32_t bits, Enum value) {
  return (bits >> static_cast<unsigned>(value) & 1U) != 0;
}

// Returns `value` if its bit is set or no bit is, else one of the set bits,
// chosen by `value` modulo their number.
template <class Enum>
Enum Nearest(std::uint32_t bits, Enum value, unsigned count) {
  bits &= (1U << count) - 1;
  if (bits == 0 || Has(bits, value)) return value;
  int skip = AsInt(value) % std::popcount(bits);
  for (; skip > 0; --skip) bits &= bits - 1;
  return static_cast<Enum>(std::countr_zero(bits));
}

void FitKind(std::uint32_t kinds, CacheSpec& spec) {
  const std::uint32_t parts = kinds & ~std::uint32_t{KVTWIN_HAS_WRAPPER};
  if (!spec.caches.empty() && !Has(kinds, Kind::kWrapper)) {
    const CacheSpec first = spec.caches[0];
    spec = first;
  }
  for (CacheSpec& part : spec.caches) FitKind(parts, part);
  if (!spec.caches.empty() || Has(kinds, spec.kind)) return;
  const int size = spec.window.value_or(spec.chunk) % 3;
  spec = {.kind = Nearest(parts, spec.kind, 6),
          .placement = spec.placement,
          .window = {},
          .memory = {},
          .chunk = 0,
          .shift = spec.shift,
          .caches = {}};
  if (IsWindowed(spec.kind)) {
    spec.window = 1 + size;
  }
  if (spec.kind == Kind::kSwaMem) spec.memory = 2 + size;
  if (spec.kind == Kind::kChunked) spec.chunk = 2 + size;
}

void FitShift(std::uint32_t shifts, CacheSpec& spec) {
  const ShiftKind kind = Nearest(shifts, spec.shift.kind, 5);
  if (kind != spec.shift.kind) {
    spec.shift = Shift();
    spec.shift.kind = kind;
  }
  for (CacheSpec& part : spec.caches) FitShift(shifts, part);
}

void FitPlacement(std::uint32_t placements, CacheSpec& spec) {
  spec.placement = Nearest(placements, spec.placement, 2);
  for (CacheSpec& part : spec.caches) FitPlacement(placements, part);
}

// Makes windows and memories at least 1 position long.
void FitWindow(CacheSpec& spec) {
  if (spec.window) spec.window = std::max(*spec.window, 1);
  if (spec.memory) spec.memory = std::max(*spec.memory, 1);
  for (CacheSpec& part : spec.caches) FitWindow(part);
}

void AtMost(int most, int& value) {
  if (most > 0) value = std::min(value, most);
}

}  // namespace

void Abilities::Fit(Setup& setup) const {
  InitArgs& init = setup.init;
  CacheConfig& config = setup.config;
  FitKind(kinds, setup.spec);
  FitShift(shifts, setup.spec);
  FitPlacement(placements, setup.spec);
  if (Cannot(KVTWIN_CANNOT_WINDOW_0)) FitWindow(setup.spec);
  init.dtype = Nearest(dtypes, init.dtype, 6);
  if (config.v_dtype &&
      (!Can(KVTWIN_CAN_MIX_DTYPES) || !Has(dtypes, *config.v_dtype))) {
    config.v_dtype.reset();
  }
  config.mask_dtype = Nearest(mask_dtypes, config.mask_dtype, 7);
  // Tiled V needs a large padding.
  const bool tiles = max_padding == 0 || max_padding >= kTileCells;
  config.v_layout =
      Nearest(tiles ? v_layouts : v_layouts & ~(1U << KVTWIN_V_TILED),
              config.v_layout, 3);
  AtMost(max_sequences, init.max_sequences);
  AtMost(max_layers, setup.layers);
  AtMost(max_padding, config.cache_padding);
  AtMost(max_mask_padding > 0 ? max_mask_padding : max_padding,
         config.mask_batch_padding);
  AtMost(LastEnd(), init.capacity);
  if (!Can(KVTWIN_CAN_TAKE_STRIDED)) setup.strided = false;
  if (!Can(KVTWIN_CAN_ANY_SEQUENCE)) setup.first_id = 0;
  if (OnlyGoesOn()) setup.legal = true;
  // The backend need not refuse sizes below 1.
  if (!Can(KVTWIN_CAN_REFUSE_MISUSE)) {
    for (int* size : {&init.max_sequences, &init.capacity, &init.max_batch,
                      &config.cache_padding, &config.mask_batch_padding}) {
      *size = std::max(*size, 1);
    }
  }
  FitStorage(setup);
}

bool Abilities::Fits(const Setup& setup) const {
  Setup fitted = setup;
  Fit(fitted);
  return ToText(fitted) == ToText(setup);
}

}  // namespace kvtwin::props
