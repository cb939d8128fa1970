#include <fmt/format.h>

#include <sstream>

#include "core/trace/trace.h"
#include "core/trace/trace_reader.h"
#include "props/fuzzers/fuzzers.h"
#include "props/oracle/judge.h"

namespace kvtwin::props {
namespace {

template <class Op, class Header>
bool Rewrite(TraceReader& reader, const Header& header, std::ostream& out) {
  if (!WriteTraceHeader(header, out).ok()) return false;
  Op op;
  while (reader.ReadOp(op)) {
    if (!WriteTraceOp(op, out).ok()) return false;
  }
  return !reader.error();
}

// The recording as it is written again; empty if it cannot be read to its end.
std::string Rewritten(const std::string& text) {
  std::istringstream in(text);
  std::ostringstream out;
  TraceReader reader(in);
  if (!reader.ReadHeader()) return "";
  const bool written = reader.paged()
                           ? Rewrite<PagedTraceOp>(reader, *reader.paged(), out)
                           : Rewrite<TraceOp>(reader, reader.header(), out);
  return written ? out.str() : "";
}

Judgement JudgedBy(std::string_view twin, const std::string& text) {
  std::istringstream in(text);
  return Judge(in, {std::string(twin)});
}

}  // namespace

std::string FuzzRecording(Bytes bytes) {
  const std::string text(bytes.begin(), bytes.end());
  const Judgement by_reference = JudgedBy("reference", text);
  const Judgement by_optimized = JudgedBy("optimized", text);
  if (by_reference.verdict() != by_optimized.verdict() ||
      by_reference.level != by_optimized.level ||
      by_reference.line() != by_optimized.line()) {
    return fmt::format(
        "by the reference: {}, line {}, {}\nby the optimized twin: {}, line "
        "{}, {}",
        VerdictName(by_reference.verdict()), by_reference.line(),
        by_reference.reason(), VerdictName(by_optimized.verdict()),
        by_optimized.line(), by_optimized.reason());
  }
  const bool accepted = by_reference.verdict() == Verdict::kAccept;
  const bool is_judged = by_reference.judged.answers > 0;
  if ((accepted && is_judged) != by_reference.reason().empty()) {
    return "a reason to accept, or none to refuse";
  }
  const std::string written = Rewritten(text);
  if (written.empty()) return "";
  const std::string again = Rewritten(written);
  if (again != written) {
    return fmt::format("reads back differently:\n{}\n{}", written, again);
  }
  const Judgement judged = JudgedBy("reference", written);
  if (judged.verdict() == by_reference.verdict() &&
      judged.reason() == by_reference.reason()) {
    return "";
  }
  return fmt::format("once rewritten, it is judged '{}' instead of '{}'",
                     judged.reason(), by_reference.reason());
}

}  // namespace kvtwin::props
