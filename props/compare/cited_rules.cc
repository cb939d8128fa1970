#include "props/compare/cited_rules.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <vector>

#include "core/index.h"

namespace kvtwin::props {
namespace {

constexpr std::string_view kStartForward =
    "S5, S6, S7, S8, S9, S10, S11, S12, S13, S43, S49";
constexpr std::string_view kSetCausal = "S19, S38";
constexpr std::string_view kPut = "S20, S21, S22, S37, S39";
constexpr std::string_view kCopyPrefix = "S26, S27, S38, S45";
constexpr std::string_view kCanResume = "S28, S44";
constexpr std::string_view kRemove = "S29, S30, S31, S32, S33, S45";
constexpr std::string_view kSetLayerType = "S41, S42, S46";
constexpr std::string_view kEncoderCached = "S40, S46";
constexpr std::string_view kRestore = "S55, S57";
// The rules of a history with recurrent state.
constexpr std::string_view kStateStart =
    "S5, S12, S43, S49, R2, R3, R4, R5, H2";
constexpr std::string_view kStateCopy = "S26, S27, R10, R15, H3";
constexpr std::string_view kStateRemove = "S30, S33, R10, R15, H3, H4";
constexpr std::string_view kStateResume = "S44, R8, R9";
constexpr std::string_view kDraft =
    "S5, S6, S7, S8, S9, S10, S11, S12, S13, S43, D1, D3, D4, D8";
constexpr std::string_view kCommit = "D1, D3, D4, D5, D8";
constexpr std::string_view kStateDraft =
    "S5, S12, S43, R2, R3, R4, R5, R11, H2, D1, D3, D4, D8";
constexpr std::string_view kStateCommit = "D3, D4, D5, D8, R13";
constexpr std::string_view kCheckpoint = "R14";
constexpr std::string_view kFindPrefix = "F1, F2, F3, F4, F5";

std::string_view RulesOf(OpKind operation) {
  switch (operation) {
    case OpKind::kPut:
      return kStartForward;
    case OpKind::kDrop:
    case OpKind::kShift:
      return kRemove;
    case OpKind::kCopy:
      return kCopyPrefix;
    case OpKind::kAsk:
      return kCanResume;
    case OpKind::kCausal:
      return kSetCausal;
    case OpKind::kGet:
    case OpKind::kLayer:
      return "S24";
    case OpKind::kReput:
      return kPut;
    case OpKind::kMisuse:
      return "S47";
    case OpKind::kPoison:
      return "S13, S21";
    case OpKind::kReload:
    case OpKind::kSnapshot:
    case OpKind::kAdd:
      return kRestore;
    case OpKind::kType:
      return kSetLayerType;
    case OpKind::kCached:
      return kEncoderCached;
    case OpKind::kCommit:
      return kCommit;
    case OpKind::kPin:
      return kCheckpoint;
    case OpKind::kFind:
      return kFindPrefix;
  }
  return "";
}

std::string_view StateRulesOf(OpKind operation) {
  switch (operation) {
    case OpKind::kPut:
      return kStateStart;
    case OpKind::kDrop:
      return kStateRemove;
    case OpKind::kCopy:
      return kStateCopy;
    case OpKind::kAsk:
      return kStateResume;
    case OpKind::kCausal:
      return "R10";
    case OpKind::kReload:
    case OpKind::kAdd:
      return "S55, S57, R1, R15";
    case OpKind::kCommit:
      return kStateCommit;
    default:
      return RulesOf(operation);
  }
}

struct CheckRules {
  std::string_view check;
  std::string_view rules;
};
// Checks of what the cache shows. All other checks are of a call's answer.
constexpr auto kCheckRules = std::to_array<CheckRules>({
    {"subject: batch cells", "S9, S10, S13, S18"},
    {"subject: cell count", "S3, S4"},
    {"subject: underlying cache", "S41, S42"},
    {"subject: view shape", "S14, S15, S18, S23"},
    {"subject: view cells", "S14"},
    {"subject: mask bytes", "S15, S16, S17, S19, S25, D2"},
    {"subject: K bytes", "S20, S21, S22, S34, S35, S36, S51"},
    {"subject: V bytes", "S20, S21, S22, S23, S51"},
    {"subject: rows", "S2, S16, S17, S53, D2"},
    {"subject: resume", "S7, S28, S44"},
    {"subject: prefix", kFindPrefix},
    {"subject: encoder cached", kEncoderCached},
    {"subject: misuse", "S47"},
    {"subject: snapshot", "S55, D6, D7"},
    {"subject: exception", "S47, S48"},
    {"subject: room", "S4, S12"},
    {"subject: attention", "S54"},
    {"subject: output", "S2, S16, S17, S58"},
    {"reference: cell count", "S3, S4"},
    {"reference: rows", "S2, S16, S17, S53, D2"},
    {"reference: resume", kCanResume},
    {"reference: a legal client is refused", "S4, S12"},
    {"reference: misuse", "S47"},
    {"reference: saved state", "S56"},
    {"reference: snapshot", "S55, D6, D7"},
    {"harness: not the same twice", "S50"},
    {"misuse: before Init", "S1"},
    {"misuse: after Close", "S1"},
    {"backend: crash", ""},
    {"backend: hang", ""},
    {"backend: memory", ""},
    {"backend: out of bounds", ""},
    {"backend: garbage", ""},
    {"backend: error", ""},
});

// The same, where a history has recurrent state.
constexpr auto kStateCheckRules = std::to_array<CheckRules>({
    {"subject: batch cells", "S9, S10, S18, R5, R11"},
    {"subject: cell count", "R2"},
    {"subject: mask bytes", "S15, S25, R6, R12"},
    {"subject: K bytes", "S20, S21, S22, S51, R7"},
    {"subject: V bytes", "S20, S21, S22, S23, S51, R7"},
    {"subject: rows", "S53, R1, R6, R7, R12"},
    {"subject: resume", kStateResume},
    {"reference: cell count", "R2"},
    {"reference: rows", "S53, R1, R6, R7, R12"},
    {"reference: resume", kStateResume},
    {"reference: a legal client is refused", "R2"},
});

bool HasStates(const CacheSpec& spec) {
  return spec.kind == Kind::kRecurrent ||
         std::ranges::any_of(spec.caches, HasStates);
}

}  // namespace

std::string_view CitedRules(std::string_view check, OpKind operation,
                            bool states) {
  if (states) {
    const auto* state =
        std::ranges::find(kStateCheckRules, check, &CheckRules::check);
    if (state != kStateCheckRules.end()) return state->rules;
  }
  const auto* found = std::ranges::find(kCheckRules, check, &CheckRules::check);
  if (found != kCheckRules.end()) return found->rules;
  return states ? StateRulesOf(operation) : RulesOf(operation);
}

namespace {

bool DraftsIn(const Op& op) {
  return std::ranges::any_of(op.segments, [](const Segment& segment) {
    return !segment.parents.empty();
  });
}

// Returns the rules that the failure breaks, as if there were drafts.
std::string_view RulesOfFailure(const Failure& difference,
                                const History& history) {
  const bool ran = difference.step < history.ops.size();
  const bool states = HasStates(history.setup.spec);
  // Then the K row was stored or shifted wrongly.
  if (difference.of_k_alone) return "S21, S31, S34, S35, S53";
  if (!ran) {
    const auto* found =
        std::ranges::find(kCheckRules, difference.check, &CheckRules::check);
    if (found == kCheckRules.end()) return "S1, S2, S3, S4";  // Init.
    return CitedRules(difference.check, OpKind::kLayer, states);
  }
  const Op& op = history.ops[difference.step];
  // An operation may make several calls: a legal client also removes.
  const OpKind kind = difference.call.value_or(op.kind);
  if (difference.Is("subject: result") && kind == OpKind::kPut &&
      DraftsIn(op)) {
    return states ? kStateDraft : kDraft;
  }
  return CitedRules(difference.check, kind, states);
}

bool HasDrafts(const History& history) {
  return std::ranges::any_of(history.ops, [](const Op& op) {
    return op.kind == OpKind::kCommit || DraftsIn(op);
  });
}

// Returns the rules by which tokens leave in this history.
std::vector<std::string_view> RulesOfLeaving(const History& history) {
  const auto has = [&](OpKind kind) {
    return std::ranges::count(history.ops, kind, &Op::kind) > 0;
  };
  std::vector<std::string_view> rules;
  if (HasWindow(history.setup.spec)) rules.push_back("S7");
  if (has(OpKind::kCopy)) rules.insert(rules.end(), {"S26", "S27"});
  if (has(OpKind::kDrop)) rules.insert(rules.end(), {"S29", "S30"});
  if (has(OpKind::kCommit)) rules.push_back("D5");
  const bool drops = has(OpKind::kCopy) || has(OpKind::kDrop);
  if (drops && HasDrafts(history)) rules.push_back("D6");
  return rules;
}

// Splits "S31, S32".
std::vector<std::string_view> SplitRules(std::string_view rest) {
  std::vector<std::string_view> rules;
  while (!rest.empty()) {
    rules.push_back(rest.substr(0, rest.find(',')));
    rest.remove_prefix(std::min(rest.size(), rules.back().size() + 2));
  }
  return rules;
}

bool AnyGroup(const PagedSpec& spec, bool (*has)(const PagedSpec& group)) {
  return has(spec) || std::ranges::any_of(spec.groups, has);
}

}  // namespace

std::string CitedRules(const Failure& difference, const History& history) {
  std::vector<std::string_view> rules =
      SplitRules(RulesOfFailure(difference, history));
  if (!HasDrafts(history)) {
    std::erase_if(rules, [](auto rule) { return rule.starts_with('D'); });
  }
  if (difference.of_left) {
    const auto leaving = RulesOfLeaving(history);
    rules.insert(rules.end(), leaving.begin(), leaving.end());
  }
  return fmt::format("{}", fmt::join(rules, ", "));
}

std::string_view CitedRules(TraceOpKind call, bool of_row) {
  switch (call) {
    case TraceOpKind::kStartForward:
      return kStartForward;
    case TraceOpKind::kSetCausal:
      return kSetCausal;
    case TraceOpKind::kSetLayerType:
      return kSetLayerType;
    case TraceOpKind::kPut:
      return kPut;
    case TraceOpKind::kGet:
      return of_row ? "S16, S21, S52, S53" : "S14, S15, S23, S24";
    case TraceOpKind::kAttend:
      return "S2, S16, S17, S58";
    case TraceOpKind::kReservedMask:
      return "S18";
    case TraceOpKind::kRemove:
      return kRemove;
    case TraceOpKind::kCopyPrefix:
      return kCopyPrefix;
    case TraceOpKind::kCanResume:
      return kCanResume;
    case TraceOpKind::kEncoderCached:
      return kEncoderCached;
    case TraceOpKind::kCommit:
      return kCommit;
    case TraceOpKind::kFindPrefix:
      return kFindPrefix;
    case TraceOpKind::kCheckpoint:
      return kCheckpoint;
  }
  return "";
}

std::string_view CitedPoolRules(std::string_view call) {
  static constexpr auto kRules = std::to_array<CheckRules>({
      {"open", "P1, P4, P6, P16, P17, P18"},
      {"fork", "P2, P14"},
      {"append", "P3, P4, P13"},
      {"commit", "P5, P6, P12, P15"},
      {"commit_unknown", "P5, P6"},
      {"truncate", "P8, P14"},
      {"free", "P8"},
      {"misuse", "P11"},
      {"layers", "P3, P18"},
      {"media", "P17"},
      {"seq_len", "P5, P8"},
      {"views", "P7, P12, P13"},
      {"slots", "P10"},
      {"table", "P10"},
      {"csr", "P10"},
      {"usage", "P9"},
  });
  const auto* found = std::ranges::find(kRules, call, &CheckRules::check);
  return found == kRules.end() ? "" : found->rules;
}

std::string CitedPoolRules(std::string_view call, const PagedSpec& spec,
                           bool window) {
  window = window || AnyGroup(spec, [](const PagedSpec& group) {
             return group.window.has_value();
           });
  const bool states =
      AnyGroup(spec, [](const PagedSpec& group) { return group.states; });
  std::vector<std::string_view> rules = SplitRules(CitedPoolRules(call));
  std::erase_if(rules, [&](std::string_view rule) {
    if (rule == "P12") return !window;
    if (rule == "P13") return !states;
    if (rule == "P14") return !window && !states;
    return (rule == "P15" || rule == "P16") && spec.groups.empty();
  });
  return fmt::format("{}", fmt::join(rules, ", "));
}

}  // namespace kvtwin::props
