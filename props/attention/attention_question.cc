#include "props/attention/attention_question.h"

#include <fmt/format.h>

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "core/dense_tensor.h"
#include "core/elements.h"
#include "core/guarded_paged.h"
#include "core/index.h"
#include "core/shift_row.h"
#include "props/attention/explanation.h"
#include "props/base/hash.h"

namespace kvtwin::props {
namespace {

using reference::CacheLedger;
using reference::LedgerToken;

// The question keeps this number of removed tokens at most.
constexpr std::int64_t kGoneMost = 4;
// A question to a pool has tokens of at most this number of sequences that are
// not asked, and at most this number of tokens of each of them.
constexpr int kOthersMost = 8;
// In a large batch, only some rows are judged, the last one among them.
// Together they see about this number of tokens in a search, which asks many
// questions; in a recording, these take about this number of multiplications.
constexpr std::int64_t kTermsMost = 256;
constexpr std::int64_t kProductsMost = std::int64_t{1} << 27;
// The last head of one row in this many has large scores.
constexpr std::uint64_t kLargeEvery = 16;
// No element of a query is larger, so f16 can hold it.
constexpr double kQueryMost = 4096;

TensorView FloatView(const std::vector<float>& data, const Shape& shape) {
  return DenseView(data.data(), DType::kF32, shape);
}

// Appends the elements of a dense row as f32.
void AppendRow(const TensorView& row, std::vector<float>& to) {
  if (row.dtype == DType::kF32) {
    const auto* from = static_cast<const float*>(row.data);
    to.insert(to.end(), from, from + row.elements());
    return;
  }
  const std::size_t before = to.size();
  to.resize(before + AsSize(row.elements()));
  WriteDense(row, DType::kF32, reinterpret_cast<std::byte*>(&to[before]));
}

std::uint64_t Mix(std::uint64_t seed, std::int64_t number) {
  return HashBytes(&number, sizeof(number), seed);
}

// Rounds to bf16, so that an engine may round queries without an error.
float Rounded(double number) {
  return static_cast<float>(Eigen::bfloat16(static_cast<float>(number)));
}

// The unit roundoff of a dtype, in which an engine computes.
double UnitOf(DType dtype) {
  if (dtype == DType::kF16) return 0x1p-11;
  if (dtype == DType::kBF16) return 0x1p-8;
  return 0;  // The bound counts roundings to f32.
}

}  // namespace

RowDims DimsOf(const PagedSpec& spec) {
  return {.k_head_dim = spec.k_head_dim,
          .kv_heads = spec.kv_heads,
          .v_head_dim = spec.v_head_dim};
}

// The terms as columns, which one row sees.
struct AttentionQuestion::Gathered {
  std::vector<float> key;
  std::vector<float> value;
  std::vector<float> mask;
  KvView view;
};

AttentionQuestion::AttentionQuestion(const Pass& pass, int group,
                                     std::uint64_t seed,
                                     const AttentionQuestion* before)
    : dims_(pass.dims),
      shift_(pass.ledger.shift()),
      soft_cap_(pass.soft_cap),
      sinks_(pass.sinks) {
  AddOwnTokens(pass);
  const auto& stored = pass.ledger.tokens();
  if (before != nullptr) {
    AddGone(*before, [&](const AskedToken& token) {
      return std::ranges::count(stored, token.number, &LedgerToken::number) > 0;
    });
  }
  AddRows(pass, kTermsMost, seed);
  DrawQueries(group, seed);
}

AttentionQuestion::AttentionQuestion(const PoolPass& pass, int group,
                                     std::uint64_t seed,
                                     const AttentionQuestion* before)
    : dims_(DimsOf(SpecOfLayer(pass.spec, pass.layer))),
      block_size_(pass.spec.block_size),
      soft_cap_(pass.soft_cap),
      sinks_(pass.sinks) {
  AddOwnTokens(pass);
  if (before != nullptr) {
    std::set<std::int64_t> numbers;
    for (const AskedToken& token : tokens_) numbers.insert(token.number);
    AddGone(*before, [&](const AskedToken& token) {
      // `tokens_` has only the last tokens of other sequences.
      const bool asked = std::ranges::count(pass.sequences, token.sequence) > 0;
      return numbers.contains(token.number) ||
             (!asked && pass.ledger.Has(token.sequence));
    });
  }
  AddRows(pass, kTermsMost, seed);
  DrawQueries(group, seed);
}

AttentionQuestion::AttentionQuestion(const Pass& pass, const DenseTensor& query,
                                     std::uint64_t turn)
    : dims_(pass.dims),
      shift_(pass.ledger.shift()),
      soft_cap_(pass.soft_cap),
      sinks_(pass.sinks),
      query_(query) {
  AddOwnTokens(pass);
  AddRows(pass, RecordedTermsMost(), turn);
}

AttentionQuestion::AttentionQuestion(const PoolPass& pass,
                                     const DenseTensor& query,
                                     std::uint64_t turn)
    : dims_(DimsOf(SpecOfLayer(pass.spec, pass.layer))),
      block_size_(pass.spec.block_size),
      soft_cap_(pass.soft_cap),
      sinks_(pass.sinks),
      query_(query) {
  AddOwnTokens(pass);
  AddRows(pass, RecordedTermsMost(), turn);
}

std::int64_t AttentionQuestion::RecordedTermsMost() const {
  const std::int64_t products = heads() * (dims_.k_head_dim + dims_.v_head_dim);
  return std::max(kProductsMost / products, kTermsMost);
}

void AttentionQuestion::AddOwnTokens(const Pass& pass) {
  layer_ = pass.layer;
  add_tokens_of_ = [&ledger = pass.ledger](int layer, AttentionQuestion& to) {
    to.AddTokens(ledger, layer);
  };
  add_tokens_of_(layer_, *this);
}

void AttentionQuestion::AddOwnTokens(const PoolPass& pass) {
  layer_ = pass.layer;
  add_tokens_of_ = [&ledger = pass.ledger, &spec = pass.spec, own = layer_,
                    sequences = pass.sequences](int layer,
                                                AttentionQuestion& to) {
    int in_group = layer;
    int own_in_group = own;
    const bool same_group =
        GroupOf(spec, in_group) == GroupOf(spec, own_in_group) &&
        in_group < SpecOfLayer(spec, own).layers;
    if (same_group) to.AddTokens(ledger, sequences, layer);
  };
  add_tokens_of_(layer_, *this);
}

void AttentionQuestion::AddTokens(const CacheLedger& ledger, int layer) {
  const std::vector<LedgerToken>& stored = ledger.tokens();
  const std::size_t most = stored.size() + kGoneMost;
  tokens_.reserve(most);
  keys_.reserve(most * AsSize(dims_.k_head_dim * dims_.kv_heads));
  values_.reserve(most * AsSize(dims_.v_head_dim * dims_.kv_heads));
  for (const LedgerToken& token : stored) {
    const auto rows = token.rows.find(layer);
    if (rows == token.rows.end()) continue;
    const std::set<int> owners = token.owners();
    tokens_.push_back({.number = token.number,
                       .position = token.position,
                       .sequence = *owners.begin(),
                       .more = {std::next(owners.begin()), owners.end()}});
    AppendRow(rows->second.key.view(), keys_);
    AppendRow(rows->second.value.view(), values_);
  }
}

// Adds the tokens of the sequences that are asked, then the last tokens of some
// of the others.
void AttentionQuestion::AddTokens(const reference::PagedLedger& ledger,
                                  const std::vector<int>& sequences,
                                  int layer) {
  const auto add = [&](int sequence, int first) {
    const auto rows = ledger.RowsOf(sequence, layer, first);
    for (std::int64_t i = 0; i < std::ssize(rows); ++i) {
      const KvRows& row = At(rows, i);
      const std::int64_t position = first + i;
      std::uint64_t number = Mix(AsSize(sequence), position);
      for (const auto* bytes : {&row.key.bytes, &row.value.bytes}) {
        number = HashBytes(bytes->data(), bytes->size(), number);
      }
      tokens_.push_back({.number = static_cast<std::int64_t>(number),
                         .position = position,
                         .sequence = sequence});
      AppendRow(row.key.view(), keys_);
      AppendRow(row.value.view(), values_);
    }
  };
  for (const int sequence : sequences) add(sequence, 0);
  const std::set<int> asked(sequences.begin(), sequences.end());
  int others = 0;
  for (const int sequence : ledger.Sequences()) {
    if (asked.contains(sequence) || others == kOthersMost) continue;
    ++others;
    const int end = ledger.RowCount(sequence, layer);
    add(sequence, std::max(end - kOthersMost, 0));
  }
}

template <class IsStored>
void AttentionQuestion::AddGone(const AttentionQuestion& before,
                                const IsStored& is_stored) {
  std::int64_t gone = 0;
  for (std::size_t i = before.tokens_.size(); i-- > 0 && gone < kGoneMost;) {
    const AskedToken& token = before.tokens_[i];
    if (is_stored(token)) continue;
    ++gone;
    tokens_.push_back(token);
    tokens_.back().gone = true;
    const auto append = [&](const std::vector<float>& from, int head_dim,
                            std::vector<float>& to) {
      const std::int64_t size = std::int64_t{head_dim} * dims_.kv_heads;
      const auto row =
          IteratorAt(from, std::ssize(from) / std::ssize(before.tokens_) *
                               static_cast<std::ptrdiff_t>(i));
      to.insert(to.end(), row, row + size);
    };
    append(before.keys_, dims_.k_head_dim, keys_);
    append(before.values_, dims_.v_head_dim, values_);
  }
}

std::vector<char> AttentionQuestion::FiniteKeys() const {
  std::vector<char> finite(tokens_.size(), 1);
  for (std::int64_t i = 0; i < std::ssize(tokens_); ++i) {
    for (std::int64_t h = 0; h < dims_.kv_heads; ++h) {
      if (!KeyOf(i, h).allFinite()) At(finite, i) = 0;
    }
  }
  return finite;
}

void AttentionQuestion::AddRows(const Pass& pass, std::int64_t terms_most,
                                std::uint64_t turn) {
  const std::vector<char> finite = FiniteKeys();
  rows_.reserve(pass.positions.size());
  for (std::size_t i = 0; i < pass.positions.size(); ++i) {
    Row& row = rows_.emplace_back();
    row.position = pass.positions[i];
    row.sequence = pass.sequences[i];
    row.judged = true;
    std::int64_t index = 0;  // The next token that has rows.
    for (const LedgerToken& token : pass.ledger.tokens()) {
      const bool known = index < std::ssize(tokens_) &&
                         At(tokens_, index).number == token.number;
      if (pass.ledger.MaySee(AsInt(i), token)) {
        row.judged = row.judged && known && At(finite, index) != 0 &&
                     !pass.ledger.MayMiss(AsInt(i), token);
        row.sees.push_back({index, index});
      }
      index += known ? 1 : 0;
    }
    if (!row.judged) row.sees.clear();
  }
  std::vector<std::int64_t> counts;
  for (const Row& row : rows_) counts.push_back(std::ssize(row.sees));
  JudgeSome(counts, terms_most, turn);
}

// The tokens of a sequence are in order, one sequence after another.
void AttentionQuestion::AddRows(const PoolPass& pass, std::int64_t terms_most,
                                std::uint64_t turn) {
  const std::vector<char> finite = FiniteKeys();
  std::vector<std::int64_t> firsts;  // The first token that each row may see.
  std::vector<std::int64_t> counts;
  std::int64_t start = 0;  // The token at position 0 of the sequence.
  for (std::size_t s = 0; s < pass.sequences.size(); ++s) {
    const int sequence = pass.sequences[s];
    const int end = pass.ledger.RowCount(sequence, pass.layer);
    const int first_row = end - pass.query_rows[s];
    // The last position whose K and V are not known.
    int unknown = -1;
    for (int position = pass.ledger.FirstSeenBy(pass.layer, first_row);
         position < end; ++position) {
      const bool known = At(finite, start + position) != 0 &&
                         pass.ledger.HasOneRow(sequence, pass.layer, position);
      if (!known) unknown = position;
      if (position < first_row) continue;
      const int first = pass.ledger.FirstSeenBy(pass.layer, position);
      Row& row = rows_.emplace_back();
      row.position = position;
      row.sequence = sequence;
      row.judged = unknown < first;
      firsts.push_back(start + first);
      counts.push_back(row.judged ? position - first + 1 : 0);
    }
    start += end;
  }
  JudgeSome(counts, terms_most, turn);
  for (std::int64_t r = 0; r < std::ssize(rows_); ++r) {
    Row& row = At(rows_, r);
    if (!row.judged) continue;
    for (std::int64_t i = 0; i < At(counts, r); ++i) {
      row.sees.push_back({At(firsts, r) + i, At(firsts, r) + i});
    }
  }
}

void AttentionQuestion::JudgeSome(std::span<const std::int64_t> counts,
                                  std::int64_t terms_most, std::uint64_t turn) {
  std::int64_t terms = 0;
  for (const std::int64_t count : counts) terms += count;
  const std::int64_t step = 1 + terms / terms_most;
  const auto first = static_cast<std::int64_t>(turn % AsSize(step));
  for (std::int64_t r = 0; r + 1 < std::ssize(rows_); ++r) {
    if (r % step == first) continue;
    At(rows_, r).judged = false;
    At(rows_, r).sees.clear();
  }
}

// Returns the tokens that the heads of a row point at, one for each head of a
// KV head in turn; -1: all alike.
std::vector<std::int64_t> AttentionQuestion::TargetsOf(
    const Row& row, std::uint64_t draw) const {
  const auto position = [&](std::int64_t i) { return At(tokens_, i).position; };
  const auto [first, last] = std::ranges::minmax_element(
      row.sees, {}, [&](const Term& term) { return position(term.key); });
  std::int64_t below = -1;  // The hidden tokens next to what is seen.
  std::int64_t above = -1;
  std::int64_t other = -1;
  std::size_t next = 0;
  for (std::int64_t i = 0; i < std::ssize(tokens_); ++i) {
    if (next < row.sees.size() && row.sees[next].key == i) {
      ++next;
      continue;
    }
    if (!At(tokens_, i).HeldBy(row.sequence)) {
      other = i;
    } else if (position(i) < position(first->key)) {
      if (below < 0 || position(i) > position(below)) below = i;
    } else if (above < 0 || position(i) < position(above)) {
      above = i;
    }
  }
  const auto any = [&](std::int64_t salt) {
    return At(row.sees, Mix(draw, salt) % row.sees.size()).key;
  };
  std::vector<std::int64_t> targets = {-1,    first->key, last->key, below,
                                       above, other,      any(0),    any(1)};
  for (std::size_t i = 3; i < 6; ++i) {
    if (targets[i] < 0) targets[i] = any(AsInt(i));
  }
  // clang 14 does not compile std::ranges::rotate.
  std::rotate(targets.begin(), IteratorAt(targets, draw % targets.size()),
              targets.end());
  return targets;
}

Eigen::Map<const Eigen::VectorXf> AttentionQuestion::KeyOf(
    std::int64_t token, std::int64_t kv_head) const {
  const std::int64_t at = (token * dims_.kv_heads + kv_head) * dims_.k_head_dim;
  return {&At(keys_, at), dims_.k_head_dim};
}

Eigen::Map<const Eigen::ArrayXf> AttentionQuestion::ValueOf(
    std::int64_t token, std::int64_t kv_head) const {
  const std::int64_t at = (token * dims_.kv_heads + kv_head) * dims_.v_head_dim;
  return {&At(values_, at), dims_.v_head_dim};
}

void AttentionQuestion::DrawQueries(int group, std::uint64_t seed) {
  const std::int64_t dim = dims_.k_head_dim;
  const std::int64_t heads = std::int64_t{group} * dims_.kv_heads;
  query_ = FilledTensor(DType::kF32, {dim, heads, std::ssize(rows_), 1}, 0);
  auto* const queries = reinterpret_cast<float*>(query_.bytes.data());
  // Each KV head has a longest K; these are its length.
  Eigen::VectorXf lengths(dims_.kv_heads);
  for (std::int64_t kv_head = 0; kv_head < dims_.kv_heads; ++kv_head) {
    float longest = 0;
    for (std::int64_t i = 0; i < std::ssize(tokens_); ++i) {
      const float length = KeyOf(i, kv_head).norm();
      if (std::isfinite(length)) longest = std::max(longest, length);
    }
    lengths[kv_head] = longest;
  }
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    const Row& row = rows_[r];
    if (row.sees.empty()) continue;
    const std::uint64_t draw = Mix(seed, static_cast<std::int64_t>(r));
    const std::vector<std::int64_t> targets = TargetsOf(row, draw);
    // The score of a target. If the other tokens have scores near 0, the target
    // has more than half of the weight.
    const double score = 1 + std::log(row.sees.size());
    // f32 has no e^100, and rounds e^-110 to 0. Beside a sink, such a weight
    // makes outputs that f16 does not have.
    const std::uint64_t way = Mix(draw, 2) % (2 * kLargeEvery);
    const bool small = way == 1 && sinks_.empty();
    const double last_score = way == 0 ? 100 : small ? -110 : score;
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t kv_head = h / group;
      const std::int64_t target = At(targets, h % std::ssize(targets));
      const auto key = KeyOf(std::max<std::int64_t>(target, 0), kv_head);
      const double length = key.norm() * lengths[kv_head];
      if (target < 0 || length == 0 || !std::isfinite(length)) continue;
      const double most = kQueryMost / key.cwiseAbs().maxCoeff();
      const double wanted = h + 1 == heads ? last_score : score;
      const double factor =
          std::clamp(wanted * std::sqrt(dim) / length, -most, most);
      for (std::int64_t i = 0; i < dim; ++i) {
        queries[(static_cast<std::int64_t>(r) * heads + h) * dim + i] =
            Rounded(key[i] * factor);
      }
    }
  }
}

int QueriesPerKvHead(DType dtype, int kv_heads, int group, int most) {
  if (group == 0) group = (dtype == DType::kF32 ? 4 : 8) / kv_heads;
  return std::clamp(group, 1, most);
}

std::vector<float> SinksOf(std::int64_t heads) {
  std::vector<float> sinks;
  for (std::int64_t h = 0; h < heads; ++h) {
    sinks.push_back(0.5F * static_cast<float>(h * 3 % 5) - 1);  // -1 to 1
  }
  return sinks;
}

std::size_t AttentionQuestion::answer_size() const {
  return AsSize(dims_.v_head_dim * heads() * rows());
}

std::int64_t AttentionQuestion::CountJudged() const {
  return std::ranges::count(rows_, true, &Row::judged);
}

Eigen::MatrixXd AttentionQuestion::QueriesOf(std::int64_t row) const {
  const auto* all = reinterpret_cast<const float*>(query_.bytes.data());
  const std::int64_t dim = dims_.k_head_dim;
  return Eigen::Map<const Eigen::MatrixXf>(all + row * dim * heads(), dim,
                                           heads())
      .cast<double>();
}

Eigen::VectorXd AttentionQuestion::ScoresOf(const Eigen::MatrixXd& queries,
                                            const Term& term) const {
  const std::int64_t group = heads() / dims_.kv_heads;
  const Gathered gathered = Gather(std::span(&term, 1));
  const Eigen::Map<const Eigen::MatrixXf> keys(
      gathered.key.data(), dims_.k_head_dim, dims_.kv_heads);
  Eigen::VectorXd scores(heads());
  for (std::int64_t h = 0; h < heads(); ++h) {
    scores[h] = keys.col(h / group).cast<double>().dot(queries.col(h));
  }
  scores *= weighing().scale;
  if (soft_cap_ == 0) return scores;
  return soft_cap_ * (scores.array() / soft_cap_).tanh();
}

AttentionQuestion::Gathered AttentionQuestion::Gather(
    std::span<const Term> terms) const {
  Gathered all;
  const std::int64_t k_size = std::int64_t{dims_.k_head_dim} * dims_.kv_heads;
  const std::int64_t v_size = std::int64_t{dims_.v_head_dim} * dims_.kv_heads;
  for (const Term& term : terms) {
    const auto key = IteratorAt(keys_, term.key * k_size);
    all.key.insert(all.key.end(), key, key + k_size);
    if (term.moved != 0) {
      (void)ShiftRow(shift_, /*layer=*/0, term.moved, dims_.k_head_dim,
                     dims_.kv_heads, std::span(all.key).last(AsSize(k_size)));
    }
    const auto value = IteratorAt(values_, term.value * v_size);
    all.value.insert(all.value.end(), value, value + v_size);
  }
  const auto count = std::ssize(terms);
  all.mask.assign(terms.size(), 0);
  all.view = {
      .key = FloatView(all.key, {dims_.k_head_dim, dims_.kv_heads, count, 1}),
      .value =
          FloatView(all.value, {dims_.v_head_dim, dims_.kv_heads, count, 1}),
      .mask = FloatView(all.mask, {count, 1, 1, 1})};
  return all;
}

Eigen::MatrixXd AttentionQuestion::OutputOf(
    const Eigen::MatrixXd& queries, std::span<const Term> terms,
    const reference::Weighing& weighing) const {
  return reference::AttendRow(Gather(terms).view, VLayout::kPlain, 0, queries,
                              weighing)
      .out;
}

Eigen::MatrixXd AttentionQuestion::Expected(std::int64_t row,
                                            const AttentionPrecision& precision,
                                            Eigen::MatrixXd& allowed) const {
  const Gathered seen = Gather(At(rows_, row).sees);
  const Eigen::MatrixXd queries = QueriesOf(row);
  const reference::AttendedRow exact =
      reference::AttendRow(seen.view, VLayout::kPlain, 0, queries, weighing());
  const double unit = UnitOf(precision.dtype);
  const double step = precision.dtype == DType::kF16 ? 0x1p-25 : 0;
  allowed = BoundOfErrors(seen.view, VLayout::kPlain, 0, queries, weighing(),
                          exact, {.input_error = 2 * unit, .input_step = step})
                .out;
  allowed += unit * (allowed + exact.out.cwiseAbs());  // The result is rounded.
  allowed.array() += step;
  // The output of a row that sees nothing is zeros; no rounding adds to its
  // bound.
  allowed.array() += precision.tolerance + std::numeric_limits<double>::min();
  if (allowed.allFinite()) return exact.out;
  return BetweenValues(row, precision, exact.out, allowed);
}

// Rounding may take all digits of large scores. Outputs then lie between the
// least and the largest V that is seen, and 0 if there are sinks.
Eigen::MatrixXd AttentionQuestion::BetweenValues(
    std::int64_t row, const AttentionPrecision& precision,
    const Eigen::MatrixXd& exact, Eigen::MatrixXd& allowed) const {
  Eigen::MatrixXd expected = exact;
  const std::vector<Term>& sees = At(rows_, row).sees;
  const std::int64_t group = heads() / dims_.kv_heads;
  // The weights are rounded separately from their sum (docs/attention.md).
  const double rounding = 8 * UnitOf(precision.dtype) +
                          8 * static_cast<double>(sees.size() + 1) * 0x1p-24;
  for (std::int64_t h = 0; h < heads(); ++h) {
    Eigen::ArrayXd least = Eigen::ArrayXd::Constant(
        dims_.v_head_dim,
        sinks_.empty() ? std::numeric_limits<double>::infinity() : 0);
    Eigen::ArrayXd most = sinks_.empty() ? (-least).eval() : least;
    for (const Term& term : sees) {
      const auto value = ValueOf(term.value, h / group).cast<double>();
      least = least.min(value);
      most = most.max(value);
    }
    for (std::int64_t i = 0; i < dims_.v_head_dim; ++i) {
      if (std::isfinite(allowed(i, h))) continue;
      const double size = std::max(std::abs(least[i]), std::abs(most[i]));
      expected(i, h) = (least[i] + most[i]) / 2;
      allowed(i, h) = (most[i] - least[i]) / 2 + size * rounding +
                      precision.tolerance + 0x1p-24;
    }
  }
  return expected;
}

bool AttentionQuestion::MayOverflow(std::int64_t row, DType dtype) const {
  const double most = dtype == DType::kF16 ? 0x1p14 : 0x1p120;
  const Eigen::MatrixXd queries = QueriesOf(row).cwiseAbs();
  const std::int64_t group = heads() / dims_.kv_heads;
  for (const Term& term : At(rows_, row).sees) {
    for (std::int64_t h = 0; h < heads(); ++h) {
      const auto key = KeyOf(term.key, h / group).cast<double>().cwiseAbs();
      if (!(key.dot(queries.col(h)) <= most)) return true;
    }
  }
  return false;
}

bool AttentionQuestion::IsSurelyRight(std::int64_t row,
                                      std::span<const float> out) const {
  const std::vector<Term>& sees = At(rows_, row).sees;
  if (sees.empty()) return false;  // The sum of the weights is 0.
  const auto count = std::ssize(sees);
  const Eigen::MatrixXd queries = QueriesOf(row) / std::sqrt(dims_.k_head_dim);
  const std::int64_t group = heads() / dims_.kv_heads;
  // The bound counts at least this number of roundings for each term and for
  // the sum.
  const double error = 8 * static_cast<double>(count + 1) * 0x1p-24;
  Eigen::ArrayXXd weights(group, count);
  Eigen::ArrayXXd sums(dims_.v_head_dim, group);
  Eigen::ArrayXXd sizes(dims_.v_head_dim, group);
  for (std::int64_t kv_head = 0; kv_head < dims_.kv_heads; ++kv_head) {
    for (std::int64_t i = 0; i < count; ++i) {
      const auto key = KeyOf(At(sees, i).key, kv_head);
      for (std::int64_t h = 0; h < group; ++h) {
        weights(h, i) =
            key.cast<double>().dot(queries.col(kv_head * group + h));
      }
    }
    if (soft_cap_ != 0) weights = soft_cap_ * (weights / soft_cap_).tanh();
    Eigen::ArrayXd sinks = Eigen::ArrayXd::Constant(
        group, -std::numeric_limits<double>::infinity());
    if (!sinks_.empty()) {
      sinks =
          Eigen::Map<const Eigen::ArrayXf>(&At(sinks_, kv_head * group), group)
              .cast<double>();
    }
    const Eigen::ArrayXd largest = weights.rowwise().maxCoeff().max(sinks);
    weights = (weights.colwise() - largest).exp();
    sums.setZero();
    sizes.setZero();
    for (std::int64_t i = 0; i < count; ++i) {
      const Eigen::ArrayXd value =
          ValueOf(At(sees, i).value, kv_head).cast<double>();
      for (std::int64_t h = 0; h < group; ++h) {
        sums.col(h) += weights(h, i) * value;
        sizes.col(h) += weights(h, i) * value.abs();
      }
    }
    const Eigen::ArrayXd totals =
        weights.rowwise().sum() + (sinks - largest).exp();
    for (std::int64_t h = 0; h < group; ++h) {
      const Eigen::Map<const Eigen::ArrayXf> actual(
          &out[AsSize((kv_head * group + h) * dims_.v_head_dim)],
          dims_.v_head_dim);
      const Eigen::ArrayXd wrong =
          (actual.cast<double>() * totals[h] - sums.col(h)).abs();
      if (!(wrong <= error * sizes.col(h)).all()) return false;
    }
  }
  return true;
}

std::optional<WrongOutput> AttentionQuestion::FindWrong(
    std::span<const float> out, const AttentionPrecision& precision) const {
  const std::int64_t size = dims_.v_head_dim * heads();
  for (std::int64_t r = 0; r < rows(); ++r) {
    const Row& row = At(rows_, r);
    if (!row.judged) continue;
    const std::span<const float> answer =
        out.subspan(AsSize(r * size), AsSize(size));
    if (IsSurelyRight(r, answer) || MayOverflow(r, precision.dtype)) continue;
    const Eigen::MatrixXd actual = Eigen::Map<const Eigen::MatrixXf>(
                                       answer.data(), dims_.v_head_dim, heads())
                                       .cast<double>();
    Eigen::MatrixXd allowed;
    const Eigen::MatrixXd expected = Expected(r, precision, allowed);
    const Eigen::MatrixXd ratio =
        (actual - expected).cwiseAbs().cwiseQuotient(allowed);
    std::int64_t i = 0;
    std::int64_t h = 0;
    const double worst = ratio.maxCoeff<Eigen::PropagateNaN>(&i, &h);
    if (worst <= 1) continue;  // A NaN does not pass.
    return WrongOutput{
        .row = AsInt(r),
        .text = fmt::format(
            "the output of row {} (sequence {}, position {}) is {:.6g} at "
            "element {} of head {}, expected {:.6g}, allowed is a difference "
            "of {:.2g}; {}",
            r, row.sequence, row.position, actual(i, h), i, h, expected(i, h),
            allowed(i, h), ExplainOutput(*this, r, actual, allowed))};
  }
  return std::nullopt;
}

}  // namespace kvtwin::props
