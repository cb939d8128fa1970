#include "props/report/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "core/index.h"
#include "core/json_line.h"
#include "props/base/text_file.h"

namespace kvtwin::props {

extern const char* const kPageTemplate;  // props/report/page.html

namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kSequencesShown = 6;

// Cuts texts that come from outside, so that they cannot make the page large.
std::string Cut(std::string text, std::size_t length_max = 4000) {
  if (text.size() <= length_max) return text;
  text.resize(length_max);
  return text + " ...";
}

// Returns JSON for a script element: no text in it can end the element.
std::string Embedded(const Json& json) {
  std::string text =
      json.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  for (std::size_t at = 0; (at = text.find('<', at)) != text.npos;) {
    text.replace(at, 1, "\\u003c");
  }
  return text;
}

// "position 4 of sequence 0"
std::string TokenName(const Held& token) {
  const auto shown = std::min(kSequencesShown, token.sequences.size());
  return fmt::format("position {} of sequence {}{}", token.position,
                     fmt::join(token.sequences.begin(),
                               IteratorAt(token.sequences, shown), " and "),
                     shown < token.sequences.size() ? " and others" : "");
}

Json TokenJson(const Held& token) {
  const auto shown = std::min(kSequencesShown, token.sequences.size());
  Json json = {{"position", token.position}};
  if (token.cell >= 0) json["cell"] = token.cell;
  json["sequences"] = std::vector<int>(token.sequences.begin(),
                                       IteratorAt(token.sequences, shown));
  if (shown < token.sequences.size()) {
    json["more"] = token.sequences.size() - shown;
  }
  return json;
}

Json TokensJson(const std::vector<Held>& tokens) {
  Json json = Json::array();
  for (const Held& token : tokens) json.push_back(TokenJson(token));
  return json;
}

// The tokens that moved between two steps that show the same cache.
struct Moves {
  std::int64_t by = 0;       // The number of the step that moved the tokens.
  std::map<int, int> cells;  // The old cell of each token, by its new cell.
};

std::map<int, int> Moved(const Step& before, const Step& now) {
  using Token = std::pair<std::int64_t, std::vector<int>>;
  const auto places = [](const Step& step) {
    std::map<Token, std::vector<int>> cells;
    for (const Held& held : step.cells) {
      cells[{held.position, held.sequences}].push_back(held.cell);
    }
    return cells;
  };
  const auto old = places(before);
  std::map<int, int> moved;
  for (const auto& [token, cells] : places(now)) {
    const auto at = old.find(token);
    if (at == old.end() || at->second == cells) continue;
    if (at->second.size() == 1 && cells.size() == 1) {
      moved[cells[0]] = at->second[0];
    }
  }
  return moved;
}

// Returns the moves before each step. Only the beginning of a pass moves
// tokens. The moves in a wrapper's cache belong to the next step that shows the
// cache.
std::vector<Moves> AllMoves(const std::vector<Step>& steps) {
  std::vector<Moves> all(steps.size());
  std::map<int, const Step*> before;  // By cache.
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    const Step*& last = before[step.cache];
    if (step.begins_pass) begin = step.number;
    if (last != nullptr && begin > last->number) {
      all[i] = {begin, Moved(*last, step)};
    }
    last = &step;
  }
  return all;
}

Json MaskJson(const MaskPicture& mask) {
  Json rows = Json::array();
  for (const MaskPicture::Row& row : mask.rows) {
    Json json = {{"row", row.row}, {"sights", row.sights}};
    if (row.token) json["token"] = TokenJson(*row.token);
    if (!row.missing.empty()) json["missing"] = TokensJson(row.missing);
    rows.push_back(std::move(json));
  }
  return {{"first_cell", mask.first_cell},
          {"columns", mask.columns},
          {"from", mask.from},
          {"rows", std::move(rows)}};
}

Json StepJson(const Step& step, const Moves& moves) {
  Json json = {{"number", step.number},
               {"call", Cut(step.call)},
               {"arguments", Cut(step.arguments)},
               {"answer", step.answer}};
  if (step.code != StatusCode::kOk) json["refused"] = true;
  if (!step.drawn) return json;
  json["cache"] = step.cache;
  json["cell_count"] = step.cell_count;
  json["cells_left_out"] = step.cells_left_out;
  json["rows_left_out"] = step.rows_left_out;
  json["cells"] = TokensJson(step.cells);
  if (!step.missing.empty()) json["missing"] = TokensJson(step.missing);
  Json& found = json["found"] = Json::array();
  for (const FoundToken& one : step.found) {
    Json token = TokenJson(one.token);
    if (one.differs) token["differs"] = true;
    if (!one.key) token["key"] = false;
    if (!one.value) token["value"] = false;
    if (one.gone) token["gone"] = true;
    found.push_back(std::move(token));
  }
  if (step.mask) json["mask"] = MaskJson(*step.mask);
  if (step.begins_pass) json["begins_pass"] = true;
  for (const auto& [cell, from] : moves.cells) {
    json["moved"].push_back({{"cell", cell}, {"from", from}});
  }
  return json;
}

// Returns the whole reason, with the note about a second run.
std::string ReasonOf(const Failure& failure) {
  return failure.note.empty() ? failure.text
                              : failure.text + "\n" + failure.note;
}

// The wrong place in the drawing of the last step.
struct Wrong {
  int row = -1;                    // The row of the mask; -1: none.
  int cell = -1;                   // -1: none.
  std::optional<Held> reader;      // The token whose mask row is wrong.
  const Held* expected = nullptr;  // The token that the cell must hold, if any.
  const FoundToken* actual = nullptr;  // The token in the cell, if any.
  const Held* missing = nullptr;       // A token that the reader does not see.
  char sight = ' ';                    // How the row sees the cell.
  bool again = false;  // The row sees the same token in another cell, too.
};

const FoundToken* FoundIn(const Step& step, int cell) {
  for (const FoundToken& token : step.found) {
    if (cell >= 0 && token.token.cell == cell) return &token;
  }
  return nullptr;
}

// Whether the row sees these rows in a cell where it must see them.
bool SeesRightly(const Step& step, const MaskPicture::Row& row,
                 std::uint64_t rows) {
  for (std::size_t i = 0; i < row.sights.size(); ++i) {
    const auto column = AsInt(step.mask->from) + AsInt(i);
    const FoundToken* found = FoundIn(step, step.mask->first_cell + column);
    const bool same = found != nullptr && found->rows == rows;
    if (row.sights[i] == '#' && same) return true;
  }
  return false;
}

Wrong WrongOf(const Step& step) {
  Wrong wrong;
  if (!step.mask) return wrong;
  const MaskPicture& mask = *step.mask;
  std::int64_t at = step.wrong_column - mask.from;
  const auto is_drawn = [&](const MaskPicture::Row& row) {
    return step.wrong_column >= 0 && at >= 0 && at < std::ssize(row.sights);
  };
  for (const MaskPicture::Row& row : mask.rows) {
    // If no row is named, the first row that sees the column is wrong.
    const bool sees =
        step.wrong_row < 0 && is_drawn(row) && At(row.sights, at) == 'x';
    if (row.row != step.wrong_row && !sees) continue;
    wrong.row = row.row;
    wrong.reader = row.token;
    if (!row.missing.empty()) wrong.missing = &row.missing[0];
    // If no column is named, the first wrong column of the row is shown.
    const std::size_t first = row.sights.find_first_of("x+-?");
    if (step.wrong_column < 0 && first != std::string::npos) {
      at = static_cast<std::int64_t>(first);
    }
    if (at >= 0 && at < std::ssize(row.sights)) {
      wrong.sight = At(row.sights, at);
    }
    break;
  }
  const bool at_column = step.wrong_column >= 0 || wrong.sight != ' ';
  if (at_column) {
    wrong.cell = mask.first_cell + AsInt(mask.from + at);
  }
  for (const Held& held : step.cells) {
    if (held.cell == wrong.cell && wrong.cell >= 0) wrong.expected = &held;
  }
  wrong.actual = FoundIn(step, wrong.cell);
  for (const MaskPicture::Row& row : mask.rows) {
    wrong.again = wrong.again || (row.row == wrong.row && wrong.sight == '+' &&
                                  wrong.actual != nullptr &&
                                  !wrong.actual->token.sequences.empty() &&
                                  SeesRightly(step, row, wrong.actual->rows));
  }
  return wrong;
}

// Finds the tokens of earlier steps whose rows are found now, where no token of
// the cache has such rows.
void NameGoneTokens(Failure& failure) {
  std::map<std::uint64_t, Held> seen;
  for (Step& step : failure.trace) {
    if (!step.mask) continue;  // Only a view has rows.
    for (FoundToken& token : step.found) {
      if (!token.token.sequences.empty()) {
        if (token.key && token.value) seen[token.rows] = token.token;
      } else if (const auto at = seen.find(token.rows); at != seen.end()) {
        const int cell = std::exchange(token.token, at->second).cell;
        token.token.cell = cell;
        token.key = token.value = token.gone = true;
      }
    }
  }
}

// Names the rows that were found; briefly, if their token is one of the
// sequences of `expected`.
std::string Owner(const FoundToken& actual, const Held* expected = nullptr) {
  const Held& token = actual.token;
  if (token.sequences.empty()) return "no token's row";
  const std::string name =
      expected != nullptr && token.sequences == expected->sequences
          ? fmt::format("position {}", token.position)
          : TokenName(token);
  if (actual.gone) {
    return fmt::format("the row of {}, which it no longer holds", name);
  }
  if (actual.key && actual.value) return "the row of " + name;
  return fmt::format("the {} row of {} with another {} row",
                     actual.key ? "K" : "V", name, actual.key ? "V" : "K");
}

// Returns the number of the step that moved the token to its cell; 0: none.
std::int64_t MovedBy(const Failure& failure, const std::vector<Moves>& moves,
                     const Held& expected) {
  for (std::size_t i = moves.size(); i-- > 0;) {
    const Step& step = failure.trace[i];
    if (step.cache != failure.trace.back().cache) continue;
    if (!moves[i].cells.contains(expected.cell)) continue;
    const auto at = std::find(step.cells.begin(), step.cells.end(), expected);
    return at == step.cells.end() ? 0 : moves[i].by;
  }
  return 0;
}

// Returns "cell", or "column" for a third-party cache that leaves open which
// cells its columns show.
std::string_view PlaceOf(const Step& step) {
  const bool has_cells =
      step.cell_count > 0 || (step.mask && step.mask->first_cell > 0);
  return has_cells ? "cell" : "column";
}

// Returns the headline, and a sentence with details.
std::pair<std::string, std::string> Sentences(const Failure& failure,
                                              const Wrong& wrong,
                                              const std::vector<Moves>& moves) {
  const Step& step = failure.trace.back();
  const auto& [row, cell, reader, expected, actual, missing, sight, again] =
      wrong;
  const std::string who = reader    ? "The token at " + TokenName(*reader)
                          : row < 0 ? "A token"
                                    : "A padding row";
  const std::string_view place = PlaceOf(step);
  const std::string at = fmt::format("{} {}", place, cell);
  if (expected != nullptr && actual != nullptr && actual->differs) {
    const std::int64_t mover = MovedBy(failure, moves, *expected);
    const std::string how =
        mover == 0 ? fmt::format("The row of {} must be in {}",
                                 TokenName(*expected), at)
                   : fmt::format("{} {} moved {} to {}", failure.unit, mover,
                                 TokenName(*expected), at);
    return {sight == 'x' ? who + " reads the wrong token."
                         : fmt::format("A {} has the wrong token.", place),
            fmt::format("{}; what the cache returned there is {}.", how,
                        Owner(*actual, expected))};
  }
  if (sight == 'x' && actual != nullptr) {
    return {who + " reads a wrong row.",
            fmt::format("In {} is {}.", at, Owner(*actual))};
  }
  const std::string holds =
      expected != nullptr ? "holds " + TokenName(*expected)
      : actual != nullptr && !actual->token.sequences.empty()
          ? "has " + Owner(*actual)
      : step.cell_count > 0 ? "is free"
                            : "has no token's row";
  // The page has the whole reason further down.
  const std::string reason = failure.text.substr(0, failure.text.find('\n'));
  if (sight == '?') {
    return {who + " has a wrong element in its mask.",
            fmt::format("The element of {} is neither 0 nor -inf.", at)};
  }
  if (sight == '+') {
    return {who + (again ? " reads a token more than once."
                         : " reads what it must not see."),
            fmt::format("The mask shows it {}, which {}.", at, holds)};
  }
  if (sight == '-') {
    return {who + " does not see what it must read.",
            fmt::format("The mask hides {} from it, which {}.", at, holds)};
  }
  if (missing != nullptr) {
    const std::string where =
        missing->cell < 0
            ? fmt::format("No {} of the view has the row of", place)
            : fmt::format("The mask hides {} {} from it, which has the row of",
                          place, missing->cell);
    return {who + " does not see what it must read.",
            fmt::format("{} {}.", where, TokenName(*missing))};
  }
  if (failure.party() == Party::kBackend) {
    return {"The backend failed.", reason};
  }
  if (reader && failure.Is("subject: attention")) {
    return {who + " reads the wrong tokens.", reason};
  }
  return {step.call.substr(0, step.call.find_first_of("( :")) +
              " gave a wrong answer.",
          reason};
}

}  // namespace

std::string EscapedMarkup(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

std::string PageHtml(Failure failure) {
  NameGoneTokens(failure);
  const std::vector<Moves> moves = AllMoves(failure.trace);
  Wrong wrong = WrongOf(failure.trace.back());
  const auto [headline, more] = Sentences(failure, wrong, moves);
  // A row that sees what it must see is not marked.
  const bool wrong_sight =
      std::string_view("x+-?").find(wrong.sight) != std::string_view::npos;
  if (!wrong_sight && wrong.missing == nullptr &&
      !failure.Is("subject: attention")) {
    wrong.row = -1;
  }
  Json json = {{"headline", headline},
               {"more", Cut(more)},
               {"check", failure.check},
               {"reason", Cut(ReasonOf(failure))},
               {"command", failure.rerun},
               {"unit", failure.unit},
               {"place", PlaceOf(failure.trace.back())},
               {"left_out", failure.left_out},
               {"from", failure.frame.from},
               {"to", failure.frame.to},
               {"wrong", {{"row", wrong.row}, {"cell", wrong.cell}}},
               {"steps", Json::array()}};
  for (std::size_t i = 0; i < moves.size(); ++i) {
    json["steps"].push_back(StepJson(failure.trace[i], moves[i]));
  }
  const std::map<std::string_view, std::string> values = {
      {"headline", EscapedMarkup(headline)},
      {"more", EscapedMarkup(Cut(more))},
      {"name", EscapedMarkup(Cut(failure.name))},
      {"setup", EscapedMarkup(Cut(failure.setup))},
      {"check", EscapedMarkup(failure.check)},
      {"reason", EscapedMarkup(Cut(ReasonOf(failure)))},
      {"rules", failure.rules.empty() ? "" : " (" + failure.rules + ")"},
      {"command", EscapedMarkup(failure.rerun)},
      {"text", EscapedMarkup(Cut(failure.report, 40000))},
      {"data", Embedded(json)}};
  // {{name}} stands for a value. A value may have such a text, too: values are
  // not searched.
  std::string page;
  std::string_view rest = kPageTemplate;
  for (std::size_t at; (at = rest.find("{{")) != rest.npos;) {
    const std::size_t end = rest.find("}}", at);
    page += rest.substr(0, at);
    page += values.at(rest.substr(at + 2, end - at - 2));
    rest.remove_prefix(end + 2);
  }
  return page += rest;
}

Status WritePage(const Failure& failure, const std::string& path) {
  return WriteFile(path, PageHtml(failure));
}

}  // namespace kvtwin::props
