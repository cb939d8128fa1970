#include "slots.h"

#include <algorithm>
#include <iostream>
#include <set>

namespace serve {
namespace {

using kvtwin::Result, kvtwin::Status;

// A file is loaded, or a prompt waits for another one to be computed, only if
// that saves this many tokens.
constexpr std::size_t kWorthIt = 32;

}  // namespace

Result<std::unique_ptr<Slots>> Slots::Make(const kvtwin::CacheSpec& cache,
                                           kvtwin::DType dtype,
                                           const SlotsSpec& spec,
                                           ParkingLot* parked) {
  auto made = kvtwin::MakeCache(cache);
  if (!made.ok()) return made.status();
  Status status = (*made)->SetConfig({.mask_dtype = kvtwin::DType::kBits});
  if (status.ok()) {
    status = (*made)->Init({.dtype = dtype,
                            .max_sequences = spec.slots,
                            .capacity = spec.context,
                            .max_batch = spec.batch});
  }
  if (!status.ok()) return status;
  auto slots = std::make_unique<Slots>();
  slots->spec_ = spec;
  slots->parked_ = parked;
  slots->cache_ = *std::move(made);
  slots->slots_.resize(static_cast<std::size_t>(spec.slots));
  return slots;
}

void Slots::Submit(int request, Tokens prompt) {
  waiting_.push_back({request, std::move(prompt)});
}

int Slots::FindSlot(int request) const {
  const auto found = std::find_if(
      slots_.begin(), slots_.end(),
      [request](const Slot& slot) { return slot.request == request; });
  return found == slots_.end() ? -1 : static_cast<int>(found - slots_.begin());
}

// Finds a slot for a request, and the prefix that it takes over. Returns false
// if it has to wait.
bool Slots::Assign(const Request& request) {
  const Tokens& prompt = request.prompt;
  int source = -1, oldest = -1;
  std::size_t best = 0, promised = 0;
  for (int i = 0; i < spec_.slots; ++i) {
    const Slot& slot = slots_[static_cast<std::size_t>(i)];
    if (slot.request < 0 &&
        (oldest < 0 ||
         slot.used < slots_[static_cast<std::size_t>(oldest)].used)) {
      oldest = i;
    }
    const std::size_t common =
        spec_.share ? CommonPrefix(slot.tokens, prompt) : 0;
    promised = std::max(promised, common);
    const std::size_t stored = std::min(common, slot.stored);
    if (stored > best) best = stored, source = i;
  }
  if (oldest < 0) return false;
  std::string file;
  if (parked_ != nullptr && spec_.share) {
    const auto [path, common] = parked_->Find(prompt);
    if (common >= best + kWorthIt) file = path, best = common;
  }
  // Another request is about to compute more of this prompt.
  if (promised >= best + kWorthIt) return false;

  // At least the last token is computed, for its logits.
  best = std::min(best, prompt.size() - 1);
  int target = oldest;
  if (file.empty() && source >= 0) {
    const Slot& slot = slots_[static_cast<std::size_t>(source)];
    if (slot.request < 0 && 2 * best >= slot.stored) target = source;
  }
  Slot& slot = slots_[static_cast<std::size_t>(target)];
  Status status;
  if (!file.empty()) {
    auto state = parked_->Load(file);
    status = state.ok() ? cache_->CopyPrefix(target, target, 0)
                        : state.status();
    if (status.ok()) status = cache_->AddSequence(target, *state);
    source = target;
  } else if (source < 0) {
    source = target, best = 0;
  }
  if (status.ok()) {
    status = cache_->CopyPrefix(source, target, static_cast<int>(best));
  }
  if (!status.ok()) {  // Then all of the prompt is computed.
    std::cerr << "slots: " << status.ToString() << "\n";
    if (!cache_->CopyPrefix(target, target, 0).ok()) return false;
    best = 0;
  }
  slot = {.request = request.number,
          .tokens = prompt,
          .stored = best,
          .prompt = prompt.size(),
          .reused = static_cast<int>(best),
          .used = ++time_};
  return true;
}

Result<SlotBatch> Slots::NextBatch() {
  for (auto request = waiting_.begin(); request != waiting_.end();) {
    request = Assign(*request) ? waiting_.erase(request) : request + 1;
  }
  SlotBatch batch;
  // The tokens of answers come first, then as much of the prompts as fits.
  for (const bool answers : {true, false}) {
    for (int i = 0; i < spec_.slots; ++i) {
      const Slot& slot = slots_[static_cast<std::size_t>(i)];
      const std::size_t missing = slot.tokens.size() - slot.stored;
      if (slot.request < 0 || missing == 0 ||
          answers != (slot.stored >= slot.prompt)) {
        continue;
      }
      const std::size_t room =
          static_cast<std::size_t>(spec_.batch) - batch.tokens.size();
      const std::size_t end = slot.stored + std::min(missing, room);
      for (std::size_t at = slot.stored; at < end; ++at) {
        batch.tokens.push_back(slot.tokens[at]);
        batch.positions.push_back(static_cast<std::int32_t>(at));
        batch.sequences.push_back(i);
      }
      if (missing <= room) {
        batch.outputs.push_back(
            {static_cast<int>(batch.tokens.size()) - 1, slot.request});
      }
    }
  }
  if (batch.tokens.empty()) return batch;
  const Status status =
      cache_->StartForward({batch.positions, batch.sequences}, false);
  if (!status.ok()) return status;
  for (const int sequence : batch.sequences) {
    ++slots_[static_cast<std::size_t>(sequence)].stored;
  }
  return batch;
}

bool Slots::Sampled(int request, std::int32_t token) {
  Slot& slot = slots_[static_cast<std::size_t>(FindSlot(request))];
  slot.tokens.push_back(token);
  return slot.tokens.size() < static_cast<std::size_t>(spec_.context);
}

void Slots::Finish(int request) {
  std::erase_if(waiting_, [request](const Request& waiting) {
    return waiting.number == request;
  });
  const int index = FindSlot(request);
  if (index < 0) return;
  Slot& slot = slots_[static_cast<std::size_t>(index)];
  slot.request = -1;
  slot.used = ++time_;
  slot.tokens.resize(slot.stored);
  if (parked_ == nullptr || slot.stored < kWorthIt) return;
  auto state = cache_->SnapshotOf(index);
  if (state.ok()) parked_->Park(slot.tokens, *std::move(state));
}

int Slots::Reused(int request) const {
  const int index = FindSlot(request);
  return index < 0 ? 0 : slots_[static_cast<std::size_t>(index)].reused;
}

int Slots::running() const {
  return static_cast<int>(
      std::count_if(slots_.begin(), slots_.end(),
                    [](const Slot& slot) { return slot.request >= 0; }));
}

int Slots::used_cells() const {
  std::vector<kvtwin::CellEntry> entries;
  cache_->ListCells(entries);
  std::set<int> cells;
  for (const kvtwin::CellEntry& entry : entries) cells.insert(entry.cell);
  return static_cast<int>(cells.size());
}

}  // namespace serve
