#include "props/history/abilities.h"

#include <algorithm>

#include "core/names.h"
#include "props/history/knobs.h"

namespace kvtwin::props {
namespace {

void FitKind(std::uint32_t kinds, CacheSpec& spec) {
  const std::uint32_t parts =
      kinds & ~std::uint32_t{KVTWIN_HAS_WRAPPER | KVTWIN_HAS_HYBRID};
  if (!spec.caches.empty() && !HasBit(kinds, spec.kind)) {
    const CacheSpec first = spec.caches[0];
    spec = first;
  }
  for (CacheSpec& part : spec.caches) FitKind(parts, part);
  if (!spec.caches.empty() || HasBit(kinds, spec.kind)) return;
  const int size = std::min(spec.window.value_or(spec.chunk), kWidest);
  spec = {.kind = Nearest(parts, spec.kind, kKindNames.size()),
          .placement = spec.placement,
          .window = {},
          .memory = {},
          .chunk = 0,
          .checkpoint_every = 0,
          .checkpoints = 0,
          .pins = 0,
          .drafts = 0,
          .shift = spec.shift,
          .caches = {}};
  if (spec.kind == Kind::kSwa || spec.kind == Kind::kSwaMem) {
    spec.window = 1 + size;
  }
  if (spec.kind == Kind::kSwaMem) spec.memory = 2 + size;
  if (spec.kind == Kind::kChunked) spec.chunk = 2 + size;
  if (spec.kind == Kind::kRecurrent) {
    spec.checkpoint_every = 1 + size;
    spec.checkpoints = 2;
  }
}

void FitShift(std::uint32_t shifts, CacheSpec& spec) {
  const ShiftKind kind = Nearest(shifts, spec.shift.kind, 6);
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

// Makes each memory as long as the capacity.
void FitMemory(int capacity, CacheSpec& spec) {
  if (spec.memory) spec.memory = std::max(*spec.memory, capacity);
  for (CacheSpec& part : spec.caches) FitMemory(capacity, part);
}

// Removes pins and drafts from the spec unless the backend declares them.
void FitStates(const Abilities& can, CacheSpec& spec) {
  if (!can.Can(KVTWIN_CAN_PIN)) spec.pins = 0;
  if (!can.Can(KVTWIN_CAN_DRAFT) || !can.Can(KVTWIN_CAN_DRAFT_STATES)) {
    spec.drafts = 0;
  }
  for (CacheSpec& part : spec.caches) FitStates(can, part);
}

}  // namespace

void Abilities::Fit(Setup& setup) const {
  InitArgs& init = setup.init;
  FitKind(kinds, setup.spec);
  FitShift(shifts, setup.spec);
  FitPlacement(placements, setup.spec);
  FitStates(*this, setup.spec);
  if (Cannot(KVTWIN_CANNOT_WINDOW_0)) FitWindow(setup.spec);
  for (const Knob& knob : Knobs()) {
    if (knob.fit) knob.fit(*this, setup);
  }
  LimitTo(max_sequences, init.max_sequences);
  LimitTo(LastEnd(), init.capacity);
  // The backend need not refuse sizes below 1.
  if (!Can(KVTWIN_CAN_REFUSE_MISUSE)) {
    for (int* size :
         {&init.max_sequences, &init.capacity, &init.max_batch,
          &setup.config.cache_padding, &setup.config.mask_batch_padding}) {
      *size = std::max(*size, 1);
    }
  }
  if (Cannot(KVTWIN_CANNOT_BOUND_MEMORY)) {
    FitMemory(init.capacity, setup.spec);
  }
  FitStorage(setup);
}

bool Abilities::Fits(const Setup& setup) const {
  Setup fitted = setup;
  Fit(fitted);
  return ToText(fitted) == ToText(setup);
}

bool Abilities::CanDraft(const CacheSpec& spec) const {
  return CanDraft(spec.kind) &&
         std::ranges::all_of(spec.caches, [&](const CacheSpec& part) {
           return CanDraft(part);
         });
}

bool HasStates(const CacheSpec& spec) {
  return spec.kind == Kind::kRecurrent ||
         std::ranges::any_of(spec.caches, HasStates);
}

}  // namespace kvtwin::props
