#include "props/shrink/cost.h"

#include <array>
#include <cstdlib>

#include "core/index.h"
#include "props/history/knobs.h"

namespace kvtwin::props {
namespace {

void AddCost(const CacheSpec& spec, Cost& cost) {
  constexpr std::array kSpecial = {0, 2, 4, 2, 4, 8, 4, 9};  // By kind.
  cost.special += kSpecial.at(AsSize(spec.kind));
  cost.special += spec.placement == Placement::kScatter ? 1 : 0;
  cost.special += AsInt(spec.shift.kind);
  const Rope& rope = spec.shift.rope;
  const Rope plain;
  if (spec.shift.kind == ShiftKind::kRope) {
    cost.special += (rope.pairing != plain.pairing ? 1 : 0) +
                    (rope.base != plain.base ? 1 : 0) +
                    (rope.scale != plain.scale ? 1 : 0) +
                    (rope.dims != plain.dims ? 1 : 0);
  }
  cost.special += spec.memory.has_value() ? 1 : 0;
  cost.numbers +=
      spec.window.value_or(0) + spec.memory.value_or(0) + spec.chunk;
  cost.numbers += std::int64_t{spec.checkpoint_every} + spec.checkpoints +
                  spec.pins + spec.drafts;
  for (const CacheSpec& part : spec.caches) {
    ++cost.special;
    AddCost(part, cost);
  }
}

void AddCost(const Setup& setup, Cost& cost) {
  AddCost(setup.spec, cost);
  for (const Knob& knob : Knobs()) {
    cost.special += knob.text(setup).empty() ? 0 : 1;
    if (knob.numbers) cost.numbers += knob.numbers(setup);
  }
}

void AddSizesCost(const Setup& setup, Cost& cost) {
  const InitArgs& init = setup.init;
  const InitArgs plain = Setup().init;
  Setup sized = setup;
  SetCells(init.capacity, sized);
  const bool of_cells = WhyNotOfCells(setup).empty();
  const auto special = [&](bool is) { cost.special += is ? 1 : 0; };
  special(!of_cells);
  special(!of_cells && init.max_sequences != plain.max_sequences);
  special(init.max_batch !=
          (of_cells ? sized.init.max_batch : plain.max_batch));
  cost.numbers += init.max_sequences + init.capacity + init.max_batch;
}

void AddCost(const Segment& segment, Cost& cost) {
  cost.special += 2;
  cost.special += segment.order != Segment::Order::kUp ? 1 : 0;
  cost.special += segment.delta != 0 ? 1 : 0;
  const bool free = segment.count >= Segment::kFree / 2;
  cost.special += free ? 1 : 0;
  cost.special += segment.more > 0 ? 1 : 0;
  cost.special += 2 * std::ssize(segment.parents);
  for (const int parent : segment.parents) cost.numbers += parent + 1;
  cost.numbers +=
      segment.seq + segment.more + std::abs(std::int64_t{segment.delta}) +
      (free ? 2 + std::abs(segment.count - Segment::kFree) : segment.count);
}

}  // namespace

Cost CostOf(const Op& op) {
  Cost cost;
  cost.operations = 1;
  // By OpKind: put, drop, copy, ask, causal, get, reput, misuse, poison,
  // reload, shift, layer, type, cached, snapshot, add, commit, pin, find.
  constexpr std::array kSpecial = {0, 2, 3, 2, 3, 2, 3, 5, 4, 5,
                                   3, 3, 3, 3, 4, 4, 3, 3, 3};
  const auto add = [&](const RelativePos& pos) {
    cost.special += pos.from_end ? 1 : 0;
    cost.numbers += std::abs(std::int64_t{pos.offset});
  };
  cost.special += kSpecial.at(AsSize(op.kind));
  for (const Segment& segment : op.segments) AddCost(segment, cost);
  cost.special += (op.reserve ? 1 : 0) + (op.keep_rows ? 1 : 0);
  cost.special += op.overfull ? 1 : 0;
  cost.special += op.stop >= 0 ? 1 : 0;
  cost.numbers += std::max(op.stop, 0);
  if (op.kind == OpKind::kFind) {
    cost.special += std::ssize(op.ids);
    cost.numbers += op.seq;
    for (const int id : op.ids) cost.numbers += id;
  }
  for (const auto* indices : {&op.images, &op.except}) {
    cost.special += std::ssize(*indices);
    for (const int index : *indices) cost.numbers += index;
  }
  cost.special += op.single ? 1 : 0;
  if (op.kind == OpKind::kMisuse) cost.numbers += op.misuse;
  if (op.kind == OpKind::kLayer || op.kind == OpKind::kType) {
    cost.numbers += op.number;
  }
  if (op.kind == OpKind::kSnapshot || op.kind == OpKind::kPin)
    cost.numbers += op.seq;
  if (op.kind == OpKind::kCommit) {
    cost.special += std::ssize(op.path);
    cost.numbers += op.seq;
    for (const int choice : op.path) cost.numbers += choice;
  }
  if (op.kind == OpKind::kAdd) cost.numbers += op.seq + op.dst;
  const bool ranges = op.kind == OpKind::kDrop || op.kind == OpKind::kShift;
  if (!ranges && op.kind != OpKind::kCopy && op.kind != OpKind::kAsk) {
    return cost;
  }
  cost.numbers += op.seq;
  if (op.kind == OpKind::kCopy) {
    cost.special += op.more > 0 ? 1 : 0;
    cost.numbers += op.dst + op.more;
  }
  if (op.kind == OpKind::kShift)
    cost.numbers += std::abs(std::int64_t{op.delta});
  if (ranges) add(op.begin);
  if (!ranges || !op.open) {
    cost.special += ranges ? 1 : 0;
    add(op.end);
  }
  return cost;
}

Cost CostWithoutSizes(const History& history) {
  Cost cost;
  AddCost(history.setup, cost);
  for (const Op& op : history.ops) {
    const Cost one = CostOf(op);
    cost.operations += one.operations;
    cost.special += one.special;
    cost.numbers += one.numbers;
  }
  return cost;
}

Cost CostOf(const History& history) {
  Cost cost = CostWithoutSizes(history);
  AddSizesCost(history.setup, cost);
  return cost;
}

}  // namespace kvtwin::props
