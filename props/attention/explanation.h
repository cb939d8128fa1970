// Finds the fault that explains a wrong output of attention.

#ifndef KVTWIN_PROPS_ATTENTION_EXPLANATION_H_
#define KVTWIN_PROPS_ATTENTION_EXPLANATION_H_

#include <Eigen/Core>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "props/attention/attention_question.h"

namespace kvtwin::props {

// A row sees a wrong token: a term that it should see is missing, another term
// is there, or takes its place.
struct TokenFault {
  std::string text;                         // "position 4 were missing"
  std::optional<std::size_t> without = {};  // The place of a missing term.
  std::optional<Term> with = {};
  bool of_pair = false;  // The token has rows of another.

  // Returns the terms that the row sees with the fault.
  std::vector<Term> Applied(std::vector<Term> sees) const;
};

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
