// Calls that a cache or a pool may have in addition to those of kvtwin::Cache
// and kvtwin::PagedPool: a class for each call, which it inherits as well.

#ifndef KVTWIN_PROPS_BASE_OPTIONAL_CALLS_H_
#define KVTWIN_PROPS_BASE_OPTIONAL_CALLS_H_

#include <cstdint>
#include <span>

#include "kvtwin/attention.h"
#include "kvtwin/status.h"
#include "kvtwin/tensor.h"

namespace kvtwin::props {

// A cache that computes attention itself, in addition to Get or in its place.
class Attending {
 public:
  virtual ~Attending() = default;
  // Writes the attention of the batch of the current pass over the current
  // layer to `out`, [v_head_dim, heads, rows], dense. `query` is [k_head_dim,
  // heads, rows], f32 and dense: a row for each token of the batch. Heads /
  // kv_heads consecutive heads share a KV head, and scores are multiplied by 1
  // / sqrt(k_head_dim); the soft cap and the sinks are those of the setup
  // (S58).
  virtual Status Attend(const TensorView& query, std::span<float> out) = 0;
};

// A pool that computes attention itself.
class PoolAttending {
 public:
  virtual ~PoolAttending() = default;
  // Writes the attention of the last query_rows[i] tokens of each sequence over
  // a layer, appended ones included (P19), to `out`, [v_head_dim, heads, rows],
  // dense. `query` is [k_head_dim, heads, rows], f32 and dense: the rows of one
  // sequence after another. `options` has a scale, a soft cap and sinks.
  virtual Status AttendLast(std::span<const int> sequences,
                            std::span<const int> query_rows, int layer,
                            const TensorView& query,
                            const AttentionOptions& options,
                            std::span<float> out) = 0;
};

// A cache that finds prefixes of prompts.
class PrefixFinding {
 public:
  virtual ~PrefixFinding() = default;
  // Gives `seq`, which has no tokens, a prompt of these tokens, and returns how
  // many of them it has from now on (F1 to F5).
  virtual Result<std::int32_t> FindPrefix(
      int seq, std::span<const std::int32_t> tokens) = 0;
};

// A cache that moves positions: its Remove leaves a gap, and Shift closes it.
class Shifting {
 public:
  virtual ~Shifting() = default;
  // Adds `delta` to the positions in [begin, end) of `seq`, or from `begin` on
  // if end is kOpenEnd, and rewrites the K rows of these tokens. Tokens whose
  // position falls below 0 leave. Errors: shared_cells, not_supported.
  virtual Status Shift(int seq, std::int32_t begin, std::int32_t end,
                       std::int32_t delta) = 0;
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_OPTIONAL_CALLS_H_
