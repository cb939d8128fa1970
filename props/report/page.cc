#include "props/report/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "core/json_line.h"
#include "props/base/text_file.h"

namespace kvtwin::props {

extern const char* const kPageTemplate;  // props/report/page.html

namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kSequencesShown = 6;

// Nothing that came from outside makes the page large.
std::string Cut(std::string text, std::size_t length_max = 4000) {
  if (text.size() <= length_max) return text;
  text.resize(length_max);
  return text + " ...";
}

std::string Escaped(std::string_view text) {
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

// JSON that may stand in a script element: nothing in it can end that.
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
  return fmt::format(
      "position {} of sequence {}{}", token.position,
      fmt::join(token.sequences.begin(),
                token.sequences.begin() + static_cast<std::ptrdiff_t>(shown),
                " and "),
      shown < token.sequences.size() ? " and others" : "");
}

Json TokenJson(const Held& token) {
  const auto shown = std::min(kSequencesShown, token.sequences.size());
  Json json = {{"position", token.position}};
  if (token.cell >= 0) json["cell"] = token.cell;
  json["sequences"] = std::vector<int>(
      token.sequences.begin(),
      token.sequences.begin() + static_cast<std::ptrdiff_t>(shown));
  if (shown < token.sequences.size()) {
    json["more"] = token.sequences.size() - shown;
  }
  return json;
}

// The tokens that a step found in another cell than the step before it that
// showed the same cache: where each was, by its cell now.
struct Moves {
  std::int64_t by = 0;  // The number of the step that moved them.
  std::map<int, int> cells;
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

// Only the begin of a pass moves tokens; of a wrapper's caches it is seen when
// they are looked at next.
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
  if (!step.drawn) return json;
  json["cache"] = step.cache;
  json["cell_count"] = step.cell_count;
  json["cells_left_out"] = step.cells_left_out;
  json["rows_left_out"] = step.rows_left_out;
  Json& cells = json["cells"] = Json::array();
  for (const Held& held : step.cells) cells.push_back(TokenJson(held));
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

// The whole reason, with what a second run showed.
std::string ReasonOf(const Failure& failure) {
  return failure.note.empty() ? failure.text
                              : failure.text + "\n" + failure.note;
}

// What is in the wrong place, as far as the drawing of the last step shows it.
struct Wrong {
  int row = -1;  // Of the mask.
  int cell = -1;
  std::optional<Held> reader;  // The token whose mask row is wrong.
  const Held* due = nullptr;   // Null: nothing.
  const FoundToken* found = nullptr;
  char sight = ' ';
};

Wrong WrongOf(const Step& step) {
  Wrong wrong;
  if (!step.mask) return wrong;
  const MaskPicture& mask = *step.mask;
  const std::int64_t at = step.wrong_column - mask.from;
  if (step.wrong_column >= 0) wrong.cell = mask.first_cell + step.wrong_column;
  for (const MaskPicture::Row& row : mask.rows) {
    char sight = ' ';
    if (at >= 0 && at < std::ssize(row.sights)) {
      sight = row.sights[static_cast<std::size_t>(at)];
    }
    // If no row is named, the first that sees the column.
    const bool sees = step.wrong_row < 0 && sight == 'x';
    if (row.row != step.wrong_row && !sees) continue;
    wrong.row = row.row;
    wrong.reader = row.token;
    wrong.sight = sight;
    break;
  }
  for (const Held& held : step.cells) {
    if (held.cell == wrong.cell && wrong.cell >= 0) wrong.due = &held;
  }
  for (const FoundToken& one : step.found) {
    if (one.token.cell == wrong.cell) wrong.found = &one;
  }
  return wrong;
}

// A row that is no token's may be that of a token of earlier steps.
void NameGoneTokens(Failure& failure) {
  std::map<std::uint64_t, Held> seen;
  for (Step& step : failure.trace) {
    for (FoundToken& one : step.found) {
      if (!one.token.sequences.empty()) {
        if (one.key && one.value) seen[one.rows] = one.token;
      } else if (const auto at = seen.find(one.rows); at != seen.end()) {
        const int cell = std::exchange(one.token, at->second).cell;
        one.token.cell = cell;
        one.key = one.value = one.gone = true;
      }
    }
  }
}

// What was found where `due` is due.
std::string Owner(const FoundToken& found, const Held& due) {
  const Held& token = found.token;
  if (token.sequences.empty()) return "no token's row";
  const std::string name = token.sequences == due.sequences
                               ? fmt::format("position {}", token.position)
                               : TokenName(token);
  if (found.gone) return fmt::format("the row of {}, which it dropped", name);
  if (found.key && found.value) return "the row of " + name;
  return fmt::format("the {} row of {} with another {} row",
                     found.key ? "K" : "V", name, found.key ? "V" : "K");
}

// The number of the step that moved the token to its cell; 0 if none did.
std::int64_t MovedBy(const Failure& failure, const std::vector<Moves>& moves,
                     const Held& due) {
  for (std::size_t i = moves.size(); i-- > 0;) {
    const Step& step = failure.trace[i];
    if (step.cache != failure.trace.back().cache) continue;
    if (!moves[i].cells.contains(due.cell)) continue;
    const auto at = std::find(step.cells.begin(), step.cells.end(), due);
    return at == step.cells.end() ? 0 : moves[i].by;
  }
  return 0;
}

// One sentence, and one that says more.
std::pair<std::string, std::string> Sentences(const Failure& failure,
                                              const Wrong& wrong,
                                              const std::vector<Moves>& moves) {
  const Step& step = failure.trace.back();
  const auto& [row, cell, reader, due, found, sight] = wrong;
  const std::string who = reader    ? "The token at " + TokenName(*reader)
                          : row < 0 ? "A token"
                                    : "A padding row";
  if (due != nullptr && found != nullptr && found->differs) {
    const std::int64_t mover = MovedBy(failure, moves, *due);
    const std::string how =
        mover == 0 ? fmt::format("Cell {} must hold {}", cell, TokenName(*due))
                   : fmt::format("{} {} moved {} to cell {}", failure.unit,
                                 mover, TokenName(*due), cell);
    return {sight == 'x' ? who + " reads the wrong token."
                         : "A cell holds the wrong token.",
            fmt::format("{}; what the cache returned there is {}.", how,
                        Owner(*found, *due))};
  }
  const std::string holds =
      due != nullptr ? "holds " + TokenName(*due)
      : found != nullptr && !found->token.sequences.empty()
          ? "has the row of " + TokenName(found->token)
          : "is free";
  // In full it stands further down.
  const std::string reason = failure.text.substr(0, failure.text.find('\n'));
  if (sight == '+') {
    return {who + " reads what it must not see.",
            fmt::format("The mask shows it cell {}, which {}.", cell, holds)};
  }
  if (sight == '-') {
    return {
        who + " does not see what it must read.",
        fmt::format("The mask hides cell {} from it, which {}.", cell, holds)};
  }
  if (reader) return {who + " reads the wrong tokens.", reason};
  return {step.call.substr(0, step.call.find('(')) + " gave a wrong answer.",
          reason};
}

}  // namespace

std::string PageHtml(Failure failure) {
  NameGoneTokens(failure);
  const std::vector<Moves> moves = AllMoves(failure.trace);
  const Wrong wrong = WrongOf(failure.trace.back());
  const auto [headline, more] = Sentences(failure, wrong, moves);
  Json json = {{"headline", headline},
               {"more", Cut(more)},
               {"check", failure.check},
               {"reason", Cut(ReasonOf(failure))},
               {"command", failure.rerun},
               {"unit", failure.unit},
               {"left_out", failure.left_out},
               {"from", failure.frame.from},
               {"to", failure.frame.to},
               {"wrong", {{"row", wrong.row}, {"cell", wrong.cell}}},
               {"steps", Json::array()}};
  for (std::size_t i = 0; i < moves.size(); ++i) {
    json["steps"].push_back(StepJson(failure.trace[i], moves[i]));
  }
  const std::map<std::string_view, std::string> values = {
      {"headline", Escaped(headline)},
      {"more", Escaped(Cut(more))},
      {"name", Escaped(Cut(failure.name))},
      {"setup", Escaped(Cut(failure.setup))},
      {"check", Escaped(failure.check)},
      {"reason", Escaped(Cut(ReasonOf(failure)))},
      {"rules", failure.rules.empty() ? "" : " (" + failure.rules + ")"},
      {"command", Escaped(failure.rerun)},
      {"text", Escaped(Cut(failure.story, 40000))},
      {"data", Embedded(json)}};
  // {{name}} stands for a value. What is put in is not looked at again.
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
