#include "props/page_judge/page_judge_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "core/index.h"
#include "core/mask_elements.h"

namespace kvtwin::props {
namespace {

using nlohmann::json;
using reference::LedgerToken;

// A token that a row must see.
struct ExpectedSight {
  PageToken token;
  std::optional<RowPair> rows;  // Nothing was put in the layer: none.
  bool may_miss = false;
};

std::vector<RowPair> ColumnsOf(const JudgedView& view) {
  std::vector<RowPair> columns;
  for (std::int64_t i = 0; i < view.op.mask->shape[0]; ++i) {
    RowPair& column = columns.emplace_back();
    column.key = BytesText(Slice(view.op.key.view(), 2, i));
    if (!view.op.value) continue;
    column.value = BytesText(RowOf(view.op.value->view(), view.v_layout, i));
  }
  return columns;
}

// Returns the rows of a token, without V if the call has none.
RowPair ShownRows(const JudgedView& view, const LedgerToken& token) {
  RowPair rows = RowPairOf(token, view.op.layer);
  if (!view.op.value) rows.value.clear();
  return rows;
}

// Returns the cells that a row of the step sees with wrong rows.
std::set<std::int64_t> TornCells(const json& step, std::int64_t first_cell) {
  std::set<std::int64_t> torn;
  const auto from = step["mask"]["from"].get<std::int64_t>();
  for (const json& row : step["mask"]["rows"]) {
    const std::string sights = row["sights"];
    for (std::size_t i = 0; i < sights.size(); ++i) {
      if (sights[i] != 'x') continue;
      torn.insert(first_cell + from + static_cast<std::int64_t>(i));
    }
  }
  return torn;
}

// Judges the token that the page names for a column.
class ColumnJudge {
 public:
  ColumnJudge(const json& step, const JudgedView& view, PageLabels& labels)
      : view_(view),
        labels_(labels),
        columns_(ColumnsOf(view)),
        first_(view.op.first_cell.value_or(0)),
        torn_(TornCells(step, first_)),
        held_(ExpectedInCells(step)) {}

  const std::vector<RowPair>& columns() const { return columns_; }

  void Judge(const json& found) const {
    const std::int64_t cell = found["cell"];
    const std::int64_t column = cell - first_;
    const bool is_column = column >= 0 && column < std::ssize(columns_);
    labels_.Expect(is_column, "no such column " + found.dump());
    if (!is_column) return;
    const RowPair& rows = At(columns_, column);
    const Matches matches = MatchesOf(found, rows);
    JudgeName(found, rows, matches);
    const bool differs =
        torn_.contains(cell) || (held_.contains(cell) && !matches.right);
    labels_.Expect(found.value("differs", false) == differs,
                   "differs: " + found.dump());
  }

 private:
  // How the rows of a column match the tokens of the ledger.
  struct Matches {
    bool part = false;   // A token has the K row or the V row,
    bool whole = false;  // or both.
    bool as_named = false;
    bool right = false;  // The cell's expected token has both.
  };

  Matches MatchesOf(const json& found, const RowPair& rows) const {
    const PageToken name = PageTokenOf(found);
    const auto expected = held_.find(found["cell"].get<std::int64_t>());
    Matches matches;
    for (const LedgerToken& token : view_.ledger.tokens()) {
      const bool put = token.rows.contains(view_.op.layer);
      const RowPair own = put ? ShownRows(view_, token) : rows;
      const bool key = own.key == rows.key;
      const bool value = own.value == rows.value;
      const PageToken token_name = PageTokenOf(token);
      if (put && (key || (view_.op.value && value))) matches.part = true;
      if (put && key && value) matches.whole = true;
      if (token_name == name && key == found.value("key", true) &&
          (value == found.value("value", true) || !view_.op.value)) {
        matches.as_named = true;
      }
      if (expected != held_.end() && expected->second == token_name && key &&
          value) {
        matches.right = true;
      }
    }
    return matches;
  }

  void JudgeName(const json& found, const RowPair& rows,
                 const Matches& matches) const {
    const PageToken name = PageTokenOf(found);
    if (name.sequences.empty()) {
      labels_.Expect(!matches.part, "it is a token's row: " + found.dump());
      return;
    }
    if (!found.value("gone", false)) {
      labels_.Expect(matches.as_named,
                     "the rows are not as named: " + found.dump());
      return;
    }
    labels_.Expect(!matches.whole, "the token is not gone: " + found.dump());
    const bool had = std::ranges::any_of(view_.had, [&](const auto& past) {
      return past.first == name && past.second.key == rows.key &&
             (!view_.op.value || past.second.value == rows.value);
    });
    labels_.Expect(had, "there was no such token: " + found.dump());
  }

  const JudgedView& view_;
  PageLabels& labels_;
  std::vector<RowPair> columns_;
  std::int64_t first_;
  std::set<std::int64_t> torn_;
  std::map<std::int64_t, PageToken> held_;
};

// Judges a row of the mask.
class RowJudge {
 public:
  RowJudge(const json& step, const JudgedView& view,
           const std::vector<RowPair>& columns, const json& row,
           PageLabels& labels)
      : view_(view),
        columns_(columns),
        row_(row),
        labels_(labels),
        mask_(view.op.mask->view()),
        number_(row["row"]),
        sights_(row["sights"]),
        first_cell_(view.op.first_cell.value_or(0)),
        from_(step["mask"]["from"]),
        fresh_(view.fresh && number_ < view.ledger.rows()),
        by_cell_(HasCells(step)),
        held_(ExpectedInCells(step)),
        text_(fmt::format("row {} {}: ", number_, sights_)) {
    for (const json& one : step["found"]) {
      actual_[one["cell"]] = PageTokenOf(one);
    }
    if (fresh_) expected_ = left_ = ExpectedSights();
  }

  void Judge() {
    JudgeToken();
    // Sights that need a token of their own come first, then those that may
    // have any.
    for (const char sight : std::string_view("#?x-+.")) {
      for (std::size_t c = 0; c < sights_.size(); ++c) {
        if (sights_[c] != sight) continue;
        JudgeSight(from_ + static_cast<std::int64_t>(c), sight);
      }
    }
    TakeColumnsNotDrawn();
    for (const json& one : row_.value("missing", json::array())) {
      JudgeMissing(one);
    }
    if (fresh_) JudgeRest();
  }

 private:
  using Fits = std::function<bool(const ExpectedSight&)>;

  std::vector<ExpectedSight> ExpectedSights() const {
    std::vector<ExpectedSight> expected;
    for (const LedgerToken& token : view_.ledger.tokens()) {
      if (!view_.ledger.MaySee(number_, token)) continue;
      ExpectedSight one{
          PageTokenOf(token), {}, view_.ledger.MayMiss(number_, token)};
      if (token.rows.contains(view_.op.layer)) {
        one.rows = ShownRows(view_, token);
      }
      expected.push_back(std::move(one));
    }
    return expected;
  }

  const RowPair& RowsAt(std::int64_t column) const {
    return At(columns_, column);
  }

  void JudgeToken() {
    const auto i = AsSize(number_);
    const bool has_token = i < view_.positions.size();
    labels_.Expect(row_.contains("token") == has_token,
                   "whether the row is padding");
    if (!has_token || !row_.contains("token")) return;
    labels_.Expect(PageTokenOf(row_["token"]) ==
                       PageToken{view_.positions[i], {view_.sequences[i]}},
                   "the token of the row");
  }

  // Takes an expected token that fits; one that must be seen, if there is one.
  bool Take(const Fits& fits) {
    auto at = std::ranges::find_if(left_, [&](const ExpectedSight& one) {
      return !one.may_miss && fits(one);
    });
    if (at == left_.end()) at = std::ranges::find_if(left_, fits);
    if (at == left_.end()) return false;
    left_.erase(at);
    return true;
  }

  void JudgeSight(std::int64_t column, char sight) {
    const MaskElement element = MaskElementAt(mask_, column, number_);
    const bool seen = element == MaskElement::kAllows;
    const bool neither = element == MaskElement::kNeither;
    const std::string at =
        text_ + fmt::format("column {} is not {}", column, sight);
    labels_.Expect(neither == (sight == '?'), at);
    if (!neither) labels_.Expect(seen == (sight != '.' && sight != '-'), at);
    const bool padding = number_ >= view_.ledger.rows() && view_.fresh;
    if (padding) labels_.Expect(!seen || sight == '+', at);
    if (!fresh_) {  // The ledger does not know which tokens the row must see.
      const bool known = view_.has_twin || (padding && sight == '+');
      labels_.Expect(known || sight == '#' || sight == '.' || sight == '?', at);
      return;
    }
    if (sight == '?') {
      (void)TakeSight(column, sight);  // It may be a column that it must see.
    } else if (sight != '.' && sight != '+') {
      labels_.Expect(TakeSight(column, sight), at);
    }
  }

  // Takes an expected token that the column can have for such a sight.
  bool TakeSight(std::int64_t column, char sight) {
    const RowPair& rows = RowsAt(column);
    const std::int64_t cell = first_cell_ + column;
    const Fits here = [&](const ExpectedSight& one) {
      const auto at = held_.find(cell);
      return !by_cell_ || (at != held_.end() && at->second == one.token);
    };
    const Fits same = [&](const ExpectedSight& one) {
      return one.rows && *one.rows == rows;
    };
    const Fits unknown = [](const ExpectedSight& one) { return !one.rows; };
    const auto both = [](const Fits& a, const Fits& b) -> Fits {
      return [&a, &b](const ExpectedSight& one) { return a(one) && b(one); };
    };
    if (sight == '#') {
      return Take(both(here, same)) || Take(same) ||
             Take(both(here, unknown)) || Take(unknown);
    }
    if (sight != 'x') return Take(by_cell_ ? here : same);
    return Take([&](const ExpectedSight& one) {
      if (by_cell_) return here(one) && !same(one);
      return IsPart(one, column) && !same(one) && actual_[cell] == one.token;
    });
  }

  // Whether K or V of the column is the token's. (The recording may lack V.)
  bool IsPart(const ExpectedSight& one, std::int64_t column) const {
    const RowPair& rows = RowsAt(column);
    return one.rows && (one.rows->key == rows.key ||
                        (view_.op.value && one.rows->value == rows.value));
  }

  // Takes the tokens that the row sees in columns that are not drawn. If K or V
  // there is wrong, no label can say it.
  void TakeColumnsNotDrawn() {
    const auto take = [&](const auto& fits) {
      for (std::int64_t column = 0; column < mask_.shape[0]; ++column) {
        if (column >= from_ && column < from_ + std::ssize(sights_)) continue;
        if (!fresh_ || !MaskAllows(mask_, column, number_)) continue;
        (void)Take([&](const ExpectedSight& one) { return fits(one, column); });
      }
    };
    take([&](const ExpectedSight& one, std::int64_t column) {
      return one.rows && *one.rows == RowsAt(column);
    });
    take([&](const ExpectedSight& one, std::int64_t column) {
      return IsPart(one, column);
    });
  }

  // Whether more columns have these rows than other expected tokens need.
  bool HasSpareColumn(const RowPair& rows) const {
    const auto others = std::ranges::count_if(expected_,
                                              [&](const ExpectedSight& one) {
                                                return one.rows == rows;
                                              }) -
                        1;
    return std::ranges::count(columns_, rows) > others;
  }

  void JudgeMissing(const json& missing) {
    const PageToken token = PageTokenOf(missing);
    labels_.Expect(
        Take([&](const ExpectedSight& one) { return one.token == token; }),
        text_ + "is not missing: " + missing.dump());
    if (!missing.contains("cell")) {
      const bool there =
          std::ranges::any_of(expected_, [&](const ExpectedSight& one) {
            return one.token == token && one.rows && HasSpareColumn(*one.rows);
          });
      labels_.Expect(!there, text_ + "is in a cell: " + missing.dump());
      return;
    }
    const std::int64_t column =
        missing["cell"].get<std::int64_t>() - first_cell_;
    labels_.Expect(column >= 0 && column < mask_.shape[0] &&
                       !MaskAllows(mask_, column, number_),
                   text_ + "is not hidden: " + missing.dump());
  }

  // Each expected token must be marked, and each '+' be a token too many.
  void JudgeRest() {
    for (const ExpectedSight& one : left_) {
      labels_.Expect(
          one.may_miss,
          text_ + fmt::format("position {} is not marked", one.token.position));
    }
    for (std::size_t c = 0; c < sights_.size(); ++c) {
      if (sights_[c] != '+') continue;
      const std::int64_t column = from_ + static_cast<std::int64_t>(c);
      const bool could =
          std::ranges::any_of(left_, [&](const ExpectedSight& one) {
            return one.rows && *one.rows == RowsAt(column);
          });
      labels_.Expect(!could, text_ + fmt::format("column {} is right", column));
    }
  }

  const JudgedView& view_;
  const std::vector<RowPair>& columns_;
  const json& row_;
  PageLabels& labels_;
  TensorView mask_;
  int number_;
  std::string sights_;
  std::int64_t first_cell_;
  std::int64_t from_;
  bool fresh_;
  bool by_cell_;  // Expected tokens are in cells.
  std::map<std::int64_t, PageToken> held_;
  std::map<std::int64_t, PageToken> actual_;
  std::string text_;
  std::vector<ExpectedSight> expected_;
  std::vector<ExpectedSight>
      left_;  // The sights that no label has named so far.
};

}  // namespace

void JudgePageView(const json& step, const JudgedView& view,
                   PageLabels& labels) {
  const json& mask = step["mask"];
  const Shape& seen = view.op.mask->shape;
  labels.Expect(mask["first_cell"] == view.op.first_cell.value_or(0),
                "the first cell");
  labels.Expect(mask["columns"] == seen[0], "the number of columns");
  const ColumnJudge columns(step, view, labels);
  for (const json& found : step["found"]) columns.Judge(found);
  labels.Expect(
      std::ssize(mask["rows"]) + step["rows_left_out"].get<int>() == seen[1],
      "the number of mask rows");
  for (const json& row : mask["rows"]) {
    RowJudge(step, view, columns.columns(), row, labels).Judge();
  }
}

}  // namespace kvtwin::props
