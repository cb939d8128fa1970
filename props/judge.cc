#include "props/judge.h"

#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <optional>
#include <system_error>
#include <utility>

namespace kvtwin::props {
namespace {

Judgement BadInput(std::int64_t line, std::string reason) {
  return {Verdict::kBadInput, Level::kNone, line, std::move(reason), ""};
}

template <class Op, class Header, class AnOracle, class Watch>
Judgement JudgeLines(TraceReader& reader, const Header& header, AnOracle oracle,
                     const std::vector<std::string>& twins,
                     const Watch& watch) {
  const Status status = oracle.Start(header, twins);
  if (!status.ok()) return BadInput(1, status.message());

  Judgement judgement;
  judgement.level =
      header.entitlement_only ? Level::kEntitlement : Level::kIdentity;
  std::optional<TraceError> error;
  Op op;
  while (!error && reader.ReadOp(op)) {
    const OracleStep step = oracle.Step(op);
    const std::string_view name = TraceOpName(op.kind);
    if (!step.bad_input.empty()) {
      error = {op.line, fmt::format("{}: {}", name, step.bad_input)};
    }
    const auto& finding = step.identity ? step.identity : step.entitlement;
    if (finding && judgement.verdict == Verdict::kAccept) {
      judgement = {Verdict::kReject, Level::kEntitlement, op.line,
                   fmt::format("{}: {}", name, finding->text), finding->twin};
    }
    if (step.entitlement) judgement.level = Level::kNone;
    if (error && !finding) break;  // A call that no cache was asked.
    if (watch ? !watch(oracle, op, step) : judgement.level == Level::kNone) {
      break;
    }
  }
  if (!error) error = reader.error();
  if (!error) return judgement;
  if (judgement.verdict == Verdict::kAccept) {
    return BadInput(error->line, error->reason);
  }
  judgement.level = Level::kNone;
  judgement.reason += fmt::format("; then, on line {}, bad input: {}",
                                  error->line, error->reason);
  return judgement;
}

}  // namespace

std::string_view VerdictName(Verdict verdict) {
  constexpr std::array<std::string_view, 3> kNames = {"accept", "reject",
                                                      "bad_input"};
  return kNames[static_cast<std::size_t>(verdict)];
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

Judgement OnFile(const std::string& path,
                 const std::function<Judgement(std::istream&)>& judge) {
  const auto bad = [](std::string reason) {
    return Judgement{
        .verdict = Verdict::kBadInput, .reason = std::move(reason), .twin = ""};
  };
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return bad("is a folder");
  std::ifstream in(path, std::ios::binary);
  if (!in) return bad(fmt::format("cannot be opened: {}", strerror(errno)));
  try {
    return judge(in);
  } catch (const std::bad_alloc&) {
    return bad("there is not enough memory for it");
  }
}

}  // namespace kvtwin::props
