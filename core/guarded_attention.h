// The common part of both twins of attention: the gate that refuses misuse, and
// what the plan is for.

#ifndef KVTWIN_CORE_GUARDED_ATTENTION_H_
#define KVTWIN_CORE_GUARDED_ATTENTION_H_

#include <cstdint>

#include "kvtwin/attention.h"

namespace kvtwin {

class GuardedAttention : public Attention {
 public:
  Status Plan(const TensorView& mask, int rows, int first_row) final;
  Status Plan(const AttentionTable& table) final;
  Status Attend(const TensorView& query, const KvView& view, VLayout v_layout,
                const AttentionOptions& options, const AttentionOut& out) final;
  Status Attend(const TensorView& query, const PagedKv& blocks,
                PagedLayout layout, const AttentionOptions& options,
                const AttentionOut& out) final;

 protected:
  // The twin's part, called with valid arguments only. In K, V and masks the
  // elements of the first dimension lie one after another; the other strides
  // may be any. Nothing needs to be aligned but masks of bits.
  virtual void DoPlan(const TensorView& mask, int rows, int first_row) = 0;
  virtual void DoPlan(const AttentionTable& table) = 0;
  // Called after the DoPlan of a mask, or of a table. Query, K and V fit to it.
  virtual void DoAttend(const TensorView& query, const KvView& view,
                        VLayout v_layout, const AttentionOptions& options,
                        const AttentionOut& out) = 0;
  virtual void DoAttend(const TensorView& query, const PagedKv& blocks,
                        PagedLayout layout, const AttentionOptions& options,
                        const AttentionOut& out) = 0;

 private:
  enum class For { kNothing, kMask, kTable };
  struct Planned {
    For what = For::kNothing;
    std::int64_t rows = 0;
    std::int64_t columns = 0;     // The mask has them.
    std::int64_t block_size = 0;  // The table has it.
    std::int64_t last_block = 0;  // The largest block that a row sees.
  };

  // Makes the checks that both Attends have in common.
  Status CheckAttend(const TensorView& query, std::int64_t k_head_dim,
                     std::int64_t kv_heads, std::int64_t v_head_dim,
                     const AttentionOptions& options,
                     const AttentionOut& out) const;

  Planned planned_;
};

// Refuses options outside of their ranges.
Status CheckAttentionOptions(const AttentionOptions& options,
                             std::int64_t heads);

}  // namespace kvtwin

#endif  // KVTWIN_CORE_GUARDED_ATTENTION_H_
