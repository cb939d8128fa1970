// Compares what attention makes of a view with what it makes of the ledger's
// tokens: the level `numeric` (S54).

#ifndef KVTWIN_PROPS_ATTENTION_NUMERIC_VIEW_H_
#define KVTWIN_PROPS_ATTENTION_NUMERIC_VIEW_H_

#include <optional>

#include "kvtwin/cache.h"
#include "kvtwin/tensor.h"
#include "props/attention/attention_question.h"

namespace kvtwin::props {

// Returns the first row of a pass whose output over the actual view differs
// from that over the expected view by more than `tolerance`, which is an
// absolute difference. Of a recurrent cache, K of the state that a row sees is
// compared as well: it has no weight in an output over one state. `expected`
// has the ledger's tokens, and plain V.
std::optional<WrongOutput> FindWrongNumbers(const AttentionQuestion::Pass& pass,
                                            const KvView& expected,
                                            const KvView& actual,
                                            VLayout v_layout, double tolerance);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ATTENTION_NUMERIC_VIEW_H_
