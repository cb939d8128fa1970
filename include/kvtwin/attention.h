// Attention on the CPU, over the views of a cache and over the blocks of a
// pool.
//
// A pass is planned once, and then computed for each of its layers:
//
//   auto attention = *MakeAttention();
//   attention->Plan(view.mask, rows)  // Which row sees which cell.
//   for each layer:
//     attention->Attend(query, view, VLayout::kPlain, {.scale = 0.125f},
//                       {.out = out})
//
// Column (h, r) of the result, [v_head_dim], is the sum over the cells c that
// row r sees of weight(c) * V(c), where
//
//   score(c)  = scale * q(h, r).K(c); with a soft cap s * tanh(score(c) / s)
//   weight(c) = exp(score(c)) / sum
//   sum       = the sum of exp(score(c)) over these cells, plus exp(sink of h)
//
// and heads / kv_heads consecutive query heads share a KV head. The result of a
// row that sees no cell is zeros. K and V of cells that a row does not see may
// hold anything, NaN as well. The result of a row is unspecified, and may be
// finite, if its query or K or V that it sees is not finite, or if its scores
// or its query times the scale (and log2(e), or 1 / soft_cap) overflow.
// docs/attention.md bounds the error.
//
// A plan holds for the mask or the table from which it was made: plan again
// after each StartForward, SetCausal or SetLayerType, and after each call that
// changes the blocks of a sequence. Attend checks the shapes only. An Attention
// has one plan: layers with other masks (windows, groups of a pool) need
// another Attention each.
//
// Not thread-safe: one call at a time on one Attention. It uses OpenMP's
// threads, as many as the calling thread may have (OMP_NUM_THREADS, or
// omp_set_num_threads in this thread). The result depends on the number of
// splits, and not on the number of threads. If memory runs out, std::bad_alloc
// passes through, and the plan is gone. An Attention keeps its memory for later
// calls: with `splits`, v_head_dim + 2 floats for each head, row and split.

#ifndef KVTWIN_ATTENTION_H_
#define KVTWIN_ATTENTION_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "kvtwin/cache.h"
#include "kvtwin/paged.h"
#include "kvtwin/status.h"
#include "kvtwin/tensor.h"

namespace kvtwin {

// How the scores of a layer are computed, and how exactly.
struct AttentionOptions {
  // The magnitude is 2^-50 to 2^50. Usually 1 / sqrt(k_head_dim).
  float scale = 1;
  float soft_cap = 0;  // From 2^-50 to 2^50; 0: none.
  // [heads], learned logits of cells without V: from -2^50 to 2^50, or
  // -infinity for a head without a sink. Empty: none.
  std::span<const float> sinks = {};
  // Parts into which the cells of a row are split and merged, up to 65,536. 0:
  // chosen by the shape of the work.
  int splits = 0;
  // Whether numbers may be rounded to bf16 before they are multiplied: queries,
  // weights, and K and V of other dtypes. Sums are f32. With K or V of q8_0,
  // queries and weights may become integers of 15 and 16 bits instead, in units
  // of the largest one. This is faster on processors with AVX-512 BF16 or AMX;
  // others ignore it, and so does the twin "reference". A number above the
  // largest bf16 counts as infinite.
  bool bf16_products = false;
};

// The numbers that Attend writes.
struct AttentionOut {
  float* out = nullptr;          // [v_head_dim, heads, rows], dense.
  float* log_sum_exp = nullptr;  // [heads, rows]: the logarithm of `sum`,
                                 // -infinity if it is 0. Null: not wanted.
};

// Sequences of a pool, whose query rows come one after another. Sequence i has
// query_rows[i] rows, which are its last tokens: row j of n is the token at
// position lengths[i] - n + j and sees the tokens up to itself, or the last
// `window` before itself and itself.
struct AttentionTable {
  std::span<const std::int32_t> blocks = {};   // [columns, sequences]
  int columns = 0;                             // Entries of a row of `blocks`.
  std::span<const std::int32_t> lengths = {};  // [sequences], in tokens.
  std::span<const std::int32_t> query_rows = {};  // [sequences]
  int block_size = 0;                             // Tokens of a block.
  std::int32_t window = kOpenEnd;                 // >= 0. kOpenEnd: all.
  // Whether each row sees all tokens of its sequence. The rows are then not its
  // tokens, but come after them, as after a prompt that several rows share:
  // there may be up to 2^24, also of a sequence without tokens, whose result is
  // zeros and -infinity. `window` must be kOpenEnd.
  bool sees_all = false;
};

// Attention on the CPU, as the top of the header defines it.
class Attention {
 public:
  virtual ~Attention() = default;

  // Plans the rows [first_row, first_row + rows) of a view's mask, [columns,
  // rows], or all query rows of a table. Later calls need neither the mask nor
  // the lists of the table. Errors: invalid_argument: no row, or more than 2^24
  // rows; a mask without data; a dtype that masks cannot have; an element that
  // is neither 0 nor -inf in these rows; rows beyond the last row of the mask;
  // a table whose lists have other sizes, whose length is longer than its
  // blocks or, without sees_all, shorter than its query rows, that has a window
  // with sees_all, or a negative block where a row sees it; a mask whose
  // elements do not lie one after another, or whose rows of bits are not on
  // 8-byte boundaries. After an error the plan is unchanged.
  virtual Status Plan(const TensorView& mask, int rows, int first_row = 0) = 0;
  virtual Status Plan(const AttentionTable& table) = 0;

  // Computes the attention of a layer. query = [k_head_dim, heads, rows], f32,
  // f16 or bf16, of any strides. All dtypes of K and V, in any pair; elements
  // of their first dimension lie one after another, as Get returns them.
  // Errors: failed_precondition without a plan of a mask, or of a table;
  // invalid_argument: shapes that do not fit to each other or to the plan; a
  // tensor without data, or that is not in host memory; an option outside of
  // its range. Nothing is written then.
  virtual Status Attend(const TensorView& query, const KvView& view,
                        VLayout v_layout, const AttentionOptions& options,
                        const AttentionOut& out) = 0;
  // `blocks` are all blocks of a layer: [head_dim, kv_heads, block_size,
  // blocks], or [head_dim, block_size, kv_heads, blocks] if head-major.
  virtual Status Attend(const TensorView& query, const PagedKv& blocks,
                        PagedLayout layout, const AttentionOptions& options,
                        const AttentionOut& out) = 0;
};

// Errors: an unknown twin; in a library with CUDA, not_supported for "cuda",
// which has Decode (kvtwin/cuda.h).
Result<std::unique_ptr<Attention>> MakeAttention(
    std::string_view twin = "optimized");

// One part of an attention: the results over some of the cells.
struct AttentionPart {
  const float* out = nullptr;          // [v_head_dim, heads, rows]
  const float* log_sum_exp = nullptr;  // [heads, rows]
};

// Merges parts of an attention whose cells are disjoint; only one part may have
// the sinks. `count` = heads * rows. Errors: invalid_argument: no part, a null
// pointer (except out.log_sum_exp), a number < 1. `out` may be one of the
// parts.
Status MergeAttention(std::span<const AttentionPart> parts, int v_head_dim,
                      std::int64_t count, const AttentionOut& out);

}  // namespace kvtwin

#endif  // KVTWIN_ATTENTION_H_
