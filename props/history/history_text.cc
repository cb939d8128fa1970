// Writes histories as lines, which props/history/history.cc reads.

#include <fmt/format.h>

#include "core/index.h"
#include "core/names.h"
#include "props/history/history.h"
#include "props/history/knobs.h"

namespace kvtwin::props {
namespace {

std::string PosText(const RelativePos& pos) {
  if (!pos.from_end) return fmt::format("{}", pos.offset);
  return pos.offset > 0 ? fmt::format("^{}", pos.offset)
                        : fmt::format("~{}", -pos.offset);
}

// The text of one cache of a wrapper: "swa:w2", "chunked:c3".
std::string PartText(const CacheSpec& spec, const CacheSpec& wrapper) {
  std::string text(KindName(spec.kind));
  if (spec.window) text += fmt::format(":w{}", *spec.window);
  if (spec.memory) text += fmt::format(":m{}", *spec.memory);
  if (spec.chunk != 0) text += fmt::format(":c{}", spec.chunk);
  if (spec.checkpoint_every != 0) {
    text += fmt::format(":e{}", spec.checkpoint_every);
  }
  if (spec.checkpoints != 0) text += fmt::format(":k{}", spec.checkpoints);
  if (spec.pins != 0) text += fmt::format(":p{}", spec.pins);
  if (spec.drafts != 0) text += fmt::format(":d{}", spec.drafts);
  if (spec.placement != wrapper.placement) text += ":otherplace";
  if (spec.shift.kind != wrapper.shift.kind) {
    text += fmt::format(":{}", ShiftName(spec.shift.kind));
  }
  return text;
}

// The text of a range of sequences: `first`, and the `more` after it.
std::string RangeText(int first, int more) {
  if (more == 0) return fmt::format("{}", first);
  return fmt::format("{}-{}", first, first + more);
}

std::string SegmentText(const Segment& segment) {
  std::string text = fmt::format(" {}*", RangeText(segment.seq, segment.more));
  if (segment.count >= Segment::kFree / 2) {
    text += fmt::format("free{:+}", segment.count - Segment::kFree);
  } else {
    text += fmt::format("{}", segment.count);
  }
  if (segment.delta != 0) text += fmt::format("@{:+}", segment.delta);
  if (segment.order == Segment::Order::kDown) text += "r";
  if (segment.order == Segment::Order::kSame) text += "=";
  if (!segment.parents.empty()) {
    text += fmt::format(":{}", fmt::join(segment.parents, ","));
  }
  return text;
}

}  // namespace

std::vector<std::string> KindNames(const History& history) {
  const CacheSpec& spec = history.setup.spec;
  std::vector<std::string> names;
  if (spec.kind != Kind::kCausal) names.emplace_back(KindName(spec.kind));
  for (const CacheSpec& cache : spec.caches) {
    if (cache.kind != Kind::kCausal) names.emplace_back(KindName(cache.kind));
  }
  return names;
}

std::string ToText(const Setup& setup) {
  const Setup defaults;
  const CacheSpec& spec = setup.spec;
  std::string text = "kvt1";
  const auto add = [&](std::string_view key, const auto& value,
                       const auto& normal) {
    if (value != normal) text += fmt::format(" {}={}", key, value);
  };
  add("kind", KindName(spec.kind), KindName(Kind::kCausal));
  if (spec.window) text += fmt::format(" window={}", *spec.window);
  if (spec.memory) text += fmt::format(" memory={}", *spec.memory);
  add("chunk", spec.chunk, 0);
  add("every", spec.checkpoint_every, 0);
  add("keep", spec.checkpoints, 0);
  add("pins", spec.pins, 0);
  add("drafts", spec.drafts, 0);
  if (spec.placement == Placement::kScatter) text += " place=scatter";
  const bool halves = spec.shift.kind == ShiftKind::kRope &&
                      spec.shift.rope.pairing == Rope::Pairing::kHalves;
  add("shift", halves ? "rope_halves" : ShiftName(spec.shift.kind),
      ShiftName(ShiftKind::kNone));
  if (spec.shift.kind == ShiftKind::kRope) {
    const Rope& rope = spec.shift.rope;
    add("ropebase", rope.base, Rope().base);
    add("ropescale", rope.scale, Rope().scale);
    add("ropedims", rope.dims, 0);
  }
  for (std::size_t i = 0; i < spec.caches.size(); ++i) {
    text += i == 0 ? " caches=" : "/";
    text += PartText(spec.caches[i], spec);
  }
  Setup sized = setup;
  SetCells(setup.init.capacity, sized);
  if (WhyNotOfCells(setup).empty()) {
    text += fmt::format(" cells={}", setup.init.capacity);
  } else {
    sized.init = defaults.init;
    add("seqs", setup.init.max_sequences, sized.init.max_sequences);
    add("cap", setup.init.capacity, sized.init.capacity);
  }
  add("batch", setup.init.max_batch, sized.init.max_batch);
  for (const Knob& knob : Knobs()) {
    const std::string value = knob.text(setup);
    if (!value.empty()) text += fmt::format(" {}={}", knob.key, value);
  }
  return text;
}

std::string ToText(const Op& op) {
  switch (op.kind) {
    case OpKind::kPut: {
      std::string text = op.single ? "start" : "put";
      for (const Segment& segment : op.segments) text += SegmentText(segment);
      if (op.reserve) text += " reserve";
      if (op.keep_rows) text += " keep";
      if (op.overfull) text += " overfull";
      if (op.stop >= 0) text += fmt::format(" stop={}", op.stop);
      if (!op.images.empty()) {
        text += fmt::format(" image={}", fmt::join(op.images, ","));
      }
      if (!op.except.empty()) {
        text += fmt::format(" except={}", fmt::join(op.except, ","));
      }
      return text;
    }
    case OpKind::kDrop:
      return fmt::format("drop {}:{}-{}", op.seq, PosText(op.begin),
                         op.open ? "" : PosText(op.end));
    case OpKind::kCopy:
      return fmt::format("copy {}>{}:{}", op.seq, RangeText(op.dst, op.more),
                         PosText(op.end));
    case OpKind::kAsk:
      return fmt::format("ask {}@{}", op.seq, PosText(op.end));
    case OpKind::kCausal:
      return fmt::format("{}{}{}", op.single ? "except" : "causal",
                         op.except.empty() ? "" : " ",
                         fmt::join(op.except, ","));
    case OpKind::kGet:
      return op.single ? "read" : "get";
    case OpKind::kReput:
      return op.single ? "store" : "reput";
    case OpKind::kMisuse:
      return fmt::format("misuse {}", op.misuse);
    case OpKind::kPoison:
      return "poison";
    case OpKind::kReload:
      return "reload";
    case OpKind::kShift:
      return fmt::format("move {}:{}-{}@{:+}", op.seq, PosText(op.begin),
                         op.open ? "" : PosText(op.end), op.delta);
    case OpKind::kLayer:
      return fmt::format("layer {}", op.number);
    case OpKind::kType:
      return fmt::format("type {}", op.number);
    case OpKind::kCached:
      return "cached";
    case OpKind::kSnapshot:
      return fmt::format("snapshot {}", op.seq);
    case OpKind::kAdd:
      return fmt::format("add {}>{}", op.seq, op.dst);
    case OpKind::kCommit:
      return fmt::format("commit {}:{}", op.seq, fmt::join(op.path, ","));
    case OpKind::kPin:
      return fmt::format("pin {}", op.seq);
    case OpKind::kFind:
      return fmt::format("find {}:{}", op.seq, fmt::join(op.ids, ","));
  }
  return "";
}

std::string ToText(const History& history) {
  std::string text = ToText(history.setup);
  for (const Op& op : history.ops) text += " | " + ToText(op);
  return text;
}

}  // namespace kvtwin::props
