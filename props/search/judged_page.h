// Runs a history that fails, and judges the page that is made of it.

#ifndef KVTWIN_PROPS_SEARCH_JUDGED_PAGE_H_
#define KVTWIN_PROPS_SEARCH_JUDGED_PAGE_H_

#include <optional>

#include "props/compare/failure.h"
#include "props/compare/runner.h"
#include "props/history/history.h"
#include "props/page_judge/page_judge.h"
#include "props/page_judge/pool_page_judge.h"
#include "props/paged/paged_driver.h"
#include "props/paged/paged_history.h"

namespace kvtwin::props {

struct JudgedHistory {
  Failure failure;  // Explained and drawn.
  JudgedCalls calls;
};

// Runs the history, and writes down the calls. Returns nothing if the history
// does not fail.
std::optional<JudgedHistory> RunJudged(const History& history, Subject subject);

struct JudgedPagedHistory {
  Failure failure;  // Explained.
  JudgedPool pool;
};

// The same for a history of a pool; `make` makes the pool under test where it
// is asked for "optimized".
std::optional<JudgedPagedHistory> RunJudged(const PagedHistory& history,
                                            const PagedMaker& make);

// Returns what the judge says of the history's page. Returns nothing if the
// history does not fail.
std::optional<PageVerdict> JudgePageOf(const History& history,
                                       const Subject& subject);
std::optional<PageVerdict> JudgePageOf(const PagedHistory& history,
                                       const PagedMaker& make);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_SEARCH_JUDGED_PAGE_H_
