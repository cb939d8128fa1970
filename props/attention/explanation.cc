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
#include <tuple>
#include <utility>
#include <vector>

#include "core/index.h"
#include "kvtwin/tensor.h"

namespace kvtwin::props {
namespace {

// The most faults of each kind of one token, the most windows, and the most
// numbers of last tokens that are tried.
constexpr std::size_t kSinglesMost = std::size_t{1} << 14;
// The most pairs of tokens, and the most K for other positions, that are tried.
constexpr std::size_t kPairsMost = 1'000;
// The most blocks of a pool that are tried, each with others.
constexpr std::int64_t kBlocksMost = 1'000;
// The most scores that are kept, of all heads and tokens.
constexpr std::int64_t kScoresMost = std::int64_t{1} << 24;
// Outputs of other rows take about this number of multiplications together.
constexpr std::int64_t kRowProductsMost = std::int64_t{1} << 28;
// This number of elements is rounded to another dtype, or is of other layers.
constexpr std::int64_t kRoundedMost = std::int64_t{1} << 22;
// This number of layers is tried: those around the layer, or the first.
constexpr int kLayersMost = 16;
// A token's K is tried for this number of positions before and after its own.
constexpr std::int32_t kMovedMost = 64;

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

// Returns the terms of tokens that the row could see, from the last position
// on.
std::vector<Term> OwnTerms(const FaultSearch& search) {
  const AttentionQuestion& question = search.question();
  const AttentionQuestion::Row& row = question.row(search.row());
  std::vector<Term> own;
  for (std::int64_t i = 0; i < std::ssize(question.tokens()); ++i) {
    const AskedToken& token = At(question.tokens(), i);
    if (!token.HeldBy(row.sequence) || token.position > row.position) continue;
    own.push_back({i, i});
  }
  std::ranges::stable_sort(own, std::ranges::greater(), [&](const Term& term) {
    return search.PositionOf(term);
  });
  return own;
}

// Tries windows over the tokens of the row's sequence.
void TryWindows(FaultSearch& search) {
  const std::int64_t position = search.question().row(search.row()).position;
  const std::vector<Term> own = OwnTerms(search);
  Sums sums = search.SumsOf({});
  for (std::size_t count = 1; count <= std::min(own.size(), kSinglesMost);
       ++count) {
    search.Add(own[count - 1], 1, sums);
    const std::int64_t window = position - search.PositionOf(own[count - 1]);
    if (count < own.size() &&
        position - search.PositionOf(own[count]) == window) {
      continue;
    }
    search.Try(fmt::format("the window were {}{}", window,
                           count == own.size() ? " or more" : ""),
               FaultSearch::OutputOf(sums));
  }
}

// Tries masks that let rows see later tokens, or those of other sequences.
void TryMasks(FaultSearch& search) {
  const AttentionQuestion& question = search.question();
  const AttentionQuestion::Row& row = question.row(search.row());
  const auto all = [&](bool later, bool others) {
    std::vector<Term> terms;
    for (std::int64_t i = 0; i < std::ssize(question.tokens()); ++i) {
      const AskedToken& token = At(question.tokens(), i);
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
    if (terms.size() > own.size()) search.Try(text, terms);
  };
  attempt("later positions were seen, too", all(true, false));
  attempt("all sequences were seen", all(false, true));
  attempt("all stored tokens were seen", all(true, true));
}

// Returns what the row sees, in the order of positions.
std::vector<Term> SeenInOrder(const FaultSearch& search) {
  std::vector<Term> terms = search.sees();
  std::ranges::stable_sort(
      terms, {}, [&](const Term& term) { return search.PositionOf(term); });
  return terms;
}

// Tries whether the last tokens that the row sees are missing, or have rows of
// zeros, as in a block that was not written.
void TryLastTokens(FaultSearch& search) {
  const std::vector<Term> terms = SeenInOrder(search);
  Sums first = search.SumsOf({});  // Of the tokens before them.
  for (std::size_t i = 1; i + 1 < terms.size(); ++i) {
    search.Add(terms[i - 1], 1, first);
    const std::size_t count = terms.size() - i;
    if (count > kSinglesMost) continue;
    const std::string text =
        fmt::format("positions {} to {}", search.PositionOf(terms[i]),
                    search.PositionOf(terms.back()));
    search.Try(text + " were missing", FaultSearch::OutputOf(first));
    Sums zeros = first;
    search.AddZeros(count, zeros);
    search.Try(text + " had rows of zeros", FaultSearch::OutputOf(zeros));
  }
}

void TryZeros(FaultSearch& search) {
  const std::vector<Term>& sees = search.sees();
  for (std::size_t i = 0; i < std::min(sees.size(), kSinglesMost); ++i) {
    std::optional<Sums> sums = search.SumsWith({.text = "", .without = i});
    if (!sums) return;
    search.AddZeros(1, *sums);
    search.Try(TokenText(search.question(), search.row(), sees[i].key) +
                   " had rows of zeros",
               FaultSearch::OutputOf(*sums), /*of_token=*/true);
  }
}

// The tokens of a sequence in one block of a pool, which follow each other.
struct Block {
  std::int64_t first = 0;  // Indices into tokens().
  std::int64_t last = 0;
};

std::string BlockText(const FaultSearch& search, const Block& block) {
  const AskedToken& first = At(search.question().tokens(), block.first);
  std::string text =
      fmt::format("positions {} to {}", first.position,
                  At(search.question().tokens(), block.last).position);
  if (!first.HeldBy(search.question().row(search.row()).sequence)) {
    text += fmt::format(" of sequence {}", first.sequence);
  }
  return first.gone ? text + ", which are gone," : text;
}

// Returns the blocks of all tokens, in their order.
std::vector<Block> BlocksOf(const AttentionQuestion& question) {
  std::vector<Block> blocks;
  std::tuple<bool, int, std::int64_t> last;
  for (std::int64_t i = 0; i < std::ssize(question.tokens()); ++i) {
    const AskedToken& token = At(question.tokens(), i);
    const std::tuple place(token.gone, token.sequence,
                           token.position / question.block_size());
    if (blocks.empty() || place != last) blocks.push_back({i, i});
    blocks.back().last = i;
    last = place;
  }
  return blocks;
}

// Tries whether a block of a pool is missing, or has rows of another block, as
// with a wrong entry of a block table.
class BlockFaults {
 public:
  explicit BlockFaults(FaultSearch& search)
      : search_(search), blocks_(BlocksOf(search.question())) {
    const std::vector<Term>& sees = search.sees();
    for (const Block& block : blocks_) {
      seen_.push_back({std::max(block.first, sees.front().key),
                       std::min(block.last, sees.back().key)});
    }
    Sums none = search.SumsOf({});
    before_.push_back(none);
    none.weights.setZero();
    after_.assign(blocks_.size() + 1, none);
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      before_.push_back(before_.back());
      AddSeen(i, 0, before_.back());
    }
    for (std::size_t i = blocks_.size(); i-- > 0;) {
      after_[i] = after_[i + 1];
      AddSeen(i, 0, after_[i]);
    }
  }

  void TryMissing() {
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      if (SeenOf(i) < 2) continue;
      search_.Try(BlockText(search_, seen_[i]) + " were missing",
                  FaultSearch::OutputOf(Without(i)));
    }
  }

  // Those of the nearest blocks are tried first.
  void TryOthers() {
    std::size_t pairs = 0;
    for (std::size_t distance = 1; distance < blocks_.size(); ++distance) {
      for (std::size_t i = 0; i < blocks_.size(); ++i) {
        if (SeenOf(i) < 2) continue;
        if (i >= distance) pairs += TryOther(i, i - distance);
        if (i + distance < blocks_.size()) pairs += TryOther(i, i + distance);
        if (pairs >= kPairsMost) return;
      }
    }
  }

 private:
  std::int64_t SeenOf(std::size_t i) const {
    return seen_[i].last - seen_[i].first + 1;
  }
  // Adds what the row sees of a block, with the rows of tokens that are this
  // number of indices later.
  void AddSeen(std::size_t i, std::int64_t later, Sums& sums) const {
    for (std::int64_t at = seen_[i].first; at <= seen_[i].last; ++at) {
      search_.Add({at + later, at + later}, 1, sums);
    }
  }
  Sums Without(std::size_t i) const {
    Sums sums = before_[i];
    sums.values += after_[i + 1].values;
    sums.weights += after_[i + 1].weights;
    return sums;
  }
  // Returns the number of blocks that were tried.
  std::size_t TryOther(std::size_t i, std::size_t other) {
    const AttentionQuestion& question = search_.question();
    const auto place = [&](std::int64_t token) {
      return At(question.tokens(), token).position % question.block_size();
    };
    const Block& to = blocks_[other];
    const std::int64_t first =
        to.first + place(seen_[i].first) - place(to.first);
    const Block rows = {first, first + SeenOf(i) - 1};
    if (rows.first < to.first || rows.last > to.last) return 0;
    Sums sums = Without(i);
    AddSeen(i, first - seen_[i].first, sums);
    search_.Try(
        fmt::format("{} had K and V of {}", BlockText(search_, seen_[i]),
                    BlockText(search_, rows)),
        FaultSearch::OutputOf(sums));
    return 1;
  }

  FaultSearch& search_;
  const std::vector<Block> blocks_;
  std::vector<Block> seen_;   // What the row sees of each; empty: none.
  std::vector<Sums> before_;  // Of what is seen before each block, and in all.
  std::vector<Sums> after_;   // Of what is seen from each block on.
};

void TryBlocks(FaultSearch& search) {
  const AttentionQuestion& question = search.question();
  if (question.block_size() < 2 || search.sees().empty()) return;
  const auto size = std::ssize(question.tokens());
  if (size / question.block_size() > kBlocksMost) return;
  BlockFaults faults(search);
  faults.TryMissing();
  faults.TryOthers();
}

void TryOtherRows(FaultSearch& search) {
  const AttentionQuestion& question = search.question();
  const std::int64_t products =
      std::ssize(question.tokens()) * question.heads() *
      (question.dims().k_head_dim + question.dims().v_head_dim);
  const std::int64_t most = std::clamp<std::int64_t>(
      kRowProductsMost / std::max<std::int64_t>(products, 1), 4, 64);
  const std::int64_t count = std::min(question.rows(), most);
  for (std::int64_t other = 0; other < count; ++other) {
    const AttentionQuestion::Row& row = question.row(other);
    if (other == search.row() || !row.judged) continue;
    search.Try(fmt::format("the mask were that of row {}", other), row.sees);
    search.Try(fmt::format("it were the output of row {}", other),
               question.OutputOf(question.QueriesOf(other), row.sees));
    search.Try(fmt::format("the query were that of row {}", other),
               question.OutputOf(question.QueriesOf(other), search.sees()));
  }
}

// Tries K, V or both of another question. `were` says what they were.
void TryRows(FaultSearch& search, const AttentionQuestion& other,
             std::string_view were) {
  const AttentionQuestion& own = search.question();
  const auto attempt = [&](std::string_view what,
                           const AttentionQuestion& question) {
    search.Try(fmt::format("{} were {}", what, were),
               question.OutputOf(search.queries(), search.sees()));
  };
  attempt("K and V", other);
  attempt("K", own.WithKeysOf(other));
  attempt("V", other.WithKeysOf(own));
}

// Tries rows that lost digits, and those of other layers.
void TryOtherKV(FaultSearch& search) {
  const AttentionQuestion& question = search.question();
  const RowDims& dims = question.dims();
  const std::int64_t numbers = std::ssize(question.tokens()) * dims.kv_heads *
                               (dims.k_head_dim + dims.v_head_dim);
  if (numbers > kRoundedMost) return;
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF8}) {
    TryRows(search, question.WithRowsRoundedTo(dtype),
            fmt::format("rounded to {}", DTypeName(dtype)));
  }
  const int first = std::max(question.layer() - kLayersMost / 2, 0);
  for (int layer = first; layer < first + kLayersMost; ++layer) {
    if (layer == question.layer()) continue;
    if (const auto other = question.WithRowsOfLayer(layer)) {
      TryRows(search, *other, fmt::format("those of layer {}", layer));
    }
  }
}

// Tries other scales, and weights without the soft cap or the sinks.
void TryWeighings(FaultSearch& search) {
  const AttentionQuestion& question = search.question();
  const reference::Weighing weighing = question.weighing();
  const auto attempt = [&](const char* text, const auto& change) {
    reference::Weighing changed = weighing;
    change(changed);
    search.Try(text,
               question.OutputOf(search.queries(), search.sees(), changed));
  };
  attempt("the scale were 1", [](auto& changed) { changed.scale = 1; });
  const double v_head_dim = question.dims().v_head_dim;
  if (v_head_dim != question.dims().k_head_dim) {
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
  const std::vector<float> zeros(AsSize(search.heads()), 0.0F);
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

void TryOthers(FaultSearch& search) {
  const std::vector<Term>& sees = search.sees();
  std::vector<Term> shifted = sees;
  for (std::size_t i = 0; i < sees.size(); ++i) {
    shifted[i].value = sees[(i + 1) % sees.size()].value;
  }
  search.Try("each token had the V of the next token", shifted);
  search.Try("it were zeros",
             Eigen::MatrixXd::Zero(search.right().rows(), search.heads()));
}

// Returns the output if head h reads KV head kv_head_of(h).
template <class KvHeadOf>
Eigen::MatrixXd WithKvHeads(const FaultSearch& search,
                            const KvHeadOf& kv_head_of) {
  const AttentionQuestion& question = search.question();
  const std::int64_t heads = search.heads();
  const std::int64_t group = heads / question.dims().kv_heads;
  // The place of each head among those that read its KV head.
  std::vector<std::int64_t> places;
  std::vector<std::int64_t> counts(AsSize(question.dims().kv_heads), 0);
  for (std::int64_t h = 0; h < heads; ++h) {
    const std::int64_t kv_head = kv_head_of(h);
    places.push_back(kv_head * group + At(counts, kv_head)++);
  }
  Eigen::MatrixXd queries = search.queries();
  reference::Weighing weighing = question.weighing();
  std::vector<float> sinks(weighing.sinks.size());
  for (std::int64_t h = 0; h < heads; ++h) {
    queries.col(At(places, h)) = search.queries().col(h);
    if (!sinks.empty()) At(sinks, At(places, h)) = weighing.sinks[AsSize(h)];
  }
  weighing.sinks = sinks;
  const Eigen::MatrixXd outputs =
      question.OutputOf(queries, search.sees(), weighing);
  Eigen::MatrixXd output = outputs;
  for (std::int64_t h = 0; h < heads; ++h) {
    output.col(h) = outputs.col(At(places, h));
  }
  return output;
}

// Tries heads that are those of others: their KV heads, sinks and outputs.
void TryOtherHeads(FaultSearch& search) {
  const int kv_heads = search.question().dims().kv_heads;
  const std::int64_t heads = search.heads();
  const std::int64_t group = heads / kv_heads;
  const bool found = search.Try(
      "head h read KV head h % kv_heads",
      WithKvHeads(search, [&](std::int64_t h) { return h % kv_heads; }));
  if (found) return;
  search.TryHeads(
      kv_heads,
      [&](int turn) {
        return WithKvHeads(search, [&](std::int64_t h) {
          return (h / group + turn) % kv_heads;
        });
      },
      [&](std::int64_t h, int turn) {
        return fmt::format("head {} read KV head {}", h,
                           (h / group + turn) % kv_heads);
      });
  const auto other = [&](std::int64_t h, int turn) {
    return (h + turn) % heads;
  };
  if (!search.question().weighing().sinks.empty()) {
    search.TryHeads(
        AsInt(heads),
        [&](int turn) {
          return FaultSearch::OutputOf(search.SumsWithSinks(turn));
        },
        [&](std::int64_t h, int turn) {
          return fmt::format("head {} had the sink of head {}", h,
                             other(h, turn));
        });
  }
  search.TryHeads(
      AsInt(heads),
      [&](int turn) {
        Eigen::MatrixXd output = search.right();
        for (std::int64_t h = 0; h < heads; ++h) {
          output.col(h) = search.right().col(other(h, turn));
        }
        return output;
      },
      [&](std::int64_t h, int turn) {
        return fmt::format("head {} had the output of head {}", h,
                           other(h, turn));
      });
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
  FaultSearch search(question, row, actual, allowed,
                     /*all=*/PairCount(question, row) <= kPairsMost &&
                         question.row(row).sees.size() <= kSinglesMost);
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
  TryZeros(search);
  TryWindows(search);
  TryMasks(search);
  TryLastTokens(search);
  TryBlocks(search);
  TryOtherRows(search);
  TryOtherKV(search);
  TryWeighings(search);
  TryOthers(search);
  TryOtherHeads(search);
  return search.Text();
}

}  // namespace kvtwin::props
