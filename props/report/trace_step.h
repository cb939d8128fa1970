// The steps of a recording: its calls, for drawing.

#ifndef KVTWIN_PROPS_REPORT_TRACE_STEP_H_
#define KVTWIN_PROPS_REPORT_TRACE_STEP_H_

#include <vector>

#include "core/trace/trace.h"
#include "props/compare/step.h"
#include "props/oracle/oracle.h"

namespace kvtwin::props {

// Returns the tokens that the oracle holds, by cell; without a twin, the tokens
// of its ledger.
std::vector<Held> HeldTokens(const Oracle& oracle);

// Returns the call alone, without cells, view and mask.
Step StepOf(const TraceOp& op);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_REPORT_TRACE_STEP_H_
