#include "core/guarded_sessions.h"

#include <algorithm>
#include <limits>

#include "core/index.h"
#include "core/refusals.h"

namespace kvtwin {
namespace {

// Groups that overlap count as one: all of it must be in one batch.
Status CheckGroups(std::string_view list, std::span<const SessionInput> prompt,
                   int largest) {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  for (std::int64_t i = 0; i < std::ssize(prompt); ++i) {
    if (i >= end) begin = i;
    end = std::max(end, i + 1 + At(prompt, i).same_batch);
    if (end > std::ssize(prompt)) {
      return Invalid("{}[{}].same_batch is {}, {} inputs follow", list, i,
                     At(prompt, i).same_batch, std::ssize(prompt) - i - 1);
    }
    if (end - begin > largest) {
      return Invalid(
          "{}[{}].same_batch is {}, which makes a group of {} inputs; a "
          "batch or the context has {}",
          list, i, At(prompt, i).same_batch, end - begin, largest);
    }
  }
  return {};
}

Status BadInput(std::string_view list, std::int64_t index,
                const SessionInput& input) {
  if (input.token < 0) {
    return Invalid("{}[{}].token is {}, it must not be negative", list, index,
                   input.token);
  }
  return Invalid("{}[{}].same_batch is {}, it must not be negative", list,
                 index, input.same_batch);
}

// Checks a list of inputs; `list` is the name of the argument.
Status CheckInputs(std::string_view list, std::span<const SessionInput> inputs,
                   int largest) {
  for (std::int64_t i = 0; i < std::ssize(inputs); ++i) {
    const SessionInput& input = At(inputs, i);
    if (input.token < 0 || input.same_batch < 0)
      return BadInput(list, i, input);
  }
  return CheckGroups(list, inputs, largest);
}

}  // namespace

Status CheckSessionsSpec(const SessionsSpec& spec) {
  Status status = AtLeastOne("slots", spec.slots);
  if (status.ok()) status = AtLeastOne("context", spec.context);
  if (status.ok()) status = AtLeastOne("batch", spec.batch);
  if (status.ok()) status = CheckEnum("choice", spec.choice, 2);
  return status;
}

Status CheckRequest(const SessionsSpec& spec,
                    std::span<const SessionInput> prompt,
                    const RequestOptions& options) {
  if (prompt.empty()) return Invalid("prompt is empty");
  Status status =
      CheckInputs("prompt", prompt, std::min(spec.batch, spec.context));
  if (!status.ok()) return status;
  if (options.keep < -1) {
    return Invalid("keep is {}, it must be at least -1", options.keep);
  }
  status = NotNegative("limit", options.limit);
  if (!status.ok()) return status;
  if (std::ssize(prompt) > spec.context && !options.truncate) {
    return Invalid("prompt has {} inputs, the context {}", prompt.size(),
                   spec.context);
  }
  return {};
}

std::pair<int, int> DividedGroup(std::span<const SessionInput> inputs,
                                 int index) {
  std::int64_t begin = 0, end = 0;
  for (std::int64_t i = 0; i < std::ssize(inputs) && (i < index || i < end);
       ++i) {
    if (i >= end) begin = i;
    end = std::max(end, i + 1 + At(inputs, i).same_batch);
  }
  if (end <= index) return {index, index};
  return {AsInt(begin), static_cast<int>(std::min(end, std::ssize(inputs)))};
}

int CutMiddle(std::vector<SessionInput>& prompt, int keep, int context) {
  keep = DividedGroup(prompt, std::min(keep, context - 1)).first;
  const int end = DividedGroup(prompt, keep + Size(prompt) - context).second;
  prompt.erase(IteratorAt(prompt, keep), IteratorAt(prompt, end));
  return keep;
}

// Misuse is refused before anything changes (Q1).
Result<int> GuardedSessions::Submit(std::span<const SessionInput> prompt,
                                    const RequestOptions& options) {
  Status status = CheckRequest(spec_, prompt, options);
  if (!status.ok()) return status;
  if (next_request_ == std::numeric_limits<int>::max()) {
    return Untimely(
        "{} requests were submitted: all numbers of requests are taken",
        next_request_);
  }
  const int request = DoSubmit(prompt, options);
  next_request_ = request + 1;
  return request;
}

Result<Ending> GuardedSessions::Sampled(int request, std::int32_t token) {
  const RequestInfo* info = DoRequest(request);
  if (info == nullptr) return Invalid("request is {}, there is none", request);
  if (token < 0) return NotNegative("token", token);
  if (info->outputs == 0) {
    return Untimely("request {} has no output to sample from", request);
  }
  return DoSampled(request, token);
}

Status GuardedSessions::Finish(int request, std::int64_t removed) {
  const RequestInfo* info = DoRequest(request);
  if (info == nullptr) return Invalid("request is {}, there is none", request);
  if (removed < 0 || removed > info->answered) {
    return Invalid("removed is {}, the answer has {} tokens", removed,
                   info->answered);
  }
  DoFinish(request, removed);
  return {};
}

Status GuardedSessions::Adopt(int slot, std::span<const SessionInput> record) {
  const Result<SlotInfo> info = Slot(slot);
  if (!info.ok()) return info.status();
  if (info->request >= 0) {
    return Untimely("slot {} is in use by request {}", slot, info->request);
  }
  if (std::ssize(record) > spec_.context) {
    return Invalid("record has {} inputs, the context {}", record.size(),
                   spec_.context);
  }
  Status status =
      CheckInputs("record", record, std::min(spec_.batch, spec_.context));
  if (status.ok()) DoAdopt(slot, record);
  return status;
}

Result<RequestInfo> GuardedSessions::Request(int request) const {
  const RequestInfo* info = DoRequest(request);
  if (info == nullptr) return Invalid("request is {}, there is none", request);
  return *info;
}

Result<SlotInfo> GuardedSessions::Slot(int slot) const {
  if (slot < 0 || slot >= spec_.slots) {
    return Invalid("slot is {}, it must be 0 to {}", slot, spec_.slots - 1);
  }
  return DoSlot(slot);
}

}  // namespace kvtwin
