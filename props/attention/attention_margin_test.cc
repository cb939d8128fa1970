// How far outside of the bound the output of a cache with one wrong token is.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "core/index.h"
#include "props/attention/attention_question.h"
#include "props/attention/explanation.h"
#include "props/history/rows.h"
#include "reference/dialects.h"

namespace kvtwin::props {
namespace {

// A ledger that gets random batches of up to three sequences.
class RandomPasses {
 public:
  // With a `soft_cap`, heads have sinks, too.
  RandomPasses(std::uint32_t seed, const RowDims& dims, DType dtype, int tokens,
               int soft_cap)
      : random_(seed),
        dims_(dims),
        dtype_(dtype),
        soft_cap_(soft_cap),
        ledger_(SpecOf(Draw(0, 3))) {
    const int capacity = tokens + 16;
    EXPECT_TRUE(ledger_.Init({}, {dtype, kSequences, capacity, capacity}).ok());
    ledger_.IgnoreCapacity();
  }

  int Draw(int lo, int hi) {
    return std::uniform_int_distribution<int>(lo, hi)(random_);
  }

  // Adds `count` tokens, to one sequence or to several, and asks.
  AttentionQuestion Ask(int count, const AttentionQuestion* before) {
    positions_.clear();
    sequences_.clear();
    for (int i = 0; i < count; ++i) {
      const int seq = Draw(0, kSequences - 1);
      positions_.push_back(next_.at(AsSize(seq))++);
      sequences_.push_back(seq);
    }
    EXPECT_TRUE(ledger_.StartForward({positions_, sequences_}, false).ok());
    const auto fill = [&](RowBuffer& buffer, RowRole role, int dim) {
      return buffer.Fill({dim, dims_.kv_heads, count, 1}, DType::kF32,
                         {.role = role,
                          .layer = 0,
                          .first = serial_,
                          .nan = false,
                          .distinct = true},
                         false);
    };
    ledger_.Put(0, fill(keys_, RowRole::kKey, dims_.k_head_dim),
                fill(values_, RowRole::kValue, dims_.v_head_dim));
    serial_ += count;
    const int group = QueriesPerKvHead(dtype_, dims_.kv_heads, 0, 8);
    return {{.ledger = ledger_,
             .layer = 0,
             .dims = dims_,
             .positions = positions_,
             .sequences = sequences_,
             .soft_cap = static_cast<double>(soft_cap_),
             .sinks = SinksOf(soft_cap_ > 0 ? group * dims_.kv_heads : 0)},
            group,
            random_(),
            before};
  }

 private:
  static constexpr int kSequences = 3;

  static CacheSpec SpecOf(int kind) {
    CacheSpec spec;
    if (kind == 1) spec = {.kind = Kind::kSwa, .window = 3};
    if (kind == 2) spec = {.kind = Kind::kSwaMem, .window = 2, .memory = 5};
    if (kind == 3) spec = {.kind = Kind::kChunked, .chunk = 4};
    return spec;
  }

  std::mt19937 random_;
  const RowDims dims_;
  const DType dtype_;
  const int soft_cap_;
  reference::CacheLedger ledger_;
  std::array<std::int32_t, kSequences> next_ = {};
  std::int64_t serial_ = 0;
  std::vector<std::int32_t> positions_;
  std::vector<int> sequences_;
  RowBuffer keys_;
  RowBuffer values_;
};

// Appends how far each fault of one token moves the output of a row, in units
// of what is allowed.
void AddMargins(const AttentionQuestion& question, std::int64_t row,
                DType dtype, std::size_t most, std::vector<double>& margins) {
  Eigen::MatrixXd allowed;
  const Eigen::MatrixXd right =
      question.Expected(row, {.dtype = dtype}, allowed);
  const Eigen::MatrixXd queries = question.QueriesOf(row);
  for (const TokenFault& fault : FaultsOfOneToken(question, row, most)) {
    const Eigen::MatrixXd wrong =
        question.OutputOf(queries, fault.Applied(question.row(row).sees));
    const Eigen::MatrixXd moved = (wrong - right).cwiseAbs();
    // The only token that a row sees has all of the weight, whatever its K.
    if (question.row(row).sees.size() == 1 && moved.maxCoeff() < 1e-12)
      continue;
    margins.push_back(moved.cwiseQuotient(allowed).maxCoeff());
  }
}

std::vector<double> MarginsOf(const RowDims& dims, DType dtype, int tokens,
                              int cases, int soft_cap) {
  std::vector<double> margins;
  for (int i = 0; i < cases; ++i) {
    RandomPasses passes(static_cast<std::uint32_t>(i), dims, dtype, tokens,
                        soft_cap);
    AttentionQuestion question = passes.Ask(std::min(tokens, 8), nullptr);
    int stored = std::min(tokens, 8);
    while (stored < tokens) {
      const int count = passes.Draw(1, std::min(8, tokens - stored));
      stored += count;
      question = passes.Ask(count, &question);
    }
    for (std::int64_t row = 0; row < question.rows(); ++row) {
      if (question.row(row).judged) {
        AddMargins(question, row, dtype, 16, margins);
      }
    }
  }
  std::ranges::sort(margins);
  return margins;
}

struct MarginCase {
  DType dtype;
  double least;      // Every fault is at least this number of bounds away.
  double most_near;  // The part of the faults that may be within 2 bounds.
};

void ExpectFar(const MarginCase& test, const RowDims& dims, int tokens,
               int soft_cap) {
  const std::vector<double> margins =
      MarginsOf(dims, test.dtype, tokens, 20, soft_cap);
  ASSERT_GT(margins.size(), 100);
  const auto near = std::ranges::lower_bound(margins, 2) - margins.begin();
  const std::string text = fmt::format(
      "{}, dims {},{},{}, {} tokens, soft cap {}: {} faults, least {:.3g}, "
      "median {:.3g}, {} within 2",
      DTypeName(test.dtype), dims.k_head_dim, dims.kv_heads, dims.v_head_dim,
      tokens, soft_cap, margins.size(), margins.front(),
      margins[margins.size() / 2], near);
  EXPECT_GE(margins.front(), test.least) << text;
  EXPECT_LE(static_cast<double>(near),
            test.most_near * static_cast<double>(margins.size()))
      << text;
  if (std::getenv("KVTWIN_SHOW_MARGINS") != nullptr) fmt::print("{}\n", text);
}

// A right cache is within 1 bound, a fault of more than 2 bounds is found
// however the cache rounds.
TEST(AttentionMargin, OneWrongTokenIsFarOutsideOfTheBound) {
  for (const MarginCase& test :
       {MarginCase{DType::kF32, 30, 0}, MarginCase{DType::kF16, 5, 0},
        MarginCase{DType::kBF16, 0.5, 0.02}}) {
    for (const RowDims& dims :
         {RowDims{4, 2, 3}, RowDims{16, 2, 16}, RowDims{128, 1, 128}}) {
      for (const int tokens : {2, 8, 32, 128}) {
        ExpectFar(test, dims, tokens, /*soft_cap=*/0);
      }
    }
  }
}

TEST(AttentionMargin, TheSameWithASoftCapAndSinks) {
  for (const MarginCase& test :
       {MarginCase{DType::kF32, 30, 0}, MarginCase{DType::kF16, 5, 0},
        MarginCase{DType::kBF16, 0.5, 0.02}}) {
    for (const int tokens : {2, 8, 32, 128}) {
      ExpectFar(test, {16, 2, 16}, tokens, /*soft_cap=*/4);
    }
  }
}

}  // namespace
}  // namespace kvtwin::props
