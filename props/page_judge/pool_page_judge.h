// A judge of the pages of pools: it compares each label of a page with the
// calls, as the pool under test got and answered them.

#ifndef KVTWIN_PROPS_PAGE_JUDGE_POOL_PAGE_JUDGE_H_
#define KVTWIN_PROPS_PAGE_JUDGE_POOL_PAGE_JUDGE_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "props/page_judge/page_token.h"

namespace kvtwin::props {

// Either a recording or the calls of a history.
struct JudgedPool {
  std::string recording = {};  // Its last line, or a line soon after, is wrong.
  // The log of a LoggingPool, up to the call after which the history failed.
  std::vector<nlohmann::json> calls = {};
};

PageVerdict JudgePoolPage(const nlohmann::json& page, const JudgedPool& pool);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGE_JUDGE_POOL_PAGE_JUDGE_H_
