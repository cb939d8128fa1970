#include "props/attention/explanation.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/index.h"

namespace kvtwin::props {
namespace {

// The most faults of each kind of one token, the most windows, and the most
// numbers of last tokens that are tried.
constexpr std::size_t kSinglesMost = std::size_t{1} << 14;
// The most pairs of tokens, and the most K for other positions, that are tried.
constexpr std::size_t kPairsMost = 1'000;
// The most scores that are kept, of all heads and tokens.
constexpr std::int64_t kScoresMost = std::int64_t{1} << 24;
// Outputs that are computed as a whole take about this number of
// multiplications together: those of faults, and those of other rows.
constexpr std::int64_t kFaultProductsMost = std::int64_t{1} << 27;
constexpr std::int64_t kRowProductsMost = std::int64_t{1} << 28;
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
      faults.push_back(
          {fmt::format("{} had {} of {}", TokenText(question, row, sees[i].key),
                       what, TokenText(question, row, other)),
           i, term, /*of_pair=*/true});
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
        Term term = sees[i];
        term.moved = moved;
        faults.push_back(
            {fmt::format("K of {} were {} for position {}",
                         TokenText(question, row, sees[i].key),
                         kind == ShiftKind::kRope ? "rotated" : "shifted",
                         At(question.tokens(), sees[i].key).position + moved),
             i, term});
      }
    }
  }
}

// Sums over terms, from which an output follows.
struct Sums {
  Eigen::MatrixXd values;   // [v_head_dim, heads], with their weights.
  Eigen::VectorXd weights;  // [heads]
};

// Tries faults, and keeps those that are nearest to the output.
class FaultSearch {
 public:
  FaultSearch(const AttentionQuestion& question, std::int64_t row,
              const Eigen::MatrixXd& actual, const Eigen::MatrixXd& allowed);

  void Try(const std::string& text, const Eigen::MatrixXd& output,
           bool of_token = false, bool may_be_nearest = true);
  void Try(const std::string& text, std::span<const Term> terms) {
    Try(text, OutputOf(SumsOf(terms)));
  }
  // A pair is not named as nearest if there are pairs that are not tried.
  void Try(const TokenFault& fault);

  void TryWindows();
  void TryMasks();
  void TryLastTokens();
  void TryZeros();
  void TryOtherRows();
  void TryWeighings();
  void TryOthers();
  void TryOtherHeads();

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
  // Adds a term to the sums, or subtracts it.
  void Add(const Term& term, double sign, Sums& sums) const;
  // Adds a number of terms with rows of zeros.
  void AddZeros(std::size_t count, Sums& sums) const {
    sums.weights +=
        static_cast<double>(count) * (-largest_).array().exp().matrix();
  }
  Sums SumsOf(std::span<const Term> terms) const;
  static Eigen::MatrixXd OutputOf(const Sums& sums);
  // Returns the sums with a fault; nothing if these take too many
  // multiplications.
  std::optional<Sums> SumsWith(const TokenFault& fault);
  std::int64_t PositionOf(const Term& term) const {
    return At(question_.tokens(), term.key).position;
  }
  // Returns the terms of tokens that the row could see, from the last position
  // on.
  std::vector<Term> OwnTerms() const;

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
  bool all_;                   // All faults of one token are tried.
  std::int64_t products_ = 0;  // Those of faults so far.
  // The faults within the bound: of one token, and of all of them.
  std::vector<Named> of_tokens_;
  std::vector<Named> of_all_;
  double nearest_ = std::numeric_limits<double>::infinity();
  std::string nearest_text_;
};

FaultSearch::FaultSearch(const AttentionQuestion& question, std::int64_t row,
                         const Eigen::MatrixXd& actual,
                         const Eigen::MatrixXd& allowed)
    : question_(question),
      row_(row),
      sees_(question.row(row).sees),
      queries_(question.QueriesOf(row)),
      actual_(actual),
      allowed_(allowed),
      scores_(question.heads(), std::ssize(question.tokens())),
      largest_(Eigen::VectorXd::Zero(question.heads())),
      all_(PairCount(question, row) <= kPairsMost &&
           question.row(row).sees.size() <= kSinglesMost) {
  for (std::int64_t i = 0; i < scores_.cols(); ++i) {
    scores_.col(i) = question.ScoresOf(queries_, {i, i});
  }
  const std::span<const float> sinks = question.weighing().sinks;
  for (std::int64_t h = 0; h < largest_.size(); ++h) {
    double largest = -std::numeric_limits<double>::infinity();
    if (!sinks.empty()) largest = double{sinks[AsSize(h)]};
    for (const Term& term : sees_) {
      largest = std::max(largest, scores_(h, term.key));
    }
    if (std::isfinite(largest)) largest_[h] = largest;
  }
  sums_ = SumsOf(sees_);
  right_ = OutputOf(sums_);
}

void FaultSearch::Add(const Term& term, double sign, Sums& sums) const {
  const std::int64_t group = question_.heads() / question_.dims().kv_heads;
  const Eigen::VectorXd scores = term.moved == 0
                                     ? Eigen::VectorXd(scores_.col(term.key))
                                     : question_.ScoresOf(queries_, term);
  for (std::int64_t h = 0; h < scores.size(); ++h) {
    const double weight = sign * std::exp(scores[h] - largest_[h]);
    sums.weights[h] += weight;
    sums.values.col(h) +=
        (weight * question_.ValueOf(term.value, h / group).cast<double>())
            .matrix();
  }
}

Sums FaultSearch::SumsOf(std::span<const Term> terms) const {
  Sums sums = {.values = Eigen::MatrixXd::Zero(actual_.rows(), actual_.cols()),
               .weights = Eigen::VectorXd::Zero(actual_.cols())};
  const std::span<const float> sinks = question_.weighing().sinks;
  for (std::size_t h = 0; h < sinks.size(); ++h) {
    const auto at = static_cast<std::int64_t>(h);
    sums.weights[at] = std::exp(double{sinks[h]} - largest_[at]);
  }
  for (const Term& term : terms) Add(term, 1, sums);
  return sums;
}

Eigen::MatrixXd FaultSearch::OutputOf(const Sums& sums) {
  Eigen::MatrixXd output = sums.values;
  for (std::int64_t h = 0; h < output.cols(); ++h) {
    if (sums.weights[h] != 0) output.col(h) /= sums.weights[h];
  }
  return output;
}

void FaultSearch::Try(const std::string& text, const Eigen::MatrixXd& output,
                      bool of_token, bool may_be_nearest) {
  // A fault that hardly changes the output explains nothing.
  if (Distance(output, right_) < 0.5) return;
  const double distance = Distance(output, actual_);
  if (distance > kNear) {
    if (!may_be_nearest || distance >= nearest_) return;
    nearest_ = distance;
    nearest_text_ = text;
    return;
  }
  std::vector<Named>& within = of_token ? of_tokens_ : of_all_;
  if (std::ranges::count(within, text, &Named::text) > 0) return;
  const auto quarters = static_cast<std::int64_t>(4 * distance);
  within.insert(
      std::ranges::upper_bound(within, quarters, {}, &Named::quarters),
      {quarters, text});
  if (within.size() > kNamedMost) within.pop_back();
}

// A difference of sums lacks digits if the term that is missing has nearly all
// of the weight.
std::optional<Sums> FaultSearch::SumsWith(const TokenFault& fault) {
  Sums sums = sums_;
  if (fault.without) Add(sees_[*fault.without], -1, sums);
  if (fault.with) Add(*fault.with, 1, sums);
  if ((sums.weights.array() > 1e-6 * sums_.weights.array()).all()) return sums;
  products_ += std::ssize(sees_) * actual_.size();
  if (products_ > kFaultProductsMost) return std::nullopt;
  return SumsOf(fault.Applied(sees_));
}

void FaultSearch::Try(const TokenFault& fault) {
  const std::optional<Sums> sums = SumsWith(fault);
  all_ = all_ && sums;
  if (!sums) return;
  Try(fault.text, OutputOf(*sums), /*of_token=*/true, !fault.of_pair || all_);
}

// Names a fault of each sort, if there are some: where much is allowed, many
// faults of one token are within it by chance.
std::string FaultSearch::Text() const {
  std::vector<std::string_view> named;
  const std::size_t room = of_all_.empty() ? kNamedMost : kNamedMost - 1;
  for (const Named& fault : of_tokens_) {
    if (named.size() < room) named.push_back(fault.text);
  }
  for (const Named& fault : of_all_) {
    if (named.size() < kNamedMost) named.push_back(fault.text);
  }
  if (!named.empty()) {
    return fmt::format("as if {}", fmt::join(named, ", or "));
  }
  if (nearest_ < Distance(right_, actual_) / 8) {
    return fmt::format("as if {}, nearly", nearest_text_);
  }
  return all_ ? "no fault of one token explains it"
              : "no fault of one token that was tried explains it";
}

std::vector<Term> FaultSearch::OwnTerms() const {
  const AttentionQuestion::Row& row = question_.row(row_);
  std::vector<Term> own;
  for (std::int64_t i = 0; i < std::ssize(question_.tokens()); ++i) {
    const AskedToken& token = At(question_.tokens(), i);
    if (!token.HeldBy(row.sequence) || token.position > row.position) continue;
    own.push_back({i, i});
  }
  std::ranges::stable_sort(own, std::ranges::greater(),
                           [&](const Term& term) { return PositionOf(term); });
  return own;
}

// Tries windows over the tokens of the row's sequence.
void FaultSearch::TryWindows() {
  const AttentionQuestion::Row& row = question_.row(row_);
  const std::vector<Term> own = OwnTerms();
  Sums sums = SumsOf({});
  for (std::size_t count = 1; count <= std::min(own.size(), kSinglesMost);
       ++count) {
    Add(own[count - 1], 1, sums);
    const std::int64_t window = row.position - PositionOf(own[count - 1]);
    if (count < own.size() && row.position - PositionOf(own[count]) == window) {
      continue;
    }
    Try(fmt::format("the window were {}{}", window,
                    count == own.size() ? " or more" : ""),
        OutputOf(sums));
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

// Tries whether the last tokens that the row sees are missing, or have rows of
// zeros, as in a block that was not written.
void FaultSearch::TryLastTokens() {
  std::vector<Term> terms = sees_;
  std::ranges::stable_sort(terms, {},
                           [&](const Term& term) { return PositionOf(term); });
  Sums first = SumsOf({});  // Of the tokens before them.
  for (std::size_t i = 1; i + 1 < terms.size(); ++i) {
    Add(terms[i - 1], 1, first);
    const std::size_t count = terms.size() - i;
    if (count > kSinglesMost) continue;
    const std::string text = fmt::format(
        "positions {} to {}", PositionOf(terms[i]), PositionOf(terms.back()));
    Try(text + " were missing", OutputOf(first));
    Sums zeros = first;
    AddZeros(count, zeros);
    Try(text + " had rows of zeros", OutputOf(zeros));
  }
}

void FaultSearch::TryZeros() {
  for (std::size_t i = 0; i < std::min(sees_.size(), kSinglesMost); ++i) {
    std::optional<Sums> sums = SumsWith({.text = "", .without = i});
    if (!sums) return;
    AddZeros(1, *sums);
    Try(TokenText(question_, row_, sees_[i].key) + " had rows of zeros",
        OutputOf(*sums), /*of_token=*/true);
  }
}

void FaultSearch::TryOtherRows() {
  const std::int64_t products =
      std::ssize(question_.tokens()) * question_.heads() *
      (question_.dims().k_head_dim + question_.dims().v_head_dim);
  const std::int64_t most = std::clamp<std::int64_t>(
      kRowProductsMost / std::max<std::int64_t>(products, 1), 4, 64);
  const std::int64_t count = std::min(question_.rows(), most);
  for (std::int64_t other = 0; other < count; ++other) {
    const AttentionQuestion::Row& row = question_.row(other);
    if (other == row_ || !row.judged) continue;
    Try(fmt::format("the mask were that of row {}", other), row.sees);
    Try(fmt::format("it were the output of row {}", other),
        question_.OutputOf(question_.QueriesOf(other), row.sees));
    Try(fmt::format("the query were that of row {}", other),
        question_.OutputOf(question_.QueriesOf(other), sees_));
  }
}

// Tries other scales, and weights without the soft cap or the sinks.
void FaultSearch::TryWeighings() {
  const reference::Weighing weighing = question_.weighing();
  const auto attempt = [&](const char* text, const auto& change) {
    reference::Weighing changed = weighing;
    change(changed);
    Try(text, question_.OutputOf(queries_, sees_, changed));
  };
  attempt("the scale were 1", [](auto& changed) { changed.scale = 1; });
  const double v_head_dim = question_.dims().v_head_dim;
  if (v_head_dim != question_.dims().k_head_dim) {
    attempt("the scale were 1 / sqrt(v_head_dim)",
            [&](auto& changed) { changed.scale = 1 / std::sqrt(v_head_dim); });
  }
  std::vector<float> sinks(weighing.sinks.begin(), weighing.sinks.end());
  for (float& sink : sinks) sink *= std::numbers::ln2_v<float>;
  attempt("the weights were powers of 2", [&](auto& changed) {
    changed.scale *= std::numbers::ln2;
    changed.soft_cap *= std::numbers::ln2;
    changed.sinks = sinks;
  });
  const std::vector<float> zeros(AsSize(queries_.cols()), 0.0F);
  if (weighing.sinks.empty()) {
    attempt("1 were added to the sum of the weights",
            [&](auto& changed) { changed.sinks = zeros; });
  } else {
    attempt("the sinks were absent", [](auto& changed) { changed.sinks = {}; });
  }
  if (weighing.soft_cap != 0) {
    attempt("the soft cap were absent",
            [](auto& changed) { changed.soft_cap = 0; });
  }
}

void FaultSearch::TryOthers() {
  std::vector<Term> shifted = sees_;
  for (std::size_t i = 0; i < sees_.size(); ++i) {
    shifted[i].value = sees_[(i + 1) % sees_.size()].value;
  }
  Try("each token had the V of the next token", shifted);
  Try("it were zeros", Eigen::MatrixXd::Zero(actual_.rows(), actual_.cols()));
  // Query head h reads KV head h modulo their number.
  const std::int64_t heads = queries_.cols();
  const std::int64_t kv_heads = question_.dims().kv_heads;
  const std::int64_t group = heads / kv_heads;
  const auto place = [&](std::int64_t h) {
    return h % kv_heads * group + h / kv_heads;
  };
  Eigen::MatrixXd queries = queries_;
  reference::Weighing weighing = question_.weighing();
  std::vector<float> sinks(weighing.sinks.size());
  for (std::int64_t h = 0; h < heads; ++h) {
    queries.col(place(h)) = queries_.col(h);
    if (!sinks.empty()) At(sinks, place(h)) = weighing.sinks[AsSize(h)];
  }
  weighing.sinks = sinks;
  const Eigen::MatrixXd outputs = question_.OutputOf(queries, sees_, weighing);
  Eigen::MatrixXd output = outputs;
  for (std::int64_t h = 0; h < heads; ++h)
    output.col(h) = outputs.col(place(h));
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

std::vector<Term> TokenFault::Applied(std::vector<Term> sees) const {
  if (without) sees.erase(IteratorAt(sees, *without));
  if (with) sees.push_back(*with);
  return sees;
}

std::vector<TokenFault> FaultsOfOneToken(const AttentionQuestion& question,
                                         std::int64_t row, std::size_t most) {
  std::vector<TokenFault> faults;
  const std::vector<Term>& sees = question.row(row).sees;
  const auto text = [&](std::int64_t token) {
    return TokenText(question, row, token);
  };
  const auto count = std::min(sees.size(), most);
  for (std::size_t i = 0; i < count; ++i) {
    faults.push_back(
        {.text = text(sees[i].key) + " were missing", .without = i});
  }
  std::vector<std::int64_t> hidden = HiddenFrom(question, row);
  hidden.resize(std::min(hidden.size(), most));
  for (const std::int64_t token : hidden) {
    faults.push_back(
        {.text = text(token) + " were seen", .with = Term{token, token}});
  }
  for (std::size_t i = 0; i < count; ++i) {
    faults.push_back(
        {.text = text(sees[i].key) + " were there twice", .with = sees[i]});
  }
  AddPairs(question, row, FirstPairs(question, row, std::min(most, kPairsMost)),
           faults);
  AddMovedKeys(question, row, std::min(most, kPairsMost), faults);
  return faults;
}

std::string ExplainOutput(const AttentionQuestion& question, std::int64_t row,
                          const Eigen::MatrixXd& actual,
                          const Eigen::MatrixXd& allowed) {
  if (!actual.allFinite()) return "it is not a number";
  const auto tokens = std::ssize(question.tokens());
  if (tokens * question.heads() > kScoresMost) {
    return "no fault of one token that was tried explains it";
  }
  FaultSearch search(question, row, actual, allowed);
  for (const TokenFault& fault :
       FaultsOfOneToken(question, row, kSinglesMost)) {
    search.Try(fault);
  }
  // The first pairs lack those of later tokens.
  if (PairCount(question, row) > kPairsMost) {
    std::vector<TokenFault> faults;
    AddPairs(question, row, NearPairs(question, row, kPairsMost), faults);
    for (const TokenFault& fault : faults) search.Try(fault);
  }
  search.TryZeros();
  search.TryWindows();
  search.TryMasks();
  search.TryLastTokens();
  search.TryOtherRows();
  search.TryWeighings();
  search.TryOthers();
  search.TryOtherHeads();
  return search.Text();
}

}  // namespace kvtwin::props
