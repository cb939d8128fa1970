// The rules of docs/semantics.md that a failure breaks, so that a report can
// cite them.

#ifndef KVTWIN_PROPS_COMPARE_CITED_RULES_H_
#define KVTWIN_PROPS_COMPARE_CITED_RULES_H_

#include <optional>
#include <string>
#include <string_view>

#include "core/trace/paged_trace.h"
#include "core/trace/trace.h"
#include "kvtwin/paged.h"
#include "props/compare/runner.h"
#include "props/history/history.h"

namespace kvtwin::props {

// Returns the rules that `check` (props/base/check_name.h) tests, such as "S31,
// S32, S33". For a check of an answer, these are the rules of the operation.
// Empty if the failure breaks no rule: a backend that crashes. `states`: the
// history has recurrent state.
std::string_view CitedRules(std::string_view check, OpKind operation,
                            bool states = false);
// Returns the rules that the failure of this history breaks. Rules of drafts
// and of shifts are left out of a history without them. The rules by which
// tokens leave, and those of reserving passes, are added where they can be the
// cause. The trace of the failure, if it has one, says what a legal client
// removed by itself.
std::string CitedRules(const Failure& difference, const History& history);

// Returns the rules for the answer of a call in a recording. With `of_row`, the
// failure is about what one row of the mask sees, or about the rows in a cell.
std::string_view CitedRules(TraceOpKind call, bool of_row);

// The spec, layout and earlier calls on which views and answers depend.
struct RowPast {
  bool states = false;      // There is recurrent state.
  bool several = false;     // It is beside other caches.
  bool windows = false;     // There is a window.
  bool rearranges = false;  // V is permuted or tiled.
  bool moves = false;       // Tokens have moved to other positions.
  bool copies = false;      // Prefixes were copied.
  bool commits = false;     // Drafts were committed.
  bool pins = false;        // States were pinned.
  bool removes = false;     // Tokens were removed.
  bool reloads = false;     // The cache was restored from a snapshot.
  bool visibility = false;  // Only visibility is compared.

  // Returns the past of a cache without calls.
  static RowPast Of(const CacheSpec& spec, const CacheConfig& config);
  // Adds a call of a recording.
  void Add(const TraceOp& op);
};
// Returns the rules for the failure `finding` of a call in a recording.
std::string CitedRules(const TraceOp& op, const Failure& finding,
                       const RowPast& past);

// Returns the rules of a call to a pool, by the call's name: "open".
std::string_view CitedPoolRules(std::string_view call);
// The same, without the rules of windows, states and groups for a pool without
// these. `window`: the pool has a window by its own rules. For `views`,
// rules of `last_change` are added, which is the last call before them that may
// have changed the pool: those of its effects that views show.
std::string CitedPoolRules(std::string_view call, const PagedSpec& spec,
                           bool window = false,
                           std::optional<PagedTraceOpKind> last_change = {});

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_COMPARE_CITED_RULES_H_
