// The definition of the judge of pages; page_truth_test.cc and
// page_other_caches_test.cc have its tests.

#include "props/report/page_judge.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <regex>
#include <set>
#include <string_view>
#include <utility>

#include "core/dense_tensor.h"
#include "core/index.h"
#include "core/mask_elements.h"
#include "core/names.h"
#include "props/base/forwarding_cache.h"
#include "props/oracle/oracle.h"
#include "props/search/explain.h"
#include "reference/dialects.h"

namespace kvtwin::props {
namespace {

using nlohmann::json;
using reference::CacheLedger;
using reference::Ledger;
using reference::LedgerToken;
using Source = JudgedCalls::Source;

using Sequences = std::set<int>;
// A token as pages name it.
struct Name {
  std::int64_t position = 0;
  Sequences sequences;
  auto operator<=>(const Name&) const = default;
};

Name NameOf(const LedgerToken& token) {
  return {token.position, token.sequences};
}
Name NameOf(const Held& held) {
  return {held.position, {held.sequences.begin(), held.sequences.end()}};
}
Name NameOf(const json& token) {
  const auto sequences = token["sequences"].get<std::vector<int>>();
  return {token["position"], {sequences.begin(), sequences.end()}};
}

std::string TextOf(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
std::string TextOf(const TensorView& row) {
  return TextOf(CopyOf(row, row.dtype).bytes);
}

// The K row and the V row of a column or of a token, as bytes.
struct Bytes {
  std::string key;
  std::string value;
  auto operator<=>(const Bytes&) const = default;
};

// A token that a row must see.
struct Due {
  Name name;
  std::optional<Bytes> rows;  // Nothing was put in the layer: none.
  bool may_miss = false;
};

class Judge {
 public:
  Judge(const json& page, const JudgedCalls& calls)
      : page_(page), calls_(calls), ledger_(calls.spec, calls.rules) {
    TraceHeader header;
    header.spec = calls.spec;
    header.config = calls.config;
    header.init = calls.init;
    if (calls.source == Source::kRecording) AllowShifts(header.spec);
    if (calls.visibility_only) MakeRoom(header);
    ledger_ = Ledger(header.spec, calls.rules);
    Expect(ledger_.Init(header.config, header.init).ok(), "the ledger begins");
    if (calls.source == Source::kLedger) ledger_.NeverFull();
    fresh_.assign(ledger_.parts().size(), false);
  }

  PageVerdict Run() {
    const json& steps = page_["steps"];
    std::vector<const json*> drawn;
    for (const json& step : steps) {
      if (!IsJudged(step["call"].get<std::string>())) continue;
      drawn.push_back(&step);
    }
    std::vector<const JudgedCall*> made;
    for (const JudgedCall& call : calls_.calls) {
      if (!CallText(call.op).empty()) made.push_back(&call);
    }
    Expect(drawn.size() <= made.size(), "a call of the page was not made");
    if (page_["left_out"] == 0) {
      Expect(drawn.size() == made.size(), "each call is in the list");
    }
    std::size_t next = made.size() - std::min(drawn.size(), made.size());
    std::size_t at = 0;
    std::size_t number = 0;
    for (const JudgedCall& call : calls_.calls) {
      Follow(call);
      if (CallText(call.op).empty() || number++ < next) continue;
      if (at < drawn.size()) JudgeStep(*drawn[at++], call);
    }
    JudgeHeadline();
    return std::move(verdict_);
  }

 private:
  static void AllowShifts(CacheSpec& spec) {
    if (spec.shift.kind == ShiftKind::kNone) {
      spec.shift.kind = ShiftKind::kIdentity;
    }
    for (CacheSpec& one : spec.caches) AllowShifts(one);
  }

  void Expect(bool holds, const std::string& what) {
    ++verdict_.labels;
    if (!holds) verdict_.lies.push_back(where_ + what);
  }

  bool IsJudged(const std::string& call) const {
    if (calls_.source == Source::kRecording) return true;
    for (const char* name : {"StartForward(", "Put(", "Get(", "SetCausal(",
                             "Remove(", "CopyPrefix(", "CanResume("}) {
      if (call.starts_with(name)) return true;
    }
    return false;
  }

  // Returns the call as the page must show it; empty if pages do not show it.
  std::string CallText(const TraceOp& op) const {
    if (calls_.source == Source::kRecording) {
      return std::string(TraceOpName(op.kind));
    }
    switch (op.kind) {
      case TraceOpKind::kStartForward:
        return fmt::format("StartForward(positions [{}], sequences [{}]{})",
                           fmt::join(op.positions, " "),
                           fmt::join(op.sequences, " "),
                           op.reserve ? ", reserve" : "");
      case TraceOpKind::kPut:
        return fmt::format("Put(layer {},", op.layer);
      case TraceOpKind::kGet:
        return fmt::format("Get(layer {})", op.layer);
      case TraceOpKind::kSetCausal:
        return fmt::format("SetCausal([{}])", fmt::join(op.indices, " "));
      case TraceOpKind::kRemove:
        return fmt::format(
            "Remove({}, {}, {})", op.seq, op.begin,
            op.end == kOpenEnd ? "open" : fmt::to_string(op.end));
      case TraceOpKind::kCopyPrefix:
        return fmt::format("CopyPrefix({}, {}, {})", op.src, op.dst, op.len);
      case TraceOpKind::kCanResume:
        return fmt::format("CanResume({}, {})", op.seq, op.pos);
      default:
        return "";
    }
  }

  std::string AnswerText(const JudgedCall& call) const {
    const TraceOp& op = call.op;
    const bool recording = calls_.source == Source::kRecording;
    const bool asks = op.kind == TraceOpKind::kCanResume ||
                      op.kind == TraceOpKind::kEncoderCached;
    if (asks && !call.refused) {
      if (recording) return op.answer ? "true" : "false";
      return op.answer ? "yes" : "no";
    }
    const bool answers = op.kind == TraceOpKind::kStartForward ||
                         op.kind == TraceOpKind::kRemove;
    if (recording && !answers) return "";
    const bool got = op.kind == TraceOpKind::kGet && !call.refused;
    if (got && calls_.source == Source::kIdentity) return "";
    return std::string(StatusName(op.result));
  }

  // Makes the call on the ledger.
  void Follow(const JudgedCall& call) {
    const TraceOp& op = call.op;
    const bool recording = calls_.source == Source::kRecording;
    const bool ok = op.result == StatusCode::kOk;
    const auto all = [&](bool fresh) { fresh_.assign(fresh_.size(), fresh); };
    switch (op.kind) {
      case TraceOpKind::kStartForward: {
        const Batch batch{op.positions, op.sequences, op.indices};
        copied_ = false;
        reserving_ = ok && op.reserve;
        const bool unknown = calls_.source == Source::kLedger &&
                             op.result == StatusCode::kCacheFull;
        if (recording && !ok) {
          Ledger after = ledger_;
          const bool same = !calls_.visibility_only &&
                            !after.StartForward(batch, op.reserve).ok();
          if (same) ledger_ = after;
        } else if (!unknown) {
          (void)ledger_.StartForward(batch, op.reserve, op.result);
        }
        const bool judged = calls_.source == Source::kIdentity || !op.reserve;
        all(ok && judged);
        positions_ = op.positions;
        sequences_ = op.sequences;
        if (ok) active_ = 0;
        break;
      }
      case TraceOpKind::kSetLayerType:
        active_ = AsSize(op.type);
        ledger_.SetLayerType(op.type);
        break;
      case TraceOpKind::kSetCausal:
        if (ok) (void)ledger_.active().SetCausal(op.indices);
        fresh_[active_] = recording ? !reserving_
                          : calls_.source == Source::kLedger
                              ? !copied_ && !reserving_
                              : !copied_;
        break;
      case TraceOpKind::kPut:
        ledger_.active().Put(op.layer, op.key.view(), op.value->view());
        Remember();
        break;
      case TraceOpKind::kRemove:
        if (!recording || ok) {
          const bool strict =
              calls_.strict && op.result == StatusCode::kNotSupported;
          (void)ledger_.Remove(
              op.seq, op.begin, op.end,
              strict ? reference::Heard() : reference::Heard(op.result));
          all(false);
        }
        break;
      case TraceOpKind::kCopyPrefix:
        if (calls_.source != Source::kLedger ||
            op.result != StatusCode::kCacheFull) {
          (void)ledger_.CopyPrefix(op.src, op.dst, op.len, op.result);
          all(false);
        }
        copied_ = copied_ || ok || calls_.source == Source::kIdentity;
        break;
      case TraceOpKind::kCanResume:
        if (calls_.source == Source::kLedger && ok && op.answer) {
          ledger_.Resumes(op.seq, op.pos);
        }
        break;
      default:
        break;
    }
    if (calls_.source != Source::kRecording) cells_[active_] = call.cells;
    Remember();
  }

  // Remembers the rows that tokens have had.
  void Remember() {
    for (const LedgerToken& token : ledger_.active().tokens()) {
      for (const auto& [layer, rows] : token.rows) {
        had_.insert({NameOf(token), RowsOf(token, layer)});
      }
    }
  }

  static Bytes RowsOf(const LedgerToken& token, int layer) {
    const KvRows& rows = token.rows.at(layer);
    return {TextOf(rows.key.bytes), TextOf(rows.value.bytes)};
  }

  void JudgeStep(const json& step, const JudgedCall& call) {
    const std::string text = step["call"];
    where_ = fmt::format("step {} {}: ", step["number"].get<int>(), text);
    const bool same =
        calls_.source == Source::kRecording
            ? text == CallText(call.op) && step["number"] == call.op.line
            : text.starts_with(CallText(call.op));
    Expect(same, "the call was " + CallText(call.op));
    if (!same) return;
    // The call of the last step may fail before it answers.
    const bool is_last = &step == &page_["steps"].back();
    const std::string answer = step["answer"];
    Expect(
        answer == AnswerText(call) || (is_last && answer.empty()),
        fmt::format("the answer was '{}', not '{}'", AnswerText(call), answer));
    if (!step.contains("cells")) return;
    drawn_ = step["cache"].get<std::size_t>();
    if (is_last) {  // The cache that is wrong was looked at after the call.
      const auto at = std::ranges::find_if(
          calls_.calls, [&](const auto& one) { return &one == &call; });
      for (auto one = at; one != calls_.calls.end(); ++one) {
        if (one->op.kind != TraceOpKind::kSetLayerType) continue;
        At(cells_, one->op.type) = one->cells;
      }
    } else {
      Expect(drawn_ == active_, "another cache is active");
    }
    JudgeCells(step);
    Expect(call.op.mask || !step.contains("mask"), "there is no mask");
    if (step.contains("mask") && call.op.mask) {
      Expect(drawn_ == active_, "another cache is active");
      JudgeView(step, call.op);
    } else {
      JudgeFoundCells(step);
    }
  }

  bool InFrame(std::int64_t cell) const {
    return cell >= page_["from"] && cell < page_["to"];
  }
  static bool HasCells(const json& step) {
    return !step["cells"].empty() && step["cells"][0].contains("cell");
  }

  // The expected tokens are the ledger's, each in a cell of its own.
  void JudgeCells(const json& step) {
    std::multiset<Name> expected;
    for (const LedgerToken& token : ledger_.parts()[drawn_].tokens()) {
      expected.insert(NameOf(token));
    }
    std::set<std::int64_t> cells;
    for (const json& token : step["cells"]) {
      const auto at = expected.find(NameOf(token));
      Expect(at != expected.end(), "must not hold " + token.dump());
      if (at != expected.end()) expected.erase(at);
      if (!token.contains("cell")) continue;
      Expect(cells.insert(token["cell"].get<std::int64_t>()).second,
             "two tokens in a cell");
    }
    Expect(std::ssize(expected) == step["cells_left_out"],
           fmt::format("{} expected tokens are not drawn", expected.size()));
  }

  // Without a view: the tokens that the cache says that it holds.
  void JudgeFoundCells(const json& step) {
    if (calls_.source != Source::kIdentity) {
      Expect(step["found"].empty(), "cells are not known");
      return;
    }
    std::map<std::int64_t, Name> held;
    for (const Held& one : cells_[drawn_]) held[one.cell] = NameOf(one);
    std::map<std::int64_t, Name> expected;
    for (const json& value : step["cells"]) {
      if (value.contains("cell")) expected[value["cell"]] = NameOf(value);
    }
    if (step["found"].empty()) {
      if (!HasCells(step)) return;
      for (const auto& [cell, name] : held) {
        if (InFrame(cell)) Expect(expected[cell] == name, "a cell differs");
      }
      return;
    }
    std::multiset<Name> tokens;
    for (const LedgerToken& token : ledger_.parts()[drawn_].tokens()) {
      tokens.insert(NameOf(token));
    }
    std::set<std::int64_t> drawn;
    for (const json& one : step["found"]) {
      const std::int64_t cell = one["cell"];
      drawn.insert(cell);
      const bool differs = one.value("differs", false);
      if (one["sequences"].empty()) {
        Expect(!held.contains(cell) && differs, "the cell has a token");
        continue;
      }
      const Name name = NameOf(one);
      Expect(held.contains(cell) && held[cell] == name,
             "the cache does not hold " + one.dump());
      if (HasCells(step)) {
        Expect(differs == !(expected.contains(cell) && expected[cell] == name),
               "differs: " + one.dump());
      } else {
        const auto at = tokens.find(name);
        Expect(differs == (at == tokens.end()), "differs: " + one.dump());
        if (at != tokens.end()) tokens.erase(at);
      }
    }
    for (const auto& [cell, name] : held) {
      if (InFrame(cell)) Expect(drawn.contains(cell), "a token is not drawn");
    }
    if (HasCells(step)) {
      for (const auto& [cell, name] : expected) {
        Expect(drawn.contains(cell), "a lost token is not drawn");
      }
      return;
    }
    for (const json& one : step.value("missing", json::array())) {
      const auto at = tokens.find(NameOf(one));
      Expect(at != tokens.end(), "is not missing: " + one.dump());
      if (at != tokens.end()) tokens.erase(at);
    }
    Expect(tokens.empty(), "a missing token is not drawn");
  }

  Bytes ColumnOf(const TraceOp& op, std::int64_t column) const {
    Bytes bytes{TextOf(Slice(op.key.view(), 2, column)), ""};
    if (op.value) {
      bytes.value =
          TextOf(RowOf(op.value->view(), calls_.config.v_layout, column));
    }
    return bytes;
  }

  // The rows of a token, without V if the call has none.
  static Bytes RowsFor(const TraceOp& op, const LedgerToken& token) {
    Bytes bytes = RowsOf(token, op.layer);
    if (!op.value) bytes.value.clear();
    return bytes;
  }

  void JudgeView(const json& step, const TraceOp& op) {
    const json& mask = step["mask"];
    const TensorView seen = op.mask->view();
    const std::int64_t first_cell = op.first_cell.value_or(0);
    Expect(mask["first_cell"] == first_cell, "the first cell");
    Expect(mask["columns"] == seen.shape[0], "the number of columns");
    std::vector<Bytes> columns;
    for (std::int64_t i = 0; i < seen.shape[0]; ++i) {
      columns.push_back(ColumnOf(op, i));
    }
    JudgeColumns(step, op, columns);
    Expect(std::ssize(mask["rows"]) + step["rows_left_out"].get<int>() ==
               seen.shape[1],
           "the number of mask rows");
    for (const json& row : mask["rows"]) {
      JudgeRow(step, op, columns, row);
    }
  }

  // The tokens that the columns of the view are from.
  void JudgeColumns(const json& step, const TraceOp& op,
                    const std::vector<Bytes>& columns) {
    const std::int64_t first = op.first_cell.value_or(0);
    const auto& tokens = ledger_.active().tokens();
    std::set<std::int64_t> torn;
    for (const json& row : step["mask"]["rows"]) {
      const std::string sights = row["sights"];
      for (std::size_t i = 0; i < sights.size(); ++i) {
        const auto from = step["mask"]["from"].get<std::int64_t>();
        if (sights[i] != 'x') continue;
        torn.insert(first + from + static_cast<std::int64_t>(i));
      }
    }
    std::map<std::int64_t, Name> held;
    for (const json& one : step["cells"]) {
      if (one.contains("cell")) held[one["cell"]] = NameOf(one);
    }
    for (const json& one : step["found"]) {
      const std::int64_t cell = one["cell"];
      const std::int64_t column = cell - first;
      if (column < 0 || column >= std::ssize(columns)) {
        Expect(false, "no such column " + one.dump());
        continue;
      }
      const Bytes& rows = At(columns, column);
      const bool gone = one.value("gone", false);
      const bool key = one.value("key", true);
      const bool value = one.value("value", true);
      const Name name = NameOf(one);
      bool any = false;
      bool whole = false;
      bool as_named = false;
      bool right = false;
      for (const LedgerToken& token : tokens) {
        const bool put = token.rows.contains(op.layer);
        const Bytes expected = put ? RowsFor(op, token) : rows;
        const bool same_key = expected.key == rows.key;
        const bool same_value = expected.value == rows.value;
        const bool part = same_key || (op.value && same_value);
        any = any || (put && part);
        whole = whole || (put && same_key && same_value);
        const bool named = NameOf(token) == name;
        as_named = as_named || (named && same_key == key &&
                                (same_value == value || !op.value));
        const auto at = held.find(cell);
        right = right || (at != held.end() && at->second == NameOf(token) &&
                          same_key && same_value);
      }
      const std::string text = one.dump();
      if (name.sequences.empty()) {
        Expect(!any, "it is a token's row: " + text);
      } else if (gone) {
        Expect(!whole, "the token is not gone: " + text);
        const bool had = std::ranges::any_of(had_, [&](const auto& past) {
          return past.first == name && past.second.key == rows.key &&
                 (!op.value || past.second.value == rows.value);
        });
        Expect(had, "there was no such token: " + text);
      } else {
        Expect(as_named, "the rows are not as named: " + text);
      }
      const bool differs =
          torn.contains(cell) || (held.contains(cell) && !right);
      Expect(one.value("differs", false) == differs, "differs: " + text);
    }
  }

  // The tokens that a row must see.
  std::vector<Due> DueOf(int row, const TraceOp& op) const {
    std::vector<Due> expected;
    const CacheLedger& ledger = ledger_.active();
    for (const LedgerToken& token : ledger.tokens()) {
      if (!ledger.MaySee(row, token)) continue;
      Due one{NameOf(token), {}, ledger.MayMiss(row, token)};
      if (token.rows.contains(op.layer)) one.rows = RowsFor(op, token);
      expected.push_back(std::move(one));
    }
    return expected;
  }

  void JudgeRow(const json& step, const TraceOp& op,
                const std::vector<Bytes>& columns, const json& row) {
    const int number = row["row"];
    const std::string sights = row["sights"];
    const TensorView mask = op.mask->view();
    const std::int64_t first = op.first_cell.value_or(0);
    const std::int64_t from = step["mask"]["from"];
    const bool fresh = fresh_[active_] && number < ledger_.active().rows();
    const auto i = AsSize(number);
    const bool has_token = i < positions_.size();
    Expect(row.contains("token") == has_token, "whether the row is padding");
    if (has_token && row.contains("token")) {
      Expect(NameOf(row["token"]) == Name{positions_[i], {sequences_[i]}},
             "the token of the row");
    }
    std::map<std::int64_t, Name> held;
    for (const json& one : step["cells"]) {
      if (one.contains("cell")) held[one["cell"]] = NameOf(one);
    }
    std::map<std::int64_t, Name> actual;
    for (const json& one : step["found"]) actual[one["cell"]] = NameOf(one);
    std::vector<Due> expected;
    if (fresh) expected = DueOf(number, op);
    const std::vector<Due> wanted = expected;
    const bool by_cell = HasCells(step);
    const std::string text = fmt::format("row {} {}: ", number, sights);
    const auto take = [&](const auto& fits) {
      const auto at = std::ranges::find_if(expected, fits);
      if (at == expected.end()) return false;
      expected.erase(at);
      return true;
    };
    const auto take_known = [&](const auto& fits) {
      return take([&](const Due& one) { return !one.may_miss && fits(one); }) ||
             take(fits);
    };
    // Sights that need their own token come first, then those that may be any.
    const auto judge = [&](std::int64_t column, char sight) {
      const Bytes& rows = At(columns, column);
      const MaskElement element = MaskElementAt(mask, column, number);
      const bool seen = element == MaskElement::kAllows;
      const bool neither = element == MaskElement::kNeither;
      const std::string at =
          text + fmt::format("column {} is not {}", column, sight);
      Expect(neither == (sight == '?'), at);
      if (!neither) Expect(seen == (sight != '.' && sight != '-'), at);
      if (number >= ledger_.active().rows() && fresh_[active_]) {
        Expect(!seen || sight == '+', at);
      }
      if (!fresh) return;
      const std::int64_t cell = first + column;
      const auto here = [&](const Due& one) {
        return !by_cell || (held.contains(cell) && held[cell] == one.name);
      };
      const auto same = [&](const Due& one) {
        return one.rows && *one.rows == rows;
      };
      const auto unknown = [&](const Due& one) { return !one.rows; };
      if (sight == '#') {
        Expect(take_known(
                   [&](const Due& one) { return here(one) && same(one); }) ||
                   take_known(same) || take_known([&](const Due& one) {
                     return here(one) && unknown(one);
                   }) ||
                   take_known(unknown),
               at);
      } else if (sight == '?') {  // It may be a column that it must see.
        (void)take_known(
            [&](const Due& one) { return by_cell ? here(one) : same(one); });
      } else if (sight == '-') {
        Expect(take_known([&](const Due& one) {
                 return by_cell ? here(one) : same(one);
               }),
               at);
      } else if (sight == 'x') {
        Expect(take_known([&](const Due& one) {
                 if (by_cell) return here(one) && !same(one);
                 const bool part =
                     one.rows && (one.rows->key == rows.key ||
                                  (op.value && one.rows->value == rows.value));
                 return part && !same(one) && actual[cell] == one.name;
               }),
               at);
      }
    };
    for (const char sight : std::string_view("#?x-+.")) {
      for (std::size_t c = 0; c < sights.size(); ++c) {
        if (sights[c] != sight) continue;
        judge(from + static_cast<std::int64_t>(c), sight);
      }
    }
    // Columns that are not drawn.
    for (std::int64_t column = 0; column < mask.shape[0]; ++column) {
      if (column >= from && column < from + std::ssize(sights)) continue;
      if (!fresh || !MaskAllows(mask, column, number)) continue;
      const Bytes& rows = At(columns, column);
      (void)take_known(
          [&](const Due& one) { return one.rows && *one.rows == rows; });
    }
    for (const json& one : row.value("missing", json::array())) {
      const Name name = NameOf(one);
      Expect(take_known([&](const Due& each) { return each.name == name; }),
             text + "is not missing: " + one.dump());
      if (!one.contains("cell")) {
        const bool there = std::ranges::any_of(wanted, [&](const Due& each) {
          return each.name == name && each.rows &&
                 std::ranges::count(columns, *each.rows) >
                     std::ranges::count_if(wanted, [&](const Due& other) {
                       return other.rows == each.rows;
                     }) - 1;
        });
        Expect(!there, text + "is in a cell: " + one.dump());
        continue;
      }
      const std::int64_t column = one["cell"].get<std::int64_t>() - first;
      Expect(column >= 0 && column < mask.shape[0] &&
                 !MaskAllows(mask, column, number),
             text + "is not hidden: " + one.dump());
    }
    if (!fresh) return;
    for (const Due& one : expected) {
      Expect(one.may_miss, text + fmt::format("position {} is not marked",
                                              one.name.position));
    }
    for (std::size_t c = 0; c < sights.size(); ++c) {
      const auto column = AsSize(from) + c;
      if (sights[c] != '+') continue;
      const bool could = std::ranges::any_of(expected, [&](const Due& one) {
        return one.rows && *one.rows == columns[column];
      });
      Expect(!could, text + fmt::format("column {} is right", column));
    }
  }

  // Returns the token that "position 4 of sequence 0 and 1" names.
  static std::optional<Name> NamedIn(const std::string& text) {
    static const std::regex kName(
        R"(position (\d+) of sequence ([\d and]+\d|\d))");
    std::smatch match;
    if (!std::regex_search(text, match, kName)) return std::nullopt;
    Name name{std::stoll(match[1]), {}};
    static const std::regex kNumber(R"(\d+)");
    const std::string sequences = match[2];
    for (std::sregex_iterator at(sequences.begin(), sequences.end(), kNumber),
         end;
         at != end; ++at) {
      name.sequences.insert(std::stoi(at->str()));
    }
    return name;
  }

  static const json* CellIn(const json& step, const char* key,
                            std::int64_t cell) {
    if (!step.contains(key)) return nullptr;
    for (const json& one : step[key]) {
      if (one.value("cell", std::int64_t{-1}) == cell) return &one;
    }
    return nullptr;
  }

  // The sentences say what the drawing of the last step, which is judged
  // already, shows at the wrong place.
  void JudgeHeadline() {
    where_ = "headline: ";
    const json& step = page_["steps"].back();
    const std::string headline = page_["headline"];
    const std::string more = page_["more"];
    const int wrong_row = page_["wrong"]["row"];
    const std::int64_t wrong_cell = page_["wrong"]["cell"];
    const json* row = nullptr;
    char sight = ' ';
    bool row_is_wrong = false;
    if (step.contains("mask")) {
      for (const json& one : step["mask"]["rows"]) {
        if (one["row"] != wrong_row) continue;
        row = &one;
        const std::string sights = one["sights"];
        const std::int64_t at = wrong_cell -
                                step["mask"]["first_cell"].get<std::int64_t>() -
                                step["mask"]["from"].get<std::int64_t>();
        if (wrong_cell >= 0 && at >= 0 && at < std::ssize(sights)) {
          sight = At(sights, at);
        }
        row_is_wrong = sights.find_first_of("x+-?") != std::string::npos ||
                       one.contains("missing");
      }
    }
    const bool attention = page_["check"] == "subject: attention";
    Expect(wrong_row < 0 || row_is_wrong || attention,
           "the wrong row is right");
    const auto says = [&](std::string_view what) {
      return headline.find(what) != std::string::npos;
    };
    if (headline.starts_with("The token at ")) {
      Expect(row != nullptr && row->contains("token") &&
                 NamedIn(headline) == NameOf((*row)["token"]),
             "the row's token: " + headline);
    }
    if (headline.starts_with("A padding row")) {
      Expect(row != nullptr && !row->contains("token"), headline);
    }
    const json* actual = CellIn(step, "found", wrong_cell);
    const json* expected = CellIn(step, "cells", wrong_cell);
    Expect(wrong_cell < 0 ||
               std::string_view("x+-?").find(sight) != std::string_view::npos ||
               (actual != nullptr && actual->value("differs", false)) ||
               says("gave a wrong answer"),
           "the wrong cell is right");
    std::smatch match;
    static const std::regex kCell(R"([Cc]ell (\d+))");
    const bool in_full =
        says("gave a wrong answer") || says("reads the wrong tokens");
    if (!in_full && std::regex_search(more, match, kCell)) {
      const std::int64_t cell = std::stoll(match[1]);
      const bool elsewhere = row != nullptr && row->contains("missing") &&
                             (*row)["missing"][0].value("cell", -1) == cell;
      Expect(cell == wrong_cell || elsewhere, "the cell: " + more);
    }
    const auto is_found = [&](const std::string& text) {
      if (actual == nullptr) return false;
      if (text.find("no token's row") != text.npos) {
        return (*actual)["sequences"].empty();
      }
      Name name = NameOf(*actual);
      std::optional<Name> said = NamedIn(text);
      if (!said &&
          expected != nullptr) {  // "position 3", of the expected sequences.
        static const std::regex kShort(R"(position (\d+))");
        if (!std::regex_search(text, match, kShort)) return false;
        said = Name{std::stoll(match[1]), NameOf(*expected).sequences};
      }
      const bool key = (*actual).value("key", true);
      const bool value = (*actual).value("value", true);
      const bool parts = key == (text.find("the V row of") == text.npos) &&
                         value == (text.find("the K row of") == text.npos);
      return said == name && parts &&
             (*actual).value("gone", false) ==
                 (text.find("no longer holds") != text.npos);
    };
    if (says("reads the wrong token.") ||
        says("A cell holds the wrong token")) {
      Expect(actual != nullptr && actual->value("differs", false), headline);
      Expect(says("A cell") || sight == 'x', headline);
      const std::size_t what = more.find("; what the cache returned there is ");
      Expect(what != more.npos && expected != nullptr &&
                 NamedIn(more.substr(0, what)) == NameOf(*expected),
             "the expected token: " + more);
      if (what != more.npos) Expect(is_found(more.substr(what)), more);
    } else if (says("reads a wrong row")) {
      Expect(sight == 'x' && is_found(more), more);
    } else if (says("reads what it must not see") ||
               says("reads a token more than once")) {
      Expect(sight == '+', headline);
      JudgeHolds(more, expected, actual, is_found);
    } else if (says("does not see what it must read")) {
      if (more.starts_with("No cell") || sight != '-') {
        Expect(row != nullptr && row->contains("missing") &&
                   NamedIn(more) == NameOf((*row)["missing"][0]),
               more);
        const bool missing = row != nullptr && row->contains("missing");
        Expect(missing && more.starts_with("No cell") ==
                              !(*row)["missing"][0].contains("cell"),
               more);
      } else {
        JudgeHolds(more, expected, actual, is_found);
      }
    } else if (says("has a wrong element")) {
      Expect(sight == '?', headline);
    } else if (says("reads the wrong tokens")) {
      Expect(attention, headline);
    } else {
      const std::string call = step["call"];
      Expect(
          headline == call.substr(0, call.find('(')) + " gave a wrong answer.",
          headline);
      // Each wrong row that is drawn would be named.
      Expect(wrong_row < 0, headline);
    }
  }

  template <class IsFound>
  void JudgeHolds(const std::string& more, const json* expected,
                  const json* actual, const IsFound& is_found) {
    if (more.find("which is free") != more.npos) {
      Expect(expected == nullptr &&
                 (actual == nullptr || (*actual)["sequences"].empty()),
             more);
    } else if (more.find("which holds") != more.npos) {
      Expect(expected != nullptr && NamedIn(more) == NameOf(*expected), more);
    } else {
      Expect(is_found(more), more);
    }
  }

  const json& page_;
  const JudgedCalls& calls_;
  Ledger ledger_;
  PageVerdict verdict_;
  std::string where_;
  std::size_t active_ = 0;
  std::size_t drawn_ = 0;  // The cache that the step shows.
  std::vector<bool> fresh_;
  bool copied_ = false;
  bool reserving_ = false;
  std::vector<std::int32_t> positions_;
  std::vector<int> sequences_;
  std::map<std::size_t, std::vector<Held>> cells_;  // By cache.
  std::set<std::pair<Name, Bytes>> had_;
};

// Writes down each call between Init and Close.
class LoggingCache final : public ForwardingCache {
 public:
  LoggingCache(std::unique_ptr<Cache> cache, std::vector<JudgedCall>& log)
      : ForwardingCache(std::move(cache)), log_(log) {
    log_.clear();
  }

  Status Init(const InitArgs& args) override {
    Status status = ForwardingCache::Init(args);
    begun_ = begun_ || status.ok();
    return status;
  }
  void Close() override {
    closed_ = true;
    ForwardingCache::Close();
  }
  Status SetLayer(int layer) override {
    layer_ = layer;
    return ForwardingCache::SetLayer(layer);
  }
  Status SetLayerType(int type) override {
    TraceOp op;
    op.kind = TraceOpKind::kSetLayerType;
    op.type = type;
    return Log(op, ForwardingCache::SetLayerType(type));
  }
  Status StartForward(const Batch& batch, bool reserve) override {
    TraceOp op;
    op.kind = TraceOpKind::kStartForward;
    op.positions = {batch.positions.begin(), batch.positions.end()};
    op.sequences = {batch.sequences.begin(), batch.sequences.end()};
    op.indices = {batch.multimodal.begin(), batch.multimodal.end()};
    op.reserve = reserve;
    return Log(op, ForwardingCache::StartForward(batch, reserve));
  }
  Status SetCausal(std::span<const int> except) override {
    TraceOp op;
    op.kind = TraceOpKind::kSetCausal;
    op.indices = {except.begin(), except.end()};
    return Log(op, ForwardingCache::SetCausal(except));
  }
  Status Put(const TensorView& key, const TensorView& value) override {
    TraceOp op;
    op.kind = TraceOpKind::kPut;
    op.layer = layer_;
    op.key = CopyOf(key, key.dtype);
    op.value = CopyOf(value, value.dtype);
    return Log(op, ForwardingCache::Put(key, value));
  }
  Result<KvView> Get() override {
    Result<KvView> view = ForwardingCache::Get();
    TraceOp op;
    op.kind = TraceOpKind::kGet;
    op.layer = layer_;
    if (view.ok() && view->mask.data != nullptr) {
      op.first_cell = view->first_cell;
      op.key = CopyOf(view->key, view->key.dtype);
      op.value = CopyOf(view->value, view->value.dtype);
      op.mask = CopyOf(view->mask, view->mask.dtype);
    }
    (void)Log(op, view.status());
    return view;
  }
  Status CopyPrefix(int src, int dst, std::int32_t len) override {
    TraceOp op;
    op.kind = TraceOpKind::kCopyPrefix;
    op.src = src;
    op.dst = dst;
    op.len = len;
    try {
      return Log(op, ForwardingCache::CopyPrefix(src, dst, len));
    } catch (...) {
      (void)Log(op, {StatusCode::kFailedPrecondition, "it threw"});
      throw;
    }
  }
  Result<bool> CanResume(int seq, std::int32_t pos) override {
    TraceOp op;
    op.kind = TraceOpKind::kCanResume;
    op.seq = seq;
    op.pos = pos;
    Result<bool> answer = ForwardingCache::CanResume(seq, pos);
    op.answer = answer.ok() && *answer;
    (void)Log(op, answer.status());
    return answer;
  }
  Status Remove(int seq, std::int32_t begin, std::int32_t end) override {
    TraceOp op;
    op.kind = TraceOpKind::kRemove;
    op.seq = seq;
    op.begin = begin;
    op.end = end;
    return Log(op, ForwardingCache::Remove(seq, begin, end));
  }

 private:
  Status Log(TraceOp op, Status status) {
    if (!begun_ || closed_) return status;
    op.result = status.code();
    log_.push_back({std::move(op), !status.ok(), HeldCells(*cache_)});
    return status;
  }

  std::vector<JudgedCall>& log_;
  bool begun_ = false;
  bool closed_ = false;
  int layer_ = 0;
};

}  // namespace

json PageData(const std::string& page) {
  constexpr std::string_view kBegin =
      R"(<script type="application/json" id="failure">)";
  const std::size_t begin = page.find(kBegin) + kBegin.size();
  return json::parse(page.substr(begin, page.find("</script>", begin) - begin));
}

PageVerdict JudgePage(const json& page, const JudgedCalls& calls) {
  return Judge(page, calls).Run();
}

std::optional<JudgedHistory> RunJudged(const History& history,
                                       Subject subject) {
  std::vector<JudgedCall> log;
  const auto logged = [&log](Result<std::unique_ptr<Cache>> cache)
      -> Result<std::unique_ptr<Cache>> {
    if (!cache.ok()) return cache;
    return std::unique_ptr<Cache>(
        std::make_unique<LoggingCache>(std::move(*cache), log));
  };
  if (subject.make_of) {
    subject.make_of = [logged, make = subject.make_of](const Setup& setup) {
      return logged(make(setup));
    };
  } else {
    subject.make = [logged, make = subject.make](const CacheSpec& spec) {
      return logged(make(spec));
    };
  }
  const auto failure = RunHistory(history, subject).failure;
  if (!failure) return std::nullopt;
  JudgedHistory judged;
  judged.failure = Explain(history, *failure, subject, /*drawn=*/true, "");
  judged.calls = {.source = subject.level == Level::kIdentity
                                ? JudgedCalls::Source::kIdentity
                                : JudgedCalls::Source::kLedger,
                  .spec = history.setup.spec,
                  .config = history.setup.config,
                  .init = history.setup.init,
                  .rules = subject.rules,
                  .strict = subject.mask_rows_too,
                  .calls = std::move(log)};
  return judged;
}

}  // namespace kvtwin::props
