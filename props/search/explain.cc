#include "props/search/explain.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "core/index.h"
#include "optimized/targets.h"
#include "props/base/counted.h"
#include "props/compare/cited_rules.h"
#include "props/history/setup_text.h"
#include "props/report/finding_filter.h"

namespace kvtwin::props {
namespace {

// Describes the failure of a second run, if it differs from the first: a
// backend may answer differently in each run, and how far a run gets before it
// is killed is random.
std::string RepeatNote(const Failure& first,
                       const std::optional<Failure>& again) {
  if (!again) return "It does not repeat: another run shows no difference.";
  if (again->check != first.check) {
    return fmt::format("It does not repeat: another run fails {}.",
                       again->check);
  }
  const bool ended = IsHang(first) || first.Is("backend: memory");
  if (ended || again->step == first.step) return "";
  return fmt::format(
      "It does not repeat: another run goes wrong in operation {} instead of "
      "{}.",
      again->step + 1, first.step + 1);
}

// Fills in the fields that failures of caches and of pools have in common.
template <class AnyHistory>
Failure Begun(const AnyHistory& history, const Failure& failure,
              const Subject& subject) {
  Failure explained = failure;
  explained.subject = subject.name;
  explained.level = subject.level;
  explained.history = ToText(history);
  explained.operations = history.ops.size();
  explained.rerun = RerunCommand(history, subject);
  explained.name = "a history of calls";
  explained.unit = "Call";
  return explained;
}

// Whether the failure has a long history: a failure that varies is not shrunk.
bool IsUnshrunk(const Failure& failure) {
  return failure.Is("harness: not the same twice");
}

// A text that leaves out calls has this many calls before and after them.
constexpr std::size_t kFirstCalls = 40;
constexpr std::size_t kLastCalls = 10;

// The number of a call: its line in a recording, or counted from 1.
std::int64_t NumberOf(const Failure& failure, std::size_t i) {
  const std::int64_t number = failure.trace[i].number;
  return number > 0 ? number : static_cast<std::int64_t>(i) + 1;
}

// Leaves out the calls that a page does not show.
void KeepLast(Failure& failure) {
  std::vector<Step>& trace = failure.trace;
  trace.erase(trace.begin(),
              trace.begin() + std::min(std::ssize(trace), failure.left_out));
  if (trace.empty()) trace.emplace_back().call = "setup";
  trace.back().wrong_row = failure.row;
  trace.back().wrong_column = failure.column;
}

// Whether a legal client removed tokens without an operation that says so.
bool RemovesByItself(const History& history, const CallTrace& trace) {
  return history.setup.legal &&
         std::ranges::count(history.ops, OpKind::kDrop, &Op::kind) == 0 &&
         std::ranges::any_of(trace.steps, IsRemove, &Step::own_call);
}

// Returns the numbers and sizes of the heads, which matter at the level
// attention only.
std::string HeadsText(const History& history, const Subject& subject) {
  if (subject.level != Level::kAttention) return "";
  const RowDims& rows = history.setup.rows;
  const int queries = subject.QueriesPerKvHead(history.setup) * rows.kv_heads;
  return fmt::format(
      "; {}, {} of {} (K) and {} (V) elements", Counted(queries, "query head"),
      Counted(rows.kv_heads, "KV head"), rows.k_head_dim, rows.v_head_dim);
}

// Returns the first call that two runs answer in different ways; empty if they
// answer all calls equally.
std::string VaryingCall(const std::vector<Step>& one,
                        const std::vector<Step>& other) {
  const std::size_t count = std::min(one.size(), other.size());
  for (std::size_t i = 0; i < count; ++i) {
    const std::string text = CallLineOf(one[i]);
    const std::string otherwise = CallLineOf(other[i]);
    if (text == otherwise) continue;
    return fmt::format("Call {} varies: {}; then {}.", i + 1, text, otherwise);
  }
  return "";
}

// Runs the history again, and keeps the calls that are drawn; or, where they
// are not, all of them.
void AddTrace(const History& history, const Subject& subject, bool drawn,
              Failure& failure) {
  CallTrace trace;
  const auto shown = RunHistory(history, subject, {.trace = &trace}).failure;
  failure.note = RepeatNote(failure, shown);
  if (IsUnshrunk(failure)) {
    CallTrace other;
    RunHistory(history, subject, {.trace = &other});
    const std::string varies = VaryingCall(trace.steps, other.steps);
    if (!varies.empty()) failure.note = varies;
  }
  // A backend that was killed may have come to another call in this run.
  const bool killed = IsHang(failure) || failure.Is("backend: memory");
  if (killed && shown && shown->check == failure.check &&
      (shown->function != failure.function || failure.function.empty())) {
    failure.text = shown->text;
    failure.function = shown->function;
  }
  failure.frame =
      Viewport::Around(failure.first_cell, failure.column, failure.row);
  if (drawn) {
    const auto calls = std::ssize(trace.steps);
    failure.left_out = std::max<std::int64_t>(0, calls - Failure::kSteps);
    CallTrace again = {
        .steps = {}, .frame = failure.frame, .from = failure.left_out + 1};
    const auto second = RunHistory(history, subject, {.trace = &again}).failure;
    if (failure.note.empty()) failure.note = RepeatNote(failure, second);
    // A rerun with another number of calls does not show this failure.
    if (std::ssize(again.steps) == calls) trace = std::move(again);
  }
  failure.trace = std::move(trace.steps);
}

// Whether the history ends with misuse, and passes without it.
bool FailsByMisuse(const PagedHistory& history, const Subject& subject) {
  if (history.ops.empty() || history.ops.back().kind != PagedOpKind::kMisuse) {
    return false;
  }
  PagedHistory before = history;
  before.ops.pop_back();
  return !RunHistory(before, subject).failure;
}

// Returns the rules that the failure of a pool breaks: those of the call whose
// answer is wrong, and, for views, of the last change. Misuse must change
// nothing, whichever call shows that it did.
std::string RulesOf(const Failure& failure, const PagedHistory& history,
                    bool by_misuse) {
  if (failure.party() == Party::kBackend) return "";
  if (failure.pool_call && !by_misuse) {
    return CitedPoolRules(TraceOpName(*failure.pool_call), history.spec,
                          failure.of_window, failure.pool_change);
  }
  if (history.ops.empty()) return "P1";
  return CitedPoolRules(At(kPagedOpNames, history.ops.back().kind),
                        history.spec, failure.of_window);
}

}  // namespace

Failure Explain(const History& history, const Failure& failure,
                const Subject& subject, bool drawn,
                const std::optional<std::string>& bucket) {
  const Subject again = WithShortTimeout(subject, failure);
  Failure explained = Begun(history, failure, subject);
  explained.setup =
      SetupText(history.setup, subject.rules) + HeadsText(history, subject);
  explained.bucket = bucket                ? *bucket
                     : IsUnshrunk(failure) ? SignatureOf(subject.name, failure)
                                           : BucketOf(history, again);
  AddTrace(history, again, drawn, explained);
  explained.rules = CitedRules(explained, history);
  explained.report = FailureText(explained);
  KeepLast(explained);
  return explained;
}

Failure Explain(const PagedHistory& history, const Failure& failure,
                const Subject& subject) {
  Failure explained = Begun(history, failure, subject);
  explained.setup = ToText(PagedHistory{history.spec, {}});
  explained.bucket = SignatureOf(subject.name, failure);
  if (!IsUnshrunk(failure)) AppendHistory(history, explained.bucket);
  const Subject quick = WithShortTimeout(subject, failure);
  const bool by_misuse =
      failure.party() != Party::kBackend && FailsByMisuse(history, quick);
  const auto again = RunHistory(history, quick).failure;
  const bool same =
      again && SignatureOf("", *again) == SignatureOf("", failure);
  // `failure` may be of a longer history.
  explained.rules = RulesOf(same ? *again : failure, history, by_misuse);
  if (same) {
    explained.trace = again->trace;
  } else {
    explained.note = RepeatNote(failure, again);
  }
  explained.left_out =
      std::max<std::int64_t>(0, std::ssize(explained.trace) - Failure::kSteps);
  explained.report = FailureText(explained);
  KeepLast(explained);
  return explained;
}

Failure Explain(const SessionHistory& history, const Failure& failure,
                const Subject& subject) {
  Failure explained = Begun(history, failure, subject);
  explained.rules = "Q1 to Q13";
  explained.bucket = SignatureOf(subject.name, failure);
  explained.left_out =
      std::max<std::int64_t>(0, std::ssize(explained.trace) - Failure::kSteps);
  explained.report = FailureText(explained);
  KeepLast(explained);
  return explained;
}

std::string FailureText(const Failure& failure) {
  if (!failure.report.empty()) return failure.report;
  std::string text = fmt::format(
      "FAIL {}    {} against {}the ledger\n\n", failure.check, failure.subject,
      failure.level == Level::kIdentity ? "the reference and " : "");
  const std::size_t calls = failure.trace.size();
  for (std::size_t i = 0; i < calls; ++i) {
    if (i == kFirstCalls && calls > kFirstCalls + kLastCalls) {
      i = calls - kLastCalls;
      text += fmt::format("  ...  {} not shown\n",
                          Counted(AsInt(i - kFirstCalls), "call"));
    }
    const bool then = i + 1 == calls && failure.note.empty();
    const Step& step = failure.trace[i];
    text += fmt::format(
        "  {:3} {}{}{}\n", NumberOf(failure, i), CallLineOf(step),
        step.own_call == OwnCall::kNone ? "" : "   (by the client itself)",
        then ? "   <- then" : "");
  }
  if (calls > 0) text += "\n";
  text += fmt::format("  {}\n", failure.text);
  if (!failure.note.empty()) text += fmt::format("  {}\n", failure.note);
  if (!failure.setup.empty()) {
    text += fmt::format("\n  setup   {}", failure.setup);
  }
  text += fmt::format("\n  bucket: {}\n", failure.bucket);
  if (!failure.rules.empty()) {
    text += fmt::format("  rules   {} (docs/semantics.md)\n", failure.rules);
  }
  text += fmt::format("  rerun   {}\n", failure.rerun);
  return text;
}

nlohmann::ordered_json FailureJson(const Failure& failure) {
  return {{"check", failure.check},          {"rules", failure.rules},
          {"bucket", failure.bucket},        {"history", failure.history},
          {"shrunk_to", failure.operations}, {"reason", failure.text},
          {"rerun", failure.rerun}};
}

std::string BucketOf(const History& shrunk, const Subject& subject) {
  CallTrace trace;
  const auto again = RunHistory(shrunk, subject, {.trace = &trace}).failure;
  // A backend whose answers vary from run to run may pass this time.
  if (!again) {
    return SignatureOf(subject.name, {.check = "not reproduced"});
  }
  const std::string active = optimized::ActiveTarget();
  bool on_all = true;
  for (const std::string& target : optimized::SupportedTargets()) {
    if (!subject.is_twin()) break;
    optimized::SelectTarget(target);
    const auto there = RunHistory(shrunk, subject).failure;
    on_all = on_all && there && there->check == again->check;
  }
  if (subject.is_twin()) optimized::SelectTarget(active);
  std::string bucket =
      SignatureOf(on_all ? subject.name : subject.name + "-" + active, *again);
  AppendHistory(shrunk, bucket);
  if (RemovesByItself(shrunk, trace)) {
    bucket += again->part == WrongPart::kKey ? "+shift" : "+remove";
  }
  return bucket;
}

}  // namespace kvtwin::props
