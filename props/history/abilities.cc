#include "props/history/abilities.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

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

namespace {

// What an operation needs, and what happens without it.
struct Requirement {
  bool met = true;
  std::string_view lacks;         // "it does not declare KVTWIN_CAN_PIN"
  std::string_view instead = "";  // "its first sequence alone runs"
};

bool IsOfDrafts(const Segment& segment) { return !segment.parents.empty(); }

// Whether the batch is of several sequences.
bool Mixes(const Op& op) {
  return std::ranges::any_of(op.segments, [&](const Segment& segment) {
    return segment.more > 0 || segment.seq != op.segments[0].seq;
  });
}

std::vector<Requirement> RequirementsOfPut(const Op& op, const Setup& setup,
                                           const Abilities& can) {
  std::vector<Requirement> needs;
  if (op.reserve) {
    needs.push_back({can.Can(KVTWIN_CAN_RESERVE),
                     "it does not declare KVTWIN_CAN_RESERVE"});
  }
  if (std::ranges::any_of(op.segments, IsOfDrafts)) {
    const Requirement draft = {can.Can(KVTWIN_CAN_DRAFT),
                               "it does not declare KVTWIN_CAN_DRAFT"};
    needs.push_back(draft);
    if (draft.met) {
      needs.push_back({can.CanDraft(setup.spec),
                       "it does not declare KVTWIN_CAN_DRAFT_STATES"});
    }
  }
  if (Mixes(op)) {
    needs.push_back({can.Can(KVTWIN_CAN_MIX),
                     "it does not declare KVTWIN_CAN_MIX",
                     "its first sequence alone runs"});
  }
  if (!op.except.empty()) {
    needs.push_back(
        {can.set_causal, "it has no set_causal", "no token is excepted"});
  }
  if (op.stop >= 0) {
    needs.push_back({can.Can(KVTWIN_CAN_REMOVE_TAIL),
                     "it does not declare KVTWIN_CAN_REMOVE_TAIL",
                     "the pass is not given up"});
  }
  if (op.overfull) {
    const bool legal = setup.legal;
    needs.push_back({legal, "it needs legal=1", "it runs as written"});
    needs.push_back({!legal || can.Can(KVTWIN_CAN_REFUSE_FULL),
                     "it does not declare KVTWIN_CAN_REFUSE_FULL",
                     "the client makes room for the batch"});
  }
  return needs;
}

std::vector<Requirement> RequirementsOfDrop(const Op& op,
                                            const Abilities& can) {
  if (op.open) {
    return {{can.Can(KVTWIN_CAN_REMOVE_TAIL),
             "it does not declare KVTWIN_CAN_REMOVE_TAIL"}};
  }
  if (!can.Can(KVTWIN_CAN_REMOVE_TAIL)) {
    return {{can.Can(KVTWIN_CAN_REMOVE_MIDDLE),
             "it does not declare KVTWIN_CAN_REMOVE_MIDDLE"}};
  }
  return {{can.Can(KVTWIN_CAN_REMOVE_MIDDLE),
           "it does not declare KVTWIN_CAN_REMOVE_MIDDLE",
           "it runs as a removal up to the end"}};
}

std::vector<Requirement> RequirementsOfCopy(const Op& op,
                                            const Abilities& can) {
  const bool whole = op.end.from_end && op.end.offset == 0;
  std::vector<Requirement> needs = {
      {can.Can(KVTWIN_CAN_COPY_PREFIX),
       "it does not declare KVTWIN_CAN_COPY_PREFIX"}};
  if (!needs[0].met) return needs;
  if (op.seq == op.dst && op.more == 0) {
    needs.push_back({!can.Cannot(KVTWIN_CANNOT_COPY_TO_ITSELF),
                     "it declares KVTWIN_CANNOT_COPY_TO_ITSELF"});
  } else if (!whole) {
    needs.push_back({can.Can(KVTWIN_CAN_SHARE),
                     "it does not declare KVTWIN_CAN_SHARE",
                     "it copies the whole sequence"});
  }
  return needs;
}

std::vector<Requirement> RequirementsOf(const Op& op, const Setup& setup,
                                        const Abilities& can) {
  switch (op.kind) {
    case OpKind::kPut:
      return RequirementsOfPut(op, setup, can);
    case OpKind::kDrop:
      return RequirementsOfDrop(op, can);
    case OpKind::kCopy:
      return RequirementsOfCopy(op, can);
    case OpKind::kAsk:
      return {{can.can_resume, "it has no can_resume"}};
    case OpKind::kCausal:
      return {{can.set_causal, "it has no set_causal"}};
    case OpKind::kShift:
      return {{can.shift, "it has no shift"}};
    case OpKind::kCommit:
      return {
          {can.Can(KVTWIN_CAN_DRAFT), "it does not declare KVTWIN_CAN_DRAFT"}};
    case OpKind::kPin:
      return {{can.Can(KVTWIN_CAN_PIN), "it does not declare KVTWIN_CAN_PIN"}};
    case OpKind::kFind:
      return {{can.Can(KVTWIN_CAN_FIND_PREFIX),
               "it does not declare KVTWIN_CAN_FIND_PREFIX"},
              {setup.legal, "it needs legal=1"}};
    case OpKind::kMisuse:
      return {{can.Can(KVTWIN_CAN_REFUSE_MISUSE),
               "it does not declare KVTWIN_CAN_REFUSE_MISUSE"}};
    case OpKind::kPoison:
      return {{can.Can(KVTWIN_CAN_BE_POISONED),
               "it does not declare KVTWIN_CAN_BE_POISONED"}};
    case OpKind::kReload:
    case OpKind::kSnapshot:
    case OpKind::kAdd:
      return {{can.snapshots,
               "snapshots are compared at identity only, and "
               "need snapshot and restore"}};
    case OpKind::kReput:
    case OpKind::kLayer:
    case OpKind::kType:
    case OpKind::kCached:
      return {{can.Can(KVTWIN_CAN_ANY_ORDER),
               "it does not declare KVTWIN_CAN_ANY_ORDER"}};
    case OpKind::kGet:
      if (op.single)
        return {{can.Can(KVTWIN_CAN_ANY_ORDER),
                 "it does not declare KVTWIN_CAN_ANY_ORDER"}};
      return {};
  }
  return {};
}

}  // namespace

std::vector<std::string> NotRun(const History& history,
                                const Abilities& abilities) {
  std::vector<std::string> texts;
  for (const Op& op : history.ops) {
    for (const Requirement& need :
         RequirementsOf(op, history.setup, abilities)) {
      if (need.met) continue;
      texts.push_back(fmt::format("{}: {}{}{}", ToText(op), need.instead,
                                  need.instead.empty() ? "" : ", because ",
                                  need.lacks));
    }
  }
  return texts;
}

}  // namespace kvtwin::props
