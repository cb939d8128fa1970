#include "props/report/trace_step.h"

#include <fmt/format.h>

#include <cstddef>

#include "props/base/runs_of.h"

namespace kvtwin::props {
namespace {

constexpr std::size_t kTokensShown = 12;

std::string BatchText(const TraceOp& op) {
  std::string text;
  for (std::size_t i = 0; i < op.positions.size(); ++i) {
    if (i == kTokensShown) {
      return text + fmt::format(" and {} more", op.positions.size() - i);
    }
    text += fmt::format("{}{}@{}", i == 0 ? "" : " ", op.sequences[i],
                        op.positions[i]);
  }
  return text;
}

std::string ArgumentsText(const TraceOp& op) {
  switch (op.kind) {
    case TraceOpKind::kStartForward:
      return fmt::format("{}{}{}{}", BatchText(op),
                         op.parents.empty()
                             ? ""
                             : fmt::format(", parents {}", RunsOf(op.parents)),
                         op.reserve ? ", reserving" : "",
                         op.indices.empty() ? "" : ", with images");
    case TraceOpKind::kSetCausal:
      return fmt::format("except {}",
                         op.indices.empty() ? "none" : RunsOf(op.indices));
    case TraceOpKind::kSetLayerType:
      return fmt::format("{}", op.type);
    case TraceOpKind::kPut:
    case TraceOpKind::kGet:
      return fmt::format("layer {}, K {}", op.layer, ShapeText(op.key.shape));
    case TraceOpKind::kAttend:
      return fmt::format("layer {}, query {}", op.layer,
                         ShapeText(op.key.shape));
    case TraceOpKind::kReservedMask:
      return ShapeText(op.shape);
    case TraceOpKind::kRemove:
      return op.end == kOpenEnd
                 ? fmt::format("sequence {}, from {}", op.seq, op.begin)
                 : fmt::format("sequence {}, [{}, {})", op.seq, op.begin,
                               op.end);
    case TraceOpKind::kCopyPrefix:
      return fmt::format("sequence {} to {}, {} tokens", op.src, op.dst,
                         op.len);
    case TraceOpKind::kCanResume:
      return fmt::format("sequence {} at {}", op.seq, op.pos);
    case TraceOpKind::kCommit:
      return fmt::format("sequence {}, path [{}]", op.seq, RunsOf(op.indices));
    case TraceOpKind::kFindPrefix:
      return fmt::format("sequence {}, tokens [{}]", op.seq,
                         RunsOf(op.indices));
    case TraceOpKind::kCheckpoint:
      return fmt::format("sequence {}", op.seq);
    case TraceOpKind::kEncoderCached:
      return "";
  }
  return "";
}

std::string AnswerText(const TraceOp& op) {
  switch (op.kind) {
    case TraceOpKind::kStartForward:
    case TraceOpKind::kRemove:
      return std::string(StatusName(op.result));
    case TraceOpKind::kCanResume:
    case TraceOpKind::kEncoderCached:
      return op.answer ? "true" : "false";
    case TraceOpKind::kFindPrefix:
      return fmt::to_string(op.len);
    default:
      return "";
  }
}

}  // namespace

std::vector<Held> HeldTokens(const Oracle& oracle) {
  if (oracle.twin() != nullptr) return HeldCells(*oracle.twin());
  return HeldTokens(oracle.ledger().active());
}

Step StepOf(const TraceOp& op) {
  Step step;
  step.number = op.line;
  step.call = TraceOpName(op.kind);
  step.arguments = ArgumentsText(op);
  step.answer = AnswerText(op);
  step.code = op.result;
  step.begins_pass = op.kind == TraceOpKind::kStartForward;
  return step;
}

}  // namespace kvtwin::props
