#include "props/attention/explanation.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>
#include <set>
#include <string_view>
#include <utility>

#include "core/index.h"

namespace kvtwin::props {
namespace {

// At most this number of faults of each kind is tried, and fewer of long rows,
// so that they take about this number of multiplications.
constexpr std::size_t kFaultsMost = 1'000;
constexpr std::int64_t kFaultProductsMost = std::int64_t{1} << 27;
// A token's K is tried for this number of positions before and after its own.
constexpr std::int32_t kMovedMost = 64;
// This number of faults is named if several make the same output.
constexpr std::size_t kNamedMost = 3;

std::string TokenText(const AttentionQuestion& question, std::int64_t row,
                      std::int64_t token) {
  const AskedToken& asked = At(question.tokens(), token);
  std::string text = fmt::format("position {}", asked.position);
  if (!asked.HeldBy(question.row(row).sequence)) {
    text += fmt::format(" of sequence {}", asked.sequence);
  }
  return asked.gone ? text + ", which is gone," : text;
}

std::vector<std::int64_t> HiddenFrom(const AttentionQuestion& question,
                                     std::int64_t row) {
  std::set<std::int64_t> seen;
  for (const Term& term : question.row(row).sees) seen.insert(term.key);
  std::vector<std::int64_t> hidden;
  for (std::int64_t i = 0; i < std::ssize(question.tokens()); ++i) {
    if (!seen.contains(i)) hidden.push_back(i);
  }
  return hidden;
}

std::size_t FaultsMost(const AttentionQuestion& question, std::int64_t row) {
  const RowDims& dims = question.dims();
  const std::int64_t products = std::ssize(question.row(row).sees) *
                                question.heads() *
                                (dims.k_head_dim + dims.v_head_dim);
  const std::int64_t most =
      kFaultProductsMost / std::max<std::int64_t>(products, 1);
  return AsSize(std::clamp<std::int64_t>(most, 16, kFaultsMost));
}

// Returns the number of pairs of a token that the row sees and any other.
std::size_t PairCount(const AttentionQuestion& question, std::int64_t row) {
  const std::size_t sees = question.row(row).sees.size();
  return sees * question.tokens().size() - sees;
}

// An index into what a row sees, and one of another token.
using Pairs = std::vector<std::pair<std::size_t, std::int64_t>>;

// Returns up to `most` of these pairs, in the order of tokens.
Pairs FirstPairs(const AttentionQuestion& question, std::int64_t row,
                 std::size_t most) {
  const std::vector<Term>& sees = question.row(row).sees;
  Pairs pairs;
  for (std::size_t i = 0; i < sees.size(); ++i) {
    for (std::int64_t other = 0; other < std::ssize(question.tokens());
         ++other) {
      if (pairs.size() == most) return pairs;
      if (other != sees[i].key) pairs.emplace_back(i, other);
    }
  }
  return pairs;
}

// Returns up to `most` of these pairs, those of neighbours first, from the last
// token on.
Pairs NearPairs(const AttentionQuestion& question, std::int64_t row,
                std::size_t most) {
  const std::vector<Term>& sees = question.row(row).sees;
  const std::int64_t tokens = std::ssize(question.tokens());
  Pairs pairs;
  for (std::int64_t distance = 1; distance < tokens; ++distance) {
    for (std::size_t i = sees.size(); i-- > 0;) {
      for (const std::int64_t other :
           {sees[i].key - distance, sees[i].key + distance}) {
        if (other < 0 || other >= tokens) continue;
        if (pairs.size() == most) return pairs;
        pairs.emplace_back(i, other);
      }
    }
  }
  return pairs;
}

// Adds the faults of a token that has rows of another.
void AddPairs(const AttentionQuestion& question, std::int64_t row,
              const Pairs& pairs, std::vector<TokenFault>& faults) {
  const std::vector<Term>& sees = question.row(row).sees;
  for (const auto& [i, other] : pairs) {
    const auto add = [&, i = i, other = other](std::string_view what,
                                               const Term& term) {
      std::vector<Term> terms = sees;
      terms[i] = term;
      faults.push_back(
          {fmt::format("{} had {} of {}", TokenText(question, row, sees[i].key),
                       what, TokenText(question, row, other)),
           std::move(terms), /*of_pair=*/true});
    };
    add("K and V", {other, other});
    add("V", {sees[i].key, other});
    add("K", {other, sees[i].value});
  }
}

// Adds the faults of a token whose K is for another position, from the nearest
// position on: a K row that was shifted twice, or not at all.
void AddMovedKeys(const AttentionQuestion& question, std::int64_t row,
                  std::size_t most, std::vector<TokenFault>& faults) {
  const ShiftKind kind = question.shift().kind;
  if (kind == ShiftKind::kNone || kind == ShiftKind::kIdentity ||
      kind == ShiftKind::kCustom) {
    return;
  }
  const std::vector<Term>& sees = question.row(row).sees;
  const std::size_t last = faults.size() + most;
  for (std::int32_t distance = 1; distance <= kMovedMost; ++distance) {
    for (const std::int32_t moved : {distance, -distance}) {
      for (std::size_t i = 0; i < sees.size(); ++i) {
        if (faults.size() == last) return;
        std::vector<Term> terms = sees;
        terms[i].moved = moved;
        faults.push_back(
            {fmt::format("K of {} were {} for position {}",
                         TokenText(question, row, sees[i].key),
                         kind == ShiftKind::kRope ? "rotated" : "shifted",
                         At(question.tokens(), sees[i].key).position + moved),
             std::move(terms)});
      }
    }
  }
}

// Tries faults, and keeps those that are nearest to the output.
class FaultSearch {
 public:
  FaultSearch(const AttentionQuestion& question, std::int64_t row,
              const Eigen::MatrixXd& actual, const Eigen::MatrixXd& allowed)
      : question_(question),
        row_(row),
        queries_(question.QueriesOf(row)),
        actual_(actual),
        allowed_(allowed),
        right_(question.OutputOf(queries_, question.row(row).sees)),
        all_pairs_(PairCount(question, row) <= FaultsMost(question, row)) {}

  void Try(const std::string& text, const Eigen::MatrixXd& output,
           bool of_token = false, bool may_be_nearest = true) {
    // A fault that hardly changes the output explains nothing.
    if (Distance(output, right_) < 0.5) return;
    const double distance = Distance(output, actual_);
    if (distance <= kNear) {
      std::vector<std::string>& within = of_token ? of_tokens_ : of_all_;
      const bool known = std::ranges::count(within, text) > 0;
      if (!known && within.size() < kNamedMost) within.push_back(text);
    } else if (may_be_nearest && distance < nearest_) {
      nearest_ = distance;
      nearest_text_ = text;
    }
  }
  void Try(const std::string& text, const std::vector<Term>& terms) {
    Try(text, question_.OutputOf(queries_, terms));
  }

  // A pair is not named as nearest if there are pairs that are not tried.
  void Try(const TokenFault& fault) {
    Try(fault.text, question_.OutputOf(queries_, fault.terms),
        /*of_token=*/true, !fault.of_pair || all_pairs_);
  }

  void TryWindows();
  void TryMasks();
  void TryOtherRows();
  void TryOthers();
  void TryOtherHeads();

  // Names a fault of each sort, if there are some: where much is allowed, many
  // faults of one token are within it by chance.
  std::string Text() const {
    std::vector<std::string> named = of_tokens_;
    const std::size_t room = of_all_.empty() ? kNamedMost : kNamedMost - 1;
    named.resize(std::min(named.size(), room));
    for (const std::string& text : of_all_) {
      if (named.size() < kNamedMost) named.push_back(text);
    }
    if (!named.empty()) {
      return fmt::format("as if {}", fmt::join(named, ", or "));
    }
    if (nearest_ < Distance(right_, actual_) / 8) {
      return fmt::format("as if {}, nearly", nearest_text_);
    }
    return all_pairs_ ? "no fault of one token explains it"
                      : "no fault of one token that was tried explains it";
  }

 private:
  // The output of a cache with a fault is rounded, too, so that it may differ
  // from the expected output of the fault by another bound.
  static constexpr double kNear = 4;

  // Returns the distance in units of what is allowed. Infinity for a NaN.
  double Distance(const Eigen::MatrixXd& output,
                  const Eigen::MatrixXd& other) const {
    const double distance = (output - other)
                                .cwiseAbs()
                                .cwiseQuotient(allowed_)
                                .maxCoeff<Eigen::PropagateNaN>();
    return std::isnan(distance) ? std::numeric_limits<double>::infinity()
                                : distance;
  }

  const AttentionQuestion& question_;
  const std::int64_t row_;
  const Eigen::MatrixXd queries_;
  const Eigen::MatrixXd& actual_;
  const Eigen::MatrixXd& allowed_;
  const Eigen::MatrixXd right_;  // The right output.
  const bool all_pairs_;         // All pairs of tokens are tried.
  // The faults within the bound: of one token, and of all of them.
  std::vector<std::string> of_tokens_;
  std::vector<std::string> of_all_;
  double nearest_ = std::numeric_limits<double>::infinity();
  std::string nearest_text_;
};

// Tries windows over the tokens of the row's sequence.
void FaultSearch::TryWindows() {
  const AttentionQuestion::Row& row = question_.row(row_);
  const auto position = [&](const Term& term) {
    return At(question_.tokens(), term.key).position;
  };
  std::vector<Term> own;  // From the last position on.
  for (std::int64_t i = 0; i < std::ssize(question_.tokens()); ++i) {
    const AskedToken& token = At(question_.tokens(), i);
    if (!token.HeldBy(row.sequence) || token.position > row.position) continue;
    own.push_back({i, i});
  }
  std::ranges::stable_sort(own, std::ranges::greater(), position);
  if (own.size() > FaultsMost(question_, row_)) return;
  for (std::size_t count = 1; count <= own.size(); ++count) {
    const std::int64_t window = row.position - position(own[count - 1]);
    if (count < own.size() && row.position - position(own[count]) == window) {
      continue;
    }
    const std::vector<Term> terms(own.begin(), IteratorAt(own, count));
    Try(fmt::format("the window were {}{}", window,
                    count == own.size() ? " or more" : ""),
        terms);
  }
}

// Tries masks that let rows see later tokens, or those of other sequences.
void FaultSearch::TryMasks() {
  const AttentionQuestion::Row& row = question_.row(row_);
  const auto all = [&](bool later, bool others) {
    std::vector<Term> terms;
    for (std::int64_t i = 0; i < std::ssize(question_.tokens()); ++i) {
      const AskedToken& token = At(question_.tokens(), i);
      if (token.gone || (!later && token.position > row.position) ||
          (!others && !token.HeldBy(row.sequence))) {
        continue;
      }
      terms.push_back({i, i});
    }
    return terms;
  };
  const std::vector<Term> own = all(false, false);
  const auto attempt = [&](const char* text, const std::vector<Term>& terms) {
    if (terms.size() > own.size()) Try(text, terms);
  };
  attempt("later positions were seen, too", all(true, false));
  attempt("all sequences were seen", all(false, true));
  attempt("all stored tokens were seen", all(true, true));
}

void FaultSearch::TryOtherRows() {
  const std::int64_t count = std::min<std::int64_t>(question_.rows(), 64);
  for (std::int64_t other = 0; other < count; ++other) {
    const AttentionQuestion::Row& row = question_.row(other);
    if (other == row_ || !row.judged) continue;
    Try(fmt::format("the mask were that of row {}", other), row.sees);
    Try(fmt::format("it were the output of row {}", other),
        question_.OutputOf(question_.QueriesOf(other), row.sees));
    Try(fmt::format("the query were that of row {}", other),
        question_.OutputOf(question_.QueriesOf(other),
                           question_.row(row_).sees));
  }
}

void FaultSearch::TryOthers() {
  const std::vector<Term>& sees = question_.row(row_).sees;
  std::vector<Term> shifted = sees;
  for (std::size_t i = 0; i < sees.size(); ++i) {
    shifted[i].value = sees[(i + 1) % sees.size()].value;
  }
  Try("each token had the V of the next token", shifted);
  Try("the scale were 1",
      question_.OutputOf(queries_ * std::sqrt(question_.dims().k_head_dim),
                         sees));
  const reference::Weighing weighing = question_.weighing();
  if (question_.dims().v_head_dim != question_.dims().k_head_dim) {
    reference::Weighing changed = weighing;
    changed.scale = 1 / std::sqrt(question_.dims().v_head_dim);
    Try("the scale were 1 / sqrt(v_head_dim)",
        question_.OutputOf(queries_, sees, changed));
  }
  reference::Weighing binary = weighing;
  binary.scale *= std::numbers::ln2;
  binary.soft_cap *= std::numbers::ln2;
  std::vector<float> sinks(weighing.sinks.begin(), weighing.sinks.end());
  for (float& sink : sinks) sink *= std::numbers::ln2_v<float>;
  binary.sinks = sinks;
  Try("the weights were powers of 2",
      question_.OutputOf(queries_, sees, binary));
  if (weighing.sinks.empty()) {
    const std::vector<float> zeros(AsSize(queries_.cols()), 0.0F);
    reference::Weighing changed = weighing;
    changed.sinks = zeros;
    Try("1 were added to the sum of the weights",
        question_.OutputOf(queries_, sees, changed));
  }
  if (weighing.soft_cap != 0) {
    reference::Weighing changed = weighing;
    changed.soft_cap = 0;
    Try("the soft cap were absent",
        question_.OutputOf(queries_, sees, changed));
  }
  if (!weighing.sinks.empty()) {
    reference::Weighing changed = weighing;
    changed.sinks = {};
    Try("the sinks were absent", question_.OutputOf(queries_, sees, changed));
  }
  Try("it were zeros", Eigen::MatrixXd::Zero(actual_.rows(), actual_.cols()));
  // Query head h reads KV head h modulo their number.
  const std::int64_t heads = queries_.cols();
  const std::int64_t kv_heads = question_.dims().kv_heads;
  const std::int64_t group = heads / kv_heads;
  Eigen::MatrixXd queries = queries_;
  for (std::int64_t h = 0; h < heads; ++h) {
    queries.col(h % kv_heads * group + h / kv_heads) = queries_.col(h);
  }
  const Eigen::MatrixXd outputs = question_.OutputOf(queries, sees);
  Eigen::MatrixXd output = outputs;
  for (std::int64_t h = 0; h < heads; ++h) {
    output.col(h) = outputs.col(h % kv_heads * group + h / kv_heads);
  }
  Try("head h read KV head h % kv_heads", output);
}

// Tries whether each head has the output of some head.
void FaultSearch::TryOtherHeads() {
  Eigen::MatrixXd output = right_;
  std::string first;
  for (std::int64_t h = 0; h < output.cols(); ++h) {
    const auto near = [&](std::int64_t other) {
      return ((right_.col(other) - actual_.col(h)).cwiseAbs().array() <=
              kNear * allowed_.col(h).array())
          .all();
    };
    std::int64_t found = h;
    for (std::int64_t other = 0; !near(found); ++other) {
      if (other == output.cols()) return;
      found = other;
    }
    output.col(h) = right_.col(found);
    if (found != h && first.empty()) {
      first = fmt::format("head {} had the output of head {}", h, found);
    }
  }
  Try(first, output);
}

}  // namespace

std::vector<TokenFault> FaultsOfOneToken(const AttentionQuestion& question,
                                         std::int64_t row, std::size_t most) {
  std::vector<TokenFault> faults;
  const std::vector<Term>& sees = question.row(row).sees;
  const auto text = [&](std::int64_t token) {
    return TokenText(question, row, token);
  };
  const auto count = std::min(sees.size(), most);
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<Term> terms = sees;
    terms.erase(IteratorAt(terms, i));
    faults.push_back({text(sees[i].key) + " were missing", terms});
  }
  std::vector<std::int64_t> hidden = HiddenFrom(question, row);
  hidden.resize(std::min(hidden.size(), most));
  for (const std::int64_t token : hidden) {
    std::vector<Term> terms = sees;
    terms.push_back({token, token});
    faults.push_back({text(token) + " were seen", terms});
  }
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<Term> terms = sees;
    terms.push_back(sees[i]);
    faults.push_back({text(sees[i].key) + " were there twice", terms});
  }
  AddPairs(question, row, FirstPairs(question, row, most), faults);
  AddMovedKeys(question, row, most, faults);
  return faults;
}

std::string ExplainOutput(const AttentionQuestion& question, std::int64_t row,
                          const Eigen::MatrixXd& actual,
                          const Eigen::MatrixXd& allowed) {
  if (!actual.allFinite()) return "it is not a number";
  FaultSearch search(question, row, actual, allowed);
  // The first pairs lack those of later tokens.
  const std::size_t most = FaultsMost(question, row);
  if (PairCount(question, row) > most) {
    for (const auto& pair : NearPairs(question, row, most)) {
      std::vector<TokenFault> faults;
      AddPairs(question, row, {pair}, faults);
      for (const TokenFault& fault : faults) search.Try(fault);
    }
  }
  for (const TokenFault& fault : FaultsOfOneToken(question, row, most)) {
    search.Try(fault);
  }
  search.TryWindows();
  search.TryMasks();
  search.TryOtherRows();
  search.TryOthers();
  search.TryOtherHeads();
  return search.Text();
}

}  // namespace kvtwin::props
