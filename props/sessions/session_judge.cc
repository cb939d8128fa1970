#include "props/sessions/session_judge.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/index.h"

namespace kvtwin::props {
namespace {

// Lowers `index` to the beginning of the group that it would cut.
int OutsideGroups(const std::vector<SessionInput>& inputs, int index) {
  for (int i = 0; i < std::min(index, Size(inputs)); ++i) {
    if (i + At(inputs, i).same_batch >= index) return i;
  }
  return index;
}

std::string Text(const SessionInput& input) {
  return fmt::format("{}/{}/{}", input.token, input.multimodal,
                     input.same_batch);
}

}  // namespace

std::vector<SessionInput> Truncated(std::vector<SessionInput> prompt, int keep,
                                    int context) {
  if (Size(prompt) <= context) return prompt;
  keep = std::min(keep < 0 ? Size(prompt) : keep, context - 1);
  prompt.erase(IteratorAt(prompt, keep),
               IteratorAt(prompt, Size(prompt) - (context - keep)));
  return prompt;
}

void SessionJudge::Submit(int request, std::vector<SessionInput> prompt,
                          const RequestOptions& options) {
  Told told = {.prompt = std::move(prompt),
               .options = options,
               .story = Story(sights_),
               .pending = {},
               .unsampled = {}};
  requests_.emplace(request, std::move(told));
}

int SessionJudge::Keep(const Told& told) const {
  const int keep =
      told.options.keep < 0 ? Size(told.prompt) : told.options.keep;
  return OutsideGroups(told.prompt, std::min(keep, spec_.context - 1));
}

std::int64_t SessionJudge::Most(const Told& told) const {
  std::int64_t most = told.options.limit;
  if (most == 0) most = std::numeric_limits<std::int64_t>::max();
  if (told.options.shift) return most;
  return std::min<std::int64_t>(most, spec_.context - Size(told.prompt) + 1);
}

bool SessionJudge::IsReady(const Told& told) const {
  if (told.removed >= 0 || told.slot < 0) return false;
  if (!told.pending.empty()) return true;
  return spec_.ahead && told.unsampled.size() == 1 && told.outputs < Most(told);
}

// The most that the request could reuse (Q5).
int SessionJudge::LongestReuse(const Told& told) const {
  int longest = 0;
  for (const Held& held : slots_) {
    const bool busy = held.request >= 0;
    if (busy && spec_.choice == SlotChoice::kOwnPrefix) continue;
    const auto& inputs =
        busy ? requests_.at(held.request).story.inputs() : held.inputs;
    const int exact = busy ? requests_.at(held.request).exact : held.exact;
    int same = 0;
    while (same < std::min(exact, Size(told.prompt)) &&
           At(inputs, same) == At(told.prompt, same)) {
      ++same;
    }
    longest = std::max(longest, std::min(same, Size(told.prompt) - 1));
  }
  return OutsideGroups(told.prompt, longest);
}

// Judges the requests that got a slot.
std::string SessionJudge::Admitted(const Sessions& sessions) {
  bool first = true;
  bool waits = false;
  for (auto& [request, told] : requests_) {
    if (told.slot >= 0 || told.removed >= 0) continue;
    const RequestInfo info = *sessions.Request(request);
    if (info.slot < 0) {
      waits = true;
      continue;
    }
    if (waits) return fmt::format("request {} overtakes", request);
    if (info.prompt != Size(told.prompt)) return "a prompt has another length";
    Held& held = At(slots_, info.slot);
    if (held.request >= 0) {
      return fmt::format("request {} gets slot {}, where request {} runs",
                         request, info.slot, held.request);
    }
    const int longest = told.options.reuse ? LongestReuse(told) : 0;
    const bool all = every_prefix_ && first;  // Later ones find changed slots.
    if (info.reused > longest && first) return "more is reused than is known";
    if (all && info.reused != longest) {
      return fmt::format("request {} reuses {} inputs of {}", request,
                         info.reused, longest);
    }
    first = false;
    told.slot = info.slot;
    held.request = request;
    for (int i = 0; i < Size(told.prompt); ++i) {
      const SessionInput& input = At(told.prompt, i);
      const States* states = nullptr;
      if (i < info.reused) {
        AddTo(told, input, states);
      } else {
        told.pending.push_back(input);
      }
    }
  }
  const bool free = std::ranges::any_of(
      slots_, [](const Held& held) { return held.request < 0; });
  return waits && free ? "a request waits, though a slot is free" : "";
}

void SessionJudge::AddTo(Told& told, const SessionInput& input,
                         const States*& states) {
  if (told.exact == told.story.size()) ++told.exact;
  states = &told.story.Add(input);
}

// Whether a slot lost tokens that it computed, though nothing is planned there.
bool SessionJudge::IsEmptied(const Sessions& sessions, const Told& told) {
  if (told.slot < 0 || told.removed >= 0 || told.planned > 0) return false;
  return Size(sessions.Slot(told.slot)->record) != told.story.size();
}

std::string SessionJudge::Plan(const Sessions& sessions,
                               const SessionBatch& batch) {
  if (std::string wrong = Admitted(sessions); !wrong.empty()) return wrong;
  if (Size(batch.inputs) > spec_.batch) return "the batch is too large";
  std::vector<bool> outputs(batch.inputs.size());
  for (const int output : batch.outputs) {
    outputs.at(AsSize(output)) = true;
  }
  std::map<int, bool> was_ready;
  for (const auto& [request, told] : requests_) {
    was_ready[request] = IsReady(told);
  }
  for (int i = 0; i < Size(batch.inputs); ++i) {
    const int request = At(batch.requests, i);
    const auto found = requests_.find(request);
    if (found == requests_.end() || found->second.slot < 0 ||
        found->second.removed >= 0) {
      return fmt::format("token {} is of request {}, which does not run", i,
                         request);
    }
    std::string wrong = PlanToken(request, batch, i);
    if (!wrong.empty()) {
      return fmt::format("token {} of request {}: {}", i, request, wrong);
    }
  }
  for (auto& [request, told] : requests_) {
    told.missed = was_ready[request] && told.planned == 0 ? told.missed + 1 : 0;
    if (IsEmptied(sessions, told)) {
      return fmt::format("request {} loses tokens, and gets nothing", request);
    }
    if (told.missed > 0 && batch.inputs.empty()) return "nothing is planned";
    if (told.missed > spec_.slots) {
      return fmt::format("request {} gets nothing", request);
    }
  }
  return PlanEnds(batch, outputs);
}

// Applies the shift, if there is one, and returns what is wrong with the
// position of the next token.
std::string SessionJudge::Place(Told& told, int position) {
  if (told.planned == 0 && told.story.size() == spec_.context) {
    const int keep = Keep(told);
    const int wanted = std::max((spec_.context - keep) / 2, 1);
    int end = keep;
    while (end < keep + wanted) {
      end += 1 + At(told.story.inputs(), end).same_batch;
    }
    if (!told.options.shift) return "it shifts, but it may not";
    told.story.Erase(keep, end);
    told.exact = std::min(told.exact, keep);
    if (position == 0 && told.story.size() > 0) {
      const auto& again = told.story.inputs();
      told.pending.insert(told.pending.begin(), again.begin(), again.end());
      told.story = Story(sights_);
      told.exact = 0;
    }
  }
  const int expected = told.story.size() + told.planned;
  if (position == expected) return "";
  return fmt::format("its position is {}, not {}", position, expected);
}

std::string SessionJudge::PlanToken(int request, const SessionBatch& batch,
                                    int index) {
  Told& told = requests_.at(request);
  if (At(batch.sequences, index) != told.slot) return "it is in another slot";
  const bool later = told.planned > 0;
  if (later && At(batch.requests, index - 1) != request) return "it is apart";
  std::string wrong = Place(told, At(batch.positions, index));
  if (!wrong.empty()) return wrong;
  const SessionInput& input = At(batch.inputs, index);
  const int end = index + At(batch.inputs, index).same_batch;
  if (end >= Size(batch.requests) || At(batch.requests, end) != request) {
    return "its group is divided";
  }
  ++told.planned;
  if (told.pending.empty()) {
    const bool may = spec_.ahead && told.unsampled.size() == 1 &&
                     !told.unknown && told.outputs < Most(told);
    if (!may || input.token != kUnknownToken) return "it is not known";
    told.unknown = true;
    return "";
  }
  if (input != told.pending.front()) {
    return fmt::format("it is {}, not {}", Text(input),
                       Text(told.pending.front()));
  }
  told.pending.pop_front();
  return "";
}

// Judges which tokens have outputs.
std::string SessionJudge::PlanEnds(const SessionBatch& batch,
                                   const std::vector<bool>& outputs) {
  for (int i = 0; i < Size(batch.inputs); ++i) {
    Told& told = requests_.at(At(batch.requests, i));
    const bool last = i + 1 == Size(batch.inputs) ||
                      At(batch.requests, i + 1) != At(batch.requests, i);
    const bool wanted = last && told.pending.empty() &&
                        (told.unknown || told.unsampled.empty());
    if (outputs[AsSize(i)] != wanted) {
      return fmt::format("token {} has {} output", i, wanted ? "no" : "an");
    }
    told.in_flight += wanted ? 1 : 0;
    told.outputs += wanted ? 1 : 0;
  }
  return "";
}

std::string SessionJudge::Compute(const SessionBatch& batch,
                                  const std::vector<States>& states) {
  for (int i = 0; i < Size(batch.inputs); ++i) {
    const int request = At(batch.requests, i);
    Told& told = requests_.at(request);
    const SessionInput& input = At(batch.inputs, i);
    --told.planned;
    if (input.token == kUnknownToken || (told.unknown && told.planned == 0)) {
      continue;  // A token after the end of the answer.
    }
    const States* expected = nullptr;
    AddTo(told, input, expected);
    if (*expected != At(states, i)) {
      return fmt::format(
          "request {} sees something else than its own tokens at position {}",
          request, At(batch.positions, i));
    }
    if (told.planned == 0 && told.in_flight > 0) {
      told.in_flight = 0;
      told.unsampled.push_back(At(states, i).back());
    }
  }
  for (auto it = requests_.begin(); it != requests_.end();) {
    const int request = (it++)->first;
    if (requests_.at(request).removed >= 0) Leave(request);
  }
  return "";
}

std::vector<int> SessionJudge::Unsampled() const {
  std::vector<int> requests;
  for (const auto& [request, told] : requests_) {
    if (told.removed < 0 && !told.unsampled.empty())
      requests.push_back(request);
  }
  return requests;
}

bool SessionJudge::Needs(int request) const {
  return requests_.at(request).unknown;
}

std::uint64_t SessionJudge::NextOutput(int request) const {
  return requests_.at(request).unsampled.front();
}

Ending SessionJudge::Sampled(int request, std::int32_t token) {
  Told& told = requests_.at(request);
  told.unsampled.pop_front();
  if (told.unknown) {
    told.unknown = false;
  } else {
    told.pending.push_back({.token = token});
  }
  if (++told.answered < Most(told)) return Ending::kNone;
  const bool limit = told.answered == told.options.limit;
  Finish(request, 0);
  return limit ? Ending::kLimit : Ending::kContext;
}

void SessionJudge::Finish(int request, std::int64_t removed) {
  Told& told = requests_.at(request);
  told.removed = removed;
  if (told.slot < 0) {
    requests_.erase(request);
    return;
  }
  if (told.planned == 0) Leave(request);
}

std::vector<SessionInput> SessionJudge::ExactOf(int slot) const {
  const Held& held = At(slots_, slot);
  return {held.inputs.begin(), IteratorAt(held.inputs, held.exact)};
}

void SessionJudge::Adopt(int slot, std::vector<SessionInput> record) {
  const int exact = Size(record);
  At(slots_, slot) = {.inputs = std::move(record), .exact = exact};
}

// The request has ended, and all that was planned is computed.
void SessionJudge::Leave(int request) {
  const Told& told = requests_.at(request);
  Held& held = At(slots_, told.slot);
  held.inputs = told.story.inputs();
  const std::int64_t stays = std::max<std::int64_t>(
      told.story.size() + std::ssize(told.pending) - told.removed, 0);
  if (stays < Size(held.inputs)) held.inputs.resize(AsSize(stays));
  held.exact = std::min(told.exact, Size(held.inputs));
  held.request = -1;
  requests_.erase(request);
}

}  // namespace kvtwin::props
