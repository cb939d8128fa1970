#include "props/compare/cited_rules.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>
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
constexpr std::string_view kEncoderCached = "S39, S40, S46";
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

// Returns the operation that makes this call alone; none if a call only shows
// what the cache has.
std::optional<OpKind> OperationOf(TraceOpKind call) {
  switch (call) {
    case TraceOpKind::kStartForward:
      return OpKind::kPut;
    case TraceOpKind::kSetCausal:
      return OpKind::kCausal;
    case TraceOpKind::kSetLayerType:
      return OpKind::kType;
    case TraceOpKind::kPut:
      return OpKind::kReput;
    case TraceOpKind::kRemove:
      return OpKind::kDrop;
    case TraceOpKind::kCopyPrefix:
      return OpKind::kCopy;
    case TraceOpKind::kCanResume:
      return OpKind::kAsk;
    case TraceOpKind::kEncoderCached:
      return OpKind::kCached;
    case TraceOpKind::kCommit:
      return OpKind::kCommit;
    case TraceOpKind::kFindPrefix:
      return OpKind::kFind;
    case TraceOpKind::kCheckpoint:
      return OpKind::kPin;
    case TraceOpKind::kGet:
    case TraceOpKind::kAttend:
    case TraceOpKind::kReservedMask:
      return std::nullopt;
  }
  return std::nullopt;
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

using RuleList = std::vector<std::string_view>;

// Adds a rule that the list does not have yet.
void AddRule(std::string_view rule, RuleList& rules) {
  if (std::ranges::count(rules, rule) == 0) rules.push_back(rule);
}

// Splits "S31, S32".
RuleList SplitRules(std::string_view rest) {
  RuleList rules;
  while (!rest.empty()) {
    rules.push_back(rest.substr(0, rest.find(',')));
    rest.remove_prefix(std::min(rest.size(), rules.back().size() + 2));
  }
  return rules;
}

std::string Joined(const RuleList& rules) {
  return fmt::format("{}", fmt::join(rules, ", "));
}

// Returns the rules of stored rows, and those of `level`: "S53". Requires:
// `part` is not the mask.
RuleList RulesOfRows(WrongPart part, const RowPast& past,
                     std::string_view level) {
  RuleList rules = {"S22", "S37"};
  const bool of_key = part == WrongPart::kKey;
  const bool of_token = part != WrongPart::kEncoder;
  if (of_token) rules = {"S21", "S22"};
  if (of_token && !of_key && past.rearranges) rules.push_back("S23");
  if (of_token && past.copies) rules.push_back("S26");
  if (of_key && past.moves) rules.insert(rules.end(), {"S31", "S34", "S35"});
  for (const std::string_view rule : SplitRules(level)) rules.push_back(rule);
  if (of_token && past.states) rules.insert(rules.end(), {"R1", "R7"});
  return rules;
}

// Whether a legal client made such a call by itself.
bool HasOwn(const Failure& difference, OwnCall call) {
  return std::ranges::count(difference.trace, call, &Step::own_call) > 0;
}

bool RemovesOwn(const Failure& difference) {
  return std::ranges::any_of(difference.trace, IsRemove, &Step::own_call);
}

bool DraftsIn(const Op& op) {
  return std::ranges::any_of(op.segments, [](const Segment& segment) {
    return !segment.parents.empty();
  });
}

bool Has(const History& history, OpKind kind) {
  return std::ranges::count(history.ops, kind, &Op::kind) > 0;
}

// Whether an operation may move tokens to other positions.
bool Moves(const Op& op) {
  if (op.kind == OpKind::kShift) return true;
  return op.kind == OpKind::kDrop && !op.open && op.begin != op.end;
}

RowPast PastOf(const Failure& difference, const History& history) {
  RowPast past = RowPast::Of(history.setup.spec, history.setup.config);
  past.pins = Has(history, OpKind::kPin);
  past.copies = Has(history, OpKind::kCopy);
  past.commits =
      Has(history, OpKind::kCommit) || HasOwn(difference, OwnCall::kCommit);
  past.removes = Has(history, OpKind::kDrop) || RemovesOwn(difference);
  past.reloads = Has(history, OpKind::kReload);
  past.moves = std::ranges::any_of(history.ops, Moves) ||
               HasOwn(difference, OwnCall::kRemoveRange);
  return past;
}

// Returns the rules that the failure breaks, as if there were drafts.
RuleList RulesOfFailure(const Failure& difference, const History& history,
                        const RowPast& past) {
  const bool ran = difference.step < history.ops.size();
  if (difference.part != WrongPart::kMask) {
    RuleList rules = RulesOfRows(difference.part, past, "S53");
    if (difference.part != WrongPart::kRows) return rules;
    RuleList all =
        SplitRules(CitedRules(difference.check, OpKind::kGet, past.states));
    for (const std::string_view rule : rules) AddRule(rule, all);
    return all;
  }
  if (!ran) {
    const auto* found =
        std::ranges::find(kCheckRules, difference.check, &CheckRules::check);
    // A check of an answer: Init was refused.
    if (found == kCheckRules.end()) return SplitRules("S1, S2, S3, S4");
    return SplitRules(
        CitedRules(difference.check, OpKind::kLayer, past.states));
  }
  const Op& op = history.ops[difference.step];
  // An operation may make several calls: a legal client also removes.
  const OpKind kind = difference.call.value_or(op.kind);
  if (difference.Is("subject: result") && kind == OpKind::kPut &&
      DraftsIn(op)) {
    return SplitRules(past.states ? kStateDraft : kDraft);
  }
  RuleList rules = SplitRules(CitedRules(difference.check, kind, past.states));
  if (difference.Is("subject: K bytes") && !past.moves) {
    std::erase_if(rules, [](std::string_view rule) {
      return rule == "S34" || rule == "S35" || rule == "S36";
    });
  }
  return rules;
}

bool HasDrafts(const History& history) {
  return std::ranges::any_of(history.ops, [](const Op& op) {
    return op.kind == OpKind::kCommit || DraftsIn(op);
  });
}

// Whether drafts must have left: by CopyPrefix or Remove (D6).
bool DropsDrafts(const Failure& difference, const History& history) {
  return Has(history, OpKind::kCopy) || Has(history, OpKind::kDrop) ||
         RemovesOwn(difference);
}

// Adds the rules by which tokens left.
void AddRulesOfLeaving(const RowPast& past, RuleList& rules) {
  if (past.windows) AddRule("S7", rules);
  if (past.copies) {
    AddRule("S26", rules);
    AddRule("S27", rules);
  }
  if (past.removes && (past.several || !past.states)) {
    AddRule("S29", rules);
    AddRule("S30", rules);
  }
  if (past.removes && past.states) AddRule("R10", rules);
  if (past.commits) AddRule("D5", rules);
}

// Adds the rules of pinned states, and of what becomes of pins (R15).
void AddRulesOfPins(const RowPast& past, RuleList& rules) {
  if (!past.pins) return;
  AddRule("R14", rules);
  if (past.copies || past.removes || past.reloads) AddRule("R15", rules);
}

// Adds the rules by which the tokens of a wrong view came there, or left: of
// copies, evictions, exceptions from causality, commits, and hybrids.
void AddRulesOfViews(const History& history, const RowPast& past,
                     RuleList& rules) {
  const bool hybrid = history.setup.spec.kind == Kind::kHybrid;
  if (hybrid) AddRule("S16", rules);
  if (past.copies) AddRule("S26", rules);
  if (Has(history, OpKind::kFind)) {
    AddRule("F3", rules);
    AddRule("F4", rules);
  }
  const auto stores = [](const Op& op) {
    return op.kind == OpKind::kPut && !op.reserve;
  };
  if (past.windows && std::ranges::count_if(history.ops, stores) > 1) {
    AddRule("S7", rules);
    if (past.removes) AddRule("S28", rules);
    if (HasDrafts(history)) AddRule("D3", rules);
  }
  if (Has(history, OpKind::kCausal)) AddRule("S19", rules);
  if (past.commits) AddRule("D5", rules);
  if (HasDrafts(history) && past.copies) AddRule("D7", rules);
  if (hybrid && (past.copies || past.removes)) AddRule("H3", rules);
  if (hybrid && past.removes) AddRule("H4", rules);
}

// Whether a call up to the failure was refused with this code.
bool Refused(const Failure& difference, StatusCode code) {
  return std::ranges::count(difference.trace, code, &Step::code) > 0;
}

// Adds the rules that say what a refused call may change.
void AddRulesOfRefusals(const Failure& difference, const RowPast& past,
                        bool drafts, RuleList& rules) {
  if (rules.empty()) return;  // The failure breaks no rule.
  if (drafts && past.several &&
      Refused(difference, StatusCode::kNotSupported)) {
    AddRule("D8", rules);
  }
  // Only Remove answers shared_cells, and only StartForward cache_full.
  if (past.removes && (Refused(difference, StatusCode::kSharedCells) ||
                       Refused(difference, StatusCode::kNotSupported))) {
    AddRule("S33", rules);
    if (past.several) AddRule("S45", rules);
  }
  if (Refused(difference, StatusCode::kCacheFull)) {
    AddRule("S12", rules);
    if (past.several) AddRule("S43", rules);
  }
}

// Adds the rules of earlier calls whose effect the wrong answer or view shows:
// of drafts that stayed, of a reserving pass that stored something, of pins,
// of copies, and of found prefixes. The shortest history has such calls only
// where they matter.
void AddRulesOfEffects(const Failure& difference, const History& history,
                       const RowPast& past, RuleList& rules) {
  const bool room = difference.Is("subject: room");
  const bool result = difference.Is("subject: result");
  const bool resume = difference.Is("subject: resume");
  const bool output = difference.Is("subject: output");
  const bool views = output || difference.Is("subject: rows");
  const bool shows = views || difference.Is("subject: cell count");
  if (!room && !result && !shows && !resume) return;
  const bool reserves = std::ranges::count(history.ops, true, &Op::reserve) > 0;
  if (reserves) AddRule("S18", rules);
  AddRulesOfPins(past, rules);
  if (past.windows && resume) AddRule("S28", rules);
  if (past.states && resume) AddRule("R4", rules);
  // A K or V row that is not the token's is wrong wherever it is.
  if (views && difference.part != WrongPart::kKey &&
      difference.part != WrongPart::kValue) {
    if (past.removes) AddRule(past.states ? "R10" : "S29", rules);
    if (past.moves) AddRule("S31", rules);
  }
  if (views) AddRulesOfViews(history, past, rules);
  if ((room || result || resume) && past.copies) AddRule("S26", rules);
  if (result && past.states && past.removes) AddRule("R10", rules);
  for (const std::string_view rule : {"S31", "S34", "S35"}) {
    if (output && past.moves) AddRule(rule, rules);
  }
  if (shows || !HasDrafts(history)) return;
  const bool starts = difference.step < history.ops.size() &&
                      difference.call.value_or(
                          history.ops[difference.step].kind) == OpKind::kPut;
  if (room) AddRule("D3", rules);
  if (result && starts) AddRule("D4", rules);
  if (past.commits) {
    AddRule("D5", rules);
    if (past.states) AddRule("R13", rules);
  }
  if (DropsDrafts(difference, history)) AddRule("D6", rules);
}

// Returns the rules for a call in a recording. Beside other caches, states add
// their rules to those of these caches.
RuleList RulesOfCall(const TraceOp& op, const RowPast& past, bool of_row) {
  const std::optional<OpKind> operation = OperationOf(op.kind);
  if (op.kind == TraceOpKind::kGet && of_row && past.states && !past.several) {
    return SplitRules("S53, R1, R6, R7");
  }
  const bool drafts = !op.parents.empty();
  RuleList rules = SplitRules(drafts ? kDraft : CitedRules(op.kind, of_row));
  if (!past.states || !operation) return rules;
  if (!past.several) rules.clear();
  const auto of_states = drafts ? kStateDraft : StateRulesOf(*operation);
  for (const std::string_view rule : SplitRules(of_states)) {
    AddRule(rule, rules);
  }
  if (!past.several) {
    std::erase_if(rules, [](std::string_view rule) {
      return rule.starts_with('H') || rule == "S44";
    });
  }
  if (!past.windows) std::erase(rules, "S28");
  if (op.kind == TraceOpKind::kCheckpoint) return rules;
  std::erase(rules, "R15");
  constexpr auto kShowPins =
      std::to_array({OpKind::kPut, OpKind::kDrop, OpKind::kCopy, OpKind::kAsk,
                     OpKind::kCommit, OpKind::kFind});
  if (std::ranges::count(kShowPins, *operation) > 0) {
    AddRulesOfPins(past, rules);
  }
  return rules;
}

bool AnyGroup(const PagedSpec& spec, bool (*has)(const PagedSpec& group)) {
  return has(spec) || std::ranges::any_of(spec.groups, has);
}

}  // namespace

RowPast RowPast::Of(const CacheSpec& spec, const CacheConfig& config) {
  return {.states = HasStates(spec),
          .several = !spec.caches.empty(),
          .windows = HasWindow(spec),
          .rearranges = config.v_layout != VLayout::kPlain};
}

void RowPast::Add(const TraceOp& op) {
  const bool removed =
      op.kind == TraceOpKind::kRemove && op.result == StatusCode::kOk;
  moves = moves || (removed && op.begin < op.end && op.end != kOpenEnd);
  if (op.result != StatusCode::kOk) return;
  copies = copies || op.kind == TraceOpKind::kCopyPrefix;
  commits = commits || op.kind == TraceOpKind::kCommit;
  pins = pins || op.kind == TraceOpKind::kCheckpoint;
  removes = removes || removed;
}

std::string CitedRules(const Failure& difference, const History& history) {
  const RowPast past = PastOf(difference, history);
  const bool drafts = HasDrafts(history);
  RuleList rules = RulesOfFailure(difference, history, past);
  if (!drafts) {
    std::erase_if(rules, [](auto rule) { return rule.starts_with('D'); });
  }
  if (difference.of_left) {
    AddRulesOfLeaving(past, rules);
    if (drafts && DropsDrafts(difference, history)) AddRule("D6", rules);
  }
  AddRulesOfEffects(difference, history, past, rules);
  AddRulesOfRefusals(difference, past, drafts, rules);
  return Joined(rules);
}

std::string CitedRules(const TraceOp& op, const Failure& finding,
                       const RowPast& past) {
  const bool of_row = finding.row >= 0;
  if (finding.part == WrongPart::kMask) {
    RuleList rules = RulesOfCall(op, past, of_row);
    if (past.visibility) std::erase(rules, "S51");
    if (finding.of_left) AddRulesOfLeaving(past, rules);
    return Joined(rules);
  }
  if (finding.part == WrongPart::kCells) {
    return std::string(
        CitedRules("subject: batch cells", OpKind::kPut, past.states));
  }
  RuleList rules =
      RulesOfRows(finding.part, past, past.visibility ? "S53" : "S51, S53");
  if (finding.part == WrongPart::kRows) rules.insert(rules.begin(), "S16");
  return Joined(rules);
}

std::string_view CitedRules(TraceOpKind call, bool of_row) {
  if (call == TraceOpKind::kGet) {
    return of_row ? "S16, S21, S51, S53" : "S14, S15, S23, S24";
  }
  if (call == TraceOpKind::kAttend) return "S2, S16, S17, S58";
  if (call == TraceOpKind::kReservedMask) return "S18";
  const std::optional<OpKind> operation = OperationOf(call);
  return operation ? RulesOf(*operation) : "";
}

std::string_view CitedPoolRules(std::string_view call) {
  static constexpr auto kRules = std::to_array<CheckRules>({
      {"open", "P1, P4, P6, P16, P17, P18"},
      {"fork", "P2, P14"},
      {"append", "P3, P4, P13"},
      {"commit", "P5, P6, P12, P13, P15"},
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
      {"attend", "P7, P12, P19"},
  });
  const auto* found = std::ranges::find(kRules, call, &CheckRules::check);
  return found == kRules.end() ? "" : found->rules;
}

std::string CitedPoolRules(std::string_view call, const PagedSpec& spec,
                           bool window,
                           std::optional<PagedTraceOpKind> last_change) {
  window = window || AnyGroup(spec, [](const PagedSpec& group) {
             return group.window.has_value();
           });
  const bool states =
      AnyGroup(spec, [](const PagedSpec& group) { return group.states; });
  RuleList rules = SplitRules(CitedPoolRules(call));
  // Views show neither media nor what prompts find after a commit (P6).
  using Kind = PagedTraceOpKind;
  if (call == "views" && last_change && *last_change != Kind::kMedia) {
    for (const auto rule :
         SplitRules(CitedPoolRules(TraceOpName(*last_change)))) {
      const bool of_prompts = *last_change == Kind::kCommit && rule == "P6";
      if (!of_prompts) AddRule(rule, rules);
    }
  }
  std::erase_if(rules, [&](std::string_view rule) {
    if (rule == "P12") return !window;
    if (rule == "P13") return !states;
    if (rule == "P14") return !window && !states;
    return (rule == "P15" || rule == "P16") && spec.groups.empty();
  });
  return Joined(rules);
}

}  // namespace kvtwin::props
