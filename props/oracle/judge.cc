#include "props/oracle/judge.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <optional>
#include <system_error>
#include <utility>

#include "core/index.h"
#include "props/base/counted.h"
#include "props/compare/cited_rules.h"

namespace kvtwin::props {
namespace {

Judgement BadInput(std::int64_t line, std::string reason) {
  return {.bad_input = TraceError{line, std::move(reason)}};
}

// The note on a recording that is accepted although it shows no answers.
constexpr std::string_view kNoAnswerJudged =
    "nothing was judged: no line has an answer that is compared with the "
    "expected answer";

bool IsRefused(StatusCode result) { return result != StatusCode::kOk; }

void Count(const Oracle& oracle, const TraceOp& op, Judged& judged) {
  const bool identity = !oracle.header().visibility_only;
  switch (op.kind) {
    case TraceOpKind::kGet:
      if (!identity && !(oracle.fresh() && oracle.HasPut(op.layer))) return;
      ++judged.gets;
      ++judged.answers;
      judged.rows += op.key.shape[2];
      judged.without_v += op.key.shape[2] > 0 && !op.value;
      judged.with_unknown += !identity && oracle.ShowsUnknown(op.layer);
      return;
    case TraceOpKind::kAttend:
      if (!oracle.fresh() || !oracle.HasPut(op.layer)) return;
      ++judged.outputs;
      ++judged.answers;
      judged.output_rows += op.key.shape[2];
      judged.output_rows_judged += oracle.output_rows_judged();
      return;
    case TraceOpKind::kStartForward:
    case TraceOpKind::kRemove:
      if (IsRefused(op.result)) ++judged.refusals;
      judged.answers += identity;
      return;
    case TraceOpKind::kCanResume:
    case TraceOpKind::kEncoderCached:  // "false" is always allowed.
      judged.answers += identity || op.answer;
      return;
    case TraceOpKind::kFindPrefix:  // 0 is always right.
      judged.answers += op.len > 0;
      return;
    case TraceOpKind::kReservedMask:
      judged.answers += identity;
      return;
    default:
      return;
  }
}

void Count(const PagedOracle& oracle, const PagedTraceOp& op, Judged& judged) {
  const bool identity = !oracle.header().visibility_only;
  switch (op.kind) {
    case PagedTraceOpKind::kOpen:
      if (op.len > 0) ++judged.prefix_hits;
      judged.answers += identity || op.len > 0;
      return;
    case PagedTraceOpKind::kFork:
      judged.answers += identity;
      return;
    case PagedTraceOpKind::kAppend:
      if (IsRefused(op.result)) ++judged.refusals;
      judged.answers += identity;
      return;
    case PagedTraceOpKind::kViews:
      ++judged.gets;
      ++judged.answers;
      judged.rows += op.key ? op.key->shape[2] : 0;
      judged.without_v += op.key && op.key->shape[2] > 0 && !op.value;
      return;
    case PagedTraceOpKind::kAttend:
      ++judged.outputs;
      ++judged.answers;
      judged.output_rows += op.key->shape[2];
      judged.output_rows_judged += oracle.output_rows_judged();
      return;
    case PagedTraceOpKind::kSeqLen:
    case PagedTraceOpKind::kSlots:
    case PagedTraceOpKind::kTable:
    case PagedTraceOpKind::kCsr:
    case PagedTraceOpKind::kUsage:
      ++judged.answers;
      return;
    default:
      return;
  }
}

// Returns whether `holds` is true of `spec` or of a cache in it.
template <class Fn>
bool AnyCache(const CacheSpec& spec, const Fn& holds) {
  return holds(spec) ||
         std::ranges::any_of(spec.caches, [&](const CacheSpec& part) {
           return AnyCache(part, holds);
         });
}

// Returns a note on what the header probably has wrong, or "": its kind has a
// window, but none is given (S2); or its kind has no memory (S3), and a row
// sees a token that has left, or a sequence can resume at such tokens.
std::string_view NoteOn(const TraceHeader& header, const TraceOp& op,
                        const Failure& failure) {
  if (AnyCache(header.spec, [](const CacheSpec& spec) {
        return IsWindowed(spec.kind) && !spec.window;
      })) {
    return " (cache.window is absent: the window is unbounded)";
  }
  const bool resumes = op.kind == TraceOpKind::kCanResume && op.answer;
  if (header.visibility_only && (failure.of_left || resumes) &&
      AnyCache(header.spec,
               [](const CacheSpec& spec) { return spec.kind == Kind::kSwa; })) {
    return " (a cache that keeps more tokens than its window shows is recorded "
           "as swa_mem, with its memory)";
  }
  return "";
}
std::string_view NoteOn(const PagedTraceHeader&, const PagedTraceOp&,
                        const Failure&) {
  return "";
}

// Names the rules that a wrong line breaks.
void CiteRules(const TraceOp& op, const TraceHeader&, const Oracle& oracle,
               Failure& failure) {
  failure.rules = CitedRules(op, failure, oracle.past());
}
void CiteRules(const PagedTraceOp& op, const PagedTraceHeader& header,
               const PagedOracle& oracle, Failure& failure) {
  failure.pool_call = op.kind;
  failure.pool_change = oracle.last_change();
  failure.of_window = header.rules.window.has_value();
  failure.rules = CitedPoolRules(TraceOpName(op.kind), header.spec,
                                 failure.of_window, failure.pool_change);
}

// Reads calls as TraceReader reads lines.
class CallReader {
 public:
  explicit CallReader(std::span<const PagedTraceOp> ops) : ops_(ops) {}
  bool ReadOp(PagedTraceOp& op) {
    if (ops_.empty()) return false;
    op = ops_.front();
    ops_ = ops_.subspan(1);
    return true;
  }
  static std::optional<TraceError> error() { return std::nullopt; }

 private:
  std::span<const PagedTraceOp> ops_;
};

template <class Op, class Reader, class Header, class AnOracle, class Watch>
Judgement JudgeLines(Reader& reader, const Header& header, AnOracle oracle,
                     const std::vector<std::string>& twins,
                     const Watch& watch) {
  const Status status = oracle.Start(header, twins);
  if (!status.ok()) return BadInput(1, status.message());

  Judgement judgement;
  judgement.level =
      header.visibility_only ? Level::kVisibility : Level::kIdentity;
  Judged& judged = judgement.judged;
  std::optional<TraceError>& error = judgement.bad_input;
  Op op;
  while (!error && reader.ReadOp(op)) {
    const OracleStep step = oracle.Step(op);
    const std::string_view name = TraceOpName(op.kind);
    if (!step.bad_input.empty()) {
      error = {op.line, fmt::format("{}: {}", name, step.bad_input)};
    }
    ++judged.calls;
    if (!error) Count(oracle, op, judged);
    const auto& failure = step.identity ? step.identity : step.visibility;
    if (failure && !judgement.failure) {
      judgement.level = Level::kVisibility;
      judgement.failure = failure;
      judgement.failure->step = AsSize(op.line);
      judgement.failure->check = name;
      CiteRules(op, header, oracle, *judgement.failure);
      judgement.failure->text += NoteOn(header, op, *judgement.failure);
    }
    if (step.visibility) judgement.level = Level::kNone;
    if (error && !failure) break;  // A call that no cache accepts.
    if (watch ? !watch(oracle, op, step) : judgement.level == Level::kNone) {
      break;
    }
  }
  if (!error) error = reader.error();
  // No rows were shown, only outputs.
  if (judged.outputs > 0 && judged.gets == 0) {
    judgement.level = std::max(judgement.level, Level::kAttention);
  }
  if (error) judgement.level = Level::kNone;
  return judgement;
}

}  // namespace

Verdict Judgement::verdict() const {
  if (failure) return Verdict::kReject;
  return bad_input ? Verdict::kBadInput : Verdict::kAccept;
}

std::int64_t Judgement::line() const {
  if (failure) return static_cast<std::int64_t>(failure->step);
  return bad_input ? bad_input->line : 0;
}

std::string Judgement::reason() const {
  if (failure) {
    std::string text = fmt::format("{}: {}", failure->check, failure->text);
    if (bad_input) {
      text += fmt::format("; then, on line {}, bad input: {}", bad_input->line,
                          bad_input->reason);
    }
    return text;
  }
  if (bad_input) return bad_input->reason;
  return std::string(judged.answers == 0 ? kNoAnswerJudged : "");
}

std::string JudgedText(const Judged& judged) {
  std::string text =
      fmt::format("{}: {} of {}", Counted(judged.calls, "call"),
                  Counted(judged.gets, "get"), Counted(judged.rows, "row"));
  if (judged.outputs > 0) {
    text += ", " + Counted(judged.outputs, "output");
    if (judged.output_rows_judged < judged.output_rows) {
      text += fmt::format(" (judged: {} of their {} rows)",
                          judged.output_rows_judged, judged.output_rows);
    }
  }
  if (judged.refusals > 0) {
    text += ", " + Counted(judged.refusals, "refusal");
  }
  if (judged.prefix_hits > 0) {
    text += ", " + Counted(judged.prefix_hits, "prefix", "prefixes") + " found";
  }
  // A recording may leave out V, but rarely does so in some lines alone.
  if (judged.without_v > 0 && judged.without_v < judged.gets) {
    text += fmt::format("; V of {} was not recorded",
                        Counted(judged.without_v, "get"));
  }
  if (judged.with_unknown > 0) {
    text += fmt::format("; in {}, tokens without a put could have any rows",
                        Counted(judged.with_unknown, "get"));
  }
  return text;
}

std::string_view VerdictName(Verdict verdict) {
  constexpr std::array<std::string_view, 3> kNames = {"accept", "reject",
                                                      "bad_input"};
  return At(kNames, verdict);
}

Judgement Judge(TraceReader& reader, const std::vector<std::string>& twins,
                const OracleWatch& watch) {
  if (!reader.ReadHeader()) {
    return BadInput(reader.error()->line, reader.error()->reason);
  }
  if (reader.paged()) {
    return JudgeLines<PagedTraceOp>(reader, *reader.paged(), PagedOracle(),
                                    twins, watch.pool);
  }
  return JudgeLines<TraceOp>(reader, reader.header(), Oracle(), twins,
                             watch.cache);
}

Judgement Judge(std::istream& in, const std::vector<std::string>& twins,
                const OracleWatch& watch) {
  TraceReader reader(in);
  return Judge(reader, twins, watch);
}

Judgement Judge(const PagedTraceHeader& header,
                std::span<const PagedTraceOp> ops,
                const std::vector<std::string>& twins) {
  CallReader reader(ops);
  return JudgeLines<PagedTraceOp>(reader, header, PagedOracle(), twins,
                                  OracleWatch().pool);
}

Judgement OnFile(const std::string& path,
                 const std::function<Judgement(std::istream&)>& judge) {
  const auto bad = [](std::string reason) {
    return BadInput(0, std::move(reason));
  };
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return bad("is a folder");
  std::ifstream in(path, std::ios::binary);
  if (!in) return bad(fmt::format("cannot be opened: {}", strerror(errno)));
  try {
    return judge(in);
  } catch (const std::bad_alloc&) {
    return bad("there is not enough memory");
  }
}

}  // namespace kvtwin::props
