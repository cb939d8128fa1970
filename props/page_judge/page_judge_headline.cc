#include "props/page_judge/page_judge_headline.h"

#include <cstdint>
#include <optional>
#include <regex>
#include <string>
#include <string_view>

#include "core/index.h"

namespace kvtwin::props {
namespace {

using nlohmann::json;

bool Has(std::string_view text, std::string_view part) {
  return text.find(part) != text.npos;
}

const json* CellIn(const json& step, const char* key, std::int64_t cell) {
  if (!step.contains(key)) return nullptr;
  for (const json& one : step[key]) {
    if (one.value("cell", std::int64_t{-1}) == cell) return &one;
  }
  return nullptr;
}

class HeadlineJudge {
 public:
  HeadlineJudge(const json& page, PageLabels& labels)
      : labels_(labels),
        step_(page["steps"].back()),
        headline_(page["headline"]),
        more_(page["more"]),
        wrong_row_(page["wrong"]["row"]),
        wrong_cell_(page["wrong"]["cell"]),
        attention_(page["check"] == "subject: attention"),
        backend_failed_(
            page["check"].get<std::string>().starts_with("backend: ")),
        actual_(CellIn(step_, "found", wrong_cell_)),
        expected_(CellIn(step_, "cells", wrong_cell_)) {
    FindRow();
  }

  void Judge() {
    JudgePlace();
    JudgeReader();
    JudgeCellNumber();
    JudgeSentence();
  }

 private:
  void Expect(bool holds, const std::string& what) {
    labels_.Expect(holds, what);
  }

  bool Says(std::string_view what) const { return Has(headline_, what); }

  // Finds the wrong row, and how it sees the wrong cell.
  void FindRow() {
    if (!step_.contains("mask")) return;
    for (const json& one : step_["mask"]["rows"]) {
      if (one["row"] != wrong_row_) continue;
      row_ = &one;
      const std::string sights = one["sights"];
      const std::int64_t at = wrong_cell_ -
                              step_["mask"]["first_cell"].get<std::int64_t>() -
                              step_["mask"]["from"].get<std::int64_t>();
      if (wrong_cell_ >= 0 && at >= 0 && at < std::ssize(sights)) {
        sight_ = At(sights, at);
      }
      row_is_wrong_ = sights.find_first_of("x+-?") != std::string::npos ||
                      one.contains("missing");
    }
  }

  bool CellDiffers() const {
    return actual_ != nullptr && actual_->value("differs", false);
  }

  void JudgePlace() {
    Expect(wrong_row_ < 0 || row_is_wrong_ || attention_,
           "the wrong row is right");
    Expect(wrong_cell_ < 0 || Has("x+-?", std::string_view(&sight_, 1)) ||
               CellDiffers() || Says("gave a wrong answer"),
           "the wrong cell is right");
  }

  void JudgeReader() {
    if (Says("The token at ")) {
      Expect(row_ != nullptr && row_->contains("token") &&
                 PageTokenIn(headline_) == PageTokenOf((*row_)["token"]),
             "the row's token: " + headline_);
    }
    if (Says("A padding row")) {
      Expect(row_ != nullptr && !row_->contains("token"), headline_);
    }
  }

  const json* FirstMissing() const {
    if (row_ == nullptr || !row_->contains("missing")) return nullptr;
    return &(*row_)["missing"][0];
  }

  void JudgeCellNumber() {
    std::smatch match;
    static const std::regex kCell(R"((cell|column) (\d+))");
    const bool in_full =
        Says("gave a wrong answer") || Says("reads the wrong tokens");
    if (in_full || !std::regex_search(more_, match, kCell)) return;
    const std::int64_t cell = std::stoll(match[2]);
    const bool has_cells =
        step_.value("cell_count", 0) > 0 ||
        (step_.contains("mask") && step_["mask"]["first_cell"] > 0);
    Expect(has_cells == (match[1] == "cell"), "cells: " + more_);
    const json* missing = FirstMissing();
    const bool elsewhere =
        missing != nullptr && missing->value("cell", -1) == cell;
    Expect(cell == wrong_cell_ || elsewhere, "the cell: " + more_);
  }

  // Whether the text names the rows that were found in the wrong cell.
  bool NamesFound(const std::string& text) const {
    if (actual_ == nullptr) return false;
    if (Has(text, "no token's row")) return (*actual_)["sequences"].empty();
    std::optional<PageToken> said = PageTokenIn(text);
    if (!said && expected_ != nullptr) {
      // "position 3", of the expected sequences.
      static const std::regex kShort(R"(position (\d+))");
      std::smatch match;
      if (!std::regex_search(text, match, kShort)) return false;
      said = PageToken{std::stoll(match[1]), PageTokenOf(*expected_).sequences};
    }
    const bool parts =
        actual_->value("key", true) == !Has(text, "the V row of") &&
        actual_->value("value", true) == !Has(text, "the K row of");
    return said == PageTokenOf(*actual_) && parts &&
           actual_->value("gone", false) == Has(text, "no longer holds");
  }

  void JudgeSentence() {
    if (Says("reads the wrong token.") || Says(" has the wrong token.")) {
      JudgeWrongToken();
    } else if (Says("reads a wrong row")) {
      Expect(sight_ == 'x' && NamesFound(more_), more_);
    } else if (Says("reads what it must not see") ||
               Says("reads a token more than once")) {
      Expect(sight_ == '+', headline_);
      JudgeHolds();
    } else if (Says("does not see what it must read")) {
      JudgeUnseen();
    } else if (Says("has a wrong element")) {
      Expect(sight_ == '?', headline_);
    } else if (Says("reads the wrong tokens")) {
      Expect(attention_, headline_);
    } else {
      const std::string call = step_["call"];
      const std::string name = call.substr(0, call.find_first_of("( :"));
      Expect(headline_ == (backend_failed_ ? "The backend failed."
                                           : name + " gave a wrong answer."),
             headline_);
      // Each wrong row that is drawn would be named.
      Expect(wrong_row_ < 0, headline_);
    }
  }

  void JudgeWrongToken() {
    Expect(CellDiffers(), headline_);
    Expect(Says(" has the wrong token.") || sight_ == 'x', headline_);
    const std::size_t what = more_.find("; what the cache returned there is ");
    Expect(what != more_.npos && expected_ != nullptr &&
               PageTokenIn(more_.substr(0, what)) == PageTokenOf(*expected_),
           "the expected token: " + more_);
    if (what != more_.npos) Expect(NamesFound(more_.substr(what)), more_);
  }

  void JudgeUnseen() {
    const bool in_no_cell = Has(more_, " of the view has the row of");
    if (!in_no_cell && sight_ == '-') return JudgeHolds();
    const json* missing = FirstMissing();
    Expect(missing != nullptr && PageTokenIn(more_) == PageTokenOf(*missing),
           more_);
    Expect(missing != nullptr && in_no_cell == !missing->contains("cell"),
           more_);
  }

  void JudgeHolds() {
    if (Has(more_, "which is free")) {
      Expect(expected_ == nullptr &&
                 (actual_ == nullptr || (*actual_)["sequences"].empty()),
             more_);
    } else if (Has(more_, "which holds")) {
      Expect(
          expected_ != nullptr && PageTokenIn(more_) == PageTokenOf(*expected_),
          more_);
    } else {
      Expect(NamesFound(more_), more_);
    }
  }

  PageLabels& labels_;
  const json& step_;  // The last.
  std::string headline_;
  std::string more_;
  int wrong_row_;
  std::int64_t wrong_cell_;
  bool attention_;       // The check compares what attention returns.
  bool backend_failed_;  // It crashed, or did not return.
  const json* actual_;   // The token in the wrong cell; null: none.
  const json* expected_;
  const json* row_ = nullptr;
  char sight_ = ' ';
  bool row_is_wrong_ = false;
};

}  // namespace

void JudgePageHeadline(const json& page, PageLabels& labels) {
  labels.SetPlace("headline: ");
  HeadlineJudge(page, labels).Judge();
}

}  // namespace kvtwin::props
