// A question of the level `attention`: queries for the batch of a pass over one
// layer of a cache, or for the last tokens of sequences of a pool, and the
// outputs that the ledger's tokens make.
//
// The queries point at tokens: at the first and the last one that a row sees,
// at those that are hidden just before and just after them, and at others. So a
// token that is missing, wrong, or there twice moves an output by far more than
// rounding does (docs/attention.md has the figures).

#ifndef KVTWIN_PROPS_ATTENTION_ATTENTION_QUESTION_H_
#define KVTWIN_PROPS_ATTENTION_ATTENTION_QUESTION_H_

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/guarded_cache.h"
#include "kvtwin/paged.h"
#include "kvtwin/shift.h"
#include "kvtwin/tensor.h"
#include "props/attention/attention_bound.h"
#include "reference/attention.h"
#include "reference/dialects.h"
#include "reference/paged_ledger.h"

namespace kvtwin::props {

// A token whose rows a layer has, or had.
struct AskedToken {
  // As in the ledger of caches. In a pool, a hash of its place and its rows.
  std::int64_t number = 0;
  std::int64_t position = 0;
  int sequence = 0;            // The first that holds it.
  std::vector<int> more = {};  // The others.
  bool gone = false;           // The ledger does not have it anymore.
  bool HeldBy(int seq) const {
    return seq == sequence || std::ranges::count(more, seq) > 0;
  }
};

// One term of the sum over the tokens that a row sees: the K row of a token,
// and a V row, which is the same token's in a right cache.
struct Term {
  std::int64_t key = 0;  // Indices into AttentionQuestion::tokens().
  std::int64_t value = 0;
  std::int32_t moved = 0;  // The K row is shifted by this number of positions.
};

// How a cache or a pool computes: the dtype to which it rounds queries, weights
// and results, and what its own number formats may add.
struct AttentionPrecision {
  DType dtype = DType::kF32;  // f32, f16 or bf16
  double tolerance = 0;
};

// Returns the number of query heads for each KV head in the questions to a
// cache of this precision, at most `most`: `group` or, if it is 0, a number
// that is large enough that one wrong token shows.
int QueriesPerKvHead(DType dtype, int kv_heads, int group, int most);

// Returns the logits of the sinks in histories that have sinks, one for each
// head. Those of heads next to each other differ.
std::vector<float> SinksOf(std::int64_t heads);

// Returns the dimensions of the rows of a layer of a pool.
RowDims DimsOf(const PagedSpec& spec);

struct WrongOutput {
  int row = -1;
  std::string text;
};

class AttentionQuestion {
 public:
  struct Pass {
    const reference::CacheLedger& ledger;
    int layer = 0;
    RowDims dims;
    const std::vector<std::int32_t>& positions;
    const std::vector<int>& sequences;
    double soft_cap = 0;            // 0: none.
    std::vector<float> sinks = {};  // Empty: none; else one for each head.
  };
  // The last query_rows[i] tokens of sequences[i] of a pool, one sequence after
  // another, appended tokens included (P19). `layer` has rows, not states.
  struct PoolPass {
    const reference::PagedLedger& ledger;
    const PagedSpec& spec;  // Of the pool.
    int layer = 0;
    const std::vector<int>& sequences;
    const std::vector<int>& query_rows;
    double soft_cap = 0;            // As in Pass.
    std::vector<float> sinks = {};  // As in Pass.
  };

  // Asks with `group` query heads for each KV head. `seed` chooses the
  // tokens that queries point at. `before` is the question before in this
  // layer, if there is one, whose tokens may be gone since.
  AttentionQuestion(const Pass& pass, int group, std::uint64_t seed,
                    const AttentionQuestion* before);
  AttentionQuestion(const PoolPass& pass, int group, std::uint64_t seed,
                    const AttentionQuestion* before);
  // A question that was asked: `query` is f32, [k_head_dim, heads, rows].
  // `turn` chooses the rows that are judged, if these are not all.
  AttentionQuestion(const Pass& pass, const DenseTensor& query,
                    std::uint64_t turn);
  AttentionQuestion(const PoolPass& pass, const DenseTensor& query,
                    std::uint64_t turn);

  // [k_head_dim, heads, rows], f32
  TensorView query() const { return query_.view(); }
  std::int64_t heads() const { return query_.shape[1]; }
  std::int64_t rows() const { return query_.shape[2]; }
  // The number of elements of an answer, [v_head_dim, heads, rows].
  std::size_t answer_size() const;
  // The number of rows whose output is known and judged.
  std::int64_t CountJudged() const;

  // Returns the first row whose output is outside of the bound. Requires: `out`
  // is an answer, and has answer_size() elements.
  std::optional<WrongOutput> FindWrong(
      std::span<const float> out, const AttentionPrecision& precision) const;

  // For explanations and for tests.
  struct Row {
    std::int64_t position = 0;
    int sequence = 0;
    bool judged = false;
    std::vector<Term> sees;
  };
  const std::vector<AskedToken>& tokens() const { return tokens_; }
  const Row& row(std::int64_t row) const { return At(rows_, row); }
  const RowDims& dims() const { return dims_; }
  const Shift& shift() const { return shift_; }
  // The tokens of each block of the pool; 0: it is a cache.
  int block_size() const { return block_size_; }
  int layer() const { return layer_; }
  // Returns the question to a cache that rounds K and V to f16, bf16 or f8.
  AttentionQuestion WithRowsRoundedTo(DType dtype) const;
  // Returns the question to a cache that reads K and V of another layer, or
  // nothing if that layer lacks a row. Requires: the ledger is as it was when
  // the question was made.
  std::optional<AttentionQuestion> WithRowsOfLayer(int layer) const;
  // Returns this question over K of `other`, which has the same tokens.
  AttentionQuestion WithKeysOf(const AttentionQuestion& other) const;
  // How scores become weights. The sinks live as long as the question.
  reference::Weighing weighing() const {
    return {.scale = 1 / std::sqrt(dims_.k_head_dim),
            .soft_cap = soft_cap_,
            .sinks = sinks_};
  }
  Eigen::MatrixXd QueriesOf(std::int64_t row) const;
  // Returns the scaled and capped scores of a term, of each head.
  Eigen::VectorXd ScoresOf(const Eigen::MatrixXd& queries,
                           const Term& term) const;
  Eigen::Map<const Eigen::ArrayXf> ValueOf(std::int64_t token,
                                           std::int64_t kv_head) const;
  // Returns the output, [v_head_dim, heads], of queries over these terms.
  Eigen::MatrixXd OutputOf(const Eigen::MatrixXd& queries,
                           std::span<const Term> terms) const {
    return OutputOf(queries, terms, weighing());
  }
  Eigen::MatrixXd OutputOf(const Eigen::MatrixXd& queries,
                           std::span<const Term> terms,
                           const reference::Weighing& weighing) const;
  // Returns the output of a row, and sets `allowed` to the largest differences
  // that the precision allows.
  Eigen::MatrixXd Expected(std::int64_t row,
                           const AttentionPrecision& precision,
                           Eigen::MatrixXd& allowed) const;

 private:
  struct Gathered;  // The rows of terms as a view.
  Gathered Gather(std::span<const Term> terms) const;
  void AddTokens(const reference::CacheLedger& ledger, int layer);
  void AddTokens(const reference::PagedLedger& ledger,
                 const std::vector<int>& sequences, int layer);
  // Adds the tokens with their rows of the layer, and notes how to add those of
  // others.
  void AddOwnTokens(const Pass& pass);
  void AddOwnTokens(const PoolPass& pass);
  // Adds the last tokens of `before` that are not stored anymore.
  template <class IsStored>
  void AddGone(const AttentionQuestion& before, const IsStored& is_stored);
  // Whether each K row is finite, by token. A shift may make it infinite;
  // attention over it has no right output.
  std::vector<char> FiniteKeys() const;
  // Adds the rows, and the tokens that each judged row sees.
  void AddRows(const Pass& pass, std::int64_t terms_most, std::uint64_t turn);
  void AddRows(const PoolPass& pass, std::int64_t terms_most,
               std::uint64_t turn);
  // Returns the number of tokens that the judged rows of a recording may see in
  // all, about.
  std::int64_t RecordedTermsMost() const;
  // Leaves the rows that see about `terms_most` tokens, and the last row.
  // `counts`: the number of tokens that each row sees.
  void JudgeSome(std::span<const std::int64_t> counts, std::int64_t terms_most,
                 std::uint64_t turn);
  void DrawQueries(int group, std::uint64_t seed);
  std::vector<std::int64_t> TargetsOf(const Row& row, std::uint64_t draw) const;
  Eigen::Map<const Eigen::VectorXf> KeyOf(std::int64_t token,
                                          std::int64_t kv_head) const;
  // Returns the expected outputs, and sets `allowed` where it is not finite, so
  // that an output may be anywhere between the V that the row sees.
  Eigen::MatrixXd BetweenValues(std::int64_t row,
                                const AttentionPrecision& precision,
                                const Eigen::MatrixXd& exact,
                                Eigen::MatrixXd& allowed) const;
  // Whether a product of a query and a key of the row may be larger than the
  // largest number of the dtype, so that the output is unspecified.
  bool MayOverflow(std::int64_t row, DType dtype) const;
  // Whether the output of a row is within a part of the bound that takes little
  // time to compute.
  bool IsSurelyRight(std::int64_t row, std::span<const float> out) const;

  RowDims dims_;
  Shift shift_;
  int block_size_ = 0;
  int layer_ = 0;
  // Adds the tokens, with their rows of a layer, to a question; nothing if the
  // layer is in another group of the pool. Requires: the ledger and the spec
  // live.
  std::function<void(int layer, AttentionQuestion& to)> add_tokens_of_;
  double soft_cap_ = 0;
  std::vector<float> sinks_;
  std::vector<AskedToken> tokens_;
  std::vector<float> keys_;    // [k_head_dim, kv_heads, tokens]
  std::vector<float> values_;  // [v_head_dim, kv_heads, tokens]
  std::vector<Row> rows_;
  DenseTensor query_;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ATTENTION_ATTENTION_QUESTION_H_
