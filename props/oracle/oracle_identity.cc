// Compares recorded answers with those of the twins, at identity.

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>

#include "core/index.h"
#include "core/mask_elements.h"
#include "props/compare/visibility.h"
#include "props/oracle/oracle.h"

namespace kvtwin::props {
namespace {

// Returns the first mask row that sees each column; -1 if no row does.
std::vector<int> FirstRows(const TensorView& mask) {
  std::vector<int> first(AsSize(mask.shape[0]), -1);
  for (std::int64_t row = mask.shape[1] - 1; row >= 0; --row) {
    for (std::int64_t column = 0; column < mask.shape[0]; ++column) {
      if (!MaskAllows(mask, column, row)) continue;
      At(first, column) = AsInt(row);
    }
  }
  return first;
}

}  // namespace

std::optional<Failure> Together(const std::vector<TwinFailure>& failures) {
  const TwinFailure* differing = nullptr;
  const TwinFailure* agreeing = nullptr;
  for (const TwinFailure& twin_failure : failures) {
    const TwinFailure*& first = twin_failure.second ? differing : agreeing;
    if (first == nullptr) first = &twin_failure;
  }
  if (differing == nullptr) return std::nullopt;
  Failure found = *differing->second;
  if (agreeing != nullptr || failures.size() == 1) {
    found.twin = differing->first;
  }
  if (agreeing != nullptr) {
    found.text = fmt::format(
        "{}; so says the {} twin, but the {} twin agrees with the recording",
        found.text, differing->first, agreeing->first);
    return found;
  }
  for (const auto& [name, failure] : failures) {
    if (failure->text == differing->second->text) continue;
    found.text = fmt::format("{}; so says the {} twin, and the {} twin: {}",
                             found.text, differing->first, name, failure->text);
  }
  return found;
}

std::optional<Failure> Oracle::CompareTwins(const TraceOp& op) {
  if (twins_.empty()) return std::nullopt;
  std::vector<TwinFailure> failures;
  for (Twin& twin : twins_) {
    failures.emplace_back(twin.name,
                          Compare(op, Ask(*twin.cache, op), *twin.cache));
  }
  return Together(failures);
}

std::optional<Failure> Oracle::Compare(const TraceOp& op,
                                       const Answer& expected,
                                       const Cache& twin) const {
  const auto differs =
      [](std::string_view what, const auto& recorded,
         const auto& expected_value) -> std::optional<Failure> {
    if (recorded == expected_value) return std::nullopt;
    return WrongAnswer("{} is {}, expected {}", what, recorded, expected_value);
  };
  if (op.kind == TraceOpKind::kStartForward ||
      op.kind == TraceOpKind::kRemove) {
    auto failure = differs("result", StatusName(op.result),
                           StatusName(expected.status.code()));
    if (failure && !expected.status.ok()) {
      failure->text += fmt::format(" ({})", expected.status.message());
    }
    if (failure || !op.cells || !expected.status.ok()) return failure;
    // Cells may be absent.
    if (op.reserve && op.cells->empty()) return std::nullopt;
    const std::span<const int> cells = twin.BatchCells();
    const auto [at, expected_at] = std::ranges::mismatch(*op.cells, cells);
    if (at == op.cells->end() && expected_at == cells.end())
      return std::nullopt;
    constexpr std::size_t kShown = 16;
    failure =
        differs("cells", IntsText(*op.cells, kShown), IntsText(cells, kShown));
    if (!failure) {  // The difference is after the cells that a message shows.
      failure = WrongAnswer("cells[{}] is {}, expected {}",
                            at - op.cells->begin(), *at, *expected_at);
    }
    failure->part = WrongPart::kCells;
    return failure;
  }
  if (!expected.status.ok())
    return WrongAnswer("{}", expected.status.ToString());
  if (op.kind == TraceOpKind::kGet) return CompareView(op, expected.view, twin);
  if (op.kind == TraceOpKind::kReservedMask) {
    auto failure = differs("shape", ShapeText(op.shape),
                           ShapeText(expected.view.mask.shape));
    if (failure || !op.first_cell) return failure;
    return differs("first_cell", *op.first_cell, expected.view.first_cell);
  }
  if (op.kind == TraceOpKind::kCanResume ||
      op.kind == TraceOpKind::kEncoderCached) {
    return differs("result", op.answer, expected.yes);
  }
  return std::nullopt;
}

std::optional<Failure> Oracle::CompareView(const TraceOp& op,
                                           const KvView& expected,
                                           const Cache& twin) const {
  const KvView actual = RecordedView(op);
  const bool masked = expected.mask.data != nullptr;
  if (op.mask.has_value() != masked) {
    return WrongAnswer("{}", masked ? "mask is null, expected a mask"
                                    : "there is a mask, expected none");
  }
  const auto differs =
      [](std::string_view what, const TensorView& recorded,
         const TensorView& expected_value) -> std::optional<Failure> {
    if (recorded.shape == expected_value.shape) return std::nullopt;
    return WrongAnswer("the shape of {} is {}, expected {}", what,
                       ShapeText(recorded.shape),
                       ShapeText(expected_value.shape));
  };
  if (masked && op.first_cell && *op.first_cell != expected.first_cell) {
    return WrongAnswer("first_cell is {}, expected {}", *op.first_cell,
                       expected.first_cell);
  }
  auto failure = differs("key", actual.key, expected.key);
  if (!failure && op.value)
    failure = differs("value", actual.value, expected.value);
  if (!failure && masked) failure = differs("mask", actual.mask, expected.mask);
  if (!failure && masked) failure = CompareMask(*op.mask, expected, twin);
  if (!failure && masked) failure = CompareRows(op, expected, twin);
  if (failure || masked) return failure;
  if (op.key.bytes != CopyOf(expected.key, op.key.dtype).bytes) {
    failure = WrongAnswer("key is not what was put last");
  } else if (op.value &&
             op.value->bytes != CopyOf(expected.value, op.value->dtype).bytes) {
    failure = WrongAnswer("value is not what was put last");
  }
  if (failure) failure->part = WrongPart::kEncoder;
  return failure;
}

std::optional<Failure> Oracle::CompareMask(const DenseTensor& mask,
                                           const KvView& expected,
                                           const Cache& twin) const {
  const TensorView actual = mask.view();
  for (int row = 0; row < actual.shape[1]; ++row) {
    for (int column = 0; column < actual.shape[0]; ++column) {
      const bool sees = MaskAllows(actual, column, row);
      if (sees == MaskAllows(expected.mask, column, row)) continue;
      std::vector<CellEntry> cells;
      twin.ListCells(cells);
      const int cell = expected.first_cell + column;
      std::string held;
      for (const CellEntry& entry : cells) {
        if (entry.cell != cell) continue;
        held +=
            fmt::format("{}sequence {}, position {}", held.empty() ? "" : "; ",
                        entry.sequence, entry.position);
      }
      return Failure{
          .text = fmt::format(
              "mask row {} ({}) {} column {} (cell {}: {}), which must be {}",
              row, RowLabel(row), sees ? "sees" : "does not see", column, cell,
              held.empty() ? "free" : held, sees ? "hidden" : "seen"),
          .row = row,
          .column = column};
    }
  }
  return std::nullopt;
}

std::optional<Failure> Oracle::CompareRows(const TraceOp& op,
                                           const KvView& expected,
                                           const Cache& twin) const {
  const KvView actual = RecordedView(op);
  const VLayout v_layout = header_.config.v_layout;
  std::vector<CellEntry> cells;
  twin.ListCells(cells);
  std::set<std::int64_t> held;  // Columns with a token.
  for (const CellEntry& entry : cells) {
    held.insert(std::int64_t{entry.cell} - expected.first_cell);
  }
  const std::vector<int> first_rows = FirstRows(actual.mask);
  int wrong = -1;  // A wrong row that a mask row sees says the most.
  WrongPart part = WrongPart::kMask;
  for (int column = 0; column < actual.mask.shape[0]; ++column) {
    const bool seen = At(first_rows, column) >= 0;
    if (!seen && (wrong >= 0 || !held.contains(column))) continue;  // S52.
    const auto same = [&](const TensorView& recorded, const TensorView& stored,
                          VLayout layout) {
      return RowBytes(recorded, column, layout) ==
             CopyOf(RowOf(stored, layout, column), recorded.dtype).bytes;
    };
    const bool key = same(actual.key, expected.key, VLayout::kPlain);
    const bool value =
        !op.value || same(actual.value, expected.value, v_layout);
    if (key && value) continue;
    wrong = column;
    part = key ? WrongPart::kValue : value ? WrongPart::kKey : WrongPart::kRows;
    if (seen) break;
  }
  if (wrong < 0) return std::nullopt;
  const int row = At(first_rows, wrong);
  if (part != WrongPart::kKey) {  // The column may have another token's rows.
    const PutMatch match = FindPut(op.layer, actual, wrong);
    if (match.key && match.value) part = WrongPart::kMask;
  }
  return Failure{
      .text = fmt::format(
          "{}; expected the row of {}; found {}, expected {}",
          SightText(op.layer, actual, row, wrong, expected.first_cell),
          ExpectedText(op.layer, expected, row, wrong, cells),
          RowText(actual, wrong, v_layout), RowText(expected, wrong, v_layout)),
      .row = row,
      .column = wrong,
      .part = part};
}

// Returns "mask row 1 (sequence 1, position 4) sees at column 3 (cell 11) ...".
std::string Oracle::SightText(int layer, const KvView& found, int row,
                              int column, int first_cell) const {
  const std::string found_text =
      PutText(FindPut(layer, found, column), active_);
  const std::string cell_text =
      fmt::format("column {} (cell {})", column, first_cell + column);
  if (row < 0) {
    return fmt::format("{}, which holds a token that no mask row sees, has {}",
                       cell_text, found_text);
  }
  return fmt::format("mask row {} ({}) sees at {} {}", row, RowLabel(row),
                     cell_text, found_text);
}

// Returns "sequence 1, position 3 (put on line 14)".
std::string Oracle::ExpectedText(int layer, const KvView& expected, int row,
                                 int column,
                                 const std::vector<CellEntry>& cells) const {
  std::string token = "a free cell";
  for (const CellEntry& entry : cells) {
    if (entry.cell != expected.first_cell + column) continue;
    const auto i = AsSize(row);
    const bool asked = row >= 0 && i < sequences_.size();
    if (asked && entry.sequence != sequences_[i]) continue;
    token =
        fmt::format("sequence {}, position {}", entry.sequence, entry.position);
  }
  const PutRow* put = FindPut(layer, expected, column).put;
  if (put != nullptr) token += fmt::format(" (put on line {})", put->line);
  return token;
}

}  // namespace kvtwin::props
