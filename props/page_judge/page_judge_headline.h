// Judges the sentences at the top of a page.

#ifndef KVTWIN_PROPS_PAGE_JUDGE_PAGE_JUDGE_HEADLINE_H_
#define KVTWIN_PROPS_PAGE_JUDGE_PAGE_JUDGE_HEADLINE_H_

#include <nlohmann/json.hpp>

#include "props/page_judge/page_token.h"

namespace kvtwin::props {

// The sentences say what the drawing of the last step, whose labels are judged
// already, shows at the wrong place.
void JudgePageHeadline(const nlohmann::json& page, PageLabels& labels);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGE_JUDGE_PAGE_JUDGE_HEADLINE_H_
