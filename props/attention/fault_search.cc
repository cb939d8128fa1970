#include "props/attention/fault_search.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace kvtwin::props {
namespace {

// Outputs of faults that are computed as a whole take about this number of
// multiplications together.
constexpr std::int64_t kFaultProductsMost = std::int64_t{1} << 27;
// This number of faults is named if several make the same output.
constexpr std::size_t kNamedMost = 3;

}  // namespace

std::vector<Term> TokenFault::Applied(std::vector<Term> sees) const {
  if (without) sees.erase(IteratorAt(sees, *without));
  if (with) sees.push_back(*with);
  return sees;
}

FaultSearch::FaultSearch(const AttentionQuestion& question, std::int64_t row,
                         const Eigen::MatrixXd& actual,
                         const Eigen::MatrixXd& allowed, bool all)
    : question_(question),
      row_(row),
      sees_(question.row(row).sees),
      queries_(question.QueriesOf(row)),
      actual_(actual),
      allowed_(allowed),
      scores_(question.heads(), std::ssize(question.tokens())),
      largest_(Eigen::VectorXd::Zero(question.heads())),
      all_(all) {
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
  MeasureSizes();
}

void FaultSearch::MeasureSizes() {
  const std::int64_t group = heads() / question_.dims().kv_heads;
  sizes_ = Eigen::VectorXd::Zero(heads());
  for (std::int64_t h = 0; h < heads(); ++h) {
    Eigen::ArrayXd sums = Eigen::ArrayXd::Zero(actual_.rows());
    for (const Term& term : sees_) {
      sums += std::exp(scores_(h, term.key) - largest_[h]) *
              question_.ValueOf(term.value, h / group).cast<double>().abs();
    }
    if (sums_.weights[h] != 0) sizes_[h] = sums.maxCoeff() / sums_.weights[h];
  }
}

void FaultSearch::Add(const Term& term, double sign, Sums& sums) const {
  const std::int64_t group = heads() / question_.dims().kv_heads;
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
  Sums sums = {.values = Eigen::MatrixXd::Zero(actual_.rows(), heads()),
               .weights = Eigen::VectorXd::Zero(heads())};
  const std::span<const float> sinks = question_.weighing().sinks;
  for (std::size_t h = 0; h < sinks.size(); ++h) {
    const auto at = static_cast<std::int64_t>(h);
    sums.weights[at] = std::exp(double{sinks[h]} - largest_[at]);
  }
  for (const Term& term : terms) Add(term, 1, sums);
  return sums;
}

Sums FaultSearch::SumsWithSinks(int turn) const {
  const std::span<const float> sinks = question_.weighing().sinks;
  Sums sums = sums_;
  for (std::int64_t h = 0; h < heads(); ++h) {
    const double own = At(sinks, h);
    const double other = At(sinks, (h + turn) % heads());
    sums.weights[h] +=
        std::exp(other - largest_[h]) - std::exp(own - largest_[h]);
  }
  return sums;
}

Eigen::MatrixXd FaultSearch::OutputOf(const Sums& sums) {
  Eigen::MatrixXd output = sums.values;
  for (std::int64_t h = 0; h < output.cols(); ++h) {
    if (sums.weights[h] != 0) output.col(h) /= sums.weights[h];
  }
  return output;
}

// Rounding moves an output by a part of the magnitudes of V that are in it. The
// output of a fault may have much larger ones than the right output, whose
// weights a sink may take.
double FaultSearch::DistanceOfHead(std::int64_t head,
                                   const Eigen::VectorXd& output,
                                   const Eigen::VectorXd& other) const {
  const double scale =
      sizes_[head] == 0
          ? 1
          : std::max(1.0, output.cwiseAbs().maxCoeff() / sizes_[head]);
  const double distance = (output - other)
                              .cwiseAbs()
                              .cwiseQuotient(scale * allowed_.col(head))
                              .maxCoeff<Eigen::PropagateNaN>();
  return std::isnan(distance) ? std::numeric_limits<double>::infinity()
                              : distance;
}

double FaultSearch::Distance(const Eigen::MatrixXd& output,
                             const Eigen::MatrixXd& other) const {
  double most = 0;
  for (std::int64_t h = 0; h < output.cols(); ++h) {
    most = std::max(most, DistanceOfHead(h, output.col(h), other.col(h)));
  }
  return most;
}

bool FaultSearch::Try(std::string_view text, const Eigen::MatrixXd& output,
                      bool of_token, bool may_be_nearest) {
  // A fault that hardly changes the output explains nothing.
  if (Distance(output, right_) < 0.5) return false;
  const double distance = Distance(output, actual_);
  if (distance > kNear) {
    if (!may_be_nearest || distance >= nearest_) return false;
    nearest_ = distance;
    nearest_text_ = text;
    return false;
  }
  std::vector<Named>& within = of_token ? of_tokens_ : of_all_;
  if (std::ranges::count(within, text, &Named::text) > 0) return true;
  const auto quarters = static_cast<std::int64_t>(4 * distance);
  within.insert(
      std::ranges::upper_bound(within, quarters, {}, &Named::quarters),
      {quarters, std::string(text)});
  if (within.size() > kNamedMost) within.pop_back();
  return true;
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

void FaultSearch::TryHeads(
    int count, const std::function<Eigen::MatrixXd(int)>& other,
    const std::function<std::string(std::int64_t, int)>& text) {
  Eigen::MatrixXd output = right_;
  std::vector<int> found(AsSize(heads()), 0);
  const auto is_open = [&](std::int64_t h) {
    return DistanceOfHead(h, output.col(h), actual_.col(h)) > kNear;
  };
  for (int i = 1; i < count; ++i) {
    const Eigen::MatrixXd tried = other(i);
    for (std::int64_t h = 0; h < heads(); ++h) {
      if (!is_open(h) ||
          DistanceOfHead(h, tried.col(h), actual_.col(h)) > kNear) {
        continue;
      }
      output.col(h) = tried.col(h);
      At(found, h) = i;
    }
  }
  for (std::int64_t h = 0; h < heads(); ++h) {
    if (is_open(h)) return;
  }
  const auto first = std::ranges::find_if(found, [](int i) { return i != 0; });
  if (first == found.end()) return;
  Try(text(first - found.begin(), *first), output);
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

}  // namespace kvtwin::props
