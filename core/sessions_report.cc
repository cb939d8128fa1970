// Reports on sessions, for servers: numbers, a check and a text.

#include <fmt/format.h>

#include <string>
#include <vector>

#include "core/index.h"
#include "core/refusals.h"
#include "kvtwin/sessions.h"

namespace kvtwin {
namespace {

// The tokens that the sequence of a slot holds.
struct Held {
  std::vector<bool> positions;
  int length = 0;  // The length of the slot's record.
  bool runs = false;
  int known = 0;           // Positions below the length,
  std::int32_t first = 0;  // and the lowest of these.
};

Status Add(const CellEntry& entry, Held& held) {
  const auto [cell, position, slot] = entry;
  if (position >= Size(held.positions)) {
    return Untimely("slot {} holds position {}, the context is {}", slot,
                    position, held.positions.size());
  }
  if (At(held.positions, position)) {
    return Untimely("slot {} holds position {} twice", slot, position);
  }
  held.positions[AsSize(position)] = true;
  if (position < held.length) {
    if (held.known++ == 0 || position < held.first) held.first = position;
    return {};
  }
  if (!held.runs) return {};
  return Untimely("slot {} runs and holds position {}, its record has {}", slot,
                  position, held.length);
}

std::string SlotText(const Sessions& sessions, int slot) {
  const SlotInfo info = *sessions.Slot(slot);
  const std::string holds =
      fmt::format("{} tokens, {} reusable", info.record.size(), info.reusable);
  if (info.request < 0) return fmt::format("slot {}: free, {}\n", slot, holds);
  const RequestInfo request = *sessions.Request(info.request);
  std::string text = fmt::format(
      "slot {}: request {}, {}, {} answered, {} outputs to sample; {} of {} "
      "prompt tokens reused",
      slot, info.request, holds, request.answered, request.outputs,
      request.reused, request.prompt);
  if (request.source >= 0 && request.source != slot) {
    text += fmt::format(" from slot {}", request.source);
  }
  if (!request.missed.empty()) text += "; missed " + request.missed;
  return text + "\n";
}

}  // namespace

CellGauges CountCells(const Cache& cache) {
  std::vector<CellEntry> entries;
  cache.ListCells(entries);
  CellGauges gauges;
  gauges.cells = cache.CellCount();
  gauges.memberships = std::ssize(entries);
  for (std::size_t i = 0; i < entries.size();) {
    std::size_t end = i + 1;
    while (end < entries.size() && entries[end].cell == entries[i].cell) ++end;
    ++gauges.used;
    gauges.shared += end - i > 1 ? 1 : 0;
    i = end;
  }
  return gauges;
}

Status CheckSessions(const Sessions& sessions, const Cache& cache) {
  const SessionsSpec& spec = sessions.spec();
  std::vector<Held> slots(AsSize(spec.slots));
  for (int slot = 0; slot < spec.slots; ++slot) {
    const SlotInfo info = *sessions.Slot(slot);
    At(slots, slot) = {std::vector<bool>(AsSize(spec.context)),
                       Size(info.record), info.request >= 0};
  }
  std::vector<CellEntry> entries;
  cache.ListCells(entries);
  for (const CellEntry& entry : entries) {
    if (entry.sequence >= spec.slots) {
      return Untimely("cell {} belongs to sequence {}, there are {} slots",
                      entry.cell, entry.sequence, spec.slots);
    }
    Status status = Add(entry, At(slots, entry.sequence));
    if (!status.ok()) return status;
  }
  // The positions of a record that are stored are its last ones: a window may
  // have passed the first ones.
  for (int slot = 0; slot < spec.slots; ++slot) {
    const Held& held = At(slots, slot);
    if (held.known > 0 && held.first != held.length - held.known) {
      return Untimely("slot {} lacks one of the positions {} to {}", slot,
                      held.first, held.length - 1);
    }
  }
  return {};
}

std::string DumpSessions(const Sessions& sessions, const Cache& cache) {
  const SessionsSpec& spec = sessions.spec();
  std::string text = fmt::format(
      "{} slots of {} tokens, batches of {}, prefixes of {} slots{}\n",
      spec.slots, spec.context, spec.batch,
      spec.choice == SlotChoice::kOwnPrefix ? "free" : "all",
      spec.ahead ? ", one batch ahead" : "");
  for (int slot = 0; slot < spec.slots; ++slot) {
    text += SlotText(sessions, slot);
  }
  for (const int number : sessions.Requests()) {
    const RequestInfo request = *sessions.Request(number);
    if (request.slot >= 0) continue;
    text += fmt::format("request {} waits with {} prompt tokens\n", number,
                        request.prompt);
  }
  const CellGauges cells = CountCells(cache);
  text += fmt::format("{} of {} cells used, {} shared\n", cells.used,
                      cells.cells, cells.shared);
  const SessionGauges gauges = sessions.Gauges();
  text += fmt::format(
      "{} running, {} waiting, {} bytes of inputs; {} of {} prompt tokens "
      "reused, {} forks, {} "
      "prefixes missed, {} tokens evicted\n",
      gauges.running, gauges.waiting, gauges.bytes, gauges.hit_tokens,
      gauges.prompt_tokens, gauges.forks, gauges.missed, gauges.evicted_tokens);
  text += fmt::format(
      "{} tokens in {} batches, {} refused; {} shifts, {} computed again\n",
      gauges.planned_tokens, gauges.batches, gauges.refusals, gauges.shifts,
      gauges.reprocessed);
  return text;
}

}  // namespace kvtwin
