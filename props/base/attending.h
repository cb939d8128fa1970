// The interface of a cache that computes attention itself, in addition to, or
// in place of, kvtwin::Cache::Get.

#ifndef KVTWIN_PROPS_BASE_ATTENDING_H_
#define KVTWIN_PROPS_BASE_ATTENDING_H_

#include <span>

#include "kvtwin/status.h"
#include "kvtwin/tensor.h"

namespace kvtwin::props {

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

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_BASE_ATTENDING_H_
