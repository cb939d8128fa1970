// A judge of the pages of pools: it compares each label of a page with the
// recording of the calls, as the pool under test answered them.

#ifndef KVTWIN_PROPS_PAGE_JUDGE_POOL_PAGE_JUDGE_H_
#define KVTWIN_PROPS_PAGE_JUDGE_POOL_PAGE_JUDGE_H_

#include <nlohmann/json.hpp>
#include <string>

#include "props/page_judge/page_token.h"

namespace kvtwin::props {

struct JudgedPool {
  std::string recording;  // Its last line, or a line soon after, is wrong.
  // The page is of a history: its steps count the calls, and its last step has
  // no answer, because the pool may not have returned any.
  bool is_history = false;
};

PageVerdict JudgePoolPage(const nlohmann::json& page, const JudgedPool& pool);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGE_JUDGE_POOL_PAGE_JUDGE_H_
