// A judge of pages: it compares each label of a page with a ledger that is
// driven through the same calls.

#ifndef KVTWIN_PROPS_PAGE_JUDGE_PAGE_JUDGE_H_
#define KVTWIN_PROPS_PAGE_JUDGE_PAGE_JUDGE_H_

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/dialects/rules.h"
#include "core/trace/trace.h"
#include "kvtwin/cache.h"
#include "props/compare/step.h"
#include "props/page_judge/page_token.h"

namespace kvtwin::props {

// A call to the cache of the page, with its answer.
struct JudgedCall {
  TraceOp op;
  bool refused = false;  // CanResume, Get: the answer is `op.result`.
  // The tokens in the cells after the call, by the cache that is active; not
  // known for recordings.
  std::vector<Held> cells = {};
  // The state after an AddSequence, which pages do not show; `op` is then
  // unused.
  std::optional<CacheState> state = {};
};

struct JudgedCalls {
  enum class Source {
    kRecording,  // The page is of a recording.
    kIdentity,   // The page is of a history, against the reference twin.
    kLedger,     // The page is of a history, against the ledger alone.
  };
  Source source = Source::kRecording;
  CacheSpec spec;
  CacheConfig config;
  InitArgs init;
  bool visibility_only = false;  // A recording with placement "other".
  bool numeric = false;  // Masks are compared by what attention makes of them.
  Rules rules = {};
  bool strict = false;  // Subject::mask_rows_too.
  std::vector<JudgedCall> calls;
};

// Returns the data that a page draws.
nlohmann::json PageData(const std::string& page);

PageVerdict JudgePage(const nlohmann::json& page, const JudgedCalls& calls);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_PAGE_JUDGE_PAGE_JUDGE_H_
