// Finds the fault that explains a wrong output of attention.

#ifndef KVTWIN_PROPS_ATTENTION_EXPLANATION_H_
#define KVTWIN_PROPS_ATTENTION_EXPLANATION_H_

#include <Eigen/Core>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "props/attention/attention_question.h"
#include "props/attention/fault_search.h"

namespace kvtwin::props {

// Returns the faults of one token that a row may have: a token that is missing,
// that is hidden but seen, that is there twice, that has K, V or both of
// another token, or that has K for another position. Of each kind, there are at
// most `most`.
std::vector<TokenFault> FaultsOfOneToken(const AttentionQuestion& question,
                                         std::int64_t row, std::size_t most);

// Returns "as if position 4 were missing" for the faults whose outputs are
// within the bound, the nearest ones first, or for the nearest fault; or that
// no fault, or no fault that was tried, is near. `allowed` are the largest
// differences of a right output.
std::string ExplainOutput(const AttentionQuestion& question, std::int64_t row,
                          const Eigen::MatrixXd& actual,
                          const Eigen::MatrixXd& allowed);

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ATTENTION_EXPLANATION_H_
