// Tokens and rows as pages name them, for the judge of pages.

#ifndef KVTWIN_PROPS_PAGE_JUDGE_PAGE_TOKEN_H_
#define KVTWIN_PROPS_PAGE_JUDGE_PAGE_TOKEN_H_

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "props/compare/step.h"

namespace kvtwin::props {

// A token as a page names it.
struct PageToken {
  std::int64_t position = 0;
  std::set<int> sequences;
  auto operator<=>(const PageToken&) const = default;
};

PageToken PageTokenOf(const reference::LedgerToken& token);
PageToken PageTokenOf(const Held& held);
PageToken PageTokenOf(const nlohmann::json& token);
// Returns the token that "position 4 of sequence 0 and 1" names.
std::optional<PageToken> PageTokenIn(const std::string& text);

// The K row and the V row of a column or of a token, as bytes.
struct RowPair {
  std::string key;
  std::string value;
  auto operator<=>(const RowPair&) const = default;
};

// Returns the rows of the token in a layer. Requires: it has some.
RowPair RowPairOf(const reference::LedgerToken& token, int layer);
// Returns the elements of a row, dense.
std::string BytesText(const TensorView& row);

// Returns the tokens that a step of a page draws as expected in cells.
std::map<std::int64_t, PageToken> ExpectedInCells(const nlohmann::json& step);
// Whether the step draws expected tokens in cells.
bool HasCells(const nlohmann::json& step);

// The labels of a page that were compared, and those that are false.
struct PageVerdict {
  std::vector<std::string> lies;  // Each label that the ledger contradicts.
  std::int64_t labels = 0;        // The labels that were compared.
};

// Counts the labels of one page.
class PageLabels {
 public:
  void Expect(bool holds, const std::string& what) {
    ++verdict_.labels;
    if (!holds) verdict_.lies.push_back(place_ + what);
  }
  // The place of the labels that come next: "step 3 Get(layer 0): ".
  void SetPlace(std::string place) { place_ = std::move(place); }
  PageVerdict& verdict() { return verdict_; }

 private:
  PageVerdict verdict_;
  std::string place_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGE_JUDGE_PAGE_TOKEN_H_
