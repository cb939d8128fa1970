// Judges how a page draws a view: the tokens of its columns, and the rows of
// its mask.

#ifndef KVTWIN_PROPS_PAGE_JUDGE_PAGE_JUDGE_VIEW_H_
#define KVTWIN_PROPS_PAGE_JUDGE_PAGE_JUDGE_VIEW_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "core/trace/trace.h"
#include "props/page_judge/page_token.h"
#include "reference/dialects.h"

namespace kvtwin::props {

// A Get with its answer, and what is known of it without the page.
struct JudgedView {
  const TraceOp& op;  // Requires: it has a mask.
  const reference::CacheLedger& ledger;
  VLayout v_layout = VLayout::kPlain;
  bool fresh = false;     // The ledger can judge the mask.
  bool has_twin = false;  // A twin judges it, even if the ledger cannot.
  // The batch.
  const std::vector<std::int32_t>& positions;
  const std::vector<int>& sequences;
  // The rows that tokens have had so far.
  const std::set<std::pair<PageToken, RowPair>>& had;
};

// Compares each label of a step that draws the view.
void JudgePageView(const nlohmann::json& step, const JudgedView& view,
                   PageLabels& labels);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGE_JUDGE_PAGE_JUDGE_VIEW_H_
