#include "props/report/show.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/index.h"
#include "core/json_line.h"
#include "core/names.h"
#include "props/base/program.h"
#include "props/compare/cited_rules.h"
#include "props/compare/step.h"
#include "props/report/show_pool.h"
#include "props/report/trace_step.h"

namespace kvtwin::props {
namespace {

// Limits of a screen: the rest is counted, not drawn.
constexpr std::size_t kCellsInLine = 8;
constexpr std::int64_t kColumnsShown = 64;
constexpr std::int64_t kRowsShown = 24;
constexpr std::size_t kRunsShown = 12;
constexpr std::size_t kWidth = 80;

// Returns the runs of free cells.
std::vector<Run> FreeRuns(const std::vector<Held>& held, int cells) {
  std::vector<Run> runs;
  int next = 0;
  const auto add = [&](int end) {
    if (next < end) runs.emplace_back(next, end);
  };
  for (const Held& token : held) {
    add(token.cell);
    next = token.cell + 1;
  }
  add(cells);
  return runs;
}

// Returns lines with a token for each cell or column, which `place` names, and
// above them their numbers, unless `place` is "". Shows the first kHeldShown.
std::string TokenLines(const std::vector<Held>& held, std::string_view name,
                       std::string_view place) {
  std::string text;
  const std::size_t shown = std::min(held.size(), kHeldShown);
  for (std::size_t i = 0; i < shown; i += kCellsInLine) {
    const std::size_t end = std::min(shown, i + kCellsInLine);
    std::string cells = fmt::format("    {:<{}}", place, name.size() + 2);
    std::string tokens = fmt::format("    {}  ", name);
    for (std::size_t j = i; j < end; ++j) {
      const std::string token =
          held[j].sequences.empty() ? "-" : TokenText(held[j]);
      const std::size_t width = std::max<std::size_t>(token.size(), 5) + 2;
      cells += fmt::format("{:<{}}", held[j].cell, width);
      tokens += fmt::format("{:<{}}", token, width);
    }
    cells.resize(cells.find_last_not_of(' ') + 1);
    tokens.resize(tokens.find_last_not_of(' ') + 1);
    if (!place.empty()) text += cells + "\n";
    text += tokens + "\n";
  }
  return text;
}

std::string CellsText(const Oracle& oracle) {
  const std::vector<Held> held = HeldTokens(oracle);
  if (oracle.twin() == nullptr) return HeldText(held, std::nullopt);
  const int cells = oracle.twin()->CellCount();
  return cells == 0 ? "" : HeldText(held, cells);  // An encoder has no cells.
}

// Returns one digit of the cell number of each column.
std::string Digits(int first_cell, std::int64_t from, std::int64_t to,
                   int place) {
  std::string digits;
  for (std::int64_t column = from; column < to; ++column) {
    const std::int64_t cell = first_cell + column;
    const bool leading = place > 1 && cell < place;
    digits += leading ? ' ' : static_cast<char>('0' + cell / place % 10);
  }
  return digits;
}

// Returns "layer 0, K [3, 1, 5]" or "sequence 0 at 4: true".
std::string CallText(const Step& step) {
  const bool both = !step.arguments.empty() && !step.answer.empty();
  return step.arguments + (both ? ": " : "") + step.answer;
}

// Returns whether the operation changes the cells, or selects another cache.
bool ChangesCells(const TraceOp& op) {
  return op.kind == TraceOpKind::kStartForward ||
         op.kind == TraceOpKind::kSetLayerType ||
         op.kind == TraceOpKind::kRemove ||
         op.kind == TraceOpKind::kCopyPrefix ||
         op.kind == TraceOpKind::kCommit || op.kind == TraceOpKind::kFindPrefix;
}

std::string SpecText(const CacheSpec& spec) {
  std::string text(KindName(spec.kind));
  if (IsWrapper(spec.kind)) {
    std::vector<std::string> caches;
    for (const CacheSpec& inner : spec.caches)
      caches.push_back(SpecText(inner));
    return text + fmt::format(" of ({})", fmt::join(caches, "; "));
  }
  if (spec.window) text += fmt::format(", window {}", *spec.window);
  if (spec.memory) text += fmt::format(", memory {}", *spec.memory);
  if (spec.kind == Kind::kChunked) text += fmt::format(" {}", spec.chunk);
  if (spec.kind == Kind::kRecurrent) {
    text += fmt::format(", {} checkpoints, every {} tokens", spec.checkpoints,
                        spec.checkpoint_every);
    if (spec.pins > 0) text += fmt::format(", {} pins", spec.pins);
    if (spec.drafts > 0) text += fmt::format(", {} drafts", spec.drafts);
    return text;
  }
  if (spec.kind == Kind::kEncoder) return text;
  return text + fmt::format(", shift {}", At(kShiftNames, spec.shift.kind));
}

std::string CacheText(const TraceHeader& header) {
  const CacheSpec& spec = header.spec;
  const bool wrapper = IsWrapper(spec.kind);
  const Placement placement =
      wrapper ? spec.caches[0].placement : spec.placement;
  return fmt::format("{}; {} placement; recorded by '{}'", SpecText(spec),
                     header.visibility_only                ? "other"
                     : placement == Placement::kContiguous ? "contiguous"
                                                           : "scatter",
                     Printable(header.producer, 60));
}

std::string RowsText(const TraceHeader& header) {
  const std::string text(DTypeName(header.init.dtype));
  const std::optional<DType> v_dtype = header.config.v_dtype;
  const bool differs = v_dtype && *v_dtype != header.init.dtype;
  return differs ? fmt::format("{} (V {})", text, DTypeName(*v_dtype)) : text;
}

std::string SizesText(const TraceHeader& header) {
  const DType mask = header.config.mask_dtype;
  return fmt::format(
      "max_sequences {}, capacity {}, max_batch {}, {}; cache padding {}, "
      "mask batch padding {}{}{}",
      header.init.max_sequences, header.init.capacity, header.init.max_batch,
      RowsText(header), header.config.cache_padding,
      header.config.mask_batch_padding,
      header.config.v_layout == VLayout::kPlain
          ? ""
          : fmt::format(", {} V", VLayoutName(header.config.v_layout)),
      mask == DType::kF32 ? "" : fmt::format(", mask {}", DTypeName(mask)));
}

std::string HeaderText(const std::string& name, const TraceHeader& header) {
  return fmt::format(
      "{}\n{}{}    0@4 is the token of sequence 0 at position 4\n\n",
      Printable(name, name.size()), Wrapped(CacheText(header), 4),
      Wrapped(SizesText(header), 4));
}

std::string HeaderText(const std::string& name,
                       const PagedTraceHeader& header) {
  return fmt::format("{}\n{}    3* is a block that several sequences have\n\n",
                     Printable(name, name.size()),
                     Wrapped(PoolText(header), 4));
}

Step DrawnStep(const Oracle& oracle, const TraceOp& op, const Viewport& frame) {
  Step step = StepOf(op);
  const Cache* twin = oracle.twin();
  const std::vector<Held> held = HeldTokens(oracle);
  DrawCells(frame, held, held, twin == nullptr ? 0 : twin->CellCount(), step);
  step.cache = oracle.active();
  if (!op.mask) return step;
  DrawView(frame,
           {.ledger = oracle.ledger().active(),
            .layer = op.layer,
            .actual = Oracle::RecordedView(op),
            .expected = oracle.ExpectedView(op),
            .v_layout = oracle.header().config.v_layout,
            .fresh = oracle.fresh(),
            .positions = oracle.positions(),
            .sequences = oracle.sequences()},
           step);
  return step;
}

// Returns "cell", or "column" for a third-party cache that leaves open which
// cells its columns show.
std::string_view PlaceOf(const Oracle& oracle, const TraceOp& op) {
  const bool has_cells =
      oracle.twin() != nullptr || op.first_cell.value_or(0) > 0;
  return has_cells ? "cell" : "column";
}

// Returns the token whose rows each column of a wrong view has, "-" for rows of
// no token, and names the columns that have only one of the token's two rows.
std::string OwnersText(const Oracle& oracle, const TraceOp& op,
                       const Failure& wrong) {
  const Viewport frame =
      Viewport::Around(op.first_cell.value_or(0), wrong.column, wrong.row);
  const std::string_view place = PlaceOf(oracle, op);
  std::vector<Held> owners;
  std::string torn;
  for (const FoundToken& found : DrawnStep(oracle, op, frame).found) {
    owners.push_back(found.token);
    if (found.token.sequences.empty() || found.key == found.value) continue;
    torn += fmt::format("    {} {} has the {} row of {} only\n", place,
                        found.token.cell, found.key ? "K" : "V",
                        TokenText(found.token));
  }
  return TokenLines(owners, "rows of", place) + torn;
}

class Shower {
 public:
  Shower(std::string name, const ShowOptions& options)
      : name_(std::move(name)), options_(options) {}

  template <class AnOracle, class Op>
  bool Watch(const AnOracle& oracle, const Op& op, const OracleStep& step) {
    const auto& finding = step.identity ? step.identity : step.visibility;
    Follow(oracle, op);
    if (!std::exchange(has_begun_, true) && !options_.json) {
      fmt::print("{}", HeaderText(name_, oracle.header()));
    }
    if (op.line >= options_.from && op.line <= options_.to) {
      const Failure* wrong = finding ? &*finding : nullptr;
      if (options_.json) {
        fmt::print("{}\n", StepJson(oracle, op, wrong));
      } else {
        fmt::print("{}", StepText(oracle, op, wrong));
      }
    }
    return !finding || options_.all;
  }

  void Follow(const Oracle&, const TraceOp&) {}
  void Follow(const PagedOracle& oracle, const PagedTraceOp& op) {
    lists_.Follow(oracle, op);
  }

  std::string StepText(const Oracle& oracle, const TraceOp& op,
                       const Failure* wrong) const {
    const Step step = StepOf(op);
    std::string text =
        fmt::format("{:>5}  {}  {}\n", op.line, step.call, CallText(step));
    if (wrong == nullptr && ChangesCells(op)) text += CellsText(oracle);
    if (op.mask && wrong != nullptr) text += OwnersText(oracle, op, *wrong);
    if (op.mask) text += MaskText(oracle, op, wrong);
    return text + WrongText(op.line, wrong);
  }

  std::string StepText(const PagedOracle& oracle, const PagedTraceOp& op,
                       const Failure* wrong) const {
    return fmt::format("{:>5}  {}  {}\n", op.line, TraceOpName(op.kind),
                       PoolCallText(op)) +
           (wrong != nullptr || ShowsBlocks(oracle, op)
                ? BlocksText(oracle, lists_)
                : "") +
           (wrong != nullptr ? GivenText(oracle) : "") +
           WrongText(op.line, wrong);
  }

 private:
  std::string WrongText(std::int64_t line, const Failure* wrong) const {
    if (wrong == nullptr) return "";
    std::string text = Red("    ^ wrong:") + "\n";
    text += Wrapped(wrong->text, 6);
    if (!options_.all) {
      text += fmt::format(
          "\n    Line {} is the first that is wrong; --all "
          "shows what comes after it.\n",
          line);
    }
    return text;
  }

  std::string Red(std::string text) const {
    return options_.color ? fmt::format("\x1b[31m{}\x1b[0m", text) : text;
  }

  std::string MaskText(const Oracle& oracle, const TraceOp& op,
                       const Failure* wrong) const {
    const int first_cell = op.first_cell.value_or(0);
    const MaskPicture mask = PictureOf(op.mask->view(), first_cell,
                                       oracle.positions(), oracle.sequences());
    const std::int64_t marked_row = wrong == nullptr ? -1 : wrong->row;
    const std::int64_t marked = wrong == nullptr ? -1 : wrong->column;
    // The drawn range of columns contains the marked column.
    const std::int64_t from =
        marked < kColumnsShown ? 0 : marked - kColumnsShown / 2;
    const std::int64_t to = std::min(mask.columns, from + kColumnsShown);
    std::string text;
    const std::string_view name = PlaceOf(oracle, op);
    for (const int unit : {1000, 100, 10, 1}) {
      if (unit > 1 && first_cell + to - 1 < unit) continue;
      text += fmt::format("    {:<10}{}\n", unit == 1 ? name : "",
                          Digits(first_cell, from, to, unit));
    }
    std::int64_t elided = 0;
    for (const auto& [row, token, sights, missing] : mask.rows) {
      if (row >= kRowsShown && row != marked_row) {
        ++elided;
        continue;
      }
      text +=
          fmt::format("    {:<10}{}\n", token ? TokenText(*token) : "padding",
                      sights.substr(AsSize(from), AsSize(to - from)));
      if (row == marked_row && marked >= 0) {
        text +=
            Red(fmt::format("    {:<10}{:{}}^", "", "", marked - from)) + "\n";
      }
    }
    if (elided > 0) text += fmt::format("    ... and {} more rows\n", elided);
    if (to - from < mask.columns) {
      text += fmt::format("    (columns {} to {} of {})\n", from, to - 1,
                          mask.columns);
    }
    return text;
  }

  static std::string StepJson(const Oracle& oracle, const TraceOp& op,
                              const Failure* wrong) {
    const Step step = StepOf(op);
    nlohmann::ordered_json json = {
        {"line", op.line}, {"op", step.call}, {"call", CallText(step)}};
    if (ChangesCells(op)) {
      auto& cells = json["cells"] = nlohmann::ordered_json::array();
      for (const Held& token : HeldTokens(oracle)) {
        nlohmann::ordered_json cell;
        if (token.cell >= 0) cell["cell"] = token.cell;
        cell["position"] = token.position;
        cell["sequences"] = token.sequences;
        cells.push_back(cell);
      }
    }
    if (op.mask) {
      const MaskPicture mask =
          PictureOf(op.mask->view(), op.first_cell.value_or(0),
                    oracle.positions(), oracle.sequences());
      json["first_cell"] = mask.first_cell;
      auto& rows = json["mask"] = nlohmann::ordered_json::array();
      for (MaskPicture::Row row : mask.rows) {
        std::replace(row.sights.begin(), row.sights.end(), '#', '1');
        std::replace(row.sights.begin(), row.sights.end(), '.', '0');
        rows.push_back(row.sights);
      }
    }
    return Dumped(json, wrong);
  }

  std::string StepJson(const PagedOracle&, const PagedTraceOp& op,
                       const Failure* wrong) const {
    nlohmann::ordered_json json = {{"line", op.line},
                                   {"op", TraceOpName(op.kind)},
                                   {"call", PoolCallText(op)}};
    auto& sequences = json["sequences"] = nlohmann::ordered_json::array();
    for (const auto& [of_sequence, of_groups] : lists_.of()) {
      for (const auto& [sequence, group, len, appended, blocks] : of_groups) {
        auto& list = sequences.emplace_back(
            nlohmann::ordered_json{{"sequence", sequence}});
        if (group) list["group"] = *group;
        list["len"] = len;
        list["appended"] = appended;
        list["blocks"] = blocks;
      }
    }
    return Dumped(json, wrong);
  }

  static std::string Dumped(nlohmann::ordered_json& json,
                            const Failure* wrong) {
    if (wrong != nullptr) {
      json["wrong"] = {{"reason", wrong->text},
                       {"row", wrong->row},
                       {"column", wrong->column}};
    }
    return json.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  }

  std::string name_;
  const ShowOptions& options_;
  BlockLists lists_;  // In the recording of a pool.
  bool has_begun_ = false;
};

}  // namespace

std::string Wrapped(std::string_view text, std::size_t indent) {
  std::string lines;
  while (!text.empty()) {
    std::size_t end = std::min(text.size(), kWidth - indent);
    if (end < text.size()) {
      const std::size_t blank = text.rfind(' ', end);
      if (blank != text.npos && blank > 0) end = blank;
    }
    lines += fmt::format("{:{}}{}\n", "", indent, text.substr(0, end));
    text.remove_prefix(end);
    if (text.starts_with(' ')) text.remove_prefix(1);
  }
  return lines;
}

std::string RunsText(const std::vector<Run>& runs) {
  std::vector<std::string> texts;
  for (const auto& [begin, end] : runs) {
    if (texts.size() == kRunsShown) {
      texts.push_back(
          fmt::format("and {} more runs", runs.size() - kRunsShown));
      break;
    }
    texts.push_back(end == begin + 1 ? fmt::format("{}", begin)
                                     : fmt::format("{}-{}", begin, end - 1));
  }
  return texts.empty() ? "none" : fmt::format("{}", fmt::join(texts, ", "));
}

std::string HeldText(const std::vector<Held>& held, std::optional<int> cells) {
  std::string text = TokenLines(held, "token", cells ? "cell" : "");
  const std::size_t shown = std::min(held.size(), kHeldShown);
  if (shown < held.size()) {
    text += fmt::format("    ... and {} more\n", held.size() - shown);
  }
  if (cells) text += Wrapped("free   " + RunsText(FreeRuns(held, *cells)), 4);
  return text;
}

namespace {

// Explains a recording of a pool: its page has the calls, and the blocks as
// text.
std::optional<Failure> ExplainPool(const std::string& path,
                                   const std::vector<std::string>& twins) {
  Failure failure;
  const ShowOptions options{.twins = {}, .all = true};
  Shower shower(path, options);
  const auto watch = [&](const PagedOracle& oracle, const PagedTraceOp& op,
                         const OracleStep& step) {
    Step& shown = failure.trace.emplace_back();
    shown.number = op.line;
    shown.call = TraceOpName(op.kind);
    shown.arguments = PoolCallText(op);
    if (std::ssize(failure.trace) > Failure::kSteps) {
      failure.trace.erase(failure.trace.begin());
      ++failure.left_out;
    }
    const auto& finding = step.identity ? step.identity : step.visibility;
    if (!finding) return true;
    shower.Follow(oracle, op);
    failure.setup = PoolText(oracle.header());
    failure.text = finding->text;
    failure.rules = CitedPoolRules(TraceOpName(op.kind), oracle.header().spec,
                                   oracle.header().rules.window.has_value(),
                                   oracle.last_change());
    failure.report = HeaderText(path, oracle.header()) +
                     shower.StepText(oracle, op, &*finding);
    return false;
  };
  std::ifstream in(path, std::ios::binary);
  (void)Judge(in, twins, {.cache = nullptr, .pool = watch});
  if (failure.text.empty()) return std::nullopt;
  return failure;
}

std::optional<Failure> ExplainCache(const std::string& path,
                                    const std::vector<std::string>& twins) {
  // The recording is judged twice: to find the wrong line, and to draw the
  // steps that led to it.
  std::int64_t wrong_line = 0;
  Failure failure;
  Viewport& frame = failure.frame;
  int column = -1;
  const auto find = [&](const Oracle&, const TraceOp& op,
                        const OracleStep& step) {
    const auto& first = step.identity ? step.identity : step.visibility;
    if (!first) return true;
    wrong_line = op.line;
    // A row that sees tokens it must not see tells more than a row that sees
    // the right tokens in the wrong cells.
    const bool harmed = step.visibility && step.visibility->column >= 0;
    const Failure& finding = harmed ? *step.visibility : *first;
    column = finding.column;
    frame = Viewport::Around(op.first_cell.value_or(0), column, finding.row);
    return false;
  };
  std::ifstream in(path, std::ios::binary);
  (void)Judge(in, twins, {.cache = find, .pool = nullptr});

  const ShowOptions options{.twins = {}, .all = true};
  const Shower shower(path, options);
  const auto draw = [&](const Oracle& oracle, const TraceOp& op,
                        const OracleStep& step) {
    if (op.line > wrong_line - Failure::kSteps) {
      failure.trace.push_back(DrawnStep(oracle, op, frame));
    } else {
      ++failure.left_out;
    }
    if (op.line < wrong_line) return true;
    const auto& first = step.identity ? step.identity : step.visibility;
    if (!first) return false;  // The file has changed since.
    const Failure& finding = *first;
    const TraceHeader& header = oracle.header();
    failure.setup = CacheText(header) + "; " + SizesText(header);
    failure.text = finding.text;
    failure.rules = CitedRules(op, finding, oracle.past());
    failure.report = HeaderText(path, header) + CellsText(oracle) +
                     shower.StepText(oracle, op, &finding);
    return false;
  };
  std::ifstream again(path, std::ios::binary);
  if (wrong_line > 0)
    (void)Judge(again, twins, {.cache = draw, .pool = nullptr});
  if (failure.text.empty()) return std::nullopt;
  Step& last = failure.trace.back();
  last.wrong_row = frame.row;
  last.wrong_column = column;
  return failure;
}

}  // namespace

std::optional<Failure> ExplainRecording(const std::string& path,
                                        const std::vector<std::string>& twins) {
  std::optional<Failure> failure = ExplainCache(path, twins);
  if (!failure) failure = ExplainPool(path, twins);
  if (!failure) return std::nullopt;
  failure->name = Printable(path, path.size());
  failure->unit = "Line";
  failure->check = failure->trace.back().call;
  failure->rerun = CommandLine(fmt::format(
      "show {}{}", twins.size() == 1 ? "--twin " + twins[0] + " " : "",
      ShellWord(path)));
  return failure;
}

std::string JudgementJson(const std::string& name, const Judgement& judgement) {
  nlohmann::ordered_json json = {{"file", name},
                                 {"verdict", VerdictName(judgement.verdict())},
                                 {"level", LevelName(judgement.level)},
                                 {"line", nullptr},
                                 {"reason", judgement.reason()}};
  if (judgement.line() > 0) json["line"] = judgement.line();
  if (const std::optional<Failure>& failure = judgement.failure) {
    if (!failure->rules.empty()) json["rules"] = failure->rules;
    if (!failure->twin.empty()) json["twin"] = failure->twin;
  }
  const Judged& judged = judgement.judged;
  json["judged"] = {
      {"calls", judged.calls},       {"answers", judged.answers},
      {"gets", judged.gets},         {"rows", judged.rows},
      {"outputs", judged.outputs},   {"output_rows", judged.output_rows_judged},
      {"refusals", judged.refusals}, {"prefix_hits", judged.prefix_hits}};
  return json.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

Judgement Show(std::istream& in, const std::string& name,
               const ShowOptions& options) {
  Shower shower(name, options);
  Judgement judgement =
      Judge(in, options.twins,
            {.cache =
                 [&](const Oracle& oracle, const TraceOp& op,
                     const OracleStep& step) {
                   return shower.Watch(oracle, op, step);
                 },
             .pool =
                 [&](const PagedOracle& oracle, const PagedTraceOp& op,
                     const OracleStep& step) {
                   return shower.Watch(oracle, op, step);
                 }});
  // Judging stopped there, so no level is known to hold.
  if (judgement.verdict() == Verdict::kReject && !options.all) {
    judgement.level = Level::kNone;
  }
  if (options.json) {
    fmt::print("{}\n", JudgementJson(name, judgement));
  } else if (judgement.verdict() == Verdict::kAccept) {
    const std::int64_t lines = judgement.judged.calls + 1;
    if (options.from > lines) {
      fmt::print("    (nothing to show: the recording has {} lines)\n", lines);
    }
    fmt::print("\nAll lines hold, at the level of {}.\n",
               LevelName(judgement.level));
    if (!judgement.reason().empty()) {
      fmt::print("{}", Wrapped("But " + judgement.reason() + ".", 0));
    }
  } else if (judgement.verdict() == Verdict::kBadInput) {
    fmt::print("{:>5}  bad input: {}\n", judgement.line(), judgement.reason());
  } else if (judgement.line() < options.from || judgement.line() > options.to) {
    fmt::print("\n{}",
               Wrapped(fmt::format("Line {} is wrong: {}", judgement.line(),
                                   judgement.reason()),
                       0));
  }
  if (!options.json && judgement.failure && !judgement.failure->rules.empty()) {
    fmt::print("\nRules {} (docs/semantics.md)\n", judgement.failure->rules);
  }
  return judgement;
}

}  // namespace kvtwin::props
