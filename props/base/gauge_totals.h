// Sums of the gauges of several sessions.

#ifndef KVTWIN_PROPS_BASE_GAUGE_TOTALS_H_
#define KVTWIN_PROPS_BASE_GAUGE_TOTALS_H_

#include "kvtwin/sessions.h"

namespace kvtwin::props {

// Adds the gauges that are totals.
inline void AddTotals(const SessionGauges& gauges, SessionGauges& sum) {
  sum.prompt_tokens += gauges.prompt_tokens;
  sum.hit_tokens += gauges.hit_tokens;
  sum.planned_tokens += gauges.planned_tokens;
  sum.batches += gauges.batches;
  sum.forks += gauges.forks;
  sum.evicted_tokens += gauges.evicted_tokens;
  sum.shifts += gauges.shifts;
  sum.reprocessed += gauges.reprocessed;
  sum.missed += gauges.missed;
  sum.refusals += gauges.refusals;
}

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_GAUGE_TOTALS_H_
