// Tries faults that an attention may have, and keeps those whose outputs are
// nearest to a wrong output.

#ifndef KVTWIN_PROPS_ATTENTION_FAULT_SEARCH_H_
#define KVTWIN_PROPS_ATTENTION_FAULT_SEARCH_H_

#include <Eigen/Core>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/index.h"
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

// Sums over terms, from which an output follows.
struct Sums {
  Eigen::MatrixXd values;   // [v_head_dim, heads], with their weights.
  Eigen::VectorXd weights;  // [heads]
};

class FaultSearch {
 public:
  // `allowed` are the largest differences of a right output. All arguments live
  // as long as the search. `all`: all faults of one token are going to be
  // tried.
  FaultSearch(const AttentionQuestion& question, std::int64_t row,
              const Eigen::MatrixXd& actual, const Eigen::MatrixXd& allowed,
              bool all);

  const AttentionQuestion& question() const { return question_; }
  const std::vector<Term>& sees() const { return sees_; }
  std::int64_t row() const { return row_; }
  const Eigen::MatrixXd& queries() const { return queries_; }
  const Eigen::MatrixXd& right() const { return right_; }
  std::int64_t heads() const { return actual_.cols(); }
  std::int64_t PositionOf(const Term& term) const {
    return At(question_.tokens(), term.key).position;
  }

  // Each returns whether the output is near to the actual output.
  bool Try(std::string_view text, const Eigen::MatrixXd& output,
           bool of_token = false, bool may_be_nearest = true);
  bool Try(std::string_view text, std::span<const Term> terms) {
    return Try(text, OutputOf(SumsOf(terms)));
  }
  // A pair is not named as nearest if there are pairs that are not tried.
  void Try(const TokenFault& fault);
  // Tries whether each head has an output of other(1) to other(count - 1), or
  // is right; `text` names the first head that is not right.
  void TryHeads(int count, const std::function<Eigen::MatrixXd(int)>& other,
                const std::function<std::string(std::int64_t, int)>& text);

  // Adds a term to the sums, or subtracts it.
  void Add(const Term& term, double sign, Sums& sums) const;
  // Adds a number of terms with rows of zeros.
  void AddZeros(std::size_t count, Sums& sums) const {
    sums.weights +=
        static_cast<double>(count) * (-largest_).array().exp().matrix();
  }
  Sums SumsOf(std::span<const Term> terms) const;
  // Returns the sums with a fault; nothing if these take too many
  // multiplications.
  std::optional<Sums> SumsWith(const TokenFault& fault);
  // Returns the sums with the sink of head (h + turn) % heads for each head h.
  Sums SumsWithSinks(int turn) const;
  static Eigen::MatrixXd OutputOf(const Sums& sums);

  // Returns "as if position 4 were missing" for what is near, or nearest.
  std::string Text() const;

 private:
  // The output of a cache with a fault is rounded, too, so that it may differ
  // from the expected output of the fault by another bound.
  static constexpr double kNear = 4;

  // Distances are compared in whole quarters.
  struct Named {
    std::int64_t quarters = 0;
    std::string text;
  };

  // Returns the distance of an output of a fault from another output in units
  // of what is allowed. Infinity for a NaN.
  double Distance(const Eigen::MatrixXd& output,
                  const Eigen::MatrixXd& other) const;
  double DistanceOfHead(std::int64_t head, const Eigen::VectorXd& output,
                        const Eigen::VectorXd& other) const;
  // Sets `sizes_`.
  void MeasureSizes();

  const AttentionQuestion& question_;
  const std::int64_t row_;
  const std::vector<Term>& sees_;
  const Eigen::MatrixXd queries_;
  const Eigen::MatrixXd& actual_;
  const Eigen::MatrixXd& allowed_;
  Eigen::MatrixXd scores_;     // [heads, tokens]
  Eigen::VectorXd largest_;    // The largest score of each head.
  Sums sums_;                  // Of the terms that the row sees.
  Eigen::MatrixXd right_;      // The right output.
  Eigen::VectorXd sizes_;      // The largest mean of magnitudes of V, by head.
  bool all_;                   // All faults of one token are tried.
  std::int64_t products_ = 0;  // Those of faults so far.
  // The faults within the bound: of one token, and of all of them.
  std::vector<Named> of_tokens_;
  std::vector<Named> of_all_;
  double nearest_ = std::numeric_limits<double>::infinity();
  std::string nearest_text_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ATTENTION_FAULT_SEARCH_H_
