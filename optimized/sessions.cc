// Sessions for many slots and long prompts: prefixes are found by an index, the
// next request and the next slot without a search.

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/guarded_sessions.h"
#include "core/index.h"
#include "core/twin.h"
#include "optimized/record_index.h"

namespace kvtwin::optimized {
namespace {

using Inputs = std::vector<SessionInput>;

struct Group {
  int begin = 0;
  int end = 0;
};

// A request. What is still to be computed are the inputs of `queue` from
// `queued` on.
struct Job {
  RequestInfo info;
  int keep = 0;
  bool reuse = true;
  Ending last = Ending::kLimit;
  std::int64_t most = 0;   // Tokens of the answer, at most.
  std::int64_t asked = 0;  // Outputs planned so far.
  Inputs queue;
  std::size_t queued = 0;
  std::vector<Group> groups;  // The prompt's groups of several inputs.

  int left() const { return AsInt(queue.size() - queued); }
};

struct Lane {
  int request = -1;
  Job* job = nullptr;
  Inputs record;
  int reusable = 0;
  std::int64_t used = 0;
  bool unknown = false;  // The record's last token is not sampled yet.
};

// Merges groups that overlap, and lists those of several inputs.
std::vector<Group> MergeGroups(Inputs& inputs) {
  std::vector<Group> groups;
  int end = 0;
  int begin = 0;
  for (int i = 0; i < Size(inputs); ++i) {
    const int reach = i + 1 + std::exchange(At(inputs, i).same_batch, 0);
    if (i >= end) begin = i;
    end = std::max(end, reach);
    if (i + 1 == end && begin < i) {
      groups.push_back({begin, end});
      At(inputs, begin).same_batch = i - begin;
    }
  }
  return groups;
}

// Returns the group with begin < index < end, or null.
const Group* GroupAround(const std::vector<Group>& groups, int index) {
  const auto after = std::ranges::lower_bound(groups, index, {}, &Group::begin);
  if (after == groups.begin()) return nullptr;
  const Group& group = *(after - 1);
  return index < group.end ? &group : nullptr;
}

// A part of a batch: the first `count` inputs of a lane's queue, or with
// `unknown` a token that is not sampled yet.
struct Part {
  int slot = 0;
  int count = 0;
  bool unknown = false;
};

class FastSessions final : public GuardedSessions {
 public:
  FastSessions(Cache& cache, const SessionsSpec& spec)
      : GuardedSessions(spec),
        cache_(&cache),
        lanes_(AsSize(spec.slots)),
        index_(spec.slots) {
    for (int i = 0; i < spec.slots; ++i) free_.emplace(0, i);
  }

  Result<SessionBatch> NextBatch() override {
    Status status = Admit();
    if (status.ok()) status = Plan();
    if (status.ok()) status = Start();
    if (!status.ok()) return status;
    return SessionBatch{inputs_, positions_, sequences_, owners_, outputs_};
  }

  SessionGauges Gauges() const override {
    SessionGauges gauges = gauges_;
    gauges.running = std::ssize(running_);
    gauges.waiting = std::ssize(waiting_);
    std::int64_t inputs = waiting_inputs_;
    for (const Lane& lane : lanes_) {
      inputs += Size(lane.record) + (lane.job ? lane.job->left() : 0);
    }
    gauges.bytes = inputs * static_cast<std::int64_t>(sizeof(SessionInput));
    return gauges;
  }

 private:
  // (Q2, Q3)
  int DoSubmit(std::span<const SessionInput> prompt,
               const RequestOptions& options) override {
    Job job;
    job.queue.assign(prompt.begin(), prompt.end());
    job.groups = MergeGroups(job.queue);
    const int context = spec().context;
    job.keep =
        std::min(options.keep < 0 ? Size(prompt) : options.keep, context - 1);
    if (const Group* cut = GroupAround(job.groups, job.keep)) {
      job.keep = cut->begin;
    }
    if (Size(prompt) > context) Truncate(job);
    job.reuse = options.reuse;
    job.info.prompt = Size(job.queue);
    job.most = options.limit > 0 ? options.limit
                                 : std::numeric_limits<std::int64_t>::max();
    if (!options.shift && context - Size(job.queue) + 1 < job.most) {
      job.most = context - Size(job.queue) + 1;
      job.last = Ending::kContext;
    }
    waiting_.insert(submitted_);
    waiting_inputs_ += job.info.prompt;
    jobs_.emplace(submitted_, std::move(job));
    return submitted_++;
  }

  void Truncate(Job& job) const {
    int begin = job.keep + Size(job.queue) - spec().context;
    if (const Group* cut = GroupAround(job.groups, begin)) begin = cut->end;
    job.queue.erase(IteratorAt(job.queue, job.keep),
                    IteratorAt(job.queue, begin));
    job.groups = MergeGroups(job.queue);
  }

  // (Q4)
  Status Admit() {
    while (!waiting_.empty() && !free_.empty()) {
      const int request = *waiting_.begin();
      Job& job = jobs_.at(request);
      if (Status status = Load(request, job); !status.ok()) return status;
      waiting_.erase(waiting_.begin());
      waiting_inputs_ -= job.info.prompt;
    }
    return {};
  }

  struct Source {
    int slot = -1;
    int prefix = 0;
    int resumed = 0;
  };

  bool CanResume(int slot, int position) {
    const Result<bool> can = cache_->CanResume(slot, position);
    return can.ok() && *can;
  }

  // The longest prefix that a slot has and can resume after (Q5). Slots come in
  // classes: those that share more whole blocks with the prompt come first.
  Source FindSource(Job& job, bool own) {
    job.info.missed.clear();
    std::vector<Source> sources;  // The slots of a class that share something.
    Source found;
    int level = -1;
    const auto decide = [&] {
      std::ranges::stable_sort(sources, std::greater<>(), &Source::prefix);
      for (const Source& source : sources) {
        if (CanResume(source.slot, source.resumed)) {
          found = source;
          return true;
        }
        if (!job.info.missed.empty()) continue;
        const auto why = cache_->WhyNotResume(source.slot, source.resumed);
        job.info.missed =
            fmt::format("slot {}: {}", source.slot, why.ok() ? *why : "");
        ++gauges_.missed;
      }
      sources.clear();
      return false;
    };
    index_.Find(job.queue, [&](int slot, int shared) {
      if (shared != std::exchange(level, shared) && decide()) return true;
      const Lane& lane = At(lanes_, slot);
      if (own && lane.job != nullptr) return false;
      const int most = std::min(lane.reusable, Size(job.queue));
      while (shared < most &&
             At(lane.record, shared) == At(job.queue, shared)) {
        ++shared;
      }
      const int resumed = Resumed(job, shared);
      if (resumed > 0) sources.push_back({slot, shared, resumed});
      return false;
    });
    if (found.slot < 0) decide();
    return found;
  }

  static int Resumed(const Job& job, int prefix) {
    prefix = std::min(prefix, Size(job.queue) - 1);
    const Group* cut = GroupAround(job.groups, prefix);
    return cut != nullptr ? cut->begin : prefix;
  }

  // (Q5, Q6)
  int ChooseSlot(const Job& job, const Source& source) const {
    const bool own = spec().choice == SlotChoice::kOwnPrefix;
    const int oldest = free_.begin()->second;
    if (source.slot >= 0) {
      if (own) return source.slot;
      const Lane& lane = At(lanes_, source.slot);
      const bool whole = Size(lane.record) == source.prefix;
      return whole && lane.job == nullptr ? source.slot : oldest;
    }
    if (!own || !job.reuse) return oldest;
    const auto first = std::ranges::find(lanes_, nullptr, &Lane::job);
    return AsInt(first - lanes_.begin());
  }

  // (Q7)
  Status Load(int request, Job& job) {
    Source source;
    if (job.reuse) {
      source = FindSource(job, spec().choice == SlotChoice::kOwnPrefix);
    }
    const int slot = ChooseSlot(job, source);
    Lane& lane = At(lanes_, slot);
    const bool stays = source.slot == slot;
    int reused = source.resumed;
    gauges_.evicted_tokens += Size(lane.record) - (stays ? reused : 0);
    if (reused > 0 && !stays) {
      ++gauges_.forks;
      const Status copied =
          cache_->CopyPrefix(source.slot, slot, source.prefix);
      if (!copied.ok() || !CanResume(slot, reused)) reused = 0;
    }
    Status status = cache_->Remove(slot, reused, kOpenEnd);
    if (!status.ok()) {
      reused = 0;
      status = cache_->Remove(slot, 0, kOpenEnd);
    }
    SetRecord(slot, job.queue, status.ok() ? reused : 0);
    if (!status.ok()) return status;
    free_.erase({lane.used, slot});
    running_.insert(slot);
    lane.request = request;
    lane.job = &job;
    lane.used = ++clock_;
    job.queued = AsSize(reused);
    job.info.slot = slot;
    job.info.source = reused > 0 ? source.slot : -1;
    job.info.reused = reused;
    gauges_.prompt_tokens += Size(job.queue);
    gauges_.hit_tokens += reused;
    return {};
  }

  // Makes the slot's record the first `size` inputs.
  void SetRecord(int slot, const Inputs& inputs, int size) {
    Lane& lane = At(lanes_, slot);
    const int common = std::min({lane.reusable, size, Size(lane.record)});
    int same = 0;
    while (same < common && At(lane.record, same) == At(inputs, same)) ++same;
    index_.Set(slot, lane.record, same);
    lane.record.assign(inputs.begin(), IteratorAt(inputs, size));
    lane.reusable = size;
    index_.Set(slot, lane.record, size);
  }

  // Whether the next token of the job can be planned before it is sampled (Q9).
  bool IsAhead(const Job& job) const {
    return spec().ahead && job.left() == 0 && job.info.outputs == 1 &&
           job.asked < job.most;
  }

  int Ready(int slot) const {
    const Job& job = *At(lanes_, slot).job;
    return IsAhead(job) ? 1 : job.left();
  }

  // (Q8)
  Status Plan() {
    parts_.clear();
    following_ = -1;
    int singles = 0;  // Slots still to come that have a single input.
    for (const int slot : running_) singles += Ready(slot) == 1 ? 1 : 0;
    int size = 0;
    const auto middle = running_.lower_bound(next_);
    for (const auto& [begin, end] : {std::pair(middle, running_.end()),
                                     std::pair(running_.begin(), middle)}) {
      for (auto at = begin; at != end; ++at) {
        const int ready = Ready(*at);
        if (ready == 0) continue;
        if (ready == 1) --singles;
        int planned = 0;
        Status status =
            PlanSlot(*at, spec().batch - size - singles, size == 0, planned);
        if (!status.ok()) return status;
        size += planned;
        if (planned == 0 && following_ < 0) following_ = *at;
      }
    }
    if (following_ < 0) following_ = (next_ + 1) % spec().slots;
    return {};
  }

  Status PlanSlot(int slot, int room, bool first, int& planned) {
    if (room < 1 && !first) return {};
    Lane& lane = At(lanes_, slot);
    Job& job = *lane.job;
    if (Size(lane.record) >= spec().context) {
      if (!first && room < FirstAfterShift(lane, job)) return {};
      if (Status status = Shift(slot); !status.ok()) return status;
    }
    Part part = {.slot = slot};
    if (job.left() == 0) {
      part = {slot, 1, true};
    } else {
      for (std::size_t at = job.queued; at < job.queue.size();) {
        const int group = 1 + job.queue[at].same_batch;
        if (part.count + group > room && !(first && part.count == 0)) break;
        part.count += group;
        at += AsSize(group);
      }
    }
    planned = part.count;
    if (planned > 0) parts_.push_back(part);
    return {};
  }

  int ShiftEnd(const Lane& lane, int keep) const {
    const int least = keep + std::max((spec().context - keep) / 2, 1);
    int end = keep;
    while (end < least) end += 1 + At(lane.record, end).same_batch;
    return end;
  }

  // The size of the group that comes first if all that stays is computed again.
  int FirstAfterShift(const Lane& lane, const Job& job) const {
    const int first = job.keep == 0 ? ShiftEnd(lane, 0) : 0;
    return first < Size(lane.record) ? 1 + At(lane.record, first).same_batch
                                     : 1;
  }

  // (Q10)
  Status Shift(int slot) {
    Lane& lane = At(lanes_, slot);
    Job& job = *lane.job;
    const int end = ShiftEnd(lane, job.keep);
    ++gauges_.shifts;
    SetReusable(slot, std::min(lane.reusable, job.keep));
    const int rest = Size(lane.record) - (end - job.keep);
    const bool moved =
        cache_->Remove(slot, job.keep, end).ok() && CanResume(slot, rest);
    Status status;
    if (!moved) status = cache_->Remove(slot, 0, kOpenEnd);
    if (!status.ok()) return status;
    lane.record.erase(IteratorAt(lane.record, job.keep),
                      IteratorAt(lane.record, end));
    if (moved) return {};
    ++gauges_.reprocessed;
    lane.record.insert(lane.record.end(), IteratorAt(job.queue, job.queued),
                       job.queue.end());
    job.queue = std::exchange(lane.record, {});
    job.queued = 0;
    SetReusable(slot, 0);
    return {};
  }

  Status Start() {
    inputs_.clear();
    positions_.clear();
    sequences_.clear();
    owners_.clear();
    outputs_.clear();
    multimodal_.clear();
    for (const Part& part : parts_) Add(part);
    if (!parts_.empty()) {
      Status status =
          cache_->StartForward({positions_, sequences_, multimodal_},
                               /*reserve=*/false);
      if (!status.ok()) {
        ++gauges_.refusals;
        return status;
      }
      ++gauges_.batches;
      gauges_.planned_tokens += std::ssize(inputs_);
    }
    next_ = following_;
    for (const Part& part : parts_) Take(part);
    return {};
  }

  void Add(const Part& part) {
    const Lane& lane = At(lanes_, part.slot);
    const Job& job = *lane.job;
    for (int i = 0; i < part.count; ++i) {
      const SessionInput input = part.unknown
                                     ? SessionInput{.token = kUnknownToken}
                                     : job.queue[job.queued + AsSize(i)];
      if (input.multimodal != 0) multimodal_.push_back(Size(inputs_));
      inputs_.push_back(input);
      positions_.push_back(Size(lane.record) + i);
    }
    sequences_.resize(inputs_.size(), part.slot);
    owners_.resize(inputs_.size(), lane.request);
    if (HasOutput(part)) outputs_.push_back(Size(inputs_) - 1);
  }

  bool HasOutput(const Part& part) const {
    const Job& job = *At(lanes_, part.slot).job;
    return part.unknown || (part.count == job.left() && job.info.outputs == 0);
  }

  void Take(const Part& part) {
    Lane& lane = At(lanes_, part.slot);
    Job& job = *lane.job;
    const bool output = HasOutput(part);
    const bool exact = lane.reusable == Size(lane.record);
    if (part.unknown) {
      lane.record.push_back({.token = kUnknownToken});
      lane.unknown = true;
    } else {
      const auto begin = IteratorAt(job.queue, job.queued);
      lane.record.insert(lane.record.end(), begin, begin + part.count);
      job.queued += AsSize(part.count);
      if (exact) SetReusable(part.slot, Size(lane.record));
    }
    if (job.left() == 0) {
      job.queue.clear();
      job.queued = 0;
    }
    job.asked += output ? 1 : 0;
    job.info.outputs += output ? 1 : 0;
  }

  // Requires: the record's first inputs, this many, are exact.
  void SetReusable(int slot, int reusable) {
    Lane& lane = At(lanes_, slot);
    lane.reusable = reusable;
    index_.Set(slot, lane.record, reusable);
  }

  Ending DoSampled(int request, std::int32_t token) override {
    Job& job = jobs_.at(request);
    const int slot = job.info.slot;
    Lane& lane = At(lanes_, slot);
    if (std::exchange(lane.unknown, false)) {
      lane.record.back().token = token;
      for (const int output : outputs_) {
        SessionInput& input = At(inputs_, output);
        if (At(owners_, output) == request && input.token == kUnknownToken) {
          input.token = token;
        }
      }
      if (lane.reusable + 1 == Size(lane.record)) {
        SetReusable(slot, Size(lane.record));
      }
    } else {
      job.queue.push_back({.token = token});
    }
    --job.info.outputs;
    ++job.info.answered;
    if (job.info.answered < job.most) return Ending::kNone;
    const Ending ending = job.last;
    DoFinish(request, 0);
    return ending;
  }

  // (Q11)
  void DoFinish(int request, std::int64_t removed) override {
    const Job& job = jobs_.at(request);
    if (const int slot = job.info.slot; slot >= 0) {
      Lane& lane = At(lanes_, slot);
      if (std::exchange(lane.unknown, false)) lane.record.pop_back();
      const std::int64_t cut =
          std::clamp<std::int64_t>(removed - job.left(), 0, Size(lane.record));
      lane.record.resize(lane.record.size() - AsSize(cut));
      SetReusable(slot, std::min(lane.reusable, Size(lane.record)));
      lane.request = -1;
      lane.job = nullptr;
      lane.used = ++clock_;
      running_.erase(slot);
      free_.emplace(lane.used, slot);
    } else {
      waiting_.erase(request);
      waiting_inputs_ -= job.info.prompt;
    }
    jobs_.erase(request);
  }

  // (Q13)
  void DoAdopt(int slot, std::span<const SessionInput> record) override {
    Inputs inputs(record.begin(), record.end());
    MergeGroups(inputs);
    Lane& lane = At(lanes_, slot);
    SetRecord(slot, inputs, Size(inputs));
    free_.erase({lane.used, slot});
    lane.used = ++clock_;
    free_.emplace(lane.used, slot);
  }

  const RequestInfo* DoRequest(int request) const override {
    const auto found = jobs_.find(request);
    return found == jobs_.end() ? nullptr : &found->second.info;
  }

  std::vector<int> Requests() const override {
    std::vector<int> requests;
    for (const auto& [request, job] : jobs_) requests.push_back(request);
    std::ranges::sort(requests);
    return requests;
  }

  SlotInfo DoSlot(int slot) const override {
    const Lane& lane = At(lanes_, slot);
    return {lane.request, lane.record, lane.reusable};
  }

  Cache* cache_;
  std::vector<Lane> lanes_;
  RecordIndex index_;
  std::unordered_map<int, Job> jobs_;            // Those that have not ended.
  std::set<int> waiting_;                        // Requests.
  std::int64_t waiting_inputs_ = 0;              // Inputs of their prompts.
  std::set<std::pair<std::int64_t, int>> free_;  // By last use.
  std::set<int> running_;                        // Slots.
  int submitted_ = 0;
  int next_ = 0;
  std::int64_t clock_ = 0;
  SessionGauges gauges_;
  std::vector<Part> parts_;
  int following_ = 0;  // `next_` after this batch.
  Inputs inputs_;
  std::vector<std::int32_t> positions_;
  std::vector<int> sequences_;
  std::vector<int> owners_;
  std::vector<int> outputs_;
  std::vector<int> multimodal_;
};

}  // namespace

std::unique_ptr<Sessions> MakeSessions(Cache& cache, const SessionsSpec& spec) {
  return std::make_unique<FastSessions>(cache, spec);
}

}  // namespace kvtwin::optimized
