// Asks a pool that computes attention for its outputs.

#ifndef KVTWIN_PROPS_ATTENTION_POOL_ASKER_H_
#define KVTWIN_PROPS_ATTENTION_POOL_ASKER_H_

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <vector>

#include "core/guarded_paged.h"
#include "kvtwin/paged.h"
#include "kvtwin/status.h"
#include "props/attention/attention_question.h"
#include "reference/paged_ledger.h"

namespace kvtwin::props {

// How a pool attends.
struct PoolAttention {
  AttentionPrecision precision = {};
  int query_heads = std::numeric_limits<int>::max();  // For each KV head.
  int soft_cap = 0;                                   // 0: none.
  bool sinks = false;                                 // Those of SinksOf.
};

class PoolAsker {
 public:
  PoolAsker(const PagedSpec& spec, const PoolAttention& attention)
      : spec_(Completed(spec)), attention_(attention) {}

  // The dtype to which the pool rounds.
  DType dtype() const { return attention_.precision.dtype; }
  // Returns the layers that have rows, not states.
  std::vector<int> Layers() const;
  // Returns the sequences that have rows in a layer that are not committed.
  static std::vector<int> Appended(const reference::PagedLedger& ledger,
                                   int layer);

  // Asks for the outputs of tokens of these sequences that have rows in the
  // layer and are not committed: usually of all of them. Returns the pool's
  // answer, or ok without a call if no output is known.
  Status Ask(const reference::PagedLedger& ledger, int layer,
             const std::vector<int>& sequences, PagedPool& pool);
  // Returns the number of rows of the last outputs that are compared.
  std::int64_t CountJudged() const {
    return out_.empty() ? 0 : questions_.at(layer_).CountJudged();
  }
  // Returns what is wrong with the last outputs.
  std::optional<WrongOutput> FindWrong() const;

 private:
  // Returns the number of query heads for each KV head; 0: enough of them.
  int Group() const;

  PagedSpec spec_;
  PoolAttention attention_;
  std::map<int, AttentionQuestion> questions_;  // The last ones, by layer.
  int layer_ = 0;                               // Of the last question.
  std::vector<float> out_;  // Empty if no output was asked for.
};

}  // namespace kvtwin::props

#endif  // KVTWIN_PROPS_ATTENTION_POOL_ASKER_H_
