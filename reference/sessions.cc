// The reference of sessions: each question is answered by a scan of all slots
// and of whole records.

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/guarded_sessions.h"
#include "core/index.h"
#include "core/twin.h"

namespace kvtwin::reference {
namespace {

using Inputs = std::vector<SessionInput>;

// Gives each input the number of later inputs of its group. Groups that overlap
// become one.
Inputs WithWholeGroups(Inputs inputs) {
  for (std::size_t i = 0; i < inputs.size();) {
    std::size_t end = i + 1;
    for (std::size_t j = i; j < end; ++j) {
      end = std::max(end, j + 1 + AsSize(inputs[j].same_batch));
      inputs[j].same_batch = 0;
    }
    inputs[i].same_batch = AsInt(end - i) - 1;
    i = end;
  }
  return inputs;
}

// Returns the group that `index` would cut in two, as [begin, end); nothing if
// it cuts no group. Requires: whole groups.
std::optional<std::pair<int, int>> CutGroup(const Inputs& inputs, int index) {
  for (int i = 0; i < std::min(index, Size(inputs));
       i += 1 + At(inputs, i).same_batch) {
    const int end = i + 1 + At(inputs, i).same_batch;
    if (index < end) return std::pair(i, end);
  }
  return {};
}

// Everything about a request.
struct Asked {
  RequestOptions options;
  RequestInfo info;
  Inputs prompt;
  std::deque<SessionInput> queue;  // Inputs to compute next.
  std::int64_t outputs = 0;        // Planned, whether sampled or not.
  std::int64_t most = 0;           // Tokens of the answer, at most,
  Ending last = Ending::kLimit;    // and how it ends then.
};

struct Place {
  int request = -1;
  Inputs record;
  int reusable = 0;
  std::int64_t used = 0;  // When a request last began or ended.
};

struct Planned {
  int slot = 0;
  SessionInput input;
  bool output = false;
};

class PlainSessions final : public GuardedSessions {
 public:
  PlainSessions(Cache& cache, const SessionsSpec& spec)
      : GuardedSessions(spec), cache_(&cache), slots_(AsSize(spec.slots)) {}

  Result<SessionBatch> NextBatch() override {
    if (Status status = Admit(); !status.ok()) return status;
    std::vector<Planned> plan;
    int next = -1;
    if (Status status = Plan(plan, next); !status.ok()) return status;
    Status status = Start(plan);
    if (!status.ok()) return status;
    next_ = next >= 0 ? next : (next_ + 1) % spec().slots;
    for (const Planned& planned : plan) Take(planned);
    return SessionBatch{inputs_, positions_, sequences_, requests_of_batch_,
                        outputs_};
  }

  SessionGauges Gauges() const override {
    SessionGauges gauges = gauges_;
    std::size_t inputs = 0;
    for (const auto& [request, asked] : requests_) {
      const bool waits = asked.info.slot < 0;
      ++(waits ? gauges.waiting : gauges.running);
      inputs += waits ? asked.prompt.size() : asked.queue.size();
    }
    for (const Place& place : slots_) inputs += place.record.size();
    gauges.bytes = static_cast<std::int64_t>(inputs * sizeof(SessionInput));
    return gauges;
  }

 private:
  // The prompt as it will be computed (Q2, Q3).
  int DoSubmit(std::span<const SessionInput> prompt,
               const RequestOptions& options) override {
    Asked asked;
    asked.options = options;
    asked.prompt = WithWholeGroups({prompt.begin(), prompt.end()});
    int keep = options.keep < 0 ? Size(prompt) : options.keep;
    keep = std::min(keep, spec().context - 1);
    if (const auto cut = CutGroup(asked.prompt, keep)) keep = cut->first;
    asked.options.keep = keep;
    if (Size(prompt) > spec().context) {
      int begin = keep + Size(prompt) - spec().context;
      if (const auto cut = CutGroup(asked.prompt, begin)) begin = cut->second;
      asked.prompt.erase(IteratorAt(asked.prompt, keep),
                         IteratorAt(asked.prompt, begin));
    }
    asked.info.prompt = Size(asked.prompt);
    asked.most = options.limit > 0 ? options.limit
                                   : std::numeric_limits<std::int64_t>::max();
    const int room = spec().context - Size(asked.prompt) + 1;
    if (!options.shift && room < asked.most) {
      asked.most = room;
      asked.last = Ending::kContext;
    }
    const int request = submitted_++;
    requests_.emplace(request, std::move(asked));
    return request;
  }

  // Requests get slots in the order of their numbers (Q4).
  Status Admit() {
    for (auto& [request, asked] : requests_) {
      if (asked.info.slot >= 0) continue;
      if (std::ranges::none_of(slots_, &IsFree)) return {};
      if (Status status = Load(request, asked); !status.ok()) return status;
    }
    return {};
  }

  static bool IsFree(const Place& place) { return place.request < 0; }

  // The number of inputs that the prompt shares with the slot's record (Q5).
  int Shared(const Asked& asked, int slot) const {
    const Place& place = At(slots_, slot);
    int same = 0;
    while (same < std::min(place.reusable, Size(asked.prompt)) &&
           At(place.record, same) == At(asked.prompt, same)) {
      ++same;
    }
    return same;
  }

  // The position at which a request resumes after a prefix: an input is left to
  // compute, and no group is cut.
  static int Resumed(const Asked& asked, int prefix) {
    const int resumed = std::min(prefix, Size(asked.prompt) - 1);
    const auto cut = CutGroup(asked.prompt, resumed);
    return cut ? cut->first : resumed;
  }

  bool CanResume(int slot, int position) {
    const Result<bool> can = cache_->CanResume(slot, position);
    return can.ok() && *can;
  }

  int LeastRecentlyUsed() const {
    int oldest = -1;
    for (int i = 0; i < spec().slots; ++i) {
      if (!IsFree(At(slots_, i))) continue;
      if (oldest < 0 || At(slots_, i).used < At(slots_, oldest).used) {
        oldest = i;
      }
    }
    return oldest;
  }

  // The slot of a request, and the slot whose prefix it takes over (Q5, Q6).
  struct Choice {
    int slot = 0;
    int source = -1;
    int prefix = 0;
  };
  Choice Choose(Asked& asked) {
    asked.info.missed.clear();
    if (!asked.options.reuse) return {LeastRecentlyUsed()};
    const bool own = spec().choice == SlotChoice::kOwnPrefix;
    Choice best = {-1, -1, -1};
    Choice missed;  // The longest that cannot resume.
    for (int i = 0; i < spec().slots; ++i) {
      if (own && !IsFree(At(slots_, i))) continue;
      int prefix = Shared(asked, i);
      const int resumed = Resumed(asked, prefix);
      if (resumed == 0) {
        prefix = 0;
      } else if (!CanResume(i, resumed)) {
        if (prefix > missed.prefix) missed = {i, i, prefix};
        prefix = 0;
      }
      if (prefix > best.prefix) best = {i, i, prefix};
    }
    if (best.prefix == 0) best.source = -1;
    if (missed.prefix > best.prefix ||
        (missed.prefix == best.prefix && missed.slot < best.slot)) {
      Miss(asked, missed);
    }
    const Place& place = At(slots_, best.slot);
    const bool whole = best.prefix > 0 && best.prefix == Size(place.record);
    if (!own && !(whole && IsFree(place))) best.slot = LeastRecentlyUsed();
    return best;
  }

  void Miss(Asked& asked, const Choice& missed) {
    if (missed.prefix == 0) return;
    ++gauges_.missed;
    const int resumed = Resumed(asked, missed.prefix);
    const auto why = cache_->WhyNotResume(missed.slot, resumed);
    asked.info.missed =
        fmt::format("slot {}: {}", missed.slot, why.ok() ? *why : "");
  }

  // Makes the slot hold the reused prefix and nothing else (Q7).
  Status Load(int request, Asked& asked) {
    Choice choice = Choose(asked);
    Place& place = At(slots_, choice.slot);
    int reused = choice.source < 0 ? 0 : Resumed(asked, choice.prefix);
    gauges_.evicted_tokens +=
        Size(place.record) - (choice.source == choice.slot ? reused : 0);
    if (reused > 0 && choice.source != choice.slot) {
      ++gauges_.forks;
      const Status copied =
          cache_->CopyPrefix(choice.source, choice.slot, choice.prefix);
      if (!copied.ok() || !CanResume(choice.slot, reused)) reused = 0;
    }
    place.record.clear();
    place.reusable = 0;
    if (!cache_->Remove(choice.slot, reused, kOpenEnd).ok()) {
      reused = 0;
      Status status = cache_->Remove(choice.slot, 0, kOpenEnd);
      if (!status.ok()) return status;
    }
    const auto middle = IteratorAt(asked.prompt, reused);
    place.request = request;
    place.record.assign(asked.prompt.begin(), middle);
    place.reusable = reused;
    place.used = ++clock_;
    asked.queue.assign(middle, asked.prompt.end());
    asked.info.slot = choice.slot;
    asked.info.source = reused > 0 ? choice.source : -1;
    asked.info.reused = reused;
    gauges_.prompt_tokens += Size(asked.prompt);
    gauges_.hit_tokens += reused;
    return {};
  }

  // The number of inputs that the slot could compute now, a token that is not
  // sampled yet among them (Q8, Q9).
  int Ready(int slot) const {
    if (IsFree(At(slots_, slot))) return 0;
    const Asked& asked = requests_.at(At(slots_, slot).request);
    if (!asked.queue.empty()) return Size(asked.queue);
    return spec().ahead && asked.info.outputs == 1 && asked.outputs < asked.most
               ? 1
               : 0;
  }

  // Plans a batch. `next` is the first slot that got nothing, or -1 (Q8).
  Status Plan(std::vector<Planned>& plan, int& next) {
    for (int i = 0; i < spec().slots; ++i) {
      const int slot = (next_ + i) % spec().slots;
      if (Ready(slot) == 0) continue;
      int room = spec().batch - Size(plan);
      for (int j = i + 1; j < spec().slots; ++j) {
        if (Ready((next_ + j) % spec().slots) == 1) --room;
      }
      const std::size_t before = plan.size();
      Status status = PlanSlot(slot, room, plan);
      if (!status.ok()) return status;
      if (plan.size() == before && next < 0) next = slot;
    }
    return {};
  }

  // Plans as many inputs of the slot as there is room for; of the first slot of
  // a batch at least one group.
  Status PlanSlot(int slot, int room, std::vector<Planned>& plan) {
    if (room < 1 && !plan.empty()) return {};
    Place& place = At(slots_, slot);
    Asked& asked = requests_.at(place.request);
    if (Size(place.record) == spec().context) {
      if (!plan.empty() && room < FirstAgain(place, asked)) return {};
      if (Status status = Shift(slot); !status.ok()) return status;
    }
    if (asked.queue.empty()) {
      plan.push_back({slot, {.token = kUnknownToken}, true});
      return {};
    }
    const int first = 1 + asked.queue.front().same_batch;
    if (plan.empty()) room = std::max(room, first);
    int taken = 0;
    while (taken < Size(asked.queue)) {
      const int end = taken + 1 + At(asked.queue, taken).same_batch;
      if (end > room) break;
      for (; taken < end; ++taken) {
        plan.push_back({slot, At(asked.queue, taken)});
      }
    }
    if (taken == Size(asked.queue)) {
      plan.back().output = asked.info.outputs == 0;
    }
    return {};
  }

  // The end of what a shift removes (Q10).
  int ShiftEnd(const Place& place, int keep) const {
    const int wanted = std::max((spec().context - keep) / 2, 1);
    int end = keep;
    while (end - keep < wanted) end += 1 + At(place.record, end).same_batch;
    return end;
  }

  // The size of the group that comes first if a shift of the slot fails.
  int FirstAgain(const Place& place, const Asked& asked) const {
    const int keep = asked.options.keep;
    const int first = keep > 0 ? 0 : ShiftEnd(place, keep);
    if (first == Size(place.record)) return 1;  // A token of the answer.
    return 1 + At(place.record, first).same_batch;
  }

  // Makes room in a slot that is full (Q10). If the tokens cannot move, or
  // those that a window now sees again are gone, they are computed again.
  Status Shift(int slot) {
    Place& place = At(slots_, slot);
    Asked& asked = requests_.at(place.request);
    const int keep = asked.options.keep;
    const int end = ShiftEnd(place, keep);
    ++gauges_.shifts;
    place.reusable = std::min(place.reusable, keep);
    Inputs rest = place.record;
    rest.erase(IteratorAt(rest, keep), IteratorAt(rest, end));
    if (cache_->Remove(slot, keep, end).ok() && CanResume(slot, Size(rest))) {
      place.record = rest;
      return {};
    }
    Status status = cache_->Remove(slot, 0, kOpenEnd);
    if (!status.ok()) return status;
    ++gauges_.reprocessed;
    asked.queue.insert(asked.queue.begin(), rest.begin(), rest.end());
    place.record.clear();
    place.reusable = 0;
    return {};
  }

  Status Start(const std::vector<Planned>& plan) {
    inputs_.clear();
    positions_.clear();
    sequences_.clear();
    requests_of_batch_.clear();
    outputs_.clear();
    std::vector<int> multimodal;
    std::vector<int> lengths;
    for (const Place& place : slots_) lengths.push_back(Size(place.record));
    for (int i = 0; i < Size(plan); ++i) {
      const Planned& planned = At(plan, i);
      inputs_.push_back(planned.input);
      positions_.push_back(At(lengths, planned.slot)++);
      sequences_.push_back(planned.slot);
      requests_of_batch_.push_back(At(slots_, planned.slot).request);
      if (planned.output) outputs_.push_back(i);
      if (planned.input.multimodal != 0) multimodal.push_back(i);
    }
    if (plan.empty()) return {};
    Status status = cache_->StartForward({positions_, sequences_, multimodal},
                                         /*reserve=*/false);
    if (status.ok()) {
      ++gauges_.batches;
      gauges_.planned_tokens += Size(plan);
    } else {
      ++gauges_.refusals;
    }
    return status;
  }

  // Moves a planned input from its queue to its record.
  void Take(const Planned& planned) {
    Place& place = At(slots_, planned.slot);
    Asked& asked = requests_.at(place.request);
    if (!asked.queue.empty()) asked.queue.pop_front();
    place.record.push_back(planned.input);
    if (planned.input.token != kUnknownToken) Known(place);
    if (planned.output) {
      ++asked.outputs;
      ++asked.info.outputs;
    }
  }

  // The record's last token is known. It can be reused if all before it can.
  static void Known(Place& place) {
    if (place.reusable + 1 == Size(place.record)) ++place.reusable;
  }

  static bool EndsUnknown(const Place& place) {
    return !place.record.empty() && place.record.back().token == kUnknownToken;
  }

  Ending DoSampled(int request, std::int32_t token) override {
    Asked& asked = requests_.at(request);
    Place& place = At(slots_, asked.info.slot);
    if (EndsUnknown(place)) {
      place.record.back().token = token;
      Known(place);
      for (int i = 0; i < Size(inputs_); ++i) {
        SessionInput& input = At(inputs_, i);
        const bool same = At(requests_of_batch_, i) == request;
        if (same && input.token == kUnknownToken) input.token = token;
      }
    } else {
      asked.queue.push_back({.token = token});
    }
    --asked.info.outputs;
    if (++asked.info.answered < asked.most) return Ending::kNone;
    const Ending ending = asked.last;
    DoFinish(request, 0);
    return ending;
  }

  // The cache is not told: the cells stay until the slot is loaded again (Q11).
  void DoFinish(int request, std::int64_t removed) override {
    const Asked& asked = requests_.at(request);
    if (asked.info.slot >= 0) {
      Place& place = At(slots_, asked.info.slot);
      if (EndsUnknown(place)) place.record.pop_back();
      const std::int64_t stays = std::max<std::int64_t>(
          Size(place.record) + Size(asked.queue) - removed, 0);
      if (stays < Size(place.record)) place.record.resize(AsSize(stays));
      place.reusable = std::min(place.reusable, Size(place.record));
      place.request = -1;
      place.used = ++clock_;
    }
    requests_.erase(request);
  }

  // (Q13)
  void DoAdopt(int slot, std::span<const SessionInput> record) override {
    Place& place = At(slots_, slot);
    place.record = WithWholeGroups({record.begin(), record.end()});
    place.reusable = Size(place.record);
    place.used = ++clock_;
  }

  const RequestInfo* DoRequest(int request) const override {
    const auto found = requests_.find(request);
    return found == requests_.end() ? nullptr : &found->second.info;
  }

  std::vector<int> Requests() const override {
    std::vector<int> requests;
    for (const auto& [request, asked] : requests_) requests.push_back(request);
    return requests;
  }

  SlotInfo DoSlot(int slot) const override {
    const Place& place = At(slots_, slot);
    return {place.request, place.record, place.reusable};
  }

  Cache* cache_;
  std::vector<Place> slots_;
  std::map<int, Asked> requests_;  // Those that have not ended.
  int submitted_ = 0;
  int next_ = 0;  // The slot that comes first in the next batch.
  std::int64_t clock_ = 0;
  SessionGauges gauges_;
  Inputs inputs_;
  std::vector<std::int32_t> positions_;
  std::vector<int> sequences_;
  std::vector<int> requests_of_batch_;
  std::vector<int> outputs_;
};

}  // namespace

std::unique_ptr<Sessions> MakeSessions(Cache& cache, const SessionsSpec& spec) {
  return std::make_unique<PlainSessions>(cache, spec);
}

}  // namespace kvtwin::reference
